"""Schedules as image files (PNG, SVG, PDF) with matplotlib: ``pip install 'optpipe[plot]'``.

Panels share one time axis, so a schedule before and one after compare at a glance. Each panel has,
per device, a compute lane with its transfers beneath, and a memory curve against the limit.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optpipe.action import ActionType
from optpipe.errors import InputError, MissingExtraError
from optpipe.memory import device_peak_bytes
from optpipe.plot.colours import COLOURS
from optpipe.plot.glyphs import LETTERS, NAMES
from optpipe.plot.units import format_bytes, format_ms, format_share
from optpipe.timeline import make_timeline

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from optpipe.action import Programs
    from optpipe.problem import Problem
    from optpipe.timeline import Interval, Timeline

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
_COMPUTE_HEIGHT, _TRANSFER_HEIGHT = 0.62, 0.13
_INCHES_PER_DEVICE = 0.36
_LABELS_PER_INCH = 16
_WIDTH = 11.0
_LIMIT_COLOUR, _BUBBLE_COLOUR, _MEMORY_COLOUR = "#c5221f", "#eceff1", "#1a73e8"


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One schedule of a figure: legal programs, over a memory limit or not."""

    title: str
    programs: Programs


def draw_figure(problem: Problem, panels: Sequence[Panel]) -> Any:
    """Return a matplotlib Figure with the panels one above the other on one time axis.

    Raises
    ------
    MissingExtraError
        If matplotlib is not installed.
    """
    require_matplotlib()
    from matplotlib.figure import Figure  # noqa: PLC0415 - an optional extra

    num_devices = len(problem.devices)
    height = len(panels) * (0.55 + 1.65 * _INCHES_PER_DEVICE * num_devices) + 0.75
    figure = Figure(figsize=(_WIDTH, min(height, 60.0)), layout="constrained")
    timelines = [make_timeline(problem, panel.programs) for panel in panels]
    length = max(timeline.makespan_ms for timeline in timelines)
    ratios = [ratio for _ in panels for ratio in (1.0, 0.65)]
    axes = figure.subplots(2 * len(panels), 1, sharex=True, squeeze=False, height_ratios=ratios)
    for index, (panel, timeline) in enumerate(zip(panels, timelines, strict=True)):
        _draw_gantt(axes[2 * index, 0], problem, panel, timeline, length)
        _draw_memory(axes[2 * index + 1, 0], problem, panel, timeline)
    last = axes[-1, 0]
    last.set_xlim(0, length * 1.005)
    last.set_xlabel("time (ms)")
    _draw_legend(figure, panels)
    return figure


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

    options: Any = {"svg.hashsalt": "optpipe", "svg.fonttype": "none", "savefig.dpi": 150}
    stamps = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    with rc_context(options):
        figure.savefig(target, format=suffix[1:], metadata=stamps.get(suffix), facecolor="white")


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


def _draw_gantt(
    axis: Any, problem: Problem, panel: Panel, timeline: Timeline, length_ms: float
) -> None:
    axis.set_title(
        f"{plain_text(panel.title)}: makespan {format_ms(timeline.makespan_ms)} ms, "
        f"bubble {format_share(timeline.makespan_bubble_rate)}",
        loc="left",
        fontsize=10,
        fontweight="bold",
    )
    for device, row in enumerate(timeline.intervals):
        axis.barh(
            device, timeline.makespan_ms, height=_COMPUTE_HEIGHT, color=_BUBBLE_COLOUR, zorder=1
        )
        _draw_blocks(axis, device, row, length_ms)
    axis.set_yticks(range(len(problem.devices)), _device_names(problem))
    axis.set_ylim(len(problem.devices) - 0.4, -0.6)
    axis.tick_params(axis="y", length=0, labelsize=8)
    axis.axvline(timeline.makespan_ms, color="black", linewidth=0.8, linestyle=":")
    _plain_frame(axis)


def _device_names(problem: Problem) -> list[str]:
    return [plain_text(device.name) for device in problem.devices]


def _draw_blocks(axis: Any, device: int, row: Sequence[Interval], length_ms: float) -> None:
    by_colour: dict[tuple[str, float, float], list[tuple[float, float]]] = {}
    for item in row:
        bottom, height, colour = _place(device, item)
        by_colour.setdefault((colour, bottom, height), []).append(
            (item.start, item.end - item.start)
        )
    for (colour, bottom, height), spans in by_colour.items():
        axis.broken_barh(
            spans, (bottom, height), facecolors=colour, edgecolor="white", linewidth=0.4, zorder=2
        )
    for item in row:
        if item.lane == "compute" and item.action is not None:
            _label(axis, device, item, length_ms)


