"""Tuning: bounds against every cut of every configuration of a small space, and what is said."""

import json
import re
import sys
from dataclasses import replace
from itertools import combinations, groupby, pairwise, permutations, product
from math import inf
from multiprocessing.pool import ThreadPool
from operator import le, truediv
from subprocess import Popen
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe.errors import InputError
from optpipe.planning import (
    Configuration,
    Experts,
    ModelShape,
    PipelineCut,
    Training,
    find_gpu,
    find_model,
    megatron_arguments,
    torchtitan_config,
)
from optpipe.planning.accelerators import find_gpus
from optpipe.planning.shape import Lora
from optpipe.planning.step import in_flight
from optpipe.problem import placement_of
from optpipe.units import format_ms
from optpipe_solver import solve
from optpipe_solver.budget import Stop
from optpipe_solver.milp.highs import RowByRow
from optpipe_solver.milp.plan.pattern import HELD, Pattern, patterns_of
from optpipe_solver.plan import PlanResult, plan
from optpipe_solver.tune import TuneQuestion, TuneResult, judge, tune
from optpipe_solver.tune.bounds import LayerTable, _most_work
from optpipe_solver.tune.cut import (
    CutNumbers,
    LayerNumbers,
    _CutProgram,
    best_cut,
    fused_family,
)
from optpipe_solver.tune.judge import ConfigurationJudge
from optpipe_solver.tune.scaling import enough_gpus, nearest_configuration, shortage
from optpipe_solver.tune.space import TuneCandidate, candidates
from tests.strategies import few

SMALL = ModelShape(
    name="small", num_layers=4, hidden=2048, num_heads=16, num_kv_heads=8, ffn=8192, vocab=50_000
)
WITH_EXPERTS = replace(
    SMALL, name="small-moe", experts=Experts(num=8, active=2, ffn=2048, dense_layers=1)
)
GPU = find_gpu("h100")


def asked(shape: ModelShape = SMALL, **fields) -> TuneQuestion:
    given_fields: dict[str, Any] = {
        "shape": shape,
        "hardware": GPU,
        "num_gpus": 4,
        "global_batch": 16,
        "training": Training(sequence=2048, cuda_graphs=True),
        "framework": "megatron",
        "fixed": {"tp": 1, "cp": 1},
    }
    return TuneQuestion(**(given_fields | fields))


def all_cuts(num_layers: int, num_stages: int):
    for ends in combinations(range(1, num_layers), num_stages - 1):
        yield tuple(b - a for a, b in pairwise((0, *ends, num_layers)))


def judge_of(question: TuneQuestion, candidate: TuneCandidate) -> ConfigurationJudge:
    kinds = candidate.kinds
    return ConfigurationJudge(question, candidate.training, candidate.cut(), kinds=kinds)


def exhaustively(question: TuneQuestion) -> dict[TuneCandidate, float]:
    """Return each candidate's fastest step in ms over all its cuts; infinite where none fits."""
    num_layers = question.shape.num_layers + 2
    found = {}
    for candidate in candidates(question):
        judged = judge_of(question, candidate)
        rows = (
            judged.by_families(sizes)
            for sizes in all_cuts(num_layers, candidate.pp * candidate.chunks)
        )
        found[candidate] = min((row.step_ms for row in rows if row is not None), default=inf)
    return found


TIGHT = 9_800_000_000
LORA = Training(sequence=8192, cuda_graphs=True, lora=Lora(rank=8), lengths=(6000, 2192))


def mixed(shape: ModelShape = SMALL, **fields) -> TuneQuestion:
    """Two kinds of which either may come first: one 2 to 3 times as slow, with less memory."""
    slow = find_gpu("a100-40gb")
    small = replace(slow, memory_bytes=slow.memory_bytes._replace(value=0.58 * TIGHT))
    big = replace(GPU, memory_bytes=GPU.memory_bytes._replace(value=0.8 * TIGHT))
    return asked(shape, hardware=small, kinds=((small, 2), (big, 2)), **fields)


def _of_search(result: TuneResult) -> list[str]:
    """Return the notes without that of the class of the estimates."""
    return [note for note in result.notes if "are less accurate than we want" not in note]


@pytest.mark.parametrize(
    ("question", "threads"),
    [
        pytest.param(asked(), 1, marks=pytest.mark.extended),
        (asked(memory_bytes=TIGHT), 2),
        pytest.param(asked(WITH_EXPERTS, memory_bytes=TIGHT), 1, marks=pytest.mark.extended),
        (mixed(fixed={"tp": 1, "cp": 1, "micro_batch": 1}), 1),
        pytest.param(mixed(WITH_EXPERTS), 1, marks=pytest.mark.extended),
        pytest.param(
            asked(training=LORA, memory_bytes=14_000_000_000), 1, marks=pytest.mark.extended
        ),
    ],
    ids=[
        "dense",
        "dense, tight, two at a time",
        "experts, tight",
        "kinds",
        "kinds, experts",
        "LoRA",
    ],
)
def test_no_cut_of_any_configuration_beats_its_bounds(question: TuneQuestion, threads: int) -> None:
    """And what is answered is the best of all of them, within what the certificate leaves."""
    best_of = exhaustively(question)
    num_cut = 0
    groups = groupby(best_of, key=lambda one: (one.training, one.pp, one.kinds, one.pairs))
    for (training, pp, kinds, pairs), group in groups:
        table = LayerTable(question, training, pp, kinds, pairs=pairs)
        for candidate in group:
            fastest_ms = best_of[candidate]
            judged = judge_of(question, candidate)
            cut_ms = judged.by_cut(inf)[1] + table.after_ms
            for bound_ms in (table.quick_ms(candidate), table.packed_ms(candidate), cut_ms):
                assert bound_ms <= fastest_ms * (1 + 1e-6), candidate
            num_cut += cut_ms > table.packed_ms(candidate) * (1 + 1e-6)
    assert num_cut > 5
    fastest_ms = min(best_of.values())
    assert fastest_ms < inf
    if question.memory_bytes == TIGHT or question.kinds:
        assert inf in best_of.values(), "memory is no question here"
    result = tune(question, time_limit_s=600, work_limit=1.0, threads=threads, gap=0.0)
    assert result.best is not None
    assert result.gap is not None
    assert result.bound_ms <= fastest_ms * (1 + 1e-6)
    assert (
        fastest_ms * (1 - 1e-6) <= result.best.step_ms <= fastest_ms / (1 - result.gap) * 1.000001
    )
    has_notes = question.training.lora is not None or result.best.configuration.pipeline.pairs
    assert bool(_of_search(result)) == has_notes
    assert {one.pairs for one in best_of} == {False, question.shape.experts is not None}
    counts = result.counts
    assert counts.total == len(best_of)
    assert counts.do_not_fit <= sum(ms == inf for ms in best_of.values())
    assert counts.total == counts.do_not_fit + counts.excluded + counts.solved + counts.open


