"""Placements of stages: orders of the devices, and how a line passes through them.

A *line* is a shape over an order of devices. Linear has each device once. Loop repeats the order. V
alternates between the order and its reverse. The natural order is that of the model's devices.
*Free* means any other order, and orders that leave devices out.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, chain, islice, permutations
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from optpipe.model import fuse
from optpipe.problem import MAX_CELLS
from optpipe.requests import PlacementKind
from optpipe_solver.feasibility import least_bytes

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from optpipe.model import Model
    from optpipe.problem import Stage

__all__ = [
    "PLACEMENTS",
    "LayerRun",
    "Lines",
    "PlacementLine",
    "RunTable",
    "device_orders",
    "make_lines",
    "natural_order",
]


PLACEMENTS: tuple[PlacementKind, ...] = get_args(PlacementKind)
"""The kinds of placement a plan may try."""

_MOST_ORDERS = 32
"""Maximum number of device orders to try; the number of all orders is a factorial."""


@dataclass(frozen=True, slots=True)
class PlacementLine:
    """One placement: the device of each stage follows from shape, chunks and order."""

    shape: Literal["linear", "loop", "v"]
    chunks: int
    order: tuple[int, ...]
    free: bool = False

    @property
    def placement(self) -> tuple[int, ...]:
        """Device of each stage."""
        turned = self.order[::-1] if self.shape == "v" else self.order
        rounds = (turned if k % 2 else self.order for k in range(self.chunks))
        return tuple(chain.from_iterable(rounds))

    @property
    def label(self) -> str:
        """Name for display: ``v x2``, ``free linear 2-0-1``."""
        shape = self.shape if self.chunks == 1 else f"{self.shape} x{self.chunks}"
        return f"free {shape} {'-'.join(map(str, self.order))}" if self.free else shape


@dataclass(frozen=True, slots=True)
class Lines:
    """The lines to search; ``complete`` is False if some free orders were left out."""

    lines: tuple[PlacementLine, ...]
    complete: bool


def make_lines(model: Model, kinds: Collection[PlacementKind], chunks: Collection[int]) -> Lines:
    """Return every line of the kinds and chunk counts that has a layer for each stage.

    Lines with more than `MAX_CELLS` cells are left out. Lines come in a fixed order, the plain ones
    first.
    """
    natural = natural_order(model)
    found = [line for line in _shapes(natural, chunks, free=False) if line.shape in kinds]
    plain = {(line.shape, line.chunks) for line in found}
    complete = True
    if "free" in kinds:
        orders = list(islice(device_orders(model), _MOST_ORDERS + 1))
        complete = len(orders) <= _MOST_ORDERS
        found += [
            line
            for order in orders[:_MOST_ORDERS]
            for line in _shapes(order, chunks, free=True)
            if order != natural or (line.shape, line.chunks) not in plain
        ]
    most = min(model.num_layers, MAX_CELLS // model.num_microbatches)
    fitting = (line for line in found if len(line.placement) <= most)
    return Lines(tuple(fitting), complete)


def natural_order(model: Model) -> tuple[int, ...]:
    """Return the devices in the model's order, at most as many as it has layers."""
    return tuple(range(min(len(model.devices), model.num_layers)))


def _shapes(
    order: tuple[int, ...], chunks: Collection[int], *, free: bool
) -> Iterator[PlacementLine]:
    if 1 in chunks:
        yield PlacementLine("linear", 1, order, free)
    for count in sorted(set(chunks) - {1}):
        if len(order) > 1:  # on one device a loop and a V are one stage, cut for nothing
            yield PlacementLine("loop", count, order, free)
            yield PlacementLine("v", count, order, free)


def device_orders(model: Model) -> Iterator[tuple[int, ...]]:
    """Yield orders of devices, longest first, one for all that differ by equal devices only.

    Orders that keep equal devices together come before the others of their length. No order is
    longer than the model has layers.
    """
    classes = _classes(model)
    for length in range(min(len(classes), model.num_layers), 0, -1):
        seen = set()
        for pattern in chain(_blocks(classes, length), _patterns(tuple(sorted(classes)), length)):
            if pattern not in seen:
                seen.add(pattern)
                members = {
                    first: iter([device for device, own in enumerate(classes) if own == first])
                    for first in set(classes)
                }
                yield tuple(next(members[first]) for first in pattern)


