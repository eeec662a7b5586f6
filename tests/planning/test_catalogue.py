"""Shapes: by name against the publishers' parameters, or from the config.json they publish."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe.errors import InputError
from optpipe.planning import (
    GPUS,
    MODELS,
    Efficiency,
    Experts,
    catalogue,
    find_gpu,
    find_model,
    shape_from_config,
    total_parameters,
)
from optpipe.planning.parameters import (
    embedding_parameters,
    head_parameters,
    layer_parameters,
    mtp_parameters,
)

# What the published checkpoints hold, to the last parameter (looked up: docs/estimate.md);
# DeepSeek-V3's and Kimi K2's without the numbers that balance their experts (14,848 and 23,040),
# which no gradient trains.
PUBLISHED = {
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v3": 671_026_404_352,
    "kimi-k2": 1_026_408_209_408,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "gemma-2b": 2_506_172_416,
    "gemma-7b": 8_537_680_896,
    "gemma2-2b": 2_614_341_888,
    "gemma2-9b": 9_241_705_984,
    "gemma2-27b": 27_227_128_320,
    "gemma3-1b": 999_885_952,
    "gemma3-4b": 3_880_263_168,
    "gemma3-12b": 11_766_034_176,
    "gemma3-27b": 27_009_346_304,
}

# Billions in the models' names or papers, and the digits they are given with.
CALLED = {
    "gpt3-125m": (0.125, 3),
    "gpt3-760m": (0.760, 2),
    "gpt3-1.3b": (1.3, 1),
    "gpt3-2.7b": (2.7, 1),
    "gpt3-6.7b": (6.7, 1),
    "gpt3-13b": (13.0, 0),
    "gpt3-175b": (175.0, 0),
    "zb-1.5b": (1.5, 1),
    "zb-6.2b": (6.2, 1),
    "zb-14.6b": (14.6, 1),
    "zb-28.3b": (28.3, 1),
    "po-5.8b": (5.8, 1),
    "po-10.5b": (10.5, 1),
    "po-18.1b": (18.1, 1),
    "po-42.9b": (42.9, 1),
    "po-66.6b": (66.6, 1),
    "po-83.8b": (83.8, 1),
    "llama4-scout": (108.0, 0),
    "llama4-maverick": (401.0, 0),
    "moonlight-16b-a3b": (16.0, 1),
    "megatron-22b": (22.0, 0),
    "mt-nlg-530b": (530.0, 0),
    "megatron-1t": (1008.0, 0),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published_ones_exactly(name) -> None:
    assert total_parameters(find_model(name)) == PUBLISHED[name]


@pytest.mark.parametrize("name", CALLED)
def test_parameters_round_to_what_the_model_is_called(name) -> None:
    billions, digits = CALLED[name]
    assert round(total_parameters(find_model(name)) / 1e9, digits) == pytest.approx(billions)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("mixtral-8x7b", 13),
        ("mixtral-8x22b", 39),
        ("deepseek-v2", 21),
        ("deepseek-v3", 37),
        ("kimi-k2", 32.6),
        ("gpt-oss-120b", 5.7),
        ("llama4-scout", 17.1),
        ("llama4-maverick", 17.1),
    ],
)
def test_active_parameters_are_the_published_ones(name, billions) -> None:
    """Of experts only those that a token goes through; papers round, and differ by embeddings."""
    assert total_parameters(find_model(name), active=True) / 1e9 == pytest.approx(
        billions, rel=0.02
    )


@given(st.sampled_from(sorted(MODELS)), st.sampled_from([2, 4, 8]))
def test_tensor_parallel_ranks_hold_at_least_their_share(name, tp) -> None:
    """Nothing gets lost: together they hold every parameter, what is not split several times."""
    shape = MODELS[name]
    if shape.num_heads % tp:
        return
    for kind, _ in shape.kinds:
        whole = layer_parameters(shape, kind).total
        split = layer_parameters(shape, kind, tp=tp, etp=tp).total
        assert whole <= tp * split < 1.7 * whole


def test_a_wrong_name_is_answered_with_the_nearest() -> None:
    assert find_model("LLaMA3-70B").name == "llama3-70b"
    assert find_model("llama3.1-8b").name == "llama3-8b"
    with pytest.raises(InputError, match="did you mean llama3-70b"):
        find_model("lama3-70b")
    with pytest.raises(InputError, match="it has gpt3-125m, "):
        find_model("???")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_layers": 0}, "num_layers = 0"),
        ({"hidden": 4097}, "hidden 4097"),
        ({"num_kv_heads": 5}, "5 key/value heads"),
    ],
)
def test_impossible_shapes_are_refused(change, named) -> None:
    with pytest.raises(InputError, match=named):
        replace(find_model("llama3-8b"), **change)


def test_more_active_experts_than_there_are_is_refused() -> None:
    with pytest.raises(InputError, match="9 active experts of 8"):
        Experts(num=8, active=9, ffn=64)


# The catalogue of accelerators: sources, units, and names.


EXPECTED = {
    "a100-40gb", "a100", "h100", "h100-500w", "h100-pcie", "h200", "h800", "b200", "gb200", "b300",
    "gb300", "mi300x", "mi325x", "mi355x", "l40s", "rtx4090", "cpu",
}  # fmt: skip


def test_the_catalogue_has_what_it_promises() -> None:
    assert set(GPUS) == EXPECTED
    assert all(name == hardware.name for name, hardware in GPUS.items())


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_every_number_has_a_source_and_a_possible_size(name) -> None:
    """Units that were mixed up would be off by a thousand."""
    hardware = GPUS[name]
    for label, fact in hardware.facts:
        assert len(fact.source) > 5, label
        assert fact.value > 0
    assert 20e9 < hardware.memory_bytes.value < 310e9
    assert 100 < hardware.memory_gb_per_s.value < 10_000
    assert 50 < hardware.tflops["bf16"].value < 5000
    assert hardware.peer_gb_per_s.value <= hardware.node_gb_per_s.value
    labels = {label for label, _ in hardware.facts}
    assert {"bf16 TFLOP/s", "memory_bytes", "memory_gb_per_s", "network_gb_per_s"} <= labels


def test_names_are_found_whatever_their_case() -> None:
    assert find_gpu("H100") is GPUS["h100"]
    assert find_gpu("a100-80gb") is GPUS["a100"]
    with pytest.raises(InputError, match="did you mean"):
        find_gpu("h1000")


@pytest.mark.parametrize("value", [0.0, -0.1, 1.5])
def test_an_efficiency_is_a_share(value) -> None:
    with pytest.raises(InputError, match="efficiency matmul"):
        Efficiency(matmul=value)


@pytest.mark.parametrize("name", sorted(EXPECTED - {"cpu"}))
def test_memory_is_what_the_vendors_tool_shows(name) -> None:
    """Whole MiB, and the number stands in the source: data sheets round."""
    fact = GPUS[name].memory_bytes
    assert fact.value % 2**20 == 0
    shown = (f"{int(fact.value) >> 20} MiB", f"{int(fact.value)} B")
    assert any(text in fact.source for text in shown), fact.source


HUGGING_FACE = Path(__file__).parents[1] / "data/huggingface"
PUBLISHED_CONFIGS = json.loads((HUGGING_FACE / "published.json").read_text("utf-8"))
"""What publishers wrote when they published, fields that nobody reads left out."""
LLAMA3_8B = PUBLISHED_CONFIGS["llama3-8b"]

# Written by the configuration classes of transformers 5.24.0 (defaults included, without the label
# maps that every file repeats).
WRITTEN = json.loads((HUGGING_FACE / "transformers_5_24.json").read_text("utf-8"))


@pytest.mark.parametrize(
    ("name", "config"),
    [
        *((name, config) for name, config in PUBLISHED_CONFIGS.items() if name in MODELS),
        *WRITTEN.items(),
    ],
)
def test_a_config_is_the_catalogues_shape(name: str, config: dict[str, Any]) -> None:
    """As published, and as transformers writes it today: windows from layer types, experts under
    their present names, new fields of every file. Sources differ, and whether the width of a head
    is spelled out."""
    found, known = shape_from_config(json.dumps(config), name), find_model(name)
    assert found.left_out == known.left_out or config is WRITTEN.get(name)
    assert found.width == known.width
    assert total_parameters(found) == total_parameters(known)
    found = replace(found, source=known.source, left_out=known.left_out)
    assert replace(found, head_width=known.head_width) == known


def test_of_text_and_images_the_text_is_read() -> None:
    """And what is left out is said."""
    text = WRITTEN["gemma3-1b"]
    whole = {"model_type": "gemma3", "vision_config": {"hidden_size": 1152}, "text_config": text}
    found = shape_from_config(json.dumps(whole))
    assert found.left_out == ("what reads images",)
    assert total_parameters(found) == 999_885_952


def test_qwens_text_is_read_in_both_forms_of_its_config() -> None:
    """Early files have the text's fields beside ``vision_config``, later ones inside; tied or not.

    Fields of https://huggingface.co/Qwen/Qwen2.5-VL-7B-Instruct, whose text is Qwen2.5-7B's.
    """
    text = {
        "hidden_act": "silu", "hidden_size": 3584, "intermediate_size": 18944,
        "max_window_layers": 28, "num_attention_heads": 28, "num_hidden_layers": 28,
        "num_key_value_heads": 4, "sliding_window": 32768, "use_sliding_window": False,
        "vocab_size": 152064, "rope_scaling": {"mrope_section": [16, 24, 24], "type": "mrope"},
    }  # fmt: skip
    images = {"vision_config": {"hidden_size": 1280}, "image_token_id": 151655}
    top = {"model_type": "qwen2_5_vl", "tie_word_embeddings": False}
    flat = shape_from_config(json.dumps(top | text | images))
    inside = top | images | {"text_config": text | {"model_type": "qwen2_5_vl_text"}}
    assert shape_from_config(json.dumps(inside)) == flat
    assert flat.left_out == ("what reads images",)
    assert total_parameters(flat) == total_parameters(find_model("qwen2.5-7b"))
    assert shape_from_config(json.dumps(inside | {"tie_word_embeddings": True})).tied


def test_linear_attention_is_refused_by_name() -> None:
    """No formula costs it."""
    with pytest.raises(InputError, match=r"qwen3_next.*linear attention.*trace of its code"):
        shape_from_config(json.dumps({"model_type": "qwen3_next", "hidden_size": 2048}))


@pytest.mark.parametrize(
    "types",
    [["full_attention", "sliding_attention"], ["sliding_attention", "linear_attention"],
     ["sliding_attention"] * 2],
)  # fmt: skip
def test_other_patterns_of_attention_are_refused(types) -> None:
    """What no formula covers."""
    with pytest.raises(InputError, match="layer_types"):
        shape_from_config(json.dumps(WRITTEN["gpt-oss-120b"] | {"layer_types": types * 18}))


@pytest.mark.parametrize(
    ("name", "total", "windows"),
    [
        ("mistral-7b", 7_241_732_096, {4096}),
        ("phi3-mini", 3_821_079_552, {2047}),
        ("glm-4.5-air", 106_852_245_504, {0}),
        ("glm-4.5", 352_797_814_784, {0}),
        ("gpt2", 124_439_808, {0}),
    ],
)
def test_a_config_beside_the_catalogue_has_the_parameters_of_its_model(
    name: str, total: int, windows: set[int]
) -> None:
    """Counted in transformers' own models; GLM's 355 billion are with multi-token prediction."""
    found = shape_from_config(json.dumps(PUBLISHED_CONFIGS[name]))
    assert total_parameters(found) == total
    assert {kind.window for kind in found.layer_kinds} == windows
    assert bool(found.left_out) == name.startswith("glm")
    whole = shape_from_config(json.dumps(PUBLISHED_CONFIGS[name] | {"sliding_window": None}))
    assert {kind.window for kind in whole.layer_kinds} == {0}


def test_a_window_under_its_older_name_is_read() -> None:
    """As the first files of Gemma 2 have it, alone or beside the present one."""
    today = {
        "model_type": "gemma2", "hidden_size": 2304, "intermediate_size": 9216, "head_dim": 256,
        "num_attention_heads": 8, "num_hidden_layers": 26, "num_key_value_heads": 4,
        "vocab_size": 256000,
    }  # fmt: skip
    for names in (
        ["sliding_window_size"],
        ["sliding_window"],
        ["sliding_window", "sliding_window_size"],
    ):
        found = shape_from_config(json.dumps(today | dict.fromkeys(names, 4096)))
        assert replace(found, name="gemma2-2b", source="") == replace(
            find_model("gemma2-2b"), source=""
        )
    with pytest.raises(InputError, match="sliding_window_size = 1 and sliding_window = 4096: must"):
        shape_from_config(json.dumps(today | {"sliding_window_size": 1, "sliding_window": 4096}))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "mamba"}, r"= 'mamba' is not understood \(only deepseek_v2, deepseek_v3, "),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers = 1000000000000: must be at most 4096"),
        ({"model_type": None}, "model_type = None"),
        ({"hidden_act": "relu"}, "hidden_act = 'relu' is not understood"),
        ({"attention_bias": True}, "attention_bias = True is not understood"),
        ({"sliding_window": 4096}, "sliding_window = 4096 is not understood"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "'sliding_attention'. is not"),
        ({"parallel_attn": True}, "parallel_attn = True is not understood"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "4096"}, "hidden_size = '4096': must be a whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0: must be a whole number, at least 1"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings = 1"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(change, named) -> None:
    with pytest.raises(InputError, match=named):
        shape_from_config(json.dumps(LLAMA3_8B | change))


def test_a_sparse_step_is_refused() -> None:
    """Layers that take turns cannot be told apart by what is read; nor what is no step at all."""
    with pytest.raises(InputError, match="decoder_sparse_step = 2"):
        shape_from_config(
            json.dumps(PUBLISHED_CONFIGS["qwen3-30b-a3b"] | {"decoder_sparse_step": 2})
        )
    llama4 = next(one for one in WRITTEN.values() if "interleave_moe_layer_step" in str(one))
    text = re.sub(
        r'"interleave_moe_layer_step": \d+', '"interleave_moe_layer_step": 0', json.dumps(llama4)
    )
    with pytest.raises(InputError, match="interleave_moe_layer_step = 0: must be a whole"):
        shape_from_config(text)


@pytest.mark.parametrize("constant", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "deepseek-v3", "gpt2"])
def test_what_json_lacks_matters_only_in_fields_that_are_read(name, constant) -> None:
    """Python's json writes NaN and Infinity: each field in turn has one, alone or in a list."""
    config = PUBLISHED_CONFIGS[name]
    whole, word = shape_from_config(json.dumps(config)), json.dumps(constant)
    unread = catalogue._NEUTRAL - {"model_type", "n_group", "topk_group"}
    for field in (*sorted(config), "rope_theta"):
        for value in (constant, [0.0, constant]):
            text = json.dumps(config | {field: value})
            if field in unread:
                assert shape_from_config(text) == whole
            else:
                with pytest.raises(InputError, match=rf"{field} .*{word}"):
                    shape_from_config(text)


@pytest.mark.parametrize("text", ["[]", "{", '{"a": 1, "a": 2}', ""])
def test_what_is_no_json_object_is_refused(text) -> None:
    with pytest.raises(InputError):
        shape_from_config(text)


@pytest.mark.parametrize("name", MODELS)
def test_parts_make_the_whole(name) -> None:
    shape = MODELS[name]
    layers = sum(count * layer_parameters(shape, kind).total for kind, count in shape.kinds)
    layers += shape.mtp * mtp_parameters(shape).total
    shared = shape.vocab * shape.hidden if shape.tied else 0
    parts = embedding_parameters(shape) + layers + head_parameters(shape) - shared
    assert parts == total_parameters(shape)
    assert shape.source


def test_experts_are_spread() -> None:
    shape = find_model("mixtral-8x7b")
    whole, part = (layer_parameters(shape, shape.layer_kinds[0], ep=ep) for ep in (1, 4))
    assert part.experts * 4 == whole.experts
    assert part.common == whole.common
