"""Model shapes by name, each with its source.

Where a publisher gives the exact number of parameters, a test holds the shape to it. What the
numbers were looked up in stands in docs/estimate.md.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from optpipe.presets.shape import Experts, LatentAttention, ModelShape, pick

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["MODELS", "PIPEOFFLOAD", "find_model"]

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
