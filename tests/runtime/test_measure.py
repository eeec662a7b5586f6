"""`measure`: exact bytes, work on a counted clock, and a problem that solves."""

import weakref
from collections import deque
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from optpipe.errors import InputError
from optpipe.measurements import Given
from optpipe.runtime import PreflightError
from optpipe.runtime.measuring import Effort, measure, memory
from optpipe.runtime.measuring.times import measure_bandwidths, message_sizes
from tests.runtime import measured
from tests.runtime.delaying import DelayingLinear
from tests.strategies import few

pytestmark = pytest.mark.usefixtures("few_objects", "one_thread")

ONCE = Effort(repeats=1, warmups=0)
FLOAT = 4
CPU = torch.device("cpu")

quick = partial(measure, effort=ONCE, links=False)


@few(3)
@given(
    width=st.integers(1, 9), inner=st.integers(1, 9), samples=st.integers(1, 9), state=st.just(2)
)
def test_every_byte_of_a_stage_is_counted_once(width, inner, samples, state) -> None:
    """A stage between others: two linear layers, a ReLU whose output is saved once for two."""
    stages = [measured.perceptron(width, inner) for _ in range(3)]
    profile = quick(stages, torch.ones(samples, width), min_offload_bytes=1)
    middle = profile.problem(1).stages[1]
    boundary, saved = FLOAT * samples * width, FLOAT * samples * inner
    assert middle.output_bytes == boundary
    _, offload, recompute = middle.menu
    assert offload.offload_bytes == saved
    # What is left of a sent output is one element.
    assert middle.activation_bytes == saved + boundary + FLOAT
    assert recompute.forward_bytes == boundary
    # Both layers' inputs and output gradients.
    assert middle.weight_context_bytes == 2 * saved + 2 * boundary
    assert middle.static_bytes == FLOAT * 2 * width * inner * (2 + state)


def test_batch_target_and_messages_are_reserved_and_no_activations() -> None:
    """The batch lies on the first and the last device all step long, messages on their way."""
    stages, sample, loss_fn, target = measured.three_perceptrons(microbatch=64)
    profile = quick(stages, sample, loss_fn=loss_fn, target=target)
    problem = profile.problem(10)
    row = FLOAT * 64 * 8
    # One for each micro-batch waits on a device, four are on their way, a pass takes and makes one.
    in_flight = (10 + 4 + 2) * row
    reserved = [device.reserved_bytes for device in problem.devices]
    assert reserved == [10 * row + in_flight, in_flight, 10 * row + in_flight]
    saved = FLOAT * 64 * 16
    kept_bytes = [saved + FLOAT, saved + row + FLOAT]
    assert [stage.activation_bytes for stage in problem.stages[:2]] == kept_bytes
    # The loss saves the difference for its square, and is there itself.
    assert problem.stages[2].activation_bytes == saved + row + row + FLOAT
    assert problem.stages[2].output_bytes == 0


def test_an_output_counts_where_it_is_saved_and_stays_on_the_device() -> None:
    """A stage that ends in a ReLU: its output is what the backward needs, and is sent."""
    ends = nn.Sequential(nn.Linear(4, 6), nn.ReLU())
    stages = [measured.perceptron(4, 6), ends, nn.ReLU()]
    problem = quick(stages, torch.ones(5, 4), min_offload_bytes=1).problem(1)
    stage = problem.stages[1]
    assert stage.output_bytes == FLOAT * 5 * 6
    assert stage.activation_bytes == FLOAT * 5 * 6 + FLOAT * 5 * 4 + FLOAT
    assert stage.offload_bytes == 0


class _Keeps(nn.Module):
    """A linear layer that keeps its outputs, all of them or the last one."""

    def __init__(self, most: int | None) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.kept: deque[torch.Tensor] = deque(maxlen=most)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        self.kept.append(given * 2)
        output: torch.Tensor = self.linear(given)
        return output


