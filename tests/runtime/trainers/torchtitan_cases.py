"""What the ranks run with torchtitan's own model, parallelism, loss, pipeline and trainer."""

import dataclasses
import gc
import inspect
import json
import random
import shutil
import tempfile
import time
import types
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from optpipe import Schedule
from optpipe.runtime import passes
from tests.runtime.watching import counted

MICROBATCHES = 8
STEPS = 10
_LENGTH = 8
_WORDS = 2048
_CPU = torch.device("cpu")


@dataclass
class Titan:
    """A rank's steps: losses by torchtitan's 1F1B and by ours, and what ours did."""

    wanted: list[float]
    found: list[float]
    evaluated: float | None
    own_evaluation: float | None
    num_stages: int
    offloaded_bytes: int
    deferred_bytes: int
    num_stacked: int
    """Gradients of experts' stacked weights that W's made."""


def train_titan(
    schedule: Schedule, data_parallel: int, device: torch.device = _CPU, *,
    experts: bool = False, steps: int = STEPS,
) -> Titan:  # fmt: skip
    """Train a debug model of torchtitan's twice, from the same values, on four ranks.

    Llama's, or with ``experts`` DeepSeek's, whose parameters FSDP2 gathers in bf16.
    """
    shim_torchtitan(on_cpu=device.type == "cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchtitan.distributed.pipeline_parallel import pipeline_llm as own

        from optpipe.runtime.trainers.torchtitan import pipeline_llm

        wanted, evaluated, _ = _train(own, data_parallel, device, steps, experts=experts)
        ours = partial(pipeline_llm, schedule=schedule, min_offload_bytes=1)
        with counted(passes._GroupedDeferred, "make") as stacked:
            found, own_evaluation, pp_schedule = _train(
                ours, data_parallel, device, steps, experts=experts
            )
    runner = pp_schedule.runner
    pp_schedule.close()
    return Titan(
        wanted,
        found,
        evaluated,
        own_evaluation,
        len(pp_schedule.parts),
        runner.offloaded_bytes,
        sum(runner.deferred_bytes.values()),
        stacked.call_count,
    )


def _train(
    pipeline: Callable[..., Any],
    data_parallel: int,
    device: torch.device,
    steps: int,
    *,
    experts: bool,
) -> tuple[list[float], Any, Any]:
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims

    spec = _spec(experts=experts)
    parallelism = ParallelismConfig(
        pipeline_parallel_degree=4 // data_parallel,
        data_parallel_shard_degree=data_parallel,
        pipeline_parallel_schedule="1F1B",
        pipeline_parallel_microbatch_size=1,
        spmd_backend="partial_dtensor",
    )
    dims = ParallelDims.from_config(parallelism, 4)
    dims.build_mesh()
    with torch.device("meta"):
        model = spec.model.build()
    pp_schedule, parts, first, last = pipeline(
        model,
        parallel_dims=dims,
        training=TrainingConfig(local_batch_size=MICROBATCHES, seq_len=_LENGTH),
        parallelism=parallelism,
        compile_config=CompileConfig(),
        ac_config=None,
        dump_folder="",
        device=device,
        model_config=spec.model,
        parallelize_fn=spec.parallelize_fn,
        loss_fn=CrossEntropyLoss(CrossEntropyLoss.Config()),
    )
    for part in parts:
        part.to_empty(device=device)
        with torch.no_grad():
            part.init_states(buffer_device=device)
            _draw(part)
    optimizer = torch.optim.AdamW([one for part in parts for one in part.parameters()], lr=1e-3)
    losses = []
    column = dist.get_rank() % data_parallel
    for step in range(steps):
        optimizer.zero_grad()
        found = _run(pp_schedule.step, _data(step, column, device), first=first, last=last)
        optimizer.step()
        losses += [] if found is None else [found]
    evaluated = _run(pp_schedule.eval, _data(STEPS, column, device), first=first, last=last)
    return losses, evaluated, pp_schedule


def _spec(*, experts: bool = False) -> Any:
    from torchtitan.models import deepseek_v3, llama3
    from torchtitan.models.common.attention import ScaledDotProductAttention

    spec: Any = (deepseek_v3 if experts else llama3).model_registry("debugmodel")
    for layer in spec.model.layers:
        # Flex attention is compiled, by a compiler that this machine has not.
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return dataclasses.replace(spec, parallelize_fn=_summing(spec.parallelize_fn))


def _data(step: int, column: int, device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + column)
    tokens = torch.randint(_WORDS, (MICROBATCHES, _LENGTH + 1), generator=generator)
    tokens = tokens.to(device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _run(
    call: Callable[..., Any], data: tuple[Tensor, Tensor], *, first: bool, last: bool
) -> float | None:
    """Call as torchtitan's trainer does."""
    tokens, labels = data
    losses: list[Tensor] | None = [] if last else None
    call(
        arg_mbs=[(one,) for one in tokens.chunk(MICROBATCHES)] if first else None,
        kwarg_mbs=[{}] * MICROBATCHES,
        target_mbs=list(labels.chunk(MICROBATCHES)) if last else None,
        losses=losses,
        loss_kwargs={"global_valid_tokens": torch.tensor(float(labels.numel()))},
        return_outputs=False,
    )
    return float(torch.stack(losses).sum().detach()) if losses else None


def _draw(part: nn.Module) -> None:
    """Give every parameter values that depend on its name alone."""
    for name, parameter in part.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        whole = 0.05 * torch.randn(parameter.shape, generator=generator)
        if parameter.dim() == 1:
            whole += 1
        if isinstance(parameter, DTensor):
            parameter.copy_(distribute_tensor(whole, parameter.device_mesh, parameter.placements))
        else:
            parameter.copy_(whole)


# --- The whole trainer.


@dataclass
class TitanLog:
    """A rank's run of torchtitan's whole trainer: losses and norms by step, and what ours did."""

    losses: dict[int, float]
    norms: dict[int, float]
    offloaded_bytes: int = 0
    deferred_bytes: int = 0


@dataclass(frozen=True)
class TitanRun:
    """One start of the trainer; by ``schedule`` if there is one, else by torch's own runtime.

    ``resume`` is another run's folder and step. ``csv`` is a file for torch's runtime, ``name`` the
    schedule that says how many stages there are and where.
    """

    folder: str
    steps: int = STEPS
    name: str = "1F1B"
    schedule: Schedule | None = None
    csv: str = ""
    resume: tuple[str, int] | None = None
    tensor_parallel: int = 1


def train_by_trainer(run: TitanRun) -> TitanLog:
    """Start torchtitan's own trainer on four ranks; its tokenizer, data and checkpoints with it."""
    shim_torchtitan()
    with warnings.catch_warnings(), torchtitan_words() as words:
        warnings.simplefilter("ignore")
        from torchtitan.trainer import Trainer as Own

        trainer = Own(_trainer_config(run, words))
        found = TitanLog({}, {})
        log = trainer.metrics_processor.log

        def noted(step: int, loss: float, most: float, norm: float, **others: Any) -> None:
            found.losses[step], found.norms[step] = loss, norm
            log(step, loss, most, norm, **others)

        trainer.metrics_processor.log = noted
        try:
            trainer.train()
        finally:
            trainer.close()
            gc.enable()
    pp_schedule: Any = trainer.pp_schedule
    if run.schedule is not None:
        pp_schedule.close()
        found.offloaded_bytes = pp_schedule.runner.offloaded_bytes
        found.deferred_bytes = sum(pp_schedule.runner.deferred_bytes.values())
    if not trainer.pp_has_last_stage:
        found.losses.clear()
    return found


def _trainer_config(run: TitanRun, words: str) -> Any:
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
    from torchtitan.config import ParallelismConfig, TrainingConfig
    from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
    from torchtitan.trainer import Trainer as Own

    from optpipe.runtime.trainers.torchtitan import pipeline_llm

    spec = _spec()
    if run.schedule is not None:
        ours = partial(pipeline_llm, schedule=run.schedule, min_offload_bytes=1)
        spec = dataclasses.replace(spec, pipelining_fn=ours)
    folder = Path(run.folder)
    if run.resume is not None and dist.get_rank() == 0:
        there, step = run.resume
        name = f"checkpoint/step-{step}"
        shutil.copytree(Path(there, name), Path(run.folder, name))
    dist.barrier()
    return Own.Config(
        model_spec=spec,
        loss=CrossEntropyLoss.Config(),
        hf_assets_path=words,
        dump_folder=str(folder),
        optimizer=default_adamw(lr=1e-3),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(
            local_batch_size=MICROBATCHES,
            seq_len=_LENGTH,
            steps=run.steps,
            mixed_precision_param="float32",
            disable_cuda_graphs=True,
        ),
        dataloader=HuggingFaceTextDataLoader.Config(dataset="words"),
        metrics=MetricsProcessor.Config(log_freq=1, disable_color_printing=True),
        parallelism=ParallelismConfig(
            pipeline_parallel_degree=4 // run.tensor_parallel,
            data_parallel_shard_degree=1,
            tensor_parallel_degree=run.tensor_parallel,
            pipeline_parallel_schedule=run.name,
            pipeline_parallel_schedule_csv=run.csv,
            pipeline_parallel_microbatch_size=1,
            spmd_backend="partial_dtensor",
        ),
        checkpoint=CheckpointManager.Config(
            enable=True, interval=1, last_save_model_only=False, keep_latest_k=0
        ),
        activation_checkpoint=None,
    )


@contextmanager
def torchtitan_words() -> Iterator[str]:
    """A folder with a tokenizer of some words, and texts of them as a data set; a few kB."""
    from datasets import Dataset  # type: ignore[import-untyped]
    from tokenizers import Tokenizer, models, pre_tokenizers
    from torchtitan.hf_datasets import DatasetConfig
    from torchtitan.hf_datasets.text_datasets import DATASETS

    names = [f"w{index}" for index in range(200)]
    tokenizer = Tokenizer(
        models.WordLevel({one: i for i, one in enumerate(["<s>", *names])}, "<s>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    chooser = random.Random(3)
    texts = [{"text": " ".join(chooser.choices(names, k=40))} for _ in range(40)]
    DATASETS["words"] = DatasetConfig(
        "", lambda _: Dataset.from_list(texts), lambda one: one["text"]
    )
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(f"{folder}/tokenizer.json")
        settings = {"bos_token": "<s>", "eos_token": "<s>"}
        Path(folder, "tokenizer_config.json").write_text(json.dumps(settings))
        yield folder


def _summing(parallelize: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Let sharded parts reduce by sums: gloo knows no scaled ones."""

    def done(part: nn.Module, **settings: Any) -> nn.Module:
        parallel = parallelize(part, **settings)
        for module in parallel.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
        return parallel

    return done


def shim_torchtitan(*, on_cpu: bool = True) -> None:
    """What torchtitan asks of a GPU and a newer torch; before anything else of it is imported."""
    import torchtitan.tools.utils as tools

    if getattr(tools, "is_shimmed", False):
        return
    tools.is_shimmed = True
    if on_cpu:
        _shim_device(tools)
    import torchtitan.trainer
    from torch.distributed.pipelining import schedules as theirs

    # Rank 0 sleeps at the end.
    torchtitan.trainer.time = types.SimpleNamespace(
        sleep=lambda _: None, perf_counter=time.perf_counter
    )
    # Of a torch that is newer than 2.13: `set_timeout`, and schedules that are handed lists; of one
    # that is newer than 2.12: `loss_kwargs`.
    torchtitan.trainer.dist_utils.set_pg_timeouts = lambda **_: None  # type: ignore[assignment,unused-ignore]
    for kind in (theirs.PipelineScheduleSingle, theirs.PipelineScheduleMulti):
        kind.step = _by_lists(kind.step)  # type: ignore[method-assign,unused-ignore]


def _shim_device(tools: Any) -> None:
    device = types.SimpleNamespace(
        set_device=lambda _: None,
        current_device=lambda: 0,
        synchronize=lambda: None,
        empty_cache=lambda: None,
        reset_peak_memory_stats=lambda: None,
        memory_stats=lambda _: {},
        get_device_name=lambda _: "cpu",
        get_device_properties=lambda _: types.SimpleNamespace(total_memory=1 << 30),
    )
    tools.device_type, tools.device_module = "cpu", device
    tools.get_local_device = lambda: torch.device("cpu")


def _by_lists(step: Callable[..., Any]) -> Callable[..., Any]:
    def run(
        self: Any, *args: Any, arg_mbs: Any = None, kwarg_mbs: Any = None, target_mbs: Any = None,
        **given: Any,
    ) -> Any:  # fmt: skip
        if kwarg_mbs is not None:
            args = tuple(torch.cat(one) for one in zip(*(arg_mbs or ()), strict=True))
            given |= {name: torch.cat([one[name] for one in kwarg_mbs]) for name in kwarg_mbs[0]}
            given["target"] = torch.cat(target_mbs) if target_mbs else None
        if "loss_kwargs" in inspect.signature(step).parameters:
            return step(self, *args, **given)
        loss_fn = self._loss_fn
        self._loss_fn = partial(loss_fn, **(given.pop("loss_kwargs", None) or {}))
        try:
            return step(self, *args, **given)
        finally:
            self._loss_fn = loss_fn

    return run
