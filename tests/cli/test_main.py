"""The command line: exit codes, messages without stack traces, and what it loads."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest

import optpipe as optpipe_package
from optpipe import Provenance, dump_csv, dump_problem, load_csv, load_schedule
from optpipe.errors import install_command
from optpipe.evaluate import evaluate
from optpipe_solver import Result, SolveStatus
from tests.building import UNIT, bus, document, offloadable, problem, programs, stage
from tests.cli.conftest import LEGAL, write
from tests.plot.conftest import make_small_problem

SWAPPED = LEGAL.replace("0I0,0W0", "0W0,0I0")
COMMANDS = [
    "tune", "solve", "check", "bound", "compare", "sweep", "plan", "plot", "explain", "diff",
    "export", "import", "profile", "serve", "submit", "fetch", "jobs", "keys",
]  # fmt: skip
LIGHT = """
import sys
from optpipe.cli import main
for words in (["--help"], ["explain", *sys.argv[1:]], ["diff", *sys.argv[2:] * 2]):
    try:
        main(words)
    except SystemExit as leave:
        assert not leave.code, leave.code
print(*sys.modules, file=sys.stderr)
"""
HEAVY = ["torch", "pulp", "highspy", "numba", "scipy", "fastapi", "sqlalchemy", "matplotlib",
         "bokeh", "optpipe_solver"]  # fmt: skip


def test_help_lists_every_command(optpipe) -> None:
    done = optpipe("--help")
    assert done.code == 0
    for command in COMMANDS:
        assert f"\n  {command} " in done.out
    headings = [line for line in done.out.splitlines() if line.endswith(":")]
    assert headings[-5:] == ["Estimate:", "Solve:", "Inspect:", "Export:", "Serve:"]
    listed = done.out.partition("\nEstimate:")[2]
    assert "..." not in listed, "a sentence is too long for a terminal of 80 columns"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command_has_an_example(optpipe, command: str) -> None:
    done = optpipe(command, "--help")
    assert done.code == 0
    assert f"\n    optpipe {command}" in done.out


def test_a_command_without_arguments_shows_its_first_example(optpipe) -> None:
    done = optpipe("tune")
    assert done.code == 2
    example = "optpipe tune --model llama3-8b --gpu h100 --gpus 8 --sequence 8192"
    assert f"error: --gpu: is missing; give it\nfor example: {example}\n" in done.err
    assert "for example" not in optpipe("tune", "--gpus", "8").err


@pytest.mark.parametrize(
    ("words", "takers", "example"),
    [
        ("jobs --url http://a:1 list", "list, cancel, resume", "jobs list --url"),
        ("jobs --state=queued list", "list", "jobs list --state"),
        ("keys --database-url x list", "create, list, rotate, revoke", "keys create"),
    ],
)
def test_an_option_in_front_of_its_command_is_sent_behind_it(
    optpipe, words: str, takers: str, example: str
) -> None:
    done = optpipe(*words.split())
    assert done.code == 2
    assert f"is an option of {takers}; give it after the command: optpipe {example}" in done.err


def test_help_explain_and_diff_load_neither_solver_nor_torch_nor_server(
    problem_file, csv_file
) -> None:
    """Nor does `import optpipe`, which they begin with."""
    command = [sys.executable, "-c", LIGHT, str(problem_file), str(csv_file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not set(HEAVY) & set(done.stderr.split())


def test_check_accepts_a_legal_schedule_as_json_and_as_csv(
    optpipe, problem_file, schedule_file, tmp_path
) -> None:
    for path in (schedule_file, write(tmp_path / "s.csv", LEGAL), write(tmp_path / "s", LEGAL)):
        done = optpipe("check", problem_file, path)
        assert done.code == 0, done.err
        assert done.out.startswith("legal\n")
        assert "13 ms" in done.out
        assert "16 B of 16 B" in done.out


def test_check_prints_an_illegal_grid_with_the_cell_marked(optpipe, problem_file, tmp_path) -> None:
    done = optpipe("check", problem_file, write(tmp_path / "s.csv", SWAPPED))
    assert done.code == 2
    assert ">>0W0<<" in done.err
    assert "must come after it" in done.err
    assert "device 1 |" in done.err
    assert done.out == ""


@pytest.mark.parametrize("command", ["solve", "bound", "compare", "submit"])
def test_a_bad_problem_is_exit_code_2_with_the_file_and_the_reason(
    optpipe, tmp_path, command: str
) -> None:
    """Every command reads with the same function."""
    text = dump_problem(make_small_problem())[:-30]
    done = optpipe(command, write(tmp_path / "bad.json", text))
    assert done.code == 2
    assert "bad.json" in done.err
    assert "is the file complete?" in done.err
    assert "Traceback" not in done.err


def test_solve_writes_a_schedule_that_check_accepts(optpipe, problem_file, tmp_path) -> None:
    target = tmp_path / "found.json"
    done = optpipe("solve", problem_file, "-o", target, "--time-limit", 5)
    assert done.code == 0, done.err
    found = load_schedule(target.read_text())
    assert found.makespan_ms <= 13
    assert "proven bound" in done.out
    assert "1F1B" in done.out
    assert " ms " in done.err
    assert optpipe("check", problem_file, target).code == 0
    table = tmp_path / "found.csv"
    assert optpipe("solve", problem_file, "-o", table, "--method", "greedy").code == 0
    assert dump_csv(load_csv(table.read_text())) == table.read_text()


@pytest.mark.parametrize(
    ("memory_bytes", "more"), [(32, "; keeping all activations would fit too"), (25, "")]
)
def test_solve_says_by_how_much_its_last_step_lowered_the_peaks(
    optpipe, monkeypatch, tmp_path, memory_bytes: int, more: str
) -> None:
    """And whether keeping everything would fit, where something is not kept."""
    given = problem([offloadable()], [bus(memory_bytes=memory_bytes * UNIT)], m=3)
    path = write(tmp_path / "problem.json", dump_problem(given))
    row = "0F0 0OFFLOAD0 0F1 0RELEASE0 0F2 0B2 0B1 0RELOAD0 0B0"
    found = evaluate(given, programs(row), Provenance(method="given"))
    assert found.peak_bytes == (20 * UNIT,)
    result = Result(SolveStatus.FEASIBLE, found, peak_bytes_before=(30 * UNIT,))
    monkeypatch.setattr("optpipe_solver.solve", lambda *_, **__: result)
    said = f"same time with lower peaks: gpu0 holds 19.1 MiB instead of 28.6 MiB{more}\n"
    assert said in optpipe("solve", path).out
    result = replace(result, peak_bytes_before=())
    assert "lower peaks" not in optpipe("solve", path).out


def test_solve_says_which_link_could_not_deliver_what_it_calls_optimal(optpipe, tmp_path) -> None:
    """In v1 messages pass each other; of the same problem in v2 all is true, and nothing said."""
    stages = [stage(0, output_bytes=100_000_000), stage(1)]
    link = {"from": 0, "to": 1, "bandwidth_gb_per_s": 10.0}
    for number in (1, 2):
        given = document(stages, m=8, links=[link], format=f"optpipe/problem/v{number}")
        path = write(tmp_path / f"v{number}.json", json.dumps(given))
        done = optpipe("solve", path, "--work-limit", 1)
        assert done.code == 0, done.err
        assert ("warning: link 0 -> 1 is busy for 80.0 ms" in done.err) is (number == 1)


def test_a_robust_solve_says_what_was_ranked_and_what_is_proven(optpipe, problem_file) -> None:
    options = ["--robust", "P95", "--jitter", 0.2, "--stragglers", 0.3, "--work-limit", 0.2]
    done = optpipe("solve", problem_file, *options)
    assert done.code == 0, done.err
    assert "P95 under noise (actions +-20%, devices +-30%): " in done.out
    assert "Bound and gap are those without noise" in done.out
    assert "proven bound" in done.out
    assert "write P90" in optpipe("solve", problem_file, "--robust", "90").err


def test_a_restricted_solve_makes_a_schedule_of_the_whole_problem(optpipe, tmp_path) -> None:
    """15 ms with offload: what is proven without it is said, and is no bound of the problem."""
    problem_file = write(tmp_path / "problem.json", dump_problem(make_small_problem(15)))
    target = tmp_path / "found.json"
    limits = ("--work-limit", 2, "--time-limit", 60)
    done = optpipe("solve", problem_file, "--no-offload", "--no-recompute", *limits, "-o", target)
    assert done.code == 0, done.err
    found = load_schedule(target.read_text())
    assert "OFFLOAD" not in dump_csv(found.programs)
    assert found.bound_ms is not None
    assert found.bound_ms <= 15 < found.makespan_ms
    assert (found.status, found.stopped_by) == ("feasible", "gap")
    assert {entry.bound_ms for entry in found.provenance.trace} == {None}
    proven = f"among schedules without offload and recompute: bound {found.makespan_ms:g} ms"
    assert proven in done.out
    assert proven in str(found.provenance.bound_method)
    assert optpipe("check", problem_file, target).code == 0


def test_another_objective_is_another_problem(optpipe, problem_file, tmp_path) -> None:
    target = tmp_path / "found.json"
    options = ("--objective", "span", "--method", "greedy")
    done = optpipe("solve", problem_file, *options, "-o", target)
    assert done.code == 0, done.err
    found = load_schedule(target.read_text())
    other = make_small_problem().model_copy(update={"objective": "span"})
    assert (found.objective, found.problem_hash) == ("span", other.problem_hash)
    assert f"the file has makespan, so this is another problem, {found.problem_hash}" in done.err
    assert optpipe("check", problem_file, target).code == 2


def test_solve_of_an_infeasible_problem_is_exit_code_3_with_the_smallest_memory(
    optpipe, tmp_path
) -> None:
    path = write(tmp_path / "tight.json", dump_problem(make_small_problem(memory_bytes=9)))
    done = optpipe("solve", path)
    assert done.code == 3
    assert "devices[0].memory_bytes must be at least 10" in done.err
    assert optpipe("bound", path).code == 3


def test_solve_says_that_ctrl_c_ended_it(optpipe, problem_file, tmp_path, monkeypatch) -> None:
    """The best schedule so far is written, and the exit code is 0 as at a time limit."""
    import optpipe_solver

    solve = optpipe_solver.solve

    def stopped(problem, **options):
        os.kill(os.getpid(), signal.SIGINT)
        assert options["should_stop"]()
        return solve(problem, **options)

    monkeypatch.setattr(optpipe_solver, "solve", stopped)
    done = optpipe("solve", problem_file, "-o", tmp_path / "schedule.json")
    assert done.code == 0, done.err
    assert "stopped by Ctrl-C" in done.err
    assert (tmp_path / "schedule.json").exists()


def test_solve_that_finds_nothing_is_exit_code_4(optpipe, problem_file, monkeypatch) -> None:
    import optpipe_solver
    from optpipe_solver import Result, SolveStatus

    limits_s: list[float] = []

    def solve(*_: object, time_limit_s: float, **__: object) -> Result:
        limits_s.append(time_limit_s)
        return Result(SolveStatus.UNKNOWN, None, message="no time")

    monkeypatch.setattr(optpipe_solver, "solve", solve)
    done = optpipe("solve", problem_file)
    assert done.code == 4
    assert "no time" in done.err
    # What came before the search is taken off, at most half of the limit.
    assert 30 <= limits_s[0] < 60
    optpipe("solve", problem_file, "--time-limit", 0.02)
    assert 0.01 <= limits_s[1] < 0.02


def test_a_chunked_problem_is_drawn_below_interleaved_1f1b(optpipe, tmp_path) -> None:
    """A method that the placement rules out, or that there is not, is refused with a reason."""
    chunked, found = tmp_path / "chunked.json", tmp_path / "found.json"
    chunked.write_text(json.dumps(document([stage(0), stage(1), stage(0), stage(1)], m=4)))
    done = optpipe("solve", chunked, "--time-limit", 1, "-o", found)
    assert done.code == 0, done.err
    done = optpipe("plot", chunked, found, "--beside", "interleaved")
    assert done.code == 0, done.err
    assert done.out.startswith("Interleaved 1F1B  makespan")
    done = optpipe("plot", chunked, found, "--beside", "zb-v")
    assert done.code == 2
    assert "this rule is for a V placement" in done.err
    done = optpipe("plot", chunked, found, "--beside", "interleave")
    assert done.code == 2
    assert "must be one of serial, gpipe, 1f1b" in done.err


def test_nobody_at_the_address_is_exit_code_1(optpipe, problem_file) -> None:
    done = optpipe("submit", problem_file, "--url", "http://127.0.0.1:9")
    assert done.code == 1
    assert "127.0.0.1:9" in done.err
    assert "Traceback" not in done.err


def test_a_closed_pipe_does_not_cost_the_schedule(problem_file, tmp_path) -> None:
    target = tmp_path / "found.json"
    arguments = ["solve", str(problem_file), "-o", str(target), "--method", "greedy"]
    code = f"from optpipe.cli import main; main({arguments!r})"
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as closed:
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=closed, stderr=subprocess.PIPE, check=False
        )
    assert load_schedule(target.read_text()).problem_hash == make_small_problem().problem_hash
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize("words", [["plot"], ["export", "--to", "python"], ["--version"]])
def test_a_full_disk_is_one_sentence(problem_file, csv_file, words: list[str]) -> None:
    """Whether rich prints, Python's buffer is full, or it is written at the end."""
    files = [] if words == ["--version"] else [str(problem_file), str(csv_file)]
    command = [sys.executable, "-m", "optpipe.cli", *words, *files]
    environment = {name: os.environ[name] for name in os.environ if name != "PYTHONUNBUFFERED"}
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, env=environment, text=True, check=False
        )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: cannot write the output: No space left on device; make")


