"""The frontier of a sweep as a picture: the best objective and its bound over the memory limit."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from optpipe.errors import InputError
from optpipe.plot.figure import SUFFIXES as IMAGE_SUFFIXES
from optpipe.plot.figure import plain_text, require_matplotlib, save_drawn, svg_of
from optpipe.plot.interactive import chart_html, frontier_chart, require_bokeh

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optpipe.frontier import Line, Point

__all__ = [
    "LINE_COLOURS",
    "SUFFIXES",
    "Unit",
    "draw_frontier",
    "edges",
    "frontier_svg",
    "require_drawing",
    "save_frontier",
    "unit_of",
]

SUFFIXES = (*IMAGE_SUFFIXES, ".html")
_SIZE = (8.0, 4.8)
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

_SHADE = 0.12
_MOST_NAMED = 16
_MARGIN = 0.06


class Unit(NamedTuple):
    """A unit of memory and its bytes."""

    name: str
    size: float


_UNITS = (Unit("GB", 1e9), Unit("MB", 1e6), Unit("kB", 1e3), Unit("B", 1.0))


def draw_frontier(lines: Sequence[Line], title: str = "") -> Any:
    """Return a matplotlib Figure: a point per problem, its bound dashed, what is open shaded.

    Crosses on the lower edge are limits at which nothing fits, proven.

    Raises
    ------
    MissingExtraError
        If matplotlib is not installed.
    """
    require_matplotlib()
    from matplotlib.figure import Figure  # noqa: PLC0415 - an optional extra

    figure = Figure(figsize=_SIZE, layout="constrained")
    axes = figure.add_subplot()
    unit = unit_of([point for line in lines for point in line.points])
    for index, line in enumerate(lines):
        _draw_line(
            axes,
            line,
            unit,
            LINE_COLOURS[index % len(LINE_COLOURS)],
            is_named=index < _MOST_NAMED,
        )
    _draw_edges(axes, lines, unit)
    axes.set(
        xlabel=f"memory per device ({unit.name})",
        ylabel="objective (ms)",
        title=plain_text(title),
    )
    axes.grid(visible=True, color="#eceff1")
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    _draw_legend(figure)
    return figure


def frontier_svg(lines: Sequence[Line], title: str = "") -> bytes:
    """Return the frontier as the bytes of an SVG file; equal input, equal bytes.

    Raises
    ------
    MissingExtraError
        If matplotlib is not installed.
    """
    return svg_of(draw_frontier(lines, title))


def save_frontier(lines: Sequence[Line], path: Path | str, title: str = "") -> None:
    """Draw the frontier into a file whose suffix chooses the format, one of `SUFFIXES`.

    Raises
    ------
    InputError
        If the suffix is none of ours, or the file cannot be written.
    MissingExtraError
        If what draws it is not installed.
    """
    target = Path(path)
    if target.suffix != ".html":
        save_drawn(lambda: draw_frontier(lines, title), target)
        return
    page = chart_html(frontier_chart(lines, ""), title=title or "frontier")
    try:
        target.write_text(page, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {target}: {error.strerror}; check the path") from None


def require_drawing(path: Path) -> None:
    """Refuse to draw into a file of this suffix without the package that does it.

    Raises
    ------
    MissingExtraError
        If it is not installed.
    """
    if path.suffix == ".html":
        require_bokeh()
    else:
        require_matplotlib()


def edges(points: Sequence[Point]) -> tuple[float, float]:
    """Return the lowest and highest ms of a frame that leaves room around all numbers."""
    heights = [
        height
        for point in points
        for height in (point.objective_ms, point.bound_ms)
        if height is not None and _is_open(point)
    ]
    top, bottom = max(heights, default=1.0), min(heights, default=0.0)
    margin = _MARGIN * (top - bottom or top or 1.0)
    return bottom - margin, top + margin


def _draw_line(axes: Any, line: Line, unit: Unit, colour: str, *, is_named: bool) -> None:
    """Draw what was found, what is proven, and the room between."""
    # A name that begins with an underscore would be left out of the legend.
    name = f" {plain_text(line.label)}" if is_named else "_"
    found = [point for point in line.points if point.objective_ms is not None]
    axes.plot(
        [point.limit_bytes / unit.size for point in found],
        [point.objective_ms for point in found],
        marker="o",
        markersize=4,
        color=colour,
        label=name,
        zorder=3,
    )
    proven = [point for point in line.points if point.bound_ms is not None and _is_open(point)]
    bounds = [point.bound_ms for point in proven]
    axes.plot(
        [point.limit_bytes / unit.size for point in proven],
        bounds,
        linestyle="--",
        linewidth=1.0,
        color=colour,
        label="_",
        zorder=2,
    )
    between = [point for point in found if point.bound_ms is not None]
    axes.fill_between(
        [point.limit_bytes / unit.size for point in between],
        [point.bound_ms for point in between],
        [point.objective_ms for point in between],
        color=colour,
        alpha=_SHADE,
        linewidth=0,
    )


def _draw_edges(axes: Any, lines: Sequence[Line], unit: Unit) -> None:
    """Fit the frame to the numbers, and mark on its lower edge where nothing fits."""
    points = [point for line in lines for point in line.points]
    bottom, top = edges(points)
    axes.set_ylim(bottom, top)
    nothing = sorted({point.limit_bytes / unit.size for point in points if not _is_open(point)})
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


def _draw_legend(figure: Any) -> None:
    from matplotlib.lines import Line2D  # noqa: PLC0415 - an optional extra
    from matplotlib.patches import Patch  # noqa: PLC0415

    (axes,) = figure.axes
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


def unit_of(points: Sequence[Point]) -> Unit:
    """Return the decimal unit of the axis: GB, where the limits are not tiny."""
    most_bytes = max((point.limit_bytes for point in points), default=_UNITS[0].size)
    return next((unit for unit in _UNITS if most_bytes >= unit.size), _UNITS[-1])


def _is_open(point: Point) -> bool:
    return not point.is_infeasible
