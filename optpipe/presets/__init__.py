"""Models and accelerators by name, and what a model costs on them: estimates, not measurements.

``estimate(find_model("llama3-70b"), find_gpu("h100"), Training(tp=8), pp=8, num_microbatches=64)``
gives a problem to solve, a model to cut otherwise, and what a step takes.
"""

from optpipe.presets.accelerators import GPUS, Efficiency, Hardware, find_gpu, find_gpus
from optpipe.presets.catalogue import MODELS, find_model, shape_from_config
from optpipe.presets.configuration import Configuration, train_command
from optpipe.presets.estimate import Estimate, estimate
from optpipe.presets.machine import Machine
from optpipe.presets.megatron import megatron_arguments, megatron_script, megatron_yaml
from optpipe.presets.megatron_reader import find_model_of, read_megatron
from optpipe.presets.parameters import total_parameters
from optpipe.presets.shape import Experts, LatentAttention, LayerForm, ModelShape, Training
from optpipe.presets.step import PipelineCut, StepEstimate, step_estimate
from optpipe.presets.torchtitan import read_torchtitan, torchtitan_config

__all__ = [
    "GPUS",
    "MODELS",
    "Configuration",
    "Efficiency",
    "Estimate",
    "Experts",
    "Hardware",
    "LatentAttention",
    "LayerForm",
    "Machine",
    "ModelShape",
    "PipelineCut",
    "StepEstimate",
    "Training",
    "estimate",
    "find_gpu",
    "find_gpus",
    "find_model",
    "find_model_of",
    "megatron_arguments",
    "megatron_script",
    "megatron_yaml",
    "read_megatron",
    "read_torchtitan",
    "shape_from_config",
    "step_estimate",
    "torchtitan_config",
    "total_parameters",
    "train_command",
]