def test_slices_are_kept_as_the_runtime_keeps_them() -> None:
    """It refuses a schedule that offloads or recomputes one, and checkpoints of whole layers."""
    fixed = {"tp": 1, "cp": 1, "pp": 2, "dp": 1, "micro_batch": 1, "chunks": 1, "slices": 4}
    training = Training(sequence=32_768)
    question = asked(framework="any", num_gpus=2, global_batch=4, training=training, fixed=fixed)
    found = list(candidates(question))
    assert found
    assert not any("full" in one.training.recompute for one in found)
    judged = judge_of(question, found[0])
    row = judged.by_families(judged.sizes("balanced"))
    assert row is not None
    data = json.loads(row.problem.model_dump_json(by_alias=True))
    costs = [cost for stage in data["stages"] for cost in stage["costs"]]
    assert len(costs) == 8
    assert {mode["name"] for cost in costs for mode in cost["modes"]} == {"keep"}


@pytest.mark.extended
def test_long_sequences_are_cut_into_slices_where_that_is_faster() -> None:
    """On two ranks, four sequences: no cut of any number of slices, and no search, beats bounds."""
    fixed = {"tp": 1, "cp": 1, "pp": 2, "dp": 1, "micro_batch": 1, "chunks": 1}
    training = Training(sequence=32_768, cuda_graphs=True)
    question = asked(framework="any", num_gpus=2, global_batch=4, training=training, fixed=fixed)
    best_of = exhaustively(question)
    searched = 0
    for one, fastest_ms in best_of.items():
        table = LayerTable(question, one.training, one.pp, slices=one.slices)
        bound_ms = table.packed_ms(one)
        assert table.quick_ms(one) <= bound_ms <= fastest_ms * (1 + 1e-6), one
        if one.slices > 1 and not one.training.recompute:
            judged = judge_of(question, one)
            row = judged.by_families(judged.sizes("balanced"))
            assert row is not None
            found = solve(row.problem, work_limit=0.1, time_limit_s=30).schedule
            assert found is not None
            assert found.objective_ms + table.after_ms >= bound_ms * (1 - 1e-6), one
            searched += 1
    assert searched == 4
    result = tune(question, time_limit_s=600, work_limit=1.0, gap=0.0)
    assert result.best is not None
    assert result.gap is not None
    whole_ms = min(ms for one, ms in best_of.items() if one.slices == 1)
    assert result.best.step_ms == pytest.approx(min(best_of.values()))
    assert result.best.step_ms < whole_ms
    assert result.best.label.endswith("slices 4")
    assert result.best.method == "seq1f1b"
    assert result.bound_ms <= result.best.step_ms
    assert _of_search(result) == []
    said = _of_search(tune(replace(question, framework="megatron"), time_limit_s=1))
    assert [one.partition(":")[0] for one in said] == ["slices of sequences are not searched"]


@given(
    slow=st.lists(st.floats(0.2, 5.0), min_size=1, max_size=8),
    share=st.floats(0.2, 1.0),
    m=st.integers(1, 20),
    loads=st.lists(st.floats(0.0, 1.0), min_size=8, max_size=8),
)
@few(200)
def test_ranks_of_several_kinds_do_no_more_work_while_they_fill(slow, share, m, loads) -> None:
    """Whatever their loads; as much where all are alike, and nearly so where they nearly are."""
    most = _most_work(slow, share, m)
    loads = loads[: len(slow)]
    until = max(m * own + share * sum(loads[:rank]) for rank, own in enumerate(loads))
    assert sum(map(truediv, loads, slow)) <= most * until * (1 + 1e-9)
    alike = [slow[0], *[slow[0] * (1 + 1e-12)] * (len(slow) - 1)]
    assert _most_work(alike, share, m) == pytest.approx(_most_work(alike[:1] * len(slow), share, m))


def dealt_ms(table: LayerTable, candidate: TuneCandidate) -> float:
    """Return what the busiest rank computes and waits at least: every way to deal layers to ranks.

    To their stages as a cut does where there are several, to the ranks at will where there is one.
    """
    number = table.parts[1].number
    pp, chunks = candidate.pp, candidate.chunks
    in_flight_of = [
        in_flight(r, candidate.cut()) if table.fused else (1,) * chunks for r in range(pp)
    ]
    m, least = candidate.num_microbatches, inf
    for owners in _deals(number, pp, chunks):
        busy, need = [0.0] * pp, [0.0] * pp
        for index, (rank, chunk) in zip((0, *[1] * number, 2), owners, strict=True):
            part = table.parts_on[table.ranks[rank]][index]
            busy[rank] += part.whole_ms
            need[rank] += part.static + in_flight_of[rank][chunk] * part.kept
        ahead, waits = 0.0, []
        for rank, hardware in enumerate(table.ranks):
            waits.append(table.share * ahead)
            ahead += table.parts_on[hardware][1 if rank else 0].whole_ms
        if all(map(le, need, table.rooms)):
            least = min(least, max(m * own + wait for own, wait in zip(busy, waits, strict=True)))
    return least


