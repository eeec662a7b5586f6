"""Whole estimates: what they add up to, and what changes them."""

import inspect
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from optpipe.cli.estimate import estimate_problem
from optpipe.cli.options import flags_of
from optpipe.errors import FieldError, FieldRef, FieldSentence, InputError, plain
from optpipe.formats.json import dump_problem, load_problem
from optpipe.planning import (
    GPUS,
    MODELS,
    Estimate,
    LayerForm,
    Training,
    estimate,
    find_gpu,
    find_model,
)
from optpipe.planning.accelerators import Efficiency
from optpipe.planning.accuracy import ERRORS
from optpipe.planning.costs import model_flops
from optpipe.planning.parameters import (
    RankParameters,
    layer_parameters,
    newton_schulz_flops,
    static_bytes,
)
from optpipe.planning.shape import Lora, Optimizer
from optpipe.planning.step import StepEstimate, asked_placement, balanced_sizes
from optpipe.requests import EstimateRequest
from optpipe.simulate import simulate
from optpipe_solver.families.classic import build_interleaved, build_one_f_one_b
from tests.strategies import few

LLAMA, H100 = find_model("llama3-8b"), find_gpu("h100")


def estimated(shape=LLAMA, gpu=H100, pp=4, num_microbatches=8, training=None, **options):
    """Llama 3 8B on four H100, unless said otherwise."""
    training = training or Training(sequence=2048)
    return estimate(shape, gpu, training, pp=pp, num_microbatches=num_microbatches, **options)


def total_ms(found: Estimate) -> float:
    """F, I and W of one micro-batch over all stages."""
    return sum(
        s.forward_ms + s.backward_input_ms + s.backward_weight_ms for s in found.problem.stages
    )


@few(25)
@given(
    st.sampled_from(sorted(MODELS)),
    st.sampled_from(sorted(GPUS)),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 8]),
    st.sampled_from([("linear", 1), ("loop", 2), ("v", 2)]),
)
def test_every_model_on_every_accelerator_is_a_problem(name, gpu, pp, tp, shape) -> None:
    model = MODELS[name]
    assume(model.num_heads % tp == 0)
    placement, chunks = shape
    found = estimated(
        model, GPUS[gpu], pp, training=Training(sequence=512, tp=tp), placement=placement,
        chunks=chunks,
    )  # fmt: skip
    assert sum(found.sizes) == model.num_layers + model.mtp + 2
    assert found.problem.placement == found.placement
    again = found.model.problem(found.placement, found.sizes)
    assert again.problem_hash == found.problem.problem_hash
    assert again.stages == found.problem.stages
    assert 0 < found.mfu < 1
    assert all(stage.can_recompute for stage in found.problem.stages)


def test_the_utilisation_is_the_one_asked_for() -> None:
    plain, scaled = estimated(), estimated(mfu=0.3)
    flops = model_flops(LLAMA, Training(sequence=2048))
    reached = flops / (989.4e12 * total_ms(scaled) / 1e3)
    assert reached == pytest.approx(0.3, rel=1e-4)
    assert scaled.mfu == pytest.approx(0.3)
    assert scaled.sizes == plain.sizes
    ratio = total_ms(scaled) / total_ms(plain)
    for ours, theirs in zip(scaled.problem.stages, plain.problem.stages, strict=True):
        assert ours.forward_ms == pytest.approx(ratio * theirs.forward_ms, rel=1e-4)
        assert ours.activation_bytes == theirs.activation_bytes


def test_the_peak_is_never_beaten() -> None:
    """With every efficiency 1 the utilisation of stored scores stays below 1."""
    perfect = Efficiency(matmul=1, narrow=1, attention=1, memory=1, pcie=1, network=1)
    found = estimated(training=Training(sequence=2048, flash=False), efficiency=perfect)
    assert estimated().mfu < found.mfu < 1


