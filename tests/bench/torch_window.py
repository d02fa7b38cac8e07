#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""C5 and C10: the library and PyTorch in one process, on the same tensors, with the same threads.

    torch_window.py FOLDER [--quick] [--only C5,C10] [--threads N] [--json FILE]

FOLDER is the benchmark's build folder. The figures are added to FILE, which gradaccum_bench has written.
`run` in this folder installs PyTorch and starts this script.
"""

import argparse
import ctypes as c
import json
import os
import re
import resource
import statistics
import sys
import time

# Imported before the library is loaded: PyTorch has a libgomp of its own, which the library then uses.
import torch

GA_F32, GA_OPTIMIZER_ADAMW, GA_FLAVOR_TORCH, GA_CLIP_GLOBAL, GA_REDUCE_SUM = 1, 2, 0, 1, 1
CONSUMED, LIVE = 0, 1
LR, MAX_NORM = 1e-4, 1.0


# ---- The library by ctypes -----------------------------------------------------------------------


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
        ("reserved", c.c_int32),
        ("loss_scale", c.c_double),
        ("parallel_for", c.c_void_p),
        ("parallel_for_user", c.c_void_p),
    ]


class Optimizer(c.Structure):
    _fields_ = [
        ("struct_size", c.c_size_t),
        ("kind", c.c_int32),
        ("flavor", c.c_int32),
        ("lr", c.c_double),
        ("weight_decay", c.c_double),
        ("momentum", c.c_double),
        ("dampening", c.c_double),
        ("beta1", c.c_double),
        ("beta2", c.c_double),
        ("eps", c.c_double),
        ("nesterov", c.c_int32),
        ("amsgrad", c.c_int32),
        ("maximize", c.c_int32),
        ("state_dtype", c.c_int32),
    ]


class Clip(c.Structure):
    _fields_ = [
        ("struct_size", c.c_size_t),
        ("scope", c.c_int32),
        ("flavor", c.c_int32),
        ("max_norm", c.c_double),
        ("max_value", c.c_double),
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
    ]


class Library:
    def __init__(self, folder):
        self.ga = c.CDLL(os.path.join(folder, "gradaccum", "lib", "libgradaccum.so"))
        self.ga.ga_last_error.restype = c.c_char_p
        self.ga.ga_build_info.restype = c.c_char_p
        self.ga.ga_accumulate.argtypes = [
            c.c_void_p,
            c.POINTER(c.c_void_p),
            c.c_size_t,
            c.c_double,
            c.c_void_p,
        ]
        self.ga.ga_context_destroy.restype = None
        self.yard = c.CDLL(os.path.join(folder, "libgradaccum_yardsticks.so"))

    def check(self, status):
        if status != 0:
            raise RuntimeError(self.ga.ga_last_error().decode())


class Window:
    """A context over PyTorch's parameters: AdamW, clipped by the global norm; sums, as in PyTorch."""

    def __init__(self, library, parameters, threads, life, state_dtype=0, max_norm=MAX_NORM):
        self.library, ga, check = library, library.ga, library.check
        config = Config()
        check(ga.ga_config_init(c.byref(config), c.c_size_t(c.sizeof(config))))
        config.num_threads, config.gradient_life, config.reduce = threads, life, GA_REDUCE_SUM
        self.context = c.c_void_p()
        check(ga.ga_context_create(c.byref(config), c.byref(self.context)))
        adamw = Optimizer()
        check(
            ga.ga_optimizer_init(
                c.byref(adamw), c.c_size_t(c.sizeof(adamw)), GA_OPTIMIZER_ADAMW, GA_FLAVOR_TORCH
            )
        )
        adamw.lr, adamw.state_dtype = LR, state_dtype
        group = c.c_int32()
        check(ga.ga_group_add(self.context, c.byref(adamw), c.byref(group)))
        clip = Clip()
        check(ga.ga_clip_init(c.byref(clip), c.c_size_t(c.sizeof(clip))))
        clip.scope, clip.max_norm = GA_CLIP_GLOBAL, max_norm
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

    def run(self, micros):
        """micros: for each micro-batch, an array of pointers."""
        for pointers in micros:
            self.library.check(
                self.library.ga.ga_accumulate(self.context, pointers, len(pointers), 1.0, None)
            )
        result = StepResult(struct_size=c.sizeof(StepResult))
        self.library.check(self.library.ga.ga_step(self.context, c.byref(result)))
        if result.outcome != 0:
            raise RuntimeError("a step was skipped")

    def close(self):
        self.library.ga.ga_context_destroy(self.context)


