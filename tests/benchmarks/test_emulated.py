"""An emulated step takes at least its planned time, on any machine: its waits are the plan's."""

from dataclasses import replace

import pytest

from benchmarks.emulated import CASES, main, make_case, make_problem, measure_cases, run_steps
from optpipe import Problem, Programs, Provenance, evaluate, simulate
from optpipe.memory import modes_of
from optpipe.schedule import ActionType
from tests.runtime.ranks import start_ranks
from tests.runtime.schedules import all_offloaded

SHARE = 0.15
"""Of the planned times: a pass takes 8 to 20 ms."""


@pytest.fixture(scope="module")
def rows():
    names = ["interleaved 1F1B", "PipeOffload", "GPipe, queueing links"]
    found = list(measure_cases(2, names, num_steps=1, work=0.1, share=SHARE))
    return {row.schedule: row for row in found}


@pytest.mark.extended
def test_a_row_has_the_makespan_of_simulate_and_a_longer_measured_step(rows) -> None:
    """The rows of 1F1B to which gains refer come along."""
    assert list(rows) == [
        "1F1B", "interleaved 1F1B", "PipeOffload", "1F1B, queueing links", "GPipe, queueing links",
    ]  # fmt: skip
    for name, row in rows.items():
        problem, schedule = make_case(2, CASES[name], 0.1, share=SHARE)
        assert row.planned_ms == simulate(problem, schedule.programs).makespan_ms
        assert row.lowest_ms >= row.planned_ms
    base, gpipe = rows["1F1B, queueing links"], rows["GPipe, queueing links"]
    assert gpipe.planned_gain == 100 * (1 - gpipe.planned_ms / base.planned_ms)
    assert gpipe.measured_gain == 100 * (1 - gpipe.measured_ms / base.measured_ms)
    assert base.gain_points == 0


def exposed_copies() -> tuple[Problem, Programs]:
    """Every copy is on the critical path: a step without copies is less than half as long."""
    problem = make_problem(2, CASES["solved, offload"]._replace(kept=None), share=SHARE)
    programs = all_offloaded(problem)
    copies = (ActionType.OFFLOAD, ActionType.RELOAD)
    none = {action: 0.0 for row in programs for action in row if action.type in copies}
    planned_ms = simulate(problem, programs).makespan_ms
    assert simulate(problem, programs, none).makespan_ms < planned_ms / 2
    return problem, programs


def queueing_messages() -> tuple[Problem, Programs]:
    """Messages wait for each other: over links that carry all at once a step is a tenth shorter."""
    problem, schedule = make_case(2, CASES["GPipe, queueing links"], 0.1, share=SHARE)
    links = tuple(
        link.model_copy(update={"bandwidth_gb_per_s": None, "latency_ms": link.transfer_ms(2048)})
        for link in problem.links
    )
    free = problem.model_copy(update={"links": links})
    planned_ms = simulate(problem, schedule.programs).makespan_ms
    assert simulate(free, schedule.programs).makespan_ms < 0.9 * planned_ms
    return problem, schedule.programs


@pytest.mark.timeout(480)
def test_copies_and_messages_take_their_planned_time() -> None:
    with start_ranks(2) as ranks:
        for problem, programs in (exposed_copies(), queueing_messages()):
            schedule = evaluate(problem, programs, Provenance(method="by hand"))
            found = ranks.run(run_steps, problem, schedule, 1)
            step_s = max(rank.ended_at[0] for rank in found) - found[0].started_at[0]
            assert 1e3 * step_s >= schedule.makespan_ms
            assert len(found[-1].losses) == problem.num_microbatches


@pytest.mark.extended
def test_a_row_is_as_planned_within_3_percent_and_2_points(rows) -> None:
    row = replace(rows["GPipe, queueing links"], longer_percent=2.9, gain_points=-1.9)
    assert row.is_as_planned
    assert not replace(row, longer_percent=3.1).is_as_planned
    assert not replace(row, gain_points=-2.1).is_as_planned


@pytest.mark.extended
def test_a_solved_schedule_keeps_offloads_and_recomputes() -> None:
    problem, schedule = make_case(4, CASES["solved, menus"], 2.0)
    used = {
        problem.menus[stage][number].name
        for program in schedule.programs
        for (stage, _), number in modes_of(problem, program).items()
    }
    assert used >= {"keep", "offload", "recompute"}


@pytest.mark.extended
def test_the_command_writes_its_rows(tmp_path, capsys) -> None:
    out = tmp_path / "emulated.csv"
    main(["--ranks", "2", "--schedules", "ZB-V", "--steps", "1", "--out", str(out)])
    assert len(out.read_text().splitlines()) == 3
    assert capsys.readouterr().out.count("| 2 | ") == 2
