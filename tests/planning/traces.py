"""Traced models that say what the formulas say, so that both must lead to the same numbers."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from optpipe.planning import find_gpu, total_parameters
from optpipe.planning.costs import (
    LayerCosts,
    PassCost,
    embedding_costs,
    head_costs,
    layer_costs,
    model_flops,
)
from optpipe.planning.machine import TRACED_LAUNCH_MS, Machine
from optpipe.planning.shape import LayerForm, ModelShape, Training
from optpipe.planning.trace import (
    LinearBytes,
    LinearWork,
    TracedLayer,
    TracedLora,
    TracedModel,
    TracedParameters,
    TracedRank,
    TracedWork,
)

H100 = find_gpu("h100")


def linear_bytes(at: Callable[[int], int]) -> LinearBytes:
    """Return the bytes that a function has for one and for two sequences."""
    each = at(2) - at(1)
    return LinearBytes(fixed_bytes=at(1) - each, each_bytes=each)


def linear_work(at: Callable[[int], PassCost], *, is_layer: bool) -> LinearWork:
    """Return the work that a function has for one and two sequences; layers have narrow products.

    Routers too, which formulas keep wide.
    """
    one, two = at(1), at(2)
    values: dict[str, tuple[float, float]] = {}
    for name, a, b in zip(PassCost._fields, one, two, strict=True):
        traced = "narrow_flops" if name == "matmul_flops" and is_layer else name
        if traced in TracedWork.model_fields and name not in ("narrow_flops", "cast_elements"):
            values[traced] = (2 * a - b, b - a)
    return LinearWork(
        fixed=TracedWork(**{name: value[0] for name, value in values.items()}),
        each=TracedWork(**{name: value[1] for name, value in values.items()}),
    )


def traced_part(
    name: str, at: Callable[[int], LayerCosts], *, is_layer: bool = False, **more: Any
) -> TracedLayer:
    """Return a layer whose costs are those of a formula, called with the micro-batch."""

    def work(field: str, which: str) -> LinearWork:
        return linear_work(lambda b: getattr(getattr(at(b), field), which), is_layer=is_layer)

    def kept(field: str) -> LinearBytes:
        return linear_bytes(lambda b: getattr(at(b).kept, field))

    parameters = at(1).parameters
    passes = ("forward", "backward_input", "backward_weight")
    return TracedLayer(
        name=name,
        **{which: work("work", which) for which in passes},
        **{f"experts_{which}": work("experts", which) for which in passes},
        saved_bytes=kept("activation_bytes"),
        weight_context_bytes=kept("weight_context_bytes"),
        offload_bytes=kept("offload_bytes"),
        checkpoint_bytes=kept("checkpoint_bytes"),
        forward_workspace_bytes=linear_bytes(lambda b: at(b).forward_workspace_bytes),
        backward_workspace_bytes=linear_bytes(lambda b: at(b).backward_workspace_bytes),
        parameters=TracedParameters(
            common=parameters.common,
            experts=parameters.experts,
            frozen_common=parameters.frozen_common,
            frozen_experts=parameters.frozen_experts,
        ),
        **more,
    )


def traced_rank(shape: ModelShape, split: Training) -> TracedRank:
    """Return what the formulas say of a device of a training's tensor-parallel ranks."""

    def with_batch(b: int) -> Training:
        return replace(split, micro_batch=b)

    def layer(kind: LayerForm, number: int) -> TracedLayer:
        machine = Machine(H100, H100.efficiency, split)
        ahead, back = machine.launches_ms(shape, kind)

        def sent(which: int) -> LinearBytes:
            def at(b: int) -> int:
                one = machine._replace(training=with_batch(b))
                return round(one._tensor_bytes(shape, kind)[which])

            return linear_bytes(at)

        return traced_part(
            f"Layer{number}",
            lambda b: layer_costs(shape, with_batch(b), kind),
            is_layer=True,
            is_moe=kind.is_moe,
            forward_launches=ahead / TRACED_LAUNCH_MS,
            backward_launches=back / TRACED_LAUNCH_MS,
            forward_sent_bytes=sent(0),
            backward_sent_bytes=sent(1),
        )

    rings = (1 if split.sequence_parallel else 2) * (split.tp - 1)
    reduced = linear_bytes(lambda b: rings * b * split.sequence * shape.hidden * 2 // split.tp)
    return TracedRank(
        tp=split.tp,
        sequence_parallel=split.sequence_parallel,
        embedding=traced_part(
            "Embedding",
            lambda b: embedding_costs(shape, with_batch(b)),
            forward_sent_bytes=reduced,
        ),
        kinds=tuple(layer(kind, number) for number, kind in enumerate(kinds_of(shape))),
        head=traced_part(
            "Head", lambda b: head_costs(shape, with_batch(b)), backward_sent_bytes=reduced
        ),
        tied_parameters=-(-shape.vocab // split.tp) * shape.hidden if shape.tied else 0,
    )


def kinds_of(shape: ModelShape) -> list[LayerForm]:
    """Return each kind of layer once."""
    return list(dict.fromkeys(shape.layer_kinds))


def traced_like(shape: ModelShape, training: Training, tps: Sequence[int] = (1,)) -> TracedModel:
    """Return a document that says of a model what the formulas say, for some degrees.

    ``training`` gives the sequence, kernels and adapters; the model has no dropout.
    """
    base = replace(training, micro_batch=1, tp=1, cp=1, ep=1, etp=1, dp=1, zero=0)
    kinds = kinds_of(shape)
    experts, lora = shape.experts, base.lora
    adapters = None
    if lora is not None:
        adapters = TracedLora(rank=lora.rank, targets=tuple(sorted(lora.targets)))
    return TracedModel(
        model_type=shape.name,
        sequence=base.sequence,
        hidden=shape.hidden,
        vocab=shape.vocab,
        layers=tuple(map(kinds.index, shape.layer_kinds)),
        ranks=tuple(traced_rank(shape, replace(base, tp=tp)) for tp in tps),
        num_experts=0 if experts is None else experts.num,
        active_experts=0 if experts is None else experts.active,
        max_nodes=0 if experts is None else experts.max_nodes,
        parameters=total_parameters(shape),
        active_parameters=total_parameters(shape, active=True),
        sequence_flops=model_flops(shape, base),
        kernels="fused" if base.kernels == "megatron" else "compiled",
        lora=adapters,
    )
