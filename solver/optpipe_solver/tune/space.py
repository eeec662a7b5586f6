"""The question of a search, and all configurations of its space."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import chain, permutations, product
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from optpipe.errors import FieldError, InputError
from optpipe.planning import Machine, PipelineCut
from optpipe.planning.frameworks.rules import TORCH, broken_rules
from optpipe.requests import FixedDegrees, Framework

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from optpipe.planning import Hardware, ModelShape, Training

__all__ = [
    "FIXABLE",
    "FRAMEWORKS",
    "TuneCandidate",
    "TuneQuestion",
    "candidates",
    "has_pairs",
    "left_out",
]

FRAMEWORKS: tuple[str, ...] = get_args(Framework)

FIXABLE = tuple(FixedDegrees.model_fields)
"""Names that `TuneQuestion.fixed` may have; pairs is 0 or 1."""

_FROM_ZERO = frozenset({"zero", "pairs"})

_MOST_TP, _MOST_CP, _MOST_MICRO_BATCH = 8, 16, 8
_LEAST_TOKENS = 1024
_CHUNKS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24)
_MOST_STAGES = 512
_MOST_KINDS = 3
_SLICES, _LONG = (2, 4, 8, 16), 32_768
"""Slices of a sequence, and from how many tokens on."""


@dataclass(frozen=True, kw_only=True)
class TuneQuestion:
    """A model, accelerators and a batch: which is the fastest way to train it.

    Parameters
    ----------
    shape, hardware
        The model to train, and the accelerator.
    num_gpus
        Accelerators, all together.
    global_batch
        Sequences of a step.
    training
        The settings that all configurations share: sequence, precision, and the switches that are
        no degrees of parallelism. Its degrees, micro-batch, ``zero`` and ``recompute`` are ignored.
    framework
        The framework whose schedules, recomputation and sharding the space contains. ``megatron``:
        1F1B and interleaved 1F1B, with experts also in pairs (its combined 1F1B), modules by its
        names, distributed optimizer, or FSDP without a pipeline.
        ``torchtitan``: fused and split backwards in any order, blocks recomputed or not, FSDP2.
        ``huggingface``: the same, with layers of transformers in `optpipe.runtime`.
        ``any``: what `optpipe.runtime` runs, pairs and slices of long sequences included.
    fixed
        Values of `FIXABLE` that are not searched.
    memory_bytes
        Usable memory of a device, instead of all its memory.
    headroom
        In [0, 1): share of that memory that every row leaves free, because bytes are estimates.
    time_factor
        Multiplies every time, as `optpipe.planning.estimate` does.
    byte_factor
        Multiplies all bytes except static ones, as `optpipe.planning.estimate` does.
    kinds
        If accelerators differ: each kind and its number, ``hardware`` the first. All ranks of a
        stage are of one kind. Pipeline ranks of a kind are consecutive, and any kind may come
        first. All have the same degrees, so that tp x cp x dp divides each number.
    price_per_gpu_hour
        In any currency; rows then have the cost of a million tokens.
    chosen
        Switches that the caller set. The other switches that are off are listed with their gain.
    """

    shape: ModelShape
    hardware: Hardware
    num_gpus: int
    global_batch: int
    training: Training
    framework: Framework = "any"
    fixed: Mapping[str, int] = field(default_factory=dict)
    memory_bytes: int | None = None
    headroom: float = 0.0
    time_factor: float = 1.0
    byte_factor: float = 1.0
    kinds: tuple[tuple[Hardware, int], ...] = ()
    price_per_gpu_hour: float | None = None
    chosen: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if self.framework not in FRAMEWORKS:
            raise InputError(
                f"framework {self.framework!r}: must be {', '.join(FRAMEWORKS)}; choose one"
            )
        for name in ("num_gpus", "global_batch"):
            if not 1 <= getattr(self, name) <= 2**20:
                raise InputError(
                    f"{name} = {getattr(self, name)}: must be 1 to {2**20}; correct it"
                )
        self.training.check_held(self.shape)
        numbers = [number for _, number in self.kinds]
        if numbers and (
            sum(numbers) != self.num_gpus
            or min(numbers) < 1
            or len(numbers) > _MOST_KINDS
            or self.kinds[0][0] != self.hardware
        ):
            raise InputError(
                f"kinds: {numbers} of {', '.join(one.name for one, _ in self.kinds)}: must be at "
                f"most {_MOST_KINDS} kinds with at least one of each, {self.hardware.name} the "
                f"first, and num_gpus = {self.num_gpus} together; correct one of them"
            )
        if not 0 <= self.headroom < 1:
            raise InputError(
                f"headroom = {self.headroom}: must be in [0, 1), e.g. 0.05; correct it"
            )
        for name, value in self.fixed.items():
            if name not in FIXABLE:
                raise InputError(f"{name} cannot be fixed; choose among {', '.join(FIXABLE)}")
            if value < (0 if name in _FROM_ZERO else 1):
                raise InputError(f"{name} = {value}: is too small; raise it")

    @property
    def usable_bytes(self) -> int:
        """Memory of a device that an answer may fill; of several kinds the smallest."""
        return min(map(self.usable_bytes_of, self.all_kinds))

    @property
    def whole_bytes(self) -> int:
        """Memory of a device; of several kinds the smallest."""
        return min(map(self.whole_bytes_of, self.all_kinds))

    @property
    def all_kinds(self) -> tuple[Hardware, ...]:
        """Each kind of accelerator once."""
        return tuple(one for one, _ in self.kinds) or (self.hardware,)

    def usable_bytes_of(self, hardware: Hardware) -> int:
        """Return the memory of an accelerator that an answer may fill."""
        return int(self.whole_bytes_of(hardware) * (1 - self.headroom))

    def whole_bytes_of(self, hardware: Hardware) -> int:
        """Return the memory of an accelerator."""
        whole = int(hardware.memory_bytes.value)
        return whole if self.memory_bytes is None else self.memory_bytes

    def ranks(self, kinds: tuple[Hardware, ...], pp: int) -> tuple[Hardware, ...]:
        """Return the accelerator of each pipeline rank; without ``kinds`` all are equal."""
        return kinds or (self.hardware,) * pp

    def orders(self, num_each: int) -> list[tuple[Hardware, ...]]:
        """Return the accelerators of pipeline ranks in every order of kinds, the given one first.

        ``num_each`` accelerators are a rank. The only order is empty if all are alike. There is no
        order if ``num_each`` does not divide the number of a kind.
        """
        if any(number % num_each for _, number in self.kinds):
            return []
        groups = [(one,) * (number // num_each) for one, number in self.kinds]
        return list(dict.fromkeys(tuple(chain(*order)) for order in permutations(groups)))

    def machine(self, training: Training, hardware: Hardware | None = None) -> Machine:
        """Return an accelerator with the settings of a configuration."""
        one = hardware or self.hardware
        return Machine(
            one, one.efficiency, training, factor=self.time_factor,
            link_factor=self.time_factor, byte_factor=self.byte_factor,
        )  # fmt: skip


class TuneCandidate(NamedTuple):
    """A configuration without its cut, placement and schedule.

    ``kinds``: the accelerator of each pipeline rank, empty if all are alike. ``pairs``: whether
    forwards and backwards may run together. ``slices``: the number of slices of each sequence.
    """

    training: Training
    pp: int
    chunks: int
    num_microbatches: int
    kinds: tuple[Hardware, ...] = ()
    pairs: bool = False
    slices: int = 1

    @property
    def placement(self) -> str:
        """The frameworks' placement of stages: linear, or a loop with several chunks."""
        return "linear" if self.chunks == 1 else "loop"

    def cut(self, **more: Any) -> PipelineCut:
        """Return how it is cut and run: 1F1B, interleaved with several chunks."""
        given: dict[str, Any] = {"placement": self.placement} | more
        return PipelineCut(
            pp=self.pp,
            chunks=self.chunks,
            num_microbatches=self.num_microbatches,
            pairs=self.pairs,
            slices=self.slices,
            **given,
        )


