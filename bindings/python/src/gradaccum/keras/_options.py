# SPDX-License-Identifier: Apache-2.0
"""What a model is wrapped with, by the names that it has here and in GradientAccumulator."""

from __future__ import annotations

import difflib
import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from .. import Clip, ClipScope, Config
from ._accumulation import checked_steps
from ._optimizer import GradientAccumulateOptimizer, as_numbers, of_numbers
from ._private import keras

ALIASES: Final = {"agc": "use_agc", "use_acg": "use_agc", "n_gradients": "accum_steps"}
"""Names of GradientAccumulator's documents and of its older versions, with those of its last one."""
ORDER: Final = (
    "accum_steps", "mixed_precision", "use_agc", "clip_factor", "eps", "experimental_distributed_support",
)  # fmt: skip
"""Its arguments by position."""
OF_KERAS: Final = ("inputs", "outputs", "name", "trainable", "dtype", "autocast", "activity_regularizer")
"""What keras.Model takes."""


class Options:
    """What a model was wrapped with. Not a part of what Keras saves."""

    def __init__(
        self, accum_steps: Any = 1, *, reduction: str = "MEAN", use_agc: bool = False, clip_factor: float = 0.01,
        eps: float = 1e-3, clip: Any = None, config: Any = None, keep_window: bool = False, step_logs: bool = False,
        mixed_precision: bool = False, experimental_distributed_support: bool = False,
    ) -> None:  # fmt: skip
        if experimental_distributed_support:
            raise ValueError(
                "experimental_distributed_support was True, but one process trains a model here: several train it as "
                "ranks, see «What gradaccum.keras does not have» in docs/keras.md"
            )
        if use_agc:
            if clip is not None:
                raise ValueError("use_agc was True and clip was given: adaptive gradient clipping is a clip")
            clip = Clip(scope=ClipScope.AGC, agc_factor=clip_factor, agc_eps=eps)
        if mixed_precision and not keras.config.dtype_policy().name.startswith("mixed"):
            warnings.warn(
                "mixed_precision was True, which has no effect, and the dtype policy is "
                f'{keras.config.dtype_policy().name}: call keras.config.set_dtype_policy("mixed_float16") before the '
                "model is made",
                stacklevel=4,
            )
        self.accum_steps = checked_steps(
            {int(step): int(k) for step, k in accum_steps}
            if isinstance(accum_steps, (list, tuple))
            else accum_steps
        )
        self.reduction = reduction
        self.clip: Clip | None = of_numbers(Clip, clip) if isinstance(clip, dict) else clip
        self.config: Config | None = of_numbers(Config, config) if isinstance(config, dict) else config
        self.keep_window = keep_window
        self.step_logs = step_logs

    def optimizer(self, optimizer: Any, former: Any = None) -> Any:
        """A GradientAccumulateOptimizer over what compile() was given: the former one, if it is over the same."""
        if isinstance(optimizer, GradientAccumulateOptimizer):
            return optimizer
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        if isinstance(former, GradientAccumulateOptimizer) and former.accumulation.optimizer is inner:
            return former
        return GradientAccumulateOptimizer(
            optimizer, self.accum_steps, self.reduction, clip=self.clip, config=self.config
        )

    def saved(self, init: Callable[..., Any]) -> dict[str, Any]:
        """The options that a constructor takes, as numbers: for get_config()."""
        steps = self.accum_steps
        numbers = {
            **vars(self),
            "accum_steps": sorted(steps.items()) if isinstance(steps, dict) else steps,
            "clip": as_numbers(self.clip),
            "config": as_numbers(self.config),
        }
        parameters = inspect.signature(init).parameters
        every = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
        return {name: value for name, value in numbers.items() if every or name in parameters}


NAMES: Final = tuple(name for name in inspect.signature(Options.__init__).parameters if name != "self")
"""Of the options."""


def named(given: Mapping[str, Any], others: Mapping[str, Any], call: str, known: Iterable[str] = ()) -> dict[str, Any]:
    """given, with others by the names that they have here. TypeError: an option is not known, or given twice."""
    options = dict(given)
    for name, value in others.items():
        own = ALIASES.get(name)
        if own is None:
            names = [*NAMES, *ALIASES, *known]
            (nearest,) = difflib.get_close_matches(name, names, 1, 0.0)
            raise TypeError(f'{call} has no option "{name}": the nearest one is "{nearest}"')
        if own in options:
            raise TypeError(f'{call} was given "{name}" and "{own}", which are the same option')
        options[own] = value
    return options


def split(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[Any, ...], dict[str, Any]]:
    """Of the arguments of GradientAccumulateModel: the options, and by position and by name what keras.Model takes."""
    given: dict[str, Any] = {}
    for name in ORDER:
        if not args or not _is_option(args[0]):
            break
        if name in kwargs:
            raise TypeError(f'GradientAccumulateModel was given "{name}" by position and by name')
        given[name], args = args[0], args[1:]
    given.update((name, value) for name, value in kwargs.items() if name in NAMES)
    others = {name: value for name, value in kwargs.items() if name not in NAMES and name not in OF_KERAS}
    rest = {name: value for name, value in kwargs.items() if name in OF_KERAS}
    return named(given, others, "GradientAccumulateModel", OF_KERAS), args, rest


def _is_option(argument: Any) -> bool:
    """Whether it is none of the tensors that a model is made of."""
    if isinstance(argument, dict):
        return all(isinstance(key, int) for key in argument)
    return isinstance(argument, (int, float))
