"""What the command line shows: the same numbers, whoever found them; names, whatever they are.

The files that commands read and write: nothing is lost, and a wrong one is named in a line.
"""

import io
import json
import os
import stat
import sys
import unicodedata
from datetime import UTC, datetime
from pathlib import Path
from typing import cast

import pytest
from rich.console import Console
from rich.table import Table

from optpipe import (
    Provenance,
    Schedule,
    dump_problem,
    dump_schedule,
    evaluate,
    load_csv,
    load_schedule,
)
from optpipe.cli import console as reading
from optpipe.cli.console import (
    baseline_programs,
    check_outputs,
    gap_text,
    number_table,
    show_schedule,
    stderr,
    stdout,
    write_file,
)
from optpipe.cli.service import _follow_job
from optpipe.client import Client, Improvement, Job, JobOptions
from optpipe.errors import IllegalScheduleError, InputError, ScheduleMismatchError
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
    code, out, err = optpipe(command, path, write(tmp_path / "s\x1b[2J.csv", PLAIN))
    assert (code, controls(out + err)) == (0, set())
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
    [(None, "unknown"), (0.0, "0% (optimal)"), (1e-6, "0% (optimal)"), (2e-6, "0.0%"),
     (0.0123, "1.2%")],
)  # fmt: skip
def test_optimal_is_said_of_a_gap_of_a_millionth_and_no_more(gap, text) -> None:
    assert gap_text(gap) == text


def test_a_result_with_too_many_actions_ends_with_its_numbers(offloading, monkeypatch) -> None:
    """To draw it would take longer than many time limits: nothing is simulated."""
    monkeypatch.setattr("optpipe.cli.console.MAX_DRAWN", 7)
    monkeypatch.setattr("optpipe.cli.console.simulate", None)
    monkeypatch.setattr("optpipe.cli.console.ScheduleView", None)
    console = Console(file=io.StringIO(), width=100)
    baseline = baseline_programs(offloading.problem)
    show_schedule(console, offloading.problem, schedule_of(offloading), baseline)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "by hand: 8 actions are not drawn; use optpipe plot" in text
    assert any(row.startswith("makespan") for row in rows(text))


# What `submit --follow` prints of a job's progress.


def test_a_better_bound_leaves_the_schedule_standing(capsys) -> None:
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

    class OneLook:
        """A client that sees a job twice: its first two steps, and its end."""

        def follow(self, job: Job) -> list[Job]:
            return [job.model_copy(update={"trace": (job.trace or ())[:2]}), job]

    assert _follow_job(cast("Client", OneLook()), job) == job
    first, second, third = capsys.readouterr().err.splitlines()
    assert "no schedule yet" in first
    assert "120" in second
    assert "120" in third
    assert "90" in third


