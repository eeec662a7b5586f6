"""The even cut against all cuts."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe.errors import InputError
from optpipe.presets.cut import asked_placement, balanced_sizes


def stage_times(times, sizes) -> list[float]:
    """Time of each stage of a cut."""
    ends = [0]
    for size in sizes:
        ends.append(ends[-1] + size)
    return [sum(times[a:b]) for a, b in pairwise(ends)]


def all_cuts(count, stages) -> list[tuple[int, ...]]:
    """Every way to cut so many layers into so many stages."""
    return [
        tuple(b - a for a, b in pairwise((0, *inner, count)))
        for inner in combinations(range(1, count), stages - 1)
    ]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.data())
def test_no_cut_has_a_faster_slowest_stage_or_is_more_even(times, data) -> None:
    """Least largest stage first, least sum of squares second, by trying every cut."""
    stages = data.draw(st.integers(1, len(times)))
    sizes = balanced_sizes([float(t) for t in times], stages)
    assert min(sizes) >= 1
    assert sum(sizes) == len(times)

    def value(cut) -> tuple[float, float]:
        found = stage_times(times, cut)
        return max(found), sum(t * t for t in found)

    assert value(sizes) == min(value(cut) for cut in all_cuts(len(times), stages))


def test_a_heavy_head_takes_layers_from_the_last_stage() -> None:
    """Eight layers and a head of two: the last stage has fewer layers."""
    assert balanced_sizes([0.1, *[1.0] * 8, 2.0], 2) == (6, 4)


def test_more_stages_than_layers_are_refused() -> None:
    """With both numbers."""
    with pytest.raises(InputError, match="4 stages, but only 3 layers"):
        balanced_sizes([1.0, 1.0, 1.0], 4)


def test_placements() -> None:
    """Along, round and round, to and fro."""
    assert asked_placement("linear", 3, 1) == (0, 1, 2)
    assert asked_placement("loop", 3, 2) == (0, 1, 2, 0, 1, 2)
    assert asked_placement("v", 3, 3) == (0, 1, 2, 2, 1, 0, 0, 1, 2)


@pytest.mark.parametrize(
    ("name", "chunks", "named"),
    [("line", 1, "'line'"), ("linear", 2, "one stage per device"), ("v", 0, "at least 1")],
)
def test_wrong_placements_are_refused(name, chunks, named) -> None:
    """Naming what is wrong."""
    with pytest.raises(InputError, match=named):
        asked_placement(name, 4, chunks)
