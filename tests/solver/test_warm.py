"""Compiling once for an installation, before any clock runs."""

import fcntl
import logging
import subprocess
import sys
import time
from pathlib import Path
from threading import Thread

import pytest

from optpipe_solver import solve, warm


def test_it_compiles_only_where_nobody_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first process says so and compiles; who finds the mark does neither."""
    mark = tmp_path / "mark"
    monkeypatch.setattr(warm, "_mark", lambda: mark)
    monkeypatch.setattr(warm, "warm_up", mark.touch)
    with caplog.at_level(logging.WARNING):
        warm.ensure_warm()
        warm.ensure_warm()
    assert mark.exists()
    assert len(caplog.messages) == 1
    assert "once" in caplog.messages[0]


def test_one_process_compiles_and_the_others_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waited for the lock finds the mark, and has nothing left to do."""
    compiled: list[str] = []
    monkeypatch.setattr(warm, "_folder", lambda: tmp_path)
    monkeypatch.setattr(warm, "_compile_in_two", lambda here, _: compiled.append(here.__name__))
    with (tmp_path / "optpipe.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting = Thread(target=warm.warm_up)
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive()
        warm._mark().touch()
    waiting.join()
    assert compiled == []
    warm._mark().unlink()
    warm.warm_up()
    assert compiled == ["_compile_starts", "_compile_models"]


def test_the_general_search_is_compiled_once_for_counted_copies_and_by_cell() -> None:
    """Else the first solve of a small menu would compile it for a quarter of a minute."""
    code = (
        "from optpipe_solver import warm\n"
        "from optpipe_solver.exact.general_layers import expand_general\n"
        "warm._compile_models(); print(len(expand_general.signatures))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"


def test_a_search_that_could_not_be_compiled_beside_is_compiled_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that a process that died leaves nothing uncompiled behind the mark."""
    done: list[str] = []
    monkeypatch.setattr(sys, "executable", "false")
    monkeypatch.setattr(warm, "_compile_models", lambda: done.append("models"))

    def search() -> None:
        done.append("search")

    warm._compile_in_two(warm._compile_models, search)
    assert done == ["models", "search"]


def test_a_solve_waits_for_the_starts_and_is_told_when_the_rest_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What another process compiles is ready when that process has ended."""
    compiled: list[str] = []
    monkeypatch.setattr(warm, "_mark", lambda: tmp_path / "mark")
    monkeypatch.setattr(warm, "_can_keep", lambda: True)
    monkeypatch.setattr(warm, "_warm_starts", lambda: compiled.append("starts"))
    other = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    monkeypatch.setattr(warm, "_spawn", lambda _: other)
    is_warm = warm.ensure_warm(whole=False)
    assert compiled == ["starts"]
    assert not is_warm()
    assert other.stdin is not None
    other.stdin.close()
    end = time.monotonic() + 30
    while not is_warm() and time.monotonic() < end:
        time.sleep(0.01)
    assert is_warm()


def test_a_solve_ends_on_time_with_its_starts_where_the_search_is_not_there_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The clock of a time limit does not wait for a compiler."""
    module = sys.modules["optpipe_solver.solve"]  # hidden by the function of that name
    monkeypatch.setattr(module, "ensure_warm", lambda *, whole: lambda: whole)
    found = solve(warm._tight([0, 1, 0, 1]), time_limit_s=1.0)
    assert found.schedule is not None
    assert found.schedule.stopped_by == "time_limit"
    methods = {entry.method for entry in found.schedule.provenance.trace}
    later = {"local-search", "beam", "general-search", "periodic"}
    assert not methods & later


def test_warming_up_leaves_the_mark() -> None:
    """Beside the compiled code, so that it goes where that goes."""
    warm.warm_up()
    assert warm._mark().exists()
