"""LoRA: adapters are trained, and the model is frozen."""

from dataclasses import replace
from statistics import median

import pytest

from benchmarks.scoreboard import PUBLISHED, published, scores, stored_fit
from optpipe.errors import FieldError, RequestError
from optpipe.planning import MODELS, LayerForm, Machine, Training, find_gpu, find_model
from optpipe.planning.costs import embedding_costs, head_costs, layer_costs, model_flops, mtp_costs
from optpipe.planning.layer_profile import profile_layers
from optpipe.planning.parameters import StaticBytes, static_bytes, total_parameters
from optpipe.planning.shape import LORA_TARGETS, Lora
from optpipe.requests import EstimateRequest

S, H, F, KV, R = 256, 4096, 14336, 1024, 16
DENSE, MOE = LayerForm(False), LayerForm(True)
LLAMA, H100 = find_model("llama3-8b"), find_gpu("h100")
QKV, ALL = Lora(rank=R, targets=frozenset({"linear_qkv"})), Lora(rank=R)
FINE_TUNING = PUBLISHED.with_name("fine_tuning_runs.json")


def whole_static_bytes(name: str, training: Training) -> StaticBytes:
    """Static bytes of all layers of a model on one device."""
    machine = Machine(H100, H100.efficiency, training)
    total = StaticBytes()
    for part in profile_layers(find_model(name), machine):
        total = total.plus(static_bytes(part.parameters.times(part.repeat), training))
    return total


@pytest.mark.parametrize("tp", [1, 8])
@pytest.mark.parametrize("zero", [0, 3])
def test_only_adapters_have_gradients_and_optimizer_states(tp: int, zero: int) -> None:
    """Llama 3 70B: 2 bytes a parameter, and 2 + 4 + 12 for each of 16 x 137,216 per layer."""
    adapters = 80 * 16 * ((8192 + 10240) + (8192 + 8192) + (8192 + 57344) + (28672 + 8192))
    found = whole_static_bytes("llama3-70b", Training(tp=tp, dp=4, zero=zero, lora=ALL))
    spread = tp * (4 if zero == 3 else 1)
    weights = 2 * (total_parameters(find_model("llama3-70b")) + adapters) / spread
    assert found.weights == pytest.approx(weights, rel=1e-3)
    assert (found.gradients, found.optimizer) == (4 * adapters / spread, 12 * adapters / spread)


def test_the_local_experts_share_an_adapter() -> None:
    """Mixtral with two of eight experts on a device: one adapter of the experts' shapes."""
    mixtral = find_model("mixtral-8x7b")
    training = Training(
        sequence=S, dp=4, ep=4, lora=replace(ALL, targets=frozenset(LORA_TARGETS[2:4]))
    )
    found = layer_costs(mixtral, training, MOE).parameters
    assert found.experts == R * ((H + 2 * F) + (F + H))
    assert found.common == 0
    whole = layer_costs(mixtral, replace(training, lora=None), MOE).parameters
    assert found.frozen == (whole.common, whole.experts, 0, 0, 0, 0, 0)


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_w_multiplies_adapters_only(precision) -> None:
    """2 FLOPs per token and entry in each pass, in bf16; nothing of embedding and head."""
    training = Training(sequence=S, precision=precision)
    entries = (H + H + 2 * KV) + (H + H) + (H + 2 * F) + (F + H)
    plain = layer_costs(LLAMA, training, DENSE).work
    lora = layer_costs(LLAMA, replace(training, lora=ALL), DENSE).work
    for before, after in zip(plain[:2], lora[:2], strict=True):
        assert after.matmul_flops - before.matmul_flops == 2 * S * R * entries
        assert after.narrow_flops == before.narrow_flops
    weight = lora.backward_weight
    assert (weight.matmul_flops, weight.narrow_flops) == (2 * S * R * entries, 0)
    assert weight.gradient_bytes == 2 * 4 * R * entries
    widths = (H + H + 2 * KV) + (H + H) + (H + 2 * F) + (F + H)
    assert weight.moved_bytes == S * 2 * (widths + 4 * 2 * R)
    for costs in (embedding_costs, head_costs):
        assert sum(costs(LLAMA, replace(training, lora=ALL)).work.backward_weight) == 0


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize(
    ("lora", "read", "outputs", "adapters"),
    [(QKV, H, H + 2 * KV, 1), (ALL, H + H + F, (H + 2 * KV) + H + 2 * F + H, 4)],
)
def test_f_keeps_the_inputs_of_adapters_and_of_nonlinear_functions(
    precision, lora: Lora, read: int, outputs: int, adapters: int
) -> None:
    """By hand; bf16 in any precision. Attention's output is kept anyway, for attention."""
    nonlinear = 2 * H + (H + 2 * KV) + H + 2 * F  # norms, attention with its output, gate and up
    found = layer_costs(LLAMA, Training(sequence=S, precision=precision, lora=lora), DENSE).kept
    assert found.activation_bytes == S * (2 * (nonlinear + read + R * adapters) + 4 * 32)
    inputs = read + (H if lora == ALL else 0)
    assert found.weight_context_bytes == S * 2 * (inputs + outputs + 2 * R * adapters)


