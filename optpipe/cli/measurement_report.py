"""How measurements are shown: times of each stage, links, and what to know of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from optpipe.plot.units import format_bytes, format_ms

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import Console

    from optpipe.measurements import DeviceFacts, LinkFit, Measurements, StageFacts

__all__ = ["measurements_as_json", "show_measurements"]

_LEAST_WIDTH = 100
_ACTIONS = ("F", "I", "W", "B", "RECOMPUTE")


def show_measurements(
    console: Console,
    measurements: Measurements,
    notes: Iterable[str],
    missing: str | None = None,
) -> None:
    """Print the tables, one line per note, and what a problem still needs."""
    # Narrower, rows would be broken up; files and pipes count as 80 columns.
    console.width = max(console.width, _LEAST_WIDTH)
    console.print(escape(measurements.source))
    console.print(_times_table(measurements))
    if measurements.links:
        console.print()
        console.print(_links_table(measurements.links))
    for line in (*_size_lines(measurements.stages), *_device_lines(measurements.devices)):
        console.print(line, markup=False, soft_wrap=True)
    for note in notes:
        console.print(f"note: {note}", style="dim", markup=False, soft_wrap=True)
    if missing is not None:
        console.print(f"no problem yet: {missing}", markup=False, soft_wrap=True)


def measurements_as_json(
    measurements: Measurements, notes: Iterable[str], missing: str | None = None
) -> dict[str, Any]:
    """Return what `show_measurements` prints, for programs."""
    return {
        "source": measurements.source,
        "times": [
            {"stage": stage, "action": action, **found._asdict()}
            for (stage, action), found in _in_order(measurements)
        ],
        "links": [fit._asdict() for fit in measurements.links],
        "stages": [facts.model_dump(exclude_none=True) for facts in measurements.stages],
        "devices": [facts.model_dump(exclude_none=True) for facts in measurements.devices],
        "notes": list(notes),
        "missing": missing,
    }


def _in_order(measurements: Measurements) -> list[Any]:
    return sorted(
        measurements.spreads.items(), key=lambda item: (item[0][0], _ACTIONS.index(item[0][1]))
    )


def _times_table(measurements: Measurements) -> Table:
    table = _table("stage", "action", "samples", "median\nms", "P5\nms", "P95\nms", "MAD\nms")
    before = None
    for (stage, action), found in _in_order(measurements):
        times = (found.median_ms, found.p5_ms, found.p95_ms, found.mad_ms)
        label = "" if stage == before else str(stage)
        table.add_row(label, action, str(found.num_samples), *map(format_ms, times))
        before = stage
    return table


def _links_table(links: Iterable[LinkFit]) -> Table:
    table = _table("link", "", "messages", "sizes", "latency\nms", "bandwidth\nGB/s")
    for fit in links:
        rate = "-" if fit.bandwidth_gb_per_s is None else f"{fit.bandwidth_gb_per_s:.4g}"
        table.add_row(
            f"{fit.source} -> {fit.target}",
            "",
            str(fit.num_transfers),
            str(fit.num_sizes),
            format_ms(fit.latency_ms),
            rate,
        )
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if index > 1 else "left", no_wrap=True)
    return table


def _size_lines(stages: Iterable[StageFacts]) -> list[str]:
    lines = []
    for index, facts in enumerate(stages):
        sizes = [
            f"{name.removesuffix('_bytes').replace('_', ' ')} {format_bytes(value)}"
            for name, value in facts.known().items()
            if name.endswith("_bytes") and value
        ]
        if sizes:
            lines.append(f"stage {index}: {', '.join(sizes)}")
    return lines


def _device_lines(devices: Iterable[DeviceFacts]) -> list[str]:
    lines = []
    for index, facts in enumerate(devices):
        parts = []
        if facts.memory_bytes is not None:
            parts.append(f"memory {format_bytes(facts.memory_bytes)}")
        if facts.d2h_gb_per_s is not None and facts.h2d_gb_per_s is not None:
            parts.append(f"to the host {facts.d2h_gb_per_s:.4g} GB/s")
            parts.append(f"back {facts.h2d_gb_per_s:.4g} GB/s")
        if parts:
            lines.append(f"device {index}: {', '.join(parts)}")
    return lines
