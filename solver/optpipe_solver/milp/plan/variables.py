"""The plan MILP: layers of each run per stage, the stage's mode, and the constraints.

``layers[s][t][k]`` is the number of layers of run t that stage s holds in mode k. Each stage has
one mode. All times and bytes of a stage are sums over these numbers, so they are linear. Two
numbers are less than that sum: a stage keeps one checkpoint of the layers it recomputes apart, and
the largest workspace. For these the model uses the largest value over all runs, which is never too
little. Each family of constraints is a function; docs/milp.md has their formulas.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optpipe.planning.step import balanced_cut, run_costs
from optpipe.schedule import ActionType
from optpipe_solver.milp.highs import MilpModel, at_least, total
from optpipe_solver.milp.plan.pattern import (
    AWAY,
    BACK,
    CONTEXT,
    HELD,
    NUM_DURATIONS,
    PAIRED_FORWARD,
    RESTORED,
    STATES,
    SYNC,
    kind_number,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optpipe.model import Model
    from optpipe.stage import CellMode, Stage
    from optpipe_solver.arrays import Floats, Ints
    from optpipe_solver.milp.highs import Constraint, Expression, Linear, Variable
    from optpipe_solver.milp.plan.pattern import LongestPath, MemoryMoment

__all__ = [
    "LayerKind",
    "PlanChoice",
    "PlanTables",
    "PlanVariables",
    "as_counts",
    "devices_hold_whole_layers",
    "durations_are_sums",
    "durations_of",
    "even_loads",
    "layer_kinds",
    "makespan_is_no_shorter",
    "memory_fits",
    "one_mode_per_stage",
    "only_usable_modes",
    "runs_follow_each_other",
    "stages_hold_all_layers",
]


class LayerKind(NamedTuple):
    """A run of equal layers: the first one's index, and how many there are."""

    first: int
    length: int


def layer_kinds(model: Model) -> tuple[LayerKind, ...]:
    """Return the runs of equal layers, in model order."""
    found: list[LayerKind] = []
    layers = [layer for layer in model.layers for _ in range(layer.repeat)]
    plain = [layer.model_copy(update={"repeat": 1, "name": ""}) for layer in layers]
    for _, run in groupby(enumerate(plain), key=lambda item: item[1].model_dump_json()):
        members = list(run)
        found.append(LayerKind(members[0][0], len(members)))
    return tuple(found)


class PlanChoice(NamedTuple):
    """A cut and a mode for each stage, by its index in `PlanTables.names`."""

    sizes: tuple[int, ...]
    modes: tuple[int, ...]


_FORWARD, _BACK = kind_number(ActionType.FORWARD), kind_number(ActionType.FULL_BACKWARD)
_WORKSPACE = {
    ActionType.FORWARD: "forward_workspace_bytes",
    ActionType.BACKWARD_INPUT: "backward_input_workspace_bytes",
    ActionType.BACKWARD_WEIGHT: "backward_weight_workspace_bytes",
    ActionType.FULL_BACKWARD: "backward_workspace_bytes",
    ActionType.RECOMPUTE: "recompute_workspace_bytes",
}


