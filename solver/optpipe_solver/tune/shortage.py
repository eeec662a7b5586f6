"""Why no configuration of a question fits: the nearest one, and how many GPUs are enough."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from optpipe.errors import InputError
from optpipe.planning.configuration import Configuration
from optpipe_solver.tune.bounds import tables
from optpipe_solver.tune.space import candidates
from optpipe_solver.tune.tune import tune

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from optpipe.planning import Hardware
    from optpipe_solver.tune.judge import TuneRow
    from optpipe_solver.tune.space import TuneQuestion

__all__ = ["enough_gpus", "gpu_numbers", "nearest_configuration", "shortage"]

_GIB = 2**30
_MAX_TIMES = 64
_SECONDS_EACH = 1.0
_MAX_SECONDS = 60.0
"""For all numbers of GPUs; the bounds of one number take up to some seconds more."""


def shortage(question: TuneQuestion, *, should_stop: Callable[[], bool] | None = None) -> str:
    """Return the nearest configuration and a sufficient number of GPUs, in words.

    Call it only for a question of which no configuration fits.
    """
    parts = []
    nearest, missing_bytes = nearest_configuration(question)
    if missing_bytes > 0:
        gib = f"{missing_bytes / _GIB:.1f} GiB"
        parts.append(f"the nearest, {nearest.label}, needs at least {gib} more per GPU")
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
