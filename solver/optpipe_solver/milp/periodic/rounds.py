"""The parts of the periodic search that go on in rounds, each with its turn."""

from __future__ import annotations

from math import exp, inf
from typing import TYPE_CHECKING

import numpy as np

from optpipe.schedule import ActionType
from optpipe.simulate import simulate
from optpipe_solver.families.squeeze import BuildingBlock, Early, SqueezePolicy, Squeezer
from optpipe_solver.families.v_shape import candidate_blocks
from optpipe_solver.milp.periodic.block import POLICIES, squeezed, unroll
from optpipe_solver.milp.periodic.circular_search import CircularSearch
from optpipe_solver.milp.periodic.items import Modes, PeriodChoice, PeriodicItems, load_ms
from optpipe_solver.milp.periodic.questions import (
    num_order_pairs,
    shortest_period,
    shortest_way,
)
from optpipe_solver.offload_fit.fit import fit_memory

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from optpipe.problem import Problem
    from optpipe.schedule import Programs
    from optpipe_solver.budget import Stop
    from optpipe_solver.families.squeeze import Squeezed
    from optpipe_solver.incumbent import Incumbent
    from optpipe_solver.milp.periodic.block import PeriodicBlock
    from optpipe_solver.milp.periodic.circular_kernel import Circle

__all__ = [
    "FIT_WORK",
    "METHOD",
    "NODE_WORK",
    "POLISH_WORK",
    "CircularRounds",
    "FitRounds",
    "PeriodicRun",
    "PolishRounds",
    "Polisher",
    "ShrinkRounds",
    "fitted",
    "improve_by_periodic",
    "with_memory",
]


POLISH_WORK = 20
"""Moves of the local search that count as much work as one move of polishing."""

FIT_WORK = 1000
"""The same for fitting one schedule into memory."""

_LOOKED_AT = 64
_STARTS = 4
_IDLE_ROUNDS = 6
_POLISHED = 3
_POLISH_ROUND = 200
_POLISH_ACTIONS = 300_000
_BEATEN = 1.1
_RELAXED = (2.0, 4.0, 1.5, 8.0, 3.0)


class CircularRounds:
    """The local search in rounds: from each start in turn, until many rounds brought nothing."""

    def __init__(self, run: PeriodicRun, search: CircularSearch) -> None:
        self.run = run
        self.search = search
        self.pool: list[tuple[float, Circle]] = []
        self.rounds = 0
        self.idle = 0

    def first(self) -> None:
        """Look at building blocks, keep the best as starts, and search once from each."""
        looked = [
            self.search.from_times(block)
            for block in candidate_blocks(self.run.best.problem)[:_LOOKED_AT]
        ]
        ranked = sorted(((self.search.charged_ms(c), n) for n, c in enumerate(looked)))
        self.pool = [(ms, looked[n]) for ms, n in ranked[:_STARTS] if ms < inf]
        for _ in range(len(self.pool)):
            self.next()

    def to_the_end(self) -> None:
        """Search until rounds bring nothing any more, for at most half of what is left.

        The MILP's blocks are starts too.
        """
        for block in self.run.blocks:
            self._add(block)
        end = 0.5 * self.run.stop.left
        while self.run.stop.left > end and self.next():
            pass

    def _add(self, block: PeriodicBlock) -> None:
        circle = self.search.from_block(block)
        if circle is not None:
            self.pool.insert(0, (self.search.charged_ms(circle), circle))

    def next(self) -> bool:
        """Search from one start; return whether another round is worth it."""
        if self.run.is_over() or not self.pool or self.idle >= _IDLE_ROUNDS:
            return False
        at = self.rounds % len(self.pool)
        ms, circle = self.pool[at]
        moves = int(min(self.search.moves_per_slice, self.run.stop.left_work))
        seed = self.run.stop.seed * 1_000_003 + self.rounds
        found, evaluated = self.search.improved(circle, num_moves=moves, seed=seed)
        self.run.stop.spend(moves)
        self.rounds += 1
        if evaluated <= ms:
            self.pool[at] = (evaluated, found)
        self.idle = 0 if self._offered(found) or evaluated < ms * (1 - 1e-9) else self.idle + 1
        return True

    def _offered(self, circle: Circle) -> bool:
        block = self.search.block_of(circle)
        if block is None:
            return False
        self.run.note(block, self.search.evaluated_ms(circle))
        return self.run.offer(block)


