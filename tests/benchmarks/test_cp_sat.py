"""The CP-SAT peer against exhaustive search, its own starts and our MILP."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given

from benchmarks.jobs import PeerAnswer, PeerJob, apart, judge
from optpipe import Problem, Programs, simulate
from optpipe_solver.budget import Stop
from optpipe_solver.milp.horizon.model import improve_by_milp
from tests.building import UNIT, bus, offloadable, problem, stage
from tests.solver.exhaustive import optimum
from tests.solver.starting import started
from tests.strategies import Case, cases

pytestmark = pytest.mark.extended


@pytest.fixture(scope="module")
def peer() -> Iterator[Callable[..., PeerAnswer]]:
    """CP-SAT in a process of its own: OR-tools and highspy do not fit into one."""
    with apart("cp-sat") as ask:

        def answer(problem: Problem, start: Programs, seconds: float = 30.0) -> PeerAnswer:
            return ask(PeerJob(problem=problem, start=start, seconds=seconds, threads=1), 120.0)

        yield answer


TWO = [stage(0, 2, 3, 1), stage(1, 3, 2, 2)]
TINY = {
    "plenty": problem(TWO, m=2),
    "fused": problem([stage(0, 2, 3, 2, backward_ms=4), stage(1, 3, 2, 2, backward_ms=3)], m=2),
    "sync": problem([stage(0, 2, 3, 1, grad_sync_ms=5), stage(1, 3, 2, 2, grad_sync_ms=9)], m=2),
    "link": problem(
        [stage(0, 2, 3, 1, output_bytes=UNIT), stage(1, 3, 2, 2)],
        m=2,
        links=[{"from": 0, "to": 1, "latency_ms": 0.5, "bandwidth_gb_per_s": 2.0}],
    ),
    "one activation": problem(TWO, [{"memory_bytes": 10}] * 2, m=2),
    "wide context": problem(
        [stage(0, 2, 3, 1, weight_context_bytes=14), stage(1, 3, 2, 2)],
        [{"memory_bytes": 24}, {"memory_bytes": 20}],
        m=2,
    ),
    "workspace": problem(
        [
            stage(0, 2, 3, 1, weight_context_bytes=5, backward_input_workspace_bytes=6),
            stage(1, 3, 2, 2),
        ],
        [{"memory_bytes": 20}, {"memory_bytes": 20}],
        m=2,
    ),
    "recompute": problem(
        [stage(0, 2, 3, 1, recompute_ms=1, checkpoint_bytes=2), stage(1, 3, 2, 2)],
        [{"memory_bytes": 12}, {"memory_bytes": 20}],
        m=2,
    ),
    "offload": problem(
        [offloadable(0, 2, 3, 1, activation_bytes=2 * UNIT, offload_bytes=2 * UNIT), stage(1)],
        [bus(memory_bytes=2 * UNIT), bus()],
        m=2,
    ),
}


_BYTES = {"activation_bytes": 2 * UNIT, "offload_bytes": 2 * UNIT}
_SLOW = {"d2h_gb_per_s": 0.5, "h2d_gb_per_s": 0.5}


def _duplex(**fields: Any) -> Problem:
    """While one micro-batch is copied out the other comes back: its F and its I need the room."""
    passes = ("forward", "backward_input", "backward")
    room = {f"{name}_workspace_bytes": 2 * UNIT for name in passes}
    devices = [bus(memory_bytes=4 * UNIT, **_SLOW, **fields), bus()]
    return problem([offloadable(0, **_BYTES, **room), stage(1, 6, 2, 1)], devices, m=2)


def _vee(**fields: Any) -> Problem:
    """Both devices copy out at the same time, to make room for their second chunk."""
    leading = [offloadable(d, **_BYTES) for d in range(2)]
    rest = [stage(d, activation_bytes=2 * UNIT) for d in (1, 0)]
    return problem([*leading, *rest], [bus(memory_bytes=2 * UNIT, **_SLOW, **fields)] * 2, m=1)


def _chunks(limit: int, **first: Any) -> Problem:
    """One device, whose first chunk must shrink before its second one runs."""
    sizes = {"activation_bytes": 4 * UNIT, "weight_context_bytes": UNIT}
    stages = [stage(0, 2, 2, 3, **(sizes | first)), stage(0, 2, 2, 3, **sizes)]
    return problem(stages, [bus(memory_bytes=limit * UNIT)], m=1)


def _tight(**first: Any) -> Problem:
    """Two activations, and the first stage wants workspace besides."""
    stages = [stage(0, 2, 3, **first), stage(1, 3, 2, 2)]
    return problem(stages, [{"memory_bytes": 20}] * 2, m=2)


_COPIES = [offloadable(d, 2, 3, 1, **_BYTES) for d in range(2)]
TINY |= {
    "span": problem([stage(0), stage(1, 3, 2, 2)], m=2, objective="span"),
    "forward workspace": _tight(w=1, forward_workspace_bytes=6),
    "weight workspace": _tight(
        w=1, weight_context_bytes=5, backward_weight_workspace_bytes=6, backward_workspace_bytes=6
    ),
    "fused workspace": _tight(w=3, backward_ms=4, backward_workspace_bytes=6),
    "recompute workspace": problem(
        [
            stage(0, 2, 3, 1, recompute_ms=1, checkpoint_bytes=2, recompute_workspace_bytes=4),
            stage(1, 3, 2, 2),
        ],
        [{"memory_bytes": 14}, {"memory_bytes": 20}],
        m=2,
    ),
    "reductions queue": problem([stage(0, grad_sync_ms=7), stage(0, grad_sync_ms=5)], m=1),
    "only fused fits": problem(
        [stage(0, 1, 2, 4, weight_context_bytes=14)], [{"memory_bytes": 12}], m=2
    ),
    "full duplex": _duplex(),
    "half duplex": _duplex(half_duplex=True),
    "group of one": _duplex(pcie_group="a"),
    "apart": _vee(),
    "group": _vee(pcie_group="a"),
    "another host": problem(
        [_COPIES[0], stage(1, 6, 2, 2)],
        [bus(memory_bytes=2 * UNIT, host="a"), bus(host="b")],
        m=2,
        hosts=[{"name": "a", "memory_bytes": 4 * UNIT}, {"name": "b", "memory_bytes": 0}],
    ),
    "one host": problem(
        _COPIES,
        [bus(memory_bytes=2 * UNIT)] * 2,
        m=2,
        hosts=[{"name": "host0", "memory_bytes": 3 * UNIT}],
    ),
    "recompute in turn": _chunks(6, recompute_ms=3, checkpoint_bytes=UNIT),
    "recompute before I": problem(
        [
            stage(0, 4, 3, 4, weight_context_bytes=13, recompute_ms=1, checkpoint_bytes=3),
            stage(0, 3, 2, 3, backward_ms=4, backward_workspace_bytes=7),
        ],
        [{"memory_bytes": 23}],
        m=1,
    ),
    "half offloaded": _chunks(5, offload_bytes=2 * UNIT, recompute_ms=9, checkpoint_bytes=0),
    "too large a checkpoint": _chunks(
        5, offload_bytes=4 * UNIT, recompute_ms=1, checkpoint_bytes=2 * UNIT
    ),
}


def _menu(*modes: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A stage of v2 with the menu [keep, *modes]; 10 bytes each unless said."""
    named = [{"name": f"mode {n}", **mode} for n, mode in enumerate(modes, start=1)]
    return stage(0, 2, 3, 2, **fields) | {"modes": [{"name": "keep"}, *named]}


