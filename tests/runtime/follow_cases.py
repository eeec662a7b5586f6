"""What the ranks run while they follow a deployment that a test scripts."""

import hashlib
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from optpipe import Problem, Schedule
from optpipe.client import Client
from optpipe.errors import ServiceUnreachableError
from optpipe.measurements import Measurements
from optpipe.runtime import PipelineRunner, follow
from optpipe.runtime.preflight import num_microbatches_of
from tests.runtime.small_model import small_data, small_runner
from tests.runtime.watching import until


class Scripted:
    """A deployment whose versions are the schedules of a list, over and over, ever newer ones.

    Parameters
    ----------
    num_offered
        So many versions are there from the beginning; `offer` adds one.
    num_answers
        So many questions are answered; after them nobody is there any more.
    is_stuck
        Whether nobody is answered, and no report taken, before `let_go`.
    """

    def __init__(
        self,
        schedules: Sequence[Schedule],
        *,
        num_offered: int = 0,
        num_answers: float = float("inf"),
        is_stuck: bool = False,
    ) -> None:
        self.schedules = schedules
        self.reports: list[tuple[int, int | None, float | None, Measurements]] = []
        self.num_questions = 0
        self._offered = threading.Semaphore(num_offered)
        self._num_answers = num_answers
        self._free = threading.Event()
        if not is_stuck:
            self.let_go()

    def schedule_if_newer(self, version: int, wait_s: float = 0.0) -> tuple[int, Schedule] | None:
        self.num_questions += 1
        self._free.wait()
        if self.num_questions > self._num_answers:
            raise ConnectionError("nobody is there")
        # Long: after an answer without news the poller rests for a second.
        if not self._offered.acquire(timeout=min(wait_s, 5.0)):
            return None
        return version + 1, self.schedules[version % len(self.schedules)]

    def let_go(self) -> None:
        self._free.set()

    def offer(self) -> None:
        self._offered.release()

    def report(
        self,
        version: int,
        measurements: Measurements,
        *,
        step: int | None = None,
        step_ms: float | None = None,
    ) -> None:
        self._free.wait()
        self.reports.append((version, step, step_ms, measurements))


class Followed(NamedTuple):
    """One rank's training: losses of the last stage's rank, a digest of parameters, and moves."""

    losses: list[list[float]]
    digest: str
    version: int
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
    source: dict[str, Any] | None = None,
    num_reports: int = 0,
    **options: Any,
) -> Followed:
    """Train with an optimizer, following; ``waits`` for a new version before every step.

    At the end it waits for ``num_reports`` reports.
    """
    rank = dist.get_rank()
    own, runner, optimizer = _training(first, problem)
    parameters = [parameter for module in own.values() for parameter in module.parameters()]
    script = Scripted(later, **(source or {})) if rank == 0 else None
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
        version, refusals = training.version, training.refusals
    runner.close()
    moved = runner.offloaded_bytes
    weights = [parameter.detach() for parameter in parameters]
    return Followed(losses, _digest(weights), version, refusals, moved, reports)


def _digest(tensors: Sequence[torch.Tensor]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.numpy().tobytes())
    return found.hexdigest()


class Counted:
    """A deployment on a real service that counts how often nobody was there."""

    def __init__(self, url: str, deployment_id: str) -> None:
        self.num_failures = 0
        self._deployment = Client(url, num_retries=0).deployment(deployment_id)

    def schedule_if_newer(self, version: int, wait_s: float = 0.0) -> tuple[int, Schedule] | None:
        try:
            return self._deployment.schedule_if_newer(version, wait_s)
        except ServiceUnreachableError:
            self.num_failures += 1
            raise

    def report(self, version: int, measurements: Measurements, **step: Any) -> object:
        return self._deployment.report(version, measurements, **step)


class Served(NamedTuple):
    """One rank's training by a real service that is killed in the middle."""

    digest: str
    version: int
    num_steps: int
    num_failures: int


def train_served(
    service: tuple[str, str], first: Schedule, problem: Problem, folder: Path
) -> Served:
    """Train until the second version runs, then on when nobody serves it any more."""
    rank = dist.get_rank()
    own, runner, optimizer = _training(first, problem)
    source = Counted(*service) if rank == 0 else None
    num_steps, left = 0, 10
    # What the test reports is what counts here.
    with follow(source, runner, version=1, report_every=10**6) as training:
        while left > 0:
            optimizer.zero_grad()
            training.step(*small_data(problem.num_microbatches, seed=num_steps))
            optimizer.step()
            num_steps += 1
            left -= training.version == 2
            if source is not None and left == 9 and not (folder / "gone").exists():
                (folder / "switched").touch()
                until(lambda: (folder / "gone").exists() and source.num_failures > 0)
    runner.close()
    weights = [parameter.detach() for module in own.values() for parameter in module.parameters()]
    failures = 0 if source is None else source.num_failures
    return Served(_digest(weights), training.version, num_steps, failures)


def _training(
    first: Schedule, problem: Problem | None
) -> tuple[dict[int, nn.Module], PipelineRunner, torch.optim.Optimizer]:
    own, runner = small_runner(first, problem)
    parameters = [parameter for module in own.values() for parameter in module.parameters()]
    return own, runner, torch.optim.SGD(parameters, 0.1, momentum=0.9)