def _classes(model: Model) -> tuple[int, ...]:
    """Return, per device, the first device that is interchangeable with it."""
    found: list[int] = []
    for device in range(len(model.devices)):
        equal = (first for first in sorted(set(found)) if _interchangeable(model, first, device))
        found.append(next(equal, device))
    return tuple(found)


def _interchangeable(model: Model, one: int, other: int) -> bool:
    """Whether swapping two devices changes nothing but their names.

    Swaps that change nothing form a group, so this is an equivalence. Hosts without a memory limit
    count as equal.
    """
    limited = {host.name for host in model.hosts if host.memory_bytes is not None}
    fields = [model.devices[device].model_dump(exclude={"name"}) for device in (one, other)]
    for values in fields:
        values["host"] = values["host"] if values["host"] in limited else None
    if fields[0] != fields[1]:
        return False
    swap = {one: other, other: one}
    plain = (model.default_link.latency_ms, model.default_link.bandwidth_gb_per_s)
    wires = {
        (link.source, link.target): (link.latency_ms, link.bandwidth_gb_per_s)
        for link in model.links
        if (link.latency_ms, link.bandwidth_gb_per_s) != plain
    }
    return wires == {(swap.get(a, a), swap.get(b, b)): wire for (a, b), wire in wires.items()}


def _blocks(classes: tuple[int, ...], length: int) -> Iterator[tuple[int, ...]]:
    """Yield patterns of whole classes one after the other, the last one cut to the length."""
    for arranged in islice(permutations(sorted(set(classes))), _MOST_ORDERS):
        pattern = tuple(first for first in arranged for _ in range(classes.count(first)))
        yield pattern[:length]


def _patterns(left: tuple[int, ...], length: int) -> Iterator[tuple[int, ...]]:
    """Yield every sequence of classes of a length, each class as often as it has devices."""
    if length == 0:
        yield ()
        return
    for first in sorted(set(left)):
        at = left.index(first)
        for rest in _patterns(left[:at] + left[at + 1 :], length - 1):
            yield (first, *rest)


# --- The cost of every run of layers as one stage, per kind of device, for the search of cuts.


class LayerRun(NamedTuple):
    """One run of layers on one kind of device; ms and bytes per micro-batch, except static bytes.

    ``needed_bytes`` is the minimum while a pass of the run works, ``nested_bytes`` until its I
    ends. ``held_bytes`` is the minimum between F and its backward, offloaded or recomputed if that
    is less.
    """

    busy_ms: float
    forward_ms: float
    sync_ms: float
    needed_bytes: int
    nested_bytes: int
    held_bytes: int
    static_bytes: int


class RunTable:
    """All runs of a model's layers; devices of the same kind share their rows.

    Parameters
    ----------
    model
        A model of n layers gives n (n + 1) / 2 runs per kind of device.
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self.num_layers = model.num_layers
        self.output_bytes = [stage.output_bytes for stage in model.stages_on[0]]
        known: dict[tuple[str | None, float, bool], list[list[LayerRun]]] = {}
        self._rows = []
        for device, layers in zip(model.devices, model.stages_on, strict=True):
            kind = (device.type, device.speed, device.can_offload)
            if kind not in known:
                # By first layer: every run that starts with it, the shortest first.
                known[kind] = [
                    [
                        _run(stage, can_offload=device.can_offload)
                        for stage in accumulate(layers[start:], fuse)
                    ]
                    for start in range(len(layers))
                ]
            self._rows.append(known[kind])

    def run(self, device: int, start: int, end: int) -> LayerRun:
        """Return the run of layers start, ..., end - 1 on a device."""
        return self._rows[device][start][end - start - 1]


def _run(stage: Stage, *, can_offload: bool) -> LayerRun:
    held_bytes, nested_bytes, needed_bytes = least_bytes(stage, can_offload=can_offload)
    return LayerRun(
        busy_ms=stage.busy_ms,
        forward_ms=stage.forward_ms,
        sync_ms=stage.grad_sync_ms,
        needed_bytes=needed_bytes,
        nested_bytes=nested_bytes,
        held_bytes=held_bytes,
        static_bytes=stage.static_bytes,
    )
