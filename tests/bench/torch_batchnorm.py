#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""B4: batch normalisation of ResNet-50's layers, by the library (MICRO mode) and by PyTorch, in one
process, on the same tensors, with the same threads.

    torch_batchnorm.py FOLDER [--quick] [--threads N] [--json FILE] [--samples N]

FOLDER is the benchmark's build folder. The figures are added to FILE.
"""

import argparse
import ctypes as c
import sys
import time

import torch
from torch_window import Config, Library, Report, ratios

GA_F32, GA_FLAVOR_TORCH, GA_OPTIMIZER_SGD = 1, 0, 0
GA_BN_CHANNELS_FIRST, GA_BN_CHANNELS_LAST = 0, 1
EPS, MOMENTUM = 1e-5, 0.1

# Channels; height, which is also the width; and the number of such layers in ResNet-50.
LAYERS = [
    (64, 112, 1),
    (64, 56, 6),
    (256, 56, 4),
    (128, 56, 1),
    (128, 28, 7),
    (512, 28, 5),
    (256, 28, 1),
    (256, 14, 11),
    (1024, 14, 7),
    (512, 14, 1),
    (512, 7, 5),
    (2048, 7, 4),
]


class BnOptions(c.Structure):
    _fields_ = [
        ("struct_size", c.c_size_t),
        ("mode", c.c_int32),
        ("layout", c.c_int32),
        ("dtype", c.c_int32),
        ("biased", c.c_int32),
        ("momentum", c.c_double),
        ("eps", c.c_double),
    ]


class Layer:
    """A context with one layer and its gamma and beta."""

    def __init__(self, library, gamma, beta, layout, threads):
        self.library, ga, check = library, library.ga, library.check
        config = Config()
        check(ga.ga_config_init(c.byref(config), c.c_size_t(c.sizeof(config))))
        config.num_threads = threads
        self.context = c.c_void_p()
        check(ga.ga_context_create(c.byref(config), c.byref(self.context)))
        optimizer = (c.c_char * 4096)()
        check(ga.ga_optimizer_init(optimizer, c.c_size_t(208), GA_OPTIMIZER_SGD, GA_FLAVOR_TORCH))
        group = c.c_int32()
        check(ga.ga_group_add(self.context, optimizer, c.byref(group)))
        ids = []
        for name, p in (("gamma", gamma), ("beta", beta)):
            shape, out = (c.c_int64 * 1)(p.numel()), c.c_int32()
            check(
                ga.ga_param_add(
                    self.context, group, name.encode(), c.c_void_p(p.data_ptr()), GA_F32, 1, shape,
                    None, c.byref(out),
                )
            )
            ids.append(out)
        options = BnOptions()
        check(ga.ga_bn_options_init(c.byref(options), c.c_size_t(c.sizeof(options)), 0))
        options.layout, options.momentum, options.eps = layout, MOMENTUM, EPS
        check(
            ga.ga_bn_add(
                self.context, b"layer", c.c_int64(gamma.numel()), ids[0], ids[1], c.byref(options),
                None,
            )
        )

    def forward(self, x, samples, positions, y):
        self.library.check(
            self.library.ga.ga_bn_forward(
                self.context, 0, c.c_void_p(x.data_ptr()), c.c_int64(samples),
                c.c_int64(positions), c.c_void_p(y.data_ptr()),
            )
        )

    def begin(self):
        self.library.check(
            self.library.ga.ga_micro_begin(self.context, c.c_int64(0), c.c_double(1), None)
        )

    def backward(self, x, dy, samples, positions, dx):
        self.library.check(
            self.library.ga.ga_bn_backward(
                self.context, 0, c.c_void_p(x.data_ptr()), c.c_void_p(dy.data_ptr()),
                c.c_int64(samples), c.c_int64(positions), c.c_void_p(dx.data_ptr()),
            )
        )

    def discard(self):
        self.library.check(self.library.ga.ga_discard(self.context))

    def destroy(self):
        self.library.ga.ga_context_destroy(self.context)


def measure_layer(library, options, channels, size, layout):
    """Returns the seconds of PyTorch's and the library's forward and backward passes in each round."""
    torch.manual_seed(1)
    form = torch.channels_last if layout == GA_BN_CHANNELS_LAST else torch.contiguous_format
    shape = (options.samples, channels, size, size)
    x = (torch.randn(shape) * 3 + 2).to(memory_format=form)
    dy = torch.randn(shape).to(memory_format=form)
    y, dx = torch.empty_like(x), torch.empty_like(x)
    gamma, beta = torch.rand(channels) + 0.5, torch.randn(channels)
    mean, variance = torch.zeros(channels), torch.ones(channels)
    layer = Layer(library, gamma, beta, layout, options.threads)
    out = {}

    def torch_forward():
        out["y"], out["mean"], out["rstd"] = torch.native_batch_norm(
            x, gamma, beta, mean, variance, True, MOMENTUM, EPS
        )

    def torch_backward():
        out["dx"], _, _ = torch.ops.aten.native_batch_norm_backward(
            dy, x, gamma, mean, variance, out["mean"], out["rstd"], True, EPS, [True, True, True]
        )

    def ga_forward():
        layer.forward(x, options.samples, size * size, y)

    def ga_backward():
        layer.backward(x, dy, options.samples, size * size, dx)

    # The sides take turns, and the other one is first each time; the first round is not counted. The
    # call that begins the micro-batch is not timed.
    t = {"torch_forward": [], "torch_backward": [], "forward": [], "backward": []}
    sides = [(torch_forward, torch_backward, "torch_"), (ga_forward, ga_backward, "")]
    for turn in range(1 + (7 if options.quick else 15)):
        for forward, backward, name in sides:
            layer.discard()
            start = time.perf_counter()
            forward()
            between = time.perf_counter()
            if not name:
                layer.begin()
            again = time.perf_counter()
            backward()
            end = time.perf_counter()
            if turn > 0:
                t[name + "forward"].append(between - start)
                t[name + "backward"].append(end - again)
        sides.reverse()
    for mine, theirs, name in ((y, out["y"], "y"), (dx, out["dx"], "dx")):
        error = float((mine - theirs).abs().max() / theirs.abs().max())
        if not error < 1e-4:
            raise RuntimeError(f"B4: {name} differs from PyTorch's by {error:.1e}")
    layer.destroy()
    return t


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", default=None)
    parser.add_argument("--samples", type=int, default=16)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    library = Library(options.folder)
    machine = f"PyTorch {torch.__version__}, threads: {torch.get_num_threads()}"
    print(machine)
    report = Report()
    for layout, name in ((GA_BN_CHANNELS_FIRST, "nchw"), (GA_BN_CHANNELS_LAST, "nhwc")):
        whole = {}
        for channels, size, count in LAYERS:
            t = measure_layer(library, options, channels, size, layout)
            for way in ("forward", "backward"):
                report.figure(
                    f"B4_{name}_{channels}x{size}_{way}",
                    ratios(t["torch_" + way], t[way]),
                    None,
                    f"PyTorch's time / the library's, {options.samples} samples",
                )
            for side, seconds in t.items():
                sums = whole.setdefault(side, [0.0] * len(seconds))
                whole[side] = [a + count * b for a, b in zip(sums, seconds)]
        for way in ("forward", "backward"):
            report.figure(
                f"B4_{name}_{way}",
                ratios(whole["torch_" + way], whole[way]),
                1.0,
                "all of ResNet-50's layers together",
            )
    if options.json:
        report.write(options.json, machine)


if __name__ == "__main__":
    sys.exit(main())