def _menus(first: dict[str, Any], limit: int) -> Problem:
    devices = [bus(memory_bytes=limit * UNIT), bus()]
    stages = [first, stage(1, 3, 2, 2)]
    return problem(stages, devices, m=2, format="optpipe/problem/v2")


_INSIDE = {"forward_bytes": 4 * UNIT, "recompute": "inside", "recompute_ms": 1}
_APART = {"forward_bytes": 4 * UNIT, "recompute": "apart", "recompute_ms": 1}
_TEN = {"activation_bytes": 10 * UNIT}
TINY |= {
    "inside": _menus(_menu(_INSIDE, **_TEN), 14),
    "inside with room": _menus(_menu(_INSIDE | {"inside_bytes": 7 * UNIT}, **_TEN), 14),
    "inside or part of it offloaded": _menus(
        _menu(_INSIDE | {"recompute_ms": 3}, {"offload_bytes": 5 * UNIT}, **_TEN), 15
    ),
    "an offloaded checkpoint": _menus(_menu(_APART | {"offload_bytes": 4 * UNIT}, **_TEN), 10),
    "a narrow context": _menus(_menu(_INSIDE | {"weight_context_bytes": 2 * UNIT}, **_TEN), 14),
    "uniform": _menus(_menu(_INSIDE, _APART, uniform_modes=True, **_TEN), 14),
    "messages queue": problem(
        [stage(0, 1, 3, 1, output_bytes=4 * UNIT), stage(1, 1, 1, 1)],
        m=2,
        format="optpipe/problem/v2",
        links=[{"from": 0, "to": 1, "latency_ms": 0.5, "bandwidth_gb_per_s": 1.0}],
    ),
}


