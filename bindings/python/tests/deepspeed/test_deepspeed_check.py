# SPDX-License-Identifier: Apache-2.0
"""gradaccum.check in loops of DeepSpeed, whose engine keeps gradients to itself: two ranks over gloo."""

import os
import pathlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gradaccum import check

EVEN, UNEVEN = (4, 4, 4), (4, 4, 2)  # samples of each rank in the micro-batches of a window
CASES: dict[str, tuple[int, dict[str, Any], tuple[int, ...], list[str]]] = {
    # The stage of ZeRO, what is added to the configuration, the samples, and the faults.
    "zero 0": (0, {}, EVEN, []),
    "zero 1": (1, {}, EVEN, []),
    "zero 2": (2, {}, EVEN, []),
    "zero 3": (3, {}, EVEN, []),
    "clipped": (2, {"gradient_clipping": 0.01}, EVEN, []),
    "uneven": (2, {}, UNEVEN, ["mean of means over uneven micro-batches"]),
    "uneven, zero 3": (3, {}, UNEVEN, ["mean of means over uneven micro-batches"]),
    "bf16": (2, {"bf16": {"enabled": True}}, EVEN, []),
    "bf16, sums in f32": (
        1, {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}, EVEN, []
    ),
    "overflows": (2, {"fp16": {"enabled": True, "initial_scale_power": 20, "hysteresis": 1}}, EVEN, []),
    "f16": (1, {"fp16": {"enabled": True, "initial_scale_power": 8}}, EVEN, []),
}  # fmt: skip


def train(rank: int, name: str, is_watched: bool = True) -> tuple[check.Report, list[torch.Tensor]]:
    import deepspeed

    stage, more, sizes, _ = CASES[name]
    torch.manual_seed(1)
    network = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.Tanh(), torch.nn.Linear(64, 5))
    config = {
        "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3, "zero_optimization": {"stage": stage},
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}}, **more,
    }  # fmt: skip
    engine, _, _, _ = deepspeed.initialize(model=network, model_parameters=network.parameters(), config=config)
    dtype = next(iter(network.parameters())).dtype
    with check.record(engine) if is_watched else check.record(windows=0) as recording:
        for i in range(9):
            torch.manual_seed(10 + rank + 5 * i)
            samples = sizes[i % 3]
            x, y = torch.randn(samples, 20), torch.randint(0, 5, (samples,))
            engine.backward(F.cross_entropy(engine(x.to(dtype)), y))
            engine.step()
    with deepspeed.zero.GatheredParameters(list(network.parameters()), enabled=stage == 3):
        parameters = [parameter.detach().clone() for parameter in network.parameters()]
    return recording.report, parameters


def work(rank: int, folder: str) -> None:
    from deepspeed.accelerator import get_accelerator

    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank))
    # The engine refuses f16 on processors without instructions for it, where torch computes in f16 all the same.
    get_accelerator().is_fp16_supported = lambda: True
    torch.set_num_threads(1)
    distributed: Any = torch.distributed
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    found: dict[str, Any] = {}
    for name in CASES:
        report, parameters = train(rank, name)
        values = [[c.value for c in window.coefficients] for each in report.optimizers for window in each.windows]
        found[name] = str(report), [fault.name for fault in report.faults], values, report.remarks
        if name == "overflows":
            found["skipped"] = [remark for remark in report.remarks if "were dropped" in remark]
        if name in ("zero 1", "zero 3"):
            alone = train(rank, name, is_watched=False)[1]
            found[f"{name}, bits"] = all(torch.equal(a, b) for a, b in zip(parameters, alone, strict=True))
    torch.save(found, f"{folder}/{rank}.pt")
    distributed.barrier()
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    multiprocessing: Any = torch.multiprocessing
    multiprocessing.set_forkserver_preload(["deepspeed", "gradaccum.check", "torch._dynamo", "pytest"])
    multiprocessing.start_processes(work, args=(str(folder),), nprocs=2, start_method="forkserver")
    return [torch.load(pathlib.Path(folder, f"{rank}.pt"), weights_only=False) for rank in range(2)]


@pytest.mark.parametrize("name", CASES)
def test_windows_of_engines(found: list[dict[str, Any]], name: str) -> None:
    _, more, sizes, wanted = CASES[name]
    text, faults, values, remarks = found[0][name]
    assert faults == wanted, text
    assert len(values) == (3 if name != "overflows" else 0) and all(len(each) == 6 for each in values), text
    exact = 1e-2 if "bf16" in more else 1e-3 if "fp16" in more else 1e-5  # of sums in 16 bits
    for each in values:  # an engine gives each micro-batch of each rank the same
        assert each == pytest.approx([1 / 6] * 6, rel=exact), text
    assert found[1][name][1:3] == found[0][name][1:3]
    assert not remarks or sizes == UNEVEN or name == "overflows", text


def test_windows_that_an_engine_skips_are_told(found: list[dict[str, Any]]) -> None:
    assert found[0]["skipped"] == ["9 micro-batches were dropped with their window, for a gradient was not finite."]


def test_a_recording_changes_nothing(found: list[dict[str, Any]]) -> None:
    for each in found:
        assert each["zero 1, bits"] and each["zero 3, bits"]