PROBLEM = make_small_problem(24)
QUICK = ("--time-limit", "5", "--threads", "1", "--method", "serial")


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch) -> Path:
    """A folder with a problem, a schedule of it, and tables; it is the current one."""
    monkeypatch.chdir(tmp_path)
    schedule = evaluate(PROBLEM, load_csv(PLAIN), Provenance(method="by hand"))
    texts = {
        "p.json": dump_problem(PROBLEM),
        "s.json": dump_schedule(schedule),
        "s.csv": PLAIN,
        "m.json": '{"format": "optpipe/model/v1"}',
        "times.csv": "stage,action,time_ms\n0,F,1\n0,B,2\n",
        "sizes.csv": "stage,activation_bytes\n0,5\n",
        "what.problem.json": dump_problem(PROBLEM),
        "trace.json": '{"traceEvents": []}',
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("solve p.json -o p.json", "p.json: this command reads it"),
        ("solve p.json -o ./../{here}/p.json", "p.json: this command reads it"),
        ("solve p.json --plot p.json", "p.json: this command reads it"),
        ("solve p.json -o x.json --plot x.json", "cannot write x.json twice"),
        ("solve p.json -o missing/s.json", "cannot write missing/s.json: there is no folder"),
        ("solve p.json -o .", "cannot write"),
        ("solve p.json --plot a.bmp", "use one of .png, .svg, .pdf, .html, .json"),
        ("plot p.json s.json -o a.htm", "cannot draw a.htm: the suffix chooses the format"),
        ("solve p.json -o x.svg", "cannot write a schedule to x.svg: .svg is for pictures"),
        ("solve p.json -o x.HTML", ".HTML is for pictures"),
        ("plot p.json s.json -o s.json", "s.json: this command reads it"),
        ("plot p.json s.json -o p.json", "p.json: this command reads it"),
        ("export p.json s.csv --to torch-csv -o s.csv", "s.csv: this command reads it"),
        ("sweep p.json -o p.json", "p.json: this command reads it"),
        ("submit p.json -o p.json", "p.json: this command reads it"),
        ("submit p.json -o x.png", ".png is for pictures"),
        ("fetch job -o x.pdf", ".pdf is for pictures"),
        ("estimate --config m.json --gpu h100 -o m.json", "m.json: this command reads it"),
        ("import csv times.csv -o times.csv", "times.csv: this command reads it"),
        ("import csv times.csv --sizes sizes.csv -o sizes.csv", "sizes.csv: this command reads"),
        ("import csv times.csv --base p.json --times-out p.json", "p.json: this command reads it"),
        ("import csv times.csv -o x --times-out x", "cannot write x twice"),
        ("explain what.problem.json s.json --what-if -o .", "what.problem.json is there"),
    ],
)
def test_no_output_takes_the_place_of_an_input_or_of_another(
    optpipe, files: Path, words: str, message: str
) -> None:
    """A slip of the keyboard may not cost the problem; it is found out before anything is done."""
    before = contents(files)
    code, out, err = optpipe(*words.format(here=files.name).split())
    assert (code, out) == (2, "")
    assert message in err.replace("\n", " ")
    assert contents(files) == before


def test_devices_and_pipes_may_stand_twice() -> None:
    """Nothing is lost in /dev/null, and standard input is not standard output."""
    check_outputs(Path("/dev/null"), Path("/dev/null"), None, inputs=[Path("/dev/null"), None])
    check_outputs(Path("-"), Path("x"), inputs=[Path("-")])
    with pytest.raises(InputError, match="cannot write - twice"):
        check_outputs(Path("-"), Path("-"))


def test_an_input_is_known_behind_a_link(files: Path) -> None:
    (files / "link.json").symlink_to("p.json")
    with pytest.raises(InputError, match="this command reads it"):
        check_outputs(Path("link.json"), inputs=[Path("p.json")])


def test_a_name_that_is_too_long_is_refused_before_the_work() -> None:
    """And without a stack trace: Path.exists raises what the system says."""
    with pytest.raises(InputError, match="File name too long; choose another name"):
        check_outputs(Path("x" * 300))


