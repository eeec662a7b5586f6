"""What the plan MILP takes and is worth.

    python -m benchmarks.plan_milp [--seconds S] [--gib G] [--most-devices P] [--model NAME]
    python -m benchmarks.plan_milp --hand-rules [--seconds S] [--only PATTERN]

The first gives CPU seconds and gaps, pattern by pattern. The model is shaped like Llama-405B on
H100 in tensor parallelism: 126 equal layers, each with seven modes, between an embedding and a
head; times and sizes are round numbers. ``--model`` takes one of the models below in its place, on
a V, for ZB-V and V-Half. Wall times mean little on a shared machine: each row is the CPU time of
this process.

The second holds `plan` against what people write by hand: models from `estimate` on H100 with menus
of eight modes, at all of the card's memory and at less; cuts even and with one layer less at both
ends; one mode for all stages; 1F1B and interleaved 1F1B (`optpipe_solver.plan.hand_plans`). It
prints what fits, what the plan MILP makes of the same schedule with layers and a mode per stage
(half of ``--seconds`` each), and what `plan` finds among all in ``--seconds``, with their bounds;
and fails where `plan` is not at least as good as the best rule.
"""

from __future__ import annotations

import argparse
import fnmatch
import math
import sys
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from optpipe.model import Model
from optpipe.planning import Training, estimate, find_gpu, find_model
from optpipe.problem import placement_of
from optpipe.schedule import gap_of
from optpipe_solver import warm_up
from optpipe_solver.budget import Stop
from optpipe_solver.milp.plan import boundaries, patterns_of, plan_pattern
from optpipe_solver.plan import hand_cuts, hand_plans, plan

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["layered_model", "main"]

