"""Writes the sample files here: a run of a known problem, as each tool would have recorded it.

``python examples/measurements/make_samples.py``

The run is simulated: three steps of 1F1B on `examples/problems/llama3-8b-h100-pp4.json`, every
duration 0-4% longer than the problem says (seeded), the first step 50% longer. Importing the
files therefore gives times about 2% above the problem's.
"""

from __future__ import annotations

import gzip
import json
import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from optpipe import Action, ActionType, Problem, load_problem, make_timeline
from optpipe_solver.families.classic import build_one_f_one_b

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).parent
BASE = HERE.parent / "problems" / "llama3-8b-h100-pp4.json"
STEPS, SEED, MOST_LATE = 3, 7, 0.04
_LAUNCH_US = 40.0
_COMPUTE, _NETWORK = 7, 20
_CPU = (100, 100)


_Event: TypeAlias = tuple[str, str, tuple[float, float], tuple[int, int], dict[str, Any]]
"""Name, category, (start, length) in us, (process, thread), arguments."""


class Run(NamedTuple):
    """One action of the recorded run: times in ms, its device's clock starting at 0."""

    step: int
    action: Action
    start_ms: float
    length_ms: float


def record(problem: Problem) -> list[list[Run]]:
    """Return what each device ran, in order."""
    chance = random.Random(SEED)
    rows: list[list[Run]] = [[] for _ in problem.devices]
    begin = 0.0
    for step in range(STEPS):
        timeline = make_timeline(problem, build_one_f_one_b(problem))
        for device, intervals in enumerate(timeline.intervals):
            for item in intervals:
                if item.action is not None:
                    late = (1.5 if step == 0 else 1.0) + MOST_LATE * chance.random()
                    length = late * (item.end - item.start)
                    # Twice the simulated start leaves room for what is late.
                    rows[device].append(Run(step, item.action, begin + 2 * item.start, length))
        begin += 2 * timeline.makespan_ms
    return rows


def kineto_trace(problem: Problem, rank: int, row: list[Run]) -> bytes:
    """Return a PyTorch profiler trace of one rank: ranges, launches, kernels and messages."""
    events = [
        {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, "ts": round(start, 3),
         "dur": round(length, 3), "args": args}
        for number, run in enumerate(row, start=1)
        for name, category, (start, length), (pid, tid), args in (
            *_work_events(number, run), *_message_events(problem, rank, number, run)
        )
    ]  # fmt: skip
    document = {
        "schemaVersion": 1,
        "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": len(problem.devices)},
        "displayTimeUnit": "ms",
        "traceEvents": events,
    }
    return json.dumps(document, separators=(",", ":")).encode()


def _work_events(number: int, run: Run) -> Iterator[_Event]:
    """Return a range of the CPU, and two kernels that follow each other without a gap."""
    start = run.start_ms * 1e3
    yield (f"PP:{run.action}", "user_annotation", (start, _LAUNCH_US), _CPU, {})
    for part in range(2):
        correlation = 10 * number + part
        launched = {"correlation": correlation}
        yield ("cudaLaunchKernel", "cuda_runtime", (start + 5, 2.0), _CPU, launched)
        length = run.length_ms * 1e3 / 2
        args = {"device": 0, "stream": _COMPUTE, "correlation": correlation}
        begin = start + 500 + part * length
        yield ("sm90_gemm", "kernel", (begin, length), (0, _COMPUTE), args)


