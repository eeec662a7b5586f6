"""From samples to a problem: medians, what is filled in, and what is asked for.

Medians and spread: of few samples, by hand.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe import Problem
from optpipe.measurements import (
    DeviceFacts,
    Given,
    MeasuredAction,
    MeasurementError,
    Measurements,
    Sample,
    StageFacts,
    Transfer,
    build_problem,
    fit_links,
)
from optpipe.measurements.to_problem import TimeSpread, spread
from tests.building import problem, stage
from tests.measurements.samples import measured

ENOUGH = Given(
    num_microbatches=4,
    stage=StageFacts(activation_bytes=100, weight_context_bytes=50),
    device=DeviceFacts(memory_bytes=1000),
)


def test_medians_become_the_times_of_a_problem() -> None:
    built = measured({(0, "F"): [1, 9, 2], (0, "I"): [3], (0, "W"): [4, 5]}).problem(ENOUGH)
    only = built.stages[0]
    assert (only.forward_ms, only.backward_input_ms, only.backward_weight_ms) == (2, 3, 4.5)
    assert only.backward_ms is None
    assert (only.activation_bytes, only.weight_context_bytes) == (100, 50)
    assert (built.num_microbatches, built.devices[0].memory_bytes) == (4, 1000)


@pytest.mark.parametrize(
    ("times", "share", "expected"),
    [
        ({"I": 3, "W": 4, "B": 6}, None, (3, 4, 6)),  # measured beside each other
        ({"B": 6}, 0.25, (4.5, 1.5, 6)),  # divided by the share given
        ({"B": 6}, None, (6, 0, 6)),  # never split
    ],
)
def test_a_fused_backward_is_kept_and_split(times, share, expected) -> None:
    """As measured, as given, or all of it input gradient, and then a note says so."""
    rest = ENOUGH.model_copy(update={"weight_share": share})
    run = measured({(0, "F"): [1], **{(0, action): [ms] for action, ms in times.items()}})
    built = build_problem(run, rest)
    only = built.problem.stages[0]
    assert (only.backward_input_ms, only.backward_weight_ms, only.backward_ms) == expected
    assert ("only B was measured" in "\n".join(built.notes)) == ("I" not in times)


def test_everything_missing_is_named_at_once() -> None:
    with pytest.raises(MeasurementError) as refused:
        measured({(0, "F"): [1], (0, "B"): [1], (1, "F"): [1], (1, "B"): [1]}).problem()
    text = str(refused.value)
    assert "num_microbatches" in text
    assert "activation_bytes of stage 0-1" in text
    assert "memory_bytes of device 0-1" in text


@pytest.mark.parametrize(
    ("times", "message"),
    [
        ({(0, "F"): [1]}, "stage 0: F was measured, but a problem needs I and W, or B"),
        ({(0, "B"): [1]}, "stage 0: B was measured, but a problem needs F"),
        ({(0, "F"): [1], (0, "I"): [1]}, "stage 0: F, I was measured"),
        ({(2, "F"): [1], (0, "F"): [1]}, "stages 0, 2 were measured, but not 1"),
        ({}, "no action was measured"),
    ],
)
def test_too_few_times_are_refused(times, message) -> None:
    with pytest.raises(MeasurementError, match=message):
        measured(times).problem(ENOUGH)


def test_one_stage_counts_before_all_and_all_before_measured() -> None:
    """Described stages, then what is given for every stage, then the measured facts."""
    times = measured({(s, a): [1.0] for s in range(2) for a in ("F", "B")})
    run = Measurements(
        source="test",
        samples=times.samples,
        stages=(StageFacts(activation_bytes=7, static_bytes=3),) * 2,
        devices=(DeviceFacts(memory_bytes=70, reserved_bytes=6),),
    )
    rest = ENOUGH.model_copy(update={"stages": (StageFacts(activation_bytes=9),)})
    built = run.problem(rest)
    assert [one_stage.activation_bytes for one_stage in built.stages] == [9, 100]
    assert [one_stage.static_bytes for one_stage in built.stages] == [3, 3]
    first = built.devices[0]
    assert (first.memory_bytes, first.reserved_bytes) == (1000, 6)


def test_only_times_of_a_base_problem_are_replaced() -> None:
    base = problem(
        [stage(0, 1, 2, 3, static_bytes=4), stage(1, 1, 2, 3, output_bytes=5)],
        m=3,
        name="base",
        links=[{"from": 0, "to": 1, "latency_ms": 8}],
    )
    times = {(0, "F"): [10.0], (0, "I"): [20.0], (0, "W"): [30.0]}
    built = measured(times).problem(base=base)
    expected = base.model_dump(by_alias=True)
    expected["name"] = "base, times from test"
    expected["stages"] = list(expected["stages"])
    expected["stages"][0] |= {"forward_ms": 10, "backward_input_ms": 20, "backward_weight_ms": 30}
    assert built == Problem.parse(expected)


@pytest.mark.parametrize(
    ("times", "hidden"),
    [
        ({(0, "F"): [3.0]}, (2.5, 1.5)),
        ({(0, "F"): [2.0]}, (2.0, 1.5)),
        ({(1, "I"): [1.0], (1, "W"): [1.25]}, (2.25, 1.0)),
        ({(1, "B"): [1.0]}, (1.0, 0.4)),
    ],
)
def test_a_pair_hides_no_more_than_the_shorter_of_its_passes_as_measured(times, hidden) -> None:
    """Or no report of a shorter pass would make a problem."""
    base = problem(
        [stage(0, 3, 2, 3), stage(0, 3, 2, 3)],
        format="optpipe/problem/v2",
        pairs=[
            {"forward": 0, "backward": 1, "hidden_ms": 2.5},
            {"forward": 0, "backward": 1, "with": "I", "hidden_ms": 1.5},
        ],
    )
    found = build_problem(measured(times), base=base)
    assert tuple(one.hidden_ms for one in found.problem.pairs) == pytest.approx(hidden)
    assert found.notes[-1].endswith("not measured.")


def test_what_the_base_gives_is_noted_once_for_all_stages_alike() -> None:
    """Stages 0 and 1 lack a backward, stage 2 everything."""
    base = problem([stage(0, 1, 2, 3), stage(1, 1, 2, 3), stage(2, 1, 2, 3)])
    built = build_problem(measured({(0, "F"): [5.0], (1, "F"): [6.0]}), base=base)
    assert [one_stage.forward_ms for one_stage in built.problem.stages] == [5, 6, 1]
    assert [one_stage.backward_weight_ms for one_stage in built.problem.stages] == [3, 3, 3]
    kept = "neither B nor I and W were measured; the base problem's times are kept."
    assert built.notes == (
        f"Stage 0-1: {kept}",
        f"Stage 2: {kept} F was not measured; the base problem's time is kept.",
    )


def test_a_measured_recompute_counts_for_the_menu_of_a_base() -> None:
    """Of modes that recompute apart; not measured, they keep their time, with a note."""
    again = {"name": "again", "forward_bytes": 9, "recompute": "apart", "recompute_ms": 7}
    inside = {"name": "inside", "forward_bytes": 5, "recompute": "inside", "recompute_ms": 3}
    whole = stage(0, 1, 2, 3, modes=[{"name": "keep"}, again, inside])
    base = problem([whole], format="optpipe/problem/v2")
    times = {(0, "F"): [5.0], (0, "B"): [9.0]}
    kept = build_problem(measured(times), base=base)
    assert [mode.recompute_ms for mode in kept.problem.stages[0].modes] == [None, 7, 3]
    assert "RECOMPUTE was not measured; the base problem's time is kept." in kept.notes[0]
    found = build_problem(measured(times | {(0, "RECOMPUTE"): [4.0]}), base=base)
    assert [mode.recompute_ms for mode in found.problem.stages[0].modes] == [None, 4, 3]
    assert "RECOMPUTE" not in found.notes[0]


def test_a_fused_backward_is_split_as_in_the_base() -> None:
    """B of 10 ms over a base with I : W of 2 : 3."""
    base = problem([stage(0, 1, 2, 3)])
    only = measured({(0, "F"): [1], (0, "B"): [10]}).problem(base=base).stages[0]
    assert (only.backward_input_ms, only.backward_weight_ms, only.backward_ms) == (4, 6, 10)


ONE = {(0, "F"): [1], (0, "B"): [1]}
TOO_MANY = ENOUGH.model_copy(update={"stages": (StageFacts(),) * 2})
TOGETHER = Measurements(source="test", samples=measured(ONE).samples, placement=(0, 0))


@pytest.mark.parametrize(
    ("run", "rest", "base", "message"),
    [
        (measured(ONE), TOO_MANY, None, "2 stages are described, but times of 1"),
        (
            measured(ONE),
            ENOUGH,
            problem([stage(0)]),
            "activation_bytes, weight_context_bytes, memory",
        ),
        (
            measured({(1, "F"): [1]}),
            None,
            problem([stage(0)]),
            "stage 1 was measured, but the base problem has 1",
        ),
        (TOGETHER, None, problem([stage(0), stage(1)]), "stages 0 and 1 ran on one device"),
    ],
)
def test_what_contradicts_the_measurements_is_refused(run, rest, base, message) -> None:
    """More described stages than measured; sizes, fewer stages, another placement of a base."""
    with pytest.raises(MeasurementError, match=message):
        run.problem(rest, base)


def test_links_are_fitted_and_the_others_given() -> None:
    """10 us and 2 GB/s from two message sizes; the third device's link as given."""
    sizes = (2_000_000, 4_000_000)
    transfers = tuple(
        Transfer(source=0, target=1, num_bytes=size, time_ms=0.01 + size / 2e6) for size in sizes
    )
    times = {(s, a): [1.0] for s in range(3) for a in ("F", "B")}
    run = Measurements(source="test", samples=measured(times).samples, transfers=transfers)
    rest = ENOUGH.model_copy(update={"link_gb_per_s": 5.0, "link_latency_ms": 0.5})
    links = {(link.source, link.target): link for link in run.problem(rest).links}
    assert links[0, 1].latency_ms == pytest.approx(0.01)
    assert links[0, 1].bandwidth_gb_per_s == pytest.approx(2)
    assert (links[1, 2].latency_ms, links[2, 1].bandwidth_gb_per_s) == (0.5, 5)


