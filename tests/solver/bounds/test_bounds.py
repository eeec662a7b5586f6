"""What single bounds are worth, on problems where that can be computed by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from optpipe import check, simulate
from optpipe.simulate import link_loads, link_warnings
from optpipe_solver import solve
from optpipe_solver.bounds import lower_bound, lower_bounds
from optpipe_solver.bounds.configurations import configurations_ms
from optpipe_solver.bounds.heads_tails import drain, heads, refill, tails
from optpipe_solver.bounds.relaxation import relaxed
from optpipe_solver.families.zero_bubble import build_zb_h1
from tests.building import UNIT, bus, problem, programs, stage
from tests.solver.bounds.judging import line, of_families
from tests.solver.exhaustive import optimum

if TYPE_CHECKING:
    from optpipe import Problem


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


@pytest.mark.parametrize("objective", ["makespan", "span"])
@pytest.mark.parametrize(("p", "m"), [(4, 8), (8, 24)])
def test_zb_h1_is_proven_optimal_at_one_activation_per_device(
    p: int, m: int, objective: str
) -> None:
    """With p activations the idle time before the first I and after the last F is all there is."""
    given = line(p, m, p, objective)
    assert lower_bound(given).ms == pytest.approx(min(of_families(given)), rel=1e-6)


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
    held = {"activation_bytes": 10, "weight_context_bytes": 10, "modes": modes}
    given = problem(
        [stage(d, 1, 1, 3, **held) for d in range(2)],
        [{"memory_bytes": memory}] * 2,
        m=4,
        format="optpipe/problem/v2",
    )
    assert _values(given)["weight-drain"] == pytest.approx(1 + 4 * (1 + 1 + 3) - 3 * left + 1 + 3)


def test_an_offloaded_checkpoint_pays_both_ways() -> None:
    """Room for one micro-batch: kept, three turns of 23 ms, 20 of them a wait.

    With checkpoints on the host three are on their way; the last of them waits for two copies.
    """
    away = {"name": "away", "forward_bytes": 4 * UNIT, "offload_bytes": 4 * UNIT,
            "recompute": "apart", "recompute_ms": 6.0}  # fmt: skip
    held = stage(0, 1, 1, 1, activation_bytes=10 * UNIT)
    stages = [{**held, "modes": [{"name": "keep"}, away]}, stage(1, 9, 1, 0, activation_bytes=0)]
    links = [{"from": 0, "to": 1, "latency_ms": 5.0}]
    devices = [bus(memory_bytes=10 * UNIT), bus()]
    given = problem(stages, devices, m=3, links=links, format="optpipe/problem/v2")
    kept = given.model_copy(
        update={"stages": (given.stages[0].model_copy(update={"modes": ()}), given.stages[1])}
    )
    trip = "OFFLOAD RELEASE", "RELOAD RECOMPUTE I W"
    first = [f"0F{j}@1 " + " ".join(f"0{kind}{j}" for kind in trip[0].split()) for j in range(3)]
    last = [" ".join(f"0{kind}{j}" for kind in trip[1].split()) for j in range(3)]
    rows = programs(" ".join(first + last), " ".join(f"1F{j} 1I{j} 1W{j}" for j in range(3)))
    check(given, rows)
    length = simulate(given, rows).makespan_ms
    assert length == 51
    assert configurations_ms(kept) == pytest.approx(69)
    for bound_ms in (configurations_ms(given), lower_bound(given).ms):
        assert bound_ms == pytest.approx(43)


def test_full_memory_ties_a_forward_to_an_earlier_input_gradient_and_the_work_in_between() -> None:
    """Two fit; F2 waits for I0 and W0, F3 for these, F2, I1 and W1: 3 + 2, then 3 more."""
    given = problem([stage(d, 1, 1, 1) for d in range(2)], [{"memory_bytes": 20}] * 2, m=4)
    model = relaxed(given)
    events = heads(model, refill(model), np.zeros(2))
    assert events.forward[:, 0].tolist() == [0, 1, 5, 8]


def test_full_memory_ties_an_input_gradient_to_a_later_forward() -> None:
    """The last F has 2 + 1 + 1 ms after it; the third last I also has that F and another W."""
    given = problem([stage(d, 1, 1, 1) for d in range(2)], [{"memory_bytes": 20}] * 2, m=4)
    model = relaxed(given)
    events = tails(model, drain(model), np.zeros(2))
    assert events.forward[0, 0] == 2 + 1 + 1
    assert events.gradient[2, 0] == events.forward[0, 0] + 1 + 1


def test_64_devices_and_512_micro_batches_are_proven_optimal_at_one_activation_per_device() -> None:
    """ZB-H1 at p activations; the load of a device alone proves only within 1.6 %."""
    given = line(64, 512, 64)
    length_ms = simulate(given, build_zb_h1(given)).makespan_ms
    assert lower_bound(given).ms == pytest.approx(length_ms, rel=1e-6)


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
    made = problem(
        [{"device": device, "costs": [cost]} for device in range(4)],
        [bus(memory_bytes=14 * UNIT, d2h_gb_per_s=20.0, h2d_gb_per_s=20.0)] * 4,
        m=6,
        format="optpipe/problem/v2",
    )
    found = solve(made, work_limit=1.0)
    assert found.schedule is not None
    assert found.schedule.objective_ms < 50
    assert all(bound.ms <= found.schedule.objective_ms for bound in lower_bounds(made))
