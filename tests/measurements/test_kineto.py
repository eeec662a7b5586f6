"""Kineto traces: GPU and CPU times, ranks, replicas, messages, copies, and files that are none.

A trace that torch's profiler wrote of torch's schedule runtime, two ranks over gloo.

Bytes from traces with allocations: what actions leave, free and need, and what lay there.
"""

import gzip
import json
import statistics
from pathlib import Path

import pytest

from optpipe.formats.exports import dump_chrome_trace
from optpipe.measurements import Given, MeasurementError, build_problem, read_kineto
from optpipe.measurements.trace_file import read_trace
from tests import building
from tests.measurements import profiled
from tests.measurements.samples import medians
from tests.measurements.traces import COPIES, NETWORK, Trace
from tests.runtime.ranks import start_ranks


def test_gpu_time_is_that_of_the_kernels_launched_inside(tmp_path: Path) -> None:
    """From the first kernel's start to the last one's end, however short the range; busy without
    the gap between them."""
    trace = Trace(rank=0)
    trace.gpu("PP:0F0", (0, 2000), (2500, 1500))
    trace.gpu("PP:0B0", (0, 7000))
    path = trace.write(tmp_path / "rank0.json")
    assert medians(read_kineto([path])) == {"0F": 4.0, "0B": 7.0}
    assert medians(read_kineto([path], gpu_time="busy")) == {"0F": 3.5, "0B": 7.0}
    assert "Kernels ran in 88% of 0F only" in "\n".join(read_kineto([path]).notes)


def test_other_streams_count_only_where_the_compute_stream_waits(tmp_path: Path) -> None:
    """A receive before the first kernel and a copy after the last are left out."""
    trace = Trace(rank=0)
    trace.work("ncclDevKernel_SendRecv(...)", -50_000, 50_000)
    trace.work("Memcpy DtoH (Device -> Pinned)", 0, 90_000, stream=COPIES)
    trace.work("ncclDevKernel_AllReduce_Sum", 100, 800, stream=NETWORK)
    trace.gpu("PP:0F0", (0, 1000))
    run = read_kineto([trace.write(tmp_path / "a.json")])
    assert medians(run) == {"0F": 1.0}
    assert "GPU kernels launched inside" in run.notes[0]


@pytest.mark.parametrize(
    ("kernel", "fields"),
    [
        ("ncclDevKernel_SendRecv(...)", {"Collective name": "all_to_allv"}),
        ("void deep_ep::intranode::dispatch<8, 4096>(...)", {}),
    ],
)
def test_exchanges_with_experts_are_told_from_computation(tmp_path: Path, kernel, fields) -> None:
    """A layer with experts computes, exchanges, computes, exchanges, computes; a message, another
    collective and what runs beside computation are no exchange of its own."""
    trace = Trace(rank=0)
    trace.work("ncclDevKernel_AllGather", 100, 800, stream=NETWORK)
    trace.work(kernel, 1000, 500, stream=NETWORK, **fields)
    trace.work(kernel, 2400, 700, stream=NETWORK, **fields)
    trace.work("ncclDevKernel_SendRecv(...)", 3400, 300, stream=NETWORK)
    trace.gpu("PP:0F0", (0, 1000), (1500, 1000), (3100, 400))
    trace.gpu("PP:0B0", (0, 2000))
    path = trace.write(tmp_path / "rank0.json")
    forward, backward = read_kineto([path]).samples
    assert (forward.time_ms, forward.lanes_ms) == (3.5, (1.0, 0.5, 1.0, 0.6, 0.4))
    assert (backward.time_ms, backward.lanes_ms) == (2.0, ())
    assert not any(one.lanes_ms for one in read_kineto([path], gpu_time="busy").samples)


def test_a_w_without_kernels_takes_no_time(tmp_path: Path) -> None:
    """Its backward ran whole in I; an F without kernels is left out and noted."""
    trace = Trace(rank=0)
    for name, kernels in (("0F0", [(0, 10)]), ("0F1", []), ("0I0", [(0, 50)]), ("0W0", [])):
        trace.gpu(f"PP:{name}", *kernels)
    run = read_kineto([trace.write(tmp_path / "a.json")])
    assert medians(run) == {"0F": 0.01, "0I": 0.05, "0W": 0.0}
    assert "Ranges that launched no kernel are left out: 1 of 0F." in run.notes


