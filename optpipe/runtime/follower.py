"""Follow a deployment: train by the newest schedule that the service has found.

::

    with Client(url) as client:
        deployment = client.deploy(problem)
        version, found = deployment.schedule(wait_s=60)   # on rank 0, broadcast to all
        schedule = evaluate(problem, found.programs, found.provenance)
        runner = PipelineRunner(own, schedule, loss_fn, problem)
        with follow(deployment, runner, version=version) as training:
            for batch, target in data:
                losses = training.step(batch, target)
                optimizer.step()

Between two steps, rank 0 broadcasts two numbers that say whether there is a newer version. If there
is one, rank 0 broadcasts its text. All ranks check it together (`PipelineRunner.use`), and the next
step runs it. If a rank refuses the version, all ranks skip it and rank 0 logs the reason.

Rank 0 broadcasts before its own next step. If it has the first stage, the other ranks wait for its
first forward anyway. So the broadcast adds no wait, even if the objective is `span`. On GPUs the
broadcast uses a gloo group of the same ranks, so that it waits for no device.

The gradients are those of the same micro-batches under every schedule. If each stage adds them up
in the same order they are equal to the last bit, otherwise up to the rounding of a sum.

If every batch is a different problem, as with packed sequences, there is no service. Rank 0 plans
each batch before its step, and all ranks run that schedule.

::

    with follow(None, runner, replan=replan) as training:
        for batch in data:
            training.step(arg_mbs=..., target_mbs=..., problem=problem_of(batch))
            optimizer.step()
"""

from __future__ import annotations

import logging
import queue
import statistics
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

import torch
import torch.distributed as dist

from optpipe.errors import PreflightError
from optpipe.formats.json import load_schedule
from optpipe.runtime.preflight import made_on
from optpipe.runtime.timing import DEFAULT_EVERY, ActionTimer
from optpipe.runtime.torch_names import backends, group_alike

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.distributed import ProcessGroup

    from optpipe.measurements import Measurements
    from optpipe.problem import Problem
    from optpipe.runtime.runner import PipelineRunner
    from optpipe.schedule import Schedule

__all__ = ["Follower", "Refusal", "SchedulePoller", "Source", "StepReport", "follow"]


_log = logging.getLogger("optpipe.runtime.follower")


class Refusal(NamedTuple):
    """A version that the ranks refused to run, and why."""

    version: int
    reason: str


