# SPDX-License-Identifier: Apache-2.0
"""Dataclasses carry every field to C and back."""

import dataclasses
from typing import Any

import gradaccum as ga
import numpy as np
import pytest
from gradaccum import _raw
from gradaccum._struct import Struct

STRUCTS: list[Any] = [
    ga.Config(), ga.Optimizer(ga.OptimizerKind.ADAM), ga.Schedule(ga.ScheduleKind.STEP), ga.Clip(),
    ga.LossScaler(), ga.Ema(), ga.ParamOptions(), ga.MicroOptions(), ga.BatchNormOptions(),
    ga.StateOptions(), ga.CommunicatorOptions(),
]  # fmt: skip


def other(value: Any) -> Any:
    """A value of the same type that differs."""
    if value is None:  # of ParamOptions.reduce
        return ga.Reduce.MAX
    if isinstance(value, bool):
        return not value
    if isinstance(value, int) and type(value) is not int:
        return next(member for member in type(value) if member != value)
    return value + 1 if isinstance(value, int) else 0.0625 if value != 0.0625 else 0.5


def test_every_field_goes_to_c_and_back() -> None:
    for struct in STRUCTS:
        kind: type[Struct] = type(struct)
        fixed = set(kind._arguments)
        for name in kind._fields():
            if name in fixed:
                continue
            changed = dataclasses.replace(struct, **{name: other(getattr(struct, name))})
            assert getattr(changed._write(), name) == getattr(changed, name), (kind, name)
            plain = dataclasses.replace(struct)._write()
            assert getattr(plain, name) == (getattr(struct, name) or 0), (kind, name)
            assert getattr(changed._write(), name) != getattr(plain, name), (kind, name)


def test_defaults_are_those_of_the_library() -> None:
    for kind in ga.OptimizerKind:
        mine = ga.Optimizer(kind)
        theirs = _raw.ga_optimizer(kind, 0)
        assert all(getattr(mine, name) == getattr(theirs, name) for name in mine._fields())
    assert ga.Optimizer(ga.OptimizerKind.ADAMW).beta2 == 0.999
    assert ga.Optimizer(ga.OptimizerKind.ADAM, ga.Flavor.KERAS).eps == 1e-7
    assert ga.BatchNormOptions(ga.Flavor.KERAS).layout is ga.BnLayout.CHANNELS_LAST
    assert ga.Optimizer(ga.OptimizerKind.MUON).ns_coefficients == (3.4445, -4.775, 2.0315)
    with pytest.raises(ga.Error):
        ga.Optimizer(ga.OptimizerKind.MUON, ga.Flavor.BERT)


def test_an_optimizer_comes_back_from_its_group() -> None:
    context = ga.Context()
    optimizer = ga.Optimizer(ga.OptimizerKind.ADAMW, lr=0.25, beta1=0.5, maximize=True)
    group = context.add_group(optimizer)
    assert group.optimizer == optimizer
    group.optimizer = dataclasses.replace(optimizer, beta2=0.75)
    assert group.optimizer.beta2 == 0.75
    with pytest.raises(ga.Error) as error:
        group.optimizer = dataclasses.replace(optimizer, amsgrad=True)
    assert error.value.status is ga.Status.UNSUPPORTED


def test_a_table_of_coefficients_comes_back_from_its_group() -> None:
    table = (3.0, -3.5, 1.25, 1.875, -1.25, 0.375)
    muon = ga.Optimizer(ga.OptimizerKind.MUON, ns_table=table)
    context = ga.Context()
    group = context.add_group(muon)
    assert group.optimizer == muon
    assert group.optimizer.ns_table == table
    group.optimizer = dataclasses.replace(muon, ns_table=table[3:])
    assert group.optimizer.ns_table == table[3:]
    group.optimizer = dataclasses.replace(muon, ns_table=(), ns_preset=ga.NewtonSchulzPreset.POLAR_EXPRESS)
    assert group.optimizer.ns_table == ()
    assert group.optimizer.ns_preset is ga.NewtonSchulzPreset.POLAR_EXPRESS
    with pytest.raises(ga.Error, match="ns_table"):
        group.optimizer = dataclasses.replace(muon, ns_preset=ga.NewtonSchulzPreset.YOU)
    with pytest.raises(ValueError, match="ns_table had 4 numbers"):
        ga.Optimizer(ga.OptimizerKind.MUON, ns_table=table[:4])


def test_values_of_the_wrong_type_are_refused() -> None:
    make: Any
    for make, words in (
        (lambda: ga.Optimizer(ga.OptimizerKind.SGD, lr="fast"), "Optimizer.lr was 'fast'"),  # type: ignore[arg-type]
        (lambda: ga.Optimizer(3), "expected a OptimizerKind"),  # type: ignore[arg-type]
        (lambda: ga.Config(accum_steps=1 << 70), "Config.accum_steps"),
        (lambda: ga.Config(num_threads=1 << 40), "Config.num_threads"),
        (lambda: ga.Config(seed=-1), "Config.seed"),
        (lambda: ga.Config(reduce=1), "expected a Reduce"),  # type: ignore[arg-type]
        (lambda: ga.ParamOptions(reduce=ga.Reduce.MEAN), "expected Reduce.MAX"),
    ):
        with pytest.raises(TypeError, match=words):
            make()
    with pytest.raises(ValueError, match="expected three"):
        ga.Optimizer(ga.OptimizerKind.MUON, ns_coefficients=(1.0, 2.0))  # type: ignore[arg-type]
    with pytest.raises(ga.Error, match="lr"):
        ga.Context().add_group(ga.Optimizer(ga.OptimizerKind.SGD, lr=-1.0))
    with pytest.raises(dataclasses.FrozenInstanceError):
        ga.Config().seed = 3  # type: ignore[misc]
    assert ga.Config(seed=(1 << 64) - 1)._write().seed == (1 << 64) - 1
    assert np.isnan(_raw.ga_optimizer(0, 0).ns_coefficient(3))
