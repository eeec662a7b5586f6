"""Small pieces of sentences: ranges, counts, names."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from optpipe.action import Action
    from optpipe.problem import Problem

__all__ = [
    "action_name",
    "count",
    "device_name",
    "device_names",
    "listed",
    "microbatches",
    "ranges",
]

_MOST_PARTS = 6


def ranges(numbers: Iterable[int]) -> str:
    """Return whole numbers as ranges, ``2..9, 12``; of more than six parts the first six."""
    parts: list[list[int]] = []
    held = sorted(set(numbers))
    for number in held:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    texts = [_range(*part) for part in parts]
    if len(texts) > _MOST_PARTS:
        return f"{', '.join(texts[:_MOST_PARTS])}, ... ({len(held)} in all)"
    return ", ".join(texts)


def _range(first: int, last: int) -> str:
    if first == last:
        return str(first)
    return f"{first}, {last}" if last == first + 1 else f"{first}..{last}"


def microbatches(numbers: Iterable[int]) -> str:
    """Return ``micro-batch 3`` or ``micro-batches 2..9``."""
    held = set(numbers)
    return f"micro-batch{'es' if len(held) != 1 else ''} {ranges(held)}"


def count(number: int, thing: str) -> str:
    """Return ``1 device`` or ``8 devices``."""
    return f"{number} {thing}{'s' if number != 1 else ''}"


def listed(parts: Sequence[str]) -> str:
    """Return ``a``, ``a and b`` or ``a, b and c``."""
    if len(parts) < 2:
        return "".join(parts)
    return f"{', '.join(parts[:-1])} and {parts[-1]}"


def device_names(problem: Problem, devices: Sequence[int]) -> str:
    """Return the names of devices; numbered ones (gpu0, gpu1, ...) as ``gpu0..7, 12``."""
    names = [device_name(problem, device) for device in devices]
    if len(names) > 2 and names == [f"gpu{device}" for device in devices]:
        return f"gpu{ranges(devices)}"
    if len(names) > _MOST_PARTS:
        return f"{', '.join(names[:_MOST_PARTS])}, ... ({len(names)} in all)"
    return listed(names)


def device_name(problem: Problem, device: int) -> str:
    """Return what people call a device."""
    return problem.devices[device].name


def action_name(action: Action) -> str:
    """Return ``2F0 (F of stage 2, micro-batch 0)``."""
    return f"{action} ({action.type} of stage {action.stage}, micro-batch {action.microbatch})"
