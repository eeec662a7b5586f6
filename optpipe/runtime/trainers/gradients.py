"""Gradients that concern several ranks: of tied weights, and their common norm.

A weight that two stages share, such as a language model's embedding and head, is one parameter if
both stages are on one rank, and autograd adds its gradients up. On two ranks each has a copy. The
copies begin equal, their gradients are added up at the end of each step, and so they stay equal
under any optimizer that does the same on both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from optpipe.runtime.errors import PreflightError
from optpipe.runtime.torch_names import parts_with_memory

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch.distributed import ProcessGroup

    from optpipe.runtime.trainers.split import Tie

__all__ = ["TiedWeights", "clip_together"]


class TiedWeights:
    """The copies on one rank of parameters that several stages share.

    All ranks of the group make one together; ties of stages on this rank become one parameter, and
    the others get the values of the first stage's.

    Parameters
    ----------
    ties
        Of all stages, the same on all ranks.
    stages
        Of this rank, by index, without a wrapper such as DDP.
    placement
        The rank of each stage.

    Raises
    ------
    PreflightError
        If a stage has no parameter of that name, or copies have different sizes.
    """

    def __init__(
        self,
        ties: Sequence[Tie],
        stages: Mapping[int, nn.Module],
        placement: Sequence[int],
        group: ProcessGroup | None,
    ) -> None:
        self._group = group
        self._before: list[Tensor | None] = []
        self._shared: list[tuple[Tensor, list[int]]] = []
        self.counted_elsewhere: set[Tensor] = set()
        """Those that another rank counts where a norm counts each weight once."""
        rank = dist.get_rank(group)
        for tie in ties:
            homes = sorted({placement[stage] for stage in tie.stages})
            if rank not in homes:
                continue
            parameter = _one_parameter(tie, stages)
            if len(homes) == 1:
                continue
            first = placement[tie.stages[0]]
            self._shared.append((parameter, homes))
            for part in parts_with_memory(parameter.data):
                part.copy_(self._exchanged(part, homes)[homes.index(first)])
            if rank != first:
                self.counted_elsewhere.add(parameter)

    def begin(self) -> None:
        """Put aside the gradients that stand before a step: only what it makes is added up."""
        self._before = [parameter.grad for parameter, _ in self._shared]
        for parameter, _ in self._shared:
            parameter.grad = None

    def add_up(self) -> None:
        """Let all copies have the sum of their gradients; all ranks that hold one together."""
        for (parameter, homes), before in zip(self._shared, self._before, strict=True):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            for part in parts_with_memory(parameter.grad):
                # In the order of the ranks, so all have the same to the last bit.
                copies = self._exchanged(part, homes)
                total = copies[0].clone()
                for one in copies[1:]:
                    total += one
                part.copy_(total)
            if before is not None:
                parameter.grad += before
        self._before = []

    def _exchanged(self, own: Tensor, homes: Sequence[int]) -> list[Tensor]:
        """Return every rank's copy, in the order of ``homes``; this one's is the tensor itself."""
        rank = dist.get_rank(self._group)
        own = own.contiguous()
        found = [own if home == rank else torch.empty_like(own) for home in homes]
        operations = []
        for home, copy in zip(homes, found, strict=True):
            if home != rank:
                operations += [
                    dist.P2POp(dist.isend, own, group=self._group, group_peer=home),
                    dist.P2POp(dist.irecv, copy, group=self._group, group_peer=home),
                ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return found


def _one_parameter(tie: Tie, stages: Mapping[int, nn.Module]) -> nn.Parameter:
    """Return the parameter of a tie; let all stages here have the same."""
    found: nn.Parameter | None = None
    for stage, name in tie.places:
        if stage not in stages:
            continue
        home, _, last = name.rpartition(".")
        try:
            owner = stages[stage].get_submodule(home)
            parameter = owner.get_parameter(last)
        except AttributeError:
            raise PreflightError(
                f"stage {stage} has no parameter {name} to tie; take ties from "
                "ties_of(stages) before the stages are changed"
            ) from None
        if found is None:
            found = parameter
        elif found.shape != parameter.shape:
            raise PreflightError(
                f"{name} of stage {stage} has shape {tuple(parameter.shape)}, what it is tied to "
                f"{tuple(found.shape)}; tie equal parameters"
            )
        setattr(owner, last, found)
    assert found is not None  # noqa: S101 - a rank is asked for its own ties
    return found


def clip_together(
    parameters: Iterable[Tensor],
    max_norm: float,
    *,
    norm_type: float = 2.0,
    counted_elsewhere: Iterable[Tensor] = (),
    group: ProcessGroup | None = None,
) -> Tensor:
    """Scale the gradients of all ranks by one factor, so that their common norm is not too large.

    All ranks wait for each other: it ends what the `span` objective promises (docs/runtime.md).

    Parameters
    ----------
    parameters
        Of this rank.
    norm_type
        2 is the root of the sum of squares, infinity the largest.
    counted_elsewhere
        Parameters whose gradients another rank counts.

    Returns
    -------
    Tensor
        The norm before, of all ranks' gradients together.
    """
    given = {one: None for one in parameters if one.grad is not None}
    elsewhere = set(counted_elsewhere)
    gradients = [one.grad for one in given if one not in elsewhere and one.grad is not None]
    norm = nn.utils.get_total_norm(gradients, norm_type)
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    if norm_type == float("inf"):
        dist.all_reduce(norm, dist.ReduceOp.MAX, group=group)
    else:
        norm = norm**norm_type
        dist.all_reduce(norm, group=group)
        norm = norm ** (1.0 / norm_type)
    nn.utils.clip_grads_with_norm_(list(given), max_norm, norm)
    return norm
