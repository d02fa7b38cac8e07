# SPDX-License-Identifier: Apache-2.0
"""gradaccum.check in loops that programs write themselves, on each backend of Keras, and in those of optax."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
from check_models import (
    MEAN, RANDOM, X, Y, accumulating, block, fit, gradients_of, is_silent, loss, made, names, values,
)  # fmt: skip
from conftest import BACKEND
from gradaccum import check

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def own(sizes: Sequence[Sequence[int]], weigh: Callable[[int, Sequence[int]], float]) -> check.Report:
    """Accumulates by hand, as a program on each backend would. weigh: what the mean of n samples is multiplied by."""
    model, mean, optimizer = made(), loss(), keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)
    with check.record(model, optimizer) as recording:
        for window in sizes:
            total: list[Any] = []
            for n in window:
                found = gradients_of(model, mean, n, weigh(n, window))
                recording.micro_batch([np.asarray(keras.ops.convert_to_numpy(each)) for each in found])
                total = [a + b for a, b in zip(total, found, strict=True)] if total else found
            recording.step([np.asarray(keras.ops.convert_to_numpy(each)) for each in total])
            optimizer.apply(total, model.trainable_variables)
    return recording.report


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


def compiled_step(**options: Any) -> None:
    """A step in a function of TensorFlow, with options of tf.function."""
    import tensorflow as tf

    model, mean, optimizer = made(), loss(), keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)

    @tf.function(**options)  # type: ignore[untyped-decorator]
    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            value = mean(y, model(x))
        optimizer.apply(tape.gradient(value, model.trainable_variables), model.trainable_variables)

    step(tf.constant(X[:4]), tf.constant(Y[:4]))


@pytest.mark.only("tensorflow")
def test_what_xla_compiles_is_refused_by_name() -> None:
    with check.record() as recording:
        compiled_step(jit_compile=True)
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
            gradients = gradients_of(model, mean, 4 + i, 1.0)[-count:]
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
    with check.record() as recording:
        compiled_step()
    (window,) = recording.report.optimizers[0].windows
    assert "test_keras_check_loops.py:" in window.step, window.step


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
