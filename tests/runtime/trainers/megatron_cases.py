"""What the ranks run with Megatron-Core's own model, data parallelism and training loop."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from optpipe import Schedule
from optpipe.runtime.overlap import PairedPass
from optpipe.runtime.trainers.megatron import forward_backward_func
from optpipe.schedule import Action
from tests.runtime.delaying import DelayingLinear, Product
from tests.runtime.trainers.megatron_shim import megatron_on_cpu

LAYERS = 8
MICROBATCHES = 8
LENGTH = 8
SAMPLES = 2
_WORDS = 64
STEPS = 2


@dataclass(frozen=True)
class Job:
    """A Megatron job: pipeline ranks, chunks on each, and what else its flags say.

    With ``half``, it trains in fp16 with a loss scaler. ``settings`` are of its configuration.
    """

    pipeline: int
    chunks: int = 1
    overlap: bool = False
    per_token: bool = False
    scale: float | None = None
    tensor: int = 1
    experts: bool = False
    distributed: bool = False
    pairs: bool = False
    delays: bool = False
    half: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    width: int = 16
    length: int = LENGTH


@dataclass
class Compared:
    """A rank's steps by our schedule beside Megatron's own: relative differences, and work done."""

    losses: float | None
    gradients: float
    parameters: float
    buffers: float
    logged: float
    evaluated: float | None
    num_gradients: int
    offloaded_bytes: int
    deferred_bytes: int
    restored: bool
    num_pairs: int


@dataclass
class _Trained:
    losses: list[float]
    evaluated: list[float]
    gradients: list[Tensor]
    parameters: list[Tensor]
    buffers: list[Tensor]
    logged: list[Tensor]


def compare_with_megatron(schedule: Schedule, job: Job) -> Compared:
    """Train two steps by Megatron's schedule and by ours, from one initialization."""
    with megatron_on_cpu(job.pipeline, job.chunks, job.tensor):
        from megatron.core.pipeline_parallel import get_forward_backward_func

        wanted, _ = _train(get_forward_backward_func(), replace(job, delays=False))
        pairs: list[PairedPass] = []

        def backward_first(forward: PairedPass, backward: PairedPass) -> None:
            backward.run()
            forward.run()
            pairs.append(forward)

        overlap = backward_first if job.pairs else None
        ours = forward_backward_func(schedule, min_offload_bytes=1, overlap=overlap)
        found, models = _train(ours, job)
        assert ours.runner is not None
        offloaded, deferred = ours.runner.offloaded_bytes, sum(ours.runner.deferred_bytes.values())
        ours.close()
        restored = not any(
            "_forward_impl" in one.__dict__ for model in models for one in model.modules()
        )
    return Compared(
        _worst(found.losses, wanted.losses),
        _worst_of(found.gradients, wanted.gradients),
        _worst_of(found.parameters, wanted.parameters),
        _worst_of(found.buffers, wanted.buffers),
        _worst_of(found.logged, wanted.logged),
        _worst(found.evaluated, wanted.evaluated),
        len(found.gradients),
        offloaded,
        deferred,
        restored,
        len(pairs),
    )


def _worst(ours: list[float], theirs: list[float]) -> float | None:
    assert len(ours) == len(theirs)
    pairs = zip(ours, theirs, strict=True)
    return max((abs(a - b) / abs(b) for a, b in pairs), default=None)


def _worst_of(ours: list[Tensor], theirs: list[Tensor]) -> float:
    pairs = list(zip(ours, theirs, strict=True))
    doubled = [(a.double(), b.double()) for a, b in pairs]
    return max((float((a - b).norm() / b.norm().clamp_min(1e-12)) for a, b in doubled), default=0.0)


def _train(run: Callable[..., list[Any]], job: Job) -> tuple[_Trained, list[nn.Module]]:
    models = models_of(job)
    parameters = [one for model in models for one in model.parameters()]
    optimizer = _optimizer(models, job)
    found = _Trained([], [], [], [], [], [])
    for step in range(STEPS):
        for model in models:
            model.zero_grad_buffer()  # type: ignore[operator]
        given = run(**arguments_of(models, job, step))
        found.losses += [float(one["lm loss"]) for one in given]
        found.logged += _take_logged()
        for parameter in parameters:
            gradient = parameter.main_grad.clone()  # type: ignore[attr-defined]
            found.gradients.append(gradient)
            if not (job.distributed or job.half):
                parameter.grad = gradient
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        given = run(**arguments_of(models, job, STEPS), forward_only=True)
    found.evaluated = [float(one["lm loss"]) for one in given]
    found.parameters = [one.detach().clone() for one in parameters]
    found.buffers = [one.clone() for model in models for _, one in model.named_buffers()]
    return found, models


