"""Small problems and programs, written short.

Sizes are multiples of `UNIT` where a transfer's time matters: one UNIT takes 1 ms at 1 GB/s and
2 ms at 0.5 GB/s, so every time in these tests is a whole number and equality is exact.
"""

from typing import Any

from optpipe import Problem, Programs, parse_action

UNIT = 1_000_000
PLENTY = 10**12


def stage(
    device: int = 0, f: float = 1, i: float = 1, w: float = 1, **fields: Any
) -> dict[str, Any]:
    """A stage of 10 bytes per micro-batch; any field can be given."""
    times = {"forward_ms": f, "backward_input_ms": i, "backward_weight_ms": w}
    return {"device": device, **times, "activation_bytes": 10, **fields}


def offloadable(
    device: int = 0, f: float = 1, i: float = 1, w: float = 1, **fields: Any
) -> dict[str, Any]:
    """A stage whose OFFLOAD and RELOAD take 10 ms each on `bus()`."""
    sizes = {"activation_bytes": 10 * UNIT, "offload_bytes": 10 * UNIT}
    return stage(device, f, i, w, **(sizes | fields))


def bus(**fields: Any) -> dict[str, Any]:
    """A device with 1 GB/s each way and memory enough."""
    return {"memory_bytes": PLENTY, "d2h_gb_per_s": 1.0, "h2d_gb_per_s": 1.0, **fields}


def document(
    stages: list[dict[str, Any]],
    devices: list[dict[str, Any]] | None = None,
    m: int = 1,
    **fields: Any,
) -> dict[str, Any]:
    """The JSON-like object of a problem; devices have plenty of memory unless given.

    It is of v2 where a stage says its layers.
    """
    if devices is None:
        devices = [bus() for _ in range(1 + max(one_stage["device"] for one_stage in stages))]
    if any("layers" in one_stage for one_stage in stages):
        fields = {"format": "optpipe/problem/v2", **fields}
    return {"num_microbatches": m, "devices": devices, "stages": stages, **fields}


def problem(
    stages: list[dict[str, Any]],
    devices: list[dict[str, Any]] | None = None,
    m: int = 1,
    **fields: Any,
) -> Problem:
    """The problem of a `document`."""
    return Problem.parse(document(stages, devices, m, **fields))


def programs(*rows: str) -> Programs:
    """Programs from one text per device, actions separated by spaces."""
    return tuple(tuple(parse_action(cell) for cell in row.split()) for row in rows)


def one_f_one_b(num_devices: int, m: int, backward: str = "B") -> Programs:
    """1F1B on a linear placement; fused, a gradient leaves only when W is done too; or as "IW"."""
    rows = []
    for device in range(num_devices):
        ahead = min(num_devices - device - 1, m)
        row = [f"{device}F{j}" for j in range(ahead)]
        for j in range(m):
            if ahead + j < m:
                row.append(f"{device}F{ahead + j}")
            row += [f"{device}{kind}{j}" for kind in backward]
        rows.append(" ".join(row))
    return programs(*rows)


def everything_at_once() -> tuple[Problem, Programs]:
    """One problem and its programs with every feature of v1, for tests of round trips and reading.

    Three devices on two hosts, V placement, unequal stages, both link forms, a shared PCIe group, a
    half-duplex device, a host limit, workspaces, static and reserved bytes, gradient reductions,
    offload, recompute, split and fused backwards, the span objective.
    """
    stages = [
        offloadable(0, 3, 4, 2, weight_context_bytes=4 * UNIT, output_bytes=UNIT, static_bytes=7),
        stage(1, 2, 2, 1, backward_ms=2.5, output_bytes=2 * UNIT, recompute_ms=2,
              checkpoint_bytes=3, recompute_workspace_bytes=5),
        offloadable(2, 2, 3, 2, offload_bytes=6 * UNIT, output_bytes=UNIT, grad_sync_ms=4),
        stage(2, 2, 2, 2, weight_context_bytes=14, forward_workspace_bytes=2),
        stage(1, 1, 2, 1, backward_input_workspace_bytes=3, backward_weight_workspace_bytes=1),
        stage(0, 5, 4, 1, backward_ms=3, backward_workspace_bytes=9, grad_sync_ms=1.5),
    ]  # fmt: skip
    devices = [
        bus(name="left", memory_bytes=64 * UNIT, reserved_bytes=UNIT, pcie_group="uplink"),
        {"memory_bytes": 1000, "host": "other"},
        bus(d2h_gb_per_s=0.5, half_duplex=True, pcie_group="uplink"),
    ]
    links = [
        {"from": 0, "to": 1, "latency_ms": 0.5, "bandwidth_gb_per_s": 2.0},
        {"from": 2, "to": 1, "latency_ms": 1},
        {"from": 1, "to": 2, "bandwidth_gb_per_s": 4.0},
    ]
    whole = problem(
        stages, devices, m=2, links=links, name="everything", objective="span",
        hosts=[{"name": "host0", "memory_bytes": 40 * UNIT}],
    )  # fmt: skip
    rows = programs(
        "0F0 0OFFLOAD0 0F1 0RELEASE0 5F0 5B0 0RELOAD0 5F1 5I1 5W1 0I0 0W0 0B1",
        "1F0 1F1 4F0 4F1 4I0 1RECOMPUTE0 4W0 4B1 1B0 1I1 1W1",
        "2F0 2OFFLOAD0 3F0 2F1 2OFFLOAD1 2RELEASE0 3F1 2RELEASE1 2RELOAD0 3I0 2I0 2RELOAD1 3B1"
        " 3W0 2I1 2W0 2W1",
    )
    return whole, rows
