"""Model shapes: by name, each with its source, or from a local Hugging Face ``config.json``.

Where a publisher gives the exact number of parameters, a test holds the shape to it. What the
numbers were looked up in stands in docs/estimate.md. Of a file only what is understood is taken:
another architecture, an unknown field, or a value that changes the shape in a way no formula here
knows is refused by name, not guessed around. Nothing is fetched.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from optpipe.errors import InputError
from optpipe.formats.json import parse_json
from optpipe.model import MAX_LAYERS
from optpipe.presets.shape import Experts, LatentAttention, ModelShape, pick

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

__all__ = ["MODELS", "MODEL_TYPES", "PIPEOFFLOAD", "find_model", "shape_from_config"]


_GPT3 = "Brown et al. 2020, Language Models are Few-Shot Learners (arXiv 2005.14165), table 2.1"
_LLAMA2 = "Touvron et al. 2023, Llama 2 (arXiv 2307.09288), and the published config.json"
_LLAMA3 = "The Llama 3 Herd of Models (arXiv 2407.21783), table 3, and the published config.json"
_QWEN25 = "Qwen2.5 Technical Report (arXiv 2412.15115), and the published config.json"
_QWEN3 = "Qwen3 Technical Report (arXiv 2505.09388), tables 1 and 2, and the published config.json"
_MIXTRAL = "Mixtral of Experts (arXiv 2401.04088), table 1, and the published config.json"
_DEEPSEEK2 = "DeepSeek-V2 (arXiv 2405.04434), section 3.1.2, and the published config.json"
_DEEPSEEK3 = "DeepSeek-V3 (arXiv 2412.19437), section 4.2, and the published config.json"
_KIMI = "Kimi K2 (arXiv 2507.20534), table 2, and the published config.json"
_MOONLIGHT = "Muon is Scalable for LLM Training (arXiv 2502.16982), and the published config.json"
_LLAMA4 = (
    "published config.json (text part); chunks of 8192 tokens count as a window of 4096, which is "
    "what a token sees of them on the average"
)
_GPT_OSS = "gpt-oss model card (arXiv 2508.10925), and the published config.json"
_GEMMA = "Gemma (arXiv 2403.08295), table 1, and the published config.json"
_GEMMA2 = "Gemma 2 (arXiv 2408.00118), table 1, and the published config.json"
_GEMMA3 = "Gemma 3 (arXiv 2503.19786), table 1, and the published config.json (text part)"
_KORTHIKANTI = "Korthikanti et al. 2022 (arXiv 2205.05198), table 3"
_ZB = "Zero Bubble Pipeline Parallelism (arXiv 2401.10241), table 4"
_PO = "PipeOffload (arXiv 2503.01328), table of models"

_GPT3_ROWS = {
    "gpt3-125m": (12, 768, 12), "gpt3-350m": (24, 1024, 16), "gpt3-760m": (24, 1536, 16),
    "gpt3-1.3b": (24, 2048, 16), "gpt3-2.7b": (32, 2560, 32), "gpt3-6.7b": (32, 4096, 32),
    "gpt3-13b": (40, 5120, 40), "gpt3-175b": (96, 12288, 96),
}  # fmt: skip

# Layers, hidden, heads, key/value heads, ffn, vocabulary.
_LLAMA_ROWS = {
    "llama2-7b": (32, 4096, 32, 32, 11008, 32000),
    "llama2-13b": (40, 5120, 40, 40, 13824, 32000),
    "llama2-70b": (80, 8192, 64, 8, 28672, 32000),
    "llama3-8b": (32, 4096, 32, 8, 14336, 128256),
    "llama3-70b": (80, 8192, 64, 8, 28672, 128256),
    "llama3.1-405b": (126, 16384, 128, 8, 53248, 128256),
    "llama3.2-1b": (16, 2048, 32, 8, 8192, 128256),
    "llama3.2-3b": (28, 3072, 24, 8, 8192, 128256),
}
_QWEN25_ROWS = {
    "qwen2.5-0.5b": (24, 896, 14, 2, 4864, 151936),
    "qwen2.5-1.5b": (28, 1536, 12, 2, 8960, 151936),
    "qwen2.5-3b": (36, 2048, 16, 2, 11008, 151936),
    "qwen2.5-7b": (28, 3584, 28, 4, 18944, 152064),
    "qwen2.5-14b": (48, 5120, 40, 8, 13824, 152064),
    "qwen2.5-32b": (64, 5120, 40, 8, 27648, 152064),
    "qwen2.5-72b": (80, 8192, 64, 8, 29568, 152064),
}
_QWEN3_ROWS = {
    "qwen3-0.6b": (28, 1024, 16, 8, 3072, 151936),
    "qwen3-1.7b": (28, 2048, 16, 8, 6144, 151936),
    "qwen3-4b": (36, 2560, 32, 8, 9728, 151936),
    "qwen3-8b": (36, 4096, 32, 8, 12288, 151936),
    "qwen3-14b": (40, 5120, 40, 8, 17408, 151936),
    "qwen3-32b": (64, 5120, 64, 8, 25600, 151936),
}
# The same, then the width of a head.
_GEMMA_ROWS = {
    "gemma-2b": (18, 2048, 8, 1, 16384, 256000, 256),
    "gemma-7b": (28, 3072, 16, 16, 24576, 256000, 256),
    "gemma2-2b": (26, 2304, 8, 4, 9216, 256000, 256),
    "gemma2-9b": (42, 3584, 16, 8, 14336, 256000, 256),
    "gemma2-27b": (46, 4608, 32, 16, 36864, 256000, 128),
    "gemma3-1b": (26, 1152, 4, 1, 6912, 262144, 256),
    "gemma3-4b": (34, 2560, 8, 4, 10240, 262208, 256),
    "gemma3-12b": (48, 3840, 16, 8, 15360, 262208, 256),
    "gemma3-27b": (62, 5376, 32, 16, 21504, 262208, 128),
}

# Layers, hidden, heads.
_MEGATRON_ROWS = {
    "megatron-22b": (48, 6144, 64),
    "mt-nlg-530b": (105, 20480, 128),
    "megatron-1t": (128, 25600, 160),
}

_TIED = {
    "llama3.2-1b", "llama3.2-3b", "qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b",
    "qwen3-0.6b", "qwen3-1.7b", "qwen3-4b",
}  # fmt: skip

_ZERO_BUBBLE = {
    "1.5B": (22, 2304, 24), "6.2B": (30, 4096, 32),
    "14.6B": (46, 5120, 40), "28.3B": (62, 6144, 48),
}  # fmt: skip
"""Layers, hidden and heads of the Zero Bubble paper's models."""

