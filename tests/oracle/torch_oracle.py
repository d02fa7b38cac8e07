#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares the library with PyTorch. Both get the same gradients, the library in micro-batches, PyTorch
as whole batches.

Usage: torch_oracle.py LIBRARY     exits with 77 if PyTorch is not installed.

PyTorch runs in float64, so its own rounding does not matter beside float32. vectors.hpp covers what
versions newer than Debian's have or do differently.
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
SGD, ADAM, ADAMW, RMSPROP, ADAGRAD, ADADELTA, ADAMAX, NADAM, RADAM = 0, 1, 2, 4, 5, 6, 7, 8, 9
TORCH = 0
CLIP_NONE, CLIP_GLOBAL = 0, 1
EXTERNAL, MICRO, WINDOW = 3, 0, 1
DTYPES = {torch.float32: 1, torch.float64: 2}


def struct(name, *fields):
    return type(name, (C.Structure,), {"_fields_": [("struct_size", C.c_size_t), *fields]})


I32, I64, F64 = C.c_int32, C.c_int64, C.c_double
Optimizer = struct("Optimizer", ("kind", I32), ("flavor", I32), ("lr", F64), ("weight_decay", F64),
                   ("momentum", F64), ("dampening", F64), ("beta1", F64), ("beta2", F64),
                   ("eps", F64), ("nesterov", I32), ("amsgrad", I32), ("maximize", I32),
                   ("state_dtype", I32), ("rho", F64), ("lr_decay", F64),
                   ("initial_accumulator", F64), ("momentum_decay", F64),
                   ("trust_coefficient", F64), ("max_grad_norm", F64), ("eps2", F64),
                   ("beta2_decay", F64), ("clip_threshold", F64), ("ns_coefficients", 3 * F64),
                   ("ns_steps", I32), ("adjust_lr", I32), ("centered", I32), ("decoupled", I32),
                   ("always_adapt", I32), ("reserved", I32))
Clip = struct("Clip", ("scope", I32), ("flavor", I32), ("max_norm", F64), ("max_value", F64))
Result = struct("Result", ("outcome", I32), ("reserved", I32), ("windows", I64), ("steps", I64),
                ("micro_batches", I64), ("weight", F64), ("norm", F64), ("clip_factor", F64),
                ("lr", F64), ("loss_scale", F64))
BnOptions = struct("BnOptions", ("mode", I32), ("layout", I32), ("dtype", I32), ("biased", I32),
                   ("momentum", F64), ("eps", F64))

# PyTorch's names of options that have other names in the library.
NAMES = {"alpha": "rho", "initial_accumulator_value": "initial_accumulator"}

torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)  # for PyTorch's own scalars too
lib = C.CDLL(sys.argv[1])
lib.ga_last_error.restype = C.c_char_p


def call(name, *arguments):
    status = getattr(lib, name)(*arguments)
    if status != 0:
        raise RuntimeError(f"{name}: status {status}: {lib.ga_last_error().decode()}")


class Library:
    """Parameters trained by the library."""

    def __init__(self, tensors, dtype, kind, options, max_norm):
        self.tensors = [t.to(dtype).clone() for t in tensors]
        self.ctx = C.c_void_p()
        call("ga_context_create", None, C.byref(self.ctx))
        o = Optimizer()
        call("ga_optimizer_init", C.byref(o), C.c_size_t(C.sizeof(o)), kind, TORCH)
        for name, value in options.items():
            if name == "betas":
                o.beta1, o.beta2 = value
            else:
                setattr(o, NAMES.get(name, name), int(value) if isinstance(value, bool) else value)
        call("ga_group_add", self.ctx, C.byref(o), None)
        if max_norm is not None:
            clip = Clip()
            call("ga_clip_init", C.byref(clip), C.c_size_t(C.sizeof(clip)))
            clip.scope, clip.max_norm = CLIP_GLOBAL, max_norm
            call("ga_context_set_clip", self.ctx, C.byref(clip))
        for i, t in enumerate(self.tensors):
            shape = (I64 * t.dim())(*t.shape)
            call("ga_param_add", self.ctx, 0, f"p{i}".encode(), C.c_void_p(t.data_ptr()),
                 DTYPES[dtype], t.dim(), shape, None, None)

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


