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


def test_an_offload_without_need_is_named() -> None:
    given_problem, rows = offloading()
    roomy = given_problem.model_copy(update={"devices": [bus()]})
    (text,) = texts(explain(roomy, rows), "offload")
    assert "without need: if gpu0 keeps it, it still has" in text


def test_one_of_two_that_is_not_needed_is_named() -> None:
    given_problem = problem([offloadable()], [bus(memory_bytes=20_000_000)], m=3)
    rows = programs(
        "0F0 0OFFLOAD0 0F1 0OFFLOAD1 0RELEASE0 0RELEASE1 0F2 0B2 0RELOAD1 0B1 0RELOAD0 0B0"
    )
    assert texts(explain(given_problem, rows), "offload")[1:] == [
        "stage 0: micro-batch 0 is offloaded without need: gpu0 holds it all the same",
        "stage 0: micro-batch 1 could be kept, but only instead of others that are offloaded "
        "without need",
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
