"""Counted storages beside the plan: the prefix walk is what a rank really holds."""

import random
from contextlib import nullcontext
from typing import Any

import pytest

from optpipe import Problem, Programs
from optpipe.memory import memory_walk, modes_of
from optpipe.runtime.demo import random_tokens, token_loss
from optpipe.runtime.measuring import Effort, measure
from optpipe.runtime.messages import BoundaryLevel
from optpipe.schedule import ActionType
from optpipe_solver import solve
from tests.runtime import memory_cases, schedules
from tests.runtime.measured import WorkClock, with_clock
from tests.runtime.memory_cases import Counted
from tests.runtime.small_model import (
    needs_hooked_checkpoints,
    small_data,
    small_loss,
    small_stages,
)

pytestmark = pytest.mark.usefixtures("few_objects", "one_thread")

MICROBATCHES = 8


def _measured(
    placement: tuple[int, ...],
    kind: str = "",
    *,
    recompute: bool = False,
    modes: int = 0,
    length: int = memory_cases.LENGTH,
) -> Problem:
    """Measure the stages that `memory_cases.count_step` runs."""
    if kind:
        stages = memory_cases.gpt_stages(kind, len(placement))
        sample, target = random_tokens(memory_cases.GPT, 1, 0)
    else:
        stages = small_stages(len(placement), memory_cases.WIDTH)
        sample, target = small_data(1, 0, memory_cases.WIDTH, length)
    # Multiplications take a time each and all else none: so menus are the same in every run.
    clock = WorkClock() if modes else None
    counted = nullcontext() if clock is None else clock.counter
    with memory_cases.around(kind), counted:
        profile = measure(
            stages,
            sample,
            loss_fn=token_loss if kind else small_loss,
            target=target,
            placement=placement,
            effort=Effort(repeats=1, warmups=0),
            min_offload_bytes=1,
            recompute=recompute or modes > 0,
            modes=modes,
            instruments=None if clock is None else with_clock(clock),
            memory_bytes=2**40,
            links=False,
        )
    return profile.problem(MICROBATCHES)


def _shares(problem: Problem, programs: Programs, outcomes: list[Counted]) -> list[float]:
    """Return, by rank, the storages counted at the peak as a share of the plan's.

    The plan is the prefix walk without static bytes, and the boundary tensors that are there
    meanwhile.
    """
    shares = []
    for rank, counted in enumerate(outcomes):
        after = peak = 0
        walk = memory_walk(problem, rank, programs[rank])
        for action, step in zip(programs[rank], walk, strict=True):
            level = counted.boundary.get(action.bare, BoundaryLevel(after, after))
            after = level.after
            peak = max(peak, step.peak + level.during)
        # The values of the losses stay to the end of the step.
        losses = 8 * MICROBATCHES if len(problem.stages) - 1 in problem.stages_of[rank] else 0
        assert counted.left == 0
        numbers = modes_of(problem, programs[rank])
        assert counted.offloaded_bytes == sum(
            problem.menu_of(*action.cell)[numbers[action.cell]].offload_bytes
            for action in programs[rank]
            if action.type is ActionType.OFFLOAD
        )
        shares.append(counted.peak / (peak - problem.static_bytes_of(rank) + losses))
    return shares


def test_unequal_micro_batches_hold_what_is_planned_of_each(ranks):
    """Slots of messages, and nothing else, are as the largest."""
    lengths = (6, 24, 40)
    kinds = [_measured(schedules.LINEAR, length=length) for length in lengths]
    stages, *others = (kind.stages for kind in kinds)
    chosen = random.Random(5).choices(range(len(lengths)), k=MICROBATCHES)
    update: dict[str, Any] = {"stages": stages, "microbatches": [{"cost": cost} for cost in chosen]}
    update |= {"other_costs": tuple(zip(*others, strict=True))}
    update |= {"format": "optpipe/problem/v2", "devices": kinds[-1].devices}
    problem = kinds[0].model_copy(update=update)
    for seed, offload in enumerate((0.0, 0.5)):
        programs = schedules.random_programs(problem, 50 + seed, offload=offload)
        schedule = schedules.make_schedule(problem, programs)
        given = [lengths[cost] for cost in chosen]
        counted = ranks.run(memory_cases.count_unequal_step, schedule, problem, given)
        shares = _shares(problem, programs, counted)
        assert 0.97 <= min(shares) <= max(shares) <= 1


_TIMES = ("forward_ms", "backward_input_ms", "backward_weight_ms")


