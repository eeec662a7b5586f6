"""Sweeps: every combination of the axes' values, each a problem that is checked like any other."""

import json
import math
import random
from typing import Any

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from optpipe import Problem, check, simulate
from optpipe.errors import InputError, ProblemError
from optpipe.sweep import (
    Point,
    family_of,
    frontier,
    label_of,
    memory_of,
    num_variations,
    sweep,
    tighter_ones,
)
from tests import building
from tests.strategies import cases, few, problems

BUS = building.bus(memory_bytes=1_000_001, reserved_bytes=1000)
LINK = {"from": 0, "to": 1, "latency_ms": 0.5, "bandwidth_gb_per_s": 10.0}
BASE = building.problem(
    [
        building.offloadable(device, static_bytes=100 * device, recompute_ms=1, checkpoint_bytes=2)
        for device in (0, 1, 1, 0)
    ],
    [building.bus(), building.bus(d2h_gb_per_s=2.0)],
    m=4,
    name="base",
    links=[LINK],
)


def one(name: str, value: Any, base: Problem = BASE) -> Problem:
    """The problem that one value on one axis makes."""
    (found,) = sweep(base, {name: [value]})
    assert found.values == {name: value}
    return found.problem


def test_every_combination_comes_once_the_last_axis_fastest() -> None:
    """Order, values and names of a sweep over two axes."""
    axes: dict[str, list[Any]] = {"num_microbatches": [4, 8], "memory_scale": [1, 0.5, 0.25]}
    found = sweep(BASE, axes)
    assert [tuple(item.values.values()) for item in found] == [
        (4, 1), (4, 0.5), (4, 0.25), (8, 1), (8, 0.5), (8, 0.25),
    ]  # fmt: skip
    assert len(found) == num_variations(axes) == 6
    assert found[4].problem.name == "base num_microbatches = 8, memory_scale = 0.5"
    assert found[4].problem.num_microbatches == 8
    assert {device.memory_bytes for device in found[4].problem.devices} == {building.PLENTY // 2}


def test_without_axes_the_problem_stays_alone_and_as_it_is() -> None:
    """A sweep over nothing is the problem itself, name included."""
    (found,) = sweep(BASE, {})
    assert (found.values, found.problem) == ({}, BASE)
    assert num_variations({}) == 1


def test_memory_is_scaled_per_device_or_set_for_all_in_whole_bytes() -> None:
    """The two memory axes: a factor that rounds, and gigabytes of 1e9."""
    base = building.problem([building.stage(0), building.stage(1)], [BUS, building.bus()])
    half = one("memory_scale", 0.5, base)
    assert [device.memory_bytes for device in half.devices] == [500_000, building.PLENTY // 2]
    flat = one("memory_gb", 0.25, base)
    assert [device.memory_bytes for device in flat.devices] == [250_000_000] * 2


def test_bandwidths_are_scaled_and_latency_is_set_where_there_are_any() -> None:
    """PCIe and links change; a link without bandwidth stays unlimited."""
    assert [(d.d2h_gb_per_s, d.h2d_gb_per_s) for d in one("pcie_scale", 0.5).devices] == [
        (0.5, 0.5),
        (1.0, 0.5),
    ]
    links = one("link_scale", 2).links
    assert [link.bandwidth_gb_per_s for link in links] == [20.0, 20.0]
    assert [link.latency_ms for link in one("latency_ms", 3).links] == [3.0, 3.0]


@pytest.mark.parametrize(
    ("value", "placement"),
    [
        ("linear", (0, 0, 1, 1)),
        ("loop", (0, 1, 0, 1)),
        ("v", (0, 1, 1, 0)),
        ([1, 0, 0, 1], (1, 0, 0, 1)),
    ],
)
def test_stages_are_placed_by_name_or_one_by_one(value: Any, placement: tuple[int, ...]) -> None:
    """Contiguous, in a loop, in a V, or as a list says."""
    assert one("placement", value).placement == placement


def test_one_stage_per_device_is_linear_however_it_is_called() -> None:
    """Where nothing is chunked, the three names keep what is there."""
    base = building.problem([building.stage(device) for device in range(3)])
    for name in ("linear", "loop", "v"):
        assert one("placement", name, base).problem_hash == base.problem_hash


def test_offload_and_recompute_can_be_taken_away_and_the_objective_chosen() -> None:
    """False takes a possibility away, true leaves everything."""
    off = one("offload", False)
    assert not any(off.can_offload(stage) for stage in range(4))
    assert not any(stage.can_recompute for stage in one("recompute", False).stages)
    for name in ("offload", "recompute"):
        assert one(name, True).problem_hash == BASE.problem_hash
    assert one("objective", "span").objective == "span"


def test_a_path_sets_one_field_or_that_of_all() -> None:
    """Paths reach into lists by index or by star, and aliases are JSON's."""
    assert [s.forward_ms for s in one("stages[2].forward_ms", 7).stages] == [1, 1, 7, 1]
    every = one("devices[*].reserved_bytes", 5)
    assert [device.reserved_bytes for device in every.devices] == [5, 5]
    assert one("links[*].latency_ms", 9).links[0].latency_ms == 9
    assert one("name", "other").name == "other"


def test_an_axis_that_is_set_within_another_leaves_its_values_alone() -> None:
    """A path may go into what a path before it has set; the axis keeps what was given."""
    hosts = [{"name": "host0", "memory_bytes": 5}]
    axes: dict[str, list[Any]] = {"hosts": [hosts], "hosts[*].memory_bytes": [7, 8]}
    found = sweep(BASE, axes)
    assert [item.problem.hosts[0].memory_bytes for item in found] == [7, 8]
    assert hosts == [{"name": "host0", "memory_bytes": 5}]


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        ({"memory": [1]}, "axes.memory: is neither an axis (memory_scale"),
        ({"": [1]}, "is neither an axis"),
        ({"devices[9].memory_bytes": [1]}, "is neither"),
        ({"devices[0000000009].memory_bytes": [1]}, "is neither"),
        ({f"devices[{'9' * 5000}].memory_bytes": [1]}, "is neither"),
        ({"devices[\N{ARABIC-INDIC DIGIT ONE}].memory_bytes": [1]}, "is neither"),
        ({"devices[*].memory": [1]}, "is neither"),
        ({"devices[*]": [1]}, "is neither"),
        ({"stages[0].device.x": [1]}, "is neither"),
        ({"x" * 9999: [1]}, f"axes.{'x' * 60}: is neither"),
        ({"memory_scale": []}, "axes.memory_scale = []: must be a list of values"),
        ({"memory_scale": "12"}, 'axes.memory_scale = "12": must be a list'),
        ({"memory_scale": [1, 0.5, 1]}, "axes.memory_scale: 1 stands there twice"),
        ({"memory_scale": [0]}, "axes.memory_scale = 0: must be a number > 0"),
        ({"memory_scale": [True]}, "axes.memory_scale = true: must be a number"),
        ({"memory_scale": [math.nan]}, "axes.memory_scale = NaN: must be a number"),
        ({"memory_scale": [1e300]}, "axes.memory_scale = 1e+300: must be a number"),
        ({"memory_gb": [10**400]}, "axes.memory_gb = 1000"),
        ({"memory_gb": ["8"]}, 'axes.memory_gb = "8": must be a number'),
        ({"offload": [1]}, "axes.offload = 1: must be true or false"),
        ({"placement": ["w"]}, 'axes.placement = "w": must be "linear", "loop", "v", or the'),
        ({"placement": [[0, 1]]}, "each of the 4 stages"),
        ({"num_microbatches": [4, 0]}, "the variation num_microbatches = 0 is no valid problem"),
        ({"objective": ["speed"]}, 'the variation objective = "speed" is no valid problem'),
        ({"placement": [[0, 0, 0, 9]]}, "stages[3].device = 9 does not exist"),
        ({"pcie_scale": [1e12]}, "the variation pcie_scale = 1000000000000.0 is no valid"),
    ],
)  # fmt: skip
def test_what_cannot_be_varied_so_is_refused_with_value_rule_and_fix(
    axes: dict[str, Any], words: str
) -> None:
    """Unknown axes, values that no axis takes, and combinations that make no problem."""
    with pytest.raises(InputError) as caught:
        sweep(BASE, axes)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("name", ["pcie_scale", "link_scale", "latency_ms", "links[*].latency_ms"])
