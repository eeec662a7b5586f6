"""WIP"""

from __future__ import annotations

import random
from optpipe import Problem
from optpipe_solver.feasibility import smallest_memory

GB = 10**9
UNIT = 10**6


def random_problem(seed: int, *, menus: bool = False) -> Problem:
    rng = random.Random(seed)
    while True:
        problem = _draw(rng)
        if problem is not None:
            return problem


def _draw(rng):
    p = rng.randint(1, 4)
    chunks = rng.choice([1, 1, 1, 2]) if p < 4 else 1
    line = list(range(p))
    if chunks == 2:
        placement = line + (line[::-1] if rng.random() < 0.5 else line)
    else:
        placement = line
    s = len(placement)
    choices = [m for m in range(1, 9) if 4 <= s * m <= 15]
    m = rng.choice(choices)
    offload, recompute, fused = (rng.random() < x for x in (0.6, 0.5, 0.4))
    equal = rng.random() < 0.3
    devices = []
    rate = rng.choice([0.5, 1.0, 1.0, 2.0])
    group = rng.random() < 0.15
    for d in range(p):
        dev = {"memory_bytes": 10**12}
        if offload:
            dev |= {"d2h_gb_per_s": rate, "h2d_gb_per_s": rate, "half_duplex": rng.random() < 0.2}
            if group:
                dev["pcie_group"] = f"{d // 2}"
        devices.append(dev)
    base = None
    stages = []
    for d in placement:
        if base is None or not equal:
            act = rng.randint(2, 6)
            base = {
                "forward_ms": rng.randint(1, 6),
                "backward_input_ms": rng.randint(1, 6),
                "backward_weight_ms": rng.randint(1, 5),
                "activation_bytes": act * UNIT,
                "weight_context_bytes": rng.randint(0, act) * UNIT,
                "grad_sync_ms": rng.choice([0, 0, 0, 2, 4]),
            }
            if offload:
                base["offload_bytes"] = rng.randint(1, act) * UNIT
            if recompute:
                base |= {
                    "recompute_ms": rng.randint(1, 5),
                    "checkpoint_bytes": rng.randint(0, act - 1) * UNIT,
                }
            if fused:
                base["backward_ms"] = max(
                    1, base["backward_input_ms"] + base["backward_weight_ms"] - rng.randint(0, 2)
                )
            if rng.random() < 0.3:
                base["forward_workspace_bytes"] = rng.randint(0, 1) * UNIT
                base["backward_input_workspace_bytes"] = rng.randint(0, 1) * UNIT
        stages.append({"device": d, **base})
    links = []
    if rng.random() < 0.5:
        links = [{"from": d, "to": d + 1, "latency_ms": rng.randint(0, 2)} for d in range(p - 1)]
    doc = {
        "format": "optpipe/problem/v1",
        "num_microbatches": m,
        "objective": rng.choice(["makespan"] * 3 + ["span"]),
        "devices": devices,
        "stages": stages,
        "links": links,
    }
    problem = Problem.parse(doc)
    least = smallest_memory(problem)
    new = []
    for d, held in enumerate(problem.devices):
        full = (
            sum(
                max(problem.stages[k].activation_bytes, problem.stages[k].weight_context_bytes)
                for k in problem.stages_of[d]
            )
            * m
            + UNIT
        )
        share = rng.choice([0.0, 0.1, 0.2, 0.3, 0.5, 0.8])
        top = max(full, least[d])
        size = least[d] + int(share * (top - least[d])) // UNIT * UNIT
        new.append(devices[d] | {"memory_bytes": size})
    return Problem.parse(doc | {"devices": new})
