"""What one micro-batch takes of a device at a stage, and the menu of modes that are worth having.

A micro-batch runs alone, held and let go of as the runtime does it, and what is live is read: from
the allocator on CUDA, from counted storages on the CPU; what one operation allocates inside itself
is not seen there. A plan adds these numbers up, so two micro-batches at once are counted beside
them, and what their backwards leave.

Of a menu: one F shows which storages each group saves and needs to start again; from that the bytes
of every combination of groups follow, and from timed recomputations its time. A few are chosen by
these numbers (`optpipe.stage.choose`) and measured as they will run.
"""

from __future__ import annotations

import gc
import statistics
import time
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from optpipe.errors import InputError
from optpipe.problem import Mode
from optpipe.runtime.measuring.times import ForwardResult, forget_gradients
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

    from optpipe.runtime.measuring.times import Bandwidths, Clock, Durations, StageUnderTest

__all__ = [
    "Candidate",
    "Footprint",
    "GroupFacts",
    "InsideMemory",
    "Split",
    "StageMemory",
    "StageMenu",
    "measure_footprint",
    "measure_inside",
    "measure_memory",
    "measure_menu",
    "meter_for",
    "with_largest_inputs",
]


_TOLERANCE = 0.03
"""By which what is live may differ from what a plan counts, as a share."""


class StageMemory(NamedTuple):
    """Bytes that are live because of one micro-batch; DESIGN section 3 has their meaning.

    Attributes
    ----------
    activation_bytes
        From F to the backward: what autograd saves, the received input, and what else goes with
        the backward, such as the cache of selective checkpointing.
    checkpoint_bytes
        From an F to its RECOMPUTE: the received input, the buffers that the F changes.
    weight_context_bytes
        From I to W.
    workspaces
        Of each pass; boundary tensors that it takes and makes are none.
    without_graph_bytes
        The workspace of an F that will be recomputed.
    """

    activation_bytes: int
    checkpoint_bytes: int
    weight_context_bytes: int
    workspaces: dict[ActionType, int]
    without_graph_bytes: int


def measure_memory(stage: StageUnderTest, saved_bytes: int) -> StageMemory:
    """Count what a stage's passes hold; gradients must exist, they are static.

    ``saved_bytes`` is what autograd's hooks count for one micro-batch.

    Raises
    ------
    InputError
        If less is live than that, or several micro-batches do not hold what a plan adds up for
        them, each within 3 %.
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
        # The first of its kind looks which buffers change.
        stage.forward(stage.receive())
    passes.reset()
    gradients = [p.grad for p in stage.module.parameters() if p.grad is not None]
    resident = [*_resident(stage, stage.inputs), *gradients]
    with _no_collector(), meter_for(stage.device, resident) as meter:
        levels = _levels(stage, meter, saved_bytes)
        held_bytes = levels.held_bytes
        again = _Alone(stage, meter)
        with without_graph():
            bare = again.forward() - again.sent_bytes
        checkpoint = meter.live_bytes()
        with passes.recompute(*cell):
            once_more = again.forward()
        again.backward()
    return StageMemory(
        activation_bytes=held_bytes,
        checkpoint_bytes=checkpoint,
        weight_context_bytes=levels.context,
        workspaces={
            ActionType.FORWARD: max(0, levels.forward - held_bytes),
            ActionType.BACKWARD_INPUT: max(0, levels.split - max(held_bytes, levels.context)),
            ActionType.BACKWARD_WEIGHT: max(0, levels.weight - levels.context),
            ActionType.RECOMPUTE: max(0, once_more - held_bytes),
            ActionType.FULL_BACKWARD: max(0, levels.fused - held_bytes),
        },
        without_graph_bytes=max(0, bare - checkpoint),
    )


class InsideMemory(NamedTuple):
    """Bytes of a micro-batch of which groups run again inside the backward; a mode's fields."""

    forward_bytes: int
    inside_bytes: int
    weight_context_bytes: int
    forward_workspace_bytes: int
    backward_input_workspace_bytes: int
    backward_weight_workspace_bytes: int
    backward_workspace_bytes: int


