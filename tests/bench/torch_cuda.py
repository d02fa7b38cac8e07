#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""G4: the library and PyTorch on one GPU, in one process, on the same tensors and stream.

    torch_cuda.py FOLDER [--quick] [--json FILE]

FOLDER has libgradaccum.so.0 and libgradaccum_cuda.so. AdamW with clipping by the global norm, GPT-2's
124 M parameters in its shapes. PyTorch runs fused AdamW and foreach clip_grad_norm_, and takes the first
gradient without copying it. apex's FusedAdam and clip_grad_norm_ run too if they can be imported. Exits
with 77, and the reason, if PyTorch or a GPU that it can use is missing.
"""

import argparse
import ctypes as c
import os
import statistics
import sys

SKIPPED = 77

try:
    import torch
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(SKIPPED)

from torch_window import (
    CONSUMED,
    GA_CLIP_GLOBAL,
    GA_F32,
    GA_FLAVOR_TORCH,
    GA_OPTIMIZER_ADAMW,
    GA_REDUCE_SUM,
    LIVE,
    LR,
    MAX_NORM,
    Clip,
    Optimizer,
    Report,
    gpt2_shapes,
    pointers,
    ratios,
)

GA_DEVICE_CUDA = 1


class Config(c.Structure):
    _fields_ = [
        ("struct_size", c.c_size_t),
        ("device", c.c_int32),
        ("num_threads", c.c_int32),
        ("accum_steps", c.c_int64),
        ("gradient_kind", c.c_int32),
        ("reduce", c.c_int32),
        ("missing", c.c_int32),
        ("nonfinite", c.c_int32),
        ("gradient_life", c.c_int32),
        ("accumulation", c.c_int32),
        ("loss_scale", c.c_double),
        ("parallel_for", c.c_void_p),
        ("parallel_for_user", c.c_void_p),
        ("seed", c.c_uint64),
        ("noise_scale", c.c_int32),
        ("reserved", c.c_int32),
        ("noise_smoothing", c.c_double),
        ("device_ordinal", c.c_int32),
        ("reserved2", c.c_int32),
        ("stream", c.c_void_p),
    ]


class StepResult(c.Structure):
    _fields_ = [
        ("struct_size", c.c_size_t),
        ("outcome", c.c_int32),
        ("reserved", c.c_int32),
        ("windows", c.c_int64),
        ("steps", c.c_int64),
        ("micro_batches", c.c_int64),
        ("weight", c.c_double),
        ("norm", c.c_double),
        ("clip_factor", c.c_double),
        ("lr", c.c_double),
        ("loss_scale", c.c_double),
        ("skipped", c.c_int64),
    ]


class Library:
    def __init__(self, folder):
        self.ga = ga = c.CDLL(os.path.join(folder, "libgradaccum.so.0"))
        ga.ga_last_error.restype = c.c_char_p
        ga.ga_build_info.restype = c.c_char_p
        ga.ga_accumulate.argtypes = [
            c.c_void_p,
            c.POINTER(c.c_void_p),
            c.c_size_t,
            c.c_double,
            c.c_void_p,
        ]
        ga.ga_step.argtypes = [c.c_void_p, c.c_void_p]
        ga.ga_context_destroy.restype = None

    def check(self, status):
        if status != 0:
            raise RuntimeError(self.ga.ga_last_error().decode())


class Window:
    """A context over PyTorch's parameters, on PyTorch's stream: AdamW, clipped by the global norm."""

    def __init__(self, library, parameters, life):
        self.library, ga, check = library, library.ga, library.check
        config = Config()
        check(ga.ga_config_init(c.byref(config), c.c_size_t(c.sizeof(config))))
        config.device, config.device_ordinal = GA_DEVICE_CUDA, torch.cuda.current_device()
        config.stream = torch.cuda.current_stream().cuda_stream
        config.gradient_life, config.reduce = life, GA_REDUCE_SUM
        self.context = c.c_void_p()
        check(ga.ga_context_create(c.byref(config), c.byref(self.context)))
        adamw = Optimizer()
        check(
            ga.ga_optimizer_init(
                c.byref(adamw), c.c_size_t(c.sizeof(adamw)), GA_OPTIMIZER_ADAMW, GA_FLAVOR_TORCH
            )
        )
        adamw.lr = LR
        group = c.c_int32()
        check(ga.ga_group_add(self.context, c.byref(adamw), c.byref(group)))
        clip = Clip()
        check(ga.ga_clip_init(c.byref(clip), c.c_size_t(c.sizeof(clip))))
        clip.scope, clip.max_norm = GA_CLIP_GLOBAL, MAX_NORM
        check(ga.ga_context_set_clip(self.context, c.byref(clip)))
        for k, p in enumerate(parameters):
            shape = (c.c_int64 * p.dim())(*p.shape)
            check(
                ga.ga_param_add(
                    self.context,
                    group,
                    b"tensor%d" % k,
                    c.c_void_p(p.data_ptr()),
                    GA_F32,
                    p.dim(),
                    shape,
                    None,
                    None,
                )
            )

    def accumulate(self, micros):
        """micros: for each micro-batch, an array of pointers."""
        for pointers in micros:
            self.library.check(
                self.library.ga.ga_accumulate(self.context, pointers, len(pointers), 1.0, None)
            )

    def step(self):
        self.library.check(self.library.ga.ga_step(self.context, None))

    def run(self, micros):
        self.accumulate(micros)
        self.step()

    def close(self):
        result = StepResult(struct_size=c.sizeof(StepResult))
        self.library.check(
            self.library.ga.ga_step_result_get(self.context, c.c_int64(0), 1, c.byref(result))
        )
        self.library.ga.ga_context_destroy(self.context)
        if result.skipped:
            raise RuntimeError("a step was skipped")


class Theirs:
    """A window of PyTorch or apex, in two parts."""

    def __init__(self, parameters, optimizer, clip):
        self.parameters, self.optimizer, self.clip = parameters, optimizer, clip

    def accumulate(self, micros):
        for p, g in zip(self.parameters, micros[0]):
            p.grad = g
        for other in micros[1:]:
            torch._foreach_add_(micros[0], other)

    def step(self):
        self.clip(self.parameters)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def run(self, micros):
        self.accumulate(micros)
        self.step()


def torch_side(parameters):
    return Theirs(
        parameters,
        torch.optim.AdamW(parameters, lr=LR, fused=True),
        lambda p: torch.nn.utils.clip_grad_norm_(p, MAX_NORM, foreach=True),
    )


def apex_side(parameters):
    """Returns None and prints the reason if apex cannot be imported."""
    try:
        from apex.contrib.clip_grad import clip_grad_norm_
        from apex.optimizers import FusedAdam

        optimizer = FusedAdam(parameters, lr=LR, weight_decay=1e-2, adam_w_mode=True)
    except Exception as error:  # an incomplete installation of apex may raise anything
        print(f"apex: skipped: {error}")
        return None
    return Theirs(parameters, optimizer, lambda p: clip_grad_norm_(p, MAX_NORM))


def check_same(library):
    """Checks that both end at the same parameters after a window of four, with a clipped norm."""
    torch.manual_seed(1)
    shapes = [(257, 129), (300,), (64, 64)]
    start = [torch.randn(s, device="cuda") for s in shapes]
    gradients = [[torch.randn(s, device="cuda") for s in shapes] for _ in range(4)]
    theirs = [p.clone().requires_grad_() for p in start]
    torch_side(theirs).run([[g.clone() for g in micro] for micro in gradients])
    for life in (CONSUMED, LIVE):
        mine = [p.clone() for p in start]
        window = Window(library, mine, life)
        window.run([pointers(g) for g in gradients])
        window.close()
        worst = max(float((a - b.detach()).abs().max()) for a, b in zip(mine, theirs))
        # Parameters are near 1, where a rounding is 6e-8 (some lie near 4: 2.4e-7); a step is 1e-4.
        if not worst <= 1e-6:
            raise RuntimeError(f"the library and PyTorch differ by {worst} after a window")


def race(rounds, sides):
    """Returns the seconds of each side in each round, between two events on the stream; sides: name ->
    (prepare, run). Another side is first each time, and round 0 is not counted. The fill before the
    first event lets the host run ahead of the device, so that device time is measured.
    """
    lead = torch.empty(1 << 28, device="cuda")
    times = {name: [] for name in sides}
    order = list(sides)
    for turn in range(rounds + 1):
        for name in order:
            prepare, run = sides[name]
            start = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            prepare()
            for _ in range(16):
                lead.zero_()
            start.record()
            run()
            end.record()
            end.synchronize()
            if turn > 0:
                times[name].append(1e-3 * start.elapsed_time(end))
        order = order[1:] + order[:1]
    return times


def measure(library, report, options):
    check_same(library)
    shapes = gpt2_shapes(3 if options.quick else 12)
    torch.manual_seed(2)
    parameters = [(0.02 * torch.randn(s, device="cuda")).requires_grad_() for s in shapes]
    # Small enough that the first set, to which PyTorch adds in every window, stays small.
    sets = [[1e-6 * torch.randn(s, device="cuda") for s in shapes] for _ in range(2)]
    sets_pointers = [pointers(s) for s in sets]
    sides = {
        "consumed": Window(library, parameters, CONSUMED),
        "live": Window(library, parameters, LIVE),
        "torch": torch_side(parameters),
    }
    apex = apex_side(parameters)
    if apex:
        sides["apex"] = apex
    rounds = 7 if options.quick else 11
    n = sum(p.numel() for p in parameters)
    print(f"G4: {len(shapes)} tensors, {n / 1e6:.4g} M parameters")
    for count in (1, 4):

        def micros(name):
            of = sets if name in ("torch", "apex") else sets_pointers
            return [of[0]] + [of[1]] * (count - 1)

        steps, windows = {}, {}
        for name, side in sides.items():
            these = micros(name)
            steps[name] = (lambda s=side, m=these: s.accumulate(m), side.step)
            windows[name] = (lambda: None, lambda s=side, m=these: s.run(m))
        for part, them, target in (("step", steps, 1.4), ("window", windows, None)):
            t = race(rounds, them)
            ms = {name: 1e3 * statistics.median(seconds) for name, seconds in t.items()}
            for peer in ("torch", "apex"):
                if peer not in t:
                    continue
                for life in ("consumed", "live"):
                    # With a live gradient, the step of a window of one computes the norm too.
                    binds = target if peer == "torch" and life == "consumed" else None
                    report.figure(
                        f"G4_{part}_n{count}_{life}_{peer}",
                        ratios(t[peer], t[life]),
                        binds,
                        f"{peer} {ms[peer]:.3f} ms / {ms[life]:.3f} ms",
                    )
    for name in ("consumed", "live"):
        sides[name].close()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", default=None)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print(f"skipped: PyTorch {torch.__version__} finds no GPU that it can use")
        return SKIPPED
    library = Library(options.folder)
    count = c.c_int32()
    if library.ga.ga_device_count(GA_DEVICE_CUDA, c.byref(count)) != 0 or count.value == 0:
        print(f"skipped: {library.ga.ga_last_error().decode()}")
        return SKIPPED
    machine = (
        f"PyTorch {torch.__version__} for CUDA {torch.version.cuda}, "
        f"{torch.cuda.get_device_name()}; {library.ga.ga_build_info().decode()}"
    )
    print(machine)
    report = Report()
    # Not the legacy default stream, which synchronises with other streams.
    with torch.cuda.stream(torch.cuda.Stream()):
        measure(library, report, options)
    if options.json:
        report.write(options.json, machine)
    return 0


if __name__ == "__main__":
    sys.exit(main())
