"""Formulas as drawings: a page that shows them needs no script, no network and no TeX.

matplotlib's mathtext sets them; glyphs are outlines in the colour of the text around them.
"""

from __future__ import annotations

import html
import re
from functools import cache

from matplotlib.font_manager import FontProperties
from matplotlib.mathtext import MathTextParser
from matplotlib.path import Path as Outline
from matplotlib.textpath import TextPath

__all__ = ["drawn", "lines_of"]

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
