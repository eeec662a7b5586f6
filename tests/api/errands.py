"""What clients want from servers that keep dying, and what they were promised.

An errand is one submission with its Idempotency-Key and what its client does afterwards. The
`Ledger` writes down every promise: an id that was given, an objective and an end that were seen.
"""

import random
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.api.fleet import Caller

NUM_SIZES = 19
POLL_S = 0.1
# How often each is drawn. Half of the submissions need no solver process: a second of a core less.
WEIGHTS = {
    "improve": 2,
    "improve, seen to its end": 2,
    "hit": 9,
    "near": 2,
    "cancel it while it waits": 3,
    "cancel it while it runs": 1,
    "resume": 1,
    "dies": 1,
    "never": 1,
    "nothing": 1,
    "fails": 1,
}
KINDS = tuple(WEIGHTS)


@dataclass(frozen=True)
class Errand:
    """One submission; ``num_rounds`` is how far ``improve`` goes."""

    kind: str
    key: str
    body: dict[str, Any]
    num_rounds: int = 0


@dataclass
class Ledger:
    """What was promised, by job."""

    errands: dict[str, Errand] = field(default_factory=dict)
    best_seen: dict[str, float] = field(default_factory=lambda: defaultdict(lambda: float("inf")))
    ends_seen: dict[str, tuple[str, float | None]] = field(default_factory=dict)
    ended: list[Errand] = field(default_factory=list)

    def accepted(self, job_id: str, errand: Errand) -> None:
        """Write down that a submission was accepted, maybe not for the first time."""
        assert self.errands.setdefault(job_id, errand) is errand, "two keys, one job"

    def saw(self, job: dict[str, Any]) -> None:
        """Write down what a server said of a job."""
        objective_ms = job["objective_ms"]
        if objective_ms is not None:
            self.best_seen[job["id"]] = min(self.best_seen[job["id"]], objective_ms)
        if job["finished_at"] is not None and self.errands[job["id"]].kind != "resume":
            end = (job["state"], objective_ms)
            assert self.ends_seen.setdefault(job["id"], end) == end, "an end that changed"


class Errands:
    """Makes errands, the same for a seed, up to a number; for several threads."""

    def __init__(self, seed: int, folder: str, ledger: Ledger, limit: int | None) -> None:
        self._limit = limit
        self._choice = random.Random(seed)
        self._folder = folder
        self._ledger = ledger
        self._lock = threading.Lock()
        self.num_made = 0
        self.pause_s = 0.02
        """How long ``improve`` takes for each schedule."""

    def take(self) -> Errand | None:
        """Return the next errand; None when all are done, or on their way."""
        with self._lock:
            number = self.num_made
            if number == self._limit:
                return None
            self.num_made += 1
            (kind,) = self._choice.choices(KINDS, tuple(WEIGHTS.values()))
            ended = self._ledger.ended
            if kind in ("hit", "near") and not ended:
                kind = "improve"
            source = self._choice.choice(ended) if ended else None
            return self._make(number, kind, source)

    def _make(self, number: int, kind: str, source: Errand | None) -> Errand:
        key = f"errand-{number}"
        if source is not None and kind == "hit":
            return Errand(kind, key, source.body, source.num_rounds)
        if source is not None and kind == "near":
            near = _scaled(source.body["problem"], 1 + 0.001 * (1 + number % 100))
            return Errand(kind, key, {**source.body, "problem": near}, source.num_rounds)
        num_rounds = 1 + number % 2
        name = f"improve:{num_rounds}:{self.pause_s}:{number}"
        body: dict[str, Any] = {"options": {"time_limit_s": 1000}, "tags": ["errand"]}
        match kind:
            case "cancel it while it waits":
                body["priority"] = -100
            case "cancel it while it runs":
                name = f"improve:{num_rounds}:5:{number}"
            case "dies":
                name = f"dies:2:{self._folder}/died-{number}"
                num_rounds = 1
            case "never" | "nothing" | "fails":
                name = f"{kind}:{number}"
        return Errand(kind, key, {**body, "problem": _problem(number, name)}, num_rounds)


def run(errand: Errand, call: Caller, ledger: Ledger) -> None:
    """Do what a client does."""
    job = _submit(errand, call)
    job_id = job["id"]
    ledger.accepted(job_id, errand)
    ledger.saw(job)
    path = f"/v1/jobs/{job_id}"
    match errand.kind:
        case "improve, seen to its end":
            _follow(call, ledger, path)
            ledger.ended.append(errand)
        case "cancel it while it waits":
            ledger.saw(call("POST", f"{path}/cancel").json())
        case "cancel it while it runs":
            for job in _views(call, ledger, path):
                if job["has_schedule"]:
                    break
            ledger.saw(call("POST", f"{path}/cancel").json())
        case "resume":
            _follow(call, ledger, path)
            answer = call("POST", f"{path}/resume", json={"time_limit_s": 1})
            # 409: the answer to an earlier try was lost, and the job runs again.
            assert answer.status_code in (200, 202, 409), answer.text
        case "hit":
            assert _submit(errand, call)["id"] == job_id


def _submit(errand: Errand, call: Caller) -> dict[str, Any]:
    answer = call("POST", "/v1/jobs", json=errand.body, headers={"Idempotency-Key": errand.key})
    assert answer.status_code in (200, 202), answer.text
    job: dict[str, Any] = answer.json()
    return job


def _follow(call: Caller, ledger: Ledger, path: str) -> None:
    for _ in _views(call, ledger, path):
        pass


def _views(call: Caller, ledger: Ledger, path: str) -> Iterator[dict[str, Any]]:
    """Look at a job again and again until it has ended."""
    while True:
        job = call("GET", path).json()
        ledger.saw(job)
        yield job
        if job["finished_at"] is not None:
            return
        time.sleep(POLL_S)


def _problem(number: int, name: str) -> dict[str, Any]:
    """Return a problem that is not near to that of any other number."""
    scale = 2.0 ** (number // NUM_SIZES)
    stage = {
        "forward_ms": 10 * scale,
        "backward_input_ms": 10 * scale,
        "backward_weight_ms": 8 * scale,
        "backward_ms": 9 * scale,
        "activation_bytes": 1000,
    }
    return {
        "name": name,
        "num_microbatches": 2 + number % NUM_SIZES,
        "devices": [{"memory_bytes": 4000}] * 2,
        "stages": [{**stage, "device": device} for device in range(2)],
    }


def _scaled(problem: dict[str, Any], factor: float) -> dict[str, Any]:
    stages = [
        {name: value * factor if name.endswith("_ms") else value for name, value in stage.items()}
        for stage in problem["stages"]
    ]
    return {**problem, "stages": stages}
