"""A schedule as columns of numbers: one bar per action, one memory curve per device.

The image files and the interactive chart share it. It does not depend on colours, pixels or drawing
libraries. A hundred thousand actions are nine arrays, not a hundred thousand objects.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from optpipe.errors import MissingExtraError, install_command
from optpipe.memory import memory_walk
from optpipe.schedule import ActionType, gap_of
from optpipe.simulate import (
    Timeline,
    idle_shares,
    memory_curve,
    occupies_lane,
    side_by_side,
    simulate,
    timeline_of,
    times_of,
)
from optpipe.units import format_ms, format_share

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from optpipe.problem import Problem
    from optpipe.schedule import Programs
    from optpipe.simulate import Interval, Lane
    from optpipe.sweep import Point

__all__ = [
    "BAR_COLOURS",
    "COLOURS",
    "COMPONENTS",
    "GRAD_SYNC_COLOUR",
    "KINDS",
    "LANES",
    "LINE_COLOURS",
    "NO_MICROBATCH",
    "NUM_CODES",
    "PALETTES",
    "TITLES",
    "UNKNOWN_BYTES",
    "Bars",
    "Curve",
    "Drawing",
    "LaneEdges",
    "Palette",
    "Pixels",
    "Theme",
    "Unit",
    "View",
    "codes_of",
    "curve_of",
    "drawing_of",
    "edges",
    "has_side_lanes",
    "headline",
    "length_of",
    "peaks_of",
    "pixels_of",
    "places",
    "require_drawing",
    "shares_of",
    "steps_of",
    "title_of",
    "unit_of",
]


LANES: tuple[Lane, ...] = ("compute", "d2h", "h2d", "grad_sync")
"""The lanes; the column `Bars.lane` holds indices of them."""

KINDS: tuple[ActionType | None, ...] = (
    ActionType.FORWARD,
    ActionType.BACKWARD_INPUT,
    ActionType.BACKWARD_WEIGHT,
    ActionType.FULL_BACKWARD,
    ActionType.RECOMPUTE,
    ActionType.OFFLOAD,
    ActionType.RELOAD,
    None,
)
"""The kinds of bars; the column `Bars.kind` holds indices of them.

