"""Menus of modes: what they are worth, on problems that only v2 can say.

    python -m benchmarks.menus [--work W] [--only PATTERN] [--again] [--report]

Problems are made here, not stored: menus of at most 8 modes from `estimate` for Llama 8B, 70B and
405B, Qwen3-235B and DeepSeek-V3, with copies of 21 GB/s (what PipeOffload's code takes an H100 to
reach), and from ``optpipe profile --modes 8`` of the tiny GPT (``instances/measured``), with copies
of a stage as long as its F, I and W. Messages wait for each other on every link. Each is there with
``uniform`` modes, one for all micro-batches of a stage, and ``free``; each at three memory limits:
of what lies between the smallest memory that v1's menu needs and as many whole activations as there
are devices, ``tight`` has 5%, ``medium`` 20%, ``loose`` 50%. Two more have 128k tokens and the
card's own memory, which v1's menu never fits.

Contestants, one thread and the same work each, so that a busy machine changes nothing:
``families`` (the best published schedule in any way that fits), ``uniform`` (the best of those with
one mode per stage), ``v1`` (`solve` with each menu cut down to keep, offload and recompute, and
with the v1 problem that these make, the better of the two, so it has twice the work), ``ours``
(`solve`), ``cp-sat`` (OR-tools, started from the best family, with the CPU seconds that `solve`
took, 20 at least). Programs are judged here, by `find_violations` and `simulate`. A row for each
is appended to ``results/menus.csv``; what stands there for this problem, commit and work is not run
again without ``--again``; ``--peer`` runs one contestant alone.
"""

from __future__ import annotations

import argparse
import fnmatch
import math
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.jobs import PeerJob, judge, run_apart
from benchmarks.ledger import INSTANCES, commit, read_rows, stamp, write_rows
from optpipe import Problem, load_problem
from optpipe.planning import Training, estimate, find_gpu, find_model
from optpipe.problem import Stage
from optpipe.stage import WORKSPACES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from benchmarks.jobs import PeerAnswer

__all__ = ["MenuRow", "all_problems", "as_v1", "large_menus", "main", "report", "v1_menus"]

RESULTS = Path(__file__).resolve().parent / "results" / "menus.csv"
MEASURED = INSTANCES / "measured" / "tiny_gpt.json"
_PEERS = ("families", "uniform", "v1", "ours", "cp-sat")
_TOLERANCE = 1e-9
_TIME_LIMIT_S = 3600.0
"""So long that work ends every solve, even on a busy machine."""
_LEAST_PEER_S = 20.0
_COPIES_GB_PER_S = 21.0
_LIMITS = {"tight": 0.05, "medium": 0.2, "loose": 0.5}


@dataclass(frozen=True, slots=True, kw_only=True)
class MenuRow:
    """What one contestant reached on one problem; times in ms, None where there is none.

    ``work`` is the limit of a solve in units, 0 where it had none; ``seconds`` where it
    had time instead, as all had at 297909f; ``cpu_seconds`` what the whole answer took, 0
    where it was not measured.
    """

    instance: str
    problem_hash: str
    solver: str
    seconds: float
    threads: int
    work: float
    cpu_seconds: float
    objective_ms: float | None
    bound_ms: float | None
    status: str
    method: str
    commit: str
    machine: str


# --- Problems.


def all_problems() -> Iterator[tuple[str, Problem]]:
    """Yield every problem and its name; the same ones each time, as long as the formulas are."""
    for name, problem in _sources():
        for way in ("free", "uniform"):
            variant = _with_stages(problem, uniform_modes=way == "uniform")
            for limit, share in _LIMITS.items():
                yield f"{name}-{limit}-{way}", _limited(variant, share)
    long = _estimated("llama3-70b", 8, 16, Training(tp=8, sequence=131_072))
    yield "llama3-70b-128k-free", long
    yield "llama3-70b-128k-uniform", _with_stages(long, uniform_modes=True)


def large_menus() -> Problem:
    """Return Llama 405B in 64 stages, 512 micro-batches, six modes, a fifth of the memory."""
    wide = Training(tp=8, sequence=8192)
    return _limited(_estimated("llama3.1-405b", 64, 512, wide, modes=6), _LIMITS["medium"])


