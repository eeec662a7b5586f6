"""Schedules as image files (PNG, SVG, PDF) with matplotlib: ``pip install 'optpipe[plot]'``.

Panels share one time axis, so a schedule before and one after compare at a glance. Each panel has,
per device, a compute lane with what comes back from the host above it and what goes there below,
and a memory curve against the limit.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optpipe.action import ActionType
from optpipe.errors import InputError, MissingExtraError
from optpipe.plot.bars import drawing_of
from optpipe.plot.colours import COLOURS
from optpipe.plot.figure_gantt import BUBBLE_COLOUR, MOST_SHAPES, draw_gantt
from optpipe.plot.figure_memory import (
    LIMIT_COLOUR,
    MEMORY_COLOUR,
    MEMORY_OPACITY,
    MOST_CURVES,
    STATIC_COLOUR,
    draw_curves,
    draw_range,
    peak_label,
)
from optpipe.plot.glyphs import LETTERS, NAMES
from optpipe.plot.headline import headline

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from optpipe.action import Programs
    from optpipe.plot.bars import Drawing
    from optpipe.problem import Problem

__all__ = [
    "SUFFIXES",
    "Panel",
    "draw_figure",
    "draw_svg",
    "plain_text",
    "require_matplotlib",
    "save_drawn",
    "save_figure",
    "svg_of",
]

SUFFIXES = (".png", ".svg", ".pdf")
_INCHES_PER_DEVICE, _MAX_GANTT, _MAX_MEMORY, _RANGE_INCHES = 0.36, 6.5, 3.6, 1.3
_TITLE_INCHES, _LEGEND_INCHES, _MAX_HEIGHT = 0.55, 0.75, 60.0
_MOST_LABELLED = 33
_WIDTH, _SHARE_OF_BARS = 11.0, 0.9
_BOUND_COLOUR = "#6a1b9a"


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One schedule of a figure: legal programs, over a memory limit or not.

    ``bound_ms`` is the proven lower bound of the problem's objective, where one is known.
    """

    title: str
    programs: Programs
    bound_ms: float | None = None


def draw_figure(problem: Problem, panels: Sequence[Panel]) -> Any:
    """Return a matplotlib Figure with the panels one above the other on one time axis.

    Raises
    ------
    MissingExtraError
        If matplotlib is not installed.
    """
    require_matplotlib()
    from matplotlib.figure import Figure  # noqa: PLC0415 - an optional extra

    gantt_inches, memory_inches = _heights(len(problem.devices))
    height = len(panels) * (_TITLE_INCHES + gantt_inches + memory_inches) + _LEGEND_INCHES
    figure = Figure(figsize=(_WIDTH, min(height, _MAX_HEIGHT)), layout="constrained")
    drawings = [drawing_of(problem, panel.programs) for panel in panels]
    length = max(drawing.makespan_ms for drawing in drawings)
    ratios = [inches for _ in panels for inches in (gantt_inches, memory_inches)]
    axes = figure.subplots(2 * len(panels), 1, sharex=True, squeeze=False, height_ratios=ratios)
    for index, (panel, drawing) in enumerate(zip(panels, drawings, strict=True)):
        gantt, memory = axes[2 * index : 2 * index + 2, 0]
        _draw_panel(gantt, memory, problem, panel, drawing=drawing, length_ms=length)
    last = axes[-1, 0]
    last.set_xlim(0, length * 1.005)
    last.set_xlabel(_time_label(drawings))
    _draw_legend(figure, problem, panels)
    return figure


def _time_label(drawings: Sequence[Drawing]) -> str:
    if all(len(drawing.bars) <= MOST_SHAPES for drawing in drawings):
        return "time (ms)"
    return "time (ms); a column of pixels mixes the colours of all that happens in it"


def _heights(num_devices: int) -> tuple[float, float]:
    """Return inches of Gantt and memory; rows share a screenful where they are many."""
    gantt = min(_INCHES_PER_DEVICE * num_devices, _MAX_GANTT)
    if num_devices > MOST_CURVES:
        return gantt, _RANGE_INCHES
    return gantt, min(gantt, _MAX_MEMORY)


def save_figure(problem: Problem, panels: Sequence[Panel], path: Path | str) -> None:
    """Draw the panels into a file whose suffix chooses the format; equal input, equal bytes.

    Raises
    ------
    InputError
        If the suffix is none of `SUFFIXES`, or the file cannot be written.
    MissingExtraError
        If matplotlib is not installed.
    """
    save_drawn(lambda: draw_figure(problem, panels), path)


def save_drawn(draw: Callable[[], Any], path: Path | str) -> None:
    """Draw a matplotlib Figure into a file; raises as `save_figure`."""
    target = Path(path)
    if target.suffix not in SUFFIXES:
        raise InputError(
            f"cannot draw {target.name}: the suffix chooses the format; use one of "
            f"{', '.join(SUFFIXES)}"
        )
    figure = draw()
    try:
        _write(figure, target, target.suffix)
    except OSError as error:
        raise InputError(f"cannot write {target}: {error.strerror}; check the path") from None


