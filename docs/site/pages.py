# SPDX-License-Identifier: Apache-2.0
"""pages SITE FOLDER: collects what the site is made of in FOLDER/pages and FOLDER/python.

The folders of the repository stay as they are, so that links between Markdown pages are right in both. A link to a file
or folder without a page of its own gets one below source/.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import textwrap

import c_reference
import plots
import python_reference

ROOT = pathlib.Path(__file__).resolve().parents[2]
SITE = ROOT / "docs" / "site"

# Markdown that is a page where it is. The README's place is taken by site/index.md.
PLACES = (
    "docs/*.md", "docs/moving/*.md", "docs/performance/*.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md",
    "src/*/README.md",
)  # fmt: skip
NOTEBOOKS = "docs/notebooks/*.ipynb"
_LINK = re.compile(r"(\]\()([^)\s#<>]+)(#[^)\s]*)?(?=\))")
_SOURCE = re.compile(r"/source/([\w./-]+)")
_LANGUAGES = {
    ".c": "c", ".h": "c", ".cpp": "cpp", ".hpp": "cpp", ".cu": "cuda", ".cuh": "cuda", ".py": "python", ".java": "java",
    ".cs": "csharp", ".txt": "none", ".cmake": "cmake", ".md": "markdown", ".json": "json",
}  # fmt: skip


def main() -> None:
    """Writes what differs from the last time, and removes what is no more."""
    site, folder = map(pathlib.Path, sys.argv[1:])
    files: dict[pathlib.Path, bytes] = {}
    for pattern in PLACES:
        for path in sorted(ROOT.glob(pattern)):
            name = path.relative_to(ROOT)
            front = "---\norphan: true\n---\n" if name.parts[0] == "src" else ""  # architecture.md leads there
            files[name] = (front + _linked(path.read_text(), name)).encode()
    for path in sorted(ROOT.glob(NOTEBOOKS)):
        name = path.relative_to(ROOT).with_suffix(".md")
        files[name] = _linked(_notebook(path), name).encode()
    for path in sorted(SITE.rglob("*")):
        if path.suffix in (".md", ".rst"):
            files[path.relative_to(SITE)] = path.read_bytes()
    if _first_lines() not in (ROOT / "README.md").read_text():
        raise SystemExit("README.md does not have the lines of examples/first/first.c")
    for name, text in plots.pictures().items():
        if (ROOT / "docs" / name).read_text() != text:
            raise SystemExit(f"docs/{name} is not what docs/site/plots.py draws: run it")
    for pattern in ("docs/*.svg", "examples/first/*"):  # what pages show
        files |= {path.relative_to(ROOT): path.read_bytes() for path in sorted(ROOT.glob(pattern))}
    picture = (ROOT / "docs" / "window.svg").read_text()
    files[pathlib.Path("window.html")] = f'<div class="window-frame">\n{picture}</div>\n'.encode()
    reference = c_reference.pages(ROOT / "include" / "gradaccum", ROOT / "examples" / "reference")
    reference |= python_reference.pages(ROOT / "bindings" / "python" / "src")
    files.update({pathlib.Path(name): text.encode() for name, text in reference.items()})
    files.update(_sources(files))
    _write(folder / "pages", files, site)
    _write_package(folder / "python" / "gradaccum")


def _first_lines() -> str:
    """What the first page shows of the program in C, which a test runs."""
    text = (ROOT / "examples" / "first" / "first.c").read_text()
    return textwrap.dedent(text.split("/* begin */\n")[1].split("  /* end */")[0])


def _linked(text: str, page: pathlib.Path) -> str:
    """Links to what has no page lead to its source."""

    def replace(match: re.Match[str]) -> str:
        target = os.path.normpath(page.parent / match[2])
        path = ROOT / target
        if "://" in match[2] or not path.exists() or path.suffix == ".svg":
            return match[0]
        if target in ("README.md", "docs/site/index.md"):
            return f"{match[1]}/index.md"
        if any(path.match(str(ROOT / pattern)) for pattern in PLACES):
            return match[0]
        if path.match(str(ROOT / NOTEBOOKS)) and path.stem != page.stem:
            return f"{match[1]}/{target.removesuffix('.ipynb')}.md"
        return f"{match[1]}/source/{target}.rst"

    return _LINK.sub(replace, text)


def _notebook(path: pathlib.Path) -> str:
    """The cells of a notebook as a page."""
    parts = []
    for cell in json.loads(path.read_text())["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
    parts.insert(1, f"This page is [a notebook]({path.name}), which a test runs.")
    return "\n\n".join(parts) + "\n"


def _sources(files: dict[pathlib.Path, bytes]) -> dict[pathlib.Path, bytes]:
    """Pages of the files and folders that other pages link to; they are not searched."""
    text = b"\n".join(content for name, content in files.items() if name.suffix in (".md", ".rst")).decode()
    targets = {re.sub(r"\.rst$", "", name).rstrip(".") for name in _SOURCE.findall(text)}
    sources: dict[pathlib.Path, bytes] = {}
    for target in sorted(targets):
        path = ROOT / target
        if path.is_dir():
            names = sorted(each.name for each in path.iterdir() if each.is_file())
            lines = ["In this folder:", ""]
            for name in names:
                has_page = f"{target}/{name}" in targets
                lines.append(f"* :doc:`{name} </source/{target}/{name}>`" if has_page else f"* ``{name}``")
            _page(sources, target, lines)
        else:
            _page(sources, target, _listing(path))
    return sources


def _page(sources: dict[pathlib.Path, bytes], name: str, lines: list[str]) -> None:
    head = [":orphan:", ":nosearch:", "", name, "=" * len(name), ""]
    sources[pathlib.Path("source", f"{name}.rst")] = "\n".join([*head, *lines, ""]).encode()


def _listing(path: pathlib.Path) -> list[str]:
    language = _LANGUAGES.get(path.suffix, "bash" if path.read_text().startswith("#!") else "none")
    return [f".. code-block:: {language}", "   :linenos:", "", *(f"   {line}" for line in path.read_text().split("\n"))]


def _write(folder: pathlib.Path, files: dict[pathlib.Path, bytes], site: pathlib.Path) -> None:
    for path in folder.rglob("*"):
        name = path.relative_to(folder)
        if path.is_file() and name not in files:
            path.unlink()
            (site / name).with_suffix(".html").unlink(missing_ok=True)
    for name, content in files.items():
        path = folder / name
        if not path.exists() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


def _write_package(package: pathlib.Path) -> None:
    """Its sources, and what the bindings' generator writes."""
    shutil.rmtree(package, ignore_errors=True)
    command = [
        sys.executable, str(ROOT / "bindings" / "generate"), "--language", "python", "--header",
        str(ROOT / "include" / "gradaccum" / "gradaccum.h"), "--out", str(package),
    ]  # fmt: skip
    subprocess.run(command, check=True, env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"})
    source = ROOT / "bindings" / "python" / "src" / "gradaccum"
    shutil.copytree(source, package, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))


if __name__ == "__main__":
    main()
