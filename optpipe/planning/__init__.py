"""Models and accelerators by name, and costs of models on them: estimates, not measurements.

``estimate(find_model("llama3-70b"), find_gpu("h100"), Training(tp=8), pp=8, num_microbatches=64)``
returns a problem to solve, a model to cut in other ways, and the time of a step.
"""

from optpipe.planning.accelerators import GPUS, Efficiency, Hardware, find_gpu, find_gpus
from optpipe.planning.benchmark_script import benchmark_script
from optpipe.planning.catalogue import (
    MEGATRON,
    MODEL_TYPES,
    MODELS,
    find_model,
    shape_from_config,
)
from optpipe.planning.configuration import Configuration, train_command
from optpipe.planning.estimate import Estimate, estimate
from optpipe.planning.frameworks.megatron import megatron_arguments, megatron_script, megatron_yaml
from optpipe.planning.frameworks.megatron_reader import (
    count_launched_gpus,
    find_model_of,
    read_megatron,
)
from optpipe.planning.frameworks.torchtitan import read_torchtitan, torchtitan_config
from optpipe.planning.machine import Machine
from optpipe.planning.parameters import total_parameters
from optpipe.planning.shape import (
    Experts,
    LatentAttention,
    LayerForm,
    Lora,
    ModelShape,
    Training,
)
from optpipe.planning.step import PipelineCut, StepEstimate, step_estimate
from optpipe.planning.trace import TracedModel
from optpipe.planning.traced_costs import shape_of_trace

__all__ = [
    "GPUS",
    "MEGATRON",
    "MODELS",
    "MODEL_TYPES",
    "Configuration",
    "Efficiency",
    "Estimate",
    "Experts",
    "Hardware",
    "LatentAttention",
    "LayerForm",
    "Lora",
    "Machine",
    "ModelShape",
    "PipelineCut",
    "StepEstimate",
    "TracedModel",
    "Training",
    "benchmark_script",
    "count_launched_gpus",
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
    "shape_of_trace",
    "step_estimate",
    "torchtitan_config",
    "total_parameters",
    "train_command",
]
