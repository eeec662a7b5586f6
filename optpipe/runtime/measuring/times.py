"""One stage as the runtime runs it, alone; and what is known of devices: memory, copies, links."""

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
from optpipe.runtime.demo_model import join_ranks, leave_ranks
from optpipe.runtime.messages import layout_of, shard_of
from optpipe.runtime.offload import host_memory_bytes
from optpipe.runtime.overlap import PairedPass
from optpipe.runtime.preflight import as_tensors, describe, gather, made_on, untouched
from optpipe.runtime.torch_names import backends
from optpipe.schedule import Action, ActionType

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch.distributed import ProcessGroup

    from optpipe.runtime.messages import Layout
    from optpipe.runtime.offload import Copies, Fence
    from optpipe.runtime.overlap import Overlap
    from optpipe.runtime.passes import WeightGradients

__all__ = [
    "Bandwidths",
    "Clock",
    "Durations",
    "ForwardResult",
    "Mark",
    "MeasuringRanks",
    "StageUnderTest",
    "clock_for",
    "computing_with",
    "device_facts",
    "device_name",
    "device_named",
    "forget_gradients",
    "joined",
    "local_copies",
    "measure_bandwidths",
    "message_sizes",
    "ping_pong",
    "time_pairs",
    "time_passes",
    "undisturbed",
]


class ForwardResult(NamedTuple):
    """What a forward leaves: what is sent on, and what the backward starts from.

    Of DTensors the shards, and how they lie.
    """

    outputs: tuple[Tensor, ...]
    roots: tuple[Tensor, ...]
    layouts: tuple[Layout | None, ...] = ()


@dataclass(frozen=True, kw_only=True)
class StageUnderTest:
    """A stage with one micro-batch's inputs: from the stage before, or the batch.

    ``loss`` and its ``target``, which belongs to the batch, are those of the last stage. ``spread``
    is by which share what is saved differs between inputs with other values.
    """

    index: int
    module: nn.Module
    inputs: tuple[Tensor, ...]
    gradients: WeightGradients
    loss: Callable[[Any, Any], Tensor] | None = None
    target: Tensor | None = None
    spread: float = 0.0

    @property
    def is_first(self) -> bool:
        """Whether the inputs are the batch, of which nobody wants gradients."""
        return self.index == 0

    @property
    def device(self) -> torch.device:
        """Where the inputs are."""
        return self.inputs[0].device

    def receive(self) -> tuple[Tensor, ...]:
        """Return the inputs as they arrive: copies that collect gradients, or the batch itself."""
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
        """Run F, the loss included where the stage is the last; refuse a stage that fails."""
        try:
            output = self.module(*received)
            # Copies of weights that an autocast around it all would keep, as in `Passes`.
            torch.clear_autocast_cache()
            if self.loss is not None:
                return ForwardResult((), (self.loss(output, self.target),))
            what = f"the output of stage {self.index}"
            whole = as_tensors(output, what)
            outputs = tuple(map(shard_of, whole))
            return ForwardResult(
                outputs,
                tuple(out for out in outputs if out.requires_grad),
                tuple(layout_of(out, what) for out in whole),
            )
        except Exception as error:
            sizes = [tuple(tensor.size()) for tensor in received]
            raise PreflightError(
                f"stage {self.index} cannot run on inputs of size {sizes}: {describe(error)}; "
                "correct the stage, or the sample"
            ) from error

    def backward(self, result: ForwardResult, gradients: Sequence[Tensor] | None = None) -> None:
        """Run the backward, an I or a B, with these output gradients, or with ones."""
        if not any(root.requires_grad for root in result.roots):
            raise InputError(
                f"no output of stage {self.index} requires a gradient, but its backward is to be "
                "measured; are its parameters frozen, or its output detached?"
            )
        if gradients is None:
            gradients = [torch.ones_like(root) for root in result.roots]
        self.gradients.run_backward(result.roots, gradients)
        if not self.gradients.collecting:
            self.gradients.take()()