@dataclass(frozen=True)
class PlanTables:
    """The ms and bytes that one layer adds to a stage per micro-batch, by stage, run and mode.

    Parameters
    ----------
    model
        The model to cut.
    placement
        Device of each stage.
    transfers, recompute
        Whether there are places for transfers, and for recomputations apart.
    hidden
        With pairs: the maximum ms that F and B of a layer hide, by device and layer.
    """

    model: Model
    placement: tuple[int, ...]
    transfers: bool
    recompute: bool
    hidden: Sequence[Sequence[tuple[float, float]]] = ()

    @cached_property
    def kinds(self) -> tuple[LayerKind, ...]:
        """Runs of equal layers, in model order."""
        return layer_kinds(self.model)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the modes that every run of layers has; runs with only keep do not count."""
        menus = [
            [mode.name for mode in self._layer(0, kind).menu[1:] if self._has_place(mode)]
            for kind in self.kinds
        ]
        said = [set(menu) for menu in menus if menu]
        common = set.intersection(*said) if said else set()
        order = next((menu for menu in menus if menu), [])
        return ("keep", *(name for name in order if name in common))

    def _has_place(self, mode: CellMode) -> bool:
        return (self.transfers or not mode.offload_bytes) and (
            self.recompute or mode.recompute != "apart"
        )

    def _layer(self, device: int, kind: LayerKind) -> Stage:
        return self.model.stages_on[device][kind.first]

    @cached_property
    def _menus(self) -> dict[tuple[int, int], dict[str, CellMode]]:
        """Modes by name, per device and run of layers."""
        return {
            (device, t): {mode.name: mode for mode in self._layer(device, kind).menu}
            for device in set(self.placement)
            for t, kind in enumerate(self.kinds)
        }

    def _mode(self, device: int, t: int, name: str) -> CellMode:
        """Return a mode of a run's layers; keep if their menu has no such name."""
        menu = self._menus[device, t]
        return menu.get(name) or next(iter(menu.values()))

    def may_use(self, s: int, k: int) -> bool:
        """Whether the device of a stage has the bandwidth that a mode needs."""
        device = self.model.devices[self.placement[s]]
        moved = any(
            self._mode(self.placement[s], t, self.names[k]).offload_bytes
            for t in range(len(self.kinds))
        )
        return device.can_offload or not moved

    @cached_property
    def durations(self) -> Floats:
        """Durations in ms, by kind, stage, run and mode; with pairs two kinds more."""
        shape = (NUM_DURATIONS, len(self.placement), len(self.kinds), len(self.names))
        table = np.zeros(shape)
        for s, index in enumerate(self.placement):
            device = self.model.devices[index]
            out, home = device.d2h_gb_per_s, device.h2d_gb_per_s
            for t, kind in enumerate(self.kinds):
                layer = self._layer(index, kind)
                for k, name in enumerate(self.names):
                    mode = self._mode(index, t, name)
                    lasts = {
                        ActionType.FORWARD: layer.forward_ms,
                        ActionType.BACKWARD_INPUT: layer.backward_input_ms + mode.inside_ms,
                        ActionType.BACKWARD_WEIGHT: layer.backward_weight_ms,
                        ActionType.FULL_BACKWARD: layer.fused_backward_ms + mode.inside_ms,
                        ActionType.OFFLOAD: mode.offload_bytes / (out * 1e6) if out else 0.0,
                        ActionType.RELOAD: mode.offload_bytes / (home * 1e6) if home else 0.0,
                        ActionType.RECOMPUTE: mode.recompute_ms - mode.inside_ms,
                    }
                    for action, ms in lasts.items():
                        table[kind_number(action), s, t, k] = ms
                    table[SYNC, s, t, k] = layer.grad_sync_ms
        if not self.hidden:
            return table
        most = [[self.hidden[d][kind.first] for kind in self.kinds] for d in self.placement]
        passes = table[[_FORWARD, _BACK]]
        return np.concatenate([table, passes - np.moveaxis(np.array(most), 2, 0)[..., None]])

    @cached_property
    def busy_ms(self) -> Floats:
        """F without its hidden ms, plus the shorter backward, in ms by stage, run and mode."""
        split = (ActionType.BACKWARD_INPUT, ActionType.BACKWARD_WEIGHT)
        apart = sum(self.durations[kind_number(kind)] for kind in split)
        forward = self.durations[PAIRED_FORWARD if self.hidden else _FORWARD]
        return np.asarray(forward + np.minimum(self.durations[_BACK], apart))

    @cached_property
    def long_runs(self) -> tuple[int, ...]:
        """Runs with more layers than there are devices: some device holds several."""
        num_devices = len(set(self.placement))
        return tuple(t for t, kind in enumerate(self.kinds) if kind.length > num_devices)

    @cached_property
    def held_bytes(self) -> Floats:
        """Bytes of a cell by state, stage, run and mode, in addition to `extra_bytes`."""
        table = np.zeros((len(STATES), len(self.placement), len(self.kinds), len(self.names)))
        for s, t, k, mode in self._all_modes:
            kept = self._per_layer(s, t, mode)
            table[HELD, s, t, k] = table[BACK, s, t, k] = kept
            table[AWAY, s, t, k] = kept - mode.offload_bytes
            apart = mode.recompute == "apart"
            table[RESTORED, s, t, k] = mode.activation_bytes if apart else kept
            table[CONTEXT, s, t, k] = mode.weight_context_bytes
        return table

    @cached_property
    def extra_bytes(self) -> Floats:
        """Bytes of a cell that a stage has once (a first checkpoint), by state, stage and mode."""
        table = np.zeros((len(STATES), len(self.placement), len(self.names)))
        for s, t, k, mode in self._all_modes:
            once = mode.forward_bytes - self._per_layer(s, t, mode)
            for state in (HELD, AWAY, BACK):
                table[state, s, k] = max(table[state, s, k], once)
        return table

    def _per_layer(self, s: int, t: int, mode: CellMode) -> int:
        """Return F's bytes of a layer after another one: its input may be recomputed."""
        if mode.recompute != "apart":
            return mode.forward_bytes
        device = self.placement[s]
        before = {self._layer(device, self.kinds[max(0, t - 1)]).output_bytes}
        if self.kinds[t].length > 1:
            before.add(self._layer(device, self.kinds[t]).output_bytes)
        return max(0, mode.forward_bytes - min(before))

    @cached_property
    def _all_modes(self) -> list[tuple[int, int, int, CellMode]]:
        return [
            (s, t, k, self._mode(device, t, name))
            for s, device in enumerate(self.placement)
            for t in range(len(self.kinds))
            for k, name in enumerate(self.names)
        ]

    @cached_property
    def static_bytes(self) -> Floats:
        """Static bytes, by stage and run."""
        return np.array(
            [[self._layer(d, kind).static_bytes for kind in self.kinds] for d in self.placement],
            dtype=np.float64,
        )

    @cached_property
    def workspace_bytes(self) -> dict[tuple[int, ActionType], int]:
        """Return, by stage and kind of action, the largest workspace over all modes of its runs.

        Only runs that the stage can have count: each stage has a layer, so only the last one can
        have the head.
        """
        num_stages, num_layers = len(self.placement), sum(kind.length for kind in self.kinds)
        found = {(s, kind): 0 for s in range(num_stages) for kind in ActionType}
        for s, t, _, mode in self._all_modes:
            first, length = self.kinds[t]
            if first > num_layers - num_stages + s or first + length <= s:
                continue
            for kind, name in _WORKSPACE.items():
                found[s, kind] = max(found[s, kind], getattr(mode, name))
        return found

    def beside_bytes(self, moment: MemoryMoment) -> int:
        """Return the bytes of the workspaces at a moment, of both passes in a pair."""
        beside = self.workspace_bytes.get((moment.forward, ActionType.FORWARD), 0)
        return beside + self.workspace_bytes[moment.stage, moment.kind]

    @cached_property
    def inside_bytes(self) -> Floats:
        """Maximum bytes that recomputation inside a backward holds, by stage and mode."""
        table = np.zeros((len(self.placement), len(self.names)))
        for s, _, k, mode in self._all_modes:
            table[s, k] = max(table[s, k], mode.inside_bytes)
        return table


