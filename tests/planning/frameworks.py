"""What Megatron-Core and torchtitan make of our texts: in a process of its own, JSON to JSON."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import sys
import tempfile
import types
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

OF_THE_MODEL = (
    "seq_length", "vocab_size", "position_embedding_type", "share_embeddings_and_output_weights",
    "rotary_base", "rotary_percent",
)  # fmt: skip

SIZES = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups",
    "kv_channels", "num_moe_experts", "moe_ffn_hidden_size", "moe_router_topk",
    "moe_shared_expert_intermediate_size", "mtp_num_layers", "q_lora_rank", "kv_lora_rank",
    "qk_head_dim", "v_head_dim", "tensor_model_parallel_size", "context_parallel_size",
    "expert_model_parallel_size", "expert_tensor_parallel_size", "add_bias_linear",
)  # fmt: skip


def megatron(text: str) -> dict[str, Any]:
    """Build the configurations of a YAML; return who holds which layers, and the sizes."""
    import yaml
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import (
        MLATransformerConfig,
        TransformerConfig,
        transformer_config,
    )

    # Transformer Engine needs a GPU; what it is asked for is its version.
    transformer_config.is_te_min_version = lambda *_, **__: True
    read = yaml.safe_load(text)
    model = {name: _resolved(value) for name, value in read["model"].items()}
    for name in OF_THE_MODEL:
        if not (model.get("multi_latent_attention") and name.startswith("rotary")):
            model.pop(name, None)
    later = model.pop("activation_offload_fraction", None)
    kind = MLATransformerConfig if model.get("multi_latent_attention") else TransformerConfig
    config = kind(**model)
    DistributedDataParallelConfig(**read["ddp"])
    sys.modules |= _transformer_engine()
    optimizer = {name: _resolved(value) for name, value in read["optimizer"].items()}
    OptimizerConfig(**optimizer)
    layout = config.pipeline_model_parallel_layout
    return {
        "layers": layout
        and [[[one.name for one in part] for part in rank] for rank in layout.layout],
        "chunks": config.virtual_pipeline_model_parallel_size,
        "later": later,
        "sizes": {name: getattr(config, name, None) for name in SIZES},
        "activation": config.activation_func.__name__,
        "attention": config.attention_backend.name,
    }


def _transformer_engine() -> dict[str, types.ModuleType]:
    """Modules with the one class whose arguments the optimizer's configuration looks at."""

    class FusedAdam:
        def __init__(
            self,
            *,
            master_weight_dtype: object,
            exp_avg_dtype: object,
            exp_avg_sq_dtype: object,
            use_decoupled_grad: bool,
        ) -> None:
            """Take the arguments of Transformer Engine's class."""

    names = ("transformer_engine", "transformer_engine.pytorch")
    modules = {name: types.ModuleType(name) for name in (*names, f"{names[-1]}.optimizers")}
    vars(modules[f"{names[-1]}.optimizers"])["FusedAdam"] = FusedAdam
    vars(modules[names[0]])["__version__"] = "2.1.0"
    return modules


def megatron_splits(cases: list[dict[str, Any]]) -> list[list[int] | None]:
    """Return the transformer layers that Megatron-Core builds on each stage, in model order.

    Each case has fields of its ``TransformerConfig``. None where it refuses them.
    """
    import torch
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.transformer_block import get_num_layers_to_build

    def built(case: dict[str, Any]) -> list[int]:
        config = TransformerConfig(
            hidden_size=64, num_attention_heads=1, pipeline_dtype=torch.bfloat16, **case
        )
        pp, chunks = (
            config.pipeline_model_parallel_size,
            config.virtual_pipeline_model_parallel_size,
        )
        if pp == 1 and (chunks or 1) > 1:
            raise ValueError("parallel_state refuses several chunks on one rank")
        layout = config.pipeline_model_parallel_layout
        stages = [(chunk, rank) for chunk in range(chunks or 1) for rank in range(pp)]
        if layout is not None:
            return [layout.layout[rank][chunk].count(LayerType.decoder) for chunk, rank in stages]
        return [
            get_num_layers_to_build(config, vp_stage=chunk if chunks else None, pp_rank=rank)
            for chunk, rank in stages
        ]

    found: list[list[int] | None] = []
    for case in cases:
        try:
            found.append(built(case))
        except (AssertionError, ValueError, IndexError):
            found.append(None)
    return found


def megatron_values(cases: list[dict[str, Any]]) -> list[str]:
    """Return why Megatron-Core refuses fields of its ``TransformerConfig``; empty: it does not."""
    import torch
    from megatron.core.transformer import TransformerConfig, transformer_config

    transformer_config.is_te_min_version = lambda *_, **__: True
    found = []
    for case in cases:
        try:
            TransformerConfig(pipeline_dtype=torch.bfloat16, **case)
        except Exception as error:  # noqa: BLE001 - whatever it says is the answer
            found.append(f"{type(error).__name__}: {error}")
        else:
            found.append("")
    return found


