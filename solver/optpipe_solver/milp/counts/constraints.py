"""Columns and rows of the model on counts; the numbers of the rows are those in docs/milp.md."""

from __future__ import annotations

from collections import defaultdict
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from optpipe_solver.milp.highs import SparseModel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from optpipe_solver.arrays import Ints
    from optpipe_solver.milp.counts.items import CountMode, CountProblem

__all__ = [
    "FAMILIES_OF_ROWS",
    "ONE",
    "Count",
    "CountSum",
    "CountVariables",
    "ModeCounts",
    "WrittenModel",
    "all_rows",
    "count_model",
]

Value: TypeAlias = tuple[int, int]
"""A column and a factor; a constant is a multiple of column `ONE`, which is no column of HiGHS."""

ONE = -1
_NONE: Value = (ONE, 0)


class CountSum:
    """A sum of counts at some steps: integer factors by column, and a constant."""

    __slots__ = ("constant", "terms")

    def __init__(self) -> None:
        self.terms: dict[int, int] = {}
        self.constant = 0

    def add(self, count: Count | Value, step: int = 0, factor: int = 1) -> CountSum:
        """Add a multiple of a count at a step; a value is the same at all steps."""
        column, times = count.at(step) if isinstance(count, Count) else count
        if column == ONE:
            self.constant += factor * times
        else:
            self.terms[column] = self.terms.get(column, 0) + factor * times
        return self


class Count:
    """How many have started an action by each step: 0 before its first, ``whole`` from its last.

    ``length`` is how long the action lasts, in steps, ``ms`` in ms; ``columns`` are those of the
    steps from ``first`` on.
    """

    def __init__(self, first: int, columns: range, whole: Value, length: int, ms: float) -> None:
        self.first = first
        self.columns = columns
        self.whole = whole
        self.length = length
        self.ms = ms

    @property
    def last(self) -> int:
        """The step from which on the count is whole."""
        return self.first + len(self.columns)

    def at(self, step: int) -> Value:
        """Return the count at a step, any number."""
        if step < self.first:
            return _NONE
        at = step - self.first
        return (self.columns[at], 1) if at < len(self.columns) else self.whole


class ModeCounts(NamedTuple):
    """The counts of one mode of a stage; None where it has no such action.

    ``total`` is of how many, ``issue`` counts RELOADs where they stand in the program, ``home``
    their copies.
    """

    mode: CountMode
    total: Value
    forward: Count
    gradient: Count
    weight: Count
    fused: Count | None
    out: Count | None
    issue: Count | None
    home: Count | None
    again: Count | None

    @property
    def backwards(self) -> tuple[Count, ...]:
        """I, and B where one pays."""
        return (self.gradient,) if self.fused is None else (self.gradient, self.fused)

    @property
    def computes(self) -> tuple[Count, ...]:
        """All that runs on the compute lane."""
        there = (self.forward, self.again, *self.backwards, self.weight)
        return tuple(count for count in there if count is not None)

    @property
    def consumers(self) -> tuple[Count, ...]:
        """What waits for a RELOAD: RECOMPUTE, or I and B."""
        return self.backwards if self.again is None else (self.again,)

    @property
    def weights(self) -> list[Count]:
        """What ends a cell: W, and B where one pays."""
        return [self.weight] if self.fused is None else [self.weight, self.fused]


