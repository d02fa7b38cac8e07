# SPDX-License-Identifier: Apache-2.0
"""plots: draws the pictures of docs/why.md and docs/performance.md, and writes them into docs/.

Those of why.md are windows in tests/check/reports: a bar is the multiple of a micro-batch's mean loss in the update,
and a line is where the bar should end. Those of performance.md are figures in docs/performance: a line is a target,
and a figure that misses it is red. Of several runs, the least is a full bar, and the most a pale one.
"""

from __future__ import annotations

import json
import math
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[2]
RED = "#c0392b"

# The picture, the report, the window, and what a micro-batch consists of.
PLOTS = {
    "why_tokens": ("transformers-4.44-language-model", 0, "tokens"),
    "why_tail": ("accelerate-1.15-tail", 2, "samples"),
    "why_sum": ("transformers-5.23-classifier", 0, "samples"),
    "why_ranks": ("deepspeed-0.18.6", 2, "samples"),
}


def pictures() -> dict[str, str]:
    """The files."""
    files = {f"{name}.svg": _window(*plot) for name, plot in PLOTS.items()}
    for name, draw in (
        ("memory", _memory), ("torch", _torch), ("peers", _peers), ("batchnorm", _batchnorm), ("eager", _eager),
        ("low_bit", _low_bit),
    ):  # fmt: skip
        tables = json.loads((ROOT / "docs" / "performance" / f"{name}.json").read_text())["tables"]
        files[f"performance_{name}.svg"] = draw({of: table["rows"] for of, table in tables.items()})
    return files


def _svg(height: float, lines: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="680" height="{height}" viewBox="0 0 680 {height}" '
        'font-family="sans-serif" font-size="13">'
    )
    return "\n".join([head, f'<rect width="680" height="{height}" fill="white"/>', *lines, "</svg>", ""])


def _window(report: str, window: int, unit: str) -> str:
    path = ROOT / "tests" / "check" / "reports" / f"{report}.json"
    (optimizer,) = json.loads(path.read_text())["optimizers"]
    bars = optimizer["windows"][window]["coefficients"]
    ranks = len({bar["rank"] for bar in bars})
    unit_width = 360 / max(max(bar["value"], bar["right"]) for bar in bars)
    lines = []
    for i, bar in enumerate(bars):
        y = 8 + 28 * i
        of = f"rank {bar['rank']}, " if ranks > 1 else ""
        right = unit_width * bar["right"]
        wrong = abs(bar["value"] - bar["right"]) > 0.05 * bar["right"]
        lines += [
            f'<text x="160" y="{y + 15}" text-anchor="end" fill="#222">{of}{bar["terms"]:.0f} {unit}</text>',
            f'<rect x="170" y="{y}" width="{unit_width * bar["value"]:.1f}" height="20" '
            f'fill="{RED if wrong else "#2e7d4f"}"/>',
            f'<line x1="{170 + right:.1f}" x2="{170 + right:.1f}" y1="{y - 3}" y2="{y + 23}" stroke="black" '
            'stroke-width="2"/>',
            f'<text x="545" y="{y + 15}" fill="#222">{round(bar["value"], 3):g} for {round(bar["right"], 3):g}</text>',
        ]
    return _svg(28 * len(bars) + 10, lines)


# ---- Performance


class Bar(NamedTuple):
    """A figure of a series, or the least and the most of several, and its target such as (">=", 0.95)."""

    series: int
    values: list[float]
    target: tuple[str, float] | None = None


class Row(NamedTuple):
    """Bars with one name, below a heading if it has one."""

    name: str
    bars: list[Bar]
    heading: str = ""


class Panel(NamedTuple):
    """Points of several runs with a line for each run: the figures of each series, over a number of the series."""

    name: str
    across: list[float]
    up: list[list[float]]


def _values(value: float | list[float]) -> list[float]:
    return sorted(value) if isinstance(value, list) else [value]


def _target(text: str | None) -> tuple[str, float] | None:
    if not text:
        return None
    sense, value = text.split()
    return sense, float(value)