def _sources() -> Iterator[tuple[str, Problem]]:
    yield "tiny-gpt-p4-m8", _measured(4, 8)
    yield "tiny-gpt-p8-m16", _measured(8, 16)
    yield "llama3-8b-p4-m12", _estimated("llama3-8b", 4, 12, Training(sequence=8192))
    wide = Training(tp=8, sequence=8192)
    yield "llama3-70b-p8-m24", _estimated("llama3-70b", 8, 24, wide)
    yield "llama3.1-405b-p16-m32", _estimated("llama3.1-405b", 16, 32, wide)
    experts = Training(tp=2, dp=16, ep=32)
    yield (
        "qwen3-235b-p8-v2-m16",
        _estimated("qwen3-235b-a22b", 8, 16, experts, chunks=2, placement="loop"),
    )
    experts = Training(dp=32, ep=32)
    yield (
        "deepseek-v3-p8-v2-m16",
        _estimated("deepseek-v3", 8, 16, experts, chunks=2, placement="v"),
    )


def _estimated(name: str, pp: int, m: int, training: Training, **cut: Any) -> Problem:
    hardware = find_gpu("h100")
    rate = hardware.pcie_gb_per_s
    share = None if rate is None else _COPIES_GB_PER_S / rate.value
    return estimate(
        find_model(name), hardware, training, pp=pp, num_microbatches=m,
        pcie_efficiency=share, **({"modes": 8} | cut),
    ).problem  # fmt: skip


def _measured(p: int, m: int) -> Problem:
    """Return the measured stages, those in the middle repeated; copies of one as long as its work.

    A message takes a tenth of the F before it.
    """
    found = load_problem(MEASURED.read_text(encoding="utf-8"))
    first, *inner, last = found.stages
    chosen = [first, *(inner[n % len(inner)] for n in range(p - 2)), last]
    middle = inner[0]
    rate = middle.activation_bytes / (1e6 * middle.busy_ms)
    message = middle.output_bytes / (1e6 * 0.1 * middle.forward_ms)
    copies = {"d2h_gb_per_s": rate, "h2d_gb_per_s": rate}
    devices = [found.devices[0].model_copy(update={"name": f"gpu{d}", **copies}) for d in range(p)]
    links = [{"from": d, "to": d + 1, "bandwidth_gb_per_s": message} for d in range(p - 1)]
    stages = [one.model_copy(update={"device": d}) for d, one in enumerate(chosen)]
    fields = {"devices": devices, "stages": stages, "links": links, "num_microbatches": m}
    return found.model_copy(update=fields)


def _with_stages(problem: Problem, **fields: Any) -> Problem:
    stages = [one.model_copy(update=fields) for one in problem.stages]
    return problem.model_copy(update={"stages": tuple(stages)})


def _limited(problem: Problem, share: float) -> Problem:
    """Return it with a share of the memory between v1's least and keeping p micro-batches."""
    from optpipe_solver.feasibility import smallest_memory

    plenty = [device.model_copy(update={"memory_bytes": 2**50}) for device in problem.devices]
    wide = problem.model_copy(update={"devices": tuple(plenty)})
    p, limits = len(plenty), []
    for d, least in enumerate(smallest_memory(v1_menus(wide))):
        whole = sum(problem.stages[s].activation_bytes for s in problem.stages_of[d])
        most = problem.static_bytes_of(d) + min(p, problem.num_microbatches) * whole
        most += problem.devices[d].reserved_bytes
        limits.append(round(least + share * (most - least)))
    devices = [
        one.model_copy(update={"memory_bytes": limit})
        for one, limit in zip(problem.devices, limits, strict=True)
    ]
    return problem.model_copy(update={"devices": tuple(devices)})


def v1_menus(problem: Problem) -> Problem:
    """Return a problem whose menus have but what v1 can say: keep, offload most, recompute all."""
    stages = tuple(map(_v1_stage, problem.stages))
    return problem.model_copy(update={"stages": stages})


