"""One configuration as a model to cut, and the simulated step times of its schedules."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

from optpipe.errors import InputError
from optpipe.formats.exports import layout_text
from optpipe.planning import estimate, step_estimate
from optpipe.planning.configuration import Configuration, train_command
from optpipe.planning.estimate import SlicedCut
from optpipe.planning.overlap import model_phases, most_hidden, with_pairs
from optpipe.planning.step import RankMemory, even_sizes
from optpipe.problem import placement_of
from optpipe.units import ShortRepr
from optpipe_solver.budget import Stop
from optpipe_solver.families import FAMILIES
from optpipe_solver.incumbent import Incumbent
from optpipe_solver.milp.plan.cut_problem import CutProblem
from optpipe_solver.milp.plan.model import plan_pattern
from optpipe_solver.milp.plan.pattern import PAIRED_PATTERNS, boundaries, patterns_of
from optpipe_solver.milp.plan.variables import PlanChoice
from optpipe_solver.milp.plan.walk import walked
from optpipe_solver.plan import plan
from optpipe_solver.portfolio import all_starts
from optpipe_solver.tune.bounds import LayerTable
from optpipe_solver.tune.cut import best_cut, fused_family

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optpipe.model import Model
    from optpipe.planning import Estimate, Hardware, PipelineCut, StepEstimate, Training
    from optpipe.planning.step import Layout
    from optpipe.problem import Problem
    from optpipe.requests import Framework, PlacementKind
    from optpipe.schedule import Programs
    from optpipe_solver.milp.plan.pattern import Boundary, Pattern
    from optpipe_solver.tune.cut import CutNumbers, CutPrices
    from optpipe_solver.tune.space import TuneQuestion

__all__ = [
    "LAYOUTS",
    "NO_LOOKS",
    "ConfigurationJudge",
    "Look",
    "Looks",
    "ScalingRow",
    "TuneCheckpoint",
    "TuneRow",
    "judge",
    "recut",
]

LAYOUTS: tuple[Layout, ...] = ("balanced", "even")
"""How frameworks cut, without asking a search."""

_SLOW, _SLOW_FROM_CELLS = frozenset({"greedy", "paired-blocks"}), 300
_PAIRED = frozenset({*PAIRED_PATTERNS, "paired-blocks"})
_UNLIMITED = 2**50
_ID_CHARS, _MOST_LAYOUT = 12, 24
_MOST_OF_V = 2
"""Chunks of a V that torchtitan places."""

_MOST_CHUNKS = 8
"""That `optpipe_solver.plan` takes."""
_MOST_SIMULATED, _MOST_PLANNED, _MOST_OF_PATTERN = 150_000, 40_000, 3_000
_LEAST_WORK = 0.1
_WALKS, _WALK = 3, 2.0
"""Annealings of a cut, and units of work that they take at most."""


@dataclass(frozen=True, kw_only=True, repr=False)
class TuneRow(ShortRepr):
    """A configuration with its best schedule found.

    Parameters
    ----------
    configuration
        With the layers of each stage.
    step_ms, makespan_ms
        Of the whole step, and of the schedule alone, by the simulator.
    method
        The method that found the schedule.
    peak_bytes
        Of each pipeline rank, including reserved memory.
    memory
        The same by purpose.
    tokens_per_s_per_gpu, mfu
        By ``step_ms``.
    problem, programs
        The simulated problem and programs.
    """

    configuration: Configuration
    step_ms: float
    makespan_ms: float
    method: str
    peak_bytes: tuple[int, ...]
    memory: tuple[RankMemory, ...]
    tokens_per_s_per_gpu: float
    mfu: float
    problem: Problem
    programs: Programs

    @property
    def label(self) -> str:
        """As `Configuration.label`."""
        return self.configuration.label

    def changes_from(self, other: TuneRow) -> tuple[str, ...]:
        """Return the changes from another row's configuration to this one.

        Examples: ``TP 8 → 4``, ``+ recompute layernorm``, ``schedule 1f1b → interleaved``,
        ``layers even → Et*2|(t|)*30L``. With another number of stages, layers are a change only if
        a cut is not the even one of its framework.
        """
        old, new = other.configuration, self.configuration
        before, after = old.degrees, new.degrees
        found = [f"{name} {before[name]} → {after[name]}" for name in after
                 if before[name] != after[name]]  # fmt: skip
        if old.order_of_kinds != new.order_of_kinds:
            found.append(f"order {old.order_of_kinds} → {new.order_of_kinds}")
        found += [f"+ {one}" for one in new.switches if one not in old.switches]
        found += [f"- {one}" for one in old.switches if one not in new.switches]
        if len(old.sizes) == len(new.sizes) and old.sizes != new.sizes:
            lists = (",".join(map(str, one.sizes)) for one in (old, new))
            found.append(f"layers {' → '.join(lists)}")
        elif len(old.sizes) != len(new.sizes) > 1:
            texts = _layers_text(old), _layers_text(new)
            found += [f"layers {' → '.join(texts)}"] * (set(texts) != {"even"})
        if other.method != self.method:
            found.append(f"schedule {other.method} → {self.method}")
        return tuple(found)

    @property
    def tflops_per_gpu(self) -> float:
        """The model's TFLOP/s on each GPU: `mfu` of the mean bf16 peak."""
        kinds = self.configuration.kinds or (self.configuration.hardware,)
        return self.mfu * sum(one.peak_flops("bf16") for one in kinds) / len(kinds) / 1e12

    def cost_per_million_tokens(self, price_per_gpu_hour: float) -> float:
        """Return the price of the GPU time that a million tokens take."""
        return 1e6 / self.tokens_per_s_per_gpu / 3600.0 * price_per_gpu_hour

    def as_json(
        self, framework: Framework | None = None, price_per_gpu_hour: float | None = None
    ) -> dict[str, Any]:
        """Return it as JSON values, without the programs; ``id`` is unique in a search.

        ``framework`` adds its ``command``; None = without. ``price_per_gpu_hour`` adds the cost of
        a million tokens.
        """
        fields = self._fields()
        text = json.dumps(fields, sort_keys=True)
        row = {"id": hashlib.sha256(text.encode()).hexdigest()[:_ID_CHARS], **fields}
        row |= {"label": self.label, "tflops_per_gpu": self.tflops_per_gpu}
        if framework is not None:
            row["command"] = train_command(self.configuration, framework)
        price = price_per_gpu_hour
        cost = None if price is None else self.cost_per_million_tokens(price)
        return row | {"cost_per_million_tokens": cost}

    def _fields(self) -> dict[str, Any]:
        training, cut = self.configuration.training, self.configuration.pipeline
        degrees = {n: getattr(training, n) for n in ("tp", "cp", "dp", "ep", "etp", "zero")}
        return {
            **degrees,
            "pp": cut.pp,
            "gpus": [one.name for one in self.configuration.kinds],
            "chunks": cut.chunks,
            "placement": list(self.problem.placement),
            "layers": list(self.configuration.sizes),
            "micro_batch": training.micro_batch,
            "num_microbatches": cut.num_microbatches,
            "recompute": sorted(training.recompute),
            "pairs": cut.pairs,
            "slices": cut.slices,
            "method": self.method,
            "step_ms": self.step_ms,
            "makespan_ms": self.makespan_ms,
            "tokens_per_s_per_gpu": self.tokens_per_s_per_gpu,
            "mfu": self.mfu,
            "peak_bytes": list(self.peak_bytes),
            "memory": [
                {f"{name}_bytes": round(part) for name, part in rank._asdict().items()}
                for rank in self.memory
            ],
        }


