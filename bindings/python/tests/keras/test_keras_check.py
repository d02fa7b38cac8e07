# SPDX-License-Identifier: Apache-2.0
"""gradaccum.check in loops of Keras on each of its backends, and of optax."""

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import gradaccum.keras as gk
import keras
import numpy as np
import pytest
from conftest import BACKEND
from gradaccum import check
from gradaccum.check._faults import UNKNOWN

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

RANDOM = np.random.default_rng(0)
X, Y = RANDOM.normal(size=(48, 6)), RANDOM.integers(0, 3, 48)
MEAN = "mean of means over uneven micro-batches"
SCHEDULE = "schedule moved per micro-batch"
AVERAGE = "moving average per micro-batch"
STATISTICS = "batch norm per micro-batch"


def made(*middle: Any) -> Any:
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(9, activation="tanh"), *middle, keras.layers.Dense(3)]
    )


def loss(**options: Any) -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)


def fit(model: Any, optimizer: Any, samples: int = 48, given: Any = None, **options: Any) -> check.Report:
    """Two epochs in micro-batches of 4, under a recording."""
    model.compile(optimizer, loss() if given is None else given, **options)
    with check.record(model, optimizer) as recording:
        model.fit(X[:samples], Y[:samples], batch_size=4, epochs=2, verbose=0, shuffle=False)
    return recording.report


def names(report: check.Report) -> list[str]:
    return [fault.name for fault in report.faults]


def is_silent(report: check.Report) -> bool:
    doubts = (UNKNOWN, "the whole window is multiplied", "is not known", "may be meant", "not watched")
    return report.ok and not any(doubt in remark for doubt in doubts for remark in report.remarks)


def values(report: check.Report, window: int = 0) -> list[float]:
    return [c.value for c in report.optimizers[0].windows[window].coefficients]


def accumulating(**options: Any) -> Any:
    return keras.optimizers.Adam(0.01, gradient_accumulation_steps=4, **options)


# ---- Loops that are right

RIGHT: dict[str, Callable[[], check.Report]] = {
    "plain": lambda: fit(made(), keras.optimizers.SGD(0.1)),
    "even micro-batches": lambda: fit(made(), accumulating()),
    "clipped": lambda: fit(made(), accumulating(global_clipnorm=0.01)),
    "clipped by value": lambda: fit(made(), accumulating(clipvalue=1e-3)),
    "decay": lambda: fit(made(), accumulating(weight_decay=0.1)),
    "a loss scale": lambda: fit(made(), keras.optimizers.LossScaleOptimizer(accumulating())),
    "a fixed loss scale": lambda: fit(made(), accumulating(loss_scale_factor=64.0)),
    "a loss by its name": lambda: fit(
        keras.Sequential([made(), keras.layers.Softmax()]), accumulating(), given="sparse_categorical_crossentropy"
    ),
    "compiled": lambda: fit(made(), accumulating(), **({} if BACKEND == "torch" else {"jit_compile": True})),
    "eager": lambda: fit(made(), accumulating(), run_eagerly=True),
    "a penalty": lambda: fit(made(keras.layers.Dense(4, kernel_regularizer="l2")), accumulating()),
    "dropout": lambda: fit(made(keras.layers.Dropout(0.2)), accumulating()),
    "one optimizer after another": lambda: (fit(made(), accumulating()), fit(made(), accumulating()))[1],
    "this library": lambda: fit(gk.wrap(made(), accum_steps=4), keras.optimizers.Adam(0.01), samples=30),
    "this library with a loss scale": lambda: fit(
        gk.wrap(made(), accum_steps=4), keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01)), samples=44
    ),
    "this library with sums": lambda: fit(
        gk.wrap(made(), accum_steps=4), keras.optimizers.Adam(0.01), given=loss(reduction="sum")
    ),
    "this library's layers": lambda: fit(
        gk.wrap(made(gk.BatchNormalization()), accum_steps=4), keras.optimizers.Adam(0.01)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_right_loops_are_silent(name: str) -> None:
    report = RIGHT[name]()
    assert is_silent(report), report
    windows = report.optimizers[0].windows
    micro_batches = 1 if name == "plain" else 4
    assert len(windows) >= 4 and windows[0].micro_batches == micro_batches
    assert f"on {BACKEND}" in report.title


def test_multiples_are_those_of_keras() -> None:
    """Whose micro-batches have 1/N of the mean each."""
    report = fit(made(), accumulating(clipnorm=0.01))
    for window in range(6):
        assert values(report, window) == pytest.approx([0.25] * 4, rel=1e-6)
    assert report.optimizers[0].windows[0].factors[0].purpose == "clip"


# ---- Loops that are wrong


def schedule() -> Any:
    return keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)


