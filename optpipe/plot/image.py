"""Schedules as image files (PNG, SVG, PDF) with matplotlib.

They need the extra ``plot``: ``pip install '.[plot]'`` in a clone of OptPipe.

Panels share one time axis, so that schedules before and after a change are easy to compare. For
each device, a panel has a compute lane and a memory curve against the limit. Transfers from the
host are above the compute lane, transfers to the host below it.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from optpipe.errors import InputError
from optpipe.memory import device_peak_bytes
from optpipe.plot.scene import (
    BAR_COLOURS,
    COLOURS,
    KINDS,
    LANES,
    LINE_COLOURS,
    PALETTES,
    Unit,
    codes_of,
    edges,
    has_side_lanes,
    headline,
    peaks_of,
    pixels_of,
    places,
    require_drawing,
    steps_of,
    unit_of,
)
from optpipe.plot.terminal import LETTERS, NAMES
from optpipe.schedule import ActionType
from optpipe.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from optpipe.plot.scene import Bars, Curve, Drawing, LaneEdges, View
    from optpipe.problem import Problem
    from optpipe.schedule import Programs
    from optpipe.sweep import FrontierLine

__all__ = [
    "FRONTIER_SUFFIXES",
    "MOST_SHAPES",
    "SUFFIXES",
    "draw_figure",
    "draw_frontier",
    "draw_svg",
    "frontier_svg",
    "save_figure",
    "save_frontier",
]


SUFFIXES = (".png", ".svg", ".pdf")
FRONTIER_SUFFIXES = (*SUFFIXES, ".html")
_INCHES_PER_DEVICE, _MAX_GANTT, _MAX_MEMORY, _RANGE_INCHES = 0.36, 6.5, 3.6, 1.3
_TITLE_INCHES, _LEGEND_INCHES, _MAX_HEIGHT = 0.55, 0.75, 60.0
_MOST_LABELLED = 33
_WIDTH = 11.0
_NAME_CHARS, _PAD_INCHES = 16, 0.12
_LOOK = PALETTES["light"]


def draw_figure(views: Sequence[View]) -> Any:
    """Return a matplotlib Figure with the panels one above the other on one time axis.

    Raises `MissingExtraError` if matplotlib is not installed.
    """
    require_drawing(".svg")
    from matplotlib.figure import Figure  # noqa: PLC0415 - an optional extra

    # Rows share a screenful where they are many.
    num_devices = max(len(view.problem.devices) for view in views)
    gantt_inches = min(_INCHES_PER_DEVICE * num_devices, _MAX_GANTT)
    memory_inches = min(gantt_inches, _MAX_MEMORY)
    if num_devices > _MOST_CURVES:
        memory_inches = _RANGE_INCHES
    height = len(views) * (_TITLE_INCHES + gantt_inches + memory_inches) + _LEGEND_INCHES
    figure = Figure(figsize=(_WIDTH, min(height, _MAX_HEIGHT)), layout="constrained")
    drawings = [view.drawing for view in views]
    length = max(drawing.makespan_ms for drawing in drawings)
    ratios = [inches for _ in views for inches in (gantt_inches, memory_inches)]
    axes = figure.subplots(2 * len(views), 1, sharex=True, squeeze=False, height_ratios=ratios)
    for index, (view, drawing) in enumerate(zip(views, drawings, strict=True)):
        gantt, memory = axes[2 * index : 2 * index + 2, 0]
        _draw_view(gantt, memory, view, drawing, length_ms=length)
    last = axes[-1, 0]
    last.set_xlim(0, length * 1.005)
    is_mixed = any(len(drawing.bars) > MOST_SHAPES for drawing in drawings)
    mixed = "; a column of pixels mixes the colours of all that happens in it"
    last.set_xlabel(f"time (ms){mixed if is_mixed else ''}")
    from matplotlib.lines import Line2D  # noqa: PLC0415 - an optional extra
    from matplotlib.patches import Patch  # noqa: PLC0415

    used = {action.type for view in views for program in view.programs for action in program}
    handles: list[Any] = [
        Patch(color=COLOURS[kind][0], label=f"{LETTERS.get(kind, '')} {NAMES[kind]}".strip())
        for kind in ActionType
        if kind in used and kind in NAMES
    ]
    handles.append(Patch(color=_LOOK.bubble, label="bubble"))
    label = "activations"
    if any(len(view.problem.devices) > _MOST_CURVES for view in views):
        label = "held by the emptiest to the fullest device"
    else:
        handles.append(Patch(color=_LOOK.static, label="weights, gradients, optimizer"))
    handles += [
        Patch(color=_LOOK.memory, alpha=_MEMORY_OPACITY, label=label),
        Line2D([], [], color=_LOOK.limit, linewidth=0.9, label="memory limit"),
    ]
    if any(view.has_bound_line for view in views):
        handles.append(
            Line2D([], [], color=_LOOK.bound, linewidth=1.2, linestyle="--", label="lower bound")
        )
    figure.legend(handles=handles, loc="outside lower center", ncols=5, fontsize=8, frameon=False)
    # The widths of bars are known only after the layout.
    engine: Any = figure.get_layout_engine()
    engine.set(w_pad=_PAD_INCHES)
    engine.execute(figure)
    for axis, view, drawing in zip(axes[::2, 0], views, drawings, strict=True):
        _label(axis, view, drawing.bars)
    return figure


def save_figure(views: Sequence[View], path: Path | str) -> None:
    """Draw the panels into a file whose suffix chooses the format; equal input, equal bytes.

    Raises `InputError` if the suffix is none of `SUFFIXES`, or the file cannot be written. Raises
    `MissingExtraError` if matplotlib is not installed.
    """
    _save(lambda: draw_figure(views), Path(path))


def _save(draw: Callable[[], Any], target: Path) -> None:
    if target.suffix not in SUFFIXES:
        raise InputError(
            f"cannot draw {target.name}: the suffix chooses the format; use one of "
            f"{', '.join(SUFFIXES)}"
        )
    _write_file(target, _bytes_of(draw(), target.suffix))


def _write_file(target: Path, content: bytes) -> None:
    try:
        target.write_bytes(content)
    except OSError as error:
        raise InputError(f"cannot write {target}: {error.strerror}; check the path") from None


def draw_svg(views: Sequence[View]) -> bytes:
    """Return the panels as the bytes of an SVG file; equal input, equal bytes.

    Raises `MissingExtraError` if matplotlib is not installed.
    """
    return _bytes_of(draw_figure(views), ".svg")


def _bytes_of(figure: Any, suffix: str) -> bytes:
    from matplotlib import rc_context  # noqa: PLC0415 - an optional extra

    # Lay out once, and round: the solver of the layout differs in the last bits. With "none" for
    # an engine, `savefig` would still draw once more to lay out.
    engine = figure.get_layout_engine()
    engine.set(w_pad=_PAD_INCHES)  # texts of a file are a little wider than those of the layout
    engine.execute(figure)
    figure.set_layout_engine(None)
    for axes in figure.axes:
        axes.set_position([round(edge, 5) for edge in axes.get_position().bounds])
    options: Any = {"svg.hashsalt": "optpipe", "svg.fonttype": "none", "savefig.dpi": 150}
    stamps = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    file = io.BytesIO()
    with rc_context(options):
        figure.savefig(file, format=suffix[1:], metadata=stamps.get(suffix), facecolor="white")
    return file.getvalue()


def _plain_text(text: str) -> str:
    """Return somebody's text so that matplotlib draws it as it is, and SVG can hold it.

    Between dollars it would be read as a formula, and refused where it is none.
    """
    shown = (letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)
    return "".join(shown).replace("$", r"\$")


def _draw_view(gantt: Any, memory: Any, view: View, drawing: Drawing, *, length_ms: float) -> None:
    """Draw one schedule: what happens above, what is held below."""
    problem = view.problem
    title = f"{_plain_text(view.title)}: {headline(problem, drawing, view.bound_ms)}"
    points = min(_TITLE_POINTS, _TITLE_POINTS * _MOST_TITLE / len(title))
    gantt.set_title(title, loc="left", fontsize=points, fontweight="bold")
    _draw_gantt(gantt, drawing, view.programs, length_ms=length_ms)
    gantt.axvline(drawing.makespan_ms, color="black", linewidth=0.8, linestyle=":")
    if view.has_bound_line:
        gantt.axvline(view.bound_ms, color=_LOOK.bound, linewidth=1.2, linestyle="--", zorder=4)
    _label_rows(gantt, [_plain_text(device.name) for device in problem.devices], 0.0, 8)
    if len(problem.devices) > _MOST_CURVES:
        # For more devices than a picture has room for curves.
        edges = np.linspace(0.0, drawing.makespan_ms, _NUM_MEMORY_COLUMNS + 1)
        shares = np.array(
            [
                peaks_of(curve, drawing.makespan_ms, edges) / max(1, device.usable_bytes)
                for curve, device in zip(drawing.memory, problem.devices, strict=True)
            ]
        )
        shares = np.concatenate([shares, shares[:, -1:]], axis=1)
        most, least = shares.max(axis=0), shares.min(axis=0)
        options: dict[str, Any] = {"step": "post", "linewidth": 0}
        memory.fill_between(
            edges, least, most, color=_LOOK.memory, alpha=_MEMORY_OPACITY, **options
        )
        memory.fill_between(edges, 1.0, np.maximum(most, 1.0), color=_LOOK.limit, **options)
        memory.plot(edges, most, drawstyle="steps-post", color=_LOOK.memory, linewidth=1.0)
        memory.hlines(1.0, 0, drawing.makespan_ms, colors=_LOOK.limit, linewidth=0.9)
        memory.set_ylim(0.0, 1.12 * max(1.0, float(most.max())))
        memory.set_yticks([0.0, 0.5, 1.0], ["0", "50%", "100% of the limit"])
        memory.tick_params(axis="y", length=0, labelsize=7)
        _plain_frame(memory)
        return
    _draw_curves(memory, problem, drawing, length_ms=length_ms)
    devices = range(len(problem.devices))
    _label_rows(memory, [_peak_label(problem, view.programs, index) for index in devices], 0.1, 7)


def _label_rows(axis: Any, labels: Sequence[str], offset: float, size: int) -> None:
    """Name the devices of a chart, as many as have room."""
    step = -(-len(labels) // _MOST_LABELLED)
    rows = range(0, len(labels), step)
    axis.set_yticks([row + offset for row in rows], [labels[row] for row in rows])
    axis.set_ylim(len(labels) - 0.4, -0.6)
    axis.tick_params(axis="y", length=0, labelsize=size)
    _plain_frame(axis)


def _plain_frame(axis: Any) -> None:
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)


# --- The Gantt chart of one panel of an image file.
# Up to some thousand bars are shapes; more are shared out to columns of pixels, so that neither the
# file nor the time to draw it grows with them.

MOST_SHAPES = 6_000
_NUM_COLUMNS = 1_400
_ROWS_PER_DEVICE = 24
_MOST_LABELS = 1_500
_LABEL_POINTS, _MARGIN_POINTS, _TWO_LINES_POINTS = 6, 0.75, 12.0
_EDGE = 0.4
_TITLE_POINTS, _MOST_TITLE = 10.0, 100  # of a title, and the letters of that size that fit


def _draw_gantt(axis: Any, drawing: Drawing, programs: Programs, *, length_ms: float) -> None:
    """Draw bars and bubbles; the rows are those of `optpipe.plot.scene`."""
    bars, num_devices = drawing.bars, len(programs)
    lanes = places(has_sides=has_side_lanes(bars))
    compute = lanes[LANES.index("compute")]
    axis.barh(
        np.arange(num_devices),
        drawing.makespan_ms,
        height=compute.bottom - compute.top,
        color=_LOOK.bubble,
        zorder=1,
    )
    if len(bars) > MOST_SHAPES:
        _draw_pixels(axis, bars, num_devices, lanes, length_ms)
        return
    from matplotlib.patches import PathPatch  # noqa: PLC0415 - an optional extra
    from matplotlib.path import Path as Outline  # noqa: PLC0415

    edges = np.array(lanes)[bars.lane] + bars.device[:, np.newaxis]
    codes = codes_of(bars)
    for code in np.unique(codes):
        rows = codes == code
        start, end, (top, bottom) = bars.start[rows], bars.end[rows], edges[rows].T
        corners = [(start, top), (end, top), (end, bottom), (start, bottom), (start, top)]
        vertices = np.stack([np.stack(corner, axis=1) for corner in corners], axis=1)
        steps = [Outline.MOVETO, *[Outline.LINETO] * 3, Outline.CLOSEPOLY]
        outline = Outline(vertices.reshape(-1, 2), np.tile(steps, len(start)))
        axis.add_patch(
            PathPatch(
                outline, facecolor=BAR_COLOURS[code], edgecolor="white", linewidth=_EDGE, zorder=2
            )
        )


def _label(axis: Any, view: View, bars: Bars) -> None:
    """Write stage, letter and micro-batch into the bars of a laid out chart that have room."""
    if len(bars) > MOST_SHAPES:
        return
    from matplotlib.font_manager import FontProperties  # noqa: PLC0415 - an optional extra
    from matplotlib.textpath import text_to_path  # noqa: PLC0415

    font = FontProperties(size=_LABEL_POINTS)
    signs = "0123456789" + "".join(LETTERS.values())
    points_of = {
        sign: text_to_path.get_text_width_height_descent(sign, font, ismath=False)[0]
        for sign in signs
    }
    area, (left, right), num_devices = axis.get_window_extent(), axis.get_xlim(), len(view.programs)
    points_per_pixel = 72 / axis.figure.dpi
    widths = (bars.end - bars.start) * area.width * points_per_pixel / (right - left)
    lane = places(has_sides=has_side_lanes(bars))[LANES.index("compute")]
    height = (lane.bottom - lane.top) * area.height * points_per_pixel / num_devices
    has_chunks = len(view.problem.stages) > len(view.problem.devices)
    fits = (widths >= points_of["0"] + 2 * _MARGIN_POINTS) & (height >= _LABEL_POINTS)
    texts = []
    for row in np.flatnonzero((bars.lane == LANES.index("compute")) & fits):
        kind = KINDS[bars.kind[row]]
        letter, number = LETTERS.get(kind, "") if kind is not None else "", bars.microbatch[row]
        options = [f"{bars.stage[row]}{letter}{number}"] if has_chunks else []
        options.append(f"{letter}{number}")
        if height >= _TWO_LINES_POINTS:
            options.append(f"{letter}\n{number}")
        for text in options:
            lines = text.split("\n")
            needed = max(sum(points_of[sign] for sign in line) for line in lines)
            if needed + 2 * _MARGIN_POINTS <= widths[row]:
                texts.append(((bars.start[row] + bars.end[row]) / 2, bars.device[row], text))
                break
    if len(texts) > _MOST_LABELS:
        return
    place = {"ha": "center", "va": "center", "linespacing": 0.9, "in_layout": False}
    for middle, device, text in texts:
        axis.text(middle, device, text, fontsize=_LABEL_POINTS, zorder=3, **place)


def _draw_pixels(
    axis: Any, bars: Bars, num_devices: int, lanes: Sequence[LaneEdges], length_ms: float
) -> None:
    """Draw an image whose columns mix the colours of their bars.

    The idle share of a column is transparent and shows the bubble's colour.
    """
    rows = [[int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)] for colour in BAR_COLOURS]
    palette = np.array(rows, np.float32)
    pixels = pixels_of(
        bars, palette, num_devices=num_devices, length_ms=length_ms, num_columns=_NUM_COLUMNS
    )
    drawn = np.round(255 * np.concatenate([pixels.colour, pixels.busy[..., np.newaxis]], axis=3))
    image = np.zeros((num_devices, _ROWS_PER_DEVICE, _NUM_COLUMNS, 4), np.uint8)
    heights = (np.arange(_ROWS_PER_DEVICE) + 0.5) / _ROWS_PER_DEVICE - 0.5
    for lane, place in enumerate(lanes):
        inside = np.flatnonzero((heights >= place.top) & (heights <= place.bottom))
        seen = drawn[:, lane, np.newaxis]
        image[:, inside] = np.where(seen[..., 3:] > 0, seen, image[:, inside])
    axis.imshow(
        image.reshape(num_devices * _ROWS_PER_DEVICE, _NUM_COLUMNS, 4),
        extent=(0.0, length_ms, num_devices - 0.5, -0.5),
        aspect="auto",
        origin="upper",
        zorder=2,
    )


# --- The memory chart of one panel of an image file: what devices hold against their limits.

_MEMORY_OPACITY = 0.55
_HEIGHT = 0.8
_NUM_MEMORY_COLUMNS = 700
_MOST_CURVES = 24


def _draw_curves(axis: Any, problem: Problem, drawing: Drawing, *, length_ms: float) -> None:
    """Draw each device's curve in a row of its own, from 0 to its limit."""
    end = drawing.makespan_ms
    for device, curve in enumerate(drawing.memory):
        limit = problem.devices[device].usable_bytes
        base, scale = device + 0.5, _HEIGHT / max(1, limit)
        moments, held_bytes = _thinned(curve, end, length_ms)
        heights = base - held_bytes * scale
        options: dict[str, Any] = {"step": "post", "linewidth": 0}
        floor = base - problem.static_bytes_of(device) * scale
        axis.fill_between(
            moments, base, heights, color=_LOOK.memory, alpha=_MEMORY_OPACITY, **options
        )
        axis.fill_between([0, end], base, floor, color=_LOOK.static, **options)
        top = base - limit * scale
        over = np.minimum(heights, top)
        axis.fill_between(moments, top, over, color=_LOOK.limit, **options)
        axis.hlines(top, 0, end, colors=_LOOK.limit, linewidth=0.9)


