"""Checks schedule, problem, ranks, stages and batch before the first step.

A check that fails raises `PreflightError` with the value, the rule and the fix.
"""

from __future__ import annotations

import logging
import random
import socket
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import chain, compress
from operator import is_
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parallel import DistributedDataParallel

from optpipe.check import check, check_schedule
from optpipe.errors import OptPipeError, PreflightError, ScheduleFormatError
from optpipe.memory import host_walk, memory_walk
from optpipe.problem import Device, Problem, Stage
from optpipe.runtime.messages import BoundaryLevel, Layout, layout_of, shard_of
from optpipe.runtime.offload import count_slots, host_memory_bytes
from optpipe.runtime.torch_names import (
    backends,
    buffers_of,
    dependencies_of,
    parts_with_memory,
    reduced_by_ddp,
    replaced,
    tree_leaves,
    tree_map,
)
from optpipe.schedule import Action, ActionType

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from optpipe.memory import CellModes
    from optpipe.schedule import Program, Schedule

__all__ = [
    "Needs",
    "Shapes",
    "Spread",
    "TensorShape",
    "agree",
    "as_tensors",
    "attempt",
    "called",
    "check_cells",
    "check_devices",
    "check_needs",
    "check_programs",
    "check_ranks",
    "check_reduced",
    "check_split",
    "check_stages",
    "check_wrappers",
    "describe",
    "gather",
    "made_on",
    "meshes_of",
    "named_tensors",
    "needs_of",
    "num_microbatches_of",
    "probe_pipeline",
    "received",
    "shapes_of",
    "spread_of",
    "untouched",
]


_log = logging.getLogger("optpipe.runtime.preflight")

_OFFLOADED_OR_MADE_AGAIN = (ActionType.OFFLOAD, ActionType.RECOMPUTE)


def check_cells(schedule: Schedule) -> None:
    """Refuse cells that are no actions: a schedule made or changed by hand may hold anything."""
    for device, program in enumerate(schedule.programs):
        for index, cell in enumerate(program):
            if not isinstance(cell, Action):
                raise PreflightError(
                    f"cell {index} of program {device} is {cell!r}, which is no action; "
                    "read the schedule with Schedule.model_validate or load_schedule"
                )


def check_programs(schedule: Schedule, problem: Problem | None) -> None:
    """Refuse an illegal schedule; without a problem, all but its memory is checked."""
    if problem is not None:
        check_schedule(problem, schedule)
        if problem.has_samples:
            for action in chain.from_iterable(schedule.programs):
                if action.mode or action.type in _OFFLOADED_OR_MADE_AGAIN:
                    raise PreflightError(
                        f"{action} offloads or recomputes a slice, whose keys and values later "
                        "slices read; this runtime only keeps slices: solve the problem without "
                        "other modes"
                    )
    else:
        for action in chain.from_iterable(schedule.programs):
            if action.mode:
                raise PreflightError(
                    f"{action} names a mode, and without its problem nothing says what that is; "
                    "pass problem=, for which the schedule was made"
                )
        # The two of a pair run one after the other here, whether they may run together or not.
        rows = schedule.programs
        alone = (tuple(action._replace(paired=False) for action in row) for row in rows)
        check(_boundless_problem(schedule), tuple(alone))
    for device, program in enumerate(schedule.programs):
        if not program:
            raise PreflightError(
                f"device {device} has no stage and an empty program, but each rank of a pipeline "
                "runs a stage; start the group without that rank"
            )


def _boundless_problem(schedule: Schedule) -> Problem:
    """Return a problem in which every action is possible and nothing is ever too large."""
    device = Device(memory_bytes=2**53, d2h_gb_per_s=1, h2d_gb_per_s=1)
    highest = max(schedule.placement, default=0)
    if highest >= len(schedule.programs):
        raise ScheduleFormatError(
            f"placement names device {highest}, but there are {len(schedule.programs)} programs; "
            "give one program per device"
        )
    return Problem(
        num_microbatches=max(1, num_microbatches_of(schedule)),
        devices=(device,) * len(schedule.programs),
        stages=tuple(
            Stage(
                device=home,
                forward_ms=1,
                backward_input_ms=1,
                backward_weight_ms=1,
                activation_bytes=1,
                offload_bytes=1,
                recompute_ms=1,
                checkpoint_bytes=1,
            )
            for home in schedule.placement
        ),
    )


