"""What the ranks run with models of transformers, made from their configurations."""

import copy
import warnings
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from optpipe import Schedule
from optpipe.runtime import PipelineRunner, passes
from optpipe.runtime.preflight import num_microbatches_of
from optpipe.runtime.trainers.huggingface import build_stages, loss_of, shard_layers
from tests.runtime import schedules
from tests.runtime.watching import counted

WORDS = 64
LENGTH = 12
STEPS = 2

_SIZES: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GPT2: dict[str, Any] = {
    **{name: _SIZES[name] for name in _SIZES if name.endswith("_token_id")},
    **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    "vocab_size": WORDS,
    "n_embd": 16,
    "n_layer": 8,
    "n_head": 4,
    "n_positions": 64,
}
_MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_UNLISTED: dict[str, dict[str, Any]] = {
    # The kinds of its layers come of a list of its own, of periods, or are one kind alone.
    "bamba": {
        "attn_layer_indices": [1, 5],
        "mamba_n_heads": 8,
        "mamba_d_head": 4,
        "mamba_d_state": 4,
        "mamba_n_groups": 1,
    },
    "gemma": {"head_dim": 8},
    "jamba": {
        "num_experts": 2,
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "use_mamba_kernels": False,
        "mamba_d_state": 4,
        "mamba_dt_rank": 4,
    },
    "mamba": {"state_size": 4},
    "mamba2": {"state_size": 4, "num_heads": 8, "head_dim": 4, "n_groups": 1},
}
UNLISTED = tuple(_UNLISTED)
"""Kinds that `split` knows only by comparing them."""

_OWN: dict[str, dict[str, Any]] = {
    **_UNLISTED,
    "gpt_oss": {
        "head_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "llama": {"tie_word_embeddings": True},
    "mistral": {"head_dim": 4, "sliding_window": 4},
    "mixtral": {"num_local_experts": 4},
    "nemotron_h": {
        "head_dim": 8,
        "layers_block_type": ["mamba", "mlp", "attention", "moe"] * 2,
        "mamba_num_heads": 8,
        "mamba_head_dim": 4,
        "ssm_state_size": 4,
        "n_groups": 2,
        "chunk_size": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 16,
    },
    "qwen2": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 3},
    "qwen2_moe": {**_MIXTURE, "shared_expert_intermediate_size": 16},
    "qwen3": {"head_dim": 8},
    "qwen3_moe": {**_MIXTURE, "head_dim": 8},
}
GROUPED = {"qwen3_moe, grouped": "qwen3_moe"}
ADAPTED = {"llama, adapters": "llama"}
"""Kinds whose weights are frozen, with low-rank adapters on their linear layers."""

KINDS = ("gpt2", *sorted(set(_OWN) - set(UNLISTED)))


def small_config(kind: str) -> Any:
    """A configuration of eight small layers, in float64."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoConfig

        if kind == "gpt2":
            return AutoConfig.for_model(kind, **_GPT2)
        name = (GROUPED | ADAPTED).get(kind, kind)
        config = AutoConfig.for_model(name, **{**_SIZES, **_OWN[name]})
        # Grouped products know no double precision.
        config._experts_implementation = "grouped_mm" if kind in GROUPED else "eager"
        return config


def padded(num_samples: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, of which every third sample ends early; their mask; and labels without the rest."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, WORDS, (num_samples, LENGTH), generator=generator)
    mask = torch.ones_like(tokens)
    mask[::3, 8:] = 0
    return tokens, mask, tokens.masked_fill(mask == 0, -100)


class Adapter(nn.Module):
    """A frozen linear layer with two small matrices that are trained (LoRA)."""

    def __init__(self, frozen: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.frozen = frozen
        self.down = nn.Linear(frozen.in_features, rank, bias=False)
        self.up = nn.Linear(rank, frozen.out_features, bias=False)

    def forward(self, given: Tensor) -> Tensor:
        found: Tensor = self.frozen(given) + self.up(self.down(given))
        return found


def add_adapters(stage: nn.Module, seed: int) -> None:
    """Freeze a stage, and put adapters on the linear layers of its blocks."""
    stage.requires_grad_(False)
    torch.manual_seed(seed)
    for block in stage.get_submodule("model.layers").children():
        for part in list(block.modules()):
            for name, child in list(part.named_children()):
                if type(child) is nn.Linear and not isinstance(part, Adapter):
                    setattr(part, name, Adapter(child))


class TrainedModel(NamedTuple):
    """A rank's steps beside one process: differences relative to the largest gradient."""

    losses: float | None
    gradients: float
    tied_equal: bool
    num_built: int
    """Parameters that have values."""
    offloaded_bytes: int
    deferred_bytes: int
    num_stacked: int
    """Gradients of experts' stacked weights that W's made."""


