"""A start after AdaOffload: as many forwards ahead as without limits, offloaded where they must.

OptPipe, arXiv 2510.05186, its section on the initial schedule: the MILP there starts from one
that offloads adaptively, only as much as the limit needs, and is tight otherwise.

Rule: take tight schedules that ignore memory - ZB-H1 and 1F1B on a line, `gis` and `gis_h` on a
loop, list scheduling (`list_scheduler`) with 1F1B's depth on any placement - and make each fit with
`fit_memory`. The best simulated one wins; large problems try only the first two. Memory: at
most the limit. Bubble: that of the schedule taken, plus stalls where copies cannot be hidden.
It ignores that another order of F and I could need fewer copies, and so gives up where the parts
that cannot move of all micro-batches ahead exceed the limit.
"""

from __future__ import annotations

from itertools import islice
from math import inf
from operator import attrgetter
from typing import TYPE_CHECKING

from optpipe_solver.families.classic import build_one_f_one_b
from optpipe_solver.families.common import NotApplicable, NotApplicableReason
from optpipe_solver.families.list_scheduling import ListPolicy, list_schedule
from optpipe_solver.families.pipeoffload import grouped_interleaved, smallest_group
from optpipe_solver.families.zero_bubble import build_zb_h1
from optpipe_solver.offload_fit.fit import THOROUGH, Frame, fit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from optpipe.problem import Problem
    from optpipe.schedule import Programs
    from optpipe_solver.arrays.encoding import Rows

__all__ = ["build_ada_offload"]

_LARGE = 60_000
_FEW = 2
_UNLIMITED = 2**60


def build_ada_offload(problem: Problem) -> Programs:
    """Return the best tight schedule that offload, or recompute, makes fit.

    Raises
    ------
    NotApplicable
        If none of them can be made to fit.
    """
    size = 3 * len(problem.stages) * problem.num_microbatches
    bases = _bases(problem)
    fitted = (
        fit(Frame(problem, base), THOROUGH)
        for base in (islice(bases, _FEW) if size > _LARGE else bases)
    )
    best = min(
        (made for made in fitted if made is not None),
        key=attrgetter("objective_ms"),
        default=None,
    )
    if best is None:
        raise NotApplicable(
            NotApplicableReason.DOES_NOT_FIT,
            "what offload and recompute leave of the micro-batches in flight exceeds the memory "
            "limits",
        )
    return best.programs()


def _bases(problem: Problem) -> Iterator[Programs | Rows]:
    builders: tuple[Callable[[Problem], Programs], ...] = (
        build_zb_h1,
        build_one_f_one_b,
        lambda given: grouped_interleaved(given, smallest_group(given)),
        lambda given: grouped_interleaved(given, len(set(given.placement))),
    )
    for build in builders:
        try:
            yield build(problem)
        except NotApplicable:
            continue
    limits = (_UNLIMITED,) * len(problem.devices)
    for in_flight, patience in ((1.0, 0.0), (1.0, 1.0), (1.5, 1.0), (inf, 1.0)):
        programs = list_schedule(problem, ListPolicy(limits, patience, in_flight=in_flight))
        if programs is not None:
            yield programs
