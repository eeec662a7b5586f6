"""Bytes against the formulas of the papers, with one shape that all of them can express."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from examples import make_llama3_8b as example
from optpipe.planning import MODELS, LayerForm, ModelShape, Training, find_model
from optpipe.planning.costs import head_costs, layer_costs, layer_parts
from optpipe.planning.parameters import RankParameters, static_bytes

H, A, S, B = 512, 8, 256, 3
DENSE, MOE = LayerForm(False), LayerForm(True)
GPT = ModelShape(
    name="gpt", num_layers=4, hidden=H, num_heads=A, num_kv_heads=A, ffn=4 * H, vocab=1024,
    mlp="gelu", bias="all", positions=S, dropout=True,
)  # fmt: skip


def kept(**changes) -> int:
    """Bytes that F of a layer of GPT keeps."""
    training = Training(**{"micro_batch": B, "sequence": S, "flash": False, **changes})
    return layer_costs(GPT, training, DENSE).kept.activation_bytes


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        # Korthikanti's equations 1, 2 and 4: s b h (34 + 5 a s / h), (10 + 24 / t + 5 a s / (h t))
        # and, with sequence parallelism, a t-th of the first.
        ({}, 34 * H + 5 * A * S),
        *(
            ({"tp": t, "sequence_parallel": False}, 10 * H + 24 * H // t + 5 * A * S // t)
            for t in (2, 8)
        ),
        *(({"tp": t}, (34 * H + 5 * A * S) // t) for t in (2, 8)),
        # Flash attention leaves 34 s b h, and 4 bytes per token and head.
        ({"flash": True}, 34 * H + 4 * A),
        # PipeOffload: norms, GELU and dropouts of the residual stream are made again.
        ({"flash": True, "lean": True}, 20 * H + 4 * A),
    ],
)
def test_what_f_keeps_per_token_is_the_papers(changes: dict[str, Any], expected: int) -> None:
    assert kept(**changes) == S * B * expected


def test_small_tensors_stay_on_the_device() -> None:
    """OFFLOAD moves all but four bytes per token and head, and per token and expert."""
    gpt = layer_costs(GPT, Training(micro_batch=B, sequence=S), DENSE).kept
    assert gpt.activation_bytes - gpt.offload_bytes == S * B * 4 * A
    mixtral = find_model("mixtral-8x7b")
    routed = layer_costs(mixtral, Training(micro_batch=B, sequence=S), MOE).kept
    assert routed.activation_bytes - routed.offload_bytes == S * B * 4 * (32 + 8)


def test_weight_context_is_the_zero_bubble_papers() -> None:
    """32 s b h from I to W."""
    training = Training(micro_batch=B, sequence=S)
    assert layer_costs(GPT, training, DENSE).kept.weight_context_bytes == 32 * S * B * H


def test_the_llama_of_the_examples_is_met() -> None:
    """Counted there by hand, with the norms' statistics, which are left out here."""
    found = layer_costs(find_model("llama3-8b"), Training(sequence=8192), DENSE).kept
    assert found.activation_bytes == example.layer_activation_bytes() - 2 * 8192 * 4
    assert found.weight_context_bytes == example.layer_weight_context_bytes()


def test_the_head_keeps_input_norm_and_softmax() -> None:
    """Korthikanti section 4.3: 2 + 2 + 4 v / h per element of the hidden state."""
    found = head_costs(GPT, Training(micro_batch=B, sequence=S)).kept
    assert found.activation_bytes == S * B * (4 * H + 4 * 1024)
    assert found.offload_bytes == 0


@pytest.mark.parametrize(
    ("dp", "zero", "per_parameter"),
    [
        (1, 0, (2, 4, 12)), (4, 0, (2, 4, 12)), (4, 1, (2, 4, 3)), (4, 2, (2, 1, 3)),
        (4, 3, (0.5, 1, 3)),
    ],
)  # fmt: skip
def test_static_bytes_per_parameter(dp, zero, per_parameter) -> None:
    """Weight, gradient, and the optimizer's 12, spread as ZeRO does; cp's ranks are replicas."""
    expected = tuple(1000 * size for size in per_parameter)
    assert static_bytes(RankParameters(1000), Training(dp=dp, zero=zero)) == expected
    assert static_bytes(RankParameters(1000), Training(cp=dp, zero=zero)) == expected


