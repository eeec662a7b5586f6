"""Counted storages beside the plan: the prefix walk is what a rank really holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import pytest

from optpipe import Problem, Programs, Stage, parse_action
from optpipe.memory import memory_walk
from tests.runtime import memory_cases, schedules

if TYPE_CHECKING:
    from tests.runtime.live_bytes import Moment
    from tests.runtime.memory_cases import Counted
    from tests.runtime.ranks import Ranks

MICROBATCHES = 8


def _count(ranks: Ranks, problem: Problem, programs: Programs) -> list[Counted]:
    schedule = schedules.make_schedule(problem, programs)
    return ranks.run(memory_cases.count_step, schedule, problem.num_microbatches)


class _Alone(NamedTuple):
    """What every stage holds around its actions when one micro-batch runs alone, in four ways."""

    split: dict[str, Moment]
    fused: dict[str, Moment]
    offloaded: dict[str, Moment]
    recomputed: dict[str, Moment]


_ALONE: dict[tuple[int, ...], _Alone] = {}
"""By placement: counted once."""

_WAYS = ("F I W", "F B", "F OFFLOAD RELEASE RELOAD B", "F RECOMPUTE B")


def _measured(
    ranks: Ranks, placement: tuple[int, ...], num_microbatches: int, *, recomputes: bool = False
) -> Problem:
    """Return the problem whose stages hold what was counted of one micro-batch.

    Parameters
    ----------
    recomputes
        Whether its F's must have room to run without a graph, too.
    """
    if placement not in _ALONE:
        problem = schedules.make_problem(placement, 1)
        runs = [_count(ranks, problem, schedules.alone(placement, way.split())) for way in _WAYS]
        moments = [
            {key: moment for one in run for key, moment in _without_boundary(one).items()}
            for run in runs
        ]
        _ALONE[placement] = _Alone(*moments)
    counted = _ALONE[placement]
    stages: list[Stage] = []
    for index, home in enumerate(placement):
        beside = [stage for stage in stages if stage.device == home]
        stage = _stage(home, index, counted, beside)
        stages.append(_with_room(stage, counted, index, beside) if recomputes else stage)
    plain = schedules.make_problem(placement, num_microbatches, limit=2**50)
    return plain.model_copy(update={"stages": tuple(stages)})


def _without_boundary(counted: Counted) -> dict[str, Moment]:
    """Return what is live by action, less the boundary tensors that are there meanwhile."""
    found, level = {}, 0
    for moment in counted.moments:
        action = parse_action(moment.action)
        level = counted.boundary.get(action, level)
        used_up = counted.gradient_bytes.get(action.stage, 0) if action.type.is_backward else 0
        after = max(0, moment.after - (level - used_up))
        found[moment.action] = moment._replace(peak=moment.peak - level, after=after)
    return found


def _stage(device: int, index: int, runs: _Alone, beside: list[Stage]) -> Stage:
    """Return what a stage holds, less what the earlier stages of its rank hold meanwhile."""
    others = sum(stage.activation_bytes for stage in beside)
    checkpoints = sum(stage.checkpoint_bytes or 0 for stage in beside)
    forward, back = runs.split[f"{index}F0"], runs.split[f"{index}I0"]
    # Torch's loop still holds the last stage's output when its F has ended, not when I begins.
    activation = min(forward.after, back.before) - others
    context = back.after - others
    again, once_more = runs.recomputed[f"{index}F0"], runs.recomputed[f"{index}RECOMPUTE0"]
    checkpoint = min(again.after, once_more.before) - checkpoints
    kept, released = runs.offloaded[f"{index}OFFLOAD0"], runs.offloaded[f"{index}RELEASE0"]
    return Stage(
        device=device,
        forward_ms=1,
        backward_input_ms=1,
        backward_weight_ms=1,
        activation_bytes=activation,
        weight_context_bytes=context,
        offload_bytes=min(activation, kept.after - released.after),
        recompute_ms=1,
        checkpoint_bytes=checkpoint,
        forward_workspace_bytes=forward.peak - others - activation,
        backward_input_workspace_bytes=max(0, back.peak - others - max(activation, context)),
        backward_weight_workspace_bytes=max(0, runs.split[f"{index}W0"].peak - others - context),
        backward_workspace_bytes=max(0, runs.fused[f"{index}B0"].peak - others - activation),
        recompute_workspace_bytes=max(0, once_more.peak - checkpoints - activation),
    )


def _with_room(stage: Stage, runs: _Alone, index: int, beside: list[Stage]) -> Stage:
    held = sum(one.checkpoint_bytes or 0 for one in (*beside, stage))
    room = max(stage.forward_workspace_bytes, runs.recomputed[f"{index}F0"].peak - held)
    return stage.model_copy(update={"forward_workspace_bytes": room})


def _planned_peak(problem: Problem, rank: int, programs: Programs, counted: Counted) -> int:
    level = peak = 0
    walk = memory_walk(problem, rank, programs[rank])
    for action, step in zip(programs[rank], walk, strict=True):
        level = counted.boundary.get(action, level)
        peak = max(peak, step.peak + level)
    return peak


@pytest.mark.parametrize("placement", [schedules.LINEAR, schedules.V_SHAPE])
def test_the_peak_is_the_plans_and_nothing_is_left(ranks, placement):
    problem = _measured(ranks, placement, MICROBATCHES)
    for seed, offload in enumerate((0.0, 0.5)):
        programs = schedules.random_programs(problem, 40 + seed, offload=offload)
        outcomes = _count(ranks, problem, programs)
        for rank, counted in enumerate(outcomes):
            planned = _planned_peak(problem, rank, programs, counted)
            assert counted.peak == pytest.approx(planned, rel=0.01)
            assert counted.left == 0


def test_with_recomputation_the_plan_holds_and_nothing_is_left(ranks):
    """An F without a graph needs its own room; a plan has one number for both kinds of F."""
    problem = _measured(ranks, schedules.LINEAR, MICROBATCHES, recomputes=True)
    programs = schedules.random_programs(problem, 42, offload=0.4, recompute=0.3)
    for rank, counted in enumerate(_count(ranks, problem, programs)):
        planned = _planned_peak(problem, rank, programs, counted)
        assert 0.95 * planned <= counted.peak <= 1.01 * planned
        assert counted.left == 0


def test_torchs_own_split_backward_holds_more(ranks):
    rows = ranks.run(memory_cases.zero_bubble_v_rows, 8)[0]
    problem = schedules.make_problem(schedules.V_SHAPE, 8)
    ours = _count(ranks, problem, schedules.from_text(rows))
    stock = ranks.run(memory_cases.count_stock_step, 8)
    for counted, held in zip(ours, stock, strict=True):
        assert counted.peak < 0.7 * held
