"""`measure`: run stages on the real device and return the measurements for a problem."""

from __future__ import annotations

import statistics
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import torch
import torch.distributed as dist

from optpipe.errors import InputError, PreflightError
from optpipe.measurements import Given, Measurements, Sample, StageFacts
from optpipe.planning.accelerators import find_gpu
from optpipe.problem import LicensedPair
from optpipe.runtime.measuring.memory import (
    Footprint,
    StageMemory,
    StageMenu,
    measure_footprint,
    measure_memory,
    measure_menu,
    meter_for,
    with_largest_inputs,
)
from optpipe.runtime.measuring.times import (
    Durations,
    Instruments,
    MeasuringRanks,
    Rate,
    StageUnderTest,
    clock_for,
    device_facts,
    device_name,
    measure_bandwidths,
    preserve_state,
    select_device,
    time_messages,
    time_pairs,
    time_passes,
)
from optpipe.runtime.measuring.traced import TRACED, trace_instruments, without_data
from optpipe.runtime.messages import max_boundary_bytes
from optpipe.runtime.offload import DEFAULT_MIN_BYTES, make_copies
from optpipe.runtime.passes import WeightGradients, check_delaying, deferred_bytes, split_linears
from optpipe.runtime.preflight import as_tensors, meshes_of
from optpipe.schedule import ActionType
from optpipe.stage import Mode
from optpipe.units import format_bytes, format_share

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor, nn
    from torch.distributed import ProcessGroup

    from optpipe.problem import Problem
    from optpipe.runtime.messages import Layout
    from optpipe.runtime.overlap import Overlap

__all__ = [
    "Effort",
    "Profile",
    "StageResult",
    "instruments_of",
    "measure",
    "select_instruments",
]


class Effort(NamedTuple):
    """Number of measured repeats, after warm-ups that are dropped."""

    repeats: int = 20
    warmups: int = 5


class StageResult(NamedTuple):
    """All measurements of one stage.

    ``rate`` is None if nothing can be offloaded, and ``menu`` if none was requested.
    ``deferred_bytes`` is the weight gradient that a W computes, 0 if the stage cannot be split.
    ``spread`` is the share by which the saved bytes depend on the values of the inputs.
    """

    footprint: Footprint
    memory: StageMemory
    durations: Durations
    rate: Rate | None
    deferred_bytes: int
    menu: StageMenu | None
    spread: float


_ADAM_MOMENTS = 2.0
_DEFAULT_EFFORT = Effort()
_NO_PAIRS = (
    "No pair was shorter than its two passes one after the other, so none is listed. Pairs hide "
    "only exchanges of experts on several ranks (optpipe.runtime.overlap.exchange), and work on "
    "other streams."
)
_NO_LOSS = "There was no loss: the sum of the last stage's output replaced it."