def _deals(num_layers: int, pp: int, chunks: int):
    if chunks == 1:
        for counts in product(range(num_layers + 1), repeat=pp):
            if sum(counts) == num_layers:
                ranks = [rank for rank, count in enumerate(counts) for _ in range(count)]
                yield [(rank, 0) for rank in (0, *ranks, pp - 1)]
        return
    stages = [(rank, chunk) for chunk in range(chunks) for rank in range(pp)]
    for sizes in all_cuts(num_layers + 2, len(stages)):
        yield [stage for stage, size in zip(stages, sizes, strict=True) for _ in range(size)]


@pytest.mark.parametrize("framework", ["megatron", "torchtitan"])
@pytest.mark.parametrize("gigabytes", [80, 9.8, 9.2, None])
def test_whole_layers_are_dealt_as_well_as_they_can_be(
    framework: str, gigabytes: float | None
) -> None:
    """Never better than a cut, and where ranks have one stage exactly as the best deal.

    None: of two kinds of accelerators each has its own.
    """
    training = Training(sequence=2048, cuda_graphs=framework == "megatron")
    question = mixed(framework=framework, training=training)
    if gigabytes is not None:
        memory_bytes = int(gigabytes * 1e9)
        question = asked(framework=framework, memory_bytes=memory_bytes, training=training)
    num_packed = 0
    for candidate in candidates(question):
        table = LayerTable(question, candidate.training, candidate.pp, candidate.kinds)
        packed = table.packed_ms(candidate)
        expected = max(dealt_ms(table, candidate) + table.after_ms, table.quick_ms(candidate))
        assert packed <= expected * (1 + 1e-9), candidate
        if candidate.chunks == 1:
            assert packed == pytest.approx(expected, rel=1e-5)
        num_packed += packed > table.quick_ms(candidate)
    assert num_packed > 10


def test_more_chunks_than_a_plan_takes_have_the_schedules_of_families() -> None:
    question = asked(replace(SMALL, num_layers=18), framework="torchtitan", num_gpus=2)
    question = replace(question, training=Training(sequence=2048))
    question = replace(question, fixed={"tp": 1, "cp": 1, "pp": 2, "chunks": 10})
    result = tune(question, time_limit_s=600, work_limit=0.1)
    assert result.best is not None
    assert result.best.configuration.pipeline.chunks == 10


def test_torchtitan_has_a_v_of_two_chunks_and_no_other(monkeypatch) -> None:
    """More are placed round and round: what is answered can be pasted."""
    question = asked(replace(SMALL, num_layers=16), framework="torchtitan", num_gpus=2)
    question = replace(question, training=Training(sequence=2048))
    asked_for: list[tuple[int, Any]] = []

    def note(model: Any, **options: Any) -> PlanResult:
        asked_for.append((options["chunks"][0], options["placements"]))
        return plan(model, **{**options, "time_limit_s": 0.1})

    monkeypatch.setattr(sys.modules[ConfigurationJudge.__module__], "plan", note)
    for chunks in (2, 4):
        fixed = {"tp": 1, "cp": 1, "pp": 2, "chunks": chunks, "micro_batch": 1}
        candidate = next(candidates(replace(question, fixed=fixed)))
        judged = ConfigurationJudge(question, candidate.training, candidate.cut())
        judged.planned(Stop(1.0))
    assert asked_for == [(2, ("loop", "v")), (4, ("loop",))]


def test_one_stage_is_not_cut() -> None:
    """Many layers on one device: the plan MILP has nothing to choose, and the answer comes."""
    result = tune(asked(fixed={"tp": 1, "pp": 1, "dp": 4}), time_limit_s=10)
    assert result.best is not None
    assert {row.configuration.pipeline.pp for row in result.rows} == {1}


def test_plans_with_free_order_do_not_beat_their_bounds_either() -> None:
    """Where any schedule may be answered, with offload and split backwards."""
    question = asked(framework="any", memory_bytes=TIGHT, fixed={"tp": 1, "cp": 1, "pp": 4})
    num_planned = 0
    for candidate in candidates(question):
        if candidate.chunks > 1 or candidate.training.recompute:
            continue
        table = LayerTable(question, candidate.training, candidate.pp)
        judged = ConfigurationJudge(question, candidate.training, candidate.cut())
        found = plan(
            judged.model, work_limit=0.1, time_limit_s=600, chunks=(1,), placements=["linear"]
        )
        if found.schedule is None:
            continue
        num_planned += 1
        step_ms = found.schedule.makespan_ms + table.after_ms
        assert table.packed_ms(candidate) <= step_ms * (1 + 1e-6)
    assert num_planned > 1


def fused(pp: int, chunks: int, m: int, links, *, pairs: bool = False) -> Pattern:
    """1F1B, or interleaved 1F1B."""
    placement = placement_of("linear" if chunks == 1 else "loop", pp, chunks)
    names = (fused_family(chunks, pairs=pairs),)
    return next(patterns_of(placement, m, links, transfers=False, recompute=False, names=names))


