"""Never solve twice: which finished jobs answer a new one, and which give it a start."""

from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe import Problem, check_schedule, evaluate, load_schedule
from optpipe.schedule import Provenance
from optpipe.wire import Cache, JobKind, JobOptions, JobState
from optpipe_api.errors import BodyTooHeavyError
from optpipe_api.jobs import AttemptOutcome, JobError, JobEvent, JobRecord, NewJob
from optpipe_api.services.cache import MOST_CELLS, TOLERANCE, JobCache, answers, is_near
from optpipe_api.services.parse_pool import ParsePool
from optpipe_api.services.submission import solved_job
from optpipe_api.store import open_stores
from tests.api.live import make_settings, two_stages
from tests.api.serial import serial

ASKED = JobOptions(time_limit_s=10.0, work_limit=5.0, threads=2, seed=1, gap=0.01)


def two(name: str = "", **stage: Any) -> Problem:
    """The problem of `two_stages`, with other numbers in both of its stages."""
    data = two_stages(name)
    return Problem.parse(data | {"stages": [{**held, **stage} for held in data["stages"]]})


class Shelf:
    """A store with finished jobs, and what the cache finds of them."""

    def __init__(self, folder, **settings) -> None:
        self.settings = make_settings(folder, **({"cache": True} | settings))
        self.stores = open_stores(self.settings.database_url)
        self.store = self.stores.jobs
        self.pool = ParsePool()
        self.cache = JobCache(self.settings, self.store, self.pool)

    def new(self, problem: Problem, owner: str = "", **options) -> NewJob:
        return solved_job(problem, replace(JobOptions(time_limit_s=5.0), **options), owner=owner)

    def ask(self, problem: Problem, owner: str = "", **options) -> NewJob:
        return self.cache.complete(self.new(problem, owner, **options))

    def solved(
        self,
        problem: Problem,
        num_fused: int = 1,
        event: JobEvent = JobEvent.SUCCEED,
        bound_ms: float | None = 1.0,
        owner: str = "",
        **options,
    ) -> Any:
        """A job that ended with a serial schedule: the more fused backwards, the shorter."""
        self.store.add(self.new(problem, owner, **options), max_queued=99)
        claim: Any = self.store.claim("worker", 60.0)
        programs = serial(problem, num_fused)
        schedule = evaluate(problem, programs, Provenance(method="zb"), bound_ms=bound_ms)
        outcome = AttemptOutcome(
            event=event,
            schedule=schedule.model_dump_json(by_alias=True),
            objective_ms=schedule.objective_ms,
            bound_ms=bound_ms,
            method="zb",
        )
        return self.store.finish(claim.lease, outcome)

    def close(self) -> None:
        self.pool.close()
        self.stores.close()


@pytest.fixture
def shelf(tmp_path):
    with closing(Shelf(tmp_path)) as shelf:
        yield shelf


# Which answers answer


def answer_of(objective_ms: float | None, bound_ms: float | None, **options) -> JobRecord:
    return JobRecord(
        id="",
        position=1,
        state=JobState.SUCCEEDED,
        name="",
        problem_hash="",
        objective="makespan",
        options=replace(ASKED, **options),
        created_at=0.0,
        objective_ms=objective_ms,
        bound_ms=bound_ms,
    )


@pytest.mark.parametrize(
    ("had", "asked", "is_answer"),
    [
        # Found with the same budget, or with more.
        ({}, {}, True),
        ({"time_limit_s": 11.0, "threads": 3, "work_limit": None, "gap": 0.001}, {}, True),
        ({"time_limit_s": 9.0}, {}, False),
        ({"threads": 1}, {}, False),
        ({"work_limit": 4.0}, {}, False),
        ({}, {"work_limit": None}, False),
        ({"gap": 0.02}, {}, False),
        ({"seed": 2}, {}, False),
        ({"cache": "refresh"}, {}, True),
        # Proven, or close enough to what is proven: the budget does not matter.
        ({"time_limit_s": 1.0, "seed": 2, "bound_ms": 100.0}, {}, True),
        ({"time_limit_s": 1.0, "seed": 2, "bound_ms": 99.5}, {}, True),
        ({"time_limit_s": 1.0, "seed": 2, "bound_ms": 98.0}, {}, False),
        ({"time_limit_s": 1.0, "gap": 0.5, "bound_ms": 98.0}, {"gap": 0.02}, True),
        # Another method finds something else, proven or not.
        ({"method": "1f1b"}, {}, False),
        ({"method": "1f1b", "bound_ms": 100.0}, {}, False),
        ({"chunks": (1,), "bound_ms": 100.0}, {}, False),
        ({"placements": ("v",)}, {"placements": ("v",)}, True),
        # Under noise nothing is proven: the same percentile and noise, the same budget or more.
        ({"robust": "P90"}, {"robust": "P90"}, True),
        ({"robust": "P90", "jitter": 0.2}, {"robust": "P90"}, False),
        ({"robust": "P95"}, {"robust": "P90"}, False),
        ({"bound_ms": 100.0}, {"robust": "P90"}, False),
        ({"robust": "P90", "bound_ms": 100.0}, {}, False),
        ({"robust": "P90", "bound_ms": 100.0, "seed": 2}, {"robust": "P90"}, False),
        ({"jitter": 0.2}, {}, True),
    ],
)
def test_an_answer_counts_where_it_would_be_found_again(
    had: dict[str, Any], asked: dict[str, Any], is_answer: bool
) -> None:
    """The job has an objective of 100 ms, and a bound of 50 ms where nothing else is said."""
    job = answer_of(100.0, had.pop("bound_ms", 50.0), **had)
    assert answers(job, replace(ASKED, **asked)) is is_answer


