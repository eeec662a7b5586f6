"""If one rank fails, all end soon and all name the same one.

Beside the thread that trains every rank has one that writes a *beat* into the store through which
the ranks found each other, twice a second: what its rank does, and since when. It reads the beats
of the ranks with which its own exchanges messages, and the *cause*. There is one cause, the first
that a rank leaves:

* who raises leaves its error;
* who has been in one action for longer than ``hang_timeout_s`` leaves that: it waits for nobody,
  except a copy of its stage that reduces gradients with it, if that is behind. On CUDA events
  before and after every action say where the device is, not the host;
* whose connections break leaves nothing at once, since its neighbour may be dead: that one's beats
  stop. Without a broken connection they must be missing for longer.

If the store does not answer, the process that held it is dead. Nobody who fails leaves before all
have read the cause, for he may hold the store. Whoever then still waits in a step has his
connections cut where the backend can (NCCL), which lets the device go on with anything as data: so
a step ends with a look for a cause. Where that does not help, the process is ended.
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
from optpipe.runtime.torch_names import backends, further_connection
from optpipe.schedule import ActionType

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.distributed import ProcessGroup
    from torch.distributed.distributed_c10d import Store

    from optpipe.schedule import Action

__all__ = [
    "EXIT_CODE",
    "Activity",
    "Beat",
    "Cause",
    "CauseStore",
    "DeviceMarks",
    "Doing",
    "Watchdog",
    "cut",
    "watch_over",
]

EXIT_CODE = 70
"""Of a process that is ended because it, or another rank, failed."""

_POLL_S = 0.5
_SILENT_S = 2.0
"""For so long beats are missing of a neighbour that a rank with broken connections calls dead."""
_LONELY_S = 30.0
"""The same where no connection broke, as over NCCL."""
_GRACE_S = 4.0
_STORE_TIMEOUT = timedelta(seconds=30)
_BUSY = frozenset(kind for kind in ActionType if kind.is_compute) - {ActionType.RECOMPUTE}
"""The actions that count as busy in bubble rates; recomputation and copies are overhead."""


# --- What the thread that trains does, told to the one beside it at the price of an assignment.


class Doing(NamedTuple):
    """Inside an action or behind it, waiting (None: before the first), since a monotonic time."""

    action: Action | None
    computes: bool
    since: float


class DeviceMarks:
    """Events on the compute stream, where actions begin and end: how far the device is."""

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device = device
        self._cuda = cuda
        self._events: list[Any] = []
        self._set: list[Doing] = []
        self._seen = (-1, 0.0)

    def clear(self) -> None:
        """Begin a step."""
        self._set = []
        self._seen = (-1, 0.0)

    def set(self, doing: Doing) -> None:
        """Mark what the device does when it gets here."""
        count = len(self._set)
        if count == len(self._events):
            self._events.append(self._cuda.Event(enable_timing=True))
        self._events[count].record(self._cuda.current_stream(self._device))
        self._set.append(doing)

    def wait(self) -> None:
        """Wait until the device has passed the last mark."""
        self._events[len(self._set) - 1].synchronize()

    def ms_after(self, index: int) -> float:
        """Return the time from a mark to the next one, both of which the device has passed."""
        return float(self._events[index].elapsed_time(self._events[index + 1]))

    def seen(self) -> Doing:
        """Return what the device does since when, as far as has been seen by looking here."""
        marks = self._set
        count = next((n for n in range(len(marks)) if not self._events[n].query()), len(marks))
        if count != self._seen[0]:
            self._seen = (count, time.monotonic())
        action, computes, _ = marks[count - 1] if count else Doing(None, False, 0.0)
        return Doing(action, computes, self._seen[1])


class Activity:
    """What the thread that trains does; it writes, the one beside it reads."""

    def __init__(self, marks: DeviceMarks | None = None) -> None:
        self.marks = marks
        self.what = "the start"
        self.num_begun = self.num_left = self.num_actions = 0
        self.now = Doing(None, False, time.monotonic())
        self._done: list[Doing] = []

    @property
    def is_inside(self) -> bool:
        """Whether something is going on that all ranks do together."""
        return self.num_begun > self.num_left

    def enter(self, what: str) -> None:
        """Begin a step, or anything else that all ranks do together."""
        self.what = what
        self.num_actions = 0
        self.now = Doing(None, False, time.monotonic())
        self._done = []
        if self.marks is not None:
            self.marks.clear()
        self.num_begun += 1

    def leave(self) -> None:
        """End it."""
        self.num_left = self.num_begun
        self.now = Doing(None, False, time.monotonic())

    def begin(self, action: Action) -> None:
        """Begin an action, whose inputs are there."""
        self.num_actions += 1
        self._set(Doing(action, True, time.monotonic()))

    def end(self) -> None:
        """End it; now messages are waited for."""
        self._set(Doing(self.now.action, False, time.monotonic()))

    def finish(self) -> None:
        """Wait until the device has done all of the step."""
        if self.marks is not None:
            self.end()
            self.marks.wait()

    def busy_ms(self) -> float:
        """Return how long F, I, W and B ran since `enter`; call it after `finish`.

        Two passes of a pair that run together count once. On a GPU it is the time on the device,
        between the marks that the watchdog needs anyway.
        """
        total, running = 0.0, 0
        for index, (doing, following) in enumerate(pairwise(self._done)):
            if doing.action is not None and doing.action.type in _BUSY:
                running += 1 if doing.computes else -1
            if running > 0:
                host_ms = 1e3 * (following.since - doing.since)
                total += host_ms if self.marks is None else self.marks.ms_after(index)
        return total

    def seen(self, patience_s: float) -> Doing:
        """Return what is done; by the device, once the host has stood still for so long.

        Not before: who looks at an event while a graph is captured spoils that.
        """
        now = self.now
        if self.marks is None or time.monotonic() - now.since < patience_s:
            return now
        return self.marks.seen()

    def words(self, doing: Doing) -> str:
        """Return that as it stands in messages."""
        if not self.is_inside:
            return f"behind {self.what}"
        where = "in" if doing.computes else "waiting behind"
        return f"{self.what}, {where} {doing.action}" if doing.action is not None else self.what

    def _set(self, doing: Doing) -> None:
        self.now = doing
        self._done.append(doing)
        if self.marks is not None:
            self.marks.set(doing)


# --- What ranks leave for each other in the store.


class Cause(NamedTuple):
    """Why all ranks end: the rank to blame, and the sentence that each of them says."""

    rank: int
    text: str


class Beat(NamedTuple):
    """A sign of life: no two in a row of a rank are equal.

    ``place`` is the rank in its pipeline, ``num_actions`` are those begun in its step.
    """

    number: int
    place: int
    num_begun: int
    num_actions: int
    num_left: int
    words: str
    seconds: float


_NO_CAUSE = "-"


class CauseStore:
    """The ranks' beats and the cause, on a connection of its own.

    Ranks are those of the whole world, in which several pipelines may train copies of a model:
    they have one cause. ``runner`` is a number that the ranks of a group agree on.

    RuntimeError is raised where the store does not answer.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        peers: Sequence[int],
        *,
        runner: int,
        place: int,
        world_size: int,
    ) -> None:
        self.rank = rank
        self.place = place
        self.peers = tuple(peers)
        self._store = store
        self._beats = f"optpipe/{runner}/beat"
        self._key = f"optpipe/{runner}/cause"
        self._read_key = f"{self._key}/read"
        self._world_size = world_size
        self._num_beats = 0
        store.compare_set(self._key, "", _NO_CAUSE)
        self.beat(Activity(), "behind the start", 0.0)

    def beat(self, activity: Activity, words: str, seconds: float) -> None:
        """Give a sign of life."""
        self._num_beats += 1
        counts = activity.num_begun, activity.num_actions, activity.num_left
        beat = Beat(self._num_beats, self.place, *counts, words, round(seconds, 1))
        self._store.set(f"{self._beats}/{self.rank}", json.dumps(beat))

    def read(self) -> tuple[Cause | None, dict[int, Beat]]:
        """Return the cause, if there is one, and the last beats of the peers."""
        found = self._store.multi_get([self._key, *(f"{self._beats}/{r}" for r in self.peers)])
        beats = (Beat(*json.loads(text)) for text in found[1:])
        return _cause_of(found[0]), dict(zip(self.peers, beats, strict=True))

    def others(self) -> list[Beat]:
        """Return the last beats of all other ranks, of all pipelines."""
        keys = [f"{self._beats}/{rank}" for rank in range(self._world_size) if rank != self.rank]
        found = self._store.multi_get([key for key in keys if self._store.check([key])])
        return [Beat(*json.loads(text)) for text in found]

    def claim(self, cause: Cause) -> Cause:
        """Leave a cause, and return the first that was left."""
        first = self._store.compare_set(self._key, _NO_CAUSE, json.dumps(cause))
        return _cause_of(first) or cause

    def acknowledge(self) -> None:
        """Say that this rank has read the cause; not said by the rank to blame."""
        self._store.add(self._read_key, 1)

    def num_read(self) -> int:
        """Return how many have said so."""
        return self._store.add(self._read_key, 0)


