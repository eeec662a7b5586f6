"""How many GPUs a training run needs, and what the step costs on each number of them.

`shortage` says why no configuration fits: the nearest one, and how many GPUs are enough.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from optpipe.errors import InputError
from optpipe.planning import total_parameters
from optpipe.planning.configuration import Configuration
from optpipe.requests import MAX_AUTO_GPUS
from optpipe_solver.tune.bounds import tables
from optpipe_solver.tune.judge import ScalingRow
from optpipe_solver.tune.space import candidates
from optpipe_solver.tune.tune import tune

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from optpipe.planning import Hardware
    from optpipe_solver.tune.judge import TuneRow
    from optpipe_solver.tune.space import TuneQuestion
    from optpipe_solver.tune.tune import TuneResult

__all__ = ["auto_counts", "enough_gpus", "nearest_configuration", "shortage", "tune_counts"]

_GIB = 2**30
_MAX_TIMES = 64
_SECONDS_EACH = 1.0
_MAX_SECONDS = 60.0
"""For all numbers of GPUs; the bounds of one number take up to some seconds more."""
_SECONDS_PER_HOUR = 3600.0


def auto_counts(question: TuneQuestion) -> tuple[int, ...]:
    """Return the numbers of GPUs that ``auto`` tries: parts of a host, then whole hosts.

    They begin with the largest number on which weights, gradients and optimizer alone do not fit.
    """
    training, optimizer = question.training, question.training.optimizer
    each: float = training.element_bytes
    if training.lora is None:
        states = training.master_bytes + optimizer.moment_bytes
        each += training.gradient_bytes + states * (1 - optimizer.offload)
    fewest = total_parameters(question.shape) * each / max(1, question.usable_bytes)
    counts = list(gpu_numbers(question.hardware, 1, MAX_AUTO_GPUS))
    return tuple(counts[max(0, sum(number < fewest for number in counts) - 1) :])


def tune_counts(
    question: TuneQuestion,
    counts: Sequence[int],
    tune: Callable[..., TuneResult],
    *,
    time_limit_s: float,
    work_limit: float | None = None,
    from_first: bool = False,
    on_progress: Callable[[str], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
    **options: Any,
) -> TuneResult:
    """Return the result for the smallest number of GPUs that fits, with a row for each number.

    If no number fits, the result is that of the largest one.

    Parameters
    ----------
    counts
        Numbers of GPUs to tune for.
    tune
        `optpipe_solver.tune.tune` or a replacement; ``options`` are passed to it.
    time_limit_s, work_limit
        For all numbers together. Each number gets an equal share of what is left. Bounds and the
        first schedules of a number are not cut short. Once a number fits and the time is over, no
        other number is tried.
    from_first
        Whether rows begin with the largest number below the smallest one that fits.
    """
    counts = sorted(set(counts))
    end_s, work = time.monotonic() + time_limit_s, work_limit
    rows: list[ScalingRow] = []
    found: TuneResult | None = None
    for index, number in enumerate(counts):
        has_one = found is not None and found.best is not None
        is_stopped = should_stop is not None and should_stop()
        if (has_one and time.monotonic() >= end_s) or (rows and is_stopped):
            rows.append(ScalingRow(num_gpus=number, reason="not tried: the search had ended"))
            continue
        own, left = replace(question, num_gpus=number), len(counts) - index
        if next(candidates(own), None) is None:
            rows.append(ScalingRow(num_gpus=number, reason="model or batch do not split evenly"))
            continue
        if on_progress is not None:
            on_progress(f"{number} GPUs:")
        result = tune(
            own,
            time_limit_s=max(0.1, (end_s - time.monotonic()) / left),
            work_limit=None if work is None else max(0.1, work / left),
            on_progress=on_progress,
            should_stop=should_stop,
            **options,
        )
        if work is not None:
            work -= result.work
        rows.append(_row(result))
        if found is None or found.best is None:
            found = result
    if found is None:
        return tune(replace(question, num_gpus=counts[-1]), time_limit_s=time_limit_s)
    if from_first:
        fits = [index for index, row in enumerate(rows) if row.step_ms is not None]
        rows = rows[max(0, fits[0] - 1) :] if fits else rows[-1:]
    return replace(found, scaling=tuple(rows), minimum=_minimum(rows))


def _row(result: TuneResult) -> ScalingRow:
    """Return a number's row from the result of its search."""
    question, best = result.question, result.best
    if best is not None:
        price = question.price_per_gpu_hour
        return ScalingRow(
            num_gpus=question.num_gpus,
            label=best.label,
            step_ms=best.step_ms,
            tokens_per_s_per_gpu=best.tokens_per_s_per_gpu,
            tokens_per_gpu_hour=best.tokens_per_s_per_gpu * _SECONDS_PER_HOUR,
            cost_per_million_tokens=None if price is None else best.cost_per_million_tokens(price),
            gap=result.gap,
        )
    missing_bytes, reason = None, "no schedule that fits was found in the time"
    if result.counts.do_not_fit == result.counts.total:
        nearest, lacks = nearest_configuration(question)
        nearest_one = f"the configuration nearest to fitting, {nearest.label},"
        reason = f"{nearest_one} has no cut into layers that fits"
        if lacks > 0:
            missing_bytes = round(lacks)
            reason = f"{nearest_one} needs at least {lacks / _GIB:.1f} GiB more per GPU"
    return ScalingRow(num_gpus=question.num_gpus, missing_bytes=missing_bytes, reason=reason)