WRONG: dict[str, tuple[list[str], Callable[[], check.Report]]] = {
    "uneven": ([MEAN], lambda: fit(made(), accumulating(), samples=30)),
    "schedule": (
        [SCHEDULE], lambda: fit(made(), keras.optimizers.Adam(schedule(), gradient_accumulation_steps=4))
    ),
    "average": ([AVERAGE], lambda: fit(made(), accumulating(use_ema=True))),
    "statistics": ([STATISTICS], lambda: fit(made(keras.layers.BatchNormalization()), accumulating())),
    "sums": (["sum for mean"], lambda: fit(made(), accumulating(), given=Sums())),
}  # fmt: skip


class Sums(keras.losses.Loss):  # type: ignore[misc]
    """Multiplies the mean by 4, so that four micro-batches that are averaged have 1 each."""

    def __init__(self) -> None:
        super().__init__(name="sums")
        self._mean = loss()

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        return 4 * self._mean(y_true, y_pred, sample_weight)


@pytest.mark.parametrize("name", WRONG)
def test_wrong_loops_are_named(name: str) -> None:
    wanted, run = WRONG[name]
    report = run()
    assert names(report) == wanted and not report.ok, report
    windows = report.optimizers[0].windows
    assert [window.moves for window in windows[1:]] == [4 if name == "statistics" else 0] * (len(windows) - 1)
    assert [window.averages for window in windows[1:]] == [4 if name == "average" else 0] * (len(windows) - 1)


def test_a_weight_of_the_whole_loss_is_told() -> None:
    report = fit(made(), accumulating(), loss_weights=[0.5])
    assert report.ok and "the whole window is multiplied by 0.5, which may be meant" in str(report)


def test_what_is_left_at_the_end_is_told() -> None:
    report = fit(made(), accumulating(), samples=44)
    assert report.ok and "ended with 2 micro-batches that no step had applied" in str(report)


def test_masked_terms_do_not_count() -> None:
    keras.utils.set_random_seed(1)
    words = keras.Sequential([
        keras.Input((5,), dtype="int32"), keras.layers.Embedding(7, 4, mask_zero=True), keras.layers.Dense(3),
    ])  # fmt: skip
    random, tokens = np.random.default_rng(1), np.zeros((16, 5), "int32")
    for row, length in enumerate([5, 5, 5, 5, 1, 1, 1, 1, 2, 2, 2, 2, 5, 5, 5, 5]):
        tokens[row, :length] = random.integers(1, 7, length)
    words.compile(accumulating(), loss())
    with check.record(words) as recording:
        words.fit(tokens, random.integers(0, 3, (16, 5)), batch_size=4, verbose=0, shuffle=False)
    report = recording.report
    assert names(report) == [MEAN], report
    assert [c.terms for c in report.optimizers[0].windows[0].coefficients] == [20, 4, 8, 20]


def test_an_overflow_drops_a_micro_batch() -> None:
    scaler = keras.optimizers.LossScaleOptimizer(accumulating(), initial_scale=64.0)
    model = made()
    model.compile(scaler, loss())
    weights = np.ones(20)
    weights[4] = np.inf
    with check.record(model) as recording:
        model.fit(X[:20], Y[:20], sample_weight=weights, batch_size=4, verbose=0, shuffle=False)
    report = recording.report
    assert not report.faults and "was computed and dropped" in str(report), report
    assert values(report) == pytest.approx([0.25, 0, 0.25, 0.25, 0.25], rel=1e-6)


# ---- Loops of a program's own


