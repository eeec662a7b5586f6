"""An earlier plan as the start of a search: which cut of the model its problem is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe.errors import ModelError
from optpipe.fuse import fuse

if TYPE_CHECKING:
    from optpipe.model import Model
    from optpipe.problem import Problem, Stage

__all__ = ["cut_of"]


def cut_of(model: Model, problem: Problem) -> tuple[int, ...] | None:
    """Return the layers of each stage; None where the problem is no cut of the model.

    Where a layer has neither time nor bytes, several cuts make the same stages: the fewest layers
    count for each, and a cut that had more of them may be taken for none.
    """
    sizes = []
    first = 0
    for stage in problem.stages:
        size = _run_length(model, stage, first)
        if size is None:
            return None
        sizes.append(size)
        first += size
    try:
        same = model.problem(problem.placement, sizes).problem_hash == problem.problem_hash
    except ModelError:
        return None
    return tuple(sizes) if same else None


def _run_length(model: Model, stage: Stage, first: int) -> int | None:
    """Return how many layers from the first one on make the stage, the fewest that do."""
    if not 0 <= stage.device < len(model.devices):
        return None
    run: Stage | None = None
    for size, layer in enumerate(model.stages_on[stage.device][first:], start=1):
        run = layer if run is None else fuse(run, layer)
        if run == stage:
            return size
    return None
