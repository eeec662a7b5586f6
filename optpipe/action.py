"""Actions: one thing one device does for one (stage, micro-batch).

The text form is that of torch.distributed.pipelining, ``<stage><ACTION><microbatch>``: ``2F0`` is
the forward of micro-batch 0 on stage 2. torch parses loosely (``0B1x7`` passes); here a text is an
action as a whole or not at all.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic_core import core_schema

from optpipe.errors import ActionSyntaxError

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
    from pydantic.json_schema import JsonSchemaValue

__all__ = ["Action", "ActionType", "Program", "Programs", "parse_action"]


class ActionType(StrEnum):
    """What an action does; F, I, W and B are torch's letters (DESIGN section 3)."""

    FORWARD = "F"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    FULL_BACKWARD = "B"
    OFFLOAD = "OFFLOAD"
    RELEASE = "RELEASE"
    RELOAD = "RELOAD"
    RECOMPUTE = "RECOMPUTE"

    @property
    def is_backward(self) -> bool:
        """Whether the input gradient is made here (I or B)."""
        return self in (ActionType.BACKWARD_INPUT, ActionType.FULL_BACKWARD)

    @property
    def is_transfer(self) -> bool:
        """Whether this only enqueues work on a transfer lane (OFFLOAD or RELOAD)."""
        return self in (ActionType.OFFLOAD, ActionType.RELOAD)

    @property
    def is_compute(self) -> bool:
        """Whether this occupies the compute lane for a duration of its own."""
        return not self.is_transfer and self is not ActionType.RELEASE


_PATTERN = re.compile(
    r"(0|[1-9][0-9]{0,8})(F|I|W|B|OFFLOAD|RELEASE|RELOAD|RECOMPUTE)(0|[1-9][0-9]{0,8})"
)
_TYPES = {str(kind): kind for kind in ActionType}


class Action(NamedTuple):
    """One action; ``str(action)`` is its text form and `parse_action` inverts it.

    In pydantic models it validates from, and serialises to, that text.
    """

    stage: int
    type: ActionType
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.type.value}{self.microbatch}"

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(
            _validate_action,
            serialization=core_schema.plain_serializer_function_ser_schema(
                str, return_schema=core_schema.str_schema()
            ),
        )

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {"type": "string", "pattern": f"^{_PATTERN.pattern}$", "examples": ["2F0"]}


Program = tuple[Action, ...]
"""The ordered actions of one device."""

Programs = tuple[Program, ...]
"""One program per device, in device order."""


def parse_action(text: str) -> Action:
    """Parse one action from its text form.

    Raises
    ------
    ActionSyntaxError
        If the whole text is not exactly one action.
    """
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise ActionSyntaxError(_why_not(text))
    stage, kind, microbatch = match.groups()
    return Action(int(stage), _TYPES[kind], int(microbatch))


def _why_not(text: str) -> str:
    shown = text if len(text) <= 40 else text[:37] + "..."
    if "OVERLAP" in text or text.startswith("("):
        return (
            f"{shown!r} is an overlapped forward-backward pair, which v1 cannot express; "
            "write its two actions one after the other"
        )
    if any(word in text for word in ("SEND", "RECV", "UNSHARD", "RESHARD", "REDUCE")):
        return (
            f"{shown!r} is a communication action; a schedule holds compute and offload actions "
            "only, the runtime places communication: export with format compute_only"
        )
    return (
        f"{shown!r} is not an action; an action is <stage><ACTION><microbatch> with ACTION one of "
        f"{', '.join(_TYPES)} and no leading zeros, for example 2F0"
    )


def _validate_action(value: Any) -> Action:
    if isinstance(value, Action):
        return value
    if isinstance(value, str):
        return parse_action(value)
    raise ActionSyntaxError(f"{value!r} is not an action; write it as text, for example 2F0")