def measure_inside(
    stage: StageUnderTest, kept: StageMemory, running: Callable[[], AbstractContextManager[None]]
) -> InsideMemory:
    """Count what passes hold whose F's run in such contexts; gradients must exist.

    ``kept`` is what they hold otherwise. inside_bytes are what both I and B need beyond that; what
    one of them needs more is its workspace.

    Raises
    ------
    InputError
        As `measure_memory`.
    """
    gradients = [p.grad for p in stage.module.parameters() if p.grad is not None]
    resident = [*_resident(stage, stage.inputs), *gradients]
    with _no_collector(), meter_for(stage.device, resident) as meter:
        found = _levels(stage, meter, 0, running)
    held_bytes = min(found.held_bytes, kept.activation_bytes)
    own = (
        found.split - kept.workspaces[ActionType.BACKWARD_INPUT],
        found.fused - kept.workspaces[ActionType.FULL_BACKWARD],
    )
    inside = max(0, min(own) - held_bytes)
    return InsideMemory(
        forward_bytes=held_bytes,
        inside_bytes=inside,
        weight_context_bytes=found.context,
        forward_workspace_bytes=max(0, found.forward - held_bytes),
        backward_input_workspace_bytes=max(
            0, found.split - max(held_bytes + inside, found.context)
        ),
        backward_weight_workspace_bytes=max(0, found.weight - found.context),
        backward_workspace_bytes=max(0, found.fused - held_bytes - inside),
    )


class _Levels(NamedTuple):
    """Bytes that are live after F and after I, and the peaks of F, I, W and B."""

    held_bytes: int
    context: int
    forward: int
    split: int
    weight: int
    fused: int