None is a gradient reduction. RELEASE occupies nothing.
"""

UNKNOWN_BYTES = -1
"""In the columns `Bars.before` and `Bars.after`: how much the device held is not known."""

NO_MICROBATCH = -1
"""In the columns `Bars.stage` and `Bars.microbatch`: a gradient reduction has neither."""

_LANE_CODE = {lane: code for code, lane in enumerate(LANES)}
_KIND_CODE = {kind: code for code, kind in enumerate(KINDS)}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bars:
    """Equally long columns, a row per bar: device by device, each in program order.

    * ``device``, ``stage``, ``microbatch``: which one; int32. A gradient reduction has
      `NO_MICROBATCH` for stage and micro-batch.
    * ``lane``, ``kind``: places in `LANES` and `KINDS`; int8.
    * ``start``, ``end``: ms from the first start of all; float64. A pair is two bars side by side
      (`optpipe.simulate.side_by_side`), so that it shows as one bar in two colours.
    * ``before``, ``after``: bytes that the device holds before and after the action, in program
      order, static bytes included and workspaces not; int64.
    """

    device: NDArray[np.int32]
    lane: NDArray[np.int8]
    kind: NDArray[np.int8]
    stage: NDArray[np.int32]
    microbatch: NDArray[np.int32]
    start: NDArray[np.float64]
    end: NDArray[np.float64]
    before: NDArray[np.int64]
    after: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.start)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Curve:
    """The memory of one device: ``held_bytes[i]`` bytes from ``moments[i]`` ms on.

    Moments do not decrease. The first is 0; the last `held_bytes` lasts to the end.
    """

    moments: NDArray[np.float64]
    held_bytes: NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Drawing:
    """Everything about one schedule that a picture shows; lengths in ms.

    * ``idle``: the share of the objective in which each device computes nothing.
    * ``has_memory``: whether ``memory`` is known; else it is 0.
    """

    bars: Bars
    memory: tuple[Curve, ...]
    makespan_ms: float
    span_ms: float
    idle: tuple[float, ...] = ()
    has_memory: bool = True

    def without_memory(self) -> Drawing:
        """Return a copy that does not show memory."""
        unknown = np.full(len(self.bars), UNKNOWN_BYTES)
        return replace(
            self, has_memory=False, bars=replace(self.bars, before=unknown, after=unknown)
        )


def drawing_of(problem: Problem, programs: Programs) -> Drawing:
    """Simulate legal programs and return them as columns.

    Raises `IllegalScheduleError` if the programs get stuck.
    """
    timeline = timeline_of(problem, programs, simulate(problem, programs))
    length_ms = timeline.span_ms if problem.objective == "span" else timeline.makespan_ms
    return _drawing(problem, programs, timeline, idle_shares(problem, length_ms))


def _drawing(
    problem: Problem, programs: Programs, timeline: Timeline, idle: tuple[float, ...]
) -> Drawing:
    """Return a timeline of programs as columns."""
    curves = tuple(curve_of(points) for points in timeline.memory)
    rows = [row for device in timeline.intervals for row in side_by_side(device)]
    around = [
        _held_around(problem, device, programs, intervals, curves[device])
        for device, intervals in enumerate(timeline.intervals)
    ]
    held_bytes = np.concatenate([*around, np.empty((0, 2), np.int64)])
    return Drawing(
        bars=_bars(rows, held_bytes),
        memory=curves,
        makespan_ms=timeline.makespan_ms,
        span_ms=timeline.span_ms,
        idle=idle,
    )


def _measured_drawing(
    problem: Problem,
    programs: Programs,
    measured: Sequence[Sequence[Interval]],
    *,
    has_memory: bool,
) -> Drawing:
    """Return measured intervals as columns; with memory if they are all actions of the programs."""
    end_ms = max((item.end for row in measured for item in row), default=0.0)
    spans = [(row[0].start, max(item.end for item in row)) for row in measured if row]
    span_ms = max((end - start for start, end in spans), default=0.0)
    length_ms = span_ms if problem.objective == "span" else end_ms
    idle = tuple(1.0 - _busy_ms(row) / length_ms if length_ms else 0.0 for row in measured)
    if has_memory:
        ran = [{item.action.bare: item for item in row if item.action} for row in measured]
        ordered = tuple(
            tuple(
                replace(own[action.bare], action=action)
                for action in program
                if occupies_lane(action)
            )
            for program, own in zip(programs, ran, strict=True)
        )
        memory = tuple(
            memory_curve(problem, device, program, times_of(program, ordered[device]))
            for device, program in enumerate(programs)
        )
        return _drawing(problem, programs, Timeline(ordered, memory, end_ms, span_ms), idle)
    rows = [item for row in measured for item in side_by_side(row)]
    return Drawing(
        bars=_bars(rows, np.zeros((len(rows), 2), np.int64)),
        memory=(curve_of([(0.0, 0)]),) * len(measured),
        makespan_ms=end_ms,
        span_ms=span_ms,
        idle=idle,
    ).without_memory()


def _busy_ms(row: Sequence[Interval]) -> float:
    """Return how long a device computed; the two of a pair run together."""
    return sum(
        item.end - item.start
        for item in row
        if item.lane == "compute" and not (item.action and item.action.paired)
    )


def _bars(rows: Sequence[Interval], held_bytes: NDArray[np.int64]) -> Bars:
    actions = [row.action for row in rows]
    return Bars(
        device=np.array([row.device for row in rows], np.int32),
        lane=np.array([_LANE_CODE[row.lane] for row in rows], np.int8),
        kind=np.array([_KIND_CODE[act.type if act else None] for act in actions], np.int8),
        stage=np.array([act.stage if act else NO_MICROBATCH for act in actions], np.int32),
        microbatch=np.array(
            [act.microbatch if act else NO_MICROBATCH for act in actions], np.int32
        ),
        start=np.array([row.start for row in rows], np.float64),
        end=np.array([row.end for row in rows], np.float64),
        before=held_bytes[:, 0],
        after=held_bytes[:, 1],
    )


def curve_of(points: Sequence[tuple[float, int]]) -> Curve:
    """Return a memory curve of (ms, bytes held from then on)."""
    return Curve(
        moments=np.array([moment for moment, _ in points], np.float64),
        held_bytes=np.array([held_bytes for _, held_bytes in points], np.int64),
    )


def _held_around(
    problem: Problem, device: int, programs: Programs, intervals: Sequence[Interval], curve: Curve
) -> NDArray[np.int64]:
    """Return bytes before and after each interval: of `memory_walk`, or by time for a reduction."""
    program = programs[device]
    steps = memory_walk(problem, device, program)
    pairs = [
        (step.before, step.after)
        for action, step in zip(program, steps, strict=True)
        if action.type is not ActionType.RELEASE
    ]
    for sync in intervals[len(pairs) :]:
        now = int(curve.held_bytes[np.searchsorted(curve.moments, sync.start, side="right") - 1])
        pairs.append((now, now))
    return np.array(pairs, np.int64).reshape(-1, 2)


@dataclass(frozen=True)
class View:
    """One schedule of a chart: legal programs, over a memory limit or not.

    * ``title``: text before the numbers.
    * ``bound_ms``: proven lower bound of the problem's objective, where one is known.
    * ``measured``: per device, when it ran its actions, instead of a simulation.
    * ``has_memory``: whether the problem has sizes, and ``measured`` all actions of the programs.
    """

    title: str
    problem: Problem
    programs: Programs
    bound_ms: float | None = None
    measured: Sequence[Sequence[Interval]] | None = None
    has_memory: bool = True

    @property
    def drawing(self) -> Drawing:
        """The columns of the schedule, as `drawing_of`."""
        if self.measured is not None:
            return _measured_drawing(
                self.problem, self.programs, self.measured, has_memory=self.has_memory
            )
        drawing = drawing_of(self.problem, self.programs)
        return drawing if self.has_memory else drawing.without_memory()

    @property
    def has_bound_line(self) -> bool:
        """Whether a bound is known and a moment of the time axis: a span's is none."""
        return bool(self.bound_ms) and self.problem.objective == "makespan"