def _v1_stage(stage: Stage) -> Stage:
    menu = stage.menu
    whole = [m for m in menu[1:] if not m.recompute and m.forward_bytes == stage.activation_bytes]
    again = [m for m in menu if m.recompute == "apart" and not m.offload_bytes]
    kept = [
        menu[0].name,
        *(m.name for m in sorted(whole, key=lambda m: m.offload_bytes)[-1:]),
        *(m.name for m in sorted(again, key=lambda m: -m.forward_bytes)[-1:]),
    ]
    fields = {name: getattr(stage, name) for name in Stage.model_fields}
    if stage.modes:
        known = {mode.name: mode for mode in stage.modes}
        fields["modes"] = tuple(known[name] for name in kept)
    return Stage.model_validate(fields)


def as_v1(problem: Problem) -> Problem:
    """Return a problem in v1's fields, each workspace the largest of the modes it stands for.

    Uniform modes stay, which v1 cannot ask for.
    """
    stages = []
    for stage in v1_menus(problem).stages:
        fields = {name: getattr(stage, name) for name in Stage.model_fields}
        fields |= {name: max(getattr(m, name) for m in stage.menu) for name in WORKSPACES}
        for mode in stage.menu[1:]:
            if mode.offload_bytes:
                fields["offload_bytes"] = mode.offload_bytes
            else:
                fields["recompute_ms"] = mode.recompute_ms
                fields["checkpoint_bytes"] = mode.forward_bytes
        stages.append(Stage.model_validate(fields | {"modes": ()}))
    return problem.model_copy(update={"stages": tuple(stages)})


# --- Contestants.


class _Stamps(NamedTuple):
    """Where all rows of a run were made."""

    commit: str
    machine: str


class _Rows:
    """What the contestants reach on one problem."""

    def __init__(self, name: str, problem: Problem, work: float, stamps: _Stamps) -> None:
        self.name, self.problem, self.work, self.stamps = name, problem, work, stamps
        self.job = PeerJob(problem=problem, seconds=_TIME_LIMIT_S, threads=1, work=work)

    def run(self, done: set[str], spent_s: float = 0.0) -> Iterator[MenuRow]:
        """Run what is missing; ``spent_s`` is what `solve` took where that is not."""
        start: PeerAnswer | None = None
        if not {"families", "uniform"} <= done:
            start = found = run_apart("families", self.job)
            objective = judge(self.problem, found.programs)
            yield self._row("families", found, objective, 0.0)
            values = found.extra.get("values", {})
            uniform = {
                method: ms
                for method, ms in values.items()
                if " " not in method and method != "serial"
            }
            method = min(uniform, key=uniform.__getitem__, default="")
            yield replace(self._row("uniform", found, uniform.get(method), 0.0), method=method)
        for solver, forms in (
            ("v1", [v1_menus(self.problem), as_v1(self.problem)]),
            ("ours", [self.problem]),
        ):
            if solver not in done:
                rows = [self._solved(solver, variant) for variant in forms]
                row = min(rows, key=lambda row: row.objective_ms or math.inf)
                spent_s = row.cpu_seconds if solver == "ours" else spent_s
                yield row
        if "cp-sat" not in done:
            start = start or run_apart("families", self.job)
            job = PeerJob(
                problem=self.problem,
                start=start.programs,
                floor_ms=start.bound_ms or 0.0,
                seconds=max(_LEAST_PEER_S, spent_s),
                threads=1,
                cpu=True,
            )
            found = run_apart("cp-sat", job)
            yield self._row("cp-sat", found, judge(self.problem, found.programs), 0.0)

    def _solved(self, solver: str, variant: Problem) -> MenuRow:
        found = run_apart("ours", replace(self.job, problem=variant))
        return self._row(solver, found, judge(variant, found.programs), self.work)

    def _row(
        self, solver: str, found: PeerAnswer, objective_ms: float | None, work: float
    ) -> MenuRow:
        return MenuRow(
            instance=self.name,
            problem_hash=_hash(self.problem),
            solver=solver,
            seconds=0.0,
            threads=1,
            work=work,
            cpu_seconds=found.process_cpu_s,
            objective_ms=objective_ms,
            bound_ms=found.bound_ms if solver in ("families", "ours", "cp-sat") else None,
            status=found.status,
            method=found.method,
            **self.stamps._asdict(),
        )


def _hash(problem: Problem) -> str:
    return problem.problem_hash.removeprefix("sha256:")[:12]


