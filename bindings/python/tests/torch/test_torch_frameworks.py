# SPDX-License-Identifier: Apache-2.0
"""The loops of accelerate and Lightning, as test_torch_loops.py runs those of programs."""

import functools
import warnings
from typing import Any

import gradaccum.torch as gt
import pytest
import test_torch_loops
import torch
from test_torch_loops import (
    CLIP, GLOBAL, MICRO, RULE, SCHEDULERS, WHOLE, K, Row, clipped, loss_of, network, whole,
)  # fmt: skip

run = test_torch_loops.test_a_loop


# ---- accelerate


def accelerated(options: dict[str, Any], ours: dict[str, Any], way: str) -> Any:
    import accelerate

    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()
    accelerator = accelerate.Accelerator(cpu=True, **options)
    net = network()
    module: Any = torch.optim if way == "torch" else gt
    net, optimizer = accelerator.prepare(net, module.SGD(net.parameters(), **RULE, **ours))
    for batch in MICRO:
        for x, y in batch:
            with accelerator.accumulate(net):
                accelerator.backward(loss_of(net, x, y))
                if way == "accumulate":
                    optimizer.optimizer.accumulate(weight=len(x))
                optimizer.step()
                optimizer.zero_grad()
        if module is gt:
            optimizer.optimizer.flush()
    return net


def plugin(**options: Any) -> dict[str, Any]:
    import accelerate

    return {"gradient_accumulation_plugin": accelerate.utils.GradientAccumulationPlugin(num_steps=K, **options)}


def test_accelerate() -> None:
    accelerate = pytest.importorskip("accelerate")
    four = {"gradient_accumulation_steps": K}
    try:
        run(
            Row("weights", functools.partial(accelerated, {}, {"accum_steps": K}, "accumulate"))
        )
        for options in (four, plugin(adjust_scheduler=False), plugin(sync_with_dataloader=False)):
            # Without accum_steps it is accelerate's own accumulation, tail and all.
            run(
                Row(
                    "accelerate's own", functools.partial(accelerated, options, {}, ""),
                    functools.partial(accelerated, options, {}, "torch"),
                )  # fmt: skip
            )
            for way in ("", "accumulate"):
                row = Row(
                    "both", functools.partial(accelerated, options, {"accum_steps": K}, way),
                    warns="divides each loss by 4", apart=1e-2,
                )  # fmt: skip
                run(row)
    finally:
        accelerate.state.AcceleratorState._reset_state(True)
        accelerate.state.GradientState._reset_state()


# ---- Lightning


def lightning_module() -> Any:
    lightning: Any = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self, net: Any, options: Any, way: str, scheduler: Any = None) -> None:
            super().__init__()
            self.net, self.options, self.way, self.scheduler = net, options, way, scheduler
            self.automatic_optimization = not way.startswith("manual")

        def configure_optimizers(self) -> Any:
            optimizer = gt.SGD(self.net.parameters(), **RULE, **self.options)
            if self.scheduler is None:
                return optimizer
            schedule = {"scheduler": self.scheduler(optimizer), "interval": "step", "frequency": K}
            return {"optimizer": optimizer, "lr_scheduler": schedule}

        def training_step(self, batch: Any, _: int) -> Any:
            self.samples = len(batch[0])
            loss = loss_of(self.net, *batch)
            if self.automatic_optimization:
                return loss
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            if self.way == "manual backward":
                optimizer.backward(loss, weight=self.samples)
            else:
                self.manual_backward(loss)
                optimizer.accumulate(weight=self.samples)
            optimizer.step()
            return None

        def on_after_backward(self) -> None:
            if self.way == "weights":
                self.optimizers().accumulate(weight=self.samples)

        def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
            if self.way == "weights" and self.trainer.current_epoch == 1 and index % 2:
                self.optimizers().flush()

        def on_train_epoch_end(self) -> None:
            self.optimizers().flush()

    return Module


def fitted(way: str, options: Any, batches: Any = None, scheduler: Any = None, **trainer: Any) -> Any:
    lightning: Any = pytest.importorskip("lightning")
    module = lightning_module()(network(), options, way, scheduler)
    flat = [micro for batch in MICRO for micro in batch] if batches is None else batches
    with warnings.catch_warnings():
        for theirs in ("lightning", "pytorch_lightning"):
            warnings.filterwarnings("ignore", module=theirs)
        warnings.filterwarnings("ignore", message=".*(num_workers|GPU|`isinstance|LeafSpec|log_every).*")
        fit = lightning.Trainer(
            **{"max_epochs": 1, **trainer}, accelerator="cpu", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        fit.fit(module, torch.utils.data.DataLoader(flat, batch_size=None))
    return module.net


def test_the_steps_of_a_trainer_are_batches() -> None:
    loop = functools.partial(fitted, "weights", {"accum_steps": K}, max_epochs=None, max_steps=2 * K)
    run(Row("max_steps", loop, functools.partial(whole, batches=WHOLE[:2])))


@pytest.mark.parametrize("way", ["weights", "manual", "manual backward"])
def test_lightning(way: str) -> None:
    run(Row(way, functools.partial(fitted, way, {"accum_steps": K})))
    run(Row(way, functools.partial(fitted, way, {"accum_steps": K, "clip": GLOBAL}), clipped))


def test_a_window_that_changes_with_the_epoch() -> None:
    """What GradientAccumulationScheduler({0: 4, 1: 2}) is for."""
    pairs = [
        (torch.cat([x for x, _ in pair]), torch.cat([y for _, y in pair]))
        for batch in MICRO
        for pair in (batch[:2], batch[2:])
        if pair
    ]
    run(
        Row(
            "epochs", functools.partial(fitted, "weights", {"accum_steps": K}, max_epochs=2),
            functools.partial(whole, batches=WHOLE + pairs),
        )  # fmt: skip
    )


def test_a_scheduler_of_lightning() -> None:
    make = SCHEDULERS["ExponentialLR"]
    run(
        Row(
            "frequency", functools.partial(fitted, "weights", {"accum_steps": K}, scheduler=make),
            functools.partial(whole, scheduler=make),
        )  # fmt: skip
    )


@pytest.mark.parametrize("way", ["weights", ""])
@pytest.mark.parametrize(
    "trainer, warns",
    [
        ({"gradient_clip_val": CLIP}, "gradient_clip_val=0.3.*clips each micro-batch"),
        ({"accumulate_grad_batches": K}, "accumulate_grad_batches=4.*divides each loss"),
    ],
)
def test_what_a_trainer_does_besides_is_said(way: str, trainer: dict[str, Any], warns: str) -> None:
    want = clipped if "gradient_clip_val" in trainer else whole
    run(Row(way, functools.partial(fitted, way, {"accum_steps": K}, **trainer), want, warns=warns, apart=1e-2))


def test_lightning_by_itself_is_left_alone() -> None:
    equal = [(x[:4], y[:4]) for x, y in WHOLE for _ in range(K)]
    batches = [(x[:4], y[:4]) for x, y in WHOLE]
    trainer: dict[str, Any] = {"accumulate_grad_batches": K, "gradient_clip_val": CLIP}
    run(
        Row(
            "itself", functools.partial(fitted, "", {}, batches=equal, **trainer),
            functools.partial(whole, clip=True, batches=batches),
        )  # fmt: skip
    )
