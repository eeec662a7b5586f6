"""The families: golden programs, published numbers, and legality on anything."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe import Problem, Programs, dump_csv, find_violations, simulate
from optpipe.problem import LicensedPair
from optpipe.simulate import bubble_rate
from optpipe_solver.families import FAMILIES, Family
from optpipe_solver.families.common import NotApplicable, NotApplicableReason
from optpipe_solver.families.registry import Shape, replaced
from tests.building import UNIT, bus, offloadable, problem, stage
from tests.solver.families.pipelines import built, lines, loops, v_problems
from tests.strategies import Case, cases, few, problems

TABLE = json.loads(
    (Path(__file__).parents[2] / "data/published/zero_bubble_table.json").read_text()
)
GOLDEN_FILES = Path(__file__).parents[2] / "data/golden"
BY_NAME = {family.name: family for family in FAMILIES}


def published(row: dict[str, Any], limit: float) -> Problem:
    """A row of the Zero Bubble table with a memory limit in activations of one micro-batch.

    Bytes are those of one layer in units of s b h: 34 + 5 a s / h from F, 32 after I.
    """
    model, p = TABLE["models"][row["model"]], row["p"]
    activation = round(1000 * (34 + 5 * model["heads"] * model["seq"] / model["hidden"]))
    times = (row[f"{name}_ms"] for name in ("forward", "backward_input", "backward_weight"))
    whole = stage(0, *times, activation_bytes=activation, weight_context_bytes=32000)
    return problem(
        [whole | {"device": d} for d in range(p)],
        [{"memory_bytes": int(limit * activation)} for _ in range(p)],
        m=row["m"],
        links=[
            {"from": d, "to": d + 1, "latency_ms": row["communication_ms"]} for d in range(p - 1)
        ],
        objective="span",
    )


@pytest.mark.parametrize(
    ("name", "column"), [("1f1b", "1F1B"), ("zb-h1", "ZB-H1"), ("zb-h2", "ZB-H2")]
)
def test_published_bubble_rates(name: str, column: str) -> None:
    """Zero Bubble, tables 5 and 9: span-based rates to four decimals."""
    assert len(TABLE["rows"]) == 8
    for row in TABLE["rows"]:
        given = published(row, 1000)
        rate = bubble_rate(given, simulate(given, BY_NAME[name].build(given)).span_ms)
        assert rate == pytest.approx(row["bubble_rate_span"][column], abs=6e-5), row["model"]


@pytest.mark.parametrize(
    ("names", "placements", "reason", "said"),
    [
        (
            ("1f1b", "1f1b-r", "zb-h1", "zb-h2", "zb-1p", "zb-2p", "zb-greedy"),
            ((0, 1, 0, 1), (0, 1, 1, 0)),
            NotApplicableReason.NEEDS_ONE_STAGE_PER_DEVICE,
            r"device [01] holds stages [01], [23]",
        ),
        (
            ("interleaved", "gis", "gis-h", "po-h", "po-f"),
            ((0, 1), (0, 1, 1, 0), (0, 1, 2, 0, 1), (0,)),
            NotApplicableReason.NEEDS_LOOP_PLACEMENT,
            "loop placement",
        ),
        (
            ("zb-v", "v-half", "v-min"),
            ((0, 1, 2), (0, 1, 0, 1), (0,), (0, 1, 1), (0, 0, 1, 1)),
            NotApplicableReason.NEEDS_V_PLACEMENT,
            "V placement",
        ),
        (("seq1f1b", "slimpipe"), ((0, 1),), NotApplicableReason.NEEDS_SLICES, "name a sample"),
    ],
)
def test_other_placements_are_refused(
    names: tuple[str, ...],
    placements: tuple[tuple[int, ...], ...],
    reason: NotApplicableReason,
    said: str,
) -> None:
    """Each rule says which placement it is for."""
    for name, placement in product(names, placements):
        with pytest.raises(NotApplicable, match=said) as refused:
            BY_NAME[name].build(problem([stage(device) for device in placement], m=4))
        assert refused.value.reason is reason


# Of building blocks, which are slow, tests/solver/families/test_building_blocks.py says it.
@pytest.mark.parametrize(
    "family", [f for f in FAMILIES if f.name != "building-blocks"], ids=lambda family: family.name
)
@few(24)
@given(given=st.one_of(problems(), lines(recompute=True), loops(), v_problems()))
def test_legal_but_for_memory_or_a_reason(family: Family, given: Problem) -> None:
    """Any placement, heterogeneous times, m < p, m = 1, p = 1, odd p; zero and large links."""
    programs = built(family.build, given)
    if not isinstance(programs, NotApplicableReason):
        assert find_violations(given, programs) == []


@pytest.mark.parametrize(
    "family", [f for f in FAMILIES if f.limit == "respected"], ids=lambda family: family.name
)
@few(15)
@given(case=cases(tight=True))
def test_limits_are_respected_where_that_is_said(family: Family, case: Case) -> None:
    """Under limits that some schedule just meets; serial execution always finds one."""
    programs = built(family.build, case.problem)
    if isinstance(programs, NotApplicableReason):
        assert family.name != "serial"
    else:
        assert find_violations(case.problem, programs) == []


def reference_problems() -> list[Problem]:
    """Four devices, unequal passes, everything allowed; a line, a loop and a V, pairs, slices."""
    sizes = {"weight_context_bytes": 6 * UNIT, "offload_bytes": 8 * UNIT}
    again = {"recompute_ms": 5.0, "checkpoint_bytes": UNIT}
    line = problem(
        [offloadable(d, 5, 6, 4, **sizes, **again) for d in range(4)],
        [bus(memory_bytes=55 * UNIT) for _ in range(4)],
        m=8,
        links=[{"from": d, "to": d + 1, "latency_ms": 0.5} for d in range(3)],
    )
    plain = [line, replaced(line, "loop", 2), replaced(line, "v", 2)]
    cut = [{"sample": j // 4} for j in range(8)]
    sliced = line.model_copy(update={"format": "optpipe/problem/v2", "microbatches": cut})
    return [*plain, *(_with_all_pairs(one) for one in plain[1:]), sliced]


def _with_all_pairs(given: Problem) -> Problem:
    """Every F may run together with every B of its device, and hide a millisecond."""
    pairs = tuple(
        LicensedPair(forward=a, backward=b, hidden_ms=1.0)
        for own in given.stages_of
        for a in own
        for b in own
    )
    return given.model_copy(update={"format": "optpipe/problem/v2", "pairs": pairs})


def reference_programs(family: Family) -> Programs:
    """The family's programs on the first reference problem it applies to."""
    for reference in reference_problems():
        programs = built(family.build, reference)
        if not isinstance(programs, NotApplicableReason):
            return programs
    raise AssertionError(f"{family.name} applies to no reference problem")


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_golden_schedule(family: Family) -> None:
    """Written down; `python -m tests.solver.families.test_families` writes them anew."""
    assert dump_csv(reference_programs(family)) == (GOLDEN_FILES / f"{family.name}.csv").read_text()


