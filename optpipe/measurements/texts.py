"""Measurements as texts: the training log of Megatron-LM, and CSV tables.

Forms of Megatron's timers, by version and ``--timing-log-option``; a launcher may put a prefix
before each line. Each is the total of one iteration, averaged over the logging interval:

* ``time (ms) | forward-compute: 58.16 | ...`` on one line, of the last rank (before 2023);
* ``(min, max) time across ranks (ms):`` and lines ``forward-compute ....: (58.16, 60.02)``;
* ``max time across ranks (ms):`` or ``time (ms):`` and lines with one number;
* ``times across ranks (ms):``, then per timer ``forward-compute:`` and lines ``rank  0: 58.16``.

The first row of a table names its columns:

* times: ``stage, action, time_ms`` and, where known, ``microbatch, step, rank``;
* stages: ``stage`` and any fields of a problem's stage that are no times, ``device`` too;
* messages: ``from, to, bytes, time_ms``.
"""

from __future__ import annotations

import csv
import io
import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, ValidationError

from optpipe.errors import MeasurementError, explain
from optpipe.measurements.to_problem import (
    MOST_STAGES,
    Measurements,
    Sample,
    StageFacts,
    Transfer,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from optpipe.measurements.to_problem import MeasuredAction

__all__ = [
    "MegatronRun",
    "dump_times",
    "read_megatron",
    "read_messages_table",
    "read_stages_table",
    "read_times",
]


_COMPUTE_TIMERS: dict[str, MeasuredAction] = {"forward-compute": "F", "backward-compute": "B"}
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
class _TimerBlock:
    """Timers printed together; times in ms, by timer and rank (None if no rank is named)."""

    form: Form
    line: int
    times: dict[str, list[tuple[int | None, float]]] = field(default_factory=dict)

    def add(self, name: str, rank: int | None, text: str, line: int) -> None:
        """Note one printed time; of timers that are not needed, only that they are there."""
        found = self.times.setdefault(name, [])
        if name not in _COMPUTE_TIMERS:
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
class _MegatronLog:
    """The contents of a log: blocks in order, and arguments as printed."""

    blocks: tuple[_TimerBlock, ...]
    arguments: dict[str, str]

    def number(self, name: str) -> int | None:
        """Return an argument that is a whole number, or None."""
        text = self.arguments.get(name, "")
        return int(text) if text.isdecimal() else None

    def flag(self, name: str) -> bool:
        """Return whether an argument is True."""
        return self.arguments.get(name) == "True"


def _parse_log(text: str) -> _MegatronLog:
    """Return the timers and arguments of a log."""
    arguments: dict[str, str] = {}
    blocks: list[_TimerBlock] = []
    open_block: _TimerBlock | None = None
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
            argument = _ARGUMENT.search(line)
            if argument is not None:
                arguments.setdefault(argument["name"], argument["value"])
            constant = _MICROBATCHES.search(line)
            if constant is not None:
                arguments["num_microbatches"] = constant["value"]
            world = _WORLD.search(line)
            if world is not None:
                for name, value in world.groupdict().items():
                    if value:
                        arguments.setdefault(name, value)
    return _MegatronLog(blocks=tuple(blocks), arguments=arguments)


def _header(line: str, number: int) -> _TimerBlock | None:
    one_line = _ONE_LINE.search(line)
    if one_line is not None:
        block = _TimerBlock(form="last_rank", line=number)
        for cell in one_line["rest"].split("|"):
            name, mark, value = cell.partition(":")
            if mark:
                block.add(name.strip(), None, value.strip(), number)
        return block
    for header, form in _HEADERS:
        if header in line:
            return _TimerBlock(form=form, line=number)
    return None


def _take(block: _TimerBlock, timer: str, line: str, number: int) -> str | None:
    """Read a line of a block; return the timer whose ranks follow, or None after the block."""
    if block.form == "all":
        of_rank = _OF_RANK.search(line)
        if of_rank is not None and timer:
            block.add(timer, int(of_rank["rank"]), of_rank["value"], number)
            return timer
        heading = _TIMER_OF_RANKS.search(line)
        return heading["name"] if heading is not None else None
    found = _PAIR.search(line) or _SINGLE.search(line)
    if found is None:
        return None
    name, *values = found.groups()
    for value in values:
        block.add(name, None, value, number)
    return ""


# --- Megatron-LM's timer logs as measurements.
# Megatron times the forward and the fused backward of a whole iteration on every rank, after a
# device synchronisation each; so a micro-batch's time is a rank's total divided by the number of
# its micro-batches and chunks. It times no I or W, and its send and receive timers include waiting.

_HALF_PRECISION = ("torch.bfloat16", "torch.float16", "torch.half")


class MegatronRun(NamedTuple):
    """The facts about a run that its log may lack.

    Parameters
    ----------
    num_microbatches
        Per pipeline and iteration.
    num_stages
        Pipeline ranks times chunks.
    equal_stages
        Whether all stages take the same time: what the log says of all ranks together then counts
        for each stage.
    """

    num_microbatches: int | None = None
    num_stages: int | None = None
    equal_stages: bool = False


class _Layout(NamedTuple):
    """How ranks hold stages: rank r of the pipeline holds stages r, r + num_ranks, ..."""

    num_pipeline_ranks: int
    num_chunks: int
    world_size: int
    ranks_inside: int
    stages_outermost: bool

    def pipeline_rank(self, rank: int) -> int:
        """Return the pipeline rank of a global rank."""
        if self.stages_outermost:
            return rank * self.num_pipeline_ranks // self.world_size
        return rank // self.ranks_inside % self.num_pipeline_ranks

    def stages_of(self, pipeline_rank: int) -> list[int]:
        """Return the stages a pipeline rank holds."""
        return [pipeline_rank + chunk * self.num_pipeline_ranks for chunk in range(self.num_chunks)]


def read_megatron(text: str, run: MegatronRun | None = None) -> Measurements:
    """Return the measurements in a Megatron-LM log.

    Samples are one per stage, timer and logging interval (and rank, with ``--timing-log-option
    all``); their step counts the intervals.

    Parameters
    ----------
    text
        The log: what the last rank printed, other lines included.
    run
        What is known besides.

    Raises
    ------
    MeasurementError
        If there are no compute timers, or the log does not name their ranks.
    """
    run = run or MegatronRun()
    log = _parse_log(text)
    blocks = [block for block in log.blocks if "forward-compute" in block.times]
    if not blocks:
        names = sorted({name for block in log.blocks for name in block.times})
        seen = f"timers there: {', '.join(names[:8])}" if names else "no timers at all"
        raise MeasurementError(
            f"the log has no timer forward-compute ({seen}); run Megatron-LM with "
            "--timing-log-level 2 --timing-log-option all"
        )
    layout = _layout(log, run, blocks)
    num_microbatches = run.num_microbatches or _num_microbatches(log)
    samples = tuple(
        sample
        for step, block in enumerate(blocks)
        for sample in _samples(block, step, layout, num_microbatches, run.equal_stages)
    )
    facts = StageFacts(output_bytes=_output_bytes(log))
    num_stages = layout.num_pipeline_ranks * layout.num_chunks
    return Measurements(
        source="a Megatron-LM log",
        samples=samples,
        num_microbatches=num_microbatches,
        placement=tuple(stage % layout.num_pipeline_ranks for stage in range(num_stages)),
        stages=(facts,) * num_stages,
        notes=tuple(_notes(log, blocks, layout, run)),
    )


def _layout(log: _MegatronLog, run: MegatronRun, blocks: list[_TimerBlock]) -> _Layout:
    num_chunks = log.number("virtual_pipeline_model_parallel_size") or 1
    num_ranks = log.number("pipeline_model_parallel_size")
    if run.num_stages is not None:
        if run.num_stages % num_chunks:
            raise MeasurementError(
                f"num_stages = {run.num_stages}: must be a multiple of the {num_chunks} chunks per "
                "rank that the log names (virtual_pipeline_model_parallel_size); correct it"
            )
        num_ranks = run.num_stages // num_chunks
    if num_ranks is None:
        raise MeasurementError(
            "the log does not name pipeline_model_parallel_size (Megatron prints its arguments at "
            "the start); give num_stages"
        )
    named = [rank for block in blocks for rank, _ in block.times["forward-compute"] if rank]
    world_size = log.number("world_size") or max([num_ranks - 1, *named]) + 1
    if named and max(named) >= world_size:
        raise MeasurementError(
            f"the log has a time of rank {max(named)}, but names world_size {world_size}; "
            "is it the log of one run?"
        )
    if world_size % num_ranks:
        raise MeasurementError(
            f"{world_size} ranks cannot be divided into {num_ranks} pipeline stages; "
            "correct num_stages"
        )
    tensor = log.number("tensor_model_parallel_size") or 1
    context = log.number("context_parallel_size") or 1
    outermost = not log.flag("use_tp_pp_dp_mapping")
    return _Layout(num_ranks, num_chunks, world_size, tensor * context, outermost)


def _num_microbatches(log: _MegatronLog) -> int:
    known = log.number("num_microbatches")
    if known is not None:
        return known
    whole, micro = log.number("global_batch_size"), log.number("micro_batch_size")
    replicas = log.number("data_parallel_size")
    if whole and micro and replicas and whole % (micro * replicas) == 0:
        return whole // (micro * replicas)
    raise MeasurementError(
        "the log names neither the number of micro-batches nor global_batch_size, "
        "micro_batch_size and data_parallel_size; give num_microbatches: "
        "Megatron's timers are totals of an iteration"
    )


def _samples(
    block: _TimerBlock, step: int, layout: _Layout, num_microbatches: int, equal_stages: bool
) -> Iterator[Sample]:
    share = num_microbatches * layout.num_chunks
    for timer, action in _COMPUTE_TIMERS.items():
        for rank, total_ms in block.times.get(timer, ()):
            for stage in _stages(block, rank, layout, equal_stages):
                yield Sample(
                    stage=stage,
                    action=action,
                    time_ms=round(total_ms / share, 6),
                    step=step,
                    rank=rank,
                )


def _stages(block: _TimerBlock, rank: int | None, layout: _Layout, equal_stages: bool) -> list[int]:
    """Return the stages that a printed time is about."""
    last = layout.num_pipeline_ranks - 1
    if rank is not None:
        return layout.stages_of(layout.pipeline_rank(rank))
    if equal_stages or last == 0:
        return list(range(layout.num_pipeline_ranks * layout.num_chunks))
    if block.form == "last_rank":
        return layout.stages_of(last)
    raise MeasurementError(
        f"line {block.line}: {block.form} of all ranks does not say which stage took how long; "
        "run Megatron-LM with --timing-log-option all, or say that all stages take the same "
        "time (equal_stages)"
    )


def _output_bytes(log: _MegatronLog) -> int | None:
    """Return the bytes of a boundary tensor: sequence x micro-batch x hidden, in the params' type.

    With sequence parallelism each tensor rank sends its part; so it is with context parallelism.
    """
    names = ("seq_length", "micro_batch_size", "hidden_size")
    sizes = [size for name in names if (size := log.number(name)) is not None]
    if len(sizes) < len(names):
        return None
    item = 2 if log.arguments.get("params_dtype") in _HALF_PRECISION else 4
    parts = log.number("context_parallel_size") or 1
    if log.flag("sequence_parallel"):
        parts *= log.number("tensor_model_parallel_size") or 1
    return math.prod(sizes) * item // parts


def _notes(
    log: _MegatronLog, blocks: list[_TimerBlock], layout: _Layout, run: MegatronRun
) -> Iterator[str]:
    forms = {block.form for block in blocks}
    last = layout.num_pipeline_ranks - 1
    if run.equal_stages and last and forms != {"all"}:
        yield "All stages are taken to be equal: the log has no times of single ranks."
    elif forms == {"last_rank"} and last:
        stages = ", ".join(map(str, layout.stages_of(last)))
        yield f"The log has times of the last rank only: stage {stages}."
    if layout.num_chunks > 1:
        yield "A rank's chunks are taken to be equal: Megatron's timers do not tell them apart."
    if log.arguments.get("recompute_granularity", "None") != "None":
        yield "The run recomputed activations: B includes the recomputation."
    yield "Links are not measured: Megatron's send and receive timers include waiting."


_TIMES = ("stage", "action", "time_ms")
_OPTIONAL = ("microbatch", "step", "rank")
_SHOWN_CHARS = 80
_MESSAGES = {"from": "source", "to": "target", "bytes": "num_bytes", "time_ms": "time_ms"}


Value = TypeVar("Value", bound=BaseModel)


class _CsvRow(NamedTuple):
    """A row's line in the file, and its cells by column; empty cells are left out."""

    line: int
    cells: dict[str, str]


def read_times(text: str) -> Measurements:
    """Return the measurements of a table of times; errors name the line.

    If rows name ranks, the stages of one rank share a device.
    """
    rows = _rows(text, needed=_TIMES, known=(*_TIMES, *_OPTIONAL))
    samples = tuple(
        _checked(
            Sample,
            {
                name: cell if name == "action" else _number(row, name)
                for name, cell in row.cells.items()
            },
            row.line,
        )
        for row in rows
    )
    return Measurements(source="a table of times", samples=samples, placement=_placement(samples))


def dump_times(measurements: Measurements) -> str:
    """Return the samples as a table that `read_times` inverts."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    columns = (*_TIMES, *_OPTIONAL)
    writer.writerow(columns)
    for sample in measurements.samples:
        values = (getattr(sample, name) for name in columns)
        writer.writerow(["" if value is None else value for value in values])
    return out.getvalue()


def read_stages_table(text: str) -> tuple[StageFacts, ...]:
    """Return the facts of a table of stages, by stage; errors name the line or the stage."""
    fields = tuple(name for name in StageFacts.model_fields if name != "modes")
    rows = _rows(text, needed=("stage",), known=("stage", *fields))
    found: dict[int, StageFacts] = {}
    for row in rows:
        cells = {name: _number(row, name) for name in row.cells}
        stage = cells.pop("stage")
        if not isinstance(stage, int) or stage in found or stage >= MOST_STAGES:
            rule = f"must be a whole number from 0, below {MOST_STAGES}"
            again = "stands twice" if stage in found else rule
            raise MeasurementError(f"line {row.line}: stage = {stage}: {again}; correct the row")
        found[stage] = _checked(StageFacts, cells, row.line)
    gaps = sorted(set(range(1 + max(found))) - set(found))
    if gaps:
        raise MeasurementError(f"the table has no row for stage {gaps[0]}; add it")
    return tuple(found[stage] for stage in sorted(found))


def read_messages_table(text: str) -> tuple[Transfer, ...]:
    """Return the messages of a table; errors name the line."""
    rows = _rows(text, needed=tuple(_MESSAGES), known=tuple(_MESSAGES))
    return tuple(
        _checked(Transfer, {_MESSAGES[name]: _number(row, name) for name in row.cells}, row.line)
        for row in rows
    )


def _rows(text: str, needed: Sequence[str], known: Sequence[str]) -> list[_CsvRow]:
    reader = csv.reader(io.StringIO(text.removeprefix("\ufeff")), strict=True)
    header: list[str] = []
    rows = []
    try:
        for line in reader:
            cells, number = [cell.strip() for cell in line], reader.line_num
            if not any(cells):
                continue
            if not header:
                _check_header(cells, needed, known, number)
                header = cells
                continue
            if len(cells) != len(header):
                raise MeasurementError(
                    f"line {number}: {len(cells)} cells, but {len(header)} columns; "
                    "write one cell per column, empty where unknown"
                )
            found = {name: cell for name, cell in zip(header, cells, strict=True) if cell}
            rows.append(_CsvRow(number, found))
    except csv.Error as error:
        raise MeasurementError(
            f"line {reader.line_num}: not CSV: {error}; separate cells by commas"
        ) from None
    if not rows:
        raise MeasurementError(
            f"the table has no rows; write a header with {', '.join(needed)}, then a row for each"
        )
    return rows


def _check_header(names: list[str], needed: Sequence[str], known: Sequence[str], line: int) -> None:
    missing = [name for name in needed if name not in names]
    if missing:
        text = ", ".join(names)
        shown = text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."
        raise MeasurementError(
            f"line {line}: columns {shown}: {missing[0]} is missing; "
            f"a header needs {', '.join(needed)}"
        )
    for name in names:
        if name not in known or names.count(name) > 1:
            rule = "stands twice" if names.count(name) > 1 else "is unknown"
            raise MeasurementError(
                f"line {line}: column {name!r} {rule}; the columns are {', '.join(known)}"
            )


def _checked(kind: type[Value], fields: dict[str, Any], line: int) -> Value:
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise MeasurementError(f"line {line}: {explain(error, kind)}") from None


def _number(row: _CsvRow, name: str) -> int | float:
    text = row.cells[name]
    try:
        return int(text) if text.isdecimal() else float(text)
    except ValueError:
        raise MeasurementError(
            f"line {row.line}: {name} = {text!r}: must be a number; correct the cell"
        ) from None


def _placement(samples: Iterable[Sample]) -> tuple[int, ...]:
    """Return the device of each stage, where ranks are named for all: ranks in order."""
    rank_of: dict[int, int] = {}
    for sample in samples:
        if sample.rank is None:
            return ()
        rank_of[sample.stage] = min(sample.rank, rank_of.get(sample.stage, sample.rank))
    device_of = {rank: device for device, rank in enumerate(sorted(set(rank_of.values())))}
    if sorted(rank_of) != list(range(len(rank_of))):
        return ()
    return tuple(device_of[rank_of[stage]] for stage in sorted(rank_of))
