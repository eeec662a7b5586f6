"""What crosses between ranks, when it is in flight, and that it cannot get stuck.

torch places a send behind the pass that makes a tensor and a receive on the other rank; both are
posted without waiting, and the pass that needs a tensor waits for its receive. From these orders
alone follow three things that are checked or used before the first step:

* Between two ranks there is one queue in both directions (so since torch 2.12 over NCCL), so both
  must post the same messages in the same order: two swapped receives would hand one micro-batch's
  tensor to another, silently.
* Whether all ranks get to their ends, if a message passes only when both sides have posted it and
  everything before it in that queue has passed.
* Where a sent tensor can be let go. A rank that has waited for a message knows what its sender had
  done before sending it, and what that one knew. So at the first wait after which the receiver
  must have used the tensor, the send is over, and waiting for it costs nothing. Where a rank
  sends many tensors before it hears anything, it waits for the oldest before it posts another:
  at most `window_of` are in flight. That ends. torch places a receive when it places the send; in
  the order in which it placed everything, on all ranks, no step waits for a later one, and the
  wait for an older send is for its receive, placed before the send that has to wait.

What is in flight then depends on the programs alone, never on how fast anything is.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from optpipe.errors import PreflightError
from optpipe.runtime.torch_names import alias_no_view, dtensor_of, slices_of_mesh
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
    "boundary_room",
    "check_orders",
    "layout_of",
    "sends_over_before",
    "shard_of",
    "slots_of",
    "window_of",
]


class MessageSend(NamedTuple):
    """The output of a pass is posted to the rank of the next stage (backward: of the previous)."""

    message: Pass

    def __str__(self) -> str:
        return f"send of {_words(self.message)}"


class BoundaryLevel(NamedTuple):
    """Bytes of boundary tensors during an action, and then until the next action or message."""

    during: int
    after: int


class Receive(NamedTuple):
    """The output of a pass of another rank is expected here."""

    message: Pass

    def __str__(self) -> str:
        return f"receive of {_words(self.message)}"


Step = Action | MessageSend | Receive
"""A pass, or a message posted."""

Order = tuple[Step, ...]
"""What one rank does, one after another."""


def window_of(num_stages: int, *, trains: bool) -> int:
    """Return how many sends of a rank may be in flight when it posts another.

    With fewer a rank could stall for a neighbour that is a little behind; in an evaluation, whose
    ranks all go at the pace of the slowest, few are enough.
    """
    return max(4, num_stages // 2 + 2) if trains else 2


def _words(message: Pass) -> str:
    tensor = "gradient" if message.backward else "output"
    return f"the {tensor} of stage {message.stage}, micro-batch {message.microbatch}"


def check_orders(orders: Sequence[Order], placement: Sequence[int], window: int) -> None:
    """Refuse orders in which tensors would be mixed up, or ranks wait for ever."""
    queues = _queues(orders, placement)
    for (left, right), queue in sorted(queues.items()):
        if left < right:
            _expect_same(left, right, queue, queues.get((right, left), []))
    stuck = _Execution(orders, placement, window).stuck()
    if stuck:
        waits = "; ".join(f"rank {rank} waits at {step}" for rank, step in stuck)
        raise PreflightError(
            f"the sends and receives cannot all pass: {waits}; this is no fault of the schedule, "
            "report it with the schedule"
        )


def _queues(orders: Sequence[Order], placement: Sequence[int]) -> dict[tuple[int, int], list[Pass]]:
    """Return what each rank posts towards each other rank, in order."""
    queues: dict[tuple[int, int], list[Pass]] = {}
    for rank, order in enumerate(orders):
        for step in order:
            if not isinstance(step, Action):
                other = _other_end(step, placement)
                queues.setdefault((rank, other), []).append(step.message)
                queues.setdefault((other, rank), [])
    return queues


def _receiver(message: Pass, placement: Sequence[int]) -> int:
    return placement[message.reader]


def _other_end(step: MessageSend | Receive, placement: Sequence[int]) -> int:
    """Return the rank to which this one sends, or from which it receives."""
    if isinstance(step, MessageSend):
        return _receiver(step.message, placement)
    return placement[step.message.stage]


def _expect_same(left: int, right: int, ours: list[Pass], theirs: list[Pass]) -> None:
    for index, (first, second) in enumerate(zip_longest(ours, theirs)):
        if first != second:
            raise PreflightError(
                f"message {index} between ranks {left} and {right} is "
                f"{_words(first) if first else 'none'} for rank {left}, but "
                f"{_words(second) if second else 'none'} for rank {right}: both must post the same "
                "messages in the same order, or tensors are mixed up; "
                "let the runtime place sends and receives"
            )


class _Execution:
    """All ranks run without a clock; a message passes when both queues have reached it."""

    def __init__(self, orders: Sequence[Order], placement: Sequence[int], window: int) -> None:
        self._orders = orders
        self._placement = placement
        self._over_before = sends_over_before(orders, placement, window)
        self._heads = [0] * len(orders)
        self._posted: dict[tuple[int, int], list[Pass]] = {}
        self._num_passed: dict[tuple[int, int], int] = {}
        self._passed: set[Pass] = set()

    def stuck(self) -> list[tuple[int, str]]:
        """Return every rank that does not get to its end, with the step it waits at."""
        while any(self._advance(rank) for rank in range(len(self._orders))):
            pass
        return [
            (rank, str(order[head]))
            for rank, (order, head) in enumerate(zip(self._orders, self._heads, strict=True))
            if head < len(order)
        ]

    def _advance(self, rank: int) -> bool:
        """Run a rank as far as it gets; return whether it got anywhere."""
        order, start = self._orders[rank], self._heads[rank]
        while self._heads[rank] < len(order) and self._can_run(rank, order[self._heads[rank]]):
            step = order[self._heads[rank]]
            if not isinstance(step, Action):
                self._post(rank, step)
            self._heads[rank] += 1
        return self._heads[rank] > start

    def _can_run(self, rank: int, step: Step) -> bool:
        if not isinstance(step, Action):
            return self._passed.issuperset(self._over_before[rank].get(step, ()))
        needed = input_of(step, len(self._placement))
        if needed is None or self._placement[needed.stage] == rank:
            return True
        return needed in self._passed

    def _post(self, rank: int, step: MessageSend | Receive) -> None:
        other = _other_end(step, self._placement)
        self._posted.setdefault((rank, other), []).append(step.message)
        pair = (min(rank, other), max(rank, other))
        theirs = self._posted.get((other, rank), [])
        passing = self._num_passed.get(pair, 0)
        both = min(len(self._posted[rank, other]), len(theirs))
        self._passed.update(theirs[passing:both])
        self._num_passed[pair] = both


def sends_over_before(
    orders: Sequence[Order], placement: Sequence[int], window: int
) -> list[dict[Step, tuple[Pass, ...]]]:
    """Return, per rank, the sends that are waited for before a step.

    Before an action, once it has its input: those known to be over. The argument. Let K(r) be what
    rank r knows each rank to have done: of itself, everything so far; and when an action of r has
    waited for a message, everything its sender knew when it sent it, the send included. A message
    is used by the action that waits for its receive. If K(r) holds that action's begin, the
    receive has ended, so has the send.

    Before a send: the oldest, if ``window`` are still in flight. What is in no tuple is in flight
    to the end of the step.
    """
    known = [[0] * len(orders) for _ in orders]
    used_at = _uses(orders, len(placement))
    known_at_send: dict[Pass, list[int]] = {}
    in_flight: list[list[Pass]] = [[] for _ in orders]
    over: list[dict[Step, tuple[Pass, ...]]] = [{} for _ in orders]
    for rank, step in _in_some_order(orders, placement):
        known[rank][rank] += 1
        if isinstance(step, MessageSend):
            if len(in_flight[rank]) >= window:
                over[rank][step] = (in_flight[rank].pop(0),)
            known_at_send[step.message] = list(known[rank])
            in_flight[rank].append(step.message)
        elif isinstance(step, Action):
            news = known_at_send.get(input_of(step, len(placement)) or _NOTHING)
            if news is None:
                continue
            known[rank] = [max(pair) for pair in zip(known[rank], news, strict=True)]
            used = tuple(
                message
                for message in in_flight[rank]
                if used_at[message] < known[rank][_receiver(message, placement)]
            )
            if used:
                over[rank][step] = used
                in_flight[rank] = [one for one in in_flight[rank] if one not in used]
    return over


_NOTHING = Pass(False, -1, -1)


def _uses(orders: Sequence[Order], num_stages: int) -> dict[Pass, int]:
    """Return where in its rank's order every message is used."""
    return {
        needed: index
        for order in orders
        for index, step in enumerate(order)
        if isinstance(step, Action) and (needed := input_of(step, num_stages)) is not None
    }


