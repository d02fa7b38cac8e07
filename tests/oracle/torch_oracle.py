#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The library against PyTorch: the same gradients to both, to one in micro-batches, to the other
as whole batches.

Usage: torch_oracle.py LIBRARY     exits with 77 where PyTorch is not installed.

PyTorch runs in float64, so it has no rounding of its own to excuse; what may differ is float32's.
"""
import ctypes
import math
import sys

try:
    import torch
except ImportError:
    print("skipped: this Python has no torch")
    sys.exit(77)

C = ctypes
SGD, ADAM, ADAMW = 0, 1, 2
TORCH = 0
CLIP_NONE, CLIP_GLOBAL = 0, 1
F32 = 1


def struct(name, *fields):
    return type(name, (C.Structure,), {"_fields_": [("struct_size", C.c_size_t), *fields]})


I32, I64, F64 = C.c_int32, C.c_int64, C.c_double
Optimizer = struct("Optimizer", ("kind", I32), ("flavor", I32), ("lr", F64), ("weight_decay", F64),
                   ("momentum", F64), ("dampening", F64), ("beta1", F64), ("beta2", F64),
                   ("eps", F64), ("nesterov", I32), ("amsgrad", I32), ("maximize", I32),
                   ("reserved", I32))
Clip = struct("Clip", ("scope", I32), ("flavor", I32), ("max_norm", F64), ("max_value", F64))
Result = struct("Result", ("outcome", I32), ("reserved", I32), ("windows", I64), ("steps", I64),
                ("micro_batches", I64), ("weight", F64), ("norm", F64), ("clip_factor", F64),
                ("lr", F64), ("loss_scale", F64))

torch.set_num_threads(1)
lib = C.CDLL(sys.argv[1])
lib.ga_last_error.restype = C.c_char_p


def call(name, *arguments):
    status = getattr(lib, name)(*arguments)
    if status != 0:
        raise RuntimeError(f"{name}: status {status}: {lib.ga_last_error().decode()}")


class Library:
    """Parameters that the library trains."""

    def __init__(self, tensors, kind, options, max_norm):
        self.tensors = [t.to(torch.float32).clone() for t in tensors]
        self.ctx = C.c_void_p()
        call("ga_context_create", None, C.byref(self.ctx))
        o = Optimizer()
        call("ga_optimizer_init", C.byref(o), C.c_size_t(C.sizeof(o)), kind, TORCH)
        for name, value in options.items():
            if name == "betas":
                o.beta1, o.beta2 = value
            else:
                setattr(o, name, int(value) if isinstance(value, bool) else value)
        call("ga_group_add", self.ctx, C.byref(o), None)
        if max_norm is not None:
            clip = Clip()
            call("ga_clip_init", C.byref(clip), C.c_size_t(C.sizeof(clip)))
            clip.scope, clip.max_norm = CLIP_GLOBAL, max_norm
            call("ga_context_set_clip", self.ctx, C.byref(clip))
        for i, t in enumerate(self.tensors):
            shape = (I64 * t.dim())(*t.shape)
            call("ga_param_add", self.ctx, 0, f"p{i}".encode(), C.c_void_p(t.data_ptr()), F32,
                 t.dim(), shape, None, None)

    def accumulate(self, gradients, weight):
        pointers = (C.c_void_p * len(gradients))(
            *[None if g is None else g.data_ptr() for g in gradients])
        call("ga_accumulate", self.ctx, pointers, C.c_size_t(len(gradients)), F64(weight), None)

    def step(self):
        result = Result(struct_size=C.sizeof(Result))
        call("ga_step", self.ctx, C.byref(result))
        assert result.outcome == 0, result.outcome
        return result

    def set_lr(self, lr):
        call("ga_group_set_lr", self.ctx, 0, F64(lr))

    def close(self):
        lib.ga_context_destroy(self.ctx)


def run(name, kind, options, max_norm=None, micro_batches=1, missing=False, schedule=False,
        steps=40):
    torch.manual_seed(1)
    shapes = [(7, 5), (13,), (), (40, 41)]
    start = [torch.randn(s).to(torch.float32) for s in shapes]
    ours = Library(start, kind, options, max_norm)
    theirs = [t.to(torch.float64).clone().requires_grad_() for t in start]
    classes = {SGD: torch.optim.SGD, ADAM: torch.optim.Adam, ADAMW: torch.optim.AdamW}
    optimizer = classes[kind](theirs, **options)

    distance = [torch.zeros(s, dtype=torch.float64) for s in shapes]
    for step in range(steps):
        if schedule:
            lr = options["lr"] * (1 + math.cos(step)) / 2
            ours.set_lr(lr)
            optimizer.param_groups[0]["lr"] = lr
        before = [p.detach().clone() for p in theirs]
        sums, total = [None] * len(shapes), 0
        for k in range(micro_batches):
            weight = k + 1
            # Of mixed size, some of the order of Adam's eps; here and there none at all.
            gradients = [torch.randn(s) * torch.exp(4 * torch.randn(s) - 4) for s in shapes]
            if missing:
                gradients = [None if (i + step + k) % 3 == 0 or (i == 1 and step % 5) else g
                             for i, g in enumerate(gradients)]
            ours.accumulate(gradients, weight)
            total += weight
            for i, g in enumerate(gradients):
                if g is not None:
                    term = weight * g.to(torch.float64)
                    sums[i] = term if sums[i] is None else sums[i] + term
        for p, s in zip(theirs, sums):
            p.grad = None if s is None else s / total
        if max_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(theirs, max_norm)
            result = ours.step()
            assert abs(result.norm - norm) <= 1e-6 * norm, (result.norm, norm)
        else:
            ours.step()
        optimizer.step()
        for d, p, b in zip(distance, theirs, before):
            d += (p.detach() - b).abs()

    # Each step rounds p once and its own change a few times: the change is good to 64 roundings
    # (the sums in moments and in micro-batches), p to one for each step.
    worst = 0.0
    for got, want, d in zip(ours.tensors, theirs, distance):
        want = want.detach()
        bound = 2.0**-24 * (64 * d + steps * (want.abs() + d))
        worst = max(worst, ((got.to(torch.float64) - want).abs() / bound).max().item())
        assert d.max() > 0 or not steps, "nothing moved"
    ours.close()
    print(f"{'ok' if worst <= 1 else 'FAILED':6} {worst:6.3f} of the tolerance   {name}")
    return worst <= 1


sgd = [dict(lr=0.05), dict(lr=0.05, weight_decay=0.1), dict(lr=0.05, momentum=0.9),
       dict(lr=0.05, momentum=0.9, dampening=0.5, weight_decay=0.01),
       dict(lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
       dict(lr=0.05, momentum=0.9, maximize=True, weight_decay=0.01)]
adam = [dict(lr=1e-2), dict(lr=1e-2, weight_decay=0.1), dict(lr=1e-2, amsgrad=True),
        dict(lr=1e-2, betas=(0.5, 0.9), eps=1e-3),
        dict(lr=1e-2, amsgrad=True, maximize=True, weight_decay=0.1)]
variants = [dict(), dict(micro_batches=4), dict(max_norm=1.0, micro_batches=3),
            dict(max_norm=1e6), dict(missing=True, micro_batches=2), dict(schedule=True)]

right = 0
cases = [(n, k, o, v) for n, k, list_ in (("SGD", SGD, sgd), ("Adam", ADAM, adam),
                                          ("AdamW", ADAMW, adam)) for o in list_ for v in variants]
for name, kind, options, variant in cases:
    right += run(f"{name} {options} {variant}", kind, options, **variant)
print(f"torch {torch.__version__}: {right} of {len(cases)} agree")
sys.exit(right != len(cases))
