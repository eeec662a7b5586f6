"""What single bounds are worth, on problems where that can be computed by hand.

What every bound must be: below every schedule, and blind to what does not matter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe import Problem, check, simulate
from optpipe.simulate import link_loads, link_warnings
from optpipe_solver import solve
from optpipe_solver.bounds import lower_bound, lower_bounds
from optpipe_solver.bounds.heads_tails import drain, heads, refill, tails
from optpipe_solver.bounds.relaxation import relaxed
from optpipe_solver.families.zero_bubble import build_zb_h1
from optpipe_solver.feasibility import smallest_memory
from optpipe_solver.incumbent import grid_ms
from tests.building import UNIT, bus, problem, programs, stage
from tests.solver.bounds.judging import assert_below, line, of_families
from tests.solver.exhaustive import optimum, tiny_problems
from tests.solver.families.v_problems import all_in_pairs
from tests.solver.starting import renumbered, with_memory
from tests.strategies import Case, cases, documents, few, random_modes

if TYPE_CHECKING:
    import random
    from typing import Any


def _values(given: Problem) -> dict[str, float]:
    return {bound.method: bound.ms for bound in lower_bounds(given)}


def test_head_and_work_and_way_back() -> None:
    """The last stage of three waits 2 x 5 ms, works 4 x 10 ms; then back to stage 0 and its W."""
    given = problem([stage(d, 5, 5, 3) for d in range(3)], m=4)
    assert _values(given)["memory-window"] == pytest.approx(2 * 5 + 4 * 10 + 2 * 5 + 3)


def test_a_slow_stage_delays_what_comes_after_it() -> None:
    """The k-th micro-batch leaves stage 0 after 10 k ms; the last is still to go all the way."""
    given = problem([stage(0, 10, 0, 0), stage(1, 1, 9, 3), stage(2, 1, 1, 1)], m=6)
    assert _values(given)["memory-window"] >= 60 + 1 + 1 + 1 + 9


def test_one_activation_lets_micro_batches_pass_one_by_one() -> None:
    """Stage 0 holds each micro-batch through 4 F, 4 I and its own W: 9 ms, 8 times."""
    given = problem([stage(d, 1, 1, 1) for d in range(4)], [{"memory_bytes": 10}] * 4, m=8)
    assert lower_bound(given).ms == pytest.approx(72)


@pytest.mark.parametrize(
    ("p", "m", "objective"),
    [
        (4, 8, "makespan"),
        (8, 24, "span"),
        pytest.param(64, 512, "makespan", marks=pytest.mark.extended),
    ],
)
def test_zb_h1_is_proven_optimal_at_one_activation_per_device(
    p: int, m: int, objective: str
) -> None:
    """With p activations the idle time before the first I and after the last F is all there is.

    The load of a device alone proves the last only within 1.6%.
    """
    given = line(p, m, p, objective)
    length_ms = simulate(given, build_zb_h1(given)).objective_ms(objective)
    assert lower_bound(given).ms == pytest.approx(length_ms, rel=1e-6)


def test_stages_of_a_device_share_its_memory() -> None:
    """V placement: the two stages of a device together hold what one alone could."""
    given = problem(
        [stage(d, 2, 2, 1, activation_bytes=10) for d in (0, 1, 2, 2, 1, 0)],
        [{"memory_bytes": 40}] * 3,
        m=8,
    )
    assert _values(given)["memory-window"] > _of_single_events(given) + 1e-6


def _of_single_events(given: Problem) -> float:
    """What heads and tails prove alone: they know each stage's memory as if it were alone."""
    model = relaxed(given)
    before = heads(model, refill(model), np.zeros(len(given.stages)))
    after = tails(model, drain(model), np.zeros(len(given.stages)))
    pieces = (model.forward, model.gradient, model.weight)
    both = zip(before, pieces, after, strict=True)
    return max(float((head + work + tail[::-1]).max()) for head, work, tail in both)


def test_transfers_of_a_group_share_its_lanes() -> None:
    """Both devices must move all of stages 0 and 1: 8 x 4 ms in one lane."""
    stages = [
        stage(d, 1, 1, 1, activation_bytes=4 * UNIT, offload_bytes=4 * UNIT) for d in (0, 1, 1, 0)
    ]
    devices = [bus(memory_bytes=4 * UNIT, pcie_group="uplink") for _ in range(2)]
    assert _values(problem(stages, devices, m=4))["memory-energy"] >= 2 * 4 * 4


