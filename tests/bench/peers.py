#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""PEERS in Python: PyTorch's ways to step and DeepSpeed's CPUAdam, in one process with the library, on the
same tensors, with the same threads. Each figure is a peer's time over the library's.

    peers.py FOLDER [--quick] [--threads N] [--json FILE]

FOLDER is the benchmark's build folder. The figures are added to FILE, which gradaccum_bench has written.
`run` in this folder installs PyTorch and DeepSpeed and starts this script.
"""

import argparse
import logging
import os
import statistics
import sys

import torch
import torch_window as tw


def deepspeed_adam(folder):
    """Returns a function that makes a CPUAdam over parameters, or None if there is none here. The first use
    compiles CPUAdam into the folder, with the ninja beside this interpreter.
    """
    os.environ["PATH"] = os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]
    os.environ.update(TORCH_EXTENSIONS_DIR=folder, DS_ACCELERATOR="cpu")
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        DeepSpeedCPUAdam([torch.zeros(1, requires_grad=True)])
    except Exception as error:  # whatever a build or an import may raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        print(f"PEERS: deepspeed is skipped, because it does not run here: {reason}")
        return None
    return lambda parameters: DeepSpeedCPUAdam(parameters, lr=tw.LR, weight_decay=0.01)


def peers(folder):
    """Returns functions that make the optimizer of each peer over parameters."""
    adamw = torch.optim.AdamW
    result = {
        "torch_fused": lambda parameters: adamw(parameters, lr=tw.LR, fused=True),
        "torch_foreach": lambda parameters: adamw(parameters, lr=tw.LR, foreach=True),
        "torch_default": lambda parameters: adamw(parameters, lr=tw.LR),
    }
    deepspeed = deepspeed_adam(os.path.join(folder, "torch_extensions"))
    if deepspeed:
        result["deepspeed"] = deepspeed
    return result


def times(count, call):
    def calls():
        for _ in range(count):
            call()

    return calls


def measure(library, report, options, makers, prefix, shapes, counts, repeat, rounds):
    """Windows of each count of micro-batches. Gradients are added one by one, as backward adds them, and
    clipped by the global norm.
    """
    torch.manual_seed(4)
    parameters = [(0.02 * torch.randn(s)).requires_grad_() for s in shapes]
    # Small enough that the first set, to which the peers add in every window, stays small.
    sets = [[1e-6 * torch.randn(s) for s in shapes] for _ in range(2)]
    optimizers = {name: make(parameters) for name, make in makers.items()}
    live, consumed = (
        tw.Window(library, parameters, options.threads, life) for life in (tw.LIVE, tw.CONSUMED)
    )
    for count in counts:
        micros = [sets[0]] + [sets[1]] * (count - 1)
        pointers = [tw.pointers(micro) for micro in micros]
        sides = {
            "live": lambda: live.run(pointers),
            "consumed": lambda: consumed.run(pointers),
        }
        for name, optimizer in optimizers.items():
            sides[name] = lambda optimizer=optimizer: tw.torch_window(
                parameters, optimizer, micros, tw.add_each, False
            )
        t = tw.race(rounds, {name: times(repeat, side) for name, side in sides.items()})
        ms = {name: 1e3 * statistics.median(seconds) / repeat for name, seconds in t.items()}
        for name in optimizers:
            with_consumed = statistics.median(tw.ratios(t[name], t["consumed"]))
            report.figure(
                f"PEERS_{prefix}{name}_n{count}",
                tw.ratios(t[name], t["live"]),
                None,
                f"{ms[name]:.4g} ms / {ms['live']:.4g} ms, clipped, threads: {options.threads}, "
                f"consumed: {with_consumed:.3f}",
            )
    live.close()
    consumed.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", default=None)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    library = tw.Library(options.folder)
    makers = peers(options.folder)
    openmp = tw.assert_one_libgomp()
    tw.check_same(library, options.threads, makers.values())
    machine = f"PyTorch {torch.__version__}"
    if "deepspeed" in makers:
        machine += f", DeepSpeed {sys.modules['deepspeed'].__version__}"
    machine += f", threads: {options.threads}, one OpenMP: {os.path.basename(openmp)} of PyTorch"
    print(machine)
    report = tw.Report()
    rounds = 7 if options.quick else 11
    shapes = tw.gpt2_shapes(3 if options.quick else 12)
    measure(library, report, options, makers, "", shapes, (1, 4), 1, rounds)
    measure(library, report, options, makers, "400_", [(512,)] * 400, (4,), 5, 3 * rounds)
    if options.json:
        report.write(options.json, machine)


if __name__ == "__main__":
    sys.exit(main())