def run(name, make, kind, options, dtype=torch.float32, max_norm=None, micro_batches=1,
        missing=False, schedule=False, steps=40):
    torch.manual_seed(1)
    shapes = [(7, 5), (13,), (), (40, 41)]

    def normal(shape):
        return torch.randn(shape).to(torch.float32)

    start = [normal(s) for s in shapes]
    ours = Library(start, dtype, kind, options, max_norm)
    theirs = [t.to(torch.float64).clone().requires_grad_() for t in start]
    optimizer = make(theirs, **options)

    distance = [torch.zeros(s) for s in shapes]
    for step in range(steps):
        if schedule:
            lr = options["lr"] * (1 + math.cos(step)) / 2
            ours.set_lr(lr)
            optimizer.param_groups[0]["lr"] = lr
        before = [p.detach().clone() for p in theirs]
        sums, total = [None] * len(shapes), 0
        for k in range(micro_batches):
            weight = k + 1
            # Gradients of mixed magnitude, some of the order of Adam's eps, and some missing.
            gradients = [(normal(s) * torch.exp(4 * normal(s) - 4)).to(dtype) for s in shapes]
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

    # The tolerance: 64 roundings of the sum of p's changes (the sums in moments and over micro-batches)
    # and one rounding of p in each step. In float64 both sides round, and a bias correction 1 - beta2^t
    # loses up to n = 1 / (1 - beta2) roundings. RAdam begins to adapt at t = 6, where it subtracts
    # 2 t beta2^t / (1 - beta2^t) from a number of size 2 n to get 2, and these have lost n / 6.
    unit, factor = 2.0**-24, 64
    if dtype == torch.float64:
        n = 1 / (1 - options.get("betas", (0.9, 0.999))[1])
        unit, factor = 2.0**-52, 64 + (n * n / 6 if kind == RADAM else n)
    worst = 0.0
    for got, want, d in zip(ours.tensors, theirs, distance):
        want = want.detach()
        bound = unit * (factor * d + steps * (want.abs() + d))
        worst = max(worst, ((got.to(torch.float64) - want).abs() / bound).max().item())
        assert d.max() > 0 or not steps, "nothing moved"
    ours.close()
    print(f"{'ok' if worst <= 1 else 'FAILED':6} {worst:6.3f} of the tolerance   {name}")
    return worst <= 1