def _levels(
    stage: StageUnderTest,
    meter: _Meter,
    saved_bytes: int,
    running: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> _Levels:
    """Run F, I and W, then two micro-batches at once, and see that they add up."""
    alone = _Alone(stage, meter, running)
    forward = alone.forward() - alone.sent_bytes
    held_bytes = meter.live_bytes()
    with stage.gradients.collect():
        split = alone.backward()
        make_weight_gradients = stage.gradients.take()
    context = meter.live_bytes()
    weight = meter.watch(make_weight_gradients)[1]
    del make_weight_gradients
    left = meter.live_bytes()
    pair = _Alone(stage, meter, running), _Alone(stage, meter, running)
    for one in pair:
        one.forward()
    held_by_two = meter.live_bytes()
    fused = [one.backward() for one in pair][-1]
    left = max(left, meter.live_bytes())
    _check(stage, held_bytes, _Beside(saved_bytes, held_by_two, left))
    return _Levels(held_bytes, context, forward, split, weight, fused)


class _Alone:
    """One micro-batch at a stage, of which is held what the runtime holds."""

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
        """Run F and let go of the outputs; return the peak, in bytes."""
        with self._running():
            result, peak = self._meter.watch(partial(self._stage.forward, self._received))
        self.sent_bytes = _bytes(result.outputs)
        # A loss is no output, and stays as it is.
        roots = result.roots if self._stage.loss is not None else hollow(result.roots)
        self._result = ForwardResult((), roots)
        return peak

    def backward(self) -> int:
        """Run I or B and let go of everything; return the peak without boundary tensors."""
        roots, taken = self._result.roots, 0
        gradients = [torch.ones(root.shape, dtype=root.dtype, device=root.device) for root in roots]
        if self._stage.loss is None:
            taken = _bytes(gradients)
        else:
            # As the runtime divides by the number of micro-batches.
            self._result = ForwardResult((), tuple(root / 2 for root in roots))
        run = partial(self._stage.backward, self._result, gradients)
        _, peak = self._meter.watch(run)
        gradient_bytes = _bytes(one.grad for one in self._received if one.grad is not None)
        self._received, self._result = (), ForwardResult((), ())
        return peak - taken - gradient_bytes


class _Beside(NamedTuple):
    """Bytes to hold against what one micro-batch holds after its F."""

    saved: int
    held_by_two: int
    left: int


def _check(stage: StageUnderTest, held_bytes: int, beside: _Beside) -> None:
    """Refuse a stage whose bytes do not add up, by more than they depend on its data."""
    index, tolerance = stage.index, max(_TOLERANCE, stage.spread)
    rule = f"a plan must be right within {format_share(tolerance)}"
    if beside.saved - held_bytes > tolerance * held_bytes:
        raise InputError(
            f"stage {index}: autograd saves {beside.saved} bytes in an F, but only {held_bytes} "
            f"are live after it: {rule}; measure on the device that will train, or without "
            "torch.compile"
        )
    if abs(beside.held_by_two - 2 * held_bytes) > tolerance * 2 * held_bytes:
        raise InputError(
            f"stage {index} holds {held_bytes} bytes after the F of one micro-batch and "
            f"{beside.held_by_two} after two, but {rule} when it adds them up; let the module keep "
            "no tensor of a forward for the next one"
        )
    if beside.left > _TOLERANCE * held_bytes:
        raise InputError(
            f"stage {index} still holds {beside.left} bytes after a backward, of {held_bytes} "
            f"after its F, which count as free: {rule}; let the module keep no tensor of a forward"
        )


@contextmanager
def _no_collector() -> Iterator[None]:
    """Let nothing be freed by the garbage collector, which comes when it likes."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _Meter(Protocol):
    """Watches the memory of one device inside a context, in bytes over those at its beginning."""

    def __enter__(self) -> Any:
        """Begin at 0."""

    def __exit__(self, kind: object, error: object, trace: object, /) -> Any:
        """End."""

    def live_bytes(self) -> int:
        """Return what is live."""

    def watch(self, run: Callable[[], Any]) -> tuple[Any, int]:
        """Return what a function returns, and the peak while it runs."""


def meter_for(device: torch.device, resident: Iterable[Tensor]) -> _Meter:
    """Return the meter of a device; ``resident`` are tensors there before what is watched."""
    return _CudaMeter(device) if device.type == "cuda" else _StorageMeter(resident)


class _CudaMeter:
    """Asks the caching allocator, whose numbers follow the host's calls and not the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = 0

    def __enter__(self) -> Self:
        self._before = torch.cuda.memory_allocated(self._device)
        return self

    def __exit__(self, kind: object, error: object, trace: object, /) -> None:
        """End."""

    def live_bytes(self) -> int:
        return torch.cuda.memory_allocated(self._device) - self._before

    def watch(self, run: Callable[[], Any]) -> tuple[Any, int]:
        torch.cuda.reset_peak_memory_stats(self._device)
        result = run()
        return result, torch.cuda.max_memory_allocated(self._device) - self._before


_COLLECTIVES = frozenset({"c10d", "_c10d_functional", "c10d_functional"})
_SETTLED_S = 0.02
"""Threads of gloo hold a collective's tensors for a moment after it has ended: what has not changed
for so long is settled."""


class _StorageMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the storages that operations return, as long as anybody holds them."""

    def __init__(self, resident: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        parts = (part for tensor in resident for part in parts_with_memory(tensor))
        self._resident = {weak_storage(part) for part in parts}
        self._sizes: dict[StorageWeakRef, int] = {}
        self._at_most = 0
        self._peak = 0
        self._has_met = False

    def watch(self, run: Callable[[], Any]) -> tuple[Any, int]:
        self._peak = self.live_bytes()
        result = run()
        return result, self._peak

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._has_met = self._has_met or func.namespace in _COLLECTIVES
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._see(leaf)
        # Looking for the dead is slow, and needed only where there may be a new peak.
        if self._at_most > self._peak:
            self._peak = max(self._peak, self._held_bytes())
        return result

    def _see(self, tensor: Tensor) -> None:
        for part in parts_with_memory(tensor):
            self._see_part(part)

    def _see_part(self, tensor: Tensor) -> None:
        known, size = weak_storage(tensor), tensor.untyped_storage().nbytes()
        if known not in self._resident and known not in self._sizes:
            self._sizes[known] = size
            self._at_most += size

    def live_bytes(self) -> int:
        """Return what is live once the threads of collectives have let go of what they held."""
        live, since = self._held_bytes(), time.monotonic()
        while self._has_met and time.monotonic() - since < _SETTLED_S:
            time.sleep(_SETTLED_S / 10)
            before, live = live, self._held_bytes()
            since = since if live == before else time.monotonic()
        return live

    def _held_bytes(self) -> int:
        live = (ref for ref in self._sizes if not ref.expired())  # type: ignore[no-untyped-call]
        self._sizes = {ref: self._sizes[ref] for ref in live}
        self._at_most = sum(self._sizes.values())
        return self._at_most


# --- What a stage holds for one micro-batch, counted where the offloader counts: by storage.
# `optpipe.runtime.offload` is asked, with the rules it has for OFFLOAD: parameters, buffers and
# boundary tensors are no activations, a storage seen by several tensors counts once, and what a
# custom autograd function keeps outside ``save_for_backward`` is not seen.


class Split(NamedTuple):
    """Parameter elements whose gradients W makes, and those that get one at all."""

    deferred: int
    total: int


class Footprint(NamedTuple):
    """Bytes of one stage.

    Attributes
    ----------
    held_bytes
        Of the storages that autograd saves, and of the received input.
    offload_sizes
        Of those an OFFLOAD moves: no outputs, and none too small to be worth a copy.
    received_bytes, output_bytes
        Boundary tensors; the batch (of the first stage) and what only the loss sees count 0.
    batch_bytes
        One micro-batch's part of the batch (first stage) and of the target (last stage): it is
        there for the whole step.
    parameter_bytes, buffer_bytes
        Of the module.
    """

    held_bytes: int
    offload_sizes: tuple[int, ...]
    received_bytes: int
    output_bytes: int
    batch_bytes: int
    parameter_bytes: int
    buffer_bytes: int
    split: Split

    @property
    def offload_bytes(self) -> int:
        """What one OFFLOAD moves."""
        return sum(self.offload_sizes)


def measure_footprint(
    stage: StageUnderTest, min_offload_bytes: int = DEFAULT_MIN_BYTES
) -> Footprint:
    """Run F, I and W once and count; gradients are dropped before."""
    forget_gradients(stage.module)
    received = stage.receive()
    saved, result, held_bytes = _saved_in_forward(stage, received)
    received_bytes = 0 if stage.is_first else _bytes(received)
    saved.keep(result.outputs)
    movable = tuple(storage.num_bytes for storage in saved.storages())
    return Footprint(
        held_bytes=held_bytes + received_bytes,
        offload_sizes=tuple(size for size in movable if size >= min_offload_bytes),
        received_bytes=received_bytes,
        output_bytes=_bytes(result.outputs),
        batch_bytes=_bytes((stage.inputs if stage.is_first else ()) + _target(stage)),
        parameter_bytes=_bytes(stage.module.parameters()),
        buffer_bytes=_bytes(stage.module.buffers()),
        split=_split_of(stage, result),
    )


_SAMPLES = 8
"""Inputs with other values that each stage is tried with."""


def with_largest_inputs(stage: StageUnderTest) -> StageUnderTest:
    """Return the stage with the inputs, of several, with which it saves most.

    Routing and masks may let that depend on the data. The others are rows of the given inputs,
    drawn with repetition; token numbers are drawn one by one. Shapes stay.
    """
    tries = [stage, *(replace(stage, inputs=_redrawn(stage.inputs)) for _ in range(_SAMPLES))]
    sizes = []
    for one in tries:
        _, _, num_bytes = _saved_in_forward(one, one.receive())
        sizes.append(num_bytes)
    largest = max(sizes)
    spread = (largest - min(sizes)) / largest if largest else 0.0
    return replace(tries[sizes.index(largest)], spread=spread)


def _saved_in_forward(
    stage: StageUnderTest, received: tuple[Tensor, ...]
) -> tuple[SavedActivations, ForwardResult, int]:
    """Run F; return what autograd saved, what F left, and the bytes saved."""
    saved = SavedActivations(
        f"stage {stage.index}", _resident(stage, received), stage.device, min_bytes=1
    )
    with saved.capture():
        result = stage.forward(received)
    return saved, result, sum(storage.num_bytes for storage in saved.storages())


def _redrawn(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    if len(inputs) == 1 and not inputs[0].is_floating_point():
        (tokens,) = inputs
        return (tokens.flatten()[torch.randint(tokens.numel(), tokens.shape)],)
    return tuple(map(_with_redrawn_rows, inputs))


def _with_redrawn_rows(tensor: Tensor) -> Tensor:
    """Return an input whose rows, of its last dimension, are drawn from its own; others whole."""
    if type(tensor) is not Tensor or not tensor.is_floating_point() or tensor.dim() < 2:
        return tensor
    rows = tensor.flatten(0, -2)
    return rows[torch.randint(len(rows), (len(rows),))].view_as(tensor)


def _resident(stage: StageUnderTest, received: Sequence[Tensor]) -> list[Tensor]:
    return [*stage.module.parameters(), *stage.module.buffers(), *received, *_target(stage)]


def _target(stage: StageUnderTest) -> tuple[Tensor, ...]:
    return () if stage.target is None else (stage.target,)


def _split_of(stage: StageUnderTest, result: ForwardResult) -> Split:
    """Return which gradients an I and a W make."""
    with stage.gradients.collect():
        stage.backward(result)
        make_weight_gradients = stage.gradients.take()
    early = {id(p) for p in stage.module.parameters() if p.grad is not None}
    make_weight_gradients()
    with_gradient = [p for p in stage.module.parameters() if p.grad is not None]
    deferred = sum(p.numel() for p in with_gradient if id(p) not in early)
    return Split(deferred, sum(p.numel() for p in with_gradient))


def _bytes(tensors: Iterable[Tensor]) -> int:
    parts = (part for tensor in tensors for part in parts_with_memory(tensor))
    return sum(part.numel() * part.element_size() for part in parts)


# --- The menu of a stage.


_MOST_GROUPS = 6
"""So many are combined: each may be kept, offloaded or recomputed."""


class GroupFacts(NamedTuple):
    """One group of a stage, for one micro-batch.

    Attributes
    ----------
    freed_bytes
        By how much less is held when it alone is recomputed; negative where its inputs are more.
    offload_bytes
        What moves when it alone is offloaded.
    recompute_ms
        Of all its modules.
    """

    name: str
    num_modules: int
    freed_bytes: int
    offload_bytes: int
    recompute_ms: float


class StageMenu(NamedTuple):
    """The modes of a stage, keep first, the groups they are made of, and what is to be said."""

    modes: tuple[Mode, ...]
    groups: tuple[GroupFacts, ...]
    notes: tuple[str, ...]


class Candidate(NamedTuple):
    """A mode that might be on the menu, by numbers that were foreseen."""

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
        """What stays on the device between F and backward."""
        return (self.forward_bytes - self.offload_bytes,)


def measure_menu(
    stage: StageUnderTest,
    clock: Clock,
    rounds: tuple[int, int],
    *,
    memory: StageMemory,
    durations: Durations,
    bandwidths: Bandwidths | None,
    most: int,
    min_offload_bytes: int,
    recompute: bool = True,
) -> StageMenu:
    """Return at most ``most`` modes of a stage, keep counted.

    ``rounds`` are how often recomputations are timed, and how often before that; ``memory`` and
    ``durations`` are what was measured of the stage when it keeps everything. Without
    ``recompute`` modes only offload.
    """
    calls = GroupCalls(stage.module)
    hidden = hidden_groups(stage.module, calls.groups)
    names = sorted(calls.groups.keys() - hidden)
    saved = _look(stage, calls, min_offload_bytes)
    ms_of = _times(stage, calls, clock, rounds, names)
    facts = []
    for name in names:
        alone = frozenset({name})
        freed = _held(saved, frozenset()) - _held(saved, alone)
        moved = _moved(saved, frozenset(), alone)
        facts.append(
            GroupFacts(name, len(calls.groups[name]), freed, moved, _ms(calls, alone, ms_of))
        )
    largest = sorted(facts, key=lambda one: -max(one.freed_bytes, one.offload_bytes))
    used = [one.name for one in largest[:_MOST_GROUPS]]
    found = [
        *_of_groups(calls, saved, memory, used, ms_of),
        *_of_whole_stage(stage, memory, durations, saved, min_offload_bytes),
    ]
    if not recompute:
        found = [one for one in found if not (one.treatment.again or one.treatment.apart)]
    keep = next(one for one in found if one.treatment == Treatment())
    chosen = choose(keep, found, most=most, transfer_ms=_transfer_ms(bandwidths))
    modes = [_as_measured(stage, calls, one, memory, min_offload_bytes) for one in chosen]
    return StageMenu(tuple(modes), tuple(facts), tuple(_notes(stage, hidden, facts, used)))


def _notes(
    stage: StageUnderTest, hidden: Collection[str], facts: Sequence[GroupFacts], used: Sequence[str]
) -> Iterator[str]:
    if hidden:
        yield (
            f"Stage {stage.index}: {', '.join(sorted(hidden))} are compiled, or parts of what is: "
            "no hook tells their tensors from others, so no mode offloads or recomputes them alone."
        )
    if not facts:
        yield (
            f"Stage {stage.index} has no groups of modules that could be treated apart; declare "
            "some with optpipe.runtime.groups."
        )
    if left := [one.name for one in facts if one.name not in used]:
        yield (
            f"Stage {stage.index}: {', '.join(left)} are measured, but in no mode: {_MOST_GROUPS} "
            "groups are combined, those with the most bytes."
        )


# --- Which storages each group saves, and which it needs to start again.


class _SavedStorage(NamedTuple):
    """A storage that is held after an F, in one mode or another.

    Attributes
    ----------
    contexts
        The groups around each place that saves it.
    inputs
        For each module that takes it: the module's groups, and the groups around it.
    """

    num_bytes: int
    contexts: frozenset[frozenset[str]]
    inputs: frozenset[tuple[frozenset[str], frozenset[str]]]
    movable: bool

    def holders(self, again: frozenset[str]) -> list[frozenset[str]]:
        """Return the groups around each place that holds it where ``again`` are recomputed."""
        taken = [around for names, around in self.inputs if names & again]
        return [around for around in (*self.contexts, *taken) if not around & again]


class _Recorder(SavedActivations):
    """Notes who saves and who takes each storage."""

    def __init__(self, stage: StageUnderTest, resident: Sequence[Tensor]) -> None:
        super().__init__(f"stage {stage.index}", resident, stage.device, 1, moved=frozenset({REST}))
        self._refs: dict[int, Any] = {}
        self._sizes: dict[int, int] = {}
        self._contexts: dict[int, set[frozenset[str]]] = {}
        self._inputs: dict[int, set[tuple[frozenset[str], frozenset[str]]]] = {}

    def within(
        self, names: frozenset[str], given: object
    ) -> _GeneratorContextManager[None, None, None]:
        """Note what a module takes."""
        for leaf in tree_leaves(given):
            if isinstance(leaf, Tensor) and self._is_offloadable(leaf):
                self._inputs.setdefault(self._known(leaf), set()).add((names, self._scope))
        return super().within(names, given)

    def _pack(self, tensor: Tensor) -> Any:
        if self._is_offloadable(tensor):
            self._contexts.setdefault(self._known(tensor), set()).add(self._scope)
        return super()._pack(tensor)

    def _known(self, tensor: Tensor) -> int:
        identity = storage_identity(tensor.untyped_storage())
        # As long as this reference is held, no other storage has that identity.
        self._refs.setdefault(identity, weak_storage(tensor))
        self._sizes[identity] = tensor.untyped_storage().nbytes()
        return identity

    def found(self, outputs: Sequence[Tensor], min_bytes: int) -> list[_SavedStorage]:
        """Return all storages, those of the outputs as such that stay."""
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


def _look(stage: StageUnderTest, calls: GroupCalls, min_bytes: int) -> list[_SavedStorage]:
    received = stage.receive()
    target = () if stage.target is None else (stage.target,)
    resident = [*stage.module.parameters(), *stage.module.buffers(), *received, *target]
    recorder = _Recorder(stage, resident)
    with recorder.capture(), calls.running((), recorder):
        result = stage.forward(received)
    return recorder.found(result.outputs, min_bytes)


def _held(saved: Sequence[_SavedStorage], again: frozenset[str]) -> int:
    return sum(one.num_bytes for one in saved if one.holders(again))


def _moved(saved: Sequence[_SavedStorage], again: frozenset[str], moved: frozenset[str]) -> int:
    return sum(
        one.num_bytes
        for one in saved
        if one.movable
        and any(
            moved == EVERYTHING or around & moved or (not around and REST in moved)
            for around in one.holders(again)
        )
    )


# --- What it takes to run groups again.


def _times(
    stage: StageUnderTest,
    calls: GroupCalls,
    clock: Clock,
    rounds: tuple[int, int],
    names: Sequence[str],
) -> dict[nn.Module, float]:
    """Return the median ms of running each module again, with those of its group alone."""
    found: dict[nn.Module, float] = {}
    for name in names:
        samples: list[dict[nn.Module, float]] = []
        for _ in range(sum(rounds)):
            taken = _run_again(stage, calls, clock, name)
            samples.append(dict.fromkeys(calls.groups[name], 0.0))
            for part, start, end in taken:
                samples[-1][part] += clock.ms_between(start, end)
        kept = samples[rounds[1] :]
        for part in calls.groups[name]:
            found[part] = statistics.median(one[part] for one in kept)
    return found


def _run_again(
    stage: StageUnderTest, calls: GroupCalls, clock: Clock, name: str
) -> list[tuple[nn.Module, Any, Any]]:
    taken: list[tuple[nn.Module, Any, Any]] = []

    @contextmanager
    def timed(part: nn.Module) -> Iterator[None]:
        start = clock.mark()
        try:
            yield
        finally:
            # torch leaves a recomputation by an exception, once it has all that was saved.
            taken.append((part, start, clock.mark()))

    received, before = stage.receive(), calls.watch
    calls.watch = timed
    try:
        with calls.running({name}):
            result = stage.forward(received)
        stage.backward(result)
    finally:
        calls.watch = before
    return taken


def _ms(calls: GroupCalls, again: frozenset[str], ms_of: dict[nn.Module, float]) -> float:
    """Return what running groups again takes; what lies in another of them runs with it."""
    parts = {part for name in again for part in calls.groups[name]}
    inner = {one for part in parts for one in part.modules() if one is not part}
    return round(sum(ms_of[part] for part in parts - inner), 6)


# --- The modes that could be.


def _of_groups(
    calls: GroupCalls,
    saved: Sequence[_SavedStorage],
    memory: StageMemory,
    names: Sequence[str],
    ms_of: dict[nn.Module, float],
) -> Iterator[Candidate]:
    """Yield all combinations of groups that are kept, offloaded and recomputed."""
    kept = _held(saved, frozenset())
    for recomputed in product((False, True), repeat=len(names)):
        again = frozenset(name for name, is_in in zip(names, recomputed, strict=True) if is_in)
        forward = memory.activation_bytes - kept + _held(saved, again)
        ms = _ms(calls, again, ms_of)
        others = [*(name for name in names if name not in again), REST]
        for away in product((False, True), repeat=len(others)):
            moved = frozenset(name for name, is_in in zip(others, away, strict=True) if is_in)
            moved = EVERYTHING if len(moved) == len(others) else moved
            treatment = Treatment(again=again, moved=moved)
            num_bytes = _moved(saved, again, moved)
            if bool(num_bytes) == bool(moved):
                yield Candidate(treatment, forward, num_bytes, ms)


def _of_whole_stage(
    stage: StageUnderTest,
    memory: StageMemory,
    durations: Durations,
    saved: Sequence[_SavedStorage],
    min_bytes: int,
) -> Iterator[Candidate]:
    """Yield full recomputation by a RECOMPUTE, from an input on the device or on the host."""
    if everything := _moved(saved, frozenset(), EVERYTHING):
        yield Candidate(Treatment(moved=EVERYTHING), memory.activation_bytes, everything, 0.0)
    ms = statistics.median(durations[ActionType.RECOMPUTE])
    yield Candidate(Treatment(apart=True), memory.checkpoint_bytes, 0, ms)
    sizes = [one.untyped_storage().nbytes() for one in stage.receive()]
    if not stage.is_first and (moved := sum(size for size in sizes if size >= min_bytes)):
        treatment = Treatment(apart=True, moved=EVERYTHING)
        yield Candidate(treatment, memory.checkpoint_bytes, moved, ms)


def _transfer_ms(bandwidths: Bandwidths | None) -> float:
    """Return the ms that a byte takes to the host and back."""
    if bandwidths is None:
        return 0.0
    rates = bandwidths.under_compute
    return 1e-6 / rates.d2h_gb_per_s + 1e-6 / rates.h2d_gb_per_s


# --- A chosen mode as it will run.


def _as_measured(
    stage: StageUnderTest,
    calls: GroupCalls,
    chosen: Candidate,
    memory: StageMemory,
    min_bytes: int,
) -> Mode:
    treatment = chosen.treatment
    if treatment == Treatment():
        return Mode(name="keep")
    found = {"name": str(treatment), "offload_bytes": chosen.offload_bytes}
    if treatment.moved and not treatment.apart:
        found["offload_bytes"] = _run_offloaded(stage, calls, treatment, min_bytes)
    if treatment.apart:
        return Mode(
            **found,
            recompute="apart",
            recompute_ms=chosen.recompute_ms,
            forward_bytes=memory.checkpoint_bytes,
            forward_workspace_bytes=memory.without_graph_bytes,
        )
    if not treatment.again:
        return Mode(**found)
    inside = measure_inside(stage, memory, lambda: calls.running(treatment.again))
    return Mode(**found, recompute="inside", recompute_ms=chosen.recompute_ms, **inside._asdict())


def _run_offloaded(
    stage: StageUnderTest, calls: GroupCalls, treatment: Treatment, min_bytes: int
) -> int:
    """Return the bytes that an OFFLOAD in this mode moves."""
    received = stage.receive()
    target = () if stage.target is None else (stage.target,)
    resident = [*stage.module.parameters(), *stage.module.buffers(), *received, *target]
    label = f"stage {stage.index}"
    saved = SavedActivations(label, resident, stage.device, min_bytes, treatment.moved)
    with saved.capture(), calls.running(treatment.again, saved):
        result = stage.forward(received)
    saved.keep(result.outputs)
    return sum(storage.num_bytes for storage in saved.storages())
