"""Measures stages on real devices: times, bytes, copies and links, as a problem needs them."""

from optpipe.runtime.measuring.layers import (
    ModelProfile,
    RepeatedLayer,
    measure_layers,
)
from optpipe.runtime.measuring.measure import (
    Effort,
    Profile,
    StageResult,
    instruments_of,
    measure,
    select_instruments,
)
from optpipe.runtime.measuring.stages import (
    ModelToMeasure,
    StageSet,
    load_function,
    load_model,
    load_stages,
)
from optpipe.runtime.measuring.times import select_device, use_process_group, use_threads
from optpipe.runtime.measuring.traced import trace_instruments, use_fake_ranks

__all__ = [
    "Effort",
    "ModelProfile",
    "ModelToMeasure",
    "Profile",
    "RepeatedLayer",
    "StageResult",
    "StageSet",
    "instruments_of",
    "load_function",
    "load_model",
    "load_stages",
    "measure",
    "measure_layers",
    "select_device",
    "select_instruments",
    "trace_instruments",
    "use_fake_ranks",
    "use_process_group",
    "use_threads",
]