def test_pcie_and_memory_are_as_given() -> None:
    """A share of PCIe 5, and the limit in bytes."""
    device = estimated(pcie_efficiency=0.5, memory_bytes=40_000_000_000).problem.devices[0]
    assert device.d2h_gb_per_s == device.h2d_gb_per_s == 31.5
    assert device.memory_bytes == 40_000_000_000
    assert estimated(gpu=find_gpu("cpu")).problem.devices[0].d2h_gb_per_s is None


def cells_ms(found: Estimate) -> list[float]:
    """F, I and W of one micro-batch on each device."""
    busy = [0.0] * len(found.problem.devices)
    for stage in found.problem.stages:
        busy[stage.device] += stage.forward_ms + stage.backward_input_ms + stage.backward_weight_ms
    return busy


@few(12)
@given(
    st.sampled_from([
        ("llama3-70b", {"tp": 4, "dp": 2, "precision": "fp8"}, "h100"),
        ("qwen3-235b-a22b", {"tp": 2, "dp": 16, "ep": 32}, "h100"),
        ("deepseek-v3-mtp", {"dp": 64, "ep": 64, "precision": "mxfp8"}, "gb200"),
        ("gpt-oss-120b", {"dp": 16, "ep": 8}, "b300"),
        ("gemma3-27b", {"dp": 2, "zero": 0}, "mi300x"),
        ("llama3-70b", {"tp": 4, "dp": 2, "precision": "fp8", "lora": Lora(rank=16)}, "h100"),
        ("deepseek-v3-mtp", {"dp": 64, "ep": 64, "lora": Lora()}, "gb200"),
        ("gemma3-27b", {"dp": 2, "zero": 0, "lora": Lora()}, "mi300x"),
    ]),
    st.sampled_from([("linear", 1, "balanced"), ("linear", 1, "even"), ("loop", 2, "even")]),
    st.sampled_from([8, 24]),
)  # fmt: skip
def test_the_problem_and_the_step_are_one_model(run, cut, m) -> None:
    """Every device works as long in both; its static bytes are the same; 1F1B takes as long.

    The simulator's 1F1B and the formula's differ by what unequal stages and messages do together.
    """
    name, degrees, gpu = run
    placement, chunks, layout = cut
    found = estimated(
        find_model(name), find_gpu(gpu), 4, m, Training(sequence=4096, **degrees),
        placement=placement, chunks=chunks, layout=layout,
    )  # fmt: skip
    assert cells_ms(found) == pytest.approx(found.step.busy_ms, rel=1e-5)
    for index, memory in enumerate(found.step.memory):
        static = memory.weights + memory.gradients + memory.optimizer
        assert found.problem.static_bytes_of(index) == pytest.approx(static, abs=200)
        messages = 8 * found.problem.stages[0].output_bytes
        assert found.problem.devices[index].reserved_bytes == memory.reserved + messages
    build = build_interleaved if chunks > 1 else build_one_f_one_b
    problem = found.problem.model_copy(
        update={
            "devices": tuple(
                device.model_copy(update={"memory_bytes": 2**50})
                for device in found.problem.devices
            )
        }
    )
    simulated = simulate(problem, build(problem)).makespan_ms
    assert found.step.pipeline_ms == pytest.approx(simulated, rel=0.03)
    after = found.step.reduction_ms + found.step.gather_ms + found.step.optimizer_ms
    assert found.step.step_ms == pytest.approx(found.step.pipeline_ms + after)


def test_one_measured_step_calibrates_every_time() -> None:
    """The step becomes what was measured, and the factor carries it to other configurations."""
    plain = estimated()
    measured = estimated(measured_step_s=2 * plain.step.step_ms / 1e3)
    assert measured.step.step_ms == pytest.approx(2 * plain.step.step_ms)
    assert measured.factor == pytest.approx(2)
    assert cells_ms(measured) == pytest.approx([2 * ms for ms in cells_ms(plain)], rel=1e-4)
    other, again = estimated(pp=2), estimated(pp=2, time_factor=measured.factor)
    assert again.step.step_ms == pytest.approx(2 * other.step.step_ms)
    rate = plain.problem.links[0].bandwidth_gb_per_s
    assert measured.problem.links[0].bandwidth_gb_per_s == pytest.approx(rate / 2)
    devices = (measured.problem.devices[0], plain.problem.devices[0])
    assert devices[0].d2h_gb_per_s == devices[1].d2h_gb_per_s