class _KeepsForBackward(torch.autograd.Function):
    """Twice a tensor; holds four times as much where no hook sees it."""

    @staticmethod
    def forward(ctx, given):
        ctx.kept = given.repeat(4, 1)
        return given * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class _Shares(nn.Module):
    """A linear layer with a mask that is made once for all micro-batches in flight."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.mask: weakref.ref[torch.Tensor] | None = None

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.linear(given)
        mask = self.mask() if self.mask is not None else None
        mask = torch.ones_like(output) if mask is None else mask
        self.mask = weakref.ref(mask)
        return _Masked.apply(output, mask)  # type: ignore[no-any-return]


class _Masked(torch.autograd.Function):
    """A product that keeps the very mask it was given."""

    @staticmethod
    def forward(ctx, given, mask):
        ctx.mask = mask
        return given * mask

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.mask, None


class _Unseen(nn.Module):
    """A linear layer with a mask that is made where no mode looks, as in compiled code."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        with _disable_current_modes():
            mask = torch.ones(given.shape)
        return self.linear(given) * mask  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        (_Keeps(None), r"holds \d+ bytes after the F of one micro-batch and \d+ after two"),
        (_Keeps(2), r"still holds \d+ bytes after a backward, of \d+ after its F"),
        (_Shares(), r"holds \d+ bytes after the F of one micro-batch and \d+ after two"),
        (_Unseen(), r"autograd saves \d+ bytes in an F, but only \d+ are live after it"),
    ],
    ids=["keeps all", "keeps two", "shares", "unseen"],
)
def test_a_stage_whose_bytes_do_not_add_up_is_refused(stage, message) -> None:
    """What a plan adds up is what lives, within 3%, whoever holds it."""
    with pytest.raises(InputError, match=rf"stage 1:? {message}.* within 3"):
        quick([measured.deep(8, 1), stage, measured.deep(8, 1)], torch.ones(64, 8))


def test_what_autograd_does_not_see_counts_and_stays_on_the_device() -> None:
    """An attribute of a custom function goes with the backward, as a checkpoint's cache does."""
    doubled, layer = measured.Doubled(_KeepsForBackward), measured.deep(8, 1)
    profile = quick([layer, doubled, layer], torch.ones(64, 8), min_offload_bytes=1)
    stage = profile.problem(1).stages[1]
    assert stage.activation_bytes == 5 * 64 * 8 * FLOAT + FLOAT
    assert stage.offload_bytes == 0
    assert any("besides what autograd saves" in note for note in profile.measurements.notes)


class _Routed(nn.Module):
    """Experts that get the rows that are meant for them; the gates are drawn with noise, too."""

    def __init__(self, noise: float) -> None:
        super().__init__()
        self.experts = nn.ModuleList(measured.deep(8, depth) for depth in (1, 3))
        self.noise = noise

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        gate = given.mean(-1) + self.noise * torch.randn(given.shape[:-1])
        output = torch.zeros_like(given)
        for expert, mine in zip(self.experts, (gate < 0, gate >= 0), strict=True):
            output[mine] = expert(given[mine])
        return output


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_a_stage_that_depends_on_data_is_measured_with_its_largest_input(
    noise, monkeypatch
) -> None:
    torch.manual_seed(0)
    sample = torch.randn(64, 8)
    stages = [measured.deep(8, 1), _Routed(noise), measured.deep(8, 1)]
    profile = quick(stages, sample, effort=Effort(repeats=2, warmups=1))
    (note,) = (one for one in profile.measurements.notes if "data-dependent" in one)
    assert note.startswith("Stage 1 is data-dependent: between inputs of one shape")
    routed = profile.results[1]
    assert 0.0 < routed.spread < 0.5
    assert [profile.results[0].spread, profile.results[2].spread] == [0.0, 0.0]
    monkeypatch.setattr(memory, "_NUM_REDRAWN", 0)
    if noise:
        with pytest.raises(InputError, match="a plan must be right within 3"):
            quick(stages, sample)
    else:
        alone = quick(stages, sample).results[1]
        assert alone.footprint.saved_bytes < routed.footprint.saved_bytes