class CountVariables:
    """All counts of a problem below its horizon; ``lows`` and ``tops`` are those of the columns.

    Attributes
    ----------
    is_empty
        Whether the windows alone prove that nothing ends in time.
    windows
        Per stage, of F, of I and B together, and of the weight pieces.
    modes
        Per stage the counts of its modes.
    sent, returned
        Per boundary, of messages up and down the stages; None where no link queues.
    absent
        What must be 0, because no step is left for it.
    begun
        Under span, per device but stage 0's, whether it has started by each step.
    reduced
        Per stage with a gradient reduction on a device with several, whether that has started.
    """

    def __init__(self, given: CountProblem) -> None:
        self.given = given
        self.lows: list[int] = []
        self.tops: list[int] = []
        problem = given.problem
        self.m = problem.num_microbatches
        self.indices = range(len(problem.stages))
        self.windows = [
            (given.forward_windows(s), given.gradient_windows(s), given.weight_windows(s))
            for s in self.indices
        ]
        self.is_empty = any(
            bool(np.any(one.earliest > one.latest)) for three in self.windows for one in three
        )
        if self.is_empty:
            return
        self.absent: list[Value] = []
        self.modes = [tuple(self._modes(s)) for s in self.indices]
        self.sent = [self._messages(s, 0) for s in self.indices]
        self.returned = [self._messages(s, 1) for s in self.indices]
        home = problem.stages[0].device
        self.begun = {
            device: self._begun(device)
            for device, held in enumerate(problem.stages_of)
            if held and device != home and problem.objective == "span"
        }
        self.reduced = {
            s: self._reduced(s) for held in problem.stages_of for s in self._syncs(held)
        }

    def column(self, low: int, top: int) -> Value:
        """Make a column between two bounds."""
        self.lows.append(low)
        self.tops.append(top)
        return len(self.tops) - 1, 1

    def _modes(self, s: int) -> Iterator[ModeCounts]:
        modes = self.given.modes[s]
        for mode in modes:
            total = self.column(0, self.m) if len(modes) > 1 else (ONE, self.m)
            yield self._mode(s, mode, total)

    def _mode(self, s: int, mode: CountMode, total: Value) -> ModeCounts:
        forward, gradient, weight = self.windows[s]
        back_last = int(gradient.latest[-1])
        fused_total, split_total = _NONE, total
        if mode.fused >= 0:
            fused_total, split_total = self.column(0, self.m), self.column(0, self.m)
        count = self._count
        made = forward.earliest + mode.forward
        home, again = max(0, mode.home), max(0, mode.again)
        gone = made + max(0, mode.out)
        out = issue = copy = restored = fused = None
        if mode.moves:
            out = count(made, back_last - again - home - mode.out, total, mode.out_ms)
            issue = count(gone, back_last - again - home, total, 0.0)
            copy = count(gone, back_last - again - home, total, mode.home_ms)
        if mode.recomputes:
            restored = count(gone + home, back_last - again, total, mode.again_ms)
        if mode.fused >= 0:
            fused = count(gradient.earliest, back_last, fused_total, mode.fused_ms)
        return ModeCounts(
            mode=mode,
            total=total,
            forward=count(forward.earliest, int(forward.latest[-1]), total, mode.forward_ms),
            gradient=count(gradient.earliest, back_last, split_total, mode.gradient_ms),
            weight=count(weight.earliest, int(weight.latest[-1]), split_total, mode.weight_ms),
            fused=fused,
            out=out,
            issue=issue,
            home=copy,
            again=restored,
        )

    def _count(self, early: Ints, last: int, whole: Value, ms: float) -> Count:
        """Make a count whose k-th is at ``early[k]`` at the earliest, the last by step ``last``."""
        first = int(early[0])
        steps = np.arange(first, max(first, last))
        most = np.searchsorted(early, steps, side="right")
        begin = len(self.tops)
        self.tops += most.tolist()
        self.lows += [0] * len(most)
        if last < first:
            self.absent.append(whole)
        return Count(first, range(begin, len(self.tops)), whole, self.given.steps(ms), ms)

    def _messages(self, s: int, way: int) -> Count | None:
        lane = self.given.problem.boundary_lanes[s][way]
        if lane.ms <= 0:
            return None
        source, target = (s, s + 1) if way == 0 else (s + 1, s)
        made = self.windows[source][way].earliest + min(
            count.length
            for mode in self.modes[source]
            for count in ((mode.forward,) if way == 0 else mode.backwards)
        )
        needed = int(self.windows[target][way].latest[-1])
        last = needed - self.given.steps(self.given.problem.boundary_ms[s][way])
        return self._count(made, last, (ONE, self.m), lane.ms)

    def _begun(self, device: int) -> Count:
        windows = [self.windows[s][0] for s in self.given.problem.stages_of[device]]
        first = min(windows, key=lambda window: int(window.earliest[0]))
        last = min(int(window.latest[0]) for window in windows)
        return self._count(first.earliest[:1], last, (ONE, 1), 0.0)

    def _syncs(self, held: tuple[int, ...]) -> list[int]:
        stages = self.given.problem.stages
        found = [s for s in held if stages[s].grad_sync_ms > 0]
        return found if len(found) > 1 else []

    def _reduced(self, s: int) -> Count:
        problem = self.given.problem
        ms = problem.stages[s].grad_sync_ms
        early = self.windows[s][1].earliest[-1:]
        last = self.given.ends[problem.stages[s].device] - self.given.steps(ms)
        return self._count(early, last, (ONE, 1), ms)