def own(sizes: Sequence[Sequence[int]], weigh: Callable[[int, Sequence[int]], float]) -> check.Report:
    """Accumulates by hand, as a program on each backend would. weigh: what the mean of n samples is multiplied by."""
    model, mean, optimizer = made(), loss(), keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)
    with check.record(model, optimizer) as recording:
        for window in sizes:
            total: list[Any] = []
            for n in window:
                found = GRADIENTS[BACKEND](model, mean, n, weigh(n, window))
                recording.micro_batch([np.asarray(keras.ops.convert_to_numpy(each)) for each in found])
                total = [a + b for a, b in zip(total, found, strict=True)] if total else found
            recording.step([np.asarray(keras.ops.convert_to_numpy(each)) for each in total])
            optimizer.apply(total, model.trainable_variables)
    return recording.report


def by_tape(model: Any, mean: Any, n: int, factor: float) -> list[Any]:
    import tensorflow as tf

    with tf.GradientTape() as tape:
        value = mean(Y[:n], model(X[:n])) * factor
    found: list[Any] = tape.gradient(value, model.trainable_variables)
    return found


def by_jax(model: Any, mean: Any, n: int, factor: float) -> list[Any]:
    import jax

    def value(trainable: Any) -> Any:
        return mean(Y[:n], model.stateless_call(trainable, [], X[:n])[0]) * factor

    return list(jax.grad(value)([variable.value for variable in model.trainable_variables]))


def by_torch(model: Any, mean: Any, n: int, factor: float) -> list[Any]:
    model.zero_grad()
    (mean(Y[:n], model(X[:n])) * factor).backward()
    return [variable.value.grad.clone() for variable in model.trainable_variables]


GRADIENTS = {"tensorflow": by_tape, "jax": by_jax, "torch": by_torch}


def test_a_loop_of_the_programs_own() -> None:
    uneven = [[8, 4], [2, 4, 6], [8, 4]]
    report = own(uneven, lambda n, window: n / sum(window))
    told = next(each for each in report.optimizers if each.name == "step()")
    assert not told.faults and [len(window.coefficients) for window in told.windows] == [2, 3, 2], report
    report = own(uneven, lambda n, window: 1 / len(window))
    told = next(each for each in report.optimizers if each.name == "step()")
    assert [fault.name for fault in told.faults] == [MEAN], report


@pytest.mark.only("tensorflow")
def test_tapes_are_seen_whoever_adds_up() -> None:
    import tensorflow as tf

    model, mean = made(), loss()
    sums = [tf.Variable(tf.zeros_like(each.value)) for each in model.trainable_variables]
    optimizer = keras.optimizers.Adam(0.01, global_clipnorm=0.1)

    @tf.function  # type: ignore[untyped-decorator]
    def micro_batch(x: Any, y: Any, factor: Any) -> None:
        with tf.GradientTape() as tape:
            value = mean(y, model(x)) * factor
        for total, gradient in zip(sums, tape.gradient(value, model.trainable_variables), strict=True):
            total.assign_add(gradient)

    @tf.function  # type: ignore[untyped-decorator]
    def step() -> None:
        optimizer.apply(sums, model.trainable_variables)
        for total in sums:
            total.assign(tf.zeros_like(total))

    def train(sizes: Sequence[Sequence[int]], is_right: bool) -> check.Report:
        with check.record() as recording:
            for window in sizes:
                for n in window:
                    factor = n / sum(window) if is_right else 1 / len(window)
                    micro_batch(tf.constant(X[:n]), tf.constant(Y[:n]), tf.constant(factor, "float64"))
                step()
        return recording.report

    report = train([[8, 4], [2, 4, 6]], True)
    assert is_silent(report) and len(values(report, 1)) == 3, report
    assert names(train([[8, 4], [2, 4, 6]], False)) == [MEAN]  # by the same graph


@pytest.mark.only("tensorflow")
def test_what_xla_compiles_is_refused_by_name() -> None:
    import tensorflow as tf

    model, mean, optimizer = made(), loss(), keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)

    @tf.function(jit_compile=True)  # type: ignore[untyped-decorator]
    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            value = mean(y, model(x))
        optimizer.apply(tape.gradient(value, model.trainable_variables), model.trainable_variables)

    with check.record() as recording:
        step(tf.constant(X[:4]), tf.constant(Y[:4]))
    assert not recording.report.ok and "that XLA compiles is not watched" in str(recording.report)


