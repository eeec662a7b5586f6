"""Problems in which every pass takes time and every stage can be offloaded and recomputed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

from tests.building import UNIT, bus, problem, stage

if TYPE_CHECKING:
    from optpipe import Problem

_PLACEMENTS = ([0], [0, 1], [0, 1, 2], [0, 1, 1, 0], [0, 1, 0, 1], [0, 0, 1])
_WORKSPACES = ("forward", "backward_input", "backward_weight", "backward", "recompute")


@st.composite
def shrinkable_problems(draw: st.DrawFn) -> Problem:
    """Unequal times and bytes, workspaces, delays, half-duplex devices, shared buses, two hosts."""
    placement = draw(st.sampled_from(_PLACEMENTS))
    times = st.integers(1, 5)
    stages = [_shrinkable(draw, device) for device in placement]
    devices = [
        bus(
            d2h_gb_per_s=draw(st.sampled_from([1.0, 0.5])),
            half_duplex=draw(st.booleans()),
            pcie_group=draw(st.sampled_from([None, None, "shared"])),
            host=draw(st.sampled_from(["host0", "host1"])),
        )
        for _ in range(1 + max(placement))
    ]
    # A shared bus is one of one host.
    for device in devices:
        if device["pcie_group"] is not None:
            device["pcie_group"] = f"shared of {device['host']}"
    links = [{"from": 0, "to": 1, "latency_ms": draw(times)}] if len(devices) > 1 else []
    return problem(stages, devices, m=4, links=links)


def _shrinkable(draw: st.DrawFn, device: int) -> dict[str, Any]:
    times, units = st.integers(1, 5), st.integers(1, 4)
    activation = draw(units)
    fields: dict[str, Any] = {
        "activation_bytes": activation * UNIT,
        "offload_bytes": draw(st.integers(1, activation)) * UNIT,
        "weight_context_bytes": draw(st.integers(0, 5)) * UNIT,
        "recompute_ms": draw(times),
        "checkpoint_bytes": draw(st.integers(0, activation * UNIT)),
        "backward_ms": draw(st.none() | times),
    }
    for name in _WORKSPACES:
        fields[f"{name}_workspace_bytes"] = draw(st.sampled_from([0, 0, UNIT]))
    return stage(device, draw(times), draw(times), draw(times), **fields)
