"""Chrome traces as the PyTorch profiler (Kineto) writes them, and the pipeline's ranges in them.

A file has the JSON Object Format of the Trace Event Format, or is a bare list of events. Its times
are microseconds. Only complete events (``X``) count; their kinds are Kineto's categories.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import zlib
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from optpipe.errors import MeasurementError
from optpipe.measurements.to_problem import MOST_STAGES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = [
    "Allocation",
    "Process",
    "RankTrace",
    "TraceEvent",
    "TraceSource",
    "TracedRange",
    "UploadedFile",
    "read_rank_traces",
    "read_trace",
]

_ON_THE_GPU = {"kernel", "gpu_memcpy", "gpu_memset"}
_GPU_SHADOWS = {"gpu_user_annotation", "cuda_sync", "overhead", "Trace"}
_LAUNCHES = re.compile(r"\w+_(runtime|driver)")
_COMMUNICATION = re.compile(r"c10d::|nccl:|gloo:|record_param_comms")
_RANK_IN_NAME = re.compile(r"rank[_.\-=]?(\d{1,6})", re.IGNORECASE)


class TraceSource(Protocol):
    """A file with a trace: a `pathlib.Path`, or an `UploadedFile`."""

    @property
    def name(self) -> str:
        """The file's name, which may name the rank."""
        ...

    def read_bytes(self) -> bytes:
        """Return the content, JSON or gzip of JSON."""
        ...


class UploadedFile(NamedTuple):
    """A file whose content was sent with its name."""

    name: str
    text: str

    def __str__(self) -> str:
        return self.name

    def read_bytes(self) -> bytes:
        """Return the text in UTF-8; what is no character is left for the reader to refuse."""
        return self.text.encode("utf-8", "surrogatepass")


class TraceEvent(NamedTuple):
    """One complete event; times in microseconds."""

    name: str
    start_us: float
    duration_us: float
    args: dict[str, Any]

    @property
    def end_us(self) -> float:
        """The time when it ended."""
        return self.start_us + self.duration_us


class Allocation(NamedTuple):
    """A block allocated, or freed (negative), and all bytes allocated after it."""

    at_us: float
    num_bytes: int
    total_bytes: int
    on_gpu: bool


@dataclass(kw_only=True)
class Process:
    """The events of one rank in one file.

    * ``rank``: from the trace, else from the file's name, else None.
    * ``ranges``: annotations and other events with names of their own.
    * ``device_work``: kernels, copies and fills by the correlation id of their launch.
    * ``launches``: (time, correlation id) of the CPU's launches.
    * ``operator_starts``: when operators began, without communication.
    * ``messages``: the CPU's records of messages.
    * ``allocations``: empty unless the profiler recorded them.
    * ``gpu_bytes``: the memory of each GPU by its index.
    """

    path: TraceSource
    rank: int | None
    name: str = ""
    ranges: list[TraceEvent] = field(default_factory=list)
    device_work: dict[int, list[TraceEvent]] = field(default_factory=dict)
    launches: list[tuple[float, int]] = field(default_factory=list)
    operator_starts: list[float] = field(default_factory=list)
    messages: list[TraceEvent] = field(default_factory=list)
    allocations: list[Allocation] = field(default_factory=list)
    gpu_bytes: dict[int, int] = field(default_factory=dict)

    def sort(self) -> None:
        """Put everything in order of time."""
        self.ranges.sort(key=lambda event: (event.start_us, -event.duration_us))
        self.launches.sort()
        self.operator_starts.sort()
        self.messages.sort(key=lambda event: event.start_us)
        self.allocations.sort(key=lambda allocation: allocation.at_us)


