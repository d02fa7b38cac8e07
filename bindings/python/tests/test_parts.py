# SPDX-License-Identifier: Apache-2.0
"""Gradients by part, and which of them are kept for how long."""

import sys
from typing import Any

import gradaccum as ga
import numpy as np
import pytest
from conftest import Net
from test_tensors import Exporter


def test_parts_add_up_to_a_micro_batch(net: Net) -> None:
    w, b = net.w.copy(), net.b.copy()
    dw, db = net.gradients()
    with net.context.micro_batch(2) as micro:
        assert net.context.window.open_micro == 0
        micro.accumulate(net.params[1], db)
        micro.accumulate(net.params[0], dw)
        micro.accumulate(net.params[0], dw.ctypes.data)
        with pytest.raises(ga.Error) as error:
            net.context.step()
        assert error.value.status is ga.Status.INVALID_STATE
    net.context.step()
    np.testing.assert_allclose(net.w, w - dw, rtol=1e-6)
    np.testing.assert_allclose(net.b, b - np.float32(0.5) * db, rtol=1e-6)


def test_an_exception_aborts_the_micro_batch(net: Net) -> None:
    net.context.accumulate(net.gradients())
    with pytest.raises(ZeroDivisionError), net.context.micro_batch() as micro:
        assert micro.context is net.context
        raise ZeroDivisionError
    assert net.context.window.micro_batches == 1 and net.context.window.open_micro == -1


def test_an_exception_after_a_part_discards_the_window(net: Net) -> None:
    net.context.accumulate(net.gradients())
    with pytest.raises(ZeroDivisionError) as error, net.context.micro_batch() as micro:
        micro.accumulate(net.params[0], net.gradients()[0])
        raise ZeroDivisionError
    assert "the window was discarded" in error.value.__notes__[0]
    assert net.context.window.micro_batches == 0


def test_a_context_closed_within_a_micro_batch(net: Net) -> None:
    with pytest.raises(ZeroDivisionError), net.context.micro_batch():
        net.context.close()
        raise ZeroDivisionError


def test_a_micro_batch_is_opened_again(net: Net) -> None:
    w = net.w.copy()
    dw, _ = net.gradients()
    for index, part in ((0, dw), (1, dw), (0, 2 * dw)):
        with net.context.micro_batch(1, index=index) as micro:
            micro.accumulate(net.params[0], part)
    net.context.step()
    np.testing.assert_allclose(net.w, w - np.float32(0.5) * 2 * dw, rtol=1e-6)


def test_bad_parts_leave_the_micro_batch_open(net: Net) -> None:
    other = Net()
    dw, db = net.gradients()
    with net.context.micro_batch() as micro:
        with pytest.raises(ValueError, match="another context"):
            micro.accumulate(other.params[0], dw)
        with pytest.raises(ValueError, match="shape"):
            micro.accumulate(net.params[0], db)
        with pytest.raises(TypeError, match="a NoneType is no tensor"):
            micro.accumulate(net.params[0], None)  # type: ignore[arg-type]
        micro.accumulate(net.params[0], dw)
    assert net.context.step().applied


def test_rows() -> None:
    context = ga.Context()
    group = context.add_group(ga.Optimizer(ga.OptimizerKind.SGD, lr=1.0))
    table = np.zeros((5, 2), np.float32)
    param = context.add_param(group, "e", table, options=ga.ParamOptions(rows=ga.Rows.LAZY))
    values = np.arange(6, dtype=np.float32).reshape(3, 2)
    for dtype in (np.int32, np.int64):
        with context.micro_batch() as micro:
            micro.accumulate_rows(param, np.array([4, 0, 4], dtype), values)
            with pytest.raises(TypeError, match="int32 or int64"):
                micro.accumulate_rows(param, np.array([4.0]), values)
            with pytest.raises(ValueError, match="one dimension"):
                micro.accumulate_rows(param, np.array([[1]]), values)
            with pytest.raises(ValueError, match=r"expected \[2, 2\]"):
                micro.accumulate_rows(param, np.array([1, 2]), values)
            with pytest.raises(ga.Error, match="5"):
                micro.accumulate_rows(param, np.array([0, 5, 1]), values)
    context.step()
    np.testing.assert_array_equal(table, [[-2, -3], [0, 0], [0, 0], [0, 0], [-4, -6]])