def test_no_two_families_share_a_golden_schedule() -> None:
    """Each is its own; and no file is left over."""
    texts = {path.stem: path.read_text() for path in GOLDEN_FILES.glob("*.csv")}
    assert set(texts) == set(BY_NAME)
    assert len(set(texts.values())) == len(texts)


if __name__ == "__main__":
    GOLDEN_FILES.mkdir(exist_ok=True)
    for one in FAMILIES:
        (GOLDEN_FILES / f"{one.name}.csv").write_text(dump_csv(reference_programs(one)))


def test_the_greedy_fuses_where_an_i_does_not_fit() -> None:
    """Device 1 has room for one micro-batch, and for its B; nothing else is made soon."""
    cells = [
        stage(d, 3, 6, 2, activation_bytes=10 * UNIT, offload_bytes=5 * UNIT,
              backward_input_workspace_bytes=3 * UNIT)
        for d in range(3)
    ]  # fmt: skip
    given = problem(cells, [bus(memory_bytes=room * UNIT) for room in (15, 11, 15)], m=4)
    programs = BY_NAME["greedy"].build(given)
    assert find_violations(given, programs) == []
    assert simulate(given, programs).makespan_ms == 99
    assert simulate(given, BY_NAME["serial"].build(given)).makespan_ms == 124