def _end_collective(received: Tensor) -> None:
    """Read a gradient, as who sends it back does: until then its collective holds its memory."""
    if received.grad is not None:
        shard_of(received.grad)


@contextmanager
def undisturbed(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Give gradients, buffers and random states back as they were; inside, gradients are None."""
    gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
    forget_gradients(module)
    try:
        with untouched(module, device):
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient


def forget_gradients(module: nn.Module) -> None:
    """Drop the gradients of all parameters."""
    for parameter in module.parameters():
        parameter.grad = None


# --- How long something took on a device: events on CUDA, the processor's clock elsewhere.
# A mark stands behind everything issued before it on the compute lane; on CUDA it is an event that
# the stream passes when it gets there, so that taking it costs the host about a microsecond and
# makes nobody wait. Only `Clock.ms_between` waits.

Mark = Any
"""A moment on one clock; only that clock can read it."""


class Clock(Protocol):
    """Takes moments on a device and says what lies between them."""

    def mark(self) -> Mark:
        """Return the moment at which all compute issued so far ends."""

    def mark_after(self, fence: Fence, lane: int) -> Mark:
        """Return the moment at which a copy ends, without making compute wait for it.

        Lane 0 is that of copies to the host, 1 that of those to the device: each ends in its order.
        """

    def ms_between(self, start: Mark, end: Mark) -> float:
        """Return the milliseconds from one moment to a later one, waiting until it has passed."""


def clock_for(device: torch.device) -> Clock:
    """Return the clock of a device."""
    return _CudaClock(device) if device.type == "cuda" else _CpuClock()


class _CpuClock:
    """For devices on which work has ended when its call returns."""

    def mark(self) -> Mark:
        """Return the processor's monotonic clock in nanoseconds."""
        return time.perf_counter_ns()

    def mark_after(self, fence: Fence, lane: int) -> Mark:  # noqa: ARG002 - both lanes are this one
        """Wait for the copy and return the time."""
        fence.wait()
        return self.mark()

    def ms_between(self, start: Mark, end: Mark) -> float:
        """Return the difference of two times."""
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
        """Record an event on the lane's probe stream, which waits in the place of compute."""
        with torch.cuda.stream(self._probes[lane]):
            fence.wait()
            return self.mark()

    def ms_between(self, start: Mark, end: Mark) -> float:
        """Wait for the later event and return the device's own difference."""
        end.synchronize()
        return float(start.elapsed_time(end))


# --- What the passes of a stage take: every sample, in milliseconds.

Durations = dict[ActionType, tuple[float, ...]]
"""Pass -> its samples in ms, in the order in which they were taken."""


def time_passes(
    stage: StageUnderTest, clock: Clock, *, repeats: int, warmups: int, can_split: bool
) -> Durations:
    """Run F, I, W, then F, RECOMPUTE, B, again and again, and return what each took.

    Gradients add up from repeat to repeat, as they do over micro-batches. ``warmups`` rounds come
    first and are not kept. Where nothing can be split, I is the whole backward and W takes 0.
    """
    rounds = [_run(stage, clock) for _ in range(warmups + repeats)][warmups:]
    samples: dict[ActionType, list[float]] = {}
    for intervals in rounds:
        for kind, start, end in intervals:
            samples.setdefault(kind, []).append(clock.ms_between(start, end))
    if not can_split:
        samples[ActionType.BACKWARD_WEIGHT] = [0.0] * repeats
    return {kind: tuple(values) for kind, values in samples.items()}


def _run(stage: StageUnderTest, clock: Clock) -> list[tuple[ActionType, Mark, Mark]]:
    """Take the marks of one round; they are read later, so that no pass waits for another's end."""
    taken = []

    def timed(kind: ActionType, run: Callable[[], Any]) -> Any:
        start = clock.mark()
        result = run()
        taken.append((kind, start, clock.mark()))
        return result

    received = stage.receive()
    result = timed(ActionType.FORWARD, partial(stage.forward, received))
    with stage.gradients.collect():
        timed(ActionType.BACKWARD_INPUT, partial(stage.backward, result))
        make_weight_gradients = stage.gradients.take()
    timed(ActionType.BACKWARD_WEIGHT, make_weight_gradients)
    devices = [stage.device] if stage.device.type == "cuda" else []
    states = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)]
    received = stage.receive()

    def recompute() -> ForwardResult:
        """Run a forward with the random states put back, as a RECOMPUTE does."""
        with torch.random.fork_rng(devices=devices):
            torch.set_rng_state(states[0])
            for device, state in zip(devices, states[1:], strict=True):
                torch.cuda.set_rng_state(state, device)
            return stage.forward(received)

    result = timed(ActionType.RECOMPUTE, recompute)
    timed(ActionType.FULL_BACKWARD, partial(stage.backward, result))
    return taken


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
    """Run an F and a backward one after the other and then as a pair, again and again.

    Returns by how many ms the pair was shorter, in each of the rounds that are kept.
    """
    kind = ActionType.BACKWARD_INPUT if letter == "I" else ActionType.FULL_BACKWARD
    rounds = []
    for _ in range(warmups + repeats):
        marks = []
        for run in (_in_turn, overlap):
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


