# SPDX-License-Identifier: Apache-2.0
"""Habits of loops of torch that would go wrong without a word: refused, or said once; right loops stay silent."""

import collections
import copy
import pathlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import gradaccum as ga
import gradaccum.torch as gt
import pytest
import torch
from conftest import Task, close, train
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


def parameter(*values: float) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.tensor(values, dtype=torch.float32))


def adam() -> tuple[torch.nn.Parameter, gt.Optimizer]:
    p = parameter(1, 2)
    optimizer = gt.Adam([p], lr=0.1)
    optimizer.backward(p.square().sum())
    optimizer.step()
    return p, optimizer


# ---- optimizer.state


def test_state_is_walked_as_an_empty_one() -> None:
    p, optimizer = adam()
    state: Any = optimizer.state
    assert isinstance(state, collections.defaultdict)
    assert not state and len(state) == 0 and p not in state and list(state.items()) == []
    assert state.get(p) is None and state.get(p, 3) == 3
    of_p = state[p]
    assert isinstance(of_p, dict) and len(of_p) == 0 and "step" not in of_p and list(of_p) == []
    assert of_p.get("exp_avg") is None
    assert copy.deepcopy(state) == {}
    assert len(state) == 0  # looking has added nothing
    with pytest.raises(KeyError):
        of_p["step"]
    assert set(optimizer.state_dict()["state"][0]) == {"step", "exp_avg", "exp_avg_sq"}


def test_checkpoints_that_ask_for_a_first_state_make_no_step(tmp_path: pathlib.Path) -> None:
    """Those of torch make a step with learning rates of 0, which is none of the run."""

    def made() -> tuple[torch.nn.Module, Any]:
        torch.manual_seed(0)
        net = torch.nn.Linear(3, 2)
        return net, gt.AdamW(net.parameters(), lr=0.1)

    def steps_of(net: torch.nn.Module, optimizer: Any, steps: int) -> None:
        for k in range(steps):
            optimizer.backward(net(torch.full((2, 3), k + 1.0)).square().sum())
            optimizer.step()

    net, optimizer = made()
    before = copy.deepcopy(net.state_dict())
    _, state = get_state_dict(net, optimizer)
    assert optimizer.context.window.steps == 0
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert not state["state"]["weight"]["exp_avg"].any() and state["state"]["weight"]["step"] == 0

    steps_of(net, optimizer, 2)
    optimizer.backward(net(torch.ones(2, 3)).sum())
    of_net, state = get_state_dict(net, optimizer)
    assert optimizer.context.window.micro_batches == 1, "an open window stays"
    optimizer.discard()
    checkpoint.save({"net": of_net, "optimizer": state}, checkpoint_id=tmp_path)
    steps_of(net, optimizer, 1)

    other, new = made()
    of_net, state = get_state_dict(other, new)
    checkpoint.load({"net": of_net, "optimizer": state}, checkpoint_id=tmp_path)
    set_state_dict(other, new, model_state_dict=of_net, optim_state_dict=state)
    steps_of(other, new, 1)
    assert new.context.window.steps == 3
    assert all(torch.equal(value, net.state_dict()[name]) for name, value in other.state_dict().items())


def test_a_checkpoint_before_the_first_step_changes_nothing(tmp_path: pathlib.Path) -> None:
    """With dampening, the first gradient weighs more than the next: torch's SGD takes zeros that were saved for a step."""
    nets = []
    for way in ("plain", "saved", "loaded"):
        torch.manual_seed(0)
        net = torch.nn.Linear(3, 2)
        optimizer = gt.SGD(net.parameters(), lr=0.1, momentum=0.9, dampening=0.5)
        if way != "plain":
            of_net, state = get_state_dict(net, optimizer)
            if way == "saved":
                checkpoint.save({"net": of_net, "optimizer": state}, checkpoint_id=tmp_path)
            checkpoint.load({"net": of_net, "optimizer": state}, checkpoint_id=tmp_path)
            set_state_dict(net, optimizer, model_state_dict=of_net, optim_state_dict=state)
        for k in range(3):
            optimizer.backward(net(torch.full((2, 3), k + 1.0)).square().sum())
            optimizer.step()
        nets.append(net.state_dict())
    for net in nets[1:]:
        assert all(torch.equal(value, nets[0][name]) for name, value in net.items())


