"""Pairs of a forward and a backward that run together: how much time their overlap saves.

F of a layer with experts has four phases: attention, dispatch, experts, combine. B (or I) has them
in reverse. Dispatch and combine exchange tokens on one lane. All other work computes on the other
lane: collectives of other groups, launches, layers without experts, MTP, embedding and head.

Each pass goes through its phases in order, and no phase is interrupted. `together_ms` is the
minimum time of two passes over all interleavings. It is an exact solution of a job shop with two
jobs (Akers 1956, "A graphical approach to production scheduling problems", Operations Research 4).
A pair saves at most the time of its exchanges. The model ignores that two passes slow each other.
"""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache
from itertools import accumulate, chain
from math import floor
from typing import TYPE_CHECKING

from optpipe.errors import FieldError, FieldRef
from optpipe.planning.layer_profile import LanePhase, PassPhases, profile_layers
from optpipe.problem import LicensedPair

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from optpipe.measurements import Sample
    from optpipe.model import Model
    from optpipe.planning.machine import Machine
    from optpipe.planning.shape import ModelShape
    from optpipe.problem import Problem

__all__ = [
    "check_can_hide",
    "licensed_pairs",
    "measured_pairs",
    "model_phases",
    "most_hidden",
    "together_ms",
    "with_hidden",
    "with_pairs",
]

_DIGITS, _SAME_MS = 5, 1e-9


def check_can_hide(shape: ModelShape, machines: Iterable[Machine]) -> None:
    """Refuse what has nothing to hide.

    Raises
    ------
    FieldError
        Where no token travels to experts, or the run hides that already.
    """
    training = next(iter(machines)).training
    if shape.experts is None:
        raise FieldError(
            FieldRef("pairs"),
            f": model {shape.name!r} has no experts, so that no exchange of tokens can hide behind "
            "computation; leave it out, or take a model with experts",
        )
    if training.ep * training.etp == 1:
        raise FieldError(
            *(FieldRef("pairs"), " with ", FieldRef("ep", 1)),
            ": every device has all experts and exchanges nothing that could hide; raise ",
            FieldRef("ep"),
        )
    if training.ep_overlap:
        raise FieldError(
            *(FieldRef("pairs"), " and ", FieldRef("ep_overlap")),
            ": each hides the exchange with experts, one by the schedule's choice and one by the "
            "framework's; give one of them",
        )


@lru_cache(maxsize=4096)
def together_ms(first: tuple[LanePhase, ...], second: tuple[LanePhase, ...]) -> float:
    """Return the minimum ms of two passes that run together, each on one lane at a time.

    In Akers' plane a point is the progress of both passes, and a diagonal step advances both. A
    rectangle in which both need the same lane is an obstacle, which is passed left or right.
    """
    first = tuple(phase for phase in first if phase.ms > 0)
    second = tuple(phase for phase in second if phase.ms > 0)
    across = [0.0, *accumulate(phase.ms for phase in first)]
    up = [0.0, *accumulate(phase.ms for phase in second)]
    # From each corner (i, j), i phases of the one and j of the other done, to the end.
    least = [[0.0] * len(up) for _ in across]
    for i in reversed(range(len(across))):
        for j in reversed(range(len(up))):
            # The first phases that need the same lane at the same time, if both passes go on.
            a, b = i, j
            while a < len(first) and b < len(second) and first[a].exchanges != second[b].exchanges:
                ahead = (across[a + 1] - across[i]) - (up[b + 1] - up[j])
                a += ahead <= _SAME_MS
                b += ahead >= -_SAME_MS
            if a == len(first) or b == len(second):
                least[i][j] = max(across[-1] - across[i], up[-1] - up[j])
                continue
            by_second = max(across[a] - across[i], up[b + 1] - up[j]) + least[a][b + 1]
            by_first = max(across[a + 1] - across[i], up[b] - up[j]) + least[a + 1][b]
            least[i][j] = min(by_second, by_first)
    return least[0][0]


# --- Pairs of a problem, and the time that each saves.


def licensed_pairs(
    shape: ModelShape, machines: Sequence[Machine], problem: Problem, sizes: Sequence[int]
) -> tuple[LicensedPair, ...]:
    """Return the pairs of F with B and with I on each device, and the ms that each hides.

    Pairs that hide nothing are left out. ``sizes`` are the layers of each stage.
    """
    stages = []
    for stage, (size, end) in enumerate(zip(sizes, accumulate(sizes), strict=True)):
        machine = machines[problem.placement[stage]]
        layers = model_phases(shape, machine, len(machines))[end - size : end]
        stages.append(
            PassPhases(
                tuple(phase for layer in layers for phase in layer.forward),
                tuple(phase for layer in reversed(layers) for phase in layer.backward_input),
                tuple(phase for layer in reversed(layers) for phase in layer.backward),
                sum(layer.forward_launch_ms for layer in layers),
                sum(layer.backward_launch_ms for layer in layers),
            )
        )
    return _pairs_among(problem, stages)


