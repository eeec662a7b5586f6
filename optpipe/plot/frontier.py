"""The frontier of a sweep as a picture: the best objective and its bound over the memory limit."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from optpipe.errors import InputError
from optpipe.plot.image import SUFFIXES as IMAGE_SUFFIXES
from optpipe.plot.image import plain_text, require_matplotlib, save_drawn, svg_of
from optpipe.plot.interactive_style import require_bokeh
from optpipe.plot.scene import LINE_COLOURS, Unit, edges, is_open, unit_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optpipe.sweep import FrontierLine

__all__ = [
    "SUFFIXES",
    "draw_frontier",
    "frontier_svg",
    "require_drawing",
    "save_frontier",
]

SUFFIXES = (*IMAGE_SUFFIXES, ".html")
_SIZE = (8.0, 4.8)

_SHADE = 0.12
_MOST_NAMED = 16


def draw_frontier(lines: Sequence[FrontierLine], title: str = "") -> Any:
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


def frontier_svg(lines: Sequence[FrontierLine], title: str = "") -> bytes:
    """Return the frontier as the bytes of an SVG file; equal input, equal bytes.

    Raises
    ------
    MissingExtraError
        If matplotlib is not installed.
    """
    return svg_of(draw_frontier(lines, title))


def save_frontier(lines: Sequence[FrontierLine], path: Path | str, title: str = "") -> None:
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
    require_bokeh()
    from optpipe.plot.interactive import chart_html, frontier_chart  # noqa: PLC0415 - an extra

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


def _draw_line(axes: Any, line: FrontierLine, unit: Unit, colour: str, *, is_named: bool) -> None:
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
    proven = [point for point in line.points if point.bound_ms is not None and is_open(point)]
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


def _draw_edges(axes: Any, lines: Sequence[FrontierLine], unit: Unit) -> None:
    """Fit the frame to the numbers, and mark on its lower edge where nothing fits."""
    points = [point for line in lines for point in line.points]
    bottom, top = edges(points)
    axes.set_ylim(bottom, top)
    nothing = sorted({point.limit_bytes / unit.size for point in points if not is_open(point)})
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