@pytest.mark.parametrize("kind", ["apart", "inside"])
def test_recompute_has_its_price_where_nothing_can_be_kept(kind: str) -> None:
    """Stages 0 and 2 share room for one activation: every micro-batch is recomputed.

    By the cheaper of two modes; one that would leave 1 byte is none that can be used.
    """
    cheap, dear, none = (
        {"name": str(again), "forward_bytes": kept, "recompute": kind, "recompute_ms": again}
        | ({"inside_bytes": 10 - kept} if kind == "inside" else {})
        for again, kept in ((5.0, 0), (7.0, 0), (1.0, 1))
    )
    first = {**stage(0, 1, 1, 1), "modes": [{"name": "keep"}, dear, cheap, none]}
    given = problem(
        [first, stage(1, 1, 1, 1), stage(0, 1, 1, 1)],
        [{"memory_bytes": 10}] * 2,
        m=4,
        format="optpipe/problem/v2",
    )
    assert _values(given)["memory-energy"] == pytest.approx(4 * (3 + 5 + 3))


@pytest.mark.parametrize(("memory", "left"), [(10, 1), (20, 2), (29, 2), (1000, 4)])
def test_what_waits_for_w_is_on_the_device_in_every_mode(memory: int, left: int) -> None:
    """Device 1 begins after 1 ms and ends its last I with ``left`` W to do; then I and W of 0.

    Recomputed, F leaves nothing, but 10 bytes wait for each W.
    """
    modes = [{"name": "keep"}, {"name": "again", "forward_bytes": 0, "recompute": "apart",
                                "recompute_ms": 1.0}]  # fmt: skip
    sizes = {"activation_bytes": 10, "weight_context_bytes": 10, "modes": modes}
    given = problem(
        [stage(d, 1, 1, 3, **sizes) for d in range(2)],
        [{"memory_bytes": memory}] * 2,
        m=4,
        format="optpipe/problem/v2",
    )
    assert _values(given)["weight-drain"] == pytest.approx(1 + 4 * (1 + 1 + 3) - 3 * left + 1 + 3)


def test_an_offloaded_checkpoint_pays_both_ways() -> None:
    """Room for one micro-batch: with checkpoints on the host three are on their way.

    The last of them waits for two copies.
    """
    away = {"name": "away", "forward_bytes": 4 * UNIT, "offload_bytes": 4 * UNIT,
            "recompute": "apart", "recompute_ms": 6.0}  # fmt: skip
    first_stage = stage(0, 1, 1, 1, activation_bytes=10 * UNIT)
    stages = [
        {**first_stage, "modes": [{"name": "keep"}, away]},
        stage(1, 9, 1, 0, activation_bytes=0),
    ]
    links = [{"from": 0, "to": 1, "latency_ms": 5.0}]
    devices = [bus(memory_bytes=10 * UNIT), bus()]
    given = problem(stages, devices, m=3, links=links, format="optpipe/problem/v2")
    trip = "OFFLOAD RELEASE", "RELOAD RECOMPUTE I W"
    first = [f"0F{j}@1 " + " ".join(f"0{kind}{j}" for kind in trip[0].split()) for j in range(3)]
    last = [" ".join(f"0{kind}{j}" for kind in trip[1].split()) for j in range(3)]
    rows = programs(" ".join(first + last), " ".join(f"1F{j} 1I{j} 1W{j}" for j in range(3)))
    check(given, rows)
    length = simulate(given, rows).makespan_ms
    assert length == 51
    assert lower_bound(given).ms == pytest.approx(43)


def test_full_memory_ties_forwards_to_earlier_and_input_gradients_to_later_work() -> None:
    """Two fit; F2 waits for I0 and W0, F3 for these, F2, I1 and W1: 3 + 2, then 3 more.

    The last F has 2 + 1 + 1 ms after it; the third last I also has that F and another W.
    """
    given = problem([stage(d, 1, 1, 1) for d in range(2)], [{"memory_bytes": 20}] * 2, m=4)
    model = relaxed(given)
    before = heads(model, refill(model), np.zeros(2))
    assert before.forward[:, 0].tolist() == [0, 1, 5, 8]
    after = tails(model, drain(model), np.zeros(2))
    assert after.forward[0, 0] == 2 + 1 + 1
    assert after.gradient[2, 0] == after.forward[0, 0] + 1 + 1


@pytest.mark.extended
@pytest.mark.parametrize("transfer_ms", [1, 4, 20])
def test_a_link_that_queues_is_a_device_in_between(transfer_ms: int) -> None:
    """What a link is said to need at least is needed where each message occupies a device."""
    ends = stage(0, 2, 3, 1), stage(1, 1, 2, 1)
    between = stage(2, transfer_ms, 0, 0)
    queued = optimum(problem([ends[0], between, ends[1]], m=2))
    line = {"from": 0, "to": 1, "bandwidth_gb_per_s": 1.0}
    size = {"output_bytes": transfer_ms * UNIT}
    links = [line, {"from": 1, "to": 0, "bandwidth_gb_per_s": 1e9}]
    given = problem([{**ends[0], **size}, ends[1]], m=2, links=links)
    load = link_loads(given)[0]
    assert (load.source, load.target, load.busy_ms) == (0, 1, 2 * transfer_ms)
    assert load.least_ms <= queued + 1e-6
    assert load.least_ms >= queued - 2.0 or transfer_ms < 4
    said = link_warnings(given, optimum(given))
    assert bool(said) is (transfer_ms == 20)
    assert all("0 -> 1 is busy for" in text for text in said[:1])


