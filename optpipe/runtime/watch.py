"""Detects a rank that failed, hangs or died, and ends all ranks with the same cause.

Each rank runs a watchdog thread next to its training thread. Twice a second the watchdog writes a
heartbeat into the store of the process group: the state of its rank, and since when. It reads the
heartbeats of the ranks that exchange messages with its own rank, and the *cause*. There is one
cause, the first that any rank writes:

* A rank that raises writes its error.
* A rank that is in one action for longer than ``hang_timeout_s`` writes that it hangs. It gets
  twice that time if a copy of its stage is late, because the two may reduce gradients together.
  On CUDA, events before and after every action show the progress of the device, not of the host.
* A rank whose connections break first waits, because its neighbour may be dead. A dead neighbour
  writes no heartbeats. Without a broken connection the heartbeat timeout is longer.

If the store does not answer, the process that hosts it is dead. A failed rank ends only after all
ranks have read the cause, because it may host the store.

A rank may still be inside a step when there is a cause. The watchdog then aborts the connections,
if the backend can (NCCL). The device continues with undefined data, so a step ends with a check for
a cause. If the rank stays inside the step, the watchdog ends the process.
"""

from __future__ import annotations

import faulthandler
import json
import math
import os
import sys
import threading
import time
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist

from optpipe.errors import RankError
from optpipe.runtime.preflight import describe, gather
from optpipe.runtime.torch_names import backends, default_store
from optpipe.schedule import ActionType

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.distributed import ProcessGroup
    from torch.distributed.distributed_c10d import Store

    from optpipe.schedule import Action

__all__ = [
    "EXIT_CODE",
    "Activity",
    "Cause",
    "CauseStore",
    "DeviceMarks",
    "Watchdog",
    "watch_over",
]

EXIT_CODE = 70
"""The exit code of a process that its watchdog ends."""

_BUSY = frozenset(kind for kind in ActionType if kind.is_compute) - {ActionType.RECOMPUTE}
"""The actions that count as busy in bubble rates; recomputation and copies are overhead."""


# --- The state of the training thread; an update costs little more than an assignment.


class ActionState(NamedTuple):
    """The running action, or the last one while the rank waits; None before the first action.

    ``since`` is a time of `time.monotonic`, in seconds.
    """

    action: Action | None
    is_computing: bool
    since: float


class DeviceMarks:
    """CUDA events at the start and end of actions, which show the progress of the device."""

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device = device
        self._cuda = cuda
        self._events: list[Any] = []
        self.clear()

    def clear(self) -> None:
        """Remove all marks, before a step."""
        self._num_recorded = 0
        self._last_seen = (-1, 0.0)

    def record(self) -> None:
        """Record an event that the device passes after all work issued so far."""
        if self._num_recorded == len(self._events):
            self._events.append(self._cuda.Event(enable_timing=True))
        self._events[self._num_recorded].record(self._cuda.current_stream(self._device))
        self._num_recorded += 1

    def wait(self) -> None:
        """Wait until the device has passed the last mark."""
        self._events[self._num_recorded - 1].synchronize()

    def count_passed(self) -> tuple[int, float]:
        """Return how many marks the device has passed, and when this method first saw that."""
        recorded = self._num_recorded
        count = next((n for n in range(recorded) if not self._events[n].query()), recorded)
        if count != self._last_seen[0]:
            self._last_seen = (count, time.monotonic())
        return self._last_seen

    def ms_after(self, index: int) -> float:
        """Return the time from an event to the next one, both of which the device has passed."""
        return float(self._events[index].elapsed_time(self._events[index + 1]))


