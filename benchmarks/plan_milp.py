"""``python -m benchmarks.plan_milp``: CPU seconds and gaps of the plan MILP, pattern by pattern.

The model is shaped like Llama-405B on H100 in tensor parallelism: 126 equal layers, each with seven
modes, between an embedding and a head; times and sizes are round numbers. Wall times mean little on
a shared machine: each row is the CPU time of this process.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from optpipe.model import Model
from optpipe.problem import placement_of
from optpipe_solver.budget import Stop
from optpipe_solver.milp.plan import boundaries, patterns_of, plan_pattern

__all__ = ["layered_model", "main"]

_MB = 10**6
_KEPT = 600 * _MB
_ROWS = (
    ("linear", 8, 1, ("1f1b", "zb-h1")),
    ("linear", 16, 1, ("1f1b", "zb-h1")),
    ("linear", 32, 1, ("1f1b",)),
    ("loop", 8, 4, ("interleaved",)),
    ("v", 8, 2, ("zb-v", "v-half")),
)


def layered_model(num_devices: int, num_microbatches: int, memory_gib: float) -> Model:
    """Return the model; memory is that of each device."""

    def inside(name: str, kept: float, ms: float) -> dict[str, Any]:
        left = int(_KEPT * kept)
        again = {"recompute": "inside", "recompute_ms": ms, "inside_bytes": _KEPT - left}
        return {"name": name, "forward_bytes": left, **again}

    modes = [
        {"name": "keep"},
        inside("norms", 0.8, 0.3),
        inside("mlp", 0.6, 1.2),
        inside("attention", 0.55, 1.8),
        inside("full", 0.06, 4.4),
        {"name": "half offload", "offload_bytes": _KEPT // 2},
        {"name": "offload", "offload_bytes": int(_KEPT * 0.95)},
    ]
    layer = {
        "repeat": 126, "forward_ms": 4.4, "backward_input_ms": 4.9, "backward_weight_ms": 4.1,
        "activation_bytes": _KEPT, "weight_context_bytes": int(_KEPT * 0.7),
        "output_bytes": 30 * _MB, "static_bytes": 700 * _MB, "modes": modes,
    }  # fmt: skip
    first = {
        "forward_ms": 0.5, "backward_input_ms": 0.1, "backward_weight_ms": 0.6,
        "activation_bytes": 30 * _MB, "output_bytes": 30 * _MB, "static_bytes": 2000 * _MB,
    }  # fmt: skip
    last = {
        "forward_ms": 7.0, "backward_input_ms": 7.2, "backward_weight_ms": 7.0,
        "activation_bytes": 900 * _MB, "output_bytes": 0, "static_bytes": 2000 * _MB,
    }  # fmt: skip
    device = {"memory_bytes": int(memory_gib * 2**30), "d2h_gb_per_s": 20.0, "h2d_gb_per_s": 20.0}
    return Model.parse(
        {
            "num_microbatches": num_microbatches,
            "devices": [device] * num_devices,
            "layers": [first, layer, last],
            "default_link": {"latency_ms": 0.01, "bandwidth_gb_per_s": 40},
        }
    )


def main() -> None:
    """Print one row per placement and pattern."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=30.0, help="wall time of each pattern")
    parser.add_argument("--gib", type=float, default=80.0, help="memory of each device")
    parser.add_argument("--most-devices", type=int, default=32)
    asked = parser.parse_args()
    for shape, p, chunks, names in _ROWS:
        if p > asked.most_devices:
            continue
        model = layered_model(p, 4 * p, asked.gib)
        placement = placement_of(shape, p, chunks)
        links = boundaries(model, placement)
        for pattern in patterns_of(placement, 4 * p, links, transfers=True, recompute=False):
            if pattern.name in names:
                began = time.process_time()
                found = plan_pattern(model, pattern, Stop(asked.seconds))
                spent = time.process_time() - began
                row = f"p={p} v={chunks} m={4 * p} {pattern.name:12} {spent:6.1f} CPU-s  "
                if isinstance(found, float):
                    print(f"{row} no plan, bound {found:,.1f} ms")
                    continue
                gap = 100 * (1 - found.bound_ms / found.path_ms)
                used = ", ".join(dict.fromkeys(found.modes))
                print(f"{row} {found.objective_ms:10,.1f} ms  gap {gap:.2f} %  modes: {used}")


if __name__ == "__main__":
    main()