def test_an_axis_of_what_the_problem_has_not_is_refused(name: str) -> None:
    """A sweep over it would be the same problem again and again."""
    base = building.problem([building.stage(0)], [{"memory_bytes": 100}])
    with pytest.raises(InputError, match=r"leave this axis out|is neither"):
        sweep(base, {name: [1, 2]})


def test_a_refusal_names_all_values_of_the_combination() -> None:
    """Each alone is fine: together they exceed what a problem may have."""
    axes: dict[str, list[Any]] = {
        "devices[0].reserved_bytes": [building.PLENTY],
        "memory_scale": [1, 0.5],
    }
    with pytest.raises(InputError) as caught:
        sweep(BASE, axes)
    assert f"devices[0].reserved_bytes = {building.PLENTY}, memory_scale = 0.5 is" in str(
        caught.value
    )


def test_many_values_are_looked_through_once() -> None:
    """A hundred thousand values are checked for doubles in no time; the last one stands twice."""
    with pytest.raises(InputError, match="99999 stands there twice"):
        sweep(BASE, {"num_microbatches": [*range(1, 100_000), 99_999]})


@given(
    problems(),
    st.lists(st.integers(1, 6), unique=True, min_size=1, max_size=2),
    st.lists(st.sampled_from([0.5, 1, 2, 3.5]), unique=True, min_size=1, max_size=2),
)
def test_a_variation_is_the_problem_but_for_what_its_axes_change(
    problem: Problem, counts: list[int], scales: list[float]
) -> None:
    """Setting the changed fields back gives the problem again."""
    axes: dict[str, list[Any]] = {"num_microbatches": counts, "stages[0].grad_sync_ms": scales}
    for found in sweep(problem, axes):
        assert found.problem.num_microbatches == found.values["num_microbatches"]
        assert found.problem.stages[0].grad_sync_ms == found.values["stages[0].grad_sync_ms"]
        data = json.loads(found.problem.model_dump_json(by_alias=True))
        data["num_microbatches"] = problem.num_microbatches
        data["stages"][0]["grad_sync_ms"] = problem.stages[0].grad_sync_ms
        assert Problem.parse(data).problem_hash == problem.problem_hash


