"""Writes the benchmark set: ``python -m benchmarks.instances.make``.

Every file is a problem (``optpipe/problem/v1``); ``index.csv`` says what each covers. The same
script writes the same bytes. Limits are in activations of the busiest device (``4.0a``: four
micro-batches of all its stages), or ``min`` = the smallest memory that admits any schedule, and
``min+x`` = x activations above that.

Zero Bubble: Qi et al., ICLR 2024 (arXiv 2401.10241), tables 5 and 9. PipeOffload: Wan et al., ICML
2025 (arXiv 2503.01328), models of its figure 15 and k = one-way transfer over F + I + W. Times are
per stage and micro-batch, rounded to 0.001 ms, so that CP-SAT's whole numbers are exact.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optpipe import Problem
from optpipe_solver.feasibility import smallest_memory

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["FOLDER", "all_documents", "main"]

FOLDER = Path(__file__).parent
RATE = 20.0
"""GB/s each way: a transfer of t ms moves t * RATE * 1e6 bytes."""

Object = dict[str, Any]
PASSES = ("forward_ms", "backward_input_ms", "backward_weight_ms")

ZB: dict[str, tuple[float, float, float, float, int, int, int, int, int]] = {
    # name: F, I, W, communication ms; hidden, heads, layers per stage, micro-batch size, seq
    "1.5b": (18.522, 18.086, 9.337, 0.601, 2304, 24, 3, 6, 1024),
    "6.2b": (29.718, 29.444, 19.927, 0.527, 4096, 32, 4, 3, 1024),
    "14.6b": (11.347, 11.248, 8.132, 0.377, 5120, 40, 3, 1, 1024),
    "28.3b": (10.419, 10.207, 7.715, 0.408, 6144, 48, 2, 1, 1024),
}


def zb_stage(name: str) -> Object:
    """A stage of the Zero Bubble table: sequence x batch x (34 h + 5 a s) bytes per layer."""
    f, i, w, _, hidden, heads, layers, batch, seq = ZB[name]
    full = seq * batch * (34 * hidden + 5 * heads * seq) * layers
    return {
        **_times(f, i, w),
        "activation_bytes": full,
        "weight_context_bytes": 32 * seq * batch * hidden * layers,
    }


def stage(f: float, i: float, w: float, *, context: float = 0.5, size: int = 10**9) -> Object:
    """A stage of given times; ``context`` is the share of the activation held until W."""
    return {
        **_times(f, i, w),
        "activation_bytes": size,
        "weight_context_bytes": int(context * size),
    }


def _times(*times: float) -> Object:
    return {name: round(ms, 3) for name, ms in zip(PASSES, times, strict=True)}


def with_context(plain: Object, *, offload: float = 0.0, recompute: float = 0.0) -> Object:
    """Let a stage be offloaded in ``offload`` x (F + I + W) ms one way, or recomputed.

    All of the activation is moved: its size is set to what ``RATE`` moves in that time, and the
    weight context keeps its share. ``recompute`` is the share of F that recomputing takes; a
    tenth of the activation is the checkpoint.
    """
    changed = dict(plain)
    if offload:
        length = sum(plain[name] for name in PASSES)
        size = round(round(offload * length, 3) * RATE * 1e6)
        share = plain["weight_context_bytes"] / plain["activation_bytes"]
        changed |= {
            "activation_bytes": size,
            "offload_bytes": size,
            "weight_context_bytes": round(share * size),
        }
    if recompute:
        changed |= {
            "recompute_ms": round(recompute * plain["forward_ms"], 3),
            "checkpoint_bytes": changed["activation_bytes"] // 10,
        }
    return changed


def device(**fields: Any) -> Object:
    """A device that can offload at `RATE` both ways; its memory is set by the limit."""
    return {"memory_bytes": 2**50, "d2h_gb_per_s": RATE, "h2d_gb_per_s": RATE, **fields}


def pipeline(
    given: Object | list[Object],
    p: int,
    m: int,
    *,
    shape: str = "line",
    chunks: int = 1,
    **fields: Any,
) -> Object:
    """A problem document: one stage repeated (a chunk holds its share), or a list of stages.

    ``line`` and ``loop`` go round the devices, ``v`` turns back.
    """
    turns = [range(p)[:: -1 if shape == "v" and turn % 2 else 1] for turn in range(chunks)]
    places = [d for row in turns for d in row]
    stages = given if isinstance(given, list) else [_share(given, chunks)] * len(places)
    return {
        "format": "optpipe/problem/v1",
        "num_microbatches": m,
        "devices": [device() for _ in range(p)],
        "stages": [{"device": d, **one} for d, one in zip(places, stages, strict=True)],
        **fields,
    }


def _share(whole: Object, chunks: int) -> Object:
    if chunks == 1:
        return whole
    return {
        key: round(value / chunks, 3) if key.endswith("_ms") else value // chunks
        for key, value in whole.items()
    }


# --- The set.

EQUAL = stage(10, 10, 10)
REAL = zb_stage("6.2b")
GREEDY = stage(4, 4, 2)


def all_documents() -> Iterator[tuple[Object, Object]]:
    """Yield every problem document and its row of the index."""
    for group in (_published, _memory, _offload, _recompute, _chunks, _unequal, _lanes, _large):
        for document, limit, covers in group():
            whole = _limited(document, limit)
            yield whole, _index_row(Problem.parse(whole), limit, covers)


def _published() -> Iterator[tuple[Object, str, str]]:
    """Rows of the Zero Bubble table, as published (span), at one and two 1F1B's of memory."""
    for name, p, m in (("1.5b", 8, 24), ("6.2b", 8, 24), ("14.6b", 16, 48), ("28.3b", 32, 96)):
        for factor in (1, 2):
            document = _linked(pipeline(zb_stage(name), p, m, objective="span"), ZB[name][3])
            yield (
                _named(document, f"zb-{name}-p{p}-m{m}-{factor}p-span"),
                f"{factor * p}.0a",
                "published profile",
            )
    for name, p, m in (("1.5b", 8, 32), ("6.2b", 8, 64)):
        document = _linked(pipeline(zb_stage(name), p, m), ZB[name][3])
        yield _named(document, f"zb-{name}-p{p}-m{m}-makespan"), f"{p}.0a", "published profile"


