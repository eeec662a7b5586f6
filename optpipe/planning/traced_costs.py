"""The costs of layers from a trace instead of formulas, in a training's micro-batch and degrees.

`optpipe.planning.costs` calls these functions for a shape with a trace.
`optpipe.planning.shape.Training.check_divides` refuses what a trace does not cover.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe.planning.parameters import traced_parameters
from optpipe.planning.shape import Experts, ModelShape
from optpipe.planning.work import Kept, LayerCosts, PassCost, PassCosts

if TYPE_CHECKING:
    from optpipe.planning.shape import LayerForm, Training
    from optpipe.planning.trace import LinearWork, TracedLayer, TracedModel

__all__ = [
    "shape_of_trace",
    "traced_embedding_costs",
    "traced_head_costs",
    "traced_layer_costs",
]


def shape_of_trace(trace: TracedModel, name: str = "") -> ModelShape:
    """Return a traced model as a shape, from which estimates and tunes begin.

    Its sizes of heads and MLPs are 1: no formula reads them.
    """
    experts = None
    if trace.num_experts:
        experts = Experts(
            num=trace.num_experts, active=trace.active_experts, ffn=1, max_nodes=trace.max_nodes
        )
    return ModelShape(
        name=name or trace.model_type,
        num_layers=len(trace.layers),
        hidden=trace.hidden,
        num_heads=1,
        num_kv_heads=1,
        ffn=1,
        vocab=trace.vocab,
        tied=any(rank.tied_parameters for rank in trace.ranks),
        experts=experts,
        source=trace.source,
        left_out=trace.left_out,
        trace=trace,
    )


def traced_layer_costs(trace: TracedModel, training: Training, kind: LayerForm) -> LayerCosts:
    """Return the costs of a layer; recomputation of all of it is in I."""
    return _costs(trace.layer(training.tp, kind.traced), training)


def traced_embedding_costs(trace: TracedModel, training: Training) -> LayerCosts:
    """Return the costs of the embedding; its scatter-add into gradients is work of its own."""
    found = _costs(trace.rank(training.tp).embedding, training, is_layer=False)
    weight = found.work.backward_weight._replace(gradient_bytes=0.0)
    return found._replace(work=found.work._replace(backward_weight=weight))


def traced_head_costs(trace: TracedModel, training: Training, *, owns_matrix: bool) -> LayerCosts:
    """Return the costs of last norm, head and loss; ``owns_matrix`` is false for a tied head."""
    rank = trace.rank(training.tp)
    found = _costs(rank.head, training, is_layer=False)
    if owns_matrix:
        return found
    counts = found.parameters
    frozen = min(counts.frozen_common, rank.tied_parameters)
    trained = rank.tied_parameters - frozen
    counts = counts._replace(
        common=counts.common - trained, frozen_common=counts.frozen_common - frozen
    )
    return found._replace(parameters=counts)


def _costs(layer: TracedLayer, training: Training, *, is_layer: bool = True) -> LayerCosts:
    """Return the costs of a traced layer in a training."""
    b, ep = training.micro_batch, training.ep
    parameters = traced_parameters(layer.parameters, ep)
    passes = (layer.forward, layer.backward_input, layer.backward_weight)
    experts = (
        layer.experts_forward,
        layer.experts_backward_input,
        layer.experts_backward_weight,
    )
    routed = PassCosts(*(_work(work, training, weights=1 / ep) for work in experts))
    whole = []
    for one, of_experts in zip(passes, experts, strict=True):
        found = _work(one, training)
        # Weights of experts on other expert-parallel ranks are not read.
        remote = (1 - 1 / ep) * of_experts.fixed.weight_bytes
        whole.append(found._replace(weight_bytes=found.weight_bytes - remote))
    forward, back, weight = whole
    added = 2.0 * training.gradient_bytes
    weight = weight._replace(gradient_bytes=added * parameters.total)
    if layer.is_moe:
        routed = routed._replace(
            backward_weight=routed.backward_weight._replace(
                gradient_bytes=added * parameters.experts
            )
        )
    saved, checkpoint = layer.saved_bytes.at(b), layer.checkpoint_bytes.at(b)
    workspace = layer.backward_workspace_bytes.at(b)
    kept = Kept(saved, layer.weight_context_bytes.at(b), layer.offload_bytes.at(b), checkpoint)
    if is_layer and "full" in training.recompute:
        back = back.plus(forward)
        workspace += saved - checkpoint
        kept = kept._replace(activation_bytes=checkpoint, offload_bytes=checkpoint)
    return LayerCosts(
        PassCosts(forward, back, weight),
        kept,
        parameters,
        experts=routed,
        forward_workspace_bytes=layer.forward_workspace_bytes.at(b),
        backward_workspace_bytes=workspace,
    )


def _work(work: LinearWork, training: Training, *, weights: float = 1.0) -> PassCost:
    """Return the work of a pass; ``weights`` multiplies the bytes that no sequence adds."""

    def total(name: str, share: float = 1.0) -> float:
        each = training.micro_batch * getattr(work.each, name)
        return float(share * getattr(work.fixed, name) + each)

    wide, narrow = total("matmul_flops"), total("narrow_flops")
    return PassCost(
        wide if training.is_narrow else wide + narrow,
        narrow if training.is_narrow else 0.0,
        total("attention_flops"),
        total("weight_bytes", weights),
        total("moved_bytes"),
        total("cast_elements") if training.is_narrow else 0.0,
    )