def test_a_file_is_replaced_as_a_whole(files: Path, monkeypatch) -> None:
    """Where writing fails half-way, what stood there stands, and the new text is kept elsewhere."""
    target, elsewhere = files / "s.json", files / "kept"
    elsewhere.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(elsewhere))
    before = target.read_bytes()

    def full(_path: Path, _target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(InputError, match=r"No space left on device; its text is in .*\.json"):
        write_file(target, "new")
    assert target.read_bytes() == before
    assert [path.read_text("utf-8") for path in elsewhere.iterdir()] == ["new"]
    assert not list(files.glob(".optpipe-*"))


def test_a_replaced_file_keeps_its_mode_and_its_link(files: Path) -> None:
    """Who may read it is not for a solve to change."""
    (files / "p.json").chmod(0o640)
    (files / "link.json").symlink_to("p.json")
    write_file(files / "link.json", "new")
    assert (files / "link.json").is_symlink()
    assert (files / "p.json").read_text("utf-8") == "new"
    assert stat.S_IMODE((files / "p.json").stat().st_mode) == 0o640


def test_what_is_no_plain_file_is_written_to_directly(files: Path) -> None:
    """A named pipe has a reader, whom a new file in its place would never reach."""
    os.mkfifo(files / "pipe")
    reader = os.open(files / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_file(files / "pipe", "text")
    assert os.read(reader, 100) == b"text"
    os.close(reader)


def test_a_schedule_is_not_lost_where_its_file_cannot_be_written(optpipe, files: Path) -> None:
    """A full disk after an hour of search: the message says where the schedule is."""
    code, _, err = optpipe("solve", "p.json", "-o", "/dev/full", *QUICK)
    assert code == 2
    assert kept(err).problem_hash == PROBLEM.problem_hash


def test_a_schedule_is_not_lost_where_its_picture_cannot_be_written(
    optpipe, files: Path, monkeypatch
) -> None:
    """Who asked for a picture alone has the search's result nowhere else."""

    def full(*_: object, **__: object) -> None:
        raise InputError("cannot write x.svg: No space left on device; check the path")

    monkeypatch.setattr(sys.modules["optpipe.cli.solve"], "draw_solved", full)
    code, _, err = optpipe("solve", "p.json", "--plot", "x.svg", *QUICK)
    assert (code, "cannot write x.svg: No space left" in err) == (2, True)
    assert kept(err).problem_hash == PROBLEM.problem_hash
    code, _, err = optpipe("solve", "p.json", "--plot", "x.svg", "-o", "o.json", *QUICK)
    assert (code, "its text is in" in err) == (2, False)
    assert load_schedule((files / "o.json").read_text("utf-8")).problem_hash


def kept(err: str) -> Schedule:
    """The schedule whose place a message names."""
    place = Path(err.replace("\n", "").partition("its text is in ")[2].partition(": move it")[0])
    schedule = load_schedule(place.read_text("utf-8"))
    place.unlink()
    return schedule


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("check s.json p.json", "s.json: format = 'optpipe/schedule/v1': this is a schedule"),
        ("check p.json p.json", "p.json: format = 'optpipe/problem/v1': this is a problem"),
        ("check p.json trace.json", "trace.json: this is no schedule: it has none of"),
        ("check p.json -", "- is for problems: schedules are read from files"),
        ("plan p.json", "p.json: format = 'optpipe/problem/v1': this is a problem, but a model"),
        ("estimate --config no.json --gpu h100", "error: cannot read no.json: No such file"),
        ("diff - -", "standard input is one problem; give the other as a file"),
        ("import csv times.csv --activation-bytes 1e400GiB", "'1e400GiB': is no finite size"),
    ],
)
def test_a_wrong_file_is_named_in_one_line(optpipe, words: str, message: str) -> None:
    """Not a line for each field that a file of another kind has or lacks."""
    code, _, err = optpipe(*words.split())
    assert code == 2
    assert message in err
    assert err.count("\n") == 1


def test_what_is_wrong_with_a_schedule_names_its_file(files: Path) -> None:
    """Of several that are drawn together, the reader must know which."""
    text = (files / "s.json").read_text("utf-8")
    (files / "other.json").write_text(text.replace(PROBLEM.problem_hash, "sha256:0"))
    with pytest.raises(ScheduleMismatchError, match=r"other\.json: the schedule was made for"):
        reading.read_programs(PROBLEM, Path("other.json"))
    (files / "bad.csv").write_text(PLAIN.replace("0I0,0W0", "0W0,0I0"))
    with pytest.raises(IllegalScheduleError, match=r"bad\.csv: illegal schedule") as caught:
        reading.read_programs(PROBLEM, Path("bad.csv"))
    assert caught.value.violations[0].code == "order"


def test_a_model_is_read_from_a_pipe(optpipe, monkeypatch) -> None:
    """As `optpipe estimate --model-json -o -` writes it."""
    monkeypatch.setattr(reading, "_read_stdin", lambda: '{"format": "optpipe/model/v1"}')
    code, _, err = optpipe("plan", "-")
    assert code == 2
    assert "layers: is missing" in err