SUMMED = ("activation_bytes", "weight_context_bytes", "offload_bytes", "static_bytes")
DIVIDED = ("forward_ms", "backward_input_ms", "backward_weight_ms", "grad_sync_ms")


@pytest.mark.parametrize(
    ("line", "kind", "chunks", "placement"),
    [
        ((0, 1, 2), "loop", 3, (0, 1, 2) * 3),
        ((0, 1, 2), "v", 3, (0, 1, 2, 2, 1, 0, 0, 1, 2)),
        ((3, 0, 1), "loop", 2, (3, 0, 1, 3, 0, 1)),
        ((3, 0, 1), "v", 2, (3, 0, 1, 1, 0, 3)),
    ],
)
def test_a_loop_goes_round_a_v_turns_and_the_order_of_the_line_is_kept(
    line: tuple[int, ...], kind: Shape, chunks: int, placement: tuple[int, ...]
) -> None:
    """Idle devices stay idle; parts follow the model, not the device."""
    given = problem([stage(device, 4 + device) for device in line])
    copy = replaced(given, kind, chunks)
    assert copy.placement == placement
    assert [part.forward_ms for part in copy.stages] == [
        (4 + device) / chunks for device in line for _ in range(chunks)
    ]


def test_bytes_are_shared_out_and_workspaces_stay_whole() -> None:
    """Remainders go to the first parts; half of the bytes are half of the time to offload them."""
    sizes = {"activation_bytes": 11, "static_bytes": 2, "backward_workspace_bytes": 9}
    copy = replaced(problem([stage(0, backward_ms=1.5, **sizes)]), "loop", 3)
    assert [part.activation_bytes for part in copy.stages] == [4, 4, 3]
    assert [part.static_bytes for part in copy.stages] == [1, 1, 0]
    assert [part.backward_workspace_bytes for part in copy.stages] == [9] * 3
    assert [part.backward_ms for part in copy.stages] == [0.5] * 3
    offloaded = stage(0, activation_bytes=4_000_000, offload_bytes=2_000_000)
    halves = replaced(problem([offloaded], [bus()]), "v", 2)
    assert [halves.offload_ms(s) for s in range(2)] == [1, 1]


def test_boundaries_inside_are_as_wide_as_the_wider_side() -> None:
    """The first stage knows only its output, the last only its input."""
    line = problem([stage(0, output_bytes=7), stage(1, output_bytes=5), stage(2)])
    copy = replaced(line, "v", 2)
    assert [part.output_bytes for part in copy.stages] == [7, 7, 7, 5, 5, 0]


def test_a_checkpoint_is_at_least_the_input() -> None:
    """8 bytes of checkpoints are 4 a part, but a part behind a boundary of 6 must keep those."""
    fields = {"recompute_ms": 3, "checkpoint_bytes": 8, "output_bytes": 6}
    line = problem([stage(0, **fields), stage(1, **fields | {"activation_bytes": 9})])
    copy = replaced(line, "loop", 2)
    assert [part.checkpoint_bytes for part in copy.stages] == [4, 5, 5, 4]
    assert [part.activation_bytes for part in copy.stages] == [5, 5, 5, 4]
    assert [part.recompute_ms for part in copy.stages] == [1.5] * 4