def test_workspaces_are_what_only_lives_inside_a_pass() -> None:
    """A hidden tensor that nobody keeps, and gradients on their way."""
    size = FLOAT * 5 * 4
    stages = [measured.deep(4, 1), nn.Sequential(measured.Thrice(), measured.deep(4, 1))]
    stage = quick(stages, torch.ones(5, 4)).problem(1).stages[1]
    # Three times the input while its sum is made, which stays, and the loss's value of the F.
    assert stage.recompute_workspace_bytes == 3 * size
    # An F that will be recomputed keeps that value alone.
    assert stage.menu[-1].forward_workspace_bytes == 4 * size - FLOAT
    assert stage.forward_workspace_bytes == 3 * size - FLOAT
    assert stage.backward_weight_workspace_bytes == FLOAT * 4 * 4
    assert stage.activation_bytes == 2 * size + FLOAT


def test_only_storages_worth_a_copy_are_offloadable() -> None:
    """The smallest that an OFFLOAD moves is an argument, as in the runner."""
    stages = [measured.perceptron(8, 16) for _ in range(2)]
    size = FLOAT * 4 * 16
    for least, expected in ((size, size), (size + 1, 0)):
        problem = quick(stages, torch.ones(4, 8), min_offload_bytes=least).problem(1)
        assert max(mode.offload_bytes for mode in problem.menus[1]) == expected


def test_times_follow_the_work() -> None:
    """On a clock that counts multiplications, twice the layers take exactly twice as long.

    As in the runner the first stage makes no gradient of the batch.
    """
    clock = measured.WorkClock()
    stages = [measured.deep(6, layers) for layers in (2, 2, 4)]
    with clock.counter:
        profile = quick(stages, torch.ones(5, 6), instruments=measured.with_clock(clock))
    first, two, four = profile.problem(1).stages
    layer = 5 * 6 * 6
    assert (two.forward_ms, two.backward_input_ms, two.backward_weight_ms) == (2 * layer,) * 3
    assert first.backward_input_ms == layer
    assert two.menu[-1].recompute_ms == two.forward_ms
    assert two.backward_ms == two.backward_input_ms + two.backward_weight_ms
    for name in ("forward_ms", "backward_input_ms", "backward_weight_ms", "backward_ms"):
        assert getattr(four, name) == 2 * getattr(two, name) > 0


def test_what_cannot_be_split_has_an_empty_w_and_a_note() -> None:
    """Convolutions make their weight gradients in I."""
    stages, sample = measured.convolutions()
    profile = quick(stages, sample)
    for index, stage in enumerate(profile.problem(1).stages):
        assert stage.backward_weight_ms == 0
        assert stage.weight_context_bytes == 0
        assert stage.backward_input_ms > 0
        assert any(f"Stage {index} cannot be split" in note for note in profile.measurements.notes)
    split = profile.results[0].footprint.split
    assert split.deferred == 0
    assert split.total == sum(p.numel() for p in stages[0].parameters())


@pytest.mark.filterwarnings("ignore")  # of torch's own compiler
def test_compiled_stages_are_split_where_the_runner_splits_them() -> None:
    """Both ask `deferred_bytes`; W has all of the weight gradients, compiled or not."""
    torch.compiler.reset()
    plain, stage = measured.perceptron(6, 12), measured.perceptron(6, 12)
    stage.compile(backend="aot_eager")
    profile = quick([plain, stage], torch.ones(3, 6))
    expected, found = profile.results
    assert found.deferred_bytes == expected.deferred_bytes == FLOAT * 2 * 6 * 12
    assert found.footprint.split == expected.footprint.split
    assert profile.problem(1).stages[1].backward_weight_ms > 0
    assert not any("cannot be split" in note for note in profile.measurements.notes)


