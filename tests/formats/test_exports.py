"""ScheduledNode lists: executed by a small runtime with the zero-bubble runtime's queues.

CSV: torch's form of programs, strictly.

The layout for Megatron-Core: what its parser makes of it is the cut, layer by layer.
"""

import random
import re
import types
from collections.abc import Generator
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe import (
    Action,
    Problem,
    Programs,
    ScheduleFormatError,
    dump_csv,
    load_csv,
)
from optpipe.errors import InputError
from optpipe.formats.exports import check_num_layers, dump_python_list, megatron_layout, read_layout
from optpipe.planning import MODELS, Training, estimate, find_gpu
from optpipe.problem import placement_of
from optpipe.simulate import simulate
from tests.building import UNIT, bus, one_f_one_b, problem, programs, stage
from tests.strategies import B, F, I, W, actions, few, random_programs


def random_problem(placement: list[int], m: int, rng: random.Random) -> Problem:
    """Return a problem with whole times, many of them 0, and links that some pairs share."""
    count = max(placement) + 1
    stages = [
        stage(
            device, rng.randrange(4), rng.randrange(4), rng.randrange(3), output_bytes=UNIT,
            activation_bytes=UNIT, offload_bytes=UNIT, grad_sync_ms=rng.randrange(2),
        )
        for device in placement
    ]  # fmt: skip
    links = [
        {"from": a, "to": b, "latency_ms": rng.randrange(3)}
        for a in range(count)
        for b in range(a)
        if rng.random() < 0.7
    ]
    return problem(stages, [bus() for _ in range(count)], m, links=links)


seeds = st.integers(0, 2**32).map(random.Random)


# An executor whose every send and receive waits for its partner, and stops when all are stuck.


class Send(NamedTuple):
    """To a device; both go on once it receives from us."""

    peer: int
    tensor: Any


class Receive(NamedTuple):
    """From a device; the value of the yield is what it sent."""

    peer: int


Request = Send | Receive
Device = Generator[Request, Any, None]


def run(devices: list[Device]) -> None:
    """Run all to the end; fails the test with what each waits for if nobody can go on."""
    waiting: dict[int, Request | None] = {}
    for number, one in enumerate(devices):
        waiting[number] = next(one, None)
    while any(waiting.values()):
        pairs = (
            (number, request.peer, request.tensor)
            for number, request in waiting.items()
            if isinstance(request, Send) and waiting[request.peer] == Receive(number)
        )
        if (pair := next(pairs, None)) is None:
            pytest.fail(f"deadlock: {waiting}")
        source, target, tensor = pair
        waiting[source] = next(devices[source], None)
        try:
            waiting[target] = devices[target].send(tensor)
        except StopIteration:
            waiting[target] = None


# The runtime.

NAMES = ("F", "B", "W", "BW", "SEND_FORWARD", "RECV_FORWARD", "SEND_BACKWARD", "RECV_BACKWARD",
         "OFFLOAD_SEND_START", "OFFLOAD_SEND_END", "OFFLOAD_RECV_PREP", "OFFLOAD_RECV_START",
         "OFFLOAD_RECV_END")  # fmt: skip
FuncType = Enum("FuncType", {name: name for name in NAMES})  # type: ignore[misc]
CommDirection = Enum("CommDirection", {"NEXT": 0, "PREV": 1})


@dataclass
class ScheduledNode:
    """The fields of the runtime's node that an export fills."""

    type: Any
    stage: int
    microbatch: int
    chunk: int = 0
    layer_group_idx: int | None = None
    start_time: float | None = None
    completion_time: float | None = None
    recv_peer_stage: int | None = None
    send_peer_stage: int | None = None
    comm_direction: Any = None
    comm_peer_stage: int | None = None
    comm_pair_id: int | None = None
    should_offload: bool = False


GRAPH = types.SimpleNamespace(
    FuncType=FuncType, CommDirection=CommDirection, ScheduledNode=ScheduledNode
)
OURS = {"F": "F", "B": "I", "W": "W", "BW": "B", "OFFLOAD_SEND_START": "OFFLOAD",
        "OFFLOAD_SEND_END": "RELEASE", "OFFLOAD_RECV_START": "RELOAD"}  # fmt: skip
STATES = ("F", "OFFLOAD_SEND_START", "OFFLOAD_SEND_END", "OFFLOAD_RECV_PREP",
          "OFFLOAD_RECV_START", "OFFLOAD_RECV_END")  # fmt: skip