def numbers_of(pp: int, chunks: int, m: int, sizes, **changes: Any) -> CutNumbers:
    """Equal layers of 1 ms and room for a cut of them, as it is."""
    links = (((0.0, 0.0), (0.0, 0.0)),) * (pp * chunks - 1)
    pattern = fused(pp, chunks, m, links, pairs=changes.get("pairs", False))
    needs = [
        sum(
            (3 + in_flight_of[HELD]) * sizes[rank + chunk * pp]
            for chunk, in_flight_of in enumerate(moment.counts)
        )
        for rank, moments in enumerate(pattern.moments)
        for moment in moments
    ]
    nothing = LayerNumbers(1, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    plain: dict[str, Any] = {
        "pp": pp,
        "chunks": chunks,
        "num_microbatches": m,
        "links": links,
        "layers": ((LayerNumbers(sum(sizes), 1 / 3, 1.0, 1.0, 3.0, 0.0, 0.0),),) * pp,
        "ends": (nothing, nothing),
        "rooms": (float(max(needs)),) * pp,
    }
    return CutNumbers(**(plain | changes))


def limits_of(numbers: CutNumbers, pattern: Pattern) -> list[tuple[dict[int, list[float]], float]]:
    """Return what layers take and what room there is for them, of each rank at each moment."""
    return [
        (numbers.layer_bytes(rank, one), numbers.room(rank, one))
        for rank, moments in enumerate(pattern.moments)
        for one in moments
    ]


@given(data=st.data(), cut=st.sampled_from([(2, 1, 3), (3, 1, 6), (2, 2, 4), (2, 3, 4), (3, 2, 6)]))
@few(8)
def test_no_cut_that_fits_beats_the_best_one(data, cut) -> None:
    """Nor, of layers of two kinds, what prices of other numbers of the same order say of it."""
    share, sent = data.draw(st.floats(0.2, 0.5)), data.draw(st.floats(0.0, 1.0))
    slower, hidden = data.draw(st.floats(1.0, 3.0)), data.draw(st.floats(0.0, 0.3))
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=6, max_size=6))
    others = data.draw(st.lists(st.integers(0, 2), min_size=6, max_size=6))
    pp, chunks, m = cut
    pairs, num_stages = chunks > 1 and hidden > 0.1, pp * chunks
    layers = np.array([sizes, others]).T[:num_stages]
    sums = layers.sum(axis=1)
    kinds = [
        LayerNumbers(
            int(number), share * ms, ms, 1.0, 3.0, 0.0, 0.0,
            hidden_forward_ms=hidden * share * ms, hidden_back_ms=hidden * share * ms / 2,
        )
        for number, ms in zip(layers.sum(axis=0), (1.0, slower), strict=True)
        if number
    ]  # fmt: skip
    given_numbers = numbers_of(
        pp, chunks, m, sums, pairs=pairs, layers=(tuple(kinds),) * pp,
        links=(((sent, 0.01), (sent, 0.01)),) * (num_stages - 1),
    )  # fmt: skip
    pattern = _CutProgram(given_numbers).pattern

    def length_ms(numbers: CutNumbers, sized) -> float:
        return pattern.length_ms(numbers.durations(np.array(sized)))

    layers = layers[:, : len(kinds)]
    bound_ms, best, _, prices = best_cut(given_numbers)
    relaxed_ms = best_cut(given_numbers, relaxed=True).bound_ms
    assert relaxed_ms * (1 - 1e-9) <= bound_ms <= length_ms(given_numbers, layers) * (1 + 1e-9)
    assert prices is not None
    assert bound_ms <= prices.bound_ms(given_numbers) <= bound_ms * (1 + 1e-9)
    prices = prices._replace(least_ms=0.0)
    assert 0.98 * relaxed_ms <= prices.bound_ms(given_numbers) <= relaxed_ms * (1 + 1e-6)
    if len(kinds) == 1:
        answered = [[sized - (s in {0, len(best) - 1})] for s, sized in enumerate(best)]
        assert bound_ms <= length_ms(given_numbers, answered) * (1 + 1e-9) <= bound_ms * 1.01
    # Slower and larger layers, another place for what fits, faster links.
    longer = [one._replace(whole_ms=1.3 * one.whole_ms, kept=1.5) for one in kinds]
    other = given_numbers._replace(
        layers=(tuple(longer),) * pp,
        rooms=(1.4 * given_numbers.rooms[0],) * pp,
        links=(((sent / 2, 0.004), (sent / 2, 0.004)),) * (num_stages - 1),
    )
    limits = limits_of(other, pattern)
    lengths = [
        length_ms(other, sized)
        for sized in map(np.array, permutations(layers.tolist()))
        if all(
            sum(np.dot(needs, sized[stage]) for stage, needs in bytes_of.items()) <= room
            for bytes_of, room in limits
        )
    ]
    # A program may stop 0.2% below the best cut; what prices say may not be above that.
    assert prices.bound_ms(other) <= best_cut(other)[0] * (1 + 2e-3 + 1e-6)
    assert prices.bound_ms(other) <= min(lengths) * (1 + 1e-9)