PIPEOFFLOAD = {
    "5.8B": (32, 4096, 32), "10.5B": (38, 5120, 40), "18.1B": (46, 6144, 48),
    "42.9B": (62, 8192, 64), "66.6B": (62, 10240, 80), "83.8B": (78, 10240, 80),
}  # fmt: skip
"""Layers, hidden and heads of the PipeOffload paper's models."""

# Neither paper prints it; with this one all ten totals come out as the models are called.
_PAPER_VOCAB = 32000


def _gelu(name: str, row: tuple[int, int, int], source: str, **fields: Any) -> ModelShape:
    layers, hidden, heads = row
    return ModelShape(
        **{"name": name, "num_layers": layers, "hidden": hidden, "num_heads": heads,
           "num_kv_heads": heads, "ffn": 4 * hidden, "vocab": _PAPER_VOCAB, "mlp": "gelu",
           "tied": True, "source": source, **fields},
    )  # fmt: skip


def _rotary(name: str, row: tuple[int, ...], source: str, **fields: Any) -> ModelShape:
    layers, hidden, heads, kv_heads, ffn, vocab = row
    usual = {"head_width": 128 if "qk_norm" in fields else None, "tied": name in _TIED}
    return ModelShape(
        name=name, num_layers=layers, hidden=hidden, num_heads=heads, num_kv_heads=kv_heads,
        ffn=ffn, vocab=vocab, source=source, **(usual | fields),
    )  # fmt: skip


def _latent(query_rank: int | None) -> LatentAttention:
    return LatentAttention(query_rank=query_rank, kv_rank=512, nope=128, rope=64, value=128)


def _dense() -> Iterator[ModelShape]:
    corrected = {
        "gpt3-1.3b": "; its 24 heads of 128 do not make 2048, so 16",
        "gpt3-13b": "; its hidden 5140 is no multiple of 40 heads of 128, so 5120",
    }
    for name, small in _GPT3_ROWS.items():
        source = _GPT3 + corrected.get(name, "")
        yield _gelu(name, small, source, vocab=50257, positions=2048, bias="all")
    for name, row in _LLAMA_ROWS.items():
        yield _rotary(name, row, _LLAMA2 if "llama2" in name else _LLAMA3)
    for name, row in _QWEN25_ROWS.items():
        yield _rotary(name, row, _QWEN25, bias="qkv")
    for name, row in _QWEN3_ROWS.items():
        yield _rotary(name, row, _QWEN3, qk_norm=True)
    yield from _gemmas()


