"""What the papers say of their schedules at equal times, as numbers that a test holds.

Every formula is of p devices, m micro-batches and v chunks per device, in micro-batches of a device
(memory of the fullest device) and in ms (bubble: length less work). F, I, W and B = I + W are times
of all chunks of a device together; communication is free. ``docs/schedules`` shows both as TeX.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["FORMULAS", "Formula", "Shape"]


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a problem of equal stages: p devices of v chunks, m micro-batches, times in ms."""

    p: int
    m: int
    v: int
    forward: float
    backward_input: float
    backward_weight: float

    @property
    def backward(self) -> float:
        """Duration of a fused backward."""
        return self.backward_input + self.backward_weight


@dataclass(frozen=True, slots=True, kw_only=True)
class Formula:
    """Memory and bubble of a family; ``bubble`` of ``length``, an upper bound where it says so.

    ``holds`` says in words when, ``applies`` the same as code.
    """

    memory_tex: str
    memory: Callable[[Shape], float]
    bubble_tex: str
    bubble: Callable[[Shape], float]
    length: Literal["makespan", "span"] = "makespan"
    is_upper_bound: bool = False
    holds: str = ""
    applies: Callable[[Shape], bool] = lambda _: True


def _v_half(s: Shape) -> float:
    passes = 3 * s.p - (7 if s.p % 2 == 0 else 4)
    return passes * s.forward / s.v


def _v_min(s: Shape) -> float:
    return (4 * s.p - (7, 5, 9)[s.p % 3]) * s.forward / s.v


def _gis_h(s: Shape) -> float:
    pair = s.forward + s.backward_input
    more = (s.v - 1) * (s.p / 2) * (pair - s.backward_weight)
    return ((s.p - 1) * pair + more) / s.v


FORMULAS: dict[str, Formula] = {
    "gpipe": Formula(
        memory_tex="m",
        memory=lambda s: s.m,
        bubble_tex="(p - 1)(F + B)",
        bubble=lambda s: (s.p - 1) * (s.forward + s.backward),
        holds="one stage per device",
        applies=lambda s: s.v == 1,
    ),
    "1f1b": Formula(
        memory_tex=r"\min(m, p)",
        memory=lambda s: min(s.m, s.p),
        bubble_tex="(p - 1)(F + B)",
        bubble=lambda s: (s.p - 1) * (s.forward + s.backward),
    ),
    "1f1b-r": Formula(
        memory_tex=r"1 + (\min(m, p) - 1)\,c",
        memory=lambda s: 1 + (min(s.m, s.p) - 1) / 10,
        bubble_tex=r"(p - 1)(F + R + B) \text{ at most, beside } m R",
        bubble=lambda s: (s.p - 1) * (2 * s.forward + s.backward) + s.m * s.forward,
        is_upper_bound=True,
        holds="a checkpoint of c activations, a recompute of R",
    ),
    "interleaved": Formula(
        memory_tex=r"p \left(1 + \frac{p - 1}{p v}\right)",
        memory=lambda s: min(s.m * s.v, 2 * (s.p - 1) + (s.v - 1) * s.p + 1) / s.v,
        bubble_tex=r"\frac{(p - 1)(F + B)}{v}",
        bubble=lambda s: (s.p - 1) * (s.forward + s.backward) / s.v,
        holds="m a multiple of p",
        applies=lambda s: s.m % s.p == 0,
    ),
    "zb-h1": Formula(
        memory_tex=r"\min(m, p)",
        memory=lambda s: min(s.m, s.p),
        bubble_tex="(p - 1)(F + I - W)",
        bubble=lambda s: (s.p - 1) * (s.forward + s.backward_input - s.backward_weight),
        holds="m ≥ p",
        applies=lambda s: s.m >= s.p,
    ),
    "zb-h2": Formula(
        memory_tex=r"\min(m, 2p - 1)",
        memory=lambda s: min(s.m, 2 * s.p - 1),
        bubble_tex="0",
        bubble=lambda _: 0.0,
        length="span",
        holds="m ≥ 2p - 1",
        applies=lambda s: s.m >= 2 * s.p - 1,
    ),
    "gis": Formula(
        memory_tex="p",
        memory=lambda s: s.p,
        bubble_tex=r"\frac{(p - 1)(F + I)}{v}",
        bubble=lambda s: (s.p - 1) * (s.forward + s.backward_input) / s.v,
        holds="m a multiple of p",
        applies=lambda s: s.m % s.p == 0,
    ),
    "gis-h": Formula(
        memory_tex=r"\frac{p (v + 1)}{2 v}",
        memory=lambda s: s.p * (s.v + 1) / (2 * s.v),
        bubble_tex=r"\frac{(p - 1)(F + I) + (v - 1) \frac{p}{2} (F + I - W)}{v}",
        bubble=_gis_h,
        holds="p even, m a multiple of p/2, m ≥ p",
        applies=lambda s: s.p % 2 == 0 and s.m % (s.p // 2) == 0 and s.m >= s.p,
    ),
    "zb-v": Formula(
        memory_tex=r"\min(m, p)",
        memory=lambda s: min(s.m, s.p),
        bubble_tex="0",
        bubble=lambda _: 0.0,
        length="span",
        holds="F = I = W, m ≥ 2p - 1",
        applies=lambda s: s.m >= 2 * s.p - 1,
    ),
    "v-half": Formula(
        memory_tex=r"\left\lfloor \frac{p + 2}{2} \right\rfloor",
        memory=lambda s: (s.p + 2) // 2,
        bubble_tex=r"\frac{3p - k}{v} F, \quad k = 7, 4 \text{ for even, odd } p",
        bubble=_v_half,
        holds="F = I = W, p > 2, m ≥ p",
        applies=lambda s: s.p > 2 and s.m >= s.p,
    ),
    "v-min": Formula(
        memory_tex=r"\left\lfloor \frac{p + 4}{3} \right\rfloor",
        memory=lambda s: (s.p + 4) // 3,
        bubble_tex=r"\frac{4p - k}{v} F, \quad k = 7, 5, 9 \text{ for } p \bmod 3 = 0, 1, 2",
        bubble=_v_min,
        holds="F = I = W, p > 2, m ≥ p",
        applies=lambda s: s.p > 2 and s.m >= s.p,
    ),
}
