"""The solver process: ``python -m optpipe_api.engine.worker DESCRIPTOR SETTINGS``.

It takes a job, a problem to solve, a model to plan or a configuration to tune, tells every
improvement, tells the result, and is ready for the next; or it takes a comparison, and tells the
rows. (To start one takes a
second, which a sweep of small problems would pay for each.) It ends after an error, when it has
grown large, or when a search has left a thread behind; and at once when the server does: the end of
the connection, which ``DESCRIPTOR`` is the file of, says so.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import queue
import resource
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optpipe.errors import OptPipeError
from optpipe.evaluate import evaluate
from optpipe.formats.json import load_model, load_problem, load_schedule
from optpipe.formats.tables import dump_comparison
from optpipe.requests import TuneRequest
from optpipe.schedule import Provenance, TraceEntry
from optpipe_api.engine.processes import Message, decode, encode, limit_cpu, limit_process

if TYPE_CHECKING:
    from collections.abc import Callable

    from optpipe.problem import Problem
    from optpipe.schedule import Programs, Schedule
    from optpipe_solver import ComparisonRow, Progress, Result
    from optpipe_solver.plan import PlanResult
    from optpipe_solver.tune import TuneResult, TuneRow

__all__ = ["main"]

_BOUND_EVERY_S = 0.2
_EQUAL = 1e-9
_MOST_BYTES = 1024**3
_STATUS = Path("/proc/self/status")
_LAST_WORDS_S = 2.0
_USED_UP = 3
"""The exit code of a process that had too little memory, which a new one may have."""
_CLUSTER_POOL = "optpipe_api.engine.ray:RayTasks"
_OF_SOLVE = ("time_limit_s", "work_limit", "threads", "seed", "gap", "method")
_OF_TUNE = ("time_limit_s", "work_limit", "threads", "seed", "gap")
_OF_PLAN = ("time_limit_s", "work_limit", "threads", "seed", "chunks", "placements")


def main() -> None:
    """Serve jobs and comparisons, one after the other, over the connection that was passed on."""
    settings = json.loads(sys.argv[2])
    channel = _Channel(int(sys.argv[1]))
    limit_process(settings["memory_bytes"])
    try:
        _find(settings["solve_path"])
        _warm_up(settings)
        channel.send(Message("ready"))
        while _serve(channel, settings):
            channel.is_used = True
            channel.send(Message("ready"))
        channel.send(Message("retired"))
    except OptPipeError as error:
        channel.send(Message("error", {"code": error.code, "message": str(error)}))
    except MemoryError:
        if channel.is_used:
            # What jobs before it have left may be what was too much: the job begins anew elsewhere.
            os._exit(_USED_UP)
        channel.send(_out_of_memory(settings["memory_bytes"]))
    except Exception as error:  # noqa: BLE001 - printed, and the server is told
        traceback.print_exc()
        channel.send(_bug(error))
    # Threads of native solvers must not hold up the end.
    os._exit(0)


def _serve(channel: _Channel, settings: dict[str, Any]) -> bool:
    """Serve one job or comparison; return whether the process is as good as a new one."""
    task = channel.receive()
    limit_cpu(task.header["options"], settings["overtime_s"])
    match task.kind:
        case "compare":
            answer = _compare(channel, task, _find(settings["compare_path"]))
        case "plan":
            answer = _plan(channel, task, _find(settings["plan_path"]))
        case "tune":
            is_on_cluster = settings["engine"] == "ray" and task.header["options"]["threads"] > 1
            open_pool = _find(_CLUSTER_POOL) if is_on_cluster else None
            answer = _tune(channel, task, _find(settings["tune_path"]), open_pool)
        case _:
            answer = _solve(channel, task, _find(settings["solve_path"]))
    channel.send(answer)
    allowed = settings["memory_bytes"]
    most = _MOST_BYTES if allowed is None else min(_MOST_BYTES, allowed // 2)
    return _most_held_bytes() < most and _is_quiet(channel)


def _most_held_bytes() -> int:
    """Return the most memory that this program has held at a time.

    Linux's ``ru_maxrss`` begins with what the process that started it had held.
    """
    try:
        lines = _STATUS.read_text("utf-8").splitlines()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def _is_quiet(channel: _Channel) -> bool:
    """Whether all threads of a search have ended, a moment after it has."""
    until = time.monotonic() + _LAST_WORDS_S
    others = set(threading.enumerate()) - {threading.main_thread(), channel.listener}
    for thread in others:
        thread.join(max(0.0, until - time.monotonic()))
    return not any(thread.is_alive() for thread in others)


def _warm_up(settings: dict[str, Any]) -> None:
    """Load all code before a job comes; a process waits for one most of its life.

    Compiled or not: up to a minute of compiling must not be taken from a job's time.
    """
    if not settings["solve_path"].startswith("optpipe_solver"):
        return
    for name in ("plan_path", "compare_path", "tune_path"):
        if settings[name].startswith("optpipe_solver"):
            _find(settings[name])
    importlib.import_module("optpipe_solver.warm").warm_up()


class _Channel:
    """The connection to the server; several threads may send, and one of its own listens.

    ``stop`` is set when the server wants the running job to end; ``is_used`` says whether a job has
    ended here before.
    """

    def __init__(self, descriptor: int) -> None:
        self._connection = Connection(descriptor)
        self._lock = threading.Lock()
        self._tasks: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.stop = threading.Event()
        self.is_used = False
        self.listener = threading.Thread(target=self._listen, daemon=True)
        self.listener.start()

    def send(self, message: Message) -> None:
        try:
            with self._lock:
                self._connection.send_bytes(encode(message))
        except OSError:
            os._exit(0)

    def receive(self) -> Message:
        return self._tasks.get()

    def _listen(self) -> None:
        while True:
            try:
                message = decode(self._connection.recv_bytes())
            except (EOFError, OSError):
                os._exit(0)
            if message.kind == "stop":
                self.stop.set()
                continue
            if message.kind != "start":
                # One that came too late for the job before is not meant for this one.
                self.stop.clear()
            self._tasks.put(message)


def _find(path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


def _compare(
    channel: _Channel, task: Message, compare: Callable[..., list[ComparisonRow]]
) -> Message:
    from optpipe_solver.compare import Workload  # noqa: PLC0415 - heavy; after the limits are set

    options = task.header["options"]
    rows = compare(
        load_problem(task.document),
        time_limit_s=options["time_limit_s"],
        threads=options["threads"],
        seed=options["seed"],
        workload=Workload(**(options["workload"] or {})),
        should_stop=channel.stop.is_set,
    )
    return Message("rows", {}, dump_comparison([row.as_json() for row in rows], "json"))


def _solve(channel: _Channel, job: Message, solve: Callable[..., Result]) -> Message:
    start = load_schedule(channel.receive().document) if job.header["has_start"] else None
    problem = load_problem(job.document)
    options = job.header["options"]
    reporter = _Reporter(channel, options["seed"], problem)
    start_method = "given start" if start is None else start.provenance.method
    if start is not None and job.header["is_carried"]:
        start_method = "tighter problem"
        reporter.carry(problem, start.programs, start_method)
    result = solve(
        problem,
        **{name: options[name] for name in _OF_SOLVE},
        start=None if start is None else start.programs,
        start_method=start_method,
        **_robust(options),
        on_progress=reporter,
        should_stop=channel.stop.is_set,
    )
    return _result(result)


def _robust(options: dict[str, Any]) -> dict[str, Any]:
    if options.get("robust") is None:
        return {}
    from optpipe_solver.last_steps import Robust  # noqa: PLC0415 - heavy; after the limits are set

    noise = {name: options[name] for name in ("jitter", "stragglers", "seed")}
    return {"robust": Robust.parse(options["robust"], **noise)}


def _plan(channel: _Channel, job: Message, plan: Callable[..., PlanResult]) -> Message:
    begun = None
    if job.header["has_start"]:
        start = channel.receive()
        begun = load_problem(start.problem), load_schedule(start.document).programs
    options = job.header["options"]
    result = plan(
        load_model(job.document),
        **{name: options[name] for name in _OF_PLAN if options.get(name) is not None},
        start=begun,
        on_progress=_Reporter(channel, options["seed"]),
        should_stop=channel.stop.is_set,
    )
    return _result(result, result.problem)


def _tune(
    channel: _Channel,
    job: Message,
    tune: Callable[..., TuneResult],
    open_pool: Callable[..., Any] | None = None,
) -> Message:
    from optpipe_solver import tune as tuning  # noqa: PLC0415 - heavy; after the limits are set

    read = tuning.read_question(TuneRequest.parse(json.loads(job.document)))
    options = job.header["options"]
    start, kept = None, job.header.get("checkpoint")
    known = None if kept is None else tuning.read_checkpoint(read.question, kept)
    if job.header["has_start"]:
        last = channel.receive()
        (row, *_) = json.loads(last.header["tuned"])["rows"]
        programs = load_schedule(last.document).programs
        start = tuning.read_row(read.question, row, load_problem(last.problem), programs)
    reported: list[TuneRow] = []

    def say(text: str) -> None:
        channel.send(Message("said", {"text": text}))

    def tell(result: TuneResult) -> None:
        best = result.best
        is_better = best is not None and best not in reported[-1:]
        if best is not None and is_better:
            reported.append(best)
        else:
            say(result.certificate)
        shown = best if is_better else None
        header = {"seconds": result.seconds, **_words_of(result), "tuned": _text_of(result)}
        header["objective_ms"] = None if shown is None else shown.step_ms
        header["checkpoint"] = tuning.checkpoint_of(result)
        schedule = None if shown is None else _simulated(shown, options["seed"])
        problem = None if shown is None else shown.problem
        channel.send(Message("progress", header, _text(schedule), _text(problem)))

    result = tune(
        read.question,
        current=read.current,
        **{name: options[name] for name in _OF_TUNE},
        start=start,
        known=known,
        on_progress=say,
        on_result=tell,
        should_stop=channel.stop.is_set,
        **({} if open_pool is None else {"open_pool": lambda number: open_pool(number, say)}),
    )
    is_over = not channel.stop.is_set()
    return _tuned(result, options["seed"], tuning.checkpoint_of(result, is_over=is_over))


def _words_of(result: TuneResult) -> dict[str, Any]:
    """Return who made the best schedule, and the bound where there is one."""
    best = result.best
    return {
        "method": "" if best is None else f"{best.label}, {best.method}",
        "bound_ms": None if math.isinf(result.bound_ms) else result.bound_ms,
    }


def _text_of(result: TuneResult) -> str:
    return json.dumps(result.as_json())


def _tuned(result: TuneResult, seed: int, checkpoint: str) -> Message:
    best, counts = result.best, result.counts
    status, message = "feasible", ""
    if best is None:
        status = "infeasible" if counts.do_not_fit == counts.total else "unknown"
        message = f"no schedule was found that fits: {result.certificate}; allow more time, memory "
        message += "or GPUs, or fix less"
    elif result.gap == 0:
        status = "optimal"
    header: dict[str, Any] = {
        "status": status,
        "objective_ms": None if best is None else best.step_ms,
        **_words_of(result),
        "message": message,
        "needs": {},
        "tuned": _text_of(result) if best is not None else None,
        "checkpoint": checkpoint,
    }
    schedule = None if best is None else _simulated(best, seed)
    problem = None if best is None else best.problem
    return Message("result", header, _text(schedule), _text(problem))


def _simulated(row: TuneRow, seed: int) -> Schedule:
    return evaluate(row.problem, row.programs, Provenance(method=row.method, seed=seed))


class _Reporter:
    """Tells the server every better schedule, and better bounds a few times per second.

    ``problem`` is what is solved; a plan has none: it names the one it chose with each schedule.
    """

    def __init__(self, channel: _Channel, seed: int, problem: Problem | None = None) -> None:
        self._channel = channel
        self._problem = problem
        self._seed = seed
        self._best_ms = float("inf")
        self._best: Programs | None = None
        self._last_bound_s = float("-inf")
        self._trace: list[TraceEntry] = []

    def __call__(self, progress: Progress) -> None:
        problem = self._problem or progress.problem
        if problem is not None and progress.programs is not None:
            self._tell_schedule(progress, problem, progress.programs)
        elif progress.seconds >= self._last_bound_s + _BOUND_EVERY_S:
            self._last_bound_s = progress.seconds
            self._send(progress, None)

    def carry(self, problem: Problem, programs: Programs, method: str) -> None:
        """Tell programs that are legal for a tighter problem: they are this one's, come what may.

        Raises `IllegalScheduleError` if they are not.
        """
        made_by = Provenance(method=method, seed=self._seed)
        schedule = evaluate(problem, programs, made_by, stopped_by="cancelled")
        self._best_ms, self._best = schedule.objective_ms, programs
        header = {"seconds": 0.0, "method": method, "objective_ms": self._best_ms, "bound_ms": None}
        self._channel.send(Message("progress", header, _text(schedule)))

    def _tell_schedule(self, progress: Progress, problem: Problem, programs: Programs) -> None:
        self._trace.append(
            TraceEntry(
                seconds=progress.seconds,
                method=progress.method,
                objective_ms=progress.objective_ms,
                bound_ms=progress.bound_ms,
            )
        )
        # Should this schedule stay the last, then because the solve was interrupted.
        schedule = evaluate(
            problem,
            programs,
            Provenance(
                method=progress.method,
                seed=self._seed,
                solve_seconds=progress.seconds,
                trace=tuple(self._trace),
            ),
            bound_ms=progress.bound_ms,
            stopped_by="cancelled",
        )
        if self._is_better(schedule):
            self._best_ms, self._best = schedule.objective_ms, programs
            self._send(progress, schedule, progress.problem)

    def _is_better(self, schedule: Schedule) -> bool:
        """Whether a schedule is shorter, or another one as long, which the solver found better."""
        if schedule.objective_ms < self._best_ms:
            return True
        is_as_long = schedule.objective_ms <= self._best_ms * (1 + _EQUAL)
        return self._problem is not None and is_as_long and schedule.programs != self._best

    def _send(
        self, progress: Progress, schedule: Schedule | None, problem: Problem | None = None
    ) -> None:
        header = {
            "seconds": progress.seconds,
            "method": progress.method,
            "objective_ms": None if schedule is None else schedule.objective_ms,
            "bound_ms": progress.bound_ms,
        }
        self._channel.send(Message("progress", header, _text(schedule), _text(problem)))


def _result(result: Result | PlanResult, problem: Problem | None = None) -> Message:
    schedule = result.schedule
    header: dict[str, Any] = {
        "status": result.status.value,
        "objective_ms": None if schedule is None else schedule.objective_ms,
        "method": None if schedule is None else schedule.provenance.method,
        "bound_ms": result.bound_ms,
        "message": result.message,
        "needs": result.needs,
    }
    return Message("result", header, _text(schedule), _text(problem))


def _text(value: Schedule | Problem | None) -> str:
    return "" if value is None else value.model_dump_json(by_alias=True)


def _out_of_memory(memory_bytes: int | None) -> Message:
    limit = "the machine's memory" if memory_bytes is None else f"its {memory_bytes} bytes"
    message = (
        f"the solver needs more than {limit}; lower num_microbatches or threads, choose another "
        "method, or raise OPTPIPE_SOLVER_MEMORY_BYTES"
    )
    return Message("error", {"code": "solver.memory", "message": message})


def _bug(error: Exception) -> Message:
    message = (
        f"the solver failed with {type(error).__name__}, which is a fault of OptPipe; its server's "
        "log says where: please report it with the problem"
    )
    return Message("error", {"code": "solver.failed", "message": message})


if __name__ == "__main__":
    main()