class CountRow(NamedTuple):
    """``left`` is at most ``right``, a whole number."""

    left: CountSum
    right: int


def adds_up(v: CountVariables) -> Iterator[CountRow]:
    """Every micro-batch has one mode, and in it one kind of backward (1)."""
    for none in v.absent:
        yield CountRow(CountSum().add(none), 0)
    for modes in v.modes:
        yield from _equal([(mode.total, 1) for mode in modes], v.m)
        for mode in modes:
            if mode.fused is not None:
                parts = [(mode.gradient.whole, 1), (mode.fused.whole, 1), (mode.total, -1)]
                yield from _equal(parts, 0)
    for stage, modes in zip(v.given.problem.stages, v.modes, strict=True):
        if stage.uniform_modes and len(modes) > 1:
            for mode in modes:
                yield from _equal([(mode.total, 1), (v.column(0, 1), -v.m)], 0)


def _equal(parts: Sequence[tuple[Value, int]], right: int) -> Iterator[CountRow]:
    for sign in (1, -1):
        left = CountSum()
        for part, factor in parts:
            left.add(part, 0, sign * factor)
        yield CountRow(left, sign * right)


def grows(v: CountVariables) -> Iterator[CountRow]:
    """What has started stays started (2)."""
    for count in _all_counts(v):
        for step in range(count.first, count.last):
            yield CountRow(CountSum().add(count, step).add(count, step + 1, -1), 0)


def in_windows(v: CountVariables) -> Iterator[CountRow]:
    """The k-th start of a stage, whatever its mode, lies in its window (3)."""
    for s in v.indices:
        modes = v.modes[s]
        forward, gradient, weight = v.windows[s]
        forwards = [(mode.forward, 0) for mode in modes]
        backwards = [(count, 0) for mode in modes for count in mode.backwards]
        yield from _late(forwards, forward.latest)
        yield from _late(backwards, gradient.latest)
        least = v.given.steps(v.given.gradient_ms(s))
        pieces = [(mode.weight, 0) for mode in modes]
        pieces += [(mode.fused, least) for mode in modes if mode.fused is not None]
        yield from _late(pieces, weight.latest)
        if len(forwards) > 1:
            yield from _early(forwards, forward.earliest)
        if len(backwards) > 1:
            yield from _early(backwards, gradient.earliest)


def _late(counts: Sequence[tuple[Count, int]], latest: Ints) -> Iterator[CountRow]:
    for step in np.unique(latest):
        done = int(np.searchsorted(latest, step, side="right"))
        yield CountRow(_sum(counts, int(step), -1), -done)


def _early(counts: Sequence[tuple[Count, int]], earliest: Ints) -> Iterator[CountRow]:
    for step in np.unique(earliest):
        begun = int(np.searchsorted(earliest, step, side="left"))
        yield CountRow(_sum(counts, int(step) - 1), begun)


def _sum(counts: Iterable[tuple[Count, int]], step: int, factor: int = 1) -> CountSum:
    """Return the sum of counts, each so many steps earlier."""
    left = CountSum()
    for count, lag in counts:
        left.add(count, step - lag, factor)
    return left


