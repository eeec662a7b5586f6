"""Messages between ranks: their order and their memory.

`optpipe.runtime.lowering` places each send right after the pass that makes its tensor, and the
receive on the other rank. Neither blocks: the pass that needs a tensor waits for its receive.

* Two ranks share one queue for both directions (over NCCL since torch 2.12). So both must post the
  same messages in the same order. Two swapped receives would silently mix up two micro-batches. The
  lowering places both ends of a message at the same time.
* The orders show when a sent tensor can be freed. A rank that has waited for a message knows what
  its sender had done before the send, and what that sender knew. If this includes that the receiver
  has used the tensor, the send is over, and waiting for it costs nothing.

A rank that sends many tensors before it receives one waits for its oldest send before it posts
another. So at most `window_of` sends are in flight. These waits cannot deadlock. The lowering
places a receive when it places the send. In the order in which it places all instructions of all
ranks, no step waits for a later one. A wait for an older send is a wait for its receive, which is
placed before the send that has to wait.

So the messages in flight depend on the programs alone, and not on any duration.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from optpipe.errors import PreflightError
from optpipe.runtime.torch_names import alias_no_view, slices_of_mesh
from optpipe.schedule import Action, Pass, input_of, pass_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

__all__ = [
    "Blank",
    "BoundaryLevel",
    "Layout",
    "MessageSend",
    "MessageSlots",
    "Order",
    "Receive",
    "Step",
    "boundary_levels",
    "layout_of",
    "max_boundary_bytes",
    "sends_over_before",
    "shard_of",
    "slots_of",
    "window_of",
]


class MessageSend(NamedTuple):
    """A rank posts the output of a pass to the rank that reads it."""

    message: Pass

    def __str__(self) -> str:
        return f"send of {_describe_message(self.message)}"


class BoundaryLevel(NamedTuple):
    """Bytes of boundary tensors during an action, and then until the next action or message."""

    during: int
    after: int


class Receive(NamedTuple):
    """A rank posts the receive of the output of another rank's pass."""

    message: Pass

    def __str__(self) -> str:
        return f"receive of {_describe_message(self.message)}"


Step = Action | MessageSend | Receive
"""A pass, or a message that is posted."""

Order = tuple[Step, ...]
"""The steps of one rank, in order."""


