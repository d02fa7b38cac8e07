# SPDX-License-Identifier: Apache-2.0
"""What the loss functions of torch average over."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import _where
from .._terms import Term

def _classes(given: Mapping[str, Any]) -> Any:
    """The terms of cross entropy: targets that are not ignored, each with the weight of its class."""
    target: Tensor = given["target"]
    scores: Tensor = given["input"]
    if target.is_floating_point():  # probabilities
        return target.numel() / scores.shape[0 if scores.dim() == 1 else 1]
    counted: Tensor = target != given["ignore_index"]
    weight: Tensor | None = given.get("weight")
    if weight is None:
        return counted.sum()
    return (weight.detach()[target.masked_fill(~counted, 0)] * counted).sum()


def _elements(given: Mapping[str, Any]) -> Any:
    shapes = [value.shape for key, value in given.items() if key in ("input", "target", "weight", "var")
              if isinstance(value, Tensor)]  # fmt: skip
    broadcast: Any = torch.broadcast_shapes
    return float(torch.Size(broadcast(*shapes)).numel())


def _samples(given: Mapping[str, Any]) -> Any:
    first = next(value for value in given.values() if isinstance(value, Tensor))
    return float(first.shape[0]) if first.dim() else 1.0


def _sequences(given: Mapping[str, Any]) -> Any:
    lengths = given["target_lengths"]
    return float(lengths.numel() if isinstance(lengths, Tensor) else len(lengths))


def _divergence(given: Mapping[str, Any]) -> Any:
    return _samples(given) if given["reduction"] == "batchmean" else _elements(given)


_COUNTS: dict[Callable[..., Any], Callable[[Mapping[str, Any]], Any]] = {
    F.cross_entropy: _classes, F.nll_loss: _classes, F.kl_div: _divergence,
    F.mse_loss: _elements, F.l1_loss: _elements, F.smooth_l1_loss: _elements, F.huber_loss: _elements,
    F.binary_cross_entropy: _elements, F.binary_cross_entropy_with_logits: _elements,
    F.poisson_nll_loss: _elements, F.gaussian_nll_loss: _elements, F.soft_margin_loss: _elements,
    F.hinge_embedding_loss: _elements, F.multi_margin_loss: _samples, F.multilabel_margin_loss: _samples,
    F.multilabel_soft_margin_loss: _samples, F.cosine_embedding_loss: _samples, F.margin_ranking_loss: _samples,
    F.triplet_margin_loss: _samples, F.ctc_loss: _sequences,
}  # fmt: skip
_SIGNATURES = {function: inspect.signature(function) for function in _COUNTS}
FUNCTIONS = frozenset(_COUNTS)
"""The loss functions that are understood."""


def term(
    function: Callable[..., Any], value: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Term:
    """What a call of one of FUNCTIONS has returned."""
    bound = _SIGNATURES[function].bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    reduction = given["reduction"]
    if given.get("size_average") is not None or given.get("reduce") is not None:  # of older programs
        legacy: Any = F._Reduction.legacy_get_string  # type: ignore[attr-defined]
        reduction = legacy(given.get("size_average"), given.get("reduce"))
    given["reduction"] = reduction
    count = _COUNTS[function](given)
    kind = reduction if reduction in ("sum", "none") else "mean"
    return Term(function.__name__, _where.line(), kind, count, torch.finfo(value.dtype).eps, _where.call())