def _layers_text(configuration: Configuration) -> str:
    """Return ``even``, the layers of each stage as ``Et*2|(t|)*30L``, or ``2 to 4 per stage``."""
    shape, sizes = configuration.shape, configuration.sizes
    if sizes == even_sizes(shape.num_layers, shape.mtp + 1, len(sizes)):
        return "even"
    stages = configuration.stages
    numbers = [one.transformer for one in stages]
    text = f"{min(numbers)} to {max(numbers)} per stage"
    with suppress(InputError):  # Megatron-Core has no such cut
        layout = layout_text(stages, configuration.pipeline.pp)
        text = layout if len(layout) <= _MOST_LAYOUT else text
    return text


@dataclass(frozen=True, kw_only=True, repr=False)
class ScalingRow(ShortRepr):
    """The fastest configuration on a number of GPUs; its numbers are None if none is known.

    Parameters
    ----------
    num_gpus
        Number of GPUs.
    label, step_ms, tokens_per_s_per_gpu
        Of the fastest configuration.
    tokens_per_gpu_hour
        Tokens that a GPU trains in an hour.
    cost_per_million_tokens
        In the currency of the price; None without a price.
    gap
        Share by which another configuration may still be faster.
    missing_bytes
        Bytes per GPU that the nearest configuration lacks at least; None if one fits, or if the
        mean GPU has enough memory.
    reason
        Why no configuration is known; empty if one is.
    """

    num_gpus: int
    label: str = ""
    step_ms: float | None = None
    tokens_per_s_per_gpu: float | None = None
    tokens_per_gpu_hour: float | None = None
    cost_per_million_tokens: float | None = None
    gap: float | None = None
    missing_bytes: int | None = None
    reason: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)


