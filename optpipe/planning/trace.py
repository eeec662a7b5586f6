"""Traced models: what each kind of layer of a model costs, counted from the model's own code.

A `TracedModel` (``optpipe/trace/v1``) is a document without torch.
``optpipe.runtime.measuring.trace_model`` writes it: it runs the model on tensors without data, one
layer of each kind, with one and with two sequences. So every cost is linear in the micro-batch.

All numbers are those of one device of a tensor-parallel group, in bf16, with whole sequences and
flash attention. Routing is balanced, all experts are on the device, and nothing is recomputed.
`optpipe.planning.traced_costs` reads the document instead of formulas if a shape has one
(`ModelShape.trace`).
"""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from optpipe.errors import FieldError, FieldRef, ModelError, rule_broken
from optpipe.model import MAX_LAYERS
from optpipe.problem import FileValue
from optpipe.stage import Count, Flag, Flops, FrozenValue, Index, Name

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "TRAINING_KERNELS",
    "LinearBytes",
    "LinearWork",
    "RefusedDegree",
    "TracedKernels",
    "TracedLayer",
    "TracedLora",
    "TracedModel",
    "TracedParameters",
    "TracedRank",
    "TracedWork",
]

TracedKernels = Literal["torch", "fused", "compiled"]

_MOST = 2**60


def _whole(value: object) -> object:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


SignedBytes = Annotated[int, Field(ge=-_MOST, le=_MOST), BeforeValidator(_whole)]
Total = Annotated[int, Field(ge=0, le=_MOST), BeforeValidator(_whole)]
SignedNumber = Annotated[float, Field(ge=-1e30, le=1e30, allow_inf_nan=False)]
Launches = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]


class TracedWork(FrozenValue):
    """The work of a pass of a layer; `optpipe.planning.costs.PassCost` has the same quantities.

    Parameters
    ----------
    matmul_flops
        Of products with weights that stay wide whatever the precision (router, head).
    narrow_flops
        Of products with weights that a narrow precision (fp8, mxfp8, nvfp4) makes narrow.
    attention_flops
        Of attention's own products; the masked half does not count.
    weight_bytes
        All that products with weights read and write.
    moved_bytes
        All that everything else reads and writes.
    cast_elements
        Elements that a narrow precision casts: inputs of those products in F, gradients of their
        outputs in I.
    """

    matmul_flops: SignedNumber = 0.0
    narrow_flops: SignedNumber = 0.0
    attention_flops: SignedNumber = 0.0
    weight_bytes: SignedNumber = 0.0
    moved_bytes: SignedNumber = 0.0
    cast_elements: SignedNumber = 0.0


class LinearWork(FrozenValue):
    """The work of a pass with a micro-batch of b sequences: ``fixed + b * each``.

    W's additions to stored gradients are not in it: they follow from the trained parameters. The
    scatter-add of the embedding is.
    """

    fixed: TracedWork = TracedWork()
    each: TracedWork = TracedWork()

    @model_validator(mode="after")
    def _check_signs(self) -> Self:
        for name in TracedWork.model_fields:
            _check_linear(name, getattr(self.fixed, name), getattr(self.each, name))
        return self


class LinearBytes(FrozenValue):
    """Bytes with a micro-batch of b sequences: ``fixed_bytes + b * each_bytes``."""

    fixed_bytes: SignedBytes = 0
    each_bytes: SignedBytes = 0

    @model_validator(mode="after")
    def _check_signs(self) -> Self:
        _check_linear("bytes", self.fixed_bytes, self.each_bytes)
        return self

    def at(self, sequences: int) -> int:
        """Return the bytes of a micro-batch, by its number of sequences."""
        return self.fixed_bytes + sequences * self.each_bytes


def _check_linear(name: str, fixed: float, each: float) -> None:
    """Refuse a cost that is negative for some micro-batch of at least one sequence."""
    if each < 0 or fixed + each < 0:
        raise rule_broken(
            f"{name}: {fixed:g} + b x {each:g} is negative for some micro-batch of b sequences",
            "trace with one and with two sequences again",
        )


class TracedParameters(FrozenValue):
    """Parameters of a layer on one device: trained and frozen ones, of experts and of all else."""

    common: Total = 0
    experts: Total = 0
    frozen_common: Total = 0
    frozen_experts: Total = 0