def read_trace(path: TraceSource) -> list[Process]:
    """Return the processes of a trace that have named ranges, in order of their ids."""
    loaded = _load(path)
    document: dict[str, Any] = loaded if isinstance(loaded, dict) else {"traceEvents": loaded}
    events = document.get("traceEvents")
    if not isinstance(events, list):
        raise MeasurementError(
            f"{path}: no list of events (traceEvents) is in it; name a Chrome trace, as "
            "profiler.export_chrome_trace writes it"
        )
    info = document.get("distributedInfo")
    rank = info.get("rank") if isinstance(info, dict) else None
    if not isinstance(rank, int):
        named = _RANK_IN_NAME.search(path.name)
        rank = int(named[1]) if named else None
    processes = _by_process(path, rank, events)
    listed = document.get("deviceProperties")
    gpu_bytes = {
        one["id"]: one["totalGlobalMem"]
        for one in (listed if isinstance(listed, list) else ())
        if isinstance(one, dict)
        and isinstance(one.get("id"), int)
        and isinstance(one.get("totalGlobalMem"), int)
    }
    for process in processes:
        process.gpu_bytes = gpu_bytes
        process.sort()
    return processes


def _load(path: TraceSource) -> Any:
    try:
        raw = path.read_bytes()
        text = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
        return json.loads(text, parse_int=_read_integer)
    except OSError as error:
        if isinstance(error, gzip.BadGzipFile):
            raise MeasurementError(f"{path}: broken gzip file; write it anew") from None
        raise MeasurementError(f"cannot read {path}: {error.strerror}; check the path") from None
    except (EOFError, zlib.error):
        raise MeasurementError(f"{path}: the gzip file is cut off; write it anew") from None
    except UnicodeDecodeError as error:
        raise MeasurementError(
            f"{path} is not UTF-8 text (byte {error.start}); name a Chrome trace"
        ) from None
    except json.JSONDecodeError as error:
        raise MeasurementError(
            f"{path}: not JSON: {error.msg} at line {error.lineno}, column {error.colno}; "
            "was the trace written to its end?"
        ) from None
    except RecursionError:
        raise MeasurementError(f"{path}: nested too deeply for a trace; name another") from None


def _read_integer(text: str) -> int | float:
    """Return an integer of a trace; one that no clock or counter has becomes a float."""
    return int(text) if len(text) <= _MOST_DIGITS else float(text)


_MOST_DIGITS = 30


def _text_of(raw: dict[str, Any], name: str) -> str:
    """Return a field of an event that is a text; empty if it is anything else."""
    value = raw.get(name)
    return value if isinstance(value, str) else ""


def _by_process(path: TraceSource, rank: int | None, events: list[Any]) -> list[Process]:
    found: dict[Any, Process] = {}
    names: dict[str, str] = {}
    device_work: dict[int, list[TraceEvent]] = {}
    for index, raw in enumerate(events):
        if not isinstance(raw, dict):
            continue
        key = str(raw.get("pid"))
        if raw.get("ph") != "X":
            _note_name(raw, names)
            allocation = _allocation(raw)
            if allocation is not None:
                process = found.setdefault(key, Process(path=path, rank=rank))
                process.allocations.append(allocation)
            continue
        event = _event(path, index, raw)
        category = _text_of(raw, "cat")
        if category in _ON_THE_GPU:
            correlation = event.args.get("correlation")
            if isinstance(correlation, int):
                device_work.setdefault(correlation, []).append(event)
        elif category not in _GPU_SHADOWS:
            process = found.setdefault(key, Process(path=path, rank=rank))
            _file(process, event, category)
    keys = [key for key in sorted(found, key=_as_number) if found[key].ranges]
    for key in keys:
        found[key].device_work = device_work
        found[key].name = names.get(key, "")
    return [found[key] for key in keys]


def _allocation(raw: dict[str, Any]) -> Allocation | None:
    args = raw.get("args")
    if raw.get("name") != "[memory]" or not isinstance(args, dict):
        return None
    moment, size, total = raw.get("ts"), args.get("Bytes"), args.get("Total Allocated", 0)
    if not isinstance(moment, int | float) or not isinstance(size, int):
        return None
    on_gpu = args.get("Device Type", 0) != 0
    return Allocation(float(moment), size, total if isinstance(total, int) else 0, on_gpu)


