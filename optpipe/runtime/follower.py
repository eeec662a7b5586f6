"""Following a deployment: training goes on by the newest schedule that the service has found.

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

Between two steps rank 0 tells all others, in one broadcast of two numbers, whether there is a
newer version; where there is, its text follows, all ranks check it together (`PipelineRunner.use`),
and the next step runs it. A version that is refused is reported and passed over. Rank 0 sends
before its own next step, and the others need rank 0's first forward anyway where it holds the first
stage: so nobody waits longer than the pipeline makes him, also where `span` is the objective. On
GPUs the broadcast goes over a gloo group of the same ranks, so that no device is waited for.

Gradients are those of the same micro-batches whatever the schedule: where each stage adds them up
in the same order, they are the same to the last bit, else to the rounding of a sum.

Where every batch is another problem, as with packed sequences, no service is asked: rank 0 plans
each batch before its step, and all ranks run that.

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
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self, cast

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
    from optpipe.problem import Objective, Problem
    from optpipe.runtime.runner import PipelineRunner
    from optpipe.runtime.timing import MeasuredStep
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
        The deployment; looked at on rank 0 of the runner's group only, pass None elsewhere.
    runner
        What runs now. The service must know the same problem: sizes, placement, micro-batches.
    version
        Of the schedule that it runs, 0 if it is not one of the deployment's.
    sample_every
        One step in so many is timed, action by action (see `ActionTimer`).
    report_every
        So many steps after a switch, and then every so many, the times are reported.
    agree_every
        The ranks look for a newer version before one step in so many.
    replan
        From the problem of a batch to its schedule, such as `optpipe_solver.replan`: called on rank
        0 before each step whose problem is not that of the step before. In place of a deployment;
        nothing is then reported.

    Attributes
    ----------
    runner
        What runs the steps. It is the same throughout, and may be used directly: nothing is then
        switched or reported.
    version
        Of the schedule that runs, the same on all ranks; 0 = not one of the deployment's.
    refusals
        The versions that were refused, oldest first, the same on all ranks.
    poller
        Rank 0's line to the service; None elsewhere.

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
                "a deployment's schedules are for one problem, and replan= makes one for each "
                "batch's; give either"
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
        self._timer = self._new_timer()
        self.version, _ = self._agree(version, 0)
        self.poller: SchedulePoller | None = None
        if self._is_first and source is not None:
            self.poller = SchedulePoller(source, version)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Follow no longer; what runs stays."""
        if self._timer is not None:
            self._timer.detach()
        if self.poller is not None:
            self.poller.close()

    def step(self, *args: Any, problem: Problem | None = None, **kwargs: Any) -> Tensor | Any:
        """Switch to a newer version where there is one, and run a step: `PipelineRunner.step`.

        Parameters
        ----------
        *args, **kwargs
            Of `PipelineRunner.step`.
        problem
            With ``replan``, that of this batch. Rank 0 needs it; others may be given it, too, and
            it is then compared with rank 0's.

        Raises
        ------
        PreflightError
            On all ranks alike, if a batch cannot be planned or run, or the ranks' problems differ.
        """
        if self._replan is not None:
            self._plan(problem)
            losses = self.runner.step(*args, **kwargs)
            self._num_steps += 1
            return losses
        if problem is not None:
            raise ValueError("problem= is that of a batch which replan= plans; give follow both")
        if self._num_steps % self._agree_every == 0:
            self._look_for_news()
        losses = self.runner.step(*args, **kwargs)
        self._num_steps += 1
        self._num_timed += 1
        # The first step is a warm-up, so that by then at least one was sampled on all ranks.
        if self._num_timed % self._report_every == 0 and self._num_timed > self._sample_every:
            self._report()
        return losses

    def _plan(self, problem: Problem | None) -> None:
        """Run the schedule of a batch from now on; all ranks, or none of them."""
        found, faults = made_on(0, lambda: self._planned(problem), torch.device("cpu"), self._group)
        if faults:
            raise PreflightError(f"rank 0 cannot plan this batch: {faults[0]}")
        planned, schedule = found
        own = problem if problem is not None else planned
        differ = torch.tensor(own.problem_hash != planned.problem_hash, dtype=torch.int64)
        dist.all_reduce(differ, group=self._group)
        if differ:
            raise PreflightError(
                f"the problem of this batch is {planned.problem_hash} on rank 0, and another one "
                f"on {int(differ)} ranks, {own.problem_hash} on this one; give all ranks the same, "
                "or rank 0 alone"
            )
        if schedule is not None:
            self.runner.use(schedule, planned)

    def _planned(self, problem: Problem | None) -> tuple[Problem, Schedule | None]:
        """Return a batch's problem and schedule; None = the one that runs."""
        if problem is None:
            raise PreflightError("it was given no problem; pass step(..., problem=) there")
        running = self.runner.problem
        if running is not None and running.problem_hash == problem.problem_hash:
            return problem, None
        replan = cast("Callable[[Problem], Schedule]", self._replan)
        return problem, replan(problem)

    def _look_for_news(self) -> None:
        found = self.poller.take() if self.poller is not None else None
        text = b"" if found is None else found[1].model_dump_json(by_alias=True).encode()
        version, size = self._agree(0 if found is None else found[0], len(text))
        if size:
            self._switch(version, load_schedule(self._share(text, size).decode()))

    def _switch(self, version: int, schedule: Schedule) -> None:
        """Run another schedule from now on, if all ranks can."""
        if self._timer is not None:
            self._timer.detach()
        try:
            self.runner.use(schedule)
        except PreflightError as error:
            self.refusals.append(Refusal(version, str(error)))
            if self._is_first:
                _log.warning(
                    "version %d was refused, version %d runs on: %s", version, self.version, error
                )
        else:
            self.version = version
            if self._is_first:
                _log.info("version %d runs from step %d on", version, self._num_steps)
        self._num_timed = 0
        self._timer = self._new_timer()

    def _report(self) -> None:
        """Put together, on rank 0, what all ranks have measured, and leave it to the line."""
        if self._timer is None:
            return
        steps, measurements = self._timer.gather(), self._timer.measurements()
        if self.poller is None or steps is None or measurements is None or self.version == 0:
            return
        objective = self.runner.schedule.objective
        step_ms = statistics.median(_length_ms(step, objective) for step in steps)
        report = StepReport(self.version, self._num_steps, step_ms, measurements.condensed())
        self.poller.post(report)

    def _new_timer(self) -> ActionTimer | None:
        """Return what times steps; nothing where each is of another schedule."""
        if self._replan is not None:
            return None
        return ActionTimer(self.runner, every=self._sample_every)

    def _agree(self, version: int, size: int) -> tuple[int, int]:
        """Return rank 0's two numbers, on every rank."""
        shared = torch.tensor([version, size])
        dist.broadcast(shared, group=self._group, group_src=0)
        return int(shared[0]), int(shared[1])

    def _share(self, text: bytes, size: int) -> bytes:
        """Return rank 0's text, on every rank."""
        buffer = bytearray(text) if self._is_first else bytearray(size)
        dist.broadcast(torch.frombuffer(buffer, dtype=torch.uint8), group=self._group, group_src=0)
        return bytes(buffer)


