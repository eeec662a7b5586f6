"""What the command line shows: the same numbers, whoever found them; names, whatever they are."""

import io
import json
import unicodedata
from datetime import UTC, datetime

import pytest
from rich.console import Console
from rich.table import Table

from optpipe import Provenance, Schedule, dump_problem, evaluate
from optpipe.cli.console import (
    baseline_programs,
    gap_text,
    number_table,
    show_schedule,
    stderr,
    stdout,
    text_table,
)
from optpipe.cli.service import _Lines
from optpipe.client import Improvement, Job, JobOptions
from optpipe.simulate import simulate
from tests.building import offloadable, problem, programs, stage
from tests.cli.conftest import PLAIN, write
from tests.plot.conftest import make_small_problem
from tests.strategies import Case

# Sets the window's title, clears the screen, goes back to overwrite, and the same as one C1 code.
NAME = "mine\x1b]0;yours\x07\x1b[2J\rover\x9b2J\x7f"


@pytest.fixture
def terminal(monkeypatch) -> None:
    """Let consoles think that they write to a terminal, one without colours and styles."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")


def controls(text: str) -> set[str]:
    return {char for char in text if unicodedata.category(char) == "Cc"} - {"\n", "\t"}


@pytest.mark.parametrize("command", ["check", "plot", "explain"])
@pytest.mark.usefixtures("terminal")
def test_a_name_with_escape_codes_is_printed_as_text(tmp_path, optpipe, command) -> None:
    problem = make_small_problem(24).model_copy(update={"name": NAME})
    path = write(tmp_path / "p.json", dump_problem(problem))
    code, out, told = optpipe(command, path, write(tmp_path / "s\x1b[2J.csv", PLAIN))
    assert (code, controls(out + told)) == (0, set())
    # It shows names of schedules: those of their files.
    assert ("s\u241b[2J" in out) == (command == "plot")


@pytest.mark.parametrize("console", [stdout, stderr])
@pytest.mark.usefixtures("terminal")
def test_control_characters_are_seen_and_hide_nothing_beside_them(console, capsys) -> None:
    console().print(f"[bold]{NAME}[/bold]\tand\nmore", soft_wrap=True)
    table = Table("name", box=None, pad_edge=False)
    table.add_row("\x1b" * 4 + "abcdef")
    console().print(table)
    captured = capsys.readouterr()
    text = captured.out + captured.err
    assert controls(text) == set()
    assert text.startswith("mine\u241b]0;yours\u2407\u241b[2J\u240dover\ufffd2J\u2421")
    assert "and\nmore\n" in text
    assert "\u241b" * 4 + "abcdef" in text


def test_what_is_no_terminal_gets_what_is_there(capsys) -> None:
    """JSON that a program reads is not changed for the sake of an eye."""
    text = json.dumps({"name": "rack\x85A\x7f"}, ensure_ascii=False)
    stdout().out(text)
    assert capsys.readouterr().out == f"{text}\n"


def test_a_name_commands_no_terminal_at_the_end_of_a_pipe(capsys) -> None:
    """What people read is shown; a table in a log would else colour, clear or retitle."""
    stdout().print(NAME)
    assert not set(capsys.readouterr().out) & set("\x1b\x07\r\x9b\x7f")


def test_a_table_of_numbers_is_wider_than_the_console_before_one_is_cut(
    capsys, monkeypatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    table = text_table(*(f"number {index}" for index in range(5)), texts=("text",))
    table.add_row("a text of many words " * 9, *(["1,234,567.8 ms"] * 5))
    (console := stdout()).print(table)
    shown = capsys.readouterr().out
    assert shown.count("1,234,567.8 ms") == 5
    assert shown.count("words") == 9
    assert console.width == 40


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
    baseline = baseline_programs(case.problem)
    console.print(number_table(case.problem, case.programs, schedule, baseline))
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
    assert gap_text(gap) == text


def test_what_is_known_is_not_simulated_again(offloading, monkeypatch) -> None:
    asked = []

    def counted(given, programs):
        asked.append(programs)
        return simulate(given, programs)

    monkeypatch.setattr("optpipe.cli.console.simulate", counted)
    shown(offloading, schedule_of(offloading))
    assert asked == [baseline_programs(offloading.problem)]
    shown(offloading, None)
    assert offloading.programs in asked


def test_a_result_with_too_many_actions_ends_with_its_numbers(offloading, monkeypatch) -> None:
    """To draw it would take longer than many time limits: nothing is simulated."""
    monkeypatch.setattr("optpipe.cli.console.MOST_DRAWN", 7)
    monkeypatch.setattr("optpipe.cli.console.simulate", None)
    monkeypatch.setattr("optpipe.cli.console.ScheduleView", None)
    console = Console(file=io.StringIO(), width=100)
    baseline = baseline_programs(offloading.problem)
    show_schedule(console, offloading.problem, schedule_of(offloading), baseline)
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