@given(data=st.data(), cut=st.sampled_from([(3, 1, 6), (2, 2, 4), (2, 3, 4), (3, 2, 6)]))
@few(8)
def test_lengths_that_no_cut_has_are_refuted_and_others_are_not(data, cut) -> None:
    """Against every cut; numbers that are nowhere better have no less, so proven."""
    pp, chunks, m = cut
    num_stages, share = pp * chunks, data.draw(st.floats(0.2, 0.5))
    pairs = chunks > 1 and data.draw(st.booleans())
    sent, hidden = data.draw(st.floats(0.0, 0.5)), 0.2 * share
    sizes = data.draw(st.lists(st.integers(1, 2), min_size=num_stages, max_size=num_stages))
    kind = LayerNumbers(
        sum(sizes), share, 1.0, 1.0, 3.0, 0.0, 0.0,
        hidden_forward_ms=hidden, hidden_back_ms=hidden,
    )  # fmt: skip
    head = kind._replace(number=1, whole_ms=data.draw(st.floats(0.4, 2.0)), kept=0.5)
    nothing = LayerNumbers(1, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    tight = numbers_of(
        pp, chunks, m, sizes, pairs=pairs, layers=((kind,),) * pp,
        links=(((sent, 0.01), (sent, 0.01)),) * (num_stages - 1),
    )  # fmt: skip
    # The head has what two layers more would take at most.
    rooms = tuple(room + 3.0 + m * data.draw(st.floats(0.2, 2.0)) for room in tight.rooms)
    here = tight._replace(ends=(nothing, head), rooms=rooms)
    worse = here._replace(
        layers=((kind._replace(whole_ms=1.1, kept=1.1),),) * pp,
        rooms=tuple(0.99 * room for room in rooms),
    )
    assert worse.is_no_better_than(here)
    assert here.is_no_better_than(here)
    assert not here.is_no_better_than(worse)
    pattern = _CutProgram(here).pattern

    def least_ms(numbers: CutNumbers) -> float:
        found, limits = inf, limits_of(numbers, pattern)
        for sized in all_cuts(sum(sizes) + 2, num_stages):
            layers = np.array(sized, dtype=float)[:, None]
            layers[[0, -1]] -= 1.0
            if all(sum(need[0] * layers[s, 0] for s, need in n.items()) <= r for n, r in limits):
                found = min(found, pattern.length_ms(numbers.durations(layers)))
        return found

    best_ms = least_ms(here)
    assert best_ms < inf
    slower = best_cut(worse, 2.0 * best_ms, Stop(inf, work=50.0)).prices
    assert slower is None or slower.bound_ms(here) <= best_ms * (1 + 1e-9)
    for share_of_best in (0.9, 0.997, 1.003, 1.2):
        enough_ms = share_of_best * best_ms
        bound_ms, answered, _, prices = best_cut(here, enough_ms, Stop(inf, work=50.0))
        assert min(enough_ms, 0.997 * best_ms) <= bound_ms <= best_ms * (1 + 1e-9)
        assert prices is not None
        assert prices.least_ms == bound_ms <= prices.bound_ms(worse) <= least_ms(worse) * (1 + 1e-9)
        again = best_cut(here, enough_ms, Stop(inf, work=50.0), least_ms=0.5 * bound_ms)
        # Refuting alone leaves steps of less than 2e-3 of the length undone.
        assert 0.998 * min(enough_ms, 0.997 * best_ms) <= again.bound_ms
        assert again.bound_ms <= best_ms * (1 + 1e-9)
        for found in (answered, again.sizes) if share_of_best > 1 else ():
            layers = np.array(found, dtype=float)[:, None]
            layers[[0, -1]] -= 1.0
            assert pattern.length_ms(here.durations(layers)) <= enough_ms * (1 + 1e-4)


@given(data=st.data(), cut=st.sampled_from([(3, 1, 6), (2, 2, 4), (3, 2, 6)]))
@few(8)
def test_the_best_cut_keeps_the_order_of_different_layers(data, cut) -> None:
    """Against every cut of a few runs, or of kinds that alternate."""
    pp, chunks, m = cut
    num_stages, share = pp * chunks, data.draw(st.floats(0.2, 0.5))
    lengths = st.lists(st.integers(1, 4), min_size=2, max_size=4)
    runs = [(i % 2, n) for i, n in enumerate(data.draw(lengths | st.just([1] * 9)))]
    order = [kind for kind, number in runs for _ in range(number)]
    order += [order[-1]] * (num_stages - len(order))
    runs[-1] = (runs[-1][0], runs[-1][1] + len(order) - sum(number for _, number in runs))
    cuts = list(all_cuts(len(order) + 2, num_stages))
    sizes = np.array(data.draw(st.sampled_from(cuts)))
    kind = LayerNumbers(0, share, 1.0, 1.0, 3.0, 0.0, 0.0)
    slower = data.draw(st.floats(0.2, 3.0))
    kinds = (
        kind._replace(number=order.count(0)),
        kind._replace(number=order.count(1), whole_ms=slower, forward_ms=share * slower),
    )
    head = kind._replace(number=1, whole_ms=data.draw(st.floats(0.4, 2.0)), kept=0.0, static=0.0)
    nothing = LayerNumbers(1, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    numbers = numbers_of(
        pp, chunks, m, sizes, layers=(kinds,) * pp, ends=(nothing, head), runs=tuple(runs)
    )
    pattern = _CutProgram(numbers).pattern
    limits = limits_of(numbers, pattern)

    def layers_of(sized) -> np.ndarray:
        rows, at = np.zeros((num_stages, 2)), -1
        for stage, size in enumerate(sized):
            for index in range(max(at, 0), min(at + size, len(order))):
                rows[stage, order[index]] += 1
            at += size
        return rows

    best_ms = min(
        pattern.length_ms(numbers.durations(layers))
        for layers in map(layers_of, cuts)
        if all(sum(n @ layers[s] for s, n in needs.items()) <= room for needs, room in limits)
    )
    for share_of_best in (0.997, 1.003):
        enough_ms = share_of_best * best_ms
        bound_ms, answered, *_ = best_cut(numbers, enough_ms, Stop(inf, work=50.0))
        assert min(enough_ms, 0.997 * best_ms) <= bound_ms <= best_ms * (1 + 1e-9)
        if answered and share_of_best > 1:
            found_ms = pattern.length_ms(numbers.durations(layers_of(answered)))
            assert found_ms <= enough_ms * (1 + 1e-4)


def test_a_refutation_that_ends_early_leaves_the_program_as_it_was() -> None:
    """The search for a good cut uses the same rows next; a range that stays would hide cuts."""
    kind = LayerNumbers(7, 0.3, 1.0, 1.0, 3.0, 0.0, 0.0)
    slower = kind._replace(number=5, whole_ms=1.7, forward_ms=0.51)
    ends = kind._replace(number=1, whole_ms=0.0, forward_ms=0.0, kept=0.0, static=0.0)
    numbers = numbers_of(3, 2, 6, [2] * 6, layers=((kind, slower),) * 3, ends=(ends, ends))
    best_ms = best_cut(numbers, inf, Stop(inf, work=50.0)).bound_ms
    for work in np.linspace(0.3, 0.8, 12):
        program = _CutProgram(numbers)
        before = program.rows._highs.getLp()
        ranges = [*before.col_lower_, *before.col_upper_]
        program.solved(Stop(inf, work=float(work)), 1.1 * best_ms)
        after = program.rows._highs.getLp()
        assert [*after.col_lower_, *after.col_upper_] == ranges


def test_the_best_cut_knows_how_interleaved_1f1b_fills_and_what_fits() -> None:
    """More than the load and no more than the even cut takes, 16 and 3 of 16 parts of a rank."""
    even = numbers_of(4, 4, 16, [10] * 16)
    bound_ms, sizes, *_ = best_cut(even, stop=Stop(60.0, work=1.0))
    assert 16 * 41.0 < bound_ms <= 16 * 41.875
    assert sum(sizes) == 162
    room = even.rooms[0]
    assert best_cut(even._replace(rooms=(0.9 * room,) * 4), stop=Stop(60.0, work=1.0))[0] > bound_ms
    assert best_cut(even._replace(rooms=(0.5 * room,) * 4))[:2] == (inf, ())


def test_a_program_that_highs_refuses_to_go_on_with_is_begun_anew(monkeypatch) -> None:
    """Numbers with which it ended in a solve error; where it always does, less is known."""
    link = ((0.4194304, 0.03), (0.4194304, 0.03))
    given_numbers = CutNumbers(
        pp=2, chunks=2, num_microbatches=8, links=(link,) * 3,
        layers=tuple(
            (
                LayerNumbers(
                    4, slow * 0.5042054001026262, slow * 1.5527941568241346,
                    92471296.0, 755023872.0, 0.0, 67108864.0,
                ),
            )
            for slow in (1.0, 2.1)
        ),
        ends=(
            LayerNumbers(
                1, 0.006538021121546315, 0.022883073925412105, 16384.0, 1228800000.0, 0.0, 0.0
            ),
            LayerNumbers(
                1, 1.2590267761319576, 3.2151425208279685, 426377216.0, 1228824576.0,
                204800000.0, 0.0,
            ),
        ),
        rooms=(11093807488.0, 7291407488.0),
    )  # fmt: skip
    bound_ms, sizes, *_ = best_cut(given_numbers)
    assert 8 * 4 * 1.5527941568241346 < bound_ms < inf
    assert sum(sizes) == 6
    module = sys.modules[RowByRow.__module__]
    run, runs = module._run, iter(range(1000))

    def refused_later(highs: Any) -> None:
        if next(runs) >= 3:
            raise RuntimeError("HiGHS refused to run")
        run(highs)

    monkeypatch.setattr(module, "_run", refused_later)
    less = given_numbers._replace(rooms=tuple(room + 1 for room in given_numbers.rooms))
    known_ms, sizes, *_ = best_cut(less)
    assert 0 < known_ms <= bound_ms
    assert not sizes


@pytest.mark.parametrize("limit", [{"headroom": 0.3}, {"memory_bytes": 60 * 10**9}])
def test_what_a_configuration_needs_does_not_depend_on_the_limit(limit: dict[str, Any]) -> None:
    """What is reserved is the card's; else an answer would need more where it is run."""
    candidate = TuneCandidate(replace(asked().training, dp=1, micro_batch=2), 4, 1, 8)
    rows = [
        judge_of(asked(**fields), candidate).by_families((2, 1, 1, 2)) for fields in ({}, limit)
    ]
    assert rows[0] is not None
    assert rows[1] is not None
    assert (rows[0].peak_bytes, rows[0].memory) == (rows[1].peak_bytes, rows[1].memory)
    assert all(one.activations > 0 for one in rows[0].memory)


def test_where_time_is_over_the_first_that_fits_ends_the_first_looks(monkeypatch) -> None:
    module, taken = sys.modules["optpipe_solver.tune.tune"], []
    look = module._look

    def noted(*given):
        taken.append(given)
        return look(*given)

    monkeypatch.setattr(module, "_look", noted)
    result = tune(asked(fixed={}), time_limit_s=1e-3)
    assert result.best is not None
    assert len(taken) == 1


def test_what_is_run_today_is_judged_alike_and_the_gain_is_over_it() -> None:
    question = asked()
    today = Configuration(
        shape=SMALL,
        hardware=GPU,
        training=replace(question.training, dp=1, sequence_parallel=False),
        pipeline=PipelineCut(pp=4, num_microbatches=16, layout="even"),
    )
    row = judge(question, today)
    assert row is not None
    assert row.configuration.sizes == (2, 1, 1, 2)
    result = tune(question, current=today, time_limit_s=20)
    assert result.current == row
    equal = replace(result.rows[0], step_ms=row.step_ms * (1 - 1e-5))
    alike = replace(result, rows=(equal,))
    assert "nothing was found that is faster" in alike.verdict
    assert (alike.changes, alike.gain_probability) == ((), None)
    for small in (question, asked(memory_bytes=max(row.peak_bytes) - 1)):
        again = judge(small, today)
        assert again is not None
        assert again.step_ms == row.step_ms
        memory = [device.memory_bytes for device in again.problem.devices]
        assert memory == [max(small.whole_bytes, peak) for peak in again.peak_bytes]
        assert (again.peak_bytes, again.memory) == (row.peak_bytes, row.memory)
    assert result.best is not None
    assert result.gain == pytest.approx(1 - result.best.step_ms / row.step_ms)
    assert result.best.step_ms < row.step_ms
    assert row in result.rows or row.step_ms > result.best.step_ms
    assert f"more than {result.gap:.1%} faster" in result.certificate
    assert result.gain is not None
    assert f"{100 * result.gain:.1f}% less time per step" in repr(result)
    assert len(repr(result)) < 200
    assert str(result) == repr(result)
    assert len(repr(replace(result, minimum="many words " * 99))) < 200
    shown = result._repr_html_()
    assert result.verdict in shown
    for one in (row, *result.rows[:16]):
        assert f"{one.label}</td><td>{format_ms(one.step_ms)}" in shown
    assert f"<td>today: {row.label}" in shown


def test_a_gain_needs_a_baseline_that_fits_and_an_answer() -> None:
    """Today's step is no baseline where it does not fit; nor is it an answer while others are open.

    What the search tells before it has found anything faster has no gain, not one of 0%.
    """
    question = asked()
    training = replace(question.training, dp=1, sequence_parallel=False)
    cut = PipelineCut(pp=4, num_microbatches=16, layout="even")
    today = Configuration(shape=SMALL, hardware=GPU, training=training, pipeline=cut)
    results: list[TuneResult] = []
    tune(question, current=today, time_limit_s=20, on_result=results.append)
    row = results[0].current
    assert row is not None
    early = replace(results[0], rows=(row,))
    assert early.gain is None
    assert "has found nothing faster than what you run" in early.verdict
    late = replace(early, stopped_by="optimal")
    assert late.gain == 0.0
    assert "nothing was found that is faster than what you run" in late.verdict
    slower = replace(row, step_ms=2 * row.step_ms, method="gpipe")
    assert replace(late, rows=(slower,)).changes == late.changes == ()
    faster = replace(slower, step_ms=row.step_ms / 2)
    assert replace(late, rows=(faster,)).changes == (f"schedule {row.method} → gpipe",)
    small = asked(memory_bytes=max(row.peak_bytes) - 2**28)
    result = tune(small, current=today, time_limit_s=20)
    assert result.best is not None
    assert result.best.step_ms < row.step_ms
    assert result.gain is None
    assert result.changes == result.best.changes_from(row) != ()
    assert replace(result, rows=(replace(result.best, step_ms=2 * row.step_ms),)).changes != ()
    assert "pipeline rank 3 needs" in result.verdict
    assert "0.2 GiB more than it has" in repr(result)
    assert "%" not in repr(result).partition(";")[0]
    assert len(repr(result)) < 200


def test_the_best_and_the_ten_next_have_rows_though_bounds_exclude_them() -> None:
    """None below the bound; what filled up counts as excluded, and all is the same in any pool.

    Less memory is offered where it costs time.
    """
    question = asked(memory_bytes=TIGHT)
    first = tune(question, time_limit_s=300, work_limit=20.0)
    again = tune(question, time_limit_s=300, work_limit=20.0, threads=3, open_pool=ThreadPool)
    steps = [row.step_ms for row in first.rows]
    assert len(steps) >= 11
    assert steps == sorted(steps)
    assert first.bound_ms <= steps[0] * (1 + 1e-9)
    assert len(
        {(row.configuration.training, row.configuration.pipeline.pp) for row in first.rows}
    ) == len(steps)
    assert first.counts.solved < len(steps)
    assert first.counts.total == sum(
        (first.counts.do_not_fit, first.counts.excluded, first.counts.solved, first.counts.open)
    )
    assert [row.as_json() for row in again.rows] == [row.as_json() for row in first.rows]
    peaks = [max(row.peak_bytes) for row in first.pareto]
    assert [row.step_ms for row in first.pareto] == sorted(row.step_ms for row in first.pareto)
    assert peaks == sorted(peaks, reverse=True)
    assert max(peaks) <= TIGHT


def test_a_cut_that_is_walked_from_is_no_longer_and_fits(monkeypatch) -> None:
    """In pairs and without: nearly as fast as the best of all cuts."""
    monkeypatch.setattr(sys.modules[ConfigurationJudge.__module__], "_WALK", 0.05)
    fixed = {"tp": 1, "cp": 1, "ep": 2, "pp": 2, "chunks": 2, "micro_batch": 1}
    question = asked(replace(WITH_EXPERTS, num_layers=8), fixed=fixed, memory_bytes=2 * TIGHT)
    best_of, num_better, passes = exhaustively(question), 0, set()
    for candidate, fastest_ms in best_of.items():
        if fastest_ms == inf:
            continue
        judged = judge_of(question, candidate)
        start = (7, 1, 1, 1)
        row, before = judged.by_families(judged.walked(start, Stop(5.0))), judged.by_families(start)
        assert row is not None
        assert row.step_ms <= fastest_ms * 1.005
        num_better += before is None or row.step_ms < before.step_ms
        passes.add(candidate.pairs)
    assert num_better > 2
    assert passes == {False, True}


@pytest.mark.parametrize("graphs", [False, True])
def test_bounds_of_pairs_hold_where_the_host_launches_longer_than_the_device_works(graphs) -> None:
    """Short sequences on a slow network: what pairs hide is less than all of the exchange."""
    question = asked(
        find_model("qwen3-30b-a3b"),
        hardware=find_gpus(["h100"], "ethernet:25", 1.0)[0].hardware,
        num_gpus=16,
        global_batch=64,
        training=Training(sequence=512, cuda_graphs=graphs),
        memory_bytes=10**13,
        fixed={"tp": 1, "cp": 1, "ep": 16, "etp": 1, "pp": 1, "micro_batch": 1, "pairs": 1},
    )
    compared = 0
    for one in candidates(question):
        if one.training.recompute:
            continue
        table = LayerTable(question, one.training, one.pp, one.kinds, pairs=True, slices=1)
        row = judge_of(question, one).simulated()
        if row is not None:
            assert table.packed_ms(one) <= row.step_ms * (1 + 1e-9)
            compared += 1
    assert compared


@given(data=st.data())
@few(20)
def test_whatever_may_be_answered_can_be_pasted(data) -> None:
    """The framework's writer refuses no candidate, of any kind of model and switches."""
    framework = data.draw(st.sampled_from(["megatron", "torchtitan"]))
    name = data.draw(
        st.sampled_from(["llama3-70b", "qwen3-235b-a22b", "deepseek-v3", "gpt-oss-120b"])
    )
    question = TuneQuestion(
        shape=find_model(name), hardware=GPU, num_gpus=64, global_batch=256, framework=framework,
        training=Training(
            sequence=4096, ep_overlap=data.draw(st.booleans()) and framework == "megatron",
            cuda_graphs=data.draw(st.booleans()),
        ),
        fixed={"tp": data.draw(st.sampled_from([1, 2, 8]))},
    )  # fmt: skip
    found = list(candidates(question))
    for _ in range(10 if found else 0):
        one = data.draw(st.sampled_from(found))
        configuration = Configuration(
            shape=question.shape, hardware=GPU, training=one.training,
            pipeline=one.cut(layout=data.draw(st.sampled_from(["balanced", "even"]))),
        )  # fmt: skip
        if framework == "megatron":
            assert megatron_arguments(configuration)
        else:
            assert torchtitan_config(configuration, csv="schedule.csv")


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"framework": "deepspeed"}, "must be any, megatron, torchtitan"),
        ({"num_gpus": 0}, "num_gpus = 0: must be 1 to"),
        ({"fixed": {"layers": 3}}, "layers cannot be fixed"),
        ({"fixed": {"tp": 0}}, "tp = 0: is too small"),
        ({"headroom": 1.0}, "must be in [0, 1)"),
    ],
)
def test_a_question_out_of_range_is_refused(fields, sentence: str) -> None:
    with pytest.raises(InputError, match=re.escape(sentence)):
        asked(**fields)


