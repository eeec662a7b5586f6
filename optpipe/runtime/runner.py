"""`PipelineRunner`: trains and evaluates stages by a schedule."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from optpipe.action import ActionType
from optpipe.runtime.agreement import fail_together
from optpipe.runtime.host_pool import count_slots
from optpipe.runtime.offload import DEFAULT_MIN_BYTES, Cell, Offloader
from optpipe.runtime.passes import Observer, Passes
from optpipe.runtime.pipeline import Blueprint, Pipeline, check_blueprint, start_pipeline
from optpipe.runtime.watch import Watch
from optpipe.runtime.weight_gradients import SplitLinear, WeightGradients, split_linears

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch.distributed import ProcessGroup

    from optpipe.action import Action, Program
    from optpipe.problem import Problem
    from optpipe.runtime.needs import Needs
    from optpipe.schedule import Schedule

__all__ = ["Evaluation", "PipelineRunner"]


class Evaluation(NamedTuple):
    """What an evaluation gives on the last stage's rank; both None elsewhere.

    ``losses`` by micro-batch, shape (num_microbatches,), None without a target; ``outputs`` of the
    whole batch, samples in dimension 0, as the last stage returns them.
    """

    losses: Tensor | None
    outputs: Any


class PipelineRunner:
    """Runs one rank's program of a schedule, with all other ranks, step after step.

    All ranks of the group make one at the same time with the same schedule. Where a stage's
    backwards are split, its linear layers become `SplitLinear` in place, which changes neither
    parameters nor results.

    A rank that fails leaves its cause for the others and raises; they raise `RankError` with that
    cause as soon as their connections to it break. Its process should end: if it lives on, the
    others, which no exception can reach in a receive, end after seconds by themselves with that
    cause on stderr (`optpipe.runtime.watch`).

    Parameters
    ----------
    stages
        The stages of this rank, by index; each takes and returns a tensor or a tuple of tensors
        whose dimension 0 is the samples, except the first stage's input and the last one's output.
    schedule
        What to run; rank i of the group runs program i.
    loss_fn
        From (output of the last stage, target) of a micro-batch to a scalar.
    problem
        The problem the schedule was made for: then memory is checked, too.
    device
        Where the stages are; the current CUDA device under NCCL, else the CPU.
    group
        The ranks of the pipeline; all by default.
    mean_loss
        Whether ``loss_fn`` averages over samples, so that the batch's loss and gradients are the
        means over its micro-batches; False for losses that sum.
    min_offload_bytes
        Storages below this are not offloaded.

    Raises
    ------
    PreflightError
        On every rank alike, if schedule, ranks and stages do not fit together.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        schedule: Schedule,
        loss_fn: Callable[[Any, Any], Tensor],
        problem: Problem | None = None,
        *,
        device: torch.device | str | None = None,
        group: ProcessGroup | None = None,
        mean_loss: bool = True,
        min_offload_bytes: int = DEFAULT_MIN_BYTES,
    ) -> None:
        self._blueprint = Blueprint(
            stages=dict(sorted(stages.items())),
            schedule=schedule,
            loss_fn=loss_fn,
            problem=problem,
            rank=dist.get_rank(group),
            device=_device_for(device, group),
            group=group,
            mean_loss=mean_loss,
        )
        self._min_offload_bytes = min_offload_bytes
        check_blueprint(self._blueprint)
        self.offloader, self._passes = self._prepare(self._blueprint)
        gradients = _gradients_of(self._blueprint.stages)
        self._forwards = self._make_passes(self._make_offloader((), 1), gradients, ())
        self._training: Pipeline | None = None
        self._evaluating: Pipeline | None = None
        self._watch = Watch.over(group)
        weakref.finalize(self, self._watch.stop)
        self._num_steps = 0
        self._moved_before = (0, 0)

    @property
    def schedule(self) -> Schedule:
        """What is run."""
        return self._blueprint.schedule

    @property
    def group(self) -> ProcessGroup | None:
        """The ranks of the pipeline; None = all."""
        return self._blueprint.group

    @property
    def device(self) -> torch.device:
        """Where the stages are."""
        return self._blueprint.device

    @property
    def holds_first(self) -> bool:
        """Whether this rank takes the batch."""
        return self._blueprint.holds_first

    @property
    def holds_last(self) -> bool:
        """Whether this rank takes the target and makes the losses."""
        return self._blueprint.holds_last

    @property
    def offloaded_bytes(self) -> int:
        """Bytes this rank has moved to the host since it was made."""
        return self._moved_before[0] + self.offloader.offloaded_bytes

    @property
    def reloaded_bytes(self) -> int:
        """Bytes this rank has moved back since it was made."""
        return self._moved_before[1] + self.offloader.reloaded_bytes

    @property
    def needs(self) -> Needs | None:
        """What the schedule takes of device and host; known from the first step on."""
        return self._training.needs if self._training is not None else None

    @property
    def boundary_levels(self) -> Mapping[Action, int]:
        """Bytes of boundary tensors on this rank while each action runs; {} before a step."""
        return self._training.boundary if self._training is not None else {}

    def observe(self, observer: Observer | None) -> None:
        """Show every action of a step to somebody, for example to measure it; None = nobody."""
        self._passes.observer = observer

    def use(self, schedule: Schedule) -> None:
        """Run another schedule from the next step on; all ranks together, between two steps.

        It is checked as the first one was. Where it is refused, on every rank alike, the old one
        stays. The stages stay where they are, and so must the placement. It may have been made for
        other times: memory does not depend on them (DESIGN section 3), and sizes are checked
        against the runner's problem. Gradients that stand are added to as before.

        Observers stay, but one that knows the programs, such as `ActionTimer`, must be detached
        before, and made again.

        Raises
        ------
        PreflightError
            If schedule, ranks and stages do not fit together, or it takes more memory than there
            is.
        """
        problem = self._blueprint.problem
        if problem is not None:
            schedule = schedule.model_copy(update={"problem_hash": problem.problem_hash})
        blueprint = replace(self._blueprint, schedule=schedule)
        check_blueprint(blueprint)
        offloader, passes = self._prepare(blueprint)
        training = None
        if self._training is not None:
            examples = self._training.examples()
            training = start_pipeline(blueprint, passes, *examples, trains=True)
        passes.observer = self._passes.observer
        self._moved_before = (self.offloaded_bytes, self.reloaded_bytes)
        self._blueprint, self._training = blueprint, training
        self.offloader, self._passes = offloader, passes

    def step(
        self, batch: Tensor | tuple[Tensor, ...] | None = None, target: Tensor | None = None
    ) -> Tensor | None:
        """Run forward and backward of one batch; gradients are added to ``parameter.grad``.

        Parameters
        ----------
        batch
            Inputs of the first stage, samples in dimension 0; looked at on its rank only.
        target
            Of the loss, samples in dimension 0; looked at on the last stage's rank only.

        Returns
        -------
        Tensor or None
            The losses by micro-batch, shape (num_microbatches,), on the last stage's rank.

        Raises
        ------
        PreflightError
            On every rank, if the first batch does not divide or the stages do not fit together;
            later on the rank whose batch has another shape than the first.
        RankError
            If another rank failed; the message holds its cause.
        """
        inputs, targets = self._given(batch, target)
        if self._training is None:
            self._training = start_pipeline(
                self._blueprint, self._passes, inputs, targets, trains=True
            )
        losses, _ = self._run(self._training, self._passes, inputs, targets)
        self._num_steps += 1
        return torch.stack(losses) if self.holds_last else None

    def eval(
        self, batch: Tensor | tuple[Tensor, ...] | None = None, target: Tensor | None = None
    ) -> Evaluation:
        """Run the forwards of one batch, without gradients and keeping nothing.

        The modules stay in the mode they are in: switch dropout off by their own ``eval()``. The
        batch may have another size than those of `step`, but each time the same.

        Parameters
        ----------
        batch, target
            As for `step`; the target may be left out.

        Raises
        ------
        PreflightError, RankError
            As `step`.
        """
        inputs, targets = self._given(batch, target)
        with torch.no_grad():
            if self._evaluating is None:
                self._evaluating = start_pipeline(
                    self._blueprint, self._forwards, inputs, targets, trains=False
                )
            losses, outputs = self._run(self._evaluating, self._forwards, inputs, targets)
        return Evaluation(torch.stack(losses) if losses else None, _joined(outputs))

    def close(self) -> None:
        """End what the runner has in the background, a thread; nothing runs after it."""
        self._watch.stop()

    def _given(
        self, batch: Tensor | tuple[Tensor, ...] | None, target: Tensor | None
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        return (
            _as_given(batch) if self.holds_first else (),
            _as_given(target) if self.holds_last else (),
        )

    def _run(
        self,
        pipeline: Pipeline,
        passes: Passes,
        inputs: tuple[Tensor, ...],
        targets: tuple[Tensor, ...],
    ) -> tuple[list[Tensor], list[Any]]:
        try:
            with self._watch:
                pipeline.expect(inputs, targets)
                return pipeline.runtime.run(inputs, targets[0] if targets else None)
        except Exception as error:  # noqa: BLE001 - always raised again
            passes.reset()
            fail_together(error, self._where(passes), self._blueprint.group)

    def _where(self, passes: Passes) -> str:
        what = f"step {self._num_steps}" if passes is self._passes else "evaluation"
        return what if passes.running is None else f"{what}, in {passes.running}"

    def _prepare(self, blueprint: Blueprint) -> tuple[Offloader, Passes]:
        """Return what this rank does around the passes of its program; split what it splits."""
        program = blueprint.programs[blueprint.rank]
        gradients = _gradients_of(blueprint.stages)
        split = {stage for stage, _ in _cells(program, ActionType.BACKWARD_INPUT)}
        for index in sorted(split):
            split_linears(blueprint.stages[index], gradients)
        offloader = self._make_offloader(program, self._min_offload_bytes)
        return offloader, self._make_passes(offloader, gradients, program)

    def _make_offloader(self, program: Program, min_bytes: int) -> Offloader:
        return Offloader(
            self._blueprint.stages,
            self._blueprint.device,
            _cells(program, ActionType.OFFLOAD),
            min_bytes=min_bytes,
            num_slots=count_slots(program),
        )

    def _make_passes(
        self, offloader: Offloader, gradients: WeightGradients, program: Program
    ) -> Passes:
        return Passes(
            offloader,
            gradients,
            _cells(program, ActionType.RECOMPUTE),
            len(self.schedule.placement) - 1,
            self._blueprint.device,
        )


def _device_for(device: torch.device | str | None, group: ProcessGroup | None) -> torch.device:
    if device is None:
        device = "cuda" if dist.get_backend(group) == dist.Backend.NCCL else "cpu"
    found = torch.device(device)
    if found.type == "cuda" and found.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return found


def _gradients_of(stages: Mapping[int, nn.Module]) -> WeightGradients:
    """Return where split layers put gradients: where those of an earlier runner do, if any.

    So that runners of several schedules can take turns on the same stages.
    """
    layers = (layer for module in stages.values() for layer in module.modules())
    split = (layer.gradients for layer in layers if isinstance(layer, SplitLinear))
    return next(split, None) or WeightGradients()


def _as_given(values: Tensor | tuple[Tensor, ...] | None) -> tuple[Tensor, ...]:
    if values is None:
        return ()
    return tuple(values) if isinstance(values, tuple | list) else (values,)


def _cells(program: Program, kind: ActionType) -> frozenset[Cell]:
    return frozenset((action.stage, action.microbatch) for action in program if action.type is kind)


def _joined(outputs: list[Any]) -> Any:
    """Return the outputs of all micro-batches as one batch."""
    if not outputs:
        return None
    if isinstance(outputs[0], tuple | list):
        return tuple(torch.cat(parts) for parts in zip(*outputs, strict=True))
    return torch.cat(outputs)
