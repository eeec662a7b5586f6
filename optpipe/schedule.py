"""The schedule: one program per device, and what is known about it (``optpipe/schedule/v1``).

A `Schedule` is a record and checks nothing. `optpipe.check` checks whether its programs are legal,
and `optpipe.simulate` computes their costs. `optpipe.evaluate.evaluate` makes a schedule by both.
"""

from __future__ import annotations

import hashlib
import re
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

from pydantic import Field, field_serializer, field_validator, model_validator
from pydantic_core import core_schema

from optpipe.errors import ActionSyntaxError, ScheduleFormatError, rule_broken
from optpipe.problem import FileValue, FrozenValue, LinkLane, Objective
from optpipe.units import ShortRepr, format_bytes, format_ms, format_share, html_table

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
    from pydantic.json_schema import JsonSchemaValue

    from optpipe.problem import Problem

__all__ = [
    "OPTIMAL_GAP",
    "Action",
    "ActionType",
    "Contribution",
    "Pass",
    "Program",
    "Programs",
    "Provenance",
    "Schedule",
    "Status",
    "StoppedBy",
    "TraceEntry",
    "cells_of",
    "gap_of",
    "input_of",
    "lane_of",
    "parse_action",
    "parse_cell",
    "partner_of",
    "pass_of",
    "starts_pair",
    "transit_ms",
]


# --- Actions: one thing one device does for one (stage, micro-batch).
# The text form is that of torch.distributed.pipelining, ``<stage><ACTION><microbatch>``: ``2F0`` is
# the forward of micro-batch 0 on stage 2. torch parses loosely (``0B1x7`` passes); here a text is
# an action as a whole or not at all.


class ActionType(StrEnum):
    """Kinds of actions; F, I, W and B are torch's letters (docs/specification.md, "Actions")."""

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
    def consumes_reload(self) -> bool:
        """Whether this waits for its cell's RELOAD (I, B or RECOMPUTE); the first that does."""
        return self.is_backward or self is ActionType.RECOMPUTE

    @property
    def is_transfer(self) -> bool:
        """Whether this only enqueues work on a transfer lane (OFFLOAD or RELOAD)."""
        return self in (ActionType.OFFLOAD, ActionType.RELOAD)

    @property
    def is_compute(self) -> bool:
        """Whether this occupies the compute lane for a duration of its own."""
        return not self.is_transfer and self is not ActionType.RELEASE


_INDEX = "(0|[1-9][0-9]{0,8})"
_PATTERN = re.compile(
    f"{_INDEX}(?:F{_INDEX}(?:@([1-9][0-9]?))?|(I|W|B|OFFLOAD|RELEASE|RELOAD|RECOMPUTE){_INDEX})"
)
_TYPES = {str(kind): kind for kind in ActionType}


class Action(NamedTuple):
    """One action; ``str(action)`` is its text form and `parse_action` inverts it.

    In pydantic models it validates from, and serialises to, that text. ``mode`` is the cell's mode,
    an index of the stage's menu. Only F has it (``2F0@3``); 0 = none is named. ``paired`` marks a
    backward (I or B) that runs together with the F right before it in its program. In text the two
    are one cell, ``(0F7;7B3)OVERLAP_F_B`` (`cells_of`, `parse_cell`).
    """

    stage: int
    type: ActionType
    microbatch: int
    mode: int = 0
    paired: bool = False

    def __str__(self) -> str:
        mode = f"@{self.mode}" if self.mode else ""
        return f"{self.stage}{self.type.value}{self.microbatch}{mode}"

    @property
    def cell(self) -> tuple[int, int]:
        """The (stage, micro-batch)."""
        return self.stage, self.microbatch

    @property
    def bare(self) -> Action:
        """The action whatever its mode or partner: what tables of actions are keyed by."""
        return self._replace(mode=0, paired=False) if self.mode or self.paired else self

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
        pattern = f"^(?:{_PATTERN.pattern}|{_PAIR_PATTERN})$"
        return {"type": "string", "pattern": pattern, "examples": ["2F0", "(0F7;7B3)OVERLAP_F_B"]}


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
    stage, forward, mode, kind, microbatch = match.groups()
    if forward is not None:
        return Action(int(stage), ActionType.FORWARD, int(forward), int(mode or 0))
    return Action(int(stage), _TYPES[kind], int(microbatch))