def candidates(question: TuneQuestion) -> Iterator[TuneCandidate]:
    """Yield every configuration of a question, whether it fits or not.

    * tp: powers of two up to 8, inside a domain of NVLink.
    * cp: powers of two up to 16, with at least 1,024 tokens of a sequence per rank.
    * ep and etp: divisors of the experts and their width. pp and dp: divisors of the GPUs.
    * Micro-batches of 1, 2, 4 or 8 sequences, and 1 to 24 chunks.
    * Several kinds of accelerators in any order.
    * If the framework has them (`left_out`): pairs with experts on several ranks, and slices of
      sequences from 32,768 tokens on.

    Configurations that break a rule of the framework (`broken_rules`) are left out.
    """
    shape, fixed = question.shape, question.fixed
    most_tp = min(_MOST_TP, *(one.gpus_per_node for one in question.all_kinds))
    for tp in _powers(most_tp, fixed.get("tp")):
        if not shape.has_degree(tp):
            continue
        for cp in _powers(_MOST_CP, fixed.get("cp")):
            if question.num_gpus % (tp * cp) or (
                cp > 1 and question.training.sequence // cp < _LEAST_TOKENS
            ):
                continue
            yield from _with_pipeline(question, tp, cp)


def _with_pipeline(question: TuneQuestion, tp: int, cp: int) -> Iterator[TuneCandidate]:
    left, fixed = question.num_gpus // (tp * cp), question.fixed
    num_layers = question.shape.num_layers + question.shape.mtp + 2
    for pp in _divisors(left):
        dp = left // pp
        if pp != fixed.get("pp", pp) or dp != fixed.get("dp", dp) or pp > num_layers:
            continue
        orders = question.orders(tp * cp * dp)
        if question.global_batch % dp or not orders:
            continue
        for micro_batch in _powers(_MOST_MICRO_BATCH, fixed.get("micro_batch")):
            if (question.global_batch // dp) % micro_batch:
                continue
            m = question.global_batch // dp // micro_batch
            chunks = [v for v in _chunks(question, pp, m) if v == fixed.get("chunks", v)]
            degrees = {"tp": tp, "cp": cp, "dp": dp, "micro_batch": micro_batch}
            for training, kinds in product(_trainings(question, pp, degrees), orders):
                ways = _passes(question, training, pp, m, max(chunks, default=1))
                for (pairs, n), v in product(ways, chunks):
                    # A family has an order for the stages, with pairs or with slices.
                    has_order = v > 1 or pp == 1 if pairs else v == 1 or n == 1 or n % pp == 0
                    if has_order:
                        yield TuneCandidate(training, pp, v, m, kinds, pairs, n)


def _passes(
    question: TuneQuestion, training: Training, pp: int, num_microbatches: int, chunks: int
) -> Iterator[tuple[bool, int]]:
    """Yield whether passes run in pairs, and the number of slices of a sequence.

    Nothing if the framework does not start with any cut of the layers.
    """
    place = "linear" if chunks == 1 else "loop"
    cut = PipelineCut(pp=pp, chunks=chunks, num_microbatches=num_microbatches, placement=place)
    broken = broken_rules(question.framework, question.shape, training, cut)
    if any(rule.source != TORCH for rule in broken):  # a schedule of a CSV has other limits
        return
    fixed = question.fixed
    ways = [(False, 1)]
    if has_pairs(question) and training.ep * training.etp > 1:
        paired = replace(cut, pairs=True)
        is_broken = any(broken_rules(question.framework, question.shape, training, paired))
        if not is_broken and "full" not in training.recompute:
            ways.append((True, 1))
    has_slices = question.framework == "any" and question.shape.trace is None
    if has_slices and question.training.sequence >= _LONG and pp > 1:
        ways += [
            (False, n)
            for n in _SLICES
            # The runtime refuses to checkpoint a module that reads keys of earlier slices.
            if "full" not in training.recompute
            and training.micro_batch == 1
            and training.sequence % (n * training.split) == 0
            and training.tokens // n >= _LEAST_TOKENS
        ]
    for pairs, n in ways:
        if pairs == fixed.get("pairs", pairs) and n == fixed.get("slices", n):
            yield pairs, n


def has_pairs(question: TuneQuestion) -> bool:
    """Whether the space contains configurations with forwards and backwards in pairs."""
    return (
        question.shape.experts is not None
        and question.framework not in ("torchtitan", "huggingface")
        and not question.training.ep_overlap
    )


def left_out(question: TuneQuestion) -> tuple[str, ...]:
    """Return options that are not searched although they may be faster, each with its reason."""
    found = []
    trace = question.shape.trace
    if trace is not None and "tp" not in question.fixed:
        degrees = ", ".join(map(str, trace.degrees))
        found.append(f"other degrees of tensor parallelism than {degrees} are not traced")
        found += [f"tp {one.tp} is not searched: {one.reason}" for one in trace.refused]
    if trace is not None and question.framework == "torchtitan":
        found.append(
            "costs and tensor-parallel exchanges are those of the traced code, which must be what "
            "you train; torchtitan's own models divide sequences, too"
        )
    if question.shape.experts is not None:
        if question.training.ep_overlap:
            found.append(
                "pairs of a forward and a backward are not searched: with ep_overlap the exchange "
                "with experts is taken to hide already"
            )
        elif question.framework == "torchtitan":
            found.append(
                "pairs of a forward and a backward are not searched: torchtitan 0.3.0 runs the two "
                "one after the other"
            )
        elif question.framework == "huggingface":
            found.append(
                "pairs of a forward and a backward are not searched: stages of transformers have "
                "all experts on each rank, so that there is no exchange to hide"
            )
    if question.training.sequence >= _LONG and trace is not None:
        found.append("slices of sequences are not searched: a trace has whole sequences")
    elif question.training.sequence >= _LONG and question.framework != "any":
        found.append(
            f"slices of sequences are not searched: {question.framework} runs sequences whole, "
            "framework any does not"
        )
    return tuple(found)


def _chunks(question: TuneQuestion, pp: int, num_microbatches: int) -> Iterator[int]:
    """Yield numbers of stages per device.

    Megatron-Core interleaves multiples of pp only, and overlaps experts only if it interleaves.
    """
    most = question.shape.num_layers + question.shape.mtp + 2
    overlaps = question.framework == "megatron" and question.training.ep_overlap
    for v in _CHUNKS:
        if v == 1:
            if pp == 1 or not overlaps:
                yield v
        elif pp > 1 and pp * v <= min(most, _MOST_STAGES) and num_microbatches % pp == 0:
            yield v


def _trainings(question: TuneQuestion, pp: int, degrees: Mapping[str, Any]) -> Iterator[Training]:
    fixed = question.fixed
    ranks = degrees["tp"] * degrees["cp"] * degrees["dp"]
    split = question.shape.split_settings(degrees["tp"])
    for ep, etp in _expert_degrees(question, ranks, degrees["tp"]):
        for zero in _zeros(question, pp, degrees["dp"] * degrees["cp"]):
            if zero != fixed.get("zero", zero):
                continue
            try:
                training = replace(
                    question.training, **(split | {**degrees, "ep": ep, "etp": etp}), zero=zero,
                    recompute=frozenset(),
                )  # fmt: skip
                training.check_divides(question.shape)
            except FieldError:
                continue
            for modules in recomputations(question):
                yield replace(training, recompute=modules) if modules else training


def _expert_degrees(question: TuneQuestion, ranks: int, tp: int) -> Iterator[tuple[int, int]]:
    """Yield ep and etp.

    torchtitan splits experts over tensor-parallel ranks with ep 1 only.
    """
    experts, fixed = question.shape.experts, question.fixed
    if experts is None:
        if fixed.get("ep", 1) == 1 == fixed.get("etp", 1):
            yield 1, 1
        return
    for ep in _divisors(experts.num):
        etps = sorted({1, tp})
        if question.framework == "torchtitan":
            etps = [tp if ep == 1 else 1]
        for etp in etps:
            is_asked = (ep, etp) == (fixed.get("ep", ep), fixed.get("etp", etp))
            if is_asked and ranks % (ep * etp) == 0:
                yield ep, etp


def _zeros(question: TuneQuestion, pp: int, replicas: int) -> tuple[int, ...]:
    """Return the ways to shard optimizer, gradients and weights, by framework.

    Megatron-LM's distributed optimizer is 1, and its FSDP works without a pipeline. torchtitan's
    FSDP2 gathers weights once per step with a pipeline. With transformers it gathers them for each
    pass, or weights are whole. ``replicas`` is dp x cp.
    """
    if replicas == 1 and question.framework != "megatron":
        return (0,)
    if question.framework == "torchtitan":
        return (3,) if pp == 1 else (2,)
    if question.framework == "huggingface":
        return (0, 3)
    return (1, 3) if pp == 1 else (1,)


def recomputations(question: TuneQuestion) -> tuple[frozenset[str], ...]:
    """Return the sets of modules to recompute, the same in every layer, the empty one first.

    Megatron-Core does not recompute whole layers with overlapped experts. With captured launches it
    recomputes neither whole layers nor whole blocks of experts.
    """
    shape, is_megatron = question.shape, question.framework == "megatron"
    captured = is_megatron and question.training.cuda_graphs
    sets: list[set[str]] = [set()]
    if question.framework not in ("torchtitan", "huggingface"):
        if not question.training.flash:
            sets.append({"core_attn"})
        small = {"layernorm"}
        if shape.experts is not None:
            sets += [{"moe_act"}, {"moe_act", "layernorm"}]
            small.add("moe_act")
        else:
            sets += [{"layernorm"}, {"mlp"}]
        if shape.latent is not None:
            sets += [{"mla_up_proj"}, {"mla_up_proj", *small}]
        if shape.experts is not None and not captured:
            sets.append({"moe", "layernorm"})
    if not (captured or (is_megatron and question.training.ep_overlap)):
        sets.append({"full"})
    return tuple(frozenset(modules) for modules in sets if not modules & shape.without)


def _powers(most: int, fixed: int | None) -> Iterator[int]:
    """Yield 1, 2, 4 ... up to a number, or only the fixed value."""
    if fixed is not None:
        yield fixed
        return
    value = 1
    while value <= most:
        yield value
        value *= 2


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
