"""Builds what runs a step: the executor of this rank, checked by all ranks before it starts."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations
from operator import lt
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch.distributed as dist

from optpipe.errors import PreflightError
from optpipe.memory import modes_of
from optpipe.runtime import preflight
from optpipe.runtime.batches import tensors_in
from optpipe.runtime.executor import Executor
from optpipe.runtime.messages import boundary_levels, sends_over_before, window_of
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
from optpipe.runtime.stage_executor import StageExecutor
from optpipe.runtime.torch_names import note_accumulator_hooks
from optpipe.runtime.treatments import treatments_of

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    import torch
    from torch import Tensor, nn
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from optpipe.memory import CellModes
    from optpipe.problem import Problem
    from optpipe.runtime.batches import Microbatches
    from optpipe.runtime.messages import BoundaryLevel, MessageSlots
    from optpipe.runtime.offload import Cell
    from optpipe.runtime.overlap import Overlap
    from optpipe.runtime.passes import Passes
    from optpipe.runtime.treatments import Treatment
    from optpipe.schedule import Action, Pass, Program, Schedule

__all__ = ["KnownShapes", "Pipeline", "PipelineSpec", "check_spec", "start_pipeline"]


@dataclass(frozen=True, kw_only=True)
class PipelineSpec:
    """The parts and settings of a pipeline on this rank."""

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
        """The number of parts that a batch is cut into."""
        return preflight.num_microbatches_of(self.schedule)

    @property
    def is_unequal(self) -> bool:
        """Whether micro-batches may have shapes of their own: they have costs of their own."""
        problem = self.problem
        return problem is not None and problem.num_costs > 1 and not problem.has_samples

    @property
    def compared(self) -> range:
        """The micro-batches whose shapes represent those of all."""
        return range(self.num_microbatches if self.is_unequal else 1)

    @property
    def program(self) -> Program:
        """The program of this rank."""
        return self.schedule.programs[self.rank]

    @cached_property
    def modes(self) -> CellModes:
        """The modes of the program's cells; none without a problem."""
        return {} if self.problem is None else modes_of(self.problem, self.program)

    @cached_property
    def treatments(self) -> Mapping[Cell, Treatment]:
        """The treatments of the program's cells that are not simply kept; raises as they do."""
        return treatments_of(self.problem, self.program, self.modes, self.stages)


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A schedule that is ready to run on batches and targets of these shapes."""

    runtime: Executor
    given: Microbatches
    num_samples: int | None
    """The samples of a whole batch, as counted on the first stage's rank."""
    compared: Sequence[int]
    boundary: Mapping[Action, BoundaryLevel]

    def expect(self, cut: Microbatches) -> None:
        """Refuse a batch if the shapes of a ``compared`` micro-batch differ from the first ones."""
        for index in self.compared:
            if cut.shapes(index) != self.given.shapes(index):
                raise PreflightError(
                    f"a micro-batch's inputs and target have shapes {cut.shapes(index)}, the first "
                    f"ones had {self.given.shapes(index)}; the shapes of boundary tensors are "
                    "agreed on once: pad the batch, or give all ranks another bucket="
                )


