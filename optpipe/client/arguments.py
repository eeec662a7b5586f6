"""Keyword arguments of the client, from the requests by ``make client``.

What is left out, or None, takes the default of the service.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = [
    "CurrentDegrees",
    "EstimateArguments",
    "SearchArguments",
    "SolveArguments",
    "SubmitArguments",
    "TuneArguments",
]


class SearchArguments(TypedDict, total=False):
    """Options of every search."""

    # Seconds to search.
    time_limit_s: float | None
    # Threads; from 2 on, search and proofs run side by side.
    threads: int | None
    # Seed of all random numbers.
    seed: int | None


class SolveArguments(TypedDict, total=False):
    """How to solve a problem."""

    # Seconds to search.
    time_limit_s: float | None
    # Threads; from 2 on, search and proofs run side by side.
    threads: int | None
    # Seed of all random numbers.
    seed: int | None
    # auto optimises; or milp, or a published method as `optpipe compare` and `/v1/methods` name
    # it.
    method: str | None
    # Stop where (objective - bound) / objective is at most this, e.g. 0.01.
    gap: float | None
    # Units of work, about a second of one core each, counted in iterations. The result is then
    # the same on every machine, unless the time limit ends the search first.
    work_limit: float | None
    # `use` may answer with an earlier result; `refresh` solves again.
    cache: Literal["use", "refresh"] | None


class SubmitArguments(TypedDict, total=False):
    """How to solve a problem, or how to plan a model; chunks and placements are of plans."""

    # Seconds to search.
    time_limit_s: float | None
    # Threads; from 2 on, search and proofs run side by side.
    threads: int | None
    # Seed of all random numbers.
    seed: int | None
    # Units of work, about a second of one core each, counted in iterations. The result is then
    # the same on every machine, unless the time limit ends the search first.
    work_limit: float | None
    # Numbers of stages per device to try, each 1-8; default 1,2,4.
    chunks: Sequence[int] | None
    # Placements to try: linear, loop, v, and free (other orders of the devices); default all.
    placements: Sequence[Literal["linear", "loop", "v", "free"]] | None
    # auto optimises; or milp, or a published method as `optpipe compare` and `/v1/methods` name
    # it.
    method: str | None
    # Stop where (objective - bound) / objective is at most this, e.g. 0.01.
    gap: float | None
    # `use` may answer with an earlier result; `refresh` solves again.
    cache: Literal["use", "refresh"] | None
    # Objective to minimise, instead of the one that the problem or model names.
    objective: Literal["makespan", "span"] | None
    # Rank schedules by this percentile of the objective under noise, as P90. Bound and gap stay
    # those without noise.
    robust: str | None
    # With robust: share by which the duration of every action varies.
    jitter: float | None
    # With robust: share by which all compute times of a device vary together.
    stragglers: float | None


class EstimateArguments(TypedDict, total=False):
    """A model on accelerators with degrees of parallelism, and values to vary the problem by."""

    # Model of the catalogue (`optpipe estimate --list`, `/v1/presets`).
    model: str | None
    # Instead of model: a Hugging Face config.json.
    config: dict[str, Any] | None
    # Name of the config's model, for people.
    name: str | None
    # Accelerator of the catalogue, and how many (h100:64). With several kinds (h100:32,a100:32)
    # each is a part of the pipeline.
    gpu: str | None
    # Tokens per sequence.
    sequence: int | None
    # Precision of the layers' matrix products: bf16, fp16, fp8, mxfp8, nvfp4, fp32.
    precision: Literal["bf16", "fp16", "fp8", "mxfp8", "nvfp4", "fp32"] | None
    # Flash attention; without it, scores are stored.
    flash: bool | None
    # CUDA graphs: kernel launches cost the host nothing.
    cuda_graphs: bool | None
    # The all-to-all of experts runs while other micro-batches compute.
    ep_overlap: bool | None
    # alltoall sends a copy of a token per expert; deduplicated sends one per rank (DeepEP,
    # HybridEP).
    dispatcher: Literal["alltoall", "deduplicated"] | None
    # Precision of tokens on the way to their experts.
    dispatch: Literal["bf16", "fp8"] | None
    # Collectives run next to compute where they can.
    overlap: bool | None
    # Network between nodes: infiniband, ethernet or tcp, and Gbit/s per GPU.
    network: str | None
    # Divides the bandwidth between nodes.
    oversubscription: float | None
    # Memory per device, instead of all that it has.
    memory_bytes: int | None
    # Measured seconds of a step; calibrates every duration.
    measured_step_s: float | None
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
    # Data-parallel degree; by default 1, or what the number of GPUs leaves.
    dp: int | None
    # Sequences per micro-batch.
    micro_batch: int | None
    # Micro-batches per step.
    num_microbatches: int | None
    # Stages per device.
    chunks: int | None
    # linear, loop or v; by default linear, with several chunks loop.
    placement: Literal["linear", "loop", "v"] | None
    # balanced: the slowest stage is as fast as possible; even: as frameworks cut.
    layout: Literal["balanced", "even"] | None
    # What is sharded over dp: 0 nothing, 1 optimizer states, 2 gradients too, 3 weights too
    # (FSDP).
    zero: Literal[0, 1, 2, 3] | None
    # Tensor parallelism also splits norms and the residual stream.
    sequence_parallel: bool | None
    # Outputs of norms and activation functions are recomputed in I.
    lean: bool | None
    # Modules that the backward recomputes, of full, core_attn, layernorm, mlp, moe, moe_act,
    # shared_experts, mla_up_proj.
    recompute: Sequence[str] | None
    # Layers whose activations stay in host memory.
    offloaded_layers: int | None
    # Multiplies every duration: the factor of another configuration.
    time_factor: float | None
    # Share (0-1) of peak FLOP/s that F, I and W reach together.
    mfu: float | None
    # Share (0-1) of the PCIe bandwidth that copies reach.
    pcie_efficiency: float | None
    # Maximum number of modes per stage, e.g. 8; 0: keep, offload and recompute whole micro-
    # batches.
    modes: int | None
    # Forwards and backwards may run together; the experts' exchange is hidden.
    pairs: bool | None
    # Slices of each sequence, each a micro-batch of the problem.
    slices: int | None
    # Unequal micro-batches: for each one, the lengths in tokens of the sequences packed into it.
    lengths: Sequence[Sequence[int]] | None
    # With lengths: maximum number of kinds of micro-batches, rounded up.
    costs: int | None
    # Axis -> its value: memory_scale, memory_gb, num_microbatches, pcie_scale, link_scale,
    # latency_ms, placement, objective, offload, recompute, or the path of a field; as the axes of
    # `/v1/batches`.
    values: dict[str, Any] | None


class CurrentDegrees(TypedDict, total=False):
    """What is run today: 1F1B, or interleaved 1F1B with several chunks."""

    tp: int | None
    cp: int | None
    # By default what the number of GPUs leaves.
    dp: int | None
    ep: int | None
    etp: int | None
    pp: int | None
    chunks: int | None
    micro_batch: int | None
    zero: Literal[0, 1, 2, 3] | None
    recompute: Sequence[str] | None
    # Layers of each stage in model order, embedding and head counted; by default cut evenly.
    layers: Sequence[int] | None


class TuneArguments(TypedDict, total=False):
    """A model, GPUs and a batch: which configuration trains it fastest."""

    # Model of the catalogue (`optpipe estimate --list`, `/v1/presets`).
    model: str | None
    # Instead of model: a Hugging Face config.json.
    config: dict[str, Any] | None
    # Name of the config's model, for people.
    name: str | None
    # Accelerator of the catalogue, and how many (h100:64). With several kinds (h100:32,a100:32)
    # each is a part of the pipeline.
    gpu: str | None
    # Tokens per sequence.
    sequence: int | None
    # Precision of the layers' matrix products: bf16, fp16, fp8, mxfp8, nvfp4, fp32.
    precision: Literal["bf16", "fp16", "fp8", "mxfp8", "nvfp4", "fp32"] | None
    # Flash attention; without it, scores are stored.
    flash: bool | None
    # CUDA graphs: kernel launches cost the host nothing.
    cuda_graphs: bool | None
    # The all-to-all of experts runs while other micro-batches compute.
    ep_overlap: bool | None
    # alltoall sends a copy of a token per expert; deduplicated sends one per rank (DeepEP,
    # HybridEP).
    dispatcher: Literal["alltoall", "deduplicated"] | None
    # Precision of tokens on the way to their experts.
    dispatch: Literal["bf16", "fp8"] | None
    # Collectives run next to compute where they can.
    overlap: bool | None
    # Network between nodes: infiniband, ethernet or tcp, and Gbit/s per GPU.
    network: str | None
    # Divides the bandwidth between nodes.
    oversubscription: float | None
    # Memory per device, instead of all that it has.
    memory_bytes: int | None
    # Measured seconds of a step; calibrates every duration.
    measured_step_s: float | None
    # Number of GPUs; by default the sum of those in gpu, or 8.
    num_gpus: int | None
    # Sequences of a step, over all replicas.
    global_batch: int | None
    # Whose schedules may be the answer: megatron, torchtitan, or any (those of our runtime).
    framework: Literal["any", "megatron", "torchtitan"] | None
    # What you run today, e.g. tp=4,pp=8,chunks=5,micro_batch=1. The gain is over it.
    current: CurrentDegrees | None
    # Instead of current: Megatron arguments or YAML, or a torchtitan config, as text.
    current_file: str | None
    # Framework of current_file; by default it follows from framework and text.
    current_format: Literal["megatron", "torchtitan"] | None
    # Degrees that are not searched.
    fixed: Mapping[str, int] | None
    # Share (0-1) of the memory that answers leave free: bytes are estimates too.
    headroom: float | None
    # Seconds to search.
    time_limit_s: float | None
    # Threads; from 2 on, search and proofs run side by side.
    threads: int | None
    # Seed of all random numbers.
    seed: int | None
    # Stop where no configuration is faster than the best by more than this share.
    gap: float | None
    # Units of work, about a second of one core each, counted in iterations. The result is then
    # the same on every machine, unless the time limit ends the search first.
    work_limit: float | None
    # `use` may answer with an earlier result; `refresh` solves again.
    cache: Literal["use", "refresh"] | None