def test_cpu_time_starts_with_the_first_operator(tmp_path: Path) -> None:
    """Waiting for a receive at the start of a range is not the action's."""
    trace = Trace(rank=3)
    trace.cpu("PP:1F0", wait=9000, work=250)
    trace.cpu("PP:1B0", wait=0, work=500)
    run = read_kineto([trace.write(tmp_path / "a.json")])
    assert medians(run) == {"1F": 0.25, "1B": 0.5}
    assert {sample.rank for sample in run.samples} == {3}
    assert "no GPU kernels" in run.notes[0]


def test_every_step_is_told_apart_and_the_first_left_out(tmp_path: Path) -> None:
    """The k-th run of an action with one micro-batch is step k, over several files of a rank."""
    first, second = Trace(rank=0), Trace(rank=0)
    first.gpu("PP:0F0", (0, 9000))
    first.gpu("PP:0F0", (0, 2000))
    second.gpu("PP:0F0", (0, 4000))
    paths = [first.write(tmp_path / "a.json"), second.write(tmp_path / "b.json.gz")]
    run = read_kineto(paths)
    assert [(one.step, one.time_ms) for one in run.samples] == [(0, 9.0), (1, 2.0), (2, 4.0)]
    assert medians(run.without_warmup()) == {"0F": 3.0}


def test_replicas_share_a_device_and_chunks_too(tmp_path: Path) -> None:
    """Ranks 0 and 2 hold stages 0 and 3, ranks 1 and 3 stages 1 and 2: a V on two devices."""
    paths = []
    for rank in (3, 1, 0, 2):
        trace = Trace(rank=rank)
        for stage in ((0, 3), (1, 2))[rank % 2]:
            trace.gpu(f"PP:{stage}F0", (0, 1000 * (stage + 1)))
            trace.gpu(f"PP:{stage}B0", (0, 1000))
        paths.append(trace.write(tmp_path / f"{rank}.json"))
    run = read_kineto(paths)
    assert run.placement == (0, 1, 1, 0)
    assert run.spreads[3, "F"].num_samples == 2
    rest = Given.model_validate(
        {"num_microbatches": 4, "stage": {"activation_bytes": 1}, "device": {"memory_bytes": 9}}
    )
    assert run.problem(rest).placement == (0, 1, 1, 0)


def test_the_file_name_names_the_rank_where_the_trace_does_not(tmp_path: Path) -> None:
    """rank1 before rank0 on the command line; GPipe's ranges do not say the stage."""
    paths = []
    for rank in (1, 0):
        trace = Trace()
        trace.gpu("Forward 0", (0, 1000 * (rank + 1)))
        trace.gpu("Backward 0", (0, 5000))
        paths.append(trace.write(tmp_path / f"rank{rank}.json"))
    assert medians(read_kineto(paths)) == {"0F": 1.0, "0B": 5.0, "1F": 2.0, "1B": 5.0}


def test_ranges_of_ones_own_are_named_by_patterns(tmp_path: Path) -> None:
    """Groups say stage, action and micro-batch, or the pattern begins with the action."""
    trace = Trace(rank=0)
    trace.add("ProfilerStep#5", "user_annotation", trace.now, 45)
    trace.gpu("stage 1 forward mb 2", (0, 3000))
    trace.add("ProfilerStep#6", "user_annotation", trace.now, 45)
    trace.gpu("bwd/1", (0, 8000))
    patterns = [
        r"stage (?P<stage>\d+) (?P<action>\w+) mb (?P<microbatch>\d+)",
        r"B=bwd/(?P<stage>1)",
    ]
    path = trace.write(tmp_path / "a.json")
    run = read_kineto([path], patterns)
    assert medians(run) == {"1F": 3.0, "1B": 8.0}
    assert [(one.microbatch, one.step) for one in run.samples] == [(2, 0), (None, 1)]
    run = read_kineto([path, trace.write(tmp_path / "b.json")], patterns)
    assert [one.step for one in run.samples] == [0, 1, 1, 3]


