"""Limits of a solve and the budget that is left; its result and its progress messages."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from html import escape
from math import inf
from typing import TYPE_CHECKING, Any

from optpipe.errors import InputError, MissingExtraError
from optpipe.schedule import OPTIMAL_GAP
from optpipe.units import html_table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from optpipe.problem import Problem
    from optpipe.schedule import Programs, Schedule, StoppedBy

__all__ = [
    "Limits",
    "Progress",
    "Result",
    "RobustChoice",
    "SolveStatus",
    "Stop",
    "Stopped",
    "check_stop",
    "stopped_by",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Time, work, threads, seed and sufficient gap, as given by the caller.

    Parameters
    ----------
    time_limit_s
        Seconds, > 0.
    work_limit
        None, or units > 0 of about one second of one core. Work is counted in iterations and nodes,
        not by the clock. With a limit, the parts run one after another. The result then depends
        only on problem, seed, threads and this number, unless the time limit ends the solve first.
    threads
        >= 1. From 2 on, the search for schedules and the proofs run at the same time.
    seed
        >= 0.
    gap
        In [0, 1): stop when (objective - bound) / objective is at most this, or optimal.

    Raises
    ------
    InputError
        With value, rule and fix.
    """

    time_limit_s: float = 60.0
    work_limit: float | None = None
    threads: int = 1
    seed: int = 0
    gap: float = OPTIMAL_GAP

    def __post_init__(self) -> None:
        if not self.time_limit_s > 0:
            raise InputError(f"time_limit_s = {self.time_limit_s}: must be > 0 seconds; raise it")
        if self.work_limit is not None and not self.work_limit > 0:
            raise InputError(
                f"work_limit = {self.work_limit}: must be > 0 units; raise it or leave it out"
            )
        if self.threads < 1:
            raise InputError(f"threads = {self.threads}: must be >= 1; raise it")
        if self.seed < 0:
            raise InputError(f"seed = {self.seed}: must be >= 0; change it")
        if not 0 <= self.gap < 1:
            raise InputError(f"gap = {self.gap}: must be in [0, 1), e.g. 0.01 for 1%; change it")

    @property
    def good_gap(self) -> float:
        """The gap at which the solve stops; a gap that counts as optimal always stops it."""
        return max(self.gap, OPTIMAL_GAP)