def measure(
    stages: Sequence[nn.Module],
    sample: Tensor | tuple[Tensor, ...],
    *,
    loss_fn: Callable[[Any, Any], Tensor] | None = None,
    target: Tensor | None = None,
    placement: Sequence[int] | None = None,
    device: torch.device | str = "cpu",
    group: ProcessGroup | None = None,
    effort: Effort = _DEFAULT_EFFORT,
    min_offload_bytes: int = DEFAULT_MIN_BYTES,
    state_copies: float = _ADAM_MOMENTS,
    memory_bytes: int | None = None,
    recompute: bool = True,
    modes: int = 0,
    links: bool = True,
    overlap: Overlap | None = None,
    instruments: Instruments | None = None,
) -> Profile:
    """Measure stages one after another, each alone, on its rank or on this process's device.

    Linear layers become `SplitLinear`, as in `PipelineRunner`. Gradients, buffers, random states
    and devices stay the same.

    Parameters
    ----------
    stages
        The stages in model order, under torch.distributed the same on all ranks. Each moves to the
        device while it is measured, for example from the CPU.
    sample
        The first stage's input, one micro-batch.
    loss_fn, target
        From (the last stage's output, target) to a scalar; the output's sum by default.
    placement
        Device of each stage; one device each by default, or in a loop over the ranks.
    device
        The device of this rank; "meta" with `trace_instruments`. Then the stages are copied without
        data and stay as they are.
    group
        One rank per device; all ranks by default.
    effort
        How often everything runs.
    min_offload_bytes
        Smaller storages are not offloaded.
    state_copies
        Optimizer state in copies of the parameters: 2 for Adam in the parameters' type. Static
        bytes are the weights, their gradients and this state.
    memory_bytes
        Memory of each device; None = the GPU's, or an equal part of the host's.
    recompute
        Whether a schedule may recompute whole micro-batches. Their F has another workspace, which
        v1 cannot express, so the stage gets a menu, as with ``modes``.
    modes
        Maximum number of modes per stage, keep included. Groups of its modules
        (`optpipe.runtime.groups`) are measured, and the useful modes make its menu. 0 = keep,
        offload and recompute, each of everything.
    links
        Whether to measure links: between ranks, or as copies on the only device.
    overlap
        Runs pairs, as in `PipelineRunner`. An F and a B or I of one device's stages then also run
        as pairs. The problem lists those that are shorter than their passes in 19 of 20 rounds.
        With experts on several ranks, each rank has a ``group`` of its own, and all measure
        together.
    instruments
        Measure the device; those of `instruments_of` by default.

    Raises
    ------
    InputError
        If the placement does not fit, a stage cannot run backward, or the bytes of its
        micro-batches do not add up.
    PreflightError
        On every rank, if one rank could not measure.
    """
    device = torch.device(device)
    instruments = instruments or instruments_of(device)
    known = instruments.known
    if known is not None:
        _check_traced(device, overlap)
        # Traced times are exact.
        effort = Effort(1, 0)
        stages, sample, loss_fn, target = without_data((list(stages), sample, loss_fn, target))
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    ranks = MeasuringRanks(group, device)
    homes = _check_placement(placement, len(stages), ranks.num_ranks)
    clock = instruments.clock
    crossing: tuple[_Crossing, ...] = tuple(
        (None, tensor) for tensor in as_tensors(sample, "the sample")
    )
    results, bare = [], []
    for index, (module, home) in enumerate(zip(stages, homes, strict=True)):
        is_last = index == len(stages) - 1
        stage = StageUnderTest(
            index=index,
            module=module,
            inputs=(),
            gradients=WeightGradients(),
            instruments=instruments,
            loss=(loss_fn or _sum) if is_last else None,
            target=target if is_last else None,
        )
        bare.append((stage, crossing))
        run = partial(
            _measure_stage, stage, crossing, device, effort,
            min_bytes=min_offload_bytes, modes=modes, recompute=recompute,
        )  # fmt: skip
        with instruments.running(module):
            result, crossing = ranks.run_on(home, run)
        results.append(result)
    boundary: dict[tuple[int, int], int] = {}
    for (a, b), result in zip(pairwise(homes) if links else (), results, strict=False):
        if a != b:
            pair = (min(a, b), max(a, b))
            boundary[pair] = max(boundary.get(pair, 0), result.footprint.output_bytes)
    transfers = time_messages(boundary, ranks, instruments, effort.repeats)
    notes = [
        *([known.note] if known is not None else []),
        *_notes_on(ranks, homes, results, is_traced=known is not None),
        *([] if loss_fn is not None else [_NO_LOSS]),
    ]
    pairs: list[LicensedPair] = []
    if overlap is not None:
        timed = partial(
            time_pairs, overlap=overlap, clock=clock,
            repeats=effort.repeats, warmups=effort.warmups,
        )  # fmt: skip
        for home in range(1 + max(homes)):
            own = [one for one, at in zip(bare, homes, strict=True) if at == home]
            pairs += ranks.run_on(home, partial(_measure_pairs, own, results, timed, device))
        notes += [] if pairs else [_NO_PAIRS]
    # Each device gets the bandwidths of its stage that offloads most.
    largest: dict[int, StageResult] = {}
    for home, result in zip(homes, results, strict=True):
        both = (largest.get(home, result), result)
        largest[home] = max(both, key=lambda one: one.footprint.offload_bytes)
    rates = [largest[home].rate for home in sorted(largest)]
    measurements = Measurements(
        source=f"{len(stages)} stages on {known.name if known else device_name(device)}",
        samples=tuple(
            Sample(stage=index, action=kind.value, time_ms=ms, rank=home)
            for index, (home, result) in enumerate(zip(homes, results, strict=True))
            for kind, times in result.durations.items()
            for ms in times
        ),
        placement=homes,
        stages=tuple(_facts(result, state_copies, recompute=recompute) for result in results),
        devices=device_facts(ranks, rates, memory_bytes, known),
        transfers=transfers,
        notes=tuple(notes),
    )
    return Profile(measurements, tuple(results), tuple(pairs))


