"""Compiling once for an installation, before any clock runs."""

from __future__ import annotations

import logging
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


def test_warming_up_leaves_the_mark() -> None:
    """Beside the compiled code, so that it goes where that goes."""
    warm.warm_up()
    assert warm._mark().exists()
