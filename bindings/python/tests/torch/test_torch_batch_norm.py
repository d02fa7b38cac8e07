# SPDX-License-Identifier: Apache-2.0
"""Running statistics of convert_batchnorm: once a step in windows, torch's own everywhere else."""

import copy
import gc
import io
import weakref
from typing import Any

import gradaccum as ga
import gradaccum.torch as gt
import pytest
import torch
from torch.optim.swa_utils import AveragedModel, update_bn
from torch.utils.checkpoint import checkpoint


def converted() -> tuple[torch.nn.BatchNorm1d, gt.Optimizer, torch.nn.BatchNorm1d]:
    layer, twin = torch.nn.BatchNorm1d(3), torch.nn.BatchNorm1d(3)
    optimizer = gt.SGD(layer.parameters(), lr=0.0)
    assert gt.convert_batchnorm(layer, optimizer) == 1
    return layer, optimizer, twin


def alike(layer: torch.nn.BatchNorm1d, twin: torch.nn.BatchNorm1d) -> None:
    for a, b in zip(layer.buffers(), twin.buffers(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_copies_of_a_converted_model() -> None:
    layer, optimizer, twin = converted()
    twin(x := torch.randn(8, 3) * 3 + 1)
    optimizer.backward(layer(x).sum())
    optimizer.step()
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for other in (copy.deepcopy(layer), torch.load(file, weights_only=False)):
        other.eval()
        assert torch.allclose(other(x), twin.eval()(x), atol=1e-6)
        other.train()
        other(x * 100)  # known to nobody
    optimizer.backward(layer(x).sum())
    optimizer.step()
    twin.train()(x)
    alike(layer, twin)
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    layer(x)


def test_several_forwards_in_a_micro_batch() -> None:
    layer, optimizer, twin = converted()
    x, y = torch.randn(8, 3), torch.randn(5, 3) * 4 + 2
    twin(torch.cat([x, y]))
    losses = [layer(x).sum(), layer(y).sum()]
    with pytest.raises(ValueError, match="more than 1 value"):
        layer(x[:1])
    for loss in losses:
        optimizer.backward(loss)
    optimizer.step()
    alike(layer, twin)
    twin(torch.cat([x, y]))
    optimizer.backward(layer(x).sum() + layer(y).sum())
    optimizer.step()
    alike(layer, twin)


def test_statistics_that_are_loaded_later_count() -> None:
    layer, optimizer, twin = converted()
    for other in (layer, twin):
        other.load_state_dict({**other.state_dict(), "running_mean": torch.full((3,), 50.0)})
    twin(x := torch.randn(8, 3))
    optimizer.backward(layer(x).sum())
    optimizer.step()
    alike(layer, twin)
    layer.momentum = 0.5
    with pytest.raises(RuntimeError, match="momentum"):
        optimizer.backward(layer(x).sum())


def test_layers_that_cannot_be_converted_leave_the_others() -> None:
    net = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.BatchNorm1d(3, momentum=None))
    with pytest.raises(ValueError, match="momentum None"):
        gt.convert_batchnorm(net, optimizer := gt.SGD(net.parameters()))
    assert not optimizer._layers
    with pytest.raises(ValueError, match="SyncBatchNorm"):
        gt.convert_batchnorm(torch.nn.SyncBatchNorm(3), optimizer)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputed_layer_counts_once(reentrant: bool) -> None:
    layer, optimizer, twin = converted()
    x = torch.randn(4, 3, requires_grad=True)
    twin(x)
    out: Any = checkpoint(layer, x, use_reentrant=reentrant)
    optimizer.backward(out.sum())
    optimizer.step()
    alike(layer, twin)


# ---- Outside of windows


@pytest.mark.parametrize("averaged", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_update_bn(averaged: bool, inside: bool) -> None:
    layer, optimizer, twin = converted()
    x = torch.randn(6, 4, 3) * 3 + 1
    if inside:  # of a window, whose statistics then move what update_bn has written
        optimizer.backward(layer(x[5]).sum())
    models: list[Any] = [AveragedModel(layer), AveragedModel(twin)] if averaged else [layer, twin]
    for model in models:
        update_bn(x[:3], model)
    assert (models[1].module if averaged else twin).num_batches_tracked == 3
    alike(*[model.module if averaged else model for model in models])
    for part in x[3:5]:
        optimizer.backward(layer(part).sum())
    optimizer.step()
    twin(torch.cat([*x[3:5], x[5]] if inside else [*x[3:5]]))
    alike(layer, twin)
    assert layer.num_batches_tracked == (1 if averaged else 4)


def test_statistics_that_are_written_in_a_window_move_on() -> None:
    layer, optimizer, twin = converted()
    x = torch.randn(8, 3)
    optimizer.backward(layer(x).sum())
    for other in (layer, twin):
        other.running_mean.fill_(50.0)  # type: ignore[union-attr]
    optimizer.step()
    twin(x)
    alike(layer, twin)
    optimizer.backward(layer(x).sum())
    for other in (layer, twin):
        other.running_var.fill_(7.0)  # type: ignore[union-attr]
    optimizer.discard()
    alike(layer, twin)
    optimizer.backward(layer(x).sum())
    optimizer.step()
    twin(x)
    alike(layer, twin)


@pytest.mark.filterwarnings("error")
def test_statistics_that_are_loaded_after_a_forward_stand() -> None:
    layer, optimizer, twin = converted()
    state = copy.deepcopy(layer.state_dict())
    layer(torch.randn(8, 3) * 100)
    layer.load_state_dict(state)
    twin(x := torch.randn(8, 3))
    optimizer.backward(layer(x).sum())
    optimizer.step()
    alike(layer, twin)


@pytest.mark.filterwarnings("error")
def test_a_layer_outlives_its_optimizer() -> None:
    layer, optimizer, twin = converted()
    del optimizer
    gc.collect()
    for _ in range(3):
        twin(x := torch.randn(8, 3))
        layer(x)
    alike(layer, twin)


@pytest.mark.parametrize("module", [torch.optim, gt])
def test_another_optimizer_trains_the_layer(module: Any) -> None:
    layer, optimizer, twin = converted()
    other = module.SGD(layer.parameters(), lr=0.1)
    for model, one in ((layer, other), (twin, torch.optim.SGD(twin.parameters(), lr=0.1))):
        torch.manual_seed(0)
        for step in range(4):
            one.zero_grad()
            x = torch.randn(8, 3) * 2 + 1
            if model is layer and step == 1:
                with pytest.warns(UserWarning, match='statistics of "batch_norm" move with each forward'):
                    loss = model(x).square().sum()
            else:
                loss = model(x).square().sum()
            loss.backward()
            one.step()
    alike(layer, twin)
    layer.zero_grad()
    for part in (x := torch.randn(8, 3)).split(4):  # its own optimizer again
        optimizer.backward(layer(part).sum())
    optimizer.step()
    assert layer.num_batches_tracked == 6  # torch moved them in the first forward, the step in the second
    optimizer.backward(layer(x[:4]).sum())
    optimizer.backward(layer(x[4:]).sum())
    optimizer.step()
    assert layer.num_batches_tracked == 7


@pytest.mark.filterwarnings("error")
def test_a_layer_goes_to_the_optimizer_of_the_last_call() -> None:
    layer, first, twin = converted()
    first.backward(layer(x := torch.randn(8, 3)).sum())
    first.step()
    twin(x)
    second = gt.SGD(layer.parameters(), lr=0.0)
    assert gt.convert_batchnorm(layer, second) == 1 and len(first._layers) == 0
    for _ in range(2):
        twin(x := torch.randn(8, 3) * 2)
        for part in x.split([5, 3]):
            second.backward(layer(part).sum(), weight=len(part))
        second.step()
        alike(layer, twin)
    loaded = copy.deepcopy(layer)
    third = gt.SGD(loaded.parameters(), lr=0.0)
    assert gt.convert_batchnorm(loaded, third) == 1
    third.backward(loaded(x).sum())
    third.step()
    twin(x)
    alike(loaded, twin)


@pytest.mark.filterwarnings("error")
def test_a_discriminator_sees_the_step_of_its_generator() -> None:
    """Forwards that no micro-batch of its own follows at once are no sign of another optimizer."""
    layer, optimizer, _ = converted()
    source = torch.nn.Parameter(torch.randn(8, 3))
    other = torch.optim.SGD([source], lr=0.1)
    for _ in range(3):
        real, fake = torch.randn(8, 3), source.detach().clone()
        optimizer.backward(layer(real).sum() + layer(fake).sum())
        optimizer.step()
        layer(source).square().sum().backward()
        other.step()
        other.zero_grad()
        optimizer.zero_grad()
    assert layer.num_batches_tracked == 3


def test_a_forward_that_raises_leaves_the_layer_as_it_was() -> None:
    layer, optimizer, _ = converted()
    with pytest.raises(ValueError):
        layer(torch.ones(1, 3))
    with pytest.raises(Exception):
        layer(torch.ones(4, 5))
    assert layer.track_running_stats
    layer.track_running_stats = False  # by the program
    layer(torch.ones(4, 3))
    assert not layer.track_running_stats


def test_a_compiled_model() -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4), torch.nn.ReLU()).double()
    twin = copy.deepcopy(net)
    optimizer = gt.SGD(net.parameters(), lr=0.0)
    gt.convert_batchnorm(net, optimizer)
    fast: Any = torch.compile(net, backend="aot_eager")
    for _ in range(3):
        twin(x := torch.randn(12, 5).double())
        for part in x.split(4):
            optimizer.backward(fast(part).mean(), weight=4)
        optimizer.step()
        alike(net[1], twin[1])  # type: ignore[arg-type]
    for model in (fast, twin):
        update_bn([x, x + 1], model)
    alike(net[1], twin[1])  # type: ignore[arg-type]
    del optimizer
    gc.collect()
    for model in (fast, twin):
        model(x)
    alike(net[1], twin[1])  # type: ignore[arg-type]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputed_layer_after_an_update_ahead(reentrant: bool) -> None:
    """The last layer is updated before the first one is computed again."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 4)).double()
    twin = copy.deepcopy(net)
    options = ga.Config(eager=True, nonfinite=ga.Nonfinite.IGNORE)
    optimizer = gt.SGD(net.parameters(), lr=0.0, accum_steps=2, config=options)
    gt.convert_batchnorm(net, optimizer)
    for _ in range(3):
        twin(x := torch.randn(12, 5).double())
        for part in x.split(6):
            part.requires_grad_()
            out: Any = checkpoint(net[:1], part, use_reentrant=reentrant)
            optimizer.backward(net[1](out).sum(), weight=6)
        assert optimizer.context.window.state == ga.WindowState.FULL
        optimizer.step()
        alike(net[0], twin[0])  # type: ignore[arg-type]
