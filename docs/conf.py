"""How the documentation is built: `make docs`, warnings are errors."""

from __future__ import annotations

import sys
from importlib.metadata import version as installed
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sphinx.application import Sphinx
    from sphinx.config import Config

_HERE = Path(__file__).parent
# Where `docs.generators` is found; the packages themselves are installed.
sys.path.insert(0, str(_HERE.parent))

project = "OptPipe"
author = "The OptPipe developers"
version = release = installed("optpipe")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinxcontrib.openapi",
    "sphinxcontrib.typer",
]
openapi_default_renderer = "httpdomain"
myst_enable_extensions = ["dollarmath", "colon_fence", "attrs_inline"]
myst_heading_anchors = 3
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
napoleon_google_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
# `name` in a docstring is code, not a reference that must resolve.
default_role = "code"
nitpicky = False

exclude_patterns = ["_build", "generators"]
html_theme = "furo"
html_title = "OptPipe"
# MathJax comes out of a package and is copied: formulas are set without any network.
_MATHJAX = Path(find_spec("sphinx-mathjax-offline").origin).parent / "static" / "mathjax"
mathjax_path = "tex-svg.js"
html_static_path = [str(_MATHJAX / mathjax_path)]
html_copy_source = False


def setup(app: Sphinx) -> None:
    """Make what nobody writes by hand before the pages are read."""
    app.connect("config-inited", _generate)
    app.connect("source-read", _link_functions)


def _generate(_app: Sphinx, _config: Config) -> None:
    from docs.generators import generate  # noqa: PLC0415 - found by the path above

    generate(_HERE / "generated")


def _link_functions(_app: Sphinx, _page: str, source: list[str]) -> None:
    """Point links of functions at the reference; in the repository they lead to the file."""
    from docs.generators import to_reference  # noqa: PLC0415 - as above

    source[0] = to_reference(source[0])
