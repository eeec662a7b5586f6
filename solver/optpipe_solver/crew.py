"""Lanes of a solve in threads of their own, so that it ends on time whatever a lane is at.

Compiled search and HiGHS let go of the interpreter while they run, so lanes do run side by side. A
lane that is told to stop has a moment to do so; then it is left behind: it ends at its next look,
and what it still finds is ignored. An interpreter that ends waits for it: to cut a thread that is
inside HiGHS aborts the process, with its results written and exit status 134.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Lane", "run_lanes"]

Lane: TypeAlias = Callable[[Callable[[], bool]], None]
"""Called with a function that says whether to stop."""

_TICK_S = 0.02
_GRACE_S = 0.25


def run_lanes(lanes: Sequence[Lane], should_end: Callable[[], bool]) -> None:
    """Run every lane until all have returned, or until told to end.

    Parameters
    ----------
    lanes
        Each runs in a thread of its own.
    should_end
        Asked fifty times a second in the caller's thread.

    Raises
    ------
    Exception
        What a lane raised, the first of them; the others are told to stop.
    """
    stop = threading.Event()
    faults: list[BaseException] = []

    def run(lane: Lane) -> None:
        try:
            lane(stop.is_set)
        except BaseException as fault:  # noqa: BLE001 - raised again by the caller's thread
            faults.append(fault)
            stop.set()

    threads = [
        threading.Thread(target=run, args=(lane,), name=f"solve-{number}")
        for number, lane in enumerate(lanes)
    ]
    for thread in threads:
        thread.start()
    try:
        while any(thread.is_alive() for thread in threads) and not (faults or should_end()):
            next(t for t in threads if t.is_alive() or t is threads[-1]).join(_TICK_S)
    finally:
        stop.set()
    latest = time.monotonic() + _GRACE_S
    for thread in threads:
        thread.join(max(0.0, latest - time.monotonic()))
    if faults:
        raise faults[0]