class Look(NamedTuple):
    """A candidate's evaluation level, its bound of a step, and 1F1B's time by formula."""

    entry: int
    level: int
    bound_ms: float
    formula_ms: float


class Looks(NamedTuple):
    """The results for candidates, of which ``num_entries`` passed the first memory bound."""

    num_candidates: int
    num_entries: int
    found: tuple[Look, ...]


NO_LOOKS = Looks(0, 0, ())


@dataclass(frozen=True, kw_only=True)
class TuneCheckpoint:
    """The state of a search that another search continues.

    Parameters
    ----------
    looks
        The evaluation level and bound of each candidate.
    rows
        The best, the Pareto front and today's run, with their schedules.
    is_over
        Whether that search ended without a limit. Then plans may be tried again, with more time.
    work
        Units of work of that search, if work was limited.
    """

    looks: Looks
    rows: tuple[TuneRow, ...]
    is_over: bool
    work: float = 0.0


def judge(question: TuneQuestion, configuration: Configuration) -> TuneRow | None:
    """Return the row of a given configuration: simulated 1F1B, interleaved with chunks.

    Its layers are cut by its ``sizes``, or as frameworks cut them. The configuration runs today, so
    it needs no headroom. If it exceeds the memory in this model, ``peak_bytes`` is above the limit.
    None if there is too much to simulate.
    """
    cut, question = configuration.pipeline, replace(question, headroom=0.0)
    configuration_judge = ConfigurationJudge(
        question, configuration.training, cut, kinds=configuration.kinds, is_limited=False
    )
    sizes = configuration.sizes or configuration_judge.sizes("even")
    return configuration_judge.by_names(sizes, (fused_family(cut.chunks, pairs=cut.pairs),))


def recut(question: TuneQuestion, row: TuneRow, sizes: tuple[int, ...]) -> TuneRow:
    """Return a row with other numbers of layers per stage, by the framework's families.

    If no schedule fits, ``peak_bytes`` of the row is above the memory of a device.

    Raises
    ------
    InputError
        If the sizes are no cut of the model into as many stages, or there is too much to simulate.
    """
    wanted, num_layers = len(row.configuration.sizes), sum(row.configuration.sizes)
    if len(sizes) != wanted or sum(sizes) != num_layers or min(sizes) < 1:
        raise InputError(
            f"layers {list(sizes)}: must be {wanted} numbers of at least 1, one for each stage, "
            f"and {num_layers} together, embedding and head counted; correct them"
        )
    training, cut = row.configuration.training, row.configuration.pipeline
    for is_limited in (True, False):
        configuration_judge = ConfigurationJudge(
            question, training, cut, kinds=row.configuration.kinds, is_limited=is_limited
        )
        found = configuration_judge.by_families(sizes)
        if found is not None:
            return found
    raise InputError(
        f"layers {list(sizes)}: {configuration_judge.num_cells:,} cells are too many to simulate "
        f"at once, which takes at most {_MOST_SIMULATED:,}; solve the row's problem instead"
    )


