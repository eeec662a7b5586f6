"""Model shapes: by name from ``models.json``, or from a local Hugging Face ``config.json``.

If a publisher gives the exact number of parameters, a test compares it with the shape.
docs/estimate.md lists the sources. A config.json is refused by the name of its architecture, field
or value if no formula here covers it. Nothing is fetched.
"""

from __future__ import annotations

import json
from importlib import resources
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from optpipe.errors import InputError
from optpipe.formats.json import parse_json
from optpipe.model import MAX_LAYERS
from optpipe.planning.shape import Experts, LatentAttention, ModelSettings, ModelShape, pick

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["MEGATRON", "MODELS", "MODEL_TYPES", "find_model", "shape_from_config"]


def _load_models() -> tuple[dict[str, ModelShape], dict[str, str]]:
    data = json.loads(
        resources.files("optpipe.planning").joinpath("models.json").read_text("utf-8")
    )
    shapes = {}
    for group in data["groups"]:
        for model in group["models"]:
            fields: dict[str, Any] = {**group.get("all", {}), **model}
            note = fields.pop("note", "")
            fields["source"] = f"{group['source']}; {note}" if note else group["source"]
            for name, kind in (("experts", Experts), ("latent", LatentAttention)):
                if name in fields:
                    fields[name] = kind(**fields[name])
            fields["settings"] = ModelSettings(values=fields.pop("settings", {}))
            if "left_out" in fields:
                fields["left_out"] = tuple(fields["left_out"])
            shapes[fields["name"]] = ModelShape(**fields)
    return shapes, data["aliases"]


_SHAPES, _ALIASES = _load_models()
MODELS: Mapping[str, ModelShape] = MappingProxyType(_SHAPES)
"""Every model of the catalogue by name, from ``models.json``."""


def find_model(name: str) -> ModelShape:
    """Return a model by name; case does not matter.

    Raises
    ------
    InputError
        If the catalogue has none of that name; the message names the nearest.
    """
    key = name.lower()
    return pick("model", _ALIASES.get(key, key), MODELS)


# Fields that change neither parameters, nor FLOPs, nor bytes of training.
_NEUTRAL = frozenset({
    "_name_or_path", "_attn_implementation", "architectures", "attention_dropout", "attn_pdrop",
    "auto_map", "aux_loss_alpha", "bos_token_id", "dtype", "embd_pdrop", "eos_token_id",
    "ep_size", "hidden_dropout", "id2label", "initializer_range", "label2id",
    "layer_norm_epsilon", "max_position_embeddings", "max_window_layers", "model_type", "n_ctx",
    "n_group", "norm_topk_prob", "num_labels", "output_router_logits", "pad_token_id",
    "pretraining_tp", "quantization_config", "reorder_and_upcast_attn", "resid_pdrop",
    "rms_norm_eps", "rope_interleave", "rope_parameters", "rope_scaling", "rope_theta",
    "routed_scaling_factor", "router_aux_loss_coef", "router_jitter_noise",
    "scale_attn_by_inverse_layer_idx", "scale_attn_weights", "scoring_func", "seq_aux",
    "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type",
    "summary_use_proj", "task_specific_params", "topk_group", "topk_method", "torch_dtype",
    "transformers_version", "use_cache",
    # transformers 5 writes these into every file
    "chunk_size_feed_forward", "output_attentions", "output_hidden_states", "problem_type",
    "return_dict",
    # what single models add
    "attn_logit_softcapping", "attn_scale", "attn_temperature_tuning", "cache_implementation",
    "experts_per_token", "final_logit_softcapping", "floor_scale", "for_llm_compressor",
    "initial_context_length", "no_rope_layer_interval", "no_rope_layers",
    "original_max_position_embeddings", "partial_rotary_factor", "qk_head_dim",
    "query_pre_attn_scalar", "rope_local_base_freq", "swiglu_alpha", "swiglu_limit",
    "use_qk_norm",
    # tokens that represent images
    "image_token_id", "video_token_id", "vision_end_token_id", "vision_start_token_id",
    "vision_token_id",
})  # fmt: skip