def check_ranks(schedule: Schedule, num_ranks: int) -> None:
    """Refuse another number of ranks than programs."""
    if len(schedule.programs) != num_ranks:
        raise PreflightError(
            f"the schedule has {len(schedule.programs)} programs for {num_ranks} ranks: there must "
            "be one rank per program; start that many processes, or solve for that many devices"
        )


def check_stages(schedule: Schedule, rank: int, stages: Iterable[int]) -> None:
    """Refuse other stages on a rank than those the schedule places there."""
    given = sorted(stages)
    placed = [index for index, device in enumerate(schedule.placement) if device == rank]
    if given != placed:
        raise PreflightError(
            f"this rank was given stages {given}, the schedule's placement puts {placed} here; "
            "pass the modules of exactly those"
        )


def check_devices(stages: Mapping[int, nn.Module], device: torch.device) -> None:
    """Refuse parameters that are elsewhere than the runner computes."""
    for index, module in sorted(stages.items()):
        for name, parameter in module.named_parameters():
            if parameter.device != device:
                raise PreflightError(
                    f"parameter {name} of stage {index} is on {parameter.device}, the runner on "
                    f"{device}; move the module, or pass device="
                )


def check_wrappers(stages: Mapping[int, nn.Module]) -> None:
    """Refuse data parallelism inside a stage: who wraps a part reduces in every backward.

    Of the whole stage the runtime knows when its gradients are complete.
    """
    for index, module in sorted(stages.items()):
        for name, part in module.named_modules():
            if isinstance(part, DistributedDataParallel) and part.static_graph:
                raise PreflightError(
                    f"stage {index} is wrapped in DistributedDataParallel(static_graph=True), "
                    "which needs one backward per step, but a pipeline runs one per micro-batch; "
                    "leave static_graph out"
                )
            if isinstance(part, DistributedDataParallel) and name:
                raise PreflightError(
                    f"{name} of stage {index} is wrapped in DistributedDataParallel, which reduces "
                    "its gradients in every backward and hears of no W; wrap the whole stage"
                )
            if isinstance(part, FSDPModule) and not isinstance(module, FSDPModule):
                raise PreflightError(
                    f"{name} of stage {index} is sharded by fully_shard and the stage is not: its "
                    "gradients would be reduced in every backward, and those of a W never; call "
                    "fully_shard on the stage, too"
                )


def check_reduced(stages: Mapping[int, nn.Module]) -> None:
    """Refuse a trained parameter whose gradient DDP would not reduce, or would reduce too early.

    DDP reduces the parameters that its stage had when the stage was wrapped. A tie replaces one.
    """
    wrapped = {s: one for s, one in stages.items() if isinstance(one, DistributedDataParallel)}
    places: dict[Tensor, dict[int, str]] = {}
    for index, module in sorted(stages.items()):
        inner: Any = module.module if index in wrapped else module
        for name, parameter in inner.named_parameters():
            if parameter.requires_grad:
                places.setdefault(parameter, {})[index] = name
    for name_in in places.values():
        inside, outside = name_in.keys() & wrapped.keys(), name_in.keys() - wrapped.keys()
        if inside and outside:
            one, other = min(inside), min(outside)
            raise PreflightError(
                f"parameter {name_in[other]} of stage {other} is {name_in[one]} of stage {one}. "
                f"DistributedDataParallel wraps stage {one} and not stage {other}, so it would "
                f"miss gradients that stage {other} adds; wrap both stages, or neither"
            )
    for index, module in sorted(wrapped.items()):
        known, num_reduced = reduced_by_ddp(module)
        trained = {one: name_in[index] for one, name_in in places.items() if index in name_in}
        for parameter, name in trained.items():
            if parameter not in known and name not in module.parameters_to_ignore:
                others = [f"{there} of stage {s}" for s, there in places[parameter].items()
                          if s != index]  # fmt: skip
                tied = f", tied to {' and '.join(others)}," if others else ""
                raise PreflightError(
                    f"parameter {name} of stage {index}{tied} came into the stage after "
                    "DistributedDataParallel had wrapped it, so its gradient would not be reduced; "
                    "tie or replace parameters first, and wrap the stage afterwards"
                )
        num_trained = len(known & trained.keys())
        if num_trained != num_reduced:
            raise PreflightError(
                f"DistributedDataParallel reduces {num_reduced} parameters of stage {index}, of "
                f"which the stage trains {num_trained}; tie, freeze or unfreeze parameters first, "
                "and wrap the stage afterwards"
            )