def contest(
    work: float,
    only: str = "*",
    *,
    again: bool = False,
    peer: str | None = None,
    results: Path = RESULTS,
) -> None:
    """Run all contestants, or one, on all problems; append every row as soon as it is there."""
    known = read_rows(MenuRow, results)
    old, stamps = [] if again else known, _Stamps(commit(), stamp())
    others = {*_PEERS} - {peer} if peer else set()
    for name, problem in all_problems():
        if not fnmatch.fnmatch(name, only):
            continue
        done = {
            row.solver
            for row in old
            if (row.instance, row.problem_hash, row.commit) == (name, _hash(problem), stamps.commit)
            and row.work in (0.0, work)
        }
        spent = [
            row.cpu_seconds
            for row in known
            if (row.solver, row.problem_hash, row.work) == ("ours", _hash(problem), work)
        ]
        for row in _Rows(name, problem, work, stamps).run(
            done | others, max(spent[-1:], default=0)
        ):
            value = "-" if row.objective_ms is None else f"{row.objective_ms:.3f}"
            print(f"{name:34} {row.solver:9} {value:>12}  {row.status} {row.method}", flush=True)
            write_rows([row], results)


# --- What the rows say.


def report(rows: Iterable[MenuRow]) -> list[str]:
    """Return the lines: how much shorter than v1's menu, and whether worse than a family."""
    table = {(row.instance, row.solver): row for row in rows}
    names = list(dict.fromkeys(name for name, _ in table))
    ours = {name: table[name, "ours"] for name in names if (name, "ours") in table}
    if not ours:
        return ["no rows"]
    limits = ", ".join(sorted({_limit(row) for row in ours.values()}))
    spent = sum(row.cpu_seconds for row in ours.values())
    lines = [f"{len(ours)} problems, {limits} each, {spent:.0f} CPU s; ours, against"]
    for peer in ("v1", "uniform", "families", "cp-sat"):
        against = {name: table[name, peer].objective_ms for name in ours if (name, peer) in table}
        lines.append(f"{peer}: {_against(ours, against)}")
    for way in ("free", "uniform"):
        some = {name: row for name, row in ours.items() if name.endswith(way)}
        against = {name: table[name, "v1"].objective_ms for name in some if (name, "v1") in table}
        lines.append(f"v1, {way} modes: {_against(some, against)}")
    return lines


def _limit(row: MenuRow) -> str:
    return f"{row.work:g} units of work" if row.work else f"{row.seconds:g} s, {row.threads} thread"


def _against(ours: dict[str, MenuRow], theirs: dict[str, float | None]) -> str:
    """Say how often ours is shorter and longer, and the geometric mean of the ratio.

    No schedule at all is longer than any; such pairs have no ratio.
    """
    better, worse, logs, alone = 0, [], [], 0
    for name, other in theirs.items():
        mine = ours[name].objective_ms
        a, b = (math.inf if ms is None else ms for ms in (mine, other))
        better += a < b * (1 - _TOLERANCE)
        if a > b * (1 + _TOLERANCE):
            worse.append(name)
        alone += a < b == math.inf
        if max(a, b) < math.inf:
            logs.append(math.log(a / b))
    mean = f"{math.exp(statistics.fmean(logs)):.4f}" if logs else "of none"
    names = f" ({', '.join(worse)})" if worse else ""
    only = f", {alone} of these with a schedule alone" if alone else ""
    return (
        f"shorter on {better} of {len(theirs)}{only}, longer on {len(worse)}{names}; "
        f"geometric mean of the ratio {mean} over {len(logs)}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line, run, and report on the rows of the newest run of each problem."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--work", type=float, default=4.0)
    parser.add_argument("--only", default="*", help="glob of names")
    parser.add_argument("--again", action="store_true", help="run what is already there")
    parser.add_argument("--peer", choices=_PEERS, help="this contestant alone")
    parser.add_argument(
        "--report", action="store_true", help="of the rows that are there; run nothing"
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    if not options.report:
        contest(
            options.work,
            options.only,
            again=options.again,
            peer=options.peer,
            results=options.results,
        )
    print("\n".join(report(read_rows(MenuRow, options.results))))


if __name__ == "__main__":
    main()
