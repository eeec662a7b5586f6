"""Who is to blame, by what one rank knows; ranks are watchdogs with a store, in one process."""

import re
import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from optpipe import parse_action
from optpipe.errors import PreflightError, RankError
from optpipe.runtime.watch import Activity, Cause, CauseStore, DeviceMarks, Watchdog
from tests.runtime import cases, schedules
from tests.runtime.watching import PATIENCE_S, until

ACTION = parse_action("1F0")
NEVER = 1e9
BOOM = ValueError("boom")
BROKEN = RuntimeError("Connection closed by peer [127.0.0.1]:4711")
OTHER = "another rank failed, so this rank cannot continue: "


class _Rank:
    """One that is watched; whether its connections were cut, and how it would have ended."""

    def __init__(self, store, number, size, marks=None, pipeline_rank=None, **times):
        self.was_cut = threading.Event()
        self.had_ended = threading.Event()
        self.words = []
        self.activity = Activity(marks)
        peers = [other for other in range(size) if abs(other - number) == 1]
        known = {
            "pipeline_rank": number if pipeline_rank is None else pipeline_rank,
            "world_size": size,
        }
        self.causes = CauseStore(store, number, peers, runner=1, **known)
        self.times = {
            "hang_timeout_s": NEVER,
            "short_timeout_s": 1.0,
            "long_timeout_s": NEVER,
            "grace_s": 0.2,
        }
        self.times |= {"poll_s": 0.01} | times

    def start(self):
        self.watch = Watchdog(self.causes, self.activity, self.was_cut.set, self._end, **self.times)

    def _end(self, words, stands_still):
        self.words.append((words, stands_still))
        self.had_ended.set()

    def runs(self, body=lambda: None, what="step 3"):
        """Return what is raised where a step is that; None if nothing."""
        try:
            with self.watch.over(what):
                body()
        except (RuntimeError, ValueError) as error:
            return error
        return None

    def fails(self, error=BOOM):
        def body():
            raise error

        return self.runs(body)


@pytest.fixture
def world():
    """Return a function that starts ranks; each of them with what is special to it."""
    started: list[_Rank] = []

    def start(*special, store=None, **times):
        store = store or HashStore()
        started.extend(_Rank(store, n, len(special), **times, **s) for n, s in enumerate(special))
        for rank in started:
            rank.start()
        return started

    yield start
    for rank in started:
        rank.watch.close()
        assert not rank.watch._thread.is_alive()


def test_a_rank_stuck_in_a_step_is_cut_off_and_ended_with_the_cause(world):
    stuck, failing = world({}, {})

    def body():
        assert failing.fails() is BOOM
        assert stuck.was_cut.wait(PATIENCE_S)
        assert stuck.had_ended.wait(PATIENCE_S)

    assert isinstance(stuck.runs(body), RankError)
    assert stuck.words == [(f"{OTHER}rank 1, step 3: ValueError: boom", False)]


def test_cutting_the_connections_is_enough_where_it_frees_the_rank(world):
    """What the step then ends with is nothing to go on with."""
    stuck, failing = world({}, {}, grace_s=1)

    def body():
        failing.fails()
        assert stuck.was_cut.wait(PATIENCE_S)

    assert str(stuck.runs(body)) == f"{OTHER}rank 1, step 3: ValueError: boom"
    time.sleep(1)
    assert not stuck.had_ended.is_set()


def test_a_rank_between_its_steps_is_left_alone_and_begins_no_other(world):
    waiting, failing = world({}, {})
    failing.fails()
    time.sleep(0.5)
    assert not waiting.was_cut.is_set()
    began = []
    assert isinstance(waiting.runs(lambda: began.append(1)), RankError)
    assert not began


def test_without_a_failure_steps_go_on_and_so_do_the_beats(world):
    first, second = world({}, {}, short_timeout_s=0.5, long_timeout_s=1)
    for step in range(3):
        with first.watch.over(f"step {step}"):
            time.sleep(1.5 if step == 2 else 0.1)
    until(lambda: second.causes.read()[1][0].state == "after step 2")
    before = second.causes.read()[1][0].number
    until(lambda: second.causes.read()[1][0].number > before + 3)
    assert not first.was_cut.is_set()


def test_what_all_ranks_refuse_alike_is_no_cause(world):
    first, _ = world({}, {})
    with pytest.raises(PreflightError), first.watch.over("the start", shared=(PreflightError,)):
        raise PreflightError("too large")
    assert first.runs() is None


def test_nobody_who_fails_leaves_before_all_have_read_why(world):
    """He may hold the store."""
    failing, *others = world({}, {}, {}, poll_s=0.2)
    failing.fails()
    assert [one.watch.cause for one in others] == [failing.watch.cause] * 2