def _take_logged() -> list[Tensor]:
    """Return what the routers have logged of their losses since the last call."""
    from megatron.core.transformer.moe import moe_utils

    logged = moe_utils.get_moe_layer_wise_logging_tracker()
    values = [logged[name]["values"].clone() for name in sorted(logged)]
    moe_utils.clear_aux_losses_tracker()
    return values


def _optimizer(models: list[nn.Module], job: Job) -> Any:
    if not (job.distributed or job.half):
        return torch.optim.Adam([one for model in models for one in model.parameters()], lr=1e-3)
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    settings = OptimizerConfig(
        optimizer="adam",
        lr=1e-3,
        use_distributed_optimizer=job.distributed,
        clip_grad=1.0,
        fp16=job.half,
        params_dtype=torch.half if job.half else torch.float32,
        # The scale doubles after the first step.
        initial_loss_scale=2.0**10,
        loss_scale_window=1,
    )
    optimizer = get_megatron_optimizer(settings, models, use_gloo_process_groups=False)
    if job.half:
        models[0].config.grad_scale_func = optimizer.scale_loss  # type: ignore[union-attr]
    return optimizer


def arguments_of(models: list[nn.Module], job: Job, step: int) -> dict[str, Any]:
    iterators = [_data(step, job.length) for _ in models]
    return {
        "forward_step_func": partial(_forward_step, job=job),
        "data_iterator": iterators if job.chunks > 1 else iterators[0],
        "model": models if job.chunks > 1 else models[0],
        "num_microbatches": MICROBATCHES,
        "seq_length": job.length,
        "micro_batch_size": SAMPLES,
    }


def _data(step: int, length: int = LENGTH) -> Iterator[dict[str, Tensor]]:
    from megatron.core import parallel_state

    generator = torch.Generator().manual_seed(10 * step + parallel_state.get_data_parallel_rank())
    for _ in range(MICROBATCHES):
        drawn = torch.randint(_WORDS, (SAMPLES, length + 1), generator=generator)
        yield {
            "tokens": drawn[:, :-1].contiguous(),
            "labels": drawn[:, 1:].contiguous(),
            "mask": (torch.rand(SAMPLES, length, generator=generator) > 0.2).float(),
        }


def _forward_step(items: Any, model: nn.Module, *, job: Job) -> tuple[Tensor, Any]:
    batch = next(items)
    positions = torch.arange(job.length).expand(SAMPLES, job.length)
    output = model(batch["tokens"], positions, None, labels=batch["labels"])
    return output, partial(_loss, batch["mask"], per_token=job.per_token)


def _loss(mask: Tensor, losses: Tensor, *, per_token: bool) -> Any:
    total = (losses * mask).sum()
    report = {"lm loss": (total / mask.sum()).detach()}
    if per_token:
        return total, mask.sum().to(torch.int), report
    return total / mask.sum(), report


def models_of(job: Job) -> list[nn.Module]:
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import Float16Module

    experts: dict[str, Any] = {}
    if job.experts:
        experts = {
            "num_moe_experts": 4,
            "moe_router_topk": 2,
            "moe_aux_loss_coeff": 1e-2,
            "moe_router_load_balancing_type": "aux_loss",
            "moe_token_dispatcher_type": "allgather",
            "add_bias_linear": False,
        }
    kind = torch.half if job.half else torch.float32
    settings: dict[str, Any] = {
        "num_layers": LAYERS,
        "hidden_size": job.width,
        "num_attention_heads": 2,
        "ffn_hidden_size": 2 * job.width,
        "use_cpu_initialization": True,
        "pipeline_model_parallel_size": job.pipeline,
        "virtual_pipeline_model_parallel_size": job.chunks if job.chunks > 1 else None,
        "fp16": job.half,
        "params_dtype": kind,
        "pipeline_dtype": kind,
        # In one batch, messages of two chunks between the same two ranks would be mixed up.
        "overlap_p2p_comm": job.chunks > 1,
        "batch_p2p_comm": job.chunks == 1,
        "gradient_accumulation_fusion": False,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
        "masked_softmax_fusion": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "calculate_per_token_loss": job.per_token,
        "tensor_model_parallel_size": job.tensor,
    }
    config = TransformerConfig(**(settings | experts | job.settings))
    stage, pipeline = parallel_state.get_pipeline_model_parallel_rank(), job.pipeline
    model_parallel_cuda_manual_seed(7 + stage)
    models: list[Any] = []
    for chunk in range(job.chunks):
        first = stage == 0 and chunk == 0
        last = stage == pipeline - 1 and chunk == job.chunks - 1
        model: Any = GPTModel(
            config,
            get_gpt_layer_local_spec(4 if job.experts else None),
            vocab_size=_WORDS,
            max_sequence_length=job.length,
            pre_process=first,
            post_process=last,
            share_embeddings_and_output_weights=True,
            vp_stage=chunk if job.chunks > 1 else None,
        )
        if job.delays:
            for layer in model.decoder.layers:
                for name in ("linear_fc1", "linear_fc2"):
                    setattr(layer.mlp, name, _DelayingParallel(getattr(layer.mlp, name)))
        if job.half:
            model = Float16Module(config, model)
        reduction = DistributedDataParallelConfig(
            delay_wgrad_compute=job.delays,
            overlap_grad_reduce=job.overlap,
            grad_reduce_in_fp32=True,
            bucket_size=1000,
            use_distributed_optimizer=job.distributed,
        )
        models.append(
            DistributedDataParallel(config, reduction, model, disable_bucketing=chunk > 0)
        )
    config.finalize_model_grads_func = finalize_model_grads
    if job.overlap:
        functions = [model.no_sync for model in models]
        config.no_sync_func = functions if job.chunks > 1 else functions[0]
    if job.scale is not None:
        config.grad_scale_func = lambda loss: loss * job.scale
    return models


