"""The explanation as a whole: round trips, what it says in words, and how long it takes."""

import time

import pytest
from hypothesis import given

from optpipe import Problem, Programs, simulate
from optpipe.explain import Explanation, explain
from optpipe.explain.explanation import ranges
from tests.building import bus, offloadable, one_f_one_b, problem, programs, stage
from tests.strategies import Case, cases


def texts(explanation: Explanation, topic: str) -> list[str]:
    return [sentence.text for sentence in explanation.sentences if sentence.topic == topic]


def offloading() -> tuple[Problem, Programs]:
    given_problem = problem([offloadable(f=1, i=1, w=2)], [bus(memory_bytes=20_000_000)], m=3)
    return given_problem, programs("0F0 0OFFLOAD0 0RELEASE0 0F1 0F2 0B2 0B1 0RELOAD0 0B0")


def test_why_it_offloads_in_words() -> None:
    assert texts(explain(*offloading()), "offload") == [
        "stage 0 offloads 1 of 3 micro-batches (9.5 MiB each, 10 ms away and 10 ms back): without "
        "it 0F2 would need 9.5 MiB more than gpu0 has"
    ]


def test_an_offload_that_is_not_needed_to_fit_says_what_it_is_for() -> None:
    """It lowers the peak, or not; offloads that free nothing are given with the bytes they move."""
    given_problem, rows = offloading()
    roomy = given_problem.model_copy(update={"devices": [bus(memory_bytes=40_000_000)]})
    (text,) = texts(explain(roomy, rows), "offload")
    assert text == (
        "stage 0 offloads 1 of 3 micro-batches (9.5 MiB each, 10 ms away and 10 ms back), not "
        "needed to fit: it lowers the peak of gpu0 (keeping it, 9.5 MiB would still be left)"
    )
    rows = programs("0F0 0F1 0F2 0B2 0B1 0OFFLOAD0 0RELEASE0 0RELOAD0 0B0")
    (text,) = texts(explain(roomy, rows), "offload")
    assert text == (
        "stage 0 offloads 1 of 3 micro-batches (9.5 MiB each, 10 ms away and 10 ms back), not "
        "needed to fit: it frees nothing, as gpu0 runs nothing between release and reload "
        "(keeping it, 9.5 MiB would still be left)"
    )
    rows = programs("0F0 0OFFLOAD0 0RELEASE0 0F1 0B1 0RELOAD0 0F2 0B2 0B0")
    (text,) = texts(explain(roomy, rows), "offload")
    assert "not needed to fit: it does not lower the peak of gpu0 (keeping it, 19.1 MiB" in text


def test_the_bubble_and_the_idle_time_are_reconciled() -> None:
    """Recomputation is bubble and no idle time; without it both are equal, and nothing is said."""
    recomputing = stage(recompute_ms=2, checkpoint_bytes=3)
    explanation = explain(
        problem([recomputing, stage(1)], m=2),
        programs("0F0 0RECOMPUTE0 0B0 0F1 0B1", "1F0 1B0 1F1 1B1"),
    )
    assert (
        "The bubble is 50.0%, the idle time 41.7%: the bubble also counts recomputation (8.3%)."
    ) in texts(explanation, "idle")
    explanation = explain(problem([stage(), stage(1)], m=2), one_f_one_b(2, 2))
    assert "recomputation" not in " ".join(texts(explanation, "idle"))


def test_one_of_two_that_is_not_needed_is_named() -> None:
    given_problem = problem([offloadable()], [bus(memory_bytes=20_000_000)], m=3)
    rows = programs(
        "0F0 0OFFLOAD0 0F1 0OFFLOAD1 0RELEASE0 0RELEASE1 0F2 0B2 0RELOAD1 0B1 0RELOAD0 0B0"
    )
    assert texts(explain(given_problem, rows), "offload")[1:] == [
        "stage 0: micro-batch 0 is offloaded, not needed to fit: gpu0 has the memory to keep it",
        "stage 0: micro-batch 1 could be kept, but only instead of others that are offloaded and "
        "not needed to fit",
    ]