def check_spec(spec: PipelineSpec, found: Sequence[str] = ()) -> None:
    """Refuse what does not fit together before anything is built; all ranks together.

    ``found`` are the faults of this rank that are known already.
    """
    faults = list(found)
    schedule, problem = spec.schedule, spec.problem
    num_ranks = dist.get_world_size(spec.group)
    if not faults:
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
        attempt(lambda: spec.treatments, faults)
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
    num_samples: int | None,
    trains: bool,
    known: KnownShapes,
    pool: MessageSlots | None = None,
) -> Pipeline:
    """Build a pipeline for batches like this one, once all ranks find that it can run.

    ``kwargs`` are the keyword inputs of each stage, by micro-batch. Without ``trains`` it runs
    forwards only. ``known`` are shapes that were found before, and what is found is added;
    ``pool`` are slots of messages to take over.
    """
    group, placement = spec.group, spec.schedule.placement
    known_here, kinds = _known(spec, cut, bucket, trains=trains)
    for key, first in known_here.items():
        if key in known:
            continue
        if spec.shapes is not None:
            said = spec.shapes(_bucket_of(spec, bucket, first))
            # None gets a gradient where nothing is trained.
            known[key] = [
                tuple(one._replace(requires_grad=one.requires_grad and trains) for one in row)
                for row in said
            ]
        else:
            known[key] = probe_pipeline(
                spec.stages,
                placement,
                shapes_of(cut.args[first]) if cut.args else (),
                spec.device,
                group,
                kwargs={index: given[first] for index, given in kwargs.items()},
                mesh=spec.mesh,
                trains=trains,
            )
    faults: list[str] = []
    shapes = Crossing([known[key] for key in known_here], kinds)
    attempt(lambda: _expect_alike(shapes.by_kind, list(known_here.values())), faults)
    attempt(lambda: _expect_costs(spec, cut), faults)
    if trains:
        # Not earlier: a runner ties the weights of its stages after it has checked its spec.
        attempt(lambda: preflight.check_reduced(spec.stages), faults)
        for module in spec.stages.values():
            note_accumulator_hooks(module.parameters())
    agree({}, faults, group)
    runtime = attempt(lambda: _build(spec, hooks, shapes, pool, trains=trains), faults)
    orders = runtime.orders if runtime is not None else ()
    window = window_of(len(placement), trains=trains)
    text = "\n".join(",".join(map(str, order)) for order in orders)
    digest = "sha256:" + hashlib.sha256(text.encode()).hexdigest()
    agree({"the order of messages": digest}, faults, group)
    boundary = boundary_levels(
        orders[spec.rank],
        sends_over_before(orders, placement, window)[spec.rank],
        len(placement),
        shapes.bytes_of,
        runtime.slots.num_bytes,
    )
    # An evaluation holds no activations, so no plan either.
    problem = spec.problem if trains else None
    needs = attempt(
        lambda: needs_of(spec.rank, spec.program, problem, boundary, spec.device, modes=spec.modes),
        faults,
    )
    all_needs = [one for one in gather(needs, group) if one is not None]
    attempt(lambda: check_needs(all_needs), faults)
    agree({}, faults, group)
    return Pipeline(
        runtime=runtime,
        given=cut.without_memory(),
        num_samples=num_samples,
        compared=spec.compared,
        boundary=boundary,
    )


KnownShapes = dict[tuple[str, ...], "list[Shapes]"]
"""Inputs of a micro-batch on every rank -> shapes at all stage boundaries."""


class Crossing(NamedTuple):
    """The shapes at all stage boundaries by kind of micro-batch, and the kind of each."""

    by_kind: Sequence[Sequence[Shapes]]
    kinds: Sequence[int]

    def bytes_of(self, message: Pass) -> int:
        """Return the bytes of a message."""
        boundaries = self.by_kind[self.kinds[message.microbatch]]
        crossed = boundaries[message.stage if message.backward else message.stage + 1]
        sent = [shape for shape in crossed if shape.requires_grad or not message.backward]
        return sum(shape.num_bytes for shape in sent)


def _known(
    spec: PipelineSpec, cut: Microbatches, bucket: Hashable, *, trains: bool
) -> tuple[dict[tuple[str, ...], int], list[int]]:
    """Return the first micro-batch by key of its kind, equal on all ranks; the kind of each."""
    own = [repr((cut.inputs(j), trains, _bucket_of(spec, bucket, j))) for j in spec.compared]
    keys = list(zip(*gather(own, spec.group), strict=True))
    firsts = {key: keys.index(key) for key in keys}
    number = {key: kind for kind, key in enumerate(firsts)}
    kinds = [number[key] for key in keys]
    return firsts, kinds if spec.is_unequal else kinds * spec.num_microbatches


