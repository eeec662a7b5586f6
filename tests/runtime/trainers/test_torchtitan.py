"""torchtitan's debug model trains by our schedules as by its own, on four ranks over gloo."""

from functools import partial
from importlib import metadata
from typing import Any

import pytest

from optpipe import dump_csv
from optpipe.errors import MissingExtraError
from optpipe.runtime.trainers.torchtitan import pipeline_llm
from optpipe.schedule import ActionType
from tests.runtime import schedules
from tests.runtime.trainers import torchtitan_cases
from tests.runtime.trainers.torchtitan_cases import TitanRun

V = (0, 1, 1, 0)
CASES = {
    "pp 4": (schedules.LINEAR, 1, 0.3),
    "pp 2 x FSDP2 2, a V of four stages": (V, 2, 0.0),
    "DeepSeek, pp 2 x FSDP2 2, a V of four stages": (V, 2, 0.3),
}


# At every change: the losses of its whole trainer, below, and FSDP2 in test_interop.py.
@pytest.mark.extended
@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("pp 4", 10),
        ("pp 2 x FSDP2 2, a V of four stages", 10),
        ("DeepSeek, pp 2 x FSDP2 2, a V of four stages", 3),
    ],
)
def test_steps_have_the_losses_of_torchtitans_own_1f1b(ranks, name, steps):
    """Its model, sharding and loss; ours splits backwards, offloads, recomputes, evaluates alike.

    Llama's debug model, and DeepSeek's, whose experts leave their gradients to W.
    """
    placement, data_parallel, fused = CASES[name]
    experts = name.startswith("DeepSeek")
    problem = schedules.make_problem(placement, torchtitan_cases.MICROBATCHES)
    programs = schedules.random_programs(
        problem, 3, offload=0.4, recompute=0.3, fused=fused, in_order=True
    )
    kinds = {action.type for program in programs for action in program}
    assert {ActionType.OFFLOAD, ActionType.RECOMPUTE} <= kinds
    schedule = schedules.make_schedule(problem, programs)
    train = partial(torchtitan_cases.train_titan, steps=steps, experts=experts)
    outcomes = ranks.run(train, schedule, data_parallel, timeout=400)
    # Their last stage is on the last rank, ours where the schedule says; each column has its data.
    wanted = [one.wanted for one in outcomes if one.wanted]
    found = [one.found for one in outcomes if one.found]
    assert len(wanted) == len(found) == data_parallel
    for ours, theirs in zip(found, wanted, strict=True):
        assert len(ours) == steps
        assert ours == (theirs if experts else pytest.approx(theirs, rel=1e-6))
        assert theirs[-1] != theirs[0]
    evaluated = [one.evaluated for one in outcomes if one.evaluated is not None]
    by_ours = [one.own_evaluation for one in outcomes if one.own_evaluation is not None]
    assert by_ours == pytest.approx(evaluated, rel=1e-6)
    assert all(one.offloaded_bytes and one.deferred_bytes for one in outcomes)
    assert all((one.num_stacked > 0) == experts for one in outcomes)
    assert [one.num_stages for one in outcomes] == [len(placement) // (4 // data_parallel)] * 4
    worst = max(
        abs(a - b) / b
        for one, two in zip(found, wanted, strict=True)
        for a, b in zip(one, two, strict=True)
    )
    print(f"torchtitan, {name}: losses of {steps} steps differ by at most {worst:.1e}, relative")


def schedule_on(placement: tuple[int, ...]) -> Any:
    """Any order of split backwards with offload; on 0, 1, 2, 3, 3, 0 torchtitan has none."""
    problem = schedules.make_problem(placement, torchtitan_cases.MICROBATCHES)
    programs = schedules.random_programs(problem, 3, offload=0.4, in_order=True)
    return schedules.make_schedule(problem, programs)


# Tensor parallelism and a CSV at every change: test_interop.py's.
@pytest.mark.parametrize("others", [False, pytest.param(True, marks=pytest.mark.extended)])
def test_its_whole_trainer_goes_on_from_every_checkpoint_as_if_unbroken(ranks, tmp_path, others):
    """Its 1F1B unbroken, ours from its checkpoint, ours elsewhere from ours, our CSV in torch's."""
    path, steps = {one: str(tmp_path / one) for one in ("own", "ours", "moved", "csv", "tp")}, 3
    text = tmp_path / "schedule.csv"
    wave = schedules.wave(schedules.V_SHAPE, torchtitan_cases.MICROBATCHES)
    text.write_text(dump_csv(wave, for_torch=True))
    start = partial(TitanRun, steps=steps, resume=(path["own"], 1))
    four, moved, two = map(schedule_on, ((0, 1, 2, 3), (0, 1, 2, 3, 3, 0), (0, 1, 1, 0)))
    runs = {
        "own": TitanRun(path["own"], steps),
        "ours": start(path["ours"], schedule=four),
        "moved": start(path["moved"], schedule=moved, resume=(path["ours"], 2)),
    }
    if others:
        runs["csv"] = start(path["csv"], name="ZBVZeroBubble", csv=str(text))
        runs["tp"] = start(path["tp"], schedule=two, tensor_parallel=2)
    found = {
        name: ranks.run(torchtitan_cases.train_by_trainer, run, timeout=220)
        for name, run in runs.items()
    }
    holders = {name: [one for one in ends if one.losses] for name, ends in found.items()}
    (unbroken,) = holders.pop("own")
    assert list(unbroken.losses) == [1, 2, 3]
    assert len(set(unbroken.losses.values())) == steps
    for name, ends in holders.items():
        assert len(ends) == runs[name].tensor_parallel
        first = 3 if name == "moved" else 2
        for one in ends:
            wanted = {step: unbroken.losses[step] for step in range(first, steps + 1)}
            assert one.losses == pytest.approx(wanted, rel=1e-6)
            norms = {step: unbroken.norms[step] for step in wanted}
            # Between one and two tensor-parallel ranks torchtitan's own 1F1B differs as much.
            assert one.norms == pytest.approx(norms, rel=1e-6 if name != "tp" else 1e-3)
        if name != "csv":
            assert all(one.offloaded_bytes and one.deferred_bytes for one in found[name])
        worst = max(abs(1 - x / unbroken.losses[step]) for step, x in ends[0].losses.items())
        print(f"torchtitan's trainer, {name}: losses differ by at most {worst:.1e}, relative")


def test_another_torchtitan_is_refused(monkeypatch):
    monkeypatch.setattr(metadata, "version", lambda _name: "0.2.2")
    names = ("parallel_dims", "training", "parallelism", "compile_config", "ac_config")
    others = ("dump_folder", "device", "model_config", "parallelize_fn", "loss_fn", "schedule")
    call: Any = pipeline_llm
    with pytest.raises(MissingExtraError, match=r"pip install .torchtitan==0\.3"):
        call(None, **dict.fromkeys((*names, *others)))