def test_measured_links_follow_the_devices_of_the_base() -> None:
    """The run's device 0 is the base's device 1."""
    run = Measurements(
        source="test",
        samples=measured({(0, "F"): [1]}).samples,
        placement=(0, 1),
        transfers=(Transfer(source=0, target=1, num_bytes=1_000_000, time_ms=1),),
    )
    known = [{"from": 1, "to": 0, "latency_ms": 8}]
    built = run.problem(base=problem([stage(1), stage(0)], links=known))
    assert (built.links[1].source, built.links[1].bandwidth_gb_per_s) == (1, 1)


def test_a_recomputation_takes_what_was_measured_or_a_forward() -> None:
    """With checkpoint_bytes known: RECOMPUTE's median, else F's."""
    rest = Given(
        num_microbatches=1,
        stage=StageFacts(activation_bytes=10, checkpoint_bytes=1),
        device=ENOUGH.device,
    )
    times = {(0, "F"): [2.0], (0, "B"): [1.0]}
    assert measured(times).problem(rest).stages[0].recompute_ms == 2
    assert measured(times | {(0, "RECOMPUTE"): [3.0]}).problem(rest).stages[0].recompute_ms == 3


def test_every_assumption_is_noted() -> None:
    times = {(s, a): [1.0] for s in range(2) for a in ("F", "I", "W", "RECOMPUTE")}
    rest = Given(
        num_microbatches=1, stage=StageFacts(activation_bytes=9, offload_bytes=9),
        device=ENOUGH.device,
    )  # fmt: skip
    notes = "\n".join(build_problem(measured(times), rest).notes)
    assert "static_bytes of stage 0-1" in notes
    assert "weight_context_bytes of stage 0-1" in notes
    assert "output_bytes of stage 0-1" in notes
    assert "d2h_gb_per_s of device 0-1" in notes
    assert "checkpoint_bytes is unknown" in notes
    assert "Links 0 -> 1, 1 -> 0" in notes