def _memory() -> Iterator[tuple[Object, str, str]]:
    """From 2p activations down to the smallest feasible, nothing but order to choose."""
    for p, m, one_stage, label in (
        (4, 8, EQUAL, "equal"),
        (4, 8, REAL, "6.2b"),
        (8, 16, REAL, "6.2b"),
    ):
        for share in (2.0, 1.0, 0.75, 0.5, 0.25):
            limit = f"{share * p:.1f}a"
            yield (
                _named(pipeline(one_stage, p, m), f"{label}-p{p}-m{m}-{limit}"),
                limit,
                "order alone",
            )
    for p, m, limit in ((4, 12, "3.0a"), (2, 4, "1.0a"), (3, 6, "2.0a"), (8, 24, "8.0a")):
        yield _named(pipeline(REAL, p, m), f"6.2b-p{p}-m{m}-{limit}"), limit, "order alone"


def _offload() -> Iterator[tuple[Object, str, str]]:
    """Offload ratio (one-way transfer over F + I + W) 0.25 to 2, memory far below p."""
    for ratio in (0.25, 0.5, 1.0, 2.0):
        one_stage = with_context(REAL, offload=ratio)
        for p, m, limit in ((4, 8, "1.5a"), (8, 16, "2.0a")):
            name = f"offload-{ratio}-p{p}-m{m}-{limit}"
            yield _named(pipeline(one_stage, p, m), name), limit, f"offload ratio {ratio}"
    one_stage = with_context(REAL, offload=0.5)
    for limit in ("min", "min+0.25", "3.0a"):
        yield _named(pipeline(one_stage, 4, 8), f"offload-0.5-p4-m8-{limit}"), limit, "offload"
    yield (
        _named(pipeline(with_context(GREEDY, offload=1.6), 4, 7), "parking-p4-m7"),
        "2.0a",
        "parking",
    )
    span = pipeline(with_context(REAL, offload=0.75), 4, 8, objective="span")
    yield _named(span, "offload-0.75-p4-m8-span"), "2.0a", "offload, span"
    yield _named(pipeline(one_stage, 2, 4), "offload-0.5-p2-m4"), "1.0a", "offload"


