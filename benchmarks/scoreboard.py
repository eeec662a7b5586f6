"""Estimates of `optpipe.presets` against published numbers, the error of every row.

``python benchmarks/estimates.py`` prints a table and writes ``benchmarks/results/estimates.csv``.
``--fit`` prints how the A100's two fitted efficiencies come about, ``--runs FILE`` the runs of a
file of the form of ``published_runs.json``; both write nothing.

1. *Zero Bubble* (arXiv 2401.10241, table 9): profiled F, I and W of one stage on A100, stored
   scores, dropout. The row 6.2B with 24 micro-batches is the one that the A100's ``matmul`` and
   ``memory`` were fitted to (``used`` says so); the other rows played no part in it.
2. *PipeOffload* (arXiv 2503.01328), activation memory of 1F1B: the most loaded device; one sequence
   per micro-batch, which the paper's batch sizes leave as the natural reading; GB = 1e9 bytes.
3. *PipeOffload*, utilisation of 1F1B: ours is simulated, with the paper's cut. Which column is
   which method is itself inferred (see the note in published.json). What the optimizer's step cost
   is in theirs, not in ours.
4. *PipeOffload*, TFLOP/s that a layer reaches: what paper (A100) and code (H100) take for it. The
   H100's ``matmul`` was fitted to the latter.
5. *PipeOffload*, k: copy time over compute time of a layer at the paper's own rates. The paper
   computes it by a formula, it was not measured there: these rows hold FLOPs and bytes together.
6. *Runs* of whole clusters (source in published_runs.json), seconds per step: ours is 1F1B or
   interleaved 1F1B, simulated. What an estimate cannot be asked for is not stated, and ``used``
   says why; overlapped expert communication is counted in full.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
from collections import defaultdict
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from optpipe.errors import InputError
from optpipe.presets.catalogue import PIPEOFFLOAD, find_gpu, find_model
from optpipe.presets.costs import Machine, layer_kept, layer_work, model_flops
from optpipe.presets.estimate import estimate
from optpipe.presets.shape import Training
from optpipe.simulate import simulate
from optpipe_solver.families.classic import build_interleaved, build_one_f_one_b

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from optpipe.presets.catalogue import Efficiency
    from optpipe.presets.shape import ModelShape

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "estimates.csv"
DATA = HERE.parent / "tests" / "data" / "published"
FITTED = ("6.2B", 24)
A100 = find_gpu("a100")


class Row(NamedTuple):
    """One published number and ours, NaN where it cannot be stated: then ``used`` says why."""

    table: str
    model: str
    setting: str
    quantity: str
    published: float
    estimated: float
    used: str = "check"

    @property
    def error(self) -> float:
        """Ours over theirs, less 1."""
        return self.estimated / self.published - 1


def load(name: str) -> Any:
    """Return a published table."""
    return json.loads((DATA / name).read_text(encoding="utf-8"))


def zero_bubble(efficiency: Efficiency = A100.efficiency) -> Iterator[Row]:
    """Yield F, I and W of a stage between the first and the last, which have a layer less."""
    table = load("zero_bubble_table.json")
    for row in table["rows"]:
        model, p, m = row["model"], row["p"], row["m"]
        sizes = table["models"][model]
        shape = find_model(f"zb-{model}")
        training = Training(micro_batch=sizes["mb_size"], sequence=sizes["seq"], flash=False)
        machine = Machine(A100, efficiency, training)
        times = machine.pass_times(layer_work(shape, training, is_moe=False))
        layers = (sizes["layers"] + 2) // p
        used = "fit" if (model, m) == FITTED else "check"
        for name, value in times._asdict().items():
            yield Row("zero bubble", model, f"p={p} m={m}", name, row[name], layers * value, used)


def _figure() -> Iterator[tuple[str, int, int, int, Any, Any]]:
    """Yield model, devices, micro-batches, sequence, utilisation and GB of 1F1B in figure 15."""
    published = load("published.json")["pipeoffload"]
    batches = {row[0]: row[4] for row in published["models"]}
    figure = published["fig15"]
    column = figure["methods"].index("1F1B")
    for key, found in figure.items():
        if not key.endswith("gpu"):
            continue
        model, devices = key.removesuffix("gpu").split("_")
        for at, sequence in enumerate(figure["seq"]):
            mfu, size = found["mfu_pct"][at][column], found["act_mem_gb"][at][column]
            if not isinstance(mfu, str) and not isinstance(size, str):
                yield model, int(devices), batches[model], sequence, mfu, size


def pipeoffload_runs() -> Iterator[Row]:
    """Yield activation memory and utilisation of 1F1B, where the paper has a number."""
    for model, p, m, sequence, mfu, size in _figure():
        shape = find_model(f"po-{model}")
        training = Training(sequence=sequence, lean=True)
        found = estimate(shape, A100, training, pp=p, num_microbatches=m)
        problem = found.model.problem(tuple(range(p)), [(shape.num_layers + 2) // p] * p)
        makespan_ms = simulate(problem, build_one_f_one_b(problem)).makespan_ms
        peak = p * A100.peak_flops("bf16") * makespan_ms / 1e3
        reached = 100 * m * model_flops(shape, training) / peak
        setting = f"p={p} m={m} s={sequence}"
        kept = layer_kept(shape, training, is_moe=False).activation_bytes
        layers = (shape.num_layers + 2) // p
        held = max(p * (layers - 1), (p - 1) * layers) * kept / 1e9
        yield Row("pipeoffload", model, setting, "activation GB", size, held)
        yield Row("pipeoffload", model, setting, "mfu %", mfu, reached)


def pipeoffload_k() -> Iterator[Row]:
    """Yield k of the grid: bytes there and back over FLOPs of F, I and W, at the paper's rates."""
    published = load("published.json")["pipeoffload"]
    rates = published["k_calibration"]["paper_A100"]
    grid = published["k_grid_A100"]
    heads = {hidden: heads for _, hidden, heads in PIPEOFFLOAD.values()}
    base = find_model("po-5.8b")
    for (row, hidden), (column, sequence) in product(
        enumerate(grid["hidden"]), enumerate(grid["seq"])
    ):
        count = heads.get(hidden, hidden // 128)
        shape = replace(
            base, hidden=hidden, num_heads=count, num_kv_heads=count, ffn=4 * hidden
        )  # its 6 h + s counts as many key/value heads as heads, and scores without the mask
        training = Training(sequence=sequence, lean=True, flash=False)
        flops = _flops(training, shape)
        kept = layer_kept(shape, replace(training, flash=True), is_moe=False).offload_bytes
        copies = 2 * kept / (rates["B_o_GBps"] * 1e9)
        k = copies / (flops / (rates["B_c_TFLOPS"] * 1e12))
        yield Row("pipeoffload k", "-", f"h={hidden} s={sequence}", "k", grid["k"][row][column], k)


def pipeoffload_rates() -> Iterator[Row]:
    """Yield TFLOP/s of a layer of the 10.5B model, 4096 tokens, without the mask's half."""
    rates = load("published.json")["pipeoffload"]["k_calibration"]
    shape, training = find_model("po-10.5b"), Training(sequence=4096, lean=True)
    flops = _flops(replace(training, flash=False), shape)
    for gpu, key, used in (("a100", "paper_A100", "check"), ("h100", "code_H100", "fit")):
        hardware = find_gpu(gpu)
        machine = Machine(hardware, hardware.efficiency, training)
        times = machine.pass_times(layer_work(shape, training, is_moe=False))
        tflops = flops / sum(times) / 1e9
        yield Row("pipeoffload", "10.5B", gpu, "TFLOP/s", rates[key]["B_c_TFLOPS"], tflops, used)


def published_runs(file: Path = DATA / "published_runs.json") -> Iterator[Row]:
    """Yield the step time of every run, by accelerator, those with experts apart."""
    for run in json.loads(file.read_text(encoding="utf-8"))["runs"]:
        kind = " experts" if run["ep"] > 1 else ""
        setting = " ".join(f"{name}{run[name]}" for name in ("tp", "cp", "ep", "pp", "vp"))
        try:
            step_s, used = _step_s(run), "check"
        except InputError as error:
            step_s, used = math.nan, f"not stated: {error}"
        where = f"{run['container']} {run['precision']} dp{run['data_parallel']} {setting}"
        table = f"runs {run['gpu']}{kind}"
        yield Row(table, run["model"], where, "step s", run["step_s"], step_s, used)


def _step_s(run: dict[str, Any]) -> float:
    """Return the estimated seconds of a step; raise `InputError` where it cannot be asked for."""
    for field in ("fsdp", "offloaded_layers", "recompute_modules"):
        if run[field]:
            raise InputError(f"{field} = {run[field]}: an estimate has none")
    training = Training(
        micro_batch=run["micro_batch"], sequence=run["sequence"], tp=run["tp"], cp=run["cp"],
        ep=run["ep"], dp=run["data_parallel"], precision=run["precision"].lower(),
    )  # fmt: skip
    found = estimate(
        find_model(run["model"]), find_gpu(run["gpu"]), training, pp=run["pp"],
        num_microbatches=run["microbatches"], chunks=run["vp"],
        placement="loop" if run["vp"] > 1 else "linear",
    )  # fmt: skip
    build = build_interleaved if run["vp"] > 1 else build_one_f_one_b
    return simulate(found.problem, build(found.problem)).makespan_ms / 1e3


def _flops(training: Training, shape: ModelShape) -> float:
    """Return the FLOPs of F, I and W of one layer."""
    passes = layer_work(shape, training, is_moe=False)
    return sum(work.matmul_flops + work.attention_flops for work in passes)


def all_rows() -> list[Row]:
    """Return every row, in the order of the docstring."""
    return [*zero_bubble(), *pipeoffload_runs(), *pipeoffload_rates(), *pipeoffload_k(),
            *published_runs()]  # fmt: skip


def fit() -> list[tuple[float, float, float]]:
    """Return worst error of the fitted row, matmul, memory: a grid of 0.01, the best ten."""
    tried = []
    for matmul, memory in product(range(60, 90), range(25, 80)):
        efficiency = replace(A100.efficiency, matmul=matmul / 100, memory=memory / 100)
        errors = [abs(row.error) for row in zero_bubble(efficiency) if row.used == "fit"]
        tried.append((max(errors), matmul / 100, memory / 100))
    return sorted(tried)[:10]


def summary(rows: Sequence[Row]) -> list[str]:
    """Return a line per table and quantity: mean and extreme errors; then what is not stated."""
    errors: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for row in rows:
        if not math.isnan(row.error):
            errors[row.table, row.quantity, row.used].append(row.error)
    lines = [
        f"{table:18} {quantity:18} {used:5} {len(some):3} rows  "
        f"mean {sum(map(abs, some)) / len(some):6.1%}  largest {max(map(abs, some)):6.1%}  "
        f"from {min(some):+.1%} to {max(some):+.1%}"
        for (table, quantity, used), some in errors.items()
    ]
    missing = sum(math.isnan(row.error) for row in rows)
    return [*lines, f"{missing} of {len(rows)} rows are not stated"]


def write(rows: Sequence[Row]) -> None:
    """Write all rows as CSV."""
    with RESULTS.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([*Row._fields, "error"])
        for row in rows:
            writer.writerow([*row[:4], row.published, f"{row.estimated:.4f}", row.used,
                             f"{row.error:.4f}"])  # fmt: skip


def main() -> None:
    """Compare, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--fit", action="store_true", help="print the fit, write nothing")
    parser.add_argument("--runs", type=Path, metavar="FILE", help="these runs alone, write nothing")
    options = parser.parse_args()
    if options.fit:
        for error, matmul, memory in fit():
            print(f"matmul {matmul:.2f}  memory {memory:.2f}  largest error {error:.1%}")
        return
    rows = all_rows() if options.runs is None else list(published_runs(options.runs))
    for row in rows:
        where = f"{row.table:18} {row.model:15} {row.setting:20} {row.quantity:18}"
        print(f"{where} {row.published:9.3f} {row.estimated:9.3f} {row.error:+7.1%} {row.used}")
    print(*summary(rows), sep="\n")
    if options.runs is None:
        write(rows)


if __name__ == "__main__":
    main()
