"""Train by the best schedule known: switch to a better one, and report measured times.

::

    with Client(url) as client:
        run = client.training_run(client.submit(problem))      # on rank 0
        first = run.schedule(wait_s=60)                        # broadcast to all
        runner = PipelineRunner(own, first, loss_fn, problem)
        with follow(run, runner) as training:                  # follow(None, runner) elsewhere
            for batch, target in data:
                losses = training.step(batch, target)
                optimizer.step()

Between two steps, rank 0 broadcasts whether there is a schedule to switch to. If there is one,
rank 0 broadcasts its text. All ranks check it together (`PipelineRunner.use`), and the next step
runs it. If a rank refuses the schedule, all ranks skip it and rank 0 logs the reason.

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
import statistics
import threading
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

    from optpipe.measurements import Measurements
    from optpipe.problem import Problem
    from optpipe.runtime.runner import PipelineRunner
    from optpipe.schedule import Schedule

__all__ = ["Follower", "Refusal", "SchedulePoller", "Source", "StepReport", "follow"]


_log = logging.getLogger("optpipe.runtime.follower")


class Refusal(NamedTuple):
    """A schedule that the ranks refused to run: before which step, and why."""

    step: int
    reason: str


class Follower:
    """Runs the steps of a training that switches to better schedules; all ranks together.

    Close it, or use it in a ``with``.

    Parameters
    ----------
    source
        The source of better schedules, on rank 0 of the runner's group; None on all other ranks.
    runner
        Runs the steps. The source must know the same problem: sizes, placement, micro-batches.
    sample_every
        The period, in steps, of the steps whose actions are timed (see `ActionTimer`).
    report_every
        The period, in steps since the last switch, of the reports of measured times.
    replan
        A function from the problem of a batch to its schedule, such as `optpipe_solver.replan`, to
        use instead of a source. Rank 0 calls it before each step whose problem differs from the
        one before. Nothing is reported.

    Attributes
    ----------
    runner
        The runner, which stays the same. You may use it directly; such a step switches and reports
        nothing.
    num_switches
        Number of schedules that the ranks switched to, equal on all ranks.
    refusals
        The schedules that the ranks refused, oldest first, equal on all ranks.
    poller
        The thread of rank 0 that communicates with the source; None on other ranks.

    Raises
    ------
    ValueError
        If a period is below 1, or there are both a source and ``replan``.
    """

    def __init__(
        self,
        source: Source | None,
        runner: PipelineRunner,
        *,
        sample_every: int = DEFAULT_EVERY,
        report_every: int = 200,
        replan: Callable[[Problem], Schedule] | None = None,
    ) -> None:
        for name, value in (("sample_every", sample_every), ("report_every", report_every)):
            if value < 1:
                raise ValueError(f"{name} = {value}: must be at least 1; 1 means every step")
        if source is not None and replan is not None:
            raise ValueError(
                "there are both a source and replan=: the schedules of a source are for "
                "one problem, and replan= plans the problem of each batch; give either"
            )
        self._replan = replan
        self.runner = runner
        self.refusals: list[Refusal] = []
        self._sample_every = sample_every
        self._report_every = report_every
        # Its tensors are on the host.
        is_gloo = backends(runner.group).get("cpu") == dist.Backend.GLOO
        self._group = runner.group if is_gloo else group_alike(runner.group, dist.Backend.GLOO)
        self._is_first = dist.get_rank(runner.group) == 0
        self._num_steps = 0
        self._num_timed = 0
        # With replan= steps have different schedules, so their times are not comparable.
        self._timer = None if replan is not None else ActionTimer(runner, every=sample_every)
        self.num_switches = 0
        self.poller: SchedulePoller | None = None
        if self._is_first and source is not None:
            self.poller = SchedulePoller(source)

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
        """Switch to a better schedule if there is one, then run a step: `PipelineRunner.step`.

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
        else:
            self._switch()
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

    def _switch(self) -> None:
        """Run the schedule that the source has found, if there is one and all ranks can run it."""
        found = self.poller.take() if self.poller is not None else None
        text = b"" if found is None else found.model_dump_json(by_alias=True).encode()
        num_bytes = torch.tensor(len(text))
        dist.broadcast(num_bytes, group=self._group, group_src=0)
        if not num_bytes:
            return
        buffer = bytearray(text) if self._is_first else bytearray(int(num_bytes))
        dist.broadcast(torch.frombuffer(buffer, dtype=torch.uint8), group=self._group, group_src=0)
        schedule = load_schedule(buffer.decode())
        if self._timer is not None:
            self._timer.detach()
        try:
            self.runner.use(schedule)
        except PreflightError as error:
            self.refusals.append(Refusal(self._num_steps, str(error)))
            if self._is_first:
                _log.warning("a schedule was refused, the running one stays: %s", error)
        else:
            self.num_switches += 1
            if self._is_first:
                _log.info(
                    "another schedule (%s, %.6g ms) runs from step %d on",
                    schedule.provenance.method,
                    schedule.objective_ms,
                    self._num_steps,
                )
        self._num_timed = 0
        self._timer = ActionTimer(self.runner, every=self._sample_every)

    def _report(self) -> None:
        """Gather the times of all ranks on rank 0, and queue a report."""
        if self._timer is None:
            return
        steps, measurements = self._timer.gather(), self._timer.measurements()
        if self.poller is None or steps is None or measurements is None:
            return
        is_span = self.runner.schedule.objective == "span"
        step_ms = statistics.median(
            step.span_ms if is_span else max(item.end for row in step.rows for item in row)
            for step in steps
        )
        self.poller.post(
            StepReport(self.runner.schedule, self._num_steps, step_ms, measurements.condensed())
        )


