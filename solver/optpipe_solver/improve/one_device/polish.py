"""Device after device re-optimised until none gets better: a local optimum of whole programs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe_solver.improve.one_device.fifo import in_order, is_plain
from optpipe_solver.improve.one_device.reoptimise import OneDevice, Outcome, can_reoptimise

if TYPE_CHECKING:
    from optpipe_solver.improve.compiled.problem import CompiledProblem, Rows

__all__ = ["Polish"]

_LABELS, _ALIKE = 1_000, 20
"""Most labels per layer and per state: far more than are needed where a schedule is good."""

_LAYERS = 60
"""Layers' worth of labels remembered for the way back."""

_WAY_SHARE, _LABEL_WORK = 8, 16
"""Steps along ways that cost as much as an action simulated, and what a label costs."""

_MOST_WORK = 1_000_000
"""Largest cost of looking at every device once, in actions simulated."""


class Polish:
    """Re-optimises the devices of one problem in turn.

    Where it does not apply (see `reoptimise`; or the problem is too large) rows come back as they
    are.
    """

    def __init__(self, compiled: CompiledProblem) -> None:
        self.compiled = compiled
        times = compiled.times
        passes = 2 * times.num_cells
        self.sweep_work = passes * 3 * times.num_cells // _WAY_SHARE
        self.applies = self.sweep_work <= _MOST_WORK and can_reoptimise(compiled.problem)
        if self.applies:
            self.device = OneDevice(
                compiled, width=_LABELS, most=_LAYERS * _LABELS, most_per_state=_ALIKE
            )

    def polish(self, rows: Rows, objective_ms: float) -> Outcome:
        """Return legal programs no worse than the given ones, and what it took.

        ``objective_ms`` is that of the rows; ``is_exact`` says that no device's program alone can
        be better.
        """
        if not self.applies or not is_plain(rows, self.compiled.times):
            return Outcome(rows, objective_ms, False, 0)
        best = Outcome(in_order(rows, self.compiled.times), objective_ms, True, 0)
        num_devices = int(rows.lengths.size)
        work, device, idle = 0, 0, 0
        proven = [False] * num_devices
        while idle < num_devices:
            found = self.device.reoptimise(best.rows, device)
            work += self.sweep_work // num_devices + found.work * _LABEL_WORK
            proven[device] = found.is_exact
            idle = 0 if found.objective_ms < best.objective_ms else idle + 1
            best = found
            device = (device + 1) % num_devices
        return best._replace(is_exact=all(proven), work=work)