def test_matrix_products_in_every_layout() -> None:
    context = ga.Context()
    group = context.add_group(ga.Optimizer(ga.OptimizerKind.SGD, lr=1.0))
    w = np.zeros((3, 4), np.float32)
    param = context.add_param(group, "w", w)
    random = np.random.default_rng(2)
    a, b = random.standard_normal((3, 5)), random.standard_normal((5, 4))
    a, b = a.astype(np.float32), b.astype(np.float32)
    wide = np.zeros((3, 9), np.float32)
    wide[:, 2:7] = a
    lefts = (a, np.asfortranarray(a), wide[:, 2:7])
    rights = (b, np.asfortranarray(b))
    try:
        with context.micro_batch() as micro:
            for left in lefts:
                for right in rights:
                    micro.accumulate_matmul(param, left, right)
            with pytest.raises(ValueError, match=r"matrix a .* expected \[3, k\]"):
                micro.accumulate_matmul(param, b, b)
            with pytest.raises(ValueError, match=r"matrix b .* expected \[5, 4\]"):
                micro.accumulate_matmul(param, a, b.T.copy())
            with pytest.raises(ValueError, match="neither rows nor columns"):
                micro.accumulate_matmul(param, np.zeros((6, 10), np.float32)[::2, ::2], b)
            with pytest.raises(TypeError, match="expected float32"):
                micro.accumulate_matmul(param, a, b.astype(np.float16))
    except ga.Error as error:
        assert error.status is ga.Status.UNSUPPORTED
        pytest.skip(str(error))
    context.step()
    np.testing.assert_allclose(w, -6 * (a.astype(np.float64) @ b), rtol=1e-4, atol=1e-5)


def test_a_kernel_writes_into_the_accumulator(net: Net) -> None:
    w = net.w.copy()
    dw, _ = net.gradients()
    for weight in (1, 3, 0):
        with net.context.micro_batch(weight) as micro, micro.accumulator(net.params[0]) as target:
            if weight == 0:
                assert target.tensor is None
                continue
            view: Any = np.from_dlpack(target.tensor)  # type: ignore[arg-type]
            view[:] = target.alpha * dw + (target.beta * view if target.beta else 0)
            with pytest.raises(ga.Error):
                micro.end()
    net.context.step()
    np.testing.assert_allclose(net.w, w - np.float32(0.5) * dw, rtol=1e-6)
    net.context.close()
    view[:] = 1  # the memory is the view's now


def live(
    nonfinite: ga.Nonfinite = ga.Nonfinite.SKIP_STEP, life: ga.GradientLife = ga.GradientLife.LIVE
) -> tuple[ga.Context, ga.Param]:
    config = ga.Config(gradient_life=life, nonfinite=nonfinite)
    context = ga.Context(config)
    group = context.add_group(ga.Optimizer(ga.OptimizerKind.SGD, lr=1.0))
    return context, context.add_param(group, "p", np.zeros((2, 3), np.float32))


def test_a_live_gradient_is_kept_until_the_second() -> None:
    context, param = live()
    first, second, third = Exporter(), Exporter(), Exporter()
    context.accumulate([first])
    assert first.deleted == 0
    context.accumulate([second])
    assert (first.deleted, second.deleted) == (1, 1)
    with context.micro_batch() as micro:
        micro.accumulate(param, third)
    assert third.deleted == 1
    context.step()


def test_a_live_gradient_is_kept_until_the_step() -> None:
    context, param = live()
    for end in (context.step, context.discard, context.close):
        by_call, by_part = Exporter(), Exporter()
        context.accumulate([by_call])
        assert by_call.deleted == 0
        end()
        assert by_call.deleted == 1
        if context.closed:
            break
        with context.micro_batch() as micro:
            micro.accumulate(param, by_part)
        assert by_part.deleted == 0
        end()
        assert by_part.deleted == 1


def test_a_lent_gradient_is_the_librarys_until_the_step() -> None:
    context, param = live(life=ga.GradientLife.LENT)
    data = np.zeros((2, 3), np.float32)
    param.bind(data)
    first, second, third = (np.full((2, 3), value, np.float32) for value in (1, 2, 4))
    references = sys.getrefcount(first), sys.getrefcount(second)
    context.accumulate([first])
    context.accumulate([second])
    with context.micro_batch() as micro:
        micro.accumulate(param, third)
    assert (sys.getrefcount(first), sys.getrefcount(second)) == (references[0] + 1, references[1])
    context.step()
    assert sys.getrefcount(first) == references[0]
    np.testing.assert_allclose(data, np.full((2, 3), -7 / 3), rtol=1e-6)
    np.testing.assert_array_equal(second, np.full((2, 3), 2))


@pytest.mark.parametrize("life", list(ga.GradientLife))
def test_the_owner_of_an_address_is_kept_as_a_tensor_is(life: ga.GradientLife) -> None:
    context, param = live(life=life)
    is_kept = life != ga.GradientLife.CONSUMED
    for by_part in (False, True):
        gradient = np.ones((2, 3), np.float32)
        references = sys.getrefcount(gradient)
        if by_part:
            with context.micro_batch() as micro:
                micro.accumulate(param, gradient.ctypes.data, owner=gradient)
        else:
            context.accumulate([gradient.ctypes.data], owners=[gradient])
        assert sys.getrefcount(gradient) == references + is_kept
        context.step()
        assert sys.getrefcount(gradient) == references