def measured_pairs(problem: Problem, samples: Iterable[Sample]) -> tuple[LicensedPair, ...]:
    """Return the pairs on each device by measured phases, and the ms that each hides.

    The phases of a pass (`Sample.lanes_ms`) are those of its run of median time. A pass without an
    exchange computes all the time. A pass that was not measured is in no pair.
    """
    runs: dict[tuple[int, str], list[Sample]] = defaultdict(list)
    for sample in samples:
        runs[sample.stage, sample.action].append(sample)

    def phases(stage: int, action: str) -> tuple[LanePhase, ...]:
        own = sorted(runs[stage, action], key=lambda one: one.time_ms)
        if not own:
            return ()
        median = own[(len(own) - 1) // 2]
        lanes = median.lanes_ms or (median.time_ms,)
        return tuple(LanePhase(ms, bool(at % 2)) for at, ms in enumerate(lanes))

    return _pairs_among(
        problem,
        [
            PassPhases(phases(s, "F"), phases(s, "I"), phases(s, "B"))
            for s in range(len(problem.stages))
        ],
    )


def _pairs_among(problem: Problem, stages: Sequence[PassPhases]) -> tuple[LicensedPair, ...]:
    pairs = []
    for owned in problem.stages_of:
        for a in owned:
            for b in owned:
                stage = problem.stages[b]
                passes = {"B": stage.fused_backward_ms, "I": stage.backward_input_ms}
                for letter, back_ms in passes.items():
                    most_ms = min(problem.stages[a].forward_ms, back_ms)
                    hidden = _hidden_ms(stages[a], stages[b], letter, most_ms)
                    if hidden > 0:
                        pairs.append(
                            LicensedPair(forward=a, backward=b, with_=letter, hidden_ms=hidden)
                        )
    return tuple(pairs)


def most_hidden(layers: Sequence[PassPhases]) -> list[tuple[float, float]]:
    """Return the maximum ms that each layer's F, and B, overlap with the other pass of a pair.

    While one pass computes, the other can only exchange, and only once: a pass computes between two
    exchanges, and no phase is interrupted. So a computing phase overlaps with at most the longest
    exchange of the other pass. An exchanging phase overlaps with at most all of itself. A pair
    hides at most the sum over the layers of its F, and the sum over the layers of its B.
    """
    longest_forward = _longest_exchange(phase for one in layers for phase in one.forward)
    longest_back = _longest_exchange(phase for one in reversed(layers) for phase in one.backward)
    each = {
        one: (_overlap_ms(one.forward, longest_back), _overlap_ms(one.backward, longest_forward))
        for one in dict.fromkeys(layers)
    }
    return [each[one] for one in layers]


def _longest_exchange(phases: Iterable[LanePhase]) -> float:
    """Return the longest stretch without computation."""
    longest = run = 0.0
    for ms, exchanges in phases:
        if exchanges:
            run += ms
            longest = max(longest, run)
        elif ms > 0:
            run = 0.0
    return longest


def _overlap_ms(phases: tuple[LanePhase, ...], longest: float) -> float:
    return sum(phase.ms if phase.exchanges else min(phase.ms, longest) for phase in phases)


def with_pairs(
    shape: ModelShape, machines: Sequence[Machine], problem: Problem, sizes: Sequence[int]
) -> Problem:
    """Return the problem with its `licensed_pairs`."""
    listed = licensed_pairs(shape, machines, problem, sizes)
    return problem.model_copy(update={"format": "optpipe/problem/v2", "pairs": listed})


def with_hidden(shape: ModelShape, machines: Sequence[Machine], model: Model) -> Model:
    """Return the model with the ms that each layer hides in a pair with an equal layer.

    A stage's F, layer by layer next to the B of as many equal layers, hides at least their sum.
    `licensed_pairs` may find more.
    """
    phases = model_phases(shape, machines[0], len(machines))
    layers, at = [], 0
    for layer in model.layers:
        one, stage = phases[at], model.stages_on[0][at]
        at += layer.repeat
        most = min(stage.forward_ms, stage.fused_backward_ms)
        hidden = _hidden_ms(one, one, "B", most)
        layers.append(layer.model_copy(update={"hidden_ms": hidden}))
    return model.with_layers(layers)


def _hidden_ms(one: PassPhases, other: PassPhases, letter: str, most_ms: float) -> float:
    """Return the ms that F of the first and B (or I) of the second hide, rounded down.

    A pair is not shorter than the launches of both passes, which one thread of the host makes.
    ``most_ms`` is the shorter of the two passes.
    """
    first, second = one.forward, other.backward if letter == "B" else other.backward_input
    back = sum(phase.ms for phase in second)
    alone = sum(phase.ms for phase in first) + back
    launches = one.forward_launch_ms + other.backward_launch_ms
    if letter == "I" and back:
        share = min(1.0, back / sum(phase.ms for phase in other.backward))
        launches = one.forward_launch_ms + share * other.backward_launch_ms
    shortest = max(together_ms(first, second), launches)
    hidden = floor((alone - shortest) * 10**_DIGITS) / 10**_DIGITS
    return float(max(0.0, min(hidden, most_ms)))


@lru_cache(maxsize=64)
def model_phases(shape: ModelShape, machine: Machine, pp: int) -> tuple[PassPhases, ...]:
    """Return the phases of every layer in model order, embedding and head included."""
    profiles = profile_layers(shape, machine, pp=pp)
    return tuple(chain.from_iterable([one.phases] * one.repeat for one in profiles))