def _gemmas() -> Iterator[ModelShape]:
    for name, (*row, width) in _GEMMA_ROWS.items():
        fields: dict[str, Any] = {"head_width": width, "tied": True}
        source = {"gemma-": _GEMMA, "gemma2": _GEMMA2, "gemma3": _GEMMA3}[name[:6]]
        if source != _GEMMA:
            fields |= {"norms": 4, "window": 4096, "full_every": 2}
        if source == _GEMMA3:
            window = 512 if name == "gemma3-1b" else 1024
            fields |= {"qk_norm": True, "window": window, "full_every": 6}
        yield _rotary(name, tuple(row), source, **fields)


def _with_experts() -> Iterator[ModelShape]:
    for name, row, ffn in (
        ("qwen3-30b-a3b", (48, 2048, 32, 4, 6144, 151936), 768),
        ("qwen3-235b-a22b", (94, 4096, 64, 4, 12288, 151936), 1536),
    ):
        experts = Experts(num=128, active=8, ffn=ffn)
        yield _rotary(name, row, _QWEN3, qk_norm=True, experts=experts)
    for name, row in (
        ("mixtral-8x7b", (32, 4096, 32, 8, 14336, 32000)),
        ("mixtral-8x22b", (56, 6144, 48, 8, 16384, 32000)),
    ):
        yield _rotary(name, row, _MIXTRAL, experts=Experts(num=8, active=2, ffn=row[4]))
    yield _rotary(
        "deepseek-v2-lite", (27, 2048, 16, 16, 10944, 102400), _DEEPSEEK2, latent=_latent(None),
        experts=Experts(num=64, active=6, ffn=1408, shared_ffn=2816, dense_layers=1),
    )  # fmt: skip
    yield _rotary(
        "deepseek-v2", (60, 5120, 128, 128, 12288, 102400), _DEEPSEEK2, latent=_latent(1536),
        experts=Experts(
            num=160, active=6, ffn=1536, shared_ffn=3072, dense_layers=1, max_nodes=3
        ),
    )  # fmt: skip
    experts = Experts(num=256, active=8, ffn=2048, shared_ffn=2048, dense_layers=3, max_nodes=4)
    row = (61, 7168, 128, 128, 18432, 129280)
    left_out = ("the multi-token prediction module, which deepseek-v3-mtp has",)
    for name, mtp in (("deepseek-v3", 0), ("deepseek-v3-mtp", 1)):
        yield _rotary(
            name, row, _DEEPSEEK3, latent=_latent(1536), experts=experts, mtp=mtp,
            left_out=() if mtp else left_out,
        )  # fmt: skip
    yield _rotary(
        "kimi-k2", (61, 7168, 64, 64, 18432, 163840), _KIMI, latent=_latent(1536),
        experts=Experts(num=384, active=8, ffn=2048, shared_ffn=2048, dense_layers=1),
    )  # fmt: skip
    yield _rotary(
        "moonlight-16b-a3b", (27, 2048, 16, 16, 11264, 163840), _MOONLIGHT, latent=_latent(None),
        experts=Experts(num=64, active=6, ffn=1408, shared_ffn=2816, dense_layers=1),
    )  # fmt: skip
    for name, layers, num in (("gpt-oss-20b", 24, 32), ("gpt-oss-120b", 36, 128)):
        yield _rotary(
            name, (layers, 2880, 64, 8, 2880, 201088), _GPT_OSS, head_width=64, bias="attention",
            sinks=True, window=128, full_every=2,
            experts=Experts(num=num, active=4, ffn=2880, bias=True),
        )  # fmt: skip
    for name, num, every in (("llama4-scout", 16, 1), ("llama4-maverick", 128, 2)):
        yield _rotary(
            name, (48, 5120, 40, 8, 16384, 202048), _LLAMA4, window=4096, full_every=4,
            experts=Experts(num=num, active=1, ffn=8192, shared_ffn=8192, every=every),
        )  # fmt: skip


def _of_papers() -> Iterator[ModelShape]:
    for name, small in _MEGATRON_ROWS.items():
        yield _gelu(
            name, small, _KORTHIKANTI, vocab=51200, positions=2048, bias="all", dropout=True
        )
    for model, small in _ZERO_BUBBLE.items():
        source = f"{_ZB}; vocabulary inferred from the number of parameters"
        name = f"zb-{model.lower()}"
        yield _gelu(name, small, source, positions=1024, bias="all", dropout=True)
    for model, small in PIPEOFFLOAD.items():
        source = f"{_PO}; 8 key/value heads and vocabulary inferred from the number of parameters"
        yield _gelu(f"po-{model.lower()}", small, source, num_kv_heads=8)


MODELS: Mapping[str, ModelShape] = MappingProxyType(
    {shape.name: shape for shape in (*_dense(), *_with_experts(), *_of_papers())}
)
"""Every model of the catalogue by name."""

