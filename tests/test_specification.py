"""docs/specification.md: its examples are true, and its sections are those that code cites."""

import re

import pytest

from optpipe import check_schedule, load_problem, load_schedule, simulate
from optpipe.schedule import parse_cell
from tests.docs_console import ROOT, blocks

PAGE = (ROOT / "docs" / "specification.md").read_text("utf-8")
PAIRED, V1, V2, SLICES, SCHEDULE = blocks(PAGE, "json")
SECTIONS = set(re.findall(r"^## (.+)$", PAGE, re.MULTILINE))


def test_both_formats_are_one_problem() -> None:
    """The v1 file and the v2 file have the hash that the schedule names; the slices are read."""
    v1, v2, slices = map(load_problem, (V1, V2, SLICES))
    assert v1.problem_hash == v2.problem_hash == load_schedule(SCHEDULE).problem_hash
    assert [one.sample for one in slices.microbatches] == [0, 0]
    assert [mode.name for mode in slices.stages[0].modes] == ["keep", "half offload", "mlp"]


def test_the_schedule_has_the_times_and_peaks_of_the_page() -> None:
    problem, schedule = load_problem(V1), load_schedule(SCHEDULE)
    check_schedule(problem, schedule)
    times = blocks(PAGE, "text")[1].splitlines()
    shown = [[cell.split()[:1] for cell in line.split(", ")] for line in times]
    assert [[parse_cell(text) for (text,) in row] for row in shown] == [
        [(action,) for action in program] for program in schedule.programs
    ]
    assert [
        [tuple(map(float, cell.split()[1:])) for cell in line.split(", ")] for line in times
    ] == [
        [(one.start, one.end) for one in row] for row in simulate(problem, schedule.programs).times
    ]
    said = re.findall(r"peak is ([\d,]+) bytes", PAGE)
    assert [int(number.replace(",", "")) for number in said] == list(schedule.peak_bytes)


def test_a_pair_hides_what_the_page_says() -> None:
    problem, (text, _) = load_problem(PAIRED), blocks(PAGE, "text")
    paired, apart = (
        simulate(problem, (sum(map(parse_cell, line.split()), start=()),)).makespan_ms
        for line in (text, re.sub(r"\((\w+);(\w+)\)OVERLAP_F_B", r"\1 \2", text))
    )
    said = re.search(
        r"takes (\d+) ms\. Without the pair, in the same order, it takes (\d+) ms", PAGE
    )
    assert said is not None
    assert (paired, apart) == (float(said[1]), float(said[2]))


@pytest.mark.parametrize("root", ["optpipe", "solver", "api", "tests", "benchmarks"])
def test_sections_that_code_cites_exist(root) -> None:
    """And nothing cites the design, which readers of the repository do not have."""
    texts = [path.read_text("utf-8") for path in (ROOT / root).rglob("*.py")]
    cited = {name for text in texts for name in re.findall(r'specification\.md, "(\w+)"', text)}
    assert cited <= SECTIONS
    assert cited or root in {"api", "benchmarks"}
    assert not [text for text in texts if "DESIGN" + " section" in text]
