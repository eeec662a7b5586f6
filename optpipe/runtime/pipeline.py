"""Builds what runs a step: torch's stages and schedule, checked by all ranks before it starts."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from optpipe.runtime import preflight
from optpipe.runtime.errors import PreflightError
from optpipe.runtime.messages import boundary_levels, check_orders, sends_over_before, window_of
from optpipe.runtime.passes import check_delaying, deferred_bytes
from optpipe.runtime.preflight import (
    Shapes,
    agree,
    attempt,
    check_needs,
    gather,
    meshes_of,
    needs_of,
    probe_pipeline,
    shapes_of,
    spread_of,
)
from optpipe.runtime.slices import SliceStates
from optpipe.runtime.torch_names import check_torch
from optpipe.runtime.torch_schedule import HookedSchedule, HookedStage
from optpipe.runtime.treatments import treatments_of

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    import torch
    from torch import Tensor, nn
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from optpipe.problem import Problem
    from optpipe.runtime.batches import Microbatches
    from optpipe.runtime.messages import BoundaryLevel, Order
    from optpipe.runtime.overlap import Overlap
    from optpipe.runtime.passes import Passes
    from optpipe.schedule import Action, Pass, Program, Schedule

__all__ = ["Pipeline", "PipelineSpec", "check_spec", "start_pipeline"]


@dataclass(frozen=True, kw_only=True)
class PipelineSpec:
    """What a pipeline is made of, on this rank."""

    stages: Mapping[int, nn.Module]
    schedule: Schedule
    loss_fn: Callable[..., Tensor] | None
    problem: Problem | None
    rank: int
    device: torch.device
    group: ProcessGroup | None
    messages: ProcessGroup | None
    mean_loss: bool
    gradients_done: Callable[[int], None] | None = None
    shapes: Callable[[Hashable], Sequence[Shapes]] | None = None
    overlap: Overlap | None = None
    mesh: DeviceMesh | None = None

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
    given: Microbatches
    boundary: Mapping[Action, BoundaryLevel]

    def expect(self, cut: Microbatches) -> None:
        """Refuse other shapes than the first ones."""
        if cut.shapes != self.given.shapes:
            raise PreflightError(
                f"a micro-batch's inputs and target have shapes {cut.shapes}, the first ones had "
                f"{self.given.shapes}; the shapes of boundary tensors are agreed on once: pad the "
                "batch, or give all ranks another bucket="
            )


def check_spec(spec: PipelineSpec) -> None:
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
        attempt(lambda: check_delaying(stages), faults)
    if not faults:
        waiting = {index: deferred_bytes(module) for index, module in stages.items()}
        attempt(lambda: preflight.check_split(spec.program, problem, waiting), faults)
        attempt(lambda: treatments_of(problem, spec.program, spec.stages), faults)
    shared = {
        "the programs": schedule.program_hash,
        "the problem": problem.problem_hash if problem is not None else "none given",
    }
    agree(shared, faults, spec.group)


def start_pipeline(
    spec: PipelineSpec,
    hooks: Passes,
    cut: Microbatches,
    kwargs: Mapping[int, list[dict[str, Any]]],
    bucket: Hashable,
    *,
    trains: bool,
) -> Pipeline:
    """Build a pipeline for batches like this one, once all ranks find that it can run.

    ``kwargs`` are the keyword inputs of each stage, by micro-batch. Without ``trains`` it runs
    forwards only.
    """
    group, placement = spec.group, spec.schedule.placement
    if spec.shapes is not None:
        shapes = [_freed(one, trains=trains) for one in spec.shapes(bucket)]
    else:
        first = shapes_of(cut.args[0]) if cut.args else ()
        one = {index: given[0] for index, given in kwargs.items()}
        shapes = probe_pipeline(
            spec.stages,
            placement,
            first,
            spec.device,
            group,
            kwargs=one,
            mesh=spec.mesh,
            trains=trains,
        )
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
    return Pipeline(runtime=runtime, given=cut.without_memory(), boundary=boundary)


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
            names=(_names(shapes[index]), _names(shapes[index + 1])),
            spread=spread_of(shapes[index], meshes_of(index, spec.stages, spec.mesh)),
            layouts=[shape.layout for shape in shapes[index + 1]],
            group=spec.messages,
            hooks=hooks,
            trains=trains,
        )
        for index, module in spec.stages.items()
    ]
    for stage in stages:
        stage.gradients_done = spec.gradients_done if trains else None
        if spec.problem is not None and spec.problem.has_samples:
            stage.slices = SliceStates(spec.problem.samples)
    count = spec.num_microbatches
    return HookedSchedule(
        stages,
        spec.schedule.programs,
        num_microbatches=count,
        loss_fn=spec.loss_fn,
        loss_divisor=(count if spec.mean_loss else 1) if trains else 0,
        hooks=hooks,
        bytes_of=partial(_bytes_of, shapes),
        overlap=spec.overlap,
    )


def _freed(shapes: Shapes, *, trains: bool) -> Shapes:
    """Return shapes of which none gets a gradient where nothing is trained."""
    return tuple(one._replace(requires_grad=one.requires_grad and trains) for one in shapes)


def _names(shapes: Shapes) -> list[str]:
    return [shape.name for shape in shapes]


def _boundary(
    spec: PipelineSpec, orders: Sequence[Order], shapes: Sequence[Shapes], window: int
) -> dict[Action, BoundaryLevel]:
    """Return the bytes of boundary tensors on this rank with each action."""
    rank, placement = spec.rank, spec.schedule.placement
    over_before = sends_over_before(orders, placement, window)[rank]
    return boundary_levels(orders[rank], over_before, len(placement), partial(_bytes_of, shapes))


def _bytes_of(shapes: Sequence[Shapes], message: Pass) -> int:
    crossed = shapes[message.stage if message.backward else message.stage + 1]
    sent = [shape for shape in crossed if shape.requires_grad or not message.backward]
    return sum(shape.num_bytes for shape in sent)
