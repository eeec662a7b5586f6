"""The real tuner, which tells a result of its own and, where the seed is ``HELD``, then waits."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from optpipe_solver import tune as tuning

if TYPE_CHECKING:
    from optpipe_solver.tune import TuneQuestion, TuneResult

HELD = 7


def tune(question: TuneQuestion, **options: Any) -> TuneResult:
    result = tuning.tune(question, **options)
    while options["seed"] == HELD and not options["should_stop"]():
        time.sleep(0.02)
    return result
