"""``lean``: compiles what allocates nothing, and refuses what does."""

import ast
from pathlib import Path

import numba
import numpy as np
import pytest
from numba import types
from numpy.typing import NDArray

import optpipe_solver
from optpipe_solver.jit import lean


@lean
def total(values: NDArray[np.float64]) -> float:
    """Sum up; slices are views and allowed."""
    found = 0.0
    for value in values[1:]:
        found += value
    return found


@lean
def doubled(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Allocate."""
    return values * 2.0


@lean
def twice_total(values: NDArray[np.float64]) -> float:
    """Call another."""
    return 2.0 * total(values)


@lean
def weighed(value: float, weight: int, place: tuple[int, int]) -> float:
    """Use constants, and a tuple with one."""
    return value * weight + place[0] + place[1]


@lean
def both_weighed(value: float, index: int) -> float:
    """Call it with different constants."""
    return weighed(value, 2, (1, index)) + weighed(value, 3, (index, 2))


def test_constants_of_calls_are_compiled_once() -> None:
    """Asked for as numba asks; what compiled code of an earlier run calls is not compiled again."""
    assert both_weighed(10.0, 5) == 2 * 10 + 6 + 3 * 10 + 7
    widened = (types.float64, types.int64, types.UniTuple(types.int64, 2))
    for weight in (2, 3):
        place = types.Tuple((types.literal(weight), types.int64))
        given = (types.float64, types.literal(weight), place)
        _, _, arguments, _ = weighed.get_call_template(given, {})  # type: ignore[attr-defined]
        assert tuple(arguments) == widened
    assert list(weighed._part.overloads) == [widened]  # type: ignore[attr-defined]


def test_what_only_compiled_code_calls_becomes_part_of_it() -> None:
    """No machine code, wrapper or file of its own; Python may call it all the same."""
    every_second = np.arange(10.0)[::2]
    called = total.overloads  # type: ignore[attr-defined]
    before = len(called)
    assert twice_total(every_second) == 40.0
    assert len(called) == before
    assert total(every_second) == 20.0
    assert len(called) == before + 1


def test_refuses_to_allocate() -> None:
    """An array made without reference counts would never be freed."""
    with pytest.raises(numba.core.errors.NumbaError):
        doubled(np.arange(5.0))


def test_places_that_are_not_there_are_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Those that numba would count from the end, too; `make test-long` compiles everything so."""
    monkeypatch.setattr(numba.config, "BOUNDSCHECK", 1)
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))

    @lean
    def twice_at(values: NDArray[np.float64], place: int) -> float:
        return 2.0 * float(values[place])

    values = np.arange(5.0)
    assert twice_at(values, 3) == 6.0
    for place in (-1, 5):
        with pytest.raises(IndexError):
            twice_at(values, place)
    # What is compiled differently here is so here alone.
    assert numba.njit(lambda values: values[-1])(values) == 4.0


def test_no_kernel_counts_from_the_end() -> None:
    """Where bounds are not checked, ``row[-1]`` would be what stands before the row."""
    found = []
    for path in Path(optpipe_solver.__file__).parent.rglob("*.py"):
        for function in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(function, ast.FunctionDef):
                continue
            if not {ast.unparse(one) for one in function.decorator_list} & {"lean", "jitted"}:
                continue
            places = [one.slice for one in ast.walk(function) if isinstance(one, ast.Subscript)]
            found += [f"{path}: {ast.unparse(one)}" for one in places if from_end(one)]
    assert not found


def from_end(place: ast.expr) -> bool:
    """Whether a subscript has a negative constant in it, slices aside."""
    parts = place.elts if isinstance(place, ast.Tuple) else [place]
    return any(isinstance(one, ast.UnaryOp) and isinstance(one.op, ast.USub) for one in parts)
