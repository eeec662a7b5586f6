"""The model that every bound uses and each legal schedule satisfies (docs/bounds.md).

Each micro-batch has three pieces of work per stage, in this order. F is first, then the *gradient
piece* I of min(I, B) ms, then the *weight piece* W of the rest. The three add up to the minimum
compute time. Whatever its mode, the micro-batch holds at least ``keep`` bytes from the start of F
to the end of I, less ``moved`` while offloaded. Then it holds ``context`` to the end of W.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optpipe_solver.feasibility import possible_modes, refuse_unless

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from optpipe.problem import CellMode, Problem
    from optpipe_solver.arrays import Floats, Ints

__all__ = ["Paths", "Relaxed", "hidden_in_pairs", "relaxed"]


class Relaxed(NamedTuple):
    """The model in arrays, one entry per stage unless said otherwise; ms and bytes.

    ``forward``, ``gradient``, ``weight`` are the pieces. ``there[s]`` and ``back[s]`` are the
    boundary transfers between s and s + 1. ``sync`` is the gradient reduction. With pairs, F is
    shorter by the maximum that it can hide, and ``there[s]`` is longer by it (`hidden_in_pairs`).
    On the last stage ``there[s]`` is the minimum from F to I. The module defines ``keep``,
    ``context`` and ``moved``. ``out`` and ``home`` are the ms of one transfer, ``most_away`` how
    many micro-batches the host can take. If transfers of several sizes save bytes, ``out`` and
    ``home`` are for ``moved`` bytes at the best rate. The first transfer then counts as done
    immediately: ``lag`` is 0, else 1. ``room_*`` are the device's bytes for activations, less the
    workspace of the pass. ``first`` and ``last`` are the first and last stage of s's device in
    model order. ``forward_to`` sums the forwards of the device's stages up to s, ``gradient_from``
    the gradient pieces from s on, and so on. ``backward_to`` sums the gradient and weight pieces up
    to s.
    """

    num_microbatches: int
    device: Ints
    forward: Floats
    gradient: Floats
    weight: Floats
    there: Floats
    back: Floats
    sync: Floats
    keep: Floats
    context: Floats
    moved: Floats
    out: Floats
    home: Floats
    most_away: Ints
    lag: Floats
    room_forward: Floats
    room_gradient: Floats
    room_weight: Floats
    first: Ints
    last: Ints
    forward_to: Floats
    forward_from: Floats
    gradient_to: Floats
    gradient_from: Floats
    backward_to: Floats


def relaxed(problem: Problem) -> Relaxed:
    """Return the model of a problem; `InputError` unless its micro-batches are equal."""
    refuse_unless(problem.is_even, "relaxed", problem, "equal micro-batches in a free order")
    stages = problem.stages
    indices = range(len(stages))
    hidden = hidden_in_pairs(problem)
    gradient = [min(stage.backward_input_ms, stage.fused_backward_ms) for stage in stages]
    weight = [
        max(0.0, stage.busy_ms - stage.forward_ms - piece)
        for stage, piece in zip(stages, gradient, strict=True)
    ]
    forward = [s.forward_ms - ms for s, ms in zip(stages, hidden, strict=True)]
    menus = _menus(problem)
    keep = [min(mode.forward_bytes for mode in menu) for menu in menus]
    away = [_away(problem, s, menus[s], keep[s]) for s in indices]
    room = [problem.room_bytes(stage.device) for stage in stages]
    backward = [g + w for g, w in zip(gradient, weight, strict=True)]
    return Relaxed(
        num_microbatches=problem.num_microbatches,
        device=np.array(problem.placement, dtype=np.int64),
        forward=_floats(forward),
        gradient=_floats(gradient),
        weight=_floats(weight),
        there=_floats(
            there + ms for (there, _), ms in zip(problem.boundary_ms, hidden, strict=True)
        ),
        back=_floats(back for _, back in problem.boundary_ms),
        sync=_floats(stage.grad_sync_ms for stage in stages),
        keep=_floats(keep),
        context=_floats(
            min(least, *(mode.weight_context_bytes for mode in menu))
            for menu, least in zip(menus, keep, strict=True)
        ),
        moved=_floats(one.moved for one in away),
        out=_floats(one.out for one in away),
        home=_floats(one.home for one in away),
        most_away=np.array([one.most for one in away], dtype=np.int64),
        lag=_floats(one.lag for one in away),
        room_forward=_floats(
            r - min(mode.forward_workspace_bytes for mode in menu)
            for r, menu in zip(room, menus, strict=True)
        ),
        room_gradient=_floats(
            r - min(map(_gradient_workspace, menu)) for r, menu in zip(room, menus, strict=True)
        ),
        room_weight=_floats(
            r - min(map(_weight_workspace, menu)) for r, menu in zip(room, menus, strict=True)
        ),
        first=np.array([problem.stages_of[stage.device][0] for stage in stages], dtype=np.int64),
        last=np.array([problem.stages_of[stage.device][-1] for stage in stages], dtype=np.int64),
        forward_to=_upto(problem, forward),
        forward_from=_from(problem, forward),
        gradient_to=_upto(problem, gradient),
        gradient_from=_from(problem, gradient),
        backward_to=_upto(problem, backward),
    )


def hidden_in_pairs(problem: Problem) -> list[float]:
    """Return the maximum ms that an F of each stage can hide in a pair, 0 where it has none.

    Take that off every F, let its output arrive as much later, and allow no pairs. Any schedule
    becomes a schedule of that problem, no longer and with the same memory. Replace a pair of ``F +
    B - x`` ms by an F of ``F - h`` ms, h >= x, at the start of the pair. Its B follows and ends by
    the end of the pair. The output of F arrives at least ``F`` ms after the start: a pair is no
    shorter than either of its passes. So no path gets shorter, and both activations are held all
    along the pair.
    """
    most = [0.0] * len(problem.stages)
    for pair in problem.pairs:
        most[pair.forward] = max(most[pair.forward], pair.hidden_ms)
    return most


def _floats(values: Iterable[float]) -> Floats:
    return np.array([float(value) for value in values], dtype=np.float64)


def _menus(problem: Problem) -> list[list[CellMode]]:
    return [
        [menu[number] for number in numbers]
        for menu, numbers in zip(problem.menus, possible_modes(problem), strict=True)
    ]


def _gradient_workspace(mode: CellMode) -> int:
    least = min(mode.backward_input_workspace_bytes, mode.backward_workspace_bytes)
    return least + mode.inside_bytes


def _weight_workspace(mode: CellMode) -> int:
    return min(mode.backward_weight_workspace_bytes, mode.backward_workspace_bytes)


class _Away(NamedTuple):
    """The savings by transfers of a stage: ``moved``, ``out``, ``home``, ``most_away``, ``lag``."""

    moved: int = 0
    out: float = 0.0
    home: float = 0.0
    most: int = 0
    lag: float = 1.0


def _away(problem: Problem, s: int, menu: Sequence[CellMode], keep: int) -> _Away:
    """Return what a cell of a stage can hold less than ``keep`` while it is on the host."""
    # Offloaded bytes to those that a cell then holds less.
    saved: dict[int, int] = {}
    for mode in menu:
        less = keep - mode.least_bytes
        if mode.offload_bytes and less > saved.get(mode.offload_bytes, 0):
            saved[mode.offload_bytes] = less
    if not saved:
        return _Away()
    most = max(saved.values())
    away = _most_away(problem, s, min(saved))
    # Bytes moved for ``most`` saved ones, at the best rate.
    size = min(moved * most / less for moved, less in saved.items())
    (rate_out, rate_home) = problem.offload_ms(s, 1), problem.reload_ms(s, 1)
    if len(saved) == 1:
        (moved,) = saved
        return _Away(most, problem.offload_ms(s, moved), problem.reload_ms(s, moved), away)
    return _Away(most, size * rate_out, size * rate_home, away, lag=0.0)


def _most_away(problem: Problem, s: int, moved: int) -> int:
    """Return how many micro-batches of a stage its host can hold if no other stage uses it."""
    names = {host.name: host.memory_bytes for host in problem.hosts}
    room = names[problem.devices[problem.stages[s].device].host]
    most = problem.num_microbatches
    return most if room is None else min(most, room // moved)


def _upto(problem: Problem, values: list[float]) -> Floats:
    """Sum over the stages of the same device up to and with each stage."""
    sums = np.zeros(len(values))
    for stages in problem.stages_of:
        sums[list(stages)] = np.cumsum([values[s] for s in stages])
    return sums


def _from(problem: Problem, values: list[float]) -> Floats:
    """Sum over the stages of the same device from each stage on."""
    sums = np.zeros(len(values))
    for stages in problem.stages_of:
        sums[list(stages)] = np.cumsum([values[s] for s in reversed(stages)])[::-1]
    return sums


# --- The least times before, between and after the passes of every stage: one micro-batch alone.


class Paths:
    """Least times before, between and after the passes of every stage, in ms.

    Raises
    ------
    InputError
        Unless all micro-batches are equal, in a free order.
    """

    def __init__(self, problem: Problem) -> None:
        refuse_unless(problem.is_even, "Paths", problem, "equal micro-batches in a free order")
        self.problem = problem

    @cached_property
    def menus(self) -> list[list[CellMode]]:
        """Per stage the modes in which memory lets any of its cells be, in the menu's order."""
        return _menus(self.problem)

    @cached_property
    def hidden(self) -> list[float]:
        """Per stage the most ms that its F can hide in a pair."""
        return hidden_in_pairs(self.problem)

    @cached_property
    def busy(self) -> list[float]:
        """Per stage the minimum compute time of a micro-batch, without the time that can hide."""
        stages = self.problem.stages
        return [stage.busy_ms - ms for stage, ms in zip(stages, self.hidden, strict=True)]

    @cached_property
    def head_f(self) -> list[float]:
        """Earliest start of F(s, .): the way from stage 0."""
        heads = [0.0]
        for stage, (there, _) in zip(
            self.problem.stages[:-1], self.problem.boundary_ms, strict=False
        ):
            heads.append(heads[-1] + stage.forward_ms + there)
        return heads

    @cached_property
    def between(self) -> list[float]:
        """Least time from the end of F(s, j) to the start of its backward."""
        stages = self.problem.stages
        gaps = [0.0] * len(stages)
        for s in reversed(range(len(stages) - 1)):
            there, back = self.problem.boundary_ms[s]
            gaps[s] = there + stages[s + 1].forward_ms + gaps[s + 1] + self.backward[s + 1] + back
        return gaps

    @cached_property
    def backward(self) -> list[float]:
        """Least time of the pass that makes the input gradient: I, or B where that is shorter."""
        return [
            min(stage.backward_input_ms, stage.fused_backward_ms) for stage in self.problem.stages
        ]

    @cached_property
    def tail(self) -> list[float]:
        """Least time after the end of the I of s: on to stage 0, whose W or B comes last."""
        tails = [0.0]
        for s, stage in enumerate(self.problem.stages[:-1]):
            back = self.problem.boundary_ms[s][1]
            split = stage.backward_input_ms + max(tails[s], self.after_i(s))
            fused = stage.fused_backward_ms + max(tails[s], stage.grad_sync_ms)
            tails.append(back + min(split, fused))
        return tails

    def after_i(self, s: int) -> float:
        """Least time after the end of I(s) on its own device: W and the gradient reduction."""
        stage = self.problem.stages[s]
        return stage.backward_weight_ms + stage.grad_sync_ms
