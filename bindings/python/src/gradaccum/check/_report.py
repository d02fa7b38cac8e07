# SPDX-License-Identifier: Apache-2.0
"""What was found, in words, as JSON and as a picture."""

from __future__ import annotations

import dataclasses
import html
import json
import math
import os
from collections.abc import Sequence
from typing import Any

from ._faults import Coefficient, Fault, Window

_MOST_ROWS = 8  # of a table, and bars of a picture


@dataclasses.dataclass
class Optimizer:
    """What was found of one optimizer."""

    name: str
    windows: list[Window]
    faults: list[Fault]


@dataclasses.dataclass
class Report:
    """Which multiple of each micro-batch went into the updates, and what is wrong with it."""

    title: str
    optimizers: list[Optimizer]
    remarks: list[str]
    """What is no fault but should be known, and what was not seen."""
    has_failed: bool = False
    """Whether the watching has ended before the loop."""
    compared: int = 0
    """Windows that were compared with those of another run, without their coefficients."""

    @property
    def faults(self) -> list[Fault]:
        """Of all optimizers, the worst first."""
        found = [fault for optimizer in self.optimizers for fault in optimizer.faults]
        return sorted(found, key=lambda fault: -fault.severity)

    @property
    def ok(self) -> bool:
        """Whether micro-batches were seen in windows, to the end, and no fault."""
        seen = any(window.coefficients for optimizer in self.optimizers for window in optimizer.windows)
        return (seen or self.compared > 0) and not self.faults and not self.has_failed

    def __str__(self) -> str:
        lines = [f"gradaccum check: {self.title}", ""]
        for number, fault in enumerate(self.faults, 1):
            lines += _paragraph(number, fault)
        for optimizer in self.optimizers:
            lines += _table(optimizer) if optimizer.windows else []
        lines += [f"Note: {remark}" for remark in self.remarks]
        lines += [""] if self.remarks else []
        lines.append(self._verdict())
        return "\n".join(lines)

    def _verdict(self) -> str:
        count = len(self.faults)
        if count:
            return f"{count} fault was found." if count == 1 else f"{count} faults were found."
        windows = self.compared + sum(len(optimizer.windows) for optimizer in self.optimizers)
        if not windows:
            return "No window was seen: no optimizer that was followed has made a step."
        found = f"No fault was found in {windows} window{'s' if windows > 1 else ''}"
        return f"{found}, but not all was seen." if not self.ok else f"{found}."

    def json(self) -> str:
        """The report as a JSON object."""
        value = {
            "title": self.title,
            "ok": self.ok,
            "remarks": self.remarks,
            "optimizers": [
                {
                    "name": optimizer.name,
                    "faults": [
                        {**dataclasses.asdict(fault), "effect": fault.effect, "fix": fault.fix,
                         "library": fault.library} for fault in optimizer.faults
                    ],
                    "windows": [dataclasses.asdict(window) for window in optimizer.windows],
                }
                for optimizer in self.optimizers
            ],
        }  # fmt: skip
        return json.dumps(_finite(value), indent=1)

    def svg(self) -> str:
        """A bar for each micro-batch of the first windows with a fault, beside the line where it should end."""
        shown = _shown(self.optimizers)
        parts, top = [], 0
        for title, coefficients in shown:
            drawn, height = _bars(title, coefficients, top)
            parts.append(drawn)
            top += height
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="640" height="{top + 10}" '
            'font-family="sans-serif" font-size="12">'
            f'<rect width="640" height="{top + 10}" fill="white"/>{"".join(parts)}</svg>'
        )

    def html(self) -> str:
        """A page that needs nothing else."""
        faults = "".join(
            f"<h2>{html.escape(fault.name)}</h2><p>{html.escape(fault.text)}</p><dl>"
            + "".join(
                f"<dt>{name}</dt><dd>{html.escape(text)}</dd>" for name, text in _rows(fault) if name != "What"
            )
            + "</dl>"
            for fault in self.faults
        )
        remarks = "".join(f"<li>{html.escape(remark)}</li>" for remark in self.remarks)
        return (
            '<!doctype html><html lang="en"><meta charset="utf-8"><title>gradaccum check</title>'
            "<style>body{font:16px/1.5 sans-serif;max-width:46em;margin:2em auto;padding:0 1em}"
            "dt{font-weight:bold}</style>"
            f"<h1>gradaccum check</h1><p>{html.escape(self.title)}</p><p><b>{self._verdict()}</b></p>{self.svg()}"
            f"{faults}<ul>{remarks}</ul></html>\n"
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the report to a file, in the format of its name: ``.json``, ``.svg``, ``.html``, or as text."""
        ending = os.path.splitext(os.fspath(path))[1]
        text = {".json": self.json, ".svg": self.svg, ".html": self.html}.get(ending, self.__str__)()
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)


def _rows(fault: Fault) -> list[tuple[str, str]]:
    rows = [("What", fault.text), ("Effect", fault.effect), ("Where", fault.where), ("Fix", fault.fix),
            ("Or", fault.library)]  # fmt: skip
    return [(name, text) for name, text in rows if text]


def _paragraph(number: int, fault: Fault) -> list[str]:
    windows = len(fault.windows)
    seen = f"in window {fault.windows[0] + 1}" if windows == 1 else f"in {windows} windows"
    return [f"{number}. {fault.name}, {seen}", *(f"   {name + ':':<8}{text}" for name, text in _rows(fault)), ""]


def _table(optimizer: Optimizer) -> list[str]:
    lines = [f"{optimizer.name}: multiples of each micro-batch's mean loss in the update, and the right ones"]
    previous: tuple[str, ...] = ()
    repeated = 0
    rows = 0
    for window in optimizer.windows:
        row = tuple(_cells(window))
        if row == previous:
            repeated += 1
            continue
        if rows == _MOST_ROWS:
            lines.append(f"  ... {len(optimizer.windows) - window.index} more windows")
            break
        lines += _repeated(repeated)
        repeated, previous, rows = 0, row, rows + 1
        lines += [f"  window {window.index + 1:<4} {cell}" if i == 0 else f"{'':14}{cell}" for i, cell in enumerate(row)]
    else:
        lines += _repeated(repeated)
    return [*lines, ""]


def _repeated(count: int) -> list[str]:
    return [f"  and {count} more like it"] if count else []


def _cells(window: Window) -> list[str]:
    cells = []
    for own in window.by_loss():
        line = own[0].loss
        values = " ".join(str(c) for c in own[:_MOST_ROWS])
        right = " ".join(f"{c.right:.4g}" for c in own[:_MOST_ROWS])
        more = f" ... {len(own)} in all" if len(own) > _MOST_ROWS else ""
        cells.append(f"{values} for {right}{more}" + (f"   {line}" if line else "   (of an unknown loss)"))
    return cells or ["no micro-batch"]


def _shown(optimizers: Sequence[Optimizer]) -> list[tuple[str, list[Coefficient]]]:
    result = []
    for optimizer in optimizers:
        if not optimizer.windows:
            continue
        chosen = {fault.windows[0]: fault.name for fault in reversed(optimizer.faults)}
        if not chosen and optimizer.windows:
            chosen = {0: "right"}
        for index, name in sorted(chosen.items()):
            window = optimizer.windows[index]
            if window.coefficients:
                result.append((f"{optimizer.name}, window {index + 1}: {name}", window.coefficients[: 4 * _MOST_ROWS]))
    return result


def _bars(title: str, coefficients: Sequence[Coefficient], top: int) -> tuple[str, int]:
    finite = [abs(c.value) for c in coefficients if math.isfinite(c.value)]
    most = max([*finite, *(abs(c.right) for c in coefficients), 1e-300])
    parts = [f'<text x="10" y="{top + 20}" font-weight="bold">{html.escape(title)}</text>']
    y = top + 30
    for c in coefficients:
        name = f"micro-batch {c.micro_batch + 1}" + (f", rank {c.rank}" if c.rank or any(
            other.rank for other in coefficients) else "")  # fmt: skip
        wrong = not math.isnan(c.value) and not c.is_(c.right)
        width = 380 * abs(c.value) / most if math.isfinite(c.value) else 0
        at = 150 + 380 * c.right / most
        parts.append(
            f'<text x="140" y="{y + 13}" text-anchor="end">{name}</text>'
            f'<rect x="150" y="{y}" width="{width:.1f}" height="16" fill="{"#c0392b" if wrong else "#2a7f62"}"/>'
            f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{y - 2}" y2="{y + 18}" stroke="black" stroke-width="2"/>'
            f'<text x="540" y="{y + 13}">{c} for {c.right:.4g}</text>'
        )
        y += 22
    return "".join(parts), y - top + 14


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return value
