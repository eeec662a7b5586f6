"""The demo from end to end in processes of its own, its failures, and a rank that breaks."""

import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from optpipe import dump_schedule, load_problem
from optpipe.runtime import demo
from optpipe.runtime.launch import launch_ranks
from optpipe.runtime.watch import EXIT_CODE
from tests.runtime import cases, schedules
from tests.runtime.ranks import Ended, fork_ranks, free_port

pytestmark = pytest.mark.long

PROBLEM = Path(__file__).parents[2] / "examples" / "problems" / "tiny-gpt-pp4.json"


@pytest.fixture(scope="module")
def problem():
    return load_problem(PROBLEM.read_text())


@pytest.fixture(scope="module")
def offloading(problem):
    """Return 1F1B with split backwards whose micro-batches wait on the host, as JSON."""
    return dump_schedule(schedules.make_schedule(problem, schedules.all_offloaded(problem)))


@pytest.fixture
def schedule(offloading, tmp_path):
    path = tmp_path / "schedule.json"
    path.write_text(offloading)
    return str(path)


def arguments(*more: str) -> list[str]:
    return ["--problem", str(PROBLEM), "--steps", "2", *more]


@pytest.mark.extended
def test_the_demo_trains_by_a_schedule(schedule, problem, capfd):
    """At every change the quickstart runs it, in test_examples.py."""
    assert launch_ranks("optpipe.runtime.demo", arguments("--schedule", schedule), 4) == 0
    out = capfd.readouterr().out
    assert out.count("0.0e+00") == 2
    each = 2 * problem.num_microbatches * problem.stages[1].offload_bytes
    # The plan's offload_bytes are what really moves.
    assert f"rank 1: {each} bytes offloaded, {each} bytes reloaded" in out
    assert "losses and all gradients agree" in out


def test_the_demo_says_once_what_is_wrong_with_its_input(tmp_path):
    given = arguments("--schedule", str(PROBLEM))
    first, second = fork_ranks(partial(demo.main, given), 2, tmp_path)
    assert (first.code, second.code) == (2, 2)
    assert first.output.startswith("rank 0: ")
    assert second.output == ""


def test_the_demo_fails_when_host_copies_are_wrong(schedule, tmp_path):
    main = partial(cases.demo_with_wrong_copies, arguments("--schedule", schedule))
    ended = fork_ranks(main, 4, tmp_path)
    assert [one.code for one in ended] == [1] * 4
    assert "DISAGREES" in ended[0].output
    assert "does NOT train like one process" in ended[0].output


def _fail(fault: str, rank: int, copies: int, folder: Path) -> tuple[list[Ended], float]:
    """Return how four ranks ended of which one failed, and after how many seconds all had."""
    folder.mkdir()
    ended = fork_ranks(partial(cases.fail_at, rank, fault, copies, free_port()), 4, folder)
    until = time.time()
    (begun,) = re.findall(r"fault at ([\d.]+)", ended[rank].output)
    return ended, until - float(begun)


_WORDS = {
    "kill": "rank {0}: its process is dead",
    "raise": "rank {0}, step 1, in {1}F0: ValueError",
    "hang": "rank {0}, step 1, in {1}F0: no progress for",
}


@pytest.mark.parametrize(
    ("fault", "failing", "copies"),
    [
        ("kill", (0, 2), 1),
        ("raise", (2,), 1),
        # A rank that hangs is at every change in test_watch.py.
        pytest.param("hang", (0,), 1, marks=pytest.mark.extended),
        *(
            pytest.param(fault, (0, 1, 2, 3), copies, marks=pytest.mark.extended)
            for fault in _WORDS
            for copies in (1, 2)
        ),
    ],
    ids=str,
)
def test_whoever_fails_all_ranks_end_soon_and_name_the_same_one(tmp_path, fault, failing, copies):
    """With rank 0 ends the store through which they would tell each other."""
    with ThreadPoolExecutor() as pool:
        runs = {
            rank: pool.submit(_fail, fault, rank, copies, tmp_path / str(rank)) for rank in failing
        }
    for culprit, run in runs.items():
        ended, seconds = run.result()
        assert seconds < 10
        for rank, one in enumerate(ended):
            if rank != culprit or fault == "hang":
                assert one.code in {10 + rank, EXIT_CODE}
                named = re.findall(r"this rank cannot continue: rank (\d)", one.output)
                assert named == [str(culprit)], one.output
                assert _WORDS[fault].format(culprit, culprit % (4 // copies)) in one.output
        itself = {"kill": -signal.SIGKILL, "raise": 10 + culprit, "hang": EXIT_CODE}
        assert ended[culprit].code == itself[fault]
        if fault == "raise":
            assert f"raised on rank {culprit}, step 1, in" in ended[culprit].output


def test_a_rank_that_breaks_and_lives_on_ends_the_others_too(tmp_path):
    first, second = fork_ranks(cases.fail_and_live_on, 2, tmp_path, lives_on=1)
    assert (first.code, second.code) == (EXIT_CODE, None)
    assert "rank 1: ValueError" in second.output
    assert (
        "optpipe: another rank failed, so this rank cannot continue: rank 1, step 1, in 1F0"
        in first.output
    )
    assert "no such layer" in first.output


def test_ranks_that_stay_behind_a_failed_one_are_ended(monkeypatch):
    """Two processes without torch: one fails at once, the other sleeps."""
    monkeypatch.setattr("optpipe.runtime.launch._GRACE_S", 0.1)
    statement = "1 / 0 if os.environ['RANK'] == '1' else time.sleep(60)"
    given = ["-n", "1", "-r", "1", "-s", "import os, time", statement]
    assert launch_ranks("timeit", given, 2) == 1
