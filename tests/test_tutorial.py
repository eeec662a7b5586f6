"""Tutorial and how-tos: their commands run, one after the other, and print what they say."""

import re
import subprocess

import pytest

from tests.docs_console import ROOT, blocks, make_workplace, mismatch, run_shell, run_step, steps

pytestmark = pytest.mark.long

DOCS = ROOT / "docs"
YOUR_CASE = (DOCS / "your-case.md").read_text("utf-8")
CASES = re.split(r"^## ", YOUR_CASE, flags=re.MULTILINE)[1:]
ALONE = {"tutorial.md", "your-case.md"}
PAGES = sorted(
    page
    for page in (*DOCS.glob("*.md"), *DOCS.glob("howto/*.md"))
    if steps(page.read_text("utf-8")) and page.name not in ALONE
)


# Fourteen programs, one after the other: 40 s of CPU time.
@pytest.mark.extended
@pytest.mark.timeout(480)
def test_the_tutorial_runs_as_it_stands(tmp_path) -> None:
    """From estimate to a run on torch; each command finds what the ones before it wrote."""
    folder = make_workplace(tmp_path)
    found = steps((DOCS / "tutorial.md").read_text("utf-8"))
    assert len(found) > 10
    for step in found:
        printed = run_step(step, folder, seconds=1)
        assert (wrong := mismatch(step, printed)) is None, f"{step.command}\n{wrong}\n{printed}"
    for name in ("schedule.json", "before-after.svg", "trace.json", "frontier.svg"):
        assert (folder / name).stat().st_size > 0


@pytest.mark.extended
@pytest.mark.timeout(480)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_runs_as_it_stands(page, tmp_path) -> None:
    """The how-tos, and each page with a command and its output."""
    folder = make_workplace(tmp_path, "tiny-gpt-pp4.json")
    for name in ("examples", "benchmarks"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "batch.json").write_text("[8192, [6000, 2000], [512, 512, 7168]]")
    for step in steps(page.read_text("utf-8")):
        printed = run_step(step, folder, seconds=1)
        assert (wrong := mismatch(step, printed)) is None, f"{step.command}\n{wrong}\n{printed}"


# Searches have the time that the page gives them: what is found first is shown.
@pytest.mark.extended
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.partition("\n")[0])
def test_each_case_prints_what_it_says(case: str, tmp_path) -> None:
    """In a folder with the files that the page names."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (copies,) = blocks(YOUR_CASE, "sh")
    subprocess.run(["bash", "-euc", copies], cwd=tmp_path, check=True)
    folder = make_workplace(tmp_path / "cases")
    found = steps(case)
    assert found
    for step in found:
        if "--time-limit 120" in step.command:
            printed = run_step(step, folder, seconds=1)
        else:
            printed = run_shell(step.command, folder)
        assert (wrong := mismatch(step, printed)) is None, f"{step.command}\n{wrong}\n{printed}"


def test_no_command_is_shown_with_its_output_and_not_run() -> None:
    """A prompt means: this block is run, and compared. So its language is ``console``."""
    for page in (*DOCS.glob("*.md"), *DOCS.glob("howto/*.md"), ROOT / "README.md"):
        text = page.read_text("utf-8")
        prompts = re.findall(r"^\$ ", text, re.MULTILINE)
        assert len(prompts) == len(steps(text)), page.name
    assert {"estimate.md", "measurements.md", "profile.md", "solve.md"} <= {p.name for p in PAGES}


def test_there_are_ten_cases() -> None:
    assert len(CASES) == 10


def test_a_line_that_was_not_printed_is_found() -> None:
    """The comparison sees words and order, and not numbers."""
    (step,) = steps("```console\n$ tell\nmakespan  1,234.5 ms\n...\ngap 0.1%\n```\n")
    assert mismatch(step, "makespan 9 ms\nbubble 3\ngap 12%\n") is None
    assert mismatch(step, "gap 12%\nmakespan 9 ms\n") == "gap 0.1%"
    assert mismatch(step, "span 9 ms\ngap 1%\n") == "makespan  1,234.5 ms"


def test_numbers_of_commands_without_a_search_are_compared() -> None:
    """So a page with an estimate of an older model of time fails."""
    (step,) = steps(
        "```console\n$ optpipe bound problem.json\nmakespan >= 2,258.4 ms   proven\n```\n"
    )
    assert mismatch(step, "makespan >= 2,258.4 ms proven\n") is None
    assert mismatch(step, "makespan >= 2,258.5 ms proven\n") is not None
    (step,) = steps("```console\n$ optpipe tune\ntoday: TP 2  17.5\nTP 4  15.0\n```\n")
    assert mismatch(step, "today: TP 2 17.5\nTP 4 14.0\n") is None
    assert mismatch(step, "today: TP 2 17.6\nTP 4 15.0\n") is not None