def test_modules_that_delay_their_weight_gradients_have_a_w() -> None:
    """As Transformer Engine's: the same bytes and times as of layers that the runtime splits."""

    def delaying(plain: nn.Sequential) -> nn.Sequential:
        parts = (DelayingLinear(one, delay_wgrad_compute=True) if isinstance(one, nn.Linear)
                 else one for one in plain)  # fmt: skip
        return nn.Sequential(*parts)

    clock = measured.WorkClock()
    stages = [measured.perceptron(6, 12), measured.perceptron(6, 12)]
    with clock.counter:
        wanted = quick(
            stages, torch.ones(3, 6), instruments=measured.with_clock(clock), recompute=False
        )
        delayed = list(map(delaying, stages))
        found = quick(
            delayed, torch.ones(3, 6), instruments=measured.with_clock(clock), recompute=False
        )
    ours, theirs = (
        [stage.model_copy(update={"backward_workspace_bytes": 0}) for stage in problem.stages]
        for problem in (found.problem(1), wanted.problem(1))
    )
    assert ours == theirs
    # A B is an I and a W, which starts when the I has ended.
    first, second = (one.problem(1).stages[1].backward_workspace_bytes for one in (found, wanted))
    assert first > second > 0
    for one, plain in zip(found.results, wanted.results, strict=True):
        assert one.deferred_bytes == plain.deferred_bytes == FLOAT * 2 * 6 * 12
        assert one.footprint.split == plain.footprint.split
    refused = nn.Linear(6, 6)
    refused.need_backward_dw = lambda: True  # type: ignore[assignment]
    with pytest.raises(PreflightError, match="the module of stage 0, a Linear, delays its weight"):
        quick([refused, measured.deep(6, 1)], torch.ones(3, 6))


def test_modules_are_left_as_they_were() -> None:
    """Gradients, buffers and random states; dropout draws and batch norm counts in between."""
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    following = measured.deep(4, 1)
    module(torch.ones(3, 4)).sum().backward()
    before = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    buffers = [buffer.clone() for buffer in module.buffers()]
    state = torch.get_rng_state()
    quick([module, following], torch.ones(3, 4))
    after = [p.grad for p in module.parameters() if p.grad is not None]
    assert len(before) == 4
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(buffers, module.buffers(), strict=True))
    assert torch.equal(state, torch.get_rng_state())


class Paced(nn.Module):
    """Takes 4 ms forward and 6 ms backward of a clock."""

    def __init__(self, clock: measured.TurnClock) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.clock = clock

    def forward(self, state: Tensor) -> Tensor:
        self.clock.now += 4
        output: Tensor = state * self.weight
        if output.requires_grad:
            output.register_hook(self._back)
        return output

    def _back(self, _gradient: Tensor) -> None:
        self.clock.now += 6


def _measure_paced(saved_ms: float):
    clock = measured.TurnClock()

    def overlap(forward, backward) -> None:
        backward.run()
        forward.run()
        clock.now -= saved_ms if forward.action.stage == 0 else 0

    return measure(
        [Paced(clock) for _ in range(3)], torch.ones(2), placement=(0, 1, 0),
        instruments=measured.with_clock(clock),
        effort=Effort(3, 1), links=False, overlap=overlap,
    )  # fmt: skip


def test_what_a_pair_hides_is_how_much_shorter_it_was() -> None:
    """Of stages of one device, with the executor that was given; never more than a pass takes."""
    profile = _measure_paced(1.5)
    found = [(one.forward, one.backward, one.with_, one.hidden_ms) for one in profile.pairs]
    assert found == [(0, 0, "B", 1.5), (0, 2, "B", 1.5)]
    known = Given(link_latency_ms=0, link_gb_per_s=10, objective="span")
    problem = profile.problem(4, known)
    assert problem.pairs == profile.pairs
    assert problem.objective == "span"
    links = {(one.source, one.target): one.bandwidth_gb_per_s for one in problem.links}
    assert links == {(0, 1): 10, (1, 0): 10}
    assert problem.format == "optpipe/problem/v2"
    assert {one.hidden_ms for one in _measure_paced(9.0).pairs} == {4.0}
    slower = _measure_paced(-1.0)
    assert slower.pairs == ()
    assert "No pair was shorter" in slower.measurements.notes[-1]


def test_experts_on_several_ranks_measure_their_pairs_together(ranks) -> None:
    """Each pipeline is a group of its own; exchanges of a pair go on in both while they measure."""
    for handed_over, num_pairs in ranks.run(measured.measure_pairs):
        # Of one stage beside itself: B, and I, in a warm-up and two rounds; two exchanges each way.
        assert handed_over == 2 * 3 * 4
        assert num_pairs <= 2