@pytest.mark.only("tensorflow", "jax")
def test_names_of_losses_within_compiled_functions() -> None:
    model = made()

    def error(y_true: Any, y_pred: Any) -> Any:
        value = keras.ops.mean(keras.ops.square(y_pred), axis=-1)
        return recording.loss(keras.ops.mean(value), weight=keras.ops.cast(keras.ops.shape(value)[0], "float32"))

    with check.record(model) as recording:
        model.compile(accumulating(), error)
        model.fit(X[:30], Y[:30], batch_size=4, epochs=2, verbose=0, shuffle=False)
    report = recording.report
    assert names(report) == [MEAN] and "loss in " in str(report), report


def test_a_recording_may_begin_within_a_window() -> None:
    model = made()
    model.compile(accumulating(), loss())
    model.fit(X[:24], Y[:24], batch_size=4, verbose=0, shuffle=False)  # two micro-batches are left
    with check.record(model) as recording:
        model.fit(X[:40], Y[:40], batch_size=4, verbose=0, shuffle=False)
    report = recording.report
    assert is_silent(report) and values(report) == pytest.approx([0.25] * 4, rel=1e-6), report


def test_recordings_within_one_another() -> None:
    model = made()
    model.compile(accumulating(), loss())
    with check.record() as outer:
        with check.record(model) as inner:
            model.fit(X, Y, batch_size=4, verbose=0, shuffle=False)
    for report in (inner.report, outer.report):
        assert report.ok and len(report.optimizers[0].windows) == 3 and len(values(report)) == 4, report


def test_variables_may_come_later() -> None:
    model, mean, optimizer = made(), loss(), keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)
    with check.record() as recording:
        for i in range(4):
            count = 2 if i < 2 else 4
            gradients = GRADIENTS[BACKEND](model, mean, 4 + i, 1.0)[-count:]
            optimizer.apply(gradients, model.trainable_variables[-count:])
    assert recording.report.ok and len(recording.report.optimizers[0].windows) == 4, recording.report


@pytest.mark.only("tensorflow")
def test_what_tensorflow_computes_for_something_else() -> None:
    import tensorflow as tf

    model, mean, x = made(), loss(reduction="none"), tf.constant(X[:4])
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)

    def jacobians() -> Any:
        with tf.GradientTape() as tape:
            value = mean(Y[:4], model(x))
        return tape.jacobian(value, model.trainable_variables)

    def each_alone() -> Any:
        @tf.function  # type: ignore[untyped-decorator]
        def one(row: Any) -> Any:
            with tf.GradientTape() as tape:
                value = tf.reduce_sum(mean(Y[:1], model(row[None])))
            return tape.gradient(value, model.trainable_variables)[0]

        return tf.vectorized_map(one, x)

    alone = jacobians(), each_alone()
    with check.record() as recording:
        watched = jacobians(), each_alone()
        for _ in range(3):
            with tf.GradientTape() as tape:
                value = tf.reduce_mean(model(x) ** 2)
            optimizer.apply(tape.gradient(value, model.trainable_variables), model.trainable_variables)
            with tf.GradientTape() as tape:
                value = tf.reduce_mean(tf.abs(model(tf.constant(X[4:8]))))
            tape.gradient(value, model.trainable_variables)  # is looked at, and not applied
    for a, b in zip(tf.nest.flatten(alone), tf.nest.flatten(watched), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-15)
    report = recording.report
    assert not report.faults and "jacobians compute is not watched" in str(report), report
    assert "was computed and dropped, which may be meant" in str(report)


@pytest.mark.only("tensorflow")
def test_a_strategy_of_tensorflow() -> None:
    import tensorflow as tf

    with check.record() as recording, tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        model = made()
        model.compile(keras.optimizers.SGD(0.1), loss())
        model.fit(X, Y, batch_size=4, verbose=0, shuffle=False)
    assert recording.report.ok, recording.report
    assert is_silent(fit(made(), accumulating()))


@pytest.mark.only("tensorflow")
def test_lines_are_those_of_the_program() -> None:
    import tensorflow as tf

    model, mean, optimizer = made(), loss(), keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)

    @tf.function  # type: ignore[untyped-decorator]
    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            value = mean(y, model(x))
        optimizer.apply(tape.gradient(value, model.trainable_variables), model.trainable_variables)

    with check.record() as recording:
        step(tf.constant(X[:4]), tf.constant(Y[:4]))
    (window,) = recording.report.optimizers[0].windows
    assert "test_keras_check.py:" in window.step, window.step


