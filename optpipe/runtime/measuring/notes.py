"""What a reader of the numbers must know, in whole sentences."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from optpipe.runtime.measuring.one_stage import StageResult
    from optpipe.runtime.measuring.ranks import MeasuringRanks

__all__ = ["notes_on"]


def notes_on(
    ranks: MeasuringRanks, homes: Sequence[int], results: Sequence[StageResult]
) -> Iterator[str]:
    """Yield what was assumed, and what could not be measured as it will run."""
    for index, result in enumerate(results):
        if not result.footprint.split.is_possible:
            yield (
                f"Stage {index} cannot be split: I does all of the backward and W nothing. "
                "Only weight gradients of plain nn.Linear layers are put aside for W."
            )
    if not ranks.are_many and max(homes) > 0:
        yield (
            "One process measured all stages on one device, one after another. Links are copies "
            "on it unless given: for messages between devices start one rank per device."
        )
    if ranks.device.type == "cpu":
        yield "Copies on the CPU run on the thread that computes: they overlap with nothing."
        yield f"Unless given, a device's memory is the host's divided by {1 + max(homes)}."
