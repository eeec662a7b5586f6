"""Cuts decoder-only models of `transformers` into stages that run their own code.

::

    from optpipe.runtime.trainers.huggingface import build_stages, loss_of

    config = AutoConfig.from_pretrained("config.json")
    stages = build_stages(config, [4, 4, 4, 4], own=[rank])   # the others hold no memory
    runner = PipelineRunner({rank: stages[rank]}, schedule, loss_of(config), ties=ties_of(...))

A stage is the model with some of its decoder layers, called by the model's own ``forward``. The
first takes token ids, the others take hidden states of the previous stage, the last returns logits.
So the model's code makes masks and rotary tables on every stage, from ``attention_mask`` and
``position_ids`` if a step has them. There are no caches, which are for generation.
"""

from __future__ import annotations

import copy
from importlib import metadata
from itertools import accumulate
from types import MethodType
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from optpipe.errors import PreflightError
from optpipe.runtime.passes import class_forwards
from optpipe.runtime.trainers import require_framework
from optpipe.runtime.trainers.split import (
    Passed,
    Tie,
    chain_stages,
    check_stages,
    materialize,
    ties_of,
)
from optpipe.runtime.trainers.split import split as split_model

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from torch.distributed.device_mesh import DeviceMesh

__all__ = [
    "Stages",
    "build_stages",
    "is_language_model",
    "loss_of",
    "require_transformers",
    "shard_layers",
    "split",
]