class _DelayingParallel(DelayingLinear):
    """As Megatron's `TEColumnParallelLinear`: the bias is given on, and added by the caller."""

    def __init__(self, base: Any) -> None:
        super().__init__(base, delay_wgrad_compute=True)
        self.use_bias = False
        self.bias.skip_backward_post_hook = False  # type: ignore[attr-defined]

    def forward(self, given: Tensor) -> Any:
        how = self.wgrad_store, self.fp8
        return Product.apply(given, self.weight, None, how), self.bias


def timed_by_megatron(schedule: Schedule, job: Job, steps: int = 1) -> tuple[str, list[float]]:
    """Run steps under Megatron's timers; what it prints of them, and the milliseconds of each."""
    with megatron_on_cpu(job.pipeline, job.chunks):
        from megatron.core.timers import Timers

        models = models_of(job)
        config: Any = models[0].config
        run = forward_backward_func(schedule)
        run(**arguments_of(models, job, 0))
        config.timers = timers = Timers(2, "all")
        run.close()
        names = ["forward-backward", "forward-compute", "backward-compute"]
        printed, took_ms = [], []
        for step in range(1, steps + 1):
            run(**arguments_of(models, job, step))
            took_ms.append(1000 * timers("forward-backward").elapsed(reset=False))
            printed.append(timers.get_all_timers_string(names, reset=True))
        run.close()
        return "\n".join(text for text in printed if text), took_ms


def reductions_by_megatron(schedule: Schedule, job: Job) -> list[tuple[Action, set[int]]]:
    """The actions of a step, each with the stages whose gradients were being reduced before it."""
    seen: list[tuple[Action, set[int]]] = []
    with megatron_on_cpu(job.pipeline, job.chunks):
        from megatron.core import parallel_state

        models: list[Any] = models_of(job)
        run = forward_backward_func(schedule)
        run(**arguments_of(models, job, 0))
        assert run.runner is not None
        rank = parallel_state.get_pipeline_model_parallel_rank()
        own = [stage for stage, home in enumerate(schedule.placement) if home == rank]

        class Watcher:
            def begin(self, action: Action) -> None:
                groups = {stage: one.bucket_groups for stage, one in zip(own, models, strict=True)}
                begun = {
                    stage
                    for stage, found in groups.items()
                    if all(one.grad_reduce_handle is not None for one in found)
                }
                seen.append((action, begun))

            def end(self, action: Action) -> None:
                pass

        run.runner.observe(Watcher())
        run(**arguments_of(models, job, 1))
        run.close()
    return seen


def refused_by_megatron(schedule: Schedule, job: Job) -> list[str]:
    """What is said of calls that a schedule cannot run."""
    with megatron_on_cpu(job.pipeline, job.chunks):
        models = models_of(job)
        run = forward_backward_func(schedule)
        given = arguments_of(models, job, 0)
        config: Any = models[0].config
        config.variable_seq_lengths = True
        said = [_said(run, given)]
        config.variable_seq_lengths = False
        said.append(_said(run, given | {"num_microbatches": 3}))
        said.append(_said(run, given | {"adjust_tensor_shapes_fn": print}))
        run.close()
        swapped: Any = [models[0]] * 2
        both = {"model": swapped, "data_iterator": [_data(0), _data(0)]}
        said.append(_said(forward_backward_func(schedule), given | both))
        inner: Any = models[0].module
        inner.pre_process = not inner.pre_process
        said.append(_said(forward_backward_func(schedule), given))
    return said


def started_by_megatron(schedule: Schedule, job: Job) -> str:
    """What is said of a first step."""
    with megatron_on_cpu(job.pipeline, job.chunks):
        run = forward_backward_func(schedule)
        said = _said(run, arguments_of(models_of(job), job, 0))
        run.close()
    return said


def _said(run: Any, given: dict[str, Any]) -> str:
    try:
        run(**given)
    except Exception as error:  # noqa: BLE001 - compared by the test
        return f"{type(error).__name__}: {error} <- {error.__cause__}"
    return "not refused"
