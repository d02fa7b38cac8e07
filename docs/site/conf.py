# SPDX-License-Identifier: Apache-2.0
"""Sphinx's configuration of the site. docs/build runs it, on the pages that pages.py has collected."""

import pathlib
import re
from typing import Any

_BUILD = pathlib.Path(__file__).resolve().parents[2] / "build"
_HEADER = _BUILD.parent / "include" / "gradaccum" / "gradaccum.h"

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

# Python's pages are made of the sources, which are read and not imported.
autoapi_dirs = [str(_BUILD / "site-python" / "gradaccum")]
autoapi_generate_api_docs = False
autoapi_add_toctree_entry = False
autoapi_options = ["members", "show-inheritance"]
autoapi_member_order = "bysource"
autoapi_python_class_content = "both"
autodoc_typehints = "signature"
add_module_names = False
python_maximum_signature_line_length = 80
python_use_unqualified_type_names = True
c_maximum_signature_line_length = 80

html_theme = "furo"
html_title = f"libgradaccum {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False


def _without_substitutions(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """A docstring is no place for reStructuredText's substitutions: |G|^2 is a norm."""
    lines[:] = [line.replace("|", "\\|") for line in lines]


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", _without_substitutions)
