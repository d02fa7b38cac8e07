# SPDX-License-Identifier: Apache-2.0
"""plots: draws the pictures of docs/why.md from the windows in tests/check/reports, and writes them into docs/.

A bar is the multiple of a micro-batch's mean loss in the update; a line is where the bar should end.
"""

from __future__ import annotations

import json
import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[2]

# The picture, the report, the window, and what a micro-batch consists of.
PLOTS = {
    "why_tokens": ("transformers-4.44-language-model", 0, "tokens"),
    "why_tail": ("accelerate-1.15-tail", 2, "samples"),
    "why_sum": ("transformers-5.23-classifier", 0, "samples"),
    "why_ranks": ("deepspeed-0.18.6", 2, "samples"),
}


def pictures() -> dict[str, str]:
    """The files."""
    return {f"{name}.svg": _picture(*plot) for name, plot in PLOTS.items()}


def _picture(report: str, window: int, unit: str) -> str:
    path = ROOT / "tests" / "check" / "reports" / f"{report}.json"
    (optimizer,) = json.loads(path.read_text())["optimizers"]
    bars = optimizer["windows"][window]["coefficients"]
    ranks = len({bar["rank"] for bar in bars})
    unit_width = 360 / max(max(bar["value"], bar["right"]) for bar in bars)
    height = 28 * len(bars) + 10
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="680" height="{height}" viewBox="0 0 680 {height}" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="680" height="{height}" fill="white"/>',
    ]
    for i, bar in enumerate(bars):
        y = 8 + 28 * i
        of = f"rank {bar['rank']}, " if ranks > 1 else ""
        right = unit_width * bar["right"]
        wrong = abs(bar["value"] - bar["right"]) > 0.05 * bar["right"]
        lines += [
            f'<text x="160" y="{y + 15}" text-anchor="end" fill="#222">{of}{bar["terms"]:.0f} {unit}</text>',
            f'<rect x="170" y="{y}" width="{unit_width * bar["value"]:.1f}" height="20" '
            f'fill="{"#c0392b" if wrong else "#2e7d4f"}"/>',
            f'<line x1="{170 + right:.1f}" x2="{170 + right:.1f}" y1="{y - 3}" y2="{y + 23}" stroke="black" '
            'stroke-width="2"/>',
            f'<text x="545" y="{y + 15}" fill="#222">{round(bar["value"], 3):g} for {round(bar["right"], 3):g}</text>',
        ]
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    for name, text in pictures().items():
        (ROOT / "docs" / name).write_text(text)
