"""Keyword arguments of the client, from the requests by ``make client``.

What is left out, or None, takes the default of the service.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = [
    "BatchArguments",
    "CurrentDegrees",
    "EstimateArguments",
    "FollowArguments",
    "JobArguments",
    "ModelArguments",
    "SearchArguments",
    "SolveArguments",
    "SubmitArguments",
    "SweepArguments",
    "TuneArguments",
]


class BatchArguments(TypedDict, total=False):
    """Arguments of every submission; `AsyncClient` explains them."""

    tags: Sequence[str] | None
    priority: int | None
    idempotency_key: str | None


class JobArguments(BatchArguments, total=False):
    """Arguments of every submission of a job; `AsyncClient` explains them."""

    wait_s: float


class SearchArguments(TypedDict, total=False):
    """Options of every search."""

    # Time limit of the search in seconds.
    time_limit_s: float | None
    # CPU threads. With two or more, search and lower bounds run in parallel.
    threads: int | None
    # Seed of all random numbers.
    seed: int | None


class SolveArguments(SearchArguments, total=False):
    """Options to solve a problem."""

    # `auto` (optimises), `milp`, or a published method that `optpipe compare` and `/v1/methods`
    # list.
    method: str | None
    # Gap at which the search stops: (objective - bound) / objective, e.g. 0.01.
    gap: float | None
    # Limit of the search in units of work. A unit is counted in iterations and takes about one
    # second of one core. The result is then the same on every machine, unless the time limit ends
    # the search first.
    work_limit: float | None
    # `use` accepts an earlier result; `refresh` solves again.
    cache: Literal["use", "refresh"] | None


class SubmitArguments(SolveArguments, JobArguments, total=False):
    """Options to solve a problem or to plan a model; chunks and placements are for plans."""

    # Numbers of stages per device to try, each 1-8. By default 1,2,4.
    chunks: Sequence[int] | None
    # Placements to try: linear, loop, v, and free (other orders of the devices). By default all.
    placements: Sequence[Literal["linear", "loop", "v", "free"]] | None
    # Objective to minimise, instead of that of the problem or model.
    objective: Literal["makespan", "span"] | None
    # Percentile of the objective under noise that ranks schedules, such as P90. Bound and gap are
    # those without noise.
    robust: str | None
    # With robust: share (0-1) by which the duration of each action varies.
    jitter: float | None
    # With robust: share (0-1) by which all compute durations of a device vary together.
    stragglers: float | None


class FollowArguments(SolveArguments, JobArguments, total=False):
    """Measured times of a training run, and the schedule that runs."""

    # Minimum gain of another schedule, as a share (0-1) of the step. The problem is solved again
    # only where drift costs more.
    threshold: float | None
    # Number of the measured step.
    step: int | None
    # Duration of a step in milliseconds.
    step_ms: float | None


class SweepArguments(SolveArguments, BatchArguments, total=False):
    """A problem and axes to vary it along, a list of problems, or a job whose problem to vary."""

    # Name of the batch. By default the problem's.
    name: str | None


class ModelArguments(TypedDict, total=False):
    """A model, accelerators, and training settings other than degrees of parallelism."""

    # Model of the catalogue (`optpipe estimate --list`, `/v1/presets`).
    model: str | None
    # Hugging Face config.json, instead of a model of the catalogue.
    config: dict[str, Any] | None
    # Traced model (optpipe/trace/v1), instead of a config. `python -m
    # optpipe.runtime.measuring.trace_model` writes one.
    trace: dict[str, Any] | None
    # Costs of the layers of config: formula (Megatron's kernels), or trace (the model's own code
    # in transformers). By default formula if its model_type has one.
    costs_from: Literal["formula", "trace"] | None
    # Display name of the model in config or trace.
    name: str | None
    # Accelerator of the catalogue, and how many, such as h100:64. Of several kinds
    # (h100:32,a100:32) each is a part of the pipeline.
    gpu: str | None
    # Tokens per sequence.
    sequence: int | None
    # Lengths in tokens of the sequences that are packed into one, everywhere the same. None
    # attends to another. Their sum replaces sequence.
    packed_lengths: Sequence[int] | None
    # Precision of the layers' matrix products: bf16, fp16, fp8, mxfp8, nvfp4, fp32.
    precision: Literal["bf16", "fp16", "fp8", "mxfp8", "nvfp4", "fp32"] | None
    # Flash attention; without it, attention scores are stored.
    flash: bool | None
    # CUDA graphs: kernel launches take no time.
    cuda_graphs: bool | None
    # Overlap of the experts' all-to-all with the compute of other micro-batches.
    ep_overlap: bool | None
    # Dispatcher of tokens: alltoall sends a copy per expert, deduplicated sends one per rank
    # (DeepEP, HybridEP), allgather sends every token to all ranks of the experts.
    dispatcher: Literal["allgather", "alltoall", "deduplicated"] | None
    # Precision of tokens sent to their experts.
    dispatch: Literal["bf16", "fp8"] | None
    # Load of the busiest expert-parallel rank relative to the mean, or how often each expert is
    # chosen.
    expert_imbalance: Sequence[float] | None
    # Tokens per expert relative to the mean above which tokens are dropped (Megatron-Core's
    # moe_expert_capacity_factor).
    expert_capacity: float | None
    # Experts compute as many tokens as expert_capacity allows (moe_pad_expert_input_to_capacity).
    pad_experts: bool | None
    # Load for which a rank's buffers are allocated (moe_expert_rank_capacity_factor).
    expert_rank_capacity: float | None
    # Paged activations of experts (moe_paged_stash).
    paged_stash: bool | None
    # Overlap of collectives with compute.
    overlap: bool | None
    # Optimizer: adam (two moments), sgd (momentum) or muon.
    optimizer: Literal["adam", "sgd", "muon"] | None
    # Adam with moments narrower than fp32 and master weights of 2 bytes (Megatron-Core's flag of
    # this name).
    precision_aware_optimizer: bool | None
    # Type of Adam's first moment; other types than fp32 need the precision-aware optimizer.
    exp_avg_dtype: Literal["fp32", "bf16", "fp16", "fp8"] | None
    # Type of Adam's second moment.
    exp_avg_sq_dtype: Literal["fp32", "bf16", "fp16", "fp8"] | None
    # Type in which gradients are accumulated and reduced.
    gradient_dtype: Literal["fp32", "bf16"] | None
    # Kernels and weights: megatron (fused kernels, bf16 and master weights) or torch (PyTorch
    # operators, FSDP2's fp32 shards). By default the framework's.
    kernels: Literal["megatron", "torch"] | None
    # With kernels torch: torch.compile fuses the operators of layers and loss.
    compiled: bool | None
    # Share (0-1) of the optimizer's states and step on the CPU (Megatron-Core's
    # optimizer_offload_fraction).
    optimizer_offload: float | None
    # LoRA: rank of the adapters, which are trained while the model is frozen. By default all
    # weights are trained.
    lora_rank: int | None
    # LoRA: matrices that have an adapter, by Megatron-Bridge's names: linear_qkv, linear_proj,
    # linear_fc1, linear_fc2, linear_q_proj, linear_q_down_proj, linear_q_up_proj,
    # linear_kv_down_proj, linear_kv_up_proj.
    lora_targets: Sequence[str] | None
    # Network between nodes: infiniband, ethernet or tcp, and Gbit/s per GPU.
    network: str | None
    # Divisor of the bandwidth between nodes.
    oversubscription: float | None
    # Memory per device, instead of the data sheet's.
    memory_bytes: int | None
    # Measured duration of a step in seconds; calibrates every duration.
    measured_step_s: float | None
    # Measured peak of the framework's allocator in GiB, the largest of all ranks; calibrates
    # activations and buffers.
    measured_peak_gib: float | None


class EstimateArguments(ModelArguments, total=False):
    """A model on accelerators with degrees of parallelism, and values to vary the problem by."""

    # Devices of the pipeline.
    pp: int | None
    # Tensor-parallel degree.
    tp: int | None
    # Context-parallel degree.
    cp: int | None
    # Expert-parallel degree; ep x etp divides tp x cp x dp.
    ep: int | None
    # Tensor-parallel degree of the experts.
    etp: int | None
    # Data-parallel degree. By default 1, or the number of GPUs determines it.
    dp: int | None
    # Sequences per micro-batch.
    micro_batch: int | None
    # Micro-batches per step.
    num_microbatches: int | None
    # Stages per device.
    chunks: int | None
    # Placement: linear, loop or v. By default linear, or loop with several chunks.
    placement: Literal["linear", "loop", "v"] | None
    # Cut: balanced makes the slowest stage as fast as possible, even cuts as frameworks do.
    layout: Literal["balanced", "even"] | None
    # Sharding over dp: 0 nothing, 1 optimizer states, 2 also gradients, 3 also weights (FSDP).
    zero: Literal[0, 1, 2, 3] | None
    # Tensor parallelism also of norms and residual stream.
    sequence_parallel: bool | None
    # Recomputation of norms and activation functions in the backward I.
    lean: bool | None
    # Modules that the backward recomputes, of full, core_attn, layernorm, mlp, moe, moe_act,
    # shared_experts, mla_up_proj.
    recompute: Sequence[str] | None
    # Layers whose activations stay in host memory.
    offloaded_layers: int | None
    # Factor of every duration, e.g. from another configuration's calibration.
    time_factor: float | None
    # Factor of activations and buffers, e.g. from another configuration's measured peak.
    byte_factor: float | None
    # Share (0-1) of peak FLOP/s that F, I and W reach together.
    mfu: float | None
    # Share (0-1) of the PCIe bandwidth that copies reach.
    pcie_efficiency: float | None
    # Maximum number of modes per stage, e.g. 8. With 0: keep, offload and recompute whole micro-
    # batches.
    modes: int | None
    # Pairs of a forward and a backward that hide the experts' all-to-all.
    pairs: bool | None
    # Slices per sequence; each is a micro-batch of the problem.
    slices: int | None
    # Unequal micro-batches: for each one, the lengths in tokens of the sequences packed into it.
    lengths: Sequence[Sequence[int]] | None
    # With lengths: maximum number of kinds of micro-batches, rounded up.
    costs: int | None
    # Axis -> value. Axes: memory_scale, memory_gb, num_microbatches, pcie_scale, link_scale,
    # latency_ms, placement, objective, offload, recompute, or the path of a field; as in
    # `/v1/batches`.
    values: dict[str, Any] | None


class CurrentDegrees(TypedDict, total=False):
    """The current configuration: 1F1B, or interleaved 1F1B with several chunks."""

    # Tensor-parallel degree.
    tp: int | None
    # Context-parallel degree.
    cp: int | None
    # Data-parallel degree. By default the number of GPUs determines it.
    dp: int | None
    # Expert-parallel degree; ep x etp divides tp x cp x dp.
    ep: int | None
    # Tensor-parallel degree of the experts.
    etp: int | None
    # Devices of the pipeline.
    pp: int | None
    # Stages per device.
    chunks: int | None
    # Sequences per micro-batch.
    micro_batch: int | None
    # Sharding over dp: 0 nothing, 1 optimizer states, 2 also gradients, 3 also weights (FSDP).
    zero: Literal[0, 1, 2, 3] | None
    # Modules that the backward recomputes.
    recompute: Sequence[str] | None
    # Layers of each stage in model order, including embedding and head. By default an even cut.
    layers: Sequence[int] | None


class TuneArguments(ModelArguments, SearchArguments, JobArguments, total=False):
    """A model, GPUs and a batch, for which the fastest training configuration is searched."""

    # Number of GPUs. By default the sum of the numbers in gpu, else what torchrun starts in
    # current_file, else 8.
    num_gpus: int | None
    # Numbers of GPUs to tune for, instead of num_gpus. auto tries powers of two and numbers
    # halfway between them, up to 1024. Rows are of the smallest number that fits.
    gpu_counts: Sequence[int] | Literal["auto"] | None
    # Sequences per step, over all replicas.
    global_batch: int | None
    # Framework that runs the schedule: megatron, torchtitan, huggingface (transformers in the
    # optpipe runtime), or any (the optpipe runtime). By default that of current_file; without
    # one, any.
    framework: Literal["any", "megatron", "torchtitan", "huggingface"] | None
    # Current configuration, e.g. tp=4,pp=8,chunks=5,micro_batch=1. The gain is relative to it.
    current: CurrentDegrees | None
    # Current configuration as the text of Megatron arguments or YAML, or of a torchtitan config;
    # instead of current.
    current_file: str | None
    # Vocabulary of the model that current_file describes, if the script leaves it to the
    # tokenizer.
    vocab_size: int | None
    # Format of current_file. By default it follows from framework and text.
    current_format: Literal["megatron", "torchtitan"] | None
    # Degrees that are not searched.
    fixed: Mapping[str, int] | None
    # Price of a GPU-hour in any currency; adds the cost of a million tokens.
    price_per_gpu_hour: float | None
    # Share (0-1) of the memory that stays free, as bytes are estimates.
    headroom: float | None
    # Share (0-1) at which the search stops: no configuration is faster than the best by more.
    gap: float | None
    # Limit of the search in units of work. A unit is counted in iterations and takes about one
    # second of one core. The result is then the same on every machine, unless the time limit ends
    # the search first.
    work_limit: float | None
    # `use` accepts an earlier result; `refresh` solves again.
    cache: Literal["use", "refresh"] | None
