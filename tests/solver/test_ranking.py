"""What is better among schedules of equal objective, and how long they take under noise."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import example, given

from optpipe import InputError, Problem, Programs, check, simulate
from optpipe.memory import modes_of
from optpipe.schedule import Pass
from optpipe.simulate import duration_ms
from optpipe_solver.arrays.encoding import KINDS
from optpipe_solver.incumbent import Incumbent
from optpipe_solver.ranking import Noise, NoisyTimes
from tests.building import UNIT, bus, problem, programs, stage
from tests.strategies import Case, cases, few

LAYERS = {"transformer": 1}


def with_modes() -> Problem:
    """Two micro-batches of one stage: keep, move half, or recompute for no time to speak of."""
    moved = {"name": "half", "offload_bytes": 5}
    again = {"name": "again", "recompute": "inside", "recompute_ms": 1e-10}
    cost = {k: v for k, v in stage().items() if k != "device"}
    staged = {"device": 0, "costs": [{**cost, "modes": [{"name": "keep"}, moved, again]}]}
    return problem([staged], [bus(memory_bytes=100, d2h_gb_per_s=1e9, h2d_gb_per_s=1e9)], m=2,
                   format="optpipe/problem/v2")  # fmt: skip


FULL = programs("0F0 0F1 0I0 0W0 0I1 0W1")
LEAN = programs("0F0 0I0 0W0 0F1 0I1 0W1")
AGAIN = programs("0F0@2 0I0 0W0 0F1 0I1 0W1")
MOVED = programs("0F0@1 0OFFLOAD0 0RELEASE0 0RELOAD0 0I0 0W0 0F1 0I1 0W1")


@pytest.mark.parametrize("order", list(permutations((LEAN, AGAIN, MOVED, FULL))))
def test_of_equals_the_one_stays_that_fills_moves_and_recomputes_least(
    order: tuple[Programs, ...],
) -> None:
    """Peaks first, then bytes moved, then recomputation, in whatever order they are offered."""
    best = Incumbent(with_modes())
    ranks = [LEAN, AGAIN, MOVED, FULL]
    for number, offered in enumerate(order, start=1):
        check(best.problem, offered)
        best.offer(offered, "made", expected_ms=6.0)
        assert best.programs == min(order[:number], key=ranks.index)
    assert best.objective_ms == pytest.approx(6.0, rel=1e-9)


def test_no_byte_buys_time() -> None:
    """What is longer by more than rounding never replaces what is shorter, however lean."""
    best = Incumbent(problem([stage(0, layers=LAYERS), stage(1, layers=LAYERS)], m=2))
    last = "1F0 1I0 1W0 1F1 1I1 1W1"
    assert best.offer(programs("0F0 0F1 0I0 0W0 0I1 0W1", last), "short")
    assert not best.offer(programs("0F0 0I0 0W0 0F1 0I1 0W1", last), "lean")


def test_in_v1_the_first_one_stays() -> None:
    """Results of v1 are as they were, and nothing is asked of noise."""
    best = Incumbent(problem([stage()], m=2))
    assert best.offer(FULL, "full")
    assert not best.offer(LEAN, "lean")
    assert best.programs == FULL


def test_in_v1_whatever_is_shorter_goes_first() -> None:
    """By less than counts in v2, and with more memory."""
    best = Incumbent(problem([stage(recompute_ms=1e-10, checkpoint_bytes=10)], m=2))
    assert best.offer(programs("0F0 0RECOMPUTE0 0I0 0W0 0F1 0I1 0W1"), "lean")
    assert best.offer(FULL, "shorter")
    assert best.objective_ms == 6.0


def _late(m: int) -> tuple[Problem, Programs, Programs]:
    """Equal programs but for the order of two devices' weight gradients, which wait for nobody."""
    given = problem([stage(0, layers=LAYERS), stage(1, layers=LAYERS)], m=m)
    ahead = programs("0F0 0F1 0I0 0F2 0I1 0W0 0I2 0W1 0W2", "1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2")
    behind = programs("0F0 0F1 0I0 0F2 0I1 0W1 0I2 0W0 0W2", "1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2")
    return given, ahead, behind


