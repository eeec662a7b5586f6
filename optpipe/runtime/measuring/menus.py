"""The menu of a stage: what its groups hold and take to run again, and the modes worth having.

One F shows which storages each group saves and needs to start again; from that the bytes of every
combination of groups follow, and from timed recomputations its time. A few are chosen by these
numbers (`optpipe.menus.choose`) and measured as they will run.
"""

from __future__ import annotations

import statistics
from contextlib import contextmanager
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from optpipe.menus import choose
from optpipe.problem import Mode
from optpipe.runtime.measuring.memory import measure_inside
from optpipe.runtime.offload import EVERYTHING, REST, SavedActivations, weak_storage
from optpipe.runtime.torch_names import storage_identity, tree_leaves
from optpipe.runtime.treatments import GroupCalls, Treatment, hidden_groups
from optpipe.schedule import ActionType

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence
    from contextlib import _GeneratorContextManager

    from torch import nn

    from optpipe.runtime.measuring.memory import StageMemory
    from optpipe.runtime.measuring.times import Bandwidths, Clock, Durations, StageUnderTest

__all__ = ["Candidate", "GroupFacts", "StageMenu", "measure_menu"]


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
