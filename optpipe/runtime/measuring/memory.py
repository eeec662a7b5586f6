"""Measure the memory of one micro-batch at a stage, and the stage's menu of modes.

A micro-batch runs alone, and its tensors live as long as in the runtime. Live bytes come from the
allocator on CUDA, and from counted storages on the CPU, which miss allocations inside one
operation. A plan adds these numbers up. So we also measure two micro-batches together, and the
bytes that their backwards leave.

For the menu, one F shows the storages that each group saves, and those it needs for recomputation.
They give the bytes of every combination of groups, and timed recomputations give its time.
`optpipe.stage.choose` selects a few combinations, which are then measured as they will run.
"""

from __future__ import annotations

import gc
import statistics
import time
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from torch import Tensor

from optpipe.errors import InputError
from optpipe.problem import Mode
from optpipe.runtime.measuring.times import ForwardResult, drop_gradients
from optpipe.runtime.offload import (
    DEFAULT_MIN_BYTES,
    EVERYTHING,
    REST,
    Offloader,
    SavedActivations,
    weak_storage,
)
from optpipe.runtime.passes import Passes
from optpipe.runtime.stage_executor import hollow
from optpipe.runtime.torch_names import (
    TorchDispatchMode,
    parts_with_memory,
    storage_identity,
    tree_leaves,
)
from optpipe.runtime.treatments import GroupCalls, Treatment, hidden_groups
from optpipe.runtime.watch import Activity
from optpipe.schedule import ActionType
from optpipe.stage import choose
from optpipe.units import format_share

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager, _GeneratorContextManager

    from torch import nn
    from torch.multiprocessing.reductions import StorageWeakRef

    from optpipe.runtime.measuring.times import Durations, Mark, Rate, StageUnderTest

__all__ = [
    "Candidate",
    "Footprint",
    "GroupFacts",
    "Split",
    "StageMemory",
    "StageMenu",
    "measure_footprint",
    "measure_memory",
    "measure_menu",
    "meter_for",
    "with_largest_inputs",
]


_TOLERANCE = 0.03
"""Share by which live bytes may differ from the bytes that a plan counts."""


class StageMemory(NamedTuple):
    """Live bytes of one micro-batch (docs/specification.md, "Memory").

    Attributes
    ----------
    activation_bytes
        From F to the backward: the tensors that autograd saves, the received input, and others that
        the backward frees, such as the cache of selective checkpointing.
    checkpoint_bytes
        From F to RECOMPUTE: the received input, and the buffers that F changes.
    weight_context_bytes
        From I to W.
    workspaces
        Workspace of each pass, without its boundary tensors, by the field of a problem's stage.
    without_graph_bytes
        Workspace of an F that will be recomputed.
    """

    activation_bytes: int
    checkpoint_bytes: int
    weight_context_bytes: int
    workspaces: dict[str, int]
    without_graph_bytes: int


def measure_memory(stage: StageUnderTest, saved_bytes: int) -> StageMemory:
    """Measure the live bytes of a stage's passes; its gradients must exist, since they are static.

    ``saved_bytes`` is the number of bytes that autograd saves for one micro-batch.

    Raises
    ------
    InputError
        If fewer bytes are live than autograd saves, or if several micro-batches do not add up, each
        by more than 3%.
    """
    cell = (stage.index, 0)
    passes = Passes(
        Offloader({stage.index: stage.module}, stage.device, ()),
        stage.gradients,
        {cell: Treatment(apart=True)},
        stage.index if stage.loss is not None else -1,
        stage.device,
        activity=Activity(),
    )
    without_graph = partial(passes.forward, *cell, ())
    with without_graph():
        # The first F without a graph finds the buffers that change.
        stage.forward(stage.receive())
    passes.reset()
    with _metered(stage) as meter:
        levels = _measure_levels(stage, meter, saved_bytes)
        microbatch = _Microbatch(stage, meter)
        with without_graph():
            without_graph_peak = microbatch.forward() - microbatch.sent_bytes
        checkpoint_bytes = meter.live_bytes()
        with passes.recompute(*cell):
            recompute_peak = microbatch.forward()
        microbatch.backward()
    held_bytes = levels.held_bytes
    recompute_workspace = {"recompute_workspace_bytes": max(0, recompute_peak - held_bytes)}
    return StageMemory(
        activation_bytes=held_bytes,
        checkpoint_bytes=checkpoint_bytes,
        weight_context_bytes=levels.context_bytes,
        workspaces=levels.workspaces(held_bytes, held_bytes) | recompute_workspace,
        without_graph_bytes=max(0, without_graph_peak - checkpoint_bytes),
    )