@pytest.mark.parametrize(
    "write",
    [
        lambda o, p: o.state[p]["exp_avg"].zero_(),
        lambda o, p: o.state[p].__setitem__("exp_avg", p),
        lambda o, p: o.state[p].update(step=0),
        lambda o, p: o.state[p].setdefault("step", 0),
        lambda o, p: o.state[p].clear(),
        lambda o, p: o.state[p].pop("exp_avg", None),
        lambda o, p: o.state[p].__ior__({"step": 0}),
        lambda o, p: o.state.__setitem__(p, {}),
        lambda o, p: o.state.__delitem__(p),
        lambda o, p: o.state.pop(p, None),
        lambda o, p: o.state.clear(),
        lambda o, p: o.state.update({p: {}}),
        lambda o, p: setattr(o, "state", collections.defaultdict(dict)),
    ],
)
def test_a_write_to_state_raises(write: Callable[[Any, Any], Any]) -> None:
    p, optimizer = adam()
    with pytest.raises((KeyError, RuntimeError), match=r"set_state\(\)") as caught:
        write(optimizer, p)
    assert not str(caught.value).startswith('"')
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.state_dict()["state"][0]["exp_avg"].abs().max() > 0


def test_the_way_that_messages_name() -> None:
    p, optimizer = adam()
    (own,) = optimizer.context.params
    own.set_state("exp_avg", torch.zeros(2))
    assert optimizer.state_dict()["state"][0]["exp_avg"].tolist() == [0, 0]


# ---- Groups


@pytest.mark.parametrize(
    "change",
    [
        lambda o, p: o.param_groups[1].__setitem__("params", [p]),
        lambda o, p: o.param_groups[1]["params"].append(p),
        lambda o, p: o.param_groups[1]["params"].clear(),
        lambda o, p: o.param_groups[1]["params"].__setitem__(0, p),
    ],
)
@pytest.mark.parametrize("way", ["backward", "step"])
def test_a_replaced_list_of_parameters_is_noticed(change: Callable[[Any, Any], Any], way: str) -> None:
    p, q, head = parameter(1), parameter(1), parameter(1)
    optimizer = gt.SGD([{"params": [p]}, {"params": [q]}], lr=0.1)
    optimizer.backward((p + q).sum())
    optimizer.step()
    change(optimizer, head)
    loss = (p + q + head).sum()
    with pytest.raises(RuntimeError, match='"params" of group 1 was changed.*add_param_group'):
        if way == "backward":
            optimizer.backward(loss)
        else:
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    assert q.item() == pytest.approx(0.9)


def test_groups_that_are_taken_away_are_noticed() -> None:
    p, q = parameter(1), parameter(1)
    optimizer = gt.SGD([{"params": [p]}, {"params": [q], "lr": 5.0}], lr=0.1)
    optimizer.backward((p + q).sum())
    del optimizer.param_groups[0]
    for call in (optimizer.step, optimizer.flush, optimizer.state_dict):
        with pytest.raises(RuntimeError, match="has 1 groups, but the optimizer has 2"):
            call()
    assert p.item() == 1
    optimizer.param_groups.clear()
    with pytest.raises(RuntimeError, match="has 0 groups, but the optimizer has 2"):
        optimizer.add_param_group({"params": [p, q]})


def test_accum_steps_cannot_be_changed() -> None:
    optimizer: Any = gt.SGD([parameter(1)], accum_steps=4)
    with pytest.raises(AttributeError):
        optimizer.accum_steps = 8
    assert optimizer.accum_steps == 4


def test_an_optimizer_that_was_taken_over_is_no_more() -> None:
    p = parameter(1)
    theirs = torch.optim.SGD([p], lr=1.0, momentum=0.9)
    optimizer = gt.wrap(theirs)
    p.sum().backward()  # type: ignore[no-untyped-call]
    with pytest.raises(RuntimeError, match=r"call that of what wrap\(\) returned"):
        theirs.step()
    with pytest.raises(ValueError, match="taken over by wrap"):
        gt.wrap(theirs)
    optimizer.step()
    assert p.item() == 0


# ---- zero_grad()


