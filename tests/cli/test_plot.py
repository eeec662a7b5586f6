"""``optpipe plot``: every format, and every refusal with what works instead."""

from __future__ import annotations

import json

import pytest

from optpipe import dump_csv, dump_problem
from optpipe.plot import scene
from tests.plot.conftest import make_small_problem, make_small_programs


@pytest.fixture
def files(tmp_path):
    """A problem, and two schedules of it as CSV."""
    problem = tmp_path / "problem.json"
    problem.write_text(dump_problem(make_small_problem()), "utf-8")
    plain = "0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1F1,1I1,1W0,1W1\n"
    (tmp_path / "before.csv").write_text(plain, "utf-8")
    (tmp_path / "after.csv").write_text(dump_csv(make_small_programs()), "utf-8")
    return problem, tmp_path / "before.csv", tmp_path / "after.csv"


def test_html_holds_every_schedule(optpipe, files, tmp_path) -> None:
    """Named after their files, on one page."""
    assert optpipe("plot", *files, "-o", tmp_path / "a.html")[0] == 0
    page = (tmp_path / "a.html").read_text("utf-8")
    assert "before: makespan 13 ms" in page
    assert "after: makespan 13 ms" in page
    assert '<meta name="color-scheme" content="light">' in page


def test_dark_is_another_page(optpipe, files, tmp_path) -> None:
    """Only an HTML file has a page to be dark."""
    assert optpipe("plot", *files, "--dark", "-o", tmp_path / "a.html")[0] == 0
    assert 'content="dark"' in (tmp_path / "a.html").read_text("utf-8")
    code, _, err = optpipe("plot", *files, "--dark", "-o", tmp_path / "a.svg")
    assert code == 2
    assert "--dark is for .html files" in err
    assert not (tmp_path / "a.svg").exists()
    assert optpipe("plot", *files, "--dark")[0] == 2


def test_a_trace_holds_one_schedule(optpipe, files, tmp_path) -> None:
    """Two would be two files."""
    assert optpipe("plot", *files[:2], "-o", tmp_path / "a.json")[0] == 0
    assert json.loads((tmp_path / "a.json").read_text("utf-8"))["traceEvents"]
    code, _, err = optpipe("plot", *files, "-o", tmp_path / "b.json")
    assert code == 2
    assert "one schedule, not 2" in err


@pytest.mark.parametrize("name", ["a.bmp", "a", "a.htm"])
def test_an_unknown_suffix_names_those_that_work(optpipe, files, tmp_path, name: str) -> None:
    """The suffix chooses the format."""
    code, _, err = optpipe("plot", *files, "-o", tmp_path / name)
    assert code == 2
    assert ".png, .svg, .pdf, .html, .json" in err.replace("\n", " ")


def test_without_bokeh_the_pip_command_is_named(optpipe, files, tmp_path, monkeypatch) -> None:
    """A bare install draws in the terminal only."""
    monkeypatch.setattr(scene, "find_spec", lambda name: None)
    code, _, err = optpipe("plot", *files, "-o", tmp_path / "a.html")
    assert code == 1
    assert "pip install 'optpipe[plot]'" in err