@pytest.mark.only("tensorflow")
def test_a_step_that_fails_is_passed_over() -> None:
    import tensorflow as tf

    model, mean, optimizer = made(), loss(), keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)

    @tf.function  # type: ignore[untyped-decorator]
    def step(x: Any, y: Any, limit: Any) -> None:
        with tf.GradientTape() as tape:
            value = mean(y, model(x))
        tf.debugging.assert_less(value, limit)
        optimizer.apply(tape.gradient(value, model.trainable_variables), model.trainable_variables)

    with check.record(windows=30) as recording:
        for i in range(60):
            try:
                step(tf.constant(X[:4]), tf.constant(Y[:4]), tf.constant(-1.0 if i == 3 else 1e9, "float64"))
            except tf.errors.InvalidArgumentError:
                assert i == 3
        assert recording._series.is_limited  # before the end calls what is left
    assert len(recording.report.optimizers[0].windows) == 30, recording.report


@pytest.mark.only("torch")
def test_what_torch_transforms_is_left_alone() -> None:
    import torch

    model, mean = made(), loss()
    variables = [variable.value.detach() for variable in model.trainable_variables]

    def value(variables: Any, x: Any, y: Any) -> Any:
        return mean(y[None], model.stateless_call(list(variables), [], x[None])[0])

    each = torch.func.vmap(torch.func.grad(value), in_dims=(None, 0, 0))
    given = variables, torch.tensor(X[:4]), torch.tensor(Y[:4])
    alone = each(*given)
    with check.record():
        watched = each(*given)
    assert all(torch.equal(a, b) for a, b in zip(alone, watched, strict=True))


@pytest.mark.only("torch")
def test_a_model_of_keras_in_a_loop_of_torch() -> None:
    import torch

    model, mean = made(), loss()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with check.record() as recording:
        for _ in range(2):
            for n in (4, 8):
                torch.nn.functional.cross_entropy(model(torch.tensor(X[:n])), torch.tensor(Y[:n])).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert names(recording.report) == ["sum for mean"], recording.report
    assert mean is not None


def test_releases_that_are_not_known_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "keras.src.losses.loss", None)
    with check.record() as recording:
        model = made()
        model.compile(accumulating(), loss())
        model.fit(X[:8], Y[:8], batch_size=4, verbose=0)
    assert not recording.report.ok and f"on {BACKEND} is not watched" in str(recording.report), recording.report


# ---- What a recording leaves


def test_it_computes_the_same_and_leaves_nothing() -> None:
    functions = [
        keras.optimizers.Optimizer.apply, keras.optimizers.Optimizer._clip_gradients,
        keras.optimizers.LossScaleOptimizer.apply, keras.layers.BatchNormalization.call, keras.Model.make_train_function,
        sys.modules["keras.src.losses.loss"].reduce_weighted_values, gk._optimizer.Accumulation.add,
    ]  # fmt: skip

    def trained(is_watched: bool) -> Any:
        model = made(keras.layers.BatchNormalization())
        model.compile(accumulating(global_clipnorm=0.1), loss())
        for _ in range(2):
            with check.record(model) if is_watched else check.record(windows=0) as recording:
                model.fit(X, Y, batch_size=4, epochs=1, verbose=0, shuffle=False)
        assert len(recording.report.optimizers[0].windows) == (3 if is_watched else 0)
        model.fit(X, Y, batch_size=4, epochs=1, verbose=0, shuffle=False)
        return model.get_weights()

    alone = made(keras.layers.BatchNormalization())
    alone.compile(accumulating(global_clipnorm=0.1), loss())
    for _ in range(3):
        alone.fit(X, Y, batch_size=4, epochs=1, verbose=0, shuffle=False)
    for a, b in zip(trained(True), alone.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)
    assert functions == [
        keras.optimizers.Optimizer.apply, keras.optimizers.Optimizer._clip_gradients,
        keras.optimizers.LossScaleOptimizer.apply, keras.layers.BatchNormalization.call, keras.Model.make_train_function,
        sys.modules["keras.src.losses.loss"].reduce_weighted_values, gk._optimizer.Accumulation.add,
    ]  # fmt: skip


