"""Formulas as drawings inside the page: they need no script, no network and no TeX.

matplotlib's mathtext sets them; glyphs are outlines in the colour of the text around them.
"""

from __future__ import annotations

import html
import re
from functools import cache
from typing import TYPE_CHECKING, Any

from docutils import nodes
from matplotlib.font_manager import FontProperties
from matplotlib.mathtext import MathTextParser
from matplotlib.path import Path as Outline
from matplotlib.textpath import TextPath
from sphinx.util import logging

if TYPE_CHECKING:
    from sphinx.application import Sphinx

__all__ = ["drawn", "install", "lines_of"]

_LOG = logging.getLogger(__name__)
_SIZE = 100.0
"""Units per em of the drawings; the page scales them to its own em."""
_WIDEST = 44.0
"""What fits into the theme's column, in em."""
_GROWTH = 1.06
"""Computer Modern is a little smaller than the theme's letters of the same size."""
_OTHER_NAMES = {
    r"\\le(?![a-z])": r"\\leq",
    r"\\ge(?![a-z])": r"\\geq",
    r"\\bmod(?![a-z])": r"\\ \\mathrm{mod}\\ ",
    r"\\big(?![a-z])": "",
}
"""What mathtext calls differently."""
_COMMANDS = {
    Outline.MOVETO: "M",
    Outline.LINETO: "L",
    Outline.CURVE3: "Q",
    Outline.CURVE4: "C",
    Outline.CLOSEPOLY: "Z",
}


def install(app: Sphinx) -> None:
    """Make Sphinx draw formulas; ``html_math_renderer`` must be "drawn"."""
    app.add_html_math_renderer("drawn", (_visit_inline, None), (_visit_block, None))


@cache
def drawn(formula: str) -> str:
    """Return a formula in TeX's notation as an ``<svg>`` that stands on the line of its text.

    Raises
    ------
    ValueError
        If mathtext does not know what it says.
    """
    text = " ".join(formula.split())
    known = text
    for pattern, name in _OTHER_NAMES.items():
        known = re.sub(pattern, name, known)
    font = FontProperties(size=_SIZE, math_fontfamily="cm")
    width, height, depth, *_ = MathTextParser("path").parse(f"${known}$", dpi=72, prop=font)
    outline = TextPath((0, 0), f"${known}$", size=_SIZE, prop=font)
    em = _GROWTH / _SIZE
    label = html.escape(text, quote=True)
    return (
        f'<svg role="img" aria-label="{label}" viewBox="0 {-(height - depth):.1f} {width:.1f} '
        f'{height:.1f}" style="width:{width * em:.3f}em;height:{height * em:.3f}em;'
        f'vertical-align:{-depth * em:.3f}em;overflow:visible"><path fill="currentColor" '
        f'transform="scale(1,-1)" d="{_path_data(outline)}"/></svg>'
    )


def lines_of(formula: str) -> list[str]:
    """Return a displayed formula in one piece, or cut at its wide spaces where it is too wide."""
    width = float(re.findall(r"width:([\d.]+)em", drawn(formula))[0])
    pieces = [piece.strip() for piece in formula.split(r"\qquad")]
    return [formula] if width <= _WIDEST else pieces


def _path_data(outline: Outline) -> str:
    """Return an outline in SVG's notation."""
    parts = []
    for points, code in outline.iter_segments(simplify=False, curves=True):
        numbers = "" if code == Outline.CLOSEPOLY else " ".join(f"{one:.1f}" for one in points)
        parts.append(f"{_COMMANDS[code]}{numbers}")
    return "".join(parts)


def _drawn_or_told(node: nodes.Element) -> str:
    """Draw a formula of a page, or warn with its place and leave it as it is written."""
    try:
        if isinstance(node, nodes.math_block):
            return "<br>".join(map(drawn, lines_of(node.astext())))
        return drawn(node.astext())
    except ValueError as error:
        _LOG.warning("cannot draw %r: %s", node.astext(), error, location=node)
        return f"<code>{html.escape(node.astext())}</code>"


def _visit_inline(page: Any, node: nodes.math) -> None:
    page.body.append(f'<span class="math">{_drawn_or_told(node)}</span>')
    raise nodes.SkipNode


def _visit_block(page: Any, node: nodes.math_block) -> None:
    page.body.append(
        '<div class="math" style="overflow-x:auto;text-align:center;padding:.6em 0">'
        f"{_drawn_or_told(node)}</div>\n"
    )
    raise nodes.SkipNode