class TracedLayer(FrozenValue):
    """The costs of one layer of a kind, the embedding, or the head with the loss, on one device.

    Parameters
    ----------
    name
        Class of the module.
    is_moe
        Whether it has routed experts.
    forward, backward_input, backward_weight
        The work of F, I and W.
    experts_forward, experts_backward_input, experts_backward_weight
        The part of that work after the router: router, order of copies, all experts.
    saved_bytes
        What autograd keeps between F and the backward. The layer's input counts if it is kept.
    weight_context_bytes
        What W needs after I.
    offload_bytes
        What of ``saved_bytes`` can be copied to the host.
    checkpoint_bytes
        What a recomputation of the whole layer needs: its input.
    forward_workspace_bytes, backward_workspace_bytes
        What a pass needs only while it runs.
    parameters
        Its parameters on this device. A head that is tied to the embedding counts its matrix.
    forward_launches, backward_launches
        Kernels that the host launches in F, and in I and W together.
    forward_sent_bytes, backward_sent_bytes
        What a tensor-parallel rank sends around its ring: of an all-reduce of n bytes over t ranks
        2 n (t - 1) / t, of a gathering or scattering n (t - 1) / t.
    """

    name: Name
    is_moe: Flag = False
    forward: LinearWork = LinearWork()
    backward_input: LinearWork = LinearWork()
    backward_weight: LinearWork = LinearWork()
    experts_forward: LinearWork = LinearWork()
    experts_backward_input: LinearWork = LinearWork()
    experts_backward_weight: LinearWork = LinearWork()
    saved_bytes: LinearBytes = LinearBytes()
    weight_context_bytes: LinearBytes = LinearBytes()
    offload_bytes: LinearBytes = LinearBytes()
    checkpoint_bytes: LinearBytes = LinearBytes()
    forward_workspace_bytes: LinearBytes = LinearBytes()
    backward_workspace_bytes: LinearBytes = LinearBytes()
    parameters: TracedParameters = TracedParameters()
    forward_launches: Launches = 0.0
    backward_launches: Launches = 0.0
    forward_sent_bytes: LinearBytes = LinearBytes()
    backward_sent_bytes: LinearBytes = LinearBytes()

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        for name in ("offload_bytes", "checkpoint_bytes"):
            part: LinearBytes = getattr(self, name)
            for b in (1, 2):
                if part.at(b) > self.saved_bytes.at(b):
                    raise rule_broken(
                        f"{name} of {self.name!r} are {part.at(b)} of {self.saved_bytes.at(b)} "
                        f"saved bytes with {b} sequences: no more than all can be meant",
                        "correct one of the two",
                    )
        return self


class TracedRank(FrozenValue):
    """All kinds of layers on one device of ``tp`` tensor-parallel ranks.

    Parameters
    ----------
    tp
        Degree of tensor parallelism.
    expert_tp
        Over how many of these ranks each expert is split: 1 (whole experts) or ``tp``.
    sequence_parallel
        Whether the residual stream between layers is split over these ranks.
    embedding, kinds, head
        The embedding, each kind of layer once, and last norm, head and loss.
    tied_parameters
        Parameters of the head's matrix on this device if it is the embedding's, else 0.
    """

    tp: Count = 1
    expert_tp: Count = 1
    sequence_parallel: Flag = False
    embedding: TracedLayer
    kinds: tuple[TracedLayer, ...] = Field(min_length=1, max_length=MAX_LAYERS)
    head: TracedLayer
    tied_parameters: Total = 0

    @model_validator(mode="after")
    def _check_split(self) -> Self:
        if self.expert_tp not in (1, self.tp):
            raise rule_broken(
                f"expert_tp = {self.expert_tp}: must be 1 or tp = {self.tp}", "correct it"
            )
        return self


class RefusedDegree(FrozenValue):
    """A degree of tensor parallelism with which the model cannot be traced, and the reason."""

    tp: Count
    reason: str = Field(max_length=500)


class TracedLora(FrozenValue):
    """The adapters with which a model was traced, by the names of `optpipe.planning.shape.Lora`."""

    rank: Count
    targets: tuple[Name, ...] = Field(min_length=1, max_length=100)


