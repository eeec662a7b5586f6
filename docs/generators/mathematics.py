"""Sphinx's formulas, drawn by `docs.generators.typesetting`."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Any

from docutils import nodes  # type: ignore[import-untyped]
from sphinx.util import logging

from docs.generators.typesetting import drawn, lines_of

if TYPE_CHECKING:
    from sphinx.application import Sphinx

__all__ = ["install"]

_LOG = logging.getLogger(__name__)


def install(app: Sphinx) -> None:
    """Make Sphinx draw formulas; ``html_math_renderer`` must be "drawn"."""
    app.add_html_math_renderer("drawn", (_visit_inline, None), (_visit_block, None))


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
