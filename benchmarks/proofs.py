"""Random small problems: how many are proven optimal within some CPU seconds, by us and by CP-SAT.

    python -m benchmarks.proofs [--number 100] [--seed 0] [--seconds 5] [--only ours] [--show]

Problems have 4 to 15 cells (stages x micro-batches), times in whole ms, memory between the smallest
and that for everything, and of offload, recompute, fused backwards, shared copy lanes, hosts,
workspaces, gradient reductions and links what chance gives them; a fifth has menus of v2, and so
messages that wait for each other. The n-th problem depends on seed and n alone. Each contestant has
one thread and so many seconds of its own process's CPU, whatever else the machine does; CP-SAT gets
the best family as its start and the closed-form bound as its floor, both for nothing. Exits with 1
where a bound lies above a schedule of anybody: then a proof is false.
"""

from __future__ import annotations

import argparse
import random
import sys
from contextlib import ExitStack
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.jobs import PeerAnswer, PeerJob, apart, judge
from optpipe import Problem
from optpipe.problem import placement_of

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main", "random_problem"]

_UNIT = 1_000_000
_TOLERANCE = 1e-6
_SHAPES = (("linear", 2, 1), ("linear", 3, 1), ("linear", 4, 1), ("linear", 5, 1), ("v", 2, 2))
_PLENTY = 10**12