@pytest.mark.parametrize("name", sorted(TINY))
def test_its_optimum_is_the_exhaustive_one(name: str, peer: Callable[..., PeerAnswer]) -> None:
    posed = TINY[name]
    said = peer(posed, started(posed).programs)
    assert said.status == "optimal"
    assert said.extra["refused"] == 0
    assert judge(posed, said.programs) == pytest.approx(optimum(posed))
    assert said.bound_ms == pytest.approx(optimum(posed))


@given(case=cases(menus=True))
def test_its_bound_is_below_every_legal_schedule(
    case: Case, peer: Callable[..., PeerAnswer]
) -> None:
    """Started from any legal schedule it finds one no worse, and no bound above that."""
    posed, programs = case
    said = peer(posed, programs, 1.0)
    found = judge(posed, said.programs)
    assert found is not None
    assert found <= simulate(posed, programs).objective_ms(posed.objective)
    assert said.status != "infeasible"
    assert said.bound_ms is None or said.bound_ms <= found * (1 + 1e-6)


def parked() -> Problem:
    """A small relative of `parking-p4-m7`: parking micro-batch 0 may beat every other order."""
    sizes = {"activation_bytes": 16 * UNIT, "offload_bytes": 16 * UNIT}
    half = {"weight_context_bytes": 8 * UNIT}
    stages = [offloadable(device, 4, 4, 2, **sizes, **half) for device in range(3)]
    return problem(stages, [bus(memory_bytes=32 * UNIT)] * 3, m=4)


@pytest.mark.parametrize("offload", [False, True])
def test_it_agrees_with_the_milp(offload: bool, peer: Callable[..., PeerAnswer]) -> None:
    """Where both prove, both prove the same; elsewhere neither bound is above the other's value."""
    half = {"weight_context_bytes": 5}
    without = problem(
        [stage(d, 4, 4, 2, **half) for d in range(3)], [{"memory_bytes": 20}] * 3, m=4
    )
    posed = parked() if offload else without
    ours = started(posed)
    said = peer(posed, ours.programs, 20.0)
    improve_by_milp(ours, Stop(15))
    found = judge(posed, said.programs)
    assert found is not None
    assert said.bound_ms is not None
    assert said.bound_ms <= ours.objective_ms * (1 + 1e-6)
    assert ours.bound_ms <= found * (1 + 1e-6)