def _in_turn(forward: PairedPass, backward: PairedPass) -> None:
    forward.run()
    backward.run()


# --- How fast activations go to the host and come back: alone, both ways together, and under
# compute. The copies are those of an OFFLOAD and a RELOAD of the stage: as many, as large, on the
# same lanes. On the CPU a copy has ended when it was issued: both directions and compute take
# turns, and what "under compute" adds is that the caches are cold.

_DOWN, _UP = 0, 1
_CUDA_BYTES = 256 * 2**20
"""On CUDA that much is copied at once, so that the host's issuing is hidden."""


class Rate(NamedTuple):
    """GB/s (1e9) to the host and back."""

    d2h_gb_per_s: float
    h2d_gb_per_s: float


class Bandwidths(NamedTuple):
    """Medians; ``under_compute`` is with both directions busy, as DESIGN section 3 wants them."""

    alone: Rate
    together: Rate
    under_compute: Rate


def measure_bandwidths(
    copies: Copies,
    clock: Clock,
    sizes: Sequence[int],
    device: torch.device,
    *,
    compute: Callable[[], None],
    compute_ms: float,
    repeats: int,
) -> Bandwidths:
    """Copy buffers of some sizes, in bytes, to the host and back.

    ``compute`` runs some passes of the stage that take about ``compute_ms``. Medians are taken of
    ``repeats`` copies; one more comes before them.
    """
    rounds = max(1, round(_CUDA_BYTES / sum(sizes))) if copies.pinned else 1
    num_bytes = sum(sizes) * rounds
    # Both lanes have buffers of their own, as two different cells have them.
    lanes = [[_pair(size, device, pinned=copies.pinned) for size in sizes] for _ in (_DOWN, _UP)]
    back = [(host, there) for there, host in lanes[_UP]]

    def issue(lane: int) -> tuple[Mark, Mark]:
        """Start a lane's copies; return the moments of their start and end."""
        start = clock.mark()
        for _ in range(rounds):
            fence = copies.to_host(lanes[_DOWN]) if lane == _DOWN else copies.to_device(back)
        return start, clock.mark_after(fence, lane)

    def rates(used: Sequence[int], passes: int | None = None) -> list[float]:
        """Return the lanes' medians; compute runs once before them, and ``passes`` times beside."""
        samples = []
        for _ in range(repeats + 1):
            if passes is not None:
                compute()
            marks = [issue(lane) for lane in used]
            for _ in range(passes or 0):
                compute()
            samples.append([clock.ms_between(start, end) for start, end in marks])
        medians = map(statistics.median, zip(*samples[1:], strict=True))
        return [num_bytes / (max(ms, 1e-6) * 1e6) for ms in medians]

    alone = [*rates([_DOWN]), *rates([_UP])]
    together = rates([_DOWN, _UP])
    slowest_ms = num_bytes / (min(*alone, *together) * 1e6)
    passes = math.ceil(slowest_ms / compute_ms) if copies.pinned and compute_ms > 0 else 0
    return Bandwidths(Rate(*alone), Rate(*together), Rate(*rates([_DOWN, _UP], passes)))


