"""The hues of actions, in every picture.

Two shades each, for even and odd micro-batches. Those that meet on one lane stay apart for people
with each kind of colour blindness (simulated after Machado, Oliveira and Fernandes 2009), compute
bears black text, and all show on a light and on a dark page.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe.action import ActionType
from optpipe.plot.bars import KINDS

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["BAR_COLOURS", "COLOURS", "GRAD_SYNC_COLOUR"]

COLOURS: Mapping[ActionType, tuple[str, str]] = {
    ActionType.FORWARD: ("#85c8f5", "#6cb6ea"),
    ActionType.BACKWARD_INPUT: ("#f9d85c", "#e8c23a"),
    ActionType.BACKWARD_WEIGHT: ("#35a07d", "#218566"),
    ActionType.FULL_BACKWARD: ("#f08c5f", "#dc7345"),
    ActionType.RECOMPUTE: ("#b05cf5", "#9f50e6"),
    ActionType.OFFLOAD: ("#4a5cf0", "#3a49d0"),
    ActionType.RELOAD: ("#c02a93", "#a32079"),
}
"""All that have a bar of their own."""

GRAD_SYNC_COLOUR = "#9e9e9e"

BAR_COLOURS: tuple[str, ...] = tuple(
    shade
    for kind in KINDS
    for shade in (COLOURS[kind] if kind is not None else (GRAD_SYNC_COLOUR, GRAD_SYNC_COLOUR))
)
"""The colour of a bar by its code, as `optpipe.plot.pixels.codes_of` counts."""
