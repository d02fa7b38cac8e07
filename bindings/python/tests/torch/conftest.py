# SPDX-License-Identifier: Apache-2.0
"""A small network, and the same data for torch and for the library.

With GA_TEST_DEVICE=cuda in the environment, what the tests make is on the GPU: tests/gpu/run does this with
test_torch_optimizers.py and test_torch_windows.py, which are the library's own promise and say nothing of the CPU.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

SIZES = (5, 2, 1)  # of the micro-batches of a window: uneven on purpose
DEVICE = os.environ.get("GA_TEST_DEVICE", "cpu")
MISSING = DEVICE == "cuda" and not torch.cuda.is_available()

if DEVICE == "cuda" and not MISSING:
    torch.set_default_device(DEVICE)
    torch.backends.cudnn.allow_tf32 = False  # whose products have 10 bits
    torch.backends.cudnn.deterministic = True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if MISSING:
        reason = f"PyTorch {torch.__version__} finds no GPU that it can use"
        for item in items:
            item.add_marker(pytest.mark.skip(reason=reason))


class Task:
    """Batches of a regression, each to be seen whole or in micro-batches, and networks that begin alike."""

    def __init__(self, dtype: torch.dtype = torch.float64, bias: bool = True) -> None:
        self.dtype = dtype
        self.bias = bias
        generator = torch.Generator("cpu").manual_seed(7)
        self.x, self.y = (
            torch.randn(40, sum(SIZES), n, generator=generator, dtype=torch.float64, device="cpu").to(DEVICE)
            for n in (5, 3)
        )

    def net(self) -> torch.nn.Sequential:
        torch.manual_seed(3)
        return torch.nn.Sequential(
            torch.nn.Linear(5, 7, bias=self.bias), torch.nn.Tanh(), torch.nn.Linear(7, 3, bias=self.bias)
        ).to(self.dtype)

    def loss(self, net: torch.nn.Module, x: Tensor, y: Tensor) -> Tensor:
        out = net(x.to(self.dtype))
        return torch.nn.functional.mse_loss(out.double(), y)

    def whole(self, net: torch.nn.Module, step: int) -> Tensor:
        return self.loss(net, self.x[step], self.y[step])

    def parts(
        self, net: torch.nn.Module, step: int, sizes: Sequence[int] = SIZES
    ) -> Iterator[tuple[Tensor, int]]:
        """The losses of a batch's micro-batches, each with its size."""
        at = 0
        for size in sizes:
            yield self.loss(net, self.x[step][at : at + size], self.y[step][at : at + size]), size
            at += size


def train(task: Task, make: Callable[[Any], torch.optim.Optimizer], steps: int = 8) -> torch.nn.Sequential:
    """A network that torch trains, one whole batch a step."""
    net = task.net()
    optimizer = make(net.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        task.whole(net, step).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return net


def close(a: torch.nn.Module, b: torch.nn.Module, tolerance: float) -> None:
    for left, right in zip(a.parameters(), b.parameters(), strict=True):
        scale = max(1.0, float(left.detach().abs().max()))
        difference = float((left.detach().double() - right.detach().double()).abs().max())
        assert difference <= tolerance * scale, f"{difference} of {scale}"


@pytest.fixture
def task() -> Task:
    return Task()
