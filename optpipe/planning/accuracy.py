"""The error of an estimated step: its interval, and the probability that a gain is real.

``errors.json`` has the errors of published runs by class, log(measured / estimated). No run was
estimated with efficiencies fitted to a run of its model. ``python -m benchmarks.errors --write``
writes the file. docs/estimate.md describes how, and the errors that an interval does not cover.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from math import exp, log, sqrt
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from optpipe.planning.accelerators import Hardware
    from optpipe.planning.shape import ModelShape, Training

__all__ = [
    "ERRORS",
    "MIN_MODELS",
    "MIN_ROWS",
    "SHARE",
    "Accuracy",
    "ErrorClass",
    "class_names",
    "find_accuracy",
]

SHARE = 0.8
"""Share of runs that an interval covers."""
MIN_ROWS, MIN_MODELS = 10, 5
"""A class with fewer runs, or runs of fewer models, has the interval of the next wider class."""

_MEASURE = 0.9  # probability of a gain below which a measurement is advised
_NINTH, _STUDENT_NINTH = 1.2816, 1.8856  # 90% quantiles: normal; Student, two degrees of freedom


@dataclass(frozen=True, kw_only=True)
class ErrorClass:
    """The errors of one class of published runs.

    Parameters
    ----------
    median, worst
        Of the sizes of the errors, as shares of the measured step.
    low, high
        The interval of log(measured / estimated).
    spread
        Its standard deviation, from the quantiles at 10 and 90%.
    """

    name: str
    num_rows: int
    num_models: int
    median: float
    worst: float
    low: float
    high: float
    spread: float


class PairErrors(NamedTuple):
    """The similarity of the errors of two runs of one model on one GPU, and the number of pairs."""

    num_pairs: int
    correlation: float


_DATA: dict[str, Any] = json.loads(
    resources.files("optpipe.planning").joinpath("errors.json").read_text("utf-8")
)
ERRORS: Mapping[str, ErrorClass] = MappingProxyType(
    {name: ErrorClass(name=name, **numbers) for name, numbers in _DATA["classes"].items()}
)
"""Every class that has enough runs, by name."""
_PAIRS = {kind: PairErrors(**numbers) for kind, numbers in _DATA["pairs"].items()}
_AIMS = {kind: (median, worst) for kind, (median, worst) in _DATA["aims"].items()}
_GENERATIONS = frozenset(_DATA["generations"])
_TRACED_GENERATIONS = frozenset(_DATA["traced_generations"])


def class_names(shape: ModelShape, hardware: Hardware, training: Training) -> tuple[str, ...]:
    """Return the names of the classes of a configuration, the narrowest first.

    Traces with experts or adapters have no wider class: their errors are not those of dense models.
    """
    kind = _kind(shape, training)
    if shape.trace is not None:
        return (f"trace, {kind}", "trace") if kind == "dense" else (f"trace, {kind}",)
    kernels = f"{kind}, PyTorch" if training.kernels == "torch" else kind
    generation = f"{kernels}, {hardware.generation}"
    products = "narrow" if training.is_narrow else "wide"
    names = (f"{generation}, {products} products", generation, kernels, kind, "all")
    return tuple(dict.fromkeys(names))


def _kind(shape: ModelShape, training: Training) -> str:
    if training.lora is not None or training.lengths:
        return "fine-tuning"
    return "dense" if shape.experts is None else "experts"


def find_accuracy(
    shape: ModelShape,
    kinds: Sequence[Hardware],
    training: Training,
    *,
    is_calibrated: bool = False,
) -> Accuracy | None:
    """Return the errors of a configuration's class, or of one whose times were calibrated.

    None if no run on such accelerators was compared, nor any on several generations together. None
    also for traces with experts or adapters, of which too few runs were compared.
    """
    generations = {kind.generation for kind in kinds}
    compared = _GENERATIONS if shape.trace is None else _TRACED_GENERATIONS
    if len(generations) > 1 or not generations <= compared:
        return None
    names = class_names(shape, kinds[0], training)
    error = next((ERRORS[name] for name in names if name in ERRORS), None)
    if error is None:
        return None
    return Accuracy(
        wanted=names[0],
        error=error,
        kind=_kind(shape, training),
        is_calibrated=is_calibrated,
    )


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """How near a configuration's estimate is to a measured step.

    Parameters
    ----------
    wanted
        The configuration's own class.
    error
        The narrowest of its classes that has enough runs.
    kind
        dense, experts or fine-tuning.
    is_calibrated
        Whether times were multiplied by the factor of another measured configuration. The interval
        is then that of two runs of one model on one GPU.
    """

    wanted: str
    error: ErrorClass
    kind: str
    is_calibrated: bool = False

    @property
    def difference(self) -> float:
        """The standard deviation of the difference of two errors of one model on one GPU."""
        return self.error.spread * sqrt(2 * (1 - _PAIRS[self.kind].correlation))

    @cached_property
    def factors(self) -> tuple[float, float]:
        """The interval of measured / estimated."""
        if self.is_calibrated:
            half = _NINTH * self.difference
            return exp(-half), exp(half)
        return exp(self.error.low), exp(self.error.high)

    def interval_ms(self, step_ms: float) -> tuple[float, float]:
        """Return the two ends of the interval of a measured step."""
        low, high = self.factors
        return step_ms * low, step_ms * high

    def gain_probability(self, current_ms: float, best_ms: float) -> float:
        """Return the probability that the second configuration is faster than the first.

        Both are estimates of one model on one GPU, whose errors are correlated. Their difference
        has Student's distribution with two degrees of freedom, in which large differences are more
        frequent than in a normal one. Its quantiles at 10 and 90% are those of a normal one.
        """
        x = log(current_ms / best_ms) / (_NINTH * self.difference) * _STUDENT_NINTH
        return 0.5 + x / (2 * sqrt(2 + x * x))

    def gain_interval(self, current_ms: float, best_ms: float) -> tuple[float, float]:
        """Return the 80% interval of the share of time that the second configuration saves.

        Its ends follow from the distribution of `gain_probability`. The lower end is negative if a
        loss is possible.
        """
        ratio, factor = best_ms / current_ms, exp(_NINTH * self.difference)
        return 1 - ratio * factor, 1 - ratio / factor

    def advises_measuring(self, probability: float) -> bool:
        """Return whether a gain of this probability should be measured before a change."""
        return probability < _MEASURE

    def text(self, step_ms: float) -> str:
        """Return the interval and where it comes from, as one or two sentences."""
        low, high = (ms / 1e3 for ms in self.interval_ms(step_ms))
        said = f"{SHARE:.0%} between {low:.3g} and {high:.3g} s"
        if self.is_calibrated:
            pairs = _PAIRS[self.kind].num_pairs
            return f"{said} ({pairs} pairs of published runs of one model on one GPU)"
        error = self.error
        said += (
            f" ({error.num_rows} published runs of {error.num_models} models, class "
            f"{error.name!r}: median error {error.median:.1%}, worst {error.worst:.1%})"
        )
        if self.error.name != self.wanted:
            said += (
                f". The class {self.wanted!r} has fewer than {MIN_ROWS} published runs, or runs of "
                f"fewer than {MIN_MODELS} models, so the interval is that of the next wider class"
            )
        return said

    def as_json(self, step_ms: float | None) -> dict[str, Any]:
        """Return the fields of `optpipe.answers.ScoreboardError`; ``text`` is of this step."""
        low, high = self.factors
        return {
            "median": self.error.median,
            "worst": self.error.worst,
            "num_rows": self.error.num_rows,
            "error_class": self.error.name,
            "low": low,
            "high": high,
            "text": "" if step_ms is None else self.text(step_ms),
        }

    @property
    def warning(self) -> str:
        """The aims that the class misses, without a last full stop; empty if it meets them."""
        if self.is_calibrated:
            return ""
        median, worst = _AIMS[self.kind]
        error, missed = self.error, []
        if error.median > median:
            missed.append(f"median error {error.median:.1%} (we aim at {median:.0%})")
        if error.worst > worst:
            missed.append(f"worst error {error.worst:.1%} (we aim at {worst:.0%})")
        if not missed:
            return ""
        return (
            f"Estimates of the class {error.name!r} are less accurate than we want: "
            f"{' and '.join(missed)}. Measure a step before you rely on this one"
        )
