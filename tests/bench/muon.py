#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Steps of Muon over eight matrices of GPT-2 small, in turns: torch's, with products of bf16 as it has them and of f32,
and gradaccum.torch's with the same; beside them the products of five iterations alone, by torch.

    muon.py [THREADS]     with a Python that has torch and gradaccum
"""

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import gradaccum.torch as gt
import torch
import torch.optim._muon

SHAPES = ((768, 2304), (768, 768), (768, 3072), (3072, 768))
ROUNDS = 7


class InF32:
    """The module torch, but for what Muon rounds its matrices to."""

    bfloat16 = torch.float32

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def step_in_f32(optimizer: torch.optim.Optimizer) -> None:
    """A step of torch's Muon with products of f32."""
    torch.optim._muon.torch = InF32()
    try:
        optimizer.step()
    finally:
        torch.optim._muon.torch = torch


def multiply(gradients: list[torch.Tensor], dtype: torch.dtype) -> None:
    """The products of the iterations, and nothing else."""
    for gradient in gradients:
        x = gradient.to(dtype)
        x = x.T.contiguous() if len(x) > len(x.T) else x
        for _ in range(5):
            gram = x @ x.T
            _ = (gram @ gram) @ x


if len(sys.argv) > 1:
    torch.set_num_threads(int(sys.argv[1]))
kinds: dict[str, tuple[type, dict[str, str], Callable[[Any], object]]] = {
    "torch.optim.Muon, bf16": (torch.optim.Muon, {}, lambda optimizer: optimizer.step()),
    "gradaccum, bf16": (gt.Muon, {"ns_precision": "bf16"}, lambda optimizer: optimizer.step()),
    "torch.optim.Muon, f32": (torch.optim.Muon, {}, step_in_f32),
    "gradaccum, f32": (gt.Muon, {}, lambda optimizer: optimizer.step()),
}
torch.manual_seed(0)
sides = {}
times: dict[str, list[float]] = {}
for name, (kind, options, step) in kinds.items():
    parameters = [torch.nn.Parameter(0.02 * torch.randn(shape)) for shape in SHAPES for _ in range(2)]
    sides[name] = (parameters, kind(parameters, lr=0.02, **options), step)
gradients = [torch.randn(shape) for shape in SHAPES for _ in range(2)]


def measure(name: str, work: Callable[[], object]) -> None:
    """Times it; the first round counts for nothing."""
    start = time.perf_counter()
    work()
    if turn > 0:
        times.setdefault(name, []).append(time.perf_counter() - start)


for turn in range(ROUNDS + 1):
    for name, (parameters, optimizer, step) in sides.items():
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        measure(name, lambda optimizer=optimizer, step=step: step(optimizer))  # type: ignore[misc]
        optimizer.zero_grad()
    for dtype in (torch.bfloat16, torch.float32):
        measure(f"products by torch, {str(dtype)[6:]}", lambda dtype=dtype: multiply(gradients, dtype))  # type: ignore[misc]
print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
for name, seconds in times.items():
    print(f"{name:30} {1e3 * statistics.median(seconds):7.1f} ms")
