"""A schedule as a Chrome trace: JSON that ui.perfetto.dev and chrome://tracing open.

The JSON Object Format of the Trace Event Format: complete events (``X``) for what runs, counters
(``C``) for memory, metadata (``M``) for names. A device is a process, its lanes are threads, and a
link on which messages queue a process of its own; times are microseconds, rounded to the nanosecond
so that neighbours on a lane never overlap.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

from optpipe.schedule import cells_of
from optpipe.simulate import make_timeline

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from optpipe.problem import Problem
    from optpipe.schedule import Programs
    from optpipe.simulate import Interval, Lane, Timeline

__all__ = ["dump_chrome_trace", "dump_planned_beside_measured"]

_THREADS: dict[Lane, tuple[int, str]] = {
    "compute": (1, "compute"),
    "d2h": (2, "offload (D2H)"),
    "h2d": (3, "reload (H2D)"),
    "grad_sync": (4, "gradient reduction"),
}


def dump_chrome_trace(problem: Problem, programs: Programs) -> str:
    """Return legal programs, simulated, as the text of a trace file."""
    timeline = make_timeline(problem, programs)
    rows = [
        _TraceProcess(device, f"{device}: {own.name}") for device, own in enumerate(problem.devices)
    ]
    events = [*_events(rows, timeline), *_sent(problem, timeline)]
    return _dump(problem, events, _lengths(timeline))


def dump_planned_beside_measured(
    problem: Problem, programs: Programs, measured: Sequence[Sequence[Interval]], label: str
) -> str:
    """Return the text of a trace with two rows per device: simulated, and below it as it ran.

    * ``measured``: what each device did, in ms from the first start of all.
    * ``label``: what the measured rows are called, e.g. "measured, step 50".
    """
    timeline = make_timeline(problem, programs)
    names = [f"{device}: {own.name}" for device, own in enumerate(problem.devices)]
    planned = [_TraceProcess(2 * index, f"{name} planned") for index, name in enumerate(names)]
    events = list(_events(planned, timeline))
    for index, (name, row) in enumerate(zip(names, measured, strict=True)):
        events += _row(_TraceProcess(2 * index + 1, f"{name} {label}"), row)
    end = max((item.end for row in measured for item in row), default=0.0)
    return _dump(problem, events, _lengths(timeline) | {"measured_ms": end})


class _TraceProcess(NamedTuple):
    """A row of the picture."""

    pid: int
    name: str


def _lengths(timeline: Timeline) -> dict[str, float]:
    return {"makespan_ms": timeline.makespan_ms, "span_ms": timeline.span_ms}


def _dump(problem: Problem, events: list[dict[str, Any]], lengths: dict[str, float]) -> str:
    about = {"problem": problem.name, "problem_hash": problem.problem_hash}
    trace = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about | lengths}
    return json.dumps(trace, allow_nan=False) + "\n"


def _events(rows: Sequence[_TraceProcess], timeline: Timeline) -> Iterator[dict[str, Any]]:
    for row, intervals, memory in zip(rows, timeline.intervals, timeline.memory, strict=True):
        yield from _row(row, intervals)
        for moment, held in memory:
            yield {
                "name": "memory",
                "ph": "C",
                "ts": _microseconds(moment),
                "pid": row.pid,
                "tid": 0,
                "args": {"bytes": held},
            }


def _sent(problem: Problem, timeline: Timeline) -> Iterator[dict[str, Any]]:
    """Yield what queues on links: their names, and each message while it occupies one."""
    first = len(problem.devices)
    for index in sorted({message.link for message in timeline.messages}):
        link = problem.links[index]
        name = {"name": f"link {link.source} -> {link.target}"}
        yield _metadata("process_name", first + index, 0, name)
        yield _metadata("process_sort_index", first + index, 0, {"sort_index": first + index})
        yield _metadata("thread_name", first + index, 1, {"name": "messages"})
    for message in timeline.messages:
        made, start = message.made, _microseconds(message.depart)
        yield {
            "name": f"{'gradient' if made.backward else 'output'} of {made.stage}, "
            f"micro-batch {made.microbatch}",
            "cat": "message",
            "ph": "X",
            "ts": start,
            "dur": round(_microseconds(message.left) - start, 3),
            "pid": first + message.link,
            "tid": 1,
            "args": {**made._asdict(), "waited_ms": message.depart - message.ready},
        }


def _row(row: _TraceProcess, intervals: Sequence[Interval]) -> Iterator[dict[str, Any]]:
    yield from _names(row, {item.lane for item in intervals})
    for item in intervals:
        if item.partner is None or item.action is None or not item.action.paired:
            yield _complete(row.pid, item)


def _names(row: _TraceProcess, used: set[Lane]) -> Iterator[dict[str, Any]]:
    yield _metadata("process_name", row.pid, 0, {"name": row.name})
    yield _metadata("process_sort_index", row.pid, 0, {"sort_index": row.pid})
    for lane, (thread, label) in _THREADS.items():
        if lane in used:
            yield _metadata("thread_name", row.pid, thread, {"name": label})
            yield _metadata("thread_sort_index", row.pid, thread, {"sort_index": thread})


def _metadata(name: str, process: int, thread: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "M", "ts": 0, "pid": process, "tid": thread, "args": args}


def _complete(process: int, item: Interval) -> dict[str, Any]:
    start, end = _microseconds(item.start), _microseconds(item.end)
    action = item.action
    args: dict[str, Any] = {}
    name = "gradient reduction"
    if action is not None:
        args = {"stage": action.stage, "microbatch": action.microbatch}
        (name,) = cells_of((action,) if item.partner is None else (action, item.partner))
    if item.partner is not None:
        args |= {
            "backward_stage": item.partner.stage,
            "backward_microbatch": item.partner.microbatch,
        }
    return {
        "name": name,
        "cat": item.lane
        if action is None
        else "pair"
        if item.partner is not None
        else action.type.name.lower(),
        "ph": "X",
        "ts": start,
        "dur": round(end - start, 3),
        "pid": process,
        "tid": _THREADS[item.lane][0],
        "args": args,
    }


def _microseconds(milliseconds: float) -> float:
    return round(milliseconds * 1e3, 3)
