"""The dynamic program against every cut, and the bounds that hold for all of them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe_solver.bounds import lower_bound
from optpipe_solver.feasibility import feasibility, least_bytes, smallest_memory
from optpipe_solver.plan.cuts import any_cut_bound, best_cuts, roomiest_cut
from optpipe_solver.plan.lines import PLACEMENTS, PlacementLine, RunTable, make_lines
from tests.solver.plan.models import all_cuts, gpus, layer, model, models

if TYPE_CHECKING:
    from optpipe import Problem
    from optpipe.model import Model


def load_bound(problem: Problem) -> float:
    """The measure of a cut, from its problem: earliest start, all work, shortest reduction."""
    heads, head = [], 0.0
    for stage, (there, _) in zip(problem.stages, problem.boundary_ms, strict=True):
        heads.append(head if problem.objective == "makespan" else 0.0)
        head += stage.forward_ms + there
    return max(
        min(heads[s] for s in own)
        + problem.num_microbatches * sum(problem.stages[s].busy_ms for s in own)
        + min(problem.stages[s].grad_sync_ms for s in own)
        for own in problem.stages_of
        if own
    )


def fitting(found: Model, line: PlacementLine) -> dict[tuple[int, ...], Problem]:
    """Every cut on the line that some schedule fits, with its problem."""
    cuts = {
        sizes: found.problem(line.placement, sizes)
        for sizes in all_cuts(found.num_layers, len(line.placement))
    }
    return {sizes: problem for sizes, problem in cuts.items() if feasibility(problem).plan}


@given(models(), st.randoms(use_true_random=False))
def test_with_one_stage_per_device_the_cut_is_the_best_of_all(found: Model, rng) -> None:
    """Its value is the least load bound over every cut that fits; inf exactly where none does."""
    order = list(range(len(found.devices)))
    rng.shuffle(order)
    line = PlacementLine("linear", 1, tuple(order))
    cuts = best_cuts(RunTable(found), line)
    values = {sizes: load_bound(problem) for sizes, problem in fitting(found, line).items()}
    least = min(values.values(), default=math.inf)
    assert cuts.bound_ms == pytest.approx(max(least, any_cut_bound(found, order)), abs=1e-9)
    if values:
        assert values[cuts.sizes[0]] == pytest.approx(least, abs=1e-9)


@given(models(chunks=2), st.sampled_from(["loop", "v"]), st.sampled_from([1, 50]))
def test_with_several_stages_per_device_what_is_said_is_true(
    found: Model, shape: str, beam: int
) -> None:
    """The bound is below every cut that fits, whether the beam was full or not."""
    order = tuple(range(len(found.devices)))
    line = PlacementLine("loop" if shape == "loop" else "v", 2, order)
    cuts = best_cuts(RunTable(found), line, beam=beam)
    values = {sizes: load_bound(problem) for sizes, problem in fitting(found, line).items()}
    least = min(values.values(), default=math.inf)
    assert cuts.bound_ms <= max(least, any_cut_bound(found, order)) + 1e-9
    assert all(sum(sizes) == found.num_layers for sizes in cuts.sizes)


def test_a_w_waits_until_what_earlier_stages_hold_is_gone() -> None:
    """Its workspace need not fit beside their activations: a loop of two devices that does fit."""
    layers = [layer(activation_bytes=0), layer(activation_bytes=0, static_bytes=3)]
    layers += [layer(activation_bytes=3), layer(activation_bytes=0)]
    room = {"backward_weight_workspace_bytes": 3, "backward_workspace_bytes": 3}
    layers += [layer(activation_bytes=0, static_bytes=5, **room)]
    found = model(layers, gpus(2, memory_bytes=10), m=1)
    line = PlacementLine("loop", 2, (0, 1))
    assert fitting(found, line)
    assert best_cuts(RunTable(found), line, beam=50).bound_ms < math.inf


@given(models(chunks=2, roomy=True))
def test_with_plenty_of_memory_a_wide_beam_finds_the_best_v(found: Model) -> None:
    """Where nothing is pruned by memory the least load bound is reached, not only bounded."""
    order = tuple(range(len(found.devices)))
    line = PlacementLine("v", 2, order)
    cuts = best_cuts(RunTable(found), line, beam=200)
    best = min(load_bound(problem) for problem in fitting(found, line).values())
    assert cuts.bound_ms == pytest.approx(max(best, any_cut_bound(found, order)), abs=1e-9)
    assert load_bound(found.problem(line.placement, cuts.sizes[0])) == pytest.approx(best)


@given(models(roomy=True), st.integers(0, 60))
def test_a_cap_hides_no_cut_below_it(found: Model, cap: int) -> None:
    """What is left out is proven to be at least the cap."""
    line = PlacementLine("linear", 1, tuple(range(len(found.devices))))
    free, capped = best_cuts(RunTable(found), line), best_cuts(RunTable(found), line, cap_ms=cap)
    assert min(free.bound_ms, cap) - 1e-9 <= capped.bound_ms <= free.bound_ms + 1e-9
    if free.bound_ms < cap:
        assert capped.sizes


@given(models())
def test_the_roomiest_cut_leaves_the_most_bytes(found: Model) -> None:
    line = PlacementLine("linear", 1, tuple(range(len(found.devices))))
    sizes = roomiest_cut(RunTable(found), line)
    rooms = {}
    for cut in all_cuts(found.num_layers, len(found.devices)):
        needs = smallest_memory(found.problem(line.placement, cut))
        rooms[cut] = min(
            device.memory_bytes - need for device, need in zip(found.devices, needs, strict=True)
        )
    assert rooms[sizes] == max(rooms.values())


@given(models())
def test_the_bytes_of_a_run_are_those_of_the_smallest_memory(found: Model) -> None:
    """One stage on a device: the same number as the solver's closed form."""
    whole = found.problem((0,), (found.num_layers,))
    stage = whole.stages[0]
    kept, nested, needed = least_bytes(stage, can_offload=whole.can_offload(0))
    assert needed + stage.static_bytes == smallest_memory(whole)[0]
    assert kept <= nested <= needed


@given(models(roomy=True))
def test_no_cut_on_any_placement_is_below_the_bound_of_all(found: Model) -> None:
    """Held against each cut's own load bound, which no schedule beats, and its best bound."""
    for line in make_lines(found, PLACEMENTS, (1, 2)).lines:
        floor = any_cut_bound(found, line.order)
        for problem in fitting(found, line).values():
            best = max(lower_bound(problem).ms, load_bound(problem))
            assert floor <= best + 1e-9


def test_a_long_model_is_cut_too() -> None:
    """130 layers on 16 devices in a line, 66 on 8 in a V, in one go."""
    for shape, chunks, num_devices in (("linear", 1, 16), ("v", 2, 8)):
        num_layers = 2 + 8 * num_devices
        layers = [layer(repeat=num_layers - 2), layer(3, 3, 3), layer()]
        found = model(layers, gpus(num_devices), m=64)
        line = PlacementLine("v" if shape == "v" else "linear", chunks, tuple(range(num_devices)))
        assert sum(best_cuts(RunTable(found), line).sizes[0]) == num_layers
