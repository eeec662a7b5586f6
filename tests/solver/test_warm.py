"""Compiling once for an installation, before any clock runs."""

from __future__ import annotations

import fcntl
import logging
import sys
from threading import Thread
from typing import TYPE_CHECKING

from optpipe_solver import warm

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


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
    monkeypatch.setattr(warm, "_compile_in_two", lambda: compiled.append("here"))
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
    assert compiled == ["here"]


def test_a_search_that_could_not_be_compiled_beside_is_compiled_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that a process that died leaves nothing uncompiled behind the mark."""
    done: list[str] = []
    monkeypatch.setattr(sys, "executable", "false")
    monkeypatch.setattr(warm, "_compile_starts_and_models", lambda: done.append("models"))
    monkeypatch.setattr(warm, "_compile_search", lambda: done.append("search"))
    warm._compile_in_two()
    assert done == ["models", "search"]


def test_warming_up_leaves_the_mark() -> None:
    """Beside the compiled code, so that it goes where that goes."""
    warm.warm_up()
    assert warm._mark().exists()