class Rank:
    """One device: a first-in-first-out queue per chunk for all that it keeps.

    A tensor is the number of its micro-batch, and what a queue yields must be the node's own.
    """

    def __init__(self, nodes: list[ScheduledNode], num_devices: int, num_groups: int) -> None:
        self.nodes = nodes
        self.num_devices = num_devices
        self.num_groups = num_groups
        self.queues: dict[tuple[str, int], list[int]] = {}
        self.num_loaded = 0
        self.ran: list[str] = []

    def put(self, name: str, chunk: int, tensor: int) -> None:
        """Append to a queue."""
        self.queues.setdefault((name, chunk), []).append(tensor)

    def take(self, name: str, node: ScheduledNode) -> None:
        """Pop from a queue, which must yield the node's micro-batch."""
        assert self.queues[name, node.chunk].pop(0) == node.microbatch, node

    def run(self) -> Device:
        """Execute all nodes; what is left in a queue was lost."""
        for node in self.nodes:
            name = node.type.value
            if name in OURS:
                self.ran.append(f"{node.layer_group_idx}{OURS[name]}{node.microbatch}")
            if name.startswith(("SEND_", "RECV_")):
                yield from self.communicate(node)
            elif name.startswith("OFFLOAD_"):
                self.take(STATES[STATES.index(name) - 1], node)
                self.put(name, node.chunk, node.microbatch)
            else:
                getattr(self, f"pass_{name}")(node)
        left = {key: queue for key, queue in self.queues.items() if queue}
        assert not {key for key in left if key[0] != STATES[-1]}

    def pass_F(self, node: ScheduledNode) -> None:  # noqa: N802 - the runtime's letters
        """Forward: from the data, a neighbour or the chunk before; kept for the backward."""
        if node.layer_group_idx == 0:
            assert node.microbatch == self.num_loaded
            self.num_loaded += 1
        elif node.recv_peer_stage is None:
            assert self.queues["local forward", 0].pop(0) == node.microbatch
        else:
            self.take("RECV_FORWARD", node)
        self.put("activations", node.chunk, node.microbatch)
        if node.should_offload:
            self.put("F", node.chunk, node.microbatch)
        if node.layer_group_idx != self.num_groups - 1:
            if node.send_peer_stage is None:
                self.put("local forward", 0, node.microbatch)
            else:
                self.put("SEND_FORWARD", node.chunk, node.microbatch)

    def pass_B(self, node: ScheduledNode, *, split: bool = True) -> None:  # noqa: N802
        """Backward, weight gradients put aside."""
        if node.should_offload:
            assert node.microbatch in self.queues["OFFLOAD_RECV_START", node.chunk]
        self.take("activations", node)
        if node.layer_group_idx != self.num_groups - 1:
            if node.recv_peer_stage is None:
                assert self.queues["local backward", 0].pop(0) == node.microbatch
            else:
                self.take("RECV_BACKWARD", node)
        if node.layer_group_idx != 0:
            if node.send_peer_stage is None:
                self.put("local backward", 0, node.microbatch)
            else:
                self.put("SEND_BACKWARD", node.chunk, node.microbatch)
        if split:
            self.put("weight gradients", node.chunk, node.microbatch)

    def pass_BW(self, node: ScheduledNode) -> None:  # noqa: N802
        self.pass_B(node, split=False)

    def pass_W(self, node: ScheduledNode) -> None:  # noqa: N802
        self.take("weight gradients", node)

    def communicate(self, node: ScheduledNode) -> Device:
        """Send or receive, with the neighbour that the direction says."""
        name = node.type.value
        step = 1 if node.comm_direction is CommDirection.NEXT else -1
        assert node.comm_peer_stage == (node.stage + step) % self.num_devices
        letter = (name.removeprefix("SEND_").removeprefix("RECV_"), node.comm_pair_id)
        if name.startswith("SEND_"):
            self.take(name, node)
            yield Send(node.comm_peer_stage, (*letter, node.microbatch))
        else:
            kind, pair, tensor = yield Receive(node.comm_peer_stage)
            assert (kind, pair) == letter
            self.put(name, node.chunk, tensor)


def load(text: str) -> dict[str, Any]:
    lines = [line for line in text.splitlines() if not line.startswith("    from megatron")]
    assert not any("import " in line for line in lines)
    module: dict[str, Any] = {}
    exec(compile(text, "exported", "exec"), module)
    return module


