"""Variations of a problem along axes: less memory, more micro-batches, a slower bus.

An axis is a name and its values; a sweep is every combination of one value of each. A named axis
changes all fields that belong together, so that a sweep stays meaningful. A path such as
``devices[*].memory_bytes`` or ``stages[3].forward_ms`` sets that field alone.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import math
import re
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from optpipe.errors import InputError, ProblemError
from optpipe.problem import Problem, placement_of

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence

    from optpipe.stage import CellMode, Stage

__all__ = [
    "AXES",
    "FrontierLine",
    "Point",
    "Variation",
    "best_sources",
    "carried_message",
    "family_of",
    "frontier",
    "label_of",
    "memory_of",
    "num_variations",
    "sweep",
    "tighter_ones",
    "useful_axes",
]


Document = dict[str, Any]

_GB = 1_000_000_000
_STEP = re.compile(r"([A-Za-z_]\w*)(?:\[([0-9]{1,9}|\*)\])?")
_MOST = 1e12
_MAX_NAME = 200
_SHOWN_CHARS = 60
_EQUAL = 1e-9
"""Objectives are equal if they differ by at most this share of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variation:
    """One point of a sweep: the value on each axis, and the problem it makes."""

    values: dict[str, Any]
    problem: Problem


def num_variations(axes: Mapping[str, Sequence[Any]]) -> int:
    """Return how many combinations the values of the axes have."""
    return math.prod(len(values) for values in axes.values())


def sweep(problem: Problem, axes: Mapping[str, Sequence[Any]]) -> list[Variation]:
    """Return every combination of the axes' values, the last axis fastest.

    ``axes`` maps names (see `AXES`) or paths to values, in order. No axes: the problem alone.
    Raises `InputError` if an axis is unknown, has no values or a repeated one, or a value cannot be
    applied. A combination that makes no valid problem raises it, too; the message names its values
    and the rule.
    """
    for name, values in axes.items():
        _check_axis(name, values)
    # Fields of v1, whatever the form of the file; but of each cost where there are more.
    base = problem.model_dump(mode="json" if problem.num_costs > 1 else "python", by_alias=True)
    return [
        _vary(base, dict(zip(axes, values, strict=True)))
        for values in itertools.product(*axes.values())
    ]


def _check_axis(name: str, values: Sequence[Any]) -> None:
    if not isinstance(values, list | tuple) or not values:
        raise InputError(
            f"axes.{name} = {_shown(values)}: must be a list of values; give at least one"
        )
    known: set[str] = set()
    for value in values:
        text = json.dumps(value, sort_keys=True)
        if text in known:
            raise InputError(f"axes.{name}: {_shown(value)} stands there twice; take one out")
        known.add(text)


def _vary(base: Document, values: dict[str, Any]) -> Variation:
    document = json.loads(json.dumps(base))
    for name, value in values.items():
        AXES.get(name, _set_path(name))(document, copy.deepcopy(value))
    shown = ", ".join(f"{name} = {_shown(value)}" for name, value in values.items())
    if "name" not in values:
        document["name"] = f"{base['name']} {shown}".strip()[:_MAX_NAME]
    try:
        return Variation(values=values, problem=Problem.parse(document))
    except ProblemError as error:
        raise InputError(f"the variation {shown} is no valid problem: {error}") from error


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


def _number(name: str, value: Any) -> float:
    # Compared before it is made a float, which a huge whole number cannot be.
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value <= _MOST:
        raise InputError(
            f"axes.{name} = {_shown(value)}: must be a number > 0 and <= {_MOST:g}; change it"
        )
    return float(value)


def _scale_memory(document: Document, value: Any) -> None:
    factor = _number("memory_scale", value)
    for device in document["devices"]:
        device["memory_bytes"] = round(device["memory_bytes"] * factor)


def _set_memory(document: Document, value: Any) -> None:
    for device in document["devices"]:
        device["memory_bytes"] = round(_number("memory_gb", value) * _GB)


def _scale_pcie(document: Document, value: Any) -> None:
    factor = _number("pcie_scale", value)
    linked = [device for device in document["devices"] if device["d2h_gb_per_s"] is not None]
    _require("pcie_scale", linked, "device with d2h_gb_per_s and h2d_gb_per_s")
    for device in linked:
        for name in ("d2h_gb_per_s", "h2d_gb_per_s"):
            device[name] *= factor


def _scale_links(document: Document, value: Any) -> None:
    factor = _number("link_scale", value)
    limited = [link for link in document["links"] if link["bandwidth_gb_per_s"] is not None]
    _require("link_scale", limited, "link with bandwidth_gb_per_s")
    for link in limited:
        link["bandwidth_gb_per_s"] *= factor