def _recompute() -> Iterator[tuple[Object, str, str]]:
    """Recompute, alone and beside offload; fused backward faster than its parts."""
    one_stage = with_context(REAL, recompute=1.0)
    for p, m, limit in ((4, 8, "1.5a"), (8, 16, "2.0a")):
        yield _named(pipeline(one_stage, p, m), f"recompute-p{p}-m{m}-{limit}"), limit, "recompute"
    both = with_context(REAL, offload=1.0, recompute=0.8)
    yield _named(pipeline(both, 4, 8), "offload-recompute-p4-m8"), "1.5a", "offload or recompute"
    fused = {**REAL, "backward_ms": 45.0}
    for p, m in ((4, 8), (8, 16)):
        yield _named(pipeline(fused, p, m), f"fused-p{p}-m{m}"), f"{p / 2:.1f}a", "fused backward"
    fused_offload = with_context(fused, offload=0.5)
    yield _named(pipeline(fused_offload, 4, 8), "fused-offload-p4-m8"), "1.5a", "fused and offload"


def _chunks() -> Iterator[tuple[Object, str, str]]:
    """V and loop placements, zero-bubble memory and below; PipeOffload's shapes."""
    for p, m, limit in ((4, 8, "2.0a"), (8, 16, "3.5a"), (16, 32, "6.0a"), (4, 8, "4.0a")):
        document = pipeline(EQUAL, p, m, shape="v", chunks=2)
        yield _named(document, f"v-equal-p{p}-m{m}-{limit}"), limit, "V placement"
    real = pipeline(REAL, 8, 24, shape="v", chunks=2)
    yield _named(real, "v-6.2b-p8-m24"), "8.0a", "V placement"
    for p, m, chunks, limit in ((4, 8, 2, "3.0a"), (8, 16, 2, "4.5a"), (4, 8, 4, "4.0a")):
        document = pipeline(EQUAL, p, m, shape="loop", chunks=chunks)
        yield _named(document, f"loop{chunks}-equal-p{p}-m{m}-{limit}"), limit, "loop placement"
    for ratio, p, m, limit in ((1.0, 4, 8, "1.5a"), (0.7, 8, 16, "2.0a"), (1.2, 8, 32, "4.0a")):
        one_stage = with_context(stage(20, 22, 18), offload=ratio)
        document = pipeline(one_stage, p, m, shape="loop", chunks=2)
        yield _named(document, f"pipeoffload-k{ratio}-p{p}-m{m}"), limit, "PipeOffload shape"
    one_stage = with_context(EQUAL, offload=0.5)
    document = pipeline(one_stage, 4, 8, shape="v", chunks=2)
    yield _named(document, "v-offload-p4-m8"), "1.5a", "V placement, offload"


def _unequal() -> Iterator[tuple[Object, str, str]]:
    """Embedding and LM head, mixed GPUs, unequal limits."""
    for p, m, offload in ((4, 8, 0.0), (8, 16, 0.0), (4, 8, 0.5)):
        stages = _with_ends(with_context(REAL, offload=offload), p)
        name = f"ends-p{p}-m{m}" + ("-offload" if offload else "")
        yield _named(pipeline(stages, p, m), name), f"{p / 2:.1f}a", "embedding and LM head"
    for p, m in ((4, 8), (8, 24)):
        stages = [_slower(REAL, 1.6 if d % 2 else 1.0) for d in range(p)]
        yield _named(pipeline(stages, p, m), f"mixed-gpus-p{p}-m{m}"), f"{p / 2:.1f}a", "mixed GPUs"
    for p, m in ((4, 8), (8, 16)):
        document = pipeline(with_context(REAL, offload=0.5), p, m)
        _unequal_limits(document)
        yield _named(document, f"unequal-limits-p{p}-m{m}"), "given", "unequal limits, offload"
    stages = [{**one, "grad_sync_ms": 40.0} for one in _with_ends(REAL, 4)]
    yield _named(pipeline(stages, 4, 8), "grad-sync-p4-m8"), "3.0a", "gradient reductions"


def _lanes() -> Iterator[tuple[Object, str, str]]:
    """Links with latency, host limits, PCIe pairs, half duplex."""
    for latency in (3.0, 15.0):
        document = _linked(pipeline(REAL, 4, 8), latency)
        yield _named(document, f"latency-{latency:g}-p4-m8"), "4.0a", "links with latency"
    one_stage = with_context(REAL, offload=0.5)
    size = one_stage["activation_bytes"]
    for copies in (8, 16):
        hosts = [{"name": "host0", "memory_bytes": copies * size}]
        document = pipeline(one_stage, 4, 8, hosts=hosts)
        yield _named(document, f"host-{copies}-p4-m8"), "1.5a", "host limit"
    for p, m in ((4, 8), (8, 16)):
        document = pipeline(one_stage, p, m)
        document["devices"] = [
            device(pcie_group=f"pair{d // 2}", half_duplex=True) for d in range(p)
        ]
        yield _named(document, f"pcie-pairs-p{p}-m{m}"), "2.0a", "PCIe pairs, half duplex"


