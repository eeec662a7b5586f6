"""Groups of modules: what modes say, which modules they mean, and gradients in all of them."""

import re
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from optpipe import Problem, Schedule
from optpipe.memory import modes_of
from optpipe.runtime import PreflightError, groups
from optpipe.runtime.offload import EVERYTHING, REST, Offloader
from optpipe.runtime.passes import Passes, WeightGradients
from optpipe.runtime.treatments import (
    ChangingBuffers,
    GroupCalls,
    OutputChecks,
    Treatment,
    groups_of,
    parse_treatment,
    treatments_of,
)
from optpipe.runtime.watch import Activity
from optpipe.schedule import Action, ActionType
from tests import building
from tests.runtime import batch_cases, cases, schedules, small_cases
from tests.runtime.ranks import fork_ranks

GROUPS = ("attn", "core_attn", "mlp", "norm")
NUM_MICROBATCHES = 12


def all_modes() -> list[Treatment]:
    """Every way to keep, offload or recompute each of four groups, and what is done to a stage."""
    found = []
    for numbers in product(range(3), repeat=len(GROUPS)):
        again, moved = (
            frozenset(name for name, one in zip(GROUPS, numbers, strict=True) if one == which)
            for which in (1, 2)
        )
        # What no group makes goes along in every second one.
        rest = frozenset({REST}) if sum(numbers) % 2 else frozenset()
        found.append(Treatment(again=again, moved=moved | rest))
    whole = [Treatment(apart=True), Treatment(apart=True, moved=EVERYTHING)]
    part = [Treatment(moved=EVERYTHING), Treatment(again=frozenset({"block"}), moved=EVERYTHING)]
    return [one for one in [*found, *whole, *part] if one != Treatment()]


def menu_problem(menu: Sequence[Treatment]) -> Problem:
    """Return a problem of four stages with a menu; its sizes are those of no model."""
    modes: list[dict[str, Any]] = [{"name": "keep"}]
    for one in menu:
        numbers: dict[str, Any] = {"offload_bytes": 1} if one.moved else {}
        if one.apart or one.again:
            where = {"recompute": "apart" if one.apart else "inside", "recompute_ms": 1}
            numbers |= {"forward_bytes": 2, **where}
        modes.append({"name": str(one), **numbers})
    return problem_of(modes)


def problem_of(modes: list[dict[str, Any]]) -> Problem:
    """Return a problem of four stages with these modes."""
    times = dict.fromkeys(("forward_ms", "backward_input_ms", "backward_weight_ms"), 1)
    cost = {**times, "activation_bytes": 4, "modes": modes}
    stages = [{"device": s, "costs": [cost]} for s in range(4)]
    return building.problem(stages, m=NUM_MICROBATCHES, format="optpipe/problem/v2")


def test_gradients_are_those_of_one_process_in_every_mode_of_four_groups(ranks) -> None:
    """Fused and split, each mode on some stage, all of one menu in one step."""
    menu = all_modes()
    half = (len(menu) + 1) // 2
    seen = set()
    for part in (menu[:half], menu[half:]):
        problem = menu_problem(part)
        cells = [(stage, j) for j in range(NUM_MICROBATCHES) for stage in range(4)]
        makers: tuple[Any, ...] = (schedules.one_f_one_b, schedules.zero_bubble_h1)
        for first, make in enumerate(makers):
            number_of = {
                cell: 1 + (index + 5 * first) % len(part) for index, cell in enumerate(cells)
            }
            for cell, number in number_of.items():
                # The first stage has no input that could leave.
                whole = part[number - 1].apart and part[number - 1].moved
                number_of[cell] = 1 if whole and cell[0] == 0 else number
            programs = schedules.in_modes(problem, make(4, NUM_MICROBATCHES), number_of)
            schedule = schedules.make_schedule(problem, programs)
            outcomes = ranks.run(small_cases.train, schedule, problem, None, "transformer", 1)
            assert all(one.losses_equal for one in outcomes)
            assert max(one.worst_difference for one in outcomes) < 1e-15
            assert all(one.live_bytes_after_release == 0 for one in outcomes)
            assert min(one.offloaded_bytes for one in outcomes) > 0
            seen |= {(first, part[number - 1]) for number in number_of.values()}
    assert len(seen) == 2 * len(menu)


