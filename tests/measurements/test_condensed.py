"""Medians alone say the same of a problem as everything that was measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from optpipe import Device, Problem, Stage
from optpipe.measurements import DeviceFacts, Measurements, Sample, Transfer

if TYPE_CHECKING:
    from optpipe.measurements import MeasuredAction

ACTIONS: tuple[MeasuredAction, ...] = ("F", "I", "W", "B")
TIMES = st.floats(0.001, 100.0)
STAGE = {"forward_ms": 1, "backward_input_ms": 1, "backward_weight_ms": 1, "activation_bytes": 1}
BASE = Problem(
    num_microbatches=2,
    devices=(Device(memory_bytes=9),) * 2,
    stages=(Stage(device=0, **STAGE), Stage(device=1, **STAGE)),
)
SAMPLES = st.builds(Sample, stage=st.integers(0, 1), action=st.sampled_from(ACTIONS), time_ms=TIMES)
TRANSFERS = st.builds(
    Transfer,
    source=st.just(0),
    target=st.just(1),
    num_bytes=st.sampled_from((10, 2000, 500_000)),
    time_ms=TIMES,
)


@given(st.lists(SAMPLES, min_size=1, max_size=30), st.lists(TRANSFERS, max_size=9))
def test_the_problem_stays_the_same(samples: list[Sample], transfers: list[Transfer]) -> None:
    whole = Measurements(
        source="a test",
        samples=tuple(samples),
        transfers=tuple(transfers),
        placement=(0, 1),
        devices=(DeviceFacts(d2h_gb_per_s=3.0),),
    )
    kept = whole.condensed()
    assert kept.problem(base=BASE).problem_hash == whole.problem(base=BASE).problem_hash
    assert kept.devices == whole.devices
    assert kept.condensed() == kept
    assert len(kept.samples) == len({(one.stage, one.action) for one in samples})
    assert len(kept.transfers) == len({one.num_bytes for one in transfers})