def _note_name(raw: dict[str, Any], names: dict[str, str]) -> None:
    if raw.get("ph") == "M" and raw.get("name") == "process_name":
        args = raw.get("args")
        if isinstance(args, dict):
            names[str(raw.get("pid"))] = str(args.get("name", ""))


def _file(process: Process, event: TraceEvent, category: str) -> None:
    if _LAUNCHES.fullmatch(category):
        correlation = event.args.get("correlation")
        if isinstance(correlation, int):
            process.launches.append((event.start_us, correlation))
    elif category == "cpu_op":
        if _text_of(event.args, "Collective name") in {"send", "recv"}:
            process.messages.append(event)
        elif not _COMMUNICATION.match(event.name):
            process.operator_starts.append(event.start_us)
    else:
        process.ranges.append(event)


def _event(path: TraceSource, index: int, raw: dict[str, Any]) -> TraceEvent:
    for name in ("ts", "dur"):
        value: Any = raw.get(name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or (name == "dur" and value < 0):
            raise MeasurementError(
                f"{path}: traceEvents[{index}].{name} = {value!r}: must be a number of "
                "microseconds, and dur not negative; write the trace anew"
            )
    args = raw.get("args")
    return TraceEvent(
        name=str(raw.get("name", "")),
        start_us=float(raw["ts"]),
        duration_us=float(raw["dur"]),
        args=args if isinstance(args, dict) else {},
    )


def _as_number(key: str) -> tuple[int, str]:
    is_number = key.isdecimal() and len(key) <= _MOST_DIGITS
    return (int(key), "") if is_number else (2**62, key)


# --- Which named ranges of a trace are pipeline actions.
# torch's schedule runtime and ours mark each action as ``PP:`` and the action's text
# (`torch.distributed.pipelining.schedules`, 2.13: ``PP:1F0``, ``PP:0SEND_F0``, ``PP:0UNSHARD``),
# and traces of ours as the text alone, with its mode (``0F3@2``); torch's GPipe marks
# ``Forward 3`` and ``Backward 3``.

_TORCH = re.compile(
    r"(?:PP:)?(?P<stage>\d{1,9})(?P<action>F|I|W|B|RECOMPUTE|OFFLOAD|RELOAD|SEND_F)(?P<microbatch>\d{1,9})"
    r"(?:@\d{1,2})?"
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
_MOST_MICROBATCHES, _MOST_DIGITS_OF_A_NUMBER = 10**9, 9
_LETTERS = ("F", "I", "W", "B", "RECOMPUTE", "OFFLOAD", "RELOAD", "SEND_F")


class _TracedAction(NamedTuple):
    """The action in a range's name; ``stage`` None = the only stage of its rank."""

    action: str
    stage: int | None
    microbatch: int | None


class _RangePattern(NamedTuple):
    """A regular expression for whole names, with the groups stage, action and microbatch.

    ``action`` replaces the group if the expression has none.
    """

    expression: re.Pattern[str]
    action: str | None = None

    def match(self, name: str) -> _TracedAction | None:
        """Return the action in a name, or None if it is another range."""
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
        return _TracedAction(action, _number(groups, "stage"), _number(groups, "microbatch"))


def _match(patterns: Sequence[_RangePattern], name: str) -> _TracedAction | None:
    """Return the action by the first pattern that matches a name, or None."""
    if _OVERLAPPED.fullmatch(name):
        raise MeasurementError(
            f"range {name!r} is an overlapped forward-backward pair, whose two times cannot "
            "be told apart; profile a schedule without overlapped pairs"
        )
    return next((found for one in patterns if (found := one.match(name)) is not None), None)


def _parse_pattern(text: str) -> _RangePattern:
    """Return the pattern of ``REGEX`` or ``ACTION=REGEX``."""
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
    return _RangePattern(compiled, action)


def _number(groups: dict[str, str | None], name: str) -> int | None:
    text = groups.get(name)
    if text is None:
        return None
    if not text.isdecimal():
        raise MeasurementError(
            f"range pattern: group {name} matched {text!r}, which is no number; change the pattern"
        )
    limit = MOST_STAGES if name == "stage" else _MOST_MICROBATCHES
    if len(text) > _MOST_DIGITS_OF_A_NUMBER or int(text) >= limit:
        raise MeasurementError(
            f"a range's name says {name} {text[:40]}: must be below {limit}; change the pattern"
        )
    return int(text)


# --- The pipeline's ranges of every rank, out of the files of one run.

_STEP = "ProfilerStep#"
_SHOWN_NAMES = 8


class TracedRange(NamedTuple):
    """One run of an action; ``step`` counts from 0 within its rank."""

    event: TraceEvent
    stage: int
    action: str
    microbatch: int | None
    step: int | None


class RankTrace(NamedTuple):
    """The events of one rank in one file."""

    rank: int
    process: Process
    ranges: tuple[TracedRange, ...]


_FoundTrace = tuple[int, Process, "list[tuple[TraceEvent, _TracedAction]]"]
"""A rank, its events, and those that are actions."""


def read_rank_traces(
    paths: Sequence[TraceSource], patterns: Sequence[str], process: str = ""
) -> list[RankTrace]:
    """Return the pipeline's ranges, file by file, of the processes whose name contains ``process``.

    The rank is the trace's own (``distributedInfo``), else the file name's (``rank3``), else the
    file's place. If names do not contain the stage, each rank has one, in the order of the ranks. A
    step's number counts how often its rank ran the same (stage, action, micro-batch) before. If
    names do not contain the micro-batch, it is the profiler's step.
    """
    known = [_RangePattern(_TORCH), _RangePattern(_GPIPE)]
    if patterns:
        known = [_parse_pattern(text) for text in patterns]
    found: list[_FoundTrace] = []
    for index, path in enumerate(paths):
        if path in paths[:index]:
            raise MeasurementError(f"{path}: named twice; name each trace once")
        found += _find(path, len(found), known, process)
    place_of = {rank: place for place, rank in enumerate(sorted({rank for rank, _, _ in found}))}
    runs: Counter[tuple[int, int, str, int]] = Counter()
    steps: Counter[int] = Counter()
    traces = []
    for one in found:
        rank, events, _ = one
        starts = [event.start_us for event in events.ranges if event.name.startswith(_STEP)]
        ranges = tuple(_numbered(one, place_of[rank], runs, starts, steps[rank]))
        steps[rank] += len(starts)
        traces.append(RankTrace(rank, events, ranges))
    return traces


def _find(
    path: TraceSource, place: int, patterns: Sequence[_RangePattern], name: str
) -> list[_FoundTrace]:
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
        pairs = ((event, _match(patterns, event.name)) for event in process.ranges)
        ranges = [(event, action) for event, action in pairs if action is not None]
        if ranges:
            found.append((process, ranges))
    if not found:
        seen = Counter(event.name for process in processes for event in process.ranges)
        names = ", ".join(repr(name[:60]) for name, _ in seen.most_common(_SHOWN_NAMES))
        raise MeasurementError(
            f"{path}: no range is a pipeline action (most frequent: {names or 'no range at all'}); "
            "record steps of torch's schedule runtime, or give a pattern for the names of your "
            "ranges"
        )
    if len(found) == 1 and found[0][0].rank is not None:
        return [(found[0][0].rank, *found[0])]
    return [(place + index, *one) for index, one in enumerate(found)]


def _numbered(
    found: _FoundTrace,
    place: int,
    runs: Counter[tuple[int, int, str, int]],
    starts: Sequence[float],
    first_step: int,
) -> Iterator[TracedRange]:
    rank, _, ranges = found
    for event, action in ranges:
        stage = place if action.stage is None else action.stage
        if action.microbatch is None:
            before = bisect_right(starts, event.start_us)
            step = first_step + before - 1 if before else None
        else:
            key = rank, stage, action.action, action.microbatch
            step = runs[key]
            runs[key] += 1
        yield TracedRange(event, stage, action.action, action.microbatch, step)