def test_what_a_step_is_given_by_keyword_stays_where_it_is(ranks) -> None:
    """Where a stage's input leaves, other micro-batches still read what the caller gave."""
    problem = menu_problem([Treatment(apart=True, moved=EVERYTHING)])
    number_of = {(stage, j): 1 for j in range(NUM_MICROBATCHES) for stage in range(1, 4)}
    programs = schedules.one_f_one_b(4, NUM_MICROBATCHES)
    schedule = schedules.make_schedule(problem, schedules.in_modes(problem, programs, number_of))
    for difference in ranks.run(batch_cases.train_with_one_mask, schedule, problem):
        assert difference < 1e-15


def test_a_stage_that_changes_its_input_is_not_run_again() -> None:
    """In grad mode torch refuses it of what needs a gradient, and of a mask nobody would."""
    module, cell = nn.Identity(), (1, 0)
    device = torch.device("cpu")
    offloader = Offloader({1: module}, device, ())
    treated = {cell: Treatment(apart=True)}
    passes = Passes(offloader, WeightGradients(), treated, 3, device, activity=Activity())
    state, mask = torch.rand(2), torch.ones(2, dtype=torch.bool)
    with passes.forward(*cell, [state, mask]):
        module(state)
    with (
        pytest.raises(PreflightError, match="stage 1 changes an input in place"),
        passes.forward(*cell, [state], [mask]),
    ):
        mask.logical_not_()


# --- What a mode says.

_NAMES = st.sampled_from(["mlp", "norm", "core_attn", "a_1"])


@st.composite
def treatments(draw: st.DrawFn) -> Treatment:
    if draw(st.booleans()):
        return Treatment(apart=True, moved=draw(st.sampled_from([frozenset(), EVERYTHING])))
    again = draw(st.frozensets(_NAMES))
    moved = draw(st.frozensets(st.one_of(_NAMES, st.just(REST)))) - again
    return Treatment(again=again, moved=draw(st.sampled_from([moved, EVERYTHING])))


@given(treatments())
def test_the_text_form_reads_back(treatment: Treatment) -> None:
    assert parse_treatment(str(treatment)) == treatment


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("half", "'half' is not a treatment"),
        ("keep, offload mlp", "is not a treatment: 'keep' is unknown"),
        ("offload  mlp", "is not a treatment"),
        ("offload mlp+norm", "is not a treatment"),
        ("offload mlp,norm", "is not a treatment"),
        ("recompute mlp, recompute norm", "has recompute twice, or in the wrong order"),
        ("offload mlp, recompute norm", "has recompute twice, or in the wrong order"),
        ("offload mlp + mlp", "names a group twice"),
        (
            "recompute rest",
            "rest, the tensors saved outside all groups, cannot be",
        ),
        ("recompute mlp, offload mlp", "offloads what it recomputes"),
        ("recompute, offload mlp", "offloads what it recomputes"),
        ("", "is not a treatment"),
    ],
)
def test_what_is_no_text_form_is_refused(text: str, message: str) -> None:
    with pytest.raises(PreflightError, match=re.escape(message)):
        parse_treatment(text)


# --- Which modules groups are.


