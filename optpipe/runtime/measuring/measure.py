"""`measure`: runs stages on the real thing and returns what a problem is made of."""

from __future__ import annotations

import statistics
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import torch

from optpipe.errors import InputError
from optpipe.measurements import Given, Measurements, Sample, StageFacts
from optpipe.problem import LicensedPair
from optpipe.runtime.measuring.memory import (
    Footprint,
    StageMemory,
    StageMenu,
    measure_footprint,
    measure_memory,
    measure_menu,
    with_largest_inputs,
)
from optpipe.runtime.measuring.times import (
    Bandwidths,
    Durations,
    MeasuringRanks,
    StageUnderTest,
    clock_for,
    device_facts,
    device_name,
    local_copies,
    measure_bandwidths,
    message_sizes,
    ping_pong,
    time_pairs,
    time_passes,
    undisturbed,
)
from optpipe.runtime.messages import boundary_room
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

    from optpipe.measurements import Transfer
    from optpipe.problem import Problem
    from optpipe.runtime.measuring.times import Clock
    from optpipe.runtime.messages import Layout
    from optpipe.runtime.overlap import Overlap

__all__ = ["Effort", "Profile", "StageResult", "measure"]


class Effort(NamedTuple):
    """How often things are run: warm-ups are dropped, repeats are kept."""

    repeats: int = 20
    warmups: int = 5


class StageResult(NamedTuple):
    """All numbers of one stage.

    ``bandwidths`` is None where nothing can be offloaded; ``deferred_bytes`` is the weight gradient
    that a W makes, 0 where the stage cannot be split. ``menu`` is None where none was asked for.
    ``spread`` is by which share the bytes that autograd saves depend on the values of the inputs.
    """

    footprint: Footprint
    memory: StageMemory
    durations: Durations
    bandwidths: Bandwidths | None
    deferred_bytes: int
    menu: StageMenu | None = None
    spread: float = 0.0


_ADAM_MOMENTS = 2.0
_DEFAULT_EFFORT = Effort()
_NO_PAIRS = (
    "No pair was shorter than its two passes one after the other: none is listed. Only exchanges "
    "of experts on several ranks hide (optpipe.runtime.overlap.exchange), or what runs on streams "
    "of its own."
)
_NO_LOSS = "There was no loss: the last stage's output was summed up in its place."


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
    clock: Clock | None = None,
) -> Profile:
    """Measure stages one after another, each alone, on its rank or on this process's device.

    Linear layers become `SplitLinear`, as in `PipelineRunner`; all else is left as it was:
    gradients, buffers, random states and devices.

    Parameters
    ----------
    stages
        In model order; under torch.distributed the same on all ranks. They may be on the CPU: each
        is moved to the device while it is measured.
    sample
        The first stage's input, one micro-batch.
    loss_fn, target
        From (the last stage's output, target) to a scalar; without it the output is summed up.
    placement
        Device of each stage; if None one device each, or in a loop over the ranks.
    device
        Where this rank measures.
    group
        One rank per device; all ranks by default.
    effort
        How often everything is run.
    min_offload_bytes
        Storages below this are not offloaded.
    state_copies
        Optimizer state in copies of the parameters; 2 for Adam in the parameters' own type. Static
        bytes are weights, gradients and these.
    memory_bytes
        Of each device; None = the GPU's, or an equal part of the host's.
    recompute
        Whether a schedule may recompute whole micro-batches. An F without a graph has a workspace
        of its own, which v1 cannot say: the stage has a menu then, as with ``modes``.
    modes
        How many modes a stage may have at most, keep counted: groups of its modules
        (`optpipe.runtime.groups`) are then measured, and the modes worth having make its menu. 0 =
        keep, offload and recompute, each of everything.
    links
        Whether links are measured: between ranks, or as copies on the one device there is.
    overlap
        Who runs pairs, as `PipelineRunner` takes it: an F and a B or I of stages of one device are
        then run as pairs, too. Those that are shorter than one after the other, in 19 of 20 rounds,
        are listed with what that hides. Experts on several ranks: each has a ``group`` of its own,
        and all measure together.
    clock
        Takes the times; that of the device if None.

    Raises
    ------
    InputError
        If the placement does not fit, a stage cannot be run backward, or its micro-batches do not
        hold what a plan adds up for them.
    PreflightError
        On every rank, if one rank could not measure.
    """
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    ranks = MeasuringRanks(group, device)
    homes = _checked(placement, len(stages), ranks.size)
    ranks.check_devices(1 + max(homes))
    clock = clock if clock is not None else clock_for(device)
    flowing: tuple[_Crossing, ...] = tuple(
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
            loss=(loss_fn or _sum) if is_last else None,
            target=target if is_last else None,
        )
        bare.append((stage, flowing))
        result, flowing = ranks.tell(
            home,
            partial(
                _measure_stage,
                stage,
                flowing,
                device,
                clock,
                effort,
                min_bytes=min_offload_bytes,
                modes=modes,
                recompute=recompute,
            ),
        )
        results.append(result)
    transfers = _transfers(ranks, homes, results, clock, effort) if links else ()
    notes = [*_notes_on(ranks, homes, results), *([] if loss_fn is not None else [_NO_LOSS])]
    pairs: list[LicensedPair] = []
    if overlap is not None:
        timed = partial(
            time_pairs, overlap=overlap, clock=clock,
            repeats=effort.repeats, warmups=effort.warmups,
        )  # fmt: skip
        for home in range(1 + max(homes)):
            own = [one for one, at in zip(bare, homes, strict=True) if at == home]
            pairs += ranks.tell(home, partial(_measure_pairs, own, results, timed, device))
        notes += [] if pairs else [_NO_PAIRS]
    measurements = Measurements(
        source=f"{len(stages)} stages on {device_name(device)}",
        samples=tuple(_samples(homes, results)),
        placement=homes,
        stages=tuple(_facts(result, state_copies, recompute=recompute) for result in results),
        devices=device_facts(ranks, _bandwidths(homes, results), memory_bytes),
        transfers=transfers,
        notes=tuple(notes),
    )
    return Profile(measurements, tuple(results), tuple(pairs))