def test_messages_take_as_long_as_their_shorter_end(tmp_path: Path) -> None:
    """10 us and 100 GB/s between two ranks, one of which always waits for the other."""
    sender, receiver = Trace(rank=4), Trace(rank=6)
    for trace, number in ((sender, 0), (receiver, 1)):
        trace.gpu(f"PP:{number}F0", (0, 10))
    for elements in (1_000_000, 1_000_000, 4_000_000):
        true_us = 10 + 2 * elements / 1e5
        sender.message("send", 6, elements, true_us if elements > 1e6 else true_us + 500)
        receiver.message("recv", 4, elements, true_us + 7000 if elements > 1e6 else true_us)
    paths = [sender.write(tmp_path / "a.json"), receiver.write(tmp_path / "b.json")]
    run = read_kineto(paths)
    (link,) = run.links
    assert (link.source, link.target, link.num_transfers, link.num_sizes) == (0, 1, 3, 2)
    assert link.latency_ms == pytest.approx(0.01)
    assert link.bandwidth_gb_per_s == pytest.approx(100)
    alone = read_kineto(paths[:1])
    assert alone.links == ()
    assert "3 messages have one end only" in "\n".join(alone.notes)


def test_the_kernel_of_a_batch_carries_the_messages_noted_before_it(tmp_path: Path) -> None:
    """Two tensors of 2 and 4 MB in 60 us; before torch 2.6 the group names the peer."""
    sender, receiver = Trace(rank=4), Trace(rank=6)
    for trace, number in ((sender, 0), (receiver, 1)):
        trace.gpu(f"PP:{number}F0", (0, 10))
    for waiting in (0, 900):
        sender.batch("send", "[4, 6]", (1_000_000, 2_000_000), 60 + waiting)
        receiver.batch("recv", "[4, 6]", (1_000_000, 2_000_000), 960 - waiting)
    run = read_kineto([sender.write(tmp_path / "a.json"), receiver.write(tmp_path / "b.json")])
    assert [(one.num_bytes, one.time_ms) for one in run.transfers] == [(6_000_000, 0.06)] * 2


def test_offloads_say_how_much_and_how_fast(tmp_path: Path) -> None:
    """Two copies of 3 MB in all at 20 GB/s out, 10 GB/s back."""
    trace = Trace(rank=0)
    trace.gpu("PP:0F0", (0, 10))
    for size, time_us in ((1_000_000, 50), (2_000_000, 100)):
        trace.work("Memcpy DtoH (Device -> Pinned)", 0, time_us, stream=COPIES, bytes=size)
    trace.gpu("PP:0OFFLOAD0")
    trace.work("Memcpy HtoD (Pinned -> Device)", 0, 300, stream=COPIES, bytes=3_000_000)
    trace.gpu("PP:0RELOAD0")
    run = read_kineto([trace.write(tmp_path / "a.json")])
    assert run.stages[0].offload_bytes == 3_000_000
    assert (run.devices[0].d2h_gb_per_s, run.devices[0].h2d_gb_per_s) == (20, 10)
    trace.events = [event for event in trace.events if "HtoD" not in event["name"]]
    one_way = read_kineto([trace.write(tmp_path / "b.json")]).devices[0]
    assert (one_way.d2h_gb_per_s, one_way.h2d_gb_per_s) == (None, None)