def test_zero_grad_that_was_to_drop_a_window(task: Task) -> None:
    net = task.net()
    optimizer = gt.SGD(net.parameters(), lr=0.1)
    optimizer.zero_grad()
    for _ in range(2):
        optimizer.backward(task.whole(net, 0))
    with pytest.raises(RuntimeError, match=r"discard\(\) drops it"):
        optimizer.zero_grad()
    optimizer.discard()
    optimizer.zero_grad()
    # After the first micro-batch it may be a loop that always calls it; the third one shows that it is not.
    optimizer.backward(task.whole(net, 0))
    optimizer.zero_grad()
    optimizer.backward(task.whole(net, 0))
    with pytest.raises(RuntimeError, match=r"discard\(\) drops it"):
        optimizer.backward(task.whole(net, 0))
    optimizer.discard()
    # A loop that has ended windows without it is known.
    for _ in range(2):
        optimizer.backward(task.whole(net, 0))
    optimizer.step()
    optimizer.backward(task.whole(net, 0))
    with pytest.raises(RuntimeError, match=r"discard\(\) drops it"):
        optimizer.zero_grad()
    optimizer.discard()
    with optimizer.micro_batch():
        optimizer.zero_grad()
        task.whole(net, 0).backward()  # type: ignore[no-untyped-call]
        with pytest.raises(RuntimeError, match="in a micro-batch after its backward"):
            optimizer.zero_grad()


def test_zero_grad_drops_what_a_plain_backward_left(task: Task) -> None:
    net = task.net()
    optimizer = gt.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.backward(task.whole(net, 0))
    task.whole(net, 1).backward()  # type: ignore[no-untyped-call]
    optimizer.zero_grad()
    optimizer.step()
    close(net, train(task, lambda p: torch.optim.SGD(p, lr=0.1), steps=1), 1e-12)


def test_gradients_of_another_weight_are_not_taken_by_step(task: Task) -> None:
    net = task.net()
    optimizer = gt.SGD(net.parameters(), lr=0.1)
    optimizer.backward(task.whole(net, 0), weight=8)
    task.whole(net, 0).backward()  # type: ignore[no-untyped-call]
    with pytest.raises(RuntimeError, match=r"accumulate\(weight=\.\.\.\)"):
        optimizer.step()
    optimizer.accumulate(weight=8)
    optimizer.step()
    close(net, train(task, lambda p: torch.optim.SGD(p, lr=0.1), steps=1), 1e-12)


def test_a_micro_batch_that_failed_is_none_of_the_window(task: Task) -> None:
    net = task.net()
    optimizer = gt.SGD(net.parameters(), lr=0.1, accum_steps=1)
    with pytest.raises(ga.Error, match="weight"):
        optimizer.backward(task.whole(net, 0), weight=-1)
    task.whole(net, 0).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    close(net, train(task, lambda p: torch.optim.SGD(p, lr=0.1), steps=1), 1e-12)


# ---- Warnings


def said(call: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()
    assert all(entry.filename == __file__ for entry in found), [entry.filename for entry in found]
    return [str(entry.message) for entry in found]


DIVIDED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "divided": lambda loss: loss / 4,
    "times": lambda loss: loss * 0.25,
    "the other way round": lambda loss: 0.25 * loss,
    "of two terms": lambda loss: (loss + loss.detach()) / 4,
    "in place": lambda loss: loss.div_(4),
}


@pytest.mark.parametrize("steps", [4, None])
@pytest.mark.parametrize("how", DIVIDED)
def test_a_loss_divided_by_k_is_said(task: Task, how: str, steps: int | None) -> None:
    net = task.net()
    optimizer = gt.SGD(net.parameters(), lr=0.1, accum_steps=steps)

    def windows() -> None:
        for step in range(2):
            for loss, _ in task.parts(net, step, (2, 2, 2, 2)):
                optimizer.backward(DIVIDED[how](loss))
            optimizer.step()
            optimizer.backward(task.whole(net, step) / 4)  # of a window that comes to nothing
            optimizer.discard()

    (message,) = said(windows)
    assert "the loss was divided by 4 before backward" in message
    assert not said(windows)  # once
    hand = task.net()
    theirs = torch.optim.SGD(hand.parameters(), lr=0.1 / 4)
    for step in (0, 1, 0, 1):
        theirs.zero_grad()
        task.whole(hand, step).backward()  # type: ignore[no-untyped-call]
        theirs.step()
    close(net, hand, 1e-12)  # no number has changed


def test_a_third_is_said(task: Task) -> None:
    net = task.net().float()
    optimizer = gt.SGD(net.parameters(), lr=0.1, accum_steps=3)
    (message,) = said(lambda: optimizer.backward(net(task.x[0].float()).mean() * (1 / 3)))
    assert "divided by 3" in message


def test_steps_without_gradients_are_said(task: Task) -> None:
    net = task.net()
    optimizer = gt.SGD(net.parameters(), lr=0.1, accum_steps=3)

    def loop() -> None:
        for step in range(12):
            task.whole(net, step).backward()  # type: ignore[no-untyped-call]
            optimizer.zero_grad()
            optimizer.step()

    (message,) = said(loop)
    assert "3 calls of step() in a row found no gradient" in message
    close(net, task.net(), 0)