def _message_events(problem: Problem, rank: int, number: int, run: Run) -> Iterator[_Event]:
    """Return this rank's end of each message that the action sends or receives."""
    forward = run.action.type is ActionType.FORWARD
    for verb, peer in (("send", rank + 1 if forward else rank - 1),
                       ("recv", rank - 1 if forward else rank + 1)):  # fmt: skip
        if not 0 <= peer < len(problem.devices):
            continue
        pair = (rank, peer) if verb == "send" else (peer, rank)
        num_bytes = problem.stages[min(pair)].output_bytes
        link = next(one for one in problem.links if (one.source, one.target) == pair)
        # Whoever receives was there before and waits.
        waits_ms = 3.0 if verb == "recv" else 0.0
        length = (link.transfer_ms(num_bytes) + waits_ms) * 1e3
        correlation = 10 * number + (5 if verb == "send" else 7)
        args = {
            "device": 0, "stream": _NETWORK, "correlation": correlation,
            "Collective name": verb, "dtype": "BFloat16",
            "In msg nelems": num_bytes // 2, "Out msg nelems": num_bytes // 2,
            "Dst Rank" if verb == "send" else "Src Rank": peer,
        }  # fmt: skip
        launched = {"correlation": correlation}
        called = run.start_ms * 1e3 + _LAUNCH_US + 5
        yield ("cudaLaunchKernelExC", "cuda_runtime", (called, 2.0), _CPU, launched)
        begin = (run.start_ms + run.length_ms) * 1e3
        name = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
        yield (name, "kernel", (begin, length), (0, _NETWORK), args)


def megatron_log(problem: Problem, rows: list[list[Run]]) -> str:
    """Return a Megatron-LM log with the timers of all ranks, one interval per step."""
    arguments = {
        "data_parallel_size": 1, "global_batch_size": problem.num_microbatches,
        "hidden_size": 4096, "micro_batch_size": 1, "params_dtype": "torch.bfloat16",
        "pipeline_model_parallel_size": len(rows), "recompute_granularity": None,
        "seq_length": 8192, "sequence_parallel": False, "tensor_model_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": None, "world_size": len(rows),
    }  # fmt: skip
    lines = ["------------------------ arguments ------------------------"]
    lines += [f"  {(name + ' ').ljust(48, '.')} {value}" for name, value in arguments.items()]
    lines += ["-------------------- end of arguments ---------------------"]
    for step in range(STEPS):
        lines.append(f" iteration {step + 1:8d}/{STEPS:8d} | global batch size: 8 |")
        lines.append("times across ranks (ms):")
        for timer, kind in (("forward-compute", "F"), ("backward-compute", "B")):
            lines.append(f"  {timer}:")
            for rank, row in enumerate(rows):
                total = sum(
                    one.length_ms for one in row if (one.step, one.action.type) == (step, kind)
                )
                lines.append(f"     rank {rank:2d}: {total:.2f}")
    return "\n".join(lines) + "\n"


def times_table(rows: list[list[Run]]) -> str:
    """Return a table of times; a script of one's own would write such a one."""
    lines = ["stage,action,time_ms,microbatch,step,rank"]
    lines += [
        f"{one.action.stage},{one.action.type},{one.length_ms:.3f},{one.action.microbatch},"
        f"{one.step},{rank}"
        for rank, row in enumerate(rows)
        for one in row
    ]
    return "\n".join(lines) + "\n"


def stages_table(problem: Problem) -> str:
    """Return the bytes of the stages as a table."""
    names = ("activation_bytes", "weight_context_bytes", "offload_bytes", "static_bytes",
             "output_bytes")  # fmt: skip
    lines = [",".join(("stage", *names))]
    for index, stage in enumerate(problem.stages):
        lines.append(",".join(map(str, (index, *(getattr(stage, name) for name in names)))))
    return "\n".join(lines) + "\n"


def make_files() -> dict[str, bytes]:
    """Return every sample file by name; traces not yet compressed."""
    problem = load_problem(BASE.read_text(encoding="utf-8"))
    rows = record(problem)
    traces = {f"rank{rank}.json": kineto_trace(problem, rank, row) for rank, row in enumerate(rows)}
    return traces | {
        "megatron-log.txt": megatron_log(problem, rows).encode(),
        "times.csv": times_table(rows).encode(),
        "stages.csv": stages_table(problem).encode(),
    }


def main() -> None:
    for name, content in make_files().items():
        if name.endswith(".json"):
            # A time of 0 in the header: the same file from every run.
            (HERE / f"{name}.gz").write_bytes(gzip.compress(content, mtime=0))
        else:
            (HERE / name).write_bytes(content)
    print(f"written to {HERE}", file=sys.stderr)


if __name__ == "__main__":
    main()
