"""What people call things is shown, whatever it is, and never obeyed by the terminal."""

import json
import unicodedata

import pytest
from rich.table import Table

from optpipe import dump_problem
from optpipe.cli.console import stderr, stdout
from tests.cli.conftest import PLAIN, write
from tests.plot.conftest import make_small_problem

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