def test_static_bytes_of_experts_are_spread_over_those_who_hold_them() -> None:
    """Of tp x cp x dp ranks ep x etp hold different ones; fp32 needs no second copy of a weight."""
    assert static_bytes(RankParameters(0, 1000), Training(dp=8, ep=4)).total == 1000 * (2 + 4 + 6)
    folded = Training(tp=2, dp=16, ep=32)
    assert static_bytes(RankParameters(0, 1000), folded).total == 1000 * (2 + 4 + 12)
    assert static_bytes(RankParameters(1000), Training(precision="fp32")).total == 1000 * 16


def test_narrow_products_keep_their_inputs_narrow() -> None:
    """Llama: inputs of four products are 1 byte instead of 2, attention's output is kept twice."""
    llama, h, f = find_model("llama3-8b"), 4096, 14336
    wide, narrow = (
        layer_costs(llama, Training(sequence=S, precision=p), DENSE).kept.activation_bytes
        for p in ("bf16", "fp8")
    )
    assert wide - narrow == S * (h + h + f - h)


@pytest.mark.parametrize(
    ("recompute", "name", "per_token"),
    [
        ("core_attn", "llama3-8b", 4 * 32),
        ("layernorm", "llama3-8b", 2 * 2 * 4096),
        ("mlp", "llama3-8b", 2 * (4096 + 3 * 14336)),
        ("moe_act", "mixtral-8x7b", 2 * 2 * 14336),
        ("mla_up_proj", "deepseek-v3", 2 * (1536 + 512 + 128 * (192 + 192 + 128))),
    ],
)
def test_what_is_made_again_is_not_kept_and_costs_its_work_once_more(
    recompute, name, per_token
) -> None:
    """Bytes by hand; the time is in I, and only there."""
    shape = find_model(name)
    kind = shape.layer_kinds[-1]
    plain, again = Training(sequence=S), Training(sequence=S, recompute=frozenset({recompute}))
    saved = layer_costs(shape, plain, kind).kept.activation_bytes
    saved -= layer_costs(shape, again, kind).kept.activation_bytes
    assert saved == S * per_token
    before, after = layer_costs(shape, plain, kind).work, layer_costs(shape, again, kind).work
    assert (before.forward, before.backward_weight) == (after.forward, after.backward_weight)
    assert sum(after.backward_input) > sum(before.backward_input)


def test_full_recomputation_keeps_a_layers_input() -> None:
    """And does all of F again."""
    training = Training(sequence=S, recompute=frozenset({"full"}))
    assert layer_costs(GPT, training, DENSE).kept.activation_bytes == 2 * S * H
    work = layer_costs(GPT, training, DENSE).work
    assert work.backward_input.matmul_flops == 2 * work.forward.matmul_flops


@given(
    st.sampled_from(sorted(MODELS)),
    st.sampled_from([1, 2, 4, 8]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_bytes_are_possible(name, tp, flash, sequence_parallel, lean) -> None:
    """Offloadable bytes and checkpoint are parts of what is kept; twice the tokens, twice all."""
    shape = MODELS[name]
    assume(shape.num_heads % tp == 0)
    training = Training(
        sequence=512, tp=tp, flash=flash, sequence_parallel=sequence_parallel, lean=lean
    )
    double = replace(training, micro_batch=2)
    for kind, _ in shape.kinds:
        found = layer_costs(shape, training, kind).kept
        assert 0 < found.checkpoint_bytes <= found.activation_bytes
        assert 0 < found.offload_bytes <= found.activation_bytes
        assert found.weight_context_bytes > 0
        twice = layer_costs(shape, double, kind).kept
        assert twice.activation_bytes == 2 * found.activation_bytes
        assert twice.weight_context_bytes == pytest.approx(2 * found.weight_context_bytes, abs=1)
        names = [t.name for part in layer_parts(shape, training, kind) for t in part.tensors]
        assert len(names) == len(set(names))