class Activity:
    """The state of a rank: the training thread writes it, the watchdog thread reads it.

    A *phase* is a step, or anything else that all ranks do together.
    """

    def __init__(self, marks: DeviceMarks | None = None) -> None:
        self.marks = marks
        self.phase = "the start"
        self.num_started = self.num_ended = self.num_actions = 0
        self.now = ActionState(None, False, time.monotonic())
        self._states: list[ActionState] = []

    @property
    def is_in_phase(self) -> bool:
        """Whether a phase is running."""
        return self.num_started > self.num_ended

    def enter(self, phase: str) -> None:
        """Start a phase."""
        self.phase = phase
        self.num_actions = 0
        self.now = ActionState(None, False, time.monotonic())
        self._states = []
        if self.marks is not None:
            self.marks.clear()
        self.num_started += 1

    def leave(self) -> None:
        """End the phase."""
        self.num_ended = self.num_started
        self.now = ActionState(None, False, time.monotonic())

    def begin(self, action: Action) -> None:
        """Start an action; its inputs have arrived."""
        self.num_actions += 1
        self._set(ActionState(action, True, time.monotonic()))

    def end(self) -> None:
        """End the action; the rank now waits for messages."""
        self._set(ActionState(self.now.action, False, time.monotonic()))

    def wait_for_device(self) -> None:
        """Wait until the device has finished the phase."""
        if self.marks is not None:
            self.end()
            self.marks.wait()

    def busy_ms(self) -> float:
        """Return how long F, I, W and B ran since `enter`; call it after `wait_for_device`.

        Two passes of a pair that run together count once. On a GPU it is the time on the device,
        between the marks that the watchdog needs anyway.
        """
        total, running = 0.0, 0
        for index, (state, following) in enumerate(pairwise(self._states)):
            if state.action is not None and state.action.type in _BUSY:
                running += 1 if state.is_computing else -1
            if running > 0:
                host_ms = 1e3 * (following.since - state.since)
                total += host_ms if self.marks is None else self.marks.ms_after(index)
        return total

    def current_state(self, patience_s: float) -> ActionState:
        """Return the state of the host, or of the device if the host is idle for ``patience_s``.

        An earlier query of an event could fail the capture of a CUDA graph.
        """
        state = self.now
        if self.marks is None or time.monotonic() - state.since < patience_s:
            return state
        count, since = self.marks.count_passed()
        passed = self._states[count - 1] if count else ActionState(None, False, 0.0)
        return passed._replace(since=since)

    def describe_state(self, state: ActionState) -> str:
        """Return a state as error messages print it."""
        if not self.is_in_phase:
            return f"after {self.phase}"
        where = "in" if state.is_computing else "waiting after"
        return self.phase if state.action is None else f"{self.phase}, {where} {state.action}"

    def _set(self, state: ActionState) -> None:
        self.now = state
        self._states.append(state)
        if self.marks is not None:
            self.marks.record()


# --- The entries of the ranks in the store.


class Cause(NamedTuple):
    """Why all ranks end: the rank at fault, and the text that every rank prints."""

    rank: int
    text: str


class Heartbeat(NamedTuple):
    """One heartbeat of a rank, which differs from the previous one in ``number``.

    ``pipeline_rank`` is the rank within its pipeline. ``num_actions`` counts the actions that the
    rank has started in its phase. ``seconds`` is the time since the rank is in this state.
    """

    number: int
    pipeline_rank: int
    num_started: int
    num_actions: int
    num_ended: int
    state: str
    seconds: float


_NO_CAUSE = "-"


