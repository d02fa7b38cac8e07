# SPDX-License-Identifier: Apache-2.0
"""Windows and steps, against formulas in float64 that are written from the papers."""

import math

import gradaccum as ga
import numpy as np
import pytest
from conftest import Array, Net


def adamw(p: Array, gradients: list[Array], lr: float, decay: float) -> Array:
    """Loshchilov and Hutter 2019, algorithm 2."""
    p, m, v = p.astype(np.float64), np.zeros_like(p, np.float64), np.zeros_like(p, np.float64)
    for t, g in enumerate(gradients, 1):
        m = 0.9 * m + 0.1 * g
        v = 0.999 * v + 0.001 * g * g
        p = p * (1 - lr * decay)
        p = p - lr * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
    return p


def test_a_window_is_one_batch() -> None:
    net = Net(ga.Optimizer(ga.OptimizerKind.ADAMW, lr=0.01, weight_decay=0.1))
    start = [net.w.copy(), net.b.copy()]
    means: list[list[Array]] = [[], []]
    for sizes in ([3, 5, 2], [4, 4, 1], [7]):
        window = [net.gradients() for _ in sizes]
        for size, gradients in zip(sizes, window, strict=True):
            net.context.accumulate(gradients, size)
        result = net.context.step()
        assert result.applied and result.outcome is ga.StepOutcome.APPLIED
        assert (result.micro_batches, result.weight) == (len(sizes), sum(sizes))
        for i in range(2):
            total = sum(n * g[i].astype(np.float64) for n, g in zip(sizes, window, strict=True))
            means[i].append(total / sum(sizes))
    norm = math.sqrt(sum(float((mean[-1] ** 2).sum()) for mean in means))
    assert net.context.step_result().norm == pytest.approx(norm, rel=1e-5)
    for p, first, mean in zip((net.w, net.b), start, means, strict=True):
        np.testing.assert_allclose(p, adamw(first, mean, 0.01, 0.1), rtol=2e-5, atol=2e-6)


def test_a_step_with_nan_changes_nothing(net: Net) -> None:
    before = net.w.copy()
    gradients = net.gradients()
    gradients[1][2] = np.nan
    net.context.accumulate(gradients)
    result = net.context.step()
    assert result.outcome is ga.StepOutcome.SKIPPED_NONFINITE and not result.applied
    assert result.steps == 0 and result.windows == 1 and result.skipped == 1
    np.testing.assert_array_equal(net.w, before)


def test_an_empty_window_is_skipped(net: Net) -> None:
    assert net.context.step().outcome is ga.StepOutcome.SKIPPED_EMPTY


def test_none_is_no_gradient(net: Net) -> None:
    w, b = net.w.copy(), net.b.copy()
    dw, db = net.gradients()
    net.context.accumulate([dw, None])
    net.context.step()
    np.testing.assert_allclose(net.w, w - np.float32(0.5) * dw, rtol=1e-6)
    np.testing.assert_array_equal(net.b, b)


def test_a_full_window_takes_no_more() -> None:
    net = Net(config=ga.Config(accum_steps=2))
    for _ in range(2):
        net.context.accumulate(net.gradients())
    assert net.context.window.state is ga.WindowState.FULL
    with pytest.raises(ga.Error) as error:
        net.context.accumulate(net.gradients())
    assert error.value.status is ga.Status.WINDOW_FULL
    assert net.context.step().micro_batches == 2
    net.context.set_accum_schedule([(0, 1), (1, 3)])
    assert net.context.window.accum_steps == 3
    net.context.set_accum_schedule([])
    net.context.set_accum_steps(5)
    assert net.context.window.accum_steps == 5
    net.context.set_steps(40)
    assert net.context.window.steps == 40


def test_the_last_micro_batch_ends_a_window(net: Net) -> None:
    net.context.accumulate(net.gradients(), 1, ga.MicroOptions(flags=ga.MicroFlags.LAST))
    assert net.context.window.state is ga.WindowState.FULL


def test_discard_drops_the_window(net: Net) -> None:
    before = net.w.copy()
    net.context.accumulate(net.gradients())
    net.context.discard()
    assert net.context.window.micro_batches == 0
    net.context.step()
    np.testing.assert_array_equal(net.w, before)


def test_nonfinite_fails_where_it_is_to_fail() -> None:
    net = Net(config=ga.Config(nonfinite=ga.Nonfinite.FAIL))
    dw, db = net.gradients()
    dw[0, 0] = np.inf
    net.context.accumulate([dw, db])
    with pytest.raises(ga.Error) as error:
        net.context.step()
    assert error.value.status is ga.Status.NONFINITE
    net.context.discard()
    assert net.context.step().outcome is ga.StepOutcome.SKIPPED_EMPTY


