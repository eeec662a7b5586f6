"""Measurements that teams already have, or the runtime makes, on their way to a problem."""

from optpipe.errors import MeasurementError
from optpipe.measurements.kineto import read_kineto
from optpipe.measurements.texts import (
    MegatronRun,
    dump_times,
    read_megatron,
    read_messages_table,
    read_stages_table,
    read_times,
)
from optpipe.measurements.to_problem import BuiltProblem, Measurements, build_problem
from optpipe.measurements.values import (
    DeviceFacts,
    Given,
    LinkFit,
    MeasuredAction,
    Sample,
    StageFacts,
    TimeSpread,
    Transfer,
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
    "read_kineto",
    "read_megatron",
    "read_messages_table",
    "read_stages_table",
    "read_times",
    "spread",
]