def instruments_of(device: torch.device) -> Instruments:
    """Return the clock, the allocator and the host copies of a device."""
    return Instruments(
        clock=clock_for(device), meter_for=partial(meter_for, device), copies=make_copies(device)
    )


def select_instruments(name: str | None) -> tuple[torch.device, Instruments]:
    """Return the device of this name and its instruments: cuda, cpu, or a GPU of the catalogue.

    None is this rank's GPU, or the CPU. A GPU of the catalogue is traced.

    Raises
    ------
    InputError
        If there is no such device; the message names the nearest of the catalogue.
    """
    if name is None or name.partition(":")[0] in {"cuda", "cpu"}:
        device = select_device(name)
        return device, instruments_of(device)
    try:
        hardware = find_gpu(name)
    except InputError as error:
        raise InputError(f"--device {name}: {error}; or write cuda or cpu") from None
    return TRACED, trace_instruments(hardware)


def _check_traced(device: torch.device, overlap: Overlap | None) -> None:
    """Refuse what only a real device can do."""
    if device != TRACED:
        raise InputError(
            f'device {device}: instruments of a traced device need device "meta"; give that'
        )
    if overlap is not None:
        raise InputError(
            "overlap: a traced device cannot tell what pairs hide, because no operators run beside "
            "each other; leave it out, or measure on a GPU"
        )
    if dist.is_initialized() and dist.get_world_size() > 1 and dist.get_backend() != "fake":
        raise InputError(f"{dist.get_world_size()} ranks: one process traces all stages; start one")


def _sum(output: Any, _target: Any) -> Tensor:
    return torch.stack([one.sum() for one in as_tensors(output, "the last output")]).sum()


def _check_placement(
    placement: Sequence[int] | None, num_stages: int, num_ranks: int | None
) -> tuple[int, ...]:
    if num_stages == 0:
        raise InputError("there are no stages to measure; give at least one")
    if placement is not None:
        homes = tuple(placement)
    else:
        homes = tuple(index % (num_ranks or num_stages) for index in range(num_stages))
    if len(homes) != num_stages or set(homes) != set(range(1 + max(homes, default=0))):
        raise InputError(
            f"placement {list(homes)}: must name a device for each of {num_stages} stages, and "
            "each device from 0 up at least once; give e.g. "
            f"{list(range(num_stages))}"
        )
    if num_ranks not in (None, 1 + max(homes)):
        raise PreflightError(
            f"the placement names {1 + max(homes)} devices, but {num_ranks} ranks measure: there "
            "must be one rank per device, or one process for all; start that many"
        )
    return homes


_Crossing: TypeAlias = "tuple[Layout | None, Tensor]"
"""A tensor that crosses a boundary; of a DTensor the shard and its layout."""


def _measure_stage(
    stage: StageUnderTest,
    received: Sequence[_Crossing],
    device: torch.device,
    effort: Effort,
    *,
    min_bytes: int,
    modes: int,
    recompute: bool,
) -> tuple[StageResult, tuple[_Crossing, ...]]:
    """Return a stage's measurements, and its outputs on the CPU; restore the module afterwards."""
    check_delaying({stage.index: stage.module})
    split_linears(stage.module, stage.gradients)
    stage = _with_inputs(stage, received, device)
    with _moved_to(stage.module, device), preserve_state(stage.module, device):
        stage = with_largest_inputs(stage)
        footprint = measure_footprint(stage, min_bytes)
        memory = measure_memory(stage, footprint.saved_bytes)
        deferred = deferred_bytes(stage.module)
        durations = time_passes(
            stage, repeats=effort.repeats, warmups=effort.warmups, can_split=deferred > 0
        )
        rate = None
        if footprint.offload_sizes and stage.instruments.known is not None:
            rate = stage.instruments.known.rate
        elif footprint.offload_sizes:
            passes = (ActionType.FORWARD, ActionType.FULL_BACKWARD)
            rate = measure_bandwidths(
                stage.instruments.copies,
                stage.instruments.clock,
                footprint.offload_sizes,
                device,
                compute=lambda: stage.backward(stage.forward(stage.receive())),
                compute_ms=sum(statistics.median(durations[kind]) for kind in passes),
                repeats=effort.repeats,
            )
        menu = None
        if modes:
            menu = measure_menu(
                stage,
                effort,
                memory=memory,
                durations=durations,
                rate=rate,
                max_modes=modes,
                min_offload_bytes=min_bytes,
                recompute=recompute,
            )
        sent = stage.forward(stage.receive())
    result = StageResult(footprint, memory, durations, rate, deferred, menu, stage.spread)
    home = device if device.type == "meta" else "cpu"
    shards = [shard.detach().to(home) for shard in sent.outputs]
    return result, tuple(zip(sent.layouts, shards, strict=True))


