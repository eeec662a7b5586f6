"""Bytes from traces with allocations: what actions leave, free and need, and what lay there."""

from pathlib import Path

from optpipe.measurements import build_problem, read_kineto
from tests.measurements.traces import Trace


def step(trace: Trace, stage: int, *, first: bool = False) -> None:
    """F keeps 30 bytes, I frees 20 of them and keeps 5, W frees the last 15."""
    trace.allocate(500 if first else 30, 12, -12)
    trace.gpu(f"PP:{stage}F0", (0, 10))
    trace.allocate(7, -7, 5, -20)
    trace.gpu(f"PP:{stage}I0", (0, 10))
    trace.allocate(8, -8, -15)
    trace.gpu(f"PP:{stage}W0", (0, 10))


def test_what_actions_leave_free_and_need(tmp_path: Path) -> None:
    """Sizes of a stage, the first step aside; CPU allocations do not count beside the GPU's."""
    trace = Trace(rank=0)
    step(trace, 0, first=True)
    trace.allocate(10_000, gpu=False)
    step(trace, 0)
    run = read_kineto([trace.write(tmp_path / "a.json")])
    assert not any("leaves allocated" in note for note in run.notes)
    facts = run.stages[0]
    assert (facts.activation_bytes, facts.weight_context_bytes) == (30, 15)
    assert facts.forward_workspace_bytes == 12
    assert facts.backward_input_workspace_bytes == 7
    assert facts.backward_weight_workspace_bytes == 8
    assert facts.backward_workspace_bytes is None


def test_a_w_that_frees_nothing_has_no_context(tmp_path: Path) -> None:
    """The whole backward ran in I: nothing is held for W."""
    trace = Trace(rank=0)
    trace.allocate(30)
    trace.gpu("PP:0F0", (0, 10))
    trace.allocate(-30)
    trace.gpu("PP:0I0", (0, 10))
    trace.gpu("PP:0W0")
    facts = read_kineto([trace.write(tmp_path / "a.json")]).stages[0]
    assert (facts.activation_bytes, facts.weight_context_bytes) == (30, 0)


def test_the_received_input_is_part_of_an_activation(tmp_path: Path) -> None:
    """Its size is what the stage before sent; none is received from a stage on the same rank."""
    first, second = Trace(rank=0), Trace(rank=1)
    step(first, 0)
    args = {"Collective name": "send", "In msg nelems": 50, "dtype": "Half", "Dst Rank": 1}
    first.add("record_param_comms", "cpu_op", first.now + 1, 1, args=args)
    other = args | {"Collective name": "recv", "Out msg nelems": 50}
    first.add("record_param_comms", "cpu_op", first.now + 2, 1, args=other)
    first.gpu("PP:0SEND_F0")
    step(second, 1)
    step(second, 2)
    paths = [first.write(tmp_path / "a.json"), second.write(tmp_path / "b.json")]
    run = read_kineto(paths)
    assert [facts.activation_bytes for facts in run.stages] == [30, 130, 30]
    assert [facts.output_bytes for facts in run.stages] == [100, None, None]
    assert "lacks the received input" not in "\n".join(run.notes)


def test_what_lies_there_before_a_step_is_static(tmp_path: Path) -> None:
    """Divided among the stages of the device; with the GPU's memory nothing need be given."""
    trace = Trace(rank=0)
    for stage in (0, 1):
        step(trace, stage)
    trace.allocate(1, total=701)
    trace.now += 10
    for stage in (0, 1):
        step(trace, stage)
    built = build_problem(read_kineto([trace.write(tmp_path / "a.json")]))
    assert [held.static_bytes for held in built.problem.stages] == [351, 350]
    assert built.problem.devices[0].memory_bytes == 80_000
    assert built.problem.num_microbatches == 1
    assert "static_bytes is all that lay on the GPU" in "\n".join(built.notes)


def test_bytes_that_outlive_the_backward_are_noted(tmp_path: Path) -> None:
    """A problem has no field for what every micro-batch leaves behind."""
    trace = Trace(rank=0)
    trace.allocate(30)
    trace.gpu("PP:0F0", (0, 10))
    trace.allocate(-26)
    trace.gpu("PP:0B0", (0, 10))
    notes = "\n".join(read_kineto([trace.write(tmp_path / "a.json")]).notes)
    assert "leaves allocated after its backward: 4 of stage 0" in notes


def test_stages_with_recomputed_micro_batches_are_left_out(tmp_path: Path) -> None:
    """Their forwards keep different amounts."""
    trace = Trace(rank=0)
    step(trace, 0)
    trace.gpu("PP:0RECOMPUTE1", (0, 10))
    run = read_kineto([trace.write(tmp_path / "a.json")])
    assert run.stages[0].activation_bytes is None
    assert "Bytes of stage 0 are not read" in "\n".join(run.notes)


def test_a_trace_without_allocations_says_nothing_of_bytes(tmp_path: Path) -> None:
    """Unknown is not 0."""
    trace = Trace(rank=0)
    trace.gpu("PP:0F0", (0, 10))
    run = read_kineto([trace.write(tmp_path / "a.json")])
    assert run.stages[0].known() == {}
    assert not any("allocat" in note for note in run.notes)
