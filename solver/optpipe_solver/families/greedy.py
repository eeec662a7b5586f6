"""The Zero Bubble greedy under any memory limit, with offload where nothing else fits.

After Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 3.1.

Rule: list scheduling (`list_scheduler`) over a small grid of policies - how eagerly weight
gradients fill idle time, how many micro-batches a stage keeps in flight, fused or split backward -
each first under the memory limit itself, then under larger, virtual limits whose excess
`fit_memory` offloads or recomputes. The best simulated schedule wins. Memory: at most the
limit. Bubble: no formula, what the simulation says of the best. What it ignores: it never looks
ahead, and micro-batches go first in, first out.
"""

from __future__ import annotations

from itertools import islice
from math import inf
from operator import attrgetter
from typing import TYPE_CHECKING

from optpipe_solver.families.list_scheduler import Policy, list_schedule
from optpipe_solver.families.not_applicable import NotApplicable, Reason
from optpipe_solver.fit.fit import fit
from optpipe_solver.fit.jobs import Frame

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optpipe.action import Programs
    from optpipe.problem import Problem
    from optpipe_solver.fit.fit import Fit

__all__ = ["build_greedy", "greedy_candidates"]

_VIRTUAL = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0, inf)
_WORK = 800_000
_FEWEST = 4
_MAX_POLICIES = 60
_FIT_TRIES = 2


def build_greedy(problem: Problem) -> Programs:
    """Return the best of the greedy's schedules within the memory limits.

    Raises
    ------
    NotApplicable
        If none of them fits.
    """
    best = min(greedy_candidates(problem), key=attrgetter("objective_ms"), default=None)
    if best is None:
        raise NotApplicable(
            Reason.DOES_NOT_FIT, "no policy of the greedy finds a schedule within the memory limits"
        )
    return best.programs()


def greedy_candidates(problem: Problem) -> Iterator[Fit]:
    """Yield schedules within the limits, one per policy that works; large problems try fewer.

    A policy that gets stuck does not count as tried.
    """
    scheduled = (list_schedule(problem, policy) for policy in _policies(problem))
    tried = max(_FEWEST, min(_MAX_POLICIES, _WORK // _num_actions(problem)))
    for rows in islice(filter(None, scheduled), tried):
        fitted = fit(Frame(problem, rows), _FIT_TRIES)
        if fitted is not None:
            yield fitted


def _num_actions(problem: Problem) -> int:
    return 3 * len(problem.stages) * problem.num_microbatches


def _policies(problem: Problem) -> Iterator[Policy]:
    room = [
        device.usable_bytes - problem.static_bytes_of(index)
        for index, device in enumerate(problem.devices)
    ]
    may_shrink = any(
        problem.can_offload(s) or stage.can_recompute for s, stage in enumerate(problem.stages)
    )
    fused = (False, True) if _fusing_pays(problem) else (False,)
    for in_flight in (inf, 1.0, 2.0, 1.5):
        for factor in _VIRTUAL if may_shrink else (1.0,):
            limits = tuple(2**60 if factor == inf else int(factor * size) for size in room)
            for fuse in fused:
                for patience in (1.0,) if fuse else (1.0, 0.0, 0.5):
                    yield Policy(limits, patience, fuse, in_flight)


def _fusing_pays(problem: Problem) -> bool:
    return any(
        stage.fused_backward_ms < stage.backward_input_ms + stage.backward_weight_ms
        or stage.weight_context_bytes > stage.activation_bytes
        for stage in problem.stages
    )
