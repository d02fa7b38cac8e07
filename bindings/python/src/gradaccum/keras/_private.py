# SPDX-License-Identifier: Apache-2.0
"""Keras, and every name of it that is not public and that this package leans on."""

from __future__ import annotations

import importlib
import warnings
from typing import Any, Final

TRIED: Final = ("3.15",)
"""Versions of Keras that the tests have run with."""

keras: Any = importlib.import_module("keras")
if ".".join(keras.__version__.split(".")[:2]) not in TRIED:
    warnings.warn(
        f"gradaccum.keras was tried with Keras {', '.join(TRIED)}, and this is {keras.__version__}",
        stacklevel=3,
    )

# Every loss ends in reduce_weighted_values(), and masks its weights by apply_mask().
loss_module: Any = importlib.import_module("keras.src.losses.loss")
# clone_model() makes its clones by two functions of this module.
cloning: Any = importlib.import_module("keras.src.models.cloning")
# The registered names of classes, by which files have them.
registered: Any = importlib.import_module("keras.src.saving.object_registration").GLOBAL_CUSTOM_NAMES
# What a model is that is made of inputs and outputs, and whether these arguments of a constructor ask for one.
Functional: Any = importlib.import_module("keras.src.models.functional").Functional
is_functional: Any = importlib.import_module("keras.src.models.model").functional_init_arguments
# What saving looks for in an optimizer: its attributes of this class. Makes a model of a pickle, too.
KerasSaveable: Any = importlib.import_module("keras.src.saving.keras_saveable").KerasSaveable

# Of an optimizer: _iterations, _learning_rate, _tracker (the order of its variables),
#   _use_weight_decay(), _overwrite_variable_with_gradient(). SwapEMAWeights asks for
#   _trainable_variables and _model_variables_moving_average. Of a variable: _path.
# Of a model: _compile_config (what saving says of compile()), _aggregate_additional_loss(),
#   _autoconvert_optionals() (TensorFlow's trainer), _flatten_layers(), distribute_strategy.
# Of a layer of batch normalisation: _moments().
