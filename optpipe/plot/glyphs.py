"""The signs of the terminal picture: one set for terminals with Unicode, one for those without."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from optpipe.action import ActionType

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["ASCII", "LETTERS", "NAMES", "UNICODE", "Glyphs"]

LETTERS: Mapping[ActionType, str] = {
    ActionType.FORWARD: "F",
    ActionType.BACKWARD_INPUT: "I",
    ActionType.BACKWARD_WEIGHT: "W",
    ActionType.FULL_BACKWARD: "B",
    ActionType.RECOMPUTE: "R",
}
NAMES: Mapping[ActionType, str] = {
    ActionType.FORWARD: "forward",
    ActionType.BACKWARD_INPUT: "input gradient",
    ActionType.BACKWARD_WEIGHT: "weight gradient",
    ActionType.FULL_BACKWARD: "full backward",
    ActionType.RECOMPUTE: "recompute",
    ActionType.OFFLOAD: "to the host",
    ActionType.RELOAD: "from the host",
}


@dataclass(frozen=True, slots=True)
class Glyphs:
    """Signs; ``fill`` continues a block where there is no colour to do it.

    ``levels`` go from nothing to full, ``shades`` from idle to busy.
    """

    fill: Mapping[ActionType, str]
    grad_sync: str
    bubble: str
    levels: str
    shades: str
    over: str
    tick: str
    ruler: str
    down: str
    up: str


UNICODE = Glyphs(
    fill={
        ActionType.FORWARD: "─",
        ActionType.BACKWARD_INPUT: "═",
        ActionType.BACKWARD_WEIGHT: "┄",
        ActionType.FULL_BACKWARD: "≡",
        ActionType.RECOMPUTE: "~",
        ActionType.OFFLOAD: "▾",
        ActionType.RELOAD: "▴",
    },
    grad_sync="◦",
    bubble="·",
    levels=" ▁▂▃▄▅▆▇█",
    shades=" ░▒▓█",
    over="!",
    tick="┴",
    ruler="─",
    down="↓",
    up="↑",
)
ASCII = Glyphs(
    fill={
        ActionType.FORWARD: "-",
        ActionType.BACKWARD_INPUT: "=",
        ActionType.BACKWARD_WEIGHT: "~",
        ActionType.FULL_BACKWARD: "#",
        ActionType.RECOMPUTE: "+",
        ActionType.OFFLOAD: "v",
        ActionType.RELOAD: "^",
    },
    grad_sync="o",
    bubble=".",
    levels=" 12345678",
    shades=" -+xX",
    over="!",
    tick="|",
    ruler="-",
    down="v",
    up="^",
)