class CauseStore:
    """The heartbeats of the ranks and the cause, on a separate connection to the store.

    Ranks are global, because several pipelines that train copies of a model share one cause. The
    ranks of a group agree on ``runner``, a number.

    Every method raises RuntimeError if the store does not answer.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        peers: Sequence[int],
        *,
        runner: int,
        pipeline_rank: int,
        world_size: int,
    ) -> None:
        self.rank = rank
        self.pipeline_rank = pipeline_rank
        self.peers = tuple(peers)
        self._store = store
        self._heartbeats = f"optpipe/{runner}/heartbeat"
        self._key = f"optpipe/{runner}/cause"
        self._read_key = f"{self._key}/read"
        self._world_size = world_size
        self._num_heartbeats = 0
        store.compare_set(self._key, "", _NO_CAUSE)
        self.write_heartbeat(Activity(), ActionState(None, False, time.monotonic()))

    def write_heartbeat(self, activity: Activity, state: ActionState) -> None:
        """Write the next heartbeat of this rank."""
        self._num_heartbeats += 1
        counts = activity.num_started, activity.num_actions, activity.num_ended
        words, seconds = activity.describe_state(state), round(time.monotonic() - state.since, 1)
        heartbeat = Heartbeat(self._num_heartbeats, self.pipeline_rank, *counts, words, seconds)
        self._store.set(f"{self._heartbeats}/{self.rank}", json.dumps(heartbeat))

    def read(self) -> tuple[Cause | None, dict[int, Heartbeat]]:
        """Return the cause, if there is one, and the last heartbeat of each peer."""
        keys = [self._key, *(f"{self._heartbeats}/{rank}" for rank in self.peers)]
        cause, *texts = self._store.multi_get(keys)
        heartbeats = (Heartbeat(*json.loads(text)) for text in texts)
        return _parse_cause(cause), dict(zip(self.peers, heartbeats, strict=True))

    def read_others(self) -> list[Heartbeat]:
        """Return the last heartbeat of each other rank, of all pipelines."""
        ranks = (rank for rank in range(self._world_size) if rank != self.rank)
        keys = [f"{self._heartbeats}/{rank}" for rank in ranks]
        found = self._store.multi_get([key for key in keys if self._store.check([key])])
        return [Heartbeat(*json.loads(text)) for text in found]

    def claim(self, cause: Cause) -> Cause:
        """Write a cause if there is none, and return the one in the store."""
        first = self._store.compare_set(self._key, _NO_CAUSE, json.dumps(cause))
        return _parse_cause(first) or cause

    def acknowledge(self) -> None:
        """Count this rank as one that has read the cause; the rank at fault is not counted."""
        self._store.add(self._read_key, 1)

    def count_acknowledged(self) -> int:
        """Return how many ranks have read the cause."""
        return self._store.add(self._read_key, 0)


def _parse_cause(text: bytes) -> Cause | None:
    return None if text == _NO_CAUSE.encode() else Cause(*json.loads(text))


# --- The watchdog thread.


class Watchdog:
    """Watches every phase of a rank in a thread: ``with watch.over("step 3"):``.

    The heartbeat timeout of a peer is ``short_timeout_s`` if connections of this rank broke, and
    ``long_timeout_s`` otherwise, as over NCCL. If the rank is still inside a phase ``grace_s / 2``
    after there is a cause, the watchdog calls ``abort_connections``. After ``grace_s`` it calls
    ``end_process`` with the message, and whether this rank is at fault.
    """

    def __init__(
        self,
        store: CauseStore,
        activity: Activity,
        abort_connections: Callable[[], None],
        end_process: Callable[[str, bool], None],
        *,
        hang_timeout_s: float,
        poll_s: float = 0.5,
        short_timeout_s: float = 2.0,
        long_timeout_s: float = 30.0,
        grace_s: float = 4.0,
    ) -> None:
        self.cause: Cause | None = None
        self._store = store
        self._activity = activity
        self._abort_connections = abort_connections
        self._end_process = end_process
        self._hang_timeout_s = hang_timeout_s
        self._poll_s = poll_s
        self._short_timeout_s = short_timeout_s
        self._long_timeout_s = long_timeout_s
        self._grace_s = grace_s
        self._heartbeats: dict[int, tuple[Heartbeat, float]] = {}
        """The last heartbeat of each peer, and when this rank first read it."""
        self._store_lost_at = math.inf
        self._connections_broke = False
        self._is_failing = False
        self._lock = threading.Lock()
        self._has_cause = threading.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="optpipe-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Write a last heartbeat, which shows that this rank is done, and end the thread.

        The interpreter aborts if it ends while the thread waits for the store. The thread itself
        may call this, because Python may collect a runner in it.
        """
        if not self._stopped.is_set():
            self._stopped.set()
            if self._store_lost_at == math.inf:
                with suppress(RuntimeError):
                    self._store.write_heartbeat(self._activity, self._activity.now)
        if threading.current_thread() is not self._thread:
            self._thread.join(self._grace_s)

    @contextmanager
    def over(self, what: str, *, shared: tuple[type[Exception], ...] = ()) -> Iterator[None]:
        """Watch a phase, and end it on all ranks if one fails.

        Errors of the types in ``shared`` are raised by all ranks alike, so they are no cause.

        Raises
        ------
        RankError
            If another rank is at fault, even if the phase seems to have succeeded.
        """
        self._raise_if_cause()
        self._activity.enter(what)
        try:
            yield
            self._activity.wait_for_device()
        except shared:
            raise
        except Exception as error:  # noqa: BLE001 - always raised again
            self._fail(error)
        else:
            self._raise_if_cause()
        finally:
            self._activity.leave()

    def _raise_if_cause(self) -> None:
        if self._activity.marks is not None and self.cause is None:
            # The device may only have continued because another rank aborted the connections.
            self._find_cause(self._poll_store)
        if self.cause is not None:
            self._wait_until_read()
            raise RankError(self._message_of(self.cause))

    def _fail(self, error: Exception) -> NoReturn:
        """Raise the error, or RankError if another rank is at fault."""
        state, text = self._activity.now, describe(error)
        where = self._activity.describe_state(state)
        own = Cause(self._store.rank, f"rank {self._store.rank}, {where}: {text}")
        # An action may communicate, too, when it reduces gradients. torch wraps what it raises.
        words = ("dist", "gloo", "nccl", "connection closed", "connection reset")
        if isinstance(error, RuntimeError) and (
            not state.is_computing or any(word in text.lower() for word in words)
        ):
            self._connections_broke = True
            self._has_cause.wait(self._short_timeout_s + 4 * self._poll_s)
        self._is_failing = True
        if self.cause is None:
            self._find_cause(lambda: self._store.claim(own))
        cause = self.cause or own
        self._wait_until_read()
        self._is_failing = False
        self._abort_connections()
        if cause.rank != own.rank:
            raise RankError(self._message_of(cause)) from error
        error.add_note(f"raised on rank {own.rank}, {where}; it ends all ranks of the pipeline")
        raise error

    def _message_of(self, cause: Cause) -> str:
        is_other = cause.rank != self._store.rank
        reason = "another rank failed, so " if is_other else ""
        return f"{reason}this rank cannot continue: {cause.text}"

    def _wait_until_read(self) -> None:
        """Wait until all other ranks have read the cause; give up soon, as one may be dead."""
        deadline = time.monotonic() + self._short_timeout_s
        with suppress(RuntimeError):
            num_others = len(self._store.read_others())
            while time.monotonic() < deadline and self._store.count_acknowledged() < num_others:
                time.sleep(self._poll_s / 10)

    def _run(self) -> None:
        stuck_since = math.inf
        is_aborted = False
        while not self._stopped.wait(self._poll_s):
            if self.cause is None:
                self._find_cause(self._poll_store)
            if self.cause is None or self._is_failing or not self._activity.is_in_phase:
                stuck_since = math.inf
                continue
            stuck_since = min(stuck_since, time.monotonic())
            stuck_s = time.monotonic() - stuck_since
            if stuck_s > self._grace_s / 2 and not is_aborted:
                is_aborted = True
                self._abort_connections()
            if stuck_s > self._grace_s:
                self._wait_until_read()
                self._end_process(self._message_of(self.cause), self.cause.rank == self._store.rank)
                return

    def _find_cause(self, find: Callable[[], Cause | None]) -> None:
        """Set the cause to the one that ``find`` returns; a store that fails may be one, too."""
        with self._lock:
            if self.cause is not None:
                return
            try:
                self.cause = find()
                if self.cause is not None and self.cause.rank != self._store.rank:
                    self._store.acknowledge()
            except RuntimeError:
                self._store_lost_at = min(self._store_lost_at, time.monotonic())
                self.cause = self.cause or self._blame_store_host()
            if self.cause is not None:
                self._has_cause.set()

    def _poll_store(self) -> Cause | None:
        """Write a heartbeat, read those of the peers, and return the cause, if there is one."""
        if self._store_lost_at < math.inf:
            return self._blame_store_host()
        state = self._activity.current_state(self._hang_timeout_s / 2)
        self._store.write_heartbeat(self._activity, state)
        cause, heartbeats = self._store.read()
        now = time.monotonic()
        for rank, heartbeat in heartbeats.items():
            if rank not in self._heartbeats or self._heartbeats[rank][0] != heartbeat:
                self._heartbeats[rank] = (heartbeat, now)
        if cause is None and (suspected := self._suspect(state)) is not None:
            cause = self._store.claim(suspected)
        return cause

    def _suspect(self, state: ActionState) -> Cause | None:
        """Return the fault that this rank detects in itself or in a peer, if any."""
        activity, own = self._activity, self._store.rank
        if not activity.is_in_phase:
            return None
        seconds, timeout_s = time.monotonic() - state.since, self._hang_timeout_s
        where = f"rank {own}, {activity.describe_state(state)}"
        if state.is_computing and not self._connections_broke:
            if seconds < timeout_s or (seconds < 2 * timeout_s and self._is_ahead_of_copy()):
                return None
            return Cause(own, f"{where}: no progress for {seconds:.0f} s")
        if (silent := self._longest_silent()) is not None:
            return silent
        if seconds < timeout_s:
            return None
        for rank, (beat, _) in self._heartbeats.items():
            is_away = beat.num_started == beat.num_ended < activity.num_started
            if is_away and beat.seconds > timeout_s:
                return Cause(
                    rank,
                    f"rank {rank}, {beat.state}: did not start {activity.phase} within "
                    f"{beat.seconds:.0f} s",
                )
        if seconds < 2 * timeout_s:
            return None
        return Cause(own, f"{where}: has waited for {seconds:.0f} s")

    def _is_ahead_of_copy(self) -> bool:
        """Whether the same stage of another pipeline has started fewer actions than this rank."""
        own = self._activity.num_started, self._activity.num_actions
        others = self._store.read_others()
        copies = (beat for beat in others if beat.pipeline_rank == self._store.pipeline_rank)
        return any((beat.num_started, beat.num_actions) < own for beat in copies)

    def _longest_silent(self) -> Cause | None:
        """Return the peer whose heartbeat has timed out, if this rank still needs it."""
        now = time.monotonic()
        timeout_s = self._short_timeout_s if self._connections_broke else self._long_timeout_s
        silent = [
            (now - read_at, rank, beat)
            for rank, (beat, read_at) in self._heartbeats.items()
            if now - read_at > timeout_s and beat.num_ended < self._activity.num_started
        ]
        if not silent:
            return None
        seconds, rank, beat = max(silent)
        return Cause(
            rank,
            f"rank {rank}: its process is dead or frozen, there was no heartbeat for "
            f"{seconds:.0f} s; last seen {beat.state}",
        )

    def _blame_store_host(self) -> Cause | None:
        """Return the host of the store as the cause, if this rank still needs that process."""
        activity = self._activity
        host = self._heartbeats.get(0)
        is_done = host is not None and host[0].num_ended >= activity.num_started
        if self._store.rank == 0 or is_done or not activity.is_in_phase:
            return None
        state = activity.current_state(self._long_timeout_s / 2)
        waited_s = time.monotonic() - max(self._store_lost_at, state.since)
        if not self._connections_broke and (state.is_computing or waited_s < self._long_timeout_s):
            return None
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return Cause(-1, "the launcher is dead: the store that it hosts does not answer")
        return Cause(0, "rank 0: its process is dead, the store that it hosts does not answer")


