"""Suites of problems: each yields names and problems, the same ones each time.

``instances`` are the stored ones of `benchmarks.instances.make`. The others are made here:

``menus``
    Menus of at most 8 modes from `estimate` for Llama 8B, 70B and 405B, Qwen3-235B and
    DeepSeek-V3, with copies of 21 GB/s (PipeOffload's code reaches these on an H100), and from
    ``optpipe profile --modes 8`` of the tiny GPT (``instances/measured``), with copies of a stage
    as long as its F, I and W. Messages queue on every link. Each problem has ``uniform`` modes, one
    for all micro-batches of a stage, or ``free`` ones, and one of three memory limits. Of the bytes
    between the smallest memory of v1's menu and as many whole activations as there are devices,
    ``tight`` has 5%, ``medium`` 20%, ``loose`` 50%. Two more have 128k tokens and the memory of the
    card, which v1's menu never fits.
``pairs``
    p = 4, 8 and 16 devices of two equal chunks each, a V or a loop. F = I = W = 1 ms. Every F may
    run with every B of its device, and hides 5, 10, 20 or 33% of the two. There are 2p, 3p, 4p or
    6p micro-batches, and memory for p/2 + 1 up to DualPipeV's 2p + 1 activations of a chunk, in
    four steps. Each p and placement has each limit once, with another share and number each time.
``slices``
    Llama 3 8B and 70B at 128k and 1M tokens on H100 of 80 GB, whole micro-batches and slices.
    ``full`` recomputes every layer in full, as whole micro-batches of that length are trained
    today. ``modes`` has menus of up to eight modes per stage, ``v1`` keep, offload and recompute.
    ``less`` has slices on devices with less memory than 1F1B fills with ``full``. SlimPipe's
    exchange of attention between devices is not modelled. Times and bytes are estimated.

No function imports the solver before it is called: the process of CP-SAT imports this module, and
OR-tools cannot be loaded next to HiGHS.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.ledger import INSTANCES, index
from benchmarks.ledger import load_problem as load_instance
from optpipe import Problem, load_problem
from optpipe.memory import device_peak_bytes
from optpipe.planning import Training, estimate, find_gpu, find_model
from optpipe.stage import WORKSPACES, Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["SUITES", "as_v1", "large_menus", "large_problem", "problem_in_pairs", "v1_menus"]


def instances() -> Iterator[tuple[str, Problem]]:
    """Yield the stored instances."""
    for row in index():
        yield row["name"], load_instance(row["name"])


# --- Menus of modes.

_MEASURED = INSTANCES / "measured" / "tiny_gpt.json"
_COPIES_GB_PER_S = 21.0
_LIMITS = {"tight": 0.05, "medium": 0.2, "loose": 0.5}


def menus() -> Iterator[tuple[str, Problem]]:
    """Yield the problems with menus of modes."""
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
    found = load_problem(_MEASURED.read_text(encoding="utf-8"))
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
    """Return a problem in v1's fields, each workspace the largest of the modes that it replaces.

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


# --- Forwards and backwards in pairs.

_SHARES, _ROUNDS = (33, 20, 10, 5), (2, 3, 4, 6)


