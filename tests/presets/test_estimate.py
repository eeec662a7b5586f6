"""Whole estimates: what they add up to, and what changes them."""

import inspect
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from optpipe.cli.estimate import estimate_problem
from optpipe.errors import InputError
from optpipe.presets import (
    GPUS,
    MODELS,
    AskedError,
    AskedSentence,
    Estimate,
    Training,
    estimate,
    find_gpu,
    find_model,
)
from optpipe.presets.catalogue import Efficiency
from optpipe.presets.costs import model_flops
from optpipe.presets.estimate import asked_placement, balanced_sizes
from optpipe.presets.shape import Field, flag, plain
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
    assert sum(found.sizes) == model.num_layers + 2
    assert found.problem.placement == found.placement
    assert found.model.problem(found.placement, found.sizes) == found.problem
    assert 0 < found.mfu < 1
    assert all(stage.can_recompute for stage in found.problem.stages)


def test_the_utilisation_is_the_one_asked_for() -> None:
    plain, scaled = estimated(), estimated(mfu=0.3)
    flops = model_flops(LLAMA, Training(sequence=2048))
    reached = flops / (989.4e12 * total_ms(scaled) / 1e3)
    assert reached == pytest.approx(0.3, rel=1e-4)
    assert scaled.mfu == 0.3
    assert scaled.sizes == plain.sizes
    ratio = total_ms(scaled) / total_ms(plain)
    for ours, theirs in zip(scaled.problem.stages, plain.problem.stages, strict=True):
        assert ours.forward_ms == pytest.approx(ratio * theirs.forward_ms, rel=1e-4)
        assert ours.activation_bytes == theirs.activation_bytes


def test_the_peak_is_never_beaten() -> None:
    """With every efficiency 1 the utilisation of stored scores stays below 1."""
    perfect = Efficiency(matmul=1, attention=1, memory=1, pcie=1, network=1)
    found = estimated(training=Training(sequence=2048, flash=False), efficiency=perfect)
    assert estimated().mfu < found.mfu < 1


def test_pcie_and_memory_are_as_given() -> None:
    efficiency = H100.efficiency.with_pcie(0.5)
    device = estimated(efficiency=efficiency, memory_bytes=40_000_000_000).problem.devices[0]
    assert device.d2h_gb_per_s == device.h2d_gb_per_s == 31.5
    assert device.memory_bytes == 40_000_000_000
    assert estimated(gpu=find_gpu("cpu")).problem.devices[0].d2h_gb_per_s is None


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
    alone = estimated().problem.stages[1]
    spread, full = (
        estimated(training=Training(sequence=2048, dp=8, zero=zero)).problem.stages[1]
        for zero in (1, 0)
    )
    assert alone.grad_sync_ms == 0
    assert full.grad_sync_ms == pytest.approx(2 * spread.grad_sync_ms, rel=1e-4)
    parameters = alone.static_bytes / 18
    expected = parameters * 4 * 7 / 8 / (450e6 * 0.8)
    assert spread.grad_sync_ms == pytest.approx(expected, rel=1e-3)
    assert spread.static_bytes == pytest.approx(parameters * 7.5)
    assert full.static_bytes == alone.static_bytes


def test_a_tied_matrix_is_held_once_on_one_device_and_twice_on_several() -> None:
    shape = find_model("llama3.2-1b")
    one, two = (estimated(shape, pp=pp).problem for pp in (1, 2))
    more = sum(stage.static_bytes for stage in two.stages) - one.stages[0].static_bytes
    assert more == 18 * shape.vocab * shape.hidden
    assert one.stages[0].static_bytes == 18 * 1_235_814_400


def test_what_cannot_fit_is_said() -> None:
    """Llama 3 70B on one GPU: the static bytes alone are too many."""
    notes = " ".join(map(str, estimated(find_model("llama3-70b"), pp=2).notes))
    assert "gpu0 does not even hold its static bytes" in notes
    assert "Raise pp, tp, ep or dp" in notes
    assert "not measured" in notes


def test_what_an_estimate_leaves_out_is_said() -> None:
    """Of DeepSeek-V3 the extra module, and that routing is balanced."""
    training = Training(sequence=2048, ep=8, dp=8)
    notes = " ".join(map(str, estimated(find_model("deepseek-v3"), training=training).notes))
    assert "multi-token prediction" in notes
    assert "balanced over the experts" in notes


@pytest.mark.parametrize(
    ("training", "named"),
    [
        ({"tp": 3, "sequence": 4098}, "tp = 3 does not divide heads = 32"),
        ({"dp": 4, "ep": 3}, "ep = 3 does not divide dp = 4"),
        ({"dp": 2, "ep": 2}, "does not divide the 1 experts"),
        ({"cp": 3}, "sequence = 4096 is no multiple of 3"),
        ({"zero": 3}, "zero = 3"),
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
        ({"num_microbatches": 0}, "num_microbatches = 0: must be >= 1"),
        ({"num_microbatches": 10**8}, "exceeds 2000000"),
        ({"training": Training(sequence=10**12)}, "must be <= "),
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


def test_a_heavy_head_takes_layers_from_the_last_stage() -> None:
    assert balanced_sizes([0.1, *[1.0] * 8, 2.0], 2) == (6, 4)


def test_placements() -> None:
    assert asked_placement("linear", 3, 1) == (0, 1, 2)
    assert asked_placement("loop", 3, 2) == (0, 1, 2, 0, 1, 2)
    assert asked_placement("v", 3, 3) == (0, 1, 2, 2, 1, 0, 0, 1, 2)


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
    sentence = AskedSentence(
        (Field("tp", 3), " does not divide 32; lower ", Field("num_microbatches"))
    )
    assert str(sentence) == "tp = 3 does not divide 32; lower num_microbatches"
    assert sentence.told(flag) == "--tp 3 does not divide 32; lower --microbatches"
    assert sentence.told(plain) == str(sentence)


def test_an_error_is_its_plain_sentence() -> None:
    """Who does not know the parts reads it like any other error."""
    with pytest.raises(AskedError, match=r"^zero = 7: must be 0, 1 or 2; choose one$") as caught:
        Training(zero=7)
    assert caught.value.sentence.told(flag).startswith("--zero 7:")


def test_every_field_has_a_flag() -> None:
    """A sentence never sends people to an option that the command has not."""
    fields = {*inspect.signature(estimate).parameters, *Training.__dataclass_fields__}
    not_asked = {"shape", "hardware", "training", "efficiency"}
    flags = {flag(Field(name)) for name in fields - not_asked}
    options = {
        f"--{name.replace('_', '-')}" for name in inspect.signature(estimate_problem).parameters
    }
    assert flags <= options
