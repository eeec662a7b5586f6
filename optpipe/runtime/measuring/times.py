"""Time one stage's passes, copies and messages, as the runtime runs them."""

from __future__ import annotations

import math
import os
import socket
import statistics
import time
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from optpipe.errors import InputError, PreflightError
from optpipe.measurements import DeviceFacts, Transfer
from optpipe.runtime.launch import join_ranks, leave_ranks
from optpipe.runtime.messages import layout_of, shard_of
from optpipe.runtime.offload import host_memory_bytes
from optpipe.runtime.overlap import PairedPass
from optpipe.runtime.passes import save_random_state
from optpipe.runtime.preflight import as_tensors, describe, gather, made_on, untouched
from optpipe.runtime.torch_names import backends
from optpipe.schedule import Action, ActionType

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch.distributed import ProcessGroup

    from optpipe.runtime.messages import Layout
    from optpipe.runtime.offload import Copies, Fence
    from optpipe.runtime.overlap import Overlap
    from optpipe.runtime.passes import WeightGradients

__all__ = [
    "Clock",
    "DevicePair",
    "Durations",
    "ForwardResult",
    "Instruments",
    "KnownDevice",
    "Mark",
    "MeasuringRanks",
    "Rate",
    "StageUnderTest",
    "clock_for",
    "device_facts",
    "device_name",
    "drop_gradients",
    "measure_bandwidths",
    "message_sizes",
    "ping_pong",
    "preserve_state",
    "select_device",
    "time_messages",
    "time_pairs",
    "time_passes",
    "use_process_group",
    "use_threads",
]


class ForwardResult(NamedTuple):
    """The outputs that a forward sends, and the roots of its backward; of DTensors the shards.

    ``layouts`` describe the DTensors.
    """

    outputs: tuple[Tensor, ...]
    roots: tuple[Tensor, ...]
    layouts: tuple[Layout | None, ...] = ()


class Rate(NamedTuple):
    """Median GB/s (1e9) to the host and back, both directions busy while compute runs."""

    d2h_gb_per_s: float
    h2d_gb_per_s: float


DevicePair = tuple[int, int]
"""(lower, higher) device."""


class KnownDevice(NamedTuple):
    """Facts of a device that is not there, instead of measured ones.

    ``message_ms`` returns the time of a message, from its devices and bytes. ``note`` is for the
    report.
    """

    name: str
    memory_bytes: int
    reserved_bytes: int
    rate: Rate
    message_ms: Callable[[DevicePair, int], float]
    note: str


@dataclass(frozen=True, kw_only=True)
class Instruments:
    """The means to measure a device; measuring reads neither addresses nor values of tensors.

    Attributes
    ----------
    clock
        Measures the times of passes, copies and messages.
    meter_for
        Returns a context that counts live bytes; it takes the tensors that exist before.
    copies
        Copies between the device and its host.
    known
        Facts that are not measured, of a device that is not there.
    running, timing
        Return a context around everything that is measured of a stage, and around what is timed.
    """

    clock: Clock
    meter_for: Callable[[Iterable[Tensor]], AbstractContextManager[Any]]
    copies: Copies
    known: KnownDevice | None = None
    running: Callable[[nn.Module], AbstractContextManager[Any]] = nullcontext
    timing: Callable[[], AbstractContextManager[Any]] = nullcontext