def test_one_measured_peak_calibrates_activations_and_buffers() -> None:
    llama, training = find_model("llama3-70b"), Training(tp=4, sequence=8192)
    free = estimated(llama, training=training)
    found = estimated(llama, training=training, measured_peak_gib=90.0)
    assert found.step.peak.allocated == pytest.approx(90 * 2**30, rel=1e-6)
    assert found.step.peak.weights == free.step.peak.weights
    assert found.step.step_ms == free.step.step_ms
    kept = [one.problem.stages[1].activation_bytes for one in (free, found)]
    assert kept[1] == pytest.approx(found.byte_factor * kept[0], rel=1e-6)
    again = estimated(llama, training=training, byte_factor=found.byte_factor)
    assert again.problem == found.problem
    with pytest.raises(FieldError, match="a peak between these is expected"):
        estimated(llama, training=training, measured_peak_gib=1.0)


def test_two_kinds_of_accelerators_share_a_pipeline() -> None:
    """The slower has fewer layers, its own memory and its own times; hosts are apart."""
    a100 = find_gpu("a100")
    found = estimated(gpu=[H100, H100, a100, a100])
    assert min(found.sizes[:2]) > max(found.sizes[2:])
    assert [device.memory_bytes for device in found.problem.devices] == [
        int(gpu.memory_bytes.value) for gpu in (H100, H100, a100, a100)
    ]
    assert max(cells_ms(found)) < max(cells_ms(estimated(gpu=a100)))
    assert found.problem.devices[1].host != found.problem.devices[2].host
    with pytest.raises(FieldError, match="3 accelerators for 4 pipeline ranks"):
        estimated(gpu=[H100, H100, a100])


def test_an_estimate_has_the_errors_of_its_class() -> None:
    """By kind, generation and precision; nothing where nothing was compared or times are given."""
    assert estimated().error.error == ERRORS["dense, hopper, wide products"]
    fp8 = estimated(training=Training(precision="fp8")).error
    assert fp8.error == ERRORS["dense, hopper, narrow products"]
    moe = find_model("qwen3-30b-a3b")
    assert estimated(moe).error.wanted == "experts, hopper, wide products"
    assert estimated(moe, find_gpu("gb200")).error.kind == "experts"
    assert estimated(gpu=find_gpu("mi300x")).error is None
    assert estimated(gpu=[H100, H100, H100, find_gpu("a100")]).error is None
    assert estimated(measured_step_s=9.0).error is None
    assert estimated(mfu=0.4).error is None
    assert estimated(time_factor=1.1).error.is_calibrated


def test_slower_networks_make_slower_steps() -> None:
    """Between nodes only: boundary messages and gradients."""
    training = Training(sequence=2048, tp=8, dp=4)
    llama = find_model("llama3-70b")
    steps = [
        estimated(llama, H100.on_network(text, share), 4, training=training).step.step_ms
        for text, share in ((None, 1), ("infiniband:200", 1), ("ethernet:100", 1),
                            ("ethernet:100", 4), ("tcp:10", 1))
    ]  # fmt: skip
    assert steps == sorted(steps)
    assert len(set(steps)) == len(steps)
    for wrong in ("wifi", "ethernet:", "ethernet:0", "ethernet:fast"):
        with pytest.raises(FieldError, match="network"):
            H100.on_network(wrong)


