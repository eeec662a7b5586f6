"""Measurements that teams already have, or the runtime makes, on their way to a problem."""

from optpipe.measurements.build import BuiltProblem, build_problem
from optpipe.measurements.csv_times import (
    dump_times,
    read_messages_table,
    read_stages_table,
    read_times,
)
from optpipe.measurements.given import Given
from optpipe.measurements.kineto import read_kineto
from optpipe.measurements.links import LinkFit, fit_links
from optpipe.measurements.measurements import Measurements
from optpipe.measurements.megatron import MegatronRun, read_megatron
from optpipe.measurements.spread import Spread, spread
from optpipe.measurements.values import (
    DeviceFacts,
    MeasuredAction,
    MeasurementError,
    Sample,
    StageFacts,
    Transfer,
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
    "Spread",
    "StageFacts",
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