def window_of(num_stages: int, *, trains: bool) -> int:
    """Return how many sends of a rank may be in flight when it posts another.

    With fewer, a rank could stall because a neighbour is a little late. All ranks of an evaluation
    run at the pace of the slowest, so two are enough.
    """
    return max(4, num_stages // 2 + 2) if trains else 2


def _describe_message(message: Pass) -> str:
    tensor = "gradient" if message.backward else "output"
    return f"the {tensor} of stage {message.stage}, micro-batch {message.microbatch}"


def _run_orders(
    orders: Sequence[Order], can_run: Callable[[int, Step], bool]
) -> Iterator[tuple[int, Step]]:
    """Yield the steps of all ranks, each when it can run, until no rank can run its next one."""
    positions = [0] * len(orders)
    progressed = True
    while progressed:
        progressed = False
        for rank, order in enumerate(orders):
            while positions[rank] < len(order) and can_run(rank, order[positions[rank]]):
                yield rank, order[positions[rank]]
                positions[rank] += 1
                progressed = True


def sends_over_before(
    orders: Sequence[Order], placement: Sequence[int], window: int
) -> list[dict[Step, tuple[Pass, ...]]]:
    """Return, per rank, the sends that it waits for before each step.

    Before an action, once it has its input, a rank waits for the sends that it knows to be over.
    The proof: let K(r) be the number of steps that rank r knows each rank to have run. It knows its
    own steps. When an action of r has waited for a message, r also knows all that the sender knew
    when it sent it, including the send. The action that waits for the receive of a message uses it.
    If K(r) includes the start of that action, the receive has ended, and therefore the send.

    Before a send, a rank waits for its oldest send if ``window`` are still in flight. All other
    sends are in flight until the end of the step.
    """
    num_stages = len(placement)
    used_at = {
        input_of(step, num_stages): index
        for order in orders
        for index, step in enumerate(order)
        if isinstance(step, Action)
    }
    known = [[0] * len(orders) for _ in orders]
    known_at_send: dict[Pass | None, list[int]] = {}
    in_flight: list[list[Pass]] = [[] for _ in orders]
    over: list[dict[Step, tuple[Pass, ...]]] = [{} for _ in orders]
    done: set[Pass | None] = {None}

    def has_input(_rank: int, step: Step) -> bool:
        return not isinstance(step, Action) or input_of(step, num_stages) in done

    for rank, step in _run_orders(orders, has_input):
        known[rank][rank] += 1
        if isinstance(step, MessageSend):
            if len(in_flight[rank]) >= window:
                over[rank][step] = (in_flight[rank].pop(0),)
            known_at_send[step.message] = list(known[rank])
            in_flight[rank].append(step.message)
        elif isinstance(step, Action):
            done.add(pass_of(step))
            news = known_at_send.get(input_of(step, num_stages))
            if news is None:
                continue
            known[rank] = [max(pair) for pair in zip(known[rank], news, strict=True)]
            used = tuple(
                message
                for message in in_flight[rank]
                if used_at[message] < known[rank][placement[message.reader]]
            )
            if used:
                over[rank][step] = used
                in_flight[rank] = [one for one in in_flight[rank] if one not in used]
    return over


def slots_of(
    order: Order,
    over_before: Mapping[Step, Sequence[Pass]],
    num_stages: int,
    bytes_of: Callable[[Pass], int],
) -> tuple[int, int]:
    """Return the maximum number of messages of a rank in flight, and the bytes of the largest one.

    A received message is in flight from the post of its receive to the start of the pass that uses
    it. A sent message is in flight from the post of its send to the wait for it (``over_before``).
    """
    in_flight: set[Pass] = set()
    num_slots = slot_bytes = 0
    for step in order:
        in_flight.difference_update(over_before.get(step, ()))
        if isinstance(step, Action):
            in_flight -= {input_of(step, num_stages)}
        else:
            in_flight.add(step.message)
            slot_bytes = max(slot_bytes, bytes_of(step.message))
            num_slots = max(num_slots, len(in_flight))
    return num_slots, slot_bytes


def boundary_levels(
    order: Order,
    over_before: Mapping[Step, Sequence[Pass]],
    num_stages: int,
    bytes_of: Callable[[Pass], int],
    pool_bytes: int = 0,
) -> dict[Action, BoundaryLevel]:
    """Return the bytes of boundary tensors on a rank's device during and after each action.

    The slots of messages (`slots_of`) always count, with a minimum of ``pool_bytes``, the bytes of
    slots that are already allocated. A boundary tensor that this rank makes counts from the start
    of its pass until one of these events:

    * The rank sends it.
    * A stage of this rank uses it as the input of an F. Then it is part of the activation.
    * A stage of this rank uses it as the gradient of an I or B, and that pass ends.

    The copy of a received gradient counts while its I or B runs.
    """
    num_slots, slot_bytes = slots_of(order, over_before, num_stages, bytes_of)
    slots = max(num_slots * slot_bytes, pool_bytes)
    boundary_bytes: dict[Pass | None, int] = {}
    levels: dict[Action, BoundaryLevel] = {}
    running: Action | None = None
    for step in order:
        if isinstance(step, MessageSend):
            boundary_bytes.pop(step.message, None)
            if running is not None:
                levels[running] = levels[running]._replace(
                    after=slots + sum(boundary_bytes.values())
                )
        elif isinstance(step, Action):
            running = step
            needed, completed = input_of(step, num_stages), pass_of(step)
            boundary_bytes.pop(needed, None)
            if completed is not None and 0 <= completed.reader < num_stages:
                boundary_bytes[completed] = bytes_of(completed)
            gradient_bytes = bytes_of(needed) if needed is not None and needed.backward else 0
            level = slots + sum(boundary_bytes.values())
            levels[step] = BoundaryLevel(level + gradient_bytes, level)
    return levels


def max_boundary_bytes(sizes: Sequence[int], num_stages: int, num_microbatches: int) -> int:
    """Return the bytes of boundary tensors that no schedule exceeds on a rank.

    A stage receives one tensor per micro-batch and sends one. ``sizes`` has the bytes of the larger
    one, for each stage of the rank. Every slot is as large as the largest.

    The proof, by the rules of `boundary_levels`: a tensor waits for an F, or for an I or B, of this
    rank. A gradient exists only after the F of the next stage, and therefore after the F here. So
    at most one tensor waits per (stage, micro-batch), in a slot or from a stage of this rank.
    At most `window_of` sends are in flight. The running pass adds its input and its output.
    """
    num_passing = window_of(num_stages, trains=True) + 2
    return (num_microbatches * len(sizes) + num_passing) * max(sizes, default=0)


# --- The memory of messages in flight.
# NCCL keeps a tensor that it sends or receives from the allocator until its stream has finished
# (``record_stream``), so the memory in use would depend on timing. Slots are therefore never freed:
# the compute stream copies sent tensors into a slot, and received ones out of it.

Blank = tuple[torch.Size, torch.dtype]
"""The size and type of a tensor without its values."""


class MessageSlots:
    """The memory of all messages in flight: equal slots, which the first step allocates.

    A slot may be reused immediately after it is given back. By then the caller has ordered the
    message, or the copy out of it, before the later compute. Messages start after that compute.

    ``previous`` are the slots of an earlier schedule. There are at least as many new slots, and
    they are at least as large. If their size is the same, this object takes over their memory
    and its content.
    """

    def __init__(
        self,
        num_slots: int,
        slot_bytes: int,
        device: torch.device,
        previous: MessageSlots | None = None,
    ) -> None:
        self.num_slots: int = max(num_slots, previous.num_slots if previous is not None else 0)
        self.slot_bytes: int = max(slot_bytes, previous.slot_bytes if previous is not None else 0)
        self._previous = previous
        self.device = device
        self._slots: list[Tensor] = []
        self._free: list[Tensor] = []
        self._taken: dict[Pass, Tensor] = {}
        self._views: dict[tuple[int, int], tuple[object, list[Tensor]]] = {}

    def begin(self) -> None:
        """Start a step with all slots free; the first one allocates them."""
        if self._previous is not None:
            slots = self._previous.drop()
            self._slots = slots if self._previous.slot_bytes == self.slot_bytes else []
            self._previous = None
        self._slots += [
            torch.empty(self.slot_bytes, dtype=torch.uint8, device=self.device)
            for _ in range(self.num_slots - len(self._slots))
        ]
        self._taken.clear()
        self._free = list(self._slots)

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots."""
        return self.num_slots * self.slot_bytes

    def drop(self) -> list[Tensor]:
        """Release all memory and return it; the next step allocates it again."""
        slots, self._slots, self._free = self._slots, [], []
        self._views.clear()
        return slots

    def take(self, message: Pass, blanks: Sequence[Blank | None]) -> list[Tensor]:
        """Take a slot and return tensors of these sizes and types in it; none for a None."""
        slot = self._taken[message] = self._free.pop()
        # A pipeline keeps its slots and its lists of sizes, so each pair needs its views only once.
        known = self._views.get((id(slot), id(blanks)))
        if known is None:
            known = self._views[id(slot), id(blanks)] = (blanks, _lay_out(slot, blanks))
        return known[1]

    def give_back(self, message: Pass) -> None:
        """Make the slot of a message free again."""
        self._free.append(self._taken.pop(message))


def _lay_out(slot: Tensor, blanks: Sequence[Blank | None]) -> list[Tensor]:
    """Return tensors in a slot, placed with the widest types first: aligned, and without gaps."""
    given = [one for one in blanks if one is not None]
    tensors: dict[int, Tensor] = {}
    start = 0
    for index in sorted(range(len(given)), key=lambda index: -given[index][1].itemsize):
        size, dtype = given[index]
        end = start + size.numel() * dtype.itemsize
        tensors[index] = slot[start:end].view(dtype).view(size)
        start = end
    return [tensors[index] for index in range(len(given))]


# --- DTensors. A rank sends its shard, and the receiver makes a DTensor of it on its own mesh. The
# receiver has the same coordinate in its mesh as the sender, so this is the shard that it needs,
# even if shards are uneven. Gradients return in the same way: autograd first brings them to the
# placements of the received tensor (Partial: to Replicate).


class Layout(NamedTuple):
    """The layout of a DTensor on its mesh, as one rank sees it; picklable.

    ``size`` and ``stride`` are those of the whole tensor. ``dims`` are the names of the mesh's
    dimensions, () without names. ``degrees`` is the size of the mesh, ``place`` the coordinate of
    this rank.
    """

    size: torch.Size
    stride: tuple[int, ...]
    placements: tuple[Placement, ...]
    dims: tuple[str, ...]
    degrees: tuple[int, ...]
    place: tuple[int, ...]

    def __str__(self) -> str:
        axes = zip(self.dims or ("?",) * len(self.degrees), self.degrees, strict=True)
        mesh = ", ".join(f"{name}: {degree}" for name, degree in axes)
        return f"a DTensor placed {self.placements} on a mesh ({mesh})"

    def find_mesh(self, meshes: Iterable[DeviceMesh]) -> DeviceMesh:
        """Return the mesh, or part of a mesh, that is like the sender's.

        Raises
        ------
        PreflightError
            If there is none, or this rank has another coordinate in it than the sender.
        """
        parts = (part for mesh in meshes for part in slices_of_mesh(mesh, self.dims))
        alike = {_place_in(one): one for one in parts if tuple(one.shape) == self.degrees}
        if self.place in alike:
            return alike[self.place]
        if alike:
            raise PreflightError(
                f"{self} is sent from place {self.place} of its mesh and received in place "
                f"{next(iter(alike))}, but a rank sends the shard that the receiver must have; "
                "give the ranks of a pipeline the same place, each in its own mesh"
            )
        raise PreflightError(
            f"{self} is received, but this rank knows no such mesh of its own, neither of the "
            "parameters of its stages, nor a mesh that contains those, nor mesh=; pass mesh="
        )

    def to_dtensor(self, shard: Tensor, mesh: DeviceMesh) -> DTensor:
        """Return the DTensor of which this rank has received its shard."""
        return DTensor.from_local(
            shard, mesh, self.placements, run_check=False, shape=self.size, stride=self.stride
        )


def _place_in(mesh: DeviceMesh) -> tuple[int, ...]:
    return tuple(mesh.get_coordinate() or ())


def layout_of(tensor: Tensor, what: str) -> Layout | None:
    """Return the layout of a DTensor; None for any other tensor.

    Raises
    ------
    PreflightError
        If its placements need more than the shards.
    """
    if not isinstance(tensor, DTensor):
        return None
    mesh, placements = tensor.device_mesh, tuple(tensor.placements)
    if any(type(one) not in (Replicate, Shard, Partial) for one in placements):
        raise PreflightError(
            f"{what} is a DTensor placed {placements}, but only Replicate, Shard and Partial cross "
            "stages: others need more than their shards; redistribute it before it is returned"
        )
    return Layout(
        tensor.size(),
        tensor.stride(),
        placements,
        tuple(mesh.mesh_dim_names or ()),
        tuple(mesh.shape),
        _place_in(mesh),
    )


def shard_of(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, whose gradient is a DTensor; else the tensor."""
    if not isinstance(tensor, DTensor):
        return tensor
    shard = tensor.to_local()
    # A collective that is still running ends where its result is read.
    return shard if type(shard) is torch.Tensor else alias_no_view(shard)
