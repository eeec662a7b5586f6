"""Models and accelerators by name, and what a model costs on them: estimates, not measurements.

``estimate(find_model("llama3-70b"), find_gpu("h100"), Training(tp=8), pp=8, num_microbatches=64)``
gives a problem to solve and a model to cut otherwise.
"""

from optpipe.presets.catalogue import GPUS, MODELS, Efficiency, Hardware, find_gpu, find_model
from optpipe.presets.costs import total_parameters
from optpipe.presets.estimate import Estimate, estimate
from optpipe.presets.huggingface import shape_from_config
from optpipe.presets.shape import (
    AskedError,
    AskedSentence,
    Experts,
    LatentAttention,
    ModelShape,
    Training,
)

__all__ = [
    "GPUS",
    "MODELS",
    "AskedError",
    "AskedSentence",
    "Efficiency",
    "Estimate",
    "Experts",
    "Hardware",
    "LatentAttention",
    "ModelShape",
    "Training",
    "estimate",
    "find_gpu",
    "find_model",
    "shape_from_config",
    "total_parameters",
]