# What memory buys: which problems share a line, and what carries over along it.


def point(index: int, *memory: int, family: str = "f", **found: Any) -> Point:
    return Point(index=index, family=family, label=family, memory_bytes=memory, **found)


def test_families_are_lines_in_order_of_appearance_from_least_memory_to_most() -> None:
    """Two families, their points in disorder."""
    points = [point(0, 9), point(1, 5, family="g"), point(2, 3), point(3, 4, family="g")]
    lines = frontier(points)
    assert [line.label for line in lines] == ["f", "g"]
    assert [[p.index for p in line.points] for line in lines] == [[2, 0], [3, 1]]
    assert [p.limit_bytes for p in lines[0].points] == [3, 9]


def test_schedules_carry_to_more_memory_and_bounds_to_less() -> None:
    """By hand: the middle was solved worst and bounded best; what fits nowhere fits no less."""
    (line,) = frontier(
        [
            point(0, 1),
            point(1, 2, is_infeasible=True),
            point(2, 3, objective_ms=12.0, bound_ms=8.0),
            point(3, 4, objective_ms=14.0, bound_ms=9.0),
            point(4, 5, bound_ms=7.0),
        ]
    )
    assert [p.objective_ms for p in line.points] == [None, None, 12.0, 12.0, 12.0]
    assert [p.bound_ms for p in line.points] == [9.0, 9.0, 9.0, 9.0, 7.0]
    assert [p.is_infeasible for p in line.points] == [True, True, False, False, False]


def test_nothing_carries_over_between_limits_that_do_not_compare() -> None:
    """More on one device and less on the other: neither fits the other."""
    (line,) = frontier(
        [
            point(0, 2, 5, objective_ms=10.0, bound_ms=9.0),
            point(1, 5, 2, objective_ms=20.0, bound_ms=1.0),
            point(2, 5, 5),
        ]
    )
    assert [(p.index, p.objective_ms, p.bound_ms) for p in line.points] == [
        (0, 10.0, 9.0),
        (1, 20.0, 1.0),
        (2, 10.0, None),
    ]


@pytest.mark.parametrize(
    ("values", "label"),
    [
        ({}, "named"),
        ({"memory_scale": 1, "devices[*].memory_bytes": 2}, "best schedule"),
        ({"memory_gb": 1, "placement": "v", "offload": True}, 'placement = "v", offload = true'),
    ],
)
def test_a_line_is_called_by_what_distinguishes_it(values: dict[str, Any], label: str) -> None:
    """All axes but those of memory; a listed problem by its name."""
    assert label_of(values, "named") == label


@given(problems(), st.integers(0, 10**6))
def test_a_family_knows_neither_names_nor_the_memory_of_devices(problem, more: int) -> None:
    """Other memory is the same family, other times are another one."""
    family = family_of(problem)
    devices = [
        {**device.model_dump(), "name": f"x{index}", "memory_bytes": device.memory_bytes + more}
        for index, device in enumerate(problem.devices)
    ]
    changed = problem.model_copy(update={"devices": devices, "name": "other"})
    assert memory_of(changed) == tuple(memory + more for memory in memory_of(problem))
    assert family_of(changed) == family
    slower = sweep(problem, {"stages[0].forward_ms": [problem.stages[0].forward_ms + 1]})
    assert family_of(slower[0].problem) != family


