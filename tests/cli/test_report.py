"""What the command line shows of a schedule: the same numbers, whoever found them."""

import io
from datetime import UTC, datetime

import pytest
from rich.console import Console

from optpipe import Provenance, Schedule, evaluate
from optpipe.cli import report
from optpipe.cli.service import _Lines
from optpipe.client import Improvement, Job, JobOptions
from optpipe.simulate import simulate
from tests.building import offloadable, problem, programs, stage
from tests.strategies import Case


@pytest.fixture
def offloading() -> Case:
    """Something to say in every row of the table, bytes on the host included."""
    given = problem([offloadable(0), stage(1)], m=1)
    far = "0F0 0OFFLOAD0 0RELEASE0 0RELOAD0 0I0 0W0"
    return Case(given, programs(far, "1F0 1B0"))


def schedule_of(case: Case) -> Schedule:
    return evaluate(case.problem, case.programs, Provenance(method="by hand"), bound_ms=1.0)


def shown(case: Case, schedule: Schedule | None) -> str:
    console = Console(file=io.StringIO(), width=100)
    baseline = report.baseline_programs(case.problem)
    console.print(report.number_table(case.problem, case.programs, schedule, baseline))
    text = console.file
    assert isinstance(text, io.StringIO)
    return text.getvalue()


def rows(text: str) -> set[str]:
    """The lines of the table, those of the proof aside."""
    first = ("makespan", "span", "bubble", "peak", "offloaded")
    lines = {" ".join(line.split()) for line in text.splitlines()}
    return {line for line in lines if line.startswith(first)}


def test_a_schedule_says_what_its_programs_cost(offloading) -> None:
    assert any(row.startswith("peak memory of host") for row in rows(shown(offloading, None)))
    assert rows(shown(offloading, schedule_of(offloading))) == rows(shown(offloading, None))


@pytest.mark.parametrize(
    ("gap", "text"),
    [(None, "unknown"), (0.0, "0 % (optimal)"), (1e-6, "0 % (optimal)"), (2e-6, "0.0 %"),
     (0.0123, "1.2 %")],
)  # fmt: skip
def test_optimal_is_said_of_a_gap_of_a_millionth_and_no_more(gap, text) -> None:
    assert report.gap_text(gap) == text


def test_what_is_known_is_not_simulated_again(offloading, monkeypatch) -> None:
    asked = []

    def counted(given, programs):
        asked.append(programs)
        return simulate(given, programs)

    monkeypatch.setattr(report, "simulate", counted)
    shown(offloading, schedule_of(offloading))
    assert asked == [report.baseline_programs(offloading.problem)]
    shown(offloading, None)
    assert offloading.programs in asked


def test_a_result_with_too_many_actions_ends_with_its_numbers(offloading, monkeypatch) -> None:
    """To draw it would take longer than many time limits: nothing is simulated."""
    monkeypatch.setattr(report, "MOST_DRAWN", 7)
    monkeypatch.setattr(report, "simulate", None)
    monkeypatch.setattr(report, "ScheduleView", None)
    console = Console(file=io.StringIO(), width=100)
    baseline = report.baseline_programs(offloading.problem)
    report.show_schedule(console, offloading.problem, schedule_of(offloading), baseline)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "by hand: 8 actions are not drawn; optpipe plot does it" in text
    assert any(row.startswith("makespan") for row in rows(text))


# What `submit --follow` prints of a job's progress.


def test_a_better_bound_leaves_the_schedule_standing() -> None:
    """The service tells a bound without a length; that is not the lack of a schedule."""
    job = Job(
        id="a",
        state="running",
        has_schedule=True,
        problem_hash="sha256:0",
        objective="makespan",
        options=JobOptions(time_limit_s=60.0),
        created_at=datetime(2026, 1, 31, tzinfo=UTC),
        trace=(
            Improvement(seconds=0.0, method="energy", bound_ms=80.0),
            Improvement(seconds=0.1, method="1f1b", objective_ms=120.0, bound_ms=80.0),
            Improvement(seconds=0.2, method="milp", bound_ms=90.0),
        ),
    )
    text = io.StringIO()
    _Lines(Console(file=text, width=100)).show(job)
    first, second, third = text.getvalue().splitlines()
    assert "no schedule yet" in first
    assert "120" in second
    assert "120" in third
    assert "90" in third
