"""Larger random pipelines than `tests.strategies`: up to five devices, m on both sides of p."""

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from optpipe import Problem, Programs
from optpipe_solver.families.common import NotApplicable, NotApplicableReason
from tests.building import PLENTY

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
) -> Problem:
    """Stage k on the (k mod p)-th device; zero, small or large communication; unequal times.

    ``memory`` draws the bytes of a device beside its reserved and static ones, given its stages.
    """
    p = draw(st.integers(1, 5))
    rounds = draw(st.integers(2, 4)) if chunks is None else chunks
    num_devices = p + draw(st.integers(0, 1))
    order = draw(st.permutations(range(num_devices)))[:p]
    stages = [draw(_stages(order[k % p], recompute=recompute)) for k in range(p * rounds)]
    devices: list[dict[str, Any]] = []
    for index in range(num_devices):
        own = [stage for stage in stages if stage["device"] == index]
        room = PLENTY if memory is None else memory(draw, own)
        static = sum(stage["static_bytes"] for stage in own)
        devices.append({"memory_bytes": room + static + 3, "reserved_bytes": 3})
    communication = draw(st.sampled_from([0, 1, 50]))
    return Problem.parse(
        {
            "num_microbatches": draw(st.integers(1, 9)),
            "objective": draw(st.sampled_from(["makespan", "span"])),
            "devices": devices,
            "stages": stages,
            "links": [
                {"from": a, "to": b, "latency_ms": communication}
                for a in range(num_devices)
                for b in range(a)
            ],
        }
    )


@st.composite
def _stages(draw: st.DrawFn, device: int, *, recompute: bool) -> dict[str, Any]:
    activation = draw(st.integers(0, 20))
    stage: dict[str, Any] = {
        "device": device,
        "forward_ms": draw(times),
        "backward_input_ms": draw(times),
        "backward_weight_ms": draw(times),
        "activation_bytes": activation,
        "weight_context_bytes": draw(st.integers(0, 25)),
        "static_bytes": draw(st.integers(0, 5)),
        "grad_sync_ms": draw(st.sampled_from([0, 0, 4])),
    }
    if recompute:
        stage |= {"recompute_ms": draw(times), "checkpoint_bytes": draw(st.integers(0, activation))}
    for name in ("forward", "backward_input", "backward_weight"):
        stage[f"{name}_workspace_bytes"] = draw(workspaces)
    return stage