def megatron_parameters(configs: list[dict[str, Any]]) -> list[int]:
    """Return the parameters of the GPT models that Megatron-Core builds of these fields."""
    import torch.distributed as dist
    from megatron.core.transformer import multi_latent_attention

    from tests.runtime.trainers.megatron_shim import megatron_on_cpu

    # Without Transformer Engine it is None, and not compared with.
    vars(multi_latent_attention)["TELinear"] = type("TELinear", (), {})
    with tempfile.NamedTemporaryFile() as file, contextlib.ExitStack() as stack:
        dist.init_process_group("gloo", init_method=f"file://{file.name}", rank=0, world_size=1)
        stack.enter_context(megatron_on_cpu(1, 1))
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        model_parallel_cuda_manual_seed(7)
        return [sum(one.numel() for one in _gpt(config).parameters()) for config in configs]


def _gpt(config: dict[str, Any]) -> Any:
    import torch
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    class Attention(torch.nn.Module):
        """Instead of one that takes the widths of latent attention only on GPUs."""

        def __init__(self, *_: Any, **__: Any) -> None:
            super().__init__()

    kind = MLATransformerConfig if config.get("multi_latent_attention") else TransformerConfig
    of_model = {name: config[name] for name in OF_THE_MODEL[1:4] if name in config}
    known = {field.name for field in dataclasses.fields(kind)}
    values = {name: value for name, value in config.items() if name in known}
    built = kind(use_cpu_initialization=True, **values)
    spec = gpt_layer_specs.get_gpt_decoder_block_spec(built, use_transformer_engine=False)
    for layer in spec.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = Attention
    mtp = None
    if built.mtp_num_layers:
        mtp = gpt_layer_specs.get_gpt_mtp_block_spec(built, spec, use_transformer_engine=False)
    longest = config["max_position_embeddings"]
    return GPTModel(built, spec, max_sequence_length=longest, mtp_block_spec=mtp, **of_model)


