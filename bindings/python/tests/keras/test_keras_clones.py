# SPDX-License-Identifier: Apache-2.0
"""Every way in which Keras makes a model from a model keeps the windows, or says that they are missing."""

import copy
import pathlib
import pickle
from collections.abc import Callable
from typing import Any

import gradaccum
import gradaccum.keras as gk
import keras
import numpy as np
import pytest
from conftest import PARTS, Task, distance, parts, whole

CLIP = gradaccum.Clip(scope=gradaccum.ClipScope.GLOBAL, flavor=gradaccum.Flavor.KERAS, max_norm=0.5)


@keras.saving.register_keras_serializable(package="test_keras_clones")
class Subclassed(keras.Model):  # type: ignore[misc]
    def __init__(self, width: int = 7, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.width = width
        self.inner = keras.layers.Dense(width, activation="tanh")
        self.outer = keras.layers.Dense(3)

    def call(self, x: Any) -> Any:
        return self.outer(self.inner(x))

    def get_config(self) -> Any:
        return {"width": self.width}


@keras.saving.register_keras_serializable(package="test_keras_clones")
class Derived(gk.GradientAccumulateModel):  # type: ignore[misc]
    """Of GradientAccumulator's class, made of inputs and outputs."""


def functional(of: Any = keras.Model, **options: Any) -> Any:
    inputs = keras.Input((6,))
    outputs = keras.layers.Dense(3)(keras.layers.Dense(7, activation="tanh")(inputs))
    return of(inputs=inputs, outputs=outputs, **options)


def built(model: Any) -> Any:
    model(np.zeros((1, 6)))
    return model


MODELS: dict[str, Callable[[Task], Any]] = {
    "sequential": lambda task: gk.wrap(task.model(), PARTS, clip=CLIP, keep_window=True),
    "functional": lambda task: gk.wrap(functional(), PARTS, clip=CLIP, keep_window=True),
    "subclassed": lambda task: gk.wrap(built(Subclassed()), PARTS, clip=CLIP, keep_window=True),
    "theirs": lambda task: functional(
        gk.GradientAccumulateModel, accum_steps=PARTS, clip=CLIP, keep_window=True
    ),
    "derived": lambda task: functional(Derived, accum_steps=PARTS, clip=CLIP, keep_window=True),
}
WAYS: dict[str, Callable[[Any], Any]] = {
    "clone": keras.models.clone_model,
    "cloned layers": lambda m: keras.models.clone_model(
        m, clone_function=lambda layer: layer.__class__.from_config(layer.get_config())
    ),
    "config": lambda m: type(m).from_config(m.get_config()),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
}


def check(task: Task, model: Any) -> None:
    """It trains as whole batches do, from the weights that it has."""
    assert model._options.accum_steps == PARTS and model._options.keep_window
    reference = task.model()
    reference.set_weights(model.get_weights())
    reference.compile(keras.optimizers.SGD(0.1, global_clipnorm=0.5), "mse")
    whole(task, reference)
    parts(task, model)
    assert distance(reference, model) < 1e-6
    assert int(model.optimizer.iterations) == 8


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_model_of_a_model(task: Task, kind: str, way: str, compiled: bool) -> None:
    model = MODELS[kind](task)
    if compiled:
        model.compile(keras.optimizers.SGD(0.1), "mse")
    if kind == "subclassed" and way == "cloned layers":
        with pytest.raises(ValueError, match="clone_function"):  # Keras' own rule
            WAYS[way](model)
        return
    other = WAYS[way](model)
    assert other is not model and type(other).__name__ == type(model).__name__
    if not other.built:
        built(other)
    if not compiled or way == "config":  # which has no word of compile()
        other.compile(keras.optimizers.SGD(0.1), "mse")
    check(task, other)


def test_a_recursive_clone(task: Task) -> None:
    """A wrapped model within a plain one, and the other way round."""
    inner = gk.wrap(task.model(), PARTS)
    outer = keras.Sequential([keras.Input((6,)), inner])
    clone = keras.models.clone_model(outer, clone_function=_again, recursive=True)
    assert type(clone) is keras.Sequential and clone.layers[0]._options.accum_steps == PARTS
    clone = keras.models.clone_model(gk.wrap(outer, 2), clone_function=_again, recursive=True)
    assert clone._options.accum_steps == 2 and clone.layers[0]._options.accum_steps == PARTS


def _again(layer: Any) -> Any:
    return layer.__class__.from_config(layer.get_config())


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(
    "way", [lambda m: keras.models.model_from_json(m.to_json()), "file"], ids=["json", "file"]
)
def test_what_is_written_and_read(task: Task, tmp_path: pathlib.Path, kind: str, way: Any) -> None:
    """Keras reads a class of its own, which says before it trains that it is to be wrapped."""
    model = MODELS[kind](task)
    model.compile(keras.optimizers.SGD(0.1), "mse")
    if way == "file":
        model.save(tmp_path / "model.keras")
        other = keras.models.load_model(tmp_path / "model.keras")
    else:
        other = way(model)
    if not other.built:
        built(other)
    if kind != "derived":
        before = other.get_weights()
        for call in (other.fit, other.train_on_batch):
            with pytest.raises(RuntimeError, match=r"gradaccum\.keras\.wrap"):
                call(task.x[:3], task.y[:3])
        assert all(np.array_equal(a, b) for a, b in zip(before, other.get_weights(), strict=True))
        gk.wrap(other, PARTS, keep_window=True)
    check(task, other)


def test_an_uncompiled_model_of_theirs_keeps_its_options(task: Task, tmp_path: pathlib.Path) -> None:
    config = gradaccum.Config(nonfinite=gradaccum.Nonfinite.DROP_MICRO)
    model = functional(Derived, accum_steps={0: 2, 3: 4}, use_agc=True, clip_factor=0.25, config=config)
    model.save(tmp_path / "model.keras")
    for other in (keras.models.load_model(tmp_path / "model.keras"), Derived.from_config(model.get_config())):
        assert vars(other._options) == vars(model._options)


def test_a_class_made_of_inputs_and_outputs_leaves_the_others_alone() -> None:
    class OfInputs(gk.GradientAccumulateModel):  # type: ignore[misc]
        pass

    class WithCall(gk.GradientAccumulateModel):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(accum_steps=2)
            self.dense = keras.layers.Dense(3)

        def call(self, x: Any) -> Any:
            return self.dense(x)

    bases = gk.GradientAccumulateModel.__bases__
    made = [functional(OfInputs, accum_steps=2), WithCall(), functional(OfInputs, accum_steps=2)]
    assert gk.GradientAccumulateModel.__bases__ == bases
    for model in made:
        model.compile("sgd", "mse")
        model.fit(np.ones((8, 6)), np.ones((8, 3)), batch_size=2, verbose=0)
        assert model.step_result.micro_batches == 2