LINE_COLOURS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#9d6fd1",
    "#767c84",
)
"""Okabe and Ito's, without yellow and black, which do not show on both pages; then two of ours."""

_MARGIN = 0.06


class Unit(NamedTuple):
    """A unit of memory and its bytes."""

    name: str
    size: float


_UNITS = (Unit("GiB", 2.0**30), Unit("MiB", 2.0**20), Unit("KiB", 2.0**10), Unit("B", 1.0))


def edges(points: Sequence[Point]) -> tuple[float, float]:
    """Return the lowest and highest ms of a frame that leaves room around all numbers."""
    heights = [
        height
        for point in points
        for height in (point.objective_ms, point.bound_ms)
        if height is not None and not point.is_infeasible
    ]
    top, bottom = max(heights, default=1.0), min(heights, default=0.0)
    margin = _MARGIN * (top - bottom or top or 1.0)
    return bottom - margin, top + margin


def unit_of(points: Sequence[Point]) -> Unit:
    """Return the binary unit of the axis: GiB, where the limits are not tiny."""
    most_bytes = max((point.limit_bytes for point in points), default=_UNITS[0].size)
    return next((unit for unit in _UNITS if most_bytes >= unit.size), _UNITS[-1])


class Steps(NamedTuple):
    """The staircases of a frontier, in the order of the limits, in bytes and ms.

    A schedule also fits a larger limit, so between two limits the smaller one's length holds. A
    bound also holds for a smaller limit. ``low_ms`` and ``high_ms`` have both, at each end of each
    interval of ``ends_bytes``.
    """

    found: list[Point]
    proven: list[Point]
    ends_bytes: list[int]
    low_ms: list[float]
    high_ms: list[float]


