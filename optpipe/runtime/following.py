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
"""

from __future__ import annotations

import logging
import statistics
from typing import TYPE_CHECKING, NamedTuple, Self

import torch
import torch.distributed as dist

from optpipe.formats.json_text import load_schedule
from optpipe.runtime.errors import PreflightError
from optpipe.runtime.service_line import ServiceLine, StepReport
from optpipe.runtime.timing import DEFAULT_EVERY, ActionTimer

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from optpipe.problem import Objective
    from optpipe.runtime.alignment import MeasuredStep
    from optpipe.runtime.runner import PipelineRunner
    from optpipe.runtime.service_line import Source
    from optpipe.schedule import Schedule

__all__ = ["Follower", "Refusal", "follow"]

_REPORT_EVERY = 200
_log = logging.getLogger("optpipe.runtime.follow")


class Refusal(NamedTuple):
    """A version that the ranks refused to run, and why."""

    version: int
    reason: str


def follow(
    source: Source | None,
    runner: PipelineRunner,
    *,
    version: int = 0,
    sample_every: int = DEFAULT_EVERY,
    report_every: int = _REPORT_EVERY,
    agree_every: int = 1,
) -> Follower:
    """Return what runs the steps of a training that follows a deployment; all ranks together.

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

    Raises
    ------
    ValueError
        If one of these is below 1.
    """
    for name, value in (
        ("sample_every", sample_every),
        ("report_every", report_every),
        ("agree_every", agree_every),
    ):
        if value < 1:
            raise ValueError(f"{name} = {value}: must be at least 1; 1 means every step")
    return Follower(
        source,
        runner,
        version=version,
        sample_every=sample_every,
        report_every=report_every,
        agree_every=agree_every,
    )


class Follower:
    """Runs steps by the newest version; make it with `follow`, close it, or use it in a ``with``.

    Attributes
    ----------
    runner
        What runs the steps. It is the same throughout, and may be used directly: nothing is then
        switched or reported.
    version
        Of the schedule that runs, the same on all ranks; 0 = not one of the deployment's.
    refusals
        The versions that were refused, oldest first, the same on all ranks.
    line
        Rank 0's line to the service; None elsewhere.
    """

    def __init__(
        self,
        source: Source | None,
        runner: PipelineRunner,
        *,
        version: int,
        sample_every: int,
        report_every: int,
        agree_every: int,
    ) -> None:
        self.runner = runner
        self.refusals: list[Refusal] = []
        self._sample_every = sample_every
        self._report_every = report_every
        self._agree_every = agree_every
        self._group = _host_group(runner.group)
        self._is_first = dist.get_rank(runner.group) == 0
        self._num_steps = 0
        self._num_timed = 0
        self._timer = self._time()
        self.version, _ = self._agree(version, 0)
        asks = self._is_first and source is not None
        self.line = ServiceLine(source, version) if asks and source is not None else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Follow no longer; what runs stays."""
        self._timer.detach()
        if self.line is not None:
            self.line.close()

    def step(
        self, batch: Tensor | tuple[Tensor, ...] | None = None, target: Tensor | None = None
    ) -> Tensor | None:
        """Switch to a newer version where there is one, and run a step: `PipelineRunner.step`."""
        if self._num_steps % self._agree_every == 0:
            self._look_for_news()
        losses = self.runner.step(batch, target)
        self._num_steps += 1
        self._num_timed += 1
        # The first step is a warm-up, so that by then at least one was sampled on all ranks.
        if self._num_timed % self._report_every == 0 and self._num_timed > self._sample_every:
            self._report()
        return losses

    def _look_for_news(self) -> None:
        found = self.line.take() if self.line is not None else None
        text = b"" if found is None else found[1].model_dump_json(by_alias=True).encode()
        version, size = self._agree(0 if found is None else found[0], len(text))
        if size:
            self._switch(version, load_schedule(self._share(text, size).decode()))

    def _switch(self, version: int, schedule: Schedule) -> None:
        """Run another schedule from now on, if all ranks can."""
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
        self._timer = self._time()

    def _report(self) -> None:
        """Put together, on rank 0, what all ranks have measured, and leave it to the line."""
        steps, measurements = self._timer.gather(), self._timer.measurements()
        if self.line is None or steps is None or measurements is None or self.version == 0:
            return
        objective = self.runner.schedule.objective
        step_ms = statistics.median(_length_ms(step, objective) for step in steps)
        report = StepReport(self.version, self._num_steps, step_ms, measurements.condensed())
        self.line.post(report)

    def _time(self) -> ActionTimer:
        return ActionTimer(self.runner, every=self._sample_every, group=self.runner.group)

    def _agree(self, version: int, size: int) -> tuple[int, int]:
        """Return rank 0's two numbers, on every rank."""
        told = torch.tensor([version, size])
        dist.broadcast(told, group=self._group, group_src=0)
        return int(told[0]), int(told[1])

    def _share(self, text: bytes, size: int) -> bytes:
        """Return rank 0's text, on every rank."""
        held = bytearray(text) if self._is_first else bytearray(size)
        dist.broadcast(torch.frombuffer(held, dtype=torch.uint8), group=self._group, group_src=0)
        return bytes(held)


def _host_group(group: ProcessGroup | None) -> ProcessGroup | None:
    """Return a group of the same ranks that carries tensors of the host."""
    if dist.get_backend(group) == dist.Backend.GLOO:
        return group
    ranks = dist.get_process_group_ranks(group)
    made: ProcessGroup = dist.new_group(
        ranks, backend=dist.Backend.GLOO, use_local_synchronization=True
    )
    return made


def _length_ms(step: MeasuredStep, objective: Objective) -> float:
    """Return the length of a measured step, in ms, as an objective counts it."""
    if objective == "span":
        return step.span_ms
    return max(item.end for row in step.rows for item in row)