def test_what_cannot_be_written_is_not_lent() -> None:
    context, param = live(life=ga.GradientLife.LENT)
    gradient = np.zeros((2, 3), np.float32)
    gradient.setflags(write=False)
    with pytest.raises((ValueError, BufferError), match="read-only"):
        context.accumulate([gradient])
    with context.micro_batch() as micro, pytest.raises((ValueError, BufferError), match="read-only"):
        micro.accumulate(param, gradient)


def test_a_gradient_of_weight_zero_is_not_the_first() -> None:
    context, param = live()
    unread, first = Exporter(), Exporter()
    context.accumulate([unread], 0)
    assert unread.deleted == 1
    with context.micro_batch(0) as micro:
        micro.accumulate(param, Exporter())
    context.accumulate([first], 1)
    assert first.deleted == 0
    context.step()
    assert first.deleted == 1


def test_a_micro_batch_that_may_be_dropped_is_read_at_once() -> None:
    context, _ = live(ga.Nonfinite.DROP_MICRO)
    gradient = Exporter()
    context.accumulate([gradient])
    assert gradient.deleted == 1
    assert context.step().applied


def test_checked_parts_are_kept_until_the_end() -> None:
    for is_clipped in (False, True):
        nonfinite = ga.Nonfinite.SKIP_STEP if is_clipped else ga.Nonfinite.DROP_MICRO
        context = ga.Context(ga.Config(nonfinite=nonfinite))
        group = context.add_group(ga.Optimizer(ga.OptimizerKind.SGD, lr=1.0))
        param = context.add_param(group, "p", np.zeros((2, 3), np.float32))
        if is_clipped:
            context.set_clip(ga.Clip(scope=ga.ClipScope.GLOBAL, max_norm=1, when=ga.ClipWhen.MICRO))
        part, aborted, whole = Exporter(), Exporter(), Exporter()
        with context.micro_batch() as micro:
            micro.accumulate(param, part)
            assert part.deleted == 0
        assert part.deleted == 1
        with pytest.raises(ZeroDivisionError), context.micro_batch() as micro:
            micro.accumulate(param, aborted)
            raise ZeroDivisionError
        assert aborted.deleted == 1 and context.window.micro_batches == 1
        context.accumulate([whole])
        assert whole.deleted == 1
        assert context.step().applied


def clipped(when: ga.ClipWhen | None, of_group: bool) -> tuple[ga.Context, ga.Param]:
    context = ga.Context()
    group = context.add_group(ga.Optimizer(ga.OptimizerKind.SGD, lr=1.0))
    if when is not None:
        set_clip = group.set_clip if of_group else context.set_clip
        set_clip(ga.Clip(scope=ga.ClipScope.GLOBAL, max_norm=1, when=when))
    return context, context.add_param(group, "p", np.zeros((2, 3), np.float32))


def is_kept(context: ga.Context, param: ga.Param) -> bool:
    """Whether a part is kept until its micro-batch ends."""
    part = Exporter()
    with context.micro_batch() as micro:
        micro.accumulate(param, part)
        kept = part.deleted == 0
    assert part.deleted == 1
    context.discard()
    return kept


def test_parts_are_kept_as_the_clips_say_that_are_set() -> None:
    for of_group in (False, True):
        context, param = clipped(ga.ClipWhen.MICRO, of_group)
        assert is_kept(context, param)
        context.set_clip(None)
        assert is_kept(context, param) == of_group
        context.groups[0].set_clip(None)
        assert not is_kept(context, param)
    context.set_clip(ga.Clip(scope=ga.ClipScope.GLOBAL, max_norm=1, when=ga.ClipWhen.MICRO))
    context.groups[0].set_clip(ga.Clip())
    assert is_kept(context, param)  # also if no group has the context's clip


def test_parts_are_kept_as_the_clips_say_that_are_loaded() -> None:
    take, keep = (ga.StateOptions(settings=way) for way in (ga.Settings.TAKE, ga.Settings.KEEP))
    for of_group in (False, True):
        for when in (None, *ga.ClipWhen):
            context, param = clipped(None, of_group)
            data = clipped(when, of_group)[0].save_bytes()
            context.load(data, keep)
            assert not is_kept(context, param)
            context.load(data, take)
            assert is_kept(context, param) == (when is ga.ClipWhen.MICRO), when
            context.load(clipped(None, of_group)[0].save_bytes(), take)
            assert not is_kept(context, param)