def pointers(tensors):
    return (c.c_void_p * len(tensors))(*[t.data_ptr() for t in tensors])


def assert_one_libgomp():
    with open("/proc/self/maps") as maps:
        files = set(re.findall(r"/\S*lib(?:gomp|iomp5|omp)[-.\w]*", maps.read()))
    if len(files) != 1:
        raise RuntimeError(
            "expected one OpenMP in this process, found: " + ", ".join(sorted(files))
        )
    return files.pop()


# ---- Rounds and report ---------------------------------------------------------------------------


def ticks():
    """Returns processor seconds since boot: all, busy, stolen, and those of this process."""
    with open("/proc/stat") as stat:
        user, nice, system, idle, wait, irq, soft, steal = map(int, stat.readline().split()[1:9])
    hertz = os.sysconf("SC_CLK_TCK")
    busy = (user + nice + system + irq + soft) / hertz
    own = sum(
        u.ru_utime + u.ru_stime
        for u in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )
    return busy + (idle + wait + steal) / hertz, busy, steal / hertz, own


class Report:
    def __init__(self):
        self.entries, self.mark, self.load = {}, ticks(), (0.0, 0.0)

    def figure(self, name, ratios, target, text):
        """target: None for a figure without a target."""
        (all0, busy0, steal0, own0), (all1, busy1, steal1, own1) = self.mark, ticks()
        whole = all1 - all0
        if whole > 0.1:  # the figures of one race are reported together and share its load
            self.mark = ticks()
            self.load = (
                100 * max(0.0, (busy1 - busy0) - (own1 - own0)) / whole,
                100 * (steal1 - steal0) / whole,
            )
        others, steal = self.load
        ratio = statistics.median(ratios)
        low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        met = "" if target is None else "met" if ratio >= target else "missed"
        goal = "" if target is None else f">= {target:.4g}"
        print(
            f"{name:<30} {ratio:9.3f}  {goal:<10} {met:<6}  {text} [{low:.3f}-{high:.3f}], "
            f"others {others:.0f} %, steal {steal:.0f} %",
            flush=True,
        )
        entry = {"ratio": ratio}
        if target is not None:
            entry.update(target=target, sense=">=", met=ratio >= target)
        entry.update(
            quartiles=[low, high],
            rounds=len(ratios),
            others_percent=round(others, 1),
            steal_percent=round(steal, 1),
            text=text,
        )
        self.entries[name] = entry

    def write(self, path, machine, key="machine_torch"):
        entries = {}
        if os.path.exists(path):
            with open(path) as file:
                entries = json.load(file)
        entries[key] = {"text": machine}
        entries.update(self.entries)
        with open(path, "w") as file:
            file.write(
                "{\n"
                + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in entries.items())
                + "\n}\n"
            )


def race(rounds, sides):
    """Returns the seconds of each side in each round. Another side is first each time; round 0 is not
    counted.
    """
    times = {name: [] for name in sides}
    order = list(sides)
    for turn in range(rounds + 1):
        for name in order:
            start = time.perf_counter()
            sides[name]()
            if turn > 0:
                times[name].append(time.perf_counter() - start)
        order = order[1:] + order[:1]
    return times


def ratios(above, below):
    return [a / b for a, b in zip(above, below)]


# ---- C5 ------------------------------------------------------------------------------------------


