# SPDX-License-Identifier: Apache-2.0
"""Writes what a binding has of the header: options, enumerations, results and members, with their documentation.

    python bindings/generate --language python --header include/gradaccum/gradaccum.h --out FOLDER

Needs libclang: the package libclang of the Python index, or python3-clang in Debian. Says what the header lacks.
"""

from __future__ import annotations

import argparse
import importlib
import pathlib
import sys

import header


def main() -> int:
    """Writes the files; returns the exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--language", required=True, choices=["csharp", "java", "python"])
    parser.add_argument("--header", required=True)
    parser.add_argument("--compiler", default="cc", help="whose stddef.h and stdint.h are read")
    parser.add_argument("--out", required=True, type=pathlib.Path)
    arguments = parser.parse_args()
    try:
        declared = header.read(arguments.header, arguments.compiler)
        files = importlib.import_module(arguments.language).write(declared)
    except header.Refused as e:
        print(e, file=sys.stderr)
        return 1
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        path = arguments.out / name
        path.unlink(missing_ok=True)  # not through a link to a file of the source
        path.write_text(text.rstrip("\n") + "\n", encoding="utf-8")
    return 0


sys.exit(main())
