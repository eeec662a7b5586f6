"""The times of one stage of a problem, from the medians of what was measured."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from optpipe.measurements.values import MeasurementError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from optpipe.measurements.spread import Spread
    from optpipe.measurements.values import MeasuredAction
    from optpipe.problem import Stage

__all__ = ["StageTimes", "stage_times"]

_KEPT = "neither B nor I and W were measured; the base problem's times are kept."


class StageTimes(NamedTuple):
    """Durations in ms; ``note`` says what was assumed of the stage, or is empty."""

    forward_ms: float
    backward_input_ms: float
    backward_weight_ms: float
    backward_ms: float | None
    recompute_ms: float | None
    note: str = ""

    def fields(self, checkpoint_bytes: int | None) -> dict[str, float | None]:
        """Return the fields of a problem's stage that keeps so many bytes for a RECOMPUTE.

        A RECOMPUTE is a forward again, and takes its time where it was not measured.
        """
        again = self.forward_ms if self.recompute_ms is None else self.recompute_ms
        return {
            "forward_ms": self.forward_ms,
            "backward_input_ms": self.backward_input_ms,
            "backward_weight_ms": self.backward_weight_ms,
            "backward_ms": self.backward_ms,
            "recompute_ms": None if checkpoint_bytes is None else again,
        }


def stage_times(
    stage: int,
    spreads: Mapping[tuple[int, MeasuredAction], Spread],
    weight_share: float | None,
    base: Stage | None = None,
) -> StageTimes:
    """Return the times of a stage.

    Where I and W were measured, they count, and B beside them if it was measured too. Where only B
    was, it is divided: by ``weight_share``, else as in the base problem, else all of it is I and W
    takes nothing, as in the runtime for modules whose backward cannot be split.

    Parameters
    ----------
    stage
        Which one.
    spreads
        Of all stages.
    weight_share
        Share of B that W takes where only B was measured.
    base
        The stage of a problem whose times stand where nothing was measured.

    Raises
    ------
    MeasurementError
        If F, or both I + W and B, are neither measured nor in a base problem.
    """
    medians = {action: one.median_ms for (of, action), one in spreads.items() if of == stage}
    forward = medians.get("F", base.forward_ms if base else None)
    if forward is None:
        raise MeasurementError(_missing(stage, medians, "F"))
    backward_input, backward_weight, fused, note = _backward(stage, medians, weight_share, base)
    recompute = medians.get("RECOMPUTE", base.recompute_ms if base else None)
    if "F" not in medians:
        note = f"{note} F was not measured; the base problem's time is kept.".strip()
    return StageTimes(forward, backward_input, backward_weight, fused, recompute, note)


def _backward(
    stage: int,
    medians: Mapping[MeasuredAction, float],
    weight_share: float | None,
    base: Stage | None,
) -> tuple[float, float, float | None, str]:
    fused = medians.get("B")
    if "I" in medians and "W" in medians:
        return medians["I"], medians["W"], fused, ""
    if fused is not None:
        share, note = _weight_share(weight_share, base)
        weight = round(share * fused, 6)
        return round(fused - weight, 6), weight, fused, note
    if base is not None:
        split = medians.get("I", base.backward_input_ms), medians.get("W", base.backward_weight_ms)
        return (
            *split,
            base.backward_ms,
            "neither B nor I and W were measured; the base problem's times are kept.",
        )
    raise MeasurementError(_missing(stage, medians, "I and W, or B"))


def _weight_share(share: float | None, base: Stage | None) -> tuple[float, str]:
    if share is not None:
        return share, f"only B was measured; W is taken as {share:g} of it."
    split = base.backward_input_ms + base.backward_weight_ms if base else 0.0
    if base is not None and split > 0:
        return base.backward_weight_ms / split, "only B was measured; it is split as in the base."
    return 0.0, (
        "only B was measured; all of it counts as I and W as nothing. "
        "Give weight_share, or measure I and W, where the backward can be split."
    )


def _missing(stage: int, medians: Mapping[MeasuredAction, float], wanted: str) -> str:
    found = ", ".join(sorted(medians)) or "nothing"
    return (
        f"stage {stage}: {found} was measured, but a problem needs {wanted}; "
        "measure it, or name a base problem that has its times"
    )