def assert_same(problem: Problem, rows: Programs) -> None:
    """The ranks ran the programs: same actions, same order, each on its own tensors."""
    module = load(dump_python_list(problem, rows))
    lists = module["scheduled_nodes"](GRAPH)
    ranks = [Rank(nodes, len(problem.devices), len(problem.stages)) for nodes in lists]
    run([rank.run() for rank in ranks])
    assert [rank.ran for rank in ranks] == [[str(action) for action in row] for row in rows]
    passes = [[action for action in row if action.type in (F, I, W, B)] for row in rows]
    alone = module["local_order"](GRAPH)
    assert [
        [f"{n.layer_group_idx}{OURS[n.type.value]}{n.microbatch}" for n in nodes] for nodes in alone
    ] == [list(map(str, row)) for row in passes]


@given(seeds)
def test_any_schedule_it_takes_runs_as_planned(rng: random.Random) -> None:
    """Linear, loop and V; split and fused; offloaded or not: no deadlock, no wrong tensor."""
    count, m = rng.randrange(2, 4), rng.randrange(1, 5)
    name, chunks = rng.choice([("linear", 1), ("loop", 2), ("loop", 3), ("v", 2)])
    whole = random_problem(list(placement_of(name, count, chunks)), m, rng)
    assert_same(whole, random_programs(whole, rng, in_turn=True))


def test_nodes_carry_the_simulated_times_and_the_peers() -> None:
    whole = problem([stage(0, 2), stage(1, 3)], m=2)
    rows = one_f_one_b(2, 2)
    first, second = load(dump_python_list(whole, rows))["scheduled_nodes"](GRAPH)
    times = simulate(whole, rows).times[0]
    passes = [node for node in first if node.type.value in OURS]
    assert [(n.start_time, n.completion_time) for n in passes] == [(t.start, t.end) for t in times]
    assert [n.send_peer_stage for n in passes if n.type is FuncType["F"]] == [1, 1]
    assert [n.recv_peer_stage for n in passes if n.type is FuncType["BW"]] == [1, 1]
    sent = [node for node in first if node.type is FuncType["SEND_FORWARD"]]
    received = [node for node in second if node.type is FuncType["RECV_FORWARD"]]
    assert [node.start_time for node in sent] == [node.start_time for node in received] == [2, 4]
    assert {node.stage for node in second} == {1}


@pytest.mark.parametrize("count", [2, 3])
def test_communication_stands_in_the_order_of_its_time(count: int) -> None:
    """Of two devices each is the other's next and previous: sent to the next, whatever it is."""
    whole = problem([stage(device, 1, 2, 1) for device in range(count)], m=6)
    for nodes in load(dump_python_list(whole, one_f_one_b(count, 6)))["scheduled_nodes"](GRAPH):
        messages = [node for node in nodes if node.comm_pair_id is not None]
        moments = [node.start_time for node in messages]
        assert moments == sorted(moments)
        for node in messages:
            way = CommDirection.NEXT if "SEND" in node.type.value else CommDirection.PREV
            assert count > 2 or node.comm_direction is way


def test_an_offloaded_micro_batch_is_marked_and_let_go() -> None:
    """From its forward to its weight gradient; the header says which flags it needs."""
    whole = problem([stage(0, offload_bytes=5), stage(1)])
    rows = programs("0F0 0OFFLOAD0 0RELEASE0 0RELOAD0 0I0 0W0", "1F0 1B0")
    text = dump_python_list(whole, rows)
    first, second = load(text)["scheduled_nodes"](GRAPH)
    assert [node.type.value for node in first if node.should_offload] == [
        "F", "OFFLOAD_SEND_START", "OFFLOAD_SEND_END", "OFFLOAD_RECV_PREP", "OFFLOAD_RECV_START",
        "B", "W", "OFFLOAD_RECV_END",
    ]  # fmt: skip
    assert not any(node.should_offload for node in second)
    assert "--offload-overlap-sr" in text
    alone = load(text)["local_order"](GRAPH)
    assert not any(node.should_offload for nodes in alone for node in nodes)
    kept = programs("0F0 0B0", "1F0 1B0")
    assert "--offload-overlap-sr" not in dump_python_list(whole, kept)
    assert_same(whole, rows)


