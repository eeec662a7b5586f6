"""Menus by formulas: a mode's numbers are those of a run that recomputes as much."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from optpipe import ActionType, Problem, Programs, dump_problem, find_violations, load_problem
from optpipe.errors import FieldError
from optpipe.formats.json import dump_model, load_model
from optpipe.model import Layer
from optpipe.planning import Estimate, Training, estimate, find_gpu, find_model
from optpipe.planning.menus import layer_treatments, one_f_one_b_modes
from optpipe.problem import CellMode, Stage, StageLayers
from optpipe.stage import choose
from optpipe_solver.families.classic import build_one_f_one_b
from optpipe_solver.feasibility import feasibility

if TYPE_CHECKING:
    from collections.abc import Callable

H100 = find_gpu("h100")
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "stored scores": ("gpt3-6.7b", {"flash": False, "tp": 2, "sequence": 2048}),
    "lean": ("llama3-8b", {"lean": True, "cp": 2, "precision": "fp8"}),
    "experts": ("deepseek-v3-mtp", {"ep": 16, "dp": 32, "sequence": 2048}),
    "hidden experts": (
        "qwen3-30b-a3b",
        {"ep": 8, "dp": 8, "ep_overlap": True, "cuda_graphs": True},
    ),
    "windows": ("gemma3-27b", {"tp": 2, "recompute": frozenset({"layernorm"})}),
}
RUN_PARAMETERS = [
    pytest.param(run, marks=[pytest.mark.extended] if run in {"experts", "windows"} else [])
    for run in RUNS
]


def estimated(name: str, training: Training, modes: int = 0, **options: object) -> Estimate:
    """Four stages of equally many layers, whatever takes longer."""
    given: dict[str, Any] = {"pp": 4, "num_microbatches": 8, "layout": "even", **options}
    return estimate(find_model(name), H100, training, modes=modes, **given)


def passes_ms(stage: Stage | Layer) -> float:
    return stage.forward_ms + stage.backward_input_ms + stage.backward_weight_ms


@pytest.mark.parametrize("run", RUN_PARAMETERS)
def test_a_mode_is_what_a_run_that_recomputes_as_much_would_be(run) -> None:
    """Bytes and times of every mode of the stages, and of the same cut of the model: sums over
    layers, the first ones from a run that recomputes all in full, all others from one that does
    not, or half of each."""
    name, given = RUNS[run]
    training = Training(**given)
    runs = {str(one): one.applied(training) for one in layer_treatments(find_model(name), training)}
    runs["layers"] = replace(training, recompute=training.recompute | {"full"})
    found = estimated(name, training, modes=64)
    assert found.step == estimated(name, training).step
    layers = {
        treatment: [
            layer for layer in estimated(name, one).model.layers for layer in [layer] * layer.repeat
        ]
        for treatment, one in runs.items()
    }
    seen = set()
    for problem in (found.problem, found.model.problem(found.placement, found.sizes)):
        end = 0
        for stage, size in zip(problem.stages, found.sizes, strict=True):
            start, end = end, end + size
            for mode in stage.menu[1:]:
                if mode.recompute == "apart":
                    assert mode.recompute_ms == pytest.approx(stage.forward_ms, rel=1e-6)
                    continue
                treatment, some, share = _read(mode.name)
                rest, whole = (layers[one][start:end] for one in (treatment, "layers"))
                weights = _weights(rest, some)
                _check(stage, mode, _Expected.of(rest, whole, weights), share)
                seen.add((treatment, some, share))
    assert {(treatment, 0, 0.0) for treatment in runs} & seen
    assert {some for _, some, _ in seen if some}
    assert {share for *_, share in seen} >= {0.0, 1.0}


def _read(name: str) -> tuple[str, float, float]:
    """Return the treatment, how many layers are recomputed in full (or 0.5), and what moves."""
    *clauses, last = name.split(", ")
    share = {"offload": 1.0, "offload half": 0.5}.get(last, 0.0)
    clauses += [] if share else [last]
    words = ", ".join(clauses).removeprefix("recompute ").split(", ")
    if "half of the layers" in words[-1]:
        return (words[0] if len(words) == 2 else ""), 0.5, share
    if " of " not in words[-1]:
        return words[0], 0, share
    return (words[0] if len(words) == 2 else ""), int(words[-1].partition(" of ")[0]), share


def _weights(layers: list[Layer], some: float) -> list[float]:
    """Return how much of each layer is recomputed in full."""
    said = [layer.layers or StageLayers() for layer in layers]
    counts = [one.transformer + one.mtp for one in said]
    if some == 0.5:
        return [some * one for one in counts]
    before = [sum(counts[:n]) for n in range(len(counts))]
    return [float(bool(one) and n < some) for one, n in zip(counts, before, strict=True)]


class _Expected(NamedTuple):
    kept: float
    offloaded: float
    passes_ms: float
    workspace: int
    is_exact: bool

    @classmethod
    def of(cls, rest: list[Layer], whole: list[Layer], weights: list[float]) -> _Expected:
        both = list(zip(rest, whole, weights, strict=True))

        def total(of: Callable[[Layer], float]) -> float:
            return sum((1 - w) * of(a) + w * of(b) for a, b, w in both)

        used = [one for a, b, w in both for one in ([a] * (w < 1) + [b] * (w > 0))]
        kinds = {one.name for one in rest} - {"embedding", "head"}
        return cls(
            total(lambda one: one.activation_bytes),
            total(lambda one: one.offload_bytes),
            total(passes_ms),
            max(one.backward_workspace_bytes for one in used),
            len(kinds) == 1,
        )


def _check(stage: Stage, mode: CellMode, expected: _Expected, share: float) -> None:
    assert mode.forward_bytes == pytest.approx(expected.kept, abs=200)
    assert mode.offload_bytes == pytest.approx(share * expected.offloaded, abs=200)
    assert mode.weight_context_bytes == stage.weight_context_bytes
    assert passes_ms(stage) + mode.inside_ms == pytest.approx(expected.passes_ms, rel=1e-5)
    beside = mode.inside_bytes + mode.backward_workspace_bytes
    assert beside >= expected.workspace
    if expected.is_exact:
        assert beside == pytest.approx(expected.workspace, abs=200)


@pytest.mark.parametrize("run", [*RUN_PARAMETERS, "launches"])
def test_a_menu_is_short_and_nothing_on_it_is_beaten(run) -> None:
    """What v1 can say; of a few more what leaves least between F and backward, and what leaves
    least in the backward; files keep it."""
    name, given = RUNS.get(run, ("gpt3-125m", {"sequence": 1024}))  # whose host is slower
    every = estimated(name, Training(**given), modes=64).problem
    for most in (3, 8):
        found = estimated(name, Training(**given), modes=most)
        assert load_problem(dump_problem(found.problem)) == found.problem
        assert load_model(dump_model(found.model)) == found.model
        for stage, wide in zip(found.problem.stages, every.stages, strict=True):
            keep, *others = stage.menu
            assert keep.name == "keep"
            assert {"offload", "recompute"} <= {mode.name for mode in others}
            assert len(others) < most
            numbers = [_numbers(mode) for mode in stage.menu]
            for mode, mine in zip(stage.menu, numbers, strict=True):
                beaten = [
                    all(a <= b for a, b in zip(other, mine, strict=True)) for other in numbers
                ]
                assert beaten.count(True) == 1 or mode.name in ("keep", "offload", "recompute")
            if most == 8:
                for moment in (0, 1):
                    least = min(_numbers(mode)[moment] for mode in wide.menu)
                    assert min(one[moment] for one in numbers) == least


def _numbers(mode: CellMode) -> tuple[float, ...]:
    in_backward = mode.backward_bytes + mode.inside_bytes
    return mode.least_bytes, in_backward, mode.recompute_ms, mode.offload_bytes


class _Offer(NamedTuple):
    name: str
    offload_bytes: int
    recompute_ms: float = 0.0
    forward_bytes: int = 100

    @property
    def sizes(self) -> tuple[int, ...]:
        return (self.forward_bytes - self.offload_bytes,)


@pytest.mark.parametrize(("hidden_ms", "chosen"), [(20.0, "again"), (10.0, "half")])
def test_half_is_offloaded_where_copies_of_all_take_longer_than_computing(
    hidden_ms, chosen
) -> None:
    """Copies of all take 20 ms; recomputation that frees a quarter takes 6."""
    options = [_Offer("half", 50), _Offer("all", 100), _Offer("again", 0, 6.0, 75)]
    menu = choose(_Offer("keep", 0), options, most=3, transfer_ms=0.2, hidden_ms=hidden_ms)
    assert {one.name for one in menu} == {"keep", "all", chosen}


def test_a_little_is_recomputed_where_copies_of_all_take_a_little_too_long() -> None:
    """Norms make less to copy; at nine tenths of PCIe a schedule hides all of it."""
    fast, slow = (
        estimated("llama3-70b", Training(tp=8), 8, pcie_efficiency=share).problem.menus[1]
        for share in (0.9, 0.35)
    )
    mixed = "recompute layernorm, offload"
    assert mixed not in {mode.name for mode in fast}
    assert mixed in {mode.name for mode in slow}


def test_a_long_context_fits_by_its_menu_alone() -> None:
    """128k tokens of Llama 3 70B with tp 8 and pp 8, no context parallelism: the whole activation
    of a stage never fits beside its weights; layer by layer it does."""
    training = Training(tp=8, sequence=131_072)
    plain, found = (
        estimated("llama3-70b", training, modes, pp=8, num_microbatches=16) for modes in (0, 8)
    )
    assert feasibility(plain.problem).needs
    assert feasibility(found.problem).plan is not None
    assert not any("1F1B fits" in str(note) for note in plain.notes)
    modes = one_f_one_b_modes(found.problem)
    assert modes is not None
    assert any(f"1F1B fits: {modes[0].name} (" in str(note) for note in found.notes)
    assert not find_violations(found.problem, _in_modes(found.problem, modes))
    for s, mode in enumerate(modes):
        cheaper = [one for one in found.problem.menus[s] if one.inside_ms < mode.inside_ms]
        for other in cheaper:
            if not other.offload_bytes and other.recompute != "apart":
                changed = (*modes[:s], other, *modes[s + 1 :])
                assert find_violations(found.problem, _in_modes(found.problem, changed))


def _in_modes(problem: Problem, modes: tuple[CellMode, ...]) -> Programs:
    """Return 1F1B with one mode per stage."""
    numbers = [menu.index(mode) for menu, mode in zip(problem.menus, modes, strict=True)]
    return tuple(
        tuple(
            action._replace(mode=numbers[action.stage])
            if action.type is ActionType.FORWARD
            else action
            for action in program
        )
        for program in build_one_f_one_b(problem)
    )


def test_each_kind_of_accelerator_has_its_own_times() -> None:
    """An A100 recomputes more slowly; what nothing can be copied from offers no offload."""
    a100, cpu = find_gpu("a100"), find_gpu("cpu")
    shape, training = find_model("llama3-8b"), Training(sequence=2048)
    found = estimate(
        shape, [H100, H100, a100, a100], training, pp=4, num_microbatches=4, modes=8, layout="even"
    )
    menus = [{mode.name: mode for mode in stage.menu} for stage in found.problem.stages]
    name = "recompute"
    assert menus[2][name].recompute_ms > 1.5 * menus[1][name].recompute_ms
    few, many = (
        estimate(shape, cpu, training, pp=4, num_microbatches=4, modes=most).problem
        for most in (3, 64)
    )
    assert not any(mode.offload_bytes for menu in many.menus for mode in menu)
    for short, long in zip(few.menus, many.menus, strict=True):
        assert min(_numbers(mode)[1] for mode in short) == min(_numbers(mode)[1] for mode in long)


@pytest.mark.parametrize("modes", [1, 2, 65, -3])
def test_menus_of_other_sizes_are_refused(modes) -> None:
    with pytest.raises(FieldError, match=f"modes = {modes}: must be 3 to 64"):
        estimated("llama3-8b", Training(), modes=modes)
