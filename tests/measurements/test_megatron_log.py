"""Megatron-LM logs in every printed form, and what they cannot say."""

import pytest

from optpipe.measurements import MeasurementError, MegatronRun, read_megatron
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


def test_chunks_of_a_rank_are_equal_and_loop() -> None:
    """Two chunks: rank 0 holds stages 0 and 2, each half of its time."""
    arguments = ARGUMENTS.replace("parallel_size ............ None", "parallel_size ............ 2")
    run = read_megatron(arguments + all_ranks([160, 160, 320, 320], [160, 160, 320, 320]))
    assert run.placement == (0, 1, 0, 1)
    assert medians(run)["2F"] == medians(run)["0F"] == 10
    assert any("chunks are taken to be equal" in note for note in run.notes)


def test_pipeline_ranks_may_lie_inside_data_ranks() -> None:
    """With use_tp_pp_dp_mapping global ranks 0, 1 are stages 0, 1 of the first replica."""
    arguments = ARGUMENTS.replace("tensor_model_parallel_size ...................... 2", "")
    arguments = arguments.replace("tensor-model-parallel size: 2", "tensor-model-parallel size: 1")
    arguments += "  use_tp_pp_dp_mapping ............................ True\n"
    run = read_megatron(arguments + all_ranks([80, 160, 80, 160], [80, 160, 80, 160]))
    assert medians(run) == {"0F": 10, "0B": 10, "1F": 20, "1B": 20}


def test_least_and_most_of_all_ranks_need_equal_stages() -> None:
    """They do not say whose they are; told that all are equal, both count for each stage."""
    log = ARGUMENTS + min_max((80, 96), (160, 176))
    with pytest.raises(MeasurementError, match=r"line \d+: minmax of all ranks does not say"):
        read_megatron(log)
    run = read_megatron(log, MegatronRun(equal_stages=True))
    assert medians(run) == {"0F": 11, "0B": 21, "1F": 11, "1B": 21}
    assert any("taken to be equal" in note for note in run.notes)


def test_one_stage_needs_nobody_to_say_whose_times_they_are() -> None:
    """Data parallel only: least and most are both of stage 0."""
    run = read_megatron(
        min_max((80, 96), (160, 176)), MegatronRun(num_microbatches=8, num_stages=1)
    )
    assert medians(run) == {"0F": 11, "0B": 21}


def test_the_old_form_is_of_the_last_stage() -> None:
    """One line per interval, printed by the last rank."""
    line = "time (ms) | forward-compute: 80.00 | backward-compute: 160.00 | optimizer: 3.00\n"
    run = read_megatron(ARGUMENTS + line + ITERATION + line)
    assert medians(run) == {"1F": 10, "1B": 20}
    assert any("last rank only: stage 1" in note for note in run.notes)


@pytest.mark.parametrize("header", ["max time across ranks (ms):", "time (ms):"])
def test_single_numbers_count_for_equal_stages(header) -> None:
    log = f"{ARGUMENTS}{header}\n    forward-compute ....: 80.00\n    backward-compute ...: 160.0\n"
    run = read_megatron(log, MegatronRun(equal_stages=True))
    assert medians(run) == {"0F": 10, "0B": 20, "1F": 10, "1B": 20}


def test_other_timers_may_say_anything() -> None:
    line = "time (ms) | forward-compute: 80.0 | backward-compute: 160.0 | loader: n/a\n"
    assert medians(read_megatron(ARGUMENTS + line)) == {"1F": 10, "1B": 20}


def test_recomputation_is_said_to_be_in_the_backward() -> None:
    none = "granularity ........................... None"
    notes = read_megatron(EVEN.replace(none, none.replace("None", "full"))).notes
    assert "The run recomputed activations: B includes the recomputation." in notes


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
        (
            EVEN.replace("parallel_size ............ None", "parallel_size ............ 2"),
            MegatronRun(num_stages=3),
            "must be a multiple of the 2 chunks",
        ),
    ],
)
def test_logs_that_do_not_say_enough_are_refused(log, run, message) -> None:
    with pytest.raises(MeasurementError, match=message):
        read_megatron(log, run)
