# SPDX-License-Identifier: Apache-2.0
"""The reference of Python: which public names are on which page. Their docstrings are read, and nothing is imported."""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Sequence

# A page: its title, what it links to, its module, and names in their order, in a page of a whole module before all others.
PAGES: dict[str, tuple[str, str, str, tuple[str, ...]]] = {
    "context": ("Contexts", "/docs/python", "gradaccum", (
        "Context", "Config", "GradientKind", "Reduce", "Missing", "Nonfinite", "Accumulation", "GradientLife",
        "Device", "Memory",
    )),
    "optimizer": ("Groups and optimizers", "/docs/reference", "gradaccum", (
        "Group", "Optimizer", "OptimizerKind", "Flavor", "Schedule", "ScheduleKind", "AdjustLr", "NewtonSchulzPreset",
        "Precision", "Equilibrate",
    )),
    "params": ("Parameters and tensors", "/docs/python", "gradaccum", (
        "Param", "ParamOptions", "Master", "Rounding", "Rows", "FlatEntry", "ParamInfo", "Dtype", "Tensor",
        "TensorLike", "SupportsDLPack", "SupportsBuffer",
    )),
    "window": ("Windows and micro-batches", "/docs/first-window", "gradaccum", (
        "MicroBatch", "Accumulator", "MicroOptions", "MicroFlags", "Window", "WindowState", "StepResult", "StepOutcome",
    )),
    "clip": ("Clipping, loss scale and EMA", "/docs/clipping", "gradaccum", (
        "Clip", "ClipScope", "ClipWhen", "AgcUnits", "LossScaler", "Ema", "EmaKind",
    )),
    "batch_norm": ("Batch normalisation", "/docs/batch-normalization", "gradaccum", (
        "BatchNorm", "BatchNormOptions", "BnMode", "BnLayout", "BnSpread", "BatchNormInfo",
    )),
    "ranks": ("Several ranks", "/docs/devices", "gradaccum", (
        "Communicator", "CommunicatorOptions", "CommKind", "CommWire", "CommShard", "CommAdder", "Reduced",
    )),
    "state": ("State", "/docs/checkpoints", "gradaccum", (
        "StateInfo", "StateOptions", "StateParts", "Settings", "state_note",
    )),
    "library": ("Errors and the library", "/docs/python", "gradaccum", (
        "Error", "Status", "version", "build", "build_info", "Build", "device_count", "no_device_reason",
    )),
    "torch": ("gradaccum.torch", "/docs/torch", "gradaccum.torch", (
        "Optimizer", "WindowOptions", "wrap", "convert_batchnorm",
    )),
    "keras": ("gradaccum.keras", "/docs/keras", "gradaccum.keras", ()),
    "check": ("gradaccum.check", "/docs/check", "gradaccum.check", ()),
}  # fmt: skip

ALIASES = ("TensorLike", "AccumBatchNormalization")  # of other types
WITH_BASES = ("Context", "Group", "Param", "BatchNorm")  # of which members are in a private base


def public(source: pathlib.Path, module: str) -> list[str]:
    """__all__ of a module."""
    path = source.joinpath(*module.split("."), "__init__.py")
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    raise SystemExit(f"{path} has no __all__")


def pages(source: pathlib.Path) -> dict[str, str]:
    """The files of the reference, in reStructuredText."""
    files = {"python/index.rst": _page("Python: reference", "/docs/python", "gradaccum", ())}
    files["python/index.rst"] += "\n".join(["", ".. toctree::", "   :maxdepth: 1", "", *(f"   {name}" for name in PAGES), ""])
    for name, (title, guide, module, names) in PAGES.items():
        others = () if module == "gradaccum" else (n for n in public(source, module) if n not in names)
        files[f"python/{name}.rst"] = _page(title, guide, module, [*names, *others])
    return files


def _page(title: str, guide: str, module: str, names: Sequence[str]) -> str:
    lines = [title, "=" * len(title), "", f"The guide is :doc:`{guide}`.", ""]
    if title.startswith((module, "Python")):
        lines += [f".. autoapimodule:: {module}", ""]
    lines += [f".. py:currentmodule:: {module}", ""]
    for name in names:
        kind = "data" if name in ALIASES else "class" if name[0].isupper() else "function"
        options = ["   :members:"] if kind == "class" else []
        options += ["   :inherited-members:"] if name in WITH_BASES else []
        lines += [f".. autoapi{kind}:: {module}.{name}", *options, ""]
    return "\n".join(lines)