def _in_some_order(orders: Sequence[Order], placement: Sequence[int]) -> Iterator[tuple[int, Step]]:
    """Yield all steps so that each comes after those it waits for."""
    heads = [0] * len(orders)
    done: set[Pass] = set()
    moving = True
    while moving:
        moving = False
        for rank, order in enumerate(orders):
            while heads[rank] < len(order):
                step = order[heads[rank]]
                if isinstance(step, Action):
                    needed = input_of(step, len(placement))
                    if needed is not None and needed not in done:
                        break
                    if (completed := pass_of(step)) is not None:
                        done.add(completed)
                yield rank, step
                heads[rank] += 1
                moving = True


def slots_of(
    order: Order,
    over_before: Mapping[Step, Sequence[Pass]],
    num_stages: int,
    bytes_of: Callable[[Pass], int],
) -> tuple[int, int]:
    """Return how many messages a rank has in flight at most, and the bytes of the largest one.

    A received one is in flight from the post of its receive to the start of the pass that takes
    it, a sent one from the post of its send to where that is waited for (``over_before``).
    """
    in_flight: set[Pass] = set()
    most = largest = 0
    for step in order:
        in_flight.difference_update(over_before.get(step, ()))
        if isinstance(step, Action):
            in_flight.discard(input_of(step, num_stages) or _NOTHING)
        else:
            in_flight.add(step.message)
            largest = max(largest, bytes_of(step.message))
            most = max(most, len(in_flight))
    return most, largest