def _silence(rank):
    """Its process has died."""
    rank.causes.write_heartbeat = lambda *_: None
    rank.causes.read = lambda: (None, {})


def test_broken_connections_are_the_silent_neighbours_fault(world):
    first, dead, third, fourth = world({}, {}, {}, {})
    time.sleep(0.1)
    _silence(dead)
    error = first.fails(BROKEN)
    assert error.__cause__ is BROKEN
    assert str(error).startswith(f"{OTHER}rank 1: its process is dead or frozen")
    assert third.fails(BROKEN).args == fourth.fails().args == error.args


def test_where_no_neighbour_is_silent_they_are_this_ranks_error(world):
    first, second = world({}, {})
    assert first.fails(BROKEN) is BROKEN
    assert "rank 0, step 3: RuntimeError: Connection closed" in str(second.fails())


def test_an_error_of_an_action_is_told_at_once(world):
    first, _ = world({}, {}, short_timeout_s=60)
    error = RuntimeError("index out of range")

    def body():
        first.activity.begin(ACTION)
        raise error

    began = time.monotonic()
    assert first.runs(body) is error
    assert time.monotonic() - began < PATIENCE_S
    assert first.watch.cause == Cause(0, "rank 0, step 3, in 1F0: RuntimeError: index out of range")


def test_without_a_broken_connection_beats_must_be_missing_for_longer(world):
    first, dead = world({}, {}, long_timeout_s=1.0)
    time.sleep(0.1)
    _silence(dead)

    def body():
        time.sleep(0.5)
        assert first.watch.cause is None
        until(lambda: first.watch.cause is not None)

    assert str(first.runs(body)).startswith(f"{OTHER}rank 1: its process")


def test_who_has_left_the_step_may_be_silent(world):
    first, done = world({}, {}, short_timeout_s=0.1, long_timeout_s=0.1)
    with done.watch.over("step 0"):
        pass
    done.watch.close()
    with first.watch.over("step 0"):
        time.sleep(0.5)


def test_an_action_that_hangs_is_named_by_its_own_rank(world):
    first, hanging = world({}, {}, hang_timeout_s=0.2)

    def hangs():
        hanging.activity.begin(ACTION)
        assert hanging.had_ended.wait(PATIENCE_S)

    first.runs(lambda: hanging.runs(hangs))
    ((words, stands_still),) = hanging.words
    assert re.match(
        r"this rank cannot continue: rank 1, step 3, in 1F0: no progress for \d+ s", words
    )
    assert stands_still
    assert first.watch.cause == hanging.watch.cause


def test_an_action_that_waits_for_a_copy_of_its_stage_is_not_named(world):
    """In it gradients are reduced over both; the copy is behind, whatever keeps it there."""
    ahead, _, hanging, _ = world({}, {}, {"pipeline_rank": 0}, {}, hang_timeout_s=1)

    def waits():
        for action in (ACTION, parse_action("1B0")):
            ahead.activity.begin(action)
        time.sleep(0.5)
        hanging.runs(hangs)

    def hangs():
        hanging.activity.begin(ACTION)
        until(lambda: ahead.watch.cause is not None)

    ahead.runs(waits)
    assert ahead.watch.cause.rank == 2


def test_who_does_not_begin_the_step_is_named_by_who_waits(world):
    first, _ = world({}, {}, hang_timeout_s=0.3)
    error = first.runs(lambda: until(lambda: first.watch.cause is not None))
    assert str(error) == f"{OTHER}rank 1, after the start: did not start step 3 within 0 s"


class _StoreOfRankZero(HashStore):
    is_gone = False

    def multi_get(self, keys):
        if self.is_gone:
            raise dist.DistStoreError("connection reset")
        return super().multi_get(keys)

    def compare_set(self, *given):
        if self.is_gone:
            raise dist.DistStoreError("connection reset")
        return super().compare_set(*given)


@pytest.mark.parametrize("is_done", [False, True])
def test_with_the_store_goes_its_holder_where_it_is_still_needed(world, is_done):
    store = _StoreOfRankZero()
    holder, other = world({}, {}, store=store)

    def body():
        if is_done:
            holder.runs()
        until(lambda: 0 in other.watch._heartbeats)
        until(lambda: other.watch._heartbeats[0][0].num_ended == is_done)
        store.is_gone = True
        time.sleep(0.1)
        assert other.watch.cause is None
        raise BROKEN

    error = other.runs(body)
    assert (error is BROKEN) == is_done
    assert is_done or "rank 0: its process is dead, the store" in str(error)


