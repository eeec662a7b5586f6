"""Hypothesis strategies: small random problems, and legal programs for them."""

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hypothesis import settings
from hypothesis import strategies as st

from optpipe import Action, ActionType, Problem, Programs
from tests.building import PLENTY, UNIT
from tests.oracle import device_peak, host_peaks

F, I, W, B = (  # noqa: E741 - the specification's letters
    ActionType.FORWARD,
    ActionType.BACKWARD_INPUT,
    ActionType.BACKWARD_WEIGHT,
    ActionType.FULL_BACKWARD,
)
_ROUND_TRIP = (ActionType.OFFLOAD, ActionType.RELEASE, ActionType.RELOAD)

times = st.integers(0, 5)
sizes = st.integers(0, 4).map(lambda units: units * UNIT)
rates = st.sampled_from([1.0, 0.5])
_numbers = st.integers(0, 999_999_999)
actions = st.builds(
    Action, _numbers, st.sampled_from(list(ActionType)), _numbers, st.just(0), st.just(False)
) | st.builds(Action, _numbers, st.just(F), _numbers, st.integers(0, 99), st.just(False))


IS_LONG = settings.get_current_profile_name() == "long"
"""Whether this is `make test-long`, where tests draw more."""


def few(number: int) -> settings:
    """So many examples in the gate, where others have 40; in proportion in the long run."""
    default = settings.get_profile(settings.get_current_profile_name()).max_examples
    return settings(max_examples=number * default // settings.get_profile("ci").max_examples)


class Case(NamedTuple):
    """A problem and legal programs for it."""

    problem: Problem
    programs: Programs


@st.composite
def documents(
    draw: st.DrawFn, *, menus: bool = False, pairs: bool = False, unequal: bool = False
) -> dict[str, Any]:
    """Problems as JSON-like objects; every duration is a whole number of ms, many are 0.

    ``menus``: some of v2 have stages with modes that v1 cannot say. ``pairs``: in some of v2
    forwards and backwards may run together. ``unequal``: all are of v2, with micro-batches of up to
    three costs, samples, and a given order in some.
    """
    placement = draw(placements())
    num_devices = max(placement) + 1
    version = "v2" if unequal else draw(st.sampled_from(["v1", "v2"]))
    document: dict[str, Any] = {
        "format": f"optpipe/problem/{version}",
        "num_microbatches": draw(st.integers(1, 3)),
        "objective": draw(st.sampled_from(["makespan", "span"])),
        "devices": [draw(_devices()) for _ in range(num_devices)],
        "stages": [
            draw(_nested(draw(_stages(device))) if menus and version == "v2" else _stages(device))
            for device in placement
        ],
        "links": draw(_links(num_devices)),
    }
    if unequal:
        document |= draw(_unequal(document["num_microbatches"], placement))
    elif pairs and version == "v2":
        document["pairs"] = draw(_licences(document["stages"]))
    return document


@st.composite
def _unequal(draw: st.DrawFn, m: int, placement: list[int]) -> dict[str, Any]:
    """Stages with some costs, which micro-batch has which, and what is known of their order."""
    num_costs = draw(st.integers(1, 3))
    fields: dict[str, Any] = {"stages": []}
    for device in placement:
        first, *others = [draw(_nested(draw(_stages(device)))) for _ in range(num_costs)]
        costs = [stage["costs"][0] for stage in (first, *others)]
        fields["stages"].append({**first, "costs": costs})
    microbatch = st.fixed_dictionaries(
        {"cost": st.integers(0, num_costs - 1), "sample": st.none() | st.integers(0, 1)}
    )
    fields["microbatches"] = draw(st.lists(microbatch, min_size=m, max_size=m))
    fields["order"] = draw(st.sampled_from(["free", "free", "given"]))
    return fields


@st.composite
def _licences(draw: st.DrawFn, stages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """About half of what may pair, each with as much hidden as can be, or less."""
    costs = [stage.get("costs", [stage])[0] for stage in stages]
    found = []
    for a, first in enumerate(costs):
        for b, second in enumerate(costs):
            for letter in "BI":
                if stages[a]["device"] != stages[b]["device"] or draw(st.booleans()):
                    continue
                back = second["backward_input_ms"]
                if letter == "B":
                    split = back + second["backward_weight_ms"]
                    back = second["backward_ms"] if second["backward_ms"] is not None else split
                most = min(first["forward_ms"], back)
                hidden = draw(st.integers(0, most))
                found.append({"forward": a, "backward": b, "with": letter, "hidden_ms": hidden})
    return found


def problems(*, menus: bool = False) -> st.SearchStrategy[Problem]:
    """Problems with memory enough for any schedule."""
    return documents(menus=menus).map(Problem.parse)


@st.composite
def cases(
    draw: st.DrawFn,
    *,
    tight: bool | None = None,
    menus: bool = False,
    pairs: bool = False,
    unequal: bool = False,
) -> Case:
    """Problems with legal programs; ``tight`` = every limit is exactly what the programs need."""
    document = draw(documents(menus=menus, pairs=pairs, unequal=unequal))
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
def _nested(draw: st.DrawFn, stage: dict[str, Any]) -> dict[str, Any]:
    """The stage as v2 writes it, half of the time with a menu of its own."""
    menu = draw(st.booleans())
    head = {name: stage.pop(name) for name in ("device", "static_bytes", "grad_sync_ms")}
    old = {name: stage.pop(name, None) for name in ("offload_bytes", "recompute_ms")}
    kept = stage.pop("checkpoint_bytes", None)
    modes: list[dict[str, Any]] = [{"name": "keep"}]
    if menu:
        modes += [
            draw(random_modes(f"mode {number}", stage["activation_bytes"]))
            for number in range(1, draw(st.integers(2, 4)))
        ]
        head["uniform_modes"] = draw(st.integers(0, 3)) == 0
    else:
        if old["offload_bytes"]:
            modes.append({"name": "offload", "offload_bytes": old["offload_bytes"]})
        if kept is not None:
            again = {"recompute": "apart", "recompute_ms": old["recompute_ms"]}
            modes.append({"name": "recompute", "forward_bytes": kept, **again})
    return {**head, "costs": [{**stage, "modes": modes}]}


@st.composite
def random_modes(draw: st.DrawFn, name: str, activation: int) -> dict[str, Any]:
    """Any mode: transfers in whole UNITs, recomputation apart or inside, bytes of its own."""
    moved = draw(st.integers(0, activation // UNIT)) * UNIT
    mode: dict[str, Any] = {
        "name": name,
        "offload_bytes": moved,
        "forward_bytes": draw(st.integers(moved, activation)),
    }
    if recompute := draw(st.sampled_from([None, "apart", "inside"])):
        mode |= {"recompute": recompute, "recompute_ms": draw(times)}
    if recompute == "inside":
        mode["inside_bytes"] = draw(st.sampled_from([0, 3, UNIT]))
    for own in ("weight_context_bytes", "backward_workspace_bytes", "recompute_workspace_bytes"):
        if draw(st.integers(0, 3)) == 0:
            mode[own] = draw(st.integers(0, 2 * UNIT))
    return mode


@st.composite
def _links(draw: st.DrawFn, num_devices: int) -> list[dict[str, Any]]:
    pairs = [(a, b) for a in range(num_devices) for b in range(num_devices) if a != b]
    return [
        {
            "from": a,
            "to": b,
            "latency_ms": draw(times),
            "bandwidth_gb_per_s": draw(st.none() | rates),
        }
        for a, b in pairs
        if draw(st.booleans())
    ]


def random_programs(problem: Problem, rng: random.Random, *, in_turn: bool = False) -> Programs:
    """Run a random legal execution and write down what each device did.

    ``in_turn``: what a stage does of one kind, I and B alike, is in the order of micro-batches.

    Every legal program set can come out: modes, fused or split backwards, and any interleaving
    that some execution order yields. A random liking per kind of action makes extremes (all
    forwards first, transfers late) as likely as the middle.
    """
    keen = rng.random()
    some = [problem.cost_of.index(cost) for cost in range(problem.num_costs)]
    same = {(s, c): _mode(problem, s, j, rng, keen) for s, one_stage in enumerate(problem.stages)
            if one_stage.uniform_modes for c, j in enumerate(some)}  # fmt: skip
    chosen = {
        (s, j): same[s, problem.cost_of[j]]
        if (s, problem.cost_of[j]) in same
        else _mode(problem, s, j, rng, keen)
        for s in range(len(problem.stages))
        for j in range(problem.num_microbatches)
    }
    todo = {cell: _life(problem, cell, mode, rng) for cell, mode in chosen.items()}
    liking = {kind: rng.random() ** 3 for kind in ActionType}
    done: set[tuple[bool, int, int]] = set()
    rows: list[list[Action]] = [[] for _ in problem.devices]
    while todo:
        ready = [cell for cell in todo if _input_done(problem, cell, todo[cell][0], done)]
        if in_turn:
            ready = [cell for cell in ready if _is_next(todo, cell)]
        stage, microbatch = max(ready, key=lambda cell: liking[todo[cell][0]] * rng.random())
        kind = todo[stage, microbatch].pop(0)
        partners = [
            (s, j)
            for s, j in ready
            if kind is F and (s, j) != (stage, microbatch)
            if (stage, s, todo[s, j][0].value) in problem.hidden_ms
        ]
        # Where v1 can say the menu the actions tell the mode, named or not.
        menus = problem.has_modes and rng.random() < 0.3
        named = kind is F and (problem.stage_of(stage, microbatch).modes or menus)
        mode = chosen[stage, microbatch] if named else 0
        rows[problem.stages[stage].device].append(Action(stage, kind, microbatch, mode))
        if kind in (F, I, B):
            done.add((kind is not F, stage, microbatch))
        if partners and rng.random() < 0.7:
            s, j = rng.choice(partners)
            rows[problem.stages[s].device].append(Action(s, todo[s, j].pop(0), j, 0, True))
            done.add((True, s, j))
            if not todo[s, j]:
                del todo[s, j]
        if not todo[stage, microbatch]:
            del todo[stage, microbatch]
    return tuple(tuple(row) for row in rows)


def _mode(problem: Problem, stage: int, j: int, rng: random.Random, keen: float) -> int:
    numbers, cost = range(len(problem.menu_of(stage, j))), problem.cost_of[j]
    usable = [mode for mode in numbers if problem.can_use(stage, mode, cost)]
    return rng.choice(usable) if rng.random() < keen else 0


def _life(
    problem: Problem, cell: tuple[int, int], mode: int, rng: random.Random
) -> list[ActionType]:
    chosen = problem.menu_of(*cell)[mode]
    middle = _ROUND_TRIP if chosen.offload_bytes else ()
    if chosen.recompute == "apart":
        middle = (*middle, ActionType.RECOMPUTE)
    return [F, *middle, *rng.choice([(I, W), (B,)])]


def _is_next(todo: dict[tuple[int, int], list[ActionType]], cell: tuple[int, int]) -> bool:
    """Whether no micro-batch before it still has on its stage what comes next in a cell."""
    kinds = {I, B} if todo[cell][0] in (I, B) else {todo[cell][0]}
    return not any(
        other[0] == cell[0] and other < cell and kinds & {*life} for other, life in todo.items()
    )


def _input_done(
    problem: Problem, cell: tuple[int, int], kind: ActionType, done: set[tuple[bool, int, int]]
) -> bool:
    stage, microbatch = cell
    if kind is F and not all(
        (False, stage, j) in done for j, later in problem.forward_turns if later == microbatch
    ):
        return False
    if kind in (I, B) and not all(
        (True, stage, j) in done for earlier, j in problem.backward_turns if earlier == microbatch
    ):
        return False
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


def slowed(problem: Problem, factor: float) -> Problem:
    """The problem with every time multiplied and every bandwidth divided."""

    def walk(data: Any, key: str = "") -> Any:
        if isinstance(data, dict):
            return {name: walk(value, name) for name, value in data.items()}
        if isinstance(data, list):
            return [walk(value) for value in data]
        if data is None:
            return None
        if key.endswith("_ms"):
            return data * factor
        return data / factor if key.endswith("gb_per_s") else data

    return Problem.parse(walk(problem.model_dump(mode="json", by_alias=True)))


def inexact_cases() -> st.SearchStrategy[Case]:
    """Cases whose times are no whole numbers, so that sums of them round."""
    return cases().map(lambda case: case._replace(problem=slowed(case.problem, 0.1)))


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
        lambda: _rename(row, rng.choice([i for i, one in enumerate(row) if one.type is F] or [0])),
        lambda: row.__setitem__(index, row[index]._replace(stage=row[index].stage + 1)),
        lambda: row.__setitem__(index, row[index]._replace(microbatch=row[index].microbatch + 1)),
        lambda: row.__setitem__(index, row[index]._replace(paired=not row[index].paired)),
    )
    rng.choice(changes)()
    return tuple(tuple(row) for row in rows)


def _rename(row: list[Action], index: int) -> None:
    """Name another mode where an F stands."""
    if row[index].type is F:
        row[index] = row[index]._replace(mode=(row[index].mode + 1) % 4)


def _swap(row: list[Action], left: int, right: int) -> None:
    row[left], row[right] = row[right], row[left]