class _Shape(nn.Module):
    """A stage whose modules have names with dots, as those of published blocks, and run nothing."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        for name in names:
            place: nn.Module = self
            for part in name.split("."):
                if not hasattr(place, part):
                    place.add_module(part, nn.Module())
                place = getattr(place, part)


def _named(stage: nn.Module) -> dict[str, list[str]]:
    name_of = {part: name for name, part in stage.named_modules()}
    return {
        name: sorted(name_of[part] for part in parts) for name, parts in groups_of(stage).items()
    }


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (  # Llama's, as in Hugging Face's
            [
                "layers.0.input_layernorm",
                "layers.0.self_attn.q_proj",
                "layers.0.mlp.act_fn",
                "norm",
            ],
            {
                "norm": ["layers.0.input_layernorm", "norm"],
                "attn": ["layers.0.self_attn"],
                "act": ["layers.0.mlp.act_fn"],
                "mlp": ["layers.0.mlp"],
                "block": ["layers.0"],
            },
        ),
        (  # GPT's, as in GPT-2 and in Megatron's
            ["h.0.ln_1", "h.0.attn", "h.0.mlp.act", "h.1.self_attention.core_attention", "h.1.mlp"],
            {
                "norm": ["h.0.ln_1"],
                "attn": ["h.0.attn", "h.1.self_attention"],
                "core_attn": ["h.1.self_attention.core_attention"],
                "act": ["h.0.mlp.act"],
                "mlp": ["h.0.mlp", "h.1.mlp"],
                "block": ["h.0", "h.1"],
            },
        ),
        (  # MoE's, as in torchtitan's and Mixtral's
            ["layers.0.attention.inner_attention", "layers.0.moe.experts", "layers.1.feed_forward"],
            {
                "attn": ["layers.0.attention"],
                "core_attn": ["layers.0.attention.inner_attention"],
                "mlp": ["layers.1.feed_forward"],
                "moe": ["layers.0.moe"],
                "experts": ["layers.0.moe.experts"],
                "block": ["layers.0", "layers.1"],
            },
        ),
    ],
)
def test_groups_are_found_by_attribute_names(names, found) -> None:
    assert _named(_Shape(names)) == found


def test_declared_groups_count_in_place_of_those_by_names() -> None:
    stage = _Shape(["a.mlp.in", "a.mlp.out", "b.mlp.in", "b.norm"])
    part = stage.get_submodule
    some = [part("a.mlp"), part("b"), part("b.norm")]
    groups(stage, {"ins": ["mlp.in"], "some": some, "os": ["o*t"]})
    wrapper = nn.Sequential(stage)
    assert _named(wrapper) == {
        "ins": ["0.a.mlp.in", "0.b.mlp.in"],
        "some": ["0.a.mlp", "0.b"],
        "os": ["0.a.mlp.out"],
    }
    with pytest.raises(PreflightError, match="no module of the stage matches 'lmp'"):
        groups(stage, {"mlp": ["lmp"]})
    with pytest.raises(PreflightError, match="no module of the stage matches Linear"):
        groups(stage, {"mlp": [nn.Linear(1, 1)]})
    with pytest.raises(PreflightError, match="a group cannot be called 'rest'"):
        groups(stage, {"rest": ["mlp"]})


# --- What is refused before the first step.


def _treated(mode: dict[str, Any], stage: nn.Module, index: int = 1) -> Treatment:
    another = {"name": "another", "recompute": "inside", "recompute_ms": 1}
    problem = problem_of([{"name": "keep"}, mode, another])
    program = (Action(index, ActionType.FORWARD, 0, 1),)
    return treatments_of(problem, program, modes_of(problem, program), {index: stage})[index, 0]


_INSIDE = {"recompute": "inside", "recompute_ms": 1}
_APART = {"recompute": "apart", "recompute_ms": 1}


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ({"name": "recompute attn", **_INSIDE}, "names attn, but the groups of the stage are"),
        ({"name": "half", "offload_bytes": 1}, "'half' is not a treatment"),
        ({"name": "recompute mlp", **_APART}, "recomputes inside and offloads nothing; its"),
        ({"name": "offload mlp"}, "its numbers recompute nothing and offload 0 bytes"),
        ({"name": "recompute mlp", "offload_bytes": 1, **_INSIDE}, "inside and offload 1 bytes;"),
        ({"name": "recompute shut", **_INSIDE}, "treats shut, which run in compiled code"),
    ],
)  # fmt: skip
def test_a_mode_that_a_stage_cannot_do_is_refused(mode, message) -> None:
    """Its groups, its numbers, its words; and modules that are compiled."""
    stage = _Shape(["0.mlp"])
    if "shut" in mode["name"]:
        shut = nn.Linear(2, 2)
        shut.compile(backend="aot_eager")
        stage.add_module("shut", shut)
        groups(stage, {"shut": [shut]})
    with pytest.raises(PreflightError, match=re.escape(message)):
        _treated(mode, stage)


def test_the_batch_is_not_offloaded() -> None:
    mode = {"name": "recompute, offload", "offload_bytes": 1, **_APART}
    with pytest.raises(PreflightError, match="the first stage, which is the batch"):
        _treated(mode, _Shape(["0.mlp"]), 0)


def test_ranks_refuse_modes_together(ranks) -> None:
    """A menu of groups that stages do not have, and modes without their problem."""
    problem = menu_problem([Treatment(again=frozenset({"mlp", "lost"}))])
    number_of = dict.fromkeys([(2, 3)], 1)
    rows = schedules.one_f_one_b(4, NUM_MICROBATCHES)
    schedule = schedules.make_schedule(problem, schedules.in_modes(problem, rows, number_of))
    texts = ranks.run(cases.refused, [schedule] * 4, problem)
    assert texts == [texts[0]] * 4
    assert "rank 2: mode 1 of stage 2 ('recompute lost + mlp') names lost" in texts[0]
    assert (
        "2F3@1 names a mode, and without its problem" in ranks.run(cases.refused, [schedule] * 4)[0]
    )


# --- Random numbers and buffers of what runs again inside the backward.


class _Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = cases.Noisy(), cases.Noisy()

    def forward(self, given: Tensor) -> Tensor:
        output: Tensor = self.second(self.first(given, scale=given.cos()), scale=given)
        return output.square().sum()


def test_what_runs_again_inside_sees_the_random_numbers_and_buffers_of_its_forward() -> None:
    """Two micro-batches on their way; also of tensors that modules take by name."""
    found = []
    for again in (frozenset[str](), frozenset({"all"})):
        torch.manual_seed(3)
        stage = _Two().double()
        groups(stage, {"all": ["first", "second"]})
        calls, results, batch = GroupCalls(stage), [], torch.randn(2, 5, 6, dtype=torch.float64)
        reruns: list[nn.Module] = []
        calls.rerun_context = lambda part, seen=reruns: nullcontext(seen.append(part))  # type: ignore[misc]
        for one in batch:
            with calls.running(again):
                results.append(stage(one))
        for result in results:
            result.backward()
        assert len(reruns) == 2 * 2 * len(again)
        assert not any("forward" in vars(part) for part in stage.modules())
        found.append([*stage.buffers(), *(part.grad for part in stage.parameters())])
    assert len(found[0]) == 10 + 8
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


# --- What does something else when it runs again.

_ON_ONE_RANK = [cases.KEPT_ON_ONE_RANK]


def _recomputed(mode: str) -> tuple[Schedule, Problem]:
    """Two stages on one rank, all of whose micro-batches are recomputed."""
    numbers = _INSIDE if mode == "recompute all" else _APART
    menu = [{"name": "keep"}, {"name": mode, "forward_bytes": 2, **numbers}]
    times = dict.fromkeys(("forward_ms", "backward_input_ms", "backward_weight_ms"), 1)
    stage = {"device": 0, "costs": [{**times, "activation_bytes": 4, "modes": menu}]}
    problem = building.problem([stage, stage], m=2, format="optpipe/problem/v2")
    number_of = {(s, j): 1 for s in range(2) for j in range(2)}
    programs = schedules.in_modes(problem, schedules.from_text(_ON_ONE_RANK), number_of)
    return schedules.make_schedule(problem, programs), problem


@pytest.mark.parametrize(
    ("mode", "fault", "what"),
    [
        ("recompute", "random", "the RECOMPUTE of stage 1, micro-batch"),
        ("recompute", "generator", "the RECOMPUTE of stage 1, micro-batch"),
        ("recompute", "masked", "the RECOMPUTE of stage 1, micro-batch"),
        ("recompute", "encoder", "the RECOMPUTE of stage 1, micro-batch"),
        ("recompute all", "random", "the recomputation of 0 of stage 1, micro-batch"),
        ("recompute all", "generator", "the recomputation of 0 of stage 1, micro-batch"),
    ],
)
@pytest.mark.parametrize("begins_at", [0, 1])
def test_a_recomputation_that_returns_something_else_is_refused(
    ranks, mode, fault, what, begins_at
):
    """In the first step, and where the fault begins after the runner took its schedule anew."""
    on = [False] * begins_at + [True]
    run = partial(cases.run_again, renews=True)
    found = ranks.run(run, *_recomputed(mode), fault, on)[0]
    assert found.differences == [0.0] * begins_at
    text = found.refusals[-1]
    assert text.startswith(f"PreflightError: rank 0: the outputs of {what}"), text
    assert re.search(r"differ from those of its F by about \d(\.\d+)? of their size", text)
    assert "global generator" in text


@pytest.mark.parametrize(("begins_at", "num_steps"), [(0, 1), (1, 3)])
def test_groups_that_return_something_else_are_refused_within_as_many_steps_as_calls(
    ranks, begins_at, num_steps
):
    """At once in the first step, though only the second micro-batch's are unlike; later in turn."""
    on = [False] * begins_at + [True] * num_steps
    run = partial(cases.run_again, second_only=True)
    found = ranks.run(run, *_recomputed("recompute all"), "random", on)[0]
    assert "the recomputation of 0 of stage 1, micro-batch 1, differ" in found.refusals[-1]


