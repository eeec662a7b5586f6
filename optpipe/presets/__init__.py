"""Models and accelerators by name, and what a model costs on them: estimates, not measurements.

``estimate(find_model("llama3-70b"), find_gpu("h100"), Training(tp=8), pp=8, num_microbatches=64)``
gives a problem to solve and a model to cut otherwise.
"""

from optpipe.presets.asking import AskedError, Sentence
from optpipe.presets.estimate import Estimate, estimate
from optpipe.presets.hardware import GPUS, Efficiency, Hardware, find_gpu
from optpipe.presets.huggingface import shape_from_config
from optpipe.presets.models import MODELS, find_model
from optpipe.presets.parameters import total_parameters
from optpipe.presets.shape import Experts, LatentAttention, ModelShape
from optpipe.presets.training import Training

__all__ = [
    "GPUS",
    "MODELS",
    "AskedError",
    "Efficiency",
    "Estimate",
    "Experts",
    "Hardware",
    "LatentAttention",
    "ModelShape",
    "Sentence",
    "Training",
    "estimate",
    "find_gpu",
    "find_model",
    "shape_from_config",
    "total_parameters",
]