def test_a_plan_answers_with_the_number_of_chunks_that_was_asked(monkeypatch) -> None:
    """`plan` looks at the even cut in a line too: where that is its best, it is no answer here."""
    module = sys.modules["optpipe_solver.tune.judge"]
    question = asked(framework="any", fixed={"tp": 1, "cp": 1, "pp": 2, "chunks": 2, "dp": 2})
    candidate = next(candidates(question))
    judged = ConfigurationJudge(question, candidate.training, candidate.cut())

    def in_a_line(model, **options):
        return plan(model, **(options | {"chunks": (1,), "placements": ("linear",)}))

    monkeypatch.setattr(module, "plan", in_a_line)
    row, bound_ms = judged.planned(Stop(2.0))
    assert row is None
    assert bound_ms > 0
    monkeypatch.undo()
    row, _ = judged.planned(Stop(2.0))
    assert row is not None
    assert row.configuration.pipeline.chunks == 2
    assert len(row.problem.stages) == 4


def test_a_batch_that_nothing_splits_is_refused() -> None:
    with pytest.raises(InputError, match="no configuration of 4 GPUs splits small"):
        tune(asked(global_batch=3, fixed={"tp": 1, "cp": 1, "pp": 1}))


def test_a_published_run_is_among_what_is_searched() -> None:
    """NVIDIA's Qwen3-235B recipe, which once could not be typed in."""
    question = TuneQuestion(
        shape=find_model("qwen3-235b-a22b"), hardware=GPU, num_gpus=256, global_batch=2048,
        training=Training(sequence=4096, precision="fp8", ep_overlap=True), framework="megatron",
        fixed={"tp": 2, "pp": 8, "ep": 32, "chunks": 4, "micro_batch": 1, "cp": 1, "etp": 1},
    )  # fmt: skip
    assert any(not one.training.recompute for one in candidates(question))