class _LateEvent:
    """The device gets there when it is let go."""

    gates: dict[int, threading.Event]
    is_free: bool

    def __init__(self, enable_timing):
        self.gate = threading.Event()
        if self.is_free:
            self.gate.set()
        _LateEvent.gates[len(_LateEvent.gates)] = self.gate

    def record(self, _stream):
        """Stand in the queue."""

    def query(self):
        return self.gate.is_set()

    def synchronize(self):
        assert self.gate.wait(PATIENCE_S)


@pytest.fixture
def late():
    """Return marks on a device whose events come when a test says so, and those."""
    _LateEvent.gates, _LateEvent.is_free = {}, False
    cuda = SimpleNamespace(Event=_LateEvent, current_stream=lambda _device: None)
    yield DeviceMarks(torch.device("cpu"), cuda), _LateEvent.gates
    for gate in _LateEvent.gates.values():
        gate.set()


def test_a_step_ends_with_its_device_and_not_with_what_a_cut_connection_left(world, late):
    """Others cut their connections: the device goes on with anything, the host hears nothing."""
    marks, gates = late
    first, failing = world({"marks": marks}, {}, poll_s=0.5)

    def cut():
        until(lambda: len(gates) == 3)
        failing.fails()
        for gate in gates.values():
            gate.set()

    def body():
        first.activity.begin(ACTION)
        first.activity.end()

    thread = threading.Thread(target=cut)
    thread.start()
    assert str(first.runs(body)) == f"{OTHER}rank 1, step 3: ValueError: boom"
    thread.join()


class _TimedEvent:
    """The device gets there when its clock says so."""

    now_ms = 0.0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self, _stream):
        self.at_ms = _TimedEvent.now_ms

    def elapsed_time(self, later):
        return later.at_ms - self.at_ms


@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_rank_is_busy_while_passes_run(on_gpu, monkeypatch):
    """Copies, waiting and recomputation are none; the two of a pair run at the same time."""
    cuda = SimpleNamespace(Event=_TimedEvent, current_stream=lambda _device: None)
    activity = Activity(DeviceMarks(torch.device("cpu"), cuda) if on_gpu else None)
    now_s = [0.0]
    monkeypatch.setattr("optpipe.runtime.watch.time.monotonic", lambda: now_s[0])

    def later(ms):
        now_s[0] += ms / 1e3 / (2 if on_gpu else 1)
        _TimedEvent.now_ms += ms

    for _ in range(2):
        activity.enter("step 0")
        for cell, ms in (
            ("0F0", 1),
            ("0OFFLOAD0", 32),
            ("0RECOMPUTE1", 64),
            ("0I0", 2),
            ("0W0", 4),
        ):
            later(128)
            activity.begin(parse_action(cell))
            later(ms)
            activity.end()
        activity.begin(parse_action("0F2"))
        later(8)
        activity.begin(parse_action("0B1"))
        later(16)
        activity.end()
        later(256)
        activity.end()
        later(512)
        activity.end()  # as `finish` does
        activity.leave()
        assert activity.busy_ms() == pytest.approx(1 + 2 + 4 + 8 + 16 + 256)


@pytest.mark.parametrize(
    ("reached", "expected"),
    [
        (3, "rank 0, step 3, in 1B0: no progress"),
        (2, "rank 0, step 3, waiting after 1F0: has waited"),
    ],
)
def test_the_action_in_which_a_device_hangs_is_named_not_the_hosts(world, late, reached, expected):
    marks, gates = late
    (first,) = world({"marks": marks}, hang_timeout_s=0.3)

    def body():
        for action in (ACTION, parse_action("1B0")):
            first.activity.begin(action)
            first.activity.end()
        for number in range(reached):
            gates[number].set()
        assert first.had_ended.wait(PATIENCE_S)
        _LateEvent.is_free = True

    assert expected in str(first.runs(body))


def test_a_runner_waits_for_its_device_and_looks_before_it_returns(ranks):
    problem = schedules.make_problem(schedules.LINEAR, 4)
    schedule = schedules.make_schedule(problem, schedules.one_f_one_b(4, 4))
    for late_s, words, num_threads in ranks.run(cases.end_with_the_device, schedule):
        assert late_s >= 0.3
        assert words == "RankError: another rank failed, so this rank cannot continue: rank 9: boom"
        assert num_threads == 0


def test_a_runner_that_nobody_closed_takes_its_thread_with_it(ranks):
    """A thread that is inside the store when the interpreter ends aborts the process."""
    problem = schedules.make_problem(schedules.LINEAR, 4)
    schedule = schedules.make_schedule(problem, schedules.one_f_one_b(4, 4))
    assert ranks.run(cases.forget_a_runner, schedule) == [[]] * 4