# Fields that leave the shape as it is only with these values.
_ONLY: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "attention_bias": (False,),
    "decoder_sparse_step": (1,),
    "hidden_act": ("silu",),
    "activation_function": ("gelu", "gelu_new", "gelu_pytorch_tanh"),
    "hidden_activation": (None, "gelu_pytorch_tanh"),
    "is_encoder_decoder": (False,),
    "layer_types": (None, ["full_attention"]),
    "mlp_bias": (False,),
    "mlp_only_layers": ([], None),
    "moe_layer_freq": (1,),
    "use_bidirectional_attention": (None, False),
    "use_mla": (True,),
    "use_sliding_window": (False,),
}

_TEXT_OF = frozenset({"gemma3", "llama4", "qwen2_5_vl"})
"""Types of configs of text and images.

The text's config is in ``text_config``, or, in early files of Qwen2.5-VL, next to
``vision_config``. The reader leaves out the part for images and reports that.
"""

_NO_FORMULA = {
    "qwen3_next": "three of four of its layers have linear attention (Gated DeltaNet)",
}
"""Popular model types that have a part without a formula here, and that part."""


_OTHERWISE = (
    "take its costs from a trace of its code, or describe the model by its layers "
    "(optpipe/model/v1)"
)


class _Config:
    """Fields of a config, which are crossed off as they are read."""

    def __init__(self, data: dict[str, Any]) -> None:
        self._data = dict(data)
        self._read: set[str] = set()

    def number(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        """Return a whole number, at least ``least``; a missing one, or null, is the default."""
        self._read.add(name)
        value = self._data.get(name)
        if value is None:
            value = default
        if value is None:
            raise InputError(f"config: {name} is missing; give it")
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise InputError(
                f"config: {name} = {value!r}: must be a whole number, at least {least}; fix it"
            )
        return value

    def given(self, name: str) -> bool:
        """Return whether a field is there and not null."""
        self._read.add(name)
        return self._data.get(name) is not None

    def flag(self, name: str, default: bool) -> bool:
        """Return a true or false."""
        self._read.add(name)
        value = self._data.get(name, default)
        if not isinstance(value, bool):
            raise InputError(f"config: {name} = {value!r}: must be true or false; correct it")
        return value

    def windows(self, window: str, pattern: int | None = None) -> dict[str, int]:
        """Return the fields of a shape for the attention window of each layer.

        From the list of layers' types; or ``pattern``, every so many layers a full one.
        """
        self._read |= {"layer_types", window}
        types = self._data.get("layer_types")
        if types is None:
            width = self.number(window, least=0) if pattern else 0
            return {"window": width, "full_every": pattern or 1}
        if not isinstance(types, list):
            raise InputError(f"config: layer_types = {types!r}: must be a list; correct it")
        full = [kind == "full_attention" for kind in types]
        known = {"full_attention", "sliding_attention", "chunked_attention"}
        every = full.index(True) + 1 if True in full else 0
        regular = every and full == [(index + 1) % every == 0 for index in range(len(full))]
        if not regular or not known.issuperset(types):
            raise InputError(
                "config: layer_types is not understood: an estimate covers layers of which each "
                "n-th has full attention and the others a window"
            )
        return {"window": self.number(window, least=0) if every > 1 else 0, "full_every": every}

    def word(self, name: str, default: str) -> str:
        """Return a text."""
        self._read.add(name)
        value = self._data.get(name)
        if not isinstance(value, str | None):
            raise InputError(f"config: {name} = {value!r}: must be a text; correct it")
        return default if value is None else value

    def share(self, name: str, default: float) -> float:
        """Return a number from 0 to 1."""
        self._read.add(name)
        value = self._data.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise InputError(f"config: {name} = {value!r}: must be from 0 to 1; correct it")
        return value

    def renamed(self, old: str, new: str) -> None:
        """Read a field under its name in early files; values of both names must be equal."""
        if not self.given(old):
            return
        if self._data.get(new) not in (None, self._data[old]):
            raise InputError(
                f"config: {old} = {self._data[old]!r} and {new} = {self._data[new]!r}: must be the "
                "same; correct one of them"
            )
        self._data[new] = self._data[old]

    def listed(self, name: str) -> list[Any] | None:
        """Return a list, None if it is missing or null."""
        self._read.add(name)
        value = self._data.get(name)
        if value is not None and not isinstance(value, list):
            raise InputError(f"config: {name} = {value!r}: must be a list; correct it")
        return value

    def activation(self, *allowed: str) -> None:
        """Refuse another activation function than these."""
        self._read.add("hidden_act")
        value = self._data.get("hidden_act")
        if value is not None and value not in allowed:
            raise InputError(
                f"config: hidden_act = {value!r} is not understood (only {', '.join(allowed)}); no "
                "estimate covers it"
            )

    def fill(self, name: str, value: int) -> None:
        """Give a field that published files leave to the code its value there."""
        self._data.setdefault(name, value)

    def check_rest(self) -> None:
        """Refuse fields that were not read: unknown fields, and known ones with unknown values."""
        for name in sorted(set(self._data) - self._read - _NEUTRAL):
            value = self._data[name]
            if name == "layer_types" and isinstance(value, list):
                value = sorted(set(map(str, value)))
            if name == "sliding_window" and (
                value is None or self._data.get("use_sliding_window") is False
            ):
                continue
            if name not in _ONLY:
                raise InputError(
                    f"config: {name} = {value!r} is not understood; remove it from the file if it "
                    "changes neither parameters nor work"
                )
            if not any(value == known and type(value) is type(known) for known in _ONLY[name]):
                raise InputError(
                    f"config: {name} = {value!r} is not understood (only "
                    f"{', '.join(repr(known) for known in _ONLY[name])}); no estimate covers it"
                )


def shape_from_config(text: str, name: str = "config") -> ModelShape:
    """Return the shape that the text of a ``config.json`` describes.

    Raises
    ------
    InputError
        If it is no JSON object, or holds something that is not understood, which is named.
    """
    data = parse_json(text, takes_constants=True)
    if not isinstance(data, dict):
        raise InputError("config: must be a JSON object; give a model's config.json")
    kind = data.get("model_type")
    reader = _READERS.get(kind) if isinstance(kind, str) else None
    if isinstance(kind, str) and kind in _NO_FORMULA:
        raise InputError(
            f"config: model_type = {kind!r} is not understood: {_NO_FORMULA[kind]}, which no "
            f"formula covers; {_OTHERWISE}"
        )
    if reader is None:
        raise InputError(
            f"config: model_type = {kind!r} is not understood (only {', '.join(MODEL_TYPES)}); "
            f"{_OTHERWISE}"
        )
    left_out: tuple[str, ...] = ()
    if isinstance(kind, str) and kind in _TEXT_OF:
        of_text = data.get("text_config")
        if isinstance(of_text, dict):
            tied = {key: data[key] for key in ("tie_word_embeddings",) if key in data}
            data = tied | of_text
        elif of_text is None and kind == "qwen2_5_vl":  # in early files next to vision_config
            data = {key: value for key, value in data.items() if key != "vision_config"}
        else:
            raise InputError("config: text_config is missing; give it")
        left_out = ("what reads images",)
    config = _Config(data)
    fields = reader(config)
    config.check_rest()
    fields["left_out"] = (*fields.get("left_out", ()), *left_out)
    source = f"config.json, model_type {kind}"
    return ModelShape(name=name, source=source, settings=_settings(data), **fields)


_CARRIED = (
    "normalization", "add_bias_linear", "position_embedding_type", "attention_dropout",
    "hidden_dropout", "add_qkv_bias", "qk_layernorm",
)  # fmt: skip
"""Fields of a config of Megatron-Core that pasted files repeat."""
_SETTINGS = {
    "rms_norm_eps": "layernorm_epsilon",
    "layer_norm_epsilon": "layernorm_epsilon",
    "rope_theta": "rotary_base",
    "partial_rotary_factor": "rotary_percent",
}
"""Field of a config -> Megatron-Core's name."""


def _settings(data: Mapping[str, Any]) -> ModelSettings:
    """Return the settings that pasted files repeat; transformers 5 nests those of RoPE."""
    if data.get("model_type") == MEGATRON:
        return ModelSettings(values={name: data[name] for name in _CARRIED if name in data})
    nested = data.get("rope_parameters")
    data = {**(nested if isinstance(nested, dict) else {}), **data}
    values = {}
    for name, field in _SETTINGS.items():
        value = data.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            values[field] = int(value) if value == int(value) else value
    return ModelSettings(values=values)


def _num_layers(config: _Config, name: str) -> int:
    layers = config.number(name)
    if layers > MAX_LAYERS:
        raise InputError(f"config: {name} = {layers}: must be at most {MAX_LAYERS}; correct it")
    return layers


def _common(config: _Config) -> dict[str, Any]:
    heads = config.number("num_attention_heads")
    return {
        "num_layers": _num_layers(config, "num_hidden_layers"),
        "hidden": config.number("hidden_size"),
        "num_heads": heads,
        "num_kv_heads": config.number("num_key_value_heads", heads),
        "ffn": config.number("intermediate_size"),
        "vocab": config.number("vocab_size"),
        "tied": config.flag("tie_word_embeddings", default=False),
    }


def _llama(config: _Config, head_width: int | None = None) -> dict[str, Any]:
    fields = _common(config)
    if config.given("head_dim") or head_width is not None:
        fields["head_width"] = config.number("head_dim", head_width)
    return fields


def _qwen2(config: _Config) -> dict[str, Any]:
    return _llama(config) | {"bias": "qkv"}


def _qwen3(config: _Config) -> dict[str, Any]:
    return _llama(config, 128) | {"qk_norm": True}


def _mistral(config: _Config) -> dict[str, Any]:
    """All layers have the window, where there is one."""
    fields = _llama(config)
    if config.given("sliding_window"):
        fields |= config.windows("sliding_window", fields["num_layers"] + 1)
    return fields


def _qwen3_moe(config: _Config) -> dict[str, Any]:
    num = "num_local_experts" if config.given("num_local_experts") else "num_experts"
    experts = Experts(
        num=config.number(num),
        active=config.number("num_experts_per_tok"),
        ffn=config.number("moe_intermediate_size"),
    )
    return _qwen3(config) | {"experts": experts}


def _deepseek(config: _Config) -> dict[str, Any]:
    latent = LatentAttention(
        query_rank=config.number("q_lora_rank") if config.given("q_lora_rank") else None,
        kv_rank=config.number("kv_lora_rank"),
        nope=config.number("qk_nope_head_dim"),
        rope=config.number("qk_rope_head_dim"),
        value=config.number("v_head_dim"),
    )
    config.number("head_dim", 0, least=0)  # transformers 5 writes the rotated width
    fields = _common(config) | {"latent": latent, "experts": _routed(config)}
    if config.number("num_nextn_predict_layers", 0, least=0):
        fields["left_out"] = ("the multi-token prediction module, which deepseek-v3-mtp has",)
    return fields


def _glm4_moe(config: _Config) -> dict[str, Any]:
    fields = _llama(config) | {
        "experts": _routed(config),
        "bias": "qkv" if config.flag("attention_bias", default=False) else "none",
        "qk_norm": config.flag("use_qk_norm", default=False),
    }
    if config.number("num_nextn_predict_layers", 0, least=0):
        fields["left_out"] = ("the multi-token prediction module",)
    return fields


def _routed(config: _Config) -> Experts:
    """Return experts with shared ones and a gate by groups, after some dense layers."""
    inner = config.number("moe_intermediate_size")
    groups, chosen = config.number("n_group", 1), config.number("topk_group", 1, least=0)
    return Experts(
        num=config.number("n_routed_experts"),
        active=config.number("num_experts_per_tok"),
        ffn=inner,
        shared_ffn=inner * config.number("n_shared_experts", 0, least=0),
        dense_layers=config.number("first_k_dense_replace", 0, least=0),
        max_nodes=chosen if groups > chosen > 0 else 0,
    )


def _local_experts(config: _Config, **more: Any) -> Experts:
    """Return experts of the width ``intermediate_size``."""
    return Experts(
        num=config.number("num_local_experts"),
        active=config.number("num_experts_per_tok"),
        ffn=config.number("intermediate_size"),
        **more,
    )


def _gpt_oss(config: _Config) -> dict[str, Any]:
    fields = _llama(config) | config.windows("sliding_window", 2)
    config.flag("attention_bias", default=True)
    experts = _local_experts(config, bias=True)
    return fields | {"experts": experts, "bias": "attention", "sinks": True}


def _llama4(config: _Config) -> dict[str, Any]:
    """A chunk of n tokens costs what a window of n / 2 does: what a token sees on the average."""
    fields = _llama(config) | config.windows("attention_chunk_size", 4)
    step = config.number("interleave_moe_layer_step", 1)
    layers = config.listed("moe_layers")
    if layers is not None and layers != list(range(step - 1, fields["num_layers"], step)):
        raise InputError(f"config: moe_layers do not follow from every {step}th; correct them")
    inner = fields["ffn"]
    experts = _local_experts(config, shared_ffn=inner, every=step)
    ffn = config.number("intermediate_size_mlp", inner)
    return fields | {"experts": experts, "ffn": ffn, "window": fields["window"] // 2}


def _gemma(config: _Config) -> dict[str, Any]:
    config.activation("gelu_pytorch_tanh", "gelu")
    return _llama(config, 256) | {"tied": config.flag("tie_word_embeddings", default=True)}


def _gemma2(config: _Config) -> dict[str, Any]:
    config.renamed("sliding_window_size", "sliding_window")
    return _gemma(config) | {"norms": 4} | config.windows("sliding_window", 2)


def _gemma3(config: _Config) -> dict[str, Any]:
    pattern = config.number("sliding_window_pattern", config.number("_sliding_window_pattern", 6))
    windows = config.windows("sliding_window", pattern)
    config.fill("vocab_size", 262208)
    return _gemma(config) | {"norms": 4, "qk_norm": True} | windows


def _gpt2(config: _Config) -> dict[str, Any]:
    hidden, heads = config.number("n_embd"), config.number("n_head")
    return {
        "num_layers": config.number("n_layer"),
        "hidden": hidden,
        "num_heads": heads,
        "num_kv_heads": heads,
        "ffn": config.number("n_inner", 4 * hidden),
        "vocab": config.number("vocab_size"),
        "positions": config.number("n_positions"),
        "tied": config.flag("tie_word_embeddings", default=True),
        "mlp": "gelu",
        "bias": "all",
        "dropout": True,
    }


MEGATRON = "megatron"
"""The ``model_type`` of a config with the fields of Megatron-Core's ``TransformerConfig``."""


def _megatron(config: _Config) -> dict[str, Any]:
    """Read fields of Megatron-Core, with the defaults of its ``TransformerConfig``.

    The ranks of latent attention have no default; without ``q_lora_rank``, queries are whole.
    """
    layers, hidden = _num_layers(config, "num_layers"), config.number("hidden_size")
    heads = config.number("num_attention_heads")
    ffn = config.number("ffn_hidden_size", 4 * hidden)
    has_bias = config.flag("add_bias_linear", default=True)
    has_qkv_bias = config.flag("add_qkv_bias", default=False)
    has_dropout = [config.share(f"{name}_dropout", 0.1) > 0 for name in ("hidden", "attention")]
    has_positions = config.word("position_embedding_type", _LEARNED) == _LEARNED
    longest = config.number("max_position_embeddings", least=0) if has_positions else 0
    fields: dict[str, Any] = {
        "num_layers": layers,
        "hidden": hidden,
        "num_heads": heads,
        "num_kv_heads": config.number("num_query_groups", heads),
        "ffn": ffn,
        "vocab": config.number("vocab_size"),
        "tied": config.flag("share_embeddings_and_output_weights", default=False),
        "mlp": "swiglu" if config.flag("gated_linear_unit", default=False) else "gelu",
        "bias": "all" if has_bias else "qkv" if has_qkv_bias else "none",
        "positions": longest,
        "dropout": any(has_dropout),
        "sinks": config.word("softmax_type", "vanilla") == "learnable",
        "mtp": config.number("mtp_num_layers", 0, least=0),
    }
    if config.word("normalization", "LayerNorm") == "LayerNorm" and not has_bias:
        fields["left_out"] = ("the biases of its norms",)
    if (window := config.listed("window_size")) is not None:
        every = config.number("window_attn_skip_freq", layers + 1)
        fields |= {"window": _left_window(window), "full_every": every}
    has_norms = config.flag("qk_layernorm", default=False)
    width = config.number("kv_channels") if config.given("kv_channels") else None
    if config.flag("multi_latent_attention", default=False):
        if has_bias:
            raise InputError(
                "config: add_bias_linear = true with multi_latent_attention: no estimate covers "
                "these biases; switch them off (--disable-bias-linear)"
            )
        fields["latent"] = LatentAttention(
            query_rank=config.number("q_lora_rank", 0, least=0) or None,
            kv_rank=config.number("kv_lora_rank"),
            nope=config.number("qk_head_dim", 128),
            rope=config.number("qk_pos_emb_head_dim", 64),
            value=config.number("v_head_dim", 128),
        )
    else:
        fields |= {"head_width": width, "qk_norm": has_norms}
    if config.given("num_moe_experts"):
        groups = config.number("moe_router_num_groups", 1)
        chosen = config.number("moe_router_group_topk", 1, least=0)
        dense_layers, every = _expert_layers(config.listed("moe_layer_freq") or [1] * layers)
        fields["experts"] = Experts(
            num=config.number("num_moe_experts"),
            active=config.number("moe_router_topk", 2),
            ffn=config.number("moe_ffn_hidden_size", ffn),
            shared_ffn=config.number("moe_shared_expert_intermediate_size", 0, least=0),
            dense_layers=dense_layers,
            every=every,
            max_nodes=chosen if groups > chosen > 0 else 0,
            bias=has_bias,
        )
        if has_bias:
            fields["bias"] = "attention"
            if dense_layers or every > 1 or fields["experts"].shared_ffn:
                fields["left_out"] = ("the biases of its dense MLPs and shared experts",)
    return fields


_LEARNED = "learned_absolute"


def _left_window(window: Sequence[Any]) -> int:
    if len(window) != 2 or type(window[0]) is not int or window[0] < 0 or window[1] not in (0, -1):
        raise InputError(
            f"config: window_size = {window}: must be [tokens, 0], a window of earlier tokens; no "
            "estimate covers another"
        )
    return window[0]


def _expert_layers(freq: Sequence[Any]) -> tuple[int, int]:
    """Return ``dense_layers`` and ``every`` of `Experts` for a 1 or 0 of each layer."""
    first = freq.index(1) if 1 in freq else len(freq)
    rest = freq[first + 1 :]
    every = rest.index(1) + 1 if 1 in rest else 1
    dense = first - every + 1
    if dense < 0 or any(
        kind != (index >= dense and (index - dense + 1) % every == 0)
        for index, kind in enumerate(freq)
    ):
        raise InputError(
            f"config: moe_layer_freq = {freq}: an estimate covers some dense layers, and then "
            "experts in the last of every n layers; no estimate covers other patterns"
        )
    return dense, every


_READERS: dict[str, Callable[[_Config], dict[str, Any]]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen2_5_vl": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "mixtral": lambda config: _llama(config) | {"experts": _local_experts(config)},
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma3_text": _gemma3,
    "glm4_moe": _glm4_moe,
    "gpt2": _gpt2,
    "gpt_oss": _gpt_oss,
    "kimi_k2": _deepseek,
    "llama4": _llama4,
    "llama4_text": _llama4,
    MEGATRON: _megatron,
    "phi3": _mistral,
}

MODEL_TYPES = tuple(sorted(_READERS))
"""Every ``model_type`` that is understood."""
