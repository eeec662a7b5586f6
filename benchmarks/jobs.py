"""What a contestant is given and what it answers, as one line of JSON each way.

Contestants run in processes of their own: memory is measured per run, a crash ends one run, and
OR-tools and highspy, which each carry another build of HiGHS under one name, cannot be loaded into
the same process.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from optpipe import Problem, find_violations, parse_action, simulate

if TYPE_CHECKING:
    from optpipe import Programs

__all__ = ["Answer", "Job", "Judged", "TracePoint", "answer_of", "judge"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TracePoint:
    """The best known at a time, in seconds and ms; ``objective_ms`` None = no schedule yet."""

    seconds: float
    objective_ms: float | None
    bound_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run.

    Parameters
    ----------
    problem
        What is to be scheduled.
    start
        Legal programs to start from; None for none.
    floor_ms
        A proven lower bound of the objective.
    seconds, threads, seed
        The limits; seconds include building models, not the start of the process.
    """

    problem: Problem
    start: Programs | None = None
    floor_ms: float = 0.0
    seconds: float = 20.0
    threads: int = 2
    seed: int = 0

    def to_line(self) -> str:
        """Return the job as one line."""
        limits = {name: getattr(self, name) for name in ("floor_ms", "seconds", "threads", "seed")}
        document = self.problem.model_dump(mode="json", by_alias=True)
        return json.dumps({"problem": document, "start": _texts(self.start), **limits})

    @classmethod
    def from_line(cls, line: str) -> Job:
        """Read `to_line`'s text."""
        data = json.loads(line)
        problem, start = Problem.parse(data.pop("problem")), _programs(data.pop("start"))
        return cls(problem=problem, start=start, **data)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a contestant says; nothing of it is believed but the programs (see `judge`).

    ``bound_ms`` is None where nothing is proven, ``status`` the contestant's own word, ``method``
    who found the programs, ``bound_method`` who proved the bound, ``cpu_seconds`` what each part
    took, ``peak_bytes`` the largest resident size of the process.
    """

    programs: Programs | None
    bound_ms: float | None = None
    status: str = ""
    method: str = ""
    bound_method: str = ""
    cpu_seconds: dict[str, float] = field(default_factory=dict)
    trace: tuple[TracePoint, ...] = ()
    seconds: float = 0.0
    peak_bytes: int = 0
    extra: dict[str, Any] = field(default_factory=dict)

    def to_line(self) -> str:
        """Return the answer as one line."""
        said = {name: getattr(self, name) for name in _PLAIN}
        trace = [asdict(point) for point in self.trace]
        return json.dumps({"programs": _texts(self.programs), "trace": trace, **said})

    @classmethod
    def from_line(cls, line: str) -> Answer:
        """Read `to_line`'s text."""
        data = json.loads(line)
        trace = tuple(TracePoint(**point) for point in data.pop("trace"))
        return cls(programs=_programs(data.pop("programs")), trace=trace, **data)


_PLAIN = (
    "bound_ms", "status", "method", "bound_method", "cpu_seconds", "seconds", "peak_bytes", "extra",
)  # fmt: skip


@dataclass(slots=True)
class Judged:
    """The best legal programs offered so far."""

    problem: Problem
    programs: Programs | None = None
    objective_ms: float = float("inf")
    method: str = ""
    num_refused: int = 0

    def offer(self, programs: Programs, method: str = "") -> bool:
        """Keep programs if they are legal and better; count those that are not legal."""
        objective = judge(self.problem, programs)
        if objective is None:
            self.num_refused += 1
            return False
        if objective >= self.objective_ms:
            return False
        self.programs, self.objective_ms, self.method = programs, objective, method
        return True


def judge(problem: Problem, programs: Programs | None) -> float | None:
    """Return the simulated objective in ms of legal programs, None of all others."""
    if programs is None or find_violations(problem, programs):
        return None
    return simulate(problem, programs).objective_ms(problem.objective)


def answer_of(best: Judged, **said: Any) -> Answer:
    """Return the answer that offers the best programs."""
    fields = {"method": best.method, "extra": {"refused": best.num_refused}, **said}
    return Answer(programs=best.programs, **fields)


def _texts(programs: Programs | None) -> list[list[str]] | None:
    return None if programs is None else [[str(action) for action in row] for row in programs]


def _programs(rows: list[list[str]] | None) -> Programs | None:
    if rows is None:
        return None
    return tuple(tuple(parse_action(cell) for cell in row) for row in rows)
