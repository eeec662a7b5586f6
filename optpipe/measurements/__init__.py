"""Reads measurements of users' runs, or of the runtime, and makes problems of them."""

from optpipe.errors import MeasurementError
from optpipe.measurements.kineto import read_kineto
from optpipe.measurements.remeasured import measured_problem, named_times, times_of
from optpipe.measurements.texts import (
    MegatronRun,
    dump_times,
    read_megatron,
    read_messages_table,
    read_stages_table,
    read_times,
)
from optpipe.measurements.to_problem import (
    BuiltProblem,
    DeviceFacts,
    Given,
    LinkFit,
    MeasuredAction,
    Measurements,
    Sample,
    StageFacts,
    TimeSpread,
    Transfer,
    build_problem,
    fit_links,
    spread,
)

__all__ = [
    "BuiltProblem",
    "DeviceFacts",
    "Given",
    "LinkFit",
    "MeasuredAction",
    "MeasurementError",
    "Measurements",
    "MegatronRun",
    "Sample",
    "StageFacts",
    "TimeSpread",
    "Transfer",
    "build_problem",
    "dump_times",
    "fit_links",
    "measured_problem",
    "named_times",
    "read_kineto",
    "read_megatron",
    "read_messages_table",
    "read_stages_table",
    "read_times",
    "spread",
    "times_of",
]
