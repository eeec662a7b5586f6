"""(a) One rank's program of a real schedule: step time and peak memory, planned and measured.

The program is rank 0's of ``ada-offload-p4-m8.csv``: four ranks, eight micro-batches, five of them
offloaded. Targets: 3 % of the simulator's time, 2 % of the prefix walk's peak.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.gpu.alone import Sizes, alone, make_stage, problem_of, run_program
from optpipe import load_csv
from optpipe.runtime.measuring import Effort

SCHEDULE = Path(__file__).parent / "ada-offload-p4-m8.csv"
MICROBATCHES = 8
REAL = Sizes(hidden=4096, sequence=4096)
TINY = Sizes(hidden=32, sequence=16, samples=2, blocks=2, dtype="fp32")


def measure_it(name: str, *, tiny: bool) -> list[dict[str, Any]]:
    """Return one row."""
    sizes = TINY if tiny else REAL
    effort = Effort(3, 1) if tiny else Effort(20, 5)
    program = load_csv(SCHEDULE.read_text())[0]
    with alone(name) as device:
        stage = make_stage(sizes, device)
        problem = problem_of(stage, sizes, device, num_microbatches=MICROBATCHES, effort=effort)
        ran = run_program(stage, sizes, problem, program, device=device, steps=2 if tiny else 15)
    return [
        {
            "hidden": sizes.hidden,
            "sequence": sizes.sequence,
            "blocks": sizes.blocks,
            "simulated ms": ran.planned_ms,
            "measured ms": ran.measured_ms,
            "time off by %": 100 * (ran.measured_ms / ran.planned_ms - 1),
            "planned MB": ran.planned_bytes / 1e6,
            "measured MB": ran.measured_bytes / 1e6,
            "peak off by %": 100 * (ran.measured_bytes / ran.planned_bytes - 1),
            "offloaded MB": ran.offloaded_bytes / 1e6,
        }
    ]