def check_split(program: Program, problem: Problem | None, deferred: Mapping[int, int]) -> None:
    """Log the bytes that wait for each W; refuse a W without any, unless the plan gives it 0 ms.

    ``deferred`` are the bytes of weight gradient that a W makes, by stage.
    """
    split = {action.stage for action in program if action.type is ActionType.BACKWARD_WEIGHT}
    for stage in sorted(split):
        _log.info("%d bytes of weight gradient of stage %d wait for W", deferred[stage], stage)
        if not deferred[stage] and (problem is None or problem.stages[stage].backward_weight_ms):
            raise PreflightError(
                f"0 bytes of weight gradient of stage {stage} would wait for its W's, whose time "
                "the plan counts on: only nn.Linear layers, grouped experts and modules with "
                "delay_wgrad_compute defer, without gradient hooks, and not both tensor parallel "
                "and compiled; solve a problem in which its "
                "backward_weight_ms is 0, as `optpipe profile` measures it, and pass problem="
            )


def num_microbatches_of(schedule: Schedule) -> int:
    """Return the number of micro-batches a schedule runs."""
    return sum(
        action.stage == 0 and action.type is ActionType.FORWARD
        for program in schedule.programs
        for action in program
    )


# --- Checks that all ranks make together, so that a failure is a message everywhere and never a
# hang. All ranks exchange their findings. If anything is wrong, all of them raise the same text.
# There is no such round after the first step: `optpipe.runtime.watch` then finds failures.


def attempt(check: Callable[[], Any], faults: list[str]) -> Any:
    """Return what a check returns; if it refuses, note why and return None."""
    try:
        return check()
    except OptPipeError as error:
        faults.append(str(error))
    except Exception as error:  # noqa: BLE001 - user code; raised again, on all ranks, by `agree`
        faults.append(describe(error))
    return None


def agree(shared: dict[str, str], faults: Sequence[str], group: ProcessGroup | None) -> None:
    """Go on only if no rank found a fault and all found the same values."""
    findings: list[Any] = gather((shared, list(faults)), group)
    found = _grouped((fault, rank) for rank, (_, own) in enumerate(findings) for fault in own)
    lines = [f"  {_ranks(ranks)}: {fault}" for fault, ranks in found.items()]
    for name in shared if not lines else ():
        values = _grouped((one[name], rank) for rank, (one, _) in enumerate(findings))
        if len(values) > 1:
            text = "; ".join(f"{_ranks(ranks)} {value}" for value, ranks in values.items())
            lines.append(f"  {name} must be the same on all ranks, found {text}")
    if lines:
        raise PreflightError("the pipeline cannot start:\n" + "\n".join(lines))


def gather(value: Any, group: ProcessGroup | None) -> list[Any]:
    """Return every rank's value, in rank order, on every rank."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def _grouped(pairs: Iterable[tuple[str, int]]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for text, rank in pairs:
        found.setdefault(text, []).append(rank)
    return found


def made_on(
    home: int, make: Callable[[], Any], device: torch.device, group: ProcessGroup | None
) -> tuple[Any, list[str]]:
    """Return, on every rank, what a function gives on rank ``home``, and why it failed there."""
    shared: list[Any] = [None]
    if dist.get_rank(group) == home:
        faults: list[str] = []
        shared = [(attempt(make, faults), faults)]
    # NCCL sends from its GPU only.
    where = torch.device("cpu") if "cpu" in backends(group) else device
    dist.broadcast_object_list(shared, group=group, group_src=home, device=where)
    found: tuple[Any, list[str]] = shared[0]
    return found


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def describe(error: BaseException) -> str:
    """Return an error with what caused it, on one line."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    cause = error.__cause__
    return text if cause is None else f"{text} <- {describe(cause)}"


# --- What a rank needs of its device and host, added up over the ranks that share them.
# Memory is a property of the program (docs/specification.md, "Memory"). So it can be compared
# with what is there before anything runs: the plan's peak, and the boundary tensors in flight at
# their real sizes.


class Needs(NamedTuple):
    """One rank's needs and what there is; in bytes."""

    host: str
    device: str
    planned_bytes: int
    pinned_bytes: int
    device_bytes: int
    host_bytes: int


