"""Micro-batches of several costs, in a given order or in samples: the core, and its solver."""

import importlib
import json
import random
from math import inf
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe import InputError, Problem, ProblemError, simulate
from optpipe.check import check_schedule, find_violations
from optpipe.formats.json import dump_problem
from optpipe.memory import device_peak_bytes, host_peak_bytes
from optpipe.problem import Microbatch
from optpipe.sweep import sweep
from optpipe_solver import solve
from optpipe_solver.arrays.encoding import CompiledProblem, evaluate_arrays, evaluate_by_reference
from optpipe_solver.bounds import lower_bounds
from optpipe_solver.families.classic import build_one_f_one_b, build_serial
from optpipe_solver.feasibility import feasibility, smallest_memory
from optpipe_solver.last_steps import with_device_factors
from optpipe_solver.local_search.dispatching import dispatched
from optpipe_solver.portfolio import all_starts
from optpipe_solver.reductions import orders
from optpipe_solver.replan import replan
from tests import building
from tests.building import programs
from tests.oracle import Ticking, device_peak, host_peaks, is_legal
from tests.solver.exhaustive import optimum
from tests.solver.starting import schedule_of, with_memory
from tests.strategies import Case, cases, documents, few, mutated, random_programs, tightened

OBJECTIVES = ["makespan", "span"]


@given(cases(unequal=True))
def test_times_and_bytes_are_those_of_the_oracle_and_of_compiled_code(case: Case) -> None:
    """Every cell has the times, bytes and modes of its own cost."""
    problem, rows = case
    assert find_violations(problem, rows) == []
    assert is_legal(problem, rows)
    run = simulate(problem, rows)
    assert (run.makespan_ms, run.span_ms) == pytest.approx(Ticking(problem, rows).run())
    peaks = [device_peak_bytes(problem, device, row) for device, row in enumerate(rows)]
    assert peaks == [device_peak(problem, device, row) for device, row in enumerate(rows)]
    assert host_peak_bytes(problem, rows) == host_peaks(problem, rows)
    compiled = CompiledProblem.of(problem)
    assert evaluate_arrays(compiled, rows) == evaluate_by_reference(problem, rows)
    assert evaluate_by_reference(problem, compiled.decode(compiled.encode(rows))) is not None


@given(cases(tight=True, unequal=True), st.integers(0, 2**32))
def test_spoilt_programs_are_judged_as_the_oracle_judges(case: Case, seed: int) -> None:
    """Among them those in which a given order, or that of a sample, is broken."""
    rng, compiled = random.Random(seed), CompiledProblem.of(case.problem)
    for _ in range(10):
        changed = mutated(case.programs, rng)
        found = find_violations(case.problem, changed)
        assert (not found) == is_legal(case.problem, changed), found
        assert (evaluate_arrays(compiled, changed) is not None) == (not found)


@given(documents(unequal=True))
def test_a_file_comes_back_and_keeps_its_hash(document: dict[str, Any]) -> None:
    """What is written is read as the same; costs that nobody has change nothing."""
    problem = Problem.parse(document)
    again = Problem.parse(json.loads(dump_problem(problem)))
    assert again == problem
    assert again.problem_hash == problem.problem_hash
    for stage in document["stages"]:
        stage["costs"].append(stage["costs"][0])
    assert Problem.parse(document) == problem


@given(documents(menus=True), st.integers(2, 3))
def test_equal_costs_are_what_they_were_to_the_byte(document: dict[str, Any], number: int) -> None:
    plain = Problem.parse(document)
    written = json.loads(plain.model_copy(update={"name": "x"}).model_dump_json(by_alias=True))
    if written["format"] == "optpipe/problem/v1":
        return
    for stage in written["stages"]:
        stage["costs"] *= number
    written["microbatches"] = [{"cost": j % number} for j in range(plain.num_microbatches)]
    read = Problem.parse(written | {"name": plain.name})
    assert dump_problem(read) == dump_problem(plain)
    assert read.problem_hash == plain.problem_hash


@given(cases(unequal=True, tight=True))
def test_no_schedule_is_below_a_bound(case: Case) -> None:
    problem, rows = case
    reached = simulate(problem, rows).objective_ms(problem.objective)
    assert problem.has_samples or feasibility(problem).plan is not None
    assert not feasibility(problem).needs
    for bound in lower_bounds(problem):
        assert bound.ms <= reached * (1 + 1e-9), bound