def steps_of(points: Sequence[Point]) -> Steps:
    """Return the staircases of a line of a frontier."""
    ordered = sorted(points, key=lambda point: point.limit_bytes)
    found = [point for point in ordered if point.objective_ms is not None]
    between = [point for point in found if point.bound_ms is not None]
    steps = list(pairwise(between))
    return Steps(
        found,
        [point for point in ordered if point.bound_ms is not None and not point.is_infeasible],
        [end.limit_bytes for step in steps for end in step],
        [after.bound_ms or 0.0 for _, after in steps for _ in range(2)],
        [before.objective_ms or 0.0 for before, _ in steps for _ in range(2)],
    )


# --- The positions of a device's lanes in a picture: one row per device, device 0 on top.
# The row of device d reaches from d - 0.5 to d + 0.5, downwards. Compute is in the middle.
# Transfers from the host and gradient reductions are above it, transfers to the host below it.


class LaneEdges(NamedTuple):
    """Upper and lower edge of a lane, from the middle of its device's row."""

    top: float
    bottom: float


_ALONE = LaneEdges(-0.41, 0.41)
_COMPUTE = LaneEdges(-0.28, 0.28)
_ABOVE = LaneEdges(-0.44, -0.30)
_BELOW = LaneEdges(0.30, 0.44)


def has_side_lanes(bars: Bars) -> bool:
    """Whether there is anything in addition to compute: transfers or gradient reductions."""
    return bool(np.any(bars.lane != LANES.index("compute")))


def places(*, has_sides: bool) -> tuple[LaneEdges, ...]:
    """Return the place of each of `LANES`; compute takes the whole row where it is alone."""
    compute = _COMPUTE if has_sides else _ALONE
    return (compute, _BELOW, _ABOVE, _ABOVE)


# --- From bars to columns of pixels, for schedules with more actions than a picture has columns.

NUM_CODES = 2 * len(KINDS)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pixels:
    """Lanes cut into columns of equal length.

    * ``colour``: the mean colour of a column's bars, weighted by their time; black without bars.
      float32 of shape (devices, lanes, columns, 3), 0 to 1.
    * ``busy``: the share of a column that is filled, 0 to 1; float32, (devices, lanes, columns).
    """

    colour: NDArray[np.float32]
    busy: NDArray[np.float32]


def codes_of(bars: Bars) -> NDArray[np.int8]:
    """Return 2 x kind + (micro-batch mod 2) of each bar: what has a colour of its own."""
    return (2 * bars.kind + bars.microbatch % 2).astype(np.int8)


def pixels_of(
    bars: Bars,
    palette: NDArray[np.float32],
    *,
    num_devices: int,
    length_ms: float,
    num_columns: int,
) -> Pixels:
    """Share bars out to columns; no time is lost, and none is counted twice.

    Mixing, rather than showing what a column has most of, keeps columns from beating against
    actions: stripes that are in no schedule.

    * ``bars``: those of one lane must not overlap; those of a simulation never do.
    * ``palette``: red, green and blue of each code, 0 to 1.
    """
    edges = np.linspace(0.0, length_ms, num_columns + 1)
    shape = (num_devices, len(LANES), num_columns)
    colour, busy = np.zeros((*shape, 3), np.float32), np.zeros(shape, np.float32)
    codes = codes_of(bars)
    keys = (bars.device * len(LANES) + bars.lane) * NUM_CODES + codes
    order = np.argsort(keys, kind="stable")
    changes = np.flatnonzero(np.diff(keys[order])) + 1
    for rows in np.split(order, changes) if len(keys) else []:
        place = bars.device[rows[0]], bars.lane[rows[0]]
        share = shares_of(bars.start[rows], bars.end[rows], edges)
        busy[place] += share
        colour[place] += share[:, np.newaxis] * palette[codes[rows[0]]]
    colour /= np.maximum(busy, np.finfo(np.float32).tiny)[..., np.newaxis]
    return Pixels(colour=colour, busy=np.minimum(busy, 1.0))