def test_a_hit_is_the_other_jobs_answer_under_another_name(shelf) -> None:
    job = shelf.solved(two("first"))
    new = shelf.ask(two("second"))
    assert (new.cache, new.source_id, new.name) == (Cache.HIT, job.id, "second")
    assert new.finished == AttemptOutcome(
        event=JobEvent.SUCCEED,
        schedule=shelf.store.schedule(job.id).document,
        objective_ms=job.objective_ms,
        bound_ms=1.0,
        method="zb",
    )


def test_a_proof_that_there_is_none_is_a_hit_too(shelf) -> None:
    shelf.store.add(shelf.new(two(), time_limit_s=1.0), max_queued=9)
    error = JobError(code="problem.infeasible", message="why", needs={"d": 5})
    outcome = AttemptOutcome(event=JobEvent.PROVE_INFEASIBLE, error=error)
    shelf.store.finish(shelf.store.claim("worker", 60.0).lease, outcome)
    assert shelf.ask(two()).finished == outcome


def test_an_older_answer_counts_where_the_newest_does_not(shelf) -> None:
    job = shelf.solved(two(), time_limit_s=9.0)
    shelf.solved(two(), time_limit_s=1.0)
    assert shelf.ask(two()).source_id == job.id


@pytest.mark.parametrize("event", [JobEvent.FAIL, JobEvent.CANCEL])
def test_what_was_cut_short_is_no_answer_but_a_start(shelf, event: JobEvent) -> None:
    job = shelf.solved(two(), event=event)
    new = shelf.ask(two())
    assert (new.cache, new.source_id, new.finished) == (Cache.NEAR, job.id, None)


def test_a_bound_of_the_same_problem_comes_with_the_start(shelf) -> None:
    job = shelf.solved(two(), time_limit_s=1.0)
    start = shelf.ask(two()).start
    assert (start.objective_ms, start.bound_ms) == (job.objective_ms, 1.0)


def test_a_job_of_somebody_else_is_neither(shelf) -> None:
    shelf.solved(two(), owner="a")
    assert shelf.ask(two(), owner="b").cache is Cache.MISS
    assert shelf.ask(two(), owner="a").cache is Cache.HIT


def test_refresh_takes_neither_and_a_service_may_want_neither(shelf, tmp_path) -> None:
    shelf.solved(two())
    assert shelf.ask(two(), cache="refresh").cache is Cache.MISS
    with closing(Shelf(tmp_path, cache=False)) as other:
        assert other.ask(two()).cache is Cache.MISS


def test_a_plan_that_was_made_before_comes_with_its_problem(shelf) -> None:
    plan = replace(shelf.new(two()), kind=JobKind.PLAN, model="M", problem=None, shape_hash="")
    shelf.store.add(plan, max_queued=9)
    outcome = AttemptOutcome(
        event=JobEvent.SUCCEED, schedule="S", objective_ms=9.0, problem="P", method="plan"
    )
    shelf.store.finish(shelf.store.claim("worker", 60.0).lease, outcome)
    new = shelf.cache.complete(plan)
    assert (new.cache, new.model, new.problem, new.finished.schedule) == (Cache.HIT, "M", "P", "S")


# Which problems are near


@given(st.floats(1, 1e6), st.floats(0.5, 2))
def test_near_is_a_quarter_of_the_larger_number_and_mutual(value: float, factor: float) -> None:
    """What is near does not depend on which of the two came first."""
    a, b = {"forward_ms": value}, {"forward_ms": value * factor}
    assert is_near(a, b) is is_near(b, a)
    larger, smaller = max(value, value * factor), min(value, value * factor)
    if abs((larger - smaller) / larger - TOLERANCE) > 1e-9:
        assert is_near(a, b) is ((larger - smaller) / larger < TOLERANCE)