def _pair(size: int, device: torch.device, *, pinned: bool) -> tuple[Tensor, Tensor]:
    """Return buffers on the device and on the host."""
    return (
        torch.zeros(size, dtype=torch.uint8, device=device),
        torch.zeros(size, dtype=torch.uint8, pin_memory=pinned),
    )


def device_facts(
    ranks: MeasuringRanks, bandwidths: Sequence[Bandwidths | None], memory_bytes: int | None
) -> tuple[DeviceFacts, ...]:
    """Return the facts of every device; each is asked for its own.

    ``memory_bytes`` of each; None = the GPU's own, or an equal part of the host's.
    """
    found = []
    for index, rates in enumerate(bandwidths):
        make = partial(_own_facts, ranks, len(bandwidths), memory_bytes)
        own: dict[str, Any] = ranks.tell(index, make)
        if rates is not None:
            own |= rates.under_compute._asdict()
        found.append(DeviceFacts(**own))
    return tuple(found)


def _own_facts(ranks: MeasuringRanks, num_devices: int, memory_bytes: int | None) -> dict[str, Any]:
    facts: dict[str, Any] = {"host": socket.gethostname()} if ranks.are_many else {}
    if ranks.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(ranks.device)
        taken = total - free - torch.cuda.memory_reserved(ranks.device)
        return facts | {"memory_bytes": memory_bytes or total, "reserved_bytes": max(0, taken)}
    return facts | {"memory_bytes": memory_bytes or host_memory_bytes() // num_devices}


def device_name(device: torch.device) -> str:
    """Return what people call a device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"


# --- What messages between devices take: ping-pong between ranks, or copies on the one there is.

_WARMUPS = 2

Pair = tuple[int, int]
"""(lower, higher) device."""


def message_sizes(boundary_bytes: int) -> tuple[int, ...]:
    """Return the sizes that are sent: a short one for the latency, the boundary's, and larger.

    The larger ones, up to 16 times the boundary where that is not more than 256 MiB, tell the
    bandwidth of links on which the boundary's own is as fast as a short message.
    """
    most = max(boundary_bytes, 2**28)
    sizes = {1024, *(min(most, factor * boundary_bytes) for factor in (1, 4, 16))}
    return tuple(sorted(size for size in sizes if size > 0))


def local_copies(
    sizes_of: Mapping[Pair, Sequence[int]], clock: Clock, device: torch.device, repeats: int
) -> tuple[Transfer, ...]:
    """Copy on one device in place of messages between devices that are not there."""
    times: dict[int, list[float]] = {}
    for size in sorted({size for sizes in sizes_of.values() for size in sizes}):
        source, target = _buffer(size, device), _buffer(size, device)
        times[size] = _timed(clock, partial(target.copy_, source), repeats)
    return tuple(
        Transfer(source=a, target=b, num_bytes=size, time_ms=ms)
        for (a, b), sizes in sorted(sizes_of.items())
        for size in sizes
        for ms in times[size]
    )


def ping_pong(
    sizes_of: Mapping[Pair, Sequence[int]],
    clock: Clock,
    device: torch.device,
    group: ProcessGroup | None,
    repeats: int,
) -> tuple[Transfer, ...]:
    """Send messages to and fro between pairs of ranks, one pair at a time.

    A message's time is half of its round trip. All ranks call this together and get all times.
    ``sizes_of`` has the bytes of each pair's messages, the same on all ranks; of each size
    ``repeats`` round trips are kept, and two more come before them. Over gloo messages start and
    end in the host's memory.
    """
    if backends(group).get(device.type) != dist.Backend.NCCL:
        device = torch.device("cpu")
    own: list[Transfer] = []
    for pair, sizes in sorted(sizes_of.items()):
        dist.barrier(group)
        for size in sizes if dist.get_rank(group) in pair else ():
            own += _play(pair, _buffer(size, device), group, clock, repeats)
    return tuple(one for part in gather(own, group) for one in part)


def _play(
    pair: Pair, buffer: Tensor, group: ProcessGroup | None, clock: Clock, repeats: int
) -> list[Transfer]:
    """Send a buffer to and fro; return the transfers on the first rank, which times them."""
    first, second = pair
    if dist.get_rank(group) == second:
        for _ in range(repeats + _WARMUPS):
            dist.recv(buffer, group=group, group_src=first)
            dist.send(buffer, group=group, group_dst=first)
        return []

    def there_and_back() -> None:
        dist.send(buffer, group=group, group_dst=second)
        dist.recv(buffer, group=group, group_src=second)

    return [
        Transfer(source=first, target=second, num_bytes=buffer.numel(), time_ms=ms / 2)
        for ms in _timed(clock, there_and_back, repeats)
    ]


def _timed(clock: Clock, run: Callable[[], object], repeats: int) -> list[float]:
    marks = []
    for _ in range(repeats + _WARMUPS):
        start = clock.mark()
        run()
        marks.append((start, clock.mark()))
    return [clock.ms_between(start, end) for start, end in marks[_WARMUPS:]]


def _buffer(size: int, device: torch.device) -> Tensor:
    return torch.zeros(size, dtype=torch.uint8, device=device)


# --- The ranks that measure together, or the one process that measures alone.


class MeasuringRanks:
    """Runs a part of the measuring on one rank and tells all others what came out.

    Without torch.distributed there is one process, which plays all devices.
    """

    def __init__(self, group: ProcessGroup | None, device: torch.device) -> None:
        self.group = group
        self.device = device
        self.are_many = dist.is_initialized() and dist.get_world_size(group) > 1
        self.size = dist.get_world_size(group) if self.are_many else None
        """Number of ranks, or None where one process plays all devices."""

    def check_devices(self, num_devices: int) -> None:
        """Refuse another number of ranks than devices."""
        if self.size not in (None, num_devices):
            raise PreflightError(
                f"the placement names {num_devices} devices, but {self.size} ranks measure: there "
                "must be one rank per device, or one process for all; start that many"
            )

    def tell(self, home: int, make: Callable[[], Any]) -> Any:
        """Return what a function gives on rank ``home``; a failure there fails all ranks."""
        if not self.are_many:
            return make()
        value, faults = made_on(home, make, self.device, self.group)
        if faults:
            raise PreflightError(f"rank {home} could not measure: {faults[0]}")
        return value


@contextmanager
def joined(device: torch.device) -> Iterator[None]:
    """Meet the other ranks where torchrun, or `optpipe.runtime.demo_model`, started some."""
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
def computing_with(threads: int) -> Iterator[None]:
    """Let the CPU's operations use so many threads, as many as a rank will have."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def device_named(name: str | None) -> torch.device:
    """Return the device to measure on: the one named, else this rank's GPU, else the CPU."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(
            f"--device {name}: torch knows no such device; write cuda or cpu"
        ) from None
    return _own_gpu(device) if device.type == "cuda" else device


def _own_gpu(device: torch.device) -> torch.device:
    """Return the GPU that is named, or that torchrun gave this rank, and make it current."""
    if not torch.cuda.is_available():
        raise InputError(f"--device {device}: torch finds no GPU here; write cpu")
    if ":" not in str(device):
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device
