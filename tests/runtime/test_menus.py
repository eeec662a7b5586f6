"""Menus of stages: what groups hold, what they take to run again, and which modes are chosen."""

from itertools import product

import pytest
import torch
from torch import nn

from optpipe import load_problem
from optpipe.formats.json import dump_problem
from optpipe.runtime import groups
from optpipe.runtime.measuring import Effort, measure
from optpipe.runtime.measuring.memory import Candidate
from optpipe.runtime.offload import EVERYTHING
from optpipe.runtime.treatments import Treatment, parse_treatment
from optpipe.stage import choose
from tests.runtime import measured
from tests.runtime.measured import WorkClock

pytestmark = pytest.mark.usefixtures("few_objects", "one_thread")

FLOAT = 4


def _stages() -> list[nn.Module]:
    """Stages of two layers around a wide part, ``mlp``, that saves twice as much as it takes."""
    found: list[nn.Module] = []
    for _ in range(3):
        stage = nn.Sequential(measured.deep(8, 1), measured.perceptron(8, 16), measured.deep(8, 1))
        groups(stage, {"mlp": [stage[1]], "ends": [stage[0], stage[2]]})
        found.append(stage)
    return found


def test_every_byte_and_every_product_of_a_group_is_counted() -> None:
    """On a clock that counts multiplications; a menu is written, and read back."""
    clock = WorkClock()
    with clock.counter:
        profile = measure(
            _stages(), torch.ones(5, 8), effort=Effort(2, 1), links=False,
            instruments=measured.with_clock(clock),
            min_offload_bytes=1, modes=64,
        )  # fmt: skip
    narrow, wide = FLOAT * 5 * 8, FLOAT * 5 * 16
    product_ms = 5 * 8 * 16
    menu = profile.results[1].menu
    assert menu is not None
    ends, mlp = menu.groups
    # Saved are the ends' inputs, of which the stage's own stays; the mlp's input and ReLU's output.
    assert (ends.name, ends.num_modules, ends.offload_bytes) == ("ends", 2, narrow)
    # What the ends save are their inputs: nothing is freed.
    assert ends.freed_bytes == 0
    assert (mlp.name, mlp.num_modules) == ("mlp", 1)
    assert mlp.offload_bytes == narrow + wide
    assert mlp.freed_bytes == wide
    assert mlp.recompute_ms == 2 * product_ms
    problem = profile.problem(2)
    assert load_problem(dump_problem(problem)) == problem
    assert problem.format == "optpipe/problem/v2"
    modes = {mode.name: mode for mode in problem.menus[1]}
    assert next(iter(modes)) == "keep"
    again = modes["recompute mlp"]
    assert again.recompute == "inside"
    assert modes["keep"].activation_bytes - again.forward_bytes == wide
    assert again.recompute_ms == 2 * product_ms
    assert modes["offload"].offload_bytes == 2 * narrow + wide
    assert not any("Unknown" in note for note in profile.measurements.notes)


@pytest.mark.extended
@pytest.mark.filterwarnings("ignore")  # of torch's own compiler
def test_a_menu_says_of_compiled_groups_that_they_cannot_be_told_apart() -> None:
    torch.compiler.reset()
    stages = _stages()
    compiled = stages[1].get_submodule("1")
    compiled.compile(backend="aot_eager")
    profile = measure(stages, torch.ones(5, 8), effort=Effort(1, 0), links=False, modes=8)
    notes = [note for note in profile.measurements.notes if "No hook can separate" in note]
    assert [note.split(" are compiled")[0] for note in notes] == ["Stage 1: mlp"]
    used = {
        name for mode in profile.problem(1).menus[1] for name in parse_treatment(mode.name).named
    }
    assert "mlp" not in used


def _grid(sizes: dict[str, int], ms: dict[str, float]) -> list[Candidate]:
    """Every way to keep, offload or recompute groups that share nothing, of a stage of 100."""
    found = []
    for ways in product("kor", repeat=len(sizes)):
        again, moved = (
            frozenset(name for name, way in zip(sizes, ways, strict=True) if way == which)
            for which in "ro"
        )
        found.append(
            Candidate(
                Treatment(again=again, moved=EVERYTHING if len(moved) == len(sizes) else moved),
                100 - sum(sizes[name] for name in again),
                sum(sizes[name] for name in moved),
                sum(ms[name] for name in again),
            )
        )
    return found


@pytest.mark.parametrize("most", range(1, 9))
def test_a_menu_has_what_leaves_least_and_fills_the_levels_between(most) -> None:
    """Never more than asked for; a dear way to free few bytes is in one at most, which leaves least
    without transfers."""
    candidates = _grid({"big": 60, "mid": 25, "dear": 5}, {"big": 3.0, "mid": 1.0, "dear": 50.0})
    keep = next(one for one in candidates if one.treatment == Treatment())
    menu = choose(keep, candidates, most=most, transfer_ms=0.02)
    assert len(menu) <= most
    assert menu[0].treatment == Treatment()
    assert sum("dear" in one.treatment.again for one in menu) <= 1
    left = [one.sizes for one in menu]
    assert left == sorted(left, reverse=True)
    if most > 1:
        assert left[-1] == min(one.sizes for one in candidates)
    if most >= 6:
        said = {str(one.treatment) for one in menu}
        assert {"offload", "recompute mid", "recompute big"} <= said or len(set(left)) >= 5