class PlanVariables:
    """The decision variables of one placement, and the variables that follow from them.

    ``most_ms`` is an upper bound of the makespan. Within it, ``most_layers`` is the maximum number
    of layers of a run that a stage holds in a mode. ``most_on`` is the maximum that a device holds,
    by device and long run.

    ``layers`` and ``mode`` are the decisions; ``durations`` and ``makespan`` are continuous.
    ``done[s]`` states for each run whether all its layers are in stages up to s. ``on_device`` are
    the layers of a long run on a device, ``most`` the maximum of these over the devices.
    """

    def __init__(
        self,
        milp: MilpModel,
        tables: PlanTables,
        most_ms: float,
        most_layers: Ints,
        most_on: dict[tuple[int, int], int],
    ) -> None:
        self.milp, self.tables, self.most_layers = milp, tables, most_layers
        stages, kinds = range(len(tables.placement)), range(len(tables.kinds))
        modes = range(len(tables.names))
        self.layers = [
            [
                [milp.whole(f"n_{s}_{t}_{k}", 0, int(most_layers[s, t, k])) for k in modes]
                for t in kinds
            ]
            for s in stages
        ]
        self.mode = [[milp.binary(f"z_{s}_{k}") for k in modes] for s in stages]
        self.done = [[milp.binary(f"u_{s}_{t}") for t in kinds] for s in stages]
        self.durations = [
            [milp.continuous(f"d_{kind}_{s}", 0.0, most_ms) for s in stages]
            for kind in range(tables.durations.shape[0])
        ]
        self.on_device = {
            (device, t): milp.whole(f"h_{device}_{t}", 0, most)
            for (device, t), most in most_on.items()
        }
        self.most = {}
        for t in tables.long_runs:
            # The smallest maximum per device with which a run has all its layers.
            length, room = (
                tables.kinds[t].length,
                [n for (_, run), n in most_on.items() if run == t],
            )
            enough = (h for h in range(length) if sum(min(h, r) for r in room) >= length)
            self.most[t] = milp.whole(f"m_{t}", next(enough, length), length)
        self.makespan = milp.continuous("makespan", 0.0, most_ms)

    def of_run(self, s: int, t: int) -> Expression:
        """Return how many layers of a run a stage holds."""
        return total(list(self.layers[s][t]))

    def weighted(self, s: int, table: Floats) -> Expression:
        """Return the sum over a stage's layers of a table by run and mode."""
        return total(
            [
                float(table[t, k]) * variable
                for t, row in enumerate(self.layers[s])
                for k, variable in enumerate(row)
                if table[t, k]
            ]
        )

    def values(self, choice: PlanChoice, makespan_ms: float) -> dict[Variable, float]:
        """Return the values of all variables for a choice."""
        layers, modes = as_counts(self.tables, choice)
        durations = durations_of(self.tables, choice)
        placed = layers.sum(axis=2).cumsum(axis=0)
        found = {self.makespan: makespan_ms}
        home = np.array(self.tables.placement)
        for (device, t), one in self.on_device.items():
            found[one] = float(layers[home == device, t].sum())
            found[self.most[t]] = max(found[one], found.get(self.most[t], 0.0))
        for s, runs in enumerate(self.layers):
            for t, row in enumerate(runs):
                found |= {one: float(layers[s, t, k]) for k, one in enumerate(row)}
                found[self.done[s][t]] = float(placed[s, t] >= self.tables.kinds[t].length)
            found |= {one: float(modes[s, k]) for k, one in enumerate(self.mode[s])}
        for kind, row in enumerate(self.durations):
            found |= {one: float(durations[kind, s]) for s, one in enumerate(row)}
        return found

    def choice(self, values: dict[Variable, float]) -> PlanChoice:
        """Return the cut and the modes of a solution."""
        sizes = [sum(round(values[one]) for row in runs for one in row) for runs in self.layers]
        modes = [max(range(len(row)), key=lambda k: values[row[k]]) for row in self.mode]
        return PlanChoice(tuple(sizes), tuple(modes))


