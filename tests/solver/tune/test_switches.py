"""Switches that a search leaves off: each is listed with the gain of that switch alone."""

from dataclasses import replace
from typing import Any

import pytest

from optpipe.planning import Experts, ModelShape, PipelineCut, Training, find_gpu
from optpipe.planning.configuration import Configuration
from optpipe_solver.tune import TuneQuestion, judge, tune
from optpipe_solver.tune.switches import switch_gains

SHAPE = ModelShape(
    name="switched", num_layers=6, hidden=2048, num_heads=16, num_kv_heads=8, ffn=8192,
    vocab=50_000, experts=Experts(num=16, active=4, ffn=2048),
)  # fmt: skip
TODAY = Configuration(
    shape=SHAPE,
    hardware=find_gpu("h100"),
    training=Training(tp=1, ep=8, dp=8),
    pipeline=PipelineCut(pp=2, chunks=2, num_microbatches=8, placement="loop", layout="even"),
)
QUESTION = TuneQuestion(
    shape=SHAPE,
    hardware=find_gpu("h100"),
    num_gpus=16,
    global_batch=64,
    training=Training(),
    framework="megatron",
    fixed={"tp": 1, "cp": 1, "pp": 2, "ep": 8, "etp": 1, "micro_batch": 1},
)
DEEPEP = "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend deepep"


def test_each_switch_that_is_off_has_the_gain_of_the_same_configuration_with_it() -> None:
    """Times are simulated; pairs are listed only for today's run, as the search has them."""
    result = tune(QUESTION, current=TODAY, time_limit_s=1)
    assert result.best is not None
    assert result.current is not None
    rows = {"best": result.best, "current": result.current}
    listed = [(one.row, one.field) for one in result.switches]
    assert sorted(listed) == [
        ("best", "cuda_graphs"), ("best", "dispatcher"),
        ("current", "cuda_graphs"), ("current", "dispatcher"), ("current", "pairs"),
    ]  # fmt: skip
    for one in result.switches:
        row = rows[one.row]
        assert one.base_ms == pytest.approx(row.step_ms)
        own = row.configuration
        switch: dict[str, Any] = {one.field: one.value}
        changed = (
            replace(own, pipeline=replace(own.pipeline, pairs=True))
            if one.field == "pairs"
            else replace(own, training=replace(own.training, **switch))
        )
        other = judge(QUESTION, changed)
        assert other is not None
        assert one.step_ms == pytest.approx(other.step_ms)
        assert one.gain == pytest.approx(1 - other.step_ms / row.step_ms)
        assert one.gain > 0
    by_row = [[s.gain for s in result.switches if s.row == row] for row in rows]
    assert by_row == [sorted(gains, reverse=True) for gains in by_row]
    dispatcher = next(one for one in result.switches if one.field == "dispatcher")
    assert str(dispatcher).startswith(f"--dispatcher deduplicated ({DEEPEP}): ")
    assert "0.0 GiB" not in str(dispatcher)


@pytest.mark.parametrize(
    ("question", "training", "fields"),
    [
        (replace(QUESTION, chosen=frozenset({"dispatcher"})), {}, {"cuda_graphs", "pairs"}),
        (QUESTION, {"dispatcher": "deduplicated", "cuda_graphs": True}, {"pairs"}),
        (QUESTION, {"recompute": frozenset({"full"})}, {"dispatcher"}),  # refuses graphs
        (QUESTION, {"ep": 1}, {"cuda_graphs"}),
        (replace(QUESTION, hardware=find_gpu("mi300x")), {}, {"cuda_graphs", "pairs"}),
        (  # refuses pairs
            replace(QUESTION, hardware=find_gpu("mi300x")),
            {"dispatcher": "allgather"},
            {"cuda_graphs", "dispatcher"},
        ),
        (replace(QUESTION, framework="torchtitan"), {}, {"cuda_graphs", "dispatcher"}),
    ],
)
def test_switches_that_are_chosen_or_that_framework_or_gpu_lack_are_left_out(
    question: TuneQuestion, training: dict[str, Any], fields: set[str]
) -> None:
    """If a framework has no such model, it refuses no switch either."""
    today = replace(TODAY, training=replace(TODAY.training, **training), hardware=question.hardware)
    row = judge(question, today)
    assert row is not None
    assert {one.field for one in switch_gains(question, row, "current")} == fields


def test_where_any_schedule_is_searched_todays_switches_are_of_the_schedule_that_runs_today() -> (
    None
):
    """A family that is faster than 1F1B is no part of their gain."""
    question = replace(QUESTION, framework="any")
    current = judge(question, TODAY)
    assert current is not None
    gains = switch_gains(question, current, "current")
    assert gains
    assert {one.base_ms for one in gains} == {current.step_ms}


def test_an_all_gather_can_be_switched_to_both_other_dispatchers() -> None:
    """A token with two experts on eight ranks: eight vectors, two copies, or fewer than two."""
    experts = Experts(num=16, active=2, ffn=2048)
    question = replace(QUESTION, shape=replace(SHAPE, experts=experts))
    today = replace(TODAY.training, cuda_graphs=True)
    for training, others in (
        (replace(today, dispatcher="allgather"), ["deduplicated", "alltoall"]),
        (replace(today, dispatcher="alltoall"), ["deduplicated"]),
    ):
        row = judge(question, replace(TODAY, shape=question.shape, training=training))
        assert row is not None
        gains = switch_gains(question, row, "current")
        assert [one.value for one in gains if one.field == "dispatcher"] == others
        assert all(one.gain > 0 for one in gains)
        plain = [one for one in gains if one.value == "alltoall"]
        assert [one.flag for one in plain] == ["--moe-token-dispatcher-type alltoall"] * len(plain)


def test_a_switch_with_which_the_schedule_does_not_fit_says_what_it_lacks() -> None:
    row = judge(QUESTION, TODAY)
    assert row is not None
    tight = replace(QUESTION, memory_bytes=max(row.peak_bytes))
    pairs = next(one for one in switch_gains(tight, row, "current") if one.field == "pairs")
    assert pairs.missing_bytes > 2**27
    assert str(pairs).startswith("--fix pairs=1 (--overlap-moe-expert-parallel-comm): ")
    assert str(pairs).endswith(f"; needs {pairs.missing_bytes / 2**30:.1f} GiB more")
