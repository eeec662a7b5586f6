"""``optpipe plot``: every format, and every refusal with what works instead."""

import json

import pytest

from optpipe.errors import install_command
from optpipe.plot import scene
from tests.cli.conftest import LEGAL, PLAIN, write


@pytest.fixture
def files(problem_file, tmp_path):
    before, after = tmp_path / "before.csv", tmp_path / "after.csv"
    return problem_file, write(before, PLAIN), write(after, LEGAL)


def test_html_holds_every_schedule(optpipe, files, tmp_path) -> None:
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
    assert optpipe("plot", *files[:2], "-o", tmp_path / "a.json")[0] == 0
    assert json.loads((tmp_path / "a.json").read_text("utf-8"))["traceEvents"]
    code, _, err = optpipe("plot", *files, "-o", tmp_path / "b.json")
    assert code == 2
    assert "one schedule, not 2" in err


def test_without_bokeh_the_pip_command_is_named(optpipe, files, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(scene, "find_spec", lambda name: None)
    code, _, err = optpipe("plot", *files, "-o", tmp_path / "a.html")
    assert code == 1
    assert install_command("plot") in err
