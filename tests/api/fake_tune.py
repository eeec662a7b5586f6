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
from math import inf
from typing import TYPE_CHECKING

from optpipe.planning.accuracy import find_accuracy
from optpipe_solver.tune import TuneCounts, TuneResult, judge
from optpipe_solver.tune.judge import Look, Looks

if TYPE_CHECKING:
    from collections.abc import Callable

    from optpipe.planning.configuration import Configuration
    from optpipe_solver.tune import TuneCheckpoint, TuneQuestion, TuneRow

HANGS, DIES, FITS_NOWHERE = 1, 2, 3
LOOKS = Looks(3, 2, (Look(1, 3, 900.0, 1000.5), Look(0, 1, inf, inf)))


def tune(
    question: TuneQuestion,
    *,
    current: Configuration | None,
    time_limit_s: float,
    work_limit: float | None,
    threads: int,
    seed: int,
    gap: float,
    start: TuneRow | None,
    known: TuneCheckpoint | None,
    on_progress: Callable[[str], None],
    on_result: Callable[[TuneResult], None],
    should_stop: Callable[[], bool],
) -> TuneResult:
    work = "" if work_limit is None else f"work={work_limit:g} "
    on_progress(f"limit={time_limit_s:g} {work}threads={threads} seed={seed} gap={gap:g}")
    baseline = None if current is None else judge(question, current)
    if seed == FITS_NOWHERE or current is None or baseline is None:
        return _result(question, [], None, TuneCounts(
            total=3, do_not_fit=3, excluded=0, solved=0, open=0))  # fmt: skip
    rows = [baseline]
    first = TuneCounts(total=3, do_not_fit=1, excluded=0, solved=1, open=1)
    if start is None:
        so_far = _result(question, rows, baseline, first)
        on_result(replace(so_far, bound_ms=0.7 * baseline.step_ms, looks=LOOKS))
    else:
        is_same = (start.as_json(), start.programs) == (baseline.as_json(), baseline.programs)
        on_progress(f"goes on from {start.label}: {is_same and start.problem == baseline.problem}")
        kept = known is not None and (known.looks, known.rows, known.is_over)
        on_progress(f"knows what was looked at: {kept == (LOOKS, (start,), False)}")
    if seed == DIES and start is None:
        os.kill(os.getpid(), signal.SIGKILL)
    while seed == HANGS and not should_stop():
        time.sleep(0.01)
    if seed != HANGS:
        pipeline = replace(current.pipeline, pp=2, num_microbatches=16)
        training = replace(current.training, tp=4, dp=1, micro_batch=1, sequence_parallel=True)
        faster = judge(question, replace(current, training=training, pipeline=pipeline, sizes=()))
        assert faster is not None
        assert faster.step_ms < baseline.step_ms
        rows.insert(0, faster)
        on_result(_result(question, rows, baseline, first))
    counts = TuneCounts(total=3, do_not_fit=1, excluded=0, solved=len(rows), open=2 - len(rows))
    return replace(_result(question, rows, baseline, counts), stopped_by="looked_at")


def _result(
    question: TuneQuestion, rows: list[TuneRow], current: TuneRow | None, counts: TuneCounts
) -> TuneResult:
    return TuneResult(
        question=question,
        rows=tuple(rows),
        current=current,
        bound_ms=0.9 * rows[0].step_ms if rows else float("inf"),
        counts=counts,
        error=find_accuracy(question.shape, (question.hardware,), question.training),
        seconds=0.5,
    )
