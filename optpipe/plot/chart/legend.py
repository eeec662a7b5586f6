"""What the colours of a chart mean, as HTML above it, and in the words of its tooltips."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from optpipe.plot.bars import KINDS
from optpipe.plot.colours import BAR_COLOURS
from optpipe.plot.glyphs import LETTERS, NAMES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optpipe.action import ActionType
    from optpipe.plot.bars import Drawing
    from optpipe.plot.chart.style import Palette

__all__ = ["WORDS", "legend_of"]


def _word(kind: ActionType | None) -> str:
    if kind is None:
        return "gradient reduction"
    if kind.is_transfer:
        return f"{kind.name.lower()} ({NAMES[kind]})"
    return NAMES[kind]


WORDS = tuple(_word(kind) for kind in KINDS)
"""The action of each of `KINDS`."""


def legend_of(drawings: Sequence[Drawing], look: Palette, *, has_bound: bool) -> str:
    """Return a line of samples: the actions that some drawings have, and what is always there."""
    used = sorted({int(kind) for drawing in drawings for kind in set(drawing.bars.kind)})
    colours = [(BAR_COLOURS[2 * kind], _name(kind)) for kind in used]
    colours += [
        (look.bubble, "bubble"),
        (look.static, "weights, gradients, optimizer"),
        (look.memory, "activations"),
    ]
    samples = [_sample(f"background:{colour}", name) for colour, name in colours]
    samples.append(_sample(f"background:{look.limit};height:2px", "memory limit"))
    if has_bound:
        samples.append(_sample(f"border-left:2px dashed {look.bound};width:0", "lower bound"))
    inner = "".join(samples)
    return (
        f'<div style="display:flex;flex-wrap:wrap;gap:2px 14px;color:{look.text};'
        f'font:12px system-ui,sans-serif;align-items:center">{inner}</div>'
    )


def _name(code: int) -> str:
    kind = KINDS[code]
    letter = "" if kind is None else LETTERS.get(kind, "")
    return f"{letter} {WORDS[code]}".strip()


def _sample(style: str, name: str) -> str:
    box = f"display:inline-block;width:14px;height:11px;vertical-align:middle;{style}"
    return (
        f'<span><span style="{box}"></span> <span style="vertical-align:middle">'
        f"{escape(name)}</span></span>"
    )