def test_the_last_stage_needs_no_output() -> None:
    """It sends nothing on; what the others send is known."""
    times = {(s, a): [1.0] for s in range(2) for a in ("F", "B")}
    rest = ENOUGH.model_copy(update={"stages": (StageFacts(output_bytes=5),)})
    assert "output_bytes" not in "\n".join(build_problem(measured(times), rest).notes)


def test_the_first_step_of_each_rank_is_left_out() -> None:
    """Where a rank measured two steps; a rank with one keeps it."""
    samples = (
        Sample(stage=0, action="F", time_ms=100, step=0, rank=0),
        Sample(stage=0, action="F", time_ms=1, step=1, rank=0),
        Sample(stage=1, action="F", time_ms=2, step=0, rank=1),
    )
    run = Measurements(source="test", samples=samples)
    assert run.spreads[0, "F"].median_ms == 50.5
    kept = run.without_warmup()
    assert kept.samples == samples[1:]
    assert kept.spreads[0, "F"].median_ms == 1
    assert "1 samples of the first steps" in kept.notes[0]
    assert run.without_warmup(0) == run
    with pytest.raises(MeasurementError, match="rank 0: 2 steps were measured and 2"):
        run.without_warmup(2)


# Medians alone say the same of a problem as everything that was measured.


ACTIONS: tuple[MeasuredAction, ...] = ("F", "I", "W", "B")
TIMES = st.floats(0.001, 100.0)
BASE = problem([stage(0), stage(1)], [{"memory_bytes": 99}] * 2, m=2)
SAMPLES = st.builds(Sample, stage=st.integers(0, 1), action=st.sampled_from(ACTIONS), time_ms=TIMES)
TRANSFERS = st.builds(
    Transfer,
    source=st.just(0),
    target=st.just(1),
    num_bytes=st.sampled_from((10, 2000, 500_000)),
    time_ms=TIMES,
)


