"""Megatron's log in every form it was printed in; tables, refused with the line."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe.measurements import (
    MeasurementError,
    Measurements,
    MegatronRun,
    Sample,
    dump_times,
    read_megatron,
    read_messages_table,
    read_stages_table,
    read_times,
)
from tests.measurements.samples import medians

ARGUMENTS = """\
using world size: 4, data-parallel size: 1, tensor-model-parallel size: 2, \
pipeline-model-parallel size: 2
------------------------ arguments ------------------------
  global_batch_size ............................... 16
  hidden_size ..................................... 1024
  micro_batch_size ................................ 2
  data_parallel_size .............................. 1
  params_dtype .................................... torch.bfloat16
  pipeline_model_parallel_size .................... 2
  recompute_granularity ........................... None
  seq_length ...................................... 4096
  sequence_parallel ............................... True
  tensor_model_parallel_size ...................... 2
  virtual_pipeline_model_parallel_size ............ None
  world_size ...................................... 4
-------------------- end of arguments ---------------------
"""
ITERATION = " iteration       10/     100 | elapsed time per iteration (ms): 900.0 |\n"


def all_ranks(forward: list[float], backward: list[float]) -> str:
    lines = ["[default3]:times across ranks (ms):"]
    for name, times in (("forward-compute", forward), ("backward-compute", backward)):
        lines.append(f"[default3]:  {name}:")
        lines += [f"[default3]:     rank {rank:2d}: {ms:.2f}" for rank, ms in enumerate(times)]
    return "\n".join([*lines, "  forward-recv:", "     rank  2: 99.00", ITERATION])


EVEN = ARGUMENTS + all_ranks([8] * 4, [8] * 4)


def min_max(forward: tuple[float, float], backward: tuple[float, float]) -> str:
    return (
        "(min, max) time across ranks (ms):\n"
        "    forward-backward ...............................: (900.00, 901.00)\n"
        f"    forward-compute ................................: ({forward[0]}, {forward[1]})\n"
        f"    backward-compute ...............................: ({backward[0]}, {backward[1]})\n"
        + ITERATION
    )


def test_times_of_all_ranks_are_divided_by_the_micro_batches() -> None:
    """16 / 2 micro-batches; tensor ranks 0, 1 hold stage 0 and 2, 3 hold stage 1."""
    block = all_ranks([80, 88, 160, 160], [160, 160, 320, 320])
    run = read_megatron(ARGUMENTS + block + block)
    assert run.num_microbatches == 8
    assert medians(run) == {"0F": 10.5, "0B": 20.0, "1F": 20.0, "1B": 40.0}
    assert run.spreads[0, "F"].num_samples == 4
    assert {sample.step for sample in run.samples} == {0, 1}
    assert {sample.rank for sample in run.samples} == {0, 1, 2, 3}


def test_a_boundary_tensor_follows_from_the_arguments() -> None:
    """4096 x 2 x 1024 in bfloat16, half of it per tensor rank with sequence parallelism."""
    run = read_megatron(EVEN)
    assert [facts.output_bytes for facts in run.stages] == [8 * 2**20] * 2
    single = EVEN.replace("bfloat16", "float32").replace("sequence_parallel ", "other ")
    assert read_megatron(single).stages[0].output_bytes == 2**25


CHUNKED = ARGUMENTS.replace("parallel_size ............ None", "parallel_size ............ 2")
INSIDE = (
    ARGUMENTS.replace("tensor_model_parallel_size ...................... 2", "").replace(
        "tensor-model-parallel size: 2", "tensor-model-parallel size: 1"
    )
    + "  use_tp_pp_dp_mapping ............................ True\n"
)
LINE = "time (ms) | forward-compute: 80.00 | backward-compute: 160.00 | loader: n/a\n"
SINGLE = "\n    forward-compute ....: 80.00\n    backward-compute ...: 160.0\n"
RECOMPUTED = EVEN.replace("granularity ........................... None",
                          "granularity ........................... full")  # fmt: skip
EQUAL = MegatronRun(equal_stages=True)


@pytest.mark.parametrize(
    ("log", "run", "expected", "note"),
    [
        # Two chunks: rank 0 holds stages 0 and 2, each half of its time.
        (
            CHUNKED + all_ranks([160, 160, 320, 320], [160, 160, 320, 320]),
            None,
            {"0F": 10, "0B": 10, "1F": 20, "1B": 20, "2F": 10, "2B": 10, "3F": 20, "3B": 20},
            "chunks are taken to be equal",
        ),
        # Global ranks 0, 1 are stages 0, 1 of the first replica.
        (
            INSIDE + all_ranks([80, 160, 80, 160], [80, 160, 80, 160]),
            None,
            {"0F": 10, "0B": 10, "1F": 20, "1B": 20},
            "Links are not measured",
        ),
        # All stages are equal: minimum and maximum count for each stage.
        (
            ARGUMENTS + min_max((80, 96), (160, 176)),
            EQUAL,
            {"0F": 11, "0B": 21, "1F": 11, "1B": 21},
            "taken to be equal",
        ),
        # Data parallel only: minimum and maximum are both of stage 0.
        (
            min_max((80, 96), (160, 176)),
            MegatronRun(num_microbatches=8, num_stages=1),
            {"0F": 11, "0B": 21},
            "Links are not measured",
        ),
        # The last rank prints one line per interval; other timers may have any text.
        (
            ARGUMENTS + LINE + ITERATION + LINE,
            None,
            {"1F": 10, "1B": 20},
            "last rank only: stage 1",
        ),
        (
            f"{ARGUMENTS}max time across ranks (ms):{SINGLE}",
            EQUAL,
            {"0F": 10, "0B": 20, "1F": 10, "1B": 20},
            "taken to be equal",
        ),
        (
            f"{ARGUMENTS}time (ms):{SINGLE}",
            EQUAL,
            {"0F": 10, "0B": 20, "1F": 10, "1B": 20},
            "taken to be equal",
        ),
        (RECOMPUTED, None, {"0F": 1, "0B": 1, "1F": 1, "1B": 1}, "B includes the recomputation"),
    ],
)
def test_each_form_gives_the_times_of_its_stages(log, run, expected, note) -> None:
    found = read_megatron(log, run)
    assert medians(found) == expected
    assert note in "\n".join(found.notes)


@pytest.mark.parametrize(
    ("log", "run", "message"),
    [
        ("", None, r"no timer forward-compute \(no timers at all\); run Megatron-LM with"),
        ("time (ms) | forward: 1.0 | optimizer: 3.0\n", None, "timers there: forward, optimizer"),
        (min_max((1, 2), (3, 4)), None, "does not name pipeline_model_parallel_size"),
        (
            min_max((1, 2), (3, 4)),
            MegatronRun(num_stages=1),
            "give num_microbatches: Megatron's timers are totals",
        ),
        (
            EVEN.replace("rank  2: 8.00", "rank  2: nan", 1),
            None,
            "line 20: timer forward-compute = 'nan': must be a number of ms",
        ),
        (ARGUMENTS + all_ranks([8] * 6, [8] * 6), None, "a time of rank 5, but names world_size 4"),
        (EVEN, MegatronRun(num_stages=3), "4 ranks cannot be"),
        (CHUNKED + EVEN, MegatronRun(num_stages=3), "must be a multiple of the 2 chunks"),
        (
            ARGUMENTS + min_max((1, 2), (3, 4)),
            None,
            r"line \d+: minmax of all ranks does not say",
        ),
    ],
)
def test_logs_that_do_not_say_enough_are_refused(log, run, message) -> None:
    with pytest.raises(MeasurementError, match=message):
        read_megatron(log, run)


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
        (HEADER + "999999999,F,1\n", "line 2: stage = 999999999: must be < 65536"),
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
        ("stage,static_bytes\n999999999,1\n", "a whole number from 0, below 65536"),
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