# --- Pairs: an F and a backward that run together. A program holds them one after the other, the
# backward marked; where it is text they are one cell, as in torch.

_PAIR = re.compile(r"\(([^();]+);([^();]+)\)OVERLAP_F_B")
_PAIR_PATTERN = f"\\({_INDEX}F{_INDEX}(?:@([1-9][0-9]?))?;{_INDEX}(?:I|B){_INDEX}\\)OVERLAP_F_B"


def parse_cell(text: str) -> Program:
    """Parse one cell: one action, or the two of a pair.

    Raises
    ------
    ActionSyntaxError
        If the whole text is not exactly one cell.
    """
    match = _PAIR.fullmatch(text)
    if match is None:
        return (parse_action(text),)
    forward, backward = map(parse_action, match.groups())
    if forward.type is not ActionType.FORWARD or not backward.type.is_backward:
        raise ActionSyntaxError(
            f"{text!r} is not a pair; the F stands first and an I or a B second, for example "
            "(0F7;7B3)OVERLAP_F_B"
        )
    return forward, backward._replace(paired=True)


def cells_of(program: Iterable[Action]) -> list[str]:
    """Return the cells of a program as text: one per action, but one for both of a pair.

    A schedule made by hand may hold texts that are not actions. Each of them is a cell unchanged.
    """
    cells: list[str] = []
    last: Action | None = None
    for action in program:
        is_second = getattr(action, "paired", False)
        if is_second and last is not None and last.type is ActionType.FORWARD:
            cells[-1] = f"({cells[-1]};{action})OVERLAP_F_B"
        else:
            cells.append(str(action))
        last = action
    return cells


def starts_pair(program: Sequence[Action], index: int) -> bool:
    """Whether the action there is the F of a pair, whose backward is the next."""
    return index + 1 < len(program) and program[index + 1].paired


def partner_of(program: Sequence[Action], index: int) -> Action | None:
    """Return the action that runs together with that at an index, None if none does."""
    if starts_pair(program, index):
        return program[index + 1]
    return program[index - 1] if program[index].paired else None


