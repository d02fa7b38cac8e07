#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""gradaccum.torch on a GPU: windows against torch's own, on other streams, and in a graph.

    torch_adapter.py [--device cuda]

With --device cpu, what needs no stream runs. Prints a line for each case as GoogleTest does. Exits with 77, and the
reason, if something is missing.
"""

import argparse
import sys
import traceback

SKIPPED = 77

try:
    import gradaccum.torch as gt
    import torch
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(SKIPPED)

SIZES = (5, 2, 1)  # of the micro-batches of a window: uneven on purpose
WINDOWS = 6


def network(device):
    torch.manual_seed(3)
    layers = torch.nn.Linear(31, 70), torch.nn.Tanh(), torch.nn.Linear(70, 3)
    return torch.nn.Sequential(*layers).to(device)


def batches(device):
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(WINDOWS, sum(SIZES), 31, generator=generator)
    y = torch.randn(WINDOWS, sum(SIZES), 3, generator=generator)
    return x.to(device), y.to(device)


def window(net, optimizer, x, y):
    """One window of uneven micro-batches, through the adapter."""
    begin = 0
    for size in SIZES:
        loss = torch.nn.functional.mse_loss(net(x[begin : begin + size]), y[begin : begin + size])
        optimizer.backward(loss, weight=size)
        begin += size
    optimizer.step()


def trained(device, make=lambda params: gt.AdamW(params, lr=0.01)):
    net = network(device)
    optimizer = make(net.parameters())
    for x, y in zip(*batches(device), strict=True):
        window(net, optimizer, x, y)
    return parameters(net)


def parameters(net):
    return [p.detach().cpu().clone() for p in net.parameters()]


def same(left, right):
    for a, b in zip(left, right, strict=True):
        assert torch.equal(a, b), f"the bits differ by up to {float((a - b).abs().max())}"


def close(left, right, tolerance):
    for a, b in zip(left, right, strict=True):
        difference = float((a.double() - b.double()).abs().max())
        assert difference <= tolerance, f"{difference} is more than {tolerance}"


def whole_batches(device):
    net = network(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for x, y in zip(*batches(device), strict=True):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
    # Adam divides by the size of gradients: what rounding moves, in f32, is a share of the step.
    close(trained(device), parameters(net), 1e-4)


def the_same_twice(device):
    same(trained(device), trained(device))


def on_another_stream(device):
    want = trained(device)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        same(trained(device), want)


def on_changing_streams(device):
    want = trained(device)
    net, streams = network(device), [torch.cuda.Stream() for _ in range(3)]
    optimizer = gt.AdamW(net.parameters(), lr=0.01)
    x, y = batches(device)
    for k in range(WINDOWS):
        stream = streams[k % 3]
        stream.wait_stream(streams[(k - 1) % 3] if k else torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            window(net, optimizer, x[k], y[k])
    torch.cuda.synchronize()
    same(parameters(net), want)


def in_a_graph(device):
    """A window is captured after the first one, and replayed with the batches of the others."""
    want = trained(device)
    net = network(device)
    optimizer = gt.AdamW(net.parameters(), lr=0.01)
    x, y = batches(device)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    given = x[0].clone(), y[0].clone()
    with torch.cuda.stream(stream):
        window(net, optimizer, *given)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        window(net, optimizer, *given)
    for k in range(1, WINDOWS):
        given[0].copy_(x[k])
        given[1].copy_(y[k])
        graph.replay()
    torch.cuda.synchronize()
    same(parameters(net), want)


def memory_that_is_reused(device):
    """Gradients are freed as soon as the library has them, while it still reads them."""
    want = trained(device)
    net = network(device)
    optimizer = gt.AdamW(net.parameters(), lr=0.01)
    x, y = batches(device)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for k in range(WINDOWS):
            window(net, optimizer, x[k], y[k])
            for size in (70 * 31, 70, 3 * 70, 3):
                torch.full((size,), float("nan"), device=device)
    torch.cuda.synchronize()
    same(parameters(net), want)


ANYWHERE = (whole_batches, the_same_twice)
ON_STREAMS = (on_another_stream, on_changing_streams, in_a_graph, memory_that_is_reused)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda")
    device = parser.parse_args().device
    if device == "cuda" and not torch.cuda.is_available():
        print(f"skipped: PyTorch {torch.__version__} finds no GPU that it can use")
        return SKIPPED
    failed = 0
    for case in (*ANYWHERE, *(ON_STREAMS if device == "cuda" else ())):
        print(f"[ RUN      ] {case.__name__}", flush=True)
        try:
            case(device)
            print(f"[       OK ] {case.__name__}", flush=True)
        except Exception:
            traceback.print_exc(file=sys.stdout)
            print(f"[  FAILED  ] {case.__name__}", flush=True)
            failed += 1
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