def boundary_levels(
    order: Order,
    over_before: Mapping[Step, Sequence[Pass]],
    num_stages: int,
    bytes_of: Callable[[Pass], int],
    pool_bytes: int = 0,
) -> dict[Action, BoundaryLevel]:
    """Return the bytes of boundary tensors that are on a rank's device with each action.

    Beside the slots of messages (`slots_of`), which always are, a tensor that is made here counts
    from the start of its pass until it is sent or, if a stage of this rank takes it, as an input
    until its F (from then on it is part of the activation), as a gradient until the I or B it is
    for has ended; so does, while that runs, the copy of a received one. ``pool_bytes`` are those
    of slots that are there already.
    """
    num_slots, slot_bytes = slots_of(order, over_before, num_stages, bytes_of)
    slots = max(num_slots * slot_bytes, pool_bytes)
    boundary_bytes: dict[Pass, int] = {}
    levels: dict[Action, BoundaryLevel] = {}
    running: Action | None = None
    for step in order:
        if isinstance(step, MessageSend):
            boundary_bytes.pop(step.message, None)
            if running is not None:
                levels[running] = levels[running]._replace(
                    after=slots + sum(boundary_bytes.values())
                )
        if not isinstance(step, Action):
            continue
        running = step
        needed, completed = input_of(step, num_stages), pass_of(step)
        if needed is not None:
            boundary_bytes.pop(needed, None)
        # All but the first stage's gradient and the last one's output cross a boundary.
        if completed is not None and completed.stage != (
            0 if completed.backward else num_stages - 1
        ):
            boundary_bytes[completed] = bytes_of(completed)
        taken = bytes_of(needed) if needed is not None and needed.backward else 0
        level = slots + sum(boundary_bytes.values())
        levels[step] = BoundaryLevel(level + taken, level)
    return levels


def boundary_room(sizes: Sequence[int], num_stages: int, num_microbatches: int) -> int:
    """Return the bytes of boundary tensors that no schedule exceeds on a rank.

    The argument, by `boundary_levels`. A tensor waits for an F or for an I or B of this rank. A
    gradient is made after the next stage's F of that micro-batch, so after the F here: of each
    (stage, micro-batch) at most one tensor waits at a time, in a slot or handed over by a stage of
    this rank. What this rank sends is in flight `window_of` times at most, and there are what the
    running pass takes and what it makes. ``sizes`` has, of each stage on the rank, the larger of
    what it receives and what it sends of a micro-batch; slots are as large as the largest.
    """
    num_passing = window_of(num_stages, trains=True) + 2
    return (num_microbatches * len(sizes) + num_passing) * max(sizes, default=0)


# --- Where messages are while they are on their way.
# NCCL keeps what it sends and receives from the allocator until its stream has got there
# (``record_stream``), so how much memory is taken would depend on timing. Slots are never freed:
# sent tensors are copied into one and received ones out of it, both by the compute stream.

Blank = tuple[torch.Size, torch.dtype]
"""Size and type of a tensor without its values."""