def test_stages_of_one_node_are_joined_by_its_own_links() -> None:
    """Eight ranks of tp 8 are eight nodes; of tp 2 four share one; of tp 1 all do."""
    apart = estimated(find_model("llama3-70b"), pp=8, training=Training(sequence=2048, tp=8))
    assert len(apart.problem.hosts) == 8
    assert {link.bandwidth_gb_per_s for link in apart.problem.links} == {40.0}
    mixed = estimated(find_model("llama3-70b"), pp=8, training=Training(sequence=2048, tp=2))
    assert len(mixed.problem.hosts) == 2
    rates = {(a.source, a.target): a.bandwidth_gb_per_s for a in mixed.problem.links}
    assert rates[2, 3] == 360.0
    assert rates[3, 4] == 40.0
    together = estimated(pp=8)
    assert {link.bandwidth_gb_per_s for link in together.problem.links} == {360.0}


def test_boundary_tensors_are_split_with_the_residual_stream() -> None:
    """Sequence parallelism sends 1 / tp of them."""
    whole = Training(sequence=2048, tp=2, sequence_parallel=False)
    split = replace(whole, sequence_parallel=True)
    sizes = [estimated(training=t).problem.stages[0].output_bytes for t in (whole, split)]
    assert sizes == [2048 * 4096 * 2, 2048 * 4096]


def test_data_parallelism_adds_a_reduction_and_spreads_the_optimizer() -> None:
    """Half a ring all-reduce of fp32 gradients with ZeRO, a whole one without; none alone."""
    alone = estimated()
    spread, full = (
        estimated(training=Training(sequence=2048, dp=8, zero=zero, overlap=False))
        for zero in (1, 0)
    )
    assert alone.step.reduction_ms == 0
    assert full.step.reduction_ms == pytest.approx(2 * spread.step.reduction_ms, rel=1e-4)
    parameters = max(memory.weights for memory in alone.step.memory) / 2
    expected = parameters * 4 * 7 / 8 / (450e6 * 0.8)
    assert spread.step.reduction_ms == pytest.approx(expected, rel=1e-3)
    assert spread.step.gather_ms == pytest.approx(expected / 2, rel=1e-3)
    assert full.step.gather_ms == 0
    sizes = [found.problem.stages[1].static_bytes for found in (alone, spread, full)]
    assert sizes == [sizes[0], pytest.approx(sizes[0] * 7.5 / 18), sizes[0]]


def test_a_tied_matrix_is_held_once_on_one_device_and_twice_on_several() -> None:
    shape = find_model("llama3.2-1b")
    one, two = (estimated(shape, pp=pp).problem for pp in (1, 2))
    more = sum(stage.static_bytes for stage in two.stages) - one.stages[0].static_bytes
    assert more == 18 * shape.vocab * shape.hidden
    assert one.stages[0].static_bytes == 18 * 1_235_814_400


@pytest.mark.parametrize(
    ("model", "training", "parts"),
    [
        # The static bytes alone are too many.
        ("llama3-70b", {}, ("gpu0 does not even hold its static bytes", "Raise pp, tp, ep or dp")),
        (
            "deepseek-v3",
            {"ep": 8, "dp": 8},
            ("multi-token prediction", "balanced over the experts"),
        ),
    ],
)
def test_what_does_not_fit_and_what_is_left_out_is_said(model, training, parts) -> None:
    found = estimated(find_model(model), pp=2, training=Training(sequence=2048, **training))
    notes = " ".join(map(str, found.notes))
    assert all(part in notes for part in (*parts, "not measured"))


def test_a_multi_token_module_needs_in_its_backward_what_its_layer_does() -> None:
    shape, training = find_model("deepseek-v3-mtp"), Training(tp=8, dp=8, ep=64)
    found = estimate(shape, find_gpu("h100"), training, pp=63, num_microbatches=63)
    *_, layer, module, _ = found.problem.stages
    assert layer.backward_workspace_bytes > 0
    assert module.backward_workspace_bytes == layer.backward_workspace_bytes


