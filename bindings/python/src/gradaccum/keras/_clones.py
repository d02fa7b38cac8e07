# SPDX-License-Identifier: Apache-2.0
"""Models that Keras makes of others: clones of wrapped models are wrapped, and plain models say what is missing."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from ._model import Accumulating, wrap
from ._optimizer import NOT_WRAPPED, GradientAccumulateOptimizer
from ._private import cloning, keras


def _cloned(of_keras: Callable[..., Any]) -> Callable[..., Any]:
    """Keras' function, which makes a plain model of a wrapped Sequential for instance."""

    @functools.wraps(of_keras)
    def clone_of(model: Any, *args: Any, **kwargs: Any) -> Any:
        clone = of_keras(model, *args, **kwargs)
        if isinstance(model, Accumulating):
            if not isinstance(clone, Accumulating):
                return wrap(clone, **vars(model._options))
            object.__setattr__(clone, "_options", model._options)
        return clone

    return clone_of


# clone_model() calls the first two, also where a program has imported it before.
for _name in ("_clone_sequential_model", "_clone_functional_model", "clone_model"):
    setattr(cloning, _name, _cloned(getattr(cloning, _name)))
for _module in ("keras.models", "keras._tf_keras.keras.models"):
    if _module in sys.modules:
        setattr(sys.modules[_module], "clone_model", cloning.clone_model)  # noqa: B010


# Before training begins: on JAX, fit() takes the values out of the variables, and an exception loses them.
def _make_train_function(
    model: Any, force: bool = False, _of_keras: Any = keras.Model.make_train_function
) -> Any:
    """Keras' function of this name, for models that are not wrapped."""
    if isinstance(getattr(model, "optimizer", None), GradientAccumulateOptimizer):
        raise RuntimeError(NOT_WRAPPED)
    return _of_keras(model, force)


keras.Model.make_train_function = _make_train_function
