"""Groups of modules: what modes say, which modules they mean, and gradients in all of them."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

from optpipe import Problem
from optpipe.runtime.offload import EVERYTHING, REST
from optpipe.runtime.treatments import Treatment
from tests.runtime import schedules, small_cases

if TYPE_CHECKING:
    from collections.abc import Sequence

GROUPS = ("attn", "core_attn", "mlp", "norm")
NUM_MICROBATCHES = 12


def all_modes() -> list[Treatment]:
    """Every way to keep, offload or recompute each of four groups, and what is done to a stage."""
    found = []
    for numbers in product(range(3), repeat=len(GROUPS)):
        again, moved = (
            frozenset(name for name, one in zip(GROUPS, numbers, strict=True) if one == which)
            for which in (1, 2)
        )
        # What no group makes goes along in every second one.
        rest = frozenset({REST}) if sum(numbers) % 2 else frozenset()
        found.append(Treatment(again=again, moved=moved | rest))
    whole = [Treatment(apart=True), Treatment(apart=True, moved=EVERYTHING)]
    part = [Treatment(moved=EVERYTHING), Treatment(again=frozenset({"block"}), moved=EVERYTHING)]
    return [one for one in [*found, *whole, *part] if one != Treatment()]


def menu_problem(menu: Sequence[Treatment]) -> Problem:
    """Return a problem of four stages with a menu; its sizes are those of no model."""
    modes: list[dict[str, Any]] = [{"name": "keep"}]
    for one in menu:
        numbers: dict[str, Any] = {"offload_bytes": 1} if one.moved else {}
        if one.apart or one.again:
            where = {"recompute": "apart" if one.apart else "inside", "recompute_ms": 1}
            numbers |= {"forward_bytes": 2, **where}
        modes.append({"name": str(one), **numbers})
    cost = {"forward_ms": 1, "backward_input_ms": 1, "backward_weight_ms": 1, "modes": modes}
    device = {"memory_bytes": 10**6, "d2h_gb_per_s": 1, "h2d_gb_per_s": 1}
    return Problem.parse(
        {
            "format": "optpipe/problem/v2",
            "num_microbatches": NUM_MICROBATCHES,
            "devices": [device] * 4,
            "stages": [{"device": s, "costs": [cost | {"activation_bytes": 4}]} for s in range(4)],
        }
    )


def test_gradients_are_those_of_one_process_in_every_mode_of_four_groups(ranks) -> None:
    """Fused and split, each mode on some stage, all of one menu in one step."""
    menu = all_modes()
    half = (len(menu) + 1) // 2
    seen = set()
    for part in (menu[:half], menu[half:]):
        problem = menu_problem(part)
        cells = [(stage, j) for j in range(NUM_MICROBATCHES) for stage in range(4)]
        for first, make in enumerate((schedules.one_f_one_b, schedules.zero_bubble_h1)):
            number_of = {
                cell: 1 + (index + 5 * first) % len(part) for index, cell in enumerate(cells)
            }
            for cell, number in number_of.items():
                # The first stage has no input that could leave.
                whole = part[number - 1].apart and part[number - 1].moved
                number_of[cell] = 1 if whole and cell[0] == 0 else number
            programs = schedules.in_modes(problem, make(4, NUM_MICROBATCHES), number_of)
            schedule = schedules.make_schedule(problem, programs)
            outcomes = ranks.run(small_cases.train, schedule, problem, "", "transformer", 1)
            assert all(one.losses_equal for one in outcomes)
            assert max(one.worst_difference for one in outcomes) < 1e-15
            assert all(one.live_bytes_after_release == 0 for one in outcomes)
            assert min(one.offloaded_bytes for one in outcomes) > 0
            seen |= {(first, part[number - 1]) for number in number_of.values()}
    assert len(seen) == 2 * len(menu)