@pytest.mark.parametrize(
    ("training", "named"),
    [
        ({"tp": 3, "sequence": 4098}, "tp = 3 does not divide heads = 32"),
        ({"dp": 4, "ep": 3}, "ep = 3 x etp = 1 does not divide tp x cp x dp = 4"),
        ({"dp": 2, "ep": 2}, "does not divide the 1 experts"),
        ({"cp": 3}, "sequence = 4096 is no multiple of 3"),
        ({"zero": 4}, "zero = 4"),
        ({"recompute": frozenset({"all"})}, "recompute = 'all'"),
        ({"dispatcher": "pigeon"}, "'pigeon'"),
        ({"precision": "int8"}, "'int8'"),
        ({"micro_batch": 0}, "micro_batch = 0"),
    ],
)
def test_degrees_that_divide_nothing_are_refused(training, named) -> None:
    with pytest.raises(InputError, match=named):
        estimated(training=Training(**training))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"mfu": 0.0}, "mfu = 0.0"),
        ({"pp": 64}, "64 stages, but only 34 layers"),
        ({"pp": 10**9}, "1000000000 stages, but only 34 layers"),
        ({"shape": replace(LLAMA, num_layers=10**9)}, "more than 4096"),
        (
            {"shape": find_model("deepseek-v3-mtp"), "pp": 64, "layout": "even"},
            "64 stages, but only 61 layers: an even cut leaves one with none; take layout balanced",
        ),
        ({"num_microbatches": 0}, "num_microbatches = 0: must be >= 1"),
        ({"mfu": 0.4, "time_factor": 2.0}, "mfu and time_factor"),
        ({"measured_step_s": -1.0}, "measured_step_s = -1.0"),
        ({"layout": "fair"}, "layout = 'fair'"),
        ({"num_microbatches": 10**8}, "exceeds 2000000"),
        ({"training": Training(sequence=10**12)}, "must be <= "),
        ({"training": Training(dp=10**12)}, "parallelism.dp = 1000000000000: must be <= "),
        ({"gpu": find_gpu("a100"), "training": Training(precision="fp8")}, "no fp8 products"),
    ],
)
def test_impossible_estimates_are_refused(options, named) -> None:
    with pytest.raises(InputError, match=named):
        estimated(**options)


# The even cut against all cuts, and placements.


def stage_times(times, sizes) -> list[float]:
    """Time of each stage of a cut."""
    ends = [0]
    for size in sizes:
        ends.append(ends[-1] + size)
    return [sum(times[a:b]) for a, b in pairwise(ends)]


def all_cuts(count, stages) -> list[tuple[int, ...]]:
    """Every way to cut so many layers into so many stages."""
    return [
        tuple(b - a for a, b in pairwise((0, *inner, count)))
        for inner in combinations(range(1, count), stages - 1)
    ]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.data())
def test_no_cut_has_a_faster_slowest_stage_or_is_more_even(times, data) -> None:
    """Least largest stage first, least sum of squares second, by trying every cut."""
    stages = data.draw(st.integers(1, len(times)))
    sizes = balanced_sizes([float(t) for t in times], stages)
    assert min(sizes) >= 1
    assert sum(sizes) == len(times)

    def value(cut) -> tuple[float, float]:
        found = stage_times(times, cut)
        return max(found), sum(t * t for t in found)

    assert value(sizes) == min(value(cut) for cut in all_cuts(len(times), stages))


def test_of_equal_cuts_the_slow_stages_stand_first() -> None:
    """They wait for fewer forwards and are waited for by fewer backwards."""
    assert balanced_sizes([1.0] * 82, 8) == (11, 11, *[10] * 6)


@pytest.mark.parametrize(
    ("name", "chunks", "named"),
    [("line", 1, "'line'"), ("linear", 2, "one stage per device"), ("v", 0, "at least 1")],
)
def test_wrong_placements_are_refused(name, chunks, named) -> None:
    with pytest.raises(InputError, match=named):
        asked_placement(name, 4, chunks)


# Sentences about what was asked, for each who asks.


def test_a_sentence_names_fields_as_the_asker_knows_them() -> None:
    """Names and values over HTTP and in Python, flags on the command line."""
    sentence = FieldSentence(
        (FieldRef("tp", 3), " does not divide 32; lower ", FieldRef("num_microbatches"))
    )
    assert str(sentence) == "tp = 3 does not divide 32; lower num_microbatches"
    assert (
        sentence.text(flags_of(EstimateRequest))
        == "--tp 3 does not divide 32; lower --microbatches"
    )
    assert sentence.text(plain) == str(sentence)