def _set_latency(document: Document, value: Any) -> None:
    _require("latency_ms", document["links"], "link")
    for link in document["links"]:
        link["latency_ms"] = value


def _set_offload(document: Document, value: Any) -> None:
    _flag("offload", value)
    if not value:
        _without(document, {"offload_bytes": 0}, lambda mode: not mode.get("offload_bytes"))


def _set_recompute(document: Document, value: Any) -> None:
    _flag("recompute", value)
    if not value:
        fields = {"recompute_ms": None, "checkpoint_bytes": None}
        _without(document, fields, lambda mode: mode.get("recompute") is None)


def _without(document: Document, fields: Document, is_kept: Callable[[Document], bool]) -> None:
    """Set fields of v1, and keep some modes; where stages have costs, each has a menu alone."""
    for stage in document["stages"]:
        if "costs" not in stage:
            stage.update(fields)
        for part in stage.get("costs", [stage]):
            if "modes" in part:
                part["modes"] = [mode for mode in part["modes"] if is_kept(mode)]


def _require(name: str, found: Sequence[Any], what: str) -> None:
    if not found:
        raise InputError(f"axes.{name}: the problem has no {what}; leave this axis out")


def _flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise InputError(f"axes.{name} = {_shown(value)}: must be true or false; change it")