def test_of_all_else_equal_the_one_stays_that_noise_delays_least() -> None:
    """The 95th percentile decides, whichever is offered first; else it is not asked."""
    given, one, other = _late(m=3)
    noisy = NoisyTimes(given)
    late = {offered: noisy.percentile(offered) for offered in (one, other)}
    assert late[one] != late[other]
    for order in ((one, other), (other, one)):
        best = Incumbent(given)
        for offered in order:
            best.offer(offered, "made")
        assert best.programs == min(late, key=lambda offered: late[offered])


def test_noise_is_asked_only_between_equals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of families there are dozens, of draws hundreds."""
    monkeypatch.setattr(NoisyTimes, "lengths", lambda *_: pytest.fail("drawn"))
    best = Incumbent(with_modes())
    for offered in (FULL, MOVED, AGAIN, LEAN, LEAN):
        best.offer(offered, "made")
    assert best.programs == LEAN


def _queueing() -> Case:
    """Messages of 5 ms behind passes of 1 ms."""
    link = {"from": 0, "to": 1, "bandwidth_gb_per_s": 1.0}
    stages = [stage(0, layers=LAYERS, output_bytes=5 * UNIT), stage(1, layers=LAYERS)]
    given = problem(stages, m=3, links=[link])
    rows = (f"{s}F0 {s}F1 {s}F2 {s}I0 {s}I1 {s}I2 {s}W0 {s}W1 {s}W2" for s in (0, 1))
    return Case(given, programs(*rows))


@few(30)
@given(cases(menus=True))
@example(_queueing())
def test_under_noise_programs_take_what_the_simulator_says(case: Case) -> None:
    """Draw by draw, to the last bit: actions, messages on lanes or not, slow devices."""
    given, noise = case.problem, Noise(jitter=0.3, stragglers=0.2, num_draws=3, seed=5)
    cells, m = len(given.stages) * given.num_microbatches, given.num_microbatches
    num_actions = len(KINDS) * cells
    draw = np.random.default_rng(5)
    expected = []
    for _ in range(3):
        drawn = draw.uniform(-1.0, 1.0, num_actions + 2 * cells + len(given.devices))
        own, shared = 1 + 0.3 * drawn[:num_actions], 1 + 0.2 * drawn[num_actions + 2 * cells :]
        messages = 1 + 0.3 * drawn[num_actions : num_actions + 2 * cells]
        durations = {}
        for device, program in enumerate(case.programs):
            modes = modes_of(given, program)
            for action in program:
                ms = duration_ms(given, action, modes[action.cell])
                at = KINDS.index(action.type) * cells + action.stage * m + action.microbatch
                slow = 1.0 if action.type.is_transfer else shared[device]
                durations[action] = ms * own[at] * slow
        factors = {
            Pass(bool(way), stage, j): messages[way * cells + stage * m + j]
            for way in (0, 1)
            for stage in range(len(given.stages))
            for j in range(m)
        }
        run = simulate(given, case.programs, durations, factors)
        expected.append(run.objective_ms(given.objective))
    noisy = NoisyTimes(given, noise)
    assert noisy.lengths(case.programs).tolist() == expected
    assert noisy.percentile(case.programs, 90.0) == np.percentile(expected, 90.0)


def test_draws_are_the_same_whether_they_are_kept_or_drawn_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Large problems' factors take too much memory to be kept."""
    given, one, other = _late(m=3)
    kept = [NoisyTimes(given).lengths(offered).tolist() for offered in (one, other)]
    monkeypatch.setattr("optpipe_solver.ranking._MOST_KEPT", 0)
    noisy = NoisyTimes(given)
    assert [noisy.lengths(offered).tolist() for offered in (one, other)] == kept
    assert noisy._kept == []


@pytest.mark.parametrize("fields", [{"jitter": 1.0}, {"stragglers": -0.1}, {"num_draws": 0}])
def test_noise_is_refused_by_name(fields: dict[str, float]) -> None:
    """Value, rule, fix."""
    (name,) = fields
    with pytest.raises(InputError, match=rf"noise\.{name} = "):
        Noise(**fields)  # type: ignore[arg-type]
