"""What makes the full-horizon model solvable, each a switch: ``benchmarks/ablation.py`` turns them.

None changes the optimum (``fifo`` is used only where it loses nothing, or is named a restriction).
"""

from __future__ import annotations

from dataclasses import dataclass, fields

__all__ = ["PLAIN", "Tricks"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Tricks:
    """Switches; all on by default.

    Attributes
    ----------
    fifo
        First in, first out through every pass of every stage, where that loses nothing.
    symmetry
        Stage 0's forwards go in the order of their numbers: micro-batches are identical.
    windows
        Big-M and the bounds of starts from heads and tails instead of the whole horizon.
    implied_orders
        Orders that heads, tails and the known schedule force are constants, and push in turn.
    memory_lag
        Orders that memory forces are constants: with K activations in flight F(j + K) follows the
        release of j.
    shaving
        An order that leads to a contradiction when tried is reversed for good.
    few_rows
        No row for an order that others already imply, none for memory that cannot run out.
    triangles
        y_ab + y_bc + y_ca <= 2.
    load_rows
        Starts and length count what stands before and behind on the device.
    cutoff
        Only better schedules are looked for: by one step where all times are multiples of one
        (see `grid`), else by half of the gap that counts as none. There is then no start.
    start
        Begin from the best schedule known, where it is among those looked for.
    hand_in
        Better schedules found elsewhere are handed in while the model runs.
    """

    fifo: bool = True
    symmetry: bool = True
    windows: bool = True
    implied_orders: bool = True
    memory_lag: bool = True
    shaving: bool = True
    few_rows: bool = True
    triangles: bool = True
    load_rows: bool = True
    cutoff: bool = True
    start: bool = True
    hand_in: bool = True


PLAIN = Tricks(**dict.fromkeys((field.name for field in fields(Tricks)), False))
"""The plain big-M model."""
