# SPDX-License-Identifier: Apache-2.0
"""Sphinx's configuration of the site. docs/build runs it, on the pages that pages.py has collected."""

import pathlib
import re
from typing import Any

_HEADER = pathlib.Path(__file__).resolve().parents[2] / "include" / "gradaccum" / "gradaccum.h"

project = "libgradaccum"
version = release = ".".join(re.findall(r"^#define GA_VERSION_[A-Z]+ (\d+)$", _HEADER.read_text(), re.M))
copyright = "the authors of libgradaccum; Apache-2.0"
language = "en"

extensions = ["myst_parser", "sphinx_design", "autoapi.extension"]
highlight_language = "none"
suppress_warnings = ["misc.highlighting_failure"]  # of sources that Pygments cannot read

# The pages of docs/ are read elsewhere too, and refer to headings as GitHub names them.
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]

# Python's pages are made of the sources in autoapi_dirs, which docs/build sets. They are read and not imported.
autoapi_generate_api_docs = False
autoapi_add_toctree_entry = False
autoapi_options = ["members", "show-inheritance"]
autodoc_member_order = "bysource"
add_module_names = False
python_maximum_signature_line_length = 80
python_use_unqualified_type_names = True
c_maximum_signature_line_length = 80

html_theme = "furo"
html_title = f"libgradaccum {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_copy_source = False
html_show_search_summary = False  # without a server, no page can be fetched
html_domain_indices = False
html_show_sphinx = False


def _docstring(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """A docstring has links to pages, and none of reStructuredText's substitutions: |G|^2 is a norm."""
    lines[:] = [re.sub(r"\bdocs/([\w/-]+)\.md", r":doc:`/docs/\1`", line.replace("|", "\\|")) for line in lines]


def _public(text: str | None) -> str | None:
    """Types under the names by which programs import them."""
    if text is None:
        return None
    text = re.sub(r"\bgradaccum(\.torch|\.keras|\.check)?(?:\.[a-z_]\w*)*\.([A-Z]\w*)", r"gradaccum\1.\2", text)
    return re.sub(r"\b(?:collections\.abc\.|typing\.|_[a-z_]+\.(?=[A-Z]))", "", text)


def _with_public_types(
    app: Any, what: str, name: str, thing: Any, options: Any, signature: str | None, returned: str | None
) -> tuple[str | None, str | None]:
    return _public(signature), _public(returned)


def _public_attributes(app: Any, env: Any, pages: list[str]) -> None:
    for thing in env.autoapi_all_objects.values():
        if getattr(thing, "annotation", None):
            thing.annotation = _public(thing.annotation)
            if getattr(thing, "value", None) == "None" and "None" not in thing.annotation:
                thing.value = None  # not the default, but in place of the library's


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", _docstring)
    app.connect("env-before-read-docs", _public_attributes)
    app.connect("autodoc-process-signature", _with_public_types)