def _cause_of(text: bytes) -> Cause | None:
    return None if text == _NO_CAUSE.encode() else Cause(*json.loads(text))


# --- The thread beside the one that trains.


class Watchdog:
    """Looks after what the ranks do together: ``with watch.over("step 3"):`` around each.

    ``end`` is called with the cause, and whether it is that this rank stands still, where it is
    still inside ``grace_s`` after there was one; after half of that its connections are cut.
    """

    def __init__(
        self,
        store: CauseStore,
        activity: Activity,
        cut_connections: Callable[[], None],
        end: Callable[[str, bool], None],
        *,
        hang_timeout_s: float,
        poll_s: float = _POLL_S,
        silent_s: float = _SILENT_S,
        lonely_s: float = _LONELY_S,
        grace_s: float = _GRACE_S,
    ) -> None:
        self.cause: Cause | None = None
        self._store = store
        self._activity = activity
        self._cut_connections = cut_connections
        self._end = end
        self._hang_timeout_s = hang_timeout_s
        self._poll_s = poll_s
        self._silent_s = silent_s
        self._lonely_s = lonely_s
        self._grace_s = grace_s
        self._beats: dict[int, tuple[Beat, float]] = {}
        self._lost_at = math.inf
        self._connections_broke = False
        self._is_leaving = False
        self._asking = threading.Lock()
        self._found = threading.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._look, name="optpipe-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Let the thread end, with a last beat by which others see that this rank is done."""
        if not self._stopped.is_set():
            self._stopped.set()
            if self._lost_at == math.inf:
                with suppress(RuntimeError):
                    self._beat(self._activity.now)

    def close(self) -> None:
        """End the thread; an interpreter that ended beside it while it asks the store would abort.

        Unless it is this thread that calls, in which Python may collect a runner, too.
        """
        self.stop()
        if threading.current_thread() is not self._thread:
            self._thread.join(self._grace_s)

    @contextmanager
    def over(self, what: str, *, shared: tuple[type[Exception], ...] = ()) -> Iterator[None]:
        """Go on together, or end together; errors that are ``shared`` all ranks raise anyway.

        Raises
        ------
        RankError
            If another rank is to blame, also where the step seems to have gone well.
        """
        self._expect_no_cause()
        self._activity.enter(what)
        try:
            try:
                yield
                self._activity.finish()
            except shared:
                raise
            except Exception as error:  # noqa: BLE001 - always raised again
                self._fail(error)
            self._expect_no_cause()
        finally:
            self._activity.leave()

    def _expect_no_cause(self) -> None:
        if self._activity.marks is not None and self.cause is None:
            # The device may have been let go by others, who cut their connections.
            self._ask(self._search)
        if self.cause is not None:
            self._wait_until_read()
            raise RankError(self._told(self.cause))

    def _fail(self, error: Exception) -> NoReturn:
        """Raise the error, or, if another rank is to blame, that one's."""
        now = self._activity.now
        where = self._activity.words(now)
        own = Cause(self._store.rank, f"rank {self._store.rank}, {where}: {describe(error)}")
        if _may_be_of_messages(error, computes=now.computes):
            self._connections_broke = True
            self._found.wait(self._silent_s + 4 * self._poll_s)
        self._is_leaving = True
        if self.cause is None:
            self._ask(lambda: self._store.claim(own))
        cause = self.cause or own
        self._wait_until_read()
        self._is_leaving = False
        self._cut_connections()
        if cause.rank != own.rank:
            raise RankError(self._told(cause)) from error
        error.add_note(f"raised on rank {own.rank}, {where}; all ranks of the pipeline end with it")
        raise error

    def _told(self, cause: Cause) -> str:
        other = "" if cause.rank == self._store.rank else "another rank failed and "
        return f"{other}this one cannot go on; {cause.text}"

    def _wait_until_read(self) -> None:
        """Stay until all other ranks know the cause, or one of them seems to be dead."""
        deadline = time.monotonic() + self._silent_s
        with suppress(RuntimeError):
            num_others = len(self._store.others())
            while time.monotonic() < deadline and self._store.num_read() < num_others:
                time.sleep(self._poll_s / 10)

    def _look(self) -> None:
        stuck_since = math.inf
        is_cut = False
        while not self._stopped.wait(self._poll_s):
            if self.cause is None:
                self._ask(self._search)
            if self.cause is None or self._is_leaving or not self._activity.is_inside:
                stuck_since = math.inf
                continue
            stuck_since = min(stuck_since, time.monotonic())
            stuck_s = time.monotonic() - stuck_since
            if stuck_s > self._grace_s / 2 and not is_cut:
                is_cut = True
                self._cut_connections()
            if stuck_s > self._grace_s:
                self._wait_until_read()
                self._end(self._told(self.cause), self.cause.rank == self._store.rank)
                return

    def _ask(self, question: Callable[[], Cause | None]) -> None:
        """Let a question find the cause; where the store does not answer, that may be one."""
        with self._asking:
            if self.cause is not None:
                return
            try:
                self.cause = question()
                if self.cause is not None and self.cause.rank != self._store.rank:
                    self._store.acknowledge()
            except RuntimeError:
                self._lost_at = min(self._lost_at, time.monotonic())
                self.cause = self.cause or self._blame_the_holder()
            if self.cause is not None:
                self._found.set()

    def _search(self) -> Cause | None:
        if self._lost_at < math.inf:
            return self._blame_the_holder()
        doing = self._activity.seen(self._hang_timeout_s / 2)
        seconds = self._beat(doing)
        cause, beats = self._store.read()
        now = time.monotonic()
        for rank, beat in beats.items():
            if rank not in self._beats or self._beats[rank][0] != beat:
                self._beats[rank] = (beat, now)
        if cause is None and (accused := self._accuse(doing, seconds)) is not None:
            cause = self._store.claim(accused)
        return cause

    def _beat(self, doing: Doing) -> float:
        """Give a sign of life; return for how long that has been done, in s."""
        activity, seconds = self._activity, time.monotonic() - doing.since
        self._store.beat(activity, activity.words(doing), seconds)
        return seconds

    def _accuse(self, doing: Doing, seconds: float) -> Cause | None:
        """Return whom this rank blames by what it knows, if anybody."""
        activity, own = self._activity, self._store.rank
        if not activity.is_inside:
            return None
        if doing.computes and not self._connections_broke:
            if seconds < self._hang_timeout_s or (
                seconds < 2 * self._hang_timeout_s and self._is_ahead_of_a_copy()
            ):
                return None
            return Cause(
                own, f"rank {own}, {activity.words(doing)}: no progress for {seconds:.0f} s"
            )
        if (silent := self._longest_silent()) is not None:
            return silent
        if seconds < self._hang_timeout_s:
            return None
        for rank, (beat, _) in self._beats.items():
            is_away = beat.num_begun == beat.num_left < activity.num_begun
            if is_away and beat.seconds > self._hang_timeout_s:
                return Cause(
                    rank,
                    f"rank {rank}, {beat.words}: has not begun {activity.what} for "
                    f"{beat.seconds:.0f} s",
                )
        if seconds < 2 * self._hang_timeout_s:
            return None
        return Cause(own, f"rank {own}, {activity.words(doing)}: waits for {seconds:.0f} s")

    def _is_ahead_of_a_copy(self) -> bool:
        """Whether this rank may wait, in an action, for the same rank of another pipeline."""
        own = self._activity.num_begun, self._activity.num_actions
        copies = (beat for beat in self._store.others() if beat.place == self._store.place)
        return any((beat.num_begun, beat.num_actions) < own for beat in copies)

    def _longest_silent(self) -> Cause | None:
        """Return the neighbour whose beats are missing for too long, if it is still needed."""
        now = time.monotonic()
        limit_s = self._silent_s if self._connections_broke else self._lonely_s
        silent = [
            (now - since, rank, beat)
            for rank, (beat, since) in self._beats.items()
            if now - since > limit_s and beat.num_left < self._activity.num_begun
        ]
        if not silent:
            return None
        seconds, rank, beat = max(silent)
        return Cause(
            rank,
            f"rank {rank}: its process is dead or stands still, there was no sign of it for "
            f"{seconds:.0f} s; last seen {beat.words}",
        )

    def _blame_the_holder(self) -> Cause | None:
        """Return the rank that held the store, where this one misses it."""
        activity = self._activity
        seen = self._beats.get(0)
        is_done = seen is not None and seen[0].num_left >= activity.num_begun
        if self._store.rank == 0 or is_done or not activity.is_inside:
            return None
        doing = activity.seen(self._lonely_s / 2)
        alone_s = time.monotonic() - max(self._lost_at, doing.since)
        if not self._connections_broke and (doing.computes or alone_s < self._lonely_s):
            return None
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return Cause(-1, "the launcher is dead: the store that it holds does not answer")
        return Cause(0, "rank 0: its process is dead, for the store that it holds does not answer")