def _of_machines(rows: list[dict[str, Any]], keys: Sequence[str]) -> list[Row]:
    return [
        Row(row["plot"], [Bar(i, _values(row[key]), _target(row.get("target"))) for i, key in enumerate(keys) if key in row])
        for row in rows
        if "plot" in row
    ]  # fmt: skip


def _memory(tables: dict[str, Any]) -> str:
    rows = _of_machines(tables["beyond"], ("intel", "epyc25", "epyc26"))
    return _bars(rows, ("Intel, Sapphire Rapids", "AMD, family 25", "AMD, family 26"))


def _torch(tables: dict[str, Any]) -> str:
    rows = []
    for row in tables["windows"]:
        bars = [Bar(i, [row[key]], (">=", row[f"{key}_target"])) for i, key in enumerate(("consumed", "live"))]
        name = f"{row['micro_batches']} micro-batch{'es' * (row['micro_batches'] > 1)}"
        rows.append(Row(name, [*bars, Bar(2, [row["live_against_grad_scale"]])]))
    return _bars(rows, ("gradients consumed", "live", "live, against grad_scale"))


def _peers(tables: dict[str, Any]) -> str:
    rows = []
    heading = ""
    for row in tables["ratios"]:
        case, numbers = row["case"].replace("N = 1 / 4", "N = 1 and 4"), _list(row["epyc26"])
        of = ""
        if found := re.fullmatch(r"(.*, one thread), (N = .*)", case):
            case, of = found[1], f", {found[2]}"
        for i, ratio in enumerate(numbers):
            name = row["peer"] + (f", N = {(1, 4)[i]}" if len(numbers) > 1 else of)
            bars = [Bar(0, [ratio])] + ([Bar(1, [row["epyc25_lent"]])] if "epyc25_lent" in row else [])
            rows.append(Row(name, bars, case if case != heading else ""))
            heading = case
    return _bars(rows, ("AMD, family 26, gradients live", "AMD, family 25, lent"), logarithmic=True)


def _list(value: float | list[float]) -> list[float]:
    return value if isinstance(value, list) else [value]


def _batchnorm(tables: dict[str, Any]) -> str:
    rows = []
    for row in tables["intel"]:
        bars = []
        for i, key in enumerate(("intel", "epyc26", "epyc26_fast")):
            for other in tables[key]:
                if other["plot"] == row["plot"]:
                    shapes = [value for name, value in other.items() if name.startswith("N")]
                    bars.append(Bar(i, [min(shapes), max(shapes)], _target(row.get("target"))))
        rows.append(Row(row["plot"], bars))
    return _bars(rows, ("Intel, Sapphire Rapids", "AMD, family 26", "the same, faster memory"))


def _eager(tables: dict[str, Any]) -> str:
    days = ("2026-11-25", "2026-11-26", "2026-11-30")
    rows = []
    for row in tables["left"]:
        for i, name in enumerate(("as long as the step", "twice as long", "three times as long")):
            bars = [Bar(s, [row[day][i]], _target(row.get("target"))) for s, day in enumerate(days) if day in row]
            rows.append(Row(name, bars, row["plot"] if i == 0 else ""))
    return _bars(rows, days)


def _low_bit(tables: dict[str, Any]) -> str:
    keys = ("f32", "bf16", "8bit")
    rows = _of_machines(tables["bytes"], keys)
    rows[0] = rows[0]._replace(heading="bytes for an element, with parameters of")
    across = [tables["bytes"][0][key] for key in keys]
    panels = [
        Panel(name, across, [sum((_list(row[key]) for row in tables[table]), []) for key in keys])
        for name, table in (("loss of a transformer, by bytes", "losses"), ("accuracy on Fashion-MNIST", "accuracies"))
    ]
    return _bars(rows, ("state in f32", "in bf16", "in 8 bits"), panels=panels)


COLOURS = ("#1f4e79", "#3d8fc4", "#8a8f98")
LEFT, WIDTH = 232, 340  # of the bars