class Follower:
    """Runs the steps of a training that follows a deployment; all ranks together.

    Close it, or use it in a ``with``.

    Parameters
    ----------
    source
        The deployment, on rank 0 of the runner's group; None on all other ranks.
    runner
        Runs the steps. The service must know the same problem: sizes, placement, micro-batches.
    version
        The version of the runner's schedule; 0 if it is not a version of the deployment.
    sample_every
        The period, in steps, of the steps whose actions are timed (see `ActionTimer`).
    report_every
        The period, in steps since the last switch, of the reports of measured times.
    agree_every
        The period, in steps, at which the ranks check for a newer version.
    replan
        A function from the problem of a batch to its schedule, such as `optpipe_solver.replan`, to
        use instead of a deployment. Rank 0 calls it before each step whose problem differs from the
        one before. Nothing is reported.

    Attributes
    ----------
    runner
        The runner, which stays the same. You may use it directly; such a step switches and reports
        nothing.
    version
        The version that runs, equal on all ranks; 0 if it is not a version of the deployment.
    refusals
        The versions that the ranks refused, oldest first, equal on all ranks.
    poller
        The threads of rank 0 that communicate with the service; None on other ranks.

    Raises
    ------
    ValueError
        If a period is below 1, or there are both a deployment and ``replan``.
    """

    def __init__(
        self,
        source: Source | None,
        runner: PipelineRunner,
        *,
        version: int = 0,
        sample_every: int = DEFAULT_EVERY,
        report_every: int = 200,
        agree_every: int = 1,
        replan: Callable[[Problem], Schedule] | None = None,
    ) -> None:
        periods = {
            "sample_every": sample_every,
            "report_every": report_every,
            "agree_every": agree_every,
        }
        for name, value in periods.items():
            if value < 1:
                raise ValueError(f"{name} = {value}: must be at least 1; 1 means every step")
        if source is not None and replan is not None:
            raise ValueError(
                "there are both a deployment and replan=: the schedules of a deployment are for "
                "one problem, and replan= plans the problem of each batch; give either"
            )
        self._replan = replan
        self.runner = runner
        self.refusals: list[Refusal] = []
        self._sample_every = sample_every
        self._report_every = report_every
        self._agree_every = agree_every
        self._group = _host_group(runner.group)
        self._is_first = dist.get_rank(runner.group) == 0
        self._num_steps = 0
        self._num_timed = 0
        # With replan= steps have different schedules, so their times are not comparable.
        self._timer = None if replan is not None else ActionTimer(runner, every=sample_every)
        self.version, _ = self._broadcast_numbers(version, 0)
        self.poller: SchedulePoller | None = None
        if self._is_first and source is not None:
            self.poller = SchedulePoller(source, version)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop following; the runner keeps its schedule."""
        if self._timer is not None:
            self._timer.detach()
        if self.poller is not None:
            self.poller.close()

    def step(self, *args: Any, problem: Problem | None = None, **kwargs: Any) -> Tensor | Any:
        """Switch to a newer version if there is one, then run a step: `PipelineRunner.step`.

        Parameters
        ----------
        *args, **kwargs
            Those of `PipelineRunner.step`.
        problem
            With ``replan``, the problem of this batch. Rank 0 needs it. If other ranks pass it,
            they compare it with the one of rank 0.

        Raises
        ------
        PreflightError
            On all ranks, if a batch cannot be planned or run, or the ranks' problems differ.
        """
        if self._replan is not None:
            self._plan(problem, self._replan)
        elif problem is not None:
            raise ValueError(
                "problem= was given without replan=: it is the problem of a batch that replan= "
                "plans; pass replan= to follow, too"
            )
        elif self._num_steps % self._agree_every == 0:
            self._switch_to_newest()
        losses = self.runner.step(*args, **kwargs)
        self._num_steps += 1
        self._num_timed += 1
        # The first step is a warm-up. After this many, all ranks have timed at least one.
        if self._num_timed % self._report_every == 0 and self._num_timed > self._sample_every:
            self._report()
        return losses

    def _plan(self, problem: Problem | None, replan: Callable[[Problem], Schedule]) -> None:
        """Let all ranks run the schedule of a batch from now on, or raise on all of them."""

        def plan() -> tuple[Problem, Schedule | None]:
            if problem is None:
                raise PreflightError("it was given no problem; pass step(..., problem=) there")
            running = self.runner.problem
            is_running = running is not None and running.problem_hash == problem.problem_hash
            return problem, None if is_running else replan(problem)

        result, faults = made_on(0, plan, torch.device("cpu"), self._group)
        if faults:
            raise PreflightError(f"rank 0 cannot plan this batch: {faults[0]}")
        planned, schedule = result
        own = problem if problem is not None else planned
        num_different = torch.tensor(own.problem_hash != planned.problem_hash, dtype=torch.int64)
        dist.all_reduce(num_different, group=self._group)
        if num_different:
            raise PreflightError(
                f"the problem of this batch is {planned.problem_hash} on rank 0, and another one "
                f"on {int(num_different)} ranks, {own.problem_hash} on this one; give all ranks "
                "the same problem, or give it to rank 0 only"
            )
        if schedule is not None:
            self.runner.use(schedule, planned)

    def _switch_to_newest(self) -> None:
        """Run the newest version from now on, if there is one and all ranks can run it."""
        found = self.poller.take() if self.poller is not None else None
        text = b"" if found is None else found[1].model_dump_json(by_alias=True).encode()
        version, num_bytes = self._broadcast_numbers(0 if found is None else found[0], len(text))
        if not num_bytes:
            return
        buffer = bytearray(text) if self._is_first else bytearray(num_bytes)
        dist.broadcast(torch.frombuffer(buffer, dtype=torch.uint8), group=self._group, group_src=0)
        schedule = load_schedule(buffer.decode())
        if self._timer is not None:
            self._timer.detach()
        try:
            self.runner.use(schedule)
        except PreflightError as error:
            self.refusals.append(Refusal(version, str(error)))
            if self._is_first:
                _log.warning(
                    "version %d was refused, version %d stays: %s", version, self.version, error
                )
        else:
            self.version = version
            if self._is_first:
                _log.info("version %d runs from step %d on", version, self._num_steps)
        self._num_timed = 0
        self._timer = ActionTimer(self.runner, every=self._sample_every)

    def _report(self) -> None:
        """Gather the times of all ranks on rank 0, and queue a report."""
        if self._timer is None:
            return
        steps, measurements = self._timer.gather(), self._timer.measurements()
        if self.poller is None or steps is None or measurements is None or self.version == 0:
            return
        is_span = self.runner.schedule.objective == "span"
        step_ms = statistics.median(
            step.span_ms if is_span else max(item.end for row in step.rows for item in row)
            for step in steps
        )
        report = StepReport(self.version, self._num_steps, step_ms, measurements.condensed())
        self.poller.post(report)

    def _broadcast_numbers(self, version: int, num_bytes: int) -> tuple[int, int]:
        """Return the two numbers of rank 0, on every rank."""
        numbers = torch.tensor([version, num_bytes])
        dist.broadcast(numbers, group=self._group, group_src=0)
        return int(numbers[0]), int(numbers[1])


follow = Follower


def _host_group(group: ProcessGroup | None) -> ProcessGroup | None:
    """Return a group of the same ranks that carries tensors of the host."""
    if backends(group).get("cpu") == dist.Backend.GLOO:
        return group
    return group_alike(group, dist.Backend.GLOO)


# --- The connection of rank 0 to the service: one thread requests schedules, one sends reports.
# The service may be slow, stop, restart or send an invalid answer. These threads log the error,
# pause and retry. Training never waits for them.

_MAX_PAUSE_S = 60.0
_MIN_PERIOD_S = 1.0
_CLOSE_TIMEOUT_S = 0.2


class Source(Protocol):
    """A source of schedules that takes measured times, such as `optpipe.client.Deployment`."""

    def schedule_if_newer(self, version: int, wait_s: float = 0.0) -> tuple[int, Schedule] | None:
        """Return the newest version and its schedule; None if none is newer after ``wait_s``."""

    def report(
        self,
        version: int,
        measurements: Measurements,
        *,
        step: int | None = None,
        step_ms: float | None = None,
    ) -> object:
        """Report times that were measured under a version."""


class StepReport(NamedTuple):
    """Times measured under a version up to a step; ``step_ms`` is the time of the pipeline only."""

    version: int
    step: int
    step_ms: float
    measurements: Measurements


class SchedulePoller:
    """Requests newer versions from a source and sends it reports, in daemon threads.

    ``version`` already runs; 0 means no version of this source. The source may wait ``wait_s`` for
    a newer version before it answers. Each consecutive failure doubles the pause before the retry,
    from ``first_pause_s`` up to a minute.
    """

    def __init__(
        self, source: Source, version: int, *, wait_s: float = 30.0, first_pause_s: float = 1.0
    ) -> None:
        self._source = source
        self._known_version = version
        self._wait_s = wait_s
        self._first_pause_s = first_pause_s
        self._newest: tuple[int, Schedule] | None = None
        self._has_newer = threading.Event()
        self._reports: queue.Queue[StepReport | None] = queue.Queue(maxsize=1)
        self._closed = threading.Event()
        self._threads = [
            threading.Thread(target=self._poll_schedules, name="optpipe-follow", daemon=True),
            threading.Thread(target=self._send_reports, name="optpipe-report", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def take(self) -> tuple[int, Schedule] | None:
        """Return the newest version that was not taken yet; nearly always None."""
        if not self._has_newer.is_set():
            return None
        self._has_newer.clear()
        newest, self._newest = self._newest, None
        return newest

    def wait(self, timeout_s: float) -> bool:
        """Wait until there is a version to take; return whether there is one."""
        return self._has_newer.wait(timeout_s)

    def post(self, report: StepReport | None) -> None:
        """Queue a report; it replaces one that is still queued. None ends the thread."""
        with suppress(queue.Empty):
            self._reports.get_nowait()
        self._reports.put(report)

    def close(self) -> None:
        """Let the threads end; a thread that waits for an answer ends with the process."""
        self._closed.set()
        self.post(None)
        for thread in self._threads:
            thread.join(_CLOSE_TIMEOUT_S)

    def _poll_schedules(self) -> None:
        pause_s = self._first_pause_s
        while not self._closed.is_set():
            try:
                found = self._source.schedule_if_newer(self._known_version, self._wait_s)
            except Exception as error:  # noqa: BLE001 - training continues after any error
                _log.warning(
                    "the service sent no schedule (%s: %s); version %d stays, retry in %.0f s",
                    type(error).__name__,
                    error,
                    self._known_version,
                    pause_s,
                )
                self._closed.wait(pause_s)
                pause_s = min(2 * pause_s, _MAX_PAUSE_S)
                continue
            pause_s = self._first_pause_s
            if found is None:
                # A source that answers without a wait must not be requested in a busy loop.
                self._closed.wait(min(_MIN_PERIOD_S, self._wait_s))
            else:
                self._known_version, self._newest = found[0], found
                self._has_newer.set()

    def _send_reports(self) -> None:
        while (report := self._reports.get()) is not None:
            try:
                self._source.report(
                    report.version, report.measurements, step=report.step, step_ms=report.step_ms
                )
            except Exception as error:  # noqa: BLE001 - the next report has the same information
                _log.warning(
                    "the times measured up to step %d were not reported (%s: %s)",
                    report.step,
                    type(error).__name__,
                    error,
                )
