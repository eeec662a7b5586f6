"""Work as milliseconds on an accelerator, and the collectives inside a stage."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from optpipe.presets.parameters import kv_width

if TYPE_CHECKING:
    from optpipe.presets.flops import Passes, Work
    from optpipe.presets.hardware import Efficiency, Hardware
    from optpipe.presets.parameters import Held
    from optpipe.presets.shape import ModelShape
    from optpipe.presets.training import Training

__all__ = ["Machine", "PassTimes"]


class PassTimes(NamedTuple):
    """Milliseconds of F, I and W."""

    forward_ms: float
    backward_input_ms: float
    backward_weight_ms: float

    def times(self, factor: float) -> PassTimes:
        """Return all three multiplied."""
        return PassTimes(*(value * factor for value in self))

    def plus(self, other: PassTimes) -> PassTimes:
        """Return the sums."""
        return PassTimes(*(a + b for a, b in zip(self, other, strict=True)))


class Machine(NamedTuple):
    """An accelerator in a run: what its rates are."""

    hardware: Hardware
    efficiency: Efficiency
    training: Training

    def pass_times(self, passes: Passes) -> PassTimes:
        """Return the compute time of each pass."""
        return PassTimes(*(self._compute_ms(work) for work in passes))

    def _compute_ms(self, work: Work) -> float:
        """Return products after each other, none faster than its weights are read; then the rest.

        fp8 is for products with weights; attention stays in bf16.
        """
        reached, training = self.efficiency, self.training
        peak = self.hardware.peak_flops(training.precision)
        inner = "bf16" if training.precision == "fp8" else training.precision
        bytes_per_s = self.hardware.memory_gb_per_s.value * 1e9
        product = work.matmul_flops / (peak * reached.matmul)
        product = max(product, work.weight_bytes / bytes_per_s)
        scores = work.attention_flops / (self.hardware.peak_flops(inner) * reached.attention)
        moved = work.moved_bytes / (bytes_per_s * reached.memory)
        return 1e3 * (product + scores + moved)

    def layer_collectives(self, shape: ModelShape, *, is_moe: bool) -> PassTimes:
        """Return the time of collectives inside a layer; none of it is taken as hidden.

        Tensor parallel: two all-reduces in F and two in I (Shoeybi et al. 2019, Megatron-LM,
        arXiv 1909.08053, section 3), or as many reduce-scatters and all-gathers of the same bytes.
        Context parallel: keys and values around the ring, in I their gradients too. Experts:
        tokens out and back, in F and in I.
        """
        training = self.training
        size = training.element_bytes
        reduce = 2 * self.all_reduce_ms(training.tokens * shape.hidden * size, training.tp)
        pair = 2 * training.tokens * kv_width(shape, training.tp) * size
        ring = self._ring_ms(pair * (training.cp - 1), training.tp * training.cp)
        spread = 0.0
        if is_moe and shape.experts is not None and training.ep > 1:
            copies = shape.experts.active * training.residual_tokens * shape.hidden * size
            moved = 2 * copies * (training.ep - 1) / training.ep
            spread = self._ring_ms(moved, training.tp * training.cp * training.ep)
        return PassTimes(reduce + ring + spread, reduce + 2 * ring + spread, 0.0)

    def all_reduce_ms(self, num_bytes: float, ranks: int) -> float:
        """Return the time of a ring all-reduce: every rank sends 2 (n - 1) / n of the bytes."""
        return self._ring_ms(2 * num_bytes * (ranks - 1) / ranks, ranks)

    def grad_sync_ms(self, held: Held) -> float:
        """Return the reduction of fp32 gradients over the data-parallel ranks, after the last W.

        All-reduced, or with ``zero`` reduce-scattered, which is half of it; the all-gather of the
        new weights belongs to the optimizer's step. An expert's over the ranks that hold it.
        """
        training = self.training
        share = 0.5 if training.zero else 1.0
        inside = training.tp * training.cp
        total = 0.0
        for parameters, ranks in (
            (held.common, training.dp),
            (held.experts, training.dp // training.ep),
        ):
            sent = 2 * 4.0 * parameters * (ranks - 1) / ranks
            total += self._ring_ms(share * sent, inside * training.dp)
        return total

    def _ring_ms(self, num_bytes: float, group: int) -> float:
        """Return the time to send so many bytes within the first ``group`` neighbouring ranks."""
        if group <= self.hardware.gpus_per_node:
            rate = self.hardware.node_gb_per_s.value
        else:
            rate = self.hardware.network_gb_per_s.value
        return num_bytes / (rate * self.efficiency.network * 1e6)
