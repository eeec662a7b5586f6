"""A whole configuration (model, accelerator, degrees, the pipeline's cut), and its commands."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING

from optpipe.errors import InputError
from optpipe.planning.machine import Machine
from optpipe.planning.step import step_estimate
from optpipe.problem import StageLayers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optpipe.planning.accelerators import Hardware
    from optpipe.planning.shape import ModelShape, Training
    from optpipe.planning.step import PipelineCut

__all__ = ["PASTED_FILES", "Configuration", "has_pasted_file", "host_notes", "train_command"]


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """The settings of a training run on which its time and memory depend.

    Parameters
    ----------
    shape, hardware, training, pipeline
        As `optpipe.planning.step_estimate` takes them.
    sizes
        Layers of each stage in model order, embedding and head counted as layers; empty where
        the pipeline's layout says them.
    kinds
        The accelerator of each pipeline rank where they differ, else empty. ``hardware`` is then
        any of them.
    not_modelled
        Options of a script that no estimate counts, each with what it changes: ``moe_permute_fusion
        (time)``.
    """

    shape: ModelShape
    hardware: Hardware
    training: Training
    pipeline: PipelineCut
    sizes: tuple[int, ...] = ()
    kinds: tuple[Hardware, ...] = ()
    not_modelled: tuple[str, ...] = field(default=(), compare=False)

    @property
    def num_gpus(self) -> int:
        """Accelerators of all replicas."""
        return self.training.ranks * self.pipeline.pp

    @property
    def global_batch(self) -> int:
        """Sequences of a step, over all replicas."""
        return self.training.dp * self.training.micro_batch * self.pipeline.num_microbatches

    @property
    def gpus_per_node(self) -> int:
        """Accelerators that NVLink joins; of several kinds the fewest."""
        return min(one.gpus_per_node for one in (self.kinds or (self.hardware,)))

    @property
    def degrees(self) -> dict[str, int]:
        """Abbreviation -> degree. VPP is the stages of a rank, MBS the micro-batch size."""
        training, cut = self.training, self.pipeline
        names = {"CP": training.cp, "EP": training.ep, "ETP": training.etp, "DP": training.dp}
        layout = {"TP": training.tp, "PP": cut.pp, "VPP": cut.chunks}
        return layout | names | {
            "MBS": training.micro_batch, "ZeRO": training.zero, "slices": cut.slices
        }  # fmt: skip

    @property
    def switches(self) -> tuple[str, ...]:
        """The recomputed modules (``recompute mlp``), and ``pairs`` if passes run in pairs."""
        training, cut = self.training, self.pipeline
        recomputed = tuple(f"recompute {module}" for module in sorted(training.recompute))
        return recomputed + (("pairs",) if cut.pairs else ())

    @property
    def order_of_kinds(self) -> str:
        """The kinds of GPU along the pipeline, ``4 h100 then 4 a100``; empty if there is one."""
        groups = [(one.name, len(list(same))) for one, same in groupby(self.kinds)]
        return " then ".join(f"{number} {name}" for name, number in groups)

    @property
    def label(self) -> str:
        """``TP 4 PP 8 VPP 5 DP 2 MBS 1 ...``: the degrees above 1 and the switches."""
        shown = [
            f"{name} {value}"
            for name, value in self.degrees.items()
            if value != 1 or name in {"TP", "PP", "DP", "MBS"}
        ]
        if self.kinds:
            shown.append(f"on {self.order_of_kinds}")
        if self.training.recompute:
            shown.append(f"recompute {','.join(sorted(self.training.recompute))}")
        if self.pipeline.pairs:
            shown.append("pairs")
        return " ".join(shown)

    @cached_property
    def stages(self) -> tuple[StageLayers, ...]:
        """The layers of each stage, in model order.

        Raises
        ------
        InputError
            If there is not one size for each stage, or they are not the model's layers.
        """
        shape, count = self.shape, self.pipeline.pp * self.pipeline.chunks
        kinds = ("embedding", *["transformer"] * shape.num_layers, *["mtp"] * shape.mtp, "head")
        sizes = self.sizes or ((len(kinds),) if count == 1 else ())
        if not sizes:
            ranks = self.kinds or (self.hardware,) * self.pipeline.pp
            machines = [Machine(one, one.efficiency, self.training) for one in ranks]
            sizes = step_estimate(self.shape, machines, self.pipeline).sizes
        if len(sizes) != count or sum(sizes) != len(kinds) or min(sizes) < 0:
            raise InputError(
                f"sizes {list(sizes[:16])}: must be {count}, one for each stage, and together the "
                f"{len(kinds)} layers of {shape.name!r}, embedding and head counted; correct them"
            )
        stages, start = [], 0
        for size in sizes:
            own = kinds[start : start + size]
            stages.append(StageLayers(**{kind: own.count(kind) for kind in set(own)}))
            start += size
        return tuple(stages)


# --- The shell command that starts a training run, on each of its hosts.

PASTED_FILES = {"megatron": "arguments.sh", "torchtitan": "optpipe_config.py"}
"""Framework -> name of the file that it takes, where it has no other."""

_OUR_RUNTIME = """\
# train.py is your script. Its process groups and settings are:
#   {degrees}
#   {settings}
#   layers of each stage, embedding and head counted: {layers}
# It reads what optpipe tune -o schedule.json --problem-out problem.json wrote, and calls, with
# Megatron-Core, torchtitan, or any other model:
#   optpipe.runtime.trainers.megatron.forward_backward_func(schedule, problem)
#   partial(optpipe.runtime.trainers.torchtitan.pipeline_llm, schedule=schedule)
#   optpipe.runtime.PipelineRunner(stages, schedule, loss_fn, problem)
# Stages of a model of transformers: optpipe.runtime.trainers.huggingface.build_stages; with tp
# above 1 each is divided by shard_layers of the same module, before fully_shard."""