_MB = 10**6
_KEPT = 600 * _MB
_ROWS: tuple[tuple[str, int, int, tuple[str, ...]], ...] = (
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


# --- Against hand rules.

_CHUNKS = (1, 2, 4)
_COPIES_GB_PER_S = 21.0
_WIDE = Training(tp=8, dp=8, sequence=8192)
_EXPERTS = Training(dp=128, ep=64, sequence=4096)
_MODELS = {
    "llama3-70b": ("llama3-70b", 8, 32, _WIDE, (80, 32)),
    "llama3.1-405b": ("llama3.1-405b", 16, 64, _WIDE, (80, 64)),
    "deepseek-v3": ("deepseek-v3", 16, 64, _EXPERTS, (80, 64)),
}
"""Preset, devices, micro-batches, how it is trained, and GiB of each device, at most the card's."""


def hand_models() -> Iterator[tuple[str, Model]]:
    """Yield the models with their memory."""
    hardware = find_gpu("h100")
    rate, most = hardware.pcie_gb_per_s, int(hardware.memory_bytes.value)
    share = None if rate is None else _COPIES_GB_PER_S / rate.value
    for name, (preset, pp, m, training, limits) in _MODELS.items():
        for gib in limits:
            found = estimate(
                find_model(preset), hardware, training, pp=pp, num_microbatches=m, modes=8,
                pcie_efficiency=share, memory_bytes=min(most, gib * 2**30),
            )  # fmt: skip
            yield f"{name}-pp{pp}-m{m}-{gib}gib", found.model


def against_hand_rules(seconds: float, only: str) -> list[str]:
    """Print the tables; return where `plan` is worse than a rule."""
    faults = []
    for name, model in hand_models():
        if fnmatch.fnmatch(name, only):
            print(f"{name}", flush=True)
            best_ms = min(_of_pattern(model, *line, seconds) for line in _hand_lines(model))
            found = plan(model, time_limit_s=seconds, threads=2, chunks=_CHUNKS)
            if found.schedule is None:
                print(f"  plan: {found.message}", flush=True)
                continue
            ms = found.schedule.objective_ms
            label = "" if found.chosen is None else f"{found.chosen.label} x{found.chosen.chunks}"
            print(
                f"  plan        {ms:10,.1f} ms  {label} {found.schedule.provenance.method}, "
                f"gap {found.gap or 0:.2%}, {_left(best_ms, ms)}",
                flush=True,
            )
            by_label: dict[str, float] = {}
            for row in found.rows:
                if row.final_ms is not None:
                    chunked = f"{row.label} x{row.chunks}"
                    by_label[chunked] = min(row.final_ms, by_label.get(chunked, row.final_ms))
            print("    " + ", ".join(f"{chunked} {ms:,.1f}" for chunked, ms in by_label.items()))
            if ms > best_ms * (1 + 1e-9):
                faults.append(f"{name}: plan {ms} ms, by hand {best_ms} ms")
    return faults


def _hand_lines(model: Model) -> Iterator[tuple[str, int]]:
    for chunks in _CHUNKS:
        if chunks * len(model.devices) <= model.num_layers:
            yield ("linear" if chunks == 1 else "loop"), chunks


def _of_pattern(model: Model, shape: str, chunks: int, seconds: float) -> float:
    """Print the rules of a placement, and what the plan MILP makes of them; return the best."""
    placement = placement_of(shape, len(model.devices), chunks)
    best_ms, family = math.inf, ""
    for hand in hand_plans(model, placement):
        said = "-" if hand.objective_ms is None else f"{hand.objective_ms:,.1f}"
        print(
            f"  {hand.family:11} {chunks} {hand.cut:33} {hand.mode:60} {said:>10}",
            flush=True,
        )
        family = hand.family
        best_ms = min(best_ms, hand.objective_ms or math.inf)
    links = boundaries(model, placement)
    m, cuts = model.num_microbatches, hand_cuts(model, len(placement))
    for pattern in patterns_of(
        placement, m, links, transfers=True, recompute=True, names=(family,)
    ):
        began = time.process_time()
        found = plan_pattern(model, pattern, Stop(seconds / 2), cuts)
        spent = time.process_time() - began
        if isinstance(found, float):
            print(f"  {family:11} {chunks} plan MILP: none, bound {found:,.1f} ms", flush=True)
            continue
        gap = gap_of(found.path_ms, found.bound_ms) or 0.0
        counted = Counter(found.modes)
        print(
            f"  {family:11} {chunks} plan MILP {found.objective_ms:,.1f} ms, gap {gap:.2%} in "
            f"{spent:.0f} CPU s, {_left(best_ms, found.objective_ms)}; "
            + ", ".join(f"{count} x {mode}" for mode, count in counted.most_common()),
            flush=True,
        )
    return best_ms


def _left(best_ms: float, ms: float) -> str:
    if best_ms == math.inf:
        return "no rule fits"
    return f"{1 - ms / best_ms:.2%} less than the best by hand"


def main() -> None:
    """Print one row per placement and pattern."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=30.0, help="wall time of each pattern")
    parser.add_argument("--gib", type=float, default=80.0, help="memory of each device")
    parser.add_argument("--most-devices", type=int, default=32)
    parser.add_argument("--hand-rules", action="store_true", help="hold plan against hand rules")
    parser.add_argument("--only", default="*", help="glob of models, with --hand-rules")
    parser.add_argument("--model", help="name of a model of --hand-rules, instead of round numbers")
    options = parser.parse_args()
    if options.hand_rules:
        warm_up()
        sys.exit("\n".join(against_hand_rules(options.seconds, options.only)) or 0)
    rows = [row for row in _ROWS if row[1] <= options.most_devices]
    given = None
    if options.model:
        models = dict(hand_models())
        if options.model not in models:
            parser.error(f"--model {options.model}: must be one of {', '.join(models)}")
        given = models[options.model]
        rows = [("v", len(given.devices), 2, ("zb-v", "v-half"))]
    for shape, p, chunks, names in rows:
        model = given or layered_model(p, 4 * p, options.gib)
        placement, m = placement_of(shape, p, chunks), model.num_microbatches
        links = boundaries(model, placement)
        for pattern in patterns_of(
            placement, m, links, transfers=True, recompute=given is not None, names=names
        ):
            began = time.process_time()
            found = plan_pattern(model, pattern, Stop(options.seconds))
            spent = time.process_time() - began
            row = f"p={p} v={chunks} m={m} {pattern.name:12} {spent:6.1f} CPU-s  "
            if isinstance(found, float):
                print(f"{row} no plan, bound {found:,.1f} ms")
                continue
            gap = 100 * (1 - found.bound_ms / found.path_ms)
            used = ", ".join(dict.fromkeys(found.modes))
            print(f"{row} {found.objective_ms:10,.1f} ms  gap {gap:.2f}%  modes: {used}")


if __name__ == "__main__":
    main()
