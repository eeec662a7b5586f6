"""Parameters of a model: how many, which are experts', and adapters on frozen ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from optpipe.errors import InputError
from optpipe.runtime.measuring.architectures import count_active, count_experts, find_blocks

if TYPE_CHECKING:
    from optpipe.planning.shape import Lora

__all__ = ["ADAPTER_MATRICES", "ParameterCount", "add_adapters"]


class ParameterCount:
    """Parameters of a whole model, and which are experts', before adapters are added.

    Attributes
    ----------
    experts
        Identities of the parameters of routed experts.
    routers
        Shapes of matrices that score experts.
    """

    def __init__(self, model: Any, config: Any) -> None:
        self.num_experts = count_experts(config)
        self.active_experts = count_active(config)
        self.experts: set[int] = set()
        self.routers: set[tuple[int, ...]] = set()
        self.expert_parts = [
            one for name, one in model.named_modules() if self._holds_experts(name, one)
        ]
        for one in self.expert_parts:
            self.experts |= {id(parameter) for parameter in one.parameters()}
        own = list(model.parameters())
        self.parameters = sum(one.numel() for one in own)
        routed = sum(one.numel() for one in own if id(one) in self.experts)
        share = self.active_experts / max(1, self.num_experts)
        self.active_parameters = round(self.parameters - routed * (1 - share))
        if self.experts:
            self.routers = {
                tuple(one.shape)
                for one in own
                if one.dim() == 2 and one.shape[0] == self.num_experts
            }

    def _holds_experts(self, name: str, module: nn.Module) -> bool:
        """Whether a module is a list of routed experts, or holds their stacked matrices."""
        if self.num_experts < 2:
            return False
        if name.endswith(".experts"):
            return True
        if isinstance(module, nn.ModuleList):
            kinds = {type(one) for one in module}
            has_parts = any(list(one.children()) for one in module)
            return len(module) == self.num_experts and len(kinds) == 1 and has_parts
        stacked = [one for one in module.parameters(recurse=False) if one.dim() == _STACKED]
        return any(one.shape[0] == self.num_experts for one in stacked)


_STACKED = 3
"""Dimensions of the stacked matrices of experts."""


def add_adapters(model: nn.Module, lora: Lora) -> None:
    """Freeze a model and add an adapter to each target among its linear layers, in place.

    Raises
    ------
    InputError
        If no linear layer is a target.
    """
    model.requires_grad_(requires_grad=False)
    names = {name for target in lora.targets for name in _TARGETS.get(target, ())}
    found = [
        (parent, name, child)
        for block in find_blocks(model)
        for parent in block.modules()
        for name, child in parent.named_children()
        if name in names and isinstance(child, nn.Linear)
    ]
    if not found:
        raise InputError(
            f"lora_targets = {', '.join(sorted(lora.targets))}: no linear layer of "
            f"{type(model).__name__} is called one of {', '.join(sorted(names))}; choose others"
        )
    for parent, name, child in found:
        setattr(parent, name, _Adapted(child, lora.rank))


ADAPTER_MATRICES = ("lora_a.weight", "lora_b.weight")

_TARGETS = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value", "c_attn", "Wqkv"),
    "linear_proj": ("o_proj", "out_proj"),
    "linear_fc1": ("gate_proj", "up_proj", "gate_up_proj", "w1", "w3", "fc1", "c_fc"),
    "linear_fc2": ("down_proj", "w2", "fc2"),
    "linear_q_proj": ("q_proj",),
    "linear_q_down_proj": ("q_a_proj",),
    "linear_q_up_proj": ("q_b_proj",),
    "linear_kv_down_proj": ("kv_a_proj_with_mqa",),
    "linear_kv_up_proj": ("kv_b_proj",),
}
"""Target of `optpipe.planning.shape.Lora` -> names of linear layers in transformers."""


class _Adapted(nn.Module):
    """A frozen linear layer and its adapter of two matrices."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        options: Any = {"bias": False, "device": "meta", "dtype": base.weight.dtype}
        self.lora_a = nn.Linear(base.in_features, rank, **options)
        self.lora_b = nn.Linear(rank, base.out_features, **options)

    def forward(self, given: Tensor) -> Tensor:
        """Add the scaled adapter's output to the layer's."""
        output: Tensor = self.base(given) + self.lora_b(self.lora_a(given)) * 1.0
        return output