def _with_inputs(
    stage: StageUnderTest, received: Sequence[_Crossing], device: torch.device
) -> StageUnderTest:
    """Return the stage with its inputs and target on a device."""
    target = None if stage.target is None else stage.target.to(device)
    meshes = meshes_of(stage.index, {stage.index: stage.module}, None)
    shards = [shard.to(device) for _, shard in received]
    inputs = tuple(
        shard if layout is None else layout.to_dtensor(shard, layout.find_mesh(meshes))
        for (layout, _), shard in zip(received, shards, strict=True)
    )
    return replace(stage, inputs=inputs, target=target)


def _measure_pairs(
    own: Sequence[tuple[StageUnderTest, Sequence[_Crossing]]],
    results: Sequence[StageResult],
    timed: Callable[..., tuple[float, ...]],
    device: torch.device,
) -> list[LicensedPair]:
    """Return the passes of one device's stages that are shorter as pairs, with the hidden ms."""
    found = []
    letters: tuple[Literal["B", "I"], ...] = ("B", "I")
    with ExitStack() as moved:
        stages = []
        for stage, received in own:
            split_linears(stage.module, stage.gradients)
            moved.enter_context(_moved_to(stage.module, device))
            moved.enter_context(preserve_state(stage.module, device))
            stages.append(_with_inputs(stage, received, device))
        for forward, backward, letter in product(stages, stages, letters):
            after = results[backward.index]
            if letter == "I" and not after.deferred_bytes:
                continue
            hidden = sorted(timed(forward, backward, letter))
            if hidden[len(hidden) // 20] > 0:
                shorter_ms = min(
                    statistics.median(results[forward.index].durations[ActionType.FORWARD]),
                    statistics.median(after.durations[ActionType(letter)]),
                )
                pair = LicensedPair(
                    forward=forward.index,
                    backward=backward.index,
                    with_=letter,
                    hidden_ms=round(min(shorter_ms, statistics.median(hidden)), 6),
                )
                found.append(pair)
    return found


@contextmanager
def _moved_to(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Move a module to a device inside the context, and back after it."""
    homes = {tensor.device for tensor in (*module.parameters(), *module.buffers())}
    if homes <= {device}:
        yield
        return
    if len(homes) > 1 or any(home.type == "meta" for home in homes):
        raise InputError(
            f"a stage's tensors are on {', '.join(sorted(map(str, homes)))}: they must be on one "
            "device, and have values; put the module on the CPU or on one GPU"
        )
    module.to(device)
    try:
        yield
    finally:
        module.to(homes.pop())


def _facts(result: StageResult, state_copies: float, *, recompute: bool) -> StageFacts:
    found, memory = result.footprint, result.memory
    # If the changing buffers are larger than the activations, recomputation frees nothing.
    recompute = recompute and memory.checkpoint_bytes <= memory.activation_bytes
    modes = None if result.menu is None else result.menu.modes
    if recompute and modes is None:
        # A menu, because an F without a graph has its own workspace.
        again = Mode(
            name="recompute",
            forward_bytes=memory.checkpoint_bytes,
            recompute="apart",
            recompute_ms=statistics.median(result.durations[ActionType.RECOMPUTE]),
            forward_workspace_bytes=memory.without_graph_bytes,
        )
        offload = Mode(name="offload", offload_bytes=found.offload_bytes)
        modes = (Mode(name="keep"), *([offload] if found.offload_bytes else []), again)
    return StageFacts(
        activation_bytes=memory.activation_bytes,
        weight_context_bytes=memory.weight_context_bytes,
        modes=modes,
        offload_bytes=found.offload_bytes if modes is None else None,
        static_bytes=round(found.parameter_bytes * (2 + state_copies)) + found.buffer_bytes,
        output_bytes=found.output_bytes,
        **memory.workspaces,
    )


# --- The measurements, and the problem made of them.


class Profile(NamedTuple):
    """Measurements, from which `problem` makes a problem.

    Attributes
    ----------
    measurements
        Samples, sizes, devices and transfers, without the batch.
    results
        All measurements of each stage, also those that a problem does not have.
    pairs
        The passes that may run as pairs, if measured.
    """

    measurements: Measurements
    results: tuple[StageResult, ...]
    pairs: tuple[LicensedPair, ...] = ()

    def problem(self, num_microbatches: int, given: Given | None = None) -> Problem:
        """Return the problem of training with this number of micro-batches.

        Parameters
        ----------
        given
            Values that were not measured: links of a single process, objective, name.

        Raises
        ------
        MeasurementError
            If a value that a problem needs is missing.
        """
        given = (given or Given()).model_copy(update={"num_microbatches": num_microbatches})
        found = self.with_reserved(num_microbatches).problem(given)
        return found.with_pairs(self.pairs) if self.pairs else found

    def with_reserved(self, num_microbatches: int) -> Measurements:
        """Return the measurements with the bytes reserved for other tensors than activations.

        These are the whole batch, which stays for the step, and boundary tensors in flight. Their
        number depends on the schedule, so enough is reserved for any
        (`optpipe.runtime.messages.max_boundary_bytes`). Other schedules leave some of it unused;
        for those, reduce ``reserved_bytes``. The runtime counts what a schedule needs, and reports
        before the first step if too few bytes are reserved.
        """
        measurements, num_stages = self.measurements, len(self.results)
        reserved = [facts.reserved_bytes or 0 for facts in measurements.devices]
        crossing: list[list[int]] = [[] for _ in reserved]
        for home, result in zip(measurements.placement, self.results, strict=True):
            found = result.footprint
            reserved[home] += num_microbatches * found.batch_bytes
            crossing[home].append(max(found.received_bytes, found.output_bytes))
        devices = tuple(
            facts.model_copy(
                update={
                    "reserved_bytes": taken
                    + max_boundary_bytes(sizes, num_stages, num_microbatches)
                }
            )
            for facts, taken, sizes in zip(measurements.devices, reserved, crossing, strict=True)
        )
        return measurements.replaced(devices=devices)


# --- Notes for the reader of the report.


def _notes_on(
    ranks: MeasuringRanks,
    homes: Sequence[int],
    results: Sequence[StageResult],
    *,
    is_traced: bool,
) -> Iterator[str]:
    """Yield assumptions, and differences between measuring and training."""
    for index, result in enumerate(results):
        if not result.deferred_bytes:
            yield (
                f"Stage {index} cannot be split: I does all of the backward and W nothing. "
                "Only nn.Linear layers, grouped experts and modules with delay_wgrad_compute "
                "defer weight gradients to W."
            )
        if result.spread:
            yield (
                f"Stage {index} is data-dependent: between inputs of one shape, the bytes that "
                f"autograd saves differ by up to {format_share(result.spread)}. We measured the "
                "largest of several; others may save more, so leave that share of memory free."
            )
        yield from result.menu.notes if result.menu is not None else ()
        counted, saved = result.memory.activation_bytes, result.footprint.saved_bytes
        if counted > 1.03 * saved:
            yield (
                f"Stage {index} holds {format_bytes(counted - saved)} per micro-batch besides what "
                "autograd saves, as selective checkpointing does. They are counted, but an "
                "OFFLOAD leaves them on the device."
            )
    if not ranks.are_many and max(homes) > 0 and not is_traced:
        yield (
            "One process measured all stages on one device, one after another. Links are copies on "
            "it unless given. To measure messages between devices, start one rank per device."
        )
    if ranks.device.type == "cpu":
        yield "Copies on the CPU run on the thread that computes, so they overlap with nothing."
        yield f"Unless given, a device's memory is the host's divided by {1 + max(homes)}."