@pytest.mark.parametrize("is_infinite", [False, True])
def test_what_is_infinite_is_compared(is_infinite):
    """Elements that become infinite, or stop to be; and the others."""
    checks = OutputChecks()
    first = torch.tensor([[1.0, -torch.inf], [torch.nan, 2.0]]).repeat(1, 4)
    again = first.clone()
    again[0, 0] = torch.inf if is_infinite else 3.0
    for other, text in (
        (first, ""),
        (again, "finite" if is_infinite else "of their size"),
    ):
        for tensor in (first, other):
            checks.add(0, "the RECOMPUTE", tensor)
        with pytest.raises(PreflightError, match=text) if text else nullcontext():
            checks.check(0)


def test_a_complex_output_is_compared():
    """Of a conjugate torch makes no real numbers."""
    checks = OutputChecks()
    for factor in (1.0, 1.5):
        checks.add(0, "the RECOMPUTE", factor * torch.ones(3, dtype=torch.complex64).conj())
    with pytest.raises(PreflightError, match=r"by about 0\.5 of their size"):
        checks.check(0)


def test_a_small_difference_in_half_precision_is_seen():
    """Of any 100 changes of 3%, whatever the signs; and no rounding is taken for one."""
    checks = OutputChecks()
    generator = torch.Generator().manual_seed(1)
    first = torch.randn(64, 64, generator=generator)
    for _ in range(100):
        for change, text in ((0.03, "of their size"), (0.0, "")):
            noise = change * torch.randn(64, 64, generator=generator)
            for tensor in (
                first,
                first * (1 + 1e-3 * torch.randn(64, 64, generator=generator)) + noise,
            ):
                checks.add(0, "the RECOMPUTE", tensor.half())
            with pytest.raises(PreflightError, match=text) if text else nullcontext():
                checks.check(0)


