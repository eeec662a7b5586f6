"""The pipeline's ranges of every rank, out of the files of one run."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from optpipe.measurements.ranges import RangePatterns, TracedAction
from optpipe.measurements.trace_file import Event, Process, read_trace
from optpipe.measurements.values import MeasurementError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

__all__ = ["RankTrace", "TracedRange", "read_rank_traces"]

_STEP = "ProfilerStep#"
_SHOWN_NAMES = 8


class TracedRange(NamedTuple):
    """One run of an action; ``step`` counts from 0 within its rank."""

    event: Event
    stage: int
    action: str
    microbatch: int | None
    step: int | None


class RankTrace(NamedTuple):
    """What one file holds of one rank."""

    rank: int
    process: Process
    ranges: tuple[TracedRange, ...]


class _Found(NamedTuple):
    rank: int
    process: Process
    ranges: list[tuple[Event, TracedAction]]


def read_rank_traces(
    paths: Sequence[Path], patterns: Sequence[str], process: str = ""
) -> list[RankTrace]:
    """Return the pipeline's ranges, file by file, of the processes whose name contains ``process``.

    The rank is the trace's own (``distributedInfo``), else the file name's (``rank3``), else the
    file's place. Where names do not say the stage, each rank has one, in the order of the ranks.
    A step's number is how often its rank ran the same (stage, action, micro-batch) before; where
    names do not say the micro-batch, it is the profiler's step.

    Raises
    ------
    MeasurementError
        If a file is no trace, or has no range of the pipeline.
    """
    known = RangePatterns.of(patterns)
    found: list[_Found] = []
    for index, path in enumerate(paths):
        if path in paths[:index]:
            raise MeasurementError(f"{path}: named twice; name each trace once")
        found += _find(path, len(found), known, process)
    place_of = {rank: place for place, rank in enumerate(sorted({one.rank for one in found}))}
    runs: Counter[tuple[int, int, str, int]] = Counter()
    steps: Counter[int] = Counter()
    traces = []
    for one in found:
        ranges = tuple(_numbered(one, place_of[one.rank], runs, steps[one.rank]))
        steps[one.rank] += len(_step_starts(one.process))
        traces.append(RankTrace(one.rank, one.process, ranges))
    return traces


def _find(path: Path, place: int, patterns: RangePatterns, name: str) -> list[_Found]:
    written = read_trace(path)
    processes = [process for process in written if name in process.name]
    if written and not processes:
        raise MeasurementError(
            f"{path}: no process has {name!r} in its name (there: "
            f"{', '.join(repr(process.name) for process in written[:_SHOWN_NAMES])}); "
            "choose one of them"
        )
    found = []
    for process in processes:
        pairs = ((event, patterns.match(event.name)) for event in process.ranges)
        ranges = [(event, action) for event, action in pairs if action is not None]
        if ranges:
            found.append((process, ranges))
    if not found:
        raise MeasurementError(_nothing_found(path, processes))
    return [
        _Found(_rank(process, place + index, len(found)), process, ranges)
        for index, (process, ranges) in enumerate(found)
    ]


def _rank(process: Process, place: int, num_processes: int) -> int:
    return place if process.rank is None or num_processes > 1 else process.rank


def _nothing_found(path: Path, processes: Sequence[Process]) -> str:
    seen = Counter(event.name for process in processes for event in process.ranges)
    names = ", ".join(repr(name[:60]) for name, _ in seen.most_common(_SHOWN_NAMES))
    return (
        f"{path}: no range is a pipeline action (most frequent: {names or 'no range at all'}); "
        "record steps of torch's schedule runtime, or give a pattern for the names of your ranges"
    )


def _numbered(
    found: _Found, place: int, runs: Counter[tuple[int, int, str, int]], first_step: int
) -> Iterator[TracedRange]:
    starts = _step_starts(found.process)
    for event, action in found.ranges:
        stage = place if action.stage is None else action.stage
        if action.microbatch is None:
            before = bisect_right(starts, event.start_us)
            step = first_step + before - 1 if before else None
        else:
            key = found.rank, stage, action.action, action.microbatch
            step = runs[key]
            runs[key] += 1
        yield TracedRange(event, stage, action.action, action.microbatch, step)


def _step_starts(process: Process) -> list[float]:
    return [event.start_us for event in process.ranges if event.name.startswith(_STEP)]
