"""What cannot run is refused before the first step, in the same words on every rank."""

import re
from importlib import metadata
from typing import Any, NamedTuple, cast
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.distributed.pipelining.microbatch import TensorChunkSpec
from torch.distributed.tensor import Replicate

from optpipe import Problem, Schedule, parse_action
from optpipe.errors import MissingExtraError, OffloadError, PreflightError
from optpipe.memory import modes_of
from optpipe.runtime import require_torch
from optpipe.runtime.batches import ChunkSpecs, GivenBatch, Microbatches
from optpipe.runtime.executor import Executor
from optpipe.runtime.messages import BoundaryLevel, Layout
from optpipe.runtime.offload import HostPool, PlainCopies, count_slots
from optpipe.runtime.pipeline import Pipeline
from optpipe.runtime.preflight import (
    Needs,
    called,
    check_needs,
    check_split,
    needs_of,
    untouched,
)
from optpipe.runtime.stage_executor import StageExecutor
from tests.building import bus, offloadable, programs, stage
from tests.building import problem as built_problem
from tests.runtime import cases, schedules


def _one_text(texts: list[str]) -> str:
    assert len(set(texts)) == 1, texts
    return texts[0]


def test_a_removed_reload_is_refused_with_its_cell(ranks):
    programs = schedules.from_text(
        [" ".join(f"{s}F{j} {s}OFFLOAD{j} {s}RELEASE{j} {s}RELOAD{j} {s}B{j}" for j in range(4))
         for s in range(4)]
    )  # fmt: skip
    whole = schedules.make_schedule(PLAIN, programs)
    assert _one_text(ranks.run(cases.refused, [whole] * 4, PLAIN)) == ""
    cut = tuple(tuple(a for a in row if str(a) != "2RELOAD1") for row in programs)
    broken = whole.model_copy(update={"programs": cut})
    for given in (PLAIN, None):
        text = _one_text(ranks.run(cases.refused, [broken] * 4, given))
        assert text.startswith("PreflightError")
        assert "ranks 0, 1, 2, 3" in text
        assert "without 2RELOAD1" in text


TIGHT, OTHER = (schedules.make_problem(schedules.LINEAR, 4, limit=limit) for limit in (8, 999))
PLAIN = schedules.make_problem(schedules.LINEAR, 4)
HALF = schedules.make_problem((0, 1), 4)
STRAIGHT = schedules.make_schedule(PLAIN, schedules.one_f_one_b(4, 4))
SPLIT = schedules.make_schedule(PLAIN, schedules.zero_bubble_h1(4, 4))
SHORT = schedules.make_schedule(HALF, schedules.one_f_one_b(2, 4))
OVER = STRAIGHT.model_copy(update={"problem_hash": TIGHT.problem_hash})
ROWS = STRAIGHT.programs
ODD = STRAIGHT.model_copy(update={"programs": [*ROWS[:2], ("2F0", *ROWS[2][1:]), ROWS[3]]})
HASHES = f"ranks 0, 1, 3 {STRAIGHT.program_hash}; rank 2 {SPLIT.program_hash}"
UNEVEN = "rank 0: the batch has 7 samples, which do not divide into 4 micro-batches"

