"""(d) Four ranks on one card run a real schedule; their losses are those of one process.

Each rank is a process of its own (`benchmarks.gpu.shared_rank`). Not a measure of speed.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from optpipe.runtime.demo_model import launch_ranks

RANKS = 4


def measure_it(name: str, *, tiny: bool) -> list[dict[str, Any]]:
    """Start the ranks and return one row."""
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "told.json"
        arguments = [name, "tiny" if tiny else "real", str(told)]
        code = launch_ranks("benchmarks.gpu.shared_rank", arguments, RANKS)
        if code:
            raise RuntimeError(f"a rank ended with exit code {code}; see above")
        row: dict[str, Any] = json.loads(told.read_text())
    return [row]
