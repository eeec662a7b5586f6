"""(c) The longest sequence and the largest micro-batch that fit, with and without offload.

A size fits if its plan does: the prefix walk of measured bytes, with weights, gradients and Adam's
state, stays within the limit. The largest one found is then run, under an allocator that is not
given more.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.gpu.alone import (
    Sizes,
    alone,
    forget,
    in_flight,
    make_stage,
    problem_of,
    run_program,
)
from optpipe.check import find_violations
from optpipe.runtime import PreflightError
from optpipe.runtime.measuring import Effort

if TYPE_CHECKING:
    from optpipe import Problem

MICROBATCHES = 12
AHEAD = 8
EFFORT = Effort(2, 1)
REAL = Sizes(hidden=4096, sequence=1024, blocks=1)
TINY = Sizes(hidden=32, sequence=16, blocks=1, dtype="fp32")
LIMIT_BYTES = 10**10
"""Small, since pinned host memory must hold what goes there: up to nine micro-batches."""

TINY_LIMIT_BYTES = 12 * 10**5


def measure_it(name: str, *, tiny: bool) -> list[dict[str, Any]]:
    """Return a row for samples and one for the sequence."""
    sizes, limit = (TINY, TINY_LIMIT_BYTES) if tiny else (REAL, LIMIT_BYTES)
    with alone(name) as device:
        if device.type == "cuda":
            total = torch.cuda.get_device_properties(device).total_memory
            limit = min(limit, total)
            torch.cuda.set_per_process_memory_fraction(limit / total, device)
        return [_row(sizes, what, limit, device) for what in ("samples", "sequence")]


def _row(sizes: Sizes, what: str, limit: int, device: torch.device) -> dict[str, Any]:
    found = {
        name: _largest(sizes, what, limit, device, offload=offload)
        for name, offload in (("without", False), ("with", True))
    }
    times = found["with"][0] / found["without"][0]
    row: dict[str, Any] = {"what": what, "limit MB": limit / 1e6}
    for name, (largest, peak) in found.items():
        row |= {f"largest {name}": largest, f"peak MB {name}": peak / 1e6}
    return row | {"times as large": times}


def _largest(
    sizes: Sizes, what: str, limit: int, device: torch.device, *, offload: bool
) -> tuple[int, int]:
    """Return the largest size and its measured peak; grown in steps of an eighth."""
    step = max(1, getattr(sizes, what) // 8) if what == "sequence" else 1
    low, high = 0, 1
    while _fits(_with(sizes, what, high * step), limit, device, offload=offload):
        low, high = high, 2 * high
    while high - low > max(1, low // 8):
        middle = (low + high) // 2
        if _fits(_with(sizes, what, middle * step), limit, device, offload=offload):
            low = middle
        else:
            high = middle
    if low == 0:
        raise RuntimeError(f"{what} = {step} does not fit {limit} bytes; raise the limit")
    chosen = _with(sizes, what, low * step)
    forget(device)
    problem = _problem(chosen, limit, device)
    stage = make_stage(chosen, device)
    program = in_flight(MICROBATCHES, AHEAD, offload=offload)
    ran = run_program(stage, chosen, problem, program, device=device, steps=1)
    return low * step, ran.measured_bytes + problem.static_bytes_of(0)


def _with(sizes: Sizes, what: str, value: int) -> Sizes:
    return replace(sizes, samples=value) if what == "samples" else replace(sizes, sequence=value)


def _fits(sizes: Sizes, limit: int, device: torch.device, *, offload: bool) -> bool:
    """Whether the plan of this size keeps within the limit, and can be measured within it."""
    forget(device)
    try:
        problem = _problem(sizes, limit, device)
    except (torch.cuda.OutOfMemoryError, PreflightError) as error:
        if any(isinstance(one, torch.cuda.OutOfMemoryError) for one in (error, error.__cause__)):
            return False
        raise
    program = in_flight(MICROBATCHES, AHEAD, offload=offload)
    return not find_violations(problem, (program,))


def _problem(sizes: Sizes, limit: int, device: torch.device) -> Problem:
    stage = make_stage(sizes, device)
    return problem_of(
        stage,
        sizes,
        device,
        num_microbatches=MICROBATCHES,
        effort=EFFORT,
        memory_bytes=limit,
    )