def batch(
    costs: list[int], *, p: int = 4, order: str = "free", room: int = 400, chunks: int = 1
) -> Problem:
    """A line or loop; cost c takes c + 1 times as long and as many bytes as cost 0."""
    kinds = [
        {
            "forward_ms": 2.0 * n,
            "backward_input_ms": 2.5 * n,
            "backward_weight_ms": 1.5 * n,
            "activation_bytes": 20 * n,
            "weight_context_bytes": 10 * n,
        }
        for n in range(1, max(costs) + 2)
    ]
    return building.problem(
        [{"device": s % p, "costs": kinds} for s in range(p * chunks)],
        [{"memory_bytes": room}] * p,
        len(costs),
        format="optpipe/problem/v2",
        microbatches=[{"cost": cost} for cost in costs],
        order=order,
    )


@pytest.mark.extended
@given(st.permutations([0, 2]), st.sampled_from(["free", "given"]), st.sampled_from([60, 70, 80]))
@few(4)
def test_small_batches_are_solved_to_the_least_of_all_programs(
    costs: list[int], order: str, room: int
) -> None:
    problem = batch(costs, p=2, order=order, room=room)
    least = optimum(problem)
    found = schedule_of(problem, work_limit=0.1, time_limit_s=600)
    check_schedule(problem, found)
    assert all(bound.ms <= least * (1 + 1e-9) for bound in lower_bounds(problem))
    assert found.makespan_ms == pytest.approx(least)


COSTS = [0, 4, 1, 0, 3, 0, 0, 2, 1, 4, 0, 1]


@pytest.mark.parametrize(("order", "chunks"), [("free", 1), ("given", 1), ("free", 2)])
def test_replan_is_legal_repeatable_and_never_longer_than_1f1b(order: str, chunks: int) -> None:
    problem = batch(COSTS, order=order, chunks=chunks)
    found = replan(problem)
    check_schedule(problem, found)
    assert found == replan(problem)
    assert simulate(problem, found.programs).makespan_ms == pytest.approx(found.makespan_ms)
    assert found.bound_ms is not None
    assert found.bound_ms <= found.makespan_ms
    if chunks == 1:
        usual = build_one_f_one_b(problem.alike(0))
        assert found.makespan_ms <= simulate(problem, usual).makespan_ms


@given(cases(tight=True, unequal=True), st.integers(0, 2**32))
def test_dispatching_rules_make_legal_programs(case: Case, seed: int) -> None:
    """With any chunks, links, limits, menus and orders; how long they say it takes is true."""
    problem = case.problem
    if problem.has_samples:
        problem = problem.model_copy(
            update={"microbatches": [{"cost": cost} for cost in problem.cost_of]}
        )
    compiled = CompiledProblem.of(problem)
    found = dispatched(compiled, orders(problem), 2_000, seed)
    if found is None:
        return
    found_programs = compiled.decode(found.rows)
    assert find_violations(problem, found_programs) == []
    reached = simulate(problem, found_programs).objective_ms(problem.objective)
    assert found.objective_ms == pytest.approx(reached)
    unknown = found.rule._replace(mode=found.rule.mode + 9)
    again = dispatched(compiled, orders(problem), 0, seed, [unknown, found.rule])
    assert again is not None
    assert again.objective_ms == found.objective_ms
    assert dispatched(compiled, orders(problem), 0, seed, [unknown]) is None


LEARNING = {"_LIKE_WORK": 0.03, "_SHAPE_WORK": 0.03, "_SHARES": (1.0,), "_LEARN_WORK": 300_000}
"""So little of what a first call does that it takes no second."""


def quick(monkeypatch: pytest.MonkeyPatch, **more: Any) -> Any:
    """Return the module of `replan`, whose first calls are quick."""
    module = importlib.import_module("optpipe_solver.replan")
    for name, value in (LEARNING | more).items():
        monkeypatch.setattr(module, name, value)
    return module


