"""Public set-ups, tuned: what wins over the published configuration, and what is proven.

    python -m benchmarks.tune [--seconds 100] [--headroom 0.05] [--only NAME]

takes six runs of ``published_runs.json`` as what is run today, and asks `optpipe_solver.tune` for
the fastest configuration of Megatron-Core with the same batch and switches. It prints per set-up
the published seconds per step, ours of the same configuration, the gain in our model beside the
error of such estimates, the certificate, how many configurations are faster than the published one
in our ranking, and the wall time. A gain below the error is none that an estimate can know.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace

from benchmarks.scoreboard import PUBLISHED, PublishedRun, read_run
from optpipe.planning import Configuration, megatron_arguments
from optpipe_solver import warm_up
from optpipe_solver.tune import TuneQuestion, TuneResult, tune

SETUPS = {
    "llama3-70b h100": ("llama3-70b", "H100", "25.11"),
    "llama3.1-405b h100": ("llama3.1-405b", "H100", "25.11"),
    "llama3.1-405b gb200": ("llama3.1-405b", "GB200", "25.11"),
    "qwen3-235b-a22b h100": ("qwen3-235b-a22b", "H100", "25.11"),
    "deepseek-v3 gb200": ("deepseek-v3", "GB200", "25.11"),
    "gpt-oss-120b h100": ("gpt-oss-120b", "H100", "26.02"),
}


def published(model: str, gpu: str, container: str) -> PublishedRun:
    """Return the first published run of a model on a GPU from a container's page."""
    rows = json.loads(PUBLISHED.read_text())["runs"]
    found = (
        read_run(row, index=index)
        for index, row in enumerate(rows)
        if (row["model"], row["gpu"], row["container"]) == (model, gpu, container)
    )
    return next(found)


def tuned(run: PublishedRun, seconds: float, headroom: float) -> TuneResult:
    """Return the fastest configuration of Megatron-Core for a published run's model and batch."""
    current = Configuration(
        shape=run.shape, hardware=run.hardware, training=run.training, pipeline=run.pipeline
    )
    question = TuneQuestion(
        shape=run.shape,
        hardware=run.hardware,
        num_gpus=current.num_gpus,
        global_batch=current.global_batch,
        training=replace(
            run.training, tp=1, cp=1, ep=1, etp=1, dp=1, micro_batch=1, recompute=frozenset()
        ),
        framework="megatron",
        headroom=headroom,
    )
    return tune(question, current=current, time_limit_s=seconds, threads=2)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=100.0)
    parser.add_argument("--headroom", type=float, default=0.05)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    warm_up()
    heads = ("set-up", "published s", "ours s", "best s", "gain", "error", "none is faster by",
             "faster rows", "wall s")  # fmt: skip
    print(f"| {' | '.join(heads)} |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|--:|")
    for name, setup in SETUPS.items():
        if options.only not in name:
            continue
        run = published(*setup)
        began = time.perf_counter()
        result = tuned(run, options.seconds, options.headroom)
        wall_s = time.perf_counter() - began
        best, today, error = result.best, result.current, result.error
        if best is None:
            print(f"| {name} | nothing fits |")
            continue
        same = "too large" if today is None else f"{today.step_ms / 1e3:.3f}"
        gain = "" if result.gain is None else f"{result.gain:.1%}"
        if result.shortfall is not None:
            gain = "does not fit"
        ahead = 0 if today is None else sum(row.step_ms < today.step_ms for row in result.rows)
        band = "" if error is None else f"{error.error.median:.1%} (worst {error.error.worst:.0%})"
        print(
            f"| {name} | {run.step_s:.3f} | {same} | {best.step_ms / 1e3:.3f} | {gain} | {band} | "
            f"{result.gap:.1%} | {ahead} | {wall_s:.0f} |"
        )
        print(f"    {best.label}, {best.method}, {max(best.peak_bytes) / 2**30:.1f} GiB")
        print(f"    {result.certificate}")
        print(f"    {len(megatron_arguments(best.configuration))} arguments to paste", flush=True)


if __name__ == "__main__":
    main()
