"""The training example: it learns as one process does, by what the service plans for it."""

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from examples.train_gpt import ALPHABET, make_batch, solve, sums, with_room
from optpipe import Problem, Provenance, evaluate, load_schedule
from optpipe.client import Client
from tests.api.live import make_settings, running
from tests.api.outcomes import Result, SolveStatus
from tests.building import bus, offloadable, problem, stage
from tests.runtime.schedules import all_offloaded

ROOT = Path(__file__).parent.parent


def solver(problem: Problem, **_: object) -> Result:
    """Offload everything, in no time."""
    programs = all_offloaded(problem)
    schedule = evaluate(problem, programs, Provenance(method="by hand"), bound_ms=1.0)
    return Result(SolveStatus.FEASIBLE, schedule, 1.0)


@pytest.fixture
def service(tmp_path):
    """Run it for as long as a test takes; give its address."""
    with running(make_settings(tmp_path, solve_path=f"{__name__}:solver")) as (url, _):
        yield url


def run_example(*options: str) -> subprocess.CompletedProcess[str]:
    """Start it on four ranks through the installed torchrun."""
    torchrun = Path(sys.executable).parent / "torchrun"
    command = [str(torchrun), "--standalone", "--nproc-per-node", "4", "examples/train_gpt.py"]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    return subprocess.run(
        [*command, *options],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )


@pytest.mark.extended
def test_measured_planned_by_the_service_and_trained_like_one_process(service) -> None:
    sizes = ["--hidden", "16", "--sequence", "8", "--samples", "2", "--microbatches", "4"]
    done = run_example("--url", service, "--steps", "3", "--check", "--activations", "2", *sizes)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the loss curve equals that of one process" in done.stdout
    assert "DISAGREES" not in done.stdout
    for rank in range(4):
        assert f"rank {rank}: " in done.stdout
    assert " 0 bytes offloaded" not in done.stdout
    first, last = (
        float(line.split("loss ")[1].split(",")[0])
        for line in done.stdout.splitlines()
        if line.startswith("step ")
    )
    assert last < first


def test_that_nobody_plans_is_handed_on(monkeypatch) -> None:
    """Nobody answers there: told to all ranks, instead of leaving them waiting."""
    monkeypatch.setattr("optpipe.client.client.time.sleep", lambda _: None)
    options = argparse.Namespace(url="http://127.0.0.1:9", time_limit=1.0)
    schedule, fault = solve(problem([stage()]), options)
    assert schedule == ""
    assert "nobody answers at http://127.0.0.1:9" in fault


def test_the_service_is_given_the_problem_and_the_time(service) -> None:
    options = argparse.Namespace(url=service, time_limit=2.5)
    stages = [offloadable(device) for device in range(4)]
    posted = problem(stages, [bus()] * 4, m=2)
    schedule, fault = solve(posted, options)
    assert fault == ""
    assert load_schedule(schedule).programs == all_offloaded(posted)
    with Client(service) as client:
        (job,) = client.jobs()
    assert job.options.time_limit_s == 2.5


def test_the_text_is_sums_that_are_right() -> None:
    lines = sums(2000, seed=3).splitlines()[:-1]
    assert len(lines) > 20
    for line in lines:
        left, right, total = map(int, re.split(r" [+=] ", line))
        assert left + right == total


def test_targets_are_the_next_letters_and_a_seed_makes_the_same_text() -> None:
    batch, target = make_batch(3, 10, seed=1)
    assert batch.shape == target.shape == (3, 10)
    assert bool((batch[:, 1:] == target[:, :-1]).all())
    text = "".join(ALPHABET[code] for code in batch[0])
    assert sums(40, seed=1).startswith(text)
    assert bool((make_batch(3, 10, seed=1)[0] == batch).all())
    assert not bool((make_batch(3, 10, seed=2)[0] == batch).all())


def test_room_is_counted_in_activations_beside_what_is_always_there() -> None:
    """The larger of activation and weight context, and the larger workspace, must fit."""
    full = stage(
        activation_bytes=100,
        weight_context_bytes=120,
        static_bytes=30,
        forward_workspace_bytes=4,
        backward_input_workspace_bytes=7,
    )
    after = stage(1, activation_bytes=8)
    whole = problem([full, after], [bus(reserved_bytes=1000)] * 2, m=3)
    first, second = with_room(whole, 2.5).devices
    assert first.memory_bytes == 1000 + 30 + 7 + 300
    assert second.memory_bytes == 1000 + 20
