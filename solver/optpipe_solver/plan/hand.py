"""What people write by hand: an even cut, or one layer less at both ends, and one mode for all.

The schedules are those that frameworks have: 1F1B on a line, interleaved 1F1B on a loop. Embedding
and head, a single layer at either end that differs from its neighbour, go with the first and the
last stage and count as no layer. A mode is one of the model's menu, the same for every stage.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from optpipe_solver.arrays.encoding import CompiledProblem
from optpipe_solver.families import FAMILIES, NotApplicable
from optpipe_solver.menus import in_modes
from optpipe_solver.milp.plan import layer_kinds
from optpipe_solver.plan.cuts import even_cut

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from optpipe.model import Model
    from optpipe.problem import Problem
    from optpipe.schedule import Programs
    from optpipe_solver.arrays.encoding import Rows

__all__ = ["HandPlan", "hand_cuts", "hand_plans"]

_FAMILIES = tuple(family for family in FAMILIES if family.name in ("1f1b", "interleaved"))


class HandPlan(NamedTuple):
    """A plan by rule: how the model is cut, the mode of every stage, and the schedule.

    ``rows`` and ``objective_ms`` are None where it does not fit.
    """

    cut: str
    mode: str
    family: str
    sizes: tuple[int, ...]
    compiled: CompiledProblem
    rows: Rows | None
    objective_ms: float | None

    def programs(self) -> Programs | None:
        """Return the programs, if it fits."""
        return None if self.rows is None else self.compiled.decode(self.rows)


def hand_cuts(model: Model, num_stages: int) -> dict[tuple[int, ...], str]:
    """Return the cuts and what they are called; those that leave a stage without a layer are out.

    Where layers do not come out even, the stages behind the first have the rest.
    """
    kinds = layer_kinds(model)
    alone = [len(kinds) > 1 and kinds[at].length == 1 for at in (0, -1)]
    body = model.num_layers - sum(alone)
    found: dict[tuple[int, ...], str] = {}
    for less, name in ((0, "even"), (1, "one layer less at both ends")):
        first, *others = even_cut(body + 2 * less, num_stages)
        if others and first > others[-1]:
            others[others.index(others[-1])] += 1
            first -= 1
        sizes = [first, *others]
        for end, is_alone in zip((0, -1), alone, strict=True):
            sizes[end] += is_alone - less
        if min(sizes) > 0:
            cut = tuple(sizes)
            found[cut] = f"{found[cut]}, {name}" if cut in found else name
    return found


def hand_plans(model: Model, placement: Sequence[int]) -> Iterator[HandPlan]:
    """Yield every plan by rule for a placement, whether it fits or not.

    Transfers take the places that memory leaves them. There are no plans for a placement that
    neither 1F1B nor interleaved 1F1B runs.
    """
    for sizes, cut in hand_cuts(model, len(placement)).items():
        problem = model.problem(placement, sizes)
        compiled = CompiledProblem.of(problem)
        for family in _FAMILIES:
            try:
                rows = compiled.encode(family.build(problem))
            except NotApplicable:
                continue
            for mode, numbers in _modes_for_all(problem).items():
                fitted = in_modes(compiled, rows, numbers)
                length_ms = None if fitted is None else compiled.objective_ms(fitted)
                yield HandPlan(cut, mode, family.name, sizes, compiled, fitted, length_ms)


def _modes_for_all(problem: Problem) -> dict[str, list[int]]:
    """Return the modes that every stage can use, by their numbers; what has no menu keeps."""
    menus = [[mode.name for mode in menu] for menu in problem.menus]
    longest = max(menus, key=len)
    found = {}
    for name in longest:
        if all(name in menu or len(menu) == 1 for menu in menus):
            numbers = [menu.index(name) if name in menu else 0 for menu in menus]
            if all(problem.can_use(s, number) for s, number in enumerate(numbers)):
                found[name] = numbers
    return found
