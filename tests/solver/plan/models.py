"""Small models, written short, and random ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

from optpipe.model import Model
from tests.building import PLENTY

if TYPE_CHECKING:
    from collections.abc import Iterator

times = st.integers(0, 5)
sizes = st.integers(0, 6)


def layer(f: float = 1, i: float = 1, w: float = 1, **fields: Any) -> dict[str, Any]:
    """A layer of 10 bytes per micro-batch; any field can be given."""
    passes = {"forward_ms": f, "backward_input_ms": i, "backward_weight_ms": w}
    return {**passes, "activation_bytes": 10, **fields}


def gpus(count: int, **fields: Any) -> list[dict[str, Any]]:
    """Equal devices with plenty of memory."""
    return [{"memory_bytes": PLENTY, **fields} for _ in range(count)]


def model(
    layers: list[dict[str, Any]], devices: list[dict[str, Any]], m: int = 4, **fields: Any
) -> Model:
    """The model of these layers and devices."""
    data = {"num_microbatches": m, "devices": devices, "layers": layers, **fields}
    return Model.parse(data)


def all_cuts(num_layers: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    """Every way to cut layers into stages."""
    if num_stages == 1:
        if num_layers:
            yield (num_layers,)
        return
    for first in range(1, num_layers - num_stages + 2):
        for rest in all_cuts(num_layers - first, num_stages - 1):
            yield (first, *rest)


@st.composite
def layers(draw: st.DrawFn) -> dict[str, Any]:
    """One layer as a JSON-like object, every field drawn."""
    activation = draw(sizes)
    fields: dict[str, Any] = {
        "forward_ms": draw(times),
        "backward_input_ms": draw(times),
        "backward_weight_ms": draw(times),
        "backward_ms": draw(st.none() | times),
        "activation_bytes": activation,
        "weight_context_bytes": draw(st.none() | sizes),
        "offload_bytes": draw(st.integers(0, activation)),
        "static_bytes": draw(sizes),
        "output_bytes": draw(sizes),
        "grad_sync_ms": draw(times),
    }
    if draw(st.booleans()):
        fields["recompute_ms"] = draw(times)
        fields["checkpoint_bytes"] = draw(st.integers(0, activation))
    for name in ("forward", "backward_input", "backward_weight", "backward", "recompute"):
        fields[f"{name}_workspace_bytes"] = draw(sizes)
    return fields


@st.composite
def models(draw: st.DrawFn, *, chunks: int = 1, roomy: bool = False) -> Model:
    """Up to six layers on up to three devices of different speed and memory, links between.

    There are layers for ``chunks`` stages per device, and two devices where that is not 1.
    """
    count = draw(st.integers(1 if chunks == 1 else 2, 3))
    devices = [
        {
            "memory_bytes": PLENTY if roomy else draw(st.integers(10, 60)),
            "speed": draw(st.sampled_from([1, 2, 0.5])),
            "d2h_gb_per_s": 1,
            "h2d_gb_per_s": 1,
        }
        for _ in range(count)
    ]
    data = {
        "num_microbatches": draw(st.integers(1, 4)),
        "objective": draw(st.sampled_from(["makespan", "span"])),
        "devices": devices,
        "layers": draw(st.lists(layers(), min_size=count * chunks, max_size=6)),
        "default_link": {"latency_ms": draw(times)},
    }
    return Model.parse(data)