def test_what_a_program_has_replaced_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    with check.record():
        watched = keras.optimizers.Optimizer.apply

        def apply(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(optimizer)
            return watched(optimizer, *args, **kwargs)

        monkeypatch.setattr(keras.optimizers.Optimizer, "apply", apply)
    model = made()
    model.compile(accumulating(), loss())
    model.fit(X[:8], Y[:8], batch_size=4, verbose=0)
    assert calls and keras.optimizers.Optimizer.apply is apply
    monkeypatch.delattr(keras.optimizers.Optimizer, "apply")


PROGRAM = """
import numpy as np, keras
x, y = np.random.rand(30, 4), np.random.rand(30, 1)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(1)])
model.compile(keras.optimizers.Adam(gradient_accumulation_steps=4), "mse")
model.fit(x, y, batch_size=4, epochs=2, verbose=0)
"""


def test_the_command_imports_nothing_before_the_program(tmp_path: pathlib.Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "gradaccum.check", "--json", "report.json", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=os.environ)
    assert done.returncode == 1 and MEAN in done.stderr, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["title"].endswith(f"on {BACKEND}") and report["optimizers"][0]["faults"][0]["where"] == "train.py:6"


def block(name: str) -> str:
    page = (pathlib.Path(os.environ["GA_HEADER"]).parents[2] / "docs" / "check.md").read_text()
    return page.partition(f"<!-- test: {name} -->\n```python\n")[2].partition("```")[0]


def test_the_page() -> None:
    exec(compile(block("keras"), "keras", "exec"), {})


# ---- optax


@pytest.mark.only("jax")
def test_the_page_on_optax() -> None:
    exec(compile(block("optax"), "optax", "exec"), {})


def through_optax(make: Callable[[Any], Any], sizes: Sequence[Sequence[int]], weigh: Any = None) -> check.Report:
    """A jitted step that optax accumulates in. make: from the module, the transformation. weigh: of the mean of n."""
    import jax
    import optax

    tx, random = check.wrap(make(optax)), np.random.default_rng(4)
    parameters = {"w": random.normal(size=(6, 3)), "b": np.zeros(3)}

    def value(parameters: Any, x: Any, y: Any, factor: Any) -> Any:
        found = optax.softmax_cross_entropy_with_integer_labels(x @ parameters["w"] + parameters["b"], y)
        return recording.loss(found.mean(), weight=len(x)) * factor

    @jax.jit
    def step(parameters: Any, state: Any, x: Any, y: Any, factor: Any) -> Any:
        gradients = jax.grad(value)(parameters, x, y, factor)
        updates, state = tx.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state

    with check.record() as recording:
        state = tx.init(parameters)
        for window in sizes:
            for n in window:
                factor = 1.0 if weigh is None else weigh(n, window)
                rows = slice(begin := random.integers(40), begin + n)
                parameters, state = step(parameters, state, X[rows], Y[rows], factor)
    return recording.report


@pytest.mark.only("jax")
def test_optax() -> None:
    even = [[4, 4, 4]] * 3
    for make in (
        lambda optax: optax.MultiSteps(optax.adam(0.01), 3),
        lambda optax: optax.MultiSteps(optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1)), 3),
        lambda optax: optax.MultiSteps(optax.adam(0.01), 3).gradient_transformation(),
    ):
        report = through_optax(make, even)
        assert is_silent(report), report
        assert [values(report, i) for i in range(3)] == [pytest.approx([1 / 3] * 3, rel=1e-5)] * 3  # it adds up in f32
    report = through_optax(lambda optax: optax.MultiSteps(optax.adam(0.01), 3), [[8, 4, 1]] * 3)
    assert names(report) == [MEAN], report
    report = through_optax(
        lambda optax: optax.MultiSteps(optax.adam(0.01), 3, use_grad_mean=False), [[8, 4, 1]] * 3,
        lambda n, window: n / sum(window),
    )  # fmt: skip
    assert is_silent(report), report
    report = through_optax(lambda optax: optax.MultiSteps(optax.adam(0.01), 3, use_grad_mean=False), even)
    assert names(report) == ["sum for mean"], report


