"""The critical path: pieces that follow one another and make the length."""

import math
from itertools import pairwise

from hypothesis import given

from optpipe.explain.reasons import Piece, critical_path, runs_of
from optpipe.memory import modes_of
from optpipe.schedule import Action, parse_action
from optpipe.simulate import duration_ms, simulate
from tests.building import bus, offloadable, problem, programs, stage
from tests.strategies import Case, cases, inexact_cases


def path_of(given_problem, rows) -> tuple[Piece, ...]:
    return critical_path(given_problem, rows, simulate(given_problem, rows))


def shown(pieces) -> list[tuple[str, int, str, float, float]]:
    return [
        (piece.kind, piece.device, str(piece.action), piece.start, piece.end) for piece in pieces
    ]


def test_a_transfer_that_waits_for_a_shared_bus_is_made_late_by_the_other_device() -> None:
    """Both offload at once; device 1 has the bus second and ends last."""
    devices = [bus(pcie_group="g"), bus(pcie_group="g")]
    given_problem = problem([offloadable(0, f=1), offloadable(1, f=0)], devices)
    rows = programs("0F0 0OFFLOAD0 0RELEASE0 0RELOAD0 0B0", "1F0 1OFFLOAD0 1RELEASE0 1RELOAD0 1B0")
    assert [item[:3] for item in shown(path_of(given_problem, rows))] == [
        ("compute", 0, "0F0"),
        ("d2h", 0, "0OFFLOAD0"),
        ("d2h", 1, "1OFFLOAD0"),
        ("h2d", 1, "1RELOAD0"),
        ("compute", 1, "1B0"),
        ("compute", 0, "0B0"),
    ]


def test_under_span_what_lies_before_the_start_is_cut_off() -> None:
    """Device 1 starts at 3.5, while 0F1, for which its second forward waits, is under way."""
    given_problem = problem(
        [stage(0, 3, 0, 0), stage(1, 1, 1, 5)],
        objective="span",
        m=2,
        links=[{"from": 0, "to": 1, "latency_ms": 0.5}],
    )
    rows = programs("0F0 0F1 0B0 0B1", "1F0 1F1 1I0 1I1 1W0 1W1")
    pieces = path_of(given_problem, rows)
    assert (
        sum(piece.end - piece.start for piece in pieces)
        == simulate(given_problem, rows).span_ms
        == 16
    )
    assert shown(pieces)[0] == ("compute", 0, "0F1", 3.5, 6)


@given(cases(menus=True) | inexact_cases())
def test_pieces_follow_one_another_sum_to_the_length_and_last_as_long_as_what_they_are(
    case: Case,
) -> None:
    run = simulate(*case)
    pieces = critical_path(*case, run)
    length = run.objective_ms(case.problem.objective)
    total = math.fsum(piece.end - piece.start for piece in pieces)
    assert math.isclose(total, length, rel_tol=1e-9, abs_tol=1e-9)
    assert all(left.end == right.start for left, right in pairwise(pieces))
    assert all(piece.kind != "queue" for piece in pieces)
    # The first may be cut.
    for piece in pieces[1:]:
        if piece.action is not None and piece.kind != "link":
            lasts = length_ms(case, piece.action)
            assert math.isclose(piece.end - piece.start, lasts, abs_tol=1e-9)


def length_ms(case: Case, action: Action) -> float:
    """How long an action lasts in the mode of its cell."""
    row = next(row for row in case.programs if action in row)
    return duration_ms(case.problem, action, modes_of(case.problem, row)[action.cell])


@given(cases(menus=True))
def test_slower_where_the_path_is_means_a_longer_schedule(case: Case) -> None:
    """One ms more for a compute action of it is one ms more of makespan, where lanes are owned."""
    if case.problem.objective == "span" or any(d.pcie_group for d in case.problem.devices):
        return
    run = simulate(*case)
    computed = [piece for piece in critical_path(*case, run) if piece.kind == "compute"]
    for piece in computed:
        assert piece.action is not None
        lasts = {piece.action: length_ms(case, piece.action) + 1}
        assert simulate(*case, lasts).makespan_ms >= run.makespan_ms + 1 - 1e-9


@given(cases(menus=True))
def test_runs_hold_every_action_of_the_path_once_and_sum_to_it(case: Case) -> None:
    pieces = critical_path(*case, simulate(*case))
    runs = runs_of(pieces)
    on_path = [
        piece.action for piece in pieces if piece.kind != "link" and piece.action is not None
    ]
    assert [action for run in runs if run.kind != "link" for action in run.actions] == on_path
    assert all(left.end_ms == right.start_ms for left, right in pairwise(runs))
    assert (runs[0].start_ms, runs[-1].end_ms) == (pieces[0].start, pieces[-1].end)
    links = sum(piece.end - piece.start for piece in pieces if piece.kind == "link")
    assert math.isclose(sum(run.link_ms for run in runs), links, abs_tol=1e-9)


def test_runs_are_what_one_device_does_and_the_way_of_one_microbatch() -> None:
    """GPipe: F of micro-batch 0 goes up, the last device turns round, B of 0 comes down."""
    stages = [stage(d) for d in range(4)]
    given_problem = problem(stages, m=4)
    rows = programs(*(" ".join(f"{d}F{j}" for j in range(4)) + " " +
                      " ".join(f"{d}B{j}" for j in range(4)) for d in range(4)))  # fmt: skip
    runs = runs_of(path_of(given_problem, rows))
    assert [(run.kind, run.devices) for run in runs] == [
        ("wave", (0, 1, 2, 3)),
        ("device", (3,)),
        ("wave", (2, 1, 0)),
        ("device", (0,)),
    ]
    assert [str(action) for action in runs[1].actions] == ["3F1", "3F2", "3F3", "3B0"]
    assert [str(action) for action in runs[3].actions] == ["0B1", "0B2", "0B3"]


def test_a_wave_goes_through_neighbouring_stages_only() -> None:
    """Stages 0 and 2 of micro-batch 0, one after the other on device 0, are no wave."""
    pieces = [
        Piece("compute", 0, parse_action("0F0"), 0, 1),
        Piece("compute", 0, parse_action("2F0"), 1, 2),
        Piece("compute", 1, parse_action("3F0"), 2, 3),
    ]
    assert [run.kind for run in runs_of(pieces)] == ["device", "device"]