def test_our_own_trace_gives_the_times_it_was_drawn_from(tmp_path: Path) -> None:
    """Every device is a process there; one may be read alone, by its name."""
    whole = building.problem([building.stage(0, 3, 4, 5), building.stage(1, 6, 7, 8)], m=2)
    rows = building.programs("0F0 0F1 0I0 0W0 0B1", "1F0 1B0 1F1 1I1 1W1")
    path = write(tmp_path / "plan.json", dump_chrome_trace(whole, rows))
    run = read_kineto([path])
    assert medians(run) == {
        "0F": 3, "0I": 4, "0W": 5, "0B": 9, "1F": 6, "1I": 7, "1W": 8, "1B": 15,
    }  # fmt: skip
    assert run.placement == (0, 1)
    assert set(medians(read_kineto([path], process="0: gpu0"))) == {"0F", "0I", "0W", "0B"}
    with pytest.raises(MeasurementError, match=r"no process has 'rank 7' in its name \(there"):
        read_kineto([path], process="rank 7")


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"traceEvents": [\n{"ph": "X",', "line 2, column 12; was the trace written to its end"),
        ("{}", "no list of events"),
        (gzip.compress(b"[" * 100, mtime=0)[:-12], "cut off"),
        (b"\x1f\x8bnonsense", "broken gzip"),
        (b"\xff\xfe\x00", "not UTF-8"),
        ("[" * 100_000, "nested too deeply"),
        (
            json.dumps([{"ph": "X", "name": "PP:0F0", "ts": 1, "dur": "soon"}]),
            r"traceEvents\[0\].dur = 'soon': must be a number of microseconds",
        ),
        (
            json.dumps([{"ph": "X", "name": "PP:0F0", "ts": 1, "dur": -1}]),
            r"traceEvents\[0\].dur = -1",
        ),
        (
            json.dumps([{"ph": "X", "name": "forward", "ts": 1, "dur": 1}]),
            "no range is a pipeline action .most frequent: 'forward'",
        ),
        ("[]", "no range at all"),
        (
            json.dumps([{"ph": "X", "name": "PP:(0F1;1B0)OVERLAP_F_B", "ts": 1, "dur": 1}]),
            "overlapped forward-backward pair",
        ),
    ],
)
def test_files_that_are_no_such_trace_are_refused(tmp_path: Path, content, message) -> None:
    path = write(tmp_path / "broken.json", content)
    with pytest.raises(MeasurementError, match=message) as refused:
        read_kineto([path])
    if "OVERLAP" not in str(content):
        assert "broken.json" in str(refused.value)


def test_a_trace_named_twice_is_refused(tmp_path: Path) -> None:
    trace = Trace(rank=0)
    trace.gpu("PP:0F0", (0, 10))
    path = trace.write(tmp_path / "a.json")
    with pytest.raises(MeasurementError, match="named twice"):
        read_kineto([path, path])


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MeasurementError, match="No such file"):
        read_kineto([tmp_path / "none.json"])


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("F=(", "write a regular expression"),
        ("forward_step", "names no action"),
        ("F=(?P<stge>.)", "group 'stge' is unknown"),
        (r"PP:(?P<action>\w+)", "'0F0' is no action"),
        (r"F=PP:(?P<stage>.*)", "group stage matched '0F0', which is no number"),
    ],
)
def test_patterns_that_say_nothing_are_refused(tmp_path: Path, pattern, message) -> None:
    trace = Trace(rank=0)
    trace.gpu("PP:0F0", (0, 10))
    with pytest.raises(MeasurementError, match=message):
        read_kineto([trace.write(tmp_path / "a.json")], [pattern])


@pytest.mark.parametrize(
    ("name", "group", "limit"),
    [("999999999", "stage", 65536), ("12345678901", "microbatch", 10**9)],
)
def test_numbers_that_are_no_stage_or_micro_batch_are_refused(
    tmp_path: Path, name: str, group: str, limit: int
) -> None:
    """Process ids, say: nothing is made as long as they are."""
    trace = Trace(rank=0)
    trace.gpu(name, (0, 10))
    with pytest.raises(MeasurementError, match=f"says {group} {name}: must be below {limit}"):
        read_kineto([trace.write(tmp_path / "a.json")], [rf"F=(?P<{group}>\d+)"])


def test_ranks_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    """Stage 1 alone on one rank, beside stage 0 on another."""
    paths = []
    for rank, stages in enumerate(((0, 1), (1,))):
        trace = Trace(rank=rank)
        for stage in stages:
            trace.gpu(f"PP:{stage}F0", (0, 10))
        paths.append(trace.write(tmp_path / f"{rank}.json"))
    with pytest.raises(MeasurementError, match="stage 1 ran beside stages"):
        read_kineto(paths)


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


@pytest.mark.extended
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


@pytest.mark.extended
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


@pytest.mark.extended
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
    """Divided among the stages of the device; with the GPU's memory nothing need be given.

    Sizes of ten digits and more stay integers.
    """
    trace = Trace(rank=0)
    for stage in (0, 1):
        step(trace, stage)
    trace.allocate(1, total=70 * 10**9 + 1)
    trace.now += 10
    for stage in (0, 1):
        step(trace, stage)
    built = build_problem(read_kineto([trace.write(tmp_path / "a.json")]))
    assert [one_stage.static_bytes for one_stage in built.problem.stages] == [
        35 * 10**9 + 1,
        35 * 10**9,
    ]
    assert built.problem.devices[0].memory_bytes == 80 * 10**9
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
