"""A CUDA device that is not there: streams and events on a CPU, watched for races.

Everything that is launched, by compute, by the copy streams and by the streams of messages, is told
to torch's own race detector (`torch.cuda._sanitizer.EventHandler`) with the stream that it was
launched on. Memory is known to it in parts of 512 bytes, so that the slots of an arena are apart.
An allocation and a free count as writes by the stream that allocated, as for the caching allocator,
which hands a block on in that stream's order: whoever still uses it must be waited for before.

Compute runs at once. A copy runs some time later: at any moment the seed lets the next one of a
stream run, if the events it waits for have come, and who waits for an event lets run, in random
order, until it has come. A copy whose source has been freed meanwhile copies other bytes.
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.cuda import _sanitizer as sanitizer
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from optpipe import Problem, Schedule
from optpipe.runtime import PipelineRunner
from optpipe.runtime.executor import Executor
from optpipe.runtime.messages import MessageSlots
from optpipe.runtime.offload import Cell, CudaCopies, Fence, HostPool, Offloader, count_slots
from optpipe.schedule import Pass
from tests.runtime import small_cases

_PART_BYTES = 512
_MOST_PARTS = 1 << 40


class RecordedEvent:
    def __init__(self, number: int) -> None:
        self.number = number
        self.has_come = False


class RecordedStream:
    """A stream; what it still has to do is in ``queue``, in order."""

    def __init__(self, cuda: RecordingCuda, number: int) -> None:
        self._cuda = cuda
        self.number = number
        self.queue: list[tuple[RecordedEvent | None, Callable[[], None]]] = []

    def record_event(self) -> RecordedEvent:
        event = RecordedEvent(self._cuda.next_number())
        self._cuda.handler._handle_event_creation(event.number)
        self._cuda.handler._handle_event_record(event.number, self.number)
        self.later(None, lambda: setattr(event, "has_come", True))
        return event

    def wait_event(self, event: RecordedEvent) -> None:
        self._cuda.see_frees()
        self._cuda.handler._handle_event_wait(event.number, self.number)
        if self.number:
            self.later(event, lambda: None)
        else:
            self._cuda.run_until(event)

    def wait_stream(self, other: RecordedStream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        self._cuda.run_until(self.record_event())

    def later(self, event: RecordedEvent | None, work: Callable[[], None]) -> None:
        """Do some work behind all others of this stream and the event; compute does it now."""
        if self.number:
            self.queue.append((event, work))
        else:
            work()

    def run_next(self) -> bool:
        """Do the first of the work, if there is some and its event has come."""
        if not self.queue or (self.queue[0][0] is not None and not self.queue[0][0].has_come):
            return False
        self.queue.pop(0)[1]()
        return True


class RecordingCuda(TorchDispatchMode):
    """Stands for the module ``torch.cuda``; races are found while it is entered."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.findings: list[str] = []
        self.undo = ExitStack()
        self.page_locked: dict[int, int] = {}
        self.waits_for: list[Any] = [dist.isend, dist.irecv]
        self.handler = sanitizer.EventHandler()
        self._chooser = random.Random(seed)
        self._last_number = 0
        self._compute = self._current = RecordedStream(self, 0)
        self._side: list[RecordedStream] = []
        self._to_rank: dict[int, RecordedStream] = {}
        # Storage -> a number of its own, who allocated it, and the parts of it that were used.
        self._known: dict[int, tuple[StorageWeakRef, int, RecordedStream, set[int]]] = {}

    def next_number(self) -> int:
        self._last_number += 1
        return self._last_number

    # What production code calls.

    def Stream(self, _device: object = None) -> RecordedStream:  # noqa: N802 - torch's name
        self._side.append(RecordedStream(self, self.next_number()))
        self.handler._handle_stream_creation(self._side[-1].number)
        return self._side[-1]

    def current_stream(self, _device: object = None) -> RecordedStream:
        return self._current

    @contextmanager
    def stream(self, stream: RecordedStream) -> Iterator[None]:
        self._current, before = stream, self._current
        try:
            yield
        finally:
            self._current = before

    def cudart(self) -> RecordingCuda:
        return self

    def cudaHostRegister(self, address: int, num_bytes: int, _flags: int) -> int:  # noqa: N802
        self.page_locked[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.page_locked[address]
        return 0

    def isend(self, tensor: Tensor, *, group: Any, group_dst: int) -> Any:
        """Send as NCCL does: on a stream per neighbour, after compute."""
        stream = self._stream_to(group_dst)
        self._launch(stream, self.parts_of(tensor), set(), "P2P")
        with self.stream(stream):
            work = _ISEND(tensor, group=group, group_dst=group_dst)
        return self._recorded(work, stream, _ISEND)

    def irecv(self, tensor: Tensor, *, group: Any, group_src: int) -> Any:
        """Receive as NCCL does: on a stream per neighbour, after compute."""
        stream = self._stream_to(group_src)
        self._launch(stream, set(), self.parts_of(tensor), "P2P")
        with self.stream(stream):
            work = _IRECV(tensor, group=group, group_src=group_src)
        return self._recorded(work, stream, _IRECV)

    def _stream_to(self, peer: int) -> RecordedStream:
        stream = self._to_rank[peer] = self._to_rank.get(peer) or self.Stream()
        stream.wait_stream(self._current)
        return stream

    def _recorded(self, work: Any, stream: RecordedStream, operation: Any) -> Any:
        event = stream.record_event() if operation in self.waits_for else None
        return _RecordedWork(self, work, event)

    # What the streams do.

    def run_until(self, event: RecordedEvent) -> None:
        while not event.has_come:
            moved = [one for one in self._shuffled() if one.run_next()]
            assert moved, "the streams wait for each other"

    def run_some(self) -> None:
        for stream in self._shuffled():
            while self._chooser.random() < 0.1 and stream.run_next():
                pass

    def _shuffled(self) -> list[RecordedStream]:
        return self._chooser.sample(self._side, len(self._side))

    # What is launched, and what memory it uses.

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # Neither launches a kernel of ours; `batch_p2p` sees to the messages.
        if func.namespace == "c10d" or func.overloadpacket is torch.ops.aten.set_:
            return func(*args, **kwargs)
        self.run_some()
        is_copy = func is torch.ops.aten.copy_.default and self._current.number
        factory = bool(sanitizer.FACTORY_FUNCTION_REGEX.match(func._schema.name))
        found = _Arguments(self)
        found.parse_inputs(func._schema, args, kwargs, is_factory=factory)
        if is_copy:
            self._copy_later(self._current, args[0], args[1])
            outputs = args[0]
        else:
            outputs = func(*args, **kwargs)
        found.parse_outputs(func._schema, outputs, is_factory=factory)
        if found.read or found.written:
            self._launch(self._current, found.read - found.written, found.written, str(func))
        return outputs

    def _copy_later(self, stream: RecordedStream, target: Tensor, source: Tensor) -> None:
        to, origin = _Place(target), _Place(source)

        def write(origin: _Place | None) -> None:
            with _disable_current_modes():
                there, here = to.tensor(), None if origin is None else origin.tensor()
                if there is not None:
                    there.fill_(255) if here is None else there.copy_(here)

        # Whoever looks too early sees other bytes, not those that were there by chance.
        stream.later(None, lambda: write(None))
        stream.later(None, lambda: write(origin))

    def _launch(self, stream: RecordedStream, read: set[int], written: set[int], what: str) -> None:
        names: dict[int, list[str]] = {part: [] for part in read | written}
        errors = self.handler._handle_kernel_launch(
            stream.number, read, written, set(), what, names
        )
        for error in errors:
            assert isinstance(error, sanitizer.UnsynchronizedAccessError)
            now, before = error.current_access, error.previous_access
            self.findings.append(
                f"{now.operator} on stream {now.stream} {now.type.name}, behind {before.operator} "
                f"on stream {before.stream} {before.type.name}"
            )

    def parts_of(self, tensor: Tensor) -> set[int]:
        if tensor.layout is not torch.strided or tensor.device.type != "cpu" or not tensor.numel():
            return set()
        storage = tensor.untyped_storage()
        if storage._cdata not in self._known:
            weak = StorageWeakRef(storage)
            number = self.next_number()
            self._known[storage._cdata] = (weak, number, self._current, set())
        _, number, owner, used = self._known[storage._cdata]
        start = tensor.storage_offset()
        extent = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        size = tensor.element_size()
        first, last = start * size // _PART_BYTES, (start + extent) * size // _PART_BYTES
        parts = {number * _MOST_PARTS + part for part in range(first, last + 1)}
        if new := parts - used:
            used |= new
            self._launch(owner, set(), new, "allocation")
        return parts

    def see_frees(self) -> None:
        """Let those that allocated write to what has been freed since the last look."""
        gone = [one for one, (weak, *_) in self._known.items() if weak.expired()]
        for one in gone:
            _, _, owner, used = self._known.pop(one)
            self._launch(owner, set(), used, "free")
            for part in used:
                self.handler._handle_memory_deallocation(part)


_ISEND, _IRECV = dist.isend, dist.irecv

# The detector takes one of every launch, which is nearly all of its time.
_NO_TRACEBACKS = SimpleNamespace(
    StackSummary=SimpleNamespace(extract=lambda *_, **__: []), walk_stack=lambda _: ()
)


class _RecordedWork:
    def __init__(self, cuda: RecordingCuda, work: Any, event: RecordedEvent | None) -> None:
        self._cuda = cuda
        self._work = work
        self._event = event

    def wait(self) -> None:
        self._work.wait()
        if self._event is not None:
            self._cuda.current_stream().wait_event(self._event)


class _Place:
    """Where a tensor is, without keeping its memory."""

    def __init__(self, tensor: Tensor) -> None:
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._seen = tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride()

    def tensor(self) -> Tensor | None:
        storage: Any = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        dtype, *seen = self._seen
        return None if storage is None else torch.empty(0, dtype=dtype).set_(storage, *seen)


class _Arguments(sanitizer.ArgumentHandler):
    """torch's reading of an operator's schema, for tensors that are not on CUDA."""

    def __init__(self, cuda: RecordingCuda) -> None:
        super().__init__()
        self._cuda = cuda
        self.read: set[int] = set()
        self.written: set[int] = set()

    def _handle_argument(
        self, value: Any, is_write: bool, metadata_only: bool, *_: Any, **__: Any
    ) -> None:
        if isinstance(value, Tensor):
            parts = self._cuda.parts_of(value)
            if is_write:
                self.written |= parts
            elif not metadata_only:
                self.read |= parts


# --- What the ranks run.


class Watched(NamedTuple):
    """A rank's steps beside one process, and what the detector found first."""

    findings: list[str]
    data_right: bool
    offloaded_bytes: int


def train_watched(
    schedule: Schedule, problem: Problem, seed: int, mutation: str = "", steps: int = 2
) -> Watched:
    """Train on the recording device, with one of the production code's waits taken out."""
    cuda = RecordingCuda(seed)

    def record(runner: PipelineRunner) -> None:
        copies = CudaCopies(torch.device("cpu"), cuda)
        runner.offloader.copies = copies
        runner.offloader.pool = HostPool(copies, count_slots(schedule.programs[dist.get_rank()]))
        MUTATIONS[mutation](runner.offloader, cuda)
        step = runner.step

        def recorded(*given: Any) -> Tensor | None:
            with cuda:
                losses = step(*given)
            cuda.see_frees()
            return losses

        runner.step = recorded  # type: ignore[assignment, method-assign]

    vars(dist).update(isend=cuda.isend, irecv=cuda.irecv)
    vars(sanitizer)["traceback"] = _NO_TRACEBACKS
    try:
        trained = small_cases.train(schedule, problem, record, steps=steps)
    finally:
        cuda.undo.close()
        vars(dist).update(isend=_ISEND, irecv=_IRECV)
        vars(sanitizer)["traceback"] = traceback
    right = trained.losses_equal and trained.worst_difference <= 1e-14 * trained.largest_gradient
    return Watched(cuda.findings[:5], right, trained.offloaded_bytes)


def train_all_watched(cases: list[tuple[Schedule, Problem, int]]) -> list[Watched]:
    return [train_watched(schedule, problem, seed) for schedule, problem, seed in cases]


class _NoFence:
    def wait(self) -> None:
        """Do not."""


def _no_wait_before(lane: str) -> Callable[[Offloader, RecordingCuda], None]:
    def mutate(offloader: Offloader, _cuda: RecordingCuda) -> None:
        getattr(offloader.copies, lane).wait_stream = lambda _: None

    return mutate


def _no_wait_after(direction: str) -> Callable[[Offloader, RecordingCuda], None]:
    def mutate(offloader: Offloader, _cuda: RecordingCuda) -> None:
        issue = getattr(offloader.copies, direction)

        def issued(pairs: Any) -> _NoFence:
            issue(pairs)
            return _NoFence()

        setattr(offloader.copies, direction, issued)

    return mutate


def _fence_too_early(offloader: Offloader, cuda: RecordingCuda) -> None:
    """The event is recorded before the copies are issued."""
    copies: Any = offloader.copies
    issue = copies._issue

    def issued(stream: RecordedStream, pairs: Any) -> Fence:
        fence: Fence = issue(stream, ())
        issue(stream, pairs)
        return fence

    copies._issue = issued


def _give_back_at(name: str) -> Callable[[Offloader, RecordingCuda], None]:
    def mutate(offloader: Offloader, _cuda: RecordingCuda) -> None:
        action = getattr(offloader, name)

        def early(cell: Cell) -> None:
            action(cell)
            offloader.pool._free[cell[0]].insert(0, offloader._offloaded[cell].slot)

        setattr(offloader, name, early)
        offloader.pool.give_back = lambda *_: None  # type: ignore[method-assign]

    return mutate


def _allocate_on_the_copy_stream(offloader: Offloader, cuda: RecordingCuda) -> None:
    reload = offloader.reload

    def reloaded(cell: Cell) -> None:
        with cuda.stream(offloader.copies._up):  # type: ignore[attr-defined]
            reload(cell)

    compute = cuda.current_stream()
    cuda.current_stream = lambda _device=None: compute  # type: ignore[method-assign]
    offloader.reload = reloaded  # type: ignore[method-assign]


def _no_wait_for(operation: Any) -> Callable[[Offloader, RecordingCuda], None]:
    """Only the host sees to it that these messages have come."""
    return lambda _, cuda: cuda.waits_for.remove(operation)


def _slot_free_at_once(*, of_receives: bool) -> Callable[[Offloader, RecordingCuda], None]:
    """The slot of a message may be taken again as soon as it has been posted."""
    take, receive = MessageSlots.take, Executor._receive
    receives = False

    def received(self: Executor, message: Any) -> None:
        nonlocal receives
        receives = True
        receive(self, message)
        receives = False

    def taken(self: MessageSlots, message: Pass, blanks: Any) -> list[Tensor]:
        found = take(self, message, blanks)
        if receives == of_receives:
            self._free.append(self._taken[message])
        return found

    def given_back(self: MessageSlots, message: Pass) -> None:
        slot = self._taken.pop(message)
        if all(slot is not free for free in self._free):
            self._free.append(slot)

    def mutate(_: Offloader, cuda: RecordingCuda) -> None:
        cuda.undo.enter_context(mock.patch.multiple(MessageSlots, take=taken, give_back=given_back))
        cuda.undo.enter_context(mock.patch.object(Executor, "_receive", received))

    return mutate


MUTATIONS: dict[str, Callable[[Offloader, RecordingCuda], None]] = {
    "": lambda *_: None,
    "OFFLOAD does not wait for compute": _no_wait_before("_down"),
    "RELOAD does not wait for compute": _no_wait_before("_up"),
    "RELEASE does not wait for the copy": _no_wait_after("to_host"),
    "the backward does not wait for the copy": _no_wait_after("to_device"),
    "the event comes before the copies": _fence_too_early,
    "the slot is given back at OFFLOAD": _give_back_at("offload"),
    "the slot is given back at RELEASE": _give_back_at("release"),
    "the slot is given back at RELOAD": _give_back_at("reload"),
    "RELOAD allocates on the copy stream": _allocate_on_the_copy_stream,
}
OF_MESSAGES: dict[str, Callable[[Offloader, RecordingCuda], None]] = {
    "sends are not waited for": _no_wait_for(dist.isend),
    "receives are not waited for": _no_wait_for(dist.irecv),
    "a sent slot is free at once": _slot_free_at_once(of_receives=False),
    "a receive's slot is free at once": _slot_free_at_once(of_receives=True),
}
MUTATIONS |= OF_MESSAGES
