"""What the ranks run while they follow a source that a test scripts."""

import hashlib
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from optpipe import Problem, Schedule
from optpipe.client import Client, TrainingRun
from optpipe.errors import ServiceUnreachableError
from optpipe.measurements import MeasuredAction, Measurements, Sample
from optpipe.runtime import PipelineRunner, follow
from optpipe.runtime.preflight import num_microbatches_of
from tests.runtime.small_model import small_data, small_runner
from tests.runtime.watching import until


class Scripted:
    """A source that finds the schedules of a list, over and over.

    `offer` adds one. A source that ``is_stuck`` answers no request, and takes no report, before
    `let_go`.
    """

    def __init__(self, schedules: Sequence[Schedule], *, is_stuck: bool = False) -> None:
        self.schedules = schedules
        self.reports: list[tuple[str, int | None, float | None, Measurements]] = []
        self.num_found = 0
        self._offered = threading.Semaphore(0)
        self._free = threading.Event()
        if not is_stuck:
            self.let_go()

    def next_schedule(self, wait_s: float = 0.0) -> Schedule | None:
        self._free.wait()
        if not self._offered.acquire(timeout=min(wait_s, 0.5)):
            return None
        self.num_found += 1
        return self.schedules[(self.num_found - 1) % len(self.schedules)]

    def let_go(self) -> None:
        self._free.set()

    def offer(self) -> None:
        self._offered.release()

    def report(
        self,
        schedule: Schedule,
        measurements: Measurements,
        *,
        step: int | None = None,
        step_ms: float | None = None,
    ) -> None:
        self._free.wait()
        self.reports.append((schedule.program_hash, step, step_ms, measurements))


class Followed(NamedTuple):
    """One rank's training: losses of the last stage's rank, a digest of parameters, and moves."""

    losses: list[list[float]]
    digest: str
    num_switches: int
    refusals: list[Any]
    offloaded_bytes: int
    reports: list[Any]


def train_following(
    first: Schedule,
    later: Sequence[Schedule],
    problem: Problem | None,
    steps: int,
    *,
    waits: bool = True,
    is_stuck: bool = False,
    num_reports: int = 0,
    **options: Any,
) -> Followed:
    """Train with an optimizer, following; ``waits`` for a schedule before every step.

    At the end it waits for ``num_reports`` reports.
    """
    rank = dist.get_rank()
    own, runner, optimizer = _training(first, problem)
    parameters = [parameter for module in own.values() for parameter in module.parameters()]
    script = Scripted(later, is_stuck=is_stuck) if rank == 0 else None
    count = num_microbatches_of(first)
    losses = []
    with follow(script, runner, **options) as training:
        for step in range(steps):
            if waits and script is not None and training.poller is not None:
                script.offer()
                assert training.poller.wait(10)
            optimizer.zero_grad()
            found = training.step(*small_data(count, seed=step))
            optimizer.step()
            losses += [] if found is None else [found.tolist()]
        reports: list[Any] = []
        if script is not None:
            script.let_go()
            until(lambda: len(script.reports) >= num_reports)
            reports = script.reports
        num_switches, refusals = training.num_switches, training.refusals
    runner.close()
    moved = runner.offloaded_bytes
    weights = [parameter.detach() for parameter in parameters]
    return Followed(losses, _digest(weights), num_switches, refusals, moved, reports)


def _digest(tensors: Sequence[torch.Tensor]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.numpy().tobytes())
    return found.hexdigest()


class Counted:
    """A training run on a real service that counts how often the service was gone.

    Reports say how long each pass of stage 1 takes: real times of a test's tiny stages say nothing.
    """

    def __init__(self, run: TrainingRun, slow_ms: float) -> None:
        self.run = run
        self.num_failures = 0
        passes: tuple[MeasuredAction, ...] = ("F", "I", "W", "B")
        samples = tuple(Sample(stage=1, action=one, time_ms=slow_ms) for one in passes)
        self._times = Measurements(source="a slow stage", samples=samples)

    def next_schedule(self, wait_s: float = 0.0) -> Schedule | None:
        try:
            return self.run.next_schedule(wait_s)
        except ServiceUnreachableError:
            self.num_failures += 1
            raise

    def report(self, schedule: Schedule, measurements: Measurements, **step: Any) -> None:
        try:
            self.run.report(schedule, self._times, **step)
        except ServiceUnreachableError:
            self.num_failures += 1
            raise


class Served(NamedTuple):
    """One rank's training by a real service; the ids are those of rank 0's run."""

    digest: str
    num_switches: int
    num_steps: int
    num_failures: int
    job_id: str
    comparison_id: str | None
    program_hash: str


def train_served(
    url: str, job_id: str, *, slow_ms: float, steps: int, gone: Path | None = None
) -> Served:
    """Train by the schedule of a job, until a better one ran for ``steps`` steps.

    With ``gone`` the file ``switched`` next to it is made after the first of these steps. Training
    then goes on until ``gone`` exists, which says that the service was killed, and was missed.
    """

    def is_over(source: Counted, num_left: int) -> bool:
        if gone is None:
            return num_left <= 0
        if num_left < steps:
            gone.with_name("switched").touch()
        return num_left <= 0 and gone.exists() and source.num_failures > 0

    return _train_served(url, job_id, slow_ms, steps, is_over)


def train_resumed(url: str, job_id: str, *, slow_ms: float) -> Served:
    """Train by the schedule of a job until the first report was compared."""

    def is_over(source: Counted, _num_left: int) -> bool:
        compared = source.run.comparison_id
        return compared is not None and source.run._client.job(compared).is_finished

    return _train_served(url, job_id, slow_ms, 1, is_over)


def _train_served(
    url: str,
    job_id: str,
    slow_ms: float,
    steps: int,
    is_over: Callable[[Counted, int], bool],
) -> Served:
    start: list[Any] = [None, None]
    run, source = None, None
    if dist.get_rank() == 0:
        run = Client(url, num_retries=0).training_run(job_id)
        source = Counted(run, slow_ms)
        start = [run.schedule(wait_s=60), run.problem]
    dist.broadcast_object_list(start)
    first, problem = start
    own, runner, optimizer = _training(first, problem)
    num_steps, num_left = 0, steps
    with follow(source, runner, sample_every=1, report_every=2) as training:
        is_done = torch.tensor(0)
        while not is_done:
            optimizer.zero_grad()
            training.step(*small_data(problem.num_microbatches, seed=num_steps))
            optimizer.step()
            num_steps += 1
            num_left -= training.num_switches == 1
            if source is not None:
                is_done = torch.tensor(int(is_over(source, num_left)))
            dist.broadcast(is_done, 0)
        running = runner.schedule.program_hash
    runner.close()
    weights = [parameter.detach() for module in own.values() for parameter in module.parameters()]
    failures = 0 if source is None else source.num_failures
    ids = ("", None) if run is None else (run.job_id, run.comparison_id)
    return Served(_digest(weights), training.num_switches, num_steps, failures, *ids, running)


def _training(
    first: Schedule, problem: Problem | None
) -> tuple[dict[int, nn.Module], PipelineRunner, torch.optim.Optimizer]:
    own, runner = small_runner(first, problem)
    parameters = [parameter for module in own.values() for parameter in module.parameters()]
    return own, runner, torch.optim.SGD(parameters, 0.1, momentum=0.9)