def test_the_length_the_path_the_lanes_and_the_idle_time_in_words() -> None:
    given_problem, rows = offloading()
    explanation = explain(given_problem, rows, bound_ms=30.0)
    assert texts(explanation, "length") == [
        "The makespan is 32 ms; the busiest device computes for 12 ms of it. The bubble is 62.5%.",
        "Proven: no schedule of this problem is shorter than 30 ms; at most 6.2% can be won.",
    ]
    assert texts(explanation, "critical path") == [
        "The chain that makes the length, 32 ms on 1 device: 12 ms computing, 10 ms offloading "
        "(D2H) and 10 ms reloading (H2D).",
        "0.0: gpu0: F of micro-batch 0, 1 ms",
        "1: gpu0: offload of micro-batch 0, 10 ms",
        "11: gpu0: F of micro-batches 1, 2 and B of 1, 2, 8 ms",
        "19: gpu0: reload of micro-batch 0, 10 ms",
        "29: gpu0: B of micro-batch 0, 3 ms",
    ]
    assert texts(explanation, "lanes")[0].startswith(
        "No lane is saturated; the most used is compute of"
    )
    assert texts(explanation, "idle") == [
        "gpu0: idle 20 ms (62.5%): 10 waiting for a reload and 10 waiting for an offload to end "
        "(RELEASE)"
    ]
    assert texts(explanation, "memory")[0] == (
        "gpu0: 19.1 MiB of 19.1 MiB, 0 B left, fullest at 0F2 (F of stage 0, micro-batch 2)"
    )


def test_devices_that_read_alike_stand_together() -> None:
    given_problem = problem([stage(d) for d in range(4)], m=64)
    rows = one_f_one_b(4, 64)
    explanation = explain(given_problem, rows)
    assert texts(explanation, "lanes") == [
        "Saturated, busy 95.0% of the time or more: 4 lanes.",
        "compute of gpu0..3: busy 192.0 ms, 95.5%",
    ]
    devices = [bus(name=name) for name in ("left", "gpu1", "gpu2", "gpu3")]
    explanation = explain(given_problem.model_copy(update={"devices": devices}), rows)
    assert "compute of left, gpu1, gpu2 and gpu3: " in texts(explanation, "lanes")[1]


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([3], "3"),
        ([2, 1], "1, 2"),
        ([4, 2, 3, 9], "2..4, 9"),
        (range(0, 20, 2), "0, 2, 4, 6, 8, 10, ... (10 in all)"),
    ],
)
def test_ranges_are_short(numbers, text) -> None:
    assert ranges(numbers) == text


@given(cases(menus=True))
def test_an_explanation_survives_json(case: Case) -> None:
    explanation = explain(*case)
    assert Explanation.model_validate_json(explanation.model_dump_json()) == explanation
    assert explanation.length_ms == simulate(*case).objective_ms(case.problem.objective)


@pytest.mark.extended
def test_a_large_schedule_is_explained_in_seconds() -> None:
    """64 devices, 512 micro-batches, 98,304 actions: processor time, for the machine is shared."""
    given_problem = problem([stage(d, 3, 2, 2) for d in range(64)], m=512)
    rows = one_f_one_b(64, 512, "IW")
    assert sum(map(len, rows)) == 98_304
    began = time.process_time()
    explanation = explain(given_problem, rows)
    assert time.process_time() - began < 10
    assert len(explanation.sentences) < 100


def test_the_most_that_an_offload_frees_is_said() -> None:
    """Micro-batch 0 comes back at once and frees nothing; micro-batch 1 frees its activation."""
    given_problem = problem([offloadable()], [bus()], m=3)
    rows = programs(
        "0F0 0OFFLOAD0 0RELEASE0 0RELOAD0 0F1 0OFFLOAD1 0RELEASE1 0F2 0B2 0B0 0RELOAD1 0B1"
    )
    (text,) = texts(explain(given_problem, rows), "offload")
    assert "2 of 3 micro-batches (up to 9.5 MiB each, " in text