def train_command(configuration: Configuration, framework: str, file: str | None = None) -> str:
    """Return the bash command that starts the training on each host, in the pasted file's folder.

    Parameters
    ----------
    configuration
        The command uses the minimum number of hosts for its accelerators, with as many on each.
        ``NODE_RANK`` is the index of a host, 0 for that of pipeline rank 0. Hosts meet at
        ``MASTER_ADDR``. If kinds fill hosts unequally, ``LOCAL_GPUS`` is the number of each.
    framework
        ``megatron``: Megatron-LM's ``pretrain_gpt.py`` with the arguments, or a Megatron-Bridge
        recipe with the YAML; ``torchtitan``: its trainer with the config; ``any``,
        ``huggingface``, and a traced model: a script of yours that our runtime trains in.
    file
        Name of the arguments, the YAML (``.yaml``, ``.yml``) or the config, by default the name
        that the page gives it. A config's schedule, as CSV, is found by the config itself.

    Returns
    -------
    str
        One line; for a script of yours with comments that list the degrees, which no pasted file
        has.
    """
    start = _torchrun(configuration)
    if not has_pasted_file(configuration.shape, framework):
        training, cut = configuration.training, configuration.pipeline
        names = ("dp", "cp", "tp", "ep", "etp")
        degrees = {"pp": cut.pp} | {name: getattr(training, name) for name in names}
        settings = {
            "zero": training.zero,
            "recompute": ",".join(sorted(training.recompute)) or "none",
            "sequence": training.sequence,
            "micro_batch": training.micro_batch,
            "num_microbatches": cut.num_microbatches,
            "slices": cut.slices,
        }
        comments = _OUR_RUNTIME.format(
            degrees=" ".join(f"{name}={value}" for name, value in degrees.items()),
            settings=" ".join(f"{name}={value}" for name, value in settings.items()),
            layers=",".join(str(stage.total) for stage in configuration.stages),
        )
        return f"{start} train.py\n{comments}"
    name = file or PASTED_FILES[framework]
    if framework == "torchtitan":
        module = name.rpartition("/")[2].removesuffix(".py")
        return f"{start} -m torchtitan.train --module {shlex.quote(module)} --config optpipe"
    start = f"{_connections(configuration)}{start}"
    if name.endswith((".yaml", ".yml")):
        return f"{start} pretrain_recipe.py --config-file {shlex.quote(name)}"
    file = shlex.quote(name if "/" in name else f"./{name}")
    arguments = '${DATA_ARGS[@]} "${OPTPIPE_ARGS[@]}"'
    return f"source {file} && {start} pretrain_gpt.py {arguments}"


def has_pasted_file(shape: ModelShape, framework: str) -> bool:
    """Whether a framework's configuration file can be written; of a traced model it cannot."""
    return framework in PASTED_FILES and shape.trace is None


def _gpus_and_hosts(configuration: Configuration) -> Iterator[tuple[Hardware, int, int]]:
    """Yield each kind of GPU, its number of GPUs, and its number of equally filled hosts."""
    kinds = configuration.kinds or (configuration.hardware,) * configuration.pipeline.pp
    for kind in dict.fromkeys(kinds):
        number = kinds.count(kind) * configuration.training.ranks
        least = -(-number // kind.gpus_per_host)
        yield kind, number, next(n for n in range(least, number + 1) if number % n == 0)


def host_notes(configuration: Configuration) -> Iterator[str]:
    """Yield a note for each kind whose GPUs do not fill their hosts."""
    for kind, number, hosts in _gpus_and_hosts(configuration):
        size = kind.gpus_per_host
        if hosts > 1 and number % size:
            fewer = number - number % size
            yield (
                f"{number} {kind.name} GPUs do not fill hosts of {size}: the command "
                f"starts {number // hosts} on each of {hosts} hosts; {fewer} or {fewer + size} "
                "GPUs fill their hosts"
            )


def _torchrun(configuration: Configuration) -> str:
    hosts, locals_ = 0, set()
    for _, number, own in _gpus_and_hosts(configuration):
        hosts += own
        locals_.add(number // own)
    start = "torchrun --nproc-per-node " + (str(*locals_) if len(locals_) == 1 else '"$LOCAL_GPUS"')
    if hosts == 1:
        return start
    return f'{start} --nnodes {hosts} --node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR"'


def _connections(configuration: Configuration) -> str:
    """Return the setting of CUDA's number of queues that Megatron-LM requires, or "".

    The number is 1 before Blackwell, with tensor or context parallel ranks, but not with FSDP.
    Overlapping exchanges of experts need more. Source: ``validate_args`` of
    megatron/training/arguments.py (NVIDIA/Megatron-LM, commit 000c4ac).
    """
    training = configuration.training
    if training.ep_overlap or configuration.pipeline.pairs:
        return "CUDA_DEVICE_MAX_CONNECTIONS=32 "
    kinds = configuration.kinds or (configuration.hardware,)
    is_newer = all(one.generation.startswith("blackwell") for one in kinds)
    if is_newer or training.zero >= 2 or max(training.tp, training.cp) == 1:
        return ""
    return "CUDA_DEVICE_MAX_CONNECTIONS=1 "