def _after(later: Sequence[Count], earlier: Sequence[tuple[Count, int]]) -> Iterator[CountRow]:
    """No more of the later have started than of the earlier so many steps before."""
    first = min(count.first for count in later)
    last = max(count.last for count in later)
    last = max(last, *(count.last + lag for count, lag in earlier))
    for step in range(first, last + 1):
        left = _sum([(count, 0) for count in later], step)
        for count, lag in earlier:
            left.add(count, step - lag, -1)
        yield CountRow(left, 0)


def cells_go_on(v: CountVariables) -> Iterator[CountRow]:
    """A cell's actions follow each other: F, copies, RECOMPUTE, I or B, W (4)."""
    for mode in (mode for modes in v.modes for mode in modes):
        steps: list[tuple[Count, ...]] = [(mode.forward,)]
        lags = [mode.forward.length]
        if mode.out is not None and mode.issue is not None and mode.home is not None:
            steps += [(mode.out,), (mode.issue,), (mode.home,)]
            lags += [mode.out.length, 0, mode.home.length]
        if mode.again is not None:
            steps.append((mode.again,))
            lags.append(mode.again.length)
        steps.append(mode.backwards)
        for (earlier, later), lag in zip(pairwise(steps), lags, strict=True):
            yield from _after(later, [(count, lag) for count in earlier])
        yield from _after(mode.backwards, [(mode.forward, mode.mode.trip)])
        yield from _after([mode.weight], [(mode.gradient, mode.gradient.length)])


def data_arrives(v: CountVariables) -> Iterator[CountRow]:
    """A pass waits for that of its neighbour and its message, which may wait for its link (5)."""
    steps = v.given.steps
    for s, (this, following) in enumerate(pairwise(v.modes)):
        there, back = v.given.problem.boundary_ms[s]
        down = [(m.forward, steps(m.forward.ms + there)) for m in this]
        up = [(c, steps(c.ms + back)) for m in following for c in m.backwards]
        forwards = [mode.forward for mode in following]
        backwards = [count for mode in this for count in mode.backwards]
        for message, made, taken, ms in (
            (v.sent[s], down, forwards, there),
            (v.returned[s], up, backwards, back),
        ):
            yield from _after(taken, made)
            if message is not None:
                yield from _after([message], [(count, count.length) for count, _ in made])
                yield from _after(taken, [(message, steps(ms))])


def one_at_a_time(v: CountVariables) -> Iterator[CountRow]:
    """A device's compute lane runs one action, and RELOADs are issued between two of them (6)."""
    for device, held in enumerate(v.given.problem.stages_of):
        modes = [mode for s in held for mode in v.modes[s]]
        lane = [count for mode in modes for count in mode.computes]
        yield from _taking_turns(lane)
        if v.given.binds[device]:
            yield from _issued_between(v, device, modes, lane)


def _taking_turns(lane: Sequence[Count]) -> Iterator[CountRow]:
    lane = [count for count in lane if count.length > 0]
    if not lane:
        return
    last = max(count.last + count.length for count in lane)
    for step in range(min(count.first for count in lane), last + 1):
        left = CountSum()
        for count in lane:
            left.add(count, step).add(count, step - count.length, -1)
        yield CountRow(left, 1)