def train_transformer(kind: str, schedule: Schedule) -> TrainedModel:
    """Train two steps with masks; each rank builds its own stages only.

    In double precision, but for grouped products.
    """
    torch.set_default_dtype(torch.float32 if kind in GROUPED else torch.float64)
    try:
        return _train(kind, schedule)
    finally:
        torch.set_default_dtype(torch.float32)


def _train(kind: str, schedule: Schedule) -> TrainedModel:
    config, count = small_config(kind), num_microbatches_of(schedule)
    placement = schedule.placement
    num_ranks = max(placement) + 1
    size = (num_ranks, dist.get_world_size() // num_ranks)
    mesh = init_device_mesh("cpu", size, mesh_dim_names=("pipeline", "tensor"))
    rank = mesh["pipeline"].get_local_rank()
    layers = [8 // len(placement)] * len(placement)
    own = [s for s, home in enumerate(placement) if home == rank]
    stages = build_stages(config, layers, own=own)
    num_built = sum(not p.is_meta for stage in stages for p in stage.parameters())
    whole = build_stages(config, layers, own=range(len(placement)))
    if kind in ADAPTED:
        for index, stage in enumerate(whole):
            add_adapters(stage, seed=index)
        for index in own:
            add_adapters(stages[index], seed=index)
    if size[1] > 1:
        for index in own:
            shard_layers(stages[index], mesh["tensor"])
    loss_fn = loss_of(config)
    parts = {index: stages[index] for index in own}
    group = mesh["pipeline"].get_group()
    runner = PipelineRunner(
        parts, schedule, loss_fn, ties=stages.ties, group=group, min_offload_bytes=1
    )
    losses: float | None = 0.0 if runner.holds_last else None
    num_stacked = 0
    for step in range(STEPS):
        tokens, mask, labels = padded(3 * count, step)
        with counted(passes, "_add_gradient") as added:
            found = runner.step(tokens, target=labels, attention_mask=mask)
        num_stacked += sum(call.args[0].dim() == 3 for call in added.call_args_list)
        for j in range(count):
            state = tokens.chunk(count)[j]
            for stage in whole:
                state = stage(state, attention_mask=mask.chunk(count)[j])
            loss = loss_fn(state, labels.chunk(count)[j])
            (loss / count).backward()
            if found is not None and losses is not None:
                losses = max(losses, abs(float(found[j] - loss.detach())))
    pairs = [
        (ours, theirs)
        for index in own
        for ours, theirs in zip(stages[index].parameters(), whole[index].parameters(), strict=True)
    ]
    assert all((ours.grad is None) == (theirs.grad is None) for ours, theirs in pairs)
    largest = max(float(theirs.grad.abs().max()) for _, theirs in pairs if theirs.grad is not None)
    worst = max(
        float((whole_gradient(ours) - theirs.grad).abs().max())
        for ours, theirs in pairs
        if ours.grad is not None and theirs.grad is not None
    )
    runner.close()
    return TrainedModel(
        losses,
        worst / largest,
        _ties_are_equal(stages, own),
        num_built,
        runner.offloaded_bytes,
        sum(runner.deferred_bytes.values()),
        num_stacked,
    )


def train_replicas(kind: str) -> float:
    """Train two stages by FSDP2 over two ranks, times two tensor-parallel ones.

    Return the worst difference of a gradient, relative to the largest one.
    """
    torch.set_default_dtype(torch.float64)
    try:
        return _train_replicas(small_config(kind))
    finally:
        torch.set_default_dtype(torch.float32)


def _train_replicas(config: Any) -> float:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    problem = schedules.make_problem((0, 0), 4)
    programs = schedules.random_programs(problem, 6, offload=0.3, recompute=0.3, fused=0.3)
    stages, whole = (build_stages(config, [4, 4], own=[0, 1]) for _ in range(2))
    for stage in stages:
        shard_layers(stage, mesh["tensor"])
        for layer in stage.get_submodule("model.layers").children():
            fully_shard(layer, mesh=mesh["data"])
        fully_shard(stage, mesh=mesh["data"])
    alone = [dist.new_group([rank]) for rank in range(4)][dist.get_rank()]
    loss_fn = loss_of(config)
    runner = PipelineRunner(
        dict(enumerate(stages)), schedules.make_schedule(problem, programs), loss_fn, group=alone
    )
    batches = [padded(8, seed) for seed in range(2)]
    tokens, mask, labels = batches[mesh["data"].get_local_rank()]
    for _ in range(STEPS):
        runner.step(tokens, target=labels, attention_mask=mask)
        for batch in batches:
            for part in zip(*(one.chunk(4) for one in batch), strict=True):
                state = part[0]
                for stage in whole:
                    state = stage(state, attention_mask=part[1])
                (loss_fn(state, part[2]) / 8).backward()
    runner.close()
    pairs = [
        (whole_gradient(ours), whole_gradient(theirs))
        for one, other in zip(stages, whole, strict=True)
        for ours, theirs in zip(one.parameters(), other.parameters(), strict=True)
    ]
    largest = max(float(theirs.abs().max()) for _, theirs in pairs)
    return max(float((ours - theirs).abs().max()) for ours, theirs in pairs) / largest


def train_activations() -> float:
    """Train Apertus, whose activation has parameters, on two tensor-parallel ranks, twice.

    Return the worst difference of a gradient, relative to the largest one.
    """
    from transformers import ApertusConfig, ApertusForCausalLM

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    config = ApertusConfig(**{**_SIZES, "num_hidden_layers": 1, "dtype": torch.float64})
    torch.manual_seed(0)
    whole = ApertusForCausalLM._from_config(config)
    ours = copy.deepcopy(whole)
    shard_layers(ours, mesh["tensor"])
    for seed in range(2):
        tokens = padded(2, seed)[0]
        for model in (whole, ours):
            model(input_ids=tokens, labels=tokens).loss.backward()
    pairs = [
        (whole_gradient(one), whole_gradient(other))
        for one, other in zip(ours.parameters(), whole.parameters(), strict=True)
    ]
    largest = max(float(other.abs().max()) for _, other in pairs)
    return max(float((one - other).abs().max()) for one, other in pairs) / largest


def whole_gradient(parameter: Tensor) -> Any:
    """Return a parameter's gradient, of a divided one gathered from all ranks."""
    found = parameter.grad
    return found.full_tensor() if isinstance(found, DTensor) else found


def _ties_are_equal(stages: Any, own: list[int]) -> bool:
    """Whether all ranks have the same gradient of a tied weight, to the last bit."""
    gathered: list[Any] = [None] * dist.get_world_size()
    mine = [
        whole_gradient(stages[stage].get_parameter(name))
        for tie in stages.ties
        for stage, name in tie.places
        if stage in own
    ]
    dist.all_gather_object(gathered, mine)
    # A frozen weight has no gradient on any rank.
    everyone = [one for part in gathered for one in part if one is not None]
    return all(torch.equal(one, everyone[0]) for one in everyone)