def test_links_that_queue_make_800_mb_over_10_gb_per_s_take_at_least_1_666_ms() -> None:
    """Eight devices, 18 ms a pass: both directions are said, loops share a link's load."""
    stages = [stage(d, 18, 18, 18, output_bytes=800 * UNIT * (d == 3)) for d in range(8)]
    link = {"from": 3, "to": 4, "bandwidth_gb_per_s": 10.0}
    given = problem(stages, m=16, links=[link])
    assert [load.least_ms for load in link_loads(given)] == [1666.0, 1666.0]
    assert not link_warnings(given, 1666.0)
    first, second = link_warnings(given, 1014.0)
    assert first.startswith("link 3 -> 4 is busy for 1,280.0 ms (12.8 GB at 10 GB/s)")
    assert "no schedule is shorter than 1,666.0 ms, but these 1,014.0 ms" in first
    assert second.startswith("link 4 -> 3")
    loop = [stage(s % 2, 1, 1, 1, output_bytes=10 * UNIT) for s in range(4)]
    twice = problem(loop, m=2, links=[{"from": 0, "to": 1, "bandwidth_gb_per_s": 1.0}])
    loads = {(load.source, load.target): load.busy_ms for load in link_loads(twice)}
    assert loads == {(0, 1): 60.0, (1, 0): 60.0}


def test_copies_of_two_sizes_are_no_less_than_they_save() -> None:
    """Four devices that keep one activation and a half: offloading most of it, they nearly do."""
    modes = [
        {"name": "keep"},
        {"name": "some", "offload_bytes": 3 * UNIT},
        {"name": "most", "offload_bytes": 9 * UNIT},
    ]
    cost = {"forward_ms": 2, "backward_input_ms": 2, "backward_weight_ms": 2, "modes": modes,
            "activation_bytes": 10 * UNIT, "weight_context_bytes": 2 * UNIT}  # fmt: skip
    posed = problem(
        [{"device": device, "costs": [cost]} for device in range(4)],
        [bus(memory_bytes=14 * UNIT, d2h_gb_per_s=20.0, h2d_gb_per_s=20.0)] * 4,
        m=6,
        format="optpipe/problem/v2",
    )
    found = solve(posed, work_limit=0.05)
    assert found.schedule is not None
    assert found.schedule.objective_ms < 50
    assert all(bound.ms <= found.schedule.objective_ms for bound in lower_bounds(posed))


@given(st.one_of(cases(menus=True, pairs=True), cases(tight=True, menus=True, pairs=True)))
def test_every_bound_is_below_every_schedule(case: Case) -> None:
    """Each argument alone; limits may be exactly what the schedule needs, where it is sharpest."""
    assert_below(
        case.problem, simulate(case.problem, case.programs).objective_ms(case.problem.objective)
    )


@few(25)
@given(tiny_problems(menus=True))
def test_every_bound_is_below_the_best_of_all_programs(problem: Problem) -> None:
    """Exhaustive search is the judge where it is possible."""
    assert_below(problem, optimum(problem))


@few(10)
@given(st.one_of(cases(tight=True), cases(tight=True, pairs=True)))
def test_every_bound_is_below_all_families(case: Case) -> None:
    """Families look for good schedules, random programs do not."""
    assert_below(case.problem, min(of_families(case.problem)))


@pytest.mark.parametrize(
    ("activations", "objective"),
    [(1, "span"), (1.5, "makespan"), (2, "span"), (3, "makespan"), (8, "span")],
)
def test_every_bound_is_below_all_families_of_a_line(activations: float, objective: str) -> None:
    """Good schedules of a published profile under every limit."""
    given = line(4, 10, activations, objective)
    assert_below(given, min(of_families(given)))