@pytest.mark.parametrize(
    ("changes", "near"),
    [
        ({"forward_ms": 12.5}, True),
        ({"forward_ms": 13.4}, False),
        ({"activation_bytes": 800}, True),
        ({"activation_bytes": 700}, False),
        ({"static_bytes": 1}, False),
        ({"grad_sync_ms": 0.1}, False),
        ({"backward_ms": None}, False),
    ],
)
def test_every_time_and_every_size_counts(shelf, changes, near: bool) -> None:
    shelf.solved(two())
    assert shelf.ask(two(**changes)).cache is (Cache.NEAR if near else Cache.MISS)


def test_names_do_not_count_and_links_do(shelf) -> None:
    data = two_stages() | {"links": [{"from": 0, "to": 1, "latency_ms": 1.0}]}
    shelf.solved(Problem.parse(data))
    renamed = [{**device, "name": "other", "host": "h"} for device in data["devices"]]
    assert shelf.ask(Problem.parse(data | {"devices": renamed})).cache is Cache.NEAR
    slow = data | {"links": [{"from": 0, "to": 1, "latency_ms": 2.0}]}
    assert shelf.ask(Problem.parse(slow)).cache is Cache.MISS


@pytest.mark.parametrize(
    "changes",
    [
        {"num_microbatches": 5},
        {"objective": "span"},
        {"devices": [{"memory_bytes": 4000}, {"memory_bytes": 4000}, {"memory_bytes": 4000}]},
    ],
)
def test_another_shape_is_never_near(shelf, changes: dict[str, Any]) -> None:
    shelf.solved(two())
    assert shelf.ask(Problem.parse(two_stages(**changes))).cache is Cache.MISS


def test_a_start_is_checked_and_simulated_under_the_new_problem(shelf) -> None:
    shelf.solved(two())
    problem = two(forward_ms=11)
    start = shelf.ask(problem).start
    schedule = load_schedule(start.schedule)
    check_schedule(problem, schedule)
    again = evaluate(problem, schedule.programs, Provenance(method="again"))
    assert start.objective_ms == schedule.objective_ms == again.objective_ms
    assert (start.method, start.bound_ms, schedule.bound_ms) == ("zb", None, None)


def test_programs_that_are_illegal_here_are_no_start(shelf) -> None:
    """The serial schedule holds one activation at a time, which has room in the first only."""
    shelf.solved(Problem.parse(two_stages(devices=[{"memory_bytes": 1100}] * 2)))
    for memory_bytes, expected in ((1000, Cache.NEAR), (999, Cache.MISS)):
        devices = [{"memory_bytes": memory_bytes}] * 2
        assert shelf.ask(Problem.parse(two_stages(devices=devices))).cache is expected


def test_the_best_of_the_newest_five_is_the_start(shelf) -> None:
    jobs = [
        shelf.solved(two(forward_ms=10 + n / 10), fused)
        for n, fused in enumerate((4, 1, 3, 2, 0, 1))
    ]
    new = shelf.ask(two(forward_ms=11))
    assert new.source_id == jobs[2].id


def test_large_problems_are_tried_less_and_the_largest_not_at_all(shelf) -> None:
    best = shelf.solved(two(forward_ms=10), 4)
    last = shelf.solved(two(forward_ms=10.5), 1)
    new = shelf.new(two(forward_ms=11))
    for cells, source in ((8, best), (MOST_CELLS // 2, best), (MOST_CELLS, last)):
        assert shelf.cache.complete(replace(new, num_cells=cells)).source_id == source.id
    largest = replace(new, num_cells=MOST_CELLS + 1)
    assert shelf.cache.complete(largest).cache is Cache.MISS
    assert shelf.cache.complete(new, most_tried=0).cache is Cache.MISS


def test_other_methods_get_no_start(shelf) -> None:
    shelf.solved(two(), method="1f1b")
    assert shelf.ask(two(forward_ms=11), method="1f1b").cache is Cache.MISS


def test_a_search_for_a_start_that_fails_is_done_without(shelf, monkeypatch) -> None:
    def too_heavy(*_: object) -> None:
        raise BodyTooHeavyError("5 s")

    shelf.solved(two())
    monkeypatch.setattr(shelf.pool, "run_from_thread", too_heavy)
    assert shelf.ask(two(forward_ms=11)).cache is Cache.MISS
