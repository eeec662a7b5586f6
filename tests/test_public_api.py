"""What users see of the Python API: errors of constructors, `help`, `repr` and notebooks."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis.vendor.pretty import pretty

import optpipe
from optpipe import InputError, Model, Problem, Schedule, Stage, evaluate, load_problem, simulate
from optpipe.explain import explain
from optpipe.problem import Context, Device, Host, LicensedPair, Link, Microbatch
from optpipe.requests import Request, SolveRequest
from optpipe.schedule import Provenance
from optpipe.stage import FrozenValue, Mode, StageLayers
from optpipe_solver import Result, SolveStatus, compare, solve
from optpipe_solver.families.classic import build_serial
from tests.building import problem, stage

VALUES = [Context, Device, Host, LicensedPair, Link, Microbatch, Mode, Model, Problem, Schedule,
          Stage, StageLayers]  # fmt: skip
EXAMPLE = Path(__file__).parents[1] / "examples" / "problems" / "tiny-gpt-pp4.json"


def every_subclass(kind: type[Any]) -> list[type[Any]]:
    """The public classes below one, all levels."""
    found = [one for part in kind.__subclasses__() for one in (part, *every_subclass(part))]
    return [one for one in found if one.__module__.startswith("optpipe")]


@pytest.mark.parametrize("kind", [*every_subclass(FrozenValue), *every_subclass(Request)])
def test_constructors_raise_our_error_and_name_the_field(kind: type[Any]) -> None:
    """Never pydantic's `ValidationError`."""
    with pytest.raises(InputError, match=r"is missing|unknown field") as caught:
        kind(no_such_field=1)
    assert caught.value.pointers


def test_a_fault_of_a_part_has_the_path_into_the_whole() -> None:
    with pytest.raises(InputError, match=r"stages\[0\]\.forward_ms = -1: must be >= 0") as caught:
        Problem(num_microbatches=1, devices=[{"memory_bytes": 1}], stages=[stage(f=-1)])
    assert caught.value.pointers == ("/stages/0/forward_ms",)
    with pytest.raises(InputError, match=r"problem"):
        SolveRequest(problem={"stages": 3})


@pytest.mark.parametrize("kind", VALUES)
def test_help_shows_every_field_and_no_other(kind: type[Any]) -> None:
    """Names have their units: the ends _ms, _bytes and _gb_per_s."""
    text = kind.__doc__ or ""
    parameters = re.search(r"Parameters\n    -+\n((?:    .*\n|\n)*)", f"{text}\n")
    if parameters is not None:
        headings = re.findall(r"^    (\S.*)$", parameters[1].partition("Raises")[0], re.MULTILINE)
        named = {name.strip("` ") for line in headings for name in line.split(",")}
        assert named <= {*kind.model_fields}
    missing = [name for name in kind.model_fields if not re.search(rf"\b{name}\b", text)]
    assert missing == []


def results() -> list[Any]:
    """One of each that a user gets."""
    one = problem([stage(0), stage(1)], m=4, name="n" * 200)
    schedule = evaluate(one, build_serial(one), Provenance(method="m" * 500))
    rows = compare(one, time_limit_s=0.2, should_stop=lambda: True)
    found = Result(SolveStatus.FEASIBLE, schedule, problem=one)
    lost = Result(SolveStatus.INFEASIBLE, None, message="no " * 500)
    programs = schedule.programs
    provenance = schedule.provenance
    return [
        *(schedule, found, lost, *rows, simulate(one, programs), explain(one, programs)),
        *(one, provenance.model_copy(update={"start_method": "s" * 99, "solver": "v" * 99})),
    ]


def test_the_repr_of_a_result_is_short() -> None:
    for result in results():
        assert len(repr(result)) < 200
        assert str(result) == repr(result)
        assert repr(result).startswith(type(result).__name__)
    assert repr(results()[0]).endswith("2 devices, 24 actions)")


def test_hypothesis_prints_a_whole_problem_as_the_example_that_failed() -> None:
    """It can be evaluated; the repr is short."""
    one = load_problem(EXAMPLE.read_text())
    names = {kind.__name__: kind for kind in every_subclass(FrozenValue)}
    assert eval(pretty(one), names) == one
    assert repr(one) == (
        f"Problem('{one.name}': 4 devices, 4 stages, {one.num_microbatches} micro-batches, "
        f"{one.problem_hash[:19]})"
    )


def test_a_notebook_shows_numbers_and_picture_without_a_network() -> None:
    """Of a schedule the numbers and its order, as it does not know the durations."""
    found = solve(problem([stage(0), stage(1)], m=4), time_limit_s=1.0)
    assert found.schedule is not None
    shown = found._repr_html_()
    assert f"{found.schedule.makespan_ms:.4g} ms" in shown
    assert shown.count("<svg") == shown.count("</svg>") == 1
    assert not re.search(r"<script|<link|src=|url\((?!#)", shown)
    assert "0F0 0F1" in found.schedule._repr_html_()
    lost = Result(SolveStatus.UNKNOWN, None, message="<too little time>")
    assert "&lt;too little time&gt;" in lost._repr_html_()


def test_what_draws_for_a_notebook_is_imported_when_it_draws() -> None:
    code = "import sys, json, optpipe_solver, optpipe; print(json.dumps([*sys.modules]))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"matplotlib", "bokeh", "IPython"} & {*json.loads(run.stdout)}


def test_the_reference_has_every_public_package() -> None:
    page = (Path(__file__).parents[1] / "docs" / "reference" / "python.md").read_text()
    for name in ("optpipe", "optpipe.planning", "optpipe_solver", "optpipe_solver.tune"):
        assert f".. automodule:: {name}\n" in page
    for name in re.findall(r":: (optpipe\.plot\.\S+)", page):
        module, _, member = name.rpartition(".")
        __import__(module)
        assert hasattr(sys.modules[module], member)
    assert optpipe.__all__