def _place(device: int, item: Interval) -> tuple[float, float, str]:
    """Return bottom, height and colour: compute in the middle, offload below, reload above."""
    half = _COMPUTE_HEIGHT / 2
    if item.action is None:
        return device - half, _TRANSFER_HEIGHT, "#9e9e9e"
    colour = COLOURS[item.action.type][item.action.microbatch % 2]
    if item.lane == "d2h":
        return device + half + 0.02, _TRANSFER_HEIGHT, colour
    if item.lane == "h2d":
        return device - half - 0.02 - _TRANSFER_HEIGHT, _TRANSFER_HEIGHT, colour
    return device - half, _COMPUTE_HEIGHT, colour


def _label(axis: Any, device: int, item: Interval, length_ms: float) -> None:
    if item.action is None:
        return
    text = f"{LETTERS[item.action.type]}{item.action.microbatch}"
    inches = (item.end - item.start) / length_ms * _WIDTH * 0.9 if length_ms > 0 else 0.0
    if inches * _LABELS_PER_INCH < len(text):
        return
    middle = (item.start + item.end) / 2
    axis.text(middle, device, text, ha="center", va="center", fontsize=6, zorder=3)


def _draw_memory(axis: Any, problem: Problem, panel: Panel, timeline: Timeline) -> None:
    """Draw one small curve per device, each in a row of its own from 0 to its limit."""
    for device, curve in enumerate(timeline.memory):
        limit = problem.devices[device].usable_bytes
        static = problem.static_bytes_of(device)
        base = device + 0.5
        scale = 0.8 / max(1, limit)
        times = [moment for moment, _ in curve] + [timeline.makespan_ms]
        heights = [base - held * scale for _, held in curve]
        heights.append(heights[-1])
        axis.fill_between(
            times, base, heights, step="post", color=_MEMORY_COLOUR, alpha=0.35, linewidth=0
        )
        floor = base - static * scale
        axis.fill_between([0, timeline.makespan_ms], base, floor, color="#90a4ae", linewidth=0)
        over = [held > limit for _, held in curve]
        axis.fill_between(
            times,
            base - limit * scale,
            heights,
            where=[*over, over[-1]],
            step="post",
            color=_LIMIT_COLOUR,
            linewidth=0,
        )
        axis.hlines(
            base - limit * scale, 0, timeline.makespan_ms, colors=_LIMIT_COLOUR, linewidth=0.9
        )
    axis.set_yticks(
        [device + 0.1 for device in range(len(problem.devices))],
        [_peak_label(problem, panel, device) for device in range(len(problem.devices))],
    )
    axis.set_ylim(len(problem.devices) - 0.4, -0.6)
    axis.tick_params(axis="y", length=0, labelsize=7)
    _plain_frame(axis)


def _peak_label(problem: Problem, panel: Panel, device: int) -> str:
    peak = device_peak_bytes(problem, device, panel.programs[device])
    limit = problem.devices[device].usable_bytes
    mark = "OVER: " if peak > limit else ""
    return f"{mark}{format_bytes(peak)} of {format_bytes(limit)}"


def _plain_frame(axis: Any) -> None:
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)


def _draw_legend(figure: Any, panels: Sequence[Panel]) -> None:
    from matplotlib.lines import Line2D  # noqa: PLC0415 - an optional extra
    from matplotlib.patches import Patch  # noqa: PLC0415

    used = {action.type for panel in panels for program in panel.programs for action in program}
    handles: list[Any] = [
        Patch(color=COLOURS[kind][0], label=f"{LETTERS.get(kind, '')} {NAMES[kind]}".strip())
        for kind in ActionType
        if kind in used and kind in NAMES
    ]
    handles += [
        Patch(color=_BUBBLE_COLOUR, label="bubble"),
        Patch(color="#90a4ae", label="weights, gradients, optimizer"),
        Patch(color=_MEMORY_COLOUR, alpha=0.35, label="activations"),
        Line2D([], [], color=_LIMIT_COLOUR, linewidth=0.9, label="memory limit"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=5, fontsize=8, frameon=False)
