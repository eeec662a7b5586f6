"""Make compute programs fit: offload, and recompute where that fails, only as much as needed.

Each device's program is swept from top to bottom (`fit_kernel`). Where an action does not fit,
whatever is estimated to delay least makes room: an activation goes to the host, a waiting weight
gradient runs earlier, or an activation is recomputed. What goes is copied out as early as its lane
was free since its forward, is released no sooner than its bytes are needed, and comes back just in
time. A few rules (which victim, how much slack) are tried, each again with the arrival times that
its own delays cause; the best in simulation wins. In the spirit of AdaOffload (OptPipe, arXiv
2510.05186): no more is moved than the limit asks for.

It keeps the order of F and I. What it ignores: a device sees the delays of others only through the
arrival times of the run before, and PCIe groups only as slower copies.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from optpipe.memory import host_peak_bytes
from optpipe_solver.fit_jobs import UNLIMITED, Frame
from optpipe_solver.fit_kernel import FARTHEST, HIDDEN, OLDEST
from optpipe_solver.fit_state import Rule

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from optpipe.action import Programs
    from optpipe.problem import Problem
    from optpipe_solver.improve.compiled import Rows

__all__ = ["fit_memory", "within_hosts"]

_WORK = 400_000
_MOST_TRIES = 24
_ROUNDS = 2


def fit_memory(
    problem: Problem,
    programs: Programs,
    *,
    tries: int | None = None,
    offloading: Sequence[int] | None = None,
) -> Programs | None:
    """Return the programs with what must be offloaded or recomputed, or None if that fails.

    Parameters
    ----------
    problem
        Its limits are kept: device and host.
    programs
        Legal compute programs (F, I, W, B), over their memory limits or not. Those that fit come
        back as they are.
    tries
        How many sweeps to choose from; by default as many as the size allows in about a second.
    offloading
        Stages that may be offloaded; by default all.
    """
    frame = Frame(problem, programs, offloading)
    if frame.fits:
        return programs
    if tries is None:
        tries = max(2, min(_MOST_TRIES, _WORK // frame.num_actions))
    unlimited = (UNLIMITED,) * len(problem.devices)
    for host_limits in (unlimited, frame.host_shares()):
        best = _best(frame, tries, host_limits)
        if best is None:
            return None
        fitted = frame.decode(best)
        if within_hosts(problem, fitted):
            return fitted
    return None


def _best(frame: Frame, tries: int, host_limits: Sequence[int]) -> Rows | None:
    """Return the programs of the best of so many sweeps."""
    best, best_ms = None, inf
    for rule in _rules(frame):
        ran, last_ms = frame.base, inf
        for _ in range(_ROUNDS):
            if tries == 0:
                break
            tries -= 1
            fitted = frame.sweep_all((rule,) * len(host_limits), ran, frame.limits, host_limits)
            if fitted is None:
                break
            ran = frame.run(fitted.rows)
            if ran.objective_ms < best_ms:
                best, best_ms = fitted.rows, ran.objective_ms
            if ran.objective_ms >= last_ms:
                break
            last_ms = ran.objective_ms
    if best is None:
        fitted = frame.sweep_all(
            (_LAST_RESORT,) * len(host_limits), frame.base, frame.limits, host_limits
        )
        best = None if fitted is None else fitted.rows
    return best


def _rules(frame: Frame) -> Iterator[Rule]:
    """Yield rules, the most promising first."""
    for lanes in frame.lane_models:
        yield Rule(HIDDEN, 1.5, 0.0, *lanes)
        yield Rule(HIDDEN, 0.0, 1.0, *lanes)
        yield Rule(HIDDEN, 1.5, 0.25, *lanes)
        yield Rule(HIDDEN, 0.0, 0.0, *lanes)
        yield Rule(OLDEST, 0.5, 0.0, *lanes)
        yield Rule(FARTHEST, 0.5, 0.0, *lanes)
        yield Rule(OLDEST, 1.5, 0.25, *lanes)
        yield Rule(FARTHEST, 0.5, 0.25, *lanes)


_LAST_RESORT = Rule(HIDDEN, -1e15, 0.0)
"""Copies back only when it must: what came back early can then never be in the way."""


def within_hosts(problem: Problem, programs: Programs) -> bool:
    """Whether programs keep the limits of all hosts."""
    peaks = host_peak_bytes(problem, programs)
    return all(
        host.memory_bytes is None or peaks[host.name] <= host.memory_bytes for host in problem.hosts
    )