@pytest.mark.parametrize(
    ("placement", "flags"),
    [
        ([0, 1], "--enable-zero-bubble,"),
        ([0, 1, 1, 0], "--zero-bubble-v-schedule,"),
        ([0, 1, 0, 1], "2 virtual stages, and without --enable-zero-bubble,"),
    ],
)
def test_the_header_says_which_flags_place_chunks_so(placement: list[int], flags: str) -> None:
    """The runtime finds first and last stage by them."""
    whole = problem([stage(device) for device in placement])
    there = [Action(s, F, 0) for s in range(len(placement))]
    back = [Action(s, B, 0) for s in reversed(range(len(placement)))]
    rows = tuple(tuple(a for a in there + back if placement[a.stage] == d) for d in (0, 1))
    assert f"Run with {flags}" in dump_python_list(whole, rows)


@pytest.mark.parametrize(
    ("placement", "rows", "message"),
    [
        ([0], ["0F0 0B0"], r"placement \[0\] on 1 devices: .*two devices or more"),
        ([1, 0], ["1F0 1B0", "0F0 0B0"], r"placement \[1, 0\] on 2 devices"),
        ([0, 1], ["0F0 0RECOMPUTE0 0B0", "1F0 1B0"], "row 1, column 2: 0RECOMPUTE0: .*whole forw"),
        ([0, 1], ["0F1 0F0 0B0 0B1", "1F0 1B0 1F1 1B1"], "row 1, column 2: 0F0: .*forwards of a"),
        ([0, 1], ["0F0 0F1 0B1 0B0", "1F0 1F1 1B1 1I0 1W0"], "row 1, column 4: 0B0: .*backwards"),
        ([0, 1], ["0F0 0F1 0I0 0I1 0W1 0W0", "1F0 1F1 1B0 1B1"], "column 6: 0W0: .*weight grad"),
    ],
)
def test_what_the_runtime_would_get_wrong_is_refused(
    placement: list[int], rows: list[str], message: str
) -> None:
    """With row, column and cell: its queues would hand out another micro-batch's tensors."""
    whole = problem(
        [stage(at, recompute_ms=1, checkpoint_bytes=1) for at in placement],
        m=sum("F" in cell for cell in " ".join(rows).split()) // len(placement),
    )
    with pytest.raises(ScheduleFormatError, match=message):
        dump_python_list(whole, programs(*rows))


@given(st.lists(st.lists(actions).map(tuple), min_size=1).map(tuple))
def test_any_programs_round_trip_empty_ones_included(rows: Programs) -> None:
    assert load_csv(dump_csv(rows)) == rows


def test_cells_that_torch_leaves_empty_and_a_spreadsheets_mark_are_skipped() -> None:
    assert load_csv("0F0,0F1,,,0B0\r\n,1F0, 1B0 ,,\r\n") == programs("0F0 0F1 0B0", "1F0 1B0")
    assert load_csv("\ufeff0F0,0B0\n") == load_csv("0F0,0B0\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the CSV is empty; write one row per device"),
        ("0F0,0X1\n", "row 1, column 2: '0X1' is not an action"),
        ("0F0\n1F0,,1B0x\n", "row 2, column 3: '1B0x' is not an action"),
        ("0F0\x00\n", "row 1, column 1: '0F0\\x00' is not an action"),
        ("0F0;0B0\n", "row 1, column 1: '0F0;0B0' is not an action"),
        ("0F0\t0B0\n", "for example 2F0; separate cells by commas"),
        ("(0F0; 1B0)OVERLAP_F_B\n", "row 1, column 1: ' 1B0' is not an action"),
        ("0F0,1SEND_F0\n", "row 1, column 2: '1SEND_F0' is a communication action"),
        ('"0F0\n', "not CSV: unexpected end of data; write one row per device"),
        ("0F0\r0B0\n", "not CSV: new-line character"),
        ("0F0," + "x" * 200_000, "not CSV: field larger than field limit"),
    ],
    ids=range(11),
)
def test_a_wrong_cell_is_refused_with_its_place(text: str, message: str) -> None:
    with pytest.raises(ScheduleFormatError) as caught:
        load_csv(text)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 400


