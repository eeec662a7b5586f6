"""What hides in a pair: two passes in phases on two lanes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe import Problem, find_violations, simulate
from optpipe.errors import InputError
from optpipe.planning import Machine, Training, estimate, find_gpu, find_model
from optpipe.planning.estimate import Estimate
from optpipe.planning.layer_profile import LanePhase, PassPhases, profile_layers
from optpipe.planning.overlap import most_hidden, together_ms
from optpipe_solver import solve

H100 = find_gpu("h100")


def ticked(first: list[LanePhase], second: list[LanePhase]) -> int:
    """The least time by trying, tick by tick, who goes on: either, both, or nobody."""
    jobs = [[phase for phase in job for _ in range(int(phase.ms))] for job in (first, second)]
    begins = [
        {sum(int(phase.ms) for phase in job[:n]) for n in range(len(job))}
        for job in (first, second)
    ]
    states, now = {(0, 0)}, 0
    while (len(jobs[0]), len(jobs[1])) not in states:
        following = set()
        for state in states:
            # A phase that has begun goes on; one that has not may wait.
            moves = [
                [1] if at < len(job) and at not in starts else [0, 1] if at < len(job) else [0]
                for at, job, starts in zip(state, jobs, begins, strict=True)
            ]
            for a in moves[0]:
                for b in moves[1]:
                    both = a and b
                    if not both or jobs[0][state[0]].exchanges != jobs[1][state[1]].exchanges:
                        following.add((state[0] + a, state[1] + b))
        states, now = following, now + 1
    return now


phases = st.lists(st.builds(LanePhase, st.integers(1, 4).map(float), st.booleans()), max_size=5)


@given(phases, phases)
def test_two_passes_take_the_least_over_all_interleavings(
    first: list[LanePhase], second: list[LanePhase]
) -> None:
    assert together_ms(tuple(first), tuple(second)) == ticked(first, second)
    assert together_ms(tuple(second), tuple(first)) == ticked(first, second)


computed, exchanged = st.floats(0.01, 5.0), st.floats(0.0, 5.0)


@given(
    st.lists(
        st.tuples(computed, exchanged, computed, exchanged, exchanged, computed),
        min_size=2,
        max_size=4,
    ),
    st.data(),
)
def test_pairs_hide_no_more_than_the_most_of_either_pass(kinds, data) -> None:
    """Of any layers in any number, with experts or, where nothing is exchanged, without."""
    layers = [
        PassPhases(
            (
                LanePhase(a),
                LanePhase(x, exchanges=True),
                LanePhase(b),
                LanePhase(y, exchanges=True),
            ),
            (),
            (
                LanePhase(z, exchanges=True),
                LanePhase(c),
                LanePhase(z, exchanges=True),
                LanePhase(a),
            ),
        )
        for a, x, b, y, z, c in kinds
    ]
    hidden = most_hidden(layers)
    cut = st.lists(st.integers(0, len(layers) - 1), min_size=1, max_size=4).map(sorted)
    ahead, behind = data.draw(cut), data.draw(cut)
    forward = tuple(phase for i in ahead for phase in layers[i].forward)
    back = tuple(phase for i in reversed(behind) for phase in layers[i].backward)
    saved = sum(phase.ms for phase in forward + back) - together_ms(forward, back)
    assert saved <= sum(hidden[i][0] for i in ahead) + 1e-9
    assert saved <= sum(hidden[i][1] for i in behind) + 1e-9


def of_qwen(*, pairs: bool = True, **options: object) -> Estimate:
    """Qwen3-235B on a V of four devices with memory enough, eight ranks for the experts."""
    training = Training(tp=2, ep=8, dp=4, sequence=4096, **options)  # type: ignore[arg-type]
    return estimate(
        find_model("qwen3-235b-a22b"), H100, training, pp=4, num_microbatches=10, chunks=2,
        placement="v", memory_bytes=10**12, pairs=pairs,
    )  # fmt: skip


def test_experts_exchange_hides_and_the_rest_of_the_problem_is_what_it_was() -> None:
    """And the solver makes use of it: shorter than any schedule without pairs."""
    found = of_qwen()
    assert found.problem.model_copy(update={"pairs": ()}) == of_qwen(pairs=False).problem
    # Reading it again checks that nothing hides more than the shorter of two passes.
    given = Problem.parse(found.problem.model_dump(mode="json", by_alias=True))
    assert given == found.problem
    both = {(one.forward, one.backward, one.with_) for one in given.pairs}
    assert both == {
        (a, b, letter) for own in given.stages_of for a in own for b in own for letter in "BI"
    }
    assert min(one.hidden_ms for one in given.pairs) > 0
    schedule = solve(given, time_limit_s=600, work_limit=0.2).schedule
    assert schedule is not None
    assert find_violations(given, schedule.programs) == []
    alone = given.model_copy(update={"pairs": ()})
    least = solve(alone, time_limit_s=600, work_limit=0.2).bound_ms
    assert least is not None
    assert any(action.paired for row in schedule.programs for action in row)
    assert simulate(given, schedule.programs).makespan_ms < least


@pytest.mark.parametrize(("dispatch", "there"), [("bf16", 1 / 2), ("fp8", 1 / 3)])
def test_phases_are_the_layer_and_the_exchange_is_divided_as_its_bytes(dispatch, there) -> None:
    shape, training = find_model("qwen3-235b-a22b"), Training(tp=2, ep=8, dp=4, dispatch=dispatch)
    profile = profile_layers(shape, Machine(H100, H100.efficiency, training))[1]
    forward, back, weight = profile.times
    found = profile.phases
    parts = (found.forward, sum(forward)), (found.backward_input, sum(back))
    for phases, whole in (*parts, (found.backward, sum(back) + sum(weight))):
        assert sum(phase.ms for phase in phases) == pytest.approx(whole)
    exchanges = [phase.ms for phase in found.forward if phase.exchanges]
    assert exchanges == pytest.approx([there * forward.experts, (1 - there) * forward.experts])


@pytest.mark.parametrize("sequence", [512, 2048, 8192, 32768])
@pytest.mark.parametrize("graphs", [False, True])
def test_no_pair_is_shorter_than_the_launches_of_its_passes(sequence, graphs) -> None:
    """One thread of the host launches both; captured, the exchange may hide in full."""
    shape = find_model("qwen3-30b-a3b")
    training = Training(
        ep=8, dp=8, sequence=sequence, dispatcher="deduplicated", cuda_graphs=graphs
    )
    found = estimate(
        shape, H100, training, pp=2, chunks=2, placement="loop", num_microbatches=4, pairs=True
    )
    launches = sum(Machine(H100, H100.efficiency, training).launches_ms(shape, shape.kinds[0][0]))
    problem = found.problem
    for pair in problem.pairs:
        one, other = problem.stages[pair.forward], problem.stages[pair.backward]
        assert one.layers is not None
        assert other.layers is not None
        number = one.layers.transformer
        if number == other.layers.transformer and pair.with_ == "B":
            together = one.forward_ms + other.fused_backward_ms - pair.hidden_ms
            assert together >= number * launches - 1e-3
    if graphs or sequence == 32768:
        assert problem.pairs


def test_what_has_nothing_to_hide_is_refused() -> None:
    with pytest.raises(InputError, match="has no experts"):
        estimate(find_model("llama3-8b"), H100, Training(), pp=4, num_microbatches=8, pairs=True)
    with pytest.raises(InputError, match="each hides the exchange"):
        of_qwen(ep_overlap=True)
    with pytest.raises(InputError, match="every device has all experts"):
        estimate(
            find_model("qwen3-235b-a22b"), H100, Training(), pp=4, num_microbatches=8, pairs=True
        )
