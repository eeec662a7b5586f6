"""Work against the formulas of the papers."""

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from optpipe.planning import MODELS, LayerForm, Training, find_model
from optpipe.planning.costs import embedding_costs, head_costs, layer_costs, model_flops

GPT = find_model("gpt3-6.7b")
S, H, B = 2048, 4096, 2
DENSE, MOE = LayerForm(False), LayerForm(True)


def test_a_layer_costs_24_h2_and_4_s_h_per_token() -> None:
    """Narayanan et al.: forward 24 B s h^2 + 4 B s^2 h, scores stored and unmasked."""
    passes = layer_costs(GPT, Training(micro_batch=B, sequence=S, flash=False), DENSE).work
    assert passes.forward.matmul_flops == 24 * B * S * H**2
    assert passes.forward.attention_flops == 4 * B * S**2 * H
    assert passes.backward_input.attention_flops == 8 * B * S**2 * H
    assert passes.backward_weight.attention_flops == 0
    assert {work.matmul_flops for work in passes} == {24 * B * S * H**2}


def test_flash_attention_leaves_out_the_mask_and_makes_scores_again() -> None:
    """Half the products forward, five instead of two backward, and no scores in memory."""
    stored, flash = (
        layer_costs(GPT, Training(sequence=S, flash=value), DENSE).work for value in (False, True)
    )
    assert flash.forward.attention_flops == stored.forward.attention_flops / 2
    assert flash.backward_input.attention_flops == 2.5 * flash.forward.attention_flops
    assert flash.forward.moved_bytes < stored.forward.moved_bytes


def test_what_a_llama_layer_moves_besides_products_is_counted_by_hand() -> None:
    """Bytes of F and of I; rows of the residual stream, of the MLP, of queries and keys.

    Two norms read and write a row in F; in I they read two and write one. Two additions read two
    and write one, in both. SwiGLU has 3 and 5 rows of its width; a rotation reads and writes.
    Products write queries, keys and values, attention's output, gate and up, the MLP's output in
    F, and in I the gradients of what they read. W reads and writes fp32 gradients.
    """
    llama = find_model("llama3-8b")
    h, inner, rotated = 4096, 14336, 4096 + 1024
    work = layer_costs(llama, Training(micro_batch=B, sequence=S), DENSE).work
    size = 2 * B * S
    results, gradients = (h + 2 * 1024) + h + 2 * inner + h, h + h + inner + h
    assert work.forward.moved_bytes == size * (10 * h + 3 * inner + 2 * rotated + results)
    back = 12 * h + 5 * inner + 2 * rotated + gradients
    assert work.backward_input.moved_bytes == size * back
    parameters = 2 * h * (h + 1024) + 3 * h * inner + 2 * h
    assert work.backward_weight.gradient_bytes == 8 * parameters


def test_model_flops_are_six_per_parameter_and_token_and_attention() -> None:
    """Narayanan et al., equation 3, without its recomputation: 72 B s l h^2 (1 + s/6h + V/12lh)."""
    layers, vocab = GPT.num_layers, GPT.vocab
    ours = model_flops(GPT, Training(micro_batch=B, sequence=S))
    ratio = 1 + S / (6 * H) + vocab / (12 * layers * H)
    assert ours == pytest.approx(72 * B * S * layers * H**2 * ratio, rel=1e-12)


def test_experts_cost_what_a_token_goes_through() -> None:
    """Two experts of eight, and the router."""
    shape = find_model("mixtral-8x7b")
    work = layer_costs(shape, Training(sequence=S), MOE).work.forward
    attention = 2 * 4096 * (4096 + 1024)
    experts = 2 * 3 * 4096 * 14336
    assert work.matmul_flops == 2 * S * (attention + experts + 4096 * 8)


def test_lean_training_moves_more_in_its_backward() -> None:
    """What was not kept is made again in I, and only there."""
    full, lean = (
        layer_costs(GPT, Training(sequence=S, lean=value), DENSE).work for value in (False, True)
    )
    assert lean.forward == full.forward
    assert lean.backward_weight == full.backward_weight
    assert lean.backward_input.moved_bytes > full.backward_input.moved_bytes


def test_embedding_and_head_are_parts_of_their_own() -> None:
    """The embedding has no product and no I; the head has 2 v h per token in each pass."""
    training = Training(sequence=S)
    embedding, head = embedding_costs(GPT, training).work, head_costs(GPT, training).work
    assert all(work.matmul_flops == 0 for work in embedding)
    assert not any(embedding.backward_input)
    assert {work.matmul_flops for work in head} == {2.0 * S * GPT.vocab * H}


@given(st.sampled_from(sorted(MODELS)), st.sampled_from([2, 4, 8]), st.booleans())
def test_more_ranks_never_cost_one_of_them_more(name, degree, flash) -> None:
    """Tensor and context parallel ranks do less each, and together no less than one alone."""
    shape = MODELS[name]
    assume(shape.num_heads % degree == 0)
    alone = Training(sequence=1024, flash=flash)
    for split in (replace(alone, tp=degree), replace(alone, cp=degree)):
        for kind, _ in shape.kinds:
            one, part = (layer_costs(shape, t, kind).work for t in (alone, split))
            for whole, piece in zip(one, part, strict=True):
                for field in ("matmul_flops", "attention_flops", "moved_bytes"):
                    assert getattr(piece, field) <= getattr(whole, field)
                    assert getattr(piece, field) * degree >= getattr(whole, field) * (1 - 1e-12)