def test_a_recomputation_is_compared_in_every_step(tmp_path):
    """One rank refuses its second step; the other one hears of it, and its processes end."""
    first, second = fork_ranks(cases.recompute_unlike_on_rank_1, 2, tmp_path)
    assert (first.code, second.code) == (10, 11), first.output + second.output
    assert "rank 1: PreflightError: rank 1: the outputs of the RECOMPUTE of" in second.output
    assert "rank 0: RankError" in first.output
    assert "rank 1: the outputs of the RECOMPUTE of stage 1, micro-batch" in first.output


@pytest.mark.parametrize("second_only", [False, True])
@pytest.mark.parametrize("fault", ["buffer", "replaced", "data"])
@pytest.mark.parametrize("mode", ["recompute", "recompute all"])
def test_a_small_buffer_that_first_changes_later_is_put_back(ranks, mode, fault, second_only):
    """Gradients are bit for bit those of kept stages.

    The change comes in a later step, in its first F, or in one behind which an earlier micro-batch
    is recomputed.
    """
    run = partial(cases.run_again, second_only=second_only)
    found = ranks.run(run, *_recomputed(mode), fault, [False, True, True])[0]
    assert found.refusals == [""] * 3
    assert found.differences == [0.0] * 3


@pytest.mark.parametrize("mode", ["recompute", "recompute all"])
def test_a_large_buffer_that_first_changes_later_is_refused_by_name(ranks, mode):
    """And not one that changes from the first forward on."""
    given = (*_recomputed(mode), "table")
    assert ranks.run(cases.run_again, *given, [True, True])[0].differences == [0.0] * 2
    found = ranks.run(cases.run_again, *given, [False, True])[0]
    assert "table of 131072 bytes was first written into after the first" in found.refusals[1]


