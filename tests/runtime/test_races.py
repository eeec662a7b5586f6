"""Copies, slots and messages on a recording device: no race, and every missing wait is one."""

import pytest

from tests.runtime import recording, schedules

MICROBATCHES = 4
NUM_SCHEDULES = 100
_PER_RUN = 2
_AT_EVERY_CHANGE = 2
"""Schedules of the tests that run at every change; ``make test-long`` has all."""

_PLACEMENTS = (schedules.LINEAR, schedules.V_SHAPE, schedules.LOOP, schedules.IRREGULAR)


def _case(seed: int, num_microbatches: int = MICROBATCHES):
    problem = schedules.make_problem(_PLACEMENTS[seed % 4], num_microbatches)
    offload = (1.0, 0.5, 0.7)[seed % 3]
    programs = schedules.random_programs(problem, seed, offload=offload, recompute=0.2)
    return schedules.make_schedule(problem, programs), problem, seed


@pytest.mark.parametrize(
    "start",
    [
        pytest.param(start, marks=[pytest.mark.extended] if start >= _AT_EVERY_CHANGE else [])
        for start in range(0, NUM_SCHEDULES, _PER_RUN)
    ],
)
def test_random_schedules_have_no_race_and_right_data(ranks, start):
    cases = [_case(seed) for seed in range(start, start + _PER_RUN)]
    for found in zip(*ranks.run(recording.train_all_watched, cases), strict=True):
        assert [one.findings for one in found] == [[]] * 4
        assert all(one.data_right for one in found)
        assert sum(one.offloaded_bytes for one in found) > 0


# That the detector sees anything at all, of copies, slots and messages.
_MUTATIONS_AT_EVERY_CHANGE = {
    "OFFLOAD does not wait for compute",
    "the slot is given back at RELOAD",
    "receives are not waited for",
}


@pytest.mark.parametrize(
    "mutation",
    [
        pytest.param(
            name, marks=[] if name in _MUTATIONS_AT_EVERY_CHANGE else [pytest.mark.extended]
        )
        for name in recording.MUTATIONS
        if name
    ],
)
def test_every_missing_wait_is_found(ranks, mutation):
    # Of four micro-batches no send has to be waited for: what comes back says that it is over.
    count = 12 if mutation in recording.OF_MESSAGES else MICROBATCHES
    schedule, problem, seed = _case(0, num_microbatches=count)
    found = ranks.run(recording.train_watched, schedule, problem, seed, mutation, 1)
    assert any(one.findings for one in found)
