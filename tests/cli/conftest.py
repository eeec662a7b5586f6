"""The small problem of the pictures and its schedules as files, which most commands read."""

from pathlib import Path

import pytest

from optpipe import Provenance, dump_csv, dump_problem, dump_schedule, evaluate
from tests.plot.conftest import make_small_problem, make_small_programs

LEGAL = dump_csv(make_small_programs())
PLAIN = "0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1F1,1I1,1W0,1W1\n"


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def problem_file(tmp_path: Path) -> Path:
    """Two devices, two micro-batches, offload possible; serial schedules take 10 bytes of each."""
    return write(tmp_path / "problem.json", dump_problem(make_small_problem()))


@pytest.fixture
def csv_file(tmp_path: Path) -> Path:
    return write(tmp_path / "schedule.csv", LEGAL)


@pytest.fixture
def schedule_file(tmp_path: Path) -> Path:
    """The same programs as a record."""
    schedule = evaluate(make_small_problem(), make_small_programs(), Provenance(method="by hand"))
    return write(tmp_path / "schedule.json", dump_schedule(schedule))