REFUSALS: dict[str, tuple[tuple[Any, ...], str]] = {
    "another problem": (([STRAIGHT] * 4, OTHER), OTHER.problem_hash),
    "over the limit": (([OVER] * 4, TIGHT), "its limit is 8"),
    "another program": (([STRAIGHT, STRAIGHT, SPLIT, STRAIGHT], PLAIN), HASHES),
    "too few programs": (([SHORT] * 4, HALF), "2 programs for 4 ranks"),
    "other modules": (
        ([STRAIGHT] * 4, PLAIN, 1),
        "rank 0: this rank was given stages [1], the schedule's placement puts [0] here",
    ),
    "an uneven batch": (([STRAIGHT] * 4, PLAIN, 0, {0: 7}), UNEVEN),
    "an uneven target": (([STRAIGHT] * 4, PLAIN, 0, {3: 6}), "rank 3: the target has 6 samples"),
    "no action": (([ODD] * 4,), "cell 0 of program 2 is '2F0', which is no action"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_does_not_fit_together_is_refused_on_all_ranks(ranks, name):
    given, expected = REFUSALS[name]
    assert expected in _one_text(ranks.run(cases.refused, *given))


@pytest.mark.parametrize(
    ("trouble", "at", "expected"),
    [
        ("raises", 2, "ValueError: no such layer"),
        ("transposes", 2, "only contiguous tensors are sent"),
        ("distributes", 3, "mesh (?: 4) is received, but this rank knows no such mesh of its own"),
        ("distributes over the pipeline", 3, "sent from place (2,) of its mesh and received in"),
        ("distributes in stripes", 2, "but only Replicate, Shard and Partial cross stages"),
    ],
)
def test_a_stage_that_cannot_run_is_named_on_all_ranks(ranks, trouble, at, expected):
    text = _one_text(ranks.run(cases.refused_stage, STRAIGHT, trouble))
    assert f"rank {at}: stage {at} cannot run" in text
    assert expected in text


def test_a_name_that_the_stage_before_sends_is_no_keyword_input():
    """Neither may win: they are two tensors."""
    mask = torch.ones(2)
    assert called(dict, ("state",), [mask], {"mask": mask}) == {"state": mask, "mask": mask}
    with pytest.raises(PreflightError, match=r"^mask comes from the stage before and is a keyword"):
        called(dict, ("mask", "state"), [mask, mask], {"mask": mask})


class _Remembering(nn.Module):
    """Keeps something of every input, in each place where a module can."""

    running: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        self.average = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("running", torch.ones(2))
        self.moved = nn.Parameter(torch.ones(2))
        self.odd = torch.ones(2, dtype=torch.uint8).view(torch.bits8)
        self.plain = torch.ones(2)
        self.is_ready = False
        self.later: nn.Module | None = None
        self.seen: list[Any] = []
        self.cache: dict[str, Any] = {"inner": {1}}

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        self.moved.data = self.moved.data + given.mean(0)
        self.odd.view(torch.uint8).zero_()
        if not self.is_ready:
            self.scale.data.copy_(given.mean(0))
            self.is_ready, self.later = True, nn.Linear(2, 2)
        for one in (self.average, self.running, self.plain):
            one.mul_(0.5).add_(given.mean(0))
        self.seen.append(given)
        self.cache["inner"].add(2)
        self.cache["shape"] = given.shape
        return given * self.scale


def test_a_forward_on_zeros_leaves_no_trace_in_a_module():
    module = _Remembering()
    parts = [*module.parameters(), module.running, module.plain]
    for _ in range(2):
        with untouched(module, torch.device("cpu")):
            module(2 * torch.ones(3, 2))
            now = [*module.parameters(), module.running, module.plain]
            assert not any(torch.equal(one, torch.ones(2)) for one in now if len(one.shape) == 1)
        assert all(torch.equal(one, torch.ones(2)) for one in parts)
        assert module.odd.view(torch.uint8).tolist() == [1, 1]
        assert module.running is parts[-2]
        assert module.plain is parts[-1]
        assert (module.is_ready, module.later, module.seen) == (False, None, [])
        assert module.cache == {"inner": {1}}


def test_a_dtensor_that_is_placed_otherwise_later_is_refused():
    stage = StageExecutor.__new__(StageExecutor)
    one = Layout(torch.Size([2]), (1,), (Replicate(),), ("tensor",), (2,), (0,))
    stage.index, stage._layouts = 3, [None, one]
    plain = torch.ones(2)
    with pytest.raises(PreflightError, match=r"output 1 of stage 3 is a plain tensor, but a DTen"):
        stage._shards_of((plain, plain))


def test_a_w_without_work_is_refused_unless_the_plan_knows_that_it_takes_no_time(ranks):
    """Nobody watches gradients in stages 0, 1 and 3."""
    for given in (PLAIN, None):
        text = _one_text(ranks.run(cases.refused_split, SPLIT, given))
        assert "rank 2: 0 bytes of weight gradient of stage 2 would wait for its W's" in text
        assert "solve a problem in which its backward_weight_ms is 0" in text
    stages = list(PLAIN.stages)
    stages[2] = stages[2].model_copy(update={"backward_weight_ms": 0})
    known = PLAIN.model_copy(update={"stages": tuple(stages)})
    schedule = schedules.make_schedule(known, schedules.zero_bubble_h1(4, 4))
    assert _one_text(ranks.run(cases.refused_split, schedule, known)) == ""
    assert _one_text(ranks.run(cases.refused_split, STRAIGHT, PLAIN)) == ""


def test_what_waits_for_w_is_said_of_each_stage_that_is_split(caplog):
    caplog.set_level("INFO")
    (program,) = programs("0F0 0I0 0W0 1F0 1B0 2F0 2I0 2W0")
    check_split(program, None, {0: 4320, 1: 77, 2: 96})
    assert [record.getMessage() for record in caplog.records] == [
        f"{size} bytes of weight gradient of stage {stage} wait for W"
        for stage, size in ((0, 4320), (2, 96))
    ]


def test_what_is_unfrozen_after_gradients_were_agreed_on_is_refused():
    stage = StageExecutor.__new__(StageExecutor)
    stage.index, stage._gets_gradient, stage._trains = 3, [True, False], True
    state, mask = torch.ones(2, requires_grad=True), torch.ones(2)
    stage._check_gradients((state, mask))
    with pytest.raises(PreflightError, match="output 1 of stage 3 requires grad, but did not"):
        stage._check_gradients((state, mask.requires_grad_()))


def test_a_plan_larger_than_the_machine_is_refused_with_both_numbers(ranks):
    huge = _scaled(2**48)
    text = _one_text(ranks.run(cases.refused, [huge.schedule] * 4, huge.problem))
    assert "host memory of" in text
    (peak,) = re.findall(r"would hold (\d+) bytes at its peak", text)
    assert _planned(huge) < int(peak) < _planned(huge) + 10**6


def test_too_little_reserved_for_boundary_tensors_is_refused(ranks):
    stingy = _scaled(1, reserved_bytes=100)
    text = _one_text(ranks.run(cases.refused, [stingy.schedule] * 4, stingy.problem))
    assert "bytes of device 1, its reserved_bytes are 100" in text


def test_a_later_batch_of_another_shape_is_refused_with_both():
    def cut(samples: int) -> Microbatches:
        given = GivenBatch(args=(torch.zeros(samples, 3),))
        return given.cut(2, samples, ChunkSpecs(), first=True, last=False, needs_target=True)

    pipeline = Pipeline(
        runtime=cast("Executor", None),
        given=cut(16),
        num_samples=16,
        compared=(0,),
        boundary={},
    )
    pipeline.expect(cut(16))
    with pytest.raises(PreflightError, match=r"\(4, 3\).*the first ones had .*\(8, 3\)"):
        pipeline.expect(cut(8))


@pytest.mark.parametrize(
    ("args", "kwargs", "expected"),
    [
        (TensorChunkSpec(2), {}, "the batch says TensorChunkSpec(2), but its tensor has shape (4"),
        ((0, (1, 0)), {}, "of the batch is (0, (1, 0)), and has another form: "),
        ((0, 1), {}, "of the batch have [4, 6] samples in the dimension that is cut"),
        (1, {"mask": 1}, "mask has 5 samples, which do not divide into 2 micro-batches"),
        (1, {"mask": "rows"}, "of mask says rows, but its tensor has shape (4, 5); give a dim"),
    ],
)  # fmt: skip
def test_a_chunk_specification_that_does_not_fit_is_refused(args, kwargs, expected):
    given = GivenBatch(
        args=(torch.zeros(4, 6), torch.zeros(4, 6)), kwargs={"mask": torch.ones(4, 5)}
    )
    with pytest.raises(PreflightError, match=re.escape(expected)):
        given.cut(
            2, 6, ChunkSpecs(args=args, kwargs=kwargs), first=True, last=False, needs_target=False
        )


def test_positional_inputs_that_all_microbatches_share_leave_the_batch_to_keywords():
    table, tokens = torch.zeros(3, 4), torch.arange(6)
    given = GivenBatch(args=(table,), kwargs={"tokens": tokens})
    specs = ChunkSpecs(args=(None,))
    assert given.num_samples(specs) == 6
    found = given.cut(2, 6, specs, first=True, last=False, needs_target=False)
    assert [args[0] is table for args in found.args] == [True, True]
    assert torch.equal(torch.stack([one["tokens"] for one in found.kwargs]), tokens.view(2, 3))


class _Plan(NamedTuple):
    problem: Problem
    schedule: Schedule


def _scaled(unit: int, reserved_bytes: int = 0) -> _Plan:
    """Return 1F1B of stages whose activations are so many bytes, the last one offloaded."""
    sizes = ("activation_bytes", "weight_context_bytes", "offload_bytes", "checkpoint_bytes")
    stages = [stage(s, **dict.fromkeys(sizes, unit), recompute_ms=1) for s in range(4)]
    devices = [bus(memory_bytes=2**52, reserved_bytes=reserved_bytes)] * 4
    problem = built_problem(stages, devices, m=4)
    rows = schedules.one_f_one_b(4, 4)
    last = schedules.from_text(
        [" ".join(f"3F{j} 3OFFLOAD{j} 3RELEASE{j} 3RELOAD{j} 3B{j}" for j in range(4))]
    )
    return _Plan(problem, schedules.make_schedule(problem, (*rows[:3], *last)))


def _planned(plan: _Plan) -> int:
    """Return what all ranks hold at their peaks, on device and host, without tensors in flight."""
    return sum(plan.schedule.peak_bytes) + sum(plan.schedule.host_peak_bytes.values())


def test_an_old_torch_is_refused_and_one_that_is_newer_than_tested_gets_a_warning(monkeypatch):
    for version in ("2.12.0", "2.13.0+cpu", "2.13.1a0+git", "2.15.0+cu132"):
        require_torch(version)
    with pytest.raises(MissingExtraError, match=r"torch 2\.11\.0 .* needs torch 2\.12 or newer"):
        require_torch("2.11.0")
    with pytest.warns(UserWarning, match=r"torch 3\.0\.0 is installed; the newest .* is 2\.15$"):
        require_torch("3.0.0")
    monkeypatch.setattr(metadata, "version", Mock(side_effect=metadata.PackageNotFoundError))
    with pytest.raises(MissingExtraError, match="torch is not installed, and running"):
        require_torch()


# Needs are added up over the ranks that share a device or host.


GB = 10**9


def _needs(host: str = "node0", device: str = "cuda:0", planned: int = 0, pinned: int = 0) -> Needs:
    return Needs(host, device, planned, pinned, device_bytes=80 * GB, host_bytes=500 * GB)


PINNED = [_needs(device=f"cuda:{i}", pinned=100 * GB) for i in range(6)]


@pytest.mark.parametrize(
    ("ranks_needs", "refusals"),
    [
        ([_needs(device=f"cuda:{i}", planned=79 * GB, pinned=60 * GB) for i in range(8)], []),
        ([_needs(planned=20 * GB)] * 4, []),
        ([_needs(planned=21 * GB)] * 4, ["cuda:0 of node0 would hold 84000000000 bytes"]),
        (PINNED, ["host memory of node0 would hold 600000000000 bytes"]),
        ([one._replace(host=f"node{i % 2}") for i, one in enumerate(PINNED)], []),
        (
            [_needs(device="cpu", planned=100 * GB, pinned=100 * GB)] * 3,
            ["host memory of node0 would hold 600000000000 bytes"],
        ),
    ],
    ids=["fit", "share a card", "a card too small", "a host too small", "two hosts", "on a CPU"],
)
def test_ranks_share_the_memory_of_a_card_and_of_a_host(ranks_needs, refusals):
    """Pinned memory is that of the host; on a CPU everything is."""
    if not refusals:
        check_needs(ranks_needs)
        return
    with pytest.raises(PreflightError) as refused:
        check_needs(ranks_needs)
    assert [text for text in refusals if text in str(refused.value)] == refusals
    assert str(refused.value).count("would hold") == len(refusals)


def test_the_peak_counts_boundary_tensors_where_they_are():
    whole = built_problem([offloadable(0, static_bytes=7)], [bus()], m=2)
    (program,) = programs("0F0 0OFFLOAD0 0RELEASE0 0F1 0B1 0RELOAD0 0B0")
    modes = modes_of(whole, program)
    during = {"0F0": 5, "0F1": 11, "0B1": 0}
    levels = {parse_action(cell): BoundaryLevel(one, 0) for cell, one in during.items()}
    found = needs_of(0, program, whole, levels, torch.device("cpu"), modes=modes)
    assert found.planned_bytes == 7 + 10_000_000 + 11
    assert found.pinned_bytes == 10_000_000
    alone = needs_of(0, program, None, levels, torch.device("cpu"), modes={})
    assert alone.planned_bytes == 11
    # A RELOAD meets what is there between two passes, not what the last of them held.
    levels = {cell: BoundaryLevel(0, 0) for cell in levels}
    levels[parse_action("0B1")] = BoundaryLevel(0, 13)
    found = needs_of(0, program, whole, levels, torch.device("cpu"), modes=modes)
    assert found.planned_bytes == 7 + 10_000_000 + 13


def test_a_program_says_how_many_slots_each_stage_takes():
    (program,) = programs(
        "0F0 0OFFLOAD0 0RELEASE0 0F1 0OFFLOAD1 0RELEASE1 1F0 1OFFLOAD0 1RELEASE0 1RELOAD0 1I0 1W0"
        " 0RELOAD0 0B0 0F2 0OFFLOAD2 0RELEASE2 0RELOAD1 0B1 0RELOAD2 0B2"
    )
    assert count_slots(program) == {0: 2, 1: 1}


def test_slots_are_one_arena_and_reused():
    pool = HostPool(PlainCopies(), num_slots={0: 3})
    first, second = pool.take(0, 100), pool.take(0, 100)
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    assert pool.allocated_bytes == 300
    pool.give_back(0, first)
    assert {pool.take(0, 90).data_ptr(), pool.take(0, 100).data_ptr()} >= {first.data_ptr()}
    assert pool.allocated_bytes == 300
    pool.take(0, 100)
    assert pool.allocated_bytes == 400
    pool.take(1, 50)
    assert pool.allocated_bytes == 450


def test_more_than_the_host_has_is_refused_with_the_numbers():
    pool = HostPool(PlainCopies(), num_slots={4: 1000})
    with pytest.raises(OffloadError, match=r"stage 4 needs 1000 slots of \d+ bytes"):
        pool.take(4, 10**12)
