"""How the documentation is built: `make docs`, warnings are errors."""

from __future__ import annotations

from importlib.metadata import version as installed

project = "OptPipe"
author = "The OptPipe developers"
version = release = installed("optpipe")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
myst_enable_extensions = ["dollarmath", "colon_fence", "attrs_inline"]
myst_heading_anchors = 3
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "show-inheritance": False}
napoleon_google_docstring = False
# `name` in a docstring is code, not a reference that must resolve.
default_role = "code"
nitpicky = False

exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "OptPipe"
html_static_path: list[str] = []
html_copy_source = False