def needs_of(
    rank: int,
    program: Program,
    problem: Problem | None,
    boundary: Mapping[Action, BoundaryLevel],
    device: torch.device,
    *,
    modes: CellModes,
) -> Needs:
    """Return the memory that this rank will need; without a problem only its boundary tensors.

    ``modes`` are those of the program's cells. ``boundary`` are the bytes of boundary tensors on
    the device with each pass and message. If they exceed what the problem reserves, they are
    refused: the limit that the plan keeps to would not be the device's.
    """
    boundary_bytes = max((level.during for level in boundary.values()), default=0)
    reserved = problem.devices[rank].reserved_bytes if problem is not None else 0
    if 0 < reserved < boundary_bytes:
        raise PreflightError(
            f"boundary tensors in flight take up to {boundary_bytes} bytes of device {rank}, its "
            f"reserved_bytes are {reserved}; reserve at least as much, and solve again"
        )
    host_bytes = host_memory_bytes()
    on_gpu = device.type == "cuda"
    return Needs(
        host=socket.gethostname(),
        device=str(device),
        planned_bytes=_planned_bytes(rank, program, problem, modes, boundary),
        pinned_bytes=_pinned_bytes(program, problem, modes),
        device_bytes=torch.cuda.get_device_properties(device).total_memory
        if on_gpu
        else host_bytes,
        host_bytes=host_bytes,
    )


def _pinned_bytes(program: Program, problem: Problem | None, modes: CellModes) -> int:
    """Return what offloaded cells take on the host; slots of unequal ones are as the largest."""
    if problem is None:
        return 0
    if problem.is_even:
        return max(host_walk(problem, program, modes), default=0)
    largest: dict[int, int] = {}
    for action in program:
        if action.type is ActionType.OFFLOAD:
            menu = problem.menu_of(action.stage, action.microbatch)
            moved = menu[modes[action.cell]].offload_bytes
            largest[action.stage] = max(largest.get(action.stage, 0), moved)
    return sum(count * largest[stage] for stage, count in count_slots(program).items())


def _planned_bytes(
    rank: int,
    program: Program,
    problem: Problem | None,
    modes: CellModes,
    boundary: Mapping[Action, BoundaryLevel],
) -> int:
    """Return the peak of activations, static bytes and boundary tensors together."""
    if problem is None:
        return max((level.during for level in boundary.values()), default=0)
    after = peak = 0
    steps = memory_walk(problem, rank, program, modes)
    for action, step in zip(program, steps, strict=True):
        # Transfers and recomputation neither post nor use boundary tensors.
        level = boundary.get(action.bare, BoundaryLevel(after, after))
        after = level.after
        peak = max(peak, step.peak + level.during)
    return peak


def check_needs(all_needs: Sequence[Needs]) -> None:
    """Refuse ranks that together need more of a device or host than there is."""
    shortages = _shortages(
        [
            ((needs.host, needs.device), needs.planned_bytes, needs.device_bytes)
            for needs in all_needs
            if needs.device != "cpu"
        ],
        "plan a smaller peak (memory_bytes), or offload or recompute more",
    )
    shortages += _shortages(
        [
            # On a CPU the device is the host.
            (
                (needs.host, "host memory"),
                needs.pinned_bytes + (needs.planned_bytes if needs.device == "cpu" else 0),
                needs.host_bytes,
            )
            for needs in all_needs
        ],
        "offload less, plan a smaller peak, or give hosts a memory_bytes, and solve again; to "
        "rehearse a plan with smaller stages, leave out problem=",
    )
    if shortages:
        raise PreflightError("; ".join(shortages))


def _shortages(rows: Sequence[tuple[tuple[str, str], int, int]], fix: str) -> list[str]:
    """Return a line for every place whose ranks need more than it has."""
    needed: dict[tuple[str, str], int] = {}
    for place, num_bytes, _ in rows:
        needed[place] = needed.get(place, 0) + num_bytes
    has = {place: available for place, _, available in rows}
    return [
        f"{what} of {host} would hold {num_bytes} bytes at its peak, but has {has[host, what]}; "
        f"{fix}"
        for (host, what), num_bytes in needed.items()
        if num_bytes > has[host, what]
    ]


# --- The tensors that cross stage boundaries: shapes, types, and which of them get gradients. Each
# stage runs one forward on zeros, whose graph saves no tensor. The forward leaves no trace in the
# module or in the random states.


