"""docs/plot.md: every command and the Python in it run, in the order of the page."""

import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest

from tests.docs_console import ROOT, blocks

PAGE = (ROOT / "docs/plot.md").read_text("utf-8")


@pytest.fixture
def workplace(tmp_path, monkeypatch) -> Path:
    """A folder in which the page's paths lead into the repository, and new files do not."""
    for name in ("examples", "docs", "benchmarks"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    return Path(tmp_path)


@pytest.mark.extended
@pytest.mark.parametrize("block", blocks(PAGE, "sh"))
def test_commands_run_and_write_what_they_name(optpipe, workplace, block: str) -> None:
    for line in block.splitlines():
        program, *arguments = shlex.split(line)
        assert program == "optpipe"
        code, _, err = optpipe(*arguments)
        assert code == 0, (line, err)
        written = [value for flag, value in pairwise(arguments) if flag in {"-o", "--frontier"}]
        assert all((workplace / name).stat().st_size > 1000 for name in written)


def test_the_python_runs(workplace) -> None:
    (code,) = blocks(PAGE, "python")
    exec(compile(code, "docs/plot.md", "exec"), {})
    assert (workplace / "picture.svg").exists()
    assert (workplace / "chart.html").exists()


def test_the_page_shows_the_picture_of_the_project() -> None:
    named = re.findall(r"\]\((?!https?:)([^)#]+)\)", PAGE)
    assert "images/before-after.svg" in named
    assert [name for name in named if not (ROOT / "docs" / name).exists()] == []
