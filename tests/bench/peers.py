#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""PEERS in Python: PyTorch's ways to step and DeepSpeed's CPUAdam, in one process with the library, on the
same tensors, with the same threads. Each figure is a peer's time over the library's.

    peers.py FOLDER [--quick] [--only PEERS,OFFLOAD] [--threads N] [--json FILE]

OFFLOAD is what a trainer with its optimizer on the CPU waits for: the time from the last gradient of backward
to the last parameter.

FOLDER is the benchmark's build folder. The figures are added to FILE, which gradaccum_bench has written.
`run` in this folder installs PyTorch and DeepSpeed and starts this script.
"""

import argparse
import ctypes as c
import logging
import os
import statistics
import sys
import time

import torch
import torch_window as tw

GA_BF16, GA_MICRO_LAST = 4, 1


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


# ---- An optimizer on the CPU, while a backward pass runs -------------------------------------------


class EagerConfig(tw.Config):
    _fields_ = [
        ("seed", c.c_uint64),
        ("noise_scale", c.c_int32),
        ("measure_norm", c.c_int32),
        ("noise_smoothing", c.c_double),
        ("device_ordinal", c.c_int32),
        ("reserved2", c.c_int32),
        ("stream", c.c_void_p),
        ("allocate", c.c_void_p),
        ("free", c.c_void_p),
        ("allocator_user", c.c_void_p),
        ("log", c.c_void_p),
        ("log_user", c.c_void_p),
        ("eager", c.c_int32),
        ("eager_threads", c.c_int32),
    ]


class ParamOptions(c.Structure):
    _fields_ = [("struct_size", c.c_size_t)] + [
        (name, c.c_int32)
        for name in (
            "gradient_dtype accumulator_dtype master rounding rows agc_axes reduce write_early"
        ).split()
    ]


class MicroOptions(c.Structure):
    _fields_ = [("struct_size", c.c_size_t), ("loss_scale", c.c_double), ("flags", c.c_uint32)]


class LibrarySide:
    """A window of the library on bf16 parameters with master weights."""

    def __init__(self, library, parameters, threads, eager):
        self.ga, self.check, self.eager = library.ga, library.check, eager

        def made(struct, init, *more):
            self.check(init(c.byref(struct), c.c_size_t(c.sizeof(struct)), *more))
            return struct

        ga, check = self.ga, self.check
        config = made(EagerConfig(), ga.ga_config_init)
        config.num_threads, config.gradient_life, config.reduce = threads, tw.LIVE, tw.GA_REDUCE_SUM
        config.eager, config.eager_threads = int(eager), int(eager)
        self.context = c.c_void_p()
        check(ga.ga_context_create(c.byref(config), c.byref(self.context)))
        adamw = made(
            tw.Optimizer(), ga.ga_optimizer_init, tw.GA_OPTIMIZER_ADAMW, tw.GA_FLAVOR_TORCH
        )
        adamw.lr = tw.LR
        check(ga.ga_group_add(self.context, c.byref(adamw), None))
        clip = made(tw.Clip(), ga.ga_clip_init)
        clip.scope, clip.max_norm = tw.GA_CLIP_GLOBAL, MOST
        check(ga.ga_context_set_clip(self.context, c.byref(clip)))
        options = made(ParamOptions(), ga.ga_param_options_init)
        options.write_early = 1
        for k, p in enumerate(parameters):
            shape = (c.c_int64 * p.dim())(*p.shape)
            check(
                ga.ga_param_add(
                    self.context,
                    0,
                    b"layer%d" % k,
                    c.c_void_p(p.data_ptr()),
                    GA_BF16,
                    p.dim(),
                    shape,
                    c.byref(options),
                    None,
                )
            )
        check(ga.ga_prepare(self.context))
        self.micro = made(MicroOptions(), ga.ga_micro_options_init)
        self.micro.flags = GA_MICRO_LAST

    def begin(self):
        self.check(
            self.ga.ga_micro_begin(
                self.context, c.c_int64(-1), c.c_double(1), c.byref(self.micro)
            )
        )

    def take(self, layer, gradient):
        self.check(
            self.ga.ga_accumulate_part(self.context, layer, c.c_void_p(gradient.data_ptr()))
        )
        if self.eager:
            self.check(self.ga.ga_params_ready(self.context, c.byref(c.c_int32(layer)), c.c_size_t(1)))

    def end(self):
        self.check(self.ga.ga_micro_end(self.context))
        result = tw.StepResult(struct_size=c.sizeof(tw.StepResult))
        self.check(self.ga.ga_step(self.context, c.byref(result)))
        if result.outcome != 0 or result.clip_factor != 1:
            raise RuntimeError("a step was skipped or clipped")

    def close(self):
        self.ga.ga_context_destroy(self.context)


class ComposedSide:
    """The same window in the way of ZeRO-Offload, on f32 master weights in one flat tensor: gradients arrive in
    f32, and after the last one they are scaled, an optimizer updates, and the master weights are copied to bf16.
    measures: the norm is taken from the gradients on the host too, where ZeRO-Offload has it from the device.
    """

    def __init__(self, make, parameters, gradients, measures):
        self.master = torch.cat([p.flatten() for p in parameters]).float().requires_grad_()
        self.master.grad = torch.cat([g.flatten() for g in gradients]).float()
        self.parameter = torch.cat([p.flatten() for p in parameters])
        self.optimizer, self.measures = make([self.master]), measures

    def begin(self):
        pass

    def take(self, layer, gradient):
        pass

    def end(self):
        gradient = self.master.grad
        norm = float(torch.linalg.vector_norm(gradient)) if self.measures else 0.0
        gradient.mul_(1 / max(norm / MOST, 1.0))
        self.optimizer.step()
        self.parameter.copy_(self.master.detach())


MOST = 1e9  # a norm that no gradient has: nothing is clipped


def from_the_last(side, gradients, seconds):
    """A window whose gradients come evenly within so many seconds, for which this thread keeps a processor busy.
    Returns the seconds from the last gradient to the end of the step.
    """
    side.begin()
    start = last = time.perf_counter()
    for k in reversed(range(len(gradients))):
        due = start + seconds * (len(gradients) - k) / len(gradients)
        while time.perf_counter() < due:
            pass
        last = time.perf_counter()
        side.take(k, gradients[k])
    side.end()
    return time.perf_counter() - last


def check_same_windows(plain, eager, composed):
    """Checks parameters in bf16 after as many windows on all sides: those of the library are the same, those of a
    peer the same but for a rounding of a few.
    """
    for mine, theirs in zip(plain, eager):
        if not torch.equal(mine, theirs):
            raise RuntimeError("the library's parameters depend on eager")
    mine = torch.cat([p.flatten() for p in plain]).float()
    for side in composed:
        differ = (side.parameter.float() - mine).abs()
        # A rounding to bf16 is at most 2^-7 of the number; master weights differ by 1e-6, as in check_same().
        worst = float((differ - 2**-7 * mine.abs()).max())
        several = float((differ > 0).float().mean())
        if not (worst <= 1e-6 and several <= 1e-3):
            raise RuntimeError(
                f"the library and a peer differ after some windows, by {worst}, in {several:.2g} of all"
            )


def measure_offload(library, report, options, makers, rounds):
    torch.manual_seed(5)
    shapes = [(2048, 1024 if options.quick else 2048)] * 24
    start = [(0.02 * torch.randn(s)).bfloat16() for s in shapes]
    gradients = [(1e-3 * torch.randn(s)).bfloat16() for s in shapes]
    for name in [name for name in ("deepspeed", "torch_fused") if name in makers]:
        on = {"plain": [p.clone() for p in start], "eager": [p.clone() for p in start]}
        plain = LibrarySide(library, on["plain"], options.threads, False)
        sides = {
            "eager": LibrarySide(library, on["eager"], options.threads, True),
            name: ComposedSide(makers[name], start, gradients, False),
            name + "_norm": ComposedSide(makers[name], start, gradients, True),
        }
        t = {side: [] for side in ["plain", *sides]}
        order = list(sides)
        for turn in range(-2, rounds):
            taken = {"plain": from_the_last(plain, gradients, 0)}
            for side in order:
                taken[side] = from_the_last(sides[side], gradients, taken["plain"])
            if turn >= 0:
                for side, seconds in taken.items():
                    t[side].append(seconds)
            order = order[1:] + order[:1]
        check_same_windows(on["plain"], on["eager"], [sides[name], sides[name + "_norm"]])
        ms = {side: 1e3 * statistics.median(seconds) for side, seconds in t.items()}
        for side in (name, name + "_norm"):
            without = statistics.median(tw.ratios(t[side], t["plain"]))
            report.figure(
                f"OFFLOAD_{side}",
                tw.ratios(t[side], t["eager"]),
                2.0 if side == "deepspeed" else None,
                f"from the last gradient {ms[side]:.4g} ms / {ms['eager']:.4g} ms, "
                f"threads: {options.threads}; without eager {ms['plain']:.4g} ms: {without:.3f}",
            )
        plain.close()
        sides["eager"].close()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default="PEERS,OFFLOAD")
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
    only = options.only.split(",")
    if "PEERS" in only:
        shapes = tw.gpt2_shapes(3 if options.quick else 12)
        measure(library, report, options, makers, "", shapes, (1, 4), 1, rounds)
        measure(library, report, options, makers, "400_", [(512,)] * 400, (4,), 5, 3 * rounds)
    if "OFFLOAD" in only:
        measure_offload(library, report, options, makers, 3 * rounds)
    if options.json:
        report.write(options.json, machine)


if __name__ == "__main__":
    sys.exit(main())
