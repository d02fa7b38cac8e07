#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Steps of Muon over eight matrices of GPT-2 small: torch's, and gradaccum.torch's in f32 and in bf16, in turns.

    muon.py [THREADS]     with a Python that has torch and gradaccum
"""

import statistics
import sys
import time

import gradaccum.torch as gt
import torch

SHAPES = ((768, 2304), (768, 768), (768, 3072), (3072, 768))
ROUNDS = 7

if len(sys.argv) > 1:
    torch.set_num_threads(int(sys.argv[1]))
kinds = {
    "torch.optim.Muon": (torch.optim.Muon, {}),
    "gradaccum, f32": (gt.Muon, {}),
    "gradaccum, bf16": (gt.Muon, {"ns_precision": "bf16"}),
}
torch.manual_seed(0)
sides = {}
for name, (kind, options) in kinds.items():
    parameters = [torch.nn.Parameter(0.02 * torch.randn(shape)) for shape in SHAPES for _ in range(2)]
    sides[name] = (parameters, kind(parameters, lr=0.02, **options), [])
gradients = [torch.randn(shape) for shape in SHAPES for _ in range(2)]
for turn in range(ROUNDS + 1):
    for parameters, optimizer, times in sides.values():
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        start = time.perf_counter()
        optimizer.step()
        if turn > 0:
            times.append(time.perf_counter() - start)
        optimizer.zero_grad()
print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
for name, (_, _, times) in sides.items():
    print(f"{name:18} {1e3 * statistics.median(times):7.1f} ms")