@pytest.mark.parametrize(
    ("framework", "work", "pp", "more"),
    [
        pytest.param("megatron", 0.3, 4, {}, id="megatron"),
        pytest.param(
            *("any", 0.1, 2, {"chunks": 2, "zero": 1}), id="any", marks=pytest.mark.extended
        ),
    ],
)
def test_with_a_work_limit_the_answer_is_a_function_of_question_seed_and_limit(
    framework: str, work: float, pp: int, more: dict[str, int]
) -> None:
    """On a machine that does something else too, and in two processes, to the last byte."""
    question = asked(
        replace(SMALL, num_layers=18), framework=framework, num_gpus=2 * pp, global_batch=4 * pp,
        training=Training(sequence=2048),
        fixed={"tp": 1, "cp": 1, "pp": pp, "micro_batch": 1} | more,
    )  # fmt: skip

    def answer(threads: int) -> tuple[Any, ...]:
        found = tune(question, time_limit_s=300, work_limit=work, threads=threads, gap=0.0, seed=3)
        assert found.stopped_by == "work_limit"
        assert work <= found.work
        said = {name: value for name, value in found.as_json().items() if name != "seconds"}
        return json.dumps(said), found.looks, found.work, [row.programs for row in found.rows]

    alone = answer(1)
    with Popen([sys.executable, "-c", "while True: pass"]) as other:
        try:
            assert answer(2) == alone
        finally:
            other.kill()
    late = tune(question, time_limit_s=0.01, work_limit=work, gap=0.0)
    assert late.stopped_by == "time_limit"