def _why_not(text: str) -> str:
    shown = text if len(text) <= 40 else text[:37] + "..."
    if "OVERLAP" in text or text.startswith("("):
        return (
            f"{shown!r} is no single action and no pair; a pair is written "
            "(0F7;7B3)OVERLAP_F_B, the F first, an I or a B second, without spaces"
        )
    if "@" in text:
        return (
            f"{shown!r} is not an action; a mode stands behind F alone, without leading zeros, for "
            "example 2F0@3, and no mode is 0: leave @0 out"
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


def _flattened(programs: Any) -> Any:
    """Return lists of cells as lists of actions; what is no list of lists is left as it is."""
    if not isinstance(programs, list | tuple):
        return programs
    return tuple(
        tuple(
            action
            for cell in row
            for action in (
                parse_cell(cell) if isinstance(cell, str) and cell.startswith("(") else (cell,)
            )
        )
        if isinstance(row, list | tuple)
        else row
        for row in programs
    )


def _validate_action(value: Any) -> Action:
    if isinstance(value, Action):
        return value
    if isinstance(value, str):
        return parse_action(value)
    raise ActionSyntaxError(f"{value!r} is not an action; write it as text, for example 2F0")


OPTIMAL_GAP = 1e-6
"""``optimal`` means a relative gap of at most this."""

Status = Literal["optimal", "feasible"]
StoppedBy = Literal["optimal", "gap", "time_limit", "work_limit", "cancelled"]


def gap_of(objective_ms: float, bound_ms: float | None) -> float | None:
    """Return (objective - bound) / objective, at least 0; None without a bound."""
    if bound_ms is None:
        return None
    if objective_ms <= 0:
        return 0.0
    return max(0.0, (objective_ms - bound_ms) / objective_ms)


class TraceEntry(FrozenValue):
    """One improvement while solving.

    ``seconds`` counts from the start of the solve; ``bound_ms`` is the best known then.
    """

    seconds: float
    method: str
    objective_ms: float | None = None
    bound_ms: float | None = None


class Contribution(FrozenValue):
    """The contribution of one method to a solve, in ms, summed over its improvements.

    ``objective_ms`` and ``bound_ms`` are the best known when it last improved one of them.
    ``objective_gain_ms`` is by how much it lowered the objective below the first schedule's and
    the best of others. ``bound_gain_ms`` is by how much it raised the bound.
    """

    method: str
    objective_ms: float | None = None
    objective_gain_ms: float = Field(default=0.0, ge=0)
    bound_ms: float | None = None
    bound_gain_ms: float = Field(default=0.0, ge=0)


class Provenance(ShortRepr, FrozenValue):
    """The methods that made a schedule and proved its bound.

    ``method`` made it. ``start_method`` made the best schedule before optimisation, whose
    objective was ``start_objective_ms``. ``bound_method`` proved the bound. ``cpu_seconds`` are
    those of each part of the solve, or None if work was limited instead of time.
    ``contributions`` sums up ``trace`` by method, in the order of their first improvement.
    """

    method: str
    start_method: str | None = None
    start_objective_ms: float | None = None
    bound_method: str | None = None
    solver: str | None = None
    seed: int | None = None
    solve_seconds: float = 0.0
    cpu_seconds: dict[str, float] | None = None
    contributions: tuple[Contribution, ...] = ()
    trace: tuple[TraceEntry, ...] = ()


_SHOWN_ACTIONS = 24
_SHOWN_DEVICES = 16


class Schedule(FileValue):
    """One program per device, and what is known about it.

    Parameters
    ----------
    format
        Format of its file.
    problem_hash
        Hash of the problem that it belongs to.
    placement
        Device of each stage.
    programs
        One list of actions per device.
    objective, makespan_ms, span_ms
        docs/specification.md, "Words"; ``objective`` says which of them was minimised.
    bound_ms, gap
        Proven lower bound of the objective and relative gap; None = nothing proven.
    peak_bytes
        Per device, static bytes included, reserved bytes not.
    host_peak_bytes
        Per host, offloaded bytes.
    status, stopped_by
        Whether it is proven optimal, and why the search ended.
    provenance
        Which method found it and which proved the bound.
    """

    fault = ScheduleFormatError

    format: Literal["optpipe/schedule/v1"] = "optpipe/schedule/v1"
    problem_hash: str
    placement: tuple[int, ...]
    programs: tuple[tuple[Action, ...], ...] = Field(min_length=1)
    objective: Objective
    makespan_ms: float = Field(ge=0)
    span_ms: float = Field(ge=0)
    bound_ms: float | None = Field(default=None, ge=0)
    gap: float | None = Field(default=None, ge=0, le=1)
    peak_bytes: tuple[int, ...]
    host_peak_bytes: dict[str, int]
    status: Status
    stopped_by: StoppedBy
    provenance: Provenance

    @field_validator("programs", mode="before")
    @classmethod
    def _pairs_are_cells(cls, value: Any) -> Any:
        return _flattened(value)

    @field_serializer("programs", when_used="json")
    def _as_cells(self, programs: Programs) -> list[list[str]]:
        return [cells_of(program) for program in programs]

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if len(self.peak_bytes) != len(self.programs):
            raise rule_broken(
                f"peak_bytes has {len(self.peak_bytes)} values for {len(self.programs)} programs",
                "give one per device",
            )
        if self.status == "optimal" and (self.gap is None or self.gap > OPTIMAL_GAP):
            raise rule_broken(
                f"status optimal needs a gap of at most {OPTIMAL_GAP}, not {self.gap}",
                "call it feasible",
            )
        return self

    @property
    def objective_ms(self) -> float:
        """The minimised length: makespan_ms or span_ms."""
        return self.makespan_ms if self.objective == "makespan" else self.span_ms

    def __repr__(self) -> str:
        """Return status, objective, bound and gap, and how many actions there are."""
        bound = "none" if self.bound_ms is None else f"{self.bound_ms:.6g} ms"
        gap = "unknown" if self.gap is None else f"{self.gap:.3%}"
        return (
            f"Schedule({self.status}: {self.objective} {self.objective_ms:.6g} ms, bound {bound}, "
            f"gap {gap}, by {self.provenance.method[:60]}; {len(self.programs)} devices, "
            f"{sum(map(len, self.programs))} actions)"
        )

    __str__ = __repr__

    def _repr_html_(self) -> str:
        """Return the numbers and each device's actions as tables, for notebooks."""
        numbers = {
            "makespan": f"{format_ms(self.makespan_ms)} ms",
            "span": f"{format_ms(self.span_ms)} ms",
            "proven bound": "none" if self.bound_ms is None else f"{format_ms(self.bound_ms)} ms",
            "gap": "unknown" if self.gap is None else format_share(self.gap),
            "found by": self.provenance.method,
        }
        devices = [
            (f"device {device}", format_bytes(peak), " ".join(cells_of(program[:_SHOWN_ACTIONS])))
            for device, (peak, program) in enumerate(
                zip(self.peak_bytes[:_SHOWN_DEVICES], self.programs, strict=False)
            )
        ]
        return html_table(numbers.items()) + html_table(
            [("", "peak memory", f"first {_SHOWN_ACTIONS} actions"), *devices]
        )

    @property
    def program_hash(self) -> str:
        """``sha256:...`` of the programs alone: what all ranks must agree on."""
        text = "\n".join(",".join(cells_of(program)) for program in self.programs)
        return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


# --- What waits for what between devices: activations go forward, gradients come back.


class Pass(NamedTuple):
    """The forward or the input-gradient pass of a (stage, micro-batch), by I or by B."""

    backward: bool
    stage: int
    microbatch: int

    @property
    def reader(self) -> int:
        """The stage that needs this pass's output; no stage at the ends of the pipeline."""
        return self.stage - 1 if self.backward else self.stage + 1


def pass_of(action: Action) -> Pass | None:
    """Return the pass that an action completes; None if no other action waits for it."""
    if action.type is ActionType.FORWARD:
        return Pass(False, action.stage, action.microbatch)
    if action.type.is_backward:
        return Pass(True, action.stage, action.microbatch)
    return None


def input_of(action: Action, num_stages: int) -> Pass | None:
    """Return the pass whose output an action needs; None for all but F, I and B, and for 0F."""
    stage, kind, microbatch, *_ = action
    if kind is ActionType.FORWARD:
        return Pass(False, stage - 1, microbatch) if stage > 0 else None
    if kind.is_backward:
        if stage == num_stages - 1:
            return Pass(False, stage, microbatch)
        return Pass(True, stage + 1, microbatch)
    return None


def transit_ms(problem: Problem, source: Pass, target: Action) -> float:
    """Return the ms from a pass's output's departure to when the action that needs it may start."""
    if source.stage == target.stage:
        return 0.0
    pairs = problem.boundary_ms_by_cost[problem.cost_of[source.microbatch]]
    there, back = pairs[min(source.stage, target.stage)]
    return back if source.backward else there


def lane_of(problem: Problem, producer: Pass) -> LinkLane:
    """Return the link that the output of a pass occupies; -1 if messages do not queue."""
    lanes = problem.boundary_lanes_by_cost[problem.cost_of[producer.microbatch]]
    if not producer.backward:
        return lanes[producer.stage][0]
    return lanes[producer.stage - 1][1] if producer.stage > 0 else LinkLane(-1, 0.0)
