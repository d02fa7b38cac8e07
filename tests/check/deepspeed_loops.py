# SPDX-License-Identifier: Apache-2.0
"""deepspeed_loops.py <stage> <samples> <report>: an engine of DeepSpeed with a model in bf16 and sums in f32, watched.

Two ranks over gloo, windows of 4 micro-batches of 8 samples. See tests/check/history, and loops.py for torch.
"""

import os
import sys
import tempfile

import torch
import torch.nn.functional as F
from gradaccum import check
from loops import batches, network


def work(rank: int, stage: int, samples: int, path: str, meeting: str) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank))
    torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}/at", rank=rank, world_size=2)
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 4, "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"}, "zero_optimization": {"stage": stage},
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
    }  # fmt: skip
    net = network()
    engine, _, _, _ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)
    with check.record(engine) as recording:
        for i, (x, y) in enumerate(batches(2 * samples)):
            if i % 2 == rank:
                engine.backward(F.cross_entropy(engine(x.bfloat16()), y))
                engine.step()
    if rank == 0:
        recording.report.save(path)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        arguments = (int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], folder)
        torch.multiprocessing.spawn(work, args=arguments, nprocs=2)