@given(st.lists(SAMPLES, min_size=1, max_size=30), st.lists(TRANSFERS, max_size=9))
def test_the_problem_stays_the_same(samples: list[Sample], transfers: list[Transfer]) -> None:
    whole = Measurements(
        source="a test",
        samples=tuple(samples),
        transfers=tuple(transfers),
        placement=(0, 1),
        devices=(DeviceFacts(d2h_gb_per_s=3.0),),
    )
    kept = whole.condensed()
    assert kept.problem(base=BASE).problem_hash == whole.problem(base=BASE).problem_hash
    assert kept.devices == whole.devices
    assert kept.condensed() == kept
    assert len(kept.samples) == len({(one.stage, one.action) for one in samples})
    assert len(kept.transfers) == len({one.num_bytes for one in transfers})


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        # In disorder: the 5th percentile lies half-way between the first two.
        ([50, 0, 100, 10, 90, 20, 80, 30, 70, 40, 60], TimeSpread(11, 50, 5.0, 95.0, 30)),
        # An outlier moves neither median nor deviation; the mean of these is 202.8 ms.
        ([1, 2, 3, 1000, 8], TimeSpread(5, 3, 1.2, 801.6, 2)),
        ([7.5], TimeSpread(1, 7.5, 7.5, 7.5, 0)),
    ],
)
def test_median_quantiles_and_deviation(times, expected) -> None:
    assert spread(times) == expected


# Latency and bandwidth fitted to messages.


def messages(*points: tuple[int, float]) -> list[Transfer]:
    """Messages from device 0 to device 1: (bytes, ms) each."""
    return [Transfer(source=0, target=1, num_bytes=size, time_ms=ms) for size, ms in points]


@given(
    latency_ms=st.floats(0, 10),
    gb_per_s=st.floats(0.1, 1000),
    sizes=st.sets(st.integers(1, 1000), min_size=2, max_size=8),
)
def test_exact_messages_give_the_link_back(latency_ms, gb_per_s, sizes) -> None:
    points = [(size * 10**6, latency_ms + size / gb_per_s) for size in sizes]
    (fit,) = fit_links(messages(*points))
    assert fit.latency_ms == pytest.approx(latency_ms, abs=1e-5)
    assert fit.bandwidth_gb_per_s == pytest.approx(gb_per_s, rel=1e-6)
    assert fit.num_sizes == len(sizes)


@pytest.mark.parametrize(
    ("points", "latency_ms", "gb_per_s"),
    [
        # Of each size, the median of its times counts: one late message moves nothing.
        ([*[(10**6 * size, 1.0 + size) for size in (1, 2, 4)] * 3, (10**6, 500.0)], 1, 1),
        # Latency cannot be told from one size.
        ([(2 * 10**6, 1.0), (2 * 10**6, 3.0)], 0, 1),
        # A line below zero: latency is not negative.
        ([(10**6, 1.0), (2 * 10**6, 4.0)], 0, 1 / 1.5),
        # Longer messages that took no longer: no bandwidth is known.
        ([(10**6, 2.0), (2 * 10**6, 1.0)], 1.5, None),
    ],
)
def test_odd_messages_give_a_link_that_can_be(points, latency_ms, gb_per_s) -> None:
    (fit,) = fit_links(messages(*points))
    assert fit.latency_ms == latency_ms
    assert fit.bandwidth_gb_per_s == (gb_per_s and pytest.approx(gb_per_s))


def test_directions_are_links_of_their_own() -> None:
    there, back = messages((10**6, 1.0))[0], Transfer(source=1, target=0, num_bytes=5, time_ms=1)
    assert [(fit.source, fit.target) for fit in fit_links([back, there])] == [(0, 1), (1, 0)]
    assert fit_links([]) == ()
