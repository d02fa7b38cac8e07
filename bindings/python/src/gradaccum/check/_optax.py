# SPDX-License-Identifier: Apache-2.0
"""Lets recordings see what transformations of optax are given."""

from __future__ import annotations

import copy
import importlib
import math
from collections.abc import Callable
from typing import Any

from . import _where
from ._series import epsilon_of, leaves, tell


def wrap(tx: Any) -> Any:
    """A transformation of optax that computes the same, and tells recordings of the gradients that it is given.

    With ``optax.MultiSteps``, or its ``gradient_transformation()``, those of each call are a micro-batch, and a window
    ends when it makes a step. What any other transformation is given is the gradient of a whole window, whose
    micro-batches the program tells of by ``Recording.micro_batch()``.

    :param tx: an ``optax.GradientTransformation`` or an ``optax.MultiSteps``
    """
    optax: Any = importlib.import_module("optax")
    owner = getattr(tx.update, "__self__", None)
    if isinstance(tx, optax.MultiSteps):
        return _multi_steps(tx)
    if isinstance(owner, optax.MultiSteps):
        return _multi_steps(owner).gradient_transformation()
    return _telling(tx, None, "optax", lambda: True)


def _multi_steps(tx: Any) -> Any:
    if not all(hasattr(tx, name) for name in ("_opt", "_every_k_schedule")):
        raise TypeError("this release of optax.MultiSteps is not known to gradaccum.check")
    watched = copy.copy(tx)
    ends: list[Any] = [False]  # whether the call that is being traced ends a window

    def update(updates: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
        tell("add", _known(updates, watched), where=_where.line())
        tell("given", {}, math.nan, state.mini_step, key=watched)
        ends[0] = state.mini_step == tx._every_k_schedule(state.gradient_step) - 1
        try:
            return type(tx).update(watched, updates, state, *args, **kwargs)
        finally:
            ends[0] = False

    watched._opt = _telling(tx._opt, watched, "MultiSteps", lambda: ends[0])
    watched.update = update
    return watched


def _telling(tx: Any, key: Any, name: str, is_applied: Callable[[], Any]) -> Any:
    optax: Any = importlib.import_module("optax")
    title = f"optax {optax.__version__}"

    def update(updates: Any, *args: Any, **kwargs: Any) -> Any:
        gradients = _known(updates, key)
        epsilon = max((epsilon_of(getattr(each, "dtype", "")) for each in gradients.values()), default=0.0)
        tell("update", gradients, is_applied(), math.nan, key=key, name=name, where=_where.line(), epsilon=epsilon,
             title=title)  # fmt: skip
        return tx.update(updates, *args, **kwargs)

    kind = type(tx) if isinstance(tx, optax.GradientTransformation) else optax.GradientTransformationExtraArgs
    return kind(tx.init, update)


def _known(tree: Any, key: Any) -> dict[Any, Any]:
    """The gradients of a tree; those of two optimizers may have the same places."""
    return {(key, path): gradient for path, gradient in leaves(tree).items()}
