"""``config.json``: what is read, and what is refused by name."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from optpipe.errors import InputError
from optpipe.presets import find_model, shape_from_config, total_parameters
from optpipe.presets.huggingface import MODEL_TYPES

LLAMA3_8B = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 128000, "eos_token_id": 128001, "hidden_act": "silu", "hidden_size": 4096,
    "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 8192,
    "mlp_bias": False, "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": None,
    "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.40.0", "use_cache": True, "vocab_size": 128256,
}  # fmt: skip
QWEN25_7B = {
    "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "hidden_act": "silu",
    "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4,
    "max_window_layers": 28, "sliding_window": 131072, "use_sliding_window": False,
    "tie_word_embeddings": False, "vocab_size": 152064,
}  # fmt: skip
QWEN3_8B = {
    "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "head_dim": 128,
    "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8,
    "attention_bias": False, "sliding_window": None, "vocab_size": 151936,
}  # fmt: skip
MIXTRAL = {
    "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 32000,
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None,
}  # fmt: skip
QWEN3_30B = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "head_dim": 128,
    "num_attention_heads": 32, "num_hidden_layers": 48, "num_key_value_heads": 4,
    "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "vocab_size": 151936,
}  # fmt: skip
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "num_attention_heads": 128, "num_hidden_layers": 61,
    "num_key_value_heads": 128, "n_routed_experts": 256, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "first_k_dense_replace": 3, "moe_layer_freq": 1,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "num_nextn_predict_layers": 1, "vocab_size": 129280,
    "quantization_config": {"quant_method": "fp8"}, "scoring_func": "sigmoid", "n_group": 8,
    "topk_group": 4,
}  # fmt: skip
DEEPSEEK_LITE = DEEPSEEK_V3 | {
    "model_type": "deepseek_v2", "hidden_size": 2048, "intermediate_size": 10944,
    "moe_intermediate_size": 1408, "num_attention_heads": 16, "num_hidden_layers": 27,
    "num_key_value_heads": 16, "n_routed_experts": 64, "n_shared_experts": 2,
    "num_experts_per_tok": 6, "first_k_dense_replace": 1, "q_lora_rank": None,
    "vocab_size": 102400, "num_nextn_predict_layers": 0, "n_group": 1, "topk_group": 1,
}  # fmt: skip
GPT2 = {
    "model_type": "gpt2", "activation_function": "gelu_new", "n_embd": 768, "n_head": 12,
    "n_layer": 12, "n_positions": 1024, "n_ctx": 1024, "vocab_size": 50257, "resid_pdrop": 0.1,
}  # fmt: skip

KNOWN = {
    "llama3-8b": LLAMA3_8B,
    "qwen2.5-7b": QWEN25_7B,
    "qwen3-8b": QWEN3_8B,
    "mixtral-8x7b": MIXTRAL,
    "qwen3-30b-a3b": QWEN3_30B,
    "deepseek-v3": DEEPSEEK_V3,
    "deepseek-v2-lite": DEEPSEEK_LITE,
}


# Written by the configuration classes of transformers 5.24.0 (defaults included, without the label
# maps that every file repeats).
WRITTEN = json.loads(
    (Path(__file__).parents[1] / "data/huggingface/transformers_5_24.json").read_text("utf-8")
)


@pytest.mark.parametrize("name", WRITTEN)
def test_what_transformers_writes_today_is_the_catalogues_shape(name) -> None:
    """Windows from layer types, experts under their present names, new fields of every file."""
    found, known = shape_from_config(json.dumps(WRITTEN[name]), name), find_model(name)
    found = replace(found, source=known.source, left_out=known.left_out)
    assert replace(found, head_width=known.head_width) == known
    assert total_parameters(found) == total_parameters(known)


def test_of_text_and_images_the_text_is_read() -> None:
    """And what is left out is said."""
    text = WRITTEN["gemma3-1b"]
    whole = {"model_type": "gemma3", "vision_config": {"hidden_size": 1152}, "text_config": text}
    found = shape_from_config(json.dumps(whole))
    assert found.left_out == ("what reads images",)
    assert total_parameters(found) == 999_885_952


@pytest.mark.parametrize(
    "types",
    [["full_attention", "sliding_attention"], ["sliding_attention", "linear_attention"],
     ["sliding_attention"] * 2],
)  # fmt: skip
def test_other_patterns_of_attention_are_refused(types) -> None:
    """What no formula covers."""
    with pytest.raises(InputError, match="layer_types"):
        shape_from_config(json.dumps(WRITTEN["gpt-oss-120b"] | {"layer_types": types * 18}))


@pytest.mark.parametrize("name", KNOWN)
def test_a_published_config_is_the_catalogues_shape(name) -> None:
    """The two differ in their source only, and in whether the width of a head is spelled out."""
    found = shape_from_config(json.dumps(KNOWN[name]), name)
    known = find_model(name)
    assert replace(found, source=known.source, head_width=known.head_width) == known
    assert found.width == known.width
    assert total_parameters(found) == total_parameters(known)


def test_layers_that_all_have_full_attention_are_what_no_list_means() -> None:
    """As transformers writes them today."""
    today = QWEN3_8B | {"layer_types": ["full_attention"] * 36}
    assert shape_from_config(json.dumps(today)) == shape_from_config(json.dumps(QWEN3_8B))


def test_gpt2_is_read() -> None:
    """Its 124,439,808 parameters, learned positions and biases among them."""
    found = shape_from_config(json.dumps(GPT2))
    assert total_parameters(found) == 124_439_808
    assert found.dropout


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "mamba"}, "model_type = 'mamba' is not understood"),
        ({"model_type": None}, "model_type = None"),
        ({"hidden_act": "relu"}, "hidden_act = 'relu' is not understood"),
        ({"attention_bias": True}, "attention_bias = True is not understood"),
        ({"sliding_window": 4096}, "sliding_window = 4096 is not understood"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "'sliding_attention'. is not"),
        ({"parallel_attn": True}, "parallel_attn = True is not understood"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "4096"}, "hidden_size = '4096': must be a whole number"),
        ({"num_hidden_layers": 0}, "num_layers = 0"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings = 1"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(change, named) -> None:
    with pytest.raises(InputError, match=named):
        shape_from_config(json.dumps(LLAMA3_8B | change))


def test_a_sparse_step_is_refused() -> None:
    """Layers that take turns cannot be told apart by what is read."""
    with pytest.raises(InputError, match="decoder_sparse_step = 2"):
        shape_from_config(json.dumps(QWEN3_30B | {"decoder_sparse_step": 2}))


@pytest.mark.parametrize("text", ["[]", "{", '{"a": 1, "a": 2}', ""])
def test_what_is_no_json_object_is_refused(text) -> None:
    with pytest.raises(InputError):
        shape_from_config(text)


def test_the_list_of_types_is_sorted_and_told() -> None:
    assert list(MODEL_TYPES) == sorted(MODEL_TYPES)
    with pytest.raises(InputError, match="deepseek_v2, deepseek_v3, gemma, "):
        shape_from_config('{"model_type": "t5"}')
