# SPDX-License-Identifier: Apache-2.0
"""check SITE [--java]: whether each function and public name has a page, and each link of the site leads somewhere.

A link of the first page to a file of tests has the name of one of them, such as "a short tail".
"""

from __future__ import annotations

import html.parser
import pathlib
import re
import sys
import urllib.parse

from sphinx.util.inventory import InventoryFile

import python_reference

ROOT = pathlib.Path(__file__).resolve().parents[2]


class Page(html.parser.HTMLParser):
    """The places of a page, and what it refers to."""

    def __init__(self, path: pathlib.Path) -> None:
        super().__init__()
        self.places: set[str] = set()
        self.links: set[str] = set()
        self.texts: dict[str, list[str]] = {}  # of links
        self._link = ""
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Called for each tag."""
        for name, value in attrs:
            if name in ("id", "name") and value:
                self.places.add(value)
            elif name in ("href", "src") and value:
                self.links.add(value)
                if tag == "a":
                    self._link = value
                    self.texts.setdefault(value, []).append("")

    def handle_endtag(self, tag: str) -> None:
        """Called for each end of a tag."""
        if tag == "a":
            self._link = ""

    def handle_data(self, data: str) -> None:
        """Called for text."""
        if self._link:
            self.texts[self._link][-1] += data


def without_page(site: pathlib.Path) -> list[str]:
    """Functions of the headers and names of the packages that no page describes."""
    inventory = InventoryFile.loads((site / "objects.inv").read_bytes(), uri="").data
    missing = []
    for header in sorted((ROOT / "include" / "gradaccum").glob("*.h")):
        functions = re.findall(r"^GA_API [\w *]*?(\w+)\(", header.read_text(), re.M)
        missing += [f"{header.name}: {name}" for name in functions if name not in inventory["c:function"]]
    described = {name for kind, names in inventory.items() if kind.startswith("py:") for name in names}
    sources = ROOT / "bindings" / "python" / "src"
    for module in sorted({module for _, _, module, _ in python_reference.PAGES.values()}):
        names = (f"{module}.{name}" for name in python_reference.public(sources, module))
        missing += [name for name in names if name not in described]
    return missing


def dead_links(site: pathlib.Path, has_java: bool) -> list[str]:
    """Links within the site to what is not there; links to other places are not followed."""
    pages = {path: Page(path) for path in site.rglob("*.html")}
    dead = []
    for path, page in pages.items():
        if path.is_relative_to(site / "java") or path.is_relative_to(site / "csharp"):  # javadoc's, Doxygen's
            continue
        for link in page.links:
            url = urllib.parse.urlsplit(link)
            if url.scheme in ("http", "https", "mailto", "data"):
                continue
            target = path if not url.path else (path.parent / urllib.parse.unquote(url.path)).resolve()
            if not has_java and target.is_relative_to(site / "java"):
                continue
            place = urllib.parse.unquote(url.fragment)
            if url.scheme or url.path.startswith("/") or not target.is_file():
                dead.append(f"{path.relative_to(site)}: {link}")
            elif place and target in pages and place not in pages[target].places | {"top"}:
                dead.append(f"{path.relative_to(site)}: {link} has no such place")
    return sorted(dead)


def without_test(site: pathlib.Path) -> list[str]:
    """Links of the first page to tests that are not there."""
    missing, count = [], 0
    for link, texts in Page(site / "index.html").texts.items():
        if match := re.fullmatch(r"source/(.*/test_\w+\.\w+)\.html", link):
            for text in texts:
                count += 1
                words = re.sub(r"[^a-z0-9]+", "_", text.lower())
                if f"test_{words}(" not in (ROOT / match[1]).read_text().lower():
                    missing.append(f"{match[1]}: {text}")
    return missing if count else ["any: the first page has no link to a test"]


def main() -> int:
    """Prints what is wrong."""
    site = pathlib.Path(sys.argv[1]).resolve()
    problems = [f"without a page: {name}" for name in without_page(site)]
    problems += [f"without a test: {name}" for name in without_test(site)]
    problems += [f"dead link: {link}" for link in dead_links(site, "--java" in sys.argv)]
    print("\n".join(problems), end="\n" if problems else "")
    return 1 if problems else 0


sys.exit(main())