def _measure_inside(
    stage: StageUnderTest, kept: StageMemory, running: Callable[[], AbstractContextManager[None]]
) -> dict[str, int]:
    """Return the bytes of a `Mode` that recomputes groups inside the backward, by field.

    ``running`` returns the context of its F's. ``kept`` is the memory without recomputation. I and
    B both need ``inside_bytes`` more; what only one of them needs is its workspace.
    """
    with _metered(stage) as meter:
        levels = _measure_levels(stage, meter, 0, running)
    held_bytes = min(levels.held_bytes, kept.activation_bytes)
    inside_peak = min(
        levels.input_peak - kept.workspaces["backward_input_workspace_bytes"],
        levels.full_peak - kept.workspaces["backward_workspace_bytes"],
    )
    backward_bytes = max(held_bytes, inside_peak)
    return {
        "forward_bytes": held_bytes,
        "inside_bytes": backward_bytes - held_bytes,
        "weight_context_bytes": levels.context_bytes,
        **levels.workspaces(held_bytes, backward_bytes),
    }


class _Levels(NamedTuple):
    """Live bytes after F and after I, and the peaks of F, I, W and B."""

    held_bytes: int
    context_bytes: int
    forward_peak: int
    input_peak: int
    weight_peak: int
    full_peak: int

    def workspaces(self, held_bytes: int, backward_bytes: int) -> dict[str, int]:
        """Return the workspaces, given the bytes counted after F and during the backward."""
        peaks = {
            "forward": (self.forward_peak, held_bytes),
            "backward_input": (self.input_peak, max(backward_bytes, self.context_bytes)),
            "backward_weight": (self.weight_peak, self.context_bytes),
            "backward": (self.full_peak, backward_bytes),
        }
        return {
            f"{name}_workspace_bytes": max(0, peak - counted_bytes)
            for name, (peak, counted_bytes) in peaks.items()
        }