def batch_norm(module, shape, cuts, dtype, channels_last=False, options={}, steps=3):
    """Compares a torch.nn.BatchNorm of whole batches with the library's layer: with the same batches in
    micro-batches in WINDOW mode, or in MICRO mode if cuts has one part."""
    torch.manual_seed(1)
    channels, positions = shape[1], math.prod(shape[2:])
    theirs = module(channels, **options).to(torch.float64)
    gamma, beta = torch.randn(channels).to(dtype), torch.randn(channels).to(dtype)
    with torch.no_grad():
        theirs.weight.copy_(gamma)
        theirs.bias.copy_(beta)

    ctx, o, bn = C.c_void_p(), BnOptions(), I32()
    call("ga_context_create", None, C.byref(ctx))
    external = Optimizer()
    call("ga_optimizer_init", C.byref(external), C.c_size_t(C.sizeof(external)), EXTERNAL, TORCH)
    call("ga_group_add", ctx, C.byref(external), None)
    for name, p in ("gamma", gamma), ("beta", beta):
        call("ga_param_add", ctx, 0, name.encode(), C.c_void_p(p.data_ptr()), DTYPES[dtype], 1,
             (I64 * 1)(channels), None, None)
    call("ga_bn_options_init", C.byref(o), C.c_size_t(C.sizeof(o)), TORCH)
    o.mode, o.layout, o.dtype = WINDOW if len(cuts) > 1 else MICRO, int(channels_last), DTYPES[dtype]
    for name, value in options.items():
        setattr(o, name, value)
    call("ga_bn_add", ctx, b"bn", I64(channels), 0, 1, C.byref(o), C.byref(bn))

    unit, worst = 2.0**-24 if dtype == torch.float32 else 2.0**-53, 0.0
    n = shape[0] * positions

    def compare(got, want, scale, roundings):
        nonlocal worst
        worst = max(worst, ((got.to(torch.float64) - want).abs() / (roundings * unit * scale)).max().item())

    for step in range(steps):
        x = (torch.randn(shape) * 2 + torch.randn(channels).view(-1, *[1] * (len(shape) - 2))).to(dtype)
        dy = torch.randn(shape).to(dtype)
        x64 = x.to(torch.float64).requires_grad_()
        want = theirs(x64)
        theirs.zero_grad()
        want.backward(dy.to(torch.float64))

        def pieces(t):
            return [(p.movedim(1, -1) if channels_last else p).contiguous()
                    for p in torch.split(t, cuts)]

        xs, dys = pieces(x), pieces(dy)
        ys, dxs = [torch.empty_like(p) for p in xs], [torch.empty_like(p) for p in xs]
        sizes = [(I64(len(p)), I64(positions)) for p in xs]
        at = [[C.c_void_p(p.data_ptr()) for p in of] for of in (xs, dys, ys, dxs)]
        # The loss is a sum over the batch, so the gradients of the parts add up.
        def micro(k, name, *arguments):
            call("ga_micro_begin", ctx, I64(k), F64(1), None)
            call(name, ctx, bn, at[0][k], at[1][k], *sizes[k], *arguments)
            call("ga_micro_end", ctx)
        parts = range(len(xs))
        if o.mode == WINDOW:
            for k in parts:
                call("ga_bn_accumulate", ctx, bn, at[0][k], *sizes[k])
            call("ga_bn_finalize", ctx, bn)
        for k in parts:
            call("ga_bn_forward", ctx, bn, at[0][k], *sizes[k], at[2][k])
        for k in parts:
            if o.mode == WINDOW:
                micro(k, "ga_bn_backward_accumulate")
        for k in parts:
            micro(k, "ga_bn_backward", at[3][k])
        result = Result(struct_size=C.sizeof(Result))
        call("ga_step", ctx, C.byref(result))
        assert result.outcome == 0, result.outcome

        def whole(parts):
            t = torch.cat(parts)
            return t.movedim(-1, 1) if channels_last else t

        # y and dx take eight operations on numbers up to the largest; in float64 the sums over n
        # elements of both sides count too.
        roundings = 8 if dtype == torch.float32 else 8 + 4 * n
        compare(whole(ys), want.detach(), want.detach().abs().max(), roundings)
        compare(whole(dxs), x64.grad, x64.grad.abs().max(), roundings)
        # All weights are 1, so the library's mean is the sum divided by the number of parts.
        for p, grad, terms in (0, theirs.weight.grad, dy.abs() * x.abs()), (1, theirs.bias.grad, dy.abs()):
            data = C.c_void_p()
            call("ga_gradient", ctx, p, C.byref(data), None, None)
            real = C.c_float if dtype == torch.float32 else C.c_double
            got = torch.tensor(list((real * channels).from_address(data.value)), dtype=torch.float64)
            size = terms.to(torch.float64).transpose(0, 1).reshape(channels, -1).sum(1)
            compare(got * len(xs), grad, size.max(), roundings)
        mean, variance, count = torch.empty(channels), torch.empty(channels), I64()
        call("ga_bn_running", ctx, bn, C.c_void_p(mean.data_ptr()), C.c_void_p(variance.data_ptr()),
             DTYPES[torch.float64], C.byref(count))
        # Both sides sum in float64, numbers up to 10 and their squares.
        unit64 = 2.0**-53 * 4 * n
        worst = max(worst, ((mean - theirs.running_mean).abs() / (10 * unit64)).max().item(),
                    ((variance - theirs.running_var).abs() / (100 * unit64)).max().item())
        assert count.value == theirs.num_batches_tracked == step + 1
    lib.ga_context_destroy(ctx)
    name = f"{module.__name__} {tuple(shape)} as {cuts} {dtype} {'last' if channels_last else 'first'} {options}"
    print(f"{'ok' if worst <= 1 else 'FAILED':6} {worst:6.3f} of the tolerance   {name}")
    return worst <= 1


