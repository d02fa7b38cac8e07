# SPDX-License-Identifier: Apache-2.0
"""Optimizers of torch whose windows are right: N micro-batches equal one batch N times as large.

Each class takes the arguments of torch's (or timm's) of that name, and those of ``WindowOptions``.
foreach and fused have no effect; capturable and differentiable are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

from torch import Tensor

from .. import Rows
from . import _kinds
from ._batch_norm import convert_batchnorm
from ._bitsandbytes import from_bitsandbytes
from ._kinds import Kind, WindowOptions
from ._optimizer import Optimizer
from ._schedule_free import AdamWScheduleFree, SGDScheduleFree
from ._wrap import wrap

__all__ = [
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "Adamax",
    "AdamW",
    "AdamWScheduleFree",
    "AdEMAMix",
    "Adopt",
    "convert_batchnorm",
    "from_bitsandbytes",
    "Kind",
    "Lamb",
    "Lars",
    "Lion",
    "Muon",
    "NAdam",
    "Optimizer",
    "RAdam",
    "RMSprop",
    "RowWiseAdagrad",
    "SGD",
    "SGDScheduleFree",
    "SparseAdam",
    "WindowOptions",
    "wrap",
]

_Number = float | Tensor
_Pair = tuple[float | Tensor, float | Tensor]


class SGD(Optimizer):
    """torch.optim.SGD."""

    def __init__(
        self,
        params: Any,
        lr: _Number = 1e-3,
        momentum: _Number = 0,
        dampening: _Number = 0,
        weight_decay: _Number = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        **window: Unpack[WindowOptions],
    ) -> None:
        super().__init__(params, _kinds.SGD, _kinds.hyper_parameters(locals()), **window)


class Adam(Optimizer):
    """torch.optim.Adam."""

    def __init__(
        self,
        params: Any,
        lr: _Number = 1e-3,
        betas: _Pair = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: _Number = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        **window: Unpack[WindowOptions],
    ) -> None:
        defaults = _kinds.hyper_parameters(locals())
        super().__init__(params, _kinds.ADAMW if decoupled_weight_decay else _kinds.ADAM, defaults, **window)


class AdamW(Optimizer):
    """torch.optim.AdamW."""

    def __init__(
        self,
        params: Any,
        lr: _Number = 1e-3,
        betas: _Pair = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: _Number = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        **window: Unpack[WindowOptions],
    ) -> None:
        super().__init__(params, _kinds.ADAMW, _kinds.hyper_parameters(locals()), **window)


class SparseAdam(Optimizer):
    """torch.optim.SparseAdam."""

    def __init__(
        self,
        params: Any,
        lr: _Number = 1e-3,
        betas: _Pair = (0.9, 0.999),
        eps: float = 1e-8,
        maximize: bool = False,
        **window: Unpack[WindowOptions],
    ) -> None:
        super().__init__(params, _kinds.SPARSE_ADAM, _kinds.hyper_parameters(locals()) | {"rows": Rows.LAZY}, **window)


class Adagrad(Optimizer):
    """torch.optim.Adagrad."""

    def __init__(
        self,
        params: Any,
        lr: _Number = 1e-2,
        lr_decay: float = 0,
        weight_decay: _Number = 0,
        initial_accumulator_value: float = 0,
        eps: float = 1e-10,
        foreach: bool | None = None,
        *,
        maximize: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        **window: Unpack[WindowOptions],
    ) -> None:
        super().__init__(params, _kinds.ADAGRAD, _kinds.hyper_parameters(locals()), **window)


class Adadelta(Optimizer):
    """torch.optim.Adadelta."""

    def __init__(
        self,
        params: Any,
        lr: _Number = 1.0,
        rho: float = 0.9,
        eps: float = 1e-6,
        weight_decay: _Number = 0,
        foreach: bool | None = None,
        *,
        capturable: bool = False,
        maximize: bool = False,
        differentiable: bool = False,
        **window: Unpack[WindowOptions],
    ) -> None:
        super().__init__(params, _kinds.ADADELTA, _kinds.hyper_parameters(locals()), **window)


class Adamax(Optimizer):
    """torch.optim.Adamax."""

    def __init__(
        self,
        params: Any,
        lr: _Number = 2e-3,
        betas: _Pair = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: _Number = 0,
        foreach: bool | None = None,
        *,
        maximize: bool = False,
        differentiable: bool = False,
        capturable: bool = False,
        **window: Unpack[WindowOptions],
    ) -> None:
        super().__init__(params, _kinds.ADAMAX, _kinds.hyper_parameters(locals()), **window)


class NAdam(Optimizer):
    """torch.optim.NAdam."""

    def __init__(
        self,
        params: Any,
        lr: _Number = 2e-3,
        betas: _Pair = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: _Number = 0,
        momentum_decay: float = 4e-3,
        decoupled_weight_decay: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        **window: Unpack[WindowOptions],
    ) -> None:
        super().__init__(params, _kinds.NADAM, _kinds.hyper_parameters(locals()), **window)


class RAdam(Optimizer):
    """torch.optim.RAdam."""

    def __init__(
        self,
        params: Any,
        lr: _Number = 1e-3,
        betas: _Pair = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: _Number = 0,
        decoupled_weight_decay: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        **window: Unpack[WindowOptions],
    ) -> None:
        super().__init__(params, _kinds.RADAM, _kinds.hyper_parameters(locals()), **window)


class RMSprop(Optimizer):
    """torch.optim.RMSprop."""

    def __init__(
        self,
        params: Any,
        lr: _Number = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: _Number = 0,
        momentum: _Number = 0,
        centered: bool = False,
        capturable: bool = False,
        foreach: bool | None = None,
        maximize: bool = False,
        differentiable: bool = False,
        **window: Unpack[WindowOptions],
    ) -> None:
        super().__init__(params, _kinds.RMSPROP, _kinds.hyper_parameters(locals()), **window)


class Adafactor(Optimizer):
    """torch.optim.Adafactor."""

    def __init__(
        self,
        params: Any,
        lr: _Number = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: _Number = 0,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        **window: Unpack[WindowOptions],
    ) -> None:
        super().__init__(params, _kinds.ADAFACTOR, _kinds.hyper_parameters(locals()), **window)


class Muon(Optimizer):
    """torch.optim.Muon, for matrices, and for tensors of more axes in groups that say how they are cut into some.

    ns_coefficients: as torch's, a row of three numbers; or a row for each iteration, the last for all that follow; or
    "polar_express" or "you", the rows of :class:`gradaccum.NewtonSchulzPreset`.
    cautious: weight decay leaves alone what the step moves away from zero: :attr:`gradaccum.Optimizer.cautious`.
    beta2: above 0, NorMuon: outputs are divided by the root of an average of their updates' mean squares.
    equilibrate: MuonEq: "outputs", "inputs" or "both", which are divided by their norms before the iteration.
    ns_precision: what the matrix products of an iteration round their factors to: "f32", not at all; "tf32", on a GPU;
    "bf16", on a GPU and on processors with AVX-512 BF16 or AMX, which is what torch does, with matrices of bf16 too.
    """

    def __init__(
        self,
        params: Any,
        lr: _Number = 1e-3,
        weight_decay: _Number = 0.1,
        momentum: _Number = 0.95,
        nesterov: bool = True,
        ns_coefficients: Sequence[float] | Sequence[Sequence[float]] | str = (3.4445, -4.775, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        ns_precision: str = "f32",
        cautious: bool = False,
        beta2: float = 0.0,
        equilibrate: str | None = None,
        **window: Unpack[WindowOptions],
    ) -> None:
        super().__init__(params, _kinds.MUON, _kinds.hyper_parameters(locals()), **window)


class Lion(Optimizer):
    """lion_pytorch.Lion."""

    def __init__(
        self,
        params: Any,
        lr: _Number = 1e-4,
        betas: _Pair = (0.9, 0.99),
        weight_decay: _Number = 0,
        *,
        maximize: bool = False,
        **window: Unpack[WindowOptions],
    ) -> None:
        super().__init__(params, _kinds.LION, _kinds.hyper_parameters(locals()), **window)


class Lamb(Optimizer):
    """timm.optim.Lamb."""

    def __init__(
        self,
        params: Any,
        lr: _Number = 1e-3,
        betas: _Pair = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: _Number = 0.01,
        max_grad_norm: float = 1.0,
        always_adapt: bool = False,
        *,
        maximize: bool = False,
        **window: Unpack[WindowOptions],
    ) -> None:
        super().__init__(params, _kinds.LAMB, _kinds.hyper_parameters(locals()), **window)


class Lars(Optimizer):
    """timm.optim.Lars."""

    def __init__(
        self,
        params: Any,
        lr: _Number = 1.0,
        momentum: _Number = 0,
        dampening: _Number = 0,
        weight_decay: _Number = 0,
        nesterov: bool = False,
        trust_coefficient: float = 1e-3,
        eps: float = 1e-8,
        always_adapt: bool = False,
        *,
        maximize: bool = False,
        **window: Unpack[WindowOptions],
    ) -> None:
        super().__init__(params, _kinds.LARS, _kinds.hyper_parameters(locals()), **window)


class Adopt(Optimizer):
    """ADOPT (Taniguchi et al. 2024). clip_exponent: timm's clip_exp, whose default there is 0.333."""

    def __init__(
        self,
        params: Any,
        lr: _Number = 1e-3,
        betas: _Pair = (0.9, 0.9999),
        eps: float = 1e-6,
        weight_decay: _Number = 0,
        decoupled: bool = False,
        *,
        clip_exponent: float = 0.25,
        maximize: bool = False,
        **window: Unpack[WindowOptions],
    ) -> None:
        super().__init__(params, _kinds.ADOPT, _kinds.hyper_parameters(locals()), **window)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # of a state dictionary from before the option
            group.setdefault("clip_exponent", 0.25)


class AdEMAMix(Optimizer):
    """AdEMAMix (Pagliardini et al. 2024)."""

    def __init__(
        self,
        params: Any,
        lr: _Number = 1e-3,
        betas: tuple[_Number, _Number, _Number] = (0.9, 0.999, 0.9999),
        eps: float = 1e-8,
        weight_decay: _Number = 0,
        alpha: float = 5.0,
        alpha_warmup: int = 0,
        beta3_warmup: int = 0,
        *,
        maximize: bool = False,
        **window: Unpack[WindowOptions],
    ) -> None:
        super().__init__(params, _kinds.ADEMAMIX, _kinds.hyper_parameters(locals()), **window)


class RowWiseAdagrad(Optimizer):
    """torchrec.optim.RowWiseAdagrad."""

    def __init__(
        self,
        params: Any,
        lr: _Number = 1e-2,
        weight_decay: _Number = 0,
        initial_accumulator_value: float = 0,
        eps: float = 1e-10,
        *,
        maximize: bool = False,
        **window: Unpack[WindowOptions],
    ) -> None:
        super().__init__(params, _kinds.ROWWISE_ADAGRAD, _kinds.hyper_parameters(locals()), **window)
