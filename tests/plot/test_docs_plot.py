"""docs/plot.md: every command and the Python in it run, in the order of the page."""

import re
from pathlib import Path

import pytest

from tests.docs_console import ROOT, blocks, make_workplace, run_shell

PAGE = (ROOT / "docs/plot.md").read_text("utf-8")


@pytest.fixture
def workplace(tmp_path, monkeypatch) -> Path:
    """A folder in which the page's paths lead into the repository, and new files do not."""
    for name in ("examples", "docs", "benchmarks"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    return make_workplace(tmp_path)


@pytest.mark.extended
@pytest.mark.parametrize("block", blocks(PAGE, "sh"))
def test_commands_run_and_write_what_they_name(workplace, block: str) -> None:
    run_shell(block, workplace)
    for name in re.findall(r"(?:-o|--frontier) (\S+)", block):
        assert (workplace / name).stat().st_size > 1000


def test_the_python_runs(workplace) -> None:
    (code,) = blocks(PAGE, "python")
    exec(compile(code, "docs/plot.md", "exec"), {})
    assert (workplace / "picture.svg").exists()
    assert (workplace / "chart.html").exists()