sgd = [dict(lr=0.05), dict(lr=0.05, weight_decay=0.1), dict(lr=0.05, momentum=0.9),
       dict(lr=0.05, momentum=0.9, dampening=0.5, weight_decay=0.01),
       dict(lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
       dict(lr=0.05, momentum=0.9, maximize=True, weight_decay=0.01)]
adam = [dict(lr=1e-2), dict(lr=1e-2, weight_decay=0.1), dict(lr=1e-2, amsgrad=True),
        dict(lr=1e-2, betas=(0.5, 0.9), eps=1e-3),
        dict(lr=1e-2, amsgrad=True, maximize=True, weight_decay=0.1)]
others = [
    (RMSPROP, torch.optim.RMSprop, [
        dict(lr=1e-2), dict(lr=1e-2, momentum=0.9, weight_decay=0.1),
        dict(lr=1e-2, alpha=0.9, centered=True, eps=1e-3),
        dict(lr=1e-2, centered=True, momentum=0.5, eps=1e-3, maximize=True)]),
    (ADAGRAD, torch.optim.Adagrad, [
        dict(lr=0.05), dict(lr=0.05, lr_decay=0.1, weight_decay=0.1, initial_accumulator_value=0.3),
        dict(lr=0.05, eps=1e-3, maximize=True)]),
    (ADADELTA, torch.optim.Adadelta, [
        dict(lr=1.0), dict(lr=0.5, rho=0.5, eps=1e-3, weight_decay=0.1, maximize=True)]),
    (ADAMAX, torch.optim.Adamax, [
        dict(lr=1e-2), dict(lr=1e-2, betas=(0.5, 0.9), eps=1e-3, weight_decay=0.1, maximize=True)]),
    # PyTorch 1.13's NAdam applies its momentum twice, except in the foreach implementation.
    (NADAM, lambda p, **o: torch.optim.NAdam(p, foreach=True, **o), [
        dict(lr=1e-2), dict(lr=1e-2, weight_decay=0.1),
        dict(lr=1e-2, betas=(0.5, 0.9), momentum_decay=0.5, eps=1e-3)]),
    (RADAM, torch.optim.RAdam, [
        dict(lr=1e-2), dict(lr=1e-2, weight_decay=0.1), dict(lr=1e-2, betas=(0.5, 0.9), eps=1e-3)])]
f64 = dict(dtype=torch.float64)
variants = [dict(), f64, dict(micro_batches=4), dict(max_norm=1.0, micro_batches=3),
            dict(max_norm=1e6), dict(missing=True, micro_batches=2), dict(schedule=True)]
few = [dict(), f64, dict(missing=True, micro_batches=2), dict(schedule=True, **f64)]

right = 0
cases = [(k, m, o, v) for k, m, list_ in ((SGD, torch.optim.SGD, sgd),
                                          (ADAM, torch.optim.Adam, adam),
                                          (ADAMW, torch.optim.AdamW, adam))
         for o in list_ for v in variants]
cases += [(k, m, o, v) for k, m, list_ in others for o in list_ for v in few]
for kind, make, options, variant in cases:
    name = getattr(make, "__name__", "NAdam").replace("<lambda>", "NAdam")
    right += run(f"{name} {options} {variant}", make, kind, options, **variant)
total = len(cases)
for module, shape, cuts in ((torch.nn.BatchNorm1d, (12, 5), [4, 4, 4]),
                            (torch.nn.BatchNorm1d, (9, 3, 13), [4, 4, 1]),
                            (torch.nn.BatchNorm2d, (8, 16, 7, 5), [1, 3, 2, 2]),
                            (torch.nn.BatchNorm3d, (5, 4, 3, 4, 5), [1, 1, 1, 1, 1])):
    for parts in [shape[0]], cuts:
        for dtype in torch.float32, torch.float64:
            for last in False, True:
                for options in {}, dict(momentum=0.3, eps=1e-2):
                    right += batch_norm(module, shape, parts, dtype, last, options)
                    total += 1
print(f"torch {torch.__version__}: {right} of {total} agree")
sys.exit(right != total)
