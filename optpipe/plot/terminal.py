"""A schedule as a picture in the terminal: compute, transfers and memory of each device over time.

Each device has a row of compute, a row for each direction of transfers that it uses, and a row of
memory. Blocks are coloured, or filled with distinct signs if the terminal has no colours. If a
device has more actions than columns, actions share columns. Of many devices an evenly spaced few
are shown.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from textwrap import shorten
from typing import TYPE_CHECKING

import numpy as np
from rich.style import Style
from rich.text import Text

from optpipe.memory import device_peak_bytes
from optpipe.plot.scene import COLOURS, curve_of, peaks_of, shares_of
from optpipe.schedule import ActionType
from optpipe.simulate import bubble_rate, make_timeline, side_by_side
from optpipe.units import format_bytes, format_ms, format_share, tick_step

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from rich.console import Console, ConsoleOptions, RenderResult

    from optpipe.problem import Problem
    from optpipe.schedule import Programs
    from optpipe.simulate import Interval, Lane, Timeline

__all__ = ["LETTERS", "NAMES", "ScheduleView", "blocks_of", "short_order"]


_MAX_WIDTH = 200
_MIN_COLUMNS = 20
_NOTE_WIDTH = 21
_LEVELS = 8
_MOVES: tuple[tuple[Lane, ActionType, str], ...] = (
    ("d2h", ActionType.OFFLOAD, "down"),
    ("h2d", ActionType.RELOAD, "up"),
)
_DIM, _BOLD, _BAD = Style(dim=True), Style(bold=True), Style(color="red", bold=True)


@dataclass(frozen=True, kw_only=True)
class ScheduleView:
    """A rich renderable of legal programs; it marks programs that exceed a memory limit.

    * ``problem``, ``programs``: what is shown.
    * ``title``: first line, before the numbers.
    * ``length_ms``: end of the time axis; the makespan when None. Give two views the same one to
      compare them.
    * ``max_devices``: of more devices, this many, evenly spaced, are shown.
    * ``legend``: whether the last line explains the signs.
    """

    problem: Problem
    programs: Programs
    title: str = ""
    length_ms: float | None = None
    max_devices: int = 16
    legend: bool = True

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        plain = console.color_system is None or console.no_color
        glyphs = _ASCII if options.ascii_only else _UNICODE
        timeline = make_timeline(self.problem, self.programs)
        yield from _Picture(self, timeline, glyphs, plain, options.max_width).lines()


class _Picture:
    """One rendering: everything that depends on the terminal's width and abilities."""

    def __init__(
        self, view: ScheduleView, timeline: Timeline, glyphs: _Glyphs, plain: bool, max_width: int
    ) -> None:
        self.view = view
        self.problem = view.problem
        self.timeline = timeline
        self.glyphs = glyphs
        self.plain = plain
        self.max_width = max_width
        self.end_ms = timeline.makespan_ms
        self.length_ms = max(view.length_ms or 0.0, self.end_ms)
        self.gutter = min(14, max(8, *(len(d.name) + 1 for d in self.problem.devices)))
        room = min(max_width, _MAX_WIDTH) - self.gutter
        self.notes = room - _NOTE_WIDTH >= _MIN_COLUMNS
        self.columns = max(_MIN_COLUMNS, room - (_NOTE_WIDTH if self.notes else 0))
        self.shared = max(map(len, view.programs)) > self.columns

    def lines(self) -> Iterator[Text]:
        title = Text(no_wrap=True, overflow="ellipsis")
        title.append(self.view.title or self.problem.name or "schedule", _BOLD)
        title.append(f"  makespan {format_ms(self.end_ms)} ms")
        yield title.append(f"  bubble {format_share(bubble_rate(self.problem, self.end_ms))}")
        shown = _spread(len(self.problem.devices), self.view.max_devices)
        for device in shown:
            compute = self._lane(device, "compute")
            busy = sum(item.end - item.start for item in compute)
            share = format_share(busy / self.end_ms) if self.end_ms > 0 else "-"
            name = self.problem.devices[device].name
            yield self._row(name, self._compute(compute), Text(f"busy {share}"), _BOLD)
            if self.shared:
                # The order of passes in short, cut off where it is too long for a line.
                types = [item.action.type for item in compute if item.action is not None]
                order = short_order("".join(LETTERS[kind] for kind in types))
                line = Text(shorten(order, self.columns, placeholder=" ..."))
                yield self._row(" order", line, Text("passes"), _DIM)
            for lane, kind, sign in _MOVES:
                if moves := self._lane(device, lane):
                    note = Text(f"{len(moves)} {kind.name.lower()}ed")
                    label = f" {getattr(self.glyphs, sign)} host"
                    yield self._row(label, self._transfers(moves, kind), note, _DIM)
            syncs = self._lane(device, "grad_sync")
            if syncs:
                body = Text()
                for block in blocks_of(syncs, self.length_ms, self.end_ms, self.columns):
                    body.append((self.glyphs.grad_sync if block.interval else " ") * block.width)
                yield self._row(" grads", body, Text("reduction"), _DIM)
            yield self._row(" memory", *self._memory(device), _DIM)
        step = tick_step(self.length_ms, self.columns // 12)
        ruler = [self.glyphs.ruler] * self.columns
        labels = [" "] * (self.columns + 12)
        tick = 0.0
        while tick <= self.length_ms * (1 + 1e-9) and self.length_ms > 0:
            column = min(self.columns - 1, round(tick / self.length_ms * self.columns))
            ruler[column] = self.glyphs.tick
            text = f"{tick:,.10g}"
            labels[column : column + len(text)] = text
            tick += step
        yield Text(" " * self.gutter + "".join(ruler), style=_DIM)
        yield Text("ms".ljust(self.gutter) + "".join(labels).rstrip(), style=_DIM)
        if len(shown) < len(self.problem.devices):
            count = f"{len(shown)} of {len(self.problem.devices)} devices shown, evenly spaced"
            yield Text(" " * self.gutter + count, style=_DIM)
        if self.view.legend:
            yield from self._legend()

    def _lane(self, device: int, lane: Lane) -> list[Interval]:
        own = [item for item in self.timeline.intervals[device] if item.lane == lane]
        return list(side_by_side(own))

    def _row(self, label: str, body: Text, note: Text, label_style: Style) -> Text:
        short = label if len(label) < self.gutter else label[: self.gutter - 2] + "~"
        line = Text(no_wrap=True, overflow="crop")
        line.append(f"{short:<{self.gutter}}", label_style)
        line.append_text(body)
        if self.notes:
            line.append(" " * (self.columns - len(body) + 1))
            note.stylize(_DIM)
            line.append_text(note)
        return line

    def _compute(self, intervals: list[Interval]) -> Text:
        if self.shared:
            return self._shared(intervals)
        body = Text()
        for block in blocks_of(intervals, self.length_ms, self.end_ms, self.columns):
            action = block.interval.action if block.interval else None
            if action is None:
                body.append(self.glyphs.bubble * block.width, _DIM)
                continue
            letter, number = LETTERS.get(action.type, ""), str(action.microbatch)
            label = letter + number
            stages = self.problem.stages_of[self.problem.stages[action.stage].device]
            if len(stages) > 1 and len(f"{action.stage}{label}") <= block.width:
                label = f"{action.stage}{label}"
            if len(label) > block.width:
                label = number if not self.plain and len(number) <= block.width else letter
            fill = self.glyphs.fill[action.type] if self.plain else " "
            text = label[: block.width].ljust(block.width, fill)
            body.append(text, self._colour(action.type, action.microbatch))
        return body

    def _colour(self, kind: ActionType, microbatch: int) -> Style:
        return Style(color="black", bgcolor=COLOURS[kind][microbatch % 2])

    def _shared(self, intervals: list[Interval]) -> Text:
        body = Text()
        for kind, busy in self._columns(intervals):
            if busy < 1 / 8:
                body.append(self.glyphs.bubble, _DIM)
            elif self.plain:
                letter = LETTERS[kind]
                body.append(letter if busy >= 1 / 2 else letter.lower())
            else:
                shade = self.glyphs.shades[max(1, round(busy * 4))]
                body.append(shade, Style(color=COLOURS[kind][0]))
        return body

    def _columns(self, intervals: list[Interval]) -> list[tuple[ActionType, float]]:
        """Share a lane out: per column the type that fills most of it, and how much is busy."""
        edges = np.linspace(0.0, self.length_ms, self.columns + 1)
        kinds = sorted({item.action.type for item in intervals if item.action is not None})
        shares = [np.zeros(self.columns, np.float32)]
        for kind in kinds:
            own = [item for item in intervals if item.action and item.action.type is kind]
            starts, ends = (np.array([getattr(i, at) for i in own]) for at in ("start", "end"))
            shares.append(shares_of(starts, ends, edges))
        filled = np.array(shares)
        most = [ActionType.FORWARD, *kinds]
        return [
            (most[place], min(1.0, float(busy)))
            for place, busy in zip(filled.argmax(axis=0), filled.sum(axis=0), strict=True)
        ][: self._num_columns()]

    def _num_columns(self) -> int:
        return round(self.end_ms / self.length_ms * self.columns) if self.length_ms else 0

    def _transfers(self, intervals: list[Interval], kind: ActionType) -> Text:
        fill, body = self.glyphs.fill[kind], Text()
        if self.shared:
            for _, busy in self._columns(intervals):
                body.append(fill if busy >= 1 / 4 else " ", Style(color=COLOURS[kind][0]))
            return body
        for block in blocks_of(intervals, self.length_ms, self.end_ms, self.columns):
            if block.interval is None or block.interval.action is None:
                body.append(" " * block.width)
                continue
            label = str(block.interval.action.microbatch)
            shade = COLOURS[kind][block.interval.action.microbatch % 2]
            text = label if len(label) < block.width else ""
            body.append(text.ljust(block.width, fill), Style(color=shade))
        return body

    def _memory(self, device: int) -> tuple[Text, Text]:
        """Return the curve from the device's static bytes (lowest) to its limit, and its peak."""
        limit = self.problem.devices[device].usable_bytes
        static = self.problem.static_bytes_of(device)
        body = Text()
        edges = np.linspace(0.0, self.end_ms, max(1, self._num_columns()) + 1)
        levels = peaks_of(curve_of(self.timeline.memory[device]), self.end_ms, edges)
        for level, run in groupby(levels.tolist()):
            share = (level - static) / (limit - static) if limit > static else 1.0
            sign = self.glyphs.levels[1 + min(_LEVELS - 1, int(share * _LEVELS))]
            if level > limit:
                sign = self.glyphs.over
            body.append(sign * len(list(run)), _BAD if level > limit else Style(color="cyan"))
        peak = device_peak_bytes(self.problem, device, self.view.programs[device])
        note = Text(f"{format_bytes(peak)} = {peak / limit:.0%}" if limit else format_bytes(peak))
        if peak > limit:
            note.stylize(_BAD)
        return body, note

    def _legend(self) -> Iterator[Text]:
        low, high = self.glyphs.levels[1], self.glyphs.levels[-1]
        items = [
            *self._legend_of_actions(),
            Text(f"{self.glyphs.bubble * 2} bubble"),
            Text(f"{low} weights, gradients, optimizer", _DIM),
            Text(f"{high} at the memory limit", _DIM),
            Text(f"{self.glyphs.over} over it", _DIM),
        ]
        line = Text(" " * self.gutter)
        for item in items:
            if len(line) > self.gutter and len(line) + len(item) > self.max_width:
                yield line
                line = Text(" " * self.gutter)
            line.append_text(item).append("   ")
        line.rstrip()
        yield line
        if self.shared:
            shades = self.glyphs.shades
            busy = f"{shades[1]} to {shades[-1]}: the share of the column that is busy"
            if self.plain:
                busy = "lower case: less than half of the column is busy"
            for text in (busy, "order: 3F is F F F, 2(IW) is I W I W"):
                yield Text(" " * self.gutter + text, style=_DIM)

    def _legend_of_actions(self) -> Iterator[Text]:
        used = {action.type for program in self.view.programs for action in program}
        for kind in ActionType:
            if kind not in used or kind not in NAMES:
                continue
            sample, style = self.glyphs.fill[kind] * 2, Style(color=COLOURS[kind][0])
            if kind in LETTERS and self.shared:
                sample = LETTERS[kind] if self.plain else self.glyphs.shades[-1]
            elif kind in LETTERS:
                sample, style = f"{LETTERS[kind]}0", self._colour(kind, 0)
            yield Text.assemble((sample, style), f" {NAMES[kind]}")


def _spread(count: int, at_most: int) -> list[int]:
    """Return a limited number of 0..count-1, evenly spaced, first and last included."""
    if count <= at_most:
        return list(range(count))
    if at_most == 1:
        return [0]
    return [round(i * (count - 1) / (at_most - 1)) for i in range(at_most)]


_MOST_PERIOD = 12


def short_order(letters: str) -> str:
    """Return a text with its repetitions counted: ``FFFBFBFBB`` is ``3F 2(BF) 2B``.

    At each place the repetition that covers most letters is taken, the shortest one first.
    """
    parts, at = [], 0
    while at < len(letters):
        period, times = 1, 1
        for size in range(1, _MOST_PERIOD + 1):
            unit, count = letters[at : at + size], 1
            while letters.startswith(unit, at + count * size):
                count += 1
            if count > 1 and count * size > period * times:
                period, times = size, count
        unit = letters[at : at + period]
        parts.append(unit if times == 1 else f"{times}{unit if period == 1 else f'({unit})'}")
        at += period * times
    return " ".join(parts)


# --- From intervals in ms to columns of characters, independent of colours and terminals.


@dataclass(frozen=True, slots=True)
class _CellBlock:
    """Columns ``first`` to ``last`` (exclusive) that one action fills; idle where None."""

    first: int
    last: int
    interval: Interval | None

    @property
    def width(self) -> int:
        """Number of columns."""
        return self.last - self.first


def blocks_of(
    intervals: Iterable[Interval], length_ms: float, end_ms: float, width: int
) -> list[_CellBlock]:
    """Cut a lane of ``length_ms`` into blocks, each end rounded to the nearest column.

    Blocks cover columns 0 to that of ``end_ms`` without gaps; an action shorter than half a column
    may get none.
    """
    per_ms = width / length_ms if length_ms > 0 else 0.0
    blocks: list[_CellBlock] = []
    at = 0
    for interval in sorted(intervals, key=lambda item: item.start):
        first, last = round(interval.start * per_ms), round(interval.end * per_ms)
        first = max(first, at)
        if last <= first:
            continue
        if first > at:
            blocks.append(_CellBlock(at, first, None))
        blocks.append(_CellBlock(first, last, interval))
        at = last
    end = round(end_ms * per_ms)
    if end > at:
        blocks.append(_CellBlock(at, end, None))
    return blocks


# --- The signs of the terminal picture: one set for terminals with Unicode, one for those without.

_ACTIONS: Mapping[ActionType, tuple[str, str, str, str]] = {
    ActionType.FORWARD: ("F", "forward", "─", "-"),
    ActionType.BACKWARD_INPUT: ("I", "input gradient", "═", "="),
    ActionType.BACKWARD_WEIGHT: ("W", "weight gradient", "┄", "~"),
    ActionType.FULL_BACKWARD: ("B", "full backward", "≡", "#"),
    ActionType.RECOMPUTE: ("R", "recompute", "~", "+"),
    ActionType.OFFLOAD: ("", "to the host", "▾", "v"),
    ActionType.RELOAD: ("", "from the host", "▴", "^"),
}
"""Letter, name, and what continues a block where there is no colour: in Unicode, in ASCII."""
LETTERS = {kind: row[0] for kind, row in _ACTIONS.items() if row[0]}
NAMES = {kind: row[1] for kind, row in _ACTIONS.items()}


@dataclass(frozen=True, slots=True)
class _Glyphs:
    """Signs; ``fill`` continues a block where there is no colour to do it.

    ``levels`` go from nothing to full, ``shades`` from idle to busy.
    """

    fill: Mapping[ActionType, str]
    grad_sync: str
    bubble: str
    levels: str
    shades: str
    over: str
    tick: str
    ruler: str
    down: str
    up: str


_UNICODE = _Glyphs(
    fill={kind: row[2] for kind, row in _ACTIONS.items()},
    grad_sync="◦",
    bubble="·",
    levels=" ▁▂▃▄▅▆▇█",
    shades=" ░▒▓█",
    over="!",
    tick="┴",
    ruler="─",
    down="↓",
    up="↑",
)
_ASCII = _Glyphs(
    fill={kind: row[3] for kind, row in _ACTIONS.items()},
    grad_sync="o",
    bubble=".",
    levels=" 12345678",
    shades=" -+xX",
    over="!",
    tick="|",
    ruler="-",
    down="v",
    up="^",
)