class Counting(nn.Module):
    """Counts its calls, if gradients are recorded, as Megatron's routers count tokens."""

    count: Tensor
    seen: Tensor

    def __init__(self, kind: str) -> None:
        super().__init__()
        self._kind = kind
        self.register_buffer("count", torch.zeros(1))
        self.register_buffer("seen", torch.zeros(1, dtype=torch.bool))

    def forward(self, given: Tensor) -> Tensor:
        if torch.is_grad_enabled() and self._kind == "replaced":
            self.count = self.count + 1
        elif torch.is_grad_enabled() and self._kind == "maximum":
            self.count.copy_(torch.maximum(self.count, given.abs().amax()))
        elif torch.is_grad_enabled():
            self.count += 1
            self.seen.fill_(1)
        return given


@pytest.mark.parametrize("kind", ["replaced", "added", "shared"])
def test_what_a_module_counts_with_gradients_alone_is_counted_once(kind):
    """By the recomputations, whose F's had none, and by the F between them that is kept."""
    modules = [Counting(kind), Counting(kind)]
    if kind == "shared":
        modules[1].count = modules[0].count
    model = nn.Sequential(*modules)
    buffers = ChangingBuffers(model)
    for call in range(2):
        with buffers.recorded(call), torch.no_grad():
            model(torch.ones(1))
    model(torch.ones(1))
    for call in range(2):
        with buffers.restored(call):
            model(torch.ones(1))
    assert [int(one.count) for one in modules] == [6 if kind == "shared" else 3] * 2
    assert all(bool(one.seen) == (kind != "replaced") for one in modules)


def test_a_maximum_over_several_recomputations_is_refused():
    """Of one at a time it is right."""
    module = Counting("maximum")
    buffers = ChangingBuffers(module)
    for call in range(4):
        with buffers.recorded(call), torch.no_grad():
            module(torch.ones(1))
        if call < 2:
            with buffers.restored(call):
                module(torch.full((1,), 1.25 + call))
            assert float(module.count) == 1.25 + call
    with buffers.restored(2):
        module(torch.full((1,), 5.75))
    with (
        pytest.raises(PreflightError, match="buffer count changes only where gradients are"),
        buffers.restored(3),
    ):
        module(torch.full((1,), 3.0))


def test_another_rounding_of_a_recomputation_is_no_fault(ranks):
    """An LSTM without a graph runs another kernel, which differs in the last digits."""
    run = partial(cases.run_again, dtype=torch.float32)
    found = ranks.run(run, *_recomputed("recompute"), "lstm", [True, True])[0]
    assert found.refusals == [""] * 2
    assert max(found.differences) < 1e-6
