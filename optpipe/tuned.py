"""What a tune is asked over HTTP, and what it answers; all else is in `optpipe.wire`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict

from pydantic import ConfigDict

from optpipe.wire import SearchArguments, WireModel

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from optpipe.wire import CacheUse

__all__ = [
    "CurrentDegrees",
    "PasteForm",
    "ScoreboardError",
    "TuneArguments",
    "Tuned",
    "TunedCounts",
    "TunedMemory",
    "TunedRow",
]

PasteForm = Literal["arguments", "yaml", "python", "csv"]
"""How a row is fetched for its framework."""

_MEMORY_EXAMPLE: dict[str, Any] = {
    "weights_bytes": 2_000_000_000,
    "gradients_bytes": 4_000_000_000,
    "optimizer_bytes": 12_000_000_000,
    "activations_bytes": 6_000_000_000,
    "buffers_bytes": 86_085_997,
    "reserved_bytes": 600_000_000,
}
_TUNED_ROW_EXAMPLE: dict[str, Any] = {
    "id": "0123456789ab",
    "tp": 4,
    "cp": 1,
    "dp": 1,
    "ep": 1,
    "etp": 1,
    "zero": 1,
    "pp": 2,
    "chunks": 1,
    "placement": [0, 1],
    "layers": [18, 16],
    "micro_batch": 1,
    "num_microbatches": 16,
    "recompute": [],
    "method": "1f1b",
    "step_ms": 959.2,
    "makespan_ms": 943.5,
    "tokens_per_s_per_gpu": 8540.8,
    "mfu": 0.444,
    "peak_bytes": [24686085997, 24686085997],
    "memory": [_MEMORY_EXAMPLE, _MEMORY_EXAMPLE],
    "command": "CUDA_DEVICE_MAX_CONNECTIONS=1 xargs -a arguments.sh torchrun --nproc-per-node 8 "
    "pretrain_gpt.py $DATA_ARGS",
}
_COUNTS_EXAMPLE: dict[str, Any] = {
    "total": 4,
    "do_not_fit": 0,
    "excluded": 2,
    "solved": 2,
    "open": 0,
}
_TUNED_EXAMPLE: dict[str, Any] = {
    "certificate": "of 4 configurations 0 do not fit, 2 are excluded by their bounds, 2 were "
    "solved; within this model none of them, whatever its cut into stages, is more than 0.1% "
    "faster",
    "bound_ms": 958.4,
    "gap": 0.0008,
    "gain": 0.16,
    "error": {"median": 0.06, "worst": 0.195, "num_rows": 17},
    "counts": _COUNTS_EXAMPLE,
    "memory_bytes": 85520809984,
    "usable_bytes": 81244769484,
    "current": None,
    "rows": [_TUNED_ROW_EXAMPLE],
    "pareto": [_TUNED_ROW_EXAMPLE],
    "stopped_by": "optimal",
    "seconds": 2.4,
}


class CurrentDegrees(TypedDict, total=False):
    """What is run today; ``dp`` is what the number of GPUs leaves, all others 1 by default.

    ``layers`` of each stage in model order, embedding and head counted; by default cut evenly.
    """

    tp: int
    cp: int
    dp: int
    ep: int
    etp: int
    pp: int
    chunks: int
    micro_batch: int
    zero: int
    recompute: Sequence[str]
    layers: Sequence[int]


class TuneArguments(SearchArguments, total=False):
    """A model, GPUs and a batch: which is the fastest way to train it.

    ``model`` of the catalogue, or ``config``, a Hugging Face config.json; ``gpu`` of the catalogue,
    or several with numbers that add up to ``num_gpus``: ``h100:32,a100:32``;
    ``global_batch`` sequences of ``sequence`` tokens a step. ``framework``, whose schedules may be
    answered: megatron, torchtitan or any. ``current``, what is run today, or ``current_file``, the
    text of its Megatron arguments or YAML, or torchtitan config; ``fixed``, degrees that are not
    searched. ``headroom``, share (0 <= x < 1) of the memory that answers leave free. With
    ``work_limit`` units of work (> 0, about a second of one core each) the answer is the same on
    every machine, unless the time limit cuts it short.
    ``measured_step_s``, what a step of ``current`` takes: it calibrates every time. The search
    stops where nothing is faster than the best by more than ``gap``.
    """

    model: str | None
    config: dict[str, Any] | None
    gpu: str
    num_gpus: int | None
    global_batch: int | None
    sequence: int | None
    framework: str | None
    current: CurrentDegrees | None
    current_file: str | None
    fixed: Mapping[str, int] | None
    precision: str | None
    flash: bool | None
    cuda_graphs: bool | None
    ep_overlap: bool | None
    dispatcher: str | None
    dispatch: str | None
    overlap: bool | None
    network: str | None
    oversubscription: float | None
    memory_bytes: int | None
    headroom: float | None
    measured_step_s: float | None
    gap: float | None
    work_limit: float | None
    cache: CacheUse | None


class TunedMemory(WireModel):
    """What a pipeline rank holds at its peak, by what it is for."""

    model_config = ConfigDict(json_schema_extra={"examples": [_MEMORY_EXAMPLE]})

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    buffers_bytes: int
    reserved_bytes: int


class TunedRow(WireModel):
    """A configuration with its best schedule: degrees, layers of each stage, time and memory.

    ``id`` tells it from the others of its tune; ``step_ms`` is of the whole step, ``makespan_ms``
    of its pipeline; ``peak_bytes`` of each pipeline rank, everything reserved counted, and
    ``memory`` the same by what it is for; ``method`` made the schedule. ``gpus`` is the accelerator
    of each pipeline rank where there are several kinds, else empty. ``pairs``: forwards and
    backwards run together; ``slices`` of each sequence. ``command`` trains by it, in bash, on each
    host, beside the file that is pasted.
    """

    model_config = ConfigDict(json_schema_extra={"examples": [_TUNED_ROW_EXAMPLE]})

    id: str
    tp: int
    cp: int
    dp: int
    ep: int
    etp: int
    zero: int
    pp: int
    chunks: int
    placement: tuple[int, ...]
    layers: tuple[int, ...]
    micro_batch: int
    num_microbatches: int
    recompute: tuple[str, ...]
    method: str
    step_ms: float
    makespan_ms: float
    tokens_per_s_per_gpu: float
    mfu: float
    peak_bytes: tuple[int, ...]
    memory: tuple[TunedMemory, ...]
    gpus: tuple[str, ...] = ()
    pairs: bool = False
    slices: int = 1
    command: str = ""


class TunedCounts(WireModel):
    """What became of the configurations; those that are open may be as fast as their bounds."""

    model_config = ConfigDict(json_schema_extra={"examples": [_COUNTS_EXAMPLE]})

    total: int
    do_not_fit: int
    excluded: int
    solved: int
    open: int


class ScoreboardError(WireModel):
    """How far estimates of this kind were from published runs, as shares."""

    median: float
    worst: float
    num_rows: int


class Tuned(WireModel):
    """What a tune has found; ``rows`` has the fastest first, ``pareto`` less memory for more time.

    While it goes on it is what is known by now, and so is the certificate. No configuration takes
    less than ``bound_ms`` a step; ``gap`` is how much faster one may be, as a share, ``gain`` how
    much less than ``current`` the fastest takes. ``error`` is null where no such estimate was
    compared with published runs. A device has ``memory_bytes``, of which answers fill
    ``usable_bytes`` at most (of several kinds the smallest's). ``stopped_by``, null while it goes
    on: ``optimal``; ``gap``, as small as was asked; ``time_limit``, ``work_limit`` or
    ``cancelled``; ``looked_at``, where there is no closer look at what may be faster. ``notes``
    say what is not searched though it might be faster, and what the best rests on.
    """

    model_config = ConfigDict(json_schema_extra={"examples": [_TUNED_EXAMPLE]})

    certificate: str
    bound_ms: float | None
    gap: float | None
    gain: float | None
    error: ScoreboardError | None
    counts: TunedCounts
    memory_bytes: int
    usable_bytes: int
    current: TunedRow | None
    rows: tuple[TunedRow, ...]
    pareto: tuple[TunedRow, ...]
    stopped_by: str | None = None
    seconds: float
    notes: tuple[str, ...] = ()
