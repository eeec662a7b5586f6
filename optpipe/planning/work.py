"""The costs of a layer on one device: FLOPs and bytes by pass, bytes kept, parameters.

`optpipe.planning.costs` fills these values by formulas, `optpipe.planning.traced_costs` from a
trace of the model's own code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from optpipe.planning.parameters import RankParameters

__all__ = ["Kept", "LayerCosts", "PassCost", "PassCosts"]


class Kept(NamedTuple):
    """Bytes that one layer keeps per micro-batch, as a `Stage` has them."""

    activation_bytes: int
    weight_context_bytes: int
    offload_bytes: int
    checkpoint_bytes: int


class PassCost(NamedTuple):
    """The work of one pass of one part on one device: FLOPs of products, bytes moved.

    ``narrow_flops`` are those of products in the narrow precision, ``matmul_flops`` of all other
    products with weights. ``weight_bytes`` are read while products run, ``moved_bytes`` by
    everything else but the casts of ``cast_elements`` to the narrow precision. ``gradient_bytes``
    are read and written where W's products add to gradients.
    """

    matmul_flops: float = 0.0
    narrow_flops: float = 0.0
    attention_flops: float = 0.0
    weight_bytes: float = 0.0
    moved_bytes: float = 0.0
    cast_elements: float = 0.0
    gradient_bytes: float = 0.0

    def plus(self, other: PassCost) -> PassCost:
        """Return the sums."""
        return PassCost(*(a + b for a, b in zip(self, other, strict=True)))


class PassCosts(NamedTuple):
    """The work of F, I and W."""

    forward: PassCost = PassCost()
    backward_input: PassCost = PassCost()
    backward_weight: PassCost = PassCost()

    def plus(self, other: PassCosts) -> PassCosts:
        """Return the sums."""
        return PassCosts(*(a.plus(b) for a, b in zip(self, other, strict=True)))


class LayerCosts(NamedTuple):
    """The costs of one layer, or embedding, head or multi-token prediction, on one device.

    Parameters
    ----------
    work
        FLOPs and bytes moved of F, I and W.
    kept
        Bytes per micro-batch between F and the backward.
    parameters
        Parameters of the layer on this device.
    experts
        The part of ``work`` from the router on: the router, the order of copies, all experts.
    forward_workspace_bytes, backward_workspace_bytes
        Bytes that a pass needs only while it runs.
    """

    work: PassCosts
    kept: Kept
    parameters: RankParameters
    experts: PassCosts = PassCosts()
    forward_workspace_bytes: int = 0
    backward_workspace_bytes: int = 0