def pairs() -> Iterator[tuple[str, Problem]]:
    """Yield the problems whose F and B may run together."""
    for number, (p, shape) in enumerate((p, shape) for p in (4, 8, 16) for shape in ("v", "loop")):
        for step in range(4):
            share = _SHARES[(step + number) % 4]
            m = p * _ROUNDS[(step + 2 * number + number // 4) % 4]
            room = p // 2 + 1 + step * (3 * p // 2) // 3
            yield (
                f"{shape}-p{p}-m{m}-{share}%-{room}",
                problem_in_pairs(p, shape, m, share / 100, room),
            )


def problem_in_pairs(p: int, shape: str, m: int, share: float, room: int) -> Problem:
    """Return a problem of the set: hidden share of F and B, room in activations of a chunk."""
    around = range(p) if shape == "loop" else reversed(range(p))
    placement = [*range(p), *around]
    work = {"forward_ms": 1.0, "backward_input_ms": 1.0, "backward_weight_ms": 1.0}
    ms = {33: 1.0}.get(round(100 * share), 3 * share)
    licences: list[dict[str, Any]] = [
        {"forward": a, "backward": b, "hidden_ms": ms}
        for a, here in enumerate(placement)
        for b, there in enumerate(placement)
        if here == there
    ]
    return Problem.parse(
        {
            "format": "optpipe/problem/v2",
            "num_microbatches": m,
            "devices": [{"memory_bytes": room}] * p,
            "stages": [
                {"device": d, "costs": [{**work, "activation_bytes": 1}]} for d in placement
            ],
            "pairs": licences,
        }
    )


# --- Slices of sequences.


class SlicesCase(NamedTuple):
    """A model, tokens per sequence, degrees of parallelism, and micro-batches of a step."""

    model: str
    tokens: int
    tp: int
    cp: int
    pp: int
    num_microbatches: int
    slices: tuple[int, ...]


_CASES = {
    "8b-128k": SlicesCase("llama3-8b", 2**17, 4, 1, 4, 8, (4, 16)),
    "8b-1m": SlicesCase("llama3-8b", 2**20, 8, 2, 8, 4, (8, 32)),
    "70b-128k": SlicesCase("llama3-70b", 2**17, 8, 1, 8, 8, (8, 16)),
    "70b-1m": SlicesCase("llama3-70b", 2**20, 8, 4, 16, 4, (16, 32)),
}


def slices() -> Iterator[tuple[str, Problem]]:
    """Yield the problems of long sequences, whole and in slices."""
    from optpipe_solver.families.classic import build_one_f_one_b

    for name, case in _CASES.items():
        fullest = 0
        for label, full, modes, slices in (
            ("whole full", True, 0, 1),
            ("whole v1", False, 0, 1),
            ("whole modes", False, 8, 1),
            *((f"{n} slices {menu}", False, modes, n)
              for n in case.slices for menu, modes in (("v1", 0), ("modes", 8))),
            *((f"{n} slices v1 less", False, 0, n) for n in case.slices),
        ):  # fmt: skip
            training = Training(
                sequence=case.tokens,
                tp=case.tp,
                cp=case.cp,
                recompute=frozenset({"full"} if full else ()),
            )
            found = estimate(
                find_model(case.model),
                find_gpu("h100"),
                training,
                pp=case.pp,
                num_microbatches=case.num_microbatches,
                modes=modes,
                slices=slices,
            )
            problem = found.problem
            if label == "whole full":
                fullest = max(
                    device_peak_bytes(problem, at, row)
                    for at, row in enumerate(build_one_f_one_b(problem))
                )
            if label.endswith("less"):
                update = {"memory_bytes": fullest - 1}
                devices = [device.model_copy(update=update) for device in problem.devices]
                problem = problem.model_copy(update={"devices": tuple(devices)})
            yield f"{name} {label}", problem


# --- Problems far above the others.


def large_problem(num_devices: int, m: int, chunks: int, memory_bytes: float) -> Problem:
    """Return a problem of nearly equal stages of 100 MB a micro-batch, nothing to offload."""
    stages = [
        {
            "device": s % num_devices,
            "forward_ms": 10.0 + (s % 3) * 0.1,
            "backward_input_ms": 11.0,
            "backward_weight_ms": 9.0,
            "activation_bytes": 100_000_000,
            "weight_context_bytes": 20_000_000,
            "output_bytes": 8_000_000,
        }
        for s in range(num_devices * chunks)
    ]
    devices = [{"memory_bytes": int(memory_bytes)}] * num_devices
    return Problem.parse({"num_microbatches": m, "devices": devices, "stages": stages})


SUITES: dict[str, Callable[[], Iterator[tuple[str, Problem]]]] = {
    "instances": instances,
    "menus": menus,
    "pairs": pairs,
    "slices": slices,
}
