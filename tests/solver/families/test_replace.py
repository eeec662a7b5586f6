"""Re-placed copies: where the parts stand, what they sum up to, what is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe_solver.families.common import NotApplicable, NotApplicableReason
from optpipe_solver.families.replace import replaced
from tests.building import bus, problem, stage
from tests.solver.families.pipelines import lines

if TYPE_CHECKING:
    from optpipe import Problem
    from optpipe_solver.families.replace import Shape

SUMMED = ("activation_bytes", "weight_context_bytes", "offload_bytes", "static_bytes")
DIVIDED = ("forward_ms", "backward_input_ms", "backward_weight_ms", "grad_sync_ms")


def test_a_loop_goes_round() -> None:
    line = problem([stage(device) for device in range(3)])
    assert replaced(line, "loop", 2).placement == (0, 1, 2, 0, 1, 2)
    assert replaced(line, "loop", 3).placement == (0, 1, 2) * 3


def test_a_v_turns_at_the_ends() -> None:
    line = problem([stage(device) for device in range(3)])
    assert replaced(line, "v", 2).placement == (0, 1, 2, 2, 1, 0)
    assert replaced(line, "v", 3).placement == (0, 1, 2, 2, 1, 0, 0, 1, 2)


def test_the_order_of_the_line_is_kept_and_idle_devices_stay_idle() -> None:
    line = problem([stage(device) for device in (3, 0, 1)])
    assert len(line.devices) == 4
    assert replaced(line, "loop", 2).placement == (3, 0, 1, 3, 0, 1)
    assert replaced(line, "v", 2).placement == (3, 0, 1, 1, 0, 3)


def test_parts_follow_the_model_not_the_device() -> None:
    """Stage 0 of 2 is the first two parts, which stand on both devices."""
    copy = replaced(problem([stage(0, 4), stage(1, 6)]), "loop", 2)
    assert [held.forward_ms for held in copy.stages] == [2, 2, 3, 3]
    assert copy.placement == (0, 1, 0, 1)


def test_remainders_go_to_the_first_parts() -> None:
    copy = replaced(problem([stage(0, activation_bytes=11, static_bytes=2)]), "loop", 3)
    assert [held.activation_bytes for held in copy.stages] == [4, 4, 3]
    assert [held.static_bytes for held in copy.stages] == [1, 1, 0]


def test_boundaries_inside_are_as_wide_as_the_wider_side() -> None:
    """The first stage knows only its output, the last only its input."""
    line = problem([stage(0, output_bytes=7), stage(1, output_bytes=5), stage(2)])
    copy = replaced(line, "v", 2)
    assert [held.output_bytes for held in copy.stages] == [7, 7, 7, 5, 5, 0]


def test_a_checkpoint_is_at_least_the_input() -> None:
    """8 bytes of checkpoints are 4 a part, but a part behind a boundary of 6 must keep those."""
    fields = {"recompute_ms": 3, "checkpoint_bytes": 8, "output_bytes": 6}
    line = problem([stage(0, **fields), stage(1, **fields | {"activation_bytes": 9})])
    copy = replaced(line, "loop", 2)
    assert [held.checkpoint_bytes for held in copy.stages] == [4, 5, 5, 4]
    assert [held.activation_bytes for held in copy.stages] == [5, 5, 5, 4]
    assert [held.recompute_ms for held in copy.stages] == [1.5] * 4


def test_workspaces_are_not_divided_and_a_fused_backward_is() -> None:
    copy = replaced(problem([stage(0, backward_ms=1.5, backward_workspace_bytes=9)]), "loop", 2)
    assert [held.backward_workspace_bytes for held in copy.stages] == [9, 9]
    assert [held.backward_ms for held in copy.stages] == [0.75, 0.75]


def test_a_loop_is_closed_by_the_slowest_link_of_the_line() -> None:
    links = [{"from": 0, "to": 1, "latency_ms": 1}, {"from": 1, "to": 2, "latency_ms": 3}]
    line = problem([stage(device) for device in range(3)], links=links)
    copy = replaced(line, "loop", 2)
    assert copy.boundary_ms == ((1, 1), (3, 3), (3, 3), (1, 1), (3, 3), (0, 0))
    assert replaced(line, "v", 2).links == line.links


@pytest.mark.parametrize(
    "links",
    [[], [{"from": 0, "to": 1, "latency_ms": 1}, {"from": 2, "to": 0, "latency_ms": 9}]],
)
def test_a_loop_is_not_closed_where_all_is_free_or_a_link_is_there(links: list[object]) -> None:
    line = problem([stage(device) for device in range(3)], links=links)
    assert replaced(line, "loop", 2).links == line.links


def test_the_name_says_what_it_is() -> None:
    """Also where the problem's own fills the 200 characters there are."""
    assert replaced(problem([stage()], name="six"), "v", 2).name == "six (v, 2 chunks)"
    assert replaced(problem([stage()], name="x" * 200), "v", 2).name.endswith("x (v, 2 chunks)")


