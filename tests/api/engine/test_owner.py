"""The name of a lease's owner: who can see that it is gone, and who cannot."""

import os
import subprocess
import sys

import pytest

from optpipe_api.engine import engine
from optpipe_api.engine.engine import is_gone, new_owner


def owner_that(script: str) -> str:
    """Return the name of a process that has run this and ended."""
    made = "from optpipe_api.engine.engine import new_owner; print(new_owner(), flush=True)"
    done = subprocess.run(
        [sys.executable, "-c", f"{made}; {script}"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip()


def test_names_are_unique_and_fit_the_column() -> None:
    names = {new_owner() for _ in range(100)}
    assert len(names) == 100
    assert max(map(len, names)) <= 64


def test_a_running_process_is_not_gone() -> None:
    assert not is_gone(new_owner())


@pytest.mark.parametrize("end", ["pass", "import os; os.kill(os.getpid(), 9)"])
def test_an_ended_process_is_gone(end: str) -> None:
    assert is_gone(owner_that(end))


def test_a_dead_process_that_nobody_has_waited_for_is_gone() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert is_gone(_renamed(new_owner(), pid=child.pid))


def test_another_process_of_the_same_number_is_not_the_owner() -> None:
    mine = new_owner()
    started = int(mine.split("-")[2])
    assert is_gone(_renamed(mine, started=started - 1))


def test_a_process_that_is_there_but_not_ours_to_look_at_is_not_gone(monkeypatch) -> None:
    def refuse(pid: int, signal: int) -> None:
        raise PermissionError

    mine = _renamed(new_owner(), started=1)
    monkeypatch.setattr(os, "kill", refuse)
    monkeypatch.setattr(engine, "_started", lambda pid: None)
    assert not is_gone(mine)


@pytest.mark.parametrize(
    "name", ["", "worker", "0" * 32, "-1-2-3", "elsewhere-999999-1-0", f"{'0' * 16}-999999-1-00"]
)
def test_of_other_machines_and_unknown_names_nothing_is_said(name: str) -> None:
    assert not is_gone(name)


def test_where_the_system_says_nothing_nobody_is_gone(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(engine, "_PROC", tmp_path)
    assert not is_gone(new_owner())
    assert not is_gone(_renamed(new_owner(), pid=2**22))


def _renamed(name: str, *, pid: int | None = None, started: int | None = None) -> str:
    where, own_pid, own_start, rest = name.split("-")
    return f"{where}-{pid or own_pid}-{started or own_start}-{rest}"