def gpt2_shapes(layers):
    d = 768
    layer = [
        (d,),
        (d,),
        (d, 3 * d),
        (3 * d,),
        (d, d),
        (d,),
        (d,),
        (d,),
        (d, 4 * d),
        (4 * d,),
        (4 * d, d),
        (d,),
    ]
    return [(50257, d), (1024, d)] + layers * layer + [(d,), (d,)]


def torch_window(parameters, optimizer, micros, add, clip_in_step):
    """A window in PyTorch, in its fastest usual way: the first gradient is taken, the others are added,
    then foreach norm and fused AdamW. clip_in_step: the fused step applies the clip factor, and there is
    no clipping pass.
    """
    first = micros[0]
    for p, g in zip(parameters, first):
        p.grad = g
    for other in micros[1:]:
        add(first, other)
    if clip_in_step:
        norm = torch.nn.utils.get_total_norm(first, foreach=True)
        optimizer.grad_scale = torch.clamp((norm + 1e-6) / MAX_NORM, min=1.0)
        optimizer.found_inf = torch.zeros((), dtype=torch.float32)
    else:
        torch.nn.utils.clip_grad_norm_(parameters, MAX_NORM, foreach=True)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def add_foreach(to, other):
    torch._foreach_add_(to, other)


def add_each(to, other):
    for t, o in zip(to, other):
        t.add_(o)


def fused_adamw(parameters):
    return torch.optim.AdamW(parameters, lr=LR, fused=True)


def check_same(library, threads, makers=(fused_adamw,)):
    """Checks that all ways end at the same parameters after a window of four, with a clipped norm.
    makers: functions that make an optimizer over parameters.
    """
    torch.manual_seed(1)
    shapes = [(257, 129), (300,), (64, 64)]
    start = [torch.randn(s) for s in shapes]
    gradients = [[torch.randn(s) for s in shapes] for _ in range(4)]
    ends = []
    for life in (CONSUMED, LIVE):
        mine = [p.clone() for p in start]
        window = Window(library, mine, threads, life)
        window.run([pointers(g) for g in gradients])
        window.close()
        ends.append(mine)
    for make, clip_in_step in [(make, False) for make in makers] + [(fused_adamw, True)]:
        theirs = [p.clone().requires_grad_() for p in start]
        optimizer = make(theirs)
        torch_window(
            theirs,
            optimizer,
            [[g.clone() for g in micro] for micro in gradients],
            add_foreach,
            clip_in_step,
        )
        ends.append([p.detach() for p in theirs])
    for end in ends[1:]:
        worst = max(float((a - b).abs().max()) for a, b in zip(end, ends[0]))
        # Parameters are near 1, where a rounding is 6e-8 (some lie near 4: 2.4e-7); a step is 1e-4.
        if not worst <= 1e-6:
            raise RuntimeError(f"the library and a peer differ by {worst} after a window")


