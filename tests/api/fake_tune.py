"""A tuner whose every step a test decides: the seed is its script.

It finds what is run today, then, where that is allowed, one faster configuration. ``HANGS``: it
waits between the two until it is told to stop. ``DIES``: it is killed there, unless it was given
what an earlier attempt had found. ``FITS_NOWHERE`` finds nothing, proven.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from optpipe.presets.estimate import error_band
from optpipe_solver.tune import TuneCounts, TuneResult, judge

if TYPE_CHECKING:
    from collections.abc import Callable

    from optpipe.presets.configuration import Configuration
    from optpipe_solver.tune import TuneQuestion, TuneRow

HANGS, DIES, FITS_NOWHERE = 1, 2, 3


def tune(
    question: TuneQuestion,
    *,
    current: Configuration | None,
    time_limit_s: float,
    threads: int,
    seed: int,
    gap: float,
    start: TuneRow | None,
    on_progress: Callable[[str], None],
    on_best: Callable[[TuneRow], None],
    should_stop: Callable[[], bool],
) -> TuneResult:
    on_progress(f"limit={time_limit_s:g} threads={threads} seed={seed} gap={gap:g}")
    baseline = None if current is None else judge(question, current)
    if seed == FITS_NOWHERE or current is None or baseline is None:
        return _result(question, [], None, TuneCounts(
            total=3, do_not_fit=3, excluded=0, solved=0, open=0))  # fmt: skip
    rows = [baseline]
    if start is None:
        on_best(baseline)
    else:
        is_same = (start.as_json(), start.programs) == (baseline.as_json(), baseline.programs)
        on_progress(f"goes on from {start.label}: {is_same and start.problem == baseline.problem}")
    if seed == DIES and start is None:
        os.kill(os.getpid(), signal.SIGKILL)
    while seed == HANGS and not should_stop():
        time.sleep(0.01)
    if seed != HANGS:
        pipeline = replace(current.pipeline, pp=2, num_microbatches=16)
        training = replace(current.training, tp=4, dp=1, micro_batch=1, sequence_parallel=True)
        faster = judge(question, replace(current, training=training, pipeline=pipeline))
        assert faster is not None
        assert faster.step_ms < baseline.step_ms
        on_best(faster)
        rows.insert(0, faster)
    counts = TuneCounts(total=3, do_not_fit=1, excluded=0, solved=len(rows), open=2 - len(rows))
    return _result(question, rows, baseline, counts)


def _result(
    question: TuneQuestion, rows: list[TuneRow], current: TuneRow | None, counts: TuneCounts
) -> TuneResult:
    return TuneResult(
        question=question,
        rows=tuple(rows),
        current=current,
        bound_ms=0.9 * rows[0].step_ms if rows else float("inf"),
        counts=counts,
        error=error_band(question.shape, (question.hardware,)),
        seconds=0.5,
    )
