"""Which of many modes are worth having in a menu: those by which schedules come nearest to all."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["MenuOption", "choose"]


class MenuOption(Protocol):
    """A mode that might be on a menu, by its numbers; hashable."""

    @property
    def name(self) -> str:
        """What it is called; of equal ones the shortest name is taken."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes that it leaves on the device, one for each moment that matters; less is better.

        What stays between F and backward comes first.
        """

    @property
    def forward_bytes(self) -> int:
        """What F leaves."""

    @property
    def offload_bytes(self) -> int:
        """What of it moves to the host and back."""

    @property
    def recompute_ms(self) -> float:
        """What making the rest again takes."""


Option = TypeVar("Option", bound=MenuOption)

_SHARES = (0.0, 0.5, 1.0, math.inf)
"""Of a transfer's time that a schedule cannot hide; infinite where nothing may move."""

_LEVELS = 16
_IMPOSSIBLE = 2.0
"""What a mode counts that leaves too much, or moves what may not; the dearest possible is 1."""

_NO_GAIN = 1e-6


def choose(
    keep: Option,
    options: Sequence[Option],
    *,
    most: int,
    transfer_ms: float,
    first: Sequence[Option] = (),
    hidden_ms: float = math.inf,
) -> list[Option]:
    """Return keep and the modes by which a schedule comes nearest to the best of all, cheaply.

    A mode costs its recomputation and a share of its transfers, at least of what exceeds the time
    that can hide them. For each of some shares, and of levels of bytes that a cell may leave on the
    device at each moment, there is a cheapest option. ``first`` come first, then the one that
    leaves least at each moment; then always that by which the menu comes nearer to the cheapest,
    all shares and levels together, until none brings it nearer. They are sorted by what they leave,
    most first.

    Parameters
    ----------
    most
        Most modes, keep counted.
    transfer_ms
        What a byte takes to the host and back.
    first
        Options that are on the menu anyway, as far as ``most`` allows.
    hidden_ms
        What transfers of one micro-batch may take besides computing it.
    """
    least = [option for option in options if option.forward_bytes <= keep.forward_bytes]
    front = list(dict.fromkeys([*first, *_front(least, keep)]))
    costs = _costs(front, keep, transfer_ms, hidden_ms)
    chosen, now = [keep], [_IMPOSSIBLE] * len(next(iter(costs.values()), []))
    moments = list(range(len(keep.sizes)))
    seeds = list(first)
    while len(chosen) < most and len(chosen) <= len(front):
        left = [option for option in front if option not in chosen]
        if seeds:
            left = [seeds.pop(0)]
        elif moments:
            moment = moments.pop(0)
            smallest = min(option.sizes[moment] for option in front)
            if any(option.sizes[moment] == smallest for option in chosen[1:]):
                continue
            left = [option for option in left if option.sizes[moment] == smallest]
        gains = {
            option: sum(max(0.0, a - b) for a, b in zip(now, costs[option], strict=True))
            for option in left
        }
        taken = max(left, key=lambda option: gains[option])
        if gains[taken] <= _NO_GAIN and taken not in first:
            break
        chosen.append(taken)
        now = [min(pair) for pair in zip(now, costs[taken], strict=True)]
    return [keep, *sorted(chosen[1:], key=_order)]


def _order(option: MenuOption) -> tuple[int, float, str]:
    return -option.sizes[0], option.recompute_ms, option.name


def _costs(
    front: Sequence[Option], keep: Option, transfer_ms: float, hidden_ms: float
) -> dict[Option, list[float]]:
    """Return what each takes at each share, moment and level, in units of the dearest."""
    found: dict[Option, list[float]] = {option: [] for option in front}
    for share in _SHARES:
        ms = {option: _cost(option, share, transfer_ms, hidden_ms) for option in front}
        dearest = max((value for value in ms.values() if value < math.inf), default=0.0) or 1.0
        for moment, most in enumerate(keep.sizes):
            lowest = min((option.sizes[moment] for option in front), default=0)
            step = (most - lowest) / _LEVELS
            for level in range(_LEVELS):
                for option in front:
                    fits = option.sizes[moment] <= lowest + level * step
                    cost = min(_IMPOSSIBLE, ms[option] / dearest)
                    found[option].append(cost if fits else _IMPOSSIBLE)
    return found


def _cost(option: MenuOption, share: float, transfer_ms: float, hidden_ms: float) -> float:
    if not option.offload_bytes:
        return option.recompute_ms
    if share == math.inf:
        return math.inf
    moved_ms = option.offload_bytes * transfer_ms
    return option.recompute_ms + max(share * moved_ms, moved_ms - hidden_ms)


def _front(options: Sequence[Option], keep: Option) -> list[Option]:
    """Return the options that no other beats in every number; of equal ones the shortest named."""
    by_numbers: dict[tuple[float, ...], Option] = {}
    for option in sorted((keep, *options), key=lambda one: (len(one.name), one.name)):
        by_numbers.setdefault(_numbers(option), option)
    front: list[tuple[float, ...]] = []
    for numbers in sorted(by_numbers):
        if not any(all(a <= b for a, b in zip(other, numbers, strict=True)) for other in front):
            front.append(numbers)
    return [by_numbers[numbers] for numbers in front if numbers != _numbers(keep)]


def _numbers(option: MenuOption) -> tuple[float, ...]:
    return (*option.sizes, option.recompute_ms, option.offload_bytes, option.forward_bytes)