def measure_c5(library, report, options):
    check_same(library, options.threads)
    shapes = gpt2_shapes(3 if options.quick else 12)
    torch.manual_seed(2)
    parameters = [(0.02 * torch.randn(s)).requires_grad_() for s in shapes]
    # Small enough that the first set, to which PyTorch adds in every window, stays small.
    sets = [[1e-6 * torch.randn(s) for s in shapes] for _ in range(2)]
    sets_pointers = [pointers(s) for s in sets]
    n = sum(p.numel() for p in parameters)
    rounds = 7 if options.quick else 11

    # PyTorch adds in the way that is faster on this machine.
    adding = race(3, {"foreach": lambda: add_foreach(*sets), "each": lambda: add_each(*sets)})
    add = (
        add_foreach
        if statistics.median(adding["foreach"]) <= statistics.median(adding["each"])
        else add_each
    )

    optimizer, scaled = fused_adamw(parameters), fused_adamw(parameters)
    consumed = Window(library, parameters, options.threads, CONSUMED)
    live = Window(library, parameters, options.threads, LIVE)
    yard = [library.yard.yard_alloc, library.yard.yard_mix_4_3]
    yard[0].restype = c.c_void_p
    streams = [c.c_void_p(yard[0](c.c_int64(n), k, options.threads)) for k in range(4)]

    targets = {1: (1.4, 1.6), 4: (1.3, 1.4), 8: (1.15, 1.25)}
    margins = []
    for count in (1, 4, 8):
        micros = [sets[k % 2] for k in range(count)]
        if count > 2:  # the first set is PyTorch's accumulator, so it cannot be added again
            micros = [sets[0]] + [sets[1]] * (count - 1)
        mine = [sets_pointers[0]] + [sets_pointers[1]] * (count - 1)
        t = race(
            rounds,
            {
                "torch": lambda: torch_window(parameters, optimizer, micros, add, False),
                "consumed": lambda: consumed.run(mine),
                "torch grad_scale": lambda: torch_window(parameters, scaled, micros, add, True),
                "live": lambda: live.run(mine),
                "mix(4,3)": lambda: yard[1](*streams, c.c_int64(n), options.threads),
            },
        )
        milliseconds = {name: 1e3 * statistics.median(seconds) for name, seconds in t.items()}
        # Bytes moved per parameter. PyTorch: adding 12, the norm 4, clipping 8, the step 28; with
        # grad_scale the step writes the gradient back, 32, and there is no clipping pass.
        moved = {
            "torch": 40 + 12 * (count - 1),
            "torch grad_scale": 36 + 12 * (count - 1),
            "consumed": 24 + 12 * count,
            "live": 32 if count == 1 else 16 + 12 * count,
        }
        for side, target in zip(("consumed", "live"), targets[count]):
            values = ratios(t["torch"], t[side])
            margins.append((statistics.median(values) / target, [v / target for v in values]))
            report.figure(
                f"C5_{side}_n{count}",
                values,
                target,
                f"PyTorch {milliseconds['torch']:.1f} ms / {milliseconds[side]:.1f} ms, "
                f"bytes {moved['torch']} / {moved[side]} = {moved['torch'] / moved[side]:.2f}",
            )
            report.figure(
                f"C5_{side}_n{count}_grad_scale",
                ratios(t["torch grad_scale"], t[side]),
                None,
                f"PyTorch with grad_scale {milliseconds['torch grad_scale']:.1f} ms, bytes "
                f"{moved['torch grad_scale']} / {moved[side]} = "
                f"{moved['torch grad_scale'] / moved[side]:.2f}",
            )
        for name in ("torch", "torch grad_scale", "consumed", "live"):
            fraction = [moved[name] / a / (28 / b) for a, b in zip(t[name], t["mix(4,3)"])]
            report.figure(
                f"C5_mix_n{count}_{name.replace(' ', '_')}",
                fraction,
                None,
                f"{name}: bytes per second / those of mix(4,3)",
            )
    report.figure(
        "C5",
        min(margins)[1],
        1.0,
        "ratio / target, the worst of the six (a target only if C6 is missed)",
    )
    consumed.close()
    live.close()
    for stream in streams:
        library.yard.yard_free(stream)


# ---- C10 -----------------------------------------------------------------------------------------


class Stack:
    """The training step of stack.hpp."""

    def __init__(self, folder, weights, inputs, targets, way, threads):
        self.so = c.CDLL(os.path.join(folder, "libgradaccum_stack.so"))
        self.so.stack_create.restype = c.c_void_p
        self.so.stack_error.restype = c.c_char_p
        self.so.stack_loss.restype = c.c_double
        micros, batch, width = inputs.shape
        self.handle = self.so.stack_create(
            len(weights),
            c.c_int64(width),
            c.c_int64(batch),
            micros,
            pointers(weights),
            c.c_void_p(inputs.data_ptr()),
            c.c_void_p(targets.data_ptr()),
            c.c_double(LR),
            c.c_double(MAX_NORM),
            way,
            threads,
        )
        if not self.handle:
            raise RuntimeError(self.so.stack_error().decode())
        self.handle = c.c_void_p(self.handle)

    def step(self):
        if self.so.stack_step(self.handle) != 0:
            raise RuntimeError(self.so.stack_error().decode())

    def loss(self):
        return self.so.stack_loss(self.handle)