@given(st.text())
def test_no_text_ends_in_anything_but_programs_or_our_own_error(text: str) -> None:
    try:
        rows = load_csv(text)
    except ScheduleFormatError:
        return
    assert load_csv(dump_csv(rows)) == rows


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["0F0 0OFFLOAD0 0B0"], "row 1, column 2: torch's runtime has no OFFLOAD (0OFFLOAD0)"),
        (["0F0 0B0", "1F0 1RELEASE0"], "row 2, column 2: torch's runtime has no RELEASE"),
        (["0F0 0RELOAD0"], "row 1, column 2: torch's runtime has no RELOAD"),
        (["0F0 0RECOMPUTE0 0B0"], "row 1, column 2: torch's runtime has no RECOMPUTE"),
        (["0F1 0F0", "1F0 1F2 1F1"], "row 2, column 2: 1F2 stands where torch's runtime expects"),
        (["0F0 1F1 1F0 0F1"], "row 1, column 2: 1F1 stands where torch's runtime expects 1F0"),
        (["0F0 0B0", ""], "row 2 is empty, but torch's runtime needs an action on every rank"),
    ],
)
def test_what_torch_would_not_run_right_is_refused_for_it_alone(
    rows: list[str], message: str
) -> None:
    with pytest.raises(ScheduleFormatError) as caught:
        dump_csv(programs(*rows), for_torch=True)
    assert str(caught.value).startswith(message)
    assert load_csv(dump_csv(programs(*rows))) == programs(*rows)


LAYERS = [{"embedding": 1, "transformer": 2}, {"transformer": 3}, {"transformer": 2, "head": 1}]


def cut(*layers: dict[str, int] | None, devices: tuple[int, ...] = ()) -> Any:
    """A problem whose stages hold these, one on a device unless said otherwise."""
    devices = devices or tuple(range(len(layers)))
    return problem([stage(d, layers=counts) for d, counts in zip(devices, layers, strict=True)])


def parsed(layout: str) -> list[str]:
    """The stages of a layout, read by the two rules that Megatron-Core's parser has."""
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        layout = re.sub(pattern, lambda found: found[1] * int(found[2]), layout)
    return layout.split("|")


@few(25)
@given(st.sampled_from(sorted(MODELS)), st.sampled_from([2, 3, 4]), st.sampled_from([1, 2, 3]))
def test_an_estimate_is_pasted_into_a_model_of_as_many_layers(name, pp, chunks) -> None:
    """One E first, one L last, and the model's layers; embedding and head are none of them."""
    found = estimate(
        MODELS[name], find_gpu("h100"), Training(sequence=512), pp=pp, num_microbatches=2 * pp,
        chunks=chunks, placement="loop",
    )  # fmt: skip
    text = megatron_layout(found.problem)
    wanted, mtp = MODELS[name].num_layers, MODELS[name].mtp
    predicted = f"--mtp-num-layers {mtp} " if mtp else ""
    assert text.startswith(f"--num-layers {wanted} {predicted}--pipeline-model-parallel-size {pp} ")
    stages = parsed(text.split("'")[1])
    assert [len(letters) for letters in stages] == list(found.sizes)
    assert "".join(stages) == "E" + "t" * wanted + "m" * mtp + "L"
    assert read_layout(text.split("'")[1]) == tuple(one.layers for one in found.problem.stages)
    check_num_layers(found.problem, wanted)
    with pytest.raises(InputError, match=f"hold {wanted} transformer layers, but the model has 7"):
        check_num_layers(found.problem, 7)


def test_a_layout_repeats_nothing_without_end() -> None:
    assert len(read_layout("E(t|)*998,m*999L")) == 999
    for text in ("Et*100001L", "E(t|)*99999999999L", "Et*(9)*9L", "(t*999)*999" * 300):
        with pytest.raises(InputError, match=r"\*\d+ it has more than 100,000 letters; correct"):
            read_layout(text)


@pytest.mark.parametrize(
    ("layers", "devices", "message"),
    [
        ([LAYERS[0], None, LAYERS[2]], (), r"stages\[1\] does not say its layers"),
        ([LAYERS[1], LAYERS[0], LAYERS[2]], (), r"layers.embedding .* \[0, 1, 0\]: .* first stage"),
        ([LAYERS[0], LAYERS[2], LAYERS[2]], (), r"layers.head of the stages = \[0, 1, 1\]"),
        ([LAYERS[0], {"mtp": 1}, LAYERS[2]], (), r"layers.mtp in stages \[1\]: .* move them"),
        ([LAYERS[0], LAYERS[1], LAYERS[2]], (0, 2, 1), r"placement \[0, 2, 1\]: .* rank k mod 3"),
        ([*LAYERS[:2], LAYERS[1], LAYERS[2]], (0, 1, 1, 0), "choose a line or a loop"),
    ],
)
def test_what_it_cannot_place_is_refused(layers, devices, message: str) -> None:
    with pytest.raises(InputError, match=message):
        megatron_layout(cut(*layers, devices=devices))