def test_a_loop_is_closed_by_the_slowest_link_of_the_line() -> None:
    links = [{"from": 0, "to": 1, "latency_ms": 1}, {"from": 1, "to": 2, "latency_ms": 3}]
    line = problem([stage(device) for device in range(3)], links=links)
    copy = replaced(line, "loop", 2)
    assert copy.boundary_ms == ((1, 1), (3, 3), (3, 3), (1, 1), (3, 3), (0, 0))
    assert replaced(line, "v", 2).links == line.links
    closed = [{"from": 0, "to": 1, "latency_ms": 1}, {"from": 2, "to": 0, "latency_ms": 9}]
    for there in ([], closed):  # all is free, or a link is there
        known = problem([stage(device) for device in range(3)], links=there)
        assert replaced(known, "loop", 2).links == known.links


def test_the_name_says_what_it_is() -> None:
    """Also where the problem's own fills the 200 characters there are."""
    assert replaced(problem([stage()], name="six"), "v", 2).name == "six (v, 2 chunks)"
    assert replaced(problem([stage()], name="x" * 200), "v", 2).name.endswith("x (v, 2 chunks)")


@pytest.mark.parametrize(
    ("placement", "m", "chunks", "message", "reason"),
    [
        ((0, 0), 1, 2, "device 0 holds", NotApplicableReason.NEEDS_ONE_STAGE_PER_DEVICE),
        ((0,), 100, 20_001, "at most 65536 stages", NotApplicableReason.CANNOT_BE_SPLIT),
        ((0, 1), 1, 32_769, "at most 65536 stages", NotApplicableReason.CANNOT_BE_SPLIT),
    ],
)
def test_what_cannot_be_copied_is_refused(
    placement: tuple[int, ...], m: int, chunks: int, message: str, reason: NotApplicableReason
) -> None:
    """Several stages on a device, and more than a problem may have; no chunks at all are a bug."""
    line = problem([stage(device) for device in placement], m=m)
    with pytest.raises(NotApplicable, match=message) as raised:
        replaced(line, "loop", chunks)
    assert raised.value.reason is reason
    with pytest.raises(ValueError, match="chunks is 0"):
        replaced(problem([stage()]), "loop", 0)


@given(lines(recompute=True), st.sampled_from(["loop", "v"]), st.integers(1, 4))
def test_totals_are_kept(given: Problem, kind: Shape, chunks: int) -> None:
    """Bytes exactly, times up to rounding; the same m, devices and objective; all of it by one."""
    copy = replaced(given, kind, chunks)
    assert chunks > 1 or copy.problem_hash == given.problem_hash
    assert len(copy.stages) == chunks * len(given.stages)
    for index, whole in enumerate(given.stages):
        parts = copy.stages[chunks * index : chunks * (index + 1)]
        for name in SUMMED:
            assert sum(getattr(part, name) for part in parts) == getattr(whole, name)
        for name in DIVIDED:
            assert sum(getattr(part, name) for part in parts) == pytest.approx(getattr(whole, name))
    assert copy.devices == given.devices
    assert (copy.num_microbatches, copy.objective) == (given.num_microbatches, given.objective)
    assert {len(own) for own in copy.stages_of} <= {0, chunks}


def test_what_a_stage_holds_is_kept_or_shared_out() -> None:
    """One part is the stage, embedding and all; three parts are whole layers each."""
    mixed = problem([stage(0, layers={"embedding": 1, "transformer": 3}), stage(1)])
    assert replaced(mixed, "v", 1).stages == mixed.stages
    thirds = replaced(problem([stage(0, layers={"transformer": 6})]), "loop", 3)
    assert [str(part.layers) for part in thirds.stages] == ["2", "2", "2"]
    with pytest.raises(
        NotApplicable, match=r"stages\[0\] holds layers embedding \+ 3, not 3"
    ) as no:
        replaced(mixed, "v", 3)
    assert no.value.reason is NotApplicableReason.CANNOT_BE_SPLIT
