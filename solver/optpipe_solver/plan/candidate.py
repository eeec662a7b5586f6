"""One cut on one line while it is searched, and the row that is left of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from optpipe_solver.bounds import lower_bound
from optpipe_solver.incumbent import Incumbent
from optpipe_solver.smallest_memory import feasibility

if TYPE_CHECKING:
    from optpipe.model import Model
    from optpipe.problem import Problem
    from optpipe_solver.plan.lines import Line

__all__ = ["Candidate", "Fate", "Row"]

_ROUNDING = 1e-9


class Fate(StrEnum):
    """What became of a candidate."""

    CHOSEN = "chosen"
    SOLVED = "solved fully, slower"
    SLOWER = "slower in a short search"
    PROVEN = "bound above the chosen one (proven)"
    NO_MEMORY = "does not fit (proven)"
    NOT_TRIED = "not tried"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A candidate for people and programs; times in ms, None where there is none.

    ``quick_ms`` is the best family with a short search, ``final_ms`` the best known at the end.
    """

    label: str
    chunks: int
    placement: tuple[int, ...]
    sizes: tuple[int, ...]
    is_even: bool
    bound_ms: float | None
    quick_ms: float | None
    final_ms: float | None
    method: str
    fate: Fate
    note: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return the row as JSON values."""
        data = {name: getattr(self, name) for name in self.__slots__}
        return data | {"placement": list(self.placement), "sizes": list(self.sizes)}


class Candidate:
    """A cut on a line with its problem, its bound and the best programs known for it.

    Parameters
    ----------
    model, line, sizes
        What makes the problem.
    is_even
        Whether this is the naive cut all others are held against.
    """

    def __init__(
        self, model: Model, line: Line, sizes: tuple[int, ...], *, is_even: bool = False
    ) -> None:
        self.line, self.sizes, self.is_even = line, sizes, is_even
        self.problem: Problem = model.problem(line.placement, sizes)
        verdict = feasibility(self.problem)
        self.misfit, self.needs = verdict.message, verdict.needs
        self.bound_ms = math.inf if self.misfit else lower_bound(self.problem).ms
        self.best = Incumbent(self.problem)
        if not self.misfit:
            self.best.offer_bound(self.bound_ms, "bounds")
        self.quick_ms: float | None = None
        self.is_solved = False

    @property
    def objective_ms(self) -> float:
        """The best known; inf where nothing is."""
        return self.best.objective_ms

    @property
    def name(self) -> str:
        """Label and sizes, for progress lines."""
        return f"{self.line.label} [{' '.join(map(str, self.sizes))}]"

    def cannot_beat(self, objective_ms: float) -> bool:
        """Whether its bound proves that it is no faster than that."""
        return self.bound_ms >= objective_ms * (1 - _ROUNDING)

    def row(self, chosen: Candidate | None) -> Row:
        """Return what is to be said about it at the end."""
        known = self.best.programs is not None
        return Row(
            label=self.line.label,
            chunks=self.line.chunks,
            placement=self.line.placement,
            sizes=self.sizes,
            is_even=self.is_even,
            bound_ms=None if self.misfit else self.bound_ms,
            quick_ms=self.quick_ms,
            final_ms=self.objective_ms if known else None,
            method=self.best.method,
            fate=self._fate(chosen),
            note=self.misfit,
        )

    def _fate(self, chosen: Candidate | None) -> Fate:
        if self is chosen:
            return Fate.CHOSEN
        if self.misfit:
            return Fate.NO_MEMORY
        if chosen is not None and self.cannot_beat(chosen.objective_ms):
            return Fate.PROVEN
        if self.is_solved:
            return Fate.SOLVED
        return Fate.NOT_TRIED if self.best.programs is None else Fate.SLOWER
