# SPDX-License-Identifier: Apache-2.0
"""``python -m gradaccum.check [options] program.py [arguments]`` runs a program and reports on its accumulation."""

from __future__ import annotations

import argparse
import os
import runpy
import sys

from . import Recording, Report
from ._journal import Journal
from ._resume import JOURNAL, STOPS, compare


def main() -> int:
    """Returns 1 if a fault was found or the program failed, 2 if no window was seen."""
    parser = argparse.ArgumentParser(
        prog="python -m gradaccum.check",
        description="Runs a program that trains with torch, Keras or optax, and reports whether its gradient "
        "accumulation equals larger batches.",
    )
    parser.add_argument("--windows", type=int, default=200, help="watch so many (default: 200), then let it run")
    parser.add_argument("--json", metavar="FILE", help="write the report as JSON")
    parser.add_argument("--html", metavar="FILE", help="write the report as a page")
    parser.add_argument(
        "--resume", metavar="ARGUMENTS",
        help="run the program of torch three times: until it has saved a checkpoint in the middle of a window, with these "
        "arguments beside its own, by which it resumes, and whole; and compare the windows",
    )  # fmt: skip
    parser.add_argument("program", help="a file, run as python would run it")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the program")
    options = parser.parse_args()

    if options.resume is not None:
        return _told(compare([options.program, *options.arguments], options.resume, options.windows), options)
    return _watched(options)


def _watched(options: argparse.Namespace) -> int:
    """Runs the program within this process."""
    sys.argv = [options.program, *options.arguments]
    sys.path[0] = os.path.dirname(os.path.abspath(options.program))
    path = os.environ.pop(JOURNAL, "")
    journal = Journal(path, os.environ.pop(STOPS, "") == "1") if path else None
    recording = Recording(None, None, options.windows, journal)
    code: object = 0
    try:
        with recording:
            runpy.run_path(options.program, run_name="__main__")
    except SystemExit as end:
        code = end.code
    finally:
        status = 0 if journal is not None else _told(recording.report, options)
    if code not in (0, None):
        sys.exit(code)  # type: ignore[arg-type]
    if journal is not None:
        journal.write()
    return status


def _told(report: Report, options: argparse.Namespace) -> int:
    """Shows and writes a report. Returns the exit status for it."""
    print(f"\n{report}", file=sys.stderr)
    if options.json:
        report.save(options.json)
    if options.html:
        report.save(options.html)
    if report.faults:
        return 1
    return 0 if report.ok else 2


if __name__ == "__main__":
    sys.exit(main())