def test_learning_rates_follow_schedules(net: Net) -> None:
    net.group.set_schedule(ga.Schedule(ga.ScheduleKind.TABLE, table=[0.25, 0.125]))
    for lr in (0.25, 0.125, 0.125):
        assert net.group.lr == lr
        net.context.accumulate(net.gradients())
        assert net.context.step().lr == lr
        assert net.group.last_lr == lr
    net.group.set_schedule(None)
    net.group.lr = 3
    assert net.group.lr == 3 and net.group.optimizer.lr == 3
    net.group.set_weight_decay(0.5)
    assert net.group.optimizer.weight_decay == 0.5


def test_clip_bounds_the_norm(net: Net) -> None:
    net.context.set_clip(ga.Clip(scope=ga.ClipScope.GLOBAL, max_norm=0.1))
    before = net.w.copy(), net.b.copy()
    net.context.accumulate(net.gradients())
    assert net.context.step().clip_factor < 1
    moved = sum(((a - b) ** 2).sum() for a, b in zip(before, (net.w, net.b), strict=True))
    assert math.sqrt(moved) == pytest.approx(0.05, rel=1e-4)  # lr * 0.1
    net.context.set_clip(None)
    net.group.set_clip(ga.Clip(scope=ga.ClipScope.GLOBAL, max_norm=1e-3))
    net.context.accumulate(net.gradients())
    assert net.context.step().clip_factor < 1e-2
    net.group.set_clip(None)


def test_clips_are_read_back(net: Net) -> None:
    other = net.context.add_group(ga.Optimizer(ga.OptimizerKind.SGD))
    assert net.context.clip == net.group.clip == ga.Clip()
    clip = ga.Clip(scope=ga.ClipScope.GLOBAL, max_norm=2, flavor=ga.Flavor.KERAS, when=ga.ClipWhen.MICRO)
    own = ga.Clip(
        scope=ga.ClipScope.AGC, max_value=0.5, agc_factor=0.25, agc_eps=0.125,
        agc_units=ga.AgcUnits.TORCH,
    )  # fmt: skip
    net.context.set_clip(clip)
    assert net.context.clip == net.group.clip == other.clip == clip
    net.group.set_clip(own)
    assert (net.context.clip, net.group.clip, other.clip) == (clip, own, clip)
    loaded = Net()
    loaded.context.add_group(ga.Optimizer(ga.OptimizerKind.SGD))
    loaded.context.load(net.context.save_bytes(), ga.StateOptions(settings=ga.Settings.TAKE))
    assert [group.clip for group in loaded.context.groups] == [own, clip]
    assert loaded.context.clip == clip
    net.context.set_clip(None)
    assert (net.context.clip, net.group.clip, other.clip) == (ga.Clip(), own, ga.Clip())
    net.group.set_clip(None)
    assert net.group.clip == ga.Clip()


def test_a_loss_scaler_backs_off(net: Net) -> None:
    net.context.set_loss_scaler(ga.LossScaler(initial_scale=8))
    assert net.context.loss_scale == 8
    dw, db = net.gradients()
    w = net.w.copy()
    net.context.accumulate([8 * dw, 8 * db])
    net.context.step()
    np.testing.assert_allclose(net.w, w - np.float32(0.5) * dw, rtol=1e-5)
    dw[0, 0] = np.inf
    net.context.accumulate([dw, db])
    net.context.step()
    assert net.context.loss_scale == 4
    net.context.set_loss_scaler(None)
    assert net.context.loss_scale == 1
    with pytest.raises(ga.Error):
        net.context.set_loss_scaler(ga.LossScaler(growth_factor=0.5))


def test_ema_is_kept_and_swapped(net: Net) -> None:
    net.context.set_ema(ga.Ema(decay=0.75))
    average = None
    for _ in range(3):
        net.context.accumulate(net.gradients())
        net.context.step()
        average = net.w.copy() if average is None else average + np.float32(0.25) * (net.w - average)
    now = net.w.copy()
    np.testing.assert_allclose(np.from_dlpack(net.params[0].ema()), average, rtol=1e-6)  # type: ignore[arg-type]
    out = np.empty((3, 4), np.float64)
    assert net.params[0].ema(out) is out
    with net.context.ema_swapped():
        np.testing.assert_allclose(net.w, average, rtol=1e-6)  # type: ignore[arg-type]
        with pytest.raises(ga.Error):
            net.context.accumulate(net.gradients())
    np.testing.assert_array_equal(net.w, now)


