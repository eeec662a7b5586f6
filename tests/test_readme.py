"""The README's claims: its code and commands run, its files exist, its picture is current."""

import re
import shlex
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from optpipe import check_schedule, load_problem, load_schedule
from optpipe.cli import main
from tests.docs_console import (
    ROOT,
    blocks,
    make_workplace,
    mismatch,
    run_shell,
    run_step,
    steps,
)

pytestmark = pytest.mark.long

README = (ROOT / "README.md").read_text("utf-8")
IMAGES = ROOT / "docs" / "images"


def shortened(language: str) -> list[str]:
    """The fenced blocks of one language, with searches shortened to a second."""
    limit = r"(time_limit_s=|time_limit_s\": |--time-limit )\d+"
    return [re.sub(limit, r"\g<1>1", block) for block in blocks(README, language)]


def without_numbers(text: str) -> str:
    """The words of a text, each number as ``#``: how far a search comes is a matter of time."""
    return re.sub(r"[\d,.]*\d", "#", " ".join(text.split()))


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    """A folder that looks like a clone to the README's commands, and takes what they write."""
    make_workplace(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return tmp_path


def run(command: str, folder: Path) -> str:
    """Run a command line; returns its standard output, and leaves its errors in ``errors.txt``."""
    return run_shell(f"exec 2> errors.txt\n{command}", folder, PYTHONWARNINGS="error")


def test_the_python_block_runs_as_it_stands(workplace) -> None:
    (block,) = shortened("python")
    assert len(block.splitlines()) <= 12
    assert " ms" in run(f"python -c {shlex.quote(block)}", workplace)


def test_the_shell_commands_run_as_they_stand(workplace, monkeypatch, capsys) -> None:
    """The first through a shell, with the output shown; the others in this process."""
    (first,) = steps(README)
    assert (wrong := mismatch(first, printed := run_step(first, workplace))) is None, (
        f"{wrong}\n{printed}"
    )
    for number in re.findall(r"[\d,]+\.\d (?=ms|GiB)", "\n".join(first.shown)):
        assert number in printed
    monkeypatch.chdir(workplace)
    for line in next(x for x in shortened("sh") if "optpipe check" in x).splitlines():
        program, *words = shlex.split(line, comments=True)
        assert program == "optpipe"
        assert not re.search(r"[|&;<>()$`*?~{}\\]", " ".join(words)), "a shell reads more there"
        with pytest.raises(SystemExit) as end:
            main(words)
        assert not end.value.code, line
    assert "legal" in capsys.readouterr().out


@pytest.mark.extended
def test_from_a_name_to_a_picture_with_the_numbers_it_says(workplace) -> None:
    (block,) = (block for block in shortened("sh") if "optpipe estimate" in block)
    install, command = block.split("\n", 1)
    assert install == "pip install '.[server,plot]'"
    command = command.replace("--time-limit 1", "--time-limit 45")
    out = run(command, workplace)
    assert "(optimal)" in out
    # What people run, and ours next to it, on the cut that suits them.
    cut = command.replace("-o -", "--chunks 5 -o -").split("|")[0].rstrip("\\ \n")
    compare = f"{cut} | optpipe compare - --time-limit 5"
    out += run(compare, workplace)
    said = re.findall(r"\b[89],\d{3}\.\d(?= ms)", README.replace("\n", " "))
    assert len(said) == 4
    assert [number for number in said if number not in out] == []
    assert "Bokeh" in (workplace / "llama3-70b.html").read_text("utf-8")


@pytest.mark.extended
def test_the_published_run_is_tuned_with_the_gain_it_says(workplace) -> None:
    """Within a point: how long the plan MILP may look is a matter of time."""
    (block,) = (block for block in shortened("sh") if "optpipe tune" in block)
    out = run(block, workplace)
    page = (ROOT / "docs" / "tune.md").read_text("utf-8")
    assert block in page
    (change,) = re.findall(r"`(Change .*?)`", page)
    (certificate,) = re.findall(r"((?:^> .*\n)+)\n\*Within this model\*", page, re.MULTILINE)
    for quote in (change.partition("even")[0], certificate.replace("> ", "")):
        assert without_numbers(quote) in without_numbers(out)
    (gain,) = re.findall(r"(\d+\.\d)% less time per step", out)
    (said,) = re.findall(r"(\d+\.\d)% less time per step", README)
    assert abs(float(gain) - float(said)) <= 1.0
    assert "--pipeline-model-parallel-layout" in (workplace / "arguments.sh").read_text()


def test_every_file_the_readme_names_is_there() -> None:
    named = set(re.findall(r"\]\((?!https?://)([^)#]+)\)", README))
    assert len(named) >= 5
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_make_targets_of_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    for target in set(re.findall(r"make ([a-z]+)", README)):
        assert f"\n{target}:" in makefile


def test_the_picture_is_what_its_command_draws_now(tmp_path) -> None:
    target = tmp_path / "now.svg"
    problem = ROOT / "examples/problems/llama3-8b-h100-pp4.json"
    schedule = IMAGES / "before-after.schedule.json"
    with pytest.raises(SystemExit):
        main(["plot", str(problem), str(schedule), "--beside", "1f1b", "-o", str(target)])
    assert texts(target) == texts(IMAGES / "before-after.svg")


def test_the_numbers_under_the_picture_are_those_of_its_schedule() -> None:
    problem = load_problem((ROOT / "examples/problems/llama3-8b-h100-pp4.json").read_text())
    schedule = load_schedule((IMAGES / "before-after.schedule.json").read_text())
    check_schedule(problem, schedule)
    assert schedule.gap is not None
    assert f"{schedule.makespan_ms:,.0f} ms" in README
    assert f"{schedule.bound_ms:,.0f} ms" in README
    assert f"{100 * schedule.gap:.1f}%" in README


def texts(path: Path) -> list[str]:
    return [text.strip() for node in ET.parse(path).iter() if (text := node.text) and text.strip()]
