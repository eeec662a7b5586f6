"""The search over building blocks: within the limit, never worse than the blocks it contains."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe import Problem, dump_csv, find_violations, simulate
from optpipe_solver.families.building_blocks import (
    build_building_blocks,
    build_paired_blocks,
    build_v_half,
    build_v_min,
    build_zb_v,
)
from optpipe_solver.families.classic import build_one_f_one_b
from optpipe_solver.families.common import NotApplicable, NotApplicableReason
from optpipe_solver.feasibility import smallest_memory
from tests.building import problem, stage
from tests.solver.families.pipelines import built, v_problems
from tests.solver.families.v_problems import all_in_pairs, equal_v, v_problem
from tests.solver.starting import with_memory
from tests.strategies import few


def length(given: Problem) -> float:
    """The objective of the search's schedule, which must be legal, memory included."""
    programs = build_building_blocks(given)
    assert find_violations(given, programs) == []
    return simulate(given, programs).objective_ms(given.objective)


def test_more_memory_never_hurts_and_the_published_blocks_are_met() -> None:
    """p = 8, from one micro-batch to 1F1B's eight: V-Min at 4, V-Half at 5, ZB-V at 8."""
    lengths = {
        units: length(equal_v(8, 24, memory=units)) for units in (2, 3, 4, 6, 8, 9, 10, 12, 16)
    }
    assert list(lengths.values()) == sorted(lengths.values(), reverse=True)
    given = equal_v(8, 24)
    for units, build in ((8, build_v_min), (10, build_v_half), (16, build_zb_v)):
        assert lengths[units] <= simulate(given, build(given)).span_ms
    assert lengths[16] == given.busy_ms
    assert lengths[9] < lengths[8], "what lies between two published blocks is used"


def test_longer_periods_serve_memory_below_v_min() -> None:
    """Half of V-Min's memory: a micro-batch more often than one after the other (544 ms)."""
    assert length(equal_v(8, 16, memory=4)) <= 184


def test_real_times_beat_the_pattern_of_equal_times() -> None:
    """Where I takes twice as long as F, V-Half's order starves; the search in its memory less.

    Unequal stages too: the second device is slower.
    """
    times = [(2.0, 4.0, 1.0), (2.5, 5.0, 1.5), (2.0, 4.0, 1.0), (2.0, 4.0, 1.0)]
    given = v_problem([*times, *times[::-1]], m=12, memory=6)
    half = build_v_half(given)
    assert find_violations(given, half) == []
    assert length(given) < 0.97 * simulate(given, half).makespan_ms


def test_offsets_of_real_times_are_tried() -> None:
    """I and W four times as long as F: the order of equal times takes 303 ms."""
    given = v_problem([(1, 4, 4)] * 8, m=8, memory=3)
    assert length(given) <= 218


def test_a_short_fused_backward_is_used() -> None:
    """B takes half of I + W."""
    given = problem([stage(d, backward_ms=1) for d in (0, 1, 1, 0)], m=4)
    programs = build_building_blocks(given)
    assert {action.type for program in programs for action in program} == {"F", "B"}


def test_one_after_the_other_with_prompt_weight_gradients_is_the_last_resort() -> None:
    """Two W that wait together need more workspace than there is, and no other block fits."""
    sizes = [(0, 1, 3, 3), (1, 3, 2, 1), (1, 1, 3, 1), (0, 2, 3, 0)]
    stages = [
        stage(device, activation_bytes=activation, weight_context_bytes=context,
              backward_weight_workspace_bytes=workspace, backward_workspace_bytes=50)
        for device, activation, context, workspace in sizes
    ]  # fmt: skip
    given = problem(stages, [{"memory_bytes": 6} for _ in range(2)], m=3)
    first = dump_csv(build_building_blocks(given)).splitlines()[0]
    assert first == "0F0,3F0,3I0,3W0,0I0,0W0,0F1,3F1,3I1,3W1,0I1,0W1,0F2,3F2,3I2,3W2,0I2,0W2"


def test_on_a_line_it_is_never_worse_than_1f1b() -> None:
    """The halves of a line are halves of its devices; p activations, as 1F1B."""
    given = problem([stage(d) for d in range(6)], [{"memory_bytes": 60} for _ in range(6)], m=12)
    assert length(given) < simulate(given, build_one_f_one_b(given)).makespan_ms


@few(25)
@given(v_problems(), st.integers(0, 40))
def test_limits_are_respected_on_any_v(given: Problem, extra: int) -> None:
    """From the smallest memory that admits any schedule upwards."""
    limited = with_memory(given, [size + extra for size in smallest_memory(given)])
    programs = built(build_building_blocks, limited)
    if isinstance(programs, NotApplicableReason):
        assert programs is NotApplicableReason.DOES_NOT_FIT
        assert any(
            stage.weight_context_bytes > stage.activation_bytes
            or stage.backward_input_workspace_bytes
            or stage.backward_weight_workspace_bytes
            for stage in given.stages
        ), "all split always fits where nothing makes a fused backward smaller"
    else:
        assert find_violations(limited, programs) == []


def test_too_little_memory_is_said() -> None:
    """One byte less than serial execution needs."""
    with pytest.raises(NotApplicable, match="not even one micro-batch after the other") as caught:
        build_building_blocks(equal_v(2, 3, memory=1))
    assert caught.value.reason is NotApplicableReason.DOES_NOT_FIT


@pytest.mark.parametrize(
    ("shape", "room", "share"),
    [("v", 3, 1.0), ("v", 5, 1.02), ("v", 8, 0.95), ("v", 9, 0.88), ("loop", 5, 1.04)],
)
def test_pairs_leave_room_for_what_they_jump(shape: str, room: int, share: float) -> None:
    """Of building blocks' length, from p/2 + 1 to 2p + 1 activations of a chunk on 4 devices.

    Where early forwards took what the order keeps for others, it was up to 1.3 times it.
    """
    back = (3, 2, 1, 0) if shape == "v" else (0, 1, 2, 3)
    given = all_in_pairs((0, 1, 2, 3, *back), 16, room, 0.6)
    programs = build_paired_blocks(given)
    assert find_violations(given, programs) == []
    assert simulate(given, programs).makespan_ms <= share * length(given)