def _bucket_of(spec: PipelineSpec, bucket: Hashable, microbatch: int) -> Hashable:
    """Return the bucket of a micro-batch if each has its own, else the step's."""
    if spec.shapes is None or not spec.is_unequal:
        return bucket
    if not isinstance(bucket, tuple) or len(bucket) != spec.num_microbatches:
        raise PreflightError(
            f"the bucket is {bucket!r}, but micro-batches are unequal, and shapes= speaks of one "
            f"bucket at a time; give bucket= a tuple with {spec.num_microbatches} entries"
        )
    return cast("Hashable", bucket[microbatch])


def _expect_costs(spec: PipelineSpec, cut: Microbatches) -> None:
    """Refuse costs that cannot be the batch's: less activation where all inputs are larger."""
    if spec.problem is None or not spec.is_unequal or not cut.args:
        return
    given: dict[int, list[list[int]]] = {}
    for cost, args in zip(spec.problem.cost_of, cut.args, strict=True):
        given.setdefault(cost, []).append([tensor.numel() for tensor in tensors_in(args)])
    activation_bytes = {
        cost: spec.problem.stages_by_cost[cost][0].activation_bytes for cost in given
    }
    for (low, less), (high, more) in permutations(given.items(), 2):
        most, least = list(map(max, *less, less[0])), list(map(min, *more, more[0]))
        if activation_bytes[low] > activation_bytes[high] and all(map(lt, most, least)):
            raise PreflightError(
                f"micro-batches of cost {low} are given tensors of {most} elements at most, and "
                f"stage 0 of the problem holds {activation_bytes[low]} bytes of each; those of "
                f"cost {high} are given {least} at least, and held {activation_bytes[high]} bytes: "
                "this is the problem of another batch; pass that of this one"
            )


def _expect_alike(shapes: Sequence[Sequence[Shapes]], firsts: Sequence[int]) -> None:
    """Refuse micro-batches that differ in more than sizes."""
    for microbatch, boundaries in zip(firsts[1:], shapes[1:], strict=True):
        for stage, (one, other) in enumerate(zip(shapes[0], boundaries, strict=True)):
            if any(shape.layout is not None for shape in (*one, *other)):
                raise PreflightError(
                    f"DTensors cross before stage {stage}, and micro-batches {firsts[0]} and "
                    f"{microbatch} are of different costs; unequal ones cross as plain tensors: "
                    "pad them, or return .to_local()"
                )
            alike = [
                [shape._replace(size=(), is_used=True) for shape in row] for row in (one, other)
            ]
            if alike[0] != alike[1]:
                raise PreflightError(
                    f"what crosses before stage {stage} is {one} of micro-batch {firsts[0]} and "
                    f"{other} of micro-batch {microbatch}: only sizes may differ; return as many "
                    "tensors of the same types and names"
                )


def _build(
    spec: PipelineSpec, hooks: Passes, shapes: Crossing, pool: MessageSlots | None, *, trains: bool
) -> Executor:
    placement, problem = spec.schedule.placement, spec.problem
    slices = None if problem is None or not problem.has_samples else problem.samples
    stages = [
        StageExecutor(
            module,
            index,
            len(placement),
            inputs=[boundaries[index] for boundaries in shapes.by_kind],
            outputs=[boundaries[index + 1] for boundaries in shapes.by_kind],
            kinds=shapes.kinds,
            spread=spread_of(shapes.by_kind[0][index], meshes_of(index, spec.stages, spec.mesh)),
            passes=hooks,
            trains=trains,
            slices=None if slices is None else SliceStates(slices),
        )
        for index, module in spec.stages.items()
    ]
    return Executor(
        stages,
        spec.schedule.programs,
        placement,
        rank=spec.rank,
        device=spec.device,
        group=spec.messages,
        loss_fn=spec.loss_fn,
        loss_divisor=(spec.num_microbatches if spec.mean_loss else 1) if trains else 0,
        passes=hooks,
        bytes_of=shapes.bytes_of,
        gradients_done=spec.gradients_done if trains else None,
        overlap=spec.overlap,
        pool=pool,
    )
