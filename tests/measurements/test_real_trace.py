"""A trace that torch's profiler wrote of torch's schedule runtime, two ranks over gloo."""

import statistics
from pathlib import Path

import pytest

from optpipe.measurements import Given, read_kineto
from optpipe.measurements.trace_file import read_trace
from tests.measurements import profiled
from tests.runtime.ranks import start_ranks

pytestmark = pytest.mark.extended

ROWS = (("0F0", "0F1", "0B0", "0B1"), ("1F0", "1B0", "1F1", "1B1"))
SLOW_MS, FAST_MS = 60.0, 3.0
STEPS = 3


@pytest.fixture(scope="module")
def traces(tmp_path_factory) -> list[Path]:
    """The traces of a fast rank that waits for a slow one in every backward; made once."""
    folder = str(tmp_path_factory.mktemp("traces"))
    with start_ranks(2) as ranks:
        seconds = (FAST_MS / 1e3, SLOW_MS / 1e3)
        return [Path(path) for path in ranks.run(profiled.record, folder, ROWS, seconds, STEPS)]


def test_every_run_of_every_action_is_found(traces) -> None:
    run = read_kineto(traces)
    assert run.placement == (0, 1)
    assert run.seen_microbatches == 2
    assert {key: found.num_samples for key, found in run.spreads.items()} == {
        (stage, action): 2 * STEPS for stage in (0, 1) for action in ("F", "B")
    }
    assert {(one.rank, one.step) for one in run.samples} == {
        (rank, step) for rank in (0, 1) for step in range(STEPS)
    }


def test_times_are_the_work_and_not_the_waiting(traces) -> None:
    """The fast rank's first backward waits for the slow rank, inside its range."""
    ranges = read_trace(traces[0])[0].ranges
    waits = [event.duration_us / 1e3 for event in ranges if event.name == "PP:0B0"]
    assert statistics.median(waits) > SLOW_MS
    spreads = read_kineto(traces).without_warmup().spreads
    assert FAST_MS <= spreads[0, "B"].median_ms < SLOW_MS / 2
    assert FAST_MS <= spreads[0, "F"].median_ms < SLOW_MS / 2
    assert SLOW_MS <= spreads[1, "F"].median_ms < 2 * SLOW_MS
    assert SLOW_MS <= spreads[1, "B"].median_ms < 2 * SLOW_MS


def test_bytes_are_those_of_the_tensors_that_stay(traces) -> None:
    """In float32: the output of each stage; on the last one the difference that the square saves,
    and the loss, too. torch keeps outputs and losses to the end of the step.
    """
    run = read_kineto(traces)
    output = 4 * profiled.MICROBATCH * profiled.WIDTH
    assert [facts.activation_bytes for facts in run.stages] == [output, 2 * output + 4]
    notes = "\n".join(run.notes)
    assert "activation_bytes of stage 1 lacks the received input" in notes
    assert f"{output} of stage 0" in notes


def test_it_makes_a_problem(traces) -> None:
    asked = Given.model_validate(
        {"stage": {"activation_bytes": 100}, "device": {"memory_bytes": 1000}}
    )
    built = read_kineto(traces).without_warmup().problem(asked)
    assert (len(built.stages), built.num_microbatches) == (2, 2)
    assert built.stages[1].backward_ms is not None
    assert built.stages[1].backward_ms >= SLOW_MS