def draw_svg(problem: Problem, panels: Sequence[Panel]) -> bytes:
    """Return the panels as the bytes of an SVG file; equal input, equal bytes.

    Raises
    ------
    MissingExtraError
        If matplotlib is not installed.
    """
    return svg_of(draw_figure(problem, panels))


def svg_of(figure: Any) -> bytes:
    """Return a matplotlib Figure as the bytes of an SVG file."""
    file = io.BytesIO()
    _write(figure, file, ".svg")
    return file.getvalue()


def _write(figure: Any, target: Path | io.BytesIO, suffix: str) -> None:
    from matplotlib import rc_context  # noqa: PLC0415 - an optional extra

    _settle(figure)
    options: Any = {"svg.hashsalt": "optpipe", "svg.fonttype": "none", "savefig.dpi": 150}
    stamps = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    with rc_context(options):
        figure.savefig(target, format=suffix[1:], metadata=stamps.get(suffix), facecolor="white")


def _settle(figure: Any) -> None:
    """Lay a figure out once, and round: the solver of the layout differs in the last bits."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    for axes in figure.axes:
        axes.set_position([round(edge, 5) for edge in axes.get_position().bounds])


def plain_text(text: str) -> str:
    """Return somebody's text so that matplotlib draws it as it is, and SVG can hold it.

    Between dollars it would be read as a formula, and refused where it is none.
    """
    shown = (letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)
    return "".join(shown).replace("$", r"\$")


def require_matplotlib() -> None:
    """Refuse to draw without matplotlib.

    Raises
    ------
    MissingExtraError
        If it is not installed.
    """
    if find_spec("matplotlib") is None:
        raise MissingExtraError(
            "pictures as files need matplotlib, which is not installed; "
            "run: pip install 'optpipe[plot]'"
        )


def _draw_panel(
    gantt: Any, memory: Any, problem: Problem, panel: Panel, *, drawing: Drawing, length_ms: float
) -> None:
    """Draw one schedule: what happens above, what is held below."""
    gantt.set_title(
        f"{plain_text(panel.title)}: {headline(problem, drawing, panel.bound_ms)}",
        loc="left",
        fontsize=10,
        fontweight="bold",
    )
    draw_gantt(
        gantt, drawing, panel.programs, length_ms=length_ms, width_inches=_SHARE_OF_BARS * _WIDTH
    )
    gantt.axvline(drawing.makespan_ms, color="black", linewidth=0.8, linestyle=":")
    if _has_bound_line(problem, panel):
        gantt.axvline(panel.bound_ms, color=_BOUND_COLOUR, linewidth=1.2, linestyle="--", zorder=4)
    _label_rows(gantt, [plain_text(device.name) for device in problem.devices], 0.0, 8)
    if len(problem.devices) > MOST_CURVES:
        draw_range(memory, problem, drawing)
        memory.tick_params(axis="y", length=0, labelsize=7)
        _plain_frame(memory)
        return
    draw_curves(memory, problem, drawing, length_ms=length_ms)
    devices = range(len(problem.devices))
    _label_rows(memory, [peak_label(problem, panel.programs, held) for held in devices], 0.1, 7)


def _has_bound_line(problem: Problem, panel: Panel) -> bool:
    """Whether a bound is a moment of the time axis: one of the makespan is, one of a span not."""
    return bool(panel.bound_ms) and problem.objective == "makespan"


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


def _draw_legend(figure: Any, problem: Problem, panels: Sequence[Panel]) -> None:
    from matplotlib.lines import Line2D  # noqa: PLC0415 - an optional extra
    from matplotlib.patches import Patch  # noqa: PLC0415

    used = {action.type for panel in panels for program in panel.programs for action in program}
    handles: list[Any] = [
        Patch(color=COLOURS[kind][0], label=f"{LETTERS.get(kind, '')} {NAMES[kind]}".strip())
        for kind in ActionType
        if kind in used and kind in NAMES
    ]
    handles.append(Patch(color=BUBBLE_COLOUR, label="bubble"))
    held = "activations"
    if len(problem.devices) > MOST_CURVES:
        held = "held by the emptiest to the fullest device"
    else:
        handles.append(Patch(color=STATIC_COLOUR, label="weights, gradients, optimizer"))
    handles += [
        Patch(color=MEMORY_COLOUR, alpha=MEMORY_OPACITY, label=held),
        Line2D([], [], color=LIMIT_COLOUR, linewidth=0.9, label="memory limit"),
    ]
    if any(_has_bound_line(problem, panel) for panel in panels):
        handles.append(
            Line2D([], [], color=_BOUND_COLOUR, linewidth=1.2, linestyle="--", label="lower bound")
        )
    figure.legend(handles=handles, loc="outside lower center", ncols=5, fontsize=8, frameon=False)