def test_work_that_suffices_is_not_used_up_and_less_of_it_never_finds_more() -> None:
    question = asked(fixed={"tp": 1, "cp": 1, "pp": 2, "chunks": 1})
    found = [tune(question, work_limit=work, time_limit_s=600) for work in (0.01, 20.0)]
    assert found[0].stopped_by == "work_limit"
    assert found[1].stopped_by in {"optimal", "gap", "looked_at"}
    assert found[0].best is not None
    assert found[1].best is not None
    assert found[1].best.step_ms <= found[0].best.step_ms
    assert found[0].bound_ms <= found[1].bound_ms * (1 + 1e-9)


# --- If nothing fits.


def test_if_nothing_fits_the_nearest_configuration_and_enough_gpus_are_named() -> None:
    """Less memory than the nearest lacks refuses all; so many GPUs have a schedule that fits."""
    question = asked(find_model("llama3-8b"), num_gpus=1, fixed={"tp": 1})
    assert tune(question, time_limit_s=1).best is None
    nearest, missing_bytes = nearest_configuration(question)
    for more, fits in ((missing_bytes - 1e6, False), (missing_bytes + 1e6, True)):
        enough = replace(question, memory_bytes=int(question.whole_bytes + more))
        assert (nearest_configuration(enough)[1] <= 0) is fits
    row = enough_gpus(question)
    assert row is not None
    assert row.configuration.num_gpus in (2, 4, 8)
    assert max(row.peak_bytes) <= question.usable_bytes
    assert shortage(question) == (
        f"the configuration nearest to fitting, {nearest.label}, needs at least "
        f"{missing_bytes / 2**30:.1f} GiB more per GPU; {row.configuration.num_gpus} GPUs are "
        f"enough ({row.label})"
    )


def test_where_no_number_of_gpus_is_enough_that_is_said() -> None:
    """The degrees are fixed to one rank, so more GPUs are no help; several kinds are not tried."""
    question = asked(
        find_model("llama3-8b"), num_gpus=1, fixed={"tp": 1, "pp": 1, "dp": 1, "cp": 1}
    )
    assert enough_gpus(question) is None
    assert shortage(question).endswith("is enough; allow more memory, or fix less")