def _restricted(problem: Problem, way: str) -> Problem:
    """Return a problem whose best schedules fuse backwards, split them, offload or recompute."""
    times: dict[str, float | None] = dict.fromkeys(_TIMES, 2)
    times["backward_ms"] = 3 if way == "fused" else None
    stages = tuple(
        stage.model_copy(
            update=times
            | {
                "modes": tuple(
                    mode.model_copy(update={"recompute_ms": 2 if mode.recompute else None})
                    for mode in stage.modes
                )
            }
        )
        for stage in problem.stages
    )
    rate = 1e3 if way == "offload" else None
    devices = []
    for index, device in enumerate(problem.devices):
        own = [stage for stage in stages if stage.device == index]
        room = 2**30
        if way in {"offload", "recompute"}:
            room = sum(one.activation_bytes for one in own) * 3 // 2
            room += max(one.activation_bytes + one.forward_workspace_bytes for one in own)
        memory = problem.static_bytes_of(index) + device.reserved_bytes + room
        limits = {"memory_bytes": memory, "d2h_gb_per_s": rate, "h2d_gb_per_s": rate}
        devices.append(device.model_copy(update=limits))
    return problem.model_copy(update={"stages": stages, "devices": tuple(devices)})


_LONG = pytest.mark.extended
_USED = {"fused": "B", "split": "W", "offload": "OFFLOAD", "recompute": "RECOMPUTE"}


@pytest.mark.parametrize(
    ("kind", "placement", "way", "method"),
    [
        pytest.param("plain", schedules.LINEAR, "fused", "1f1b", marks=_LONG),
        pytest.param("plain", schedules.LINEAR, "split", "zb-h1", marks=_LONG),
        ("plain", schedules.V_SHAPE, "offload", "ada-offload"),
        ("autocast", schedules.LINEAR, "recompute", "1f1b-r"),
        pytest.param("autocast", schedules.LINEAR, "fused", "1f1b", marks=_LONG),
        pytest.param("autocast", schedules.V_SHAPE, "split", "zb-v", marks=_LONG),
        pytest.param("autocast", schedules.V_SHAPE, "offload", "ada-offload", marks=_LONG),
        pytest.param("autocast around", schedules.LINEAR, "fused", "1f1b", marks=_LONG),
        pytest.param("autocast around", schedules.V_SHAPE, "split", "zb-v", marks=_LONG),
        pytest.param("selective", schedules.LINEAR, "fused", "1f1b", marks=_LONG),
        pytest.param("selective", schedules.V_SHAPE, "split", "zb-v", marks=_LONG),
        pytest.param(
            "selective",
            schedules.V_SHAPE,
            "offload",
            "ada-offload",
            marks=needs_hooked_checkpoints,
        ),
    ],
)
def test_a_solved_plan_is_at_most_three_percent_above_what_lives(
    ranks, kind, placement, way, method
):
    problem = _restricted(_measured(placement, kind, recompute=way == "recompute"), way)
    schedule = solve(problem, time_limit_s=600, method=method).schedule
    assert schedule is not None
    assert any(a.type.value == _USED[way] for program in schedule.programs for a in program)
    counted = ranks.run(memory_cases.count_step, schedule, MICROBATCHES, kind, problem)
    shares = _shares(problem, schedule.programs, counted)
    assert 0.97 <= min(shares) <= max(shares) <= 1


@pytest.mark.parametrize(
    ("kind", "placement"),
    [
        ("plain", schedules.LINEAR),
        pytest.param("autocast", schedules.V_SHAPE, marks=pytest.mark.extended),
    ],
)
def test_every_mode_of_a_measured_menu_holds_what_it_says(ranks, kind, placement):
    """Fused and split; in one step every stage runs through its menu."""
    problem = _measured(placement, kind, modes=8)
    recomputed = {mode.recompute for menu in problem.menus for mode in menu}
    assert recomputed == {"", "apart", "inside"}
    for seed, fused in ((60, 1.0), (61, 0.0)):
        order = schedules.random_programs(problem, seed, fused=fused)
        numbers = {
            (stage, j): (j + stage) % len(problem.menus[stage])
            for stage in range(len(placement))
            for j in range(8)
        }
        programs = schedules.in_modes(problem, order, numbers)
        schedule = schedules.make_schedule(problem, programs)
        counted = ranks.run(memory_cases.count_step, schedule, MICROBATCHES, kind, problem)
        shares = _shares(problem, programs, counted)
        assert 0.97 <= min(shares) <= max(shares) <= 1