@pytest.mark.parametrize("n", [31, 32])
def test_nearly_all_layers_may_be_offloaded(n) -> None:
    """What then stays is less than a recomputation keeps of a layer's input."""
    stages = estimated(training=Training(sequence=2048, offloaded_layers=n)).problem.stages
    plain = estimated(training=Training(sequence=2048)).problem.stages
    for stage, whole in zip(stages[1:-1], plain[1:-1], strict=True):
        assert stage.activation_bytes < 0.1 * whole.activation_bytes


def test_packed_sequences_share_learned_positions() -> None:
    """Each begins at the first one; the longest must find its own."""
    shape = find_model("gpt3-125m")
    training = Training(sequence=4096, lengths=(2048, 2048))
    training.check_divides(shape)
    with pytest.raises(FieldError, match=r"^lengths = 2049: 'gpt3-125m' has 2048 learned posit"):
        replace(training, lengths=(2049, 2047)).check_divides(shape)


def test_every_field_of_an_estimate_is_an_option() -> None:
    """A sentence never names an option that the command does not have."""
    fields = {*inspect.signature(estimate).parameters, *Training.__dataclass_fields__}
    fields |= {"expert_imbalance", "expert_capacity", "expert_rank_capacity", "pad_experts"}
    fields |= {"optimizer_offload", "precision_aware_optimizer", "exp_avg_dtype", "gradient_dtype"}
    fields |= {"lora_rank", "lora_targets", "packed_lengths"}
    not_options = {"shape", "hardware", "training", "efficiency", "slice_index"}
    not_options |= {"routing", "lora"}
    options = set(inspect.signature(estimate_problem).parameters)
    assert fields - not_options <= options
    flag = flags_of(EstimateRequest)
    assert [flag(name, None) for name in ("num_microbatches", "memory_bytes", "tp")] == [
        *("--microbatches", "--memory-gb", "--tp")
    ]


# Slices of sequences.


@pytest.mark.parametrize(
    ("training", "modes"),
    [
        (Training(sequence=4096, tp=2), 0),
        (Training(sequence=4096, cp=2, recompute=frozenset({"full"})), 0),
        (Training(sequence=4096, precision="fp8"), 8),
        (Training(sequence=4096, flash=False), 0),
    ],
)
def test_slices_are_their_whole_cut_up(training: Training, modes: int) -> None:
    """Each attends to those before it; keys and values stay, whatever a mode does."""
    n, training = 4, replace(training, cuda_graphs=True)
    cuts = {"pp": 2, "num_microbatches": 3, "training": training, "modes": modes}
    whole, cut = estimated(**cuts).problem, estimated(**cuts, slices=n).problem
    assert [one.sample for one in cut.microbatches] == [0] * n + [1] * n + [2] * n
    assert [one.cost for one in cut.microbatches] == [*range(n)] * 3
    assert load_problem(dump_problem(cut)) == cut
    kinds = {len(menu) for menu in zip(*cut.menus_by_cost, strict=True) for menu in menu}
    assert kinds == {len(menu) for menu in cut.menus}
    kv_bytes = 2 * 1024 // training.tp * (4096 // n // training.cp) * 2
    for s, stage in enumerate(whole.stages):
        slices = [stages[s] for stages in cut.stages_by_cost]
        total = sum(one.forward_ms for one in slices)
        assert stage.forward_ms <= total * 1.001 or not training.flash
        if training.flash and training.cp == 1:
            assert total == pytest.approx(stage.forward_ms, rel=0.1)
        grows = [b.forward_ms - a.forward_ms for a, b in pairwise(slices)]
        assert min(grows) > 0
        assert grows == pytest.approx([grows[0]] * (n - 1), rel=1e-3)
        layers = stage.layers.transformer
        least = min(min(m.least_bytes for m in menus[s]) for menus in cut.menus_by_cost)
        assert least >= layers * kv_bytes
        sizes = [one.activation_bytes for one in slices]
        assert sizes[0] - sizes[-1] == layers * kv_bytes or not training.flash
    with pytest.raises(FieldError, match="no multiple of"):
        estimated(**cuts, slices=3)


