"""`PipelineRunner`: trains and evaluates stages by a schedule."""

from __future__ import annotations

import hashlib
import weakref
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from optpipe.runtime import preflight
from optpipe.runtime.errors import PreflightError
from optpipe.runtime.messages import boundary_levels, check_orders, sends_over_before, window_of
from optpipe.runtime.offload import DEFAULT_MIN_BYTES, Cell, Offloader, count_slots
from optpipe.runtime.passes import (
    ActionObserver,
    Passes,
    SplitLinear,
    WeightGradients,
    deferred_bytes,
    split_linears,
)
from optpipe.runtime.preflight import (
    Shapes,
    agree,
    attempt,
    check_needs,
    gather,
    needs_of,
    probe_pipeline,
    shapes_of,
)
from optpipe.runtime.torch_names import backends, check_torch, group_of_messages, tree_map
from optpipe.runtime.torch_schedule import HookedSchedule, HookedStage
from optpipe.runtime.treatments import treatments_of
from optpipe.runtime.watch import Activity, DeviceMarks, watch_over
from optpipe.schedule import ActionType

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.distributed import ProcessGroup

    from optpipe.problem import Problem
    from optpipe.runtime.messages import Order
    from optpipe.runtime.treatments import Treatment
    from optpipe.schedule import Action, Pass, Program, Schedule

__all__ = [
    "Evaluation",
    "Pipeline",
    "PipelineRunner",
    "PipelineSpec",
]


class Evaluation(NamedTuple):
    """What an evaluation gives on the last stage's rank; both None elsewhere.

    ``losses`` by micro-batch, shape (num_microbatches,), None without a target; ``outputs`` as the
    last stage returns them, tensors of the whole batch, samples in dimension 0, and all else as
    lists by micro-batch.
    """

    losses: Tensor | None
    outputs: Any


