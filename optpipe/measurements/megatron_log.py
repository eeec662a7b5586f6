"""Megatron-LM's training log: its timers, in every form they were printed in, and its arguments.

Forms, by version and ``--timing-log-option``; a launcher may put a prefix before each line:

* ``time (ms) | forward-compute: 58.16 | ...`` on one line, of the last rank (before 2023);
* ``(min, max) time across ranks (ms):`` and lines ``forward-compute ....: (58.16, 60.02)``;
* ``max time across ranks (ms):`` or ``time (ms):`` and lines with one number;
* ``times across ranks (ms):``, then per timer ``forward-compute:`` and lines ``rank  0: 58.16``.

Each is the total of one iteration, averaged over the logging interval.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from optpipe.measurements.values import MeasurementError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from optpipe.measurements.values import MeasuredAction

__all__ = ["COMPUTE_TIMERS", "MegatronLog", "TimerBlock", "parse_log"]

COMPUTE_TIMERS: dict[str, MeasuredAction] = {"forward-compute": "F", "backward-compute": "B"}
"""Timers of compute alone, and the action they time."""

Form = Literal["last_rank", "minmax", "max", "all"]

_NUMBER = r"[-+\w.]+"
_ONE_LINE = re.compile(r"time \(ms\) \|(?P<rest>.*)$")
_HEADERS: tuple[tuple[str, Form], ...] = (
    ("(min, max) time across ranks (ms):", "minmax"),
    ("max time across ranks (ms):", "max"),
    ("times across ranks (ms):", "all"),
    ("time (ms):", "max"),
)
_PAIR = re.compile(rf"(?P<name>[\w/-]+) \.*: \((?P<least>{_NUMBER}), (?P<most>{_NUMBER})\)\s*$")
_SINGLE = re.compile(rf"(?P<name>[\w/-]+) \.*: (?P<value>{_NUMBER})\s*$")
_TIMER_OF_RANKS = re.compile(r"(?P<name>[\w/-]+):\s*$")
_OF_RANK = re.compile(rf"rank\s+(?P<rank>\d{{1,6}}): (?P<value>{_NUMBER})\s*$")
_ARGUMENT = re.compile(r"(?P<name>[a-z][a-z0-9_]*) \.{3,} ?(?P<value>.*?)\s*$")
_MICROBATCHES = re.compile(r"setting number of micro-?batches to constant (?P<value>\d{1,9})")
_WORLD = re.compile(
    r"using world size: (?P<world_size>\d+),"
    r"(?:.*tensor-model-parallel size: (?P<tensor_model_parallel_size>\d+))?"
    r"(?:.*pipeline-model-parallel size: (?P<pipeline_model_parallel_size>\d+))?"
)


@dataclass(kw_only=True)
class TimerBlock:
    """Timers printed together; times in ms, by timer and rank (None where no rank is named)."""

    form: Form
    line: int
    times: dict[str, list[tuple[int | None, float]]] = field(default_factory=dict)

    def add(self, name: str, rank: int | None, text: str, line: int) -> None:
        """Note one printed time; of timers that are not needed, only that they are there."""
        found = self.times.setdefault(name, [])
        if name not in COMPUTE_TIMERS:
            return
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value < 0:
            raise MeasurementError(
                f"line {line}: timer {name} = {text!r}: must be a number of ms; "
                "is the log complete there?"
            )
        found.append((rank, value))


@dataclass(frozen=True, kw_only=True)
class MegatronLog:
    """What a log holds: blocks in order, and arguments as printed."""

    blocks: tuple[TimerBlock, ...]
    arguments: dict[str, str]

    def number(self, name: str) -> int | None:
        """Return an argument that is a whole number, or None."""
        text = self.arguments.get(name, "")
        return int(text) if text.isdecimal() else None

    def flag(self, name: str) -> bool:
        """Return whether an argument is True."""
        return self.arguments.get(name) == "True"


def parse_log(text: str) -> MegatronLog:
    """Return the timers and arguments of a log.

    Raises
    ------
    MeasurementError
        If a timer's value is no number; says the line.
    """
    arguments: dict[str, str] = {}
    blocks: list[TimerBlock] = []
    open_block: TimerBlock | None = None
    timer = ""
    for number, line in enumerate(text.splitlines(), start=1):
        found = _header(line, number)
        if found is not None:
            blocks.append(found)
            open_block, timer = found, ""
        elif open_block is not None:
            taken = _take(open_block, timer, line, number)
            open_block, timer = (open_block, taken) if taken is not None else (None, "")
        if open_block is None:
            _read_arguments(line, arguments)
    return MegatronLog(blocks=tuple(blocks), arguments=arguments)


def _header(line: str, number: int) -> TimerBlock | None:
    one_line = _ONE_LINE.search(line)
    if one_line is not None:
        block = TimerBlock(form="last_rank", line=number)
        for name, value in _cells(one_line["rest"]):
            block.add(name, None, value, number)
        return block
    for header, form in _HEADERS:
        if header in line:
            return TimerBlock(form=form, line=number)
    return None


def _cells(rest: str) -> Iterable[tuple[str, str]]:
    for cell in rest.split("|"):
        name, mark, value = cell.partition(":")
        if mark:
            yield name.strip(), value.strip()


def _take(block: TimerBlock, timer: str, line: str, number: int) -> str | None:
    """Read a line of a block; return the timer whose ranks follow, or None after the block."""
    if block.form == "all":
        of_rank = _OF_RANK.search(line)
        if of_rank is not None and timer:
            block.add(timer, int(of_rank["rank"]), of_rank["value"], number)
            return timer
        heading = _TIMER_OF_RANKS.search(line)
        return heading["name"] if heading is not None else None
    pair = _PAIR.search(line)
    if pair is not None:
        block.add(pair["name"], None, pair["least"], number)
        block.add(pair["name"], None, pair["most"], number)
        return ""
    single = _SINGLE.search(line)
    if single is not None:
        block.add(single["name"], None, single["value"], number)
        return ""
    return None


def _read_arguments(line: str, arguments: dict[str, str]) -> None:
    argument = _ARGUMENT.search(line)
    if argument is not None:
        arguments.setdefault(argument["name"], argument["value"])
    constant = _MICROBATCHES.search(line)
    if constant is not None:
        arguments["num_microbatches"] = constant["value"]
    world = _WORLD.search(line)
    if world is not None:
        known = {name: value for name, value in world.groupdict().items() if value}
        for name, value in known.items():
            arguments.setdefault(name, value)