@dataclass(frozen=True, kw_only=True)
class StageUnderTest:
    """A stage with the inputs of one micro-batch: from the stage before, or the batch.

    Only the last stage has a ``loss`` and its ``target``, a part of the batch. ``spread`` is the
    share by which the saved bytes differ between inputs with other values.
    """

    index: int
    module: nn.Module
    inputs: tuple[Tensor, ...]
    gradients: WeightGradients
    instruments: Instruments
    loss: Callable[[Any, Any], Tensor] | None = None
    target: Tensor | None = None
    spread: float = 0.0

    @property
    def is_first(self) -> bool:
        """Whether the inputs are the batch, which needs no gradients."""
        return self.index == 0

    @property
    def device(self) -> torch.device:
        """The device of the inputs."""
        return self.inputs[0].device

    def receive(self) -> tuple[Tensor, ...]:
        """Return the inputs as received: copies that collect gradients, or the batch itself."""
        if self.is_first:
            return tuple(tensor.detach() for tensor in self.inputs)
        arrived = tuple(
            tensor.detach().clone().requires_grad_(tensor.is_floating_point())
            for tensor in self.inputs
        )
        for tensor in arrived:
            if isinstance(tensor, DTensor) and tensor.requires_grad:
                tensor.register_post_accumulate_grad_hook(_end_collective)  # type: ignore[no-untyped-call]
        return arrived

    def forward(self, received: tuple[Tensor, ...]) -> ForwardResult:
        """Run F, with the loss in the last stage; refuse a stage that fails."""
        try:
            output = self.module(*received)
            # As in `Passes`: an autocast around the step would keep copies of weights.
            torch.clear_autocast_cache()
            if self.loss is not None:
                return ForwardResult((), (self.loss(output, self.target),))
            label = f"the output of stage {self.index}"
            whole = as_tensors(output, label)
            outputs = tuple(map(shard_of, whole))
            return ForwardResult(
                outputs,
                tuple(out for out in outputs if out.requires_grad),
                tuple(layout_of(out, label) for out in whole),
            )
        except Exception as error:
            sizes = [tuple(tensor.size()) for tensor in received]
            raise PreflightError(
                f"stage {self.index} cannot run on inputs of size {sizes}: {describe(error)}; "
                "correct the stage or the sample"
            ) from error

    def backward(self, result: ForwardResult, gradients: Sequence[Tensor] | None = None) -> None:
        """Run I or B with these output gradients, or with ones."""
        if not any(root.requires_grad for root in result.roots):
            raise InputError(
                f"no output of stage {self.index} requires a gradient, but measuring runs its "
                "backward; do not freeze all its parameters or detach its output"
            )
        if gradients is None:
            gradients = [torch.ones_like(root) for root in result.roots]
        self.gradients.run_backward(result.roots, gradients)
        if not self.gradients.collecting:
            self.gradients.take()()


def _end_collective(received: Tensor) -> None:
    """Read a gradient as its sender does: until then its collective keeps memory."""
    if received.grad is not None:
        shard_of(received.grad)


