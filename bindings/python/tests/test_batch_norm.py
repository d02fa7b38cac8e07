# SPDX-License-Identifier: Apache-2.0
"""Batch normalisation against numpy in float64."""

import dataclasses

import gradaccum as ga
import numpy as np
import pytest
from conftest import Array


def layer(options: ga.BatchNormOptions) -> tuple[ga.Context, ga.BatchNorm, Array, Array]:
    context = ga.Context()
    group = context.add_group(ga.Optimizer(ga.OptimizerKind.SGD, lr=1.0))
    gamma, beta = np.ones(3, np.float32), np.zeros(3, np.float32)
    params = [context.add_param(group, name, p) for name, p in (("gamma", gamma), ("beta", beta))]
    return context, context.add_batch_norm("bn", 3, *params, options), gamma, beta


def test_a_layer_is_that_of_one_batch() -> None:
    context, bn, gamma, beta = layer(ga.BatchNormOptions(mode=ga.BnMode.WINDOW))
    random = np.random.default_rng(3)
    xs = [random.standard_normal((n, 3, 2, 2)).astype(np.float32) for n in (2, 3)]
    dys = [random.standard_normal(x.shape).astype(np.float32) for x in xs]
    ys, dxs = [np.empty_like(x) for x in xs], [np.empty_like(x) for x in xs]
    for x in xs:
        bn.accumulate(x)
    bn.finalize()
    for x, y in zip(xs, ys, strict=True):
        bn.forward(x, y)
    for k, (x, dy) in enumerate(zip(xs, dys, strict=True)):
        with context.micro_batch(len(x), index=k):
            bn.backward_accumulate(x, dy)
    for k, (x, dy, dx) in enumerate(zip(xs, dys, dxs, strict=True)):
        with context.micro_batch(len(x), index=k):
            bn.backward(x, dy, dx)
    mean_now, variance_now, count = bn.statistics()
    assert context.step().applied

    x = np.concatenate(xs).astype(np.float64)
    axes = (0, 2, 3)
    mean, variance = x.mean(axes), x.var(axes)
    hat = (x - mean[:, None, None]) / np.sqrt(variance + 1e-5)[:, None, None]
    np.testing.assert_allclose(np.concatenate(ys), hat, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(np.from_dlpack(mean_now), mean, rtol=1e-6, atol=1e-7)  # type: ignore[arg-type]
    np.testing.assert_allclose(np.from_dlpack(variance_now), variance, rtol=1e-6)  # type: ignore[arg-type]
    assert count == 20
    moved = bn.running()
    np.testing.assert_allclose(np.from_dlpack(moved[0]), 0.1 * mean, rtol=1e-5, atol=1e-7)  # type: ignore[arg-type]
    unbiased = 0.9 + 0.1 * variance * 20 / 19
    np.testing.assert_allclose(np.from_dlpack(moved[1]), unbiased, rtol=1e-5)  # type: ignore[arg-type]
    assert moved[2] == 1
    # Each dy is of a mean over its micro-batch, so the batch's is weighted by the sizes.
    weights = [np.full(dy.shape, len(x) / 5) for x, dy in zip(xs, dys, strict=True)]
    dy = np.concatenate([w * d for w, d in zip(weights, dys, strict=True)])
    np.testing.assert_allclose(beta, -dy.sum(axes), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(gamma, 1 - (dy * hat).sum(axes), rtol=1e-4, atol=1e-5)


def test_statistics_and_inference() -> None:
    context, bn, _, _ = layer(ga.BatchNormOptions(flavor=ga.Flavor.KERAS))
    x = np.random.default_rng(4).standard_normal((4, 5, 3)).astype(np.float32)  # channels last
    y = np.empty_like(x)
    bn.set_running(np.full(3, 2.0), np.full(3, 4.0), 7)
    assert bn.running()[2] == 7
    bn.infer(x, y)
    np.testing.assert_allclose(y, (x - 2) / np.sqrt(4 + 1e-3), rtol=1e-5)
    mean, variance = x.mean((0, 1)), x.var((0, 1))
    bn.accumulate_stats(20, mean, variance)
    bn.set_frozen
    bn.forward(x, y)
    np.testing.assert_allclose(y, (x - mean) / np.sqrt(variance + 1e-3), rtol=1e-4, atol=1e-5)
    context.discard()
    bn.set_frozen(True)
    bn.forward(x, y)
    np.testing.assert_allclose(y, (x - 2) / np.sqrt(4 + 1e-3), rtol=1e-5)
    assert repr(bn) == '<gradaccum.BatchNorm "bn" [3]>'


def test_what_a_layer_refuses() -> None:
    context, bn, _, _ = layer(ga.BatchNormOptions())
    x = np.zeros((2, 3, 4), np.float32)
    with pytest.raises(ValueError, match="expected 3 channels at axis 1"):
        bn.forward(np.zeros((2, 4, 3), np.float32), x)
    with pytest.raises(ValueError, match='y of layer "bn"'):
        bn.forward(x, np.zeros((2, 3, 5), np.float32))
    with pytest.raises(TypeError, match="float64"):
        bn.forward(x.astype(np.float64), x)
    with pytest.raises(ga.Error):
        bn.finalize()
    with pytest.raises(ValueError, match="expected 3 channels"):
        bn.accumulate(np.zeros(3, np.float32))
    other = ga.Context()
    group = other.add_group(ga.Optimizer(ga.OptimizerKind.SGD))
    gamma = other.add_param(group, "g", np.ones(3, np.float32))
    with pytest.raises(ValueError, match="another context"):
        context.add_batch_norm("more", 3, gamma)
    plain = context.add_batch_norm("plain", 3)
    plain.forward(x, np.empty_like(x))


def test_layers_are_described_and_found_by_name() -> None:
    context = ga.Context()
    group = context.add_group(ga.Optimizer(ga.OptimizerKind.SGD))
    ones, zeros = np.ones(3, np.float32), np.zeros(3, np.float32)
    gamma, beta = (context.add_param(group, n, p) for n, p in (("gamma", ones), ("beta", zeros)))
    assert context.batch_norms == []
    options = ga.BatchNormOptions(
        mode=ga.BnMode.CUMULATIVE, layout=ga.BnLayout.CHANNELS_LAST, dtype=ga.Dtype.F64, biased=True,
        momentum=0.25, eps=0.5,
    )  # fmt: skip
    first = context.add_batch_norm("first", 3, gamma, beta, options)
    second = context.add_batch_norm("second", 2)
    expected = ga.BatchNormInfo(
        "first", 3, gamma.id, beta.id, ga.BnMode.CUMULATIVE, ga.BnLayout.CHANNELS_LAST, ga.Dtype.F64,
        biased=True, frozen=False, momentum=0.25, eps=0.5,
    )  # fmt: skip
    assert first.info == expected
    assert second.info == ga.BatchNormInfo(
        "second", 2, -1, -1, ga.BnMode.MICRO, ga.BnLayout.CHANNELS_FIRST, ga.Dtype.F32,
        biased=False, frozen=False, momentum=0.1, eps=1e-5,
    )  # fmt: skip
    assert first.info.biased is True and first.info.frozen is False
    first.set_frozen(True)
    assert first.info == dataclasses.replace(expected, frozen=True)
    first.set_frozen(False)

    assert context.batch_norms == [first, second] and first != second
    found = context.find_batch_norm("first")
    assert found == first and len({found, first}) == 1 and repr(found) == repr(first)
    assert found != ga.Context().add_batch_norm("first", 3)
    # A layer that was found knows what its tensors are.
    x, y = np.array([[1.0, 2, 3], [3, 4, 5]]), np.empty((2, 3))
    found.forward(x, y)
    np.testing.assert_allclose(y, (x - x.mean(0)) / np.sqrt(1.5), rtol=1e-12)
    with pytest.raises(TypeError, match="float32"):
        found.forward(x.astype(np.float32), y)
    with pytest.raises(ValueError, match="expected 3 channels at axis 1"):
        found.forward(x[:, :2].copy(), y)
    for absent in ("third", "gamma", ""):
        with pytest.raises(ga.Error, match=f'the context has no layer "{absent}"') as error:
            context.find_batch_norm(absent)
        assert error.value.status is ga.Status.INVALID_ARGUMENT