def measure_c10(folder, report, options):
    layers, width, batch, micros = 8, 1024, 64, 8
    torch.manual_seed(3)
    inputs, targets = torch.randn(micros, batch, width), torch.randn(micros, batch, width)
    start = [(torch.rand(width, width) * 2 - 1) * (6 / width) ** 0.5 for _ in range(layers)]

    model = torch.nn.Sequential()
    for k, weight in enumerate(start):
        dense = torch.nn.Linear(width, width, bias=False)
        with torch.no_grad():
            dense.weight.copy_(weight)
        model.append(dense)
        if k + 1 < layers:
            model.append(torch.nn.ReLU(inplace=True))
    parameters = list(model.parameters())
    optimizer = fused_adamw(parameters)
    losses = [0.0]

    def torch_step():
        total = 0.0
        for x, y in zip(inputs, targets):
            loss = torch.nn.functional.mse_loss(model(x), y) / micros
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(parameters, MAX_NORM, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses[0] = float(total)

    sides, copies = [], []
    for way in (0, 1):
        copies.append([w.clone() for w in start])
        sides.append(Stack(folder, copies[-1], inputs, targets, way, options.threads))
    written, matmul = sides
    # All sides train alike: after a few steps the losses agree and have fallen.
    for step in range(4):
        torch_step(), written.step(), matmul.step()
        first = losses[0] if step == 0 else first
    for side in sides:
        if not abs(side.loss() - losses[0]) <= 1e-3 * losses[0] or not losses[0] < first:
            raise RuntimeError(f"C10: losses differ: {side.loss()} and PyTorch's {losses[0]}")

    t = race(
        7 if options.quick else 15,
        {"torch": torch_step, "written": written.step, "matmul": matmul.step},
    )
    ms = {name: 1e3 * statistics.median(seconds) for name, seconds in t.items()}
    report.figure(
        "C10_vs_written",
        ratios(t["written"], t["matmul"]),
        1.0,
        f"a step with gradients written out, {ms['written']:.1f} ms / with ga_accumulate_matmul, "
        f"{ms['matmul']:.1f} ms",
    )
    report.figure(
        "C10_vs_torch",
        ratios(t["torch"], t["matmul"]),
        1.0,
        f"PyTorch's step, {ms['torch']:.1f} ms / with ga_accumulate_matmul",
    )
    report.figure(
        "C10_written_vs_torch",
        ratios(t["torch"], t["written"]),
        None,
        "PyTorch's step / with gradients written out",
    )
    report.figure(
        "C10",
        [
            min(a, b)
            for a, b in zip(ratios(t["written"], t["matmul"]), ratios(t["torch"], t["matmul"]))
        ],
        1.0,
        "the smaller of the two",
    )
    for side in sides:
        side.so.stack_destroy(side.handle)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default="C5,C10")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", default=None)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    library = Library(options.folder)
    openmp = assert_one_libgomp()
    machine = (
        f"PyTorch {torch.__version__}, threads: {torch.get_num_threads()}, one OpenMP: "
        f"{os.path.basename(openmp)} of PyTorch; {library.ga.ga_build_info().decode()}"
    )
    if os.path.dirname(torch.__file__) not in openmp and "torch" not in openmp:
        raise RuntimeError(f"PyTorch's own OpenMP was expected, found {openmp}")
    print(machine)
    report = Report()
    only = options.only.split(",")
    if "C5" in only:
        measure_c5(library, report, options)
    if "C10" in only:
        if os.path.exists(os.path.join(options.folder, "libgradaccum_stack.so")):
            measure_c10(options.folder, report, options)
            assert_one_libgomp()
        else:
            print("C10: skipped; this build has no oneDNN")
    if options.json:
        report.write(options.json, machine)


if __name__ == "__main__":
    sys.exit(main())