def test_several_stages_on_a_device_are_refused() -> None:
    with pytest.raises(NotApplicable) as raised:
        replaced(problem([stage(0), stage(0)]), "loop", 2)
    assert raised.value.reason is NotApplicableReason.NEEDS_ONE_STAGE_PER_DEVICE


@pytest.mark.parametrize(("num_stages", "m", "chunks"), [(1, 100, 20_001), (2, 1, 32_769)])
def test_a_copy_beyond_the_limits_of_a_problem_is_refused(
    num_stages: int, m: int, chunks: int
) -> None:
    line = problem([stage(device) for device in range(num_stages)], m=m)
    with pytest.raises(NotApplicable, match="a problem has at most 65536 stages") as raised:
        replaced(line, "loop", chunks)
    assert raised.value.reason is NotApplicableReason.CANNOT_BE_SPLIT


def test_no_parts_at_all_is_an_error() -> None:
    with pytest.raises(ValueError, match="chunks is 0"):
        replaced(problem([stage()]), "loop", 0)


def test_offload_time_stays_that_of_the_bytes() -> None:
    """Half of the bytes, half of the time, and still offloadable."""
    offloaded = stage(0, activation_bytes=4_000_000, offload_bytes=2_000_000)
    copy = replaced(problem([offloaded], [bus()]), "v", 2)
    assert [copy.offload_ms(s) for s in range(2)] == [1, 1]


@given(lines(recompute=True), st.sampled_from(["loop", "v"]), st.integers(1, 4))
def test_totals_are_kept(given: Problem, kind: Shape, chunks: int) -> None:
    """Bytes exactly, times up to rounding; the same m, devices and objective."""
    copy = replaced(given, kind, chunks)
    assert len(copy.stages) == chunks * len(given.stages)
    for index, whole in enumerate(given.stages):
        parts = copy.stages[chunks * index : chunks * (index + 1)]
        for name in SUMMED:
            assert sum(getattr(part, name) for part in parts) == getattr(whole, name)
        for name in DIVIDED:
            assert sum(getattr(part, name) for part in parts) == pytest.approx(getattr(whole, name))
    assert copy.devices == given.devices
    assert (copy.num_microbatches, copy.objective) == (given.num_microbatches, given.objective)
    assert {len(held) for held in copy.stages_of} <= {0, chunks}


def test_one_chunk_needs_no_closing_link() -> None:
    links = [{"from": 0, "to": 1, "latency_ms": 1}, {"from": 1, "to": 2, "latency_ms": 1}]
    line = problem([stage(device) for device in range(3)], links=links)
    assert replaced(line, "loop", 1).links == line.links


@given(lines(), st.sampled_from(["loop", "v"]))
def test_one_chunk_is_the_same_problem(given: Problem, kind: Shape) -> None:
    assert replaced(given, kind, 1).problem_hash == given.problem_hash


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