@pytest.mark.parametrize(("order", "chunks"), [("given", 1), ("free", 2)])
def test_rules_are_learned_from_batches_of_the_run(
    order: str, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best on average of all batches, none twice, and tried on a batch before it is searched.

    Of one that fits no memory nothing is learned.
    """
    module = quick(monkeypatch, _MOST_LEARNED=3)

    def of(costs: list[int], room: int = 120) -> Problem:
        return batch(costs, order=order, room=room * chunks, chunks=chunks)

    def length_of(like: Problem, rule: Any) -> float:
        places = list(range(12))
        if order == "free":  # the rule's ranks are by length, and higher costs are longer
            longest = sorted(places, key=lambda j: -like.cost_of[j])
            places = [int(rule.rank[longest.index(j)]) for j in places]
        ranked = rule._replace(rank=np.array(places))
        found = dispatched(CompiledProblem.of(like), orders(like), 0, 0, [ranked])
        return inf if found is None else found.objective_ms

    named = [of(COSTS[::-1]), of([4, 0, 0] * 4), of([0, 1] * 6)]
    rules = [rule for like in named for rule in module._searched(like)]
    lengths = [[length_of(like, rule) for like in named] for rule in rules]
    least = [min(column) for column in zip(*lengths, strict=True)]
    ratings = {
        tuple(row): sum(min(2.0, a / b) for a, b in zip(row, least, strict=True)) for row in lengths
    }
    wanted = sorted(ratings, key=ratings.__getitem__)[:3]
    learned = module._learned([*named, of(COSTS, room=85)])
    assert [tuple(length_of(like, rule) for like in named) for rule in learned] == wanted
    problem = of(COSTS)
    compiled = CompiledProblem.of(problem)
    ((_, length_ms, rows),) = module._ruled(compiled, learned, 0, 0)
    assert find_violations(problem, compiled.decode(rows)) == []
    assert length_ms == pytest.approx(length_of(problem, learned[0]))  # no work for more than one
    ((_, length_ms, _),) = module._ruled(compiled, learned, 48 * chunks * 11 * 9, 0)
    assert length_ms <= min(length_of(problem, rule) for rule in learned)
    with monkeypatch.context() as patch:
        tried: list[int] = []
        patch.setattr(module, "dispatched", lambda *given: tried.append(len(given[4])))
        assert list(module._ruled(compiled, learned, 2 * 3 * 48 * chunks * 11, 0)) == []
        assert tried == [2, 0]  # a third of the work, then from anywhere, as none was usable
    found = replan(problem, like=named)
    check_schedule(problem, found)
    assert found == replan(problem, like=named)


@pytest.mark.parametrize("room", [120, 160, 400])
def test_replan_is_near_a_longer_solve(room: int) -> None:
    """Within 4% of one of half a second: 0% with room, 3.4% in the middle."""
    problem = batch(COSTS, room=room)
    longer = schedule_of(problem, work_limit=0.3, time_limit_s=600)
    assert replan(problem).makespan_ms <= longer.makespan_ms * 1.04


def test_where_copies_pay_batches_of_the_run_are_dealt_into(monkeypatch: Any) -> None:
    """The rules copy nothing: about 256 ms without them, 211 ms with them, of other costs, too.

    Never longer than what is known of it where it is the same batch in another order.
    """
    module = quick(monkeypatch)

    def packed(costs: list[int], *, again: bool = False) -> Problem:
        data = json.loads(dump_problem(batch(costs, room=130)))
        for device in data["devices"]:
            device |= {"d2h_gb_per_s": 2e-5, "h2d_gb_per_s": 2e-5}
        for stage in data["stages"]:
            for number, kind in enumerate(stage["costs"], 1):
                mode: dict[str, Any] = {"name": "offload", "offload_bytes": 20 * number}
                if again:
                    mode = {"name": "again", "recompute": "apart", "recompute_ms": 1.0}
                kind["modes"] = [{"name": "keep"}, mode]
        return Problem.parse(data)

    problem = packed(COSTS)
    found = replan(problem, like=packed([*COSTS[:2], *COSTS[1:-1]]))
    check_schedule(problem, found)
    assert found.makespan_ms < 0.95 * replan(problem).makespan_ms
    check_schedule(problem, replan(problem, like=packed([0, 1] * 6)))
    turned = packed(COSTS[::-1])
    compiled = CompiledProblem.of(turned)
    _, programs = module._solved(module._plain(turned))
    least_ms = min(map(compiled.objective_ms, programs))
    for like in (turned, [packed([0, 1] * 6), turned]):
        assert replan(problem, like=like, work=3_000).makespan_ms <= least_ms + 1e-6
    tried, share = _tried(module, problem, turned)
    assert tried == []
    assert share == pytest.approx(module._DEALT_SHARE)
    kept = batch(COSTS, room=160)
    tried, share = _tried(module, kept, kept)
    num_rules = len(module._known_of(module._TrainingRun.of([kept])).rules)
    # The learned rules, then a search with what they leave of a half of the work.
    assert tried == [0, 15_000 - num_rules * 48 * 11]
    assert num_rules > 1
    assert share == pytest.approx(1 - module._RULES_SHARE)
    misses = module._searched.cache_info().misses
    found = replan(packed([4] * 11 + [0]), like=turned)
    assert found.provenance.start_method == "zb-greedy"  # so rules are tried as well
    assert module._searched.cache_info().misses == misses  # all was learned in the first call
    with pytest.raises(InputError, match="like: has 11 micro-batches, the problem 12"):
        replan(problem, like=packed(COSTS[:-1]))
    with pytest.raises(InputError, match="modes, by number, offload and recompute otherwise"):
        replan(problem, like=packed(COSTS, again=True))
    data = json.loads(dump_problem(packed(COSTS, again=True)))
    for kind in (kind for stage in data["stages"] for kind in stage["costs"]):
        kind["modes"][1]["name"] = "recompute"  # as v1 has it: number 2 instead of 1
    with pytest.raises(InputError, match="modes, by number, offload and recompute otherwise"):
        replan(packed(COSTS, again=True), like=Problem.parse(data))
    with pytest.raises(InputError, match="like: has 129 batches; name 128 at most"):
        replan(problem, like=[turned] * 129)
    data = json.loads(dump_problem(problem))
    again = {"name": "again", "recompute": "apart", "recompute_ms": 1.0}
    data["stages"][0]["costs"][-1]["modes"][1] = again
    mixed = Problem.parse(data)
    with pytest.raises(InputError, match="costs do not do the same by position"):
        replan(mixed, like=mixed)


def _tried(module: Any, problem: Problem, like: Problem) -> tuple[list[int], float]:
    """Return the work of each search of rules, and the share of all work that annealing has."""
    ruled, shares, cool = [], [], module._cool

    def counted(table: Any, start_ms: float, work: int, *others: Any) -> Any:
        shares.append(work / 30_000)
        return cool(table, start_ms, work, *others)

    with pytest.MonkeyPatch.context() as patch:
        module._known_of(module._TrainingRun.of([like]))
        patch.setattr(module, "dispatched", lambda *args: ruled.append(args))
        patch.setattr(module, "_cool", counted)
        replan(problem, like=like, work=30_000)
    return [work for _, _, work, *_ in ruled], sum(shares)


def test_what_only_recomputation_fits_is_replanned_at_once() -> None:
    """No stand-in is solved: a rule gives stages the mode that fits."""
    data = json.loads(dump_problem(batch(COSTS, room=130)))
    for stage in data["stages"]:
        for number, kind in enumerate(stage["costs"], 1):
            modes = [{"name": "keep"}]
            again = {"name": "again", "forward_bytes": 2 * number, "recompute": "apart"}
            kind["modes"] = [*modes, {**again, "recompute_ms": 2.0 * number}]
    problem = Problem.parse(data)
    found = replan(problem)
    check_schedule(problem, found)
    assert found.provenance.start_method == "dispatching rules"
    assert found.makespan_ms < replan(batch(COSTS, room=130)).makespan_ms


def test_a_free_order_is_used() -> None:
    """Equal work, one order given and one free."""
    free, bound = (
        schedule_of(batch(COSTS, order=order, room=120), work_limit=0.5, time_limit_s=600)
        for order in ("free", "given")
    )
    assert free.makespan_ms < bound.makespan_ms


def test_device_factors_reach_every_cost() -> None:
    slower = with_device_factors(batch(COSTS), [2.0, 1.0, 1.0, 1.0])
    assert [stages[0].forward_ms for stages in slower.stages_by_cost] == [
        4.0, 8.0, 12.0, 16.0, 20.0
    ]  # fmt: skip


def test_a_sweep_varies_every_cost() -> None:
    """Limits and menus of all; a field of one cost by its path, and no number of micro-batches."""
    data = json.loads(dump_problem(batch(COSTS)))
    for kind in (kind for stage in data["stages"] for kind in stage["costs"]):
        kind["modes"] = [
            {"name": "keep"},
            {"name": "offload", "offload_bytes": 5},
            {"name": "recompute", "forward_bytes": 2, "recompute": "apart", "recompute_ms": 1.0},
        ]
    data["devices"] = [{**one, "d2h_gb_per_s": 1, "h2d_gb_per_s": 1} for one in data["devices"]]
    problem = Problem.parse(data)
    path = "stages[1].costs[2].forward_ms"
    axes: dict[str, list[Any]] = {
        "memory_gb": [1e-6],
        "offload": [False],
        "recompute": [True, False],
        path: [99.0],
    }
    first, second = (one.problem for one in sweep(problem, axes))
    assert first.cost_of == second.cost_of == problem.cost_of
    assert [device.memory_bytes for device in first.devices] == [1000] * 4
    assert [len(menu) for menus in first.menus_by_cost for menu in menus] == [2] * 20
    assert [len(menu) for menus in second.menus_by_cost for menu in menus] == [1] * 20
    changed = [stage.forward_ms for stage in first.stages_by_cost[2]]
    assert changed == [6.0 if s != 1 else 99.0 for s in range(4)]
    with pytest.raises(InputError, match="12 entries, and num_microbatches is 8"):
        sweep(problem, {"num_microbatches": [8]})


def test_what_fits_no_memory_says_the_least_that_does() -> None:
    result = solve(batch(COSTS, room=90), time_limit_s=5)
    assert result.needs["devices[0].memory_bytes"] == 100


def sliced(problem: Problem, *sizes: int) -> Problem:
    """The batch with its micro-batches, one after the other, in samples of so many."""
    numbers = [sample for sample, size in enumerate(sizes) for _ in range(size)]
    pairs = zip(problem.cost_of, numbers, strict=True)
    slices = [Microbatch(cost=cost, sample=number) for cost, number in pairs]
    return problem.model_copy(update={"format": "optpipe/problem/v2", "microbatches": slices})


def test_slices_keep_their_turns() -> None:
    problem = batch([0, 0, 1], p=1)
    cut = sliced(problem, 3)
    assert cut.problem_hash != problem.problem_hash
    assert find_violations(cut, programs("0F0 0F1 0F2 0B2 0B1 0B0")) == []
    for bad, code in (
        ("0F1 0F0 0F2 0B2 0B1 0B0", "order.forward"),
        ("0F0 0F1 0F2 0B1 0B2 0B0", "order.backward"),
    ):
        assert [one.code for one in find_violations(cut, programs(bad))] == [code]
    with pytest.raises(ValueError, match="pairs beside samples"):
        cut.model_copy(update={"pairs": [{"forward": 0, "backward": 0, "hidden_ms": 1.0}]})


@st.composite
def sliced_cases(draw: st.DrawFn, *, most: int = 3) -> Case:
    """Samples of up to four slices on up to three devices, under just the memory of programs."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=most))
    costs = [draw(st.integers(0, 2)) for size in sizes for _ in range(size)]
    order = draw(st.sampled_from(["free", "given"]))
    problem = batch(costs, p=draw(st.integers(1, 3)), order=order, chunks=draw(st.integers(1, 2)))
    problem = sliced(
        problem.model_copy(update={"objective": draw(st.sampled_from(OBJECTIVES))}), *sizes
    )
    rng = random.Random(draw(st.integers(0, 2**32)))
    return tightened(Case(problem, random_programs(problem, rng)))


@few(20)
@given(sliced_cases())
def test_starts_of_slices_are_legal_and_above_all_bounds(case: Case) -> None:
    """Memory is just that of some programs: what fits them is never called too little."""
    problem = case.problem
    assert not feasibility(problem).needs
    found = [one for one in all_starts(problem) if one.programs is not None]
    assert {"serial"} <= {one.method for one in found}
    for one in found:
        rules = {fault.code for fault in find_violations(problem, one.programs or ())}
        assert rules <= (set() if one.legal else {"memory.device", "memory.host"}), one.method
    lengths = [one.objective_ms for one in found if one.legal]
    lengths.append(simulate(problem, case.programs).objective_ms(problem.objective))
    assert max(bound.ms for bound in lower_bounds(problem)) <= min(lengths) * (1 + 1e-9)


def test_samples_of_different_sizes_share_the_mode_of_a_stage() -> None:
    """A single slice alone would recompute, two slices would not; uniform_modes allows one mode."""
    again = {"name": "again", "forward_bytes": 10, "recompute": "apart", "recompute_ms": 1.0}
    modes = [{"name": "keep"}, again]
    given = building.problem(
        [building.stage(0, activation_bytes=60, modes=modes, uniform_modes=True)],
        [{"memory_bytes": 120}],
        3,
        format="optpipe/problem/v2",
        microbatches=[{"cost": 0, "sample": 0}, {"cost": 0, "sample": 0}, {"cost": 0}],
    )
    assert {fault.code for fault in find_violations(given, build_serial(given))} == {"mode.uniform"}
    (start,) = all_starts(given, ("serial",))
    assert start.legal
    assert find_violations(given, start.programs or ()) == []


@given(sliced_cases())
def test_samples_need_all_their_slices_at_once(case: Case) -> None:
    """Here just so much: with a byte less on one device nothing fits, and that much is said."""
    least = smallest_memory(case.problem)
    assert all(a <= d.memory_bytes for a, d in zip(least, case.problem.devices, strict=True))
    tight = with_memory(case.problem, least)
    assert find_violations(tight, build_serial(tight)) == []
    if case.problem.order == "free":
        found = feasibility(with_memory(case.problem, [least[0] - 1, *least[1:]]))
        assert found.plan is None
        assert found.needs == {"devices[0].memory_bytes": least[0]}


@given(sliced_cases(most=2))
@few(6)
def test_solve_keeps_the_turns_of_slices(case: Case) -> None:
    found = schedule_of(case.problem, work_limit=0.05, time_limit_s=600)
    check_schedule(case.problem, found)
    assert found.bound_ms is not None
    assert found.bound_ms <= found.objective_ms * (1 + 1e-9)


@pytest.mark.extended
@given(st.sampled_from([(2,), (2, 1)]), st.sampled_from([60, 90, 120]))
@few(4)
def test_small_samples_are_solved_to_the_least_of_all_programs(
    sizes: tuple[int, ...], room: int
) -> None:
    problem = sliced(batch([0, 1, 0][: sum(sizes)], p=2, room=room), *sizes)
    least, result = optimum(problem), solve(problem, work_limit=0.2, time_limit_s=600)
    assert (result.schedule is None) == (least == inf)
    if result.schedule is not None:
        assert result.schedule.makespan_ms == pytest.approx(least)


@given(documents(menus=True))
def test_one_slice_is_none(document: dict[str, Any]) -> None:
    plain = Problem.parse(document)
    cut = {"microbatches": [{"sample": j} for j in range(plain.num_microbatches)]}
    if document["format"] == "optpipe/problem/v2":
        assert dump_problem(Problem.parse(document | cut)) == dump_problem(plain)


@pytest.mark.parametrize(
    ("name", "chunks", "n", "ahead"),
    [("seq1f1b", 1, 4, 1), ("seq1f1b", 1, 6, 1), ("slimpipe", 1, 8, 2), ("slimpipe", 2, 8, 2)],
)
def test_slices_in_flight_and_bubble_are_as_published(
    name: str, chunks: int, n: int, ahead: int
) -> None:
    """Device r holds n v + 1 or 2 times (p - 1 - r) slices; idle (p - 1)(F + B)/(n v)."""
    p, problem = 4, sliced(batch([0] * 3 * n, chunks=chunks, room=10**6), *[n] * 3)
    (start,) = (one for one in all_starts(problem, (name,)) if one.programs is not None)
    rows = start.programs or ()
    slices = [device_peak_bytes(problem, at, row) // 20 for at, row in enumerate(rows)]
    assert slices == [n * chunks + ahead * (p - 1 - rank) for rank in range(p)]
    assert start.objective_ms == pytest.approx((3 * n * chunks + p - 1) * 6.0)


def test_a_fault_in_another_cost_says_which() -> None:
    data = json.loads(dump_problem(batch([0, 1])))
    data["stages"][2]["costs"][1]["forward_ms"] = -1
    with pytest.raises(ProblemError, match=r"^stages\[2\]\.costs\[1\]\.forward_ms = -1"):
        Problem.parse(data)
    schema = json.dumps(Problem.model_json_schema())
    assert '"costs"' in schema
    assert '"other_costs"' not in schema
