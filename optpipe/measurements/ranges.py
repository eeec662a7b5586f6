"""Which named ranges of a trace are pipeline actions.

torch's schedule runtime, and with it ours, marks each action as ``PP:`` and the action's text
(`torch.distributed.pipelining.schedules`, 2.13: ``PP:1F0``, ``PP:0SEND_F0``, ``PP:0UNSHARD``), and
our own traces as the text alone; torch's GPipe marks ``Forward 3`` and ``Backward 3``.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from optpipe.measurements.values import MeasurementError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["RangePattern", "RangePatterns", "TracedAction", "parse_pattern"]

_TORCH = re.compile(
    r"(?:PP:)?(?P<stage>\d{1,9})(?P<action>F|I|W|B|RECOMPUTE|OFFLOAD|RELOAD|SEND_F)(?P<microbatch>\d{1,9})"
)
_GPIPE = re.compile(r"(?P<action>Forward|Backward) (?P<microbatch>\d{1,9})")
_OVERLAPPED = re.compile(r"PP:.*OVERLAP_F_B.*")
_WORDS = {
    "forward": "F",
    "fwd": "F",
    "backward": "B",
    "bwd": "B",
    "backward_input": "I",
    "backward_weight": "W",
    "recompute": "RECOMPUTE",
}
_LETTERS = ("F", "I", "W", "B", "RECOMPUTE", "OFFLOAD", "RELOAD", "SEND_F")


class TracedAction(NamedTuple):
    """What a range's name says; ``stage`` None = the only stage of its rank."""

    action: str
    stage: int | None
    microbatch: int | None


class RangePattern(NamedTuple):
    """A regular expression for whole names, with the groups stage, action and microbatch.

    ``action`` stands for the group where the expression has none.
    """

    expression: re.Pattern[str]
    action: str | None = None

    def match(self, name: str) -> TracedAction | None:
        """Return what a name says, or None if it is another range."""
        found = self.expression.fullmatch(name)
        if found is None:
            return None
        groups = found.groupdict()
        word = self.action or groups.get("action") or ""
        action = word.upper() if word.upper() in _LETTERS else _WORDS.get(word.lower())
        if action is None:
            raise MeasurementError(
                f"range {name!r}: {word!r} is no action; an action is one of "
                f"{', '.join(_LETTERS)}, or {', '.join(_WORDS)}: change the pattern"
            )
        return TracedAction(action, _number(groups, "stage"), _number(groups, "microbatch"))


class RangePatterns(NamedTuple):
    """The patterns of one reading; the first that matches a name counts."""

    patterns: tuple[RangePattern, ...]

    @classmethod
    def of(cls, texts: Sequence[str]) -> RangePatterns:
        """Return the patterns people wrote, or those of torch where they wrote none."""
        if not texts:
            return cls((RangePattern(_TORCH), RangePattern(_GPIPE)))
        return cls(tuple(parse_pattern(text) for text in texts))

    def match(self, name: str) -> TracedAction | None:
        """Return what a name says, or None.

        Raises
        ------
        MeasurementError
            If it is an overlapped pair: two actions whose times cannot be told apart.
        """
        if _OVERLAPPED.fullmatch(name):
            raise MeasurementError(
                f"range {name!r} is an overlapped forward-backward pair, whose two times cannot "
                "be told apart; profile a schedule without overlapped pairs"
            )
        for pattern in self.patterns:
            found = pattern.match(name)
            if found is not None:
                return found
        return None


def parse_pattern(text: str) -> RangePattern:
    """Return the pattern of ``REGEX`` or ``ACTION=REGEX``.

    Raises
    ------
    MeasurementError
        If the expression is broken, has other groups, or nothing names the action.
    """
    action, expression = None, text
    head, mark, tail = text.partition("=")
    if mark and (head.upper() in _LETTERS or head.lower() in _WORDS):
        action, expression = head, tail
    try:
        compiled = re.compile(expression)
    except re.error as error:
        raise MeasurementError(
            f"range pattern {text!r}: {error}; write a regular expression"
        ) from None
    strange = sorted(set(compiled.groupindex) - {"stage", "action", "microbatch"})
    if strange:
        raise MeasurementError(
            f"range pattern {text!r}: group {strange[0]!r} is unknown; "
            "the groups are stage, action and microbatch"
        )
    if action is None and "action" not in compiled.groupindex:
        raise MeasurementError(
            f"range pattern {text!r} names no action; begin it with one, as in "
            "F=forward_step, or add a group (?P<action>...)"
        )
    return RangePattern(compiled, action)


def _number(groups: dict[str, str | None], name: str) -> int | None:
    text = groups.get(name)
    if text is None:
        return None
    if not text.isdecimal():
        raise MeasurementError(
            f"range pattern: group {name} matched {text!r}, which is no number; change the pattern"
        )
    return int(text)