def _sum(output: Any, _target: Any) -> Tensor:
    return torch.stack([one.sum() for one in as_tensors(output, "the last output")]).sum()


def _checked(
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
    return homes


_Crossing: TypeAlias = "tuple[Layout | None, Tensor]"
"""What crosses a boundary: of a DTensor the shard, and how all of it lies."""


def _measure_stage(
    stage: StageUnderTest,
    received: Sequence[_Crossing],
    device: torch.device,
    clock: Clock,
    effort: Effort,
    *,
    min_bytes: int,
    modes: int,
    recompute: bool,
) -> tuple[StageResult, tuple[_Crossing, ...]]:
    """Return a stage's numbers and, on the CPU, what it sends on; the module is left as it was."""
    check_delaying({stage.index: stage.module})
    split_linears(stage.module, stage.gradients)
    stage = _with_inputs(stage, received, device)
    with _moved_to(stage.module, device), undisturbed(stage.module, device):
        stage = with_largest_inputs(stage)
        footprint = measure_footprint(stage, min_bytes)
        memory = measure_memory(stage, footprint.held_bytes)
        waiting = deferred_bytes(stage.module)
        durations = time_passes(
            stage, clock, repeats=effort.repeats, warmups=effort.warmups, can_split=waiting > 0
        )
        bandwidths = None
        if footprint.offload_sizes:
            passes = (ActionType.FORWARD, ActionType.FULL_BACKWARD)
            bandwidths = measure_bandwidths(
                make_copies(device),
                clock,
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
                clock,
                effort,
                memory=memory,
                durations=durations,
                bandwidths=bandwidths,
                most=modes,
                min_offload_bytes=min_bytes,
                recompute=recompute,
            )
        sent = stage.forward(stage.receive())
    result = StageResult(footprint, memory, durations, bandwidths, waiting, menu, stage.spread)
    shards = [shard.detach().cpu() for shard in sent.outputs]
    return result, tuple(zip(sent.layouts, shards, strict=True))


def _with_inputs(
    stage: StageUnderTest, received: Sequence[_Crossing], device: torch.device
) -> StageUnderTest:
    """Return the stage with what it receives, and its target, on a device."""
    target = None if stage.target is None else stage.target.to(device)
    meshes = meshes_of(stage.index, {stage.index: stage.module}, None)
    shards = [shard.to(device) for _, shard in received]
    inputs = tuple(
        shard if layout is None else layout.whole(shard, layout.mesh_among(meshes))
        for (layout, _), shard in zip(received, shards, strict=True)
    )
    return replace(stage, inputs=inputs, target=target)


def _measure_pairs(
    own: Sequence[tuple[StageUnderTest, Sequence[_Crossing]]],
    results: Sequence[StageResult],
    timed: Callable[..., tuple[float, ...]],
    device: torch.device,
) -> list[LicensedPair]:
    """Return which passes of one device's stages are shorter together, and by how much."""
    found = []
    with ExitStack() as moved:
        stages = []
        for stage, received in own:
            split_linears(stage.module, stage.gradients)
            moved.enter_context(_moved_to(stage.module, device))
            moved.enter_context(undisturbed(stage.module, device))
            stages.append(_with_inputs(stage, received, device))
        for forward, backward in product(stages, repeat=2):
            for letter in _letters(results[backward.index]):
                hidden = sorted(timed(forward, backward, letter))
                if hidden[len(hidden) // 20] > 0:
                    kinds = (ActionType.FORWARD, ActionType(letter))
                    passes = zip((forward, backward), kinds, strict=True)
                    shorter = min(
                        statistics.median(results[one.index].durations[kind])
                        for one, kind in passes
                    )
                    found.append(
                        LicensedPair(
                            forward=forward.index,
                            backward=backward.index,
                            with_=letter,
                            hidden_ms=round(min(shorter, statistics.median(hidden)), 6),
                        )
                    )
    return found


def _letters(result: StageResult) -> tuple[Literal["B", "I"], ...]:
    """Return the backwards of a stage: I only where it leaves something to W."""
    return ("B", "I") if result.deferred_bytes else ("B",)


@contextmanager
def _moved_to(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Hold a module on a device inside the context, and where it was afterwards."""
    homes = {tensor.device for tensor in (*module.parameters(), *module.buffers())}
    if homes <= {device}:
        yield
        return
    if len(homes) > 1 or any(home.type == "meta" for home in homes):
        raise InputError(
            f"a stage's tensors are on {', '.join(sorted(map(str, homes)))}: they must lie "
            "together, and have values; put the module on the CPU or on one GPU"
        )
    module.to(device)
    try:
        yield
    finally:
        module.to(homes.pop())


def _samples(homes: Sequence[int], results: Sequence[StageResult]) -> Iterator[Sample]:
    for index, (home, result) in enumerate(zip(homes, results, strict=True)):
        for kind, times in result.durations.items():
            for ms in times:
                yield Sample(stage=index, action=kind.value, time_ms=ms, rank=home)


def _facts(result: StageResult, state_copies: float, *, recompute: bool) -> StageFacts:
    found, memory = result.footprint, result.memory
    # Where buffers that change are larger than the activations, nothing is gained.
    recompute = recompute and memory.checkpoint_bytes <= memory.activation_bytes
    modes = None if result.menu is None else result.menu.modes
    if recompute and modes is None:
        modes = _whole_modes(result)
    return StageFacts(
        activation_bytes=memory.activation_bytes,
        weight_context_bytes=memory.weight_context_bytes,
        modes=modes,
        offload_bytes=found.offload_bytes if modes is None else None,
        static_bytes=round(found.parameter_bytes * (2 + state_copies)) + found.buffer_bytes,
        output_bytes=found.output_bytes,
        forward_workspace_bytes=memory.workspaces[ActionType.FORWARD],
        backward_input_workspace_bytes=memory.workspaces[ActionType.BACKWARD_INPUT],
        backward_weight_workspace_bytes=memory.workspaces[ActionType.BACKWARD_WEIGHT],
        backward_workspace_bytes=memory.workspaces[ActionType.FULL_BACKWARD],
        recompute_workspace_bytes=memory.workspaces[ActionType.RECOMPUTE],
    )


def _whole_modes(result: StageResult) -> tuple[Mode, ...]:
    """Return keep, offload and recompute, of everything: an F without a graph has its own room."""
    found, memory = result.footprint, result.memory
    modes = [Mode(name="keep")]
    if found.offload_bytes:
        modes.append(Mode(name="offload", offload_bytes=found.offload_bytes))
    again = Mode(
        name="recompute",
        forward_bytes=memory.checkpoint_bytes,
        recompute="apart",
        recompute_ms=statistics.median(result.durations[ActionType.RECOMPUTE]),
        forward_workspace_bytes=memory.without_graph_bytes,
    )
    return (*modes, again)


def _bandwidths(homes: Sequence[int], results: Sequence[StageResult]) -> list[Bandwidths | None]:
    """Return each device's: those of its stage that offloads most."""
    most: dict[int, StageResult] = {}
    for home, result in zip(homes, results, strict=True):
        most[home] = max(most.get(home, result), result, key=_offload_bytes)
    return [most[home].bandwidths for home in sorted(most)]


def _offload_bytes(result: StageResult) -> int:
    return result.footprint.offload_bytes


def _transfers(
    ranks: MeasuringRanks,
    homes: Sequence[int],
    results: Sequence[StageResult],
    clock: Clock,
    effort: Effort,
) -> tuple[Transfer, ...]:
    boundary: dict[tuple[int, int], int] = {}
    for (a, b), result in zip(pairwise(homes), results, strict=False):
        if a != b:
            pair = (min(a, b), max(a, b))
            boundary[pair] = max(boundary.get(pair, 0), result.footprint.output_bytes)
    sizes_of = {pair: message_sizes(size) for pair, size in boundary.items()}
    if ranks.are_many:
        return ping_pong(sizes_of, clock, ranks.device, ranks.group, effort.repeats)
    return local_copies(sizes_of, clock, ranks.device, effort.repeats)


# --- What measuring gave, and the problem it makes.


class Profile(NamedTuple):
    """What was measured; `problem` makes a problem of it.

    Attributes
    ----------
    measurements
        Samples, sizes, devices and transfers, without the batch.
    results
        Per stage, everything, also what no problem has a place for.
    pairs
        What may run together, where that was measured.
    """

    measurements: Measurements
    results: tuple[StageResult, ...]
    pairs: tuple[LicensedPair, ...] = ()

    def problem(self, num_microbatches: int, given: Given | None = None) -> Problem:
        """Return the problem of training with so many micro-batches.

        Parameters
        ----------
        given
            What was not measured: links of a single process, objective, name.

        Raises
        ------
        MeasurementError
            If something is missing that a problem needs.
        """
        given = (given or Given()).model_copy(update={"num_microbatches": num_microbatches})
        found = self.with_reserved(num_microbatches).problem(given)
        return found.with_pairs(self.pairs) if self.pairs else found

    def with_reserved(self, num_microbatches: int) -> Measurements:
        """Return the measurements with bytes reserved on each device for what is no activation.

        That is the whole batch, where it lies all step long, and boundary tensors in flight. How
        many these are depends on the schedule that is still to be found; there is room for every
        one (`optpipe.runtime.messages.boundary_room`). A schedule that needs less leaves the rest
        unused: give such a problem smaller ``reserved_bytes``, and the runtime, which counts what
        the schedule at hand needs, says before the first step if they are too few.
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
                    "reserved_bytes": taken + boundary_room(sizes, num_stages, num_microbatches)
                }
            )
            for facts, taken, sizes in zip(measurements.devices, reserved, crossing, strict=True)
        )
        return measurements.replaced(devices=devices)


# --- What a reader of the numbers must know, in whole sentences.


def _notes_on(
    ranks: MeasuringRanks, homes: Sequence[int], results: Sequence[StageResult]
) -> Iterator[str]:
    """Yield what was assumed, and what could not be measured as it will run."""
    for index, result in enumerate(results):
        if not result.deferred_bytes:
            yield (
                f"Stage {index} cannot be split: I does all of the backward and W nothing. "
                "Only weight gradients of nn.Linear layers, grouped experts and modules with "
                "delay_wgrad_compute are put aside for W."
            )
        if result.spread:
            yield (
                f"Stage {index} is data-dependent: between inputs of one shape, what autograd "
                f"saves differs by up to {format_share(result.spread)}. The largest of several was "
                "measured, and others may save more: leave that share of the memory free."
            )
        yield from result.menu.notes if result.menu is not None else ()
        counted, saved = result.memory.activation_bytes, result.footprint.held_bytes
        if counted > 1.03 * saved:
            yield (
                f"Stage {index} holds {format_bytes(counted - saved)} per micro-batch besides what "
                "autograd saves, as selective checkpointing does: counted, but an OFFLOAD leaves "
                "it on the device."
            )
    if not ranks.are_many and max(homes) > 0:
        yield (
            "One process measured all stages on one device, one after another. Links are copies "
            "on it unless given: for messages between devices start one rank per device."
        )
    if ranks.device.type == "cpu":
        yield "Copies on the CPU run on the thread that computes: they overlap with nothing."
        yield f"Unless given, a device's memory is the host's divided by {1 + max(homes)}."