def test_stepping_every_k_beside_accum_steps_is_said(task: Task) -> None:
    net = task.net()
    optimizer = gt.SGD(net.parameters(), lr=0.1, accum_steps=4)

    def loop() -> None:
        for i in range(40):
            loss = task.whole(net, i)
            (loss / 4).backward()
            if (i + 1) % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()

    (message,) = said(loop)
    assert "16 for one update" in message
    assert optimizer.context.window.steps == 2


@pytest.mark.filterwarnings("error")
def test_a_backward_that_reaches_no_parameter_is_said(task: Task) -> None:
    net = task.net()
    optimizer = gt.SGD(net.parameters(), lr=0.1)
    optimizer.backward(task.whole(net, 0))
    optimizer.discard()
    net.load_state_dict(task.net().state_dict(), assign=True)

    def loop() -> None:
        for step in range(2):
            optimizer.backward(task.whole(net, step))
            optimizer.step()

    (message,) = said(loop)
    assert "no gradient to any parameter" in message
    net = task.net().requires_grad_(False)
    net[2].weight.requires_grad_(True)
    optimizer = gt.SGD(net.parameters(), lr=0.1)
    optimizer.backward(task.whole(net, 0))
    net[2].requires_grad_(False)
    net[0].bias.requires_grad_(True)
    optimizer.backward(task.whole(net, 0))
    optimizer.step()


def test_a_second_accumulate_is_said() -> None:
    p = parameter(1)
    optimizer = gt.SGD([p], lr=1.0)
    p.sum().backward()  # type: ignore[no-untyped-call]
    assert not said(lambda: optimizer.accumulate(weight=0))
    (message,) = said(lambda: [optimizer.accumulate(weight=3) for _ in range(2)])
    assert "a micro-batch of weight 3 gave no gradient" in message


def test_a_loss_that_is_not_scaled_is_said() -> None:
    for way in ("micro_batch", "accumulate", "step", "backward", "scale_loss"):
        p = parameter(1)
        optimizer = gt.SGD([p], lr=1.0, loss_scaler=ga.LossScaler(initial_scale=8.0))

        def loop(p: Any = p, optimizer: Any = optimizer, way: str = way) -> None:
            for _ in range(2):
                if way == "micro_batch":
                    with optimizer.micro_batch():
                        p.sum().backward()
                elif way == "backward":
                    optimizer.backward(p.sum())
                elif way == "scale_loss":
                    optimizer.scale_loss(p.sum()).backward()
                else:
                    p.sum().backward()
                    if way == "accumulate":
                        optimizer.accumulate()
                optimizer.step()

        found = said(loop)
        if way in ("backward", "scale_loss"):
            assert not found
            assert p.item() == -1
        else:
            assert len(found) == 1 and "scale_loss() was not called" in found[0]
            assert p.item() == 1 - 2 / 8


def test_two_optimizers_cannot_take_one_gradient() -> None:
    p = parameter(1)
    one, other = gt.SGD([p], lr=1.0), gt.SGD([p], lr=1.0)
    with pytest.raises(RuntimeError, match="has taken it"), one.micro_batch(), other.micro_batch():
        p.sum().backward()  # type: ignore[no-untyped-call]
    for optimizer in (one, other):
        optimizer.backward(p.sum())
        optimizer.step()
    assert p.item() == -1


# ---- Loops that are right

K = 4


def counted(task: Task, net: Any, optimizer: Any) -> None:
    for loss, _ in task.parts(net, 0, (2, 2, 2, 2)):
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def counted_afterwards(task: Task, net: Any, optimizer: Any) -> None:
    for loss, _ in task.parts(net, 0, (2, 2, 2, 2)):
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


def counted_twice_zeroed(task: Task, net: Any, optimizer: Any) -> None:
    for loss, _ in task.parts(net, 0, (2, 2, 2, 2)):
        optimizer.zero_grad()
        optimizer.zero_grad()
        optimizer.backward(loss, weight=2)
        optimizer.step()


