"""Messages between ranks in traces, from the kernels that NCCL sends and receives with.

torch notes a message's size, type and peer beside the call that sends or receives it
(``record_param_comms``), and, for a call that is not part of a batch, on the kernel too. The kernel
of a batch carries the messages noted since the kernel before it. A kernel that starts first waits
for the other side, so a message took as long as the shorter of its two kernels.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

from optpipe.measurements.range_times import is_p2p, work_inside
from optpipe.measurements.values import Transfer

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from optpipe.measurements.trace_file import Event, Process

__all__ = ["Messages", "read_messages", "sent_bytes"]

_ITEM_BYTES = {
    "Double": 8, "Long": 8, "Float": 4, "Int": 4, "Half": 2, "BFloat16": 2, "Short": 2,
    "Char": 1, "Byte": 1, "Bool": 1, "ComplexFloat": 8, "ComplexDouble": 16,
}  # fmt: skip
_FIELDS = {"send": ("Dst Rank", "In msg nelems"), "recv": ("Src Rank", "Out msg nelems")}


class Messages(NamedTuple):
    """Messages whose two ends are known, and the number of those with one end only."""

    transfers: tuple[Transfer, ...]
    num_single: int


class _Route(NamedTuple):
    """From which rank to which, and how much."""

    source: int
    target: int
    num_bytes: int


class _End(NamedTuple):
    """One end of a message."""

    verb: str
    route: _Route
    start_us: float
    time_ms: float


def read_messages(
    processes: Iterable[tuple[int, Process]], device_of: Mapping[int, int]
) -> Messages:
    """Return the messages between devices; the k-th sent on a route is the k-th received.

    Parameters
    ----------
    processes
        (rank, events) of every trace.
    device_of
        Device of each rank.
    """
    ends: dict[_Route, dict[str, list[_End]]] = defaultdict(lambda: defaultdict(list))
    for rank, process in processes:
        for end in _ends(rank, process):
            ends[end.route][end.verb].append(end)
    transfers: list[Transfer] = []
    num_single = 0
    for route in sorted(ends):
        sent, received = (sorted(ends[route][verb], key=_start) for verb in ("send", "recv"))
        if len(sent) != len(received):
            num_single += max(len(sent), len(received))
        elif device_of[route.source] != device_of[route.target]:
            transfers += [
                Transfer(
                    source=device_of[route.source],
                    target=device_of[route.target],
                    num_bytes=route.num_bytes,
                    time_ms=min(there.time_ms, here.time_ms),
                )
                for there, here in zip(sent, received, strict=True)
            ]
    return Messages(tuple(transfers), num_single)


def sent_bytes(process: Process, event: Event) -> int:
    """Return the bytes that were sent while a range was open, 0 where the trace does not say."""
    first = bisect_left(process.messages, event.start_us, key=_began)
    last = bisect_right(process.messages, event.end_us, key=_began)
    noted = process.messages[first:last]
    calls = noted or [one for one in work_inside(process, event) if "Collective name" in one.args]
    return sum(_num_bytes(call.args) for call in calls if call.args["Collective name"] == "send")


def _began(event: Event) -> float:
    return event.start_us


def _start(end: _End) -> float:
    return end.start_us


def _ends(rank: int, process: Process) -> Iterator[_End]:
    """Return this rank's ends; a batch with several peers or directions has no time of its own."""
    noted = process.messages
    taken = 0
    for launched_us, correlation in process.launches:
        for kernel in filter(is_p2p, process.device_work.get(correlation, ())):
            before = taken
            while taken < len(noted) and noted[taken].start_us <= launched_us:
                taken += 1
            calls = [kernel] if "Collective name" in kernel.args else noted[before:taken]
            end = _end(rank, kernel, calls)
            if end is not None:
                yield end


def _end(rank: int, kernel: Event, calls: Sequence[Event]) -> _End | None:
    found = {(call.args["Collective name"], _peer(rank, call.args)) for call in calls}
    if len(found) != 1:
        return None
    verb, peer = found.pop()
    num_bytes = sum(_num_bytes(call.args) for call in calls)
    if verb not in _FIELDS or peer is None or not num_bytes:
        return None
    route = _Route(rank, peer, num_bytes) if verb == "send" else _Route(peer, rank, num_bytes)
    return _End(verb, route, kernel.start_us, kernel.duration_us / 1e3)


def _peer(rank: int, args: Mapping[str, Any]) -> int | None:
    """Return the other rank: named by torch from 2.6 on, before that the other of a pair."""
    field, _ = _FIELDS.get(args["Collective name"], ("", ""))
    named = args.get(field)
    if isinstance(named, int):
        return named
    others = [one for one in _group(args.get("Process Group Ranks")) if one != rank]
    return others[0] if len(others) == 1 else None


def _group(ranks: Any) -> list[Any]:
    if isinstance(ranks, str):
        try:
            ranks = json.loads(ranks)
        except ValueError:
            return []  # long lists are cut off with dots
    return ranks if isinstance(ranks, list) else []


def _num_bytes(args: Mapping[str, Any]) -> int:
    _, field = _FIELDS.get(args["Collective name"], ("", ""))
    count = args.get(field)
    if not isinstance(count, int) or count <= 0:
        return 0
    name = str(args.get("dtype", ""))
    return count * (1 if name.startswith("Float8") else _ITEM_BYTES.get(name, 0))
