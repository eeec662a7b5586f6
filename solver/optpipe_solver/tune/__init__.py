"""The question users ask: which configuration, how much faster, and how much faster any can be."""

from optpipe_solver.tune.document import (
    AskedTune,
    checkpoint_of,
    read_checkpoint,
    read_question,
    read_row,
)
from optpipe_solver.tune.judge import ScalingRow, TuneCheckpoint, TuneRow, judge, recut
from optpipe_solver.tune.scaling import shortage, tune_counts
from optpipe_solver.tune.space import FIXABLE, FRAMEWORKS, TuneQuestion
from optpipe_solver.tune.tune import TaskPool, TaskResult, TuneCounts, TuneResult, tune

__all__ = [
    "FIXABLE",
    "FRAMEWORKS",
    "AskedTune",
    "ScalingRow",
    "TaskPool",
    "TaskResult",
    "TuneCheckpoint",
    "TuneCounts",
    "TuneQuestion",
    "TuneResult",
    "TuneRow",
    "checkpoint_of",
    "judge",
    "read_checkpoint",
    "read_question",
    "read_row",
    "recut",
    "shortage",
    "tune",
    "tune_counts",
]