def watch_over(
    group: ProcessGroup | None,
    messages: ProcessGroup | None,
    placement: Sequence[int],
    activity: Activity,
    hang_timeout_s: float,
) -> Watchdog:
    """Return the watchdog of this rank of a pipeline; all ranks of the group call this together."""
    members = dist.get_process_group_ranks(group)
    # A connection of its own, which no long wait of others holds up.
    store: Store = default_store().clone()  # type: ignore[attr-defined]
    rank = dist.get_rank()
    store.set_timeout(timedelta(seconds=30))
    count = store.add(f"optpipe/runners/{rank}", 1)
    own = dist.get_rank(group)
    neighbours = {
        other for pair in pairwise(placement) if own in pair for other in pair if other != own
    }
    # Rank 0 may host the store.
    peers = {members[one] for one in neighbours} | ({0} & set(members) - {rank})
    causes = CauseStore(
        store,
        rank,
        sorted(peers),
        runner=max(gather(count, group)),
        pipeline_rank=own,
        world_size=dist.get_world_size(),
    )

    def abort_connections() -> None:
        for one in {group, messages}:
            if dist.Backend.NCCL in backends(one).values():
                (one or dist.group.WORLD).abort()  # type: ignore[union-attr]

    def end_process(message: str, is_at_fault: bool) -> None:
        sys.stderr.write(f"optpipe: {message}\n")
        if is_at_fault:
            faulthandler.dump_traceback()
        sys.stderr.flush()
        os._exit(EXIT_CODE)

    return Watchdog(causes, activity, abort_connections, end_process, hang_timeout_s=hang_timeout_s)
