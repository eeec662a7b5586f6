"""What memory buys: the best objective found, and the bound, over the memory limit.

Points belong to one *line* where their problems differ in nothing but the memory of devices. Along
a line both numbers carry over: programs that fit a limit fit every larger one and take the same
time there, as memory is a property of the programs and not of the clock (DESIGN section 3); and a
bound holds for every smaller limit too, as every schedule that fits there fits here. So each point
may show the best of all points with at most its memory, and the highest bound of all with at least
its memory, compared device by device. Where nothing fits, nothing fits a smaller limit either.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from optpipe.problem import Problem

__all__ = ["Line", "Point", "family_of", "frontier", "label_of", "memory_of"]

_MEMORY_AXES = ("memory_gb", "memory_scale", "memory_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One problem of a sweep, and what was found about it.

    Parameters
    ----------
    index
        Its place in the sweep.
    family
        Equal for problems of one line; see `family_of`.
    label
        What distinguishes its line from others, for people.
    memory_bytes
        The budget of each device.
    objective_ms
        Of the best schedule found; None where there is none.
    bound_ms
        Proven lower bound of the objective; None where nothing is proven.
    is_infeasible
        Whether it is proven that there is no schedule.
    """

    index: int
    family: str
    label: str
    memory_bytes: tuple[int, ...]
    objective_ms: float | None = None
    bound_ms: float | None = None
    is_infeasible: bool = False

    @property
    def limit_bytes(self) -> int:
        """The budget of the device that has most."""
        return max(self.memory_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Points of one family from the least memory to the most; numbers carried over."""

    label: str
    points: tuple[Point, ...]


def memory_of(problem: Problem) -> tuple[int, ...]:
    """Return the memory budget of each device, in bytes."""
    return tuple(device.memory_bytes for device in problem.devices)


def family_of(problem: Problem) -> str:
    """Return what is equal for problems that differ in names and the memory of devices alone."""
    data = problem.model_dump(mode="json", by_alias=True, exclude={"name"})
    for device in data["devices"]:
        del device["memory_bytes"], device["name"]
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def label_of(values: Mapping[str, Any], name: str) -> str:
    """Return what distinguishes a line from others: the values on all axes but memory's.

    Without axes it is the problem's name; where memory is the only axis, there is but one line.
    """
    told = {axis: value for axis, value in values.items() if not axis.endswith(_MEMORY_AXES)}
    if not told:
        return "best schedule" if values else name
    return ", ".join(f"{axis} = {json.dumps(value)}" for axis, value in told.items())


def frontier(points: Iterable[Point]) -> list[Line]:
    """Return the lines of the points, in the order in which they first appear."""
    families: dict[str, list[Point]] = defaultdict(list)
    for point in points:
        families[point.family].append(point)
    return [
        Line(label=members[0].label, points=tuple(_carried(members)))
        for members in families.values()
    ]


def _carried(members: Sequence[Point]) -> list[Point]:
    ordered = sorted(members, key=lambda point: (point.limit_bytes, point.memory_bytes))
    return [_best_known(point, ordered) for point in ordered]


def _best_known(point: Point, members: Sequence[Point]) -> Point:
    smaller = [other for other in members if _fits(other, point)]
    larger = [other for other in members if _fits(point, other)]
    found = [other.objective_ms for other in smaller if other.objective_ms is not None]
    proven = [other.bound_ms for other in larger if other.bound_ms is not None]
    return replace(
        point,
        objective_ms=min(found, default=None),
        bound_ms=max(proven, default=None),
        is_infeasible=any(other.is_infeasible for other in larger),
    )


def _fits(point: Point, other: Point) -> bool:
    """Whether no device of a point has more memory than that of another."""
    pairs = zip(point.memory_bytes, other.memory_bytes, strict=True)
    return all(held <= limit for held, limit in pairs)