def _large() -> Iterator[tuple[Object, str, str]]:
    """16 to 64 devices."""
    for limit in ("16.0a", "8.0a"):
        yield _named(pipeline(REAL, 16, 64), f"6.2b-p16-m64-{limit}"), limit, "order alone"
    one_stage = with_context(REAL, offload=0.5)
    yield _named(pipeline(one_stage, 16, 64), "offload-0.5-p16-m64"), "4.0a", "offload"
    document = pipeline(EQUAL, 16, 64, shape="v", chunks=2)
    yield _named(document, "v-equal-p16-m64"), "6.0a", "V placement"
    for limit in ("64.0a", "32.0a"):
        yield _named(pipeline(REAL, 64, 512), f"6.2b-p64-m512-{limit}"), limit, "order alone"
    yield _named(pipeline(one_stage, 64, 512), "offload-0.5-p64-m512"), "16.0a", "offload"


def _named(document: Object, name: str) -> Object:
    return {**document, "name": name}


def _linked(document: Object, latency: float) -> Object:
    p = len(document["devices"])
    links = [{"from": d, "to": d + 1, "latency_ms": latency} for d in range(p - 1)]
    return {**document, "links": links}


def _with_ends(inner: Object, p: int) -> list[Object]:
    """The first stage a tenth longer for the embedding, the last two fifths for the LM head."""
    return [_slower(inner, 1.1 if s == 0 else 1.4 if s == p - 1 else 1.0) for s in range(p)]


def _slower(usual: Object, factor: float) -> Object:
    return {
        key: round(value * factor, 3) if key.endswith("_ms") else value
        for key, value in usual.items()
    }


def _unequal_limits(document: Object) -> None:
    """Half of the devices have room for 1.5 activations, half for 3."""
    size = document["stages"][0]["activation_bytes"]
    for d, device in enumerate(document["devices"]):
        device["memory_bytes"] = int((1.5 if d % 2 else 3.0) * size)


def _limited(document: Object, limit: str) -> Object:
    if limit == "given":
        return document
    if limit.startswith("min"):
        extra = float(limit.partition("+")[2] or 0.0)
        smallest = smallest_memory(Problem.parse(document))
        limits = [least + int(extra * _activation(document)) for least in smallest]
    else:
        limits = [int(float(limit.removesuffix("a")) * _activation(document))] * len(
            document["devices"]
        )
    devices = [
        {**device, "memory_bytes": bytes_}
        for device, bytes_ in zip(document["devices"], limits, strict=True)
    ]
    return {**document, "devices": devices}


def _activation(document: Object) -> int:
    """Bytes one micro-batch takes on the device that holds most of it."""
    totals = [0] * len(document["devices"])
    for one in document["stages"]:
        totals[one["device"]] += one["activation_bytes"]
    return max(totals)


def _index_row(problem: Problem, limit: str, covers: str) -> Object:
    p = len(problem.devices)
    offloads = any(problem.can_offload(s) for s in range(len(problem.stages)))
    recomputes = any(stage.can_recompute for stage in problem.stages)
    plenty = limit.endswith("a") and float(limit.removesuffix("a")) >= p
    return {
        "name": problem.name,
        "p": p,
        "stages": len(problem.stages),
        "m": problem.num_microbatches,
        "objective": problem.objective,
        "limit": limit,
        "class": "plenty" if plenty and not offloads and not recomputes else "tight",
        "covers": covers,
    }


def main() -> None:
    rows: list[Object] = []
    for document, row in all_documents():
        text = json.dumps(document, indent=None, separators=(",", ":")).replace('},{"', '},\n{"')
        (FOLDER / f"{row['name']}.json").write_text(text + "\n", encoding="utf-8")
        rows.append(row)
    with (FOLDER / "index.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(f"{len(rows)} problems in {FOLDER}")


if __name__ == "__main__":
    main()