class TracedModel(FileValue):
    """A decoder-only model, counted from its own code (``optpipe/trace/v1``).

    Parameters
    ----------
    model_type
        The ``model_type`` of its config.json, or the class of a model of the user's.
    sequence
        Tokens of a sequence with which it was traced.
    hidden, vocab
        Width of the residual stream between layers, and rows of the embedding.
    layers
        The kind of each layer in model order, as a position in `TracedRank.kinds`.
    ranks
        Costs by degree of tensor parallelism, each degree once, in ascending order.
    refused
        Requested degrees that cannot be traced.
    num_experts, active_experts
        Routed experts of a layer that has some, and how many of them a token goes through; 0 = the
        model has none.
    max_nodes
        A token goes to experts of at most so many groups, which routing keeps on one node each; 0 =
        of any (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).
    parameters, active_parameters
        Of the whole model, tied ones once; and those that a token goes through. Adapters of LoRA
        are not counted.
    sequence_flops
        FLOPs of a sequence, F and backward, by the convention of published utilisations: 6 per
        parameter of a matrix and token, and attention's products without regard to the mask. It is
        that of the whole model. With LoRA it is 4 per parameter.
    kernels
        ``torch``: each operator is a kernel of its own; ``fused``: norms, rotary embeddings,
        activations, the loss, and copies of tokens to experts and back are one kernel each;
        ``compiled``: as torch.compile fuses them.
    lora
        Adapters that are trained instead of the model's weights; None = all weights are trained.
    transformers, torch
        Versions with which it was traced; ``transformers`` is empty for a model of the user's.
    left_out
        What of the model is not in the document, in words.
    """

    fault = ModelError

    format: Literal["optpipe/trace/v1"] = "optpipe/trace/v1"
    model_type: Name
    sequence: Count
    hidden: Count
    vocab: Count
    layers: tuple[Index, ...] = Field(min_length=1, max_length=MAX_LAYERS)
    ranks: tuple[TracedRank, ...] = Field(min_length=1, max_length=32)
    refused: tuple[RefusedDegree, ...] = Field(default=(), max_length=32)
    num_experts: Index = 0
    active_experts: Index = 0
    max_nodes: Index = 0
    parameters: Total
    active_parameters: Total
    sequence_flops: Flops
    kernels: TracedKernels = "torch"
    lora: TracedLora | None = None
    transformers: str = Field(default="", max_length=100)
    torch: str = Field(default="", max_length=100)
    left_out: tuple[Name, ...] = Field(default=(), max_length=100)

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        degrees = [rank.tp for rank in self.ranks]
        if degrees != sorted(set(degrees)):
            raise rule_broken(
                f"ranks have tp {', '.join(map(str, degrees))}: must be different and ascend",
                "sort them, and leave out what is there twice",
            )
        forms = {tuple((one.name, one.is_moe) for one in rank.kinds) for rank in self.ranks}
        if len(forms) > 1:
            raise rule_broken(
                "ranks have different kinds of layers: must be the same names in the same order",
                "trace each degree with the same config",
            )
        highest = max(self.layers)
        if highest >= len(self.ranks[0].kinds):
            raise rule_broken(
                f"layers has the kind {highest}, but there are {len(self.ranks[0].kinds)} kinds",
                "count them from 0",
            )
        has_experts = any(one.is_moe for one in self.ranks[0].kinds)
        if has_experts != (self.num_experts > 0) or self.active_experts > self.num_experts:
            raise rule_broken(
                f"num_experts = {self.num_experts} and active_experts = {self.active_experts}: "
                "must be above 0 exactly if a kind has experts, and no more can be active than "
                "there are",
                "correct them",
            )
        return self

    @cached_property
    def digest(self) -> str:
        """A hash of the document's contents."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()

    def __hash__(self) -> int:
        return hash(self.digest)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TracedModel) and self.digest == other.digest

    @property
    def degrees(self) -> tuple[int, ...]:
        """The degrees of tensor parallelism that it has."""
        return tuple(rank.tp for rank in self.ranks)

    @property
    def source(self) -> str:
        """The source of the numbers, in words."""
        versions = f"transformers {self.transformers}, " if self.transformers else ""
        torch = f"torch {self.torch}" if self.torch else "torch"
        return f"traced: {self.model_type}, {versions}{torch}, {self.kernels} kernels"

    def rank(self, tp: int) -> TracedRank:
        """Return the costs on one of ``tp`` tensor-parallel ranks.

        Raises `FieldError` if the model was traced with other degrees.
        """
        found = next((rank for rank in self.ranks if rank.tp == tp), None)
        if found is not None:
            return found
        for one in self.refused:
            if one.tp == tp:
                raise FieldError(
                    FieldRef("tp", tp), f": {self.model_type} was not traced with it: {one.reason}"
                )
        raise FieldError(
            FieldRef("tp", tp),
            f": {self.model_type} was traced with tp {', '.join(map(str, self.degrees))}; choose "
            "one of these, or trace it with others",
        )

    def layer(self, tp: int, kind: int | None) -> TracedLayer:
        """Return a kind of layer on a device of so many tensor-parallel ranks."""
        return self.rank(tp).kinds[kind or 0]

    def __repr__(self) -> str:
        return f"TracedModel({self.model_type!r}, {self.digest[:12]})"


TRAINING_KERNELS: Mapping[TracedKernels, tuple[Literal["megatron", "torch"], bool]] = {
    "torch": ("torch", False),
    "compiled": ("torch", True),
    "fused": ("megatron", False),
}
"""Kernels of a trace -> ``kernels`` and ``compiled`` of a training."""