def megatron_gathers(tokens: int, hidden: int, experts: int, active: int, ranks: int) -> Any:
    """Run Megatron-Core's all-gather dispatcher on one of some ranks, the experts left out.

    Return the bytes of each collective, of all ranks together, in F and in the backward; and the
    bytes of floating-point tensors that F keeps. The process group copies, and sends nothing.
    """
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import mappings
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    seen: list[int] = []
    kept: list[int] = []

    def seeing(name: str, whole: int) -> Any:
        collective = getattr(mappings, name)

        def run(*tensors: Any, group: Any) -> None:
            assert group.size() == ranks
            seen.append(tensors[whole].nbytes)
            collective(*tensors, group=group)

        return mock.patch.object(mappings, name, run)

    def keep(tensor: Any) -> Any:
        kept.append(tensor.nbytes if tensor.is_floating_point() else 0)
        return tensor

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.cuda, "current_device", return_value="cpu"))
        parallel_state._set_global_memory_buffer()
        stack.enter_context(seeing("dist_all_gather_func", 0))
        stack.enter_context(seeing("dist_reduce_scatter_func", 1))
        config = TransformerConfig(
            num_layers=1, hidden_size=hidden, num_attention_heads=1, num_moe_experts=experts,
            moe_router_topk=active, expert_model_parallel_size=ranks, add_bias_linear=False,
        )  # fmt: skip
        own = dist.new_group([0])
        groups = types.SimpleNamespace(ep=dist.group.WORLD, expt_tp=own, tp_ep=dist.group.WORLD)
        local = list(range(experts // ranks))
        dispatcher = MoEAllGatherTokenDispatcher(len(local), local, config, groups)
        states = torch.randn(tokens, 1, hidden, dtype=torch.bfloat16, requires_grad=True)
        scores = torch.rand(tokens, experts)
        chosen = torch.zeros(tokens, experts).scatter(1, scores.topk(active).indices, 1.0).bool()
        probs = (scores * chosen).bfloat16().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            sent = dispatcher.dispatch_preprocess(states, chosen, probs)
            inputs, _, weights = dispatcher.dispatch_postprocess(*dispatcher.token_dispatch(*sent))
            results = dispatcher.combine_preprocess(inputs + weights.sum())
            output = dispatcher.combine_postprocess(dispatcher.token_combine(results))
        forward = list(seen)
        seen.clear()
        output.sum().backward()
    dist.destroy_process_group()
    return {"forward": forward, "backward": seen, "kept": sum(kept)}


def megatron_flags() -> dict[str, list[str]]:
    """Return the flags of fields whose metadata name them."""
    from megatron.core.transformer import TransformerConfig

    return {
        field.name: field.metadata["argparse_meta"]["arg_names"]
        for field in dataclasses.fields(TransformerConfig)
        if "arg_names" in field.metadata.get("argparse_meta", {})
    }


def _resolved(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    module, _, name = value["_target_"].rpartition(".")
    found = getattr(importlib.import_module(module), name)
    return found(*value["_args_"]) if value["_call_"] else found


def torchtitan(
    text: str, num_gpus: int, flags: list[str], *, split: bool, options: bool = True
) -> dict[str, Any]:
    """Load a config as torchtitan does; return what it becomes, and which stages a rank has.

    ``flags`` name its file, as ``--module NAME ...``. Without ``options`` the parser of the other
    flags, which takes 0.5 s, is left out: the dataclasses check themselves again, as it makes them.
    """
    from torchtitan.config import manager
    from torchtitan.distributed import ParallelDims, full_dtensor
    from torchtitan.distributed import pipeline_parallel as pp

    for converter in _converters():
        # Of torchao, which needs a GPU too; the classes and their settings are torchtitan's.
        converter.__init__ = lambda self, config: None
        converter.convert = lambda self, config: config
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, f"{flags[1]}.py").write_text(text)
        sys.path.insert(0, folder)
        try:
            with contextlib.ExitStack() as stack:
                if not options:
                    stack.enter_context(mock.patch.object(manager.tyro, "cli", _checked))
                config: Any = manager.ConfigManager().parse_args(flags)
        finally:
            sys.path.remove(folder)
    parallelism, model = config.parallelism, config.model_spec.model
    dims = ParallelDims.from_config(parallelism, num_gpus)
    model.update_from_config(config=config)
    named = parallelism.module_fqns_per_model_part or []
    attention = {type(one.attention.inner_attention): one.attention for one in model.layers}
    stub = types.SimpleNamespace(
        modules=lambda: [one.inner_attention.build() for one in attention.values()]
    )
    full_dtensor.validate_config(dims, stub)
    if dims.pp > 1:
        pp._get_pipeline_metadata(dims, parallelism, model)
        if not parallelism.pipeline_parallel_schedule_csv:
            _build_schedule(config, len(named))
    stages = [
        pp._get_pp_rank_to_stage_indices_mapping(
            rank, dims.pp, parallelism.pipeline_parallel_schedule, len(named)
        )
        for rank in range(dims.pp if named else 0)
    ]
    return {
        "stages": stages,
        "modules": named,
        "schedule": parallelism.pipeline_parallel_schedule,
        "csv": parallelism.pipeline_parallel_schedule_csv,
        "microbatches": config.training.local_batch_size
        // parallelism.pipeline_parallel_microbatch_size,
        "recompute": type(config.activation_checkpoint).__qualname__,
        "parameters": _split(model, named) if split else None,
    }


def _checked(_: type, *, default: Any, **__: Any) -> Any:
    """Run the checks of a configuration and of its sections; return it."""
    for one in (default.parallelism, default.training, default.compile, default):
        check = getattr(one, "__post_init__", None)
        if check is not None:
            check()
    return default


def _build_schedule(config: Any, num_stages: int) -> None:
    """Build torch's schedule of the first rank, with stages that are only numbers."""
    import torch
    from torchtitan.distributed import pipeline_parallel as pp

    degree = config.parallelism.pipeline_parallel_degree
    owned = pp._get_pp_rank_to_stage_indices_mapping(
        0, degree, config.parallelism.pipeline_parallel_schedule, num_stages
    )
    stages: Any = [
        types.SimpleNamespace(
            stage_index=index, num_stages=num_stages, group_size=degree, group_rank=0, group=None,
            is_first=index == 0, is_last=index == num_stages - 1, has_backward=True,
            device=torch.device("cpu"), submod=torch.nn.Identity(),
        )
        for index in owned
    ]  # fmt: skip
    pp._build_pipeline_schedule(
        parallelism=config.parallelism, local_batch_size=config.training.local_batch_size,
        stages=stages, loss_fn=lambda *_: (None, None),
    )  # fmt: skip


def parameters(models: list[tuple[str, str]]) -> list[int]:
    """Return the parameters of torchtitan's models, by module and flavor."""
    return [
        _split(
            importlib.import_module(f"torchtitan.models.{module}").model_registry(flavor).model, []
        )[0]
        for module, flavor in models
    ]


def _converters() -> list[Any]:
    from torchtitan.components import quantization

    return [getattr(quantization, name) for name in dir(quantization) if name.endswith("Converter")]


def _split(model: Any, named: list[list[str]]) -> list[int]:
    """Return how many parameters the whole has, and the stages that torchtitan cuts of it."""
    import torch
    from torchtitan.distributed.pipeline_parallel import _split_module

    with torch.device("meta"):
        whole = model.build()
    parts = [_split_module(whole, names) for names in named]
    return [sum(one.numel() for one in part.parameters()) for part in (whole, *parts)]


def main() -> None:
    calls = json.load(sys.stdin)
    said = sys.stdout
    sys.stdout = sys.stderr
    warnings.simplefilter("ignore")
    answers = []
    for call in calls:
        try:
            answers.append(globals()[call["call"]](**call["with"]))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the answer, whatever it is
            answers.append({"refused": f"{type(error).__name__}: {error}"})
    json.dump(answers, said)


if __name__ == "__main__":
    main()
