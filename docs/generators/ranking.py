"""Which published rule is the best where: all of them on a grid of settings, compared."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from docs.generators.examples import PASS_MS, line
from docs.generators.measured import placements_of
from docs.generators.writing import table
from optpipe_solver.starts import all_starts

if TYPE_CHECKING:
    from optpipe import Problem

__all__ = ["SETTINGS", "Setting", "ranking_table", "wins_of"]

_DEVICES, _MICROBATCHES = 8, 32
_TIE = 1e-6


@dataclass(frozen=True, slots=True)
class Setting:
    """Memory in activations per device, times of F, I, W, the copy ratio, and what counts."""

    activations: float
    times: tuple[float, float, float]
    offload: float | None
    objective: str

    def __str__(self) -> str:
        copies = "no offload" if self.offload is None else f"a copy takes {self.offload:g} (F+I+W)"
        times = "/".join(f"{ms:g}" for ms in self.times)
        room = "1 activation" if self.activations == 1 else f"{self.activations:g} activations"
        return f"{room}, F/I/W {times} ms, {copies}, {self.objective}"

    def problem(self) -> Problem:
        """Return the problem on a line of eight devices, 32 micro-batches."""
        return line(
            _DEVICES,
            _MICROBATCHES,
            activations=self.activations,
            times=self.times,
            offload=self.offload,
            objective=self.objective,
        )


_EQUAL = (PASS_MS, PASS_MS, PASS_MS)
_REAL = (29.7, 29.4, 19.9)
"""The 6.2B row of the Zero Bubble table, rounded."""

SETTINGS: tuple[Setting, ...] = (
    *(Setting(room, _EQUAL, None, "span") for room in (16, 8, 5, 4, 2, 1)),
    *(Setting(room, _EQUAL, None, "makespan") for room in (16, 8, 5, 4)),
    *(Setting(room, _REAL, None, "span") for room in (16, 8, 4, 2)),
    *(Setting(room, _EQUAL, 0.25, "makespan") for room in (4, 2)),
    *(Setting(room, _EQUAL, 0.75, "makespan") for room in (4, 2)),
)


def wins_of(name: str) -> list[str]:
    """Return the settings in which no published rule is shorter than this one."""
    return [str(setting) for setting in SETTINGS if name in _best(setting)[1]]


def ranking_table() -> str:
    """Return a row per setting: the shortest published schedules, and how long."""
    rows = []
    for setting in SETTINGS:
        length_ms, names = _best(setting)
        room, times, copies, objective = str(setting).rsplit(", ", 3)
        work_ms = sum(setting.times) * _MICROBATCHES
        shown = ", ".join(
            f"[{name}](../generated/schedules/{name}.md) ({placement})"
            for name, placement in names.items()
        )
        bubble = f"{1 - work_ms / length_ms:.1%}".replace("%", " %")
        rows.append((room, times.removeprefix("F/I/W "), copies, objective, bubble, shown))
    head = ("memory", "F/I/W", "offload", "objective", "bubble rate", "shortest (placement)")
    return table(head, rows, "llllrl")


@cache
def _best(setting: Setting) -> tuple[float, dict[str, str]]:
    """Return the least length and who attains it, with the first placement that does.

    Copies of other families that offload makes fit do not count: they are ours.
    """
    found: dict[str, tuple[float, str]] = {}
    for placement, problem in placements_of(setting.problem()).items():
        for start in all_starts(problem):
            if not start.legal or "+" in start.method:
                continue
            if start.method not in found or start.objective_ms < found[start.method][0] - _TIE:
                found[start.method] = (start.objective_ms, placement)
    least = min(length for length, _ in found.values())
    names = {name: where for name, (length, where) in found.items() if length <= least + _TIE}
    return least, names