follow = Follower


def _host_group(group: ProcessGroup | None) -> ProcessGroup | None:
    """Return a group of the same ranks that carries tensors of the host."""
    if backends(group).get("cpu") == dist.Backend.GLOO:
        return group
    return group_alike(group, dist.Backend.GLOO)


def _length_ms(step: MeasuredStep, objective: Objective) -> float:
    """Return the length of a measured step, in ms, as an objective counts it."""
    if objective == "span":
        return step.span_ms
    return max(item.end for row in step.rows for item in row)


# --- Rank 0's line to the service, in two threads: one asks for schedules, one tells measured
# times. Whatever happens to the service - it is slow, stopped, restarted, answers nonsense -
# happens in these threads. They log it, wait, and try again; training never waits for them.

_LONGEST_PAUSE_S = 60.0
_REST_S = 1.0
_LEAVE_S = 0.2


class Source(Protocol):
    """Where schedules come from and measured times go: `optpipe.client.Deployment` is one."""

    def schedule_if_newer(self, version: int, wait_s: float = 0.0) -> tuple[int, Schedule] | None:
        """Return the newest version and its number, waiting for one; None where none is newer."""

    def report(
        self,
        version: int,
        measurements: Measurements,
        *,
        step: int | None = None,
        step_ms: float | None = None,
    ) -> object:
        """Tell what was measured under a version."""


