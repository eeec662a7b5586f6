"""Measurements written short."""

from collections.abc import Mapping, Sequence

from optpipe.measurements import Measurements, Sample


def medians(run: Measurements) -> dict[str, float]:
    """Median per stage and action, keys as in 0F."""
    return {f"{stage}{action}": found.median_ms for (stage, action), found in run.spreads.items()}


def measured(times: Mapping[tuple[int, str], Sequence[float]]) -> Measurements:
    """Measurements of nothing but times in ms, by stage and action."""
    samples = tuple(
        Sample.model_validate({"stage": stage, "action": action, "time_ms": time_ms})
        for (stage, action), list_ms in times.items()
        for time_ms in list_ms
    )
    return Measurements(source="test", samples=samples)
