"""What `submit --follow` prints of a job's progress."""

from __future__ import annotations

import io
from datetime import UTC, datetime

from rich.console import Console

from optpipe.cli.following import _Lines
from optpipe.client import Improvement, Job


def test_a_better_bound_leaves_the_schedule_standing() -> None:
    """The service tells a bound without a length; that is not the lack of a schedule."""
    job = Job(
        id="a",
        state="running",
        has_schedule=True,
        problem_hash="sha256:0",
        objective="makespan",
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
