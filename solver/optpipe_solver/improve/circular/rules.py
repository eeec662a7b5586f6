"""What a problem asks of circular orders, as the arrays that compiled code reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optpipe.action import Action, ActionType
from optpipe.memory import action_delta, action_workspace
from optpipe.simulate import duration_ms
from optpipe_solver.improve.circular.kernel import (
    BACKWARD,
    FORWARD,
    NUM_ROLES,
    RECOMPUTE,
    RELEASE,
    RELOAD,
    WEIGHT,
    Rules,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from optpipe.problem import Problem

__all__ = ["Node", "Nodes", "rules_of"]

_KINDS = {
    FORWARD: ActionType.FORWARD,
    BACKWARD: ActionType.BACKWARD_INPUT,
    WEIGHT: ActionType.BACKWARD_WEIGHT,
    RELEASE: ActionType.RELEASE,
    RELOAD: ActionType.RELOAD,
    RECOMPUTE: ActionType.RECOMPUTE,
}


class Node(NamedTuple):
    """An item: what (stage, copy) it is of, its part in it, and its action type."""

    stage: int
    copy: int
    role: int
    kind: ActionType


class Nodes:
    """The items of circles, numbered.

    Parameters
    ----------
    problem
        Its number of micro-batches plays no part.
    fused
        Whether B stands for I and W.
    copies
        Micro-batches per period.
    shrinks
        Whether there is offload and recompute, where the problem has them.
    """

    def __init__(self, problem: Problem, *, fused: bool, copies: int, shrinks: bool) -> None:
        self.problem = problem
        self.fused = fused
        self.copies = copies
        self.shrinks = shrinks
        stages = range(len(problem.stages))
        self.cells = [(s, c) for c in range(copies) for s in stages]
        self.all = [node for s, c in self.cells for node in self._of(s, c)]
        self.number = {(n.stage, n.copy, n.kind): at for at, n in enumerate(self.all)}
        self.item = np.full((len(self.cells), NUM_ROLES), -1, dtype=np.int64)
        for at, node in enumerate(self.all):
            self.item[self.cell(node), node.role] = at

    def cell(self, node: Node) -> int:
        """Return the number of an item's (stage, copy)."""
        return node.copy * len(self.problem.stages) + node.stage

    def may_offload(self, s: int) -> bool:
        """Whether a stage can go to the host."""
        return self.shrinks and self.problem.can_offload(s)

    def may_recompute(self, s: int) -> bool:
        """Whether a stage can be recomputed."""
        return self.shrinks and self.problem.stages[s].can_recompute

    def arcs(self) -> Iterator[tuple[int, int, float]]:
        """Yield (a, b, ms) in the order of the chain: one sweep then reaches its end."""
        last = len(self.problem.stages) - 1
        for c in range(self.copies):
            of = self.item[c * (last + 1) : (c + 1) * (last + 1)]
            for s in range(last):
                yield self._arc(of[s, FORWARD], of[s + 1, FORWARD], self.problem.boundary_ms[s][0])
            yield self._arc(of[last, FORWARD], of[last, BACKWARD], 0.0)
            for s in range(last, 0, -1):
                back_ms = self.problem.boundary_ms[s - 1][1]
                yield self._arc(of[s, BACKWARD], of[s - 1, BACKWARD], back_ms)
            if not self.fused:
                for s in range(last + 1):
                    yield self._arc(of[s, BACKWARD], of[s, WEIGHT], 0.0)

    def duration_ms(self, at: int) -> float:
        """Return how long an item runs."""
        node = self.all[at]
        if node.kind is ActionType.RELOAD:
            return 0.0
        return duration_ms(self.problem, Action(node.stage, node.kind, 0))

    def _arc(self, a: int, b: int, delay_ms: float) -> tuple[int, int, float]:
        return int(a), int(b), self.duration_ms(a) + delay_ms

    def _of(self, s: int, c: int) -> Iterator[Node]:
        yield Node(s, c, FORWARD, ActionType.FORWARD)
        if self.fused:
            yield Node(s, c, BACKWARD, ActionType.FULL_BACKWARD)
        else:
            yield Node(s, c, BACKWARD, ActionType.BACKWARD_INPUT)
            yield Node(s, c, WEIGHT, ActionType.BACKWARD_WEIGHT)
        roles = [RELEASE, RELOAD] if self.may_offload(s) else []
        if self.may_recompute(s):
            roles.append(RECOMPUTE)
        for role in roles:
            yield Node(s, c, role, _KINDS[role])


