"""`PipelineRunner`: trains stages by a schedule."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from optpipe.action import ActionType
from optpipe.runtime import preflight
from optpipe.runtime.agreement import agree, attempt, fail_together
from optpipe.runtime.boundary import Shapes, as_tensors, probe_pipeline, shapes_of
from optpipe.runtime.errors import PreflightError
from optpipe.runtime.offload import DEFAULT_MIN_BYTES, Cell, Offloader
from optpipe.runtime.passes import Passes
from optpipe.runtime.torch_private import HookedSchedule, HookedStage
from optpipe.runtime.weight_gradients import WeightGradients, split_linears

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch.distributed import ProcessGroup

    from optpipe.action import Program
    from optpipe.problem import Problem
    from optpipe.schedule import Schedule

__all__ = ["PipelineRunner"]


class PipelineRunner:
    """Runs one rank's program of a schedule, with all other ranks, step after step.

    All ranks of the group make one at the same time with the same schedule. Linear layers of the
    stages become `SplitLinear` in place, which changes neither parameters nor results.

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
        The problem the schedule was made for: then memory limits are checked, too.
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
        self.schedule = schedule
        self._stages = dict(sorted(stages.items()))
        self._loss_fn = loss_fn
        self._group = group
        self._rank = dist.get_rank(group)
        self._device = _device_for(device, group)
        self._num_microbatches = preflight.num_microbatches_of(schedule)
        self._loss_divisor = self._num_microbatches if mean_loss else 1
        self._check_together(problem)
        program = schedule.programs[self._rank]
        gradients = WeightGradients()
        for module in self._stages.values():
            split_linears(module, gradients)
        self.offloader = Offloader(
            self._stages,
            self._device,
            _cells(program, ActionType.OFFLOAD),
            min_bytes=min_offload_bytes,
        )
        recomputed = _cells(program, ActionType.RECOMPUTE)
        self._passes = Passes(self.offloader, gradients, recomputed, self._device)
        self._runtime: HookedSchedule | None = None
        self._batch_shapes: tuple[Shapes, Shapes] | None = None
        self._num_steps = 0

    @property
    def holds_first(self) -> bool:
        """Whether this rank takes the batch."""
        return 0 in self._stages

    @property
    def holds_last(self) -> bool:
        """Whether this rank takes the target and makes the losses."""
        return len(self.schedule.placement) - 1 in self._stages

    @property
    def offloaded_bytes(self) -> int:
        """Bytes this rank has moved to the host since it was made."""
        return self.offloader.offloaded_bytes

    @property
    def reloaded_bytes(self) -> int:
        """Bytes this rank has moved back since it was made."""
        return self.offloader.reloaded_bytes

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
        inputs = _as_given(batch) if self.holds_first else ()
        targets = _as_given(target) if self.holds_last else ()
        if self._runtime is None:
            self._runtime = self._start(inputs, targets)
        try:
            self._expect_shapes(inputs, targets)
            losses = self._runtime.run(inputs, targets[0] if targets else None)
        except Exception as error:  # noqa: BLE001 - always raised again
            self._passes.reset()
            fail_together(error, f"step {self._num_steps}", self._group)
        self._num_steps += 1
        return torch.stack(losses) if self.holds_last else None

    def _check_together(self, problem: Problem | None) -> None:
        faults: list[str] = []
        schedule = self.schedule
        num_ranks = dist.get_world_size(self._group)
        attempt(lambda: preflight.check_ranks(schedule, num_ranks), faults)
        if not faults:
            attempt(lambda: preflight.check_programs(schedule, problem), faults)
            attempt(lambda: preflight.check_stages(schedule, self._rank, self._stages), faults)
            attempt(lambda: preflight.check_devices(self._stages, self._device), faults)
        shared = {
            "the programs": schedule.program_hash,
            "the problem": problem.problem_hash if problem is not None else "none given",
        }
        agree(shared, faults, self._group)

    def _start(self, inputs: tuple[Tensor, ...], targets: tuple[Tensor, ...]) -> HookedSchedule:
        """Check the first batch and the stages' shapes on all ranks, and build torch's runtime."""
        faults: list[str] = []
        if self.holds_first:
            attempt(lambda: self._check_given(inputs, "batch"), faults)
        if self.holds_last:
            attempt(lambda: self._check_given(targets, "target"), faults)
        agree({}, faults, self._group)
        self._batch_shapes = (shapes_of(inputs), shapes_of(targets))
        placement = self.schedule.placement
        first = _microbatch_shapes(inputs, self._num_microbatches)
        shapes = probe_pipeline(self._stages, placement, first, self._device, self._group)
        stages = [
            HookedStage(
                module,
                index,
                len(placement),
                device=self._device,
                inputs=tuple(shape.empty(self._device) for shape in shapes[index]),
                outputs=tuple(shape.empty(self._device) for shape in shapes[index + 1]),
                group=self._group,
                hooks=self._passes,
            )
            for index, module in self._stages.items()
        ]
        return HookedSchedule(
            stages,
            self.schedule.programs,
            num_microbatches=self._num_microbatches,
            loss_fn=self._loss_fn,
            loss_divisor=self._loss_divisor,
            hooks=self._passes,
        )

    def _check_given(self, tensors: tuple[Tensor, ...], what: str) -> None:
        if not tensors:
            raise PreflightError(
                f"step() was given no {what} on the rank that uses it; pass {what}= there"
            )
        preflight.check_batch(as_tensors(tensors, f"the {what}"), what, self._num_microbatches)

    def _expect_shapes(self, inputs: tuple[Tensor, ...], targets: tuple[Tensor, ...]) -> None:
        found = (shapes_of(inputs), shapes_of(targets))
        if found != self._batch_shapes:
            raise PreflightError(
                f"batch and target have shapes {found}, the first ones had {self._batch_shapes}; "
                "receive buffers are made once: pad the batch, or make another runner"
            )


def _device_for(device: torch.device | str | None, group: ProcessGroup | None) -> torch.device:
    if device is None:
        device = "cuda" if dist.get_backend(group) == dist.Backend.NCCL else "cpu"
    found = torch.device(device)
    if found.type == "cuda" and found.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return found


def _as_given(values: Tensor | tuple[Tensor, ...] | None) -> tuple[Tensor, ...]:
    if values is None:
        return ()
    return tuple(values) if isinstance(values, tuple | list) else (values,)


def _cells(program: Program, kind: ActionType) -> frozenset[Cell]:
    return frozenset((action.stage, action.microbatch) for action in program if action.type is kind)


def _microbatch_shapes(inputs: tuple[Tensor, ...], num_microbatches: int) -> Shapes:
    return tuple(
        shape._replace(size=(shape.size[0] // num_microbatches, *shape.size[1:]))
        for shape in shapes_of(inputs)
    )