class ConfigurationJudge:
    """A candidate as a model to cut.

    Parameters
    ----------
    question
        Framework, memory and calibration.
    training, cut
        The candidate; its layers may be cut differently.
    kinds
        As in `TuneCandidate`.
    is_limited
        Whether schedules must fit into the devices' memory.
    """

    def __init__(
        self,
        question: TuneQuestion,
        training: Training,
        cut: PipelineCut,
        *,
        kinds: tuple[Hardware, ...] = (),
        is_limited: bool = True,
    ) -> None:
        self.question, self.training, self.cut = question, training, cut
        self.kinds, self.ranks = kinds, question.ranks(kinds, cut.pp)
        self.is_limited = is_limited
        self.num_cells = cut.pp * cut.chunks * cut.num_microbatches * cut.slices

    @cached_property
    def estimate(self) -> Estimate:
        """The estimate, with layers as whole frameworks treat them."""
        cut, question = self.cut, self.question
        estimated = estimate(
            question.shape, self.ranks, self.training, pp=cut.pp, chunks=cut.chunks,
            num_microbatches=cut.num_microbatches, placement=cut.placement, layout=cut.layout,
            time_factor=question.time_factor, byte_factor=question.byte_factor,
            memory_bytes=tuple(map(question.usable_bytes_of, self.ranks)),
        )  # fmt: skip
        if question.framework == "any":
            return estimated
        return replace(estimated, model=_kept_only(estimated.model))

    @property
    def model(self) -> Model:
        """The layers and their devices."""
        return self.estimate.model

    def cut_numbers(self, table: LayerTable) -> CutNumbers | None:
        """Return the input of `best_cut`; None if the order has none."""
        model = self.model
        if len({stage.output_bytes for stage in model.stages_on[0][:-1]}) > 1:
            return None
        return table.cut_numbers(self.cut, boundaries(model, self.estimate.placement))

    def by_cut(
        self,
        best_ms: float,
        stop: Stop | None = None,
        *,
        relaxed: bool = False,
        least_ms: float = 0.0,
    ) -> tuple[TuneRow | None, float, CutPrices | None]:
        """Return the schedule of the cut that `best_cut` finds, its bound in ms, and its prices.

        The bound is that of the pipeline alone, for all cuts, 0 if none is known. Nothing is
        simulated if no step is below ``best_ms``, or if ``relaxed``. ``least_ms`` is a known bound
        of a step.
        """
        cut = self.cut
        table = LayerTable(self.question, self.training, cut.pp, self.kinds, pairs=cut.pairs)
        numbers = self.cut_numbers(table)
        if numbers is None:
            return None, 0.0, None
        stop = stop or Stop(inf)
        enough_ms, least_ms = best_ms - table.after_ms, max(0.0, least_ms - table.after_ms)
        found = best_cut(numbers, enough_ms, stop, relaxed=relaxed, least_ms=least_ms)
        sizes, row = found.sizes, None
        if sizes and min(sizes) >= 1 and found.bound_ms + table.after_ms < best_ms:
            row = self.by_families(self.walked(sizes, stop)) or self.by_families(sizes)
        return row, found.bound_ms, found.prices

    def walked(self, sizes: tuple[int, ...], stop: Stop) -> tuple[int, ...]:
        """Return a cut of the fused order that is no longer; the same cut if no cut known fits.

        An annealing of cuts begins with this cut, or with a framework's cut if that is shorter. A
        pair lasts as long as its passes less the most that either can hide, as in `best_cut`.
        """
        hidden: list[list[tuple[float, float]]] = []
        if self.cut.pairs:
            machines = [self.question.machine(self.training, one) for one in self.ranks]
            shape, pp = self.question.shape, self.cut.pp
            hidden = [most_hidden(model_phases(shape, one, pp)) for one in machines]
        links = boundaries(self.model, self.estimate.placement)
        problem = CutProblem(self.model, self._pattern(links), hidden)
        choices = [PlanChoice(one, (0,) * len(one)) for one in (sizes, *map(self.sizes, LAYOUTS))]
        starts = [(problem.length_ms(one), one) for one in choices if problem.fits(one)]
        turn = Stop(stop.limit_s, work=_WALK, seed=stop.seed, should_stop=stop.is_told)
        if starts:
            sizes = walked(problem, min(starts), turn, most=_WALKS)[1].sizes
        stop.spend(turn.spent)
        return sizes

    def simulated(self) -> TuneRow | None:
        """Return the fastest schedule of the framework's families, for the two plain cuts."""
        found = [self.by_families(self.sizes(layout)) for layout in LAYOUTS]
        if self.cut.pairs and self.cut.chunks == _MOST_OF_V and self.question.framework == "any":
            other = ConfigurationJudge(
                self.question, self.training, replace(self.cut, placement="v"), kinds=self.kinds
            )
            found += [other.by_families(other.sizes(layout)) for layout in LAYOUTS]
        rows = [row for row in found if row is not None]
        return min(rows, key=lambda row: row.step_ms, default=None)

    def sizes(self, layout: Layout) -> tuple[int, ...]:
        """Return how many layers each stage has by a layout."""
        return self._step(replace(self.cut, layout=layout), None).sizes

    def _step(self, cut: PipelineCut, sizes: tuple[int, ...] | None) -> StepEstimate:
        machines = [self.question.machine(self.training, one) for one in self.ranks]
        return step_estimate(self.question.shape, machines, cut, sizes=sizes)

    def by_families(self, sizes: tuple[int, ...]) -> TuneRow | None:
        """Return the fastest schedule of the framework's families that fits, of a cut.

        None too if there are too many cells to simulate.
        """
        if self.num_cells > _MOST_SIMULATED:
            return None
        return self.by_names(sizes, self.families)

    @property
    def families(self) -> tuple[str, ...]:
        """The families that the framework has; none that takes long for many cells."""
        cut = self.cut
        if self.question.framework == "megatron":
            return (fused_family(cut.chunks, pairs=cut.pairs),)
        return tuple(
            family.name
            for family in FAMILIES
            if (family.name not in _SLOW or self.num_cells < _SLOW_FROM_CELLS)
            and (family.name in _PAIRED or not cut.pairs)
            and (family.knows_slices or cut.slices == 1)
        )

    def _problem(self, sizes: tuple[int, ...]) -> Problem:
        """Return the problem of a cut, as `optpipe.planning.estimate` writes it."""
        problem = self.model.problem(self.estimate.placement, sizes)
        question, cut = self.question, self.cut
        machines = tuple(question.machine(self.training, one) for one in self.ranks)
        if cut.slices > 1:
            memory = tuple(map(question.usable_bytes_of, self.ranks))
            sliced = SlicedCut(question.shape, machines, sizes, cut.slices, memory, keeps=True)
            problem = sliced.problem(problem)
        return with_pairs(question.shape, machines, problem, sizes) if cut.pairs else problem

    def by_names(self, sizes: tuple[int, ...], names: tuple[str, ...]) -> TuneRow | None:
        """Return the fastest schedule of some families that fits, of a cut.

        Without a memory limit, the problem gets as much memory as the schedule needs if the GPUs
        have less.
        """
        given = self._problem(sizes)
        if self.cut.pairs and not given.pairs:  # no pair would be shorter than its two passes
            names = (fused_family(self.cut.chunks),)
        problem = given
        if not self.is_limited:
            problem = _with_memory(given, [_UNLIMITED] * len(given.devices))
        best = Incumbent(problem)
        for start in all_starts(problem, list(names)):
            if start.programs is not None and start.legal:
                best.offer(start.programs, start.method)
        if not self.is_limited and best.programs is not None and best.metrics is not None:
            peaks = zip(best.metrics.peak_bytes, given.devices, strict=True)
            needed = [max(one.memory_bytes, int(peak) + one.reserved_bytes) for peak, one in peaks]
            programs, method = best.programs, best.method
            best = Incumbent(_with_memory(given, needed))
            best.offer(programs, method)
        return self._row(best)

    def _pattern(self, links: tuple[Boundary, ...]) -> Pattern:
        """Return the framework's fused order."""
        placement, m = self.estimate.placement, self.cut.num_microbatches
        names = (fused_family(self.cut.chunks, pairs=self.cut.pairs),)
        found = patterns_of(placement, m, links, transfers=False, recompute=False, names=names)
        return next(found)

    def _by_pattern(self, stop: Stop) -> tuple[TuneRow | None, float]:
        """Return the best cut for the framework's pattern by the plan MILP, and its bound in ms."""
        links = boundaries(self.model, self.estimate.placement)
        found = plan_pattern(self.model, self._pattern(links), stop)
        if isinstance(found, float):
            return None, found
        best = Incumbent(found.problem)
        best.offer(found.programs, f"plan-milp {found.pattern}")
        return self._row(best), found.bound_ms

    def planned(self, stop: Stop) -> tuple[TuneRow | None, float]:
        """Return the best cut and schedule that the framework has, and a bound of all in ms.

        The bound is that of the pipeline alone, and infinite if nothing fits. It is 0 with too many
        cells, pairs or slices. One stage has one cut, and Megatron-Core has one order.
        """
        if self.num_cells > _MOST_PLANNED:
            return None, 0.0
        if self.cut.pp * self.cut.chunks == 1:
            if self.question.framework != "megatron":
                return None, 0.0
            row = self.by_families(self.sizes("even"))
            return row, inf if row is None else row.makespan_ms
        if self.cut.pairs or self.cut.slices > 1:
            return None, 0.0  # plans know neither
        if self.question.framework == "megatron":
            return self._by_pattern(stop) if self.num_cells <= _MOST_OF_PATTERN else (None, 0.0)
        return self._by_plan(stop)

    def _by_plan(self, stop: Stop) -> tuple[TuneRow | None, float]:
        """Return the best cut and schedule of `optpipe_solver.plan`, and the bound of all cuts."""
        if self.cut.chunks > _MOST_CHUNKS:
            return None, 0.0
        kinds: tuple[PlacementKind, ...] = ("linear",) if self.cut.chunks == 1 else ("loop", "v")
        if self.question.framework == "torchtitan" and self.cut.chunks > _MOST_OF_V:
            kinds = ("loop",)
        found = plan(
            self.model,
            time_limit_s=max(0.1, stop.left_s()),
            work_limit=None if stop.work is None else max(_LEAST_WORK, stop.left_work),
            threads=stop.threads,
            seed=stop.seed,
            chunks=(self.cut.chunks,),
            placements=kinds,
            should_stop=stop.is_told,
        )
        stop.spend(found.work)
        if found.schedule is None or found.problem is None:
            return None, inf if found.status.value == "infeasible" else found.bound_ms or 0.0
        if len(found.problem.stages) != self.cut.pp * self.cut.chunks:
            return None, found.bound_ms or 0.0  # the even cut in a line: another configuration
        best = Incumbent(found.problem)
        best.offer(found.schedule.programs, found.schedule.provenance.method)
        return self._row(best), found.bound_ms or 0.0

    def _row(self, best: Incumbent) -> TuneRow | None:
        """Return the row of a whole step with a cut's best known programs; None without any."""
        if best.programs is None or best.metrics is None:
            return None
        problem = best.problem
        sizes = tuple(stage.layers.total for stage in problem.stages if stage.layers is not None)
        # The problem's own number of chunks, in a line, loop or V.
        chunks = len(problem.stages) // self.cut.pp
        names: tuple[str, ...] = ("linear",) if chunks == 1 else ("loop", "v")
        found = [n for n in names if placement_of(n, self.cut.pp, chunks) == problem.placement]
        cut = replace(self.cut, chunks=chunks, placement=[*found, self.cut.placement][0])
        step = self._step(cut, sizes)
        step_ms = best.metrics.makespan_ms + step.after_ms
        peaks = zip(best.metrics.peak_bytes, problem.devices, strict=True)
        peak_bytes = tuple(int(peak + device.reserved_bytes) for peak, device in peaks)
        faster = step.step_ms / step_ms
        memory = []
        for rank, peak in zip(step.memory, peak_bytes, strict=True):
            # The activations are those that this schedule holds.
            activations = max(0.0, peak - (rank.total - rank.activations))
            parts = rank._replace(activations=activations)
            memory.append(RankMemory(*(float(round(part)) for part in parts)))
        return TuneRow(
            configuration=Configuration(
                shape=self.question.shape,
                hardware=self.question.hardware,
                training=self.training,
                pipeline=cut,
                sizes=sizes,
                kinds=self.kinds,
            ),
            step_ms=step_ms,
            makespan_ms=best.metrics.makespan_ms,
            method=best.method,
            peak_bytes=peak_bytes,
            memory=tuple(memory),
            tokens_per_s_per_gpu=step.tokens_per_s_per_gpu * faster,
            mfu=step.mfu * faster,
            problem=problem,
            programs=best.programs,
        )


def _kept_only(model: Model) -> Model:
    """Return the model with only the recomputation that its times already include."""
    fields = model.model_dump(mode="json", by_alias=True, exclude_none=True)
    for layer in fields["layers"]:
        for times in (layer, *layer.get("times_on", {}).values()):
            times.pop("recompute_ms", None)
        for name in ("offload_bytes", "checkpoint_bytes", "modes"):
            layer.pop(name, None)
    return type(model).parse(fields)


def _with_memory(problem: Problem, memory_bytes: Sequence[int]) -> Problem:
    """Return the problem with this memory per device."""
    devices = [
        device.model_copy(update={"memory_bytes": one})
        for device, one in zip(problem.devices, memory_bytes, strict=True)
    ]
    return problem.model_copy(update={"devices": tuple(devices)})