def rules_of(nodes: Nodes) -> Rules:
    """Return what the compiled search knows of a problem."""
    problem = nodes.problem
    stages = [problem.stages[s] for s, _ in nodes.cells]
    arcs = list(nodes.arcs())
    delta = [action_delta(problem.stages[n.stage], n.kind, is_recomputed=False) for n in nodes.all]
    space = [action_workspace(problem.stages[n.stage], n.kind) for n in nodes.all]
    ms = [nodes.duration_ms(at) for at in range(len(nodes.all))]
    may = [(True, nodes.may_offload(s), nodes.may_recompute(s)) for s, _ in nodes.cells]
    dropped = [
        stage.activation_bytes - (stage.checkpoint_bytes or 0) if may_recompute else 0
        for stage, (_, _, may_recompute) in zip(stages, may, strict=True)
    ]
    away = [problem.offload_ms(s) if nodes.may_offload(s) else 0.0 for s, _ in nodes.cells]
    home = [problem.reload_ms(s) if nodes.may_offload(s) else 0.0 for s, _ in nodes.cells]
    return Rules(
        duration=np.array(ms, dtype=np.float64),
        delta=_whole(delta),
        extra=_whole([max(0, d) + w for d, w in zip(delta, space, strict=True)]),
        cell=_whole([nodes.cell(node) for node in nodes.all]),
        role=_whole([node.role for node in nodes.all]),
        item=nodes.item,
        device=_whole([stage.device for stage in stages]),
        may=np.array(may, dtype=np.bool_),
        dropped=_whole(dropped),
        away=np.array(away, dtype=np.float64),
        home=np.array(home, dtype=np.float64),
        hosted=_whole([stage.offload_bytes for stage in stages]),
        arc_from=_whole([a for a, _, _ in arcs]),
        arc_to=_whole([b for _, b, _ in arcs]),
        lag=np.array([lag for _, _, lag in arcs], dtype=np.float64),
        limit=_whole(
            [d.usable_bytes - problem.static_bytes_of(at) for at, d in enumerate(problem.devices)]
        ),
        one_lane=np.array([device.half_duplex for device in problem.devices], dtype=np.bool_),
        group=_whole(_groups(problem)),
        host=_whole(_hosts(problem)),
        host_limit=_whole(
            [-1 if host.memory_bytes is None else host.memory_bytes for host in problem.hosts]
        ),
        least=max(_load(nodes, ms), 1e-9),
    )


def _load(nodes: Nodes, ms: list[float]) -> float:
    """Return the compute time of one period on the busiest device, in ms."""
    load = [0.0] * len(nodes.problem.devices)
    for node, lasting in zip(nodes.all, ms, strict=True):
        if node.role != RECOMPUTE:
            load[nodes.problem.stages[node.stage].device] += lasting
    return max(load)


def _groups(problem: Problem) -> list[int]:
    """Return by device the first device of its PCIe group, -1 where it has none."""
    names = [device.pcie_group for device in problem.devices]
    return [-1 if name is None else names.index(name) for name in names]


def _hosts(problem: Problem) -> list[int]:
    names = [host.name for host in problem.hosts]
    return [names.index(device.host) for device in problem.devices]


def _whole(values: list[int]) -> NDArray[np.int64]:
    return np.array(values, dtype=np.int64)