def _set_placement(document: Document, value: Any) -> None:
    stages, num_devices = document["stages"], len(document["devices"])
    if value == "linear":
        value = [index * num_devices // len(stages) for index in range(len(stages))]
    elif value in ("loop", "v"):
        chunks = -(-len(stages) // num_devices)
        value = placement_of(value, num_devices, chunks)[: len(stages)]
    elif not isinstance(value, list) or len(value) != len(stages):
        raise InputError(
            f'axes.placement = {_shown(value)}: must be "linear", "loop", "v", or the device of '
            f"each of the {len(stages)} stages; change it"
        )
    for stage, device in zip(stages, value, strict=True):
        stage["device"] = device


def _set_path(path: str) -> Callable[[Document, Any], None]:
    """Return a function that sets a field by its path; ``[*]`` means every item."""

    def apply(document: Document, value: Any) -> None:
        *steps, (last, index) = _steps(path)
        holders: list[Any] = [document]
        for name, at in steps:
            holders = [item for holder in holders for item in _items(holder, name, at, path)]
        if not holders:
            raise _no_such_axis(path)
        for holder in holders:
            if index is not None or not isinstance(holder, dict) or last not in holder:
                raise _no_such_axis(path)
            holder[last] = value

    return apply


def _steps(path: str) -> list[tuple[str, str | None]]:
    found = [_STEP.fullmatch(step) for step in path.split(".")]
    steps = [(match[1], match[2]) for match in found if match is not None]
    if len(steps) != len(found):
        raise _no_such_axis(path)
    return steps


def _items(holder: Any, name: str, at: str | None, path: str) -> list[Any]:
    value = holder.get(name) if isinstance(holder, dict) else None
    if at is None and isinstance(value, dict):
        return [value]
    if at == "*" and isinstance(value, list):
        return value
    if at is not None and at != "*" and isinstance(value, list) and int(at) < len(value):
        return [value[int(at)]]
    raise _no_such_axis(path)


def _no_such_axis(path: str) -> InputError:
    return InputError(
        f"axes.{path[:_SHOWN_CHARS]}: is neither an axis ({', '.join(AXES)}) nor the path of a "
        "field that this problem has, such as devices[*].memory_bytes or stages[3].forward_ms; "
        "change it"
    )


AXES: dict[str, Callable[[Document, Any], None]] = {
    "memory_scale": _scale_memory,
    "memory_gb": _set_memory,
    "num_microbatches": _set_path("num_microbatches"),
    "pcie_scale": _scale_pcie,
    "link_scale": _scale_links,
    "latency_ms": _set_latency,
    "placement": _set_placement,
    "objective": _set_path("objective"),
    "offload": _set_offload,
    "recompute": _set_recompute,
}
"""Named axes: factors on the problem's values (``_scale``), or values of their own."""


# --- The frontier of memory: the best objective found, and the bound, over the memory limit.
# Points belong to one *line* if their problems differ in nothing but the memory of devices.
# Along a line both numbers carry over. Memory is a property of the programs
# (docs/specification.md, "Memory"), so programs that fit a limit fit every larger one and take the
# same time there. A bound holds for every smaller limit too, as every schedule that fits there fits
# here. So each point may show the best objective of all points with at most its memory, and the
# highest bound of all with at least its memory, compared device by device. If nothing fits a limit,
# nothing fits a smaller one either.

_MEMORY_AXES = ("memory_gb", "memory_scale", "memory_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One problem of a sweep, and what was found about it.

    * ``index``: its place in the sweep.
    * ``family``: equal for problems of one line; see `family_of`.
    * ``label``: text that distinguishes its line from others.
    * ``memory_bytes``: the budget of each device.
    * ``objective_ms``: of the best schedule found; None if there is none.
    * ``bound_ms``: proven lower bound of the objective; None if nothing is proven.
    * ``is_infeasible``: whether it is proven that there is no schedule.
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
class FrontierLine:
    """Points of one family, from the smallest memory to the largest, with numbers carried over."""

    label: str
    points: tuple[Point, ...]


_ALWAYS = ("num_microbatches", "memory_scale", "memory_gb", "objective")


def useful_axes(problem: Problem) -> list[str]:
    """Return the names of `AXES` that can change this problem."""
    has_bus = any(device.d2h_gb_per_s is not None for device in problem.devices)
    has_limit = any(link.bandwidth_gb_per_s is not None for link in problem.links)
    found = {
        "pcie_scale": has_bus,
        "link_scale": has_limit,
        "latency_ms": bool(problem.links),
        "placement": len(problem.stages) > len(problem.devices),
        "offload": problem.may_offload,
        "recompute": problem.may_recompute,
    }
    return [*_ALWAYS, *(name for name, is_useful in found.items() if is_useful)]


def memory_of(problem: Problem) -> tuple[int, ...]:
    """Return the memory budget of each device, in bytes."""
    return tuple(device.memory_bytes for device in problem.devices)


def family_of(problem: Problem) -> str:
    """Return a key that is equal for problems that differ only in names and device memory."""
    data = problem.model_dump(mode="json", by_alias=True, exclude={"name"})
    for device in data["devices"]:
        del device["memory_bytes"], device["name"]
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def label_of(values: Mapping[str, Any], name: str) -> str:
    """Return a text that distinguishes a line: the values on all axes but memory's.

    Without axes it is the problem's name; where memory is the only axis, there is but one line.
    """
    shown = {axis: value for axis, value in values.items() if not axis.endswith(_MEMORY_AXES)}
    if not shown:
        return "best schedule" if values else name
    return ", ".join(f"{axis} = {json.dumps(value)}" for axis, value in shown.items())


def frontier(points: Iterable[Point]) -> list[FrontierLine]:
    """Return the lines of the points, in the order in which they first appear."""
    families: dict[str, list[Point]] = defaultdict(list)
    for point in points:
        families[point.family].append(point)
    return [
        FrontierLine(
            label=members[0].label,
            points=tuple(
                _best_known(point, members)
                for point in sorted(members, key=lambda one: (one.limit_bytes, one.memory_bytes))
            ),
        )
        for members in families.values()
    ]


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
    return all(memory <= limit for memory, limit in pairs)


# --- Which problems of a sweep are relaxations of others: programs that are legal in the *tighter*
# one are legal in the looser one, and take no longer there.
# *Argument.* Memory is a property of the program. The bytes of a cell in each state, the workspaces
# of actions, and the static bytes are compared one by one, and no limit is lower. If no lanes are
# shared, every start is the maximum of sums of durations, so shorter durations delay nothing, and
# transfers do not wait for others. A shared lane goes to the first transfer that is issued, and a
# span begins with a device's first action. There an earlier start can be worse, so times must be
# equal.


class _Demands(NamedTuple):
    """The demands of a problem on programs; smaller demands are looser.

    ``shape``: must be equal. ``sizes``, ``times``: bytes and ms, infinite if something is not
    allowed, limits negative. ``lanes``: which transfers share lanes, None if none do.
    """

    shape: Hashable
    sizes: np.ndarray[tuple[int], np.dtype[np.float64]]
    times: np.ndarray[tuple[int], np.dtype[np.float64]]
    lanes: Hashable | None
    can_offload: bool
    is_span: bool


def tighter_ones(problems: Sequence[Problem]) -> list[tuple[int, ...]]:
    """Return for each problem the indices of the others that it is a relaxation of.

    Their programs are legal in it, and their objective is no larger there. Equal problems are
    relaxations of each other. Otherwise the tighter of two problems has fewer indices.
    """
    demands = [_demands(problem) for problem in problems]
    return [
        tuple(
            other
            for other, tight in enumerate(demands)
            if other != index and _is_relaxation(loose, tight)
        )
        for index, loose in enumerate(demands)
    ]


def best_sources(objectives: Sequence[float | None], tighter: Sequence[Iterable[int]]) -> list[int]:
    """Return for each problem the index of the problem whose schedule serves it best.

    This is the problem itself, unless one of its tighter problems has a shorter schedule.

    Parameters
    ----------
    objectives
        Of the best schedule of each problem, in ms; None without one.
    tighter
        Of each problem, as `tighter_ones` returns them.
    """
    lengths = [math.inf if one is None else one for one in objectives]
    sources = []
    for index, others in enumerate(tighter):
        best = min(others, key=lengths.__getitem__, default=index)
        sources.append(best if lengths[best] < lengths[index] * (1 - _EQUAL) else index)
    return sources


def carried_message(source: str, message: str | None) -> str:
    """Return the message of a row that shows the schedule of a tighter problem.

    ``source``: the job or the problem that found it. ``message``: of the row itself.
    """
    carried = f"the schedule of {source}, whose problem is tighter: it is legal here and as short"
    return f"{carried}; {message}" if message else carried


def _is_relaxation(loose: _Demands, tight: _Demands) -> bool:
    if loose.shape != tight.shape or (tight.is_span and not loose.is_span):
        return False
    if not (loose.sizes <= tight.sizes).all():
        return False
    if not tight.is_span and (loose.lanes is None or not tight.can_offload):
        return bool((loose.times <= tight.times).all())
    are_equal = (loose.times == tight.times) | np.isinf(tight.times)
    return bool(are_equal.all()) and (loose.lanes == tight.lanes or not tight.can_offload)


def _demands(problem: Problem) -> _Demands:
    devices = problem.devices
    kinds = [problem]
    if problem.num_costs > 1:
        kinds = [problem.alike(cost) for cost in range(problem.num_costs)]
    free = [
        problem.static_bytes_of(index) - device.usable_bytes for index, device in enumerate(devices)
    ]
    hosts = {host.name: host.memory_bytes for host in problem.hosts}
    room = [hosts.get(device.host) for device in devices]
    limits = [*free, *(-math.inf if free_bytes is None else -free_bytes for free_bytes in room)]
    lanes = tuple((device.half_duplex, device.pcie_group) for device in devices)
    return _Demands(
        shape=(
            problem.num_microbatches,
            problem.placement,
            problem.queues,
            tuple(device.host for device in devices),
            tuple(_menu_shape(stage) for kind in kinds for stage in kind.stages),
            (problem.microbatches, problem.order),
        ),
        sizes=np.array(
            [*limits, *itertools.chain.from_iterable(map(_sizes, kinds))], dtype=np.float64
        ),
        times=np.array([*itertools.chain.from_iterable(map(_times, kinds))], dtype=np.float64),
        lanes=None if all(one == (False, None) for one in lanes) else lanes,
        can_offload=problem.may_offload,
        is_span=problem.objective == "span",
    )


def _menu_shape(stage: Stage) -> Hashable:
    """Return the parts of a menu that must be equal, as programs name its modes; v1 names none."""
    if not stage.modes:
        return stage.uniform_modes
    actions = tuple((mode.offload_bytes > 0, mode.recompute) for mode in stage.menu)
    return stage.uniform_modes, actions


def _sizes(problem: Problem) -> Iterator[float]:
    for stage in problem.stages:
        yield stage.activation_bytes
        for mode in _usable_modes(problem, stage):
            if mode is None:
                yield from (math.inf,) * _NUM_SIZES
                continue
            yield from (mode.forward_bytes, mode.least_bytes, mode.offload_bytes)
            yield from (mode.backward_bytes, mode.inside_bytes, mode.weight_context_bytes)
            yield from (mode.forward_workspace_bytes, mode.backward_input_workspace_bytes)
            yield from (mode.backward_weight_workspace_bytes, mode.backward_workspace_bytes)
            yield mode.recompute_workspace_bytes if mode.recompute == "apart" else 0


_NUM_SIZES = 11


def _times(problem: Problem) -> Iterator[float]:
    for index, stage in enumerate(problem.stages):
        yield from (stage.forward_ms, stage.backward_input_ms, stage.backward_weight_ms)
        yield from (stage.fused_backward_ms, stage.grad_sync_ms, *problem.boundary_ms[index])
        yield from (lane.ms for lane in problem.boundary_lanes[index])
        for mode in _usable_modes(problem, stage):
            if mode is None:
                yield from (math.inf,) * 3
                continue
            yield mode.recompute_ms
            moved = mode.offload_bytes
            yield problem.offload_ms(index, moved) if moved else 0.0
            yield problem.reload_ms(index, moved) if moved else 0.0


def _usable_modes(problem: Problem, stage: Stage) -> Iterator[CellMode | None]:
    """Yield the modes by number; None for one that the stage has not, or its device cannot do."""
    for mode in stage.numbered_menu:
        goes = mode is not None and (
            not mode.offload_bytes or problem.devices[stage.device].can_offload
        )
        yield mode if goes else None
