"""Work as milliseconds: the one place where FLOPs and bytes of a model become time.

``Machine`` is an accelerator in a run. It has the time of each pass of a layer, by cause (`Spent`):
products, attention, memory, collectives that nothing hides, and launches by the host.
`optpipe.planning.step` adds them up for a whole configuration, `optpipe.planning.estimate` writes
them into a problem.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from optpipe.planning.costs import (
    PassCost,
    PassCosts,
    embedding_costs,
    expert_tokens,
    gathered_tokens,
    head_costs,
    layer_costs,
    mtp_costs,
)
from optpipe.planning.parameters import (
    RankParameters,
    kv_width,
    replicas,
    tied_parameters,
)

if TYPE_CHECKING:
    from optpipe.planning.accelerators import Efficiency, Hardware
    from optpipe.planning.shape import LayerForm, ModelShape, Training
    from optpipe.planning.trace import TracedLayer

__all__ = ["TRACED_LAUNCH_MS", "Exchange", "Machine", "PartTimes", "PassTimes", "Spent"]


class PassTimes(NamedTuple):
    """Milliseconds of F, I and W."""

    forward_ms: float
    backward_input_ms: float
    backward_weight_ms: float


class Spent(NamedTuple):
    """Milliseconds of a pass by cause.

    ``memory``: everything bound by memory bandwidth. ``tensor``, ``context``, ``experts``, ``data``
    and ``copies``: collectives over those ranks, and copies to the host, as far as nothing hides
    them. ``host``: what launching takes longer than all of these.
    """

    products: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    tensor: float = 0.0
    context: float = 0.0
    experts: float = 0.0
    data: float = 0.0
    copies: float = 0.0
    host: float = 0.0

    def plus(self, other: Spent) -> Spent:
        """Return the sums."""
        return Spent(*[a + b for a, b in zip(self, other, strict=True)])

    def times(self, factor: float) -> Spent:
        """Return this many of it."""
        return Spent(*[factor * value for value in self])

    @property
    def compute(self) -> float:
        """The milliseconds in which the device computes."""
        return self.products + self.attention + self.memory


class PartTimes(NamedTuple):
    """Milliseconds of F, I and W of one part, by cause."""

    forward: Spent
    backward_input: Spent
    backward_weight: Spent

    @property
    def sums(self) -> PassTimes:
        """The durations."""
        return PassTimes(*(sum(spent) for spent in self))

    @property
    def spent(self) -> Spent:
        """All three passes together."""
        return self.forward.plus(self.backward_input).plus(self.backward_weight)

    def scaled(self, factor: float) -> PartTimes:
        """Return a multiple of it."""
        return PartTimes(*(spent.times(factor) for spent in self))


class Exchange(NamedTuple):
    """A reduction or gathering over replicas: its time, and what of it nothing hides."""

    whole_ms: float = 0.0
    unhidden_ms: float = 0.0


class _Ring(NamedTuple):
    ms: float
    leaves_node: bool


# Not fitted, the same for every model, row and accelerator; docs/estimate.md gives the reasons.
_SCALED_SHARE = {"fp8": 1.0, "mxfp8": 0.92, "nvfp4": 0.75}  # of what one scale per tensor reaches
_ALL_TO_ALL_SHARE = 0.6  # of what rings reach on a link: every rank writes to every other
_UNHIDDEN_SHARE = 0.5  # of a reduction beside compute: they share links, SMs and memory
_SYNCHRONOUS_SHARE = 0.5  # of a layer's launches come behind the wait for the counts of tokens
_BUSY_SHARE = 0.2  # of hidden gathers and expert communication: the SMs that they take
PEER_LATENCY_MS = 0.02  # a launch
_DENSE_LAUNCH_MS, _EXPERTS_LAUNCH_MS, _EXPERT_LAUNCH_MS = 2.0, 8.0, 0.2
TRACED_LAUNCH_MS = 2.0 / 110  # a layer of Llama 3 in torch has 110 launches: 2 ms, as above
_NARROW_LAUNCHES = 1.5  # casts and scales are launches too
_NEWTON_SCHULZ = 5  # iterations of Muon, Megatron-Core's default
_HOST_GB_PER_S = 50.0  # of host memory, per GPU: assumed, eight GPUs share two sockets


# Generations that add to fp32 gradients while they compute products. Profiles of A100 leave the
# addition no time of its own; published runs of faster products do.
_HIDES_ACCUMULATION = frozenset({"ampere", "ada", "cpu"})


class Machine(NamedTuple):
    """An accelerator in a run: what its rates are.

    ``factor`` multiplies every time but that of boundary messages, ``link_factor`` that.
    ``byte_factor`` multiplies the bytes of activations, workspaces and buffers.
    """

    hardware: Hardware
    efficiency: Efficiency
    training: Training
    factor: float = 1.0
    link_factor: float = 1.0
    byte_factor: float = 1.0

    # --- Parts of the model.

    def layer(self, shape: ModelShape, kind: LayerForm) -> PartTimes:
        """Return the times of one layer, with collectives that nothing hides and with launches."""
        training = self.training
        forward, back, weight = self._computed(layer_costs(shape, training, kind).work)
        again = 1.0 if training.recompute & {"full"} else 0.0
        tensor, tensor_back = self._tensor_bytes(shape, kind)
        experts = self._experts_ms(shape, kind)
        recomputed = experts / 2 if training.recompute & {"full", "moe"} else 0.0
        # Keys and values go around the ring while attention computes, those of earlier slices once
        # more; in the backward their gradients too (Liu et al. 2023, arXiv 2310.01889).
        pair = 2 * kv_width(shape, training.tp) * training.element_bytes
        passed = pair * training.tokens * (training.slice_index + 1) * (training.cp - 1)
        ring = self._link_ms(float(passed), training.cp, training.tp)
        gather = scatter = 0.0
        if training.zero >= 3:
            # FSDP gathers weights for each F and each backward, and scatters gradients (Zhao et al.
            # 2023, PyTorch FSDP, arXiv 2304.11277, section 3).
            counts = layer_costs(shape, training, kind).parameters
            gather = sum(one.ms for one in self._rings(counts.stored, training.element_bytes))
            scatter = sum(one.ms for one in self._rings(counts, training.gradient_bytes))
        copied, pcie = 0.0, self.hardware.pcie_gb_per_s
        if training.offloaded_layers and pcie is not None:
            share = min(1.0, training.offloaded_layers / shape.num_layers)
            moved = layer_costs(shape, training, kind).kept.offload_bytes
            copied = self.factor * share * moved / (pcie.value * self.efficiency.pcie * 1e6)
        reduced = self._tensor_exposed(tensor, forward.products)
        forward = forward._replace(
            tensor=reduced,
            context=max(0.0, ring - forward.attention),
            data=self._beside(gather, forward.compute),
            copies=max(0.0, copied - forward.compute),
        )
        back_compute = back.compute + weight.compute
        back = back._replace(
            tensor=self._tensor_exposed(tensor_back, back.products + weight.products)
            + again * reduced,
            context=max(0.0, 2 * ring - back.attention) + again * forward.context,
            data=self._beside(gather + scatter, back_compute),
            copies=max(0.0, copied - back_compute),
        )
        total = experts + recomputed
        if training.ep_overlap:
            total = max(_BUSY_SHARE * total, total - forward.compute - back_compute)
        forward = forward._replace(experts=total * (experts / 2) / (experts + recomputed or 1.0))
        back = back._replace(experts=total - forward.experts)
        return self._launched(PartTimes(forward, back, weight), shape, kind)

    def experts_share(self, shape: ModelShape, kind: LayerForm) -> PassTimes:
        """Return the share (0 to 1) of what F, I and W of a layer compute that experts do."""
        costs = layer_costs(shape, self.training, kind)
        whole, behind = self._computed(costs.work), self._computed(costs.experts)
        return PassTimes(
            *(
                min(1.0, part.compute / all_.compute) if all_.compute > 0 else 0.0
                for part, all_ in zip(behind, whole, strict=True)
            )
        )

    def embedding(self, shape: ModelShape) -> PartTimes:
        """Return the times of the embedding, the reduction of its output included."""
        forward, back, weight = self._computed(embedding_costs(shape, self.training).work)
        if shape.trace is not None:
            sent = shape.trace.rank(self.training.tp).embedding
            return self._with_sent(PartTimes(forward, back, weight), sent)
        return PartTimes(forward._replace(tensor=self._reduce_ms(shape)), back, weight)

    def head(self, shape: ModelShape) -> PartTimes:
        """Return the times of last norm, head and loss."""
        forward, back, weight = self._computed(head_costs(shape, self.training).work)
        if shape.trace is not None:
            sent = shape.trace.rank(self.training.tp).head
            return self._with_sent(PartTimes(forward, back, weight), sent)
        return PartTimes(forward, back._replace(tensor=self._reduce_ms(shape)), weight)

    def mtp(self, shape: ModelShape) -> PartTimes:
        """Return the times of one multi-token prediction module: a layer, a projection, a head."""
        training = self.training
        kind = shape.layer_kinds[-1]
        whole = self._computed(mtp_costs(shape, training).work)
        layer = self.layer(shape, kind)
        bare = self._computed(layer_costs(shape, training, kind).work)
        return PartTimes(
            *(
                Spent(*[a + b - c for a, b, c in zip(all_, with_, without, strict=True)])
                for all_, with_, without in zip(whole, layer, bare, strict=True)
            )
        )

    # --- Compute.

    def _computed(self, passes: PassCosts) -> PartTimes:
        return PartTimes(*(self._pass(work) for work in passes))

    def _pass(self, work: PassCost) -> Spent:
        """Return products after each other, none faster than its weights are read; then the rest.

        Narrow products have the narrow rate, attention's the wide one.
        """
        reached, training = self.efficiency, self.training
        wide = "bf16" if work.narrow_flops or training.is_narrow else training.precision
        peak = self.hardware.peak_flops(wide)
        bytes_per_s = self.hardware.memory_gb_per_s.value * 1e9
        products = work.matmul_flops / (peak * reached.matmul)
        if work.narrow_flops:
            narrow = self.hardware.peak_flops(training.precision)
            share = reached.narrow * _SCALED_SHARE[training.precision]
            products += work.narrow_flops / (narrow * share)
        beside, moved = work.weight_bytes, work.moved_bytes
        if self.hardware.generation in _HIDES_ACCUMULATION:
            beside += work.gradient_bytes
        else:
            moved += work.gradient_bytes
        products = max(products, beside / bytes_per_s)
        scores = work.attention_flops / (peak * reached.attention)
        moved += work.cast_elements * self._cast_bytes
        moved /= bytes_per_s * reached.memory
        in_ms = 1e3 * self.factor
        return Spent(in_ms * products, in_ms * scores, in_ms * moved)

    @property
    def _cast_bytes(self) -> float:
        """Bytes read and written to cast one element to the narrow precision.

        * fp8 reads the element for its scale, reads it again to cast it, and writes it. GPUs before
          Blackwell also write it transposed (Transformer Engine, current scaling). The products of
          Blackwell take any layout.
        * mxfp8 reads it once and writes it along rows and along columns, with a scale for every 32.
        * nvfp4 reads it twice.
        """
        if self.training.precision == "fp8":
            return 5.0 if "mxfp8" in self.hardware.tflops else 6.0
        return 4.0625 if self.training.precision == "mxfp8" else 5.125

    def _launched(self, times: PartTimes, shape: ModelShape, kind: LayerForm) -> PartTimes:
        """Return times that are at least those of the launches: a third in F, the rest later.

        Without CUDA graphs the host launches a layer with experts in 8 ms, and 0.2 ms more for each
        local expert. A layer without experts takes it 2 ms. Narrow products add half of that.
        """
        if self.training.cuda_graphs:
            return times
        forward_ms, backward_ms = self.launches_ms(shape, kind)
        training = self.training
        is_padded = training.dispatcher == "alltoall" and training.routing.is_padded
        counts_tokens = training.dispatcher != "deduplicated" and not is_padded
        waits = counts_tokens and not training.ep_overlap
        if shape.trace is not None and training.ep == 1:
            waits = False  # experts of a rank of its own need no counts from other ranks
        least = _SYNCHRONOUS_SHARE if kind.is_moe and waits else 0.0
        sums = times.sums
        ahead = max(forward_ms - sums.forward_ms, least * forward_ms)
        back = sums.backward_input_ms + sums.backward_weight_ms
        behind = max(backward_ms - back, least * backward_ms)
        added = (
            ahead,
            behind * sums.backward_input_ms / back,
            behind * sums.backward_weight_ms / back,
        )
        return PartTimes(
            *(spent._replace(host=max(0.0, more)) for spent, more in zip(times, added, strict=True))
        )

    def launches_ms(self, shape: ModelShape, kind: LayerForm) -> tuple[float, float]:
        """Return the ms in which the host launches F and the backward of a layer; 0 if captured."""
        if self.training.cuda_graphs:
            return 0.0, 0.0
        if shape.trace is not None:
            layer = shape.trace.layer(self.training.tp, kind.traced)
            again = layer.forward_launches if "full" in self.training.recompute else 0.0
            each_ms = self.factor * TRACED_LAUNCH_MS * self._launches
            return each_ms * layer.forward_launches, each_ms * (layer.backward_launches + again)
        launch_ms = _DENSE_LAUNCH_MS
        if kind.is_moe and shape.experts is not None:
            launch_ms = _EXPERTS_LAUNCH_MS
            launch_ms += _EXPERT_LAUNCH_MS * shape.experts.num / self.training.ep
        launch_ms *= self.factor * self._launches
        again = 0.0  # launches of F, or of its experts, that recomputation adds
        if "full" in self.training.recompute:
            again = 1 / 3
        elif "moe" in self.training.recompute and kind.is_moe:
            dense_ms = self.factor * _DENSE_LAUNCH_MS * self._launches
            again = max(0.0, 1.0 - dense_ms / launch_ms) / 3
        return launch_ms / 3, launch_ms * (2 / 3 + again)

    @property
    def _launches(self) -> float:
        """How many times as many launches narrow products take."""
        return _NARROW_LAUNCHES if self.training.is_narrow else 1.0

    # --- Collectives.

    def _tensor_bytes(self, shape: ModelShape, kind: LayerForm) -> tuple[float, float]:
        """Return what tensor parallelism moves in F and in the backward of a layer, per rank.

        There are two all-reduces in F and two in I, or as many reduce-scatters and all-gathers of
        the same bytes (Shoeybi et al. 2019, Megatron-LM, arXiv 1909.08053, section 3). With
        sequence parallelism W gathers its two inputs again (Korthikanti et al. 2022, section
        4.2.2).
        """
        training = self.training
        if training.tp == 1:
            return 0.0, 0.0
        if shape.trace is not None:
            layer = shape.trace.layer(training.tp, kind.traced)
            sent = layer.forward_sent_bytes, layer.backward_sent_bytes
            return float(sent[0].at(training.micro_batch)), float(sent[1].at(training.micro_batch))
        share = training.tokens * shape.hidden * (training.tp - 1) / training.tp
        adapters = (0.0, 0.0)
        if training.lora is not None:
            adapters = self._adapter_bytes(training.lora.targets, share * training.element_bytes)
        gathered = share * (1.0 if training.is_narrow else training.element_bytes)
        scattered = share * training.element_bytes
        if not training.sequence_parallel:
            return 4.0 * scattered + adapters[0], 4.0 * scattered + adapters[1]
        again = 2.0 if training.lora is None else 0.0  # of inputs that W reads
        back = (2.0 + again) * gathered + 2.0 * scattered
        return 2.0 * (gathered + scattered) + adapters[0], back + adapters[1]

    def _adapter_bytes(self, targets: frozenset[str], ring: float) -> tuple[float, float]:
        """Return the bytes that adapters gather and reduce in F and in the backward of a layer.

        ``ring`` is one gathering of the residual stream. Megatron-Bridge's adapters gather the
        result of a row-parallel target, and scatter it. With sequence parallelism those of a
        column-parallel target gather its input again if its own gathering overlaps; else they
        reduce the gradient of its input. Vectors as wide as the rank are left out.
        """
        row = len(targets & {"linear_proj", "linear_fc2"}) * ring
        column = len(targets & {"linear_qkv", "linear_q_proj", "linear_fc1"}) * ring
        if not self.training.sequence_parallel:
            return row, 2.0 * column
        column *= self.training.overlap
        return row + column, row + column

    def _tensor_exposed(self, num_bytes: float, products_ms: float) -> float:
        """Return the time of a collective that products do not hide.

        An overlapped collective is cut into pieces, which run while pieces of its product compute.
        Nothing hides the first or the last piece (Wang et al. 2023, Overlap Communication with
        Dependent Computation via Decomposition, section 4).
        """
        whole = self._link_ms(num_bytes, self.training.tp, 1)
        if not self.training.overlap:
            return whole
        return max(_UNHIDDEN_SHARE * whole, whole - products_ms)

    def _reduce_ms(self, shape: ModelShape) -> float:
        """Return the time to reduce the residual stream over the tensor-parallel ranks once."""
        training = self.training
        if training.tp == 1:
            return 0.0
        num_bytes = training.tokens * shape.hidden * training.element_bytes
        rings = 1.0 if training.sequence_parallel else 2.0
        share = (training.tp - 1) / training.tp
        return self._link_ms(rings * num_bytes * share, training.tp, 1)

    def _with_sent(self, times: PartTimes, part: TracedLayer) -> PartTimes:
        """Return the times with those of what tensor-parallel ranks send, which nothing hides."""
        b, tp = self.training.micro_batch, self.training.tp
        sizes = part.forward_sent_bytes.at(b), part.backward_sent_bytes.at(b)
        ahead, back = (self._link_ms(float(size), tp, 1) for size in sizes)
        return times._replace(
            forward=times.forward._replace(tensor=ahead),
            backward_input=times.backward_input._replace(tensor=back),
        )

    def _experts_ms(self, shape: ModelShape, kind: LayerForm) -> float:
        """Return the time of tokens to experts and back, in F and in I together.

        A token is sent once per expert. A deduplicating dispatcher sends it once to each different
        rank, and between domains once to each different domain, among its experts. These are
        n (1 - (1 - 1/n)^k) of n for k experts, and at most as many domains as routing allows.

        With all-gather each rank gathers the hidden vectors of all tokens, with a flag and a
        probability for each expert, and scatters sums of results. The backward does the reverse
        (``MoEAllGatherTokenDispatcher`` of Megatron-Core 0.16.1). The load of experts does not
        change this.
        """
        training, experts = self.training, shape.experts
        if not kind.is_moe or experts is None or training.ep * training.etp == 1:
            return 0.0
        if shape.trace is not None and training.ep == 1:
            return 0.0  # a trace counts what its tensor-parallel ranks exchange
        tokens, ep, size = expert_tokens(training), training.ep, training.element_bytes
        sent = 1.0 if training.dispatch == "fp8" else float(size)
        if training.dispatcher == "allgather":
            per_token = shape.hidden * (sent + 3 * size) + experts.num * (1 + 2 * size)
            return self._ring(gathered_tokens(training) * per_token, ep * training.etp, 1).ms
        # Out and back, and both gradients, of the busiest rank.
        per_copy = training.expert_load * tokens * shape.hidden * (sent + 3 * size)
        near = max(1, min(ep, self.hardware.gpus_per_node // training.etp))
        domains = -(-ep // near)
        copies = float(experts.active)
        across = copies
        if training.dispatcher == "deduplicated":
            copies = _different(ep, experts.active)
            across = _different(domains, experts.active)
            if experts.max_nodes:
                across = min(across, float(experts.max_nodes))
        inside = per_copy * copies * (near - 1) / near / _ALL_TO_ALL_SHARE
        inside_ms = self._rate_ms(inside, inside=True)
        across_ms = self._rate_ms(per_copy * across * (domains - 1) / domains, inside=False)
        gathered = 0.0
        if training.etp > 1:  # every rank of the experts' tensor group gets all copies, and reduces
            share = 2.0 * per_copy * copies * (training.etp - 1)
            gathered = self._rate_ms(share / 2, inside=True)
        return max(inside_ms, across_ms) + gathered

    def reduction(self, parameters: RankParameters, *, is_pipelined: bool) -> Exchange:
        """Return the reduction of fp32 gradients over all ranks that hold the same parameters.

        They are all-reduced, also for Muon, or with ``zero`` reduce-scattered, which is half of
        it. 0 with ``zero`` 3, which reduces after every backward.
        """
        if self.training.zero >= 3:
            return Exchange()
        rings = 1.0 if self.training.zero and self.training.optimizer.name != "muon" else 2.0
        return self._exchanged(
            parameters, rings * self.training.gradient_bytes, is_pipelined=is_pipelined
        )

    def gathering(self, parameters: RankParameters, *, is_pipelined: bool) -> Exchange:
        """Return the gathering of new weights that a spread optimizer makes necessary."""
        if self.training.zero not in {1, 2}:
            return Exchange()
        found = self._exchanged(parameters, self.training.element_bytes, is_pipelined=is_pipelined)
        if self.training.optimizer.name == "muon":  # Megatron-Core gathers after the step
            return found._replace(unhidden_ms=found.whole_ms)
        return found

    def _exchanged(
        self, parameters: RankParameters, size: float, *, is_pipelined: bool
    ) -> Exchange:
        """Return the time of both groups' rings, and what nothing hides of it.

        Compute hides half of a ring next to it. Between nodes of a pipeline nothing hides it: the
        boundary messages need the same network adapters, and a rank that waits computes nothing.
        """
        found = Exchange()
        for ring in self._rings(parameters, size):
            unhidden = 1.0
            if self.training.overlaps_data and not (is_pipelined and ring.leaves_node):
                unhidden = _UNHIDDEN_SHARE
            found = Exchange(found.whole_ms + ring.ms, found.unhidden_ms + unhidden * ring.ms)
        return found

    def optimizer_ms(self, counts: RankParameters) -> float:
        """Return the optimizer's step on this rank's share, the norm and clearing of its gradients.

        For the share on the CPU, gradients go to the host, the CPU makes its step, and new weights
        come back over PCIe. Nothing of it overlaps, as in Megatron-Core without
        ``overlap_cpu_optimizer_d2h_h2d``.
        """
        training, optimizer = self.training, self.training.optimizer
        gradient, element = optimizer.gradient_bytes, training.element_bytes
        # Reads the gradient and the states, writes the states and the weights.
        step = gradient + 2.0 * (training.master_bytes + optimizer.moment_bytes) + element
        if training.precision == "fp32":
            step += element  # the weights are the master weights, which are read too
        moved = on_cpu = 0.0
        for parameters, ranks in replicas(counts, training):
            share = ranks if training.zero else 1
            own = parameters / share
            moved += own * ((1.0 - optimizer.offload) * step + gradient)
            moved += parameters * gradient / (ranks if training.zero >= 2 else 1)
            on_cpu += own * optimizer.offload
        rate = self.hardware.memory_gb_per_s.value * self.efficiency.memory
        found = self.factor * moved / (rate * 1e6)
        if optimizer.name == "muon":
            (_, ranks), (_, expert_ranks) = replicas(counts, training)
            work = counts.work / (ranks if training.zero else 1)
            work += counts.expert_work / (expert_ranks if training.zero else 1)
            peak = self.hardware.peak_flops("bf16") * self.efficiency.matmul
            found += self.factor * 1e3 * _NEWTON_SCHULZ * work / peak
        pcie = self.hardware.pcie_gb_per_s
        if on_cpu and pcie is not None:
            copied = on_cpu * (gradient + element) / (pcie.value * self.efficiency.pcie)
            found += (copied + on_cpu * step / _HOST_GB_PER_S) / 1e6
        return found

    def tied_ms(self, shape: ModelShape) -> float:
        """Return the all-reduce of a tied embedding's gradients between first and last stage."""
        if self.training.lora is not None:
            return 0.0
        num_bytes = self.training.gradient_bytes * tied_parameters(shape, self.training.tp)
        return self._rate_ms(float(num_bytes), inside=False)

    def boundary_ms(self, num_bytes: float, *, inside: bool) -> float:
        """Return the time of a boundary tensor to the next pipeline rank."""
        return self.latency_ms(inside=inside) + num_bytes / (
            1e6 * self.link_gb_per_s(inside=inside)
        )

    def latency_ms(self, *, inside: bool) -> float:
        """Return the time of a message without that of its bytes."""
        return self.link_factor * (PEER_LATENCY_MS if inside else self.hardware.network_latency_ms)

    def link_gb_per_s(self, *, inside: bool) -> float:
        """Return the rate of a boundary message: to a neighbour of the node, or of another."""
        hardware = self.hardware
        rate = hardware.peer_gb_per_s.value
        if not inside:
            rate = hardware.network_gb_per_s.value * hardware.network_share
        return rate * self.efficiency.network / self.link_factor

    def _rings(self, counts: RankParameters, size: float) -> list[_Ring]:
        """Return the time to gather, or scatter, so many bytes of each parameter, by group."""
        training = self.training
        strides = (training.tp, training.etp * training.ep)
        return [
            self._ring(parameters * size, ranks, stride)
            for (parameters, ranks), stride in zip(replicas(counts, training), strides, strict=True)
            if ranks > 1 and parameters
        ]

    def _ring(self, num_bytes: float, ranks: int, stride: int) -> _Ring:
        """Return the time in which each of some ranks gathers, or scatters, so many bytes in all.

        Around a ring each rank sends (n - 1) / n of all bytes. A domain's ranks of the group share
        their network adapters. (N - 1) / N of the bytes enter and leave each of N domains.
        """
        near = max(1, min(ranks, self.hardware.gpus_per_node // stride))
        domains = -(-ranks // near)
        inside = num_bytes * (ranks - 1) / ranks if near > 1 else 0.0
        across = num_bytes * (domains - 1) / domains / near
        ms = max(self._rate_ms(inside, inside=True), self._rate_ms(across, inside=False))
        return _Ring(ms, domains > 1)

    def _link_ms(self, num_bytes: float, ranks: int, stride: int) -> float:
        """Return the time to send bytes to neighbours of a group, over the slowest link."""
        return self._rate_ms(num_bytes, inside=ranks * stride <= self.hardware.gpus_per_node)

    def _rate_ms(self, num_bytes: float, *, inside: bool) -> float:
        hardware = self.hardware
        rate = hardware.node_gb_per_s.value
        if not inside:
            rate = hardware.network_gb_per_s.value * hardware.network_share
        return self.factor * num_bytes / (rate * self.efficiency.network * 1e6)

    def _beside(self, whole_ms: float, compute_ms: float) -> float:
        """Return the part of a layer's gathering and reducing that its compute does not hide."""
        if not self.training.overlaps_data:
            return whole_ms
        return max(_BUSY_SHARE * whole_ms, whole_ms - compute_ms)


def _different(places: int, draws: int) -> float:
    """Return the expected number of different places that independent draws hit."""
    return places * (1.0 - (1.0 - 1.0 / places) ** draws)
