"""Measures stages on the real thing: times, bytes, copies and links, as a problem needs them."""

from optpipe.runtime.measuring.measure import Effort, Profile, StageResult, measure
from optpipe.runtime.measuring.stages import StageSet, load_function, load_stages
from optpipe.runtime.measuring.times import computing_with, device_named, joined

__all__ = [
    "Effort",
    "Profile",
    "StageResult",
    "StageSet",
    "computing_with",
    "device_named",
    "joined",
    "load_function",
    "load_stages",
    "measure",
]
