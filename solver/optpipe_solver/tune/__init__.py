"""The question users ask: which configuration, how much faster, and how much faster any can be."""

from optpipe_solver.tune.judge import TuneRow, judge
from optpipe_solver.tune.space import FIXABLE, FRAMEWORKS, Framework, TuneQuestion
from optpipe_solver.tune.tune import TuneCounts, TuneResult, tune

__all__ = [
    "FIXABLE",
    "FRAMEWORKS",
    "Framework",
    "TuneCounts",
    "TuneQuestion",
    "TuneResult",
    "TuneRow",
    "judge",
    "tune",
]
