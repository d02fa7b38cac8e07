# SPDX-License-Identifier: Apache-2.0
"""State in 8 bits: in steps, in state dictionaries, to and from torch's own optimizers."""

import copy
import pathlib
from typing import Any

import gradaccum as ga
import gradaccum.torch as gt
import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.utils.dlpack import from_dlpack

SHAPES = ((50, 100), (70,), (4097,))  # of which the second is too small for codes


def parameters() -> list[torch.nn.Parameter]:
    torch.manual_seed(1)
    return [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]


def step(optimizer: torch.optim.Optimizer, tensors: list[torch.nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors:
        tensor.grad = torch.randn(tensor.shape, generator=generator).to(tensor)
    if isinstance(optimizer, gt.Optimizer):
        optimizer.accumulate()
    optimizer.step()
    optimizer.zero_grad()


def trained(name: str = "AdamW", steps: int = 3, **options: Any) -> tuple[list[torch.nn.Parameter], gt.Optimizer]:
    tensors = parameters()
    optimizer = getattr(gt, name)(tensors, lr=0.01, **{"state_dtype": "8bit", **options})
    for seed in range(steps):
        step(optimizer, tensors, seed)
    return tensors, optimizer


def copies(tensors: list[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(tensor.detach().clone()) for tensor in tensors]


def same(a: list[torch.nn.Parameter], b: list[torch.nn.Parameter]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def numbers(optimizer: gt.Optimizer, index: int, name: str) -> Tensor:
    found: Any = optimizer.context.params[index].get_state(name, dtype=ga.Dtype.F32)
    return from_dlpack(found)


@pytest.mark.parametrize("state_dtype", ["8bit", ga.Dtype.STATE_8BIT])
def test_steps_are_near_those_of_f32(state_dtype: Any) -> None:
    tensors, optimizer = trained(steps=20, state_dtype=state_dtype)
    theirs = parameters()
    torchs = torch.optim.AdamW(theirs, lr=0.01)
    for seed in range(20):
        step(torchs, theirs, seed)
    dtypes = [{info.name: info.dtype for info in param.states} for param in optimizer.context.params]
    assert dtypes[0]["exp_avg"] == dtypes[2]["exp_avg_sq"] == ga.Dtype.U8
    assert dtypes[0]["exp_avg_scale"] == dtypes[1]["exp_avg"] == ga.Dtype.F32
    start = parameters()
    for i, (ours, other, first) in enumerate(zip(tensors, theirs, start, strict=True)):
        error = float(((ours - other).norm() / (other - first).norm()).detach())
        assert (error < 1e-6) == (i == 1) and error < 0.1
    assert optimizer.param_groups[0]["state_dtype"] == "8bit"


def test_a_group_has_a_dtype_of_its_own() -> None:
    first, second, third = parameters()
    optimizer = gt.AdamW(
        [{"params": [first]}, {"params": [third], "state_dtype": "f32"}, {"params": [second], "state_dtype": "bf16"}],
        state_dtype="8bit",
    )
    assert [group.optimizer.state_dtype for group in optimizer.context.groups] == [
        ga.Dtype.STATE_8BIT, ga.Dtype.F32, ga.Dtype.BF16,
    ]  # fmt: skip
    assert gt.AdamW([torch.nn.Parameter(torch.ones(2))]).context.groups[0].optimizer.state_dtype == ga.Dtype.DEFAULT
    optimizer.param_groups[0]["state_dtype"] = "f32"
    with pytest.raises(RuntimeError, match="made with state_dtype '8bit', and now has 'f32'"):
        step(optimizer, [first, second, third], 0)
    for wrong in ("8 bit", torch.uint8, 16, ga.Dtype.F16):
        with pytest.raises(ValueError, match="expected one of 'f32', 'bf16', '8bit', or None"):
            gt.AdamW(parameters(), state_dtype=wrong)  # type: ignore[arg-type]
    with pytest.raises(ga.Error, match="no state of it can be 8 bits"):
        gt.Adafactor(parameters()[:1], state_dtype="8bit")


@pytest.mark.parametrize("way", ["as it is", "torch.save", "the file"])
@pytest.mark.parametrize(("name", "options"), [("AdamW", {}), ("SGD", {"momentum": 0.9}), ("Lion", {})])
def test_a_run_goes_on_with_the_same_bits(name: str, options: dict[str, Any], way: str, tmp_path: pathlib.Path) -> None:
    tensors, optimizer = trained(name, **options)
    tensors[0].sum().backward()  # type: ignore[no-untyped-call]
    optimizer.accumulate()  # a window is open
    others = copies(tensors)
    other = getattr(gt, name)(others, lr=0.01, state_dtype="8bit", **options)
    if way == "the file":
        optimizer.save(tmp_path / "state")
        other.load(tmp_path / "state")
    else:
        state = optimizer.state_dict()
        array = "momentum_buffer" if name == "SGD" else "exp_avg"
        of = state["state"][0]
        assert of[f"{array}_codes"].dtype == torch.uint8 and of[f"{array}_codes"].shape == (50, 100)
        assert of[f"{array}_scale"].dtype == torch.float32 and of[f"{array}_scale"].shape == (20,)
        assert array not in of and state["state"][1][array].dtype == torch.float32
        if way == "torch.save":
            torch.save(state, tmp_path / "state.pt")
            state = torch.load(tmp_path / "state.pt")
        other.load_state_dict(state)
    for seed in range(3, 6):
        step(optimizer, tensors, seed)
        step(other, others, seed)
        assert same(tensors, others)


@pytest.mark.parametrize("by", ["codes", "numbers"])
def test_a_dictionary_without_the_key_goes_on_too(by: str) -> None:
    """Numbers of codes become the same codes."""
    tensors, optimizer = trained()
    others = copies(tensors)
    other = gt.AdamW(others, lr=0.01, state_dtype="8bit")
    state = optimizer.state_dict(as_numbers=by == "numbers")
    assert ("gradaccum" in state) == (by == "codes")
    state.pop("gradaccum", None)
    other.load_state_dict(state)
    for i in (0, 2):
        for info in optimizer.context.params[i].states:
            found: list[Any] = [of.context.params[i].get_state(info.name) for of in (optimizer, other)]
            ours, theirs = map(from_dlpack, found)
            assert torch.equal(ours, theirs), info.name


def test_torch_takes_numbers_and_refuses_codes() -> None:
    tensors, optimizer = trained()
    theirs = copies(tensors)
    torchs = torch.optim.AdamW(theirs, lr=0.01)
    torchs.load_state_dict(optimizer.state_dict())
    with pytest.raises(KeyError, match="exp_avg"):
        step(torchs, theirs, 3)
    state = optimizer.state_dict(as_numbers=True)
    for i in range(3):
        for name in ("exp_avg", "exp_avg_sq"):
            assert state["state"][i][name].dtype == torch.float32
            assert torch.equal(state["state"][i][name], numbers(optimizer, i, name))
    torchs.load_state_dict(state)
    plain = copies(tensors)
    f32 = gt.AdamW(plain, lr=0.01)
    f32.load_state_dict(state)
    step(torchs, theirs, 3)
    step(f32, plain, 3)
    for a, b in zip(theirs, plain, strict=True):
        assert float((a - b).detach().abs().max()) < 1e-6


def test_state_of_torch_becomes_the_nearest_codes() -> None:
    theirs = parameters()
    torchs = torch.optim.AdamW(theirs, lr=0.01)
    for seed in range(5):
        step(torchs, theirs, seed)
    want = copy.deepcopy(torchs.state_dict())
    loaded = gt.AdamW(copies(theirs), state_dtype="8bit")
    loaded.load_state_dict(want)
    for optimizer in (loaded, gt.wrap(torchs, state_dtype="8bit")):
        assert optimizer.context.window.steps == 5
        for i in (0, 2):
            for name in ("exp_avg", "exp_avg_sq"):
                x, y = want["state"][i][name].reshape(-1), numbers(optimizer, i, name).reshape(-1)
                for block, rounded in zip(x.split(256), y.split(256), strict=True):
                    largest = block.abs().max()
                    assert rounded.abs().max() == largest
                    # Half a step of an octave's eight, or what is below the least code.
                    least = 2.0**-15.9 if name == "exp_avg" else 2.0**-31.9
                    assert ((rounded - block).abs() <= torch.maximum(block.abs() / 16, largest * least)).all()
        assert torch.equal(numbers(optimizer, 1, "exp_avg"), want["state"][1]["exp_avg"])
    want["state"][2]["exp_avg_sq"][7] = -1
    with pytest.raises(ValueError, match='the state "exp_avg_sq" of parameter 2: .* expected a finite number >= 0'):
        loaded.load_state_dict(want)
    del want["state"][2]["exp_avg_sq"]
    want["state"][2] |= {"exp_avg_sq_codes": torch.zeros(4097, dtype=torch.uint8)}
    with pytest.raises(ValueError, match='"exp_avg_sq_codes", but no "exp_avg_sq_scale"'):
        loaded.load_state_dict(want)
    want["state"][2] |= {"exp_avg_sq_scale": torch.ones(16)}
    with pytest.raises((ValueError, ga.Error), match="exp_avg_sq"):
        loaded.load_state_dict(want)
    with pytest.raises(ValueError, match="4097 codes of torch.uint8 and 16 scales"):
        gt.AdamW(copies(theirs)).load_state_dict(want)


def test_codes_become_numbers_where_state_is_none_of_8_bits() -> None:
    tensors, optimizer = trained()
    state = optimizer.state_dict()
    for state_dtype, tolerance in (("f32", 0.0), ("bf16", 2.0**-8), (None, 0.0)):
        other = gt.AdamW(copies(tensors), lr=0.01, state_dtype=state_dtype)
        with pytest.raises(ValueError, match='was saved in 8 bits, .* without the key "gradaccum"'):
            other.load_state_dict(state)
        other.load_state_dict({key: state[key] for key in ("state", "param_groups")})
        assert other.param_groups[0].get("state_dtype") == state_dtype
        for i in (0, 2):
            for name in ("exp_avg", "exp_avg_sq"):
                found: Any = other.context.params[i].get_state(name)
                want = numbers(optimizer, i, name)
                assert ((from_dlpack(found).float() - want).abs() <= tolerance * want.abs()).all()
    plain = trained(state_dtype=None)[1].state_dict()
    with pytest.raises(ValueError, match="was saved in another dtype, but has 8 bits here"):
        optimizer.load_state_dict(plain)
    del plain["gradaccum"]
    optimizer.load_state_dict(plain)
    assert optimizer.param_groups[0]["state_dtype"] == "8bit"


def test_codes_are_refused_by_an_optimizer_without_any() -> None:
    tensors, optimizer = trained()
    state = optimizer.state_dict()
    del state["gradaccum"]
    with pytest.raises(ValueError, match="its optimizer keeps no state in 8 bits"):
        gt.Adamax(copies(tensors), lr=0.01).load_state_dict(state)


def test_a_parameter_in_another_order_of_memory() -> None:
    """Blocks follow the memory, so codes go from one order to another as numbers."""

    def made(channels_last: bool) -> tuple[torch.nn.Parameter, gt.Optimizer]:
        torch.manual_seed(0)
        value = torch.randn(16, 8, 6, 7)
        if channels_last:
            value = value.to(memory_format=torch.channels_last)
        tensor = torch.nn.Parameter(value)
        return tensor, gt.AdamW([tensor], state_dtype="8bit")

    for first, second in ((True, False), (False, True), (True, True)):
        (a, ours), (b, theirs) = made(first), made(second)
        step(ours, [a], 0)
        state = ours.state_dict()
        assert ("exp_avg" in state["state"][0]) == first
        if first == second:
            theirs.load_state_dict(state)
            with torch.no_grad():
                b.copy_(a)
            step(ours, [a], 1)
            step(theirs, [b], 1)
            assert torch.equal(a, b)
        del state["gradaccum"]
        theirs.load_state_dict(state)
        wants = ours if first != second else theirs
        want, got = (of.state_dict(as_numbers=True)["state"][0]["exp_avg"] for of in (wants, theirs))
        assert float((want - got).norm() / want.norm()) < 0.04


def test_dictionaries_of_torch_distributed_checkpoint() -> None:
    def made() -> tuple[torch.nn.Sequential, gt.Optimizer]:
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(100, 50), torch.nn.Linear(50, 90))
        return net, gt.AdamW(net.named_parameters(), lr=0.01, state_dtype="8bit")

    net, optimizer = made()
    for seed in range(3):
        step(optimizer, list(net.parameters()), seed)
    saved = copy.deepcopy(get_state_dict(net, optimizer))
    other_net, other = made()
    template = get_state_dict(other_net, other)[1]  # before a first gradient
    codes = template["state"]["0.weight"]
    assert codes["exp_avg_codes"].shape == (50, 100) and codes["exp_avg_scale"].shape == (20,)
    assert {name: set(of) for name, of in template["state"].items()} == {
        name: set(of) for name, of in saved[1]["state"].items()
    }
    set_state_dict(other_net, other, model_state_dict=saved[0], optim_state_dict=saved[1])
    for seed in range(3, 5):
        for of, its in ((net, optimizer), (other_net, other)):
            step(its, list(of.parameters()), seed)
    assert same(list(net.parameters()), list(other_net.parameters()))


# ---- bitsandbytes, whose dictionaries are written here as its version 0.50 writes them

SIGNED = torch.cat([-torch.linspace(0.99, 1e-6, 127).pow(3), torch.zeros(1), torch.linspace(1e-6, 1, 128).pow(3)])
UNSIGNED = torch.linspace(0, 1, 256).pow(4)


def of_bitsandbytes(
    arrays: dict[int, Tensor], table: dict[int, Tensor], **group: Any
) -> tuple[dict[str, Any], dict[int, Tensor]]:
    """A dictionary with codes at random of state1 and state2 of two parameters, and the numbers that these are."""
    generator = torch.Generator().manual_seed(5)
    quantised: dict[str, Any] = {}
    small: dict[str, Any] = {}
    expected = {}
    for k, like in arrays.items():
        rows = like.reshape(-1, 5000)
        codes = torch.randint(0, 256, rows.shape, generator=generator, dtype=torch.uint8)
        scales = torch.rand(len(rows), 20, generator=generator) + 0.1
        expected[k] = torch.tensor(
            [
                [float(table[k][int(code)] * scales[row, i // 256]) for i, code in enumerate(codes[row])]
                for row in range(len(rows))
            ]
        ).reshape(like.shape)
        quantised |= {f"state{k}": codes.reshape(like.shape), f"qmap{k}": table[k]}
        quantised[f"absmax{k}"] = scales if len(rows) > 1 else scales[0]
        small[f"state{k}"] = torch.rand(*like.shape[:-2], 70, generator=generator)
    wrapped = "__bnb_optimizer_quant_state__"
    saved = {"lr": 0.125, "betas": (0.75, 0.875), "eps": 0.5, "weight_decay": 0.0, "params": [0, 1], **group}
    state = {0: {"step": 7, wrapped: quantised}, 1: {"step": 7, wrapped: small}}
    return {"state": state, "param_groups": [saved]}, expected


def two() -> list[torch.nn.Parameter]:
    return parameters()[:2]


@pytest.mark.parametrize("state_dtype", ["f32", "8bit"])
@pytest.mark.parametrize("flat", [False, True])
def test_state_of_bitsandbytes_goes_on(flat: bool, state_dtype: str) -> None:
    array = torch.empty(50, 100)
    saved, expected = of_bitsandbytes({1: array, 2: array}, {1: SIGNED, 2: UNSIGNED}, weight_decay=0.25)
    if flat:  # as older versions
        for of in saved["state"].values():
            of |= of.pop("__bnb_optimizer_quant_state__")
    tensors = two()
    optimizer = gt.AdamW(tensors, state_dtype=state_dtype)
    optimizer.load_state_dict(gt.from_bitsandbytes(saved, optimizer))
    group = optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (0.125, (0.75, 0.875), 0.5, 0.25)
    assert group["params"] == tensors
    small = saved["state"][1]
    small = small if flat else small["__bnb_optimizer_quant_state__"]
    for k, name in enumerate(("exp_avg", "exp_avg_sq"), 1):
        got = numbers(optimizer, 0, name)
        if state_dtype == "f32":
            assert torch.equal(got, expected[k])
        else:
            error = (got - expected[k]).abs()
            assert error.any() and (error <= expected[k].abs() / 16 + 2.0**-16).all()
        assert torch.equal(numbers(optimizer, 1, name), small[f"state{k}"])
    assert optimizer.context.window.steps == 7
    assert optimizer.state_dict()["state"][0]["step"] == 7
    step(optimizer, tensors, 0)


def test_every_optimizer_of_bitsandbytes_with_a_counterpart() -> None:
    array = torch.empty(50, 100)
    cases: list[tuple[str, list[str], dict[str, Any], dict[str, Any]]] = [
        ("Adam", ["exp_avg", "exp_avg_sq"], {}, {"betas": (0.75, 0.875)}),
        ("Lion", ["exp_avg"], {}, {"betas": (0.75, 0.875)}),
        ("SGD", ["momentum_buffer"], {"momentum": 0.9}, {"momentum": 0.75}),
        ("RMSprop", ["square_avg"], {}, {"alpha": 0.75, "eps": 0.5}),
        ("Adagrad", ["sum"], {}, {"eps": 0.5}),
    ]
    for name, names, options, want in cases:
        optimizer = getattr(gt, name)(two(), **options)
        arrays = dict(enumerate([array] * len(names), 1))
        saved, expected = of_bitsandbytes(arrays, {1: SIGNED, 2: UNSIGNED})
        optimizer.load_state_dict(gt.from_bitsandbytes(saved, optimizer))
        for k, key in enumerate(names, 1):
            least = 0.0 if key in ("square_avg", "sum") else -1e9  # whose codes bitsandbytes has with a sign
            assert torch.equal(numbers(optimizer, 0, key), expected[k].clamp(min=least)), name
        assert {key: optimizer.param_groups[0][key] for key in want} == want
    ademamix = gt.AdEMAMix(two())
    saved, expected = of_bitsandbytes(
        {1: torch.empty(2, 50, 100), 2: array}, {1: SIGNED, 2: UNSIGNED}, betas=(0.5, 0.75, 0.875), alpha=3.0
    )
    ademamix.load_state_dict(gt.from_bitsandbytes(saved, ademamix))
    assert ademamix.param_groups[0]["betas"] == (0.5, 0.75, 0.875) and ademamix.param_groups[0]["alpha"] == 3.0
    for row, key in enumerate(("exp_avg", "exp_avg_slow")):
        assert torch.equal(numbers(ademamix, 0, key), expected[1][row])
    of = saved["state"][0]["__bnb_optimizer_quant_state__"]
    of["absmax1"][1, -1] = 0
    with pytest.raises(ValueError, match="parameter 0: its 5000 elements are no multiple of 256"):
        gt.from_bitsandbytes(saved, ademamix)


def test_what_of_bitsandbytes_is_refused() -> None:
    array = torch.empty(50, 100)
    saved, _ = of_bitsandbytes({1: array, 2: array}, {1: SIGNED, 2: UNSIGNED}, weight_decay=0.25)
    with pytest.raises(ValueError, match="weight_decay was 0.25, which bitsandbytes' Adam decouples"):
        gt.from_bitsandbytes(saved, gt.Adam(two()))
    with pytest.raises(TypeError, match="no state for NADAM"):
        gt.from_bitsandbytes(saved, gt.NAdam(two()))
    adamw = gt.AdamW(two())
    with pytest.raises(ValueError, match='no "state1", so it is not of bitsandbytes'):
        gt.from_bitsandbytes(adamw.state_dict() | {"state": {0: {"step": 1}}}, adamw)
    of = saved["state"][0]["__bnb_optimizer_quant_state__"]
    absmax = of.pop("absmax2")
    with pytest.raises(ValueError, match="no scales of blocks"):
        gt.from_bitsandbytes(saved, adamw)
    of["absmax2"] = absmax[:-1]
    with pytest.raises(ValueError, match="5000 codes and 19 scales"):
        gt.from_bitsandbytes(saved, adamw)
    with pytest.raises(ValueError, match="1 groups, but the optimizer 2"):
        gt.from_bitsandbytes(saved, gt.AdamW([{"params": [tensor]} for tensor in two()]))
    for key in ("t_alpha", "t_beta3"):
        saved["param_groups"][0][key] = 100
        with pytest.raises(ValueError, match="t_alpha or t_beta3"):
            gt.from_bitsandbytes(saved, adamw)