def _may_be_of_messages(error: Exception, *, computes: bool) -> bool:
    """Whether an error may be that of a broken connection, so that another rank is to blame.

    Also inside an action, where copies of a model reduce gradients; torch wraps what it raises.
    """
    if not isinstance(error, RuntimeError):
        return False
    text = describe(error).lower()
    words = ("dist", "gloo", "nccl", "connection closed", "connection reset")
    return not computes or any(word in text for word in words)


def watch_over(
    group: ProcessGroup | None,
    messages: ProcessGroup | None,
    placement: Sequence[int],
    activity: Activity,
    hang_timeout_s: float,
) -> Watchdog:
    """Return what looks after a pipeline's steps; all ranks of the group together."""
    members = dist.get_process_group_ranks(group)
    store, rank = further_connection(), dist.get_rank()
    store.set_timeout(_STORE_TIMEOUT)
    count = store.add(f"optpipe/runners/{rank}", 1)
    own = dist.get_rank(group)
    neighbours = {
        other for pair in pairwise(placement) if own in pair for other in pair if other != own
    }
    peers = {members[one] for one in neighbours} | ({0} & set(members) - {rank})
    causes = CauseStore(
        store,
        rank,
        sorted(peers),
        runner=max(gather(count, group)),
        place=own,
        world_size=dist.get_world_size(),
    )

    def cut_all() -> None:
        for one in {group, messages}:
            cut(one)

    return Watchdog(causes, activity, cut_all, _end_process, hang_timeout_s=hang_timeout_s)


def cut(group: ProcessGroup | None) -> None:
    """End the connections of a group where the backend can."""
    if dist.Backend.NCCL in backends(group).values():
        (group or dist.group.WORLD).abort()  # type: ignore[union-attr]


def _end_process(message: str, stands_still: bool) -> None:
    sys.stderr.write(f"optpipe: {message}\n")
    if stands_still:
        faulthandler.dump_traceback()
    sys.stderr.flush()
    os._exit(EXIT_CODE)