class MessageSlots:
    """As many slots of ``slot_bytes`` as a program has messages in flight, allocated once.

    A slot that is given back may be reused at once: whoever gives it back has ordered the message,
    or the copy out of it, before the compute issued from then on, behind which messages start.

    ``before`` are those of an earlier schedule: there are as many, and as large, at least, and
    where they are as large as the largest now they are taken over, with what lies in them.
    """

    def __init__(
        self,
        num_slots: int,
        slot_bytes: int,
        device: torch.device,
        before: MessageSlots | None = None,
    ) -> None:
        self.num_slots: int = max(num_slots, before.num_slots if before is not None else 0)
        self.slot_bytes: int = max(slot_bytes, before.slot_bytes if before is not None else 0)
        self._before = before
        self.device = device
        self._slots: list[Tensor] = []
        self._free: list[Tensor] = []
        self._taken: dict[Pass, Tensor] = {}
        self._views: dict[tuple[int, int], tuple[object, list[Tensor]]] = {}

    def begin(self) -> None:
        """Start a step with all slots free; the first one allocates them."""
        if self._before is not None:
            slots = self._before.drop()
            self._slots = slots if self._before.slot_bytes == self.slot_bytes else []
            self._before = None
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
        """Give all memory back, to whoever takes it; the next step allocates it again."""
        slots, self._slots, self._free = self._slots, [], []
        self._views.clear()
        return slots

    def take(self, message: Pass, blanks: Sequence[Blank | None]) -> list[Tensor]:
        """Return tensors of these sizes and types that lie in a slot; None takes no place."""
        slot = self._taken[message] = self._free.pop()
        # Of every slot and every list of sizes, which are a pipeline's own, views are made once.
        known = self._views.get((id(slot), id(blanks)))
        if known is None:
            known = self._views[id(slot), id(blanks)] = (blanks, _laid_out(slot, blanks))
        return known[1]

    def give_back(self, message: Pass) -> None:
        """Make the slot of a message free again."""
        self._free.append(self._taken.pop(message))


def _laid_out(slot: Tensor, blanks: Sequence[Blank | None]) -> list[Tensor]:
    """Return places in a slot, the widest types first: so each is aligned without gaps."""
    given = [one for one in blanks if one is not None]
    found: dict[int, Tensor] = {}
    start = 0
    for index in sorted(range(len(given)), key=lambda index: -given[index][1].itemsize):
        size, dtype = given[index]
        end = start + size.numel() * dtype.itemsize
        found[index] = slot[start:end].view(dtype).view(size)
        start = end
    return [found[index] for index in range(len(given))]


# --- DTensors: a rank sends the shard that it holds, and whoever gets it makes a DTensor of it
# again, on a mesh of its own ranks. There it stands where the sender stands in the sender's, so
# this is the shard that it must have, also where they are uneven. Gradients go back in the same
# way: autograd brings them to the placements of what was received (Partial: to Replicate) before
# they are sent.


class Layout(NamedTuple):
    """How a DTensor lies on its mesh, seen by one rank; picklable.

    ``size`` and ``stride`` are the whole tensor's; ``dims`` the mesh's names, empty if it has none,
    ``degrees`` its size, and ``place`` where this rank stands in it.
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

    def mesh_among(self, meshes: Iterable[DeviceMesh]) -> DeviceMesh:
        """Return the mesh of this rank that is like the sender's: one of these, or a part of one.

        Raises
        ------
        PreflightError
            If there is none, or this rank stands elsewhere in it than the sender in its own.
        """
        parts = (part for mesh in meshes for part in slices_of_mesh(mesh, self.dims))
        alike = {_place_in(one): one for one in parts if tuple(one.shape) == self.degrees}
        if self.place in alike:
            return alike[self.place]
        if alike:
            raise PreflightError(
                f"{self} is sent from place {self.place} of its mesh and received in place "
                f"{next(iter(alike))}, but a rank sends the shard that the receiver must have; let "
                "the ranks of a pipeline stand in the same place of meshes of their own"
            )
        raise PreflightError(
            f"{self} is received, but this rank knows no such mesh of its own: it looks at those "
            "of the parameters of its stages, at what they are parts of, and at mesh=; pass mesh="
        )

    def whole(self, shard: Tensor, mesh: DeviceMesh) -> DTensor:
        """Return the DTensor of which this rank has received its shard."""
        return dtensor_of(shard, mesh, self.placements, self.size, self.stride)


def _place_in(mesh: DeviceMesh) -> tuple[int, ...]:
    return tuple(mesh.get_coordinate() or ())


_CROSSES = (Replicate, Shard, Partial)


def layout_of(tensor: Tensor, what: str) -> Layout | None:
    """Return how a DTensor lies on its mesh; None for any other tensor.

    Raises
    ------
    PreflightError
        If the shards are not all that there is to it.
    """
    if not isinstance(tensor, DTensor):
        return None
    mesh, placements = tensor.device_mesh, tuple(tensor.placements)
    if any(type(one) not in _CROSSES for one in placements):
        raise PreflightError(
            f"{what} is a DTensor placed {placements}, but only Replicate, Shard and Partial cross "
            "stages: others know more than their shards; redistribute it before it is returned"
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
    """Return what this rank holds of a DTensor, its gradient a DTensor again; else the tensor."""
    if not isinstance(tensor, DTensor):
        return tensor
    shard = tensor.to_local()
    # A collective that is still under way ends where its result is read.
    return shard if type(shard) is torch.Tensor else alias_no_view(shard)