_MODEL_ALIASES = {
    "llama3.1-8b": "llama3-8b", "llama3.1-70b": "llama3-70b", "llama3-405b": "llama3.1-405b",
    "llama4-scout-17b-16e": "llama4-scout", "llama4-maverick-17b-128e": "llama4-maverick",
}  # fmt: skip


def find_model(name: str) -> ModelShape:
    """Return a model by name; case does not matter.

    Raises
    ------
    InputError
        If the catalogue has none of that name; the message names the nearest.
    """
    key = name.lower()
    return pick("model", _MODEL_ALIASES.get(key, key), MODELS)


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
    # tokens that stand for images
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
"""Configs of text and images: the text's is in ``text_config``, or, in early files of Qwen2.5-VL,
beside ``vision_config``; what is for images is left out, and said so."""

_NO_FORMULA = {
    "qwen3_next": "three of four of its layers have linear attention (Gated DeltaNet)",
}
"""What estimates know no formula for, of models that are often asked for."""


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
        """Return the fields of a shape that say how far which layer's attention looks.

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

    def renamed(self, old: str, new: str) -> None:
        """Read a field under the name that early files give it; both must say the same."""
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
        """Refuse what nobody read: unknown fields, and known ones with values not understood."""
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
            "formula covers; describe the model by its layers instead (optpipe/model/v1)"
        )
    if reader is None:
        raise InputError(
            f"config: model_type = {kind!r} is not understood (only {', '.join(MODEL_TYPES)}); "
            "describe the model by its layers instead (optpipe/model/v1)"
        )
    left_out: tuple[str, ...] = ()
    if isinstance(kind, str) and kind in _TEXT_OF:
        data = _text_of(data, is_flat=kind == "qwen2_5_vl")
        left_out = ("what reads images",)
    config = _Config(data)
    fields = reader(config)
    config.check_rest()
    fields["left_out"] = (*fields.get("left_out", ()), *left_out)
    return ModelShape(name=name, source=f"config.json, model_type {kind}", **fields)


def _text_of(data: dict[str, Any], *, is_flat: bool) -> dict[str, Any]:
    """Return the config of the text; of early files it is the whole without that of images."""
    tied = {key: data[key] for key in ("tie_word_embeddings",) if key in data}
    text = data.get("text_config")
    if text is None and is_flat:
        return {key: value for key, value in data.items() if key != "vision_config"}
    if not isinstance(text, dict):
        raise InputError("config: text_config is missing; give it")
    return tied | text


def _common(config: _Config) -> dict[str, Any]:
    heads, layers = config.number("num_attention_heads"), config.number("num_hidden_layers")
    if layers > MAX_LAYERS:
        raise InputError(
            f"config: num_hidden_layers = {layers}: must be at most {MAX_LAYERS}; correct it"
        )
    return {
        "num_layers": layers,
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


def _mixtral(config: _Config) -> dict[str, Any]:
    fields = _llama(config)
    experts = Experts(
        num=config.number("num_local_experts"),
        active=config.number("num_experts_per_tok"),
        ffn=fields["ffn"],
    )
    return fields | {"experts": experts}


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
    """Return experts with shared ones and a gate by groups, behind some dense layers."""
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


def _gpt_oss(config: _Config) -> dict[str, Any]:
    fields = _llama(config) | config.windows("sliding_window", 2)
    config.flag("attention_bias", default=True)
    experts = Experts(
        num=config.number("num_local_experts"),
        active=config.number("num_experts_per_tok"),
        ffn=fields["ffn"],
        bias=True,
    )
    return fields | {"experts": experts, "bias": "attention", "sinks": True}


def _llama4(config: _Config) -> dict[str, Any]:
    """A chunk of n tokens costs what a window of n / 2 does: what a token sees on the average."""
    fields = _llama(config) | config.windows("attention_chunk_size", 4)
    step = config.number("interleave_moe_layer_step", 1)
    layers = config.listed("moe_layers")
    if layers is not None and layers != list(range(step - 1, fields["num_layers"], step)):
        raise InputError(f"config: moe_layers do not follow from every {step}th; correct them")
    inner = fields["ffn"]
    experts = Experts(
        num=config.number("num_local_experts"),
        active=config.number("num_experts_per_tok"),
        ffn=inner,
        shared_ffn=inner,
        every=step,
    )
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


_READERS: dict[str, Callable[[_Config], dict[str, Any]]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen2_5_vl": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "mixtral": _mixtral,
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
    "phi3": _mistral,
}

MODEL_TYPES = tuple(sorted(_READERS))
"""Every ``model_type`` that is understood."""
