"""What is checked before the first step: schedule, problem, ranks, stages, batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe.action import Action, ActionType, parse_action
from optpipe.check import check, check_schedule
from optpipe.errors import ActionSyntaxError, ScheduleFormatError
from optpipe.problem import Device, Problem, Stage
from optpipe.runtime.boundary import Shapes, as_tensors, shapes_of
from optpipe.runtime.errors import PreflightError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch
    from torch import Tensor, nn

    from optpipe.schedule import Schedule

__all__ = [
    "check_batch",
    "check_cells",
    "check_devices",
    "check_given",
    "check_programs",
    "check_ranks",
    "check_stages",
    "microbatch_shapes",
    "num_microbatches_of",
]

_PLENTY = 2**53


def check_cells(schedule: Schedule) -> None:
    """Refuse cells that are no actions: a schedule made or changed by hand may hold anything.

    Raises
    ------
    PreflightError
        With the first cell that its own text form does not give back.
    """
    for device, program in enumerate(schedule.programs):
        for index, cell in enumerate(program):
            if not _reads_back(cell):
                raise PreflightError(
                    f"cell {index} of program {device} is {cell!r}, which is no action; "
                    "read the schedule with Schedule.model_validate or load_schedule"
                )


def _reads_back(cell: object) -> bool:
    if not isinstance(cell, Action):
        return False
    try:
        return parse_action(str(cell)) == cell
    except (ActionSyntaxError, AttributeError):
        return False


def check_programs(schedule: Schedule, problem: Problem | None) -> None:
    """Refuse an illegal schedule; without a problem, all but its memory is checked.

    Raises
    ------
    ScheduleMismatchError, IllegalScheduleError
        As `optpipe.check.check_schedule`.
    """
    if problem is not None:
        check_schedule(problem, schedule)
    else:
        check(_boundless_problem(schedule), schedule.programs)
    for device, program in enumerate(schedule.programs):
        if not program:
            raise PreflightError(
                f"device {device} has no stage and an empty program, but torch's runtime needs an "
                "action on every rank; start the group without that rank"
            )


def _boundless_problem(schedule: Schedule) -> Problem:
    """Return a problem in which every action is possible and nothing is ever too large."""
    device = Device(memory_bytes=_PLENTY, d2h_gb_per_s=1, h2d_gb_per_s=1)
    highest = max(schedule.placement, default=0)
    if highest >= len(schedule.programs):
        raise ScheduleFormatError(
            f"placement names device {highest}, but there are {len(schedule.programs)} programs; "
            "give one program per device"
        )
    return Problem(
        num_microbatches=max(1, num_microbatches_of(schedule)),
        devices=(device,) * len(schedule.programs),
        stages=tuple(_boundless_stage(home) for home in schedule.placement),
    )


def _boundless_stage(device: int) -> Stage:
    return Stage(
        device=device,
        forward_ms=1,
        backward_input_ms=1,
        backward_weight_ms=1,
        activation_bytes=1,
        offload_bytes=1,
        recompute_ms=1,
        checkpoint_bytes=1,
    )


def check_ranks(schedule: Schedule, num_ranks: int) -> None:
    """Refuse another number of ranks than programs.

    Raises
    ------
    PreflightError
        With both numbers.
    """
    if len(schedule.programs) != num_ranks:
        raise PreflightError(
            f"the schedule has {len(schedule.programs)} programs for {num_ranks} ranks: there must "
            "be one rank per program; start that many processes, or solve for that many devices"
        )


def check_stages(schedule: Schedule, rank: int, stages: Iterable[int]) -> None:
    """Refuse other stages on a rank than those the schedule places there.

    Raises
    ------
    PreflightError
        With both lists.
    """
    held = sorted(stages)
    placed = [index for index, device in enumerate(schedule.placement) if device == rank]
    if held != placed:
        raise PreflightError(
            f"this rank was given stages {held}, the schedule's placement puts {placed} here; "
            "pass the modules of exactly those"
        )


def check_devices(stages: Mapping[int, nn.Module], device: torch.device) -> None:
    """Refuse parameters that are elsewhere than the runner computes.

    Raises
    ------
    PreflightError
        With the first parameter that is.
    """
    for index, module in sorted(stages.items()):
        for name, parameter in module.named_parameters():
            if parameter.device != device:
                raise PreflightError(
                    f"parameter {name} of stage {index} is on {parameter.device}, the runner on "
                    f"{device}; move the module, or pass device="
                )


def check_batch(tensors: tuple[Tensor, ...], what: str, num_microbatches: int) -> int:
    """Return the number of samples; refuse what does not divide into micro-batches.

    Raises
    ------
    PreflightError
        With the sizes.
    """
    sizes = {tensor.size(0) if tensor.dim() else 0 for tensor in tensors}
    if len(sizes) != 1:
        raise PreflightError(
            f"the tensors of the {what} have {sorted(sizes)} samples in dimension 0; "
            "give one tensor or tensors of equal length"
        )
    size = sizes.pop()
    if size == 0 or size % num_microbatches:
        raise PreflightError(
            f"the {what} has {size} samples, which do not divide into {num_microbatches} "
            f"micro-batches of equal size; give a multiple of {num_microbatches}"
        )
    return size


def check_given(tensors: tuple[Tensor, ...], what: str, num_microbatches: int) -> None:
    """Refuse a batch or target that is missing or does not divide into micro-batches.

    Raises
    ------
    PreflightError
        With what was given.
    """
    if not tensors:
        raise PreflightError(
            f"the rank that uses the {what} was given none; pass it there, it is the "
            f"{'first' if what == 'batch' else 'last'} stage's"
        )
    check_batch(as_tensors(tensors, f"the {what}"), what, num_microbatches)


def microbatch_shapes(inputs: tuple[Tensor, ...], num_microbatches: int) -> Shapes:
    """Return the shapes of one micro-batch of a batch."""
    return tuple(
        shape._replace(size=(shape.size[0] // num_microbatches, *shape.size[1:]))
        for shape in shapes_of(inputs)
    )


def num_microbatches_of(schedule: Schedule) -> int:
    """Return the number of micro-batches a schedule runs."""
    return sum(
        action.stage == 0 and action.type is ActionType.FORWARD
        for program in schedule.programs
        for action in program
    )