follow = Follower


# --- The connection of rank 0 to the source: one thread requests schedules and sends reports.
# The service may be slow, stop, restart or send an invalid answer. The thread logs the error,
# pauses and retries. Training never waits for it.

_MAX_PAUSE_S = 60.0
_MIN_PERIOD_S = 1.0
_CLOSE_TIMEOUT_S = 0.2


class Source(Protocol):
    """A source of better schedules, such as `optpipe.client.TrainingRun`; one thread calls it."""

    def next_schedule(self, wait_s: float = 0.0) -> Schedule | None:
        """Return a schedule to switch to; None if there is none after at most ``wait_s``."""

    def report(
        self,
        schedule: Schedule,
        measurements: Measurements,
        *,
        step: int | None = None,
        step_ms: float | None = None,
    ) -> object:
        """Take times that were measured while a schedule ran."""


class StepReport(NamedTuple):
    """Times measured up to a step; ``step_ms`` is the time of the pipeline only."""

    schedule: Schedule
    step: int
    step_ms: float
    measurements: Measurements


class SchedulePoller:
    """Requests schedules from a source and sends it reports, in a daemon thread.

    The source may wait ``wait_s`` for a schedule before it answers. Each consecutive failure
    doubles the pause before the retry, from ``first_pause_s`` up to a minute.
    """

    def __init__(self, source: Source, *, wait_s: float = 30.0, first_pause_s: float = 1.0) -> None:
        self._source = source
        self._wait_s = wait_s
        self._first_pause_s = first_pause_s
        self._found: Schedule | None = None
        self._report: StepReport | None = None
        self._is_closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="optpipe-follow", daemon=True)
        self._thread.start()

    def take(self) -> Schedule | None:
        """Return the newest schedule that was not taken yet; nearly always None."""
        with self._changed:
            found, self._found = self._found, None
        return found

    def wait(self, timeout_s: float) -> bool:
        """Wait until there is a schedule to take; return whether there is one."""
        with self._changed:
            return self._changed.wait_for(lambda: self._found is not None, timeout_s)

    def post(self, report: StepReport) -> None:
        """Queue a report; it replaces one that is still queued.

        A report is dropped while there is a schedule to take: it is not of the next schedule.
        """
        with self._changed:
            if self._found is None:
                self._report = report
                self._changed.notify_all()

    def close(self) -> None:
        """Let the thread end; if it waits for an answer, it ends with the process."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        pause_s = self._first_pause_s
        while not self._is_closed:
            try:
                self._communicate()
            except Exception as error:  # noqa: BLE001 - training continues after any error
                _log.warning(
                    "the service sent no schedule or took no report (%s: %s); the running "
                    "schedule stays, retry in %.2g s",
                    type(error).__name__,
                    error,
                    pause_s,
                )
                with self._changed:
                    self._changed.wait_for(lambda: self._is_closed, pause_s)
                pause_s = min(2 * pause_s, _MAX_PAUSE_S)
            else:
                pause_s = self._first_pause_s

    def _communicate(self) -> None:
        """Request a schedule, then send the queued report if there is one."""
        found = self._source.next_schedule(self._wait_s)
        with self._changed:
            if found is not None:
                self._found, self._report = found, None
                self._changed.notify_all()
                return
            # A source that answers without a wait must not be requested in a busy loop.
            period_s = min(_MIN_PERIOD_S, self._wait_s)
            self._changed.wait_for(lambda: self._is_closed or self._report is not None, period_s)
            report, self._report = self._report, None
        if report is not None and not self._is_closed:
            self._source.report(
                report.schedule, report.measurements, step=report.step, step_ms=report.step_ms
            )