# The optimizer.


@pytest.mark.parametrize(
    ("optimizer", "per_parameter", "gradient"),
    [
        (Optimizer(), 12, 4),
        (Optimizer(precision_aware=True), 2 + 8, 4),
        (Optimizer(precision_aware=True, exp_avg="bf16", exp_avg_sq="fp8", gradients="bf16"),
         2 + 2 + 1, 2),
        (Optimizer(name="sgd"), 4 + 4, 4),
        (Optimizer(offload=0.25), 9, 4),
        (Optimizer(offload=1.0), 0, 4),
    ],
)  # fmt: skip
def test_the_optimizer_decides_the_static_bytes(
    optimizer: Optimizer, per_parameter: int, gradient: int
) -> None:
    """By Megatron-Core's types; what is on the CPU takes no memory of the device."""
    counts = RankParameters(1_000_000)
    found = static_bytes(counts, Training(optimizer=optimizer, dp=4))
    assert (found.weights, found.gradients) == (2e6, gradient * 1e6)
    assert found.optimizer == pytest.approx(per_parameter * 1e6 / 4)


def test_an_optimizer_on_the_cpu_costs_time_and_narrow_gradients_save_it() -> None:
    def step(**fields: Any) -> StepEstimate:
        training = Training(dp=8, optimizer=Optimizer(**fields))
        found: StepEstimate = estimated(training=training).step
        return found

    usual, cpu, narrow = step(), step(offload=1.0), step(gradients="bf16")
    assert cpu.optimizer_ms > 5 * usual.optimizer_ms
    assert cpu.step_ms - usual.step_ms == pytest.approx(cpu.optimizer_ms - usual.optimizer_ms)
    assert narrow.reduction_ms < 0.6 * usual.reduction_ms
    assert narrow.optimizer_ms < usual.optimizer_ms


def test_muon_has_one_moment_and_orthogonalises_matrices() -> None:
    """Bytes: 4 less for the matrices of layers. FLOPs: 4 m^2 n + 2 m^3 of an m x n matrix."""
    run = Training(tp=2, dp=4, zero=1)
    adam, muon = (
        estimated(pp=2, training=replace(run, optimizer=Optimizer(name=name))).step
        for name in ("adam", "muon")
    )
    layer = layer_parameters(LLAMA, LayerForm(False), tp=2)
    layers = [size - 1 for size in adam.sizes]  # without embedding and head
    for count, a, b in zip(layers, adam.memory, muon.memory, strict=True):
        assert a.optimizer - b.optimizer == pytest.approx(4 * count * layer.total / 4, rel=2e-3)
    assert muon.optimizer_ms > adam.optimizer_ms
    assert newton_schulz_flops([(8, 4), (4, 8)]) == 2 * (4 * 4 * 4 * 8 + 2 * 4**3)
    assert newton_schulz_flops([(4096, 4096)]) == 6 * 4096**3
    for refused in (replace(run, zero=3), replace(run, precision="fp16")):
        with pytest.raises(FieldError, match="whole gradients and weights"):
            estimated(training=replace(refused, optimizer=Optimizer(name="muon")))


def test_settings_of_an_optimizer_that_exclude_each_other_are_refused() -> None:
    for fields, named in (
        ({"exp_avg": "bf16"}, "exp_avg_dtype = 'bf16'"),
        ({"name": "sgd", "precision_aware": True}, "optimizer = 'sgd'"),
        ({"offload": 1.5}, "optimizer_offload = 1.5"),
    ):
        with pytest.raises(FieldError, match=named):
            Optimizer(**fields)
    whole = Training(zero=0, optimizer=Optimizer(precision_aware=True))
    with pytest.raises(FieldError, match="distributed optimizer"):
        whole.check_divides(find_model("llama3-8b"))