def _minimum(rows: Sequence[ScalingRow]) -> str:
    """Return the smallest number that fits and why the next smaller number does not."""
    fits = [row for row in rows if row.step_ms is not None]
    if not fits:
        return f"none of these numbers of GPUs fits: on {rows[-1].num_gpus}, {rows[-1].reason}"
    sentence = f"{fits[0].num_gpus} GPUs are the smallest number tried that fits"
    below = [row for row in rows if row.num_gpus < fits[0].num_gpus]
    if below:
        sentence += f"; on {below[-1].num_gpus} GPUs, {below[-1].reason}"
    return sentence


# --- If no configuration fits.


def shortage(question: TuneQuestion, *, should_stop: Callable[[], bool] | None = None) -> str:
    """Return the nearest configuration and a sufficient number of GPUs, in words.

    Call it only for a question of which no configuration fits.
    """
    parts = []
    nearest, missing_bytes = nearest_configuration(question)
    if missing_bytes > 0:
        gib = f"{missing_bytes / _GIB:.1f} GiB"
        parts.append(
            f"the configuration nearest to fitting, {nearest.label}, needs at least {gib} more per "
            "GPU"
        )
    row = enough_gpus(question, should_stop=should_stop)
    if question.kinds:
        parts.append("allow more memory or GPUs, or fix less")
    elif row is None:
        parts.append("no number of GPUs that was tried is enough; allow more memory, or fix less")
    else:
        parts.append(f"{row.configuration.num_gpus} GPUs are enough ({row.label})")
    return "; ".join(parts)


def nearest_configuration(question: TuneQuestion) -> tuple[Configuration, float]:
    """Return the configuration with the smallest lack of memory, and a lower bound of that lack.

    The bound is in bytes per GPU. It is at most 0 if the mean GPU has enough memory, but no cut
    into layers fits.
    """
    nearest, least = None, float("inf")
    for table, alike in tables(question):
        if table.missing_bytes < least:
            nearest, least = next(alike), table.missing_bytes
    if nearest is None:
        raise InputError("no configuration splits model and batch evenly; change one of them")
    configuration = Configuration(
        shape=question.shape,
        hardware=question.hardware,
        training=nearest.training,
        pipeline=nearest.cut(),
        kinds=nearest.kinds,
    )
    return configuration, least


def enough_gpus(
    question: TuneQuestion, *, should_stop: Callable[[], bool] | None = None
) -> TuneRow | None:
    """Return a configuration that fits on up to 64 times as many GPUs; None if none was found.

    Numbers are tried in turn: powers of two within a host, then 1, 2, 3, 4, 6, 8, 12, ... hosts.
    No number is tried after a minute, or with several kinds of GPU.
    """
    if question.kinds:
        return None
    end_s = time.monotonic() + _MAX_SECONDS
    fewest = question.num_gpus
    for number in gpu_numbers(question.hardware, fewest + 1, _MAX_TIMES * fewest):
        if time.monotonic() > end_s or (should_stop is not None and should_stop()):
            return None
        larger = replace(question, num_gpus=number)
        if next(candidates(larger), None) is None:
            continue
        found = tune(larger, time_limit_s=_SECONDS_EACH, should_stop=should_stop)
        if found.best is not None:
            return found.best
    return None


def gpu_numbers(hardware: Hardware, fewest: int, most: int) -> Iterator[int]:
    """Yield powers of two and 1.5 times powers of two that fill hosts or divide one host."""
    host = hardware.gpus_per_host
    powers = [2**n for n in range(most.bit_length())]
    for number in sorted({*powers, *(3 * one // 2 for one in powers[1:])}):
        is_whole = number % host == 0 or host % number == 0
        if is_whole and fewest <= number <= most:
            yield number
