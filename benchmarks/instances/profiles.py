"""Published profiles as stages, and the devices they stand on.

Zero Bubble: Qi et al., ICLR 2024 (arXiv 2401.10241), tables 5 and 9. PipeOffload: Wan et al., ICML
2025 (arXiv 2503.01328), models of its figure 15 and k = one-way transfer over F + I + W. Times are
per stage and micro-batch, rounded to 0.001 ms, so that CP-SAT's whole numbers are exact.
"""

from __future__ import annotations

from typing import Any

__all__ = ["RATE", "ZB", "device", "pipeline", "placed", "stage", "with_context", "zb_stage"]

RATE = 20.0
"""GB/s each way: a transfer of t ms moves t * RATE * 1e6 bytes."""

Object = dict[str, Any]
PASSES = ("forward_ms", "backward_input_ms", "backward_weight_ms")

ZB: dict[str, tuple[float, float, float, float, int, int, int, int, int]] = {
    # name: F, I, W, communication ms; hidden, heads, layers per stage, micro-batch size, seq
    "1.5b": (18.522, 18.086, 9.337, 0.601, 2304, 24, 3, 6, 1024),
    "6.2b": (29.718, 29.444, 19.927, 0.527, 4096, 32, 4, 3, 1024),
    "14.6b": (11.347, 11.248, 8.132, 0.377, 5120, 40, 3, 1, 1024),
    "28.3b": (10.419, 10.207, 7.715, 0.408, 6144, 48, 2, 1, 1024),
}


def zb_stage(name: str) -> Object:
    """A stage of the Zero Bubble table: sequence x batch x (34 h + 5 a s) bytes per layer."""
    f, i, w, _, hidden, heads, layers, batch, seq = ZB[name]
    full = seq * batch * (34 * hidden + 5 * heads * seq) * layers
    return {
        **_times(f, i, w),
        "activation_bytes": full,
        "weight_context_bytes": 32 * seq * batch * hidden * layers,
    }


def stage(f: float, i: float, w: float, *, context: float = 0.5, size: int = 10**9) -> Object:
    """A stage of given times; ``context`` is the share of the activation held until W."""
    return {
        **_times(f, i, w),
        "activation_bytes": size,
        "weight_context_bytes": int(context * size),
    }


def _times(f: float, i: float, w: float) -> Object:
    rounded = (round(f, 3), round(i, 3), round(w, 3))
    return dict(
        zip(("forward_ms", "backward_input_ms", "backward_weight_ms"), rounded, strict=True)
    )


def with_context(held: Object, *, offload: float = 0.0, recompute: float = 0.0) -> Object:
    """Let a stage be offloaded in ``offload`` x (F + I + W) ms one way, or recomputed.

    All of the activation is moved: its size is set to what ``RATE`` moves in that time, and the
    weight context keeps its share. ``recompute`` is the share of F that recomputing takes; a
    tenth of the activation is the checkpoint.
    """
    changed = dict(held)
    if offload:
        length = sum(
            held[f"{part}_ms"] for part in ("forward", "backward_input", "backward_weight")
        )
        size = round(round(offload * length, 3) * RATE * 1e6)
        share = held["weight_context_bytes"] / held["activation_bytes"]
        changed |= {
            "activation_bytes": size,
            "offload_bytes": size,
            "weight_context_bytes": round(share * size),
        }
    if recompute:
        changed |= {
            "recompute_ms": round(recompute * held["forward_ms"], 3),
            "checkpoint_bytes": changed["activation_bytes"] // 10,
        }
    return changed


def device(**fields: Any) -> Object:
    """A device that can offload at `RATE` both ways; its memory is set by the limit."""
    return {"memory_bytes": 2**50, "d2h_gb_per_s": RATE, "h2d_gb_per_s": RATE, **fields}


def placed(shape: str, p: int, chunks: int) -> list[int]:
    """Devices of the stages in model order: ``line`` and ``loop`` go round, ``v`` turns back."""
    turns = [list(range(p)) for _ in range(chunks)]
    if shape == "v":
        turns = [row[::-1] if index % 2 else row for index, row in enumerate(turns)]
    return [d for row in turns for d in row]


def pipeline(
    held: Object | list[Object],
    p: int,
    m: int,
    *,
    shape: str = "line",
    chunks: int = 1,
    **fields: Any,
) -> Object:
    """A problem document: one stage repeated (a chunk holds its share), or a list of stages."""
    places = placed(shape, p, chunks)
    stages = held if isinstance(held, list) else [_share(held, chunks)] * len(places)
    return {
        "format": "optpipe/problem/v1",
        "num_microbatches": m,
        "devices": [device() for _ in range(p)],
        "stages": [{"device": d, **one} for d, one in zip(places, stages, strict=True)],
        **fields,
    }


def _share(held: Object, chunks: int) -> Object:
    if chunks == 1:
        return held
    return {
        key: round(value / chunks, 3) if key.endswith("_ms") else value // chunks
        for key, value in held.items()
    }