def _issued_between(
    v: CountVariables, device: int, modes: Sequence[ModeCounts], lane: Sequence[Count]
) -> Iterator[CountRow]:
    room = v.given.room(device)
    lane = [count for count in lane if count.length > 1]
    for mode in modes:
        issue = mode.issue
        if issue is None:
            continue
        size = mode.mode.by_issue
        most = min(v.m, room // size) if size > 0 else v.m
        for step in range(issue.first, issue.last + 1):
            left = CountSum().add(issue, step).add(issue, step - 1, -1)
            for count in lane:
                left.add(count, step - 1, most).add(count, step - count.length, -most)
            yield CountRow(left, most)


def transfers_take_turns(v: CountVariables) -> Iterator[CountRow]:
    """A direction of a device, a half-duplex device and a group's direction carry one copy (7)."""
    lanes: defaultdict[tuple[object, ...], list[Count]] = defaultdict(list)
    for s in v.indices:
        device = v.given.problem.stages[s].device
        own = v.given.problem.devices[device]
        for way in ("out", "home"):
            copies = [count for mode in v.modes[s] if (count := getattr(mode, way)) is not None]
            lanes["device", device, "both" if own.half_duplex else way] += copies
            if own.pcie_group is not None:
                lanes["group", own.pcie_group, way] += copies
    for s, (there, back) in enumerate(v.given.problem.boundary_lanes):
        for link, message in ((there, v.sent[s]), (back, v.returned[s])):
            if message is not None:
                lanes["link", link.link].append(message)
    for counts in lanes.values():
        yield from _taking_turns(counts)


def fits_device_memory(v: CountVariables) -> Iterator[CountRow]:
    """What has started has taken its bytes, only what can have ended has given back (8)."""
    for device, held in enumerate(v.given.problem.stages_of):
        if not v.given.binds[device]:
            continue
        modes = [mode for s in held for mode in v.modes[s]]
        parts = [part for mode in modes for part in _bytes(mode) if part[2]]
        first = min((count.first for count, _, _ in parts), default=0)
        for step in range(first, v.given.ends[device] + 1):
            left = CountSum()
            for count, lag, factor in parts:
                left.add(count, step - lag, factor)
            yield CountRow(left, v.given.room(device))


def _bytes(counts: ModeCounts) -> Iterator[tuple[Count, int, int]]:
    """Yield count, lag and units of memory: at the start, at the end, and while it runs."""
    mode = counts.mode
    for count, at_start, at_end, meanwhile in (
        (counts.forward, mode.by_forward, 0, mode.while_forward),
        (counts.out, 0, mode.by_out, 0),
        (counts.issue, mode.by_issue, 0, 0),
        (counts.again, mode.by_again, 0, mode.while_again),
        (counts.gradient, 0, mode.by_gradient, mode.while_gradient),
        (counts.fused, 0, mode.by_fused, mode.while_fused),
        (counts.weight, 0, mode.by_weight, mode.while_weight),
    ):
        if count is not None:
            yield count, 0, at_start + meanwhile
            yield count, count.length, at_end - meanwhile


def fits_host_memory(v: CountVariables) -> Iterator[CountRow]:
    """A host holds the peaks of its devices together (9)."""
    problem = v.given.problem
    for host in problem.hosts:
        if host.memory_bytes is None:
            continue
        parts = {
            d: [mode for s in held for mode in v.modes[s] if mode.mode.moves]
            for d, held in enumerate(problem.stages_of)
            if problem.devices[d].host == host.name
        }
        sizes = [mode.mode.moved_bytes for modes in parts.values() for mode in modes]
        if v.m * sum(sizes) <= host.memory_bytes:
            continue
        unit = max(int(np.gcd.reduce(sizes)), host.memory_bytes // 2**20, 1)
        peaks = CountSum()
        for device, modes in parts.items():
            if not modes:
                continue
            peak = v.column(0, host.memory_bytes // unit)
            peaks.add(peak)
            for step in range(v.given.ends[device] + 1):
                left = CountSum().add(peak, 0, -1)
                for mode in modes:
                    size = mode.mode.moved_bytes // unit
                    if mode.out is not None:
                        left.add(mode.out, step, size)
                    for count in mode.consumers:
                        left.add(count, step, -size)
                yield CountRow(left, 0)
        yield CountRow(peaks, host.memory_bytes // unit)


def ends_in_time(v: CountVariables) -> Iterator[CountRow]:
    """All ends by the horizon, gradient reductions too, each device by its own clock (10)."""
    problem = v.given.problem
    for s in v.indices:
        device = problem.stages[s].device
        end = v.given.ends[device]
        sync = v.given.steps(problem.stages[s].grad_sync_ms)
        modes = v.modes[s]
        for count in (count for mode in modes for count in mode.computes):
            yield CountRow(CountSum().add(count.whole).add(count, end - count.length, -1), 0)
        ended = [(count, count.length) for mode in modes for count in mode.weights]
        yield CountRow(_sum(ended, end - sync, -1), -v.m)
        if s in v.reduced:
            yield from _reduced(v, s, ended)
        if device in v.begun:
            yield from _own_clock(v, s, ended, sync)
    for held in problem.stages_of:
        yield from _taking_turns([v.reduced[s] for s in held if s in v.reduced])


def _reduced(v: CountVariables, s: int, ended: Sequence[tuple[Count, int]]) -> Iterator[CountRow]:
    """A reduction starts when every W and B has ended, and ends by the horizon."""
    sync = v.reduced[s]
    for step in range(sync.first, sync.last + 1):
        left = CountSum().add(sync, step, v.m)
        for count, lag in ended:
            left.add(count, step - lag, -1)
        yield CountRow(left, 0)


def _own_clock(
    v: CountVariables, s: int, ended: Sequence[tuple[Count, int]], sync: int
) -> Iterator[CountRow]:
    """Under span nothing runs before the device has begun, and all ends so much later."""
    begun = v.begun[v.given.problem.stages[s].device]
    for step in range(begun.last + 1):
        left = CountSum().add(begun, step, -v.m)
        for mode in v.modes[s]:
            left.add(mode.forward, step)
        yield CountRow(left, 0)
        left = CountSum().add(begun, step, v.m)
        for count, lag in ended:
            left.add(count, step + v.given.length + v.given.slack - sync - lag, -1)
        yield CountRow(left, 0)


def _all_counts(v: CountVariables) -> Iterator[Count]:
    for mode in (mode for modes in v.modes for mode in modes):
        yield from mode.computes
        yield from (count for count in (mode.out, mode.issue, mode.home) if count is not None)
    yield from (count for count in (*v.sent, *v.returned) if count is not None)
    yield from v.begun.values()
    yield from v.reduced.values()


FAMILIES_OF_ROWS = (
    adds_up,
    grows,
    in_windows,
    cells_go_on,
    data_arrives,
    one_at_a_time,
    transfers_take_turns,
    fits_device_memory,
    fits_host_memory,
    ends_in_time,
)


def all_rows(v: CountVariables) -> Iterator[CountRow]:
    """Yield the rows of every family, in order; some hold whatever the columns are."""
    for family in FAMILIES_OF_ROWS:
        yield from family(v)


# --- The model as HiGHS takes it.

_ROWS_BETWEEN_LOOKS = 500


class WrittenModel(NamedTuple):
    """A model, None where windows or a row alone prove that nothing ends in time."""

    model: SparseModel | None
    is_complete: bool = True


def count_model(given: CountProblem, should_stop: Callable[[], bool]) -> WrittenModel:
    """Write all rows, or, where told to stop, some."""
    v = CountVariables(given)
    if v.is_empty:
        return WrittenModel(None)
    sizes = [0]
    columns: list[int] = []
    factors: list[int] = []
    limits: list[int] = []
    for number, (left, right) in enumerate(all_rows(v)):
        most = left.constant
        for column, factor in left.terms.items():
            most += factor * (v.tops if factor > 0 else v.lows)[column]
        if most <= right:
            continue
        if not left.terms:
            return WrittenModel(None)
        sizes.append(len(left.terms))
        columns += left.terms.keys()
        factors += left.terms.values()
        limits.append(right - left.constant)
        if number % _ROWS_BETWEEN_LOOKS == 0 and should_stop():
            return WrittenModel(None, is_complete=False)
    model = SparseModel(
        lows=np.array(v.lows, dtype=np.float64),
        tops=np.array(v.tops, dtype=np.float64),
        starts=np.array(list(accumulate(sizes)), dtype=np.int32),
        columns=np.array(columns, dtype=np.int32),
        factors=np.array(factors, dtype=np.float64),
        limits=np.array(limits, dtype=np.float64),
    )
    return WrittenModel(model)
