"""Hypothesis strategies: small random problems, and legal programs for them."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, NamedTuple

from hypothesis import settings
from hypothesis import strategies as st

from optpipe import Action, ActionType, Problem, Programs
from tests.building import PLENTY, UNIT
from tests.oracle import device_peak, host_peaks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

F, I, W, B = (  # noqa: E741 - DESIGN's letters
    ActionType.FORWARD,
    ActionType.BACKWARD_INPUT,
    ActionType.BACKWARD_WEIGHT,
    ActionType.FULL_BACKWARD,
)
_ROUND_TRIP = (ActionType.OFFLOAD, ActionType.RELEASE, ActionType.RELOAD)

times = st.integers(0, 5)
sizes = st.integers(0, 4).map(lambda units: units * UNIT)
rates = st.sampled_from([1.0, 0.5])
actions = st.builds(
    Action,
    stage=st.integers(0, 999_999_999),
    type=st.sampled_from(list(ActionType)),
    microbatch=st.integers(0, 999_999_999),
)


def few(number: int) -> settings:
    """So many examples in the gate, where others have 40; in proportion in the long run."""
    default = settings.get_profile(settings.get_current_profile_name()).max_examples
    return settings(max_examples=number * default // settings.get_profile("ci").max_examples)


class Case(NamedTuple):
    """A problem and legal programs for it."""

    problem: Problem
    programs: Programs


@st.composite
def documents(draw: st.DrawFn) -> dict[str, Any]:
    """Problems as JSON-like objects; every duration is a whole number of ms, many are 0."""
    placement = draw(placements())
    num_devices = max(placement) + 1
    return {
        "format": draw(st.sampled_from(["optpipe/problem/v1", "optpipe/problem/v2"])),
        "num_microbatches": draw(st.integers(1, 3)),
        "objective": draw(st.sampled_from(["makespan", "span"])),
        "devices": [draw(_devices()) for _ in range(num_devices)],
        "stages": [draw(_stages(device)) for device in placement],
        "links": draw(_links(num_devices)),
    }


def problems() -> st.SearchStrategy[Problem]:
    """Problems with memory enough for any schedule."""
    return documents().map(Problem.parse)


@st.composite
def cases(draw: st.DrawFn, *, tight: bool | None = None) -> Case:
    """Problems with legal programs; ``tight`` = every limit is exactly what the programs need."""
    document = draw(documents())
    # One seed instead of a draw per action: a hundred times faster; sizes still shrink.
    rng = random.Random(draw(st.integers(0, 2**32)))
    case = Case(Problem.parse(document), ())
    case = case._replace(programs=random_programs(case.problem, rng))
    if draw(st.booleans()) if tight is None else tight:
        return tightened(case)
    return case


@st.composite
def placements(draw: st.DrawFn) -> list[int]:
    """Linear, loop, V, or any assignment of up to six stages to up to three devices."""
    num_devices = draw(st.integers(1, 3))
    line = list(range(num_devices))
    anything = st.lists(st.integers(0, num_devices - 1), min_size=1, max_size=4)
    return draw(st.one_of(st.sampled_from([line, line * 2, line + line[::-1]]), anything))


@st.composite
def _devices(draw: st.DrawFn) -> dict[str, Any]:
    host = draw(st.sampled_from(["host0", "host0", "host1"]))
    device: dict[str, Any] = {"memory_bytes": PLENTY, "host": host}
    if draw(st.integers(0, 3)) > 0:
        device |= {"d2h_gb_per_s": draw(rates), "h2d_gb_per_s": draw(rates)}
        device["half_duplex"] = draw(st.booleans())
        device["pcie_group"] = draw(st.sampled_from([f"bus of {host}", None]))
    device["reserved_bytes"] = draw(st.integers(0, 3))
    return device


@st.composite
def _stages(draw: st.DrawFn, device: int) -> dict[str, Any]:
    activation = draw(sizes)
    stage: dict[str, Any] = {
        "device": device,
        "forward_ms": draw(times),
        "backward_input_ms": draw(times),
        "backward_weight_ms": draw(times),
        "backward_ms": draw(st.none() | times),
        "activation_bytes": activation,
        "weight_context_bytes": draw(st.integers(0, 5 * UNIT)),
        "offload_bytes": draw(st.sampled_from([activation, UNIT if activation else 0, 0])),
        "static_bytes": draw(st.integers(0, 9)),
        "output_bytes": draw(sizes),
        "grad_sync_ms": draw(times),
    }
    if draw(st.booleans()):
        stage["recompute_ms"] = draw(times)
        stage["checkpoint_bytes"] = draw(st.integers(0, activation))
    for name in ("forward", "backward_input", "backward_weight", "backward", "recompute"):
        stage[f"{name}_workspace_bytes"] = draw(st.sampled_from([0, 0, 3, UNIT]))
    return stage


@st.composite
def _links(draw: st.DrawFn, num_devices: int) -> list[dict[str, Any]]:
    pairs = [(a, b) for a in range(num_devices) for b in range(num_devices) if a != b]
    return [
        {
            "from": source,
            "to": target,
            "latency_ms": draw(times),
            "bandwidth_gb_per_s": draw(st.none() | rates),
        }
        for source, target in pairs
        if draw(st.booleans())
    ]


def random_programs(problem: Problem, rng: random.Random) -> Programs:
    """Run a random legal execution and write down what each device did.

    Every legal program set can come out: modes, fused or split backwards, and any interleaving
    that some execution order yields. A random liking per kind of action makes extremes (all
    forwards first, transfers late) as likely as the middle.
    """
    keen = rng.random()
    todo = {
        (stage, microbatch): _life(problem, stage, rng, keen)
        for stage in range(len(problem.stages))
        for microbatch in range(problem.num_microbatches)
    }
    liking = {kind: rng.random() ** 3 for kind in ActionType}
    done: set[tuple[bool, int, int]] = set()
    rows: list[list[Action]] = [[] for _ in problem.devices]
    while todo:
        ready = [cell for cell in todo if _input_done(problem, cell, todo[cell][0], done)]
        stage, microbatch = max(ready, key=lambda cell: liking[todo[cell][0]] * rng.random())
        kind = todo[stage, microbatch].pop(0)
        rows[problem.stages[stage].device].append(Action(stage, kind, microbatch))
        if kind in (F, I, B):
            done.add((kind is not F, stage, microbatch))
        if not todo[stage, microbatch]:
            del todo[stage, microbatch]
    return tuple(tuple(row) for row in rows)


def _life(problem: Problem, stage: int, rng: random.Random, keen: float) -> list[ActionType]:
    middle: tuple[ActionType, ...] = ()
    if problem.can_offload(stage) and rng.random() < keen:
        middle = _ROUND_TRIP
    elif problem.stages[stage].can_recompute and rng.random() < keen:
        middle = (ActionType.RECOMPUTE,)
    return [F, *middle, *rng.choice([(I, W), (B,)])]


def _input_done(
    problem: Problem, cell: tuple[int, int], kind: ActionType, done: set[tuple[bool, int, int]]
) -> bool:
    stage, microbatch = cell
    if kind is F:
        return stage == 0 or (False, stage - 1, microbatch) in done
    if kind in (I, B) and stage < len(problem.stages) - 1:
        return (True, stage + 1, microbatch) in done
    return True


def tightened(case: Case) -> Case:
    """The case with every memory limit lowered to exactly what its programs need."""
    problem, programs = case
    hosts = host_peaks(problem, programs)
    devices = [
        device.model_copy(
            update={"memory_bytes": device.reserved_bytes + device_peak(problem, index, row)}
        )
        for index, (device, row) in enumerate(zip(problem.devices, programs, strict=True))
    ]
    limits = [{"name": host.name, "memory_bytes": hosts[host.name]} for host in problem.hosts]
    return Case(problem.model_copy(update={"devices": devices, "hosts": limits}), programs)


def mutated(programs: Programs, rng: random.Random) -> Programs:
    """The programs with one action deleted, duplicated, swapped, moved, or of another type."""
    rows = [list(row) for row in programs]
    device = rng.choice([index for index, row in enumerate(rows) if row])
    row = rows[device]
    index = rng.randrange(len(row))
    # Swapped and moved twice as often as the rest: only they keep all actions and reach waits,
    # orders and memory.
    changes: Sequence[Callable[[], None]] = (
        lambda: _swap(row, index, (index + 1) % len(row)),
        lambda: row.insert(rng.randrange(len(row)), row.pop(index)),
        lambda: row.__delitem__(index),
        lambda: row.insert(rng.randrange(len(row) + 1), row[index]),
        lambda: _swap(row, index, rng.randrange(len(row))),
        lambda: row.insert(rng.randrange(len(row)), row.pop(index)),
        lambda: rng.choice(rows).append(row.pop(index)),
        lambda: row.__setitem__(index, row[index]._replace(type=rng.choice(list(ActionType)))),
        lambda: row.__setitem__(index, row[index]._replace(stage=row[index].stage + 1)),
        lambda: row.__setitem__(index, row[index]._replace(microbatch=row[index].microbatch + 1)),
    )
    rng.choice(changes)()
    return tuple(tuple(row) for row in rows)


def _swap(row: list[Action], left: int, right: int) -> None:
    row[left], row[right] = row[right], row[left]