def test_it_leaves_without_waiting_for_what_a_solve_has_left_behind() -> None:
    """A thread of a solve can be inside a family for seconds; what was printed is not lost."""
    code = (
        "import sys, threading\nfrom optpipe.cli import main\n"
        "threading.Thread(target=threading.Event().wait, name='solve-1').start()\n"
        "sys.argv[1:] = ['solve', '--help']\nmain()"
    )
    run = [sys.executable, "-c", code]
    done = subprocess.run(run, capture_output=True, text=True, timeout=120, check=True)
    assert done.stderr == ""
    assert "optpipe solve problem.json" in done.stdout


@pytest.mark.parametrize("module", ["numpy", "pydantic", "typer", "rich"])
@pytest.mark.parametrize("command", [["-m", "optpipe.cli"], ["optpipe"]])
def test_ctrl_c_during_the_imports_ends_without_a_traceback(
    module: str, command: list[str], tmp_path: Path
) -> None:
    """Of the core and of the commands, as the script that pip writes and as a module."""
    (tmp_path / module).mkdir()
    interrupt = "import signal; signal.raise_signal(signal.SIGINT)"
    (tmp_path / module / "__init__.py").write_text(interrupt)
    (tmp_path / "optpipe").write_text("from optpipe.cli import main\nmain()")
    path = os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))
    done = subprocess.run(
        [sys.executable, *command, "--version"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_names_that_look_like_markup_are_printed_as_they_are(optpipe, tmp_path) -> None:
    """User text never reaches rich as markup: `[/]` alone would be a stack trace."""
    path = tmp_path / "odd.json"
    odd = document([stage(0)], [{"memory_bytes": 1000, "name": "gpu[/]", "host": "[red]h"}])
    path.write_text(json.dumps({**odd, "name": "[bold]p"}))
    done = optpipe("solve", path, "--time-limit", 1)
    assert done.code == 0, done.err
    assert "gpu[/]" in done.out
    assert "[bold]p" in done.out


def test_check_refuses_a_record_whose_numbers_are_not_its_programs(
    optpipe, problem_file, schedule_file, tmp_path
) -> None:
    data = json.loads(schedule_file.read_text())
    edited = tmp_path / "edited.json"
    edited.write_text(json.dumps({**data, "makespan_ms": data["makespan_ms"] / 2}))
    done = optpipe("check", problem_file, edited)
    assert done.code == 2
    assert "makespan_ms" in done.err


@pytest.mark.parametrize("name", ["a.svg", "a.html", "a.json"])
def test_solve_draws_what_it_found(optpipe, problem_file, tmp_path, name: str) -> None:
    drawn = tmp_path / name
    done = optpipe("solve", problem_file, "--method", "greedy", "--plot", drawn)
    assert done.code == 0, done.err
    assert f"written to {drawn}" in done.err
    assert drawn.stat().st_size > 1000


def test_solve_refuses_a_picture_that_takes_longer_than_its_limit(optpipe, tmp_path) -> None:
    path = tmp_path / "large.json"
    path.write_text(json.dumps(document([stage(d) for d in range(64)], m=512)))
    done = optpipe("solve", path, "--plot", tmp_path / "a.html")
    assert (done.code, done.out) == (2, "")
    assert "65,536 actions or more" in done.err
    assert "optpipe plot" in done.err


def test_the_version_is_that_of_the_distribution(optpipe) -> None:
    done = optpipe("--version")
    assert (done.code, done.out) == (0, f"optpipe {metadata.version('optpipe')}\n")
    assert optpipe_package.__version__ == metadata.version("optpipe")


def test_answers_are_json_too_feasible_or_not(optpipe, problem_file, csv_file, tmp_path) -> None:
    """The infeasible ones with the exit code of the text and the smallest memory that works."""
    limits = ("--time-limit", "5")
    solved = json.loads(optpipe("solve", problem_file, "--json", *limits).out)
    assert solved["status"] == "optimal"
    assert solved["schedule"]["makespan_ms"] == solved["objective_ms"] == solved["bound_ms"]
    assert solved["gap"] == 0
    bound = json.loads(optpipe("bound", problem_file, "--json").out)
    assert bound["objective"] == "makespan"
    assert 0 < bound["bound_ms"] <= solved["bound_ms"]
    legal = json.loads(optpipe("check", problem_file, csv_file, "--json").out)
    assert (legal["legal"], legal["makespan_ms"]) == (True, 13)
    swept = optpipe("sweep", problem_file, "--axis", "offload=false", "--json")
    rows = json.loads(swept.out)["rows"]
    assert [row["values"] for row in rows] == [{"offload": False}]

    illegal = optpipe("check", problem_file, write(tmp_path / "s.csv", SWAPPED), "--json")
    assert illegal.code == 2
    assert json.loads(illegal.out)["violations"][0]["device"] == 0
    small = json.loads(problem_file.read_text())
    for one in small["devices"]:
        one["memory_bytes"] = 9
    impossible = write(tmp_path / "small.json", json.dumps(small))
    for command in (("solve", *limits), ("bound",)):
        done = optpipe(command[0], impossible, "--json", *command[1:])
        found = json.loads(done.out)
        assert (done.code, found["status"], bool(found["needs"])) == (3, "infeasible", True)


def test_durations_in_odd_units_are_warned_about(optpipe, problem_file, tmp_path) -> None:
    given = json.loads(problem_file.read_text())
    given["stages"][1]["forward_ms"] *= 1e-6
    done = optpipe("bound", write(tmp_path / "odd.json", json.dumps(given)))
    assert done.code == 0
    assert "warning: stage 1: forward" in done.err
    assert "milliseconds" in done.err
    assert "warning" not in optpipe("bound", problem_file).err


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        ({"url": "file:///a%20b/c", "dir_info": {"editable": True}}, "-e '/a b/c[solver]'"),
        ({"url": "file:///c"}, "'/c[solver]'"),
        (
            {"url": "https://host/r", "vcs_info": {"vcs": "git", "commit_id": "12ab"}},
            "'optpipe[solver] @ git+https://host/r@12ab'",
        ),
        ({"url": "https://host/a.zip"}, "'optpipe[solver] @ https://host/a.zip'"),
        (None, "'.[solver]' in a clone of OptPipe"),
    ],
)
def test_the_command_that_installs_an_extra_names_where_optpipe_came_from(
    monkeypatch, origin, command
) -> None:
    class Installed:
        def read_text(self, _name):
            return None if origin is None else json.dumps(origin)

    monkeypatch.setattr(metadata, "distribution", lambda _name: Installed())
    assert install_command("solver") == f"pip install {command}"
