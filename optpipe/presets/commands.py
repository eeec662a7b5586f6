"""The shell command that starts a training run of a configuration, on each of its hosts."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from optpipe.presets.configuration import Configuration

__all__ = ["PASTED_FILES", "train_command"]

PASTED_FILES = {"megatron": "arguments.sh", "torchtitan": "optpipe_config.py"}
"""Framework -> name of the file that it takes, where it has no other."""

_OUR_RUNTIME = """\
# train.py is yours: it reads what optpipe tune -o schedule.json --problem-out problem.json wrote,
# and has, with Megatron-Core, torchtitan, or any other model:
#   optpipe.runtime.trainers.megatron.forward_backward_func(schedule, problem)
#   partial(optpipe.runtime.trainers.torchtitan.pipeline_llm, schedule=schedule)
#   optpipe.runtime.PipelineRunner(stages, schedule, loss_fn, problem)"""


def train_command(configuration: Configuration, framework: str, file: str | None = None) -> str:
    """Return what bash starts on every host, where the file that was pasted lies.

    Parameters
    ----------
    configuration
        Its hosts are as few as take its accelerators, as many on each. Several are told apart by
        ``NODE_RANK``, 0 for the host of pipeline rank 0, and meet at ``MASTER_ADDR``; where kinds
        fill them unequally, ``LOCAL_GPUS`` says how many each has.
    framework
        ``megatron``: Megatron-LM's ``pretrain_gpt.py`` with the arguments, or a Megatron-Bridge
        recipe with the YAML; ``torchtitan``: its trainer with the config; ``any``: a script of
        yours that our runtime trains in.
    file
        Name of the arguments, the YAML (``.yaml``, ``.yml``) or the config, by default the name
        that the page gives it. A config's schedule, as CSV, is found by the config itself.

    Returns
    -------
    str
        One line, for ``any`` with lines of comment.
    """
    start = _torchrun(configuration)
    if framework == "any":
        return f"{start} train.py\n{_OUR_RUNTIME}"
    name = file or PASTED_FILES[framework]
    if framework == "torchtitan":
        module = name.rpartition("/")[2].removesuffix(".py")
        return f"{start} -m torchtitan.train --module {shlex.quote(module)} --config optpipe"
    start = f"{_connections(configuration)}{start}"
    if name.endswith((".yaml", ".yml")):
        return f"{start} pretrain_recipe.py --config-file {shlex.quote(name)}"
    variable, _, command = start.rpartition("torchrun")
    return f"{variable}xargs -a {shlex.quote(name)} torchrun{command} pretrain_gpt.py $DATA_ARGS"


def _torchrun(configuration: Configuration) -> str:
    kinds = configuration.kinds or (configuration.hardware,) * configuration.pipeline.pp
    hosts, locals_ = 0, set()
    for kind in dict.fromkeys(kinds):
        number = kinds.count(kind) * configuration.training.ranks
        least = -(-number // kind.gpus_per_host)
        own = next(count for count in range(least, number + 1) if number % count == 0)
        hosts += own
        locals_.add(number // own)
    start = "torchrun --nproc-per-node " + (str(*locals_) if len(locals_) == 1 else '"$LOCAL_GPUS"')
    if hosts == 1:
        return start
    return f'{start} --nnodes {hosts} --node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR"'


def _connections(configuration: Configuration) -> str:
    """Return how many queues CUDA has, where Megatron-LM asks for a number of its own.

    ``validate_args`` of megatron/training/arguments.py (NVIDIA/Megatron-LM, commit 000c4ac): 1
    before Blackwell, with tensor or context parallel ranks, but not with FSDP; more for exchanges
    of experts that overlap.
    """
    training = configuration.training
    if training.ep_overlap or configuration.pipeline.pairs:
        return "CUDA_DEVICE_MAX_CONNECTIONS=32 "
    kinds = configuration.kinds or (configuration.hardware,)
    is_newer = all(one.generation.startswith("blackwell") for one in kinds)
    if is_newer or training.zero >= 2 or max(training.tp, training.cp) == 1:
        return ""
    return "CUDA_DEVICE_MAX_CONNECTIONS=1 "
