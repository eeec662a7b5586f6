"""Measures on a card what the planner promises: ``benchmarks/gpu/run.sh``, or this module.

Each part runs in a process of its own with a time limit, so that one that fails costs the others
nothing. Results are a JSON file and a table in Markdown, for RESULTS.md.
"""

from __future__ import annotations

import argparse
import datetime as dt
import importlib
import json
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PARTS = {
    "a": (
        "alone",
        "one_rank",
        "One rank's program: step time and peak memory, planned and measured",
    ),
    "b": ("alone", "slowdown", "Every micro-batch offloaded, against none"),
    "c": ("alone", "largest", "The largest size that fits, without offload and with"),
    "d": ("runs", "shared_card", "Four ranks on one card: losses beside one process"),
    "e": ("alone", "beside_estimate", "Four layers of Llama-3 8B: measured, and estimated"),
    "f": ("runs", "megatron", "Megatron-Core's GPT: its own schedule, and ours with offload"),
    "g": ("runs", "torchtitan", "torchtitan's model on four ranks: its own 1F1B, and ours"),
    "h": ("alone", "modes", "Every mode of a measured menu: bytes, time and gradients"),
    "i": ("alone", "pairs", "Forwards and backwards in pairs, and apart"),
    "j": ("alone", "solved", "Measured, solved and run: the four programs of a schedule"),
    "k": ("alone", "sliced", "Long sequences whole and in slices: measured, and estimated"),
}
LIMIT_S = {
    "a": 80,
    "b": 150,
    "c": 150,
    "d": 160,
    "e": 150,
    "f": 120,
    "g": 120,
    "h": 150,
    "i": 90,
    "j": 240,
    "k": 120,
}


def main() -> int:
    """Run the parts asked for; return 1 if one failed."""
    options = _parse()
    if options.one is not None:
        module, name, _ = PARTS[options.one]
        run = getattr(importlib.import_module(f"benchmarks.gpu.{module}"), name)
        options.output.write_text(json.dumps(run(options.device, tiny=options.tiny)))
        return 0
    found = {part: _in_a_process(part, options) for part in options.parts}
    result = {"machine": _machine(options.device), "tiny": options.tiny, "parts": found}
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "results.json").write_text(json.dumps(result, indent=1) + "\n")
    text = as_markdown(result)
    (options.output / "results.md").write_text(text)
    print(text)
    return int(any("error" in part for part in found.values()))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu", description=__doc__)
    parser.add_argument("--device", default="cuda:0", help="default: cuda:0")
    parser.add_argument("--tiny", action="store_true", help="sizes that a CPU can run")
    parser.add_argument(
        "--parts", default="".join(PARTS), help=f"some of {''.join(PARTS)} (default: all)"
    )
    parser.add_argument("--output", type=Path, default=Path("gpu-results"), help="a folder")
    parser.add_argument("--one", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    unknown = sorted(set(options.parts) - set(PARTS))
    if unknown:
        parser.error(
            f"--parts {options.parts}: there is no {unknown[0]}; write some of {''.join(PARTS)}"
        )
    return options


def _in_a_process(part: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return a part's rows, or why there are none."""
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.json"
        command = [sys.executable, "-m", "benchmarks.gpu", "--one", part]
        command += ["--device", options.device, "--output", str(rows)]
        command += ["--tiny"] if options.tiny else []
        try:
            done = subprocess.run(command, check=False, timeout=LIMIT_S[part])
        except subprocess.TimeoutExpired:
            return {"error": f"took longer than {LIMIT_S[part]} s"}
        if done.returncode or not rows.exists():
            return {"error": f"exit code {done.returncode}; its output says why"}
        return {"rows": json.loads(rows.read_text())}


def _machine(device: str) -> dict[str, str]:
    # Loading torch takes seconds, which the parts' own processes spend anyway.
    import torch

    from optpipe.runtime.measuring.times import device_name

    return {
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "device": device_name(torch.device(device)),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "host": f"{platform.machine()}, {platform.system()} {platform.release()}",
    }


def as_markdown(result: dict[str, Any]) -> str:
    """Return the results as a section with one table per part."""
    machine = result["machine"]
    what = "tiny sizes, a test of the script" if result["tiny"] else "real sizes"
    lines = [
        f"## {machine['date']}, {machine['device']} ({what})",
        "",
        f"torch {machine['torch']}, CUDA {machine['cuda']}, {machine['host']}.",
    ]
    for part, found in result["parts"].items():
        lines += ["", f"### ({part}) {PARTS[part][2]}", ""]
        lines += _table(found["rows"]) if "rows" in found else [f"Failed: {found['error']}."]
    return "\n".join(lines) + "\n"


def _table(rows: list[dict[str, Any]]) -> list[str]:
    heads = list(rows[0])
    lines = ["| " + " | ".join(heads) + " |", "|" + "--:|" * len(heads)]
    return lines + ["| " + " | ".join(_cell(row[head]) for head in heads) + " |" for row in rows]


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
