"""Tables of times, stages and messages: read, written, and refused with the line."""

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe.measurements import (
    Given,
    MeasurementError,
    Measurements,
    Sample,
    dump_times,
    read_messages_table,
    read_stages_table,
    read_times,
)

ENOUGH = Given.model_validate(
    {"num_microbatches": 4, "stage": {"activation_bytes": 9}, "device": {"memory_bytes": 99}}
)


def test_a_table_is_read_whatever_the_order_of_its_columns() -> None:
    text = "\ufeffaction,time_ms, stage ,step\nF, 1.5,0,\n\nB,3,0,2\n"
    assert read_times(text).samples == (
        Sample(stage=0, action="F", time_ms=1.5),
        Sample(stage=0, action="B", time_ms=3, step=2),
    )


def test_ranks_place_stages() -> None:
    """Stages 0 and 3 of rank 8, 1 and 2 of rank 12: two devices. Of replicas the first counts."""
    rows = [f"{stage},F,1,{rank}" for stage, rank in enumerate((8, 12, 12, 8))]
    assert read_times("\n".join(["stage,action,time_ms,rank", *rows])).placement == (0, 1, 1, 0)
    rows = ["0,F,1,0", "1,F,1,1", "1,F,1,2", "0,F,1,3"]
    assert read_times("\n".join(["stage,action,time_ms,rank", *rows])).placement == (0, 1)


times = st.floats(0, 1e6, allow_subnormal=False)
samples = st.builds(
    Sample,
    stage=st.integers(0, 3),
    action=st.sampled_from(("F", "I", "W", "B", "RECOMPUTE")),
    time_ms=times,
    microbatch=st.none() | st.integers(0, 99),
    step=st.none() | st.integers(0, 99),
    rank=st.none() | st.integers(0, 99),
)


@given(st.lists(samples, min_size=1, max_size=20))
def test_samples_survive_the_table(found) -> None:
    written = Measurements(source="test", samples=tuple(found))
    assert read_times(dump_times(written)).samples == written.samples


@given(st.lists(st.tuples(*(st.lists(times, min_size=1, max_size=9),) * 3), min_size=1, max_size=4))
def test_a_problem_has_the_medians_of_the_table(stages) -> None:
    """Samples -> table -> problem: the medians of the samples, to the nanosecond."""
    found = [
        Sample.model_validate({"stage": stage, "action": action, "time_ms": time_ms})
        for stage, of_stage in enumerate(stages)
        for action, list_ms in zip("FIW", of_stage, strict=True)
        for time_ms in list_ms
    ]
    text = dump_times(Measurements(source="test", samples=tuple(found)))
    built = read_times(text).problem(ENOUGH)
    for held, of_stage in zip(built.stages, stages, strict=True):
        medians = held.forward_ms, held.backward_input_ms, held.backward_weight_ms
        assert medians == tuple(round(statistics.median(list_ms), 6) for list_ms in of_stage)


HEADER = "stage,action,time_ms\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the table has no rows"),
        (HEADER, "the table has no rows"),
        ("stage,time_ms\n0,1\n", "line 1: columns stage, time_ms: action is missing"),
        ("x" * 5000 + "\n", "line 1: columns x{80}\\.\\.\\.: stage is missing"),
        ("stage,action,time_ms,ms\n", "line 1: column 'ms' is unknown"),
        ("stage,action,time_ms,step,step\n", "line 1: column 'step' stands twice"),
        (HEADER + "0,F,1\n0,F\n", "line 3: 2 cells, but 3 columns"),
        (HEADER + "0,F,fast\n", "line 2: time_ms = 'fast': must be a number"),
        (HEADER + "0,F,nan\n", "line 2: time_ms = nan: must be finite"),
        (HEADER + "0,F,-1\n", "line 2: time_ms = -1.0: must be >= 0"),
        (HEADER + "0.5,F,1\n", "line 2: stage = 0.5: must be a whole number"),
        (HEADER + "0,G,1\n", "line 2: action = 'G'"),
        (HEADER + "0,,1\n", "line 2: action: is missing"),
        (HEADER + '0,"F,1\n', "not CSV"),
    ],
)
def test_wrong_tables_of_times_are_refused(text, message) -> None:
    with pytest.raises(MeasurementError, match=message):
        read_times(text)


def test_a_table_of_stages_is_read() -> None:
    text = "stage,activation_bytes,output_bytes,device\n1,20,,0\n0,10,5,1\n"
    first, second = read_stages_table(text)
    assert (first.activation_bytes, first.output_bytes, first.device) == (10, 5, 1)
    assert (second.activation_bytes, second.output_bytes, second.device) == (20, None, 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stage,activation\n0,1\n", "column 'activation' is unknown"),
        ("stage,static_bytes\n0,1\n0,2\n", "line 3: stage = 0: stands twice"),
        ("stage,static_bytes\n-1,2\n", "line 2: stage = -1.0: must be a whole number from 0"),
        ("stage,static_bytes\n0,1\n2,2\n", "no row for stage 1"),
        ("stage,static_bytes\n0,1.5\n", "line 2: static_bytes = 1.5: must be a whole number"),
    ],
)
def test_wrong_tables_of_stages_are_refused(text, message) -> None:
    with pytest.raises(MeasurementError, match=message):
        read_stages_table(text)


def test_a_table_of_messages_becomes_a_link() -> None:
    text = "from,to,bytes,time_ms\n0,1,1000000,2\n0,1,3000000,4\n"
    run = read_times(HEADER + "0,F,1\n").with_transfers(read_messages_table(text))
    (link,) = run.links
    assert link.latency_ms == 1
    assert link.bandwidth_gb_per_s == pytest.approx(1)


def test_a_message_without_bytes_is_refused() -> None:
    """A transfer of nothing says nothing about a link."""
    with pytest.raises(MeasurementError, match="line 2: num_bytes = 0: must be > 0"):
        read_messages_table("from,to,bytes,time_ms\n0,1,0,2\n")