@pytest.mark.parametrize("placement", [(0,), (0, 2), (0, 1, 2), (1, 1), (-1, 0)])
def test_a_placement_that_does_not_fit_is_refused(placement) -> None:
    """The value, the rule, an example."""
    stages = [measured.deep(6, 1) for _ in range(2)]
    with pytest.raises(InputError, match=r"placement \[.*must name a device .*give e.g. \[0, 1\]"):
        quick(stages, torch.ones(5, 6), placement=placement)


def test_frozen_and_misfit_stages_are_named() -> None:
    """Which stage, and why its passes cannot run."""
    with pytest.raises(InputError, match="no output of stage 0 requires a gradient"):
        quick([nn.ReLU(), measured.deep(6, 1)], torch.ones(5, 6))
    with pytest.raises(PreflightError, match=r"stage 1 cannot run on inputs of size \[\(2, 3\)\]"):
        quick(*measured.misfits())
    with pytest.raises(InputError, match="are on meta: they must be on one device, and have"):
        quick([nn.Linear(6, 6, device="meta"), measured.deep(6, 1)], torch.ones(5, 6))
    with pytest.raises(InputError, match="no stages to measure"):
        quick([], torch.ones(1))


@given(
    sizes=st.lists(st.integers(1000, 50_000), min_size=1, max_size=4),
    down=st.floats(0.1, 50),
    up=st.floats(0.1, 50),
)
def test_bandwidths_are_those_of_the_lanes(sizes, down, up) -> None:
    """On lanes of known speed, next to compute that takes no lane."""
    clock = measured.TurnClock()
    copies = measured.PacedCopies(clock, down, up)

    def compute() -> None:
        clock.now += 100

    found = measure_bandwidths(
        copies, clock, sizes, CPU, compute=compute, compute_ms=100, repeats=2
    )
    assert found == pytest.approx((down, up), rel=1e-6)
    assert set(copies.copied) == set(sizes)


@given(st.integers(0, 2**40))
def test_messages_are_sent_in_several_sizes(num_bytes) -> None:
    """The boundary's among them, so that latency and bandwidth are told where they matter."""
    sizes = message_sizes(num_bytes)
    assert list(sizes) == sorted(set(sizes))
    assert min(sizes) > 0
    assert num_bytes in sizes or num_bytes == 0
    assert max(sizes) <= max(1024, num_bytes, 2**28)


def test_ranks_measure_their_stages_and_the_links_between_them(ranks) -> None:
    """Every rank gets the same profile; messages travel between neighbours, also around a V."""
    profiles = ranks.run(measured.measure_perceptrons, (0, 1, 2, 3, 3, 1))
    assert profiles == [profiles[0]] * 4
    found = profiles[0].measurements
    assert {(one.source, one.target) for one in found.transfers} == {(0, 1), (1, 2), (2, 3), (1, 3)}
    boundary = FLOAT * 64 * 8
    assert {one.num_bytes for one in found.transfers} == {
        1024,
        boundary,
        4 * boundary,
        16 * boundary,
    }
    assert all(one.time_ms > 0 for one in found.transfers)
    assert {sample.rank for sample in found.samples if sample.stage == 5} == {1}
    assert not any("One process" in note for note in found.notes)
    assert profiles[0].problem(4).devices[3].memory_bytes > 2**20


@pytest.mark.parametrize(
    ("placement", "broken_rank", "words"),
    [
        ((0, 1, 2, 3), 2, "rank 2 could not measure: stage 2 cannot run on inputs of size [(64, 8"),
        ((0, 1, 2), None, "names 3 devices, but 4 ranks measure"),
    ],
)
def test_what_one_rank_cannot_measure_is_told_on_all(ranks, placement, broken_rank, words) -> None:
    """The same words everywhere, and nobody hangs."""
    texts = ranks.run(measured.measure_perceptrons, placement, broken_rank)
    assert texts == [texts[0]] * 4
    assert words in texts[0]