def one_step(task: Task, net: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    for loss, size in task.parts(net, 0):
        optimizer.backward(loss, weight=size)
    optimizer.flush()
    optimizer.zero_grad()


def accumulated(task: Task, net: Any, optimizer: Any) -> None:
    for loss, size in task.parts(net, 0):
        optimizer.zero_grad()
        loss.backward()
        optimizer.accumulate(weight=size)
    optimizer.flush()


def accumulated_and_zeroed(task: Task, net: Any, optimizer: Any) -> None:
    for loss, size in task.parts(net, 0):
        loss.backward()
        optimizer.accumulate(weight=size)
        optimizer.zero_grad()
    optimizer.flush()


def zeroed_within(task: Task, net: Any, optimizer: Any) -> None:
    for step_size in range(2):
        for k in range(4):
            with optimizer.micro_batch(weight=2):
                optimizer.zero_grad()
                list(task.parts(net, step_size * 0, (2, 2, 2, 2)))[k][0].backward()
            optimizer.step()
        if step_size == 0:
            torch.nn.utils.vector_to_parameters(
                torch.nn.utils.parameters_to_vector(task.net().parameters()), net.parameters()
            )


def sums(task: Task, net: Any, optimizer: Any) -> None:
    """A mean by hand, over as many samples as there are micro-batches: 2 x 4 outputs, in fours."""
    for k in range(2):
        x, y = task.x[0][4 * k : 4 * k + 4], task.y[0][4 * k : 4 * k + 4]
        square = (net(x) - y).square().mean(1).sum() / 4
        optimizer.backward(square, weight=4)
    optimizer.flush()


def mean_of_terms(task: Task, net: Any, optimizer: Any) -> None:
    for loss, size in task.parts(net, 0):
        same = loss * 1.0
        optimizer.backward((loss + same + same + same) / 4, weight=size)
    optimizer.flush()


def share_of_a_micro_batch(task: Task, net: Any, optimizer: Any) -> None:
    """Backwards of one micro-batch add up, so that a division is right."""
    for _ in range(1):
        with optimizer.micro_batch(weight=8):
            for loss, _ in task.parts(net, 0, (2, 2, 2, 2)):
                (loss / 4).backward()
    optimizer.flush()


def closures(task: Task, net: Any, optimizer: Any) -> None:
    for k in range(4):

        def closure(k: int = k) -> Any:
            optimizer.zero_grad()
            loss = list(task.parts(net, 0, (2, 2, 2, 2)))[k][0]
            loss.backward()
            return loss

        optimizer.step(closure)


def skipped(task: Task, net: Any, optimizer: Any) -> None:
    """A bad batch is left out, with zero_grad() before the next one."""
    for k, (loss, _) in enumerate(task.parts(net, 0, (2, 2, 2, 2))):
        optimizer.zero_grad()
        if k == 2:
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def two_backwards(task: Task, net: Any, optimizer: Any) -> None:
    for loss, _ in task.parts(net, 0, (2, 2, 2, 2)):
        optimizer.zero_grad()
        (0.5 * loss).backward(retain_graph=True)
        (0.5 * loss).backward()
        optimizer.step()


LOOPS = [
    counted, counted_afterwards, counted_twice_zeroed, one_step, accumulated, accumulated_and_zeroed, zeroed_within,
    sums, mean_of_terms, share_of_a_micro_batch, closures, skipped, two_backwards,
]  # fmt: skip


@pytest.fixture
def strict() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.usefixtures("strict")
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_right_loops_stay_silent(task: Task, loop: Any) -> None:
    want = train(task, lambda p: torch.optim.SGD(p, lr=0.1), steps=1)
    net = task.net()
    optimizer = gt.SGD(net.parameters(), lr=0.1, accum_steps=K)
    start = [p.detach().clone() for p in net.parameters()]
    for _ in range(3):
        with torch.no_grad():
            for p, q in zip(net.parameters(), start, strict=True):
                p.copy_(q)
        loop(task, net, optimizer)
        assert optimizer.context.window.micro_batches == 0
        close(net, want, 1e-12)


@pytest.mark.usefixtures("strict")
def test_a_frozen_group_may_step() -> None:
    p = parameter(1).requires_grad_(False)
    optimizer = gt.SGD([p], lr=0.1, accum_steps=2)
    for _ in range(9):
        optimizer.zero_grad()
        optimizer.step()


@pytest.mark.usefixtures("strict")
def test_nan_losses_are_looked_at(task: Task) -> None:
    net = task.net()
    optimizer = gt.SGD(net.parameters(), lr=0.1, accum_steps=4, config=ga.Config(nonfinite=ga.Nonfinite.DROP_MICRO))
    for factor in (float("nan"), float("inf"), 0.0, -0.25):
        optimizer.backward(task.whole(net, 0) * factor)
        optimizer.step()
