"""Larger random pipelines than `tests.strategies`: up to five devices, m on both sides of p."""

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from optpipe import Problem, Programs
from optpipe_solver.families.common import NotApplicable, NotApplicableReason
from tests.building import PLENTY, problem, stage

times = st.integers(0, 9)
workspaces = st.sampled_from([0, 0, 1, 7])


def built(build: Callable[[Problem], Programs], given: Problem) -> Programs | NotApplicableReason:
    """The programs, or why there are none, which is said in words."""
    try:
        return build(given)
    except NotApplicable as answer:
        refused = answer
    assert len(str(refused)) > 20
    assert "Error" not in str(refused)
    return refused.reason


@st.composite
def lines(
    draw: st.DrawFn, *, recompute: bool = False, memory: Callable[..., int] | None = None
) -> Problem:
    """One stage per device, in any device order, one device perhaps idle."""
    return draw(loops(chunks=1, recompute=recompute, memory=memory))


@st.composite
def loops(
    draw: st.DrawFn,
    *,
    chunks: int | None = None,
    recompute: bool = False,
    memory: Callable[..., int] | None = None,
    turns: bool = False,
) -> Problem:
    """Stage k on the (k mod p)-th device; zero, small or large communication; unequal times.

    ``memory`` draws the bytes of a device beside its reserved and static ones, given its stages.
    ``turns``: two stages on each device, in a V.
    """
    p = draw(st.integers(1, 5))
    rounds = draw(st.integers(2, 4)) if chunks is None else chunks
    num_devices = p + (0 if turns else draw(st.integers(0, 1)))
    order = draw(st.permutations(range(num_devices)))[:p]
    placement = [*order, *reversed(order)] if turns else [*order] * rounds
    stages = [draw(_stages(device, recompute=recompute, fused=turns)) for device in placement]
    devices: list[dict[str, Any]] = []
    for index in range(num_devices):
        own = [one_stage for one_stage in stages if one_stage["device"] == index]
        room = PLENTY if memory is None else memory(draw, own)
        static = sum(one_stage["static_bytes"] for one_stage in own)
        devices.append({"memory_bytes": room + static + 3, "reserved_bytes": 3})
    slow_ms = draw(st.sampled_from([0, 1, 50]))
    links = [
        {"from": a, "to": b, "latency_ms": draw(st.sampled_from([slow_ms, slow_ms, 0]))}
        for a in range(num_devices)
        for b in range(a)
    ]
    objective = draw(st.sampled_from(["makespan", "span"]))
    return problem(stages, devices, draw(st.integers(1, 9)), links=links, objective=objective)


def v_problems() -> st.SearchStrategy[Problem]:
    """Device d holds stages d and 2p - 1 - d, in any device order; all of a stage's fields."""
    return loops(chunks=2, turns=True)


@st.composite
def _stages(draw: st.DrawFn, device: int, *, recompute: bool, fused: bool) -> dict[str, Any]:
    activation = draw(st.integers(0, 20))
    fields: dict[str, Any] = {
        "activation_bytes": activation,
        "weight_context_bytes": draw(st.integers(0, 25)),
        "static_bytes": draw(st.integers(0, 5)),
        "grad_sync_ms": draw(st.sampled_from([0, 0, 4])),
    }
    if recompute:
        fields |= {
            "recompute_ms": draw(times),
            "checkpoint_bytes": draw(st.integers(0, activation)),
        }
    if fused:
        fields |= {
            "backward_ms": draw(st.none() | times),
            "backward_workspace_bytes": draw(workspaces),
        }
    for name in ("forward", "backward_input", "backward_weight"):
        fields[f"{name}_workspace_bytes"] = draw(workspaces)
    return stage(device, draw(times), draw(times), draw(times), **fields)