def random_problem(seed: int, number: int) -> Problem:
    """Return the ``number``-th problem of a seed; it has a schedule, and memory is short."""
    rng = random.Random(f"{seed} {number}")
    placement, num_devices, chunks = rng.choice(_SHAPES)
    num_stages = num_devices * chunks
    m = rng.randint(max(2, -(-4 // num_stages)), 15 // num_stages)
    menus = rng.random() < 0.2
    kinds = {kind: rng.random() < share for kind, share in _KINDS.items()}
    equal, first = rng.random() < 0.5, _stage(rng, kinds, menus=menus)
    stages = [first if equal else _stage(rng, kinds, menus=menus) for _ in range(num_stages)]
    owners = placement_of(placement, num_devices, chunks)
    document: dict[str, Any] = {
        "format": f"optpipe/problem/{'v2' if menus else 'v1'}",
        "name": f"random {seed} {number}",
        "num_microbatches": m,
        "objective": "span" if rng.random() < 0.1 else "makespan",
        "devices": [_device(rng, kinds) for _ in range(num_devices)],
        "stages": [
            {**stage, "device": device} for stage, device in zip(stages, owners, strict=True)
        ],
    }
    if rng.random() < 0.15:
        # Of v1 a message of 10 UNIT takes its time, of v2 it also waits for the one before.
        rate = rng.choice([None, 2.0, 5.0])
        document["links"] = [
            {"from": one, "to": two, "latency_ms": rng.randint(1, 3), "bandwidth_gb_per_s": rate}
            for one in range(num_devices)
            for two in range(num_devices)
            if abs(one - two) == 1
        ]
    limited = _limited(Problem.parse(document), rng)
    return _with_host(limited, rng) if kinds["host"] else limited


_KINDS = {"offload": 0.65, "recompute": 0.45, "fused": 0.35, "workspace": 0.1, "sync": 0.1,
          "half_duplex": 0.15, "pcie_group": 0.1, "host": 0.1}  # fmt: skip


def _stage(rng: random.Random, kinds: dict[str, bool], *, menus: bool) -> dict[str, Any]:
    forward, gradient, weight = rng.randint(2, 8), rng.randint(2, 8), rng.randint(1, 6)
    cost: dict[str, Any] = {
        "forward_ms": forward,
        "backward_input_ms": gradient,
        "backward_weight_ms": weight,
        "activation_bytes": 10 * _UNIT,
        "output_bytes": 10 * _UNIT,
        "weight_context_bytes": rng.choice([3, 5, 10]) * _UNIT,
    }
    if kinds["fused"]:
        cost["backward_ms"] = gradient + weight - rng.randint(0, min(gradient, weight) - 1)
    if kinds["workspace"]:
        cost["backward_input_workspace_bytes"] = rng.randint(0, 3) * _UNIT
    sync = {"grad_sync_ms": rng.randint(1, 8)} if kinds["sync"] else {}
    if menus:
        modes = [{"name": "keep"}, *(_mode(rng, f"mode {n}", forward) for n in range(1, 4))]
        return {**sync, "costs": [{**cost, "modes": modes}]}
    if kinds["offload"]:
        cost["offload_bytes"] = rng.choice([3, 5, 10]) * _UNIT
    if kinds["recompute"]:
        cost |= {"recompute_ms": forward, "checkpoint_bytes": rng.choice([0, 1, 2]) * _UNIT}
    return sync | cost


def _mode(rng: random.Random, name: str, forward: int) -> dict[str, Any]:
    moved = rng.choice([0, 0, 3, 6])
    mode = {
        "name": name,
        "offload_bytes": moved * _UNIT,
        "forward_bytes": rng.randint(max(moved, 1), 9) * _UNIT,
        "recompute": rng.choice(["apart", "inside", "inside"]),
        "recompute_ms": rng.randint(1, forward),
    }
    if mode["recompute"] == "inside":
        mode["inside_bytes"] = rng.randint(0, 2) * _UNIT
    mode["weight_context_bytes"] = rng.choice([3, 5]) * _UNIT
    return mode


def _device(rng: random.Random, kinds: dict[str, bool]) -> dict[str, Any]:
    rate = rng.choice([0.5, 1.0, 2.0])
    device: dict[str, Any] = {"memory_bytes": _PLENTY, "d2h_gb_per_s": rate, "h2d_gb_per_s": rate}
    if kinds["pcie_group"]:
        device["pcie_group"] = "bus"
    return {**device, "half_duplex": kinds["half_duplex"]}


def _limited(plenty: Problem, rng: random.Random) -> Problem:
    """Return the problem with memory for the smallest schedule and some of what lies above."""
    # Not above: a contestant's process loads this module, and CP-SAT's cannot bear our HiGHS.
    from optpipe_solver.feasibility import smallest_memory

    devices = []
    for d, least in enumerate(smallest_memory(plenty)):
        most = sum(
            plenty.num_microbatches * max(stage.activation_bytes, stage.weight_context_bytes)
            for stage in (plenty.stages[s] for s in plenty.stages_of[d])
        )
        room = least + rng.choice([0.0, 0.1, 0.2, 0.3, 0.5]) * max(0, most - least)
        room = round(room / _UNIT) * _UNIT
        update = {"memory_bytes": max(least, int(room))}
        devices.append(plenty.devices[d].model_copy(update=update))
    return plenty.model_copy(update={"devices": tuple(devices)})


def _with_host(problem: Problem, rng: random.Random) -> Problem:
    """Return the problem with room on the host for a few cells, if it still has a schedule."""
    from optpipe_solver.feasibility import feasibility

    most = rng.randint(1, 2 * len(problem.devices)) * 6 * _UNIT
    hosts = tuple(host.model_copy(update={"memory_bytes": most}) for host in problem.hosts)
    full = problem.model_copy(update={"hosts": hosts})
    return full if feasibility(full).plan is not None else problem


class _Outcome(NamedTuple):
    """What a contestant came to on one problem; ms, infinite or 0 where there is none."""

    objective_ms: float
    bound_ms: float
    answer: PeerAnswer

    @property
    def is_proven(self) -> bool:
        return self.objective_ms - self.bound_ms <= _TOLERANCE * self.objective_ms


def _outcome(problem: Problem, answer: PeerAnswer) -> _Outcome:
    objective = judge(problem, answer.programs)
    return _Outcome(inf if objective is None else objective, answer.bound_ms or 0.0, answer)


def main(arguments: Sequence[str] | None = None) -> None:
    """Make, solve, compare, print; see the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--number", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="number of the first problem")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=5.0, help="CPU seconds of each")
    parser.add_argument("--only", choices=["ours", "cp-sat"], help="one contestant alone")
    parser.add_argument("--show", action="store_true", help="print what each part took")
    options = parser.parse_args(arguments)
    names = [options.only] if options.only else ["ours", "cp-sat"]
    proven = dict.fromkeys(names, 0)
    false = 0
    with ExitStack() as stack:
        ask = {name: stack.enter_context(apart(name)) for name in {*names, "families"}}
        warm = PeerJob(problem=random_problem(-1, 3), seconds=30.0, threads=1)
        for name in names:
            start = ask["families"](warm, 600.0).programs
            ask[name](PeerJob(problem=warm.problem, start=start, seconds=30.0, threads=1), 600.0)
        for number in range(options.first, options.first + options.number):
            problem = random_problem(options.seed, number)
            family = ask["families"](PeerJob(problem=problem), 600.0)
            found: dict[str, _Outcome] = {}
            for name in names:
                job = PeerJob(
                    problem=problem,
                    start=family.programs if name == "cp-sat" else None,
                    floor_ms=family.bound_ms or 0.0,
                    seconds=options.seconds,
                    threads=1,
                    cpu=True,
                )
                found[name] = _outcome(problem, ask[name](job, 30 * options.seconds + 120.0))
                proven[name] += found[name].is_proven
            best = min(outcome.objective_ms for outcome in found.values())
            wrong = any(one.bound_ms > best * (1 + _TOLERANCE) for one in found.values())
            false += wrong
            print(_line(number, problem, found), "FALSE PROOF" if wrong else "", flush=True)
            if options.show:
                for outcome in found.values():
                    print("   ", outcome.answer.bound_method, outcome.answer.cpu_seconds)
    for name in names:
        print(f"{name}: proven {proven[name]} of {options.number}")
    if false:
        sys.exit(f"{false} false proofs")


def _line(number: int, problem: Problem, found: dict[str, _Outcome]) -> str:
    size = f"{len(problem.devices)}x{len(problem.stages)}x{problem.num_microbatches}"
    texts = [f"{number:4} {size:8} {'menus' if problem.has_modes else '':5}"]
    for name, one in found.items():
        cpu = one.answer.process_cpu_s
        word = "proven" if one.is_proven else "open"
        texts.append(f"{name} {one.objective_ms:8.1f} {one.bound_ms:8.1f} {cpu:5.1f} s {word:6}")
    return " | ".join(texts)


if __name__ == "__main__":
    main()