@pytest.mark.parametrize(("shape", "room"), [("v", 9), ("v", 7), ("v", 4), ("loop", 5)])
@pytest.mark.parametrize("hidden_ms", [1.0, pytest.param(0.6, marks=pytest.mark.extended)])
def test_every_bound_is_below_good_schedules_in_pairs(
    shape: str, room: int, hidden_ms: float
) -> None:
    """DualPipeV and building blocks; a V with room for nine chunks is as short as can be.

    On a loop with room for five what pairs hold says most.
    """
    back = (3, 2, 1, 0) if shape == "v" else (0, 1, 2, 3)
    given = all_in_pairs((0, 1, 2, 3, *back), 10, room, hidden_ms)
    best = min(of_families(given))
    assert_below(given, best)
    if (shape, room, hidden_ms) == ("v", 9, 1.0):
        assert best == max(bound.ms for bound in lower_bounds(given)) == 51
    if (shape, room) == ("loop", 5):
        assert lower_bound(given).method == "memory with pairs"


@given(cases(menus=True), st.sampled_from([1.0, 0.75]))
def test_every_objective_is_on_the_grid(case: Case, latency_ms: float) -> None:
    """Of two lengths on a grid the better one is so by a step: menus, lanes and links count."""
    data = case.problem.model_dump(mode="json", by_alias=True)
    data["links"] = [link | {"latency_ms": latency_ms} for link in data["links"]]
    problem = Problem.parse(data)
    length = simulate(problem, case.programs).objective_ms(problem.objective)
    grid = grid_ms(problem)
    if grid > 0:
        assert length / grid == pytest.approx(round(length / grid), abs=1e-6)


def test_a_grid_knows_how_long_a_message_leaves() -> None:
    """Two messages of 1 ms, 1 ms on their way: 2 ms alone, but 3 for the second."""
    link = {"from": 0, "to": 1, "latency_ms": 1.0, "bandwidth_gb_per_s": 1.0}
    ends = [stage(0, 0, 0, 0, output_bytes=UNIT), stage(1, 0, 0, 0)]
    given = problem(ends, m=2, links=[link], format="optpipe/problem/v2")
    assert grid_ms(given) == pytest.approx(1.0)


def _scaled(data: Any, factor: float) -> Any:
    """The document with every duration times a factor; bandwidths the other way round."""
    if isinstance(data, list):
        return [_scaled(one, factor) for one in data]
    if not isinstance(data, dict):
        return data
    scales = {key: factor for key in data if key.endswith("_ms")}
    scales |= {key: 1 / factor for key in data if key.endswith("per_s")}
    return {
        key: value * scales[key] if key in scales and value else _scaled(value, factor)
        for key, value in data.items()
    }


@given(documents(menus=True), st.sampled_from([0.5, 2.0, 4.0]))
def test_scaling_every_duration_scales_every_bound(document: dict[str, Any], factor: float) -> None:
    """A bound is a time: its unit does not matter."""
    before = lower_bounds(Problem.parse(document))
    after = lower_bounds(Problem.parse(_scaled(document, factor)))
    for one, other in zip(before, after, strict=True):
        assert other.ms == pytest.approx(one.ms * factor, rel=1e-9, abs=1e-9)


@given(cases(tight=True, menus=True), st.integers(1, 10_000_000))
def test_more_memory_never_raises_a_bound(case: Case, extra: int) -> None:
    """What is possible with less is possible with more."""
    richer = with_memory(
        case.problem, [device.memory_bytes + extra for device in case.problem.devices]
    )
    for one, other in zip(lower_bounds(case.problem), lower_bounds(richer), strict=True):
        assert other.ms <= one.ms * (1 + 1e-9) + 1e-9


@given(cases(tight=True, menus=True), st.data())
def test_one_mode_more_never_raises_a_bound(case: Case, data: st.DataObject) -> None:
    """What is possible with fewer modes is possible with more; so is the smallest memory."""
    richer = case.problem.model_dump(mode="json", by_alias=True)
    if "costs" not in richer["stages"][0]:
        return
    for one_stage in richer["stages"]:
        (cost,) = one_stage["costs"]
        one_more = data.draw(random_modes("one more", cost["activation_bytes"]))
        cost["modes"] = [*cost["modes"], one_more]
    after = Problem.parse(richer)
    known = {bound.method: bound.ms for bound in lower_bounds(after)}
    for one in lower_bounds(case.problem):  # menus have an argument more
        assert known[one.method] <= one.ms * (1 + 1e-9) + 1e-9, one.method
    for less, most in zip(smallest_memory(after), smallest_memory(case.problem), strict=True):
        assert less <= most


@given(cases(tight=True), st.randoms(use_true_random=False))
def test_numbering_of_devices_does_not_matter(case: Case, rng: random.Random) -> None:
    """Devices have names, not ranks."""
    order = list(range(len(case.problem.devices)))
    rng.shuffle(order)
    after = lower_bounds(renumbered(case.problem, order))
    for one, other in zip(lower_bounds(case.problem), after, strict=True):
        assert other.ms == pytest.approx(one.ms, rel=1e-9, abs=1e-9)