def durations_of(tables: PlanTables, choice: PlanChoice) -> Floats:
    """Return the durations in ms of a cut with its modes, by kind and stage."""
    layers, _ = as_counts(tables, choice)
    return np.asarray(np.einsum("xstk,stk->xs", tables.durations, layers))


def as_counts(tables: PlanTables, choice: PlanChoice) -> tuple[Floats, Floats]:
    """Return layers by stage, run and mode, and 1 by stage and mode for each stage's mode."""
    starts = np.cumsum([0, *choice.sizes])
    bounds = np.cumsum([0, *(kind.length for kind in tables.kinds)])
    low = np.maximum(starts[:-1, None], bounds[None, :-1])
    high = np.minimum(starts[1:, None], bounds[None, 1:])
    modes = np.zeros((len(choice.sizes), len(tables.names)))
    modes[np.arange(len(choice.sizes)), list(choice.modes)] = 1.0
    return np.maximum(0, high - low)[:, :, None] * modes[:, None, :], modes


def even_loads(tables: PlanTables, k: int) -> tuple[int, ...]:
    """Return the layers of each stage with the smallest largest load, all layers in mode k.

    The load is F plus the shorter backward.
    """
    kinds = [t for t, kind in enumerate(tables.kinds) for _ in range(kind.length)]
    return balanced_cut([run_costs(load) for load in tables.busy_ms[:, kinds, k]])[0]


# --- Constraints.

_GIB = 2.0**30


def one_mode_per_stage(v: PlanVariables) -> None:
    """(P1) Each stage has one mode, and layers only in that mode."""
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
    """(P3) The stages hold all layers of a run, and each stage has at least one layer."""
    stages = range(len(v.layers))
    for t, kind in enumerate(v.tables.kinds):
        v.milp.add(total([v.of_run(s, t) for s in stages]) == kind.length)
    for s in stages:
        v.milp.add(at_least(total([v.of_run(s, t) for t in range(len(v.tables.kinds))]), 1))


def runs_follow_each_other(v: PlanVariables) -> None:
    """(P4) A stage has layers of a run only if the run before ends in this stage or earlier."""
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
    """(P8) A device's layers of a run are whole, and their maximum limits the makespan."""
    for (device, t), on_device in v.on_device.items():
        own = [s for s, home in enumerate(v.tables.placement) if home == device]
        v.milp.add(total([v.of_run(s, t) for s in own]) - on_device == 0)
        v.milp.add(at_least(v.most[t] - on_device, 0))
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
    """(P7) The cells' and static bytes of a device at an action fit its memory, in GiB."""
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
