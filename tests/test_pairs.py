"""Pairs: a forward and a backward that run together (DESIGN section 3)."""

from __future__ import annotations

from typing import Any

import pytest

from optpipe import Problem, ProblemError, simulate
from optpipe.check import find_violations
from optpipe.errors import ActionSyntaxError
from optpipe.formats.csv import dump_csv, load_csv
from optpipe.memory import device_peak_bytes
from optpipe.schedule import cells_of, parse_cell
from optpipe_solver.arrays.encoding import CompiledProblem
from optpipe_solver.arrays.evaluate import evaluate_arrays, evaluate_by_reference
from optpipe_solver.bounds import lower_bounds
from optpipe_solver.families.overlapped import build_dualpipe_v
from tests.building import problem, stage


def _v(p: int, m: int, hidden_ms: float) -> Problem:
    """A V of equal passes, in which every F may pair with every B of its device."""
    stages = [stage(d, activation_bytes=1) for d in (*range(p), *reversed(range(p)))]
    ends = [(d, 2 * p - 1 - d) for d in range(p)]
    pairs: list[dict[str, Any]] = [
        {"forward": a, "backward": b, "hidden_ms": hidden_ms}
        for both in ends
        for a in both
        for b in both
    ]
    return problem(stages, m=m, pairs=pairs, format="optpipe/problem/v2")


@pytest.mark.parametrize(
    ("p", "m", "lengths"),
    [(4, 10, (66, 57.6, 52)), (8, 20, (134, 116, 104)), (8, 32, (206, 173.6, 152))],
)
def test_dualpipe_v_has_the_numbers_of_the_design(
    p: int, m: int, lengths: tuple[float, ...]
) -> None:
    for hidden_ms, length in zip((0, 0.6, 1), lengths, strict=True):
        given = _v(p, m, hidden_ms)
        rows = build_dualpipe_v(given)
        assert find_violations(given, rows) == []
        assert simulate(given, rows).makespan_ms == pytest.approx(length)
        assert max(device_peak_bytes(given, d, row) for d, row in enumerate(rows)) == 2 * p + 1
        assert evaluate_arrays(CompiledProblem.of(given), rows) == evaluate_by_reference(
            given, rows
        )
        assert max(bound.ms for bound in lower_bounds(given)) <= length + 1e-9
        assert load_csv(dump_csv(rows)) == rows


def test_a_pair_is_a_cell_of_text() -> None:
    text = "(0F7@2;7B3)OVERLAP_F_B"
    assert cells_of(parse_cell(text)) == [text]
    for wrong in ("(0F7; 7B3)OVERLAP_F_B", "(7B3;0F7)OVERLAP_F_B", "(0F7;7W3)OVERLAP_F_B"):
        with pytest.raises(ActionSyntaxError):
            parse_cell(wrong)


def test_what_may_not_pair_is_refused() -> None:
    given = _v(1, 1, 1)
    rows = load_csv("0F0,(1F0;1B0)OVERLAP_F_B,0B0")
    assert [fault.code for fault in find_violations(given, rows)] == ["pair.same_cell"]
    alone = given.model_copy(update={"pairs": ()})
    two = alone.model_copy(update={"num_microbatches": 2})
    rows = load_csv("0F0,1F0,(0F1;1B0)OVERLAP_F_B,0B0,1F1,1B1,0B1")
    assert [fault.code for fault in find_violations(two, rows)] == ["pair.unlicensed"]


def test_hidden_ms_is_one_number() -> None:
    data = _v(1, 1, 1).model_dump(mode="json", by_alias=True)
    data["pairs"][0]["hidden_ms"] = [[1.0]]
    assert Problem.parse(data) == _v(1, 1, 1)
    data["pairs"][0]["hidden_ms"] = [[1.0, 1.0]]
    with pytest.raises(ProblemError, match="matrix of one row"):
        Problem.parse(data)
