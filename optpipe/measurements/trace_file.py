"""Chrome traces as the PyTorch profiler (Kineto) writes them: the events that times are read from.

The JSON Object Format of the Trace Event Format, or a bare list of events. Times there are
microseconds. Of a trace's events, complete ones (``X``) count; Kineto's categories tell them apart.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from optpipe.errors import MeasurementError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Allocation", "Process", "TraceEvent", "read_trace"]

_ON_THE_GPU = {"kernel", "gpu_memcpy", "gpu_memset"}
_GPU_SHADOWS = {"gpu_user_annotation", "cuda_sync", "overhead", "Trace"}
_LAUNCHES = re.compile(r"\w+_(runtime|driver)")
_COMMUNICATION = re.compile(r"c10d::|nccl:|gloo:|record_param_comms")
_RANK_IN_NAME = re.compile(r"rank[_.\-=]?(\d{1,6})", re.IGNORECASE)


class TraceEvent(NamedTuple):
    """One complete event; times in microseconds."""

    name: str
    start_us: float
    duration_us: float
    thread: Any
    args: dict[str, Any]

    @property
    def end_us(self) -> float:
        """When it ended."""
        return self.start_us + self.duration_us


class Allocation(NamedTuple):
    """A block handed out, or taken back (negative), and what was handed out in all after it."""

    at_us: float
    num_bytes: int
    total_bytes: int
    on_gpu: bool


@dataclass(kw_only=True)
class Process:
    """The events of one rank in one file.

    Parameters
    ----------
    rank
        From the trace, else from the file's name, else None.
    name
        From the trace's metadata.
    ranges
        Annotations and whatever else has a name of its own.
    device_work
        Kernels, copies and fills, by the correlation id of their launch.
    launches
        (time, correlation id) of what the CPU launched.
    operator_starts
        When operators began, communication aside.
    messages
        What the CPU noted of messages it sent or received.
    allocations
        Of memory; none unless the profiler was told to note them.
    gpu_bytes
        Memory of each GPU the process saw, by the GPU's index.
    """

    path: Path
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


def read_trace(path: Path) -> list[Process]:
    """Return the processes of a trace that have named ranges, in order of their ids.

    Raises
    ------
    MeasurementError
        If the file cannot be read or is no trace; says where in it.
    """
    document = _load(path)
    events = document.get("traceEvents") if isinstance(document, dict) else document
    if not isinstance(events, list):
        raise MeasurementError(
            f"{path}: no list of events (traceEvents) is in it; name a Chrome trace, as "
            "profiler.export_chrome_trace writes it"
        )
    info = document.get("distributedInfo") if isinstance(document, dict) else None
    rank = info.get("rank") if isinstance(info, dict) else None
    if not isinstance(rank, int):
        named = _RANK_IN_NAME.search(path.name)
        rank = int(named[1]) if named else None
    processes = _by_process(path, rank, events)
    for process in processes:
        process.gpu_bytes = _gpu_bytes(document)
        process.sort()
    return processes


def _load(path: Path) -> Any:
    try:
        raw = path.read_bytes()
        text = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
        return json.loads(text)
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


def _by_process(path: Path, rank: int | None, events: list[Any]) -> list[Process]:
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
        category = raw.get("cat", "")
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


def _gpu_bytes(document: Any) -> dict[int, int]:
    listed = document.get("deviceProperties") if isinstance(document, dict) else None
    return {
        one["id"]: one["totalGlobalMem"]
        for one in (listed if isinstance(listed, list) else ())
        if isinstance(one, dict)
        and isinstance(one.get("id"), int)
        and isinstance(one.get("totalGlobalMem"), int)
    }


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
        if event.args.get("Collective name") in {"send", "recv"}:
            process.messages.append(event)
        elif not _COMMUNICATION.match(event.name):
            process.operator_starts.append(event.start_us)
    else:
        process.ranges.append(event)


def _event(path: Path, index: int, raw: dict[str, Any]) -> TraceEvent:
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
        thread=raw.get("tid"),
        args=args if isinstance(args, dict) else {},
    )


def _as_number(key: str) -> tuple[int, str]:
    return (int(key), "") if key.isdecimal() else (2**62, key)