class Stop:
    """The budget of a turn that is left, in seconds and in work, and whether to stop.

    One part of the solver uses it at a time.

    Parameters
    ----------
    seconds
        From now on.
    work
        Maximum work, in the unit of the part (states, moves, nodes); None for no limit.
    threads, seed
        Further arguments of the part; parts that do not need them ignore them.
    should_stop
        Called often; True ends the turn and all turns made of it.

    Attributes
    ----------
    work
        As given.
    above, steps
        The turn of which this is a part, if any, and how many units of work here make one there.
    """

    def __init__(
        self,
        seconds: float,
        *,
        work: float | None = None,
        threads: int = 1,
        seed: int = 0,
        should_stop: Callable[[], bool] | None = None,
    ) -> None:
        self.began = time.perf_counter()
        self.limit_s = seconds
        self.work = work
        self.threads = threads
        self.seed = seed
        self._should_stop = should_stop
        self.above: Stop | None = None
        self.steps = 1.0
        self._spent = 0.0
        self._turn: Stop | None = None

    def turn(
        self,
        share: float = 1.0,
        at_most: float = inf,
        *,
        steps: float | None = None,
        threads: int | None = None,
        seed: int | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> Stop:
        """Return a share of the work left if work is limited, else of the seconds left.

        The new turn ends when this turn ends, and its spending counts here. An earlier turn made of
        this one must be over by then.

        Parameters
        ----------
        share, at_most
            In [0, 1]; in seconds, or in this turn's unit of work.
        steps
            None, or how many steps make one unit of this turn. The new turn then counts in whole
            steps and has at least one.
        threads, seed
            None = as here.
        should_stop
            Ends the turn alone.
        """
        self._spent, self._turn = self.spent, None
        seconds, work = self.left_s(), None
        if self.work is None:
            seconds = min(share * seconds, at_most)
        else:
            work = min(share * self.left_work, at_most)
            if steps is not None:
                work = max(1, int(work * steps))
        turn = Stop(
            seconds,
            work=work,
            threads=self.threads if threads is None else threads,
            seed=self.seed if seed is None else seed,
            should_stop=should_stop,
        )
        turn.above, turn.steps = self, steps or 1.0
        self._turn = turn
        return turn

    def seconds(self) -> float:
        """Return the seconds since the start."""
        return time.perf_counter() - self.began

    def left_s(self) -> float:
        """Return the seconds left, at least 0."""
        return max(0.0, self.limit_s - self.seconds())

    @property
    def spent(self) -> float:
        """The work done so far, including all turns made of this one."""
        turn = self._turn
        return self._spent if turn is None else self._spent + turn.spent / turn.steps

    @property
    def left_work(self) -> float:
        """The work left; infinite if it is not limited."""
        return inf if self.work is None else self.work - self.spent

    @property
    def limit(self) -> float:
        """The total work if that is limited, else the total seconds."""
        return self.limit_s if self.work is None else self.work

    @property
    def left(self) -> float:
        """The work left if work is limited, else the seconds left."""
        return self.left_s() if self.work is None else self.left_work

    def spend(self, amount: float) -> None:
        """Count work that was done, in this turn's unit."""
        self._spent += amount

    def is_told(self) -> bool:
        """Whether a caller requests a stop, here or above."""
        if self._should_stop is not None and self._should_stop():
            return True
        return self.above is not None and self.above.is_told()

    @property
    def why(self) -> StoppedBy:
        """The reason why this turn ends, if it is not the gap."""
        if self.is_told():
            return "cancelled"
        return "time_limit" if self.work is None or self.left_s() <= 0.0 else "work_limit"

    def is_over(self) -> bool:
        """Whether time or work is used up, or a caller requests a stop, here or above."""
        if self.left_s() <= 0.0 or self.left_work <= 0 or self.is_told():
            return True
        return self.above is not None and self.above.is_over()


# --- The end of a solve, for code that has no `Stop`: a family, a bound or an evaluation of a large
# problem takes seconds.


class Stopped(Exception):  # noqa: N818 - an answer, not an error
    """Raised on a thread whose solve has ended."""


class _ThreadEnd(threading.local):
    has_come: Callable[[], bool] | None = None


_END = _ThreadEnd()


@contextmanager
def stopped_by(has_come: Callable[[], bool]) -> Iterator[None]:
    """Let `check_stop` raise `Stopped` on this thread as soon as ``has_come`` returns True."""
    before, _END.has_come = _END.has_come, has_come
    try:
        yield
    finally:
        _END.has_come = before


def check_stop() -> None:
    """Raise `Stopped` if this thread works for a solve that has ended.

    Every loop that can take a second calls this function between two of its steps. On a thread
    that works for no solve it does nothing.
    """
    if _END.has_come is not None and _END.has_come():
        raise Stopped


# --- The result of a solve, and its progress.


class SolveStatus(StrEnum):
    """How a solve can end.

    ``unknown`` is the only meaning of "nothing found": no schedule, and no proof that none exists.
    """

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Progress:
    """The best known so far, sent at every improvement; times in ms, ``seconds`` since the start.

    ``programs`` is None if only the bound improved. ``problem`` is the problem of the programs, if
    the search chose it too.
    """

    seconds: float
    method: str
    objective_ms: float | None
    bound_ms: float | None
    programs: Programs | None = None
    problem: Problem | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RobustChoice:
    """How a schedule was chosen by a percentile of its objective under noise; times in ms.

    Attributes
    ----------
    percent, late_ms
        The percentile, and its value for the chosen schedule.
    shortest_ms, shortest_late_ms
        The shortest known objective without noise, and the percentile of its schedule.
    num_compared
        Number of judged schedules, including these two.
    jitter, stragglers
        The noise, as in `Noise`.
    """

    percent: float
    late_ms: float
    shortest_ms: float
    shortest_late_ms: float
    num_compared: int
    jitter: float
    stragglers: float

    def __str__(self) -> str:
        return (
            f"P{self.percent:g} under noise (actions +-{100 * self.jitter:g}%, devices "
            f"+-{100 * self.stragglers:g}%): {self.late_ms:,.1f} ms, the best of "
            f"{self.num_compared} schedules; the shortest without noise, {self.shortest_ms:,.1f} "
            f"ms, has {self.shortest_late_ms:,.1f} ms. Bound and gap are those without noise"
        )


_MOST_DRAWN = 20_000
"""Maximum number of actions of a notebook's picture."""


@dataclass(frozen=True, slots=True)
class Result:
    """The end of a solve.

    Attributes
    ----------
    status
        ``optimal`` and ``feasible`` come with a schedule, the others without.
    schedule
        The best schedule found; it carries objective, bound, gap and provenance.
    bound_ms
        Proven lower bound of the objective; None if infeasible.
    message
        Empty, or one sentence: why there is no schedule and what would help.
    needs
        If infeasible: what is too small -> the smallest bytes that work.
    robust
        How the schedule was chosen, if the caller asked for noise.
    problem
        The problem of the schedule.
    peak_bytes_before
        The peaks before the last step, if it lowered them; else empty.
    """

    status: SolveStatus
    schedule: Schedule | None
    bound_ms: float | None = None
    message: str = ""
    needs: dict[str, int] = field(default_factory=dict)
    robust: RobustChoice | None = None
    problem: Problem | None = field(default=None, compare=False)
    peak_bytes_before: tuple[int, ...] = field(default=(), compare=False)

    def as_json(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        schedule = self.schedule
        return {
            "status": self.status.value,
            "message": self.message,
            "needs": self.needs,
            "objective_ms": None if schedule is None else schedule.objective_ms,
            "bound_ms": self.bound_ms,
            "gap": None if schedule is None else schedule.gap,
            "robust": None if self.robust is None else asdict(self.robust),
            "schedule": None if schedule is None else schedule.model_dump(mode="json"),
        }

    def _repr_html_(self) -> str:
        """Return the numbers and the picture of the schedule, for notebooks."""
        if self.schedule is None:
            return html_table([("status", self.status.value), ("message", self.message)])
        return self.schedule._repr_html_() + self._picture()

    def _picture(self) -> str:
        """Return the schedule as SVG, a hint without matplotlib, or nothing if it is too large."""
        found, problem = self.schedule, self.problem
        if found is None or problem is None or sum(map(len, found.programs)) > _MOST_DRAWN:
            return ""
        from optpipe.plot.image import draw_svg  # noqa: PLC0415 - half a second, and an extra
        from optpipe.plot.scene import View  # noqa: PLC0415

        view = View(found.provenance.method, problem, found.programs, found.bound_ms)
        try:
            svg = draw_svg([view]).decode()
        except MissingExtraError as error:
            return f"<p>{escape(str(error))}</p>"
        return svg[svg.index("<svg") :]

    def __repr__(self) -> str:
        """Return status, objective, bound and gap; not the programs."""
        if self.schedule is None:
            return f"Result({self.status.value}: {self.message[:120]})"
        return repr(self.schedule).replace("Schedule", "Result", 1)