@given(cases(), st.integers(0, 10**6))
def test_programs_that_fit_a_limit_fit_a_larger_one_and_take_the_same_time(case, more: int) -> None:
    """What `frontier` takes for granted: schedules carry over to more memory."""
    problem, programs = case
    devices = [
        device.model_copy(update={"memory_bytes": device.memory_bytes + more})
        for device in problem.devices
    ]
    larger = problem.model_copy(update={"devices": devices})
    check(problem, programs)
    check(larger, programs)
    assert simulate(larger, programs) == simulate(problem, programs)


# --- Relaxations: what is legal in the tighter one of two is legal in the looser one, and no
# longer there.


def _eased(problem: Problem, rng: random.Random) -> Problem:
    """A problem with some numbers a little to the better, some things allowed or not shared."""
    data = problem.model_dump(by_alias=True)
    modes = [mode for stage in data["stages"] for mode in stage.get("modes", ())[1:]]
    for holder in (*data["devices"], *data["stages"], *data["links"], *modes):
        for name, value in holder.items():
            if name.endswith(("_ms", "_bytes", "_gb_per_s")) and value and rng.random() < 0.2:
                eased = value * (2 if name == "memory_bytes" or name.endswith("_gb_per_s") else 0.5)
                holder[name] = round(eased) if name.endswith("_bytes") else eased
    for device in data["devices"]:
        device.update(rng.choice(({"half_duplex": False, "pcie_group": None}, {})))
    for stage in data["stages"]:
        more = {"recompute_ms": 1, "checkpoint_bytes": 0}
        may = stage["recompute_ms"] is None and "modes" not in stage
        stage.update(rng.choice((more, {}, {})) if may else {})
    data["objective"] = rng.choice(["makespan", "span", problem.objective])
    return Problem.parse(data)


@few(100)
@given(cases(menus=True, tight=True), st.integers(0, 2**32))
def test_what_is_legal_in_a_tighter_problem_is_legal_and_no_longer_in_a_looser_one(
    case, seed: int
) -> None:
    """Whatever is eased, shared lanes, spans, fused backwards and modes among it."""
    menus = [bool(stage.modes) for stage in case.problem.stages]
    rows = tuple(
        tuple(action if menus[action.stage] else action.bare for action in row)
        for row in case.programs
    )
    case = case._replace(programs=rows)
    try:
        eased = _eased(case.problem, random.Random(seed))
    except ProblemError:
        return
    _, tighter = tighter_ones([case.problem, eased])
    event(f"a relaxation: {bool(tighter)}")
    if tighter:
        check(eased, case.programs)
        before = simulate(case.problem, case.programs).objective_ms(case.problem.objective)
        after = simulate(eased, case.programs).objective_ms(eased.objective)
        assert after <= before


@pytest.mark.parametrize(
    ("name", "tight", "loose"),
    [
        ("memory_gb", 2, 3),
        ("memory_scale", 0.8, 0.9),
        ("devices[*].reserved_bytes", 9, 8),
        ("hosts[0].memory_bytes", 10**9, 2 * 10**9),
        ("hosts[0].memory_bytes", 10**9, None),
        ("pcie_scale", 0.5, 1),
        ("link_scale", 1, 3),
        ("latency_ms", 2.0, 0.5),
        ("offload", False, True),
        ("recompute", False, True),
        ("objective", "makespan", "span"),
        ("stages[*].forward_ms", 2.5, 2.0),
        ("stages[1].backward_ms", 3.5, 3.0),
        ("stages[0].grad_sync_ms", 1, 0),
        ("stages[2].static_bytes", 9, 0),
        ("stages[*].backward_weight_workspace_bytes", 9, 0),
        ("stages[*].checkpoint_bytes", 2, 1),
    ],
)
def test_every_axis_that_relaxes_is_known_in_its_direction_alone(
    name: str, tight: Any, loose: Any
) -> None:
    """The looser problem knows the tighter one, and the tighter one nobody."""
    base = one("stages[*].output_bytes", 10**6)
    swept = [item.problem for item in sweep(base, {name: [loose, tight]})]
    assert tighter_ones(swept) == [(1,), ()]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("num_microbatches", [4, 8]),
        ("placement", ["v", "loop"]),
        ("devices[1].host", ["host0", "other"]),
    ],
)
def test_what_has_another_shape_is_no_relaxation(name: str, values: list[Any]) -> None:
    """Nor is more memory for fewer micro-batches, or a bus that is faster and shared."""
    swept = [item.problem for item in sweep(BASE, {name: values, "memory_scale": [1, 2]})]
    assert tighter_ones(swept) == [(), (0,), (), (2,)]
    shared = one("devices[*].half_duplex", True)
    assert tighter_ones([one("pcie_scale", 2, shared), shared, BASE]) == [(), (), (1,)]
