"""The small problems that the documentation shows: equal times, so that a figure can be counted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from optpipe import Problem

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["GB", "PASS_MS", "line"]

GB = 10**9
PASS_MS = 10.0
"""F, I and W take 10 ms each; an activation on a device is 1 GB, half of which is held until W."""

_PLENTY = 1000
_COPY_GB_PER_S = 100.0


def line(
    num_devices: int,
    num_microbatches: int,
    *,
    activations: float = _PLENTY,
    times: tuple[float, float, float] = (PASS_MS, PASS_MS, PASS_MS),
    offload: float | None = None,
    recompute: bool = False,
    **fields: Any,
) -> Problem:
    """Return a problem of one stage per device.

    Parameters
    ----------
    num_devices, num_microbatches
        Their numbers, at least 1.
    activations
        Room per device, in micro-batches of its stage.
    times
        F, I and W in ms.
    offload
        One-way copy of an activation over F + I + W; None: nothing can be offloaded.
    recompute
        Whether a stage may be recomputed, in the time of F, from a tenth of the activation.
    fields
        Of the problem, for example ``objective``.
    """
    forward, backward_input, backward_weight = times
    stage: dict[str, Any] = {
        "forward_ms": forward,
        "backward_input_ms": backward_input,
        "backward_weight_ms": backward_weight,
        "activation_bytes": GB,
        "weight_context_bytes": GB // 2,
    }
    device: dict[str, Any] = {"memory_bytes": round(activations * GB)}
    if offload is not None:
        # 1 GB at r GB/s takes 1000 / r ms.
        rate = 1000.0 / (offload * sum(times)) if offload > 0 else _COPY_GB_PER_S
        stage["offload_bytes"] = GB
        device |= {"d2h_gb_per_s": rate, "h2d_gb_per_s": rate}
    if recompute:
        stage |= {"recompute_ms": forward, "checkpoint_bytes": GB // 10}
    return _parsed(num_devices, num_microbatches, stage, device, fields)


def _parsed(
    num_devices: int,
    num_microbatches: int,
    stage: Mapping[str, Any],
    device: Mapping[str, Any],
    fields: Mapping[str, Any],
) -> Problem:
    return Problem.parse(
        {
            "name": f"p{num_devices}-m{num_microbatches}",
            "num_microbatches": num_microbatches,
            "devices": [dict(device) for _ in range(num_devices)],
            "stages": [{"device": index, **stage} for index in range(num_devices)],
            **fields,
        }
    )