class StepReport(NamedTuple):
    """What was measured under a version up to a step; ``step_ms`` is the pipeline's time alone."""

    version: int
    step: int
    step_ms: float
    measurements: Measurements


class SchedulePoller:
    """Asks a source for newer versions and tells it reports, in daemon threads.

    ``version`` runs already, 0 = nothing of this source. The source may wait ``wait_s`` for a newer
    one before it answers. Each failure in a row doubles the pause after it, up to a minute.
    """

    def __init__(
        self, source: Source, version: int, *, wait_s: float = 30.0, first_pause_s: float = 1.0
    ) -> None:
        self._source = source
        self._known = version
        self._wait_s = wait_s
        self._first_pause_s = first_pause_s
        self._news: tuple[int, Schedule] | None = None
        self._has_news = threading.Event()
        self._reports: queue.Queue[StepReport | None] = queue.Queue(maxsize=1)
        self._closed = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask, name="optpipe-follow", daemon=True),
            threading.Thread(target=self._tell, name="optpipe-report", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def take(self) -> tuple[int, Schedule] | None:
        """Return the newest version that was not taken yet; None at nearly every call."""
        if not self._has_news.is_set():
            return None
        self._has_news.clear()
        news, self._news = self._news, None
        return news

    def wait(self, timeout_s: float) -> bool:
        """Wait until there is a version to take; return whether there is."""
        return self._has_news.wait(timeout_s)

    def post(self, report: StepReport) -> None:
        """Tell a report some time soon; it replaces one that still waits to be told."""
        while True:
            try:
                self._reports.put_nowait(report)
            except queue.Full:
                self._take_back()
            else:
                return

    def close(self) -> None:
        """Let the threads end; one that waits for an answer ends with the process."""
        self._closed.set()
        self._take_back()
        self._reports.put(None)
        for thread in self._threads:
            thread.join(_LEAVE_S)

    def _take_back(self) -> None:
        try:
            self._reports.get_nowait()
        except queue.Empty:
            return

    def _ask(self) -> None:
        pause_s = self._first_pause_s
        while not self._closed.is_set():
            try:
                found = self._source.schedule_if_newer(self._known, self._wait_s)
            except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
                _log.warning(
                    "the service gives no schedule (%s: %s); version %d runs on, asking again "
                    "in %.0f s",
                    type(error).__name__,
                    error,
                    self._known,
                    pause_s,
                )
                self._closed.wait(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                continue
            pause_s = self._first_pause_s
            if found is None:
                # The source has waited; should it not have, this keeps us from asking all the time.
                self._closed.wait(min(_REST_S, self._wait_s))
            else:
                self._known, self._news = found[0], found
                self._has_news.set()

    def _tell(self) -> None:
        while (report := self._reports.get()) is not None:
            try:
                self._source.report(
                    report.version, report.measurements, step=report.step, step_ms=report.step_ms
                )
            except Exception as error:  # noqa: BLE001 - the next report says what this one did
                _log.warning(
                    "the times measured up to step %d were not reported (%s: %s)",
                    report.step,
                    type(error).__name__,
                    error,
                )