_TESTED: Final = frozenset(
    {
        *("gpt2", "gpt_oss", "llama", "mistral", "mixtral", "nemotron_h"),
        *("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
    }
)
"""Kinds of models whose stages are tested to be the model, chained."""


class Stages(list[nn.Module]):
    """The stages of a model, and the parameters that several of them share."""

    ties: tuple[Tie, ...] = ()


def split(model: nn.Module, layers_per_stage: Sequence[int], *, check: bool = True) -> Stages:
    """Return the stages of a causal language model of `transformers`, which stays as it is.

    The stages, chained, are compared with the model on a few tokens, as
    `optpipe.runtime.trainers.split` compares them: logits, the loss, and gradients. A model without
    values cannot be compared; it is split if it is of a kind whose stages are tested.

    Parameters
    ----------
    model
        Such as `LlamaForCausalLM`; stages share its modules and have its keys.
    layers_per_stage
        How many decoder layers each stage holds.
    check
        False compares nothing and splits a model of any kind: stages that differ from the model
        then train wrongly, without an error.

    Raises
    ------
    MissingExtraError
        If `transformers` is not there in a version that the stages know.
    PreflightError
        If the model is no decoder-only language model, or does not come apart like this, or adds
        to its loss what `loss_of` does not add. If it has no values and its kind is not tested, and
        ``check`` is not False.
    """
    require_transformers()
    base: Any = getattr(model, "base_model", None)
    config: Any = getattr(model, "config", None)
    if not is_language_model(model):
        raise PreflightError(
            f"{type(model).__name__} is no decoder-only language model of transformers; split "
            "other models by optpipe.runtime.trainers.split"
        )
    prefix = model.base_model_prefix
    blocks = next(
        (f"{prefix}.{name}" for name in ("layers", "h") if hasattr(base, name)), f"{prefix}.layers"
    )
    stages = Stages()
    ends = list(accumulate(layers_per_stage))
    parts = split_model(model, layers_per_stage, blocks=blocks, check=False)
    for index, (part, end, count) in enumerate(zip(parts, ends, layers_per_stage, strict=True)):
        _keep_layers(part, config, end - count, end)
        decoder: Any = part.base_model
        if index:
            for name in ("wpe", "drop"):
                if hasattr(decoder, name):
                    setattr(decoder, name, _Nothing() if name == "wpe" else Passed())
        part.forward = MethodType(_of_states if index else _of_tokens, part)
        stages.append(part)
    stages.ties = ties_of(stages)
    if check:
        _check(model, stages)
    return stages


def is_language_model(model: nn.Module) -> bool:
    """Whether a model has the form of a decoder-only language model of `transformers`."""
    base = getattr(model, "base_model", None)
    config: Any = getattr(model, "config", None)
    has_form = base is not None and base is not model and config is not None
    return has_form and not getattr(config, "is_encoder_decoder", True)


def build_stages(
    config: Any,
    layers_per_stage: Sequence[int],
    *,
    own: Collection[int],
    device: torch.device | str = "cpu",
    seed: int = 0,
    check: bool = True,
) -> Stages:
    """Return the stages of a model that is made from its configuration alone.

    Only those in ``own`` have memory, and random values as the model initializes them. Load a
    checkpoint over them by their keys, which are the model's. No rank needs the whole model, nor
    does `measure`, which runs each stage on its own rank.

    Nothing is compared, because the model has no values. So a kind of model whose stages are not
    tested is refused, unless ``check`` is False: `split` one that has values first.

    Raises
    ------
    MissingExtraError, PreflightError
        As `split`.
    """
    require_transformers()
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    stages = split(model, layers_per_stage, check=check)
    shared: dict[Tensor, nn.Parameter] = {}
    for index in sorted(own):
        # Each stage draws its own values, independent of the other stages built here.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed + index)
            before = dict(stages[index].named_parameters())
            materialize(stages[index], device, model._init_weights)  # noqa: SLF001
        for name, parameter in before.items():
            home, _, last = name.rpartition(".")
            owner = stages[index].get_submodule(home)
            # Two stages of this rank share again, if they did before.
            setattr(owner, last, shared.setdefault(parameter, owner.get_parameter(last)))
    return stages


def shard_layers(model: nn.Module, mesh: DeviceMesh) -> None:
    """Divide a model, or a stage, over tensor-parallel ranks by transformers' own plan, in place.

    W makes the weight gradients of divided linear layers, too. Each rank has a part of the gradient
    of some replicated parameters, and these parts are summed in each micro-batch. Transformers
    sums the gradient accumulated so far instead, which counts earlier micro-batches again.
    Call it before `fully_shard`.

    Parameters
    ----------
    model
        Its parameters must have the same values on all ranks of the mesh.
    mesh
        The tensor-parallel ranks, one dimension.

    Raises
    ------
    PreflightError
        If the model has no plan, or if the plan does not fit the number of ranks.
    """
    plan = _plan_for(model, mesh.size())
    from transformers.integrations.tensor_parallel import (
        apply_tensor_parallelism,
        replace_layer_number_by_wildcard,
    )

    rules: dict[str, str] = {}
    linears: list[nn.Linear] = []
    owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for place, module in model.named_modules():
        rule = plan.get(replace_layer_number_by_wildcard(place))
        if isinstance(module, Passed):
            continue
        if rule is None and _is_between(module, replace_layer_number_by_wildcard(place), plan):
            rule = _PARTIAL_GRADIENT
        for name, parameter in module.named_parameters(recurse=False):
            whole = f"{place}.{name}"
            own = plan.get(replace_layer_number_by_wildcard(whole), rule)
            if own not in (None, _PARTIAL_GRADIENT) and parameter not in owners:
                rules[whole] = own
            owners.setdefault(parameter, []).append((module, name))
        if rule == _PARTIAL_GRADIENT:
            module.register_forward_pre_hook(_reducing(mesh.get_group()))
        elif rule is not None:
            rules[place] = rule
        if type(module) is nn.Linear and place in rules:
            linears.append(module)
    with class_forwards(linears):
        apply_tensor_parallelism(model, mesh, rules)
    _share_again(owners.values())


def _share_again(owners: Iterable[list[tuple[nn.Module, str]]]) -> None:
    """Give all owners of a parameter the one that the first of them has now."""
    for (first, name), *others in owners:
        for module, also in others:
            setattr(module, also, getattr(first, name))


def _plan_for(model: nn.Module, tp: int) -> dict[str, str]:
    """Return transformers' plan for a model: name of a module or parameter -> style."""
    require_transformers()
    from transformers.distributed.tensor_parallel import get_kv_heads_per_rank
    from transformers.integrations.tensor_parallel import replace_layer_number_by_wildcard

    whole: dict[str, str] = getattr(model, "tp_plan", None) or {}
    name = type(model).__name__
    places = (*model.named_modules(), *model.named_parameters())
    known = {replace_layer_number_by_wildcard(place) for place, _ in places}
    plan = {place: style for place, style in whole.items() if place in known}
    if any(".*." in place for place in known) and not any(".*." in place for place in plan):
        raise PreflightError(
            f"the plan of transformers {metadata.version('transformers')} for {name} divides none "
            "of its layers; choose tp 1"
        )
    config: Any = model.config
    found = (
        getattr(config, field, None) for field in ("num_key_value_heads", "num_attention_heads")
    )
    heads = next((one for one in found if one), 0)
    if get_kv_heads_per_rank(plan, heads, tp) is None:
        raise PreflightError(
            f"the plan of transformers for {name} divides {heads} key/value heads, which {tp} "
            "ranks cannot share evenly; choose a divisor of their number"
        )
    return plan


_PARTIAL_GRADIENT: Final = "replicated_with_grad_allreduce"


def _is_between(module: nn.Module, place: str, plan: dict[str, str]) -> bool:
    """Whether a module is an activation with parameters that takes parts of divided columns.

    Plans leave these out, such as Apertus's xIELU, whose gradients are parts, too.
    """
    home = place.rpartition(".")[0]
    columns = {name.rpartition(".")[0] for name, style in plan.items() if style in _COLUMNS}
    return type(module).__module__ == "transformers.activations" and home in columns


_COLUMNS: Final = ("colwise", "packed_colwise")


def _reducing(group: dist.ProcessGroup) -> Callable[[nn.Module, Any], None]:
    """Return a hook by which each gradient of a module's parameters is the sum of all ranks'.

    It looks for them in each forward, because `fully_shard` gives the module other parameters.
    """

    def reduce(gradient: Tensor) -> Tensor:
        total = gradient.clone()
        dist.all_reduce(total, group=group)
        return total

    def watch(module: nn.Module, args: Any) -> None:
        del args
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad and _REDUCED not in vars(parameter):
                parameter.register_hook(reduce)  # type: ignore[no-untyped-call]
                setattr(parameter, _REDUCED, True)

    return watch


_REDUCED: Final = "optpipe_reduced"
"""Attribute of parameters whose gradients are reduced; copies have neither it nor the hook."""


def loss_of(config: Any) -> Callable[..., Tensor]:
    """Return the loss of a causal language model: the mean cross entropy of the next tokens.

    It takes logits and labels of a micro-batch, both of the same tokens, and leaves out labels of
    -100. Given ``num_items_in_batch``, it returns the sum of the cross entropy divided by that, as
    transformers does. So the sum over micro-batches is the mean over the tokens of the batch.

    Raises
    ------
    PreflightError
        If the configuration says that the model adds the auxiliary loss of its routers.
    """
    require_transformers()
    if getattr(config, "output_router_logits", False):
        raise PreflightError(
            "config.output_router_logits is True: the model adds to its loss the auxiliary loss of "
            "the routers of all layers, of which the last stage holds only its own; set "
            "config.output_router_logits = False, which trains without that loss"
        )
    from transformers.loss.loss_utils import ForCausalLMLoss

    def loss(
        logits: Tensor, labels: Tensor, *, num_items_in_batch: int | Tensor | None = None
    ) -> Tensor:
        found: Tensor = ForCausalLMLoss(
            logits, labels, vocab_size=config.vocab_size, num_items_in_batch=num_items_in_batch
        )
        return found

    return loss


def require_transformers() -> None:
    """Refuse another transformers than 5, which finds kinds of layers and masks in the config."""
    require_framework("transformers", "5", "models are built and called as those of 5.* are")


class _Nothing(nn.Module):
    """Stands for learned positions, which the first stage has added."""

    def forward(self, positions: Tensor) -> Tensor:
        return torch.zeros((), device=positions.device)


def _keep_layers(part: Any, config: Any, start: int, end: int) -> None:
    """Restrict a stage's configuration to the layers that it holds."""
    own = copy.deepcopy(config)
    own.num_hidden_layers = end - start
    key = config.attribute_map.get("layer_types", "layer_types")
    kinds = getattr(config, key, None)
    if kinds is not None and isinstance(getattr(type(config), key, None), property):
        # Some configurations compute the kinds from a period, which would begin anew in a stage.
        known = {key: list(kinds[start:end])}
        own.__class__ = type(type(config).__name__, (type(config),), known)
    elif kinds is not None:
        setattr(own, key, list(kinds[start:end]))
    for module in (part, part.base_model):
        module.config = own


def _of_tokens(
    self: Any,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
) -> Tensor:
    """Run the first stage's layers."""
    return _run(self, attention_mask, position_ids, input_ids=input_ids)


def _of_states(
    self: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
) -> Tensor:
    """Run the layers of a later stage."""
    return _run(self, attention_mask, position_ids, inputs_embeds=hidden_states)


def _run(
    stage: Any, attention_mask: Tensor | None, position_ids: Tensor | None, **given: Tensor
) -> Tensor:
    found: Tensor = (
        type(stage)
        .forward(
            stage,
            attention_mask=attention_mask,
            position_ids=position_ids,
            use_cache=False,
            return_dict=True,
            **given,
        )
        .logits
    )
    return found


def _check(model: nn.Module, stages: Sequence[nn.Module]) -> None:
    """Refuse stages that, chained, are not the model."""
    config: Any = model.config
    loss_fn = loss_of(config)
    if any(parameter.is_meta for parameter in model.parameters()):
        if config.model_type in _TESTED:
            return
        raise PreflightError(
            f"{type(model).__name__} is not among the models whose stages are tested "
            f"({', '.join(sorted(_TESTED))}), and has no values to compare them by; split it with "
            "values once, and pass check=False when that is right"
        )
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocab_size, (2, 8), generator=generator).to(device)
    mask = torch.ones_like(tokens)
    mask[0, 6:] = 0
    labels = tokens.masked_fill(mask == 0, -100)
    loss_name = "loss, of which loss_of makes another"

    def run_model() -> dict[str, Any]:
        found: Any = model(
            input_ids=tokens,
            attention_mask=mask,
            labels=labels,
            use_cache=False,
            return_dict=True,
        )
        return {"logits": found.logits, loss_name: found.loss}

    def run_stages() -> dict[str, Any]:
        logits = chain_stages(stages, (tokens,), {"attention_mask": mask})
        return {"logits": logits, loss_name: loss_fn(logits, labels)}

    check_stages(model, stages, run_model, run_stages)