@pytest.mark.only("jax")
def test_optax_with_what_is_not_finite() -> None:
    import optax

    def broken(n: int, window: Sequence[int]) -> float:
        return float("nan") if n == 2 else 1.0

    sizes = [[4, 4, 4], [4, 2, 4], [4, 4, 4]]
    report = through_optax(lambda optax: optax.MultiSteps(optax.sgd(0.1), 3), sizes, broken)
    assert names(report)[0] == "non-finite gradient applied", report
    kept = optax.MultiSteps(optax.sgd(0.1), 3, should_skip_update_fn=optax.skip_not_finite)
    report = through_optax(lambda _: kept, [*sizes, [4]], broken)
    assert not report.faults and "was computed and dropped" in str(report), report


@pytest.mark.only("jax")
def test_a_recording_may_begin_within_a_window_of_optax() -> None:
    import jax
    import optax

    tx = check.wrap(optax.MultiSteps(optax.sgd(0.1), 3))
    weights = RANDOM.normal(size=(6, 3))
    state = tx.init(weights)

    def value(weights: Any, x: Any) -> Any:
        return ((x @ weights) ** 2).mean()

    for i in range(8):
        if i == 1:
            recording = check.record().__enter__()
        gradients = jax.grad(value)(weights, X[i : i + 4])
        updates, state = tx.update(gradients, state)
        weights = optax.apply_updates(weights, updates)
    recording.__exit__(None, None, None)
    report = recording.report
    assert report.ok and len(report.optimizers[0].windows) == 1 and len(values(report)) == 3, report


@pytest.mark.only("jax")
def test_what_jax_transforms_and_wrap_take_as_without_a_recording() -> None:
    import jax
    import jax.numpy as jnp
    import optax

    tx = check.wrap(optax.sgd(0.1))
    parameters = {"a": jnp.ones(3), "b": 1.0}
    tx.update({"a": jnp.ones(3), "b": 0.0}, tx.init(parameters), parameters)
    several = check.wrap(optax.MultiSteps(optax.sgd(0.1), 2))
    state = several.init({"a": jnp.ones(3), "b": jnp.ones(3)})
    with jax.checking_leaks():
        jax.jit(lambda g, s: several.update({"a": np.zeros(3), "b": g}, s))(jnp.ones(3), state)
    assert check.wrap(tx).update({"a": jnp.ones(3), "b": 0.0}, tx.init(parameters))

    model, mean = made(), loss()
    variables = [variable.value for variable in model.trainable_variables]

    def value(variables: Any) -> Any:
        return mean(Y[:4], model.stateless_call(variables, [], X[:4])[0])

    alone = jax.jvp(value, (variables,), (variables,))
    with check.record() as recording:
        watched = jax.jvp(value, (variables,), (variables,))
        stacked = jax.tree.map(lambda each: jnp.stack([each, each]), {"a": jnp.ones(3), "b": jnp.ones(3)})
        jax.vmap(several.update, in_axes=(0, None))(stacked, state)
    assert alone == watched and "jax.vmap transforms is not watched" in str(recording.report)


@pytest.mark.only("jax")
def test_a_transformation_of_optax_ends_windows_that_the_program_tells_of() -> None:
    import jax
    import optax

    tx = check.wrap(optax.adam(0.01))
    parameters = {"w": RANDOM.normal(size=(6, 3))}

    def value(parameters: Any, x: Any) -> Any:
        return ((x @ parameters["w"]) ** 2).mean()

    def train(weigh: Callable[[int], float]) -> check.Report:
        with check.record() as recording:
            state = tx.init(parameters)
            for _ in range(2):
                total = jax.tree.map(np.zeros_like, parameters)
                for n in (8, 2, 6):
                    gradients = jax.grad(value)(parameters, X[:n])
                    recording.micro_batch(gradients, weight=n)
                    total = jax.tree.map(lambda a, b, n=n: a + weigh(n) * b, total, gradients)
                tx.update(total, state, parameters)
        return recording.report

    assert is_silent(train(lambda n: n / 16))
    assert names(train(lambda n: 1 / 3)) == [MEAN]
    assert names(train(lambda n: 1.0)) == ["sum for mean"]