class TensorShape(NamedTuple):
    """Size and type of one boundary tensor; picklable, and equal where the tensors fit.

    ``requires_grad``: whether a gradient of it is sent back. ``name`` is that by which a stage
    returned it in a dict, and by which the next one takes it; "" = by position. With a ``layout``
    it is this rank's shard of a DTensor. If not ``is_used``, no output of the last stage depended
    on it in the forward on zeros.
    """

    size: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False
    name: str = ""
    layout: Layout | None = None
    is_used: bool = True

    def zeros(self, device: torch.device) -> Tensor:
        """Return zeros of this shape."""
        return torch.zeros(
            self.size, dtype=self.dtype, device=device, requires_grad=self.requires_grad
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements."""
        return torch.Size(self.size).numel() * self.dtype.itemsize


Shapes = tuple[TensorShape, ...]
"""Shapes of what crosses one boundary."""


def as_tensors(values: object, what: str) -> tuple[Tensor, ...]:
    """Return a tensor, or a tuple or list of tensors, as a tuple."""
    items = values if isinstance(values, tuple | list) else (values,)
    for item in items:
        if not isinstance(item, Tensor):
            raise PreflightError(
                f"{what} holds a {type(item).__name__}, but only tensors cross a stage boundary; "
                "give a tensor or a tuple of tensors"
            )
    return tuple(items)


def named_tensors(output: object, what: str) -> tuple[tuple[str, ...], tuple[Tensor, ...]]:
    """Return the tensors that a stage sends, and their names; of a dict all that is not None."""
    if not isinstance(output, Mapping):
        tensors = as_tensors(output, what)
        return ("",) * len(tensors), tensors
    named = {str(name): one for name, one in output.items() if one is not None}
    return tuple(named), as_tensors(tuple(named.values()), what)


def called(
    module: Callable[..., Any], names: Sequence[str], tensors: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Call a stage with what was received, by name where it was sent by name.

    Raises
    ------
    PreflightError
        If a keyword input of the step has a name that the stage before sends, too.
    """
    if not any(names):
        return module(*tensors, **kwargs)
    if twice := sorted(kwargs.keys() & set(names)):
        raise PreflightError(
            f"{', '.join(twice)} comes from the stage before and is a keyword input of the step, "
            "too: a stage takes one tensor of a name; rename one of them"
        )
    return module(**{**dict(zip(names, tensors, strict=True)), **kwargs})


def shapes_of(tensors: tuple[Tensor, ...]) -> Shapes:
    """Return the shapes of tensors."""
    return tuple(TensorShape(tuple(tensor.size()), tensor.dtype) for tensor in tensors)


def meshes_of(
    index: int, stages: Mapping[int, nn.Module], given: DeviceMesh | None
) -> list[DeviceMesh]:
    """Return the meshes of a stage's DTensors: as given, of its parameters, or of others'."""
    modules = [stages[index], *(one for other, one in stages.items() if other != index)]
    parameters: Iterable[Any] = chain.from_iterable(one.parameters() for one in modules)
    found = (getattr(parameter, "device_mesh", None) for parameter in parameters)
    return [mesh for mesh in dict.fromkeys((given, *found)) if mesh is not None]


def probe_pipeline(
    stages: Mapping[int, nn.Module],
    placement: Sequence[int],
    first: Shapes,
    device: torch.device,
    group: ProcessGroup | None,
    *,
    kwargs: Mapping[int, dict[str, Any]],
    mesh: DeviceMesh | None,
    trains: bool,
) -> list[Shapes]:
    """Return the shapes at all boundaries: before stage 0, between stages; none after the last.

    All ranks of the group call this together, each with its own ``stages``. ``first`` are the input
    shapes of one micro-batch; only the first stage's rank reads them. ``kwargs`` are the keyword
    inputs of a micro-batch, by stage. ``mesh`` is this rank's own, if one was given. If ``trains``,
    tensors that require grad where a stage returns them get gradients.
    """
    shapes, _ = made_on(placement[0], lambda: first, device, group)
    boundaries: list[Shapes] = [shapes]
    dependencies: list[Dependencies] = []
    for index, home in enumerate(placement):
        is_last = index == len(placement) - 1
        probe = partial(
            _probe_stage,
            index,
            stages,
            boundaries[index],
            device,
            kwargs=kwargs.get(index, {}),
            mesh=mesh,
            is_last=is_last,
            trains=trains,
        )
        found, faults = made_on(home, probe, device, group)
        if faults:
            sizes = [shape.size for shape in boundaries[index]]
            raise PreflightError(
                f"rank {home}: stage {index} cannot run on inputs of size {sizes}: {faults[0]}"
            )
        boundaries.append(found[0])
        dependencies.append(found[1])
    # The loss may depend on any output of the last stage, also where no tensor was found in it.
    uses = [True] * len(dependencies[-1])
    for index in reversed(range(1, len(placement))):
        rows = [*compress(dependencies[index], uses)]
        is_known = trains and bool(dependencies[index])
        uses = [not is_known or any(row[i] for row in rows) for i in range(len(boundaries[index]))]
        pairs = zip(boundaries[index], uses, strict=True)
        boundaries[index] = tuple(shape._replace(is_used=is_used) for shape, is_used in pairs)
    return boundaries


Dependencies = list[list[bool]]
"""For each output of a stage, whether it depends on each input."""


def _probe_stage(
    index: int,
    stages: Mapping[int, Any],
    inputs: Shapes,
    device: torch.device,
    *,
    kwargs: dict[str, Any],
    mesh: DeviceMesh | None,
    is_last: bool,
    trains: bool,
) -> tuple[Shapes, Dependencies]:
    """Return the shapes of what a stage sends; the last one's output is the loss's alone."""
    module = stages[index]
    spread = spread_of(inputs, meshes_of(index, stages, mesh))
    names = [shape.name for shape in inputs]
    given = tree_map(partial(_zeros, device), kwargs)

    def run(around: AbstractContextManager[object]) -> tuple[Any, list[Tensor]]:
        ddp = isinstance(module, DistributedDataParallel)
        alone = module.no_sync() if ddp else nullcontext()
        with torch.set_grad_enabled(trains), around, alone, untouched(module, device):
            zeros = [shape.zeros(device) for shape in inputs]
            return called(module, names, received(zeros, spread), given), zeros

    try:
        output, zeros = run(saved_tensors_hooks(_forget, _forget))
    except Exception:  # noqa: BLE001 - user code, run again
        # A forward may differentiate, which needs the saved tensors.
        output, zeros = run(nullcontext())
    if is_last:
        found = [one for one in tree_leaves(output) if isinstance(one, Tensor)]
        return (), [dependencies_of(one, zeros) for one in found]
    sent_names, outputs = named_tensors(output, f"the output of stage {index}")
    layouts = [
        layout_of(output, f"output {position} of stage {index}")
        for position, output in enumerate(outputs)
    ]
    outputs = tuple(map(shard_of, outputs))
    for position, output in enumerate(outputs):
        if not output.is_contiguous():
            raise PreflightError(
                f"output {position} of stage {index} has strides {output.stride()} for size "
                f"{tuple(output.size())}, but only contiguous tensors are sent; "
                "return it through .contiguous()"
            )
    described = zip(shapes_of(outputs), outputs, sent_names, layouts, strict=True)
    shapes = tuple(
        shape._replace(requires_grad=one.requires_grad, name=name, layout=layout)
        for shape, one, name, layout in described
    )
    return shapes, [dependencies_of(one, zeros) for one in outputs]


Spread = tuple[tuple[Layout, "DeviceMesh"] | None, ...]
"""How each tensor lies on a mesh of this rank; None of a plain one. () = all are plain."""


def spread_of(shapes: Shapes, meshes: Sequence[DeviceMesh]) -> Spread:
    """Return the layout of a stage's received tensors on its rank's meshes."""
    layouts = [shape.layout for shape in shapes]
    found = tuple(None if one is None else (one, one.find_mesh(meshes)) for one in layouts)
    return found if any(found) else ()


def received(shards: Iterable[Tensor], spread: Spread) -> tuple[Tensor, ...]:
    """Return what a stage takes: of what was received shards of become DTensors."""
    if not spread:
        return tuple(shards)
    pairs = zip(shards, spread, strict=True)
    return tuple(one if how is None else how[0].to_dtensor(one, how[1]) for one, how in pairs)


def _zeros(device: torch.device, value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.zeros(value.shape, dtype=value.dtype, device=device)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _forget(_: Tensor | None) -> None:
    """Save nothing for a backward that never comes."""


@contextmanager
def untouched(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Restore a module and the random states, Python's included, at the end.

    Restored are parameters, buffers and attributes: tensors, lists, dictionaries and sets with what
    they held. Other objects that a forward changes stay changed. FSDP2 gathers parameters anew.
    """
    devices = [device] if device.type == "cuda" else []
    state = random.getstate()
    buffers = {place: buffer.clone() for place, buffer in buffers_of(module).items()}
    copies, containers = _copies_of(module)
    has_run = False
    try:
        with replaced(buffers), torch.random.fork_rng(devices=devices):
            yield
        has_run = True
    finally:
        random.setstate(state)
        for container, before in containers:
            if not _holds_the_same(container, before):
                container.clear()
                # A list has `extend`, dictionaries and sets have `update`.
                getattr(container, "extend" if isinstance(container, list) else "update")(before)
        written = [one.tensor for one in copies if one.restore()]
        if has_run:
            known = _written.setdefault(module, {}).setdefault(module.training, [])
            known += [one for one in written if not any(one is other for other in known)]


class _TensorCopy:
    """The bytes of a tensor's storage, whatever its type and strides.

    The copy of a parameter takes the memory that its gradient will need, if it gets one, and else
    the host's.
    """

    def __init__(self, tensor: Tensor, part: Tensor) -> None:
        trains = torch.is_grad_enabled() and tensor.requires_grad
        has_room = trains and tensor.is_leaf and tensor.grad is None
        self.tensor = tensor
        self._part = part
        self._alias = part.detach()
        self._bytes = _bytes_of(part).to(part.device if has_room else "cpu", copy=True)

    @classmethod
    def of(cls, tensor: Tensor) -> list[_TensorCopy]:
        """Return copies of all memory of a tensor: of a DTensor the shard."""
        parts = parts_with_memory(tensor)
        return [
            cls(tensor, one) for one in parts if one.layout is torch.strided and not one.is_meta
        ]

    def restore(self) -> bool:
        """Restore the tensor; return whether it had changed."""
        is_moved = self._part.data_ptr() != self._alias.data_ptr()
        if is_moved:
            self._part.data = self._alias
        now, before = _bytes_of(self._alias), self._bytes.to(self._alias.device)
        is_written = not torch.equal(now, before)
        if is_written:
            now.copy_(before)
        return is_moved or is_written


def _bytes_of(tensor: Tensor) -> Tensor:
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(tensor.untyped_storage())


_written: WeakKeyDictionary[nn.Module, dict[bool, list[Tensor]]] = WeakKeyDictionary()
"""The parameters that a module's forward changes, in training or in evaluation, once it has run."""

_Container = dict[Any, Any] | list[Any] | set[Any]
_CONTAINERS = (dict, OrderedDict, list, set)
_MOST_ENTRIES = 10_000
"""Larger containers are data."""


def _copies_of(
    module: nn.Module,
) -> tuple[list[_TensorCopy], list[tuple[_Container, _Container]]]:
    """Return copies of a module's parameters and of the tensors and containers in its attributes.

    DDP and lazy modules prepare themselves in their first forward, and keep the result. A module is
    looked at whole in its first forward; later, parameters only if they changed then.
    """
    copies, containers, seen = list[_TensorCopy](), list[Any](), set[int]()
    changing = _written.get(module, {}).get(module.training)
    known = {id(one) for one in module.parameters() if changing is not None}
    known -= set(map(id, changing or ()))
    left: list[Any] = []
    for part in module.modules():
        if not isinstance(part, DistributedDataParallel | LazyModuleMixin):
            left.append(vars(part))
        # Buffers have copies already. FSDP2 replaces parameters when it gathers them.
        seen.add(id(vars(part)["_buffers"]))
        if isinstance(part, FSDPModule):
            seen |= {id(vars(one)["_parameters"]) for one in part.modules()}
    while left:
        value = left.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            copies += [] if id(value) in known else _TensorCopy.of(value)
        elif type(value) is tuple or (type(value) in _CONTAINERS and len(value) <= _MOST_ENTRIES):
            left += value.values() if isinstance(value, dict) else value
            if not isinstance(value, tuple):
                containers.append((value, value.copy()))
    return copies, containers


def _holds_the_same(one: _Container, other: _Container) -> bool:
    """Whether two containers hold the same objects in the same order."""
    entries = [
        chain.from_iterable(each.items()) if isinstance(each, dict) else each
        for each in (one, other)
    ]
    return len(one) == len(other) and all(map(is_, *entries))