def test_an_optimizer_of_the_program(net: Net) -> None:
    own = net.context.add_group(ga.Optimizer(ga.OptimizerKind.EXTERNAL))
    e = np.ones(5, np.float32)
    param = net.context.add_param(own, "e", e)
    de = np.arange(5, dtype=np.float32)
    for weight in (1, 3):
        net.context.accumulate([*net.gradients(), weight * de], weight)
    net.context.step()
    gradient = np.from_dlpack(param.gradient())  # type: ignore[arg-type]
    np.testing.assert_allclose(gradient, 2.5 * de)
    assert not gradient.flags.writeable
    net.context.close()
    np.testing.assert_allclose(gradient, 2.5 * de)  # a view keeps the memory
    with pytest.raises(ga.Error, match="closed"):
        param.gradient()


def test_maxima_in_place_of_sums(net: Net) -> None:
    own = net.context.add_group(ga.Optimizer(ga.OptimizerKind.EXTERNAL))
    options = ga.ParamOptions(reduce=ga.Reduce.MAX)
    param = net.context.add_param(own, "amax", np.zeros(2, np.float32), options=options)
    for weight, amax in ((5, [-1, -4]), (2, [-3, -2])):
        net.context.accumulate([*net.gradients(), np.array(amax, np.float32)], weight)
    net.context.step()
    np.testing.assert_array_equal(np.from_dlpack(param.gradient()), [-1, -2])  # type: ignore[arg-type]


def test_groups_and_parameters_are_found(net: Net) -> None:
    assert net.context.groups == [net.group]
    assert net.context.find_param("b") is net.params[1]
    with pytest.raises(ga.Error, match="nothing"):
        net.context.find_param("nothing")
    info = net.params[0].info
    assert (info.name, info.shape, info.dtype, info.slot) == ("w", (3, 4), ga.Dtype.F32, 0)
    assert info.data == net.w.ctypes.data
    assert net.params[1].slot == 1 and net.context.slot_count == 2
    net.params[0].set_frozen(True)
    assert net.params[0].info.frozen
    net.params[1].set_lr_scale(0.25)
    net.params[1].set_weight_decay_scale(0)
    assert (net.params[1].info.lr_scale, net.params[1].info.weight_decay_scale) == (0.25, 0)
    net.group.set_frozen(False)
    assert not net.params[0].info.frozen


def test_a_removed_parameter_is_let_go(net: Net) -> None:
    net.params[0].remove()
    assert net.context.params == [net.params[1]]
    dw, db = net.gradients()
    before = net.w.copy(), net.b.copy()
    net.context.accumulate([dw, db])
    net.context.step()
    np.testing.assert_array_equal(net.w, before[0])
    np.testing.assert_allclose(net.b, before[1] - np.float32(0.5) * db, rtol=1e-6)
    with pytest.raises(ga.Error):
        net.params[0].changed()


def test_a_parameter_moves(net: Net) -> None:
    moved = net.w.copy()
    net.params[0].bind(moved)
    net.params[0].changed()
    before = net.w.copy()
    net.context.accumulate(net.gradients())
    net.context.step()
    np.testing.assert_array_equal(net.w, before)
    assert (moved != before).all()
    with pytest.raises(ValueError, match=r"shape \[4, 3\]"):
        net.params[0].bind(np.zeros((4, 3), np.float32))


def test_a_flat_block_has_one_gradient() -> None:
    context = ga.Context()
    group = context.add_group(ga.Optimizer(ga.OptimizerKind.SGD, lr=1.0))
    block = np.arange(10, dtype=np.float32)
    entries = [
        ga.FlatEntry("a", group, (2, 2), 1),
        ga.FlatEntry("b", group, (3,), 6, ga.ParamOptions(master=ga.Master.NONE)),
    ]
    a, b = context.add_flat(block, entries)
    assert (a.slot, b.slot, context.slot_count) == (0, 0, 1)
    context.accumulate([np.ones(10, np.float32)])
    context.step()
    np.testing.assert_array_equal(block, [0, 0, 1, 2, 3, 5, 5, 6, 7, 9])
    with pytest.raises(ValueError, match="expected 9 or more"):
        context.accumulate([np.ones(8, np.float32)])
    with pytest.raises(ValueError, match="expected 9 or more"):
        context.add_flat(np.zeros(8, np.float32), entries)
    with pytest.raises(ValueError, match="negative"):
        context.add_flat(block, [ga.FlatEntry("c", group, (1,), -1)])
    assert context.add_flat(block, []) == []
    assert context.slot_count == 2  # an empty block has a gradient too
    a.remove()
    b.remove()
    context.accumulate([None, None])


def test_memory_is_counted(net: Net) -> None:
    net.context.prepare()
    assert net.context.memory.accumulators >= 4 * 16
    assert net.context.memory.total >= net.context.memory.accumulators
    net.context.synchronize()