def peaks_of(curve: Curve, end_ms: float, edges: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the maximum bytes held in each column between neighbouring edges.

    Columns from ``end_ms`` on hold what is held at the end.
    """
    before = np.searchsorted(curve.moments, edges[:-1], side="right") - 1
    until = np.searchsorted(curve.moments, np.minimum(edges[1:], end_ms), side="left")
    peaks: NDArray[np.int64] = np.array(
        [
            curve.held_bytes[first : max(last, first + 1)].max()
            for first, last in zip(np.maximum(before, 0), until, strict=True)
        ],
        np.int64,
    )
    return peaks


def shares_of(
    start: NDArray[np.float64], end: NDArray[np.float64], edges: NDArray[np.float64]
) -> NDArray[np.float32]:
    """Return the share of each column that is filled by bars, which must not overlap.

    The time filled up to a moment grows along a bar and is constant between bars. A column's filled
    time is the difference of its values at the column's edges.
    """
    order = np.argsort(start, kind="stable")
    start, end = start[order], end[order]
    filled = np.concatenate([[0.0], np.cumsum(end - start)])
    moments = np.stack([start, end], axis=1).ravel()
    heights = np.stack([filled[:-1], filled[1:]], axis=1).ravel()
    width = (edges[-1] - edges[0]) / (len(edges) - 1) or 1.0
    shares: NDArray[np.float32] = (np.diff(np.interp(edges, moments, heights)) / width).astype(
        np.float32
    )
    return shares


# --- The hues of actions, in every picture.
# Two shades each, for even and odd micro-batches. Colours of one lane differ for people with each
# kind of colour blindness (simulated after Machado, Oliveira and Fernandes 2009). Black text is
# readable on compute, and all colours are visible on a light and on a dark page.

COLOURS: Mapping[ActionType, tuple[str, str]] = {
    ActionType.FORWARD: ("#85c8f5", "#6cb6ea"),
    ActionType.BACKWARD_INPUT: ("#f9d85c", "#e8c23a"),
    ActionType.BACKWARD_WEIGHT: ("#35a07d", "#218566"),
    ActionType.FULL_BACKWARD: ("#f08c5f", "#dc7345"),
    ActionType.RECOMPUTE: ("#b05cf5", "#9f50e6"),
    ActionType.OFFLOAD: ("#4a5cf0", "#3a49d0"),
    ActionType.RELOAD: ("#c02a93", "#a32079"),
}
"""All that have a bar of their own."""

GRAD_SYNC_COLOUR = "#9e9e9e"

BAR_COLOURS: tuple[str, ...] = tuple(
    shade
    for kind in KINDS
    for shade in (COLOURS[kind] if kind is not None else (GRAD_SYNC_COLOUR, GRAD_SYNC_COLOUR))
)
"""The colour of a bar by its code, as `optpipe.plot.scene.codes_of` counts."""


# --- What is not a bar, on a light page and on a dark one.

Theme = Literal["light", "dark"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Palette:
    """Everything that is not a bar."""

    page: str
    text: str
    quiet: str
    grid: str
    bubble: str
    outline: str
    edge: str
    memory: str
    static: str
    limit: str
    bound: str


PALETTES: Mapping[Theme, Palette] = {
    "light": Palette(
        page="#ffffff",
        text="#1f2328",
        quiet="#57606a",
        grid="#e6e9ec",
        bubble="#eceff1",
        outline="#1f2328",
        edge="#b4bac2",
        memory="#4a9ad4",
        static="#90a4ae",
        limit="#b3261e",
        bound="#6a1b9a",
    ),
    "dark": Palette(
        page="#15181c",
        text="#e6e9ec",
        quiet="#9aa5b1",
        grid="#2a3037",
        bubble="#262b31",
        outline="#ffffff",
        edge="#555d68",
        memory="#4a9ad4",
        static="#5f6d78",
        limit="#ff6b5e",
        bound="#ce93f5",
    ),
}


# --- The packages that draw files.

COMPONENTS: tuple[Literal["bokeh", "bokeh-widgets"], ...] = ("bokeh", "bokeh-widgets")
"""The scripts of BokehJS that a chart needs, in the order in which a page loads them."""


def require_drawing(suffix: str) -> None:
    """Raise `MissingExtraError` where the package that draws files of this suffix is missing."""
    package = "bokeh" if suffix == ".html" else "matplotlib"
    if find_spec(package) is None:
        raise MissingExtraError(
            f"drawing {suffix} files needs {package}, which is not installed; "
            f"run: {install_command('plot')}"
        )


# --- The numbers after a picture's title.


def length_of(problem: Problem, drawing: Drawing) -> float:
    """Return the objective in ms."""
    return drawing.span_ms if problem.objective == "span" else drawing.makespan_ms


def headline(problem: Problem, drawing: Drawing, bound_ms: float | None) -> str:
    """Return makespan, span if it is the objective, and bubble; bound and gap if known.

    The bubble is the mean over the devices, with the busiest one's if that is another number. A
    bound of 0 is always true, so it is left out.
    """
    facts = [f"makespan {format_ms(drawing.makespan_ms)} ms"]
    length = length_of(problem, drawing)
    if problem.objective == "span":
        facts.append(f"span {format_ms(drawing.span_ms)} ms")
    shares = drawing.idle
    mean, least = (format_share(share) for share in (sum(shares) / len(shares), min(shares)))
    facts.append(f"bubble {mean}")
    if least != mean:
        facts[-1] += f" (busiest device {least})"
    if bound_ms:
        facts.append(f"bound {format_ms(bound_ms)} ms")
        facts.append(f"gap {format_share(gap_of(length, bound_ms) or 0.0)}")
    return ", ".join(facts)


# --- The names of methods in pictures and on the page; files and the command line keep their ids.
# The names are those of the papers. Every family of `optpipe_solver.families` has a name here, so
# that drawing a schedule of a file needs no solver.

TITLES: Mapping[str, str] = {
    "serial": "Serial",
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "1f1b-r": "1F1B-R",
    "interleaved": "Interleaved 1F1B",
    "zb-h1": "ZB-H1",
    "zb-h2": "ZB-H2",
    "zb-1p": "ZB-1p",
    "zb-2p": "ZB-2p",
    "zb-greedy": "ZB greedy",
    "gis": "GIS",
    "gis-h": "GIS-H",
    "zb-v": "ZB-V",
    "v-half": "V-Half",
    "v-min": "V-Min",
    "po-h": "PO-H",
    "po-f": "PO-F",
    "ada-offload": "AdaOffload",
    "greedy": "List scheduling",
    "dualpipe-v": "DualPipeV",
    "1f1b-overlap": "1F1B, overlapped",
    "seq1f1b": "Seq1F1B",
    "slimpipe": "SlimPipe",
    "building-blocks": "Building blocks",
    "paired-blocks": "Building blocks, paired",
    "auto": "Optimiser",
    "milp": "MILP",
    "local-search": "local search",
}
"""By id: published schedules, the choice of all of them, and methods whose id is no plain word."""


def title_of(method: str) -> str:
    """Return a method's title: ``zb-h1+offload`` is ZB-H1 + offload; unknown ids stay."""
    return " + ".join(TITLES.get(part, part) for part in method.split("+"))
