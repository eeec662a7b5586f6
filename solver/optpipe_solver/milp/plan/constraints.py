"""The plan MILP's constraints, one family a function; docs/milp.md has their formulas."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from optpipe_solver.milp.highs import at_least, total

if TYPE_CHECKING:
    from optpipe_solver.milp.highs import Constraint, Linear
    from optpipe_solver.milp.plan.pattern import LongestPath, MemoryMoment
    from optpipe_solver.milp.plan.variables import PlanVariables

__all__ = [
    "devices_hold_whole_layers",
    "durations_are_sums",
    "makespan_is_no_shorter",
    "memory_fits",
    "one_mode_per_stage",
    "only_usable_modes",
    "runs_follow_each_other",
    "stages_hold_all_layers",
]

_GIB = 2.0**30


def one_mode_per_stage(v: PlanVariables) -> None:
    """(P1) Each stage has one mode, and layers in that mode alone."""
    for s, row in enumerate(v.mode):
        v.milp.add(total(list(row)) == 1)
        for t in range(len(v.tables.kinds)):
            for k, chosen in enumerate(row):
                most = float(v.most_layers[s, t, k])
                v.milp.add(at_least(most * chosen - v.layers[s][t][k], 0))


def only_usable_modes(v: PlanVariables) -> None:
    """(P2) A mode that moves bytes needs a device with bandwidths."""
    for s, row in enumerate(v.mode):
        for k, chosen in enumerate(row):
            if not v.tables.may_use(s, k):
                v.milp.add(chosen == 0)


def stages_hold_all_layers(v: PlanVariables) -> None:
    """(P3) All layers of a run lie somewhere, and each stage has at least one layer."""
    stages = range(len(v.layers))
    for t, kind in enumerate(v.tables.kinds):
        v.milp.add(total([v.of_run(s, t) for s in stages]) == kind.length)
    for s in stages:
        v.milp.add(at_least(total([v.of_run(s, t) for t in range(len(v.tables.kinds))]), 1))


def runs_follow_each_other(v: PlanVariables) -> None:
    """(P4) A stage has layers of a run only where all of the run before lie no later."""
    kinds = v.tables.kinds
    for s in range(len(v.layers)):
        for t in range(len(kinds) - 1):
            done = v.done[s][t]
            before = total([v.of_run(i, t) for i in range(s + 1)])
            v.milp.add(at_least(before - kinds[t].length * done, 0))
            v.milp.add(at_least(kinds[t + 1].length * done - v.of_run(s, t + 1), 0))
            if s > 0:
                v.milp.add(at_least(done - v.done[s - 1][t], 0))


def durations_are_sums(v: PlanVariables) -> None:
    """(P5) A stage's times are those of its layers in its mode."""
    for kind, row in enumerate(v.durations):
        for s, duration in enumerate(row):
            v.milp.add(duration - v.weighted(s, v.tables.durations[kind, s]) == 0)


def devices_hold_whole_layers(v: PlanVariables) -> None:
    """(P8) What a device holds of a run is whole, and one of them holds the most: that lasts."""
    for (device, t), held in v.on_device.items():
        own = [s for s, home in enumerate(v.tables.placement) if home == device]
        v.milp.add(total([v.of_run(s, t) for s in own]) - held == 0)
        v.milp.add(at_least(v.most[t] - held, 0))
    for t, most in v.most.items():
        least_ms = v.tables.model.num_microbatches * float(v.tables.busy_ms[:, t].min())
        v.milp.add(at_least(v.makespan - least_ms * most, 0))


def makespan_is_no_shorter(v: PlanVariables, path: LongestPath) -> Constraint:
    """(P6) The makespan is at least as long as a path of the pattern."""
    terms: list[Linear] = [v.makespan]
    for kind, s in zip(*np.nonzero(path.counts), strict=True):
        terms.append(-float(path.counts[kind, s]) * v.durations[kind][s])
    return at_least(total(terms), path.constant_ms)


def memory_fits(v: PlanVariables, device: int, moment: MemoryMoment) -> Constraint:
    """(P7) What the cells of a device hold at an action fits beside its static bytes, in GiB."""
    tables = v.tables
    stages = [s for s, home in enumerate(tables.placement) if home == device]
    limit = tables.model.devices[device].usable_bytes
    terms: list[Linear] = []
    for s, counts in zip(stages, moment.counts, strict=True):
        live = np.array(counts, dtype=np.float64)
        table = np.tensordot(live, tables.held_bytes[:, s], 1) + tables.static_bytes[s][:, None]
        terms.append(-1.0 * v.weighted(s, table / _GIB))
        once = live @ tables.extra_bytes[:, s]
        for k, chosen in enumerate(v.mode[s]):
            inside = moment.with_inside and s == moment.stage
            most = once[k] + (tables.inside_bytes[s, k] if inside else 0)
            if most:
                terms.append(-float(most / _GIB) * chosen)
    room = limit - tables.beside_bytes(moment)
    return at_least(total(terms), -room / _GIB)
