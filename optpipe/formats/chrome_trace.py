"""A schedule as a Chrome trace: JSON that ui.perfetto.dev and chrome://tracing open.

The JSON Object Format of the Trace Event Format: complete events (``X``) for what runs, counters
(``C``) for memory, metadata (``M``) for names. A device is a process, its lanes are threads; times
are microseconds, rounded to the nanosecond so that neighbours on a lane never overlap.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from optpipe.timeline import make_timeline

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optpipe.action import Programs
    from optpipe.problem import Problem
    from optpipe.timeline import Interval, Lane, Timeline

__all__ = ["dump_chrome_trace"]

_THREADS: dict[Lane, tuple[int, str]] = {
    "compute": (1, "compute"),
    "d2h": (2, "offload (D2H)"),
    "h2d": (3, "reload (H2D)"),
    "grad_sync": (4, "gradient reduction"),
}


def dump_chrome_trace(problem: Problem, programs: Programs) -> str:
    """Return legal programs, simulated, as the text of a trace file."""
    timeline = make_timeline(problem, programs)
    trace = {
        "traceEvents": list(_events(problem, timeline)),
        "displayTimeUnit": "ms",
        "otherData": {
            "problem": problem.name,
            "problem_hash": problem.problem_hash,
            "makespan_ms": timeline.makespan_ms,
            "span_ms": timeline.span_ms,
        },
    }
    return json.dumps(trace, allow_nan=False) + "\n"


def _events(problem: Problem, timeline: Timeline) -> Iterator[dict[str, Any]]:
    for device, row in enumerate(timeline.intervals):
        used = {item.lane for item in row}
        yield from _names(device, problem.devices[device].name, used)
        for item in row:
            yield _complete(device, item)
        for moment, held in timeline.memory[device]:
            yield {
                "name": "memory",
                "ph": "C",
                "ts": _microseconds(moment),
                "pid": device,
                "tid": 0,
                "args": {"bytes": held},
            }


def _names(device: int, name: str, used: set[Lane]) -> Iterator[dict[str, Any]]:
    yield _metadata("process_name", device, 0, {"name": f"{device}: {name}"})
    yield _metadata("process_sort_index", device, 0, {"sort_index": device})
    for lane, (thread, label) in _THREADS.items():
        if lane in used:
            yield _metadata("thread_name", device, thread, {"name": label})
            yield _metadata("thread_sort_index", device, thread, {"sort_index": thread})


def _metadata(name: str, device: int, thread: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "M", "ts": 0, "pid": device, "tid": thread, "args": args}


def _complete(device: int, item: Interval) -> dict[str, Any]:
    start, end = _microseconds(item.start), _microseconds(item.end)
    action = item.action
    return {
        "name": "gradient reduction" if action is None else str(action),
        "cat": item.lane if action is None else action.type.name.lower(),
        "ph": "X",
        "ts": start,
        "dur": round(end - start, 3),
        "pid": device,
        "tid": _THREADS[item.lane][0],
        "args": {} if action is None else {"stage": action.stage, "microbatch": action.microbatch},
    }


def _microseconds(milliseconds: float) -> float:
    return round(milliseconds * 1e3, 3)