@contextmanager
def preserve_state(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Drop gradients inside the context; restore them, buffers and random states after it."""
    gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
    drop_gradients(module)
    try:
        with untouched(module, device):
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient


def drop_gradients(module: nn.Module) -> None:
    """Drop the gradients of all parameters."""
    for parameter in module.parameters():
        parameter.grad = None


# --- Clocks: events on CUDA, the processor's clock elsewhere. A mark is the moment at which all
# compute issued before it has ended. On CUDA it is an event in the stream: recording it takes the
# host about a microsecond, and only `Clock.ms_between` waits.

Mark = Any
"""A moment on one clock, which only that clock can read."""


class Clock(Protocol):
    """Marks moments on a device and measures the time between them."""

    def mark(self) -> Mark:
        """Return the moment at which all compute issued so far ends."""

    def mark_after(self, fence: Fence, lane: int) -> Mark:
        """Return the moment at which a copy ends; compute does not wait for it.

        Lane 0 copies to the host and lane 1 to the device, each in order.
        """

    def ms_between(self, start: Mark, end: Mark) -> float:
        """Wait for the later of two moments and return the milliseconds between them."""


def clock_for(device: torch.device) -> Clock:
    """Return the clock of a device."""
    return _CudaClock(device) if device.type == "cuda" else _CpuClock()


class _CpuClock:
    """For devices whose work has ended when its call returns."""

    def mark(self) -> Mark:
        """Return the processor's monotonic clock in ns."""
        return time.perf_counter_ns()

    def mark_after(self, fence: Fence, lane: int) -> Mark:  # noqa: ARG002 - lanes share the CPU
        fence.wait()
        return self.mark()

    def ms_between(self, start: Mark, end: Mark) -> float:
        return float(end - start) / 1e6


class _CudaClock:
    """Events on the compute stream, and on one probe stream per copy lane."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._probes = [
            torch.cuda.Stream(device),  # type: ignore[no-untyped-call]
            torch.cuda.Stream(device),  # type: ignore[no-untyped-call]
        ]

    def mark(self) -> Mark:
        """Record an event on the compute stream."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def mark_after(self, fence: Fence, lane: int) -> Mark:
        """Record an event on the lane's probe stream, which waits instead of compute."""
        with torch.cuda.stream(self._probes[lane]):
            fence.wait()
            return self.mark()

    def ms_between(self, start: Mark, end: Mark) -> float:
        end.synchronize()
        return float(start.elapsed_time(end))


# --- Durations of a stage's passes.

Durations = dict[ActionType, tuple[float, ...]]
"""Pass -> its samples in ms, in order."""


def time_passes(stage: StageUnderTest, *, repeats: int, warmups: int, can_split: bool) -> Durations:
    """Run F, I, W, then F as a RECOMPUTE, then B, repeatedly; return the durations.

    Gradients add up over the rounds, as over micro-batches. The first ``warmups`` rounds are
    dropped. If the stage cannot be split, I is the whole backward and W takes 0.
    """
    clock = stage.instruments.clock
    marks: list[tuple[ActionType, Mark, Mark]] = []

    def timed(
        kind: ActionType,
        run: Callable[[], Any],
        context: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> Any:
        start = clock.mark()
        with context():
            result = run()
        marks.append((kind, start, clock.mark()))
        return result

    with stage.instruments.timing():
        for _ in range(warmups + repeats):
            result = timed(ActionType.FORWARD, partial(stage.forward, stage.receive()))
            with stage.gradients.collect():
                timed(ActionType.BACKWARD_INPUT, partial(stage.backward, result))
                make_weight_gradients = stage.gradients.take()
            timed(ActionType.BACKWARD_WEIGHT, make_weight_gradients)
            again = partial(stage.forward, stage.receive())
            result = timed(ActionType.RECOMPUTE, again, save_random_state(stage.device))
            timed(ActionType.FULL_BACKWARD, partial(stage.backward, result))
    # Read after all rounds, so that no pass waits for another's end.
    samples: dict[ActionType, list[float]] = {}
    for kind, start, end in marks:
        samples.setdefault(kind, []).append(clock.ms_between(start, end))
    if not can_split:
        samples[ActionType.BACKWARD_WEIGHT] = [0.0] * (warmups + repeats)
    return {kind: tuple(values[warmups:]) for kind, values in samples.items()}


def time_pairs(
    forward: StageUnderTest,
    backward: StageUnderTest,
    letter: Literal["B", "I"],
    overlap: Overlap,
    clock: Clock,
    *,
    repeats: int,
    warmups: int,
) -> tuple[float, ...]:
    """Run an F and a backward one after the other and then as a pair, repeatedly.

    Return by how many ms the pair was shorter, in each round after the warm-ups.
    """
    kind = ActionType.BACKWARD_INPUT if letter == "I" else ActionType.FULL_BACKWARD
    rounds = []
    for _ in range(warmups + repeats):
        marks = []
        for run in (_run_in_turn, overlap):
            result = backward.forward(backward.receive())
            received = forward.receive()
            with backward.gradients.collect() if letter == "I" else nullcontext():
                passes = (
                    PairedPass(
                        Action(forward.index, ActionType.FORWARD, 1),
                        forward.module,
                        partial(forward.forward, received),
                    ),
                    PairedPass(
                        Action(backward.index, kind, 0),
                        backward.module,
                        partial(backward.backward, result),
                    ),
                )
                marks.append(clock.mark())
                run(*passes)
                marks.append(clock.mark())
                for one in passes:
                    one.expect_run()
                if letter == "I":
                    backward.gradients.take()()
        rounds.append(marks)
    return tuple(
        clock.ms_between(*marks[:2]) - clock.ms_between(*marks[2:]) for marks in rounds[warmups:]
    )


def _run_in_turn(forward: PairedPass, backward: PairedPass) -> None:
    forward.run()
    backward.run()


# --- Bandwidths to the host and back. Copies have the number, sizes and lanes of the stage's
# OFFLOAD and RELOAD. On the CPU, copies are synchronous: both directions and compute take turns,
# and compute only makes the caches cold.

_DOWN, _UP = 0, 1
_CUDA_BYTES = 256 * 2**20
"""Bytes issued together on CUDA, to hide the host's time to issue copies."""


def measure_bandwidths(
    copies: Copies,
    clock: Clock,
    sizes: Sequence[int],
    device: torch.device,
    *,
    compute: Callable[[], None],
    compute_ms: float,
    repeats: int,
) -> Rate:
    """Copy buffers of these sizes in bytes to the host and back, and return the median bandwidths.

    ``compute`` runs passes of the stage that take about ``compute_ms``. The medians are of
    ``repeats`` copies after one warm-up.
    """
    rounds = max(1, round(_CUDA_BYTES / sum(sizes))) if copies.pinned else 1
    num_bytes = sum(sizes) * rounds
    # Each lane has its own buffers, as two cells do.
    lanes = [
        [
            (_zeros(size, device), torch.zeros(size, dtype=torch.uint8, pin_memory=copies.pinned))
            for size in sizes
        ]
        for _ in (_DOWN, _UP)
    ]
    reloads = [(on_host, on_device) for on_device, on_host in lanes[_UP]]

    def issue(lane: int) -> tuple[Mark, Mark]:
        """Issue a lane's copies; return the moments of their start and end."""
        start = clock.mark()
        for _ in range(rounds):
            fence = copies.to_host(lanes[_DOWN]) if lane == _DOWN else copies.to_device(reloads)
        return start, clock.mark_after(fence, lane)

    def rate(passes: int | None = None) -> Rate:
        """Return the median GB/s of both lanes, with ``passes`` of compute if not None."""
        samples = []
        for _ in range(repeats + 1):
            if passes is not None:
                compute()
            marks = [issue(lane) for lane in (_DOWN, _UP)]
            for _ in range(passes or 0):
                compute()
            samples.append([clock.ms_between(start, end) for start, end in marks])
        medians = map(statistics.median, zip(*samples[1:], strict=True))
        return Rate(*(num_bytes / (max(ms, 1e-6) * 1e6) for ms in medians))

    if not copies.pinned or compute_ms <= 0:
        return rate(0)
    return rate(math.ceil(num_bytes / (min(rate()) * 1e6) / compute_ms))


def device_facts(
    ranks: MeasuringRanks,
    rates: Sequence[Rate | None],
    memory_bytes: int | None,
    known: KnownDevice | None = None,
) -> tuple[DeviceFacts, ...]:
    """Return the facts of every device, each read on its own rank.

    ``memory_bytes`` is the memory of each; None = the GPU's, or an equal part of the host's.
    """

    def own_facts() -> dict[str, Any]:
        facts: dict[str, Any] = {"host": socket.gethostname()} if ranks.are_many else {}
        if known is not None:
            reserved = known.reserved_bytes
            facts |= {"memory_bytes": known.memory_bytes, "reserved_bytes": reserved}
        elif ranks.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(ranks.device)
            reserved = total - free - torch.cuda.memory_reserved(ranks.device)
            facts |= {"memory_bytes": total, "reserved_bytes": max(0, reserved)}
        else:
            facts["memory_bytes"] = host_memory_bytes() // len(rates)
        return facts | ({"memory_bytes": memory_bytes} if memory_bytes else {})

    found = []
    for index, rate in enumerate(rates):
        facts = ranks.run_on(index, own_facts)
        if rate is not None:
            facts |= rate._asdict()
        found.append(DeviceFacts(**facts))
    return tuple(found)


def device_name(device: torch.device) -> str:
    """Return the name of a device for reports."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"


# --- Messages between devices: ping-pong between ranks, or copies on the only device.

_WARMUPS = 2


def message_sizes(boundary_bytes: int) -> tuple[int, ...]:
    """Return the sizes to send: a short one for the latency, the boundary's, and larger ones.

    If the boundary's message takes no longer than a short one, only larger ones show the bandwidth.
    They are up to 16 times as large, but at most 256 MiB or the boundary's size.
    """
    max_bytes = max(boundary_bytes, 2**28)
    sizes = {1024, *(min(max_bytes, factor * boundary_bytes) for factor in (1, 4, 16))}
    return tuple(sorted(size for size in sizes if size > 0))


def time_messages(
    boundary_bytes: Mapping[DevicePair, int],
    ranks: MeasuringRanks,
    instruments: Instruments,
    repeats: int,
) -> tuple[Transfer, ...]:
    """Return the times of messages between devices: measured between ranks, or known.

    One process times copies on its device, instead of messages between devices that do not exist.
    """
    sizes_of = {pair: message_sizes(size) for pair, size in sorted(boundary_bytes.items())}
    clock, device, known = instruments.clock, ranks.device, instruments.known
    if ranks.are_many:
        return ping_pong(sizes_of, clock, device, ranks.group, repeats)
    found = list[Transfer]()
    copies: dict[int, list[float]] = {}
    for pair, sizes in sizes_of.items():
        for size in sizes:
            if known is not None:
                times = [known.message_ms(pair, size)]
            else:
                if size not in copies:
                    copy = partial(_zeros(size, device).copy_, _zeros(size, device))
                    copies[size] = _timed(clock, [copy], repeats)
                times = copies[size]
            found += [
                Transfer(source=pair[0], target=pair[1], num_bytes=size, time_ms=ms) for ms in times
            ]
    return tuple(found)


def ping_pong(
    sizes_of: Mapping[DevicePair, Sequence[int]],
    clock: Clock,
    device: torch.device,
    group: ProcessGroup | None,
    repeats: int,
) -> tuple[Transfer, ...]:
    """Send messages back and forth between pairs of ranks, one pair at a time.

    A message's time is half of its round trip. All ranks call this together and get all times.
    ``sizes_of`` has the bytes of each pair's messages, the same on all ranks. Each size has
    ``repeats`` round trips after two warm-ups. Over gloo, messages are in the host's memory.
    """
    if backends(group).get(device.type) != dist.Backend.NCCL:
        device = torch.device("cpu")
    rank, own = dist.get_rank(group), list[Transfer]()
    for pair, sizes in sorted(sizes_of.items()):
        dist.barrier(group)
        for size in sizes if rank in pair else ():
            buffer, peer = _zeros(size, device), sum(pair) - rank
            send = partial(dist.send, buffer, group=group, group_dst=peer)
            receive = partial(dist.recv, buffer, group=group, group_src=peer)
            is_first = rank == pair[0]
            steps = (send, receive) if is_first else (receive, send)
            for ms in _timed(clock, steps, repeats):
                transfer = Transfer(source=pair[0], target=pair[1], num_bytes=size, time_ms=ms / 2)
                own += [transfer] if is_first else []
    return tuple(one for part in gather(own, group) for one in part)


def _timed(clock: Clock, steps: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """Return the ms of some steps in each repeat, after warm-ups."""
    marks = []
    for _ in range(repeats + _WARMUPS):
        start = clock.mark()
        for step in steps:
            step()
        marks.append((start, clock.mark()))
    return [clock.ms_between(start, end) for start, end in marks[_WARMUPS:]]


def _zeros(size: int, device: torch.device) -> Tensor:
    return torch.zeros(size, dtype=torch.uint8, device=device)


# --- The ranks that measure together, or the only process.


class MeasuringRanks:
    """Runs each part of the measuring on one rank, and sends its result to all ranks.

    Without torch.distributed one process measures for all devices.
    """

    def __init__(self, group: ProcessGroup | None, device: torch.device) -> None:
        self.group = group
        self.device = device
        # One process traces a stage of all ranks.
        is_traced = device.type == "meta"
        self.are_many = not is_traced and dist.is_initialized() and dist.get_world_size(group) > 1
        self.num_ranks = dist.get_world_size(group) if self.are_many else None
        """None if one process measures for all devices."""

    def run_on(self, home: int, function: Callable[[], Any]) -> Any:
        """Return the result of a function on rank ``home``; a failure there fails all ranks."""
        if not self.are_many:
            return function()
        value, faults = made_on(home, function, self.device, self.group)
        if faults:
            raise PreflightError(f"rank {home} could not measure: {faults[0]}")
        return value


@contextmanager
def use_process_group(device: torch.device) -> Iterator[None]:
    """Join the other ranks inside, if torchrun or `optpipe.runtime.launch` started some."""
    if os.environ.get("WORLD_SIZE", "1") == "1" or dist.is_initialized():
        yield
        return
    on_gpu = device.type == "cuda"
    join_ranks("nccl" if on_gpu else "gloo", **({"device_id": device} if on_gpu else {}))
    try:
        yield
    finally:
        leave_ranks()


@contextmanager
def use_threads(threads: int) -> Iterator[None]:
    """Let CPU operations use this many threads inside the context, as a rank would."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def select_device(name: str | None) -> torch.device:
    """Return the device of this name, or this rank's GPU, or the CPU; make a GPU current."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(
            f"--device {name}: torch knows no such device; write cuda or cpu"
        ) from None
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise InputError(f"--device {device}: torch finds no GPU here; write cpu")
        if device.index is None:
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    return device