class PipelineRunner:
    """Runs one rank's program of a schedule, with all other ranks, step after step.

    All ranks of the group make one at the same time with the same schedule. Linear layers become
    `SplitLinear` in place, as in `measure`, whatever the schedule: that changes neither parameters
    nor results, but what a micro-batch holds under autocast.

    If a rank raises, hangs or dies, all others raise `RankError` with the cause, the same on all,
    within seconds; one that cannot, because it waits where no exception reaches it, ends with
    `EXIT_CODE` and that cause on stderr (`optpipe.runtime.watch`).

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
    hang_timeout_s
        For so long an action may last; a rank that is in one for longer has failed, as has one that
        others wait for and that does not begin its step. Compilation in a first step counts.

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
        hang_timeout_s: float = 300.0,
    ) -> None:
        self._spec = PipelineSpec(
            stages=dict(sorted(stages.items())),
            schedule=schedule,
            loss_fn=loss_fn,
            problem=problem,
            rank=dist.get_rank(group),
            device=_device_for(device, group),
            group=group,
            messages=group_of_messages(group),
            mean_loss=mean_loss,
        )
        self._min_offload_bytes = min_offload_bytes
        _check_spec(self._spec)
        on_gpu = self._spec.device.type == "cuda"
        self._activity = Activity(DeviceMarks(self._spec.device) if on_gpu else None)
        self.offloader, self._passes = self._prepare(self._spec)
        gradients = _gradients_of(self._spec.stages)
        self._forwards = self._make_passes(self._make_offloader({}, (), 1), gradients, {})
        self._training: Pipeline | None = None
        self._evaluating: Pipeline | None = None
        self._watch = watch_over(
            group, self._spec.messages, schedule.placement, self._activity, hang_timeout_s
        )
        weakref.finalize(self, self._watch.stop)
        self._num_steps = 0
        self._moved_before = (0, 0)

    @property
    def schedule(self) -> Schedule:
        """What is run."""
        return self._spec.schedule

    @property
    def group(self) -> ProcessGroup | None:
        """The ranks of the pipeline; None = all."""
        return self._spec.group

    @property
    def device(self) -> torch.device:
        """Where the stages are."""
        return self._spec.device

    @property
    def holds_first(self) -> bool:
        """Whether this rank takes the batch."""
        return 0 in self._spec.stages

    @property
    def holds_last(self) -> bool:
        """Whether this rank takes the target and makes the losses."""
        return len(self.schedule.placement) - 1 in self._spec.stages

    @property
    def deferred_bytes(self) -> dict[int, int]:
        """Bytes of weight gradient that wait for W, by stage of this rank that is split."""
        split = {stage for stage, _ in _cells(self._spec.program, ActionType.BACKWARD_WEIGHT)}
        return {index: deferred_bytes(self._spec.stages[index]) for index in sorted(split)}

    @property
    def offloaded_bytes(self) -> int:
        """Bytes this rank has moved to the host since it was made."""
        return self._moved_before[0] + self.offloader.offloaded_bytes

    @property
    def reloaded_bytes(self) -> int:
        """Bytes this rank has moved back since it was made."""
        return self._moved_before[1] + self.offloader.reloaded_bytes

    def observe(self, observer: ActionObserver | None) -> None:
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
        problem = self._spec.problem
        if problem is not None:
            schedule = schedule.model_copy(update={"problem_hash": problem.problem_hash})
        spec = replace(self._spec, schedule=schedule)
        _check_spec(spec)
        offloader, passes = self._prepare(spec)
        training = None
        if self._training is not None:
            examples = self._training.examples()
            training = _start_pipeline(spec, passes, *examples, trains=True)
        passes.observer = self._passes.observer
        self._moved_before = (self.offloaded_bytes, self.reloaded_bytes)
        self._spec, self._training = spec, training
        self.offloader, self._passes = offloader, passes

    def step(
        self,
        batch: Tensor | tuple[Tensor, ...] | None = None,
        target: Tensor | tuple[Tensor, ...] | None = None,
    ) -> Tensor | None:
        """Run forward and backward of one batch; gradients are added to ``parameter.grad``.

        Parameters
        ----------
        batch
            Inputs of the first stage, samples in dimension 0; looked at on its rank only.
        target
            Of the loss, samples in dimension 0; looked at on the last stage's rank only. The loss
            gets a micro-batch of it: a tensor, or, of a tuple, the tuple.

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
        inputs, targets = self._used(batch, target)
        if self._training is None:
            with self._watch.over("the start", shared=(PreflightError,)):
                self._training = _start_pipeline(
                    self._spec, self._passes, inputs, targets, trains=True
                )
        losses, _ = self._run(self._training, self._passes, inputs, target)
        self._num_steps += 1
        return torch.stack(losses) if self.holds_last else None

    def eval(
        self,
        batch: Tensor | tuple[Tensor, ...] | None = None,
        target: Tensor | tuple[Tensor, ...] | None = None,
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
        inputs, targets = self._used(batch, target)
        with torch.no_grad():
            if self._evaluating is None:
                with self._watch.over("the start", shared=(PreflightError,)):
                    self._evaluating = _start_pipeline(
                        self._spec, self._forwards, inputs, targets, trains=False
                    )
            losses, outputs = self._run(self._evaluating, self._forwards, inputs, target)
        return Evaluation(torch.stack(losses) if losses else None, _joined(outputs))

    def close(self) -> None:
        """End what the runner has in the background, a thread; nothing runs after it."""
        self._watch.close()

    def _used(
        self,
        batch: Tensor | tuple[Tensor, ...] | None,
        target: Tensor | tuple[Tensor, ...] | None,
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return batch and target as tuples, each where it is looked at."""
        return (
            _as_tuple(batch) if self.holds_first else (),
            _as_tuple(target) if self.holds_last else (),
        )

    def _run(
        self,
        pipeline: Pipeline,
        passes: Passes,
        inputs: tuple[Tensor, ...],
        target: Tensor | tuple[Tensor, ...] | None,
    ) -> tuple[list[Tensor], list[Any]]:
        what = f"step {self._num_steps}" if passes is self._passes else "evaluation"
        try:
            with self._watch.over(what):
                pipeline.expect(inputs, _as_tuple(target) if self.holds_last else ())
                return pipeline.runtime.run(inputs, target if self.holds_last else None)
        except Exception:
            passes.reset()
            raise

    def _prepare(self, spec: PipelineSpec) -> tuple[Offloader, Passes]:
        """Return what this rank does around the passes of its program; split its linear layers."""
        program = spec.program
        gradients = _gradients_of(spec.stages)
        for module in spec.stages.values():
            split_linears(module, gradients)
        treatments = treatments_of(spec.problem, program, spec.stages)
        offloader = self._make_offloader(treatments, program, self._min_offload_bytes)
        return offloader, self._make_passes(offloader, gradients, treatments)

    def _make_offloader(
        self, treatments: Mapping[Cell, Treatment], program: Program, min_bytes: int
    ) -> Offloader:
        return Offloader(
            self._spec.stages,
            self._spec.device,
            {cell: one.moved for cell, one in treatments.items() if one.moved},
            min_bytes=min_bytes,
            num_slots=count_slots(program),
        )

    def _make_passes(
        self,
        offloader: Offloader,
        gradients: WeightGradients,
        treatments: Mapping[Cell, Treatment],
    ) -> Passes:
        return Passes(
            offloader,
            gradients,
            treatments,
            len(self.schedule.placement) - 1,
            self._spec.device,
            activity=self._activity,
        )


def _device_for(device: torch.device | str | None, group: ProcessGroup | None) -> torch.device:
    if device is None:
        device = "cuda" if backends(group).get("cuda") == dist.Backend.NCCL else "cpu"
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


def _as_tuple(values: Tensor | tuple[Tensor, ...] | None) -> tuple[Tensor, ...]:
    if values is None:
        return ()
    return tuple(values) if isinstance(values, tuple | list) else (values,)


def _cells(program: Program, kind: ActionType) -> frozenset[Cell]:
    return frozenset((action.stage, action.microbatch) for action in program if action.type is kind)


def _joined(outputs: list[Any]) -> Any:
    """Return the outputs of all micro-batches as one batch."""
    if not outputs:
        return None
    return tree_map(_joined_parts, *outputs)


def _joined_parts(*parts: Any) -> Any:
    """Return one batch of tensors with samples; of all else a list by micro-batch."""
    has_samples = isinstance(parts[0], Tensor) and parts[0].dim() > 0
    return torch.cat(parts) if has_samples else list(parts)


# --- Builds what runs a step: torch's stages and schedule, checked by all ranks before it starts.


@dataclass(frozen=True, kw_only=True)
class PipelineSpec:
    """What a pipeline is made of, on this rank."""

    stages: Mapping[int, nn.Module]
    schedule: Schedule
    loss_fn: Callable[[Any, Any], Tensor]
    problem: Problem | None
    rank: int
    device: torch.device
    group: ProcessGroup | None
    messages: ProcessGroup | None
    mean_loss: bool

    @property
    def num_microbatches(self) -> int:
        """How many parts a batch is cut into."""
        return preflight.num_microbatches_of(self.schedule)

    @property
    def program(self) -> Program:
        """What this rank runs."""
        return self.schedule.programs[self.rank]


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A schedule that can run, for batches and targets of these shapes, and what it takes."""

    runtime: HookedSchedule
    batch: Shapes
    target: Shapes
    boundary: Mapping[Action, int]

    def examples(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return a batch and a target of these shapes, without memory."""
        nowhere = torch.device("meta")
        return (
            tuple(shape.empty(nowhere) for shape in self.batch),
            tuple(shape.empty(nowhere) for shape in self.target),
        )

    def expect(self, inputs: tuple[Tensor, ...], targets: tuple[Tensor, ...]) -> None:
        """Refuse other shapes than the first ones."""
        found = (shapes_of(inputs), shapes_of(targets))
        if found != (self.batch, self.target):
            raise PreflightError(
                f"batch and target have shapes {found}, the first ones had "
                f"{(self.batch, self.target)}; the shapes of boundary tensors are agreed on once: "
                "pad the batch, or make another runner"
            )


def _check_spec(spec: PipelineSpec) -> None:
    """Refuse what does not fit together before anything is built; all ranks together."""
    faults: list[str] = []
    schedule, problem = spec.schedule, spec.problem
    num_ranks = dist.get_world_size(spec.group)
    attempt(check_torch, faults)
    attempt(lambda: preflight.check_cells(schedule), faults)
    if not faults:
        attempt(lambda: preflight.check_ranks(schedule, num_ranks), faults)
    if not faults:
        stages = spec.stages
        attempt(lambda: preflight.check_programs(schedule, problem), faults)
        attempt(lambda: preflight.check_stages(schedule, spec.rank, stages), faults)
        attempt(lambda: preflight.check_devices(stages, spec.device), faults)
        attempt(lambda: preflight.check_wrappers(stages), faults)
    if not faults:
        waiting = {index: deferred_bytes(module) for index, module in stages.items()}
        attempt(lambda: preflight.check_split(spec.program, problem, waiting), faults)
        attempt(lambda: treatments_of(problem, spec.program, spec.stages), faults)
    shared = {
        "the programs": schedule.program_hash,
        "the problem": problem.problem_hash if problem is not None else "none given",
    }
    agree(shared, faults, spec.group)


def _start_pipeline(
    spec: PipelineSpec,
    hooks: Passes,
    inputs: tuple[Tensor, ...],
    targets: tuple[Tensor, ...],
    *,
    trains: bool,
) -> Pipeline:
    """Build a pipeline for batches like this one, once all ranks find that it can run.

    Without ``trains`` it runs forwards only, and a target is optional.
    """
    _check_first_batch(spec, inputs, targets, trains=trains)
    group, placement = spec.group, spec.schedule.placement
    first = preflight.microbatch_shapes(inputs, spec.num_microbatches)
    shapes = probe_pipeline(spec.stages, placement, first, spec.device, group, trains=trains)
    faults: list[str] = []
    runtime = attempt(lambda: _build(spec, hooks, shapes, trains=trains), faults)
    orders = runtime.orders if runtime is not None else ()
    window = window_of(len(placement), trains=trains)
    attempt(lambda: check_orders(orders, placement, window), faults)
    text = "\n".join(",".join(map(str, order)) for order in orders)
    digest = "sha256:" + hashlib.sha256(text.encode()).hexdigest()
    agree({"the order of messages": digest}, faults, group)
    boundary = _boundary(spec, orders, shapes, window)
    # An evaluation holds no activations, so no plan either.
    problem = spec.problem if trains else None
    needs = attempt(
        lambda: needs_of(spec.rank, spec.program, problem, boundary, spec.device), faults
    )
    all_needs = [one for one in gather(needs, group) if one is not None]
    attempt(lambda: check_needs(all_needs), faults)
    agree({}, faults, group)
    return Pipeline(
        runtime=runtime,
        batch=shapes_of(inputs),
        target=shapes_of(targets),
        boundary=boundary,
    )


def _check_first_batch(
    spec: PipelineSpec, inputs: tuple[Tensor, ...], targets: tuple[Tensor, ...], *, trains: bool
) -> None:
    faults: list[str] = []
    count = spec.num_microbatches
    if 0 in spec.stages:
        attempt(lambda: preflight.check_given(inputs, "batch", count), faults)
    if len(spec.schedule.placement) - 1 in spec.stages and (trains or targets):
        attempt(lambda: preflight.check_given(targets, "target", count), faults)
    agree({}, faults, spec.group)


def _build(
    spec: PipelineSpec, hooks: Passes, shapes: Sequence[Shapes], *, trains: bool
) -> HookedSchedule:
    device, placement = spec.device, spec.schedule.placement
    stages = [
        HookedStage(
            module,
            index,
            len(placement),
            device=device,
            inputs=tuple(shape.empty(device) for shape in shapes[index]),
            outputs=tuple(shape.empty(device) for shape in shapes[index + 1]),
            group=spec.messages,
            hooks=hooks,
            trains=trains,
        )
        for index, module in spec.stages.items()
    ]
    count = spec.num_microbatches
    return HookedSchedule(
        stages,
        spec.schedule.programs,
        num_microbatches=count,
        loss_fn=spec.loss_fn,
        loss_divisor=(count if spec.mean_loss else 1) if trains else 0,
        hooks=hooks,
        bytes_of=partial(_bytes_of, shapes),
    )


def _boundary(
    spec: PipelineSpec, orders: Sequence[Order], shapes: Sequence[Shapes], window: int
) -> dict[Action, int]:
    """Return the bytes of boundary tensors on this rank while each action runs."""
    rank, placement = spec.rank, spec.schedule.placement
    over_before = sends_over_before(orders, placement, window)[rank]
    return boundary_levels(orders[rank], over_before, len(placement), partial(_bytes_of, shapes))


def _bytes_of(shapes: Sequence[Shapes], message: Pass) -> int:
    crossed = shapes[message.stage if message.backward else message.stage + 1]
    sent = [shape for shape in crossed if shape.requires_grad or not message.backward]
    return sum(shape.num_bytes for shape in sent)