def _peak_label(problem: Problem, programs: Programs, device: int) -> str:
    """Return a device's name, peak and limit, with a word where the limit is exceeded."""
    peak = device_peak_bytes(problem, device, programs[device])
    limit = problem.devices[device].usable_bytes
    mark = "OVER: " if peak > limit else ""
    name = _plain_text(problem.devices[device].name[:_NAME_CHARS])
    number, unit = format_bytes(peak).split()
    whole, whole_unit = format_bytes(limit).split()
    number += "" if unit == whole_unit else f" {unit}"
    return f"{name}  {mark}{number} of {whole} {whole_unit}"


def _thinned(
    curve: Curve, end_ms: float, length_ms: float
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return a curve as steps up to the end; of more steps than columns, each column's peak."""
    if len(curve.moments) <= 2 * _NUM_MEMORY_COLUMNS or length_ms <= 0:
        moments, held_bytes = curve.moments, curve.held_bytes
    else:
        num_columns = max(1, round(_NUM_MEMORY_COLUMNS * end_ms / length_ms))
        edges = np.linspace(0.0, end_ms, num_columns + 1)
        moments, held_bytes = edges[:-1], peaks_of(curve, end_ms, edges)
    return np.append(moments, end_ms), np.append(held_bytes, held_bytes[-1])


# --- The frontier of a sweep: the best objective and its bound over the memory limit.

_FRONTIER_SIZE = (8.0, 4.8)

_SHADE = 0.12
_MOST_NAMED = 16


def draw_frontier(lines: Sequence[FrontierLine], title: str = "") -> Any:
    """Return a matplotlib Figure: a point per problem, its bound dashed, what is open shaded.

    Crosses on the lower edge are limits at which nothing fits, proven. Raises `MissingExtraError`
    if matplotlib is not installed.
    """
    require_drawing(".svg")
    from matplotlib.figure import Figure  # noqa: PLC0415 - an optional extra
    from matplotlib.lines import Line2D  # noqa: PLC0415
    from matplotlib.patches import Patch  # noqa: PLC0415

    figure = Figure(figsize=_FRONTIER_SIZE, layout="constrained")
    axes = figure.add_subplot()
    unit = unit_of([point for line in lines for point in line.points])
    for index, line in enumerate(lines):
        _draw_line(
            axes, line, unit, LINE_COLOURS[index % len(LINE_COLOURS)], is_named=index < _MOST_NAMED
        )
    points = [point for line in lines for point in line.points]
    bottom, top = edges(points)
    axes.set_ylim(bottom, top)
    nothing = sorted({point.limit_bytes / unit.size for point in points if point.is_infeasible})
    axes.plot(
        nothing,
        [bottom] * len(nothing),
        linestyle="none",
        marker="x",
        color="#c5221f",
        label="nothing fits (proven)" if nothing else "_",
        clip_on=False,
        zorder=4,
    )
    axes.set(
        xlabel=f"memory per device ({unit.name})", ylabel="objective (ms)", title=_plain_text(title)
    )
    axes.grid(visible=True, color="#eceff1")
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    known: list[Any] = [
        Line2D([], [], color="#5f6368", linestyle="--", linewidth=1.0),
        Patch(color="#5f6368", alpha=_SHADE),
    ]
    figure.legend(
        handles=[*handles, *known],
        labels=[*labels, "lower bound", "not decided"],
        loc="outside lower center",
        ncols=3,
        fontsize=8,
        frameon=False,
    )
    return figure


def frontier_svg(lines: Sequence[FrontierLine], title: str = "") -> bytes:
    """Return the frontier as the bytes of an SVG file; equal input, equal bytes.

    Raises `MissingExtraError` if matplotlib is not installed.
    """
    return _bytes_of(draw_frontier(lines, title), ".svg")


def save_frontier(lines: Sequence[FrontierLine], path: Path | str, title: str = "") -> None:
    """Draw the frontier into a file whose suffix chooses the format, one of `SUFFIXES`.

    Raises `InputError` if the suffix is none of ours, or the file cannot be written. Raises
    `MissingExtraError` if what draws it is not installed.
    """
    target = Path(path)
    if target.suffix != ".html":
        _save(lambda: draw_frontier(lines, title), target)
        return
    require_drawing(".html")
    from optpipe.plot.interactive import chart_html, frontier_chart  # noqa: PLC0415 - an extra

    page = chart_html(frontier_chart(lines, ""), title=title or "frontier")
    _write_file(target, page.encode())


def _draw_line(axes: Any, line: FrontierLine, unit: Unit, colour: str, *, is_named: bool) -> None:
    """Draw what was found, what is proven, and the room between."""
    # A name that begins with an underscore would be left out of the legend.
    name = f" {_plain_text(line.label)}" if is_named else "_"
    steps = steps_of(line.points)
    axes.plot(
        [point.limit_bytes / unit.size for point in steps.found],
        [point.objective_ms for point in steps.found],
        drawstyle="steps-post",
        marker="o",
        markersize=4,
        color=colour,
        label=name,
        zorder=3,
    )
    axes.plot(
        [point.limit_bytes / unit.size for point in steps.proven],
        [point.bound_ms for point in steps.proven],
        drawstyle="steps-pre",
        linestyle="--",
        linewidth=1.0,
        color=colour,
        label="_",
        zorder=2,
    )
    axes.fill_between(
        [end / unit.size for end in steps.ends_bytes],
        steps.low_ms,
        steps.high_ms,
        color=colour,
        alpha=_SHADE,
        linewidth=0,
    )