def _bars(rows: Sequence[Row], series: Sequence[str], logarithmic: bool = False, panels: Sequence[Panel] = ()) -> str:
    """Horizontal bars from 0; logarithmic ones from 1, to the left of which the library loses. Panels below them."""
    marks: list[float] = [mark for row in rows for bar in row.bars for mark in [*bar.values, *(bar.target or ())[1:]]]
    least, most = min(marks), max(marks)

    def place(value: float) -> float:
        if logarithmic:
            return LEFT + WIDTH * math.log(value / least) / math.log(most / least)
        return LEFT + WIDTH * value / most

    origin = place(1) if logarithmic else LEFT
    lines = list(_legend(series))
    y = 32
    for row in rows:
        if row.heading:
            lines.append(f'<text x="12" y="{y + 16}" fill="#222" font-weight="bold">{row.heading}</text>')
            y += 24
        middle = y + 8 * len(row.bars) + 4
        lines.append(f'<text x="{LEFT - 10}" y="{middle}" text-anchor="end" fill="#222">{row.name}</text>')
        for bar in row.bars:
            lines += _bar(bar, y, place, origin, loses=logarithmic and bar.values[0] < 1)
            y += 16
        if logarithmic:
            top = y - 16 * len(row.bars) - 5
            lines.append(f'<line x1="{origin:.1f}" x2="{origin:.1f}" y1="{top}" y2="{y + 3}" stroke="black"/>')
        y += 8
    for i, panel in enumerate(panels):
        lines += _panel(panel, 12 + 340 * i, y)
    return _svg(y + 200 * bool(panels), lines)


def _panel(panel: Panel, x: int, y: int) -> Iterator[str]:
    least, most = min(map(min, panel.up)), max(map(max, panel.up))
    columns = [x + 80 + 200 * (n - min(panel.across)) / (max(panel.across) - min(panel.across)) for n in panel.across]
    points = [[y + 160 - 120 * (value - least) / (most - least) for value in values] for values in panel.up]
    yield f'<text x="{x}" y="{y + 16}" fill="#222" font-weight="bold">{panel.name}</text>'
    for value, height in ((most, y + 44), (least, y + 164)):
        yield f'<text x="{x + 50}" y="{height}" text-anchor="end" font-size="12" fill="#222">{value:.4g}</text>'
    for run in zip(*points, strict=True):
        line = " ".join(f"{column:.1f},{height:.1f}" for column, height in sorted(zip(columns, run, strict=True)))
        yield f'<polyline points="{line}" fill="none" stroke="#ccc"/>'
    for colour, column, n, heights in zip(COLOURS, columns, panel.across, points, strict=True):
        yield from (f'<circle cx="{column:.1f}" cy="{height:.1f}" r="4" fill="{colour}"/>' for height in heights)
        yield f'<text x="{column:.1f}" y="{y + 186}" text-anchor="middle" font-size="12" fill="#222">{n:g}</text>'


def _legend(series: Sequence[str]) -> Iterator[str]:
    x = 12
    for colour, name in zip(COLOURS, series, strict=False):
        yield f'<rect x="{x}" y="9" width="12" height="12" fill="{colour}"/>'
        yield f'<text x="{x + 18}" y="20" fill="#222">{name}</text>'
        x += 40 + 7 * len(name)


def _bar(bar: Bar, y: int, place: Any, origin: float, loses: bool) -> Iterator[str]:
    first, last = bar.values[0], bar.values[-1]
    begin, end = sorted((origin, place(first)))
    colour = COLOURS[bar.series]
    yield f'<rect x="{begin:.1f}" y="{y}" width="{end - begin:.1f}" height="13" fill="{colour}"/>'
    if last > first:
        yield (
            f'<rect x="{place(first):.1f}" y="{y}" width="{place(last) - place(first):.1f}" height="13" '
            f'fill="{colour}" fill-opacity="0.4"/>'
        )
    misses = loses
    if bar.target:
        sense, target = bar.target
        misses = first < target if sense == ">=" else last > target
        x = place(target)
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y - 2}" y2="{y + 15}" stroke="black" stroke-width="2"/>'
    text = "–".join(f"{value:.2f}" if value < 10 else f"{value:.1f}" for value in dict.fromkeys(bar.values))
    yield f'<text x="{LEFT + WIDTH + 10}" y="{y + 11}" font-size="12" fill="{RED if misses else "#222"}">{text}</text>'


if __name__ == "__main__":
    for name, text in pictures().items():
        (ROOT / "docs" / name).write_text(text)