def test_a_column_parallel_adapter_keeps_whole_rows() -> None:
    """Of sequence-parallel ranks each keeps the norm's output of all tokens for its adapter."""
    one, eight = (
        layer_costs(LLAMA, Training(sequence=S, tp=tp, lora=QKV), DENSE).kept for tp in (1, 8)
    )
    shared = one.activation_bytes - S * 2 * (H + R)
    assert eight.activation_bytes == shared // 8 + S * 2 * (H + R)


def test_experts_keep_their_inputs_for_adapters_only() -> None:
    """Mixtral: with adapters of attention alone neither copies nor gated products are kept."""
    mixtral = find_model("mixtral-8x7b")
    kept = [
        layer_costs(mixtral, Training(sequence=S, lora=lora), MOE).kept.activation_bytes
        for lora in (ALL, replace(ALL, targets=frozenset(LORA_TARGETS[:2])))
    ]
    assert kept[0] - kept[1] == S * 2 * 2 * (H + F + 2 * R)  # two copies of each token


@pytest.mark.parametrize("name", sorted(MODELS))
def test_every_model_takes_adapters_on_all_it_has(name: str) -> None:
    """LoRA is faster and keeps less than full fine-tuning, and trains less than 5% of a model."""
    shape = find_model(name)
    training = Training(sequence=512)
    lora = Lora(rank=4, targets=shape.lora_targets)
    for kind, _ in shape.kinds:
        full = layer_costs(shape, training, kind)
        found = layer_costs(shape, replace(training, lora=lora), kind)
        assert 0 < found.parameters.total < 0.05 * found.parameters.stored.total
        assert found.kept.weight_context_bytes <= full.kept.weight_context_bytes * 1.2
        weight = found.work.backward_weight
        assert 0 < weight.matmul_flops < 0.1 * found.work.forward.matmul_flops
    if shape.mtp:
        found = mtp_costs(shape, replace(training, lora=lora))
        assert found.parameters.stored.total > 20 * found.parameters.total


def test_model_flops_are_nvidias() -> None:
    """4 per parameter and token: 278 GFLOP for Llama 3 70B, as 735 TFLOP/s at 2,643 tokens/s."""
    shape = find_model("llama3-70b")
    training = Training(sequence=4096, lengths=(128,) * 32, lora=QKV)
    assert model_flops(shape, training) / 4096 == pytest.approx(735e12 / 2643, rel=0.005)


def test_targets_are_the_models() -> None:
    """Defaults that a model does not have are ignored; names that were given are refused."""
    latent = find_model("deepseek-v3")
    Training(dp=8, ep=8, lora=ALL).check_divides(latent)
    with pytest.raises(FieldError, match="'deepseek-v3' has no such matrices, but linear_fc1"):
        Training(dp=8, ep=8, lora=QKV).check_divides(latent)
    with pytest.raises(FieldError, match="tp = 8 does not divide lora_rank = 4 of 'llama3-8b'"):
        Training(tp=8, lora=replace(QKV, rank=4)).check_divides(LLAMA)
    with pytest.raises(FieldError, match="is none of linear_qkv"):
        Lora(targets=frozenset({"linear"}))
    with pytest.raises(FieldError, match="must be at least 1"):
        Lora(rank=0)
    with pytest.raises(RequestError, match="add lora_rank"):
        EstimateRequest.parse({"model": "llama3-8b", "gpu": "h100", "lora_targets": ["linear_fc1"]})


def test_nvidias_lora_runs_are_met() -> None:
    """Its 12 benchmarks of Llama 3, none of which an efficiency was fitted to."""
    rows = [
        row for row in published(FINE_TUNING) if "LoRA" in row["note"] and row.get("packed_length")
    ]
    found, left = scores(rows, stored_fit())
    errors = [abs(score.time_error or 0.0) for score in found]
    assert (len(errors), left) == (12, [])
    assert median(errors) < 0.08
    assert max(errors) < 0.15


def test_packed_sequences_attend_to_themselves_only() -> None:
    """A quarter of attention for four equal ones, in one or in several sequences of a batch."""
    whole = Training(sequence=4096, micro_batch=2)
    packed = replace(whole, lengths=(1024,) * 4)
    flops = [layer_costs(LLAMA, one, DENSE).work.forward.attention_flops for one in (whole, packed)]
    assert flops[1] == flops[0] / 4
    per_token = [model_flops(LLAMA, one) / (one.micro_batch * 4096) for one in (whole, packed)]
    assert per_token[0] - per_token[1] == 32 * 12 * 4096 * (4096 - 1024)
    assert per_token[1] == model_flops(LLAMA, replace(packed, micro_batch=1)) / 4096
    with pytest.raises(FieldError, match="slices are estimated of whole sequences"):
        replace(packed, slices=2)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"slices": 2}, "packed_lengths and slices: packed sequences are the same"),
        ({"lengths": [[8], [9]]}, "packed_lengths and lengths: packed sequences are the same"),
        ({"sequence": 5000}, "packed_lengths: add up to 2,048 tokens, not the 5,000 of sequence"),
    ],
)
def test_packed_lengths_are_refused_beside_what_contradicts_them(fields, sentence: str) -> None:
    given = {"model": "llama3-8b", "gpu": "h100", "packed_lengths": [1000, 1048]}
    with pytest.raises(RequestError, match=sentence):
        EstimateRequest.parse({**given, **fields})
    assert EstimateRequest.parse(given).packed_settings == {
        "sequence": 2048, "lengths": (1000, 1048)
    }  # fmt: skip
