"""Builds what runs a step: torch's stages and schedule, checked by all ranks before it starts."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from optpipe.runtime import preflight
from optpipe.runtime.agreement import agree, attempt, gather
from optpipe.runtime.boundary import Shapes, TensorShape, probe_pipeline, shapes_of
from optpipe.runtime.errors import PreflightError
from optpipe.runtime.messages import (
    boundary_levels,
    check_orders,
    sends_over_before,
    window_of,
)
from optpipe.runtime.needs import Needs, check_needs, needs_of
from optpipe.runtime.torch_private import HookedSchedule, HookedStage, check_torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor, nn
    from torch.distributed import ProcessGroup

    from optpipe.action import Action, Programs
    from optpipe.precedence import Pass
    from optpipe.problem import Problem
    from optpipe.runtime.hooks import PassHooks
    from optpipe.runtime.messages import Order
    from optpipe.schedule import Schedule

__all__ = ["Blueprint", "Pipeline", "check_blueprint", "start_pipeline"]


@dataclass(frozen=True, kw_only=True)
class Blueprint:
    """What a pipeline is made of, on this rank."""

    stages: Mapping[int, nn.Module]
    schedule: Schedule
    loss_fn: Callable[[Any, Any], Tensor]
    problem: Problem | None
    rank: int
    device: torch.device
    group: ProcessGroup | None
    mean_loss: bool

    @property
    def num_microbatches(self) -> int:
        """How many parts a batch is cut into."""
        return preflight.num_microbatches_of(self.schedule)

    @property
    def programs(self) -> Programs:
        """The programs of all ranks."""
        return self.schedule.programs

    @property
    def holds_first(self) -> bool:
        """Whether this rank takes the batch."""
        return 0 in self.stages

    @property
    def holds_last(self) -> bool:
        """Whether this rank takes the target and makes the losses."""
        return len(self.schedule.placement) - 1 in self.stages


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A schedule that can run, for batches and targets of these shapes, and what it takes."""

    runtime: HookedSchedule
    hooks: PassHooks
    batch: Shapes
    target: Shapes
    boundary: Mapping[Action, int]
    needs: Needs

    def examples(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return a batch and a target of these shapes, without memory."""
        nowhere = torch.device("meta")
        return (
            tuple(shape.empty(nowhere) for shape in self.batch),
            tuple(shape.empty(nowhere) for shape in self.target),
        )

    def expect(self, inputs: tuple[Tensor, ...], targets: tuple[Tensor, ...]) -> None:
        """Refuse other shapes than the first ones.

        Raises
        ------
        PreflightError
            With both.
        """
        found = (shapes_of(inputs), shapes_of(targets))
        if found != (self.batch, self.target):
            raise PreflightError(
                f"batch and target have shapes {found}, the first ones had "
                f"{(self.batch, self.target)}; the shapes of boundary tensors are agreed on once: "
                "pad the batch, or make another runner"
            )


def check_blueprint(blueprint: Blueprint) -> None:
    """Refuse what does not fit together before anything is built; all ranks together.

    Raises
    ------
    PreflightError
        On every rank alike.
    """
    faults: list[str] = []
    schedule, problem = blueprint.schedule, blueprint.problem
    num_ranks = dist.get_world_size(blueprint.group)
    attempt(check_torch, faults)
    attempt(lambda: preflight.check_cells(schedule), faults)
    if not faults:
        attempt(lambda: preflight.check_ranks(schedule, num_ranks), faults)
    if not faults:
        stages = blueprint.stages
        attempt(lambda: preflight.check_programs(schedule, problem), faults)
        attempt(lambda: preflight.check_stages(schedule, blueprint.rank, stages), faults)
        attempt(lambda: preflight.check_devices(stages, blueprint.device), faults)
    shared = {
        "the programs": schedule.program_hash,
        "the problem": problem.problem_hash if problem is not None else "none given",
    }
    agree(shared, faults, blueprint.group)


def start_pipeline(
    blueprint: Blueprint,
    hooks: PassHooks,
    inputs: tuple[Tensor, ...],
    targets: tuple[Tensor, ...],
    *,
    trains: bool,
) -> Pipeline:
    """Build a pipeline for batches like this one, once all ranks find that it can run.

    Parameters
    ----------
    inputs, targets
        The first batch and its target; looked at where they are used.
    trains
        False: forwards only; then a target is optional.

    Raises
    ------
    PreflightError
        On every rank alike: a batch that does not divide, a stage that cannot run, orders of
        messages that differ or cannot pass, or more memory than there is.
    """
    _check_first_batch(blueprint, inputs, targets, trains=trains)
    group, placement = blueprint.group, blueprint.schedule.placement
    first = preflight.microbatch_shapes(inputs, blueprint.num_microbatches)
    shapes = probe_pipeline(blueprint.stages, placement, first, blueprint.device, group)
    faults: list[str] = []
    runtime = attempt(lambda: _build(blueprint, hooks, shapes, trains=trains), faults)
    orders = runtime.orders if runtime is not None else ()
    window = window_of(len(placement), trains=trains)
    attempt(lambda: check_orders(orders, placement, window), faults)
    agree({"the order of messages": _hash(orders)}, faults, group)
    boundary = _boundary(blueprint, orders, shapes, window)
    needs = attempt(lambda: _needs(blueprint, boundary, trains=trains), faults)
    all_needs = [one for one in gather(needs, group) if one is not None]
    attempt(lambda: check_needs(all_needs), faults)
    agree({}, faults, group)
    return Pipeline(
        runtime=runtime,
        hooks=hooks,
        batch=shapes_of(inputs),
        target=shapes_of(targets),
        boundary=boundary,
        needs=needs,
    )


def _check_first_batch(
    blueprint: Blueprint, inputs: tuple[Tensor, ...], targets: tuple[Tensor, ...], *, trains: bool
) -> None:
    faults: list[str] = []
    count = blueprint.num_microbatches
    if blueprint.holds_first:
        attempt(lambda: preflight.check_given(inputs, "batch", count), faults)
    if blueprint.holds_last and (trains or targets):
        attempt(lambda: preflight.check_given(targets, "target", count), faults)
    agree({}, faults, blueprint.group)


def _build(
    blueprint: Blueprint, hooks: PassHooks, shapes: Sequence[Shapes], *, trains: bool
) -> HookedSchedule:
    device, placement = blueprint.device, blueprint.schedule.placement
    stages = [
        HookedStage(
            module,
            index,
            len(placement),
            device=device,
            inputs=tuple(shape.empty(device) for shape in shapes[index]),
            outputs=tuple(shape.empty(device) for shape in shapes[index + 1]),
            group=blueprint.group,
            hooks=hooks,
            trains=trains,
        )
        for index, module in blueprint.stages.items()
    ]
    count = blueprint.num_microbatches
    return HookedSchedule(
        stages,
        blueprint.programs,
        num_microbatches=count,
        loss_fn=blueprint.loss_fn,
        loss_divisor=(count if blueprint.mean_loss else 1) if trains else 0,
        hooks=hooks,
    )


def _hash(orders: Sequence[Order]) -> str:
    text = "\n".join(",".join(map(str, order)) for order in orders)
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def _boundary(
    blueprint: Blueprint, orders: Sequence[Order], shapes: Sequence[Shapes], window: int
) -> dict[Action, int]:
    """Return the bytes of boundary tensors on this rank while each action runs."""
    rank, placement = blueprint.rank, blueprint.schedule.placement

    def bytes_of(message: Pass) -> int:
        crossed = shapes[message.stage if message.backward else message.stage + 1]
        return sum(shape.num_bytes for shape in crossed if _goes(shape, message))

    over_before = sends_over_before(orders, placement, window)[rank]
    return boundary_levels(orders[rank], over_before, len(placement), bytes_of)


def _goes(shape: TensorShape, message: Pass) -> bool:
    """Whether a tensor of this shape is in a message: integers have no gradient."""
    return shape.dtype.is_floating_point or not message.backward


def _needs(blueprint: Blueprint, boundary: Mapping[Action, int], *, trains: bool) -> Needs:
    """Return what this rank needs; an evaluation holds no activations, so no plan either."""
    rank, problem = blueprint.rank, blueprint.problem if trains else None
    return needs_of(rank, blueprint.programs[rank], problem, boundary, blueprint.device)