def _measure_levels(
    stage: StageUnderTest,
    meter: _Meter,
    saved_bytes: int,
    running: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> _Levels:
    """Run F, I and W, then two micro-batches together; refuse a stage whose bytes do not add up."""
    single = _Microbatch(stage, meter, running)
    forward_peak = single.forward() - single.sent_bytes
    held_bytes = meter.live_bytes()
    with stage.gradients.collect():
        input_peak = single.backward()
        make_weight_gradients = stage.gradients.take()
    context_bytes = meter.live_bytes()
    weight_peak = meter.watch(make_weight_gradients)[1]
    del make_weight_gradients
    left_bytes = meter.live_bytes()
    two = _Microbatch(stage, meter, running), _Microbatch(stage, meter, running)
    for microbatch in two:
        microbatch.forward()
    held_by_two = meter.live_bytes()
    full_peak = [microbatch.backward() for microbatch in two][-1]
    left_bytes = max(left_bytes, meter.live_bytes())

    index, tolerance = stage.index, max(_TOLERANCE, stage.spread)
    rule = f"a plan must be right within {format_share(tolerance)}"
    if saved_bytes - held_bytes > tolerance * held_bytes:
        raise InputError(
            f"stage {index}: autograd saves {saved_bytes} bytes in an F, but only {held_bytes} "
            f"are live after it: {rule}; measure on the device that will train, or without "
            "torch.compile"
        )
    if abs(held_by_two - 2 * held_bytes) > tolerance * 2 * held_bytes:
        raise InputError(
            f"stage {index} holds {held_bytes} bytes after the F of one micro-batch and "
            f"{held_by_two} after two, but {rule} when it adds them up; let the module keep "
            "no tensor of a forward for the next one"
        )
    if left_bytes > _TOLERANCE * held_bytes:
        raise InputError(
            f"stage {index} still holds {left_bytes} bytes after a backward, of {held_bytes} "
            f"after its F, but a plan counts them as free: {rule}; let the module keep no tensor "
            "of a forward"
        )
    return _Levels(held_bytes, context_bytes, forward_peak, input_peak, weight_peak, full_peak)


class _Microbatch:
    """One micro-batch at a stage, with references to the tensors that the runtime keeps."""

    def __init__(
        self,
        stage: StageUnderTest,
        meter: _Meter,
        running: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._stage = stage
        self._running = running
        self._meter = meter
        self._received = stage.receive()
        self._result = ForwardResult((), ())
        self.sent_bytes = 0

    def forward(self) -> int:
        """Run F and drop the outputs; return the peak in bytes."""
        with self._running():
            result, peak = self._meter.watch(partial(self._stage.forward, self._received))
        self.sent_bytes = _count_bytes(result.outputs)
        # A loss is not an output, so it is not emptied.
        roots = result.roots if self._stage.loss is not None else hollow(result.roots)
        self._result = ForwardResult((), roots)
        return peak

    def backward(self) -> int:
        """Run I or B and drop all tensors; return the peak in bytes, without boundary tensors."""
        roots, boundary_bytes = self._result.roots, 0
        gradients = [torch.ones(root.shape, dtype=root.dtype, device=root.device) for root in roots]
        if self._stage.loss is None:
            boundary_bytes = _count_bytes(gradients)
        else:
            # The runtime divides the loss by the number of micro-batches.
            self._result = ForwardResult((), tuple(root / 2 for root in roots))
        run = partial(self._stage.backward, self._result, gradients)
        _, peak = self._meter.watch(run)
        boundary_bytes += _count_bytes(x.grad for x in self._received if x.grad is not None)
        self._received, self._result = (), ForwardResult((), ())
        return peak - boundary_bytes


@contextmanager
def _metered(stage: StageUnderTest) -> Iterator[_Meter]:
    """Measure memory inside the context, where the garbage collector does not run."""
    gradients = [p.grad for p in stage.module.parameters() if p.grad is not None]
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with stage.instruments.meter_for([*_resident(stage, stage.inputs), *gradients]) as meter:
            yield meter
    finally:
        if was_enabled:
            gc.enable()


def meter_for(device: torch.device, resident: Iterable[Tensor]) -> _Meter:
    """Return the meter of a device; ``resident`` tensors exist before the context."""
    return _CudaMeter(device) if device.type == "cuda" else _StorageMeter(resident)


class _CudaMeter:
    """Measures bytes above those at the start of a context, by the caching allocator.

    The allocator's numbers follow the host's calls, not the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = 0

    def __enter__(self) -> Self:
        self._before = torch.cuda.memory_allocated(self._device)
        return self

    def __exit__(self, kind: object, error: object, trace: object, /) -> None:
        """Stop."""

    def live_bytes(self) -> int:
        """Return the live bytes."""
        return torch.cuda.memory_allocated(self._device) - self._before

    def watch(self, run: Callable[[], Any]) -> tuple[Any, int]:
        """Return the result of a function, and the peak while it runs."""
        torch.cuda.reset_peak_memory_stats(self._device)
        result = run()
        return result, torch.cuda.max_memory_allocated(self._device) - self._before


_COLLECTIVES = frozenset({"c10d", "_c10d_functional", "c10d_functional"})
_SETTLED_S = 0.02
"""Threads of gloo reference a collective's tensors for a moment after its end. The count is final
if it does not change for this time."""


class _StorageMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Measures the same by counting the referenced storages that operations in it returned."""

    def __init__(self, resident: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        parts = (part for tensor in resident for part in parts_with_memory(tensor))
        self._resident = {weak_storage(part) for part in parts}
        self._sizes: dict[StorageWeakRef, int] = {}
        self._max_live_bytes = 0
        self._peak = 0
        self._ran_collective = False

    def watch(self, run: Callable[[], Any]) -> tuple[Any, int]:
        self._peak = self.live_bytes()
        result = run()
        return result, self._peak

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._ran_collective = self._ran_collective or func.namespace in _COLLECTIVES
        tensors = (leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        for part in (part for tensor in tensors for part in parts_with_memory(tensor)):
            known, size = weak_storage(part), part.untyped_storage().nbytes()
            if known not in self._resident and known not in self._sizes:
                self._sizes[known] = size
                self._max_live_bytes += size
        # Searching for freed storages is slow, and needed only for a possible new peak.
        if self._max_live_bytes > self._peak:
            self._peak = max(self._peak, self._count_live())
        return result

    def live_bytes(self) -> int:
        """Return the live bytes, after threads of collectives have dropped their references."""
        live, since = self._count_live(), time.monotonic()
        while self._ran_collective and time.monotonic() - since < _SETTLED_S:
            time.sleep(_SETTLED_S / 10)
            before, live = live, self._count_live()
            since = since if live == before else time.monotonic()
        return live

    def _count_live(self) -> int:
        live = (ref for ref in self._sizes if not ref.expired())  # type: ignore[no-untyped-call]
        self._sizes = {ref: self._sizes[ref] for ref in live}
        self._max_live_bytes = sum(self._sizes.values())
        return self._max_live_bytes


_Meter = _CudaMeter | _StorageMeter


# --- The bytes that a stage saves for one micro-batch, counted by storage, as an OFFLOAD does.
# `optpipe.runtime.offload` counts them. Parameters, buffers and boundary tensors do not count. A
# storage shared by several tensors counts once. Tensors that a custom autograd function keeps
# outside ``save_for_backward`` do not count.


class Split(NamedTuple):
    """Parameter elements whose gradients W computes, and all that get a gradient."""

    deferred: int
    total: int


class Footprint(NamedTuple):
    """Bytes of one stage.

    Attributes
    ----------
    saved_bytes
        The storages that autograd saves, and the received input.
    offload_sizes
        The storages that an OFFLOAD moves: no outputs, and none too small to be worth a copy.
    received_bytes, output_bytes
        Boundary tensors; 0 for the batch (first stage), and for what only the loss reads.
    batch_bytes
        One micro-batch's part of the batch (first stage) and of the target (last stage), which
        stay for the whole step.
    parameter_bytes, buffer_bytes
        The module's parameters and buffers.
    """

    saved_bytes: int
    offload_sizes: tuple[int, ...]
    received_bytes: int
    output_bytes: int
    batch_bytes: int
    parameter_bytes: int
    buffer_bytes: int
    split: Split

    @property
    def offload_bytes(self) -> int:
        """The bytes that one OFFLOAD moves."""
        return sum(self.offload_sizes)


def measure_footprint(
    stage: StageUnderTest, min_offload_bytes: int = DEFAULT_MIN_BYTES
) -> Footprint:
    """Drop the gradients, run F, I and W once, and count."""
    drop_gradients(stage.module)
    received = stage.receive()
    saved, result, saved_bytes = _capture_forward(stage, received)
    received_bytes = 0 if stage.is_first else _count_bytes(received)
    saved.keep(result.outputs)
    movable = tuple(storage.num_bytes for storage in saved.storages())
    with stage.gradients.collect():
        stage.backward(result)
        make_weight_gradients = stage.gradients.take()
    early = {id(p) for p in stage.module.parameters() if p.grad is not None}
    make_weight_gradients()
    with_gradient = [p for p in stage.module.parameters() if p.grad is not None]
    return Footprint(
        saved_bytes=saved_bytes + received_bytes,
        offload_sizes=tuple(size for size in movable if size >= min_offload_bytes),
        received_bytes=received_bytes,
        output_bytes=_count_bytes(result.outputs),
        batch_bytes=_count_bytes((stage.inputs if stage.is_first else ()) + _target(stage)),
        parameter_bytes=_count_bytes(stage.module.parameters()),
        buffer_bytes=_count_bytes(stage.module.buffers()),
        split=Split(
            deferred=sum(p.numel() for p in with_gradient if id(p) not in early),
            total=sum(p.numel() for p in with_gradient),
        ),
    )


_NUM_REDRAWN = 8
"""Number of further inputs, with other values, for each stage."""


def with_largest_inputs(stage: StageUnderTest) -> StageUnderTest:
    """Return the stage with the inputs, of several, for which autograd saves most.

    Routing and masks may make the saved bytes depend on the data. The further inputs have the same
    shapes. Their rows are drawn from the given inputs with repetition, token numbers one by one.
    """
    if stage.device.type == "meta":
        # Without values there is nothing to draw.
        return stage
    # Ranks that share a stage draw the same.
    generator = torch.Generator().manual_seed(stage.index)
    redrawn = [_redraw(stage.inputs, generator) for _ in range(_NUM_REDRAWN)]
    tries = [stage, *(replace(stage, inputs=one) for one in redrawn)]
    sizes = []
    for one in tries:
        _, _, num_bytes = _capture_forward(one, one.receive())
        sizes.append(num_bytes)
    largest = max(sizes)
    spread = (largest - min(sizes)) / largest if largest else 0.0
    return replace(tries[sizes.index(largest)], spread=spread)


def _capture_forward(
    stage: StageUnderTest,
    received: tuple[Tensor, ...],
    saved: SavedActivations | None = None,
    running: AbstractContextManager[None] | None = None,
) -> tuple[SavedActivations, ForwardResult, int]:
    """Run F; return the saved activations, the result, and the bytes saved."""
    if saved is None:
        label = f"stage {stage.index}"
        saved = SavedActivations(label, _resident(stage, received), stage.device, min_bytes=1)
    with saved.capture(), running or nullcontext():
        result = stage.forward(received)
    return saved, result, sum(storage.num_bytes for storage in saved.storages())


def _redraw(inputs: tuple[Tensor, ...], generator: torch.Generator) -> tuple[Tensor, ...]:
    """Return inputs whose float tensors have rows drawn from their own; a lone tensor, elements."""
    found = []
    for tensor in inputs:
        is_float = tensor.is_floating_point() and tensor.dim() > 1
        rows = tensor.flatten(0, -2) if is_float else tensor.flatten()
        if type(tensor) is Tensor and len(rows) and (is_float or len(inputs) == 1):
            places = torch.randint(len(rows), (len(rows),), generator=generator)
            found.append(rows[places].view_as(tensor))
        else:
            found.append(tensor)
    return tuple(found)


def _resident(stage: StageUnderTest, received: Sequence[Tensor]) -> list[Tensor]:
    return [*stage.module.parameters(), *stage.module.buffers(), *received, *_target(stage)]


def _target(stage: StageUnderTest) -> tuple[Tensor, ...]:
    return () if stage.target is None else (stage.target,)


def _count_bytes(tensors: Iterable[Tensor]) -> int:
    parts = (part for tensor in tensors for part in parts_with_memory(tensor))
    return sum(part.numel() * part.element_size() for part in parts)


# --- The menu of a stage.


_MAX_GROUPS = 6
"""Number of groups that are combined: each may be kept, offloaded or recomputed."""


class GroupFacts(NamedTuple):
    """One group of a stage, for one micro-batch.

    Attributes
    ----------
    freed_bytes
        Bytes saved by recomputing this group alone; negative if its inputs are larger.
    offload_bytes
        Bytes moved by offloading this group alone.
    recompute_ms
        Time to recompute all its modules.
    """

    name: str
    num_modules: int
    freed_bytes: int
    offload_bytes: int
    recompute_ms: float


class StageMenu(NamedTuple):
    """The modes of a stage, keep first, the groups that they treat, and notes for the report."""

    modes: tuple[Mode, ...]
    groups: tuple[GroupFacts, ...]
    notes: tuple[str, ...]


class Candidate(NamedTuple):
    """A possible mode, with predicted numbers."""

    treatment: Treatment
    forward_bytes: int
    offload_bytes: int
    recompute_ms: float

    @property
    def name(self) -> str:
        """The treatment's text form."""
        return str(self.treatment)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The bytes on the device between F and backward."""
        return (self.forward_bytes - self.offload_bytes,)


def measure_menu(
    stage: StageUnderTest,
    rounds: tuple[int, int],
    *,
    memory: StageMemory,
    durations: Durations,
    rate: Rate | None,
    max_modes: int,
    min_offload_bytes: int,
    recompute: bool = True,
) -> StageMenu:
    """Return a menu of at most ``max_modes`` modes, keep included.

    ``rounds`` are the numbers of timed recomputations and of warm-ups. ``memory`` and ``durations``
    were measured with all activations kept. Without ``recompute``, modes only offload.
    """
    calls = GroupCalls(stage.module)
    hidden = hidden_groups(stage.module, calls.groups)
    names = sorted(calls.groups.keys() - hidden)
    received = stage.receive()
    recorder = _Recorder(stage, _resident(stage, received))
    running = calls.running((), recorder)
    _, result, _ = _capture_forward(stage, received, recorder, running)
    saved = recorder.recorded(result.outputs, min_offload_bytes)
    del result, running
    ms_of = _time_groups(stage, calls, rounds, names)
    facts = []
    for name in names:
        group = frozenset({name})
        freed = _kept_bytes(saved, frozenset()) - _kept_bytes(saved, group)
        offloaded = _moved_bytes(saved, frozenset(), group)
        ms = _recompute_ms(calls, group, ms_of)
        facts.append(GroupFacts(name, len(calls.groups[name]), freed, offloaded, ms))
    largest = sorted(facts, key=lambda one: -max(one.freed_bytes, one.offload_bytes))
    used = [one.name for one in largest[:_MAX_GROUPS]]
    found = list(_group_candidates(calls, saved, memory, used, ms_of))
    # Full recomputation, from an input on the device or on the host.
    again_ms = statistics.median(durations[ActionType.RECOMPUTE])
    sizes = [one.untyped_storage().nbytes() for one in received]
    moved = sum(size for size in sizes if size >= min_offload_bytes)
    for num_bytes in (0, moved) if moved and not stage.is_first else (0,):
        treatment = Treatment(apart=True, moved=EVERYTHING if num_bytes else frozenset())
        found.append(Candidate(treatment, memory.checkpoint_bytes, num_bytes, again_ms))
    if not recompute:
        found = [one for one in found if not (one.treatment.again or one.treatment.apart)]
    keep = next(one for one in found if one.treatment == Treatment())
    transfer_ms = 0.0
    if rate is not None:
        transfer_ms = 1e-6 / rate.d2h_gb_per_s + 1e-6 / rate.h2d_gb_per_s
    chosen = choose(keep, found, most=max_modes, transfer_ms=transfer_ms)
    modes = [_measure_mode(stage, calls, one, memory, min_offload_bytes) for one in chosen]
    return StageMenu(tuple(modes), tuple(facts), tuple(_notes(stage, hidden, facts, used)))


def _notes(
    stage: StageUnderTest, hidden: Collection[str], facts: Sequence[GroupFacts], used: Sequence[str]
) -> Iterator[str]:
    if hidden:
        yield (
            f"Stage {stage.index}: {', '.join(sorted(hidden))} are compiled, or parts of compiled "
            "modules. No hook can separate their tensors, so no mode offloads or recomputes them "
            "alone."
        )
    if not facts:
        yield (
            f"Stage {stage.index} has no groups of modules that modes could treat; declare some "
            "with optpipe.runtime.groups."
        )
    if left := [one.name for one in facts if one.name not in used]:
        yield (
            f"Stage {stage.index}: {', '.join(left)} are measured, but in no mode: only the "
            f"{_MAX_GROUPS} groups with the most bytes are combined."
        )


# --- The storages that each group saves, and those that it needs for recomputation.


class _SavedStorage(NamedTuple):
    """A storage that is held after F in some mode.

    Attributes
    ----------
    contexts
        The groups around each place that saves it.
    inputs
        For each module that takes it: the module's groups, and the groups around the module.
    """

    num_bytes: int
    contexts: frozenset[frozenset[str]]
    inputs: frozenset[tuple[frozenset[str], frozenset[str]]]
    movable: bool

    def holders(self, again: frozenset[str]) -> list[frozenset[str]]:
        """Return the groups around each place that holds it if ``again`` are recomputed."""
        taken = [around for names, around in self.inputs if names & again]
        return [around for around in (*self.contexts, *taken) if not around & again]


class _Recorder(SavedActivations):
    """Records which groups save and take each storage."""

    def __init__(self, stage: StageUnderTest, resident: Sequence[Tensor]) -> None:
        super().__init__(f"stage {stage.index}", resident, stage.device, 1, moved=frozenset({REST}))
        self._refs: dict[int, Any] = {}
        self._sizes: dict[int, int] = {}
        self._contexts: dict[int, set[frozenset[str]]] = {}
        self._inputs: dict[int, set[tuple[frozenset[str], frozenset[str]]]] = {}

    def within(
        self, names: frozenset[str], given: object
    ) -> _GeneratorContextManager[None, None, None]:
        """Record a module's inputs."""
        for leaf in tree_leaves(given):
            if isinstance(leaf, Tensor) and self._is_offloadable(leaf):
                self._inputs.setdefault(self._identify(leaf), set()).add((names, self._scope))
        return super().within(names, given)

    def _pack(self, tensor: Tensor) -> Any:
        if self._is_offloadable(tensor):
            self._contexts.setdefault(self._identify(tensor), set()).add(self._scope)
        return super()._pack(tensor)

    def _identify(self, tensor: Tensor) -> int:
        identity = storage_identity(tensor.untyped_storage())
        # This reference reserves the identity: no other storage can get it.
        self._refs.setdefault(identity, weak_storage(tensor))
        self._sizes[identity] = tensor.untyped_storage().nbytes()
        return identity

    def recorded(self, outputs: Sequence[Tensor], min_bytes: int) -> list[_SavedStorage]:
        """Return all storages; those of the outputs cannot move."""
        alive = {identity for identity, ref in self._storages.items() if ref() is not None}
        staying = {storage_identity(output.untyped_storage()) for output in outputs}
        return [
            _SavedStorage(
                size,
                frozenset(self._contexts.get(identity, ()) if identity in alive else ()),
                frozenset(self._inputs.get(identity, ())),
                movable=size >= min_bytes and identity not in staying,
            )
            for identity, size in self._sizes.items()
        ]


def _kept_bytes(saved: Sequence[_SavedStorage], again: frozenset[str]) -> int:
    return sum(one.num_bytes for one in saved if one.holders(again))


def _moved_bytes(
    saved: Sequence[_SavedStorage], again: frozenset[str], moved: frozenset[str]
) -> int:
    return sum(
        one.num_bytes
        for one in saved
        if one.movable
        and any(moved == EVERYTHING or (around or {REST}) & moved for around in one.holders(again))
    )


# --- The time to recompute groups.


def _time_groups(
    stage: StageUnderTest,
    calls: GroupCalls,
    rounds: tuple[int, int],
    names: Sequence[str],
) -> dict[nn.Module, float]:
    """Return the median ms of recomputing each module, with only its group recomputed."""
    (repeats, warmups), clock = rounds, stage.instruments.clock
    marks: list[tuple[nn.Module, Mark, Mark]] = []

    @contextmanager
    def timed(part: nn.Module) -> Iterator[None]:
        start = clock.mark()
        try:
            yield
        finally:
            # torch ends a recomputation by an exception after the last saved tensor.
            marks.append((part, start, clock.mark()))

    found: dict[nn.Module, float] = {}
    before, calls.rerun_context = calls.rerun_context, timed
    for name in names:
        samples: list[dict[nn.Module, float]] = []
        for _ in range(warmups + repeats):
            marks.clear()
            with stage.instruments.timing():
                with calls.running({name}):
                    result = stage.forward(stage.receive())
                stage.backward(result)
            samples.append(dict.fromkeys(calls.groups[name], 0.0))
            for part, start, end in marks:
                samples[-1][part] += clock.ms_between(start, end)
        for part in calls.groups[name]:
            found[part] = statistics.median(one[part] for one in samples[warmups:])
    calls.rerun_context = before
    return found


def _recompute_ms(calls: GroupCalls, again: frozenset[str], ms_of: dict[nn.Module, float]) -> float:
    """Return the time to recompute groups; a module inside another is recomputed with it."""
    parts = {part for name in again for part in calls.groups[name]}
    inner = {one for part in parts for one in part.modules() if one is not part}
    return round(sum(ms_of[part] for part in parts - inner), 6)


# --- The candidates for the menu, and the measured modes.


def _group_candidates(
    calls: GroupCalls,
    saved: Sequence[_SavedStorage],
    memory: StageMemory,
    names: Sequence[str],
    ms_of: dict[nn.Module, float],
) -> Iterator[Candidate]:
    """Yield all combinations of groups that are kept, offloaded and recomputed."""
    kept = _kept_bytes(saved, frozenset())
    for recomputed in product((False, True), repeat=len(names)):
        again = frozenset(name for name, is_in in zip(names, recomputed, strict=True) if is_in)
        forward_bytes = memory.activation_bytes - kept + _kept_bytes(saved, again)
        ms = _recompute_ms(calls, again, ms_of)
        others = [*(name for name in names if name not in again), REST]
        for offloaded in product((False, True), repeat=len(others)):
            moved = frozenset(name for name, is_in in zip(others, offloaded, strict=True) if is_in)
            moved = EVERYTHING if len(moved) == len(others) else moved
            num_bytes = _moved_bytes(saved, again, moved)
            if bool(num_bytes) == bool(moved):
                treatment = Treatment(again=again, moved=moved)
                yield Candidate(treatment, forward_bytes, num_bytes, ms)


def _measure_mode(
    stage: StageUnderTest,
    calls: GroupCalls,
    chosen: Candidate,
    memory: StageMemory,
    min_bytes: int,
) -> Mode:
    """Return a chosen mode with the bytes that it holds and moves when it runs."""
    treatment = chosen.treatment
    if treatment == Treatment():
        return Mode(name="keep")
    found: dict[str, Any] = {"name": chosen.name, "offload_bytes": chosen.offload_bytes}
    if treatment.apart:
        return Mode(
            **found,
            recompute="apart",
            recompute_ms=chosen.recompute_ms,
            forward_bytes=memory.checkpoint_bytes,
            forward_workspace_bytes=memory.without_graph_bytes,
        )
    if treatment.moved:
        received = stage.receive()
        resident = _resident(stage, received)
        label = f"stage {stage.index}"
        saved = SavedActivations(label, resident, stage.device, min_bytes, treatment.moved)
        running = calls.running(treatment.again, saved)
        _, result, _ = _capture_forward(stage, received, saved, running)
        saved.keep(result.outputs)
        found["offload_bytes"] = sum(storage.num_bytes for storage in saved.storages())
        del result, running
    if treatment.again:
        found |= {"recompute": "inside", "recompute_ms": chosen.recompute_ms}
        found |= _measure_inside(stage, memory, lambda: calls.running(treatment.again))
    return Mode(**found)