class PolishRounds:
    """Polishing in rounds, of the blocks whose squeezed schedules are shortest."""

    def __init__(self, run: PeriodicRun, *, fused: bool) -> None:
        self.run = run
        self.moves = _moves(run.best.problem)
        self.polishers = _polishers(run, run.best.problem, fused=fused, most=_POLISHED)
        self.rounds = 0

    def next(self) -> bool:
        """Polish one block for a round, offer it where it got better; return whether to go on."""
        if self.run.is_over() or not self.polishers or self._is_beaten():
            return False
        polisher = self.polishers[self.rounds % len(self.polishers)]
        better = polisher.run(self.moves)
        self.run.stop.spend(POLISH_WORK * self.moves)
        self.rounds += 1
        if better or self.rounds <= len(self.polishers):
            made = polisher.result()
            if made is not None:
                self.run.offer_squeezed(made)
        return True

    def _is_beaten(self) -> bool:
        """Whether something offloaded is so much better that this will not catch up."""
        return self.polishers[0].best_ms > _BEATEN * self.run.best.objective_ms


class FitRounds:
    """Blocks that take more memory than there is, polished, then offloaded and recomputed to fit.

    A relaxed problem, of a few times the memory, is polished; `fit.fit_memory` moves what is too
    much to the host, or drops it. How much too much pays is tried.
    """

    def __init__(self, run: PeriodicRun, *, fused: bool) -> None:
        self.run = run
        self.fused = fused
        self.moves = max(2, _moves(run.best.problem) // 4)
        self.polishers: list[Polisher | None] = [None] * len(_RELAXED)
        self.fitted_ms = [inf] * len(_RELAXED)
        self.rounds = 0

    def next(self) -> bool:
        """Polish and fit at one relaxation; return whether to go on."""
        if self.run.is_over():
            return False
        at = self._turn()
        self.rounds += 1
        polisher = self.polishers[at]
        if polisher is None:
            relaxed = with_memory(self.run.best.problem, _RELAXED[at])
            found = _polishers(self.run, relaxed, fused=self.fused, most=1)
            if not found:
                return self.rounds < len(_RELAXED)
            polisher = self.polishers[at] = found[0]
        else:
            polisher.run(self.moves)
            self.run.stop.spend(POLISH_WORK * self.moves)
        self._offer(at, polisher.current())
        return True

    def _turn(self) -> int:
        """Return whose turn it is: each first, then every other time the best so far."""
        if self.rounds < len(_RELAXED) or self.rounds % 2 == 0:
            return self.rounds // (1 if self.rounds < len(_RELAXED) else 2) % len(_RELAXED)
        return min(range(len(_RELAXED)), key=self.fitted_ms.__getitem__)

    def _offer(self, at: int, made: Squeezed | None) -> None:
        self.run.stop.spend(FIT_WORK)
        if made is None:
            return
        problem = self.run.best.problem
        fitted = fit_memory(problem, made.programs(len(problem.stages)), tries=2)
        if fitted is None:
            return
        length = simulate(problem, fitted).objective_ms(problem.objective)
        self.fitted_ms[at] = min(self.fitted_ms[at], length)
        if length < self.run.best.objective_ms:
            self.run.best.offer(fitted, METHOD)


def _moves(problem: Problem) -> int:
    actions = 3 * len(problem.stages) * problem.num_microbatches
    return max(4, min(_POLISH_ROUND, _POLISH_ACTIONS // actions))


def _polishers(run: PeriodicRun, problem: Problem, *, fused: bool, most: int) -> list[Polisher]:
    """Return polishers of the blocks whose squeezed schedules are shortest, best first."""
    actions = 3 * len(problem.stages) * problem.num_microbatches
    looked = max(3, min(_LOOKED_AT, _POLISH_ACTIONS // actions))
    plain = [block.squeezable(problem) for block in run.blocks if block.is_plain]
    found: list[Polisher] = []
    for number, block in enumerate([*plain, *candidate_blocks(problem)[:looked]]):
        if run.is_over():
            break
        seed = run.stop.seed * 1_000_003 + number
        found.append(Polisher(problem, block, fused=fused, seed=seed))
        run.stop.spend(POLISH_WORK)
    return sorted(found, key=lambda polisher: polisher.best_ms)[:most]


# --- Circles with offload and recompute, searched in rounds, and schedules made of them.
# First one micro-batch per period; when that brings nothing any more, super-periods of two and of
# three, from the best of it: a fraction of the micro-batches is then treated otherwise than the
# rest.

_SHRINK_WORK = 20
_SHRINK_RELAXED = (1.0, 2.0, 4.0)
_SHRINK_LOOKED_AT = 16
_SHRINK_HOT = (0.02, 0.1, 0.3)
_FIT_POLICIES = POLICIES[:2]
_MOST_CELLS = 200


class ShrinkRounds:
    """The local search with modes in rounds: from each start in turn.

    Parameters
    ----------
    run
        What is left, and where schedules are offered.
    fused
        Whether B stands for I and W.
    fit_work
        What it counts to fit one schedule into memory, in moves.
    copies
        Micro-batches per period to search with, one number after another, 1 first.
    """

    def __init__(
        self,
        run: PeriodicRun,
        *,
        fused: bool,
        fit_work: int,
        copies: tuple[int, ...] = (1, 2, 3),
    ) -> None:
        self.run = run
        self.fused = fused
        self.fit_work = fit_work
        self.copies = copies
        self.pool: list[tuple[float, Circle]] = []
        self.singles: list[PeriodicBlock] = []
        self.level = -1
        self.rounds = 0
        self.idle = 0
        self.search = self._search(1)

    def next(self) -> bool:
        """Search from one start, offer what comes of it; return whether to go on."""
        if self.run.is_over() or self.level >= len(self.copies):
            return False
        if (self.level < 0 or self.idle >= _IDLE_ROUNDS) and not self._next_level():
            self.level = len(self.copies)
            return False
        at = self.rounds % len(self.pool)
        ms, circle = self.pool[at]
        moves = int(max(1, min(self.search.moves_per_slice, self.run.stop.left_work)))
        seed = self.run.stop.seed * 1_000_003 + self.rounds
        hot = _SHRINK_HOT[self.rounds // len(self.pool) % len(_SHRINK_HOT)]
        found, evaluated = self.search.improved(circle, num_moves=moves, seed=seed, hot=hot)
        self.run.stop.spend(moves)
        self.rounds += 1
        is_shorter = evaluated < ms * (1 - 1e-9)
        if evaluated <= ms:
            self.pool[at] = (evaluated, found)
        is_better = (is_shorter or self.rounds <= len(self.pool)) and self._offered(found)
        self.idle = 0 if is_better or is_shorter else self.idle + 1
        return True

    def _next_level(self) -> bool:
        """Go on to more micro-batches per period; return whether there is anything to search."""
        self.level += 1
        if self.level >= len(self.copies):
            return False
        copies = self.copies[self.level]
        if copies == 1:
            self.pool = self._starts()
        else:
            if copies * len(self.search.problem.stages) > _MOST_CELLS:
                return False
            self.singles = self.singles or self._best_blocks()
            self.search = self._search(copies)
            self.pool = list(self._repeated(self.singles, copies))
        self.rounds = self.idle = 0
        return bool(self.pool)

    def _search(self, copies: int) -> CircularSearch:
        problem = self.run.best.problem
        return CircularSearch(problem, fused=self.fused, copies=copies, shrinks=True)

    def _starts(self) -> list[tuple[float, Circle]]:
        """Return the best of the building blocks of several memory limits, shrunk to the real."""
        found: list[tuple[float, Circle]] = []
        for factor in _SHRINK_RELAXED:
            for block in candidate_blocks(with_memory(self.search.problem, factor))[
                :_SHRINK_LOOKED_AT
            ]:
                if self.run.is_over():
                    break
                circle = self.search.shrunk(self.search.from_times(block), seed=self.run.stop.seed)
                found.append((self.search.charged_ms(circle), circle))
                self.run.stop.spend(_SHRINK_WORK)
        ranked = sorted(range(len(found)), key=lambda at: (found[at][0], at))
        distinct = {found[at][0]: found[at] for at in reversed(ranked) if found[at][0] < inf}
        return [distinct[ms] for ms in sorted(distinct)[:_STARTS]]

    def _best_blocks(self) -> list[PeriodicBlock]:
        ranked = sorted(range(len(self.pool)), key=lambda at: (self.pool[at][0], at))
        blocks = [self.search.block_of(self.pool[at][1]) for at in ranked]
        return [block for block in blocks if block is not None]

    def _repeated(self, blocks: list[PeriodicBlock], copies: int) -> Iterator[tuple[float, Circle]]:
        for block in blocks:
            circle = self.search.from_block(block.repeated(copies))
            if circle is not None:
                yield self.search.charged_ms(circle), circle

    def _offered(self, circle: Circle) -> bool:
        block = self.search.block_of(circle)
        if block is None:
            return False
        problem, better = self.run.best.problem, False
        for programs in fitted(problem, block):
            self.run.stop.spend(self.fit_work)
            length = simulate(problem, programs).objective_ms(problem.objective)
            if length < self.run.best.objective_ms:
                better |= self.run.best.offer(programs, METHOD)
        return better


def fitted(problem: Problem, block: PeriodicBlock) -> Iterator[Programs]:
    """Yield schedules made of a block: as it is, and its order of F and I made to fit anew.

    Its transfers are those of the steady state. Warm-up and cool-down need fewer: for them
    `fit.fit_memory` decides again, of the order as it is and as it is squeezed.
    """
    programs = unroll(problem, block)
    yield programs
    kept = block.kept()
    orders = [unroll(problem, kept)]
    if kept.is_plain:
        relaxed = _with_room(problem, kept)
        squeezer = Squeezer.in_bytes(relaxed, fused=_is_fused(kept))
        times = kept.squeezable(relaxed)
        made = [squeezer.squeeze(times, policy) for policy in _FIT_POLICIES]
        orders += [each.programs(len(problem.stages)) for each in made if each is not None]
    for order in orders:
        found = fit_memory(problem, order, tries=2)
        if found is not None:
            yield found


def with_memory(problem: Problem, factor: float) -> Problem:
    """Return the problem with so many times the memory on every device."""
    devices = [
        device.model_copy(update={"memory_bytes": min(2**53, int(device.memory_bytes * factor))})
        for device in problem.devices
    ]
    return problem.model_copy(update={"devices": devices})


def _with_room(problem: Problem, kept: PeriodicBlock) -> Problem:
    """Return the problem with the memory that a block takes which keeps everything."""
    devices = [
        device.model_copy(
            update={"memory_bytes": max(device.memory_bytes, peak + device.reserved_bytes)}
        )
        for device, peak in zip(problem.devices, kept.peaks(problem), strict=True)
    ]
    return problem.model_copy(update={"devices": devices})


def _is_fused(block: PeriodicBlock) -> bool:
    return ActionType.BACKWARD_WEIGHT not in block.kinds()


# --- The portfolio's part: periodic blocks, unrolled, squeezed and offered as ``periodic``.
# Where activations can be offloaded or recomputed, circles are searched with these choices in them.
# Then the local search over plain circles from building blocks (any size) looks for the shortest
# period, and the MILP where its size allows. The rest of the time blocks are polished for the
# length of what they are squeezed to, the search with choices goes on, and blocks that need more
# memory are polished and made to fit. Work is counted in moves of the local search.

_FIRST_ROUNDS = 4


def improve_by_periodic(best: Incumbent, stop: Stop) -> None:
    """Offer unrolled blocks to the incumbent, which need not hold a schedule yet.

    Work is counted in moves, a node of branch and bound as `NODE_WORK`; where it ends the search
    before the clock does, what is offered is the same every time for one seed and thread count.
    """
    if load_ms(best.problem) <= 0.0:
        return
    run = PeriodicRun(best, stop)
    shrinking = _shrinking(run)
    _find_periods(run)
    _polish(run, shrinking)


def _shrinking(run: PeriodicRun) -> list[ShrinkRounds]:
    """Search circles with offload and recompute a little: where there is any, it pays soonest."""
    if not run.may_shrink():
        return []
    # More copies per period shorten it now and then, but no schedule that was measured.
    parts = [
        ShrinkRounds(run, fused=fused, fit_work=FIT_WORK, copies=(1,))
        for fused in run.backward_kinds()
    ]
    for _ in range(_FIRST_ROUNDS):
        for part in parts:
            part.next()
    return parts


def _find_periods(run: PeriodicRun) -> None:
    """Look for the shortest period: local search, MILP, local search."""
    kinds = run.backward_kinds()
    rounds = [CircularRounds(run, CircularSearch(run.best.problem, fused=f)) for f in kinds]
    for each in rounds:
        each.first()
    if run.milp_fits():
        run.ask_milp()
    for each in rounds:
        each.to_the_end()


def _polish(run: PeriodicRun, shrinking: list[ShrinkRounds]) -> None:
    """Polish in turn until nothing is left."""
    kinds = run.backward_kinds()
    parts: list[PolishRounds | FitRounds | ShrinkRounds] = [
        PolishRounds(run, fused=fused) for fused in kinds
    ]
    if shrinking:
        parts += [FitRounds(run, fused=fused) for fused in kinds]
        parts += shrinking
    while any([part.next() for part in parts]):  # noqa: C419 - all in turn
        pass


# --- What all parts of the periodic search share: what is left, the MILP, and what is offered.

METHOD = "periodic"
NODE_WORK = 200
"""Moves of the local search that count as much work as one branch-and-bound node."""

_MOST_PAIRS = 480
_MILP_SHARE = 0.25
_CELLS_OF_MANY_POLICIES = 20_000


class PeriodicRun:
    """What is left, and what is offered."""

    def __init__(self, best: Incumbent, stop: Stop) -> None:
        self.best = best
        self.stop = stop
        self.shortest_ms = inf
        self.shortest: PeriodicBlock | None = None
        self.blocks: list[PeriodicBlock] = []
        self._seen: set[float] = set()

    def is_over(self) -> bool:
        """Whether the turn is at its end, or nothing is left to gain."""
        return self.stop.is_over() or self.best.is_optimal

    def backward_kinds(self) -> list[bool]:
        """Return whether to search with fused backwards, with split ones, or with both."""
        items = PeriodicItems(self.best.problem, Modes())
        stages = range(len(self.best.problem.stages))
        may_fuse = [items.may(PeriodChoice.FUSED, s) for s in stages]
        return [False, True] if any(may_fuse) else [False]

    def may_shrink(self) -> bool:
        """Whether anything can be offloaded or recomputed."""
        problem = self.best.problem
        return any(
            problem.can_offload(s) or stage.can_recompute for s, stage in enumerate(problem.stages)
        )

    def milp_fits(self) -> bool:
        """Whether the model is small enough to be worth building."""
        return not self.is_over() and num_order_pairs(self.best.problem) <= _MOST_PAIRS

    def ask_milp(self) -> None:
        """Ask for the shortest period within the limits, then for the shortest way at it."""
        problem = self.best.problem
        serial = sum(
            stage.busy_ms + sum(hop)
            for stage, hop in zip(problem.stages, problem.boundary_ms, strict=True)
        )
        longest = min(self.shortest_ms, max(serial, load_ms(problem)))
        known = self.shortest if self.shortest_ms <= longest else None
        # What is optimal among blocks bounds no schedule: nothing here needs a proof.
        found = shortest_period(
            problem, longest * (1 + 1e-6), self._milp_turn(), start=known, proves=False
        )
        if found.block is None:
            return
        self._take(found.block)
        if not self.is_over():
            period = found.block.period_ms * (1 + 1e-6)
            nearer = shortest_way(
                problem, period, self._milp_turn(), start=found.block, proves=False
            )
            if nearer.block is not None:
                self._take(nearer.block)

    def offer_squeezed(self, made: Squeezed) -> bool:
        """Offer a squeezed block where it is shorter than what is known."""
        problem = self.best.problem
        length = made.span_ms if problem.objective == "span" else made.makespan_ms
        if length in self._seen or length >= self.best.objective_ms * (1 + 1e-9):
            return False
        self._seen.add(length)
        return self.best.offer(made.programs(len(problem.stages)), METHOD)

    def offer(self, block: PeriodicBlock) -> bool:
        """Offer a block squeezed, or by its own order; return whether it is better."""
        problem = self.best.problem
        large = len(problem.stages) * problem.num_microbatches > _CELLS_OF_MANY_POLICIES
        made = squeezed(problem, block, POLICIES[:2] if large else POLICIES)
        if not made:
            return self.best.offer(unroll(problem, block), METHOD)
        return self.offer_squeezed(made[0])

    def note(self, block: PeriodicBlock, period_ms: float) -> None:
        """Remember a block of one micro-batch within the limits if its period is the shortest."""
        if period_ms < self.shortest_ms:
            self.shortest, self.shortest_ms = block, period_ms

    def _take(self, block: PeriodicBlock) -> None:
        self.note(block, block.period_ms)
        self.offer(block)
        self.blocks.append(block)

    def _milp_turn(self) -> Stop:
        return self.stop.turn(_MILP_SHARE, steps=1 / NODE_WORK)


# --- Blocks improved by what they are for: the length of their squeezed schedule.
# Annealing (Kirkpatrick et al. 1983) on the waits of one micro-batch along its chain and on the
# period; the squeeze decodes them. So warm-up and cool-down count as they are, and memory limits
# are kept whatever is tried. Large problems are evaluated by fewer micro-batches: the block does
# not change.

_POLICIES = (
    SqueezePolicy(Early.BEFORE_WEIGHT, 1.0),
    SqueezePolicy(Early.AFTER_WEIGHT, 1.0),
    SqueezePolicy(Early.AFTER_WEIGHT, 0.5),
    SqueezePolicy(Early.BEFORE_WEIGHT, 0.0),
    SqueezePolicy(Early.NEVER, 1.0),
)
_FEWEST = 24
_POLISH_HOT, _POLISH_COLD = 2e-3, 1e-4


class Polisher:
    """Anneals one block.

    Parameters
    ----------
    problem
        Its limits are kept.
    fused
        Whether B stands for I and W.
    block
        Where it starts.
    seed
        What is tried is a function of it.
    """

    def __init__(self, problem: Problem, block: BuildingBlock, *, fused: bool, seed: int) -> None:
        self.problem = problem
        self.num_stages = len(problem.stages)
        self.by_span = problem.objective == "span"
        self.squeezer = Squeezer.in_bytes(problem, fused=fused)
        self.few = min(problem.num_microbatches, max(_FEWEST, 3 * len(problem.devices)))
        self.draw = np.random.default_rng(seed)
        self.waits = np.diff(_times(block), prepend=0.0)
        self.period = block.period
        self.policy = 0
        self.length_ms = self._evaluate(self.waits, self.period, self.policy)
        self.best_ms = self.length_ms
        self.best = (self.waits, self.period, self.policy)

    def run(self, num_moves: int) -> bool:
        """Make moves, cooling down once; return whether the best got better."""
        before = self.best_ms
        cooling = (_POLISH_COLD / _POLISH_HOT) ** (1 / max(1, num_moves))
        temperature = _POLISH_HOT * min(self.length_ms, 1e300)
        for _ in range(num_moves):
            temperature *= cooling
            waits, period, policy = self._neighbour()
            length = self._evaluate(waits, period, policy)
            worse = length - self.length_ms
            if worse <= 0 or self.draw.random() < exp(-worse / max(temperature, 1e-300)):
                self.waits, self.period, self.policy = waits, period, policy
                self.length_ms = length
                if length < self.best_ms * (1 - 1e-12):
                    self.best_ms, self.best = length, (waits, period, policy)
        return self.best_ms < before

    def result(self) -> Squeezed | None:
        """Return the best block squeezed for all micro-batches; None where none fitted."""
        waits, period, policy = self.best
        return self.squeezer.squeeze(self._block(waits, period), _POLICIES[policy])

    def current(self) -> Squeezed | None:
        """Return the block where the search stands, squeezed for all micro-batches."""
        return self.squeezer.squeeze(self._block(self.waits, self.period), _POLICIES[self.policy])

    def _neighbour(self) -> tuple[NDArray[np.float64], float, int]:
        """Return the waits, the period and the policy with one of them changed."""
        waits, period, policy = self.waits.copy(), self.period, self.policy
        kind = self.draw.random()
        if kind < 0.05:
            return waits, period, int(self.draw.integers(len(_POLICIES)))
        if kind < 0.15:
            return waits, period * float(np.exp(self.draw.normal(0.0, 0.03))), policy
        first = int(self.draw.integers(waits.size))
        length = 1 if kind < 0.6 else int(self.draw.integers(2, 3 + waits.size // 4))
        step = self.draw.normal(0.0, 0.25) * self.period / 2
        changed = slice(first, first + length)
        if kind < 0.4 and first + 1 < waits.size:
            # One pass earlier or later, all others in place.
            step = float(np.clip(step, -waits[first], waits[first + 1]))
            waits[first] += step
            waits[first + 1] -= step
            return waits, period, policy
        waits[changed] = np.maximum(waits[changed] + step / length, 0.0)
        return waits, period, policy

    def _evaluate(self, waits: NDArray[np.float64], period: float, policy: int) -> float:
        made = self.squeezer.squeeze(self._block(waits, period), _POLICIES[policy], self.few)
        if made is None:
            return float("inf")
        return made.span_ms if self.by_span else made.makespan_ms

    def _block(self, waits: NDArray[np.float64], period: float) -> BuildingBlock:
        times = np.cumsum(waits)
        return BuildingBlock(times[: self.num_stages], times[self.num_stages :][::-1], period)


def _times(block: BuildingBlock) -> NDArray[np.float64]:
    """Return the starts along the chain: forwards in model order, then backwards in reverse."""
    chain = np.concatenate([block.forward, block.backward[::-1]])
    return np.asarray(chain - block.forward[0], dtype=np.float64)
