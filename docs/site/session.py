#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""session PROGRAM: whether docs/session.md shows what the main example prints on a terminal, numbers aside.

Trains on a few samples only. Lines that differ in their numbers alone are one line.
"""

from __future__ import annotations

import difflib
import os
import pathlib
import pty
import re
import shutil
import sys
import tempfile

PAGE = pathlib.Path(__file__).resolve().parents[1] / "session.md"
_BLOCK = re.compile(r"<!-- test: session -->\n```\n(.*?)```\n", re.S)


def masked(text: str) -> list[str]:
    """Lines without their numbers, folders and what the build is."""
    lines: list[str] = []
    for line in text.replace("\r\n", "\n").split("\n"):
        line = line.rsplit("\x1b[K")[-1]  # a terminal has erased what is before
        line = re.sub(r"^(libgradaccum) .*", r"\1", line)
        line = re.sub(r"\S*/(?=\S+\.(csv|svg)$)", "", line)
        line = re.sub(r"-?\d+(\.\d+)?(e[-+]\d+)?", "#", line)
        line = " ".join(line.split())
        if line and line not in lines[-1:]:
            lines.append(line)
    return lines


def printed(program: str) -> str:
    """The program's output on a terminal."""
    parts: list[bytes] = []

    def read(descriptor: int) -> bytes:
        parts.append(os.read(descriptor, 4096))
        return parts[-1]

    silent, terminal = os.open(os.devnull, os.O_WRONLY), os.dup(1)
    os.dup2(silent, 1)
    with tempfile.TemporaryDirectory() as out:
        status = pty.spawn([program, "--samples", "128", "--test-samples", "100", "--out", out], read)
    os.dup2(terminal, 1)
    text = b"".join(parts).decode()
    if status:
        sys.exit(f"{text}\n{program} ended with status {os.waitstatus_to_exitcode(status)}")
    return text


def main() -> int:
    """Prints how they differ."""
    if not pathlib.Path("/usr/share/datasets/fashion-mnist/train-images-idx3-ubyte.gz").exists():
        print("skipped: dataset-fashion-mnist is not installed")
        return 77
    if not shutil.which("gnuplot"):
        print("skipped: gnuplot is not installed")
        return 77
    shown = masked("".join(_BLOCK.findall(PAGE.read_text())))
    differences = list(difflib.unified_diff(shown, masked(printed(sys.argv[1])), PAGE.name, "the program", lineterm="", n=1))
    print("\n".join(differences) or f"{len(shown)} lines")
    return 1 if differences else 0


sys.exit(main())
