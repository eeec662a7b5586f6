"""Accelerators: peak rates and sizes from their data sheets, and what of them is reached.

Every number carries its source. Rates are dense (no sparsity), bandwidths one direction, GB/s
are 1e9 bytes per second. None of them was measured here. Which were looked up in what, and which
could not be, stands in docs/estimate.md. Sizes of memory are what the vendor's tool shows, because
that is what can be allocated: data sheets round, and mix GB with GiB.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from optpipe.errors import InputError
from optpipe.presets.shape import AskedError, Experts, Field, LatentAttention, ModelShape

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from optpipe.presets.shape import Precision

__all__ = [
    "GPUS",
    "MODELS",
    "PIPEOFFLOAD",
    "Efficiency",
    "Hardware",
    "find_gpu",
    "find_model",
]


class Fact(NamedTuple):
    """A number and where it comes from."""

    value: float
    source: str


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Which share of a peak rate is reached, per class of work; assumptions, each adjustable.

    Parameters
    ----------
    matmul
        Of the matrix products with weights.
    attention
        Of attention's own products (queries with keys, scores with values).
    memory
        Of the memory bandwidth, by everything that is no matrix product: norms, activation
        functions, residual additions, scores. It stands for launches and casts too, so it may
        be lower than what a copy reaches.
    pcie
        Of one direction of PCIe, while the other direction and compute are busy.
    network
        Of the links between devices.
    """

    matmul: float = 0.5
    attention: float = 0.4
    memory: float = 0.6
    pcie: float = 0.625
    network: float = 0.8

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 < value <= 1:
                raise InputError(
                    f"efficiency {field.name} = {value}: must be a share of the peak, above 0 "
                    "and at most 1; correct it"
                )

    def with_pcie(self, share: float | None) -> Efficiency:
        """Return this with another share of PCIe; None changes nothing."""
        return self if share is None else replace(self, pcie=share)


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One kind of accelerator and the node it stands in.

    Parameters
    ----------
    tflops
        Precision -> peak dense rate in TFLOP/s; products accumulate in fp32. What is missing
        the accelerator cannot do.
    memory_bytes, memory_gb_per_s
        Size and bandwidth of the device's memory.
    pcie_gb_per_s
        To and from the host, per direction; None = there is nothing to offload to.
    peer_gb_per_s
        To one other device of the node, per direction: what a boundary tensor takes.
    node_gb_per_s
        To all devices of the node together, per direction: what collectives take.
    network_gb_per_s
        To another node, per direction, of this device's share of the adapters.
    gpus_per_node
        Devices that ``peer_gb_per_s`` joins.
    """

    name: str
    title: str
    tflops: Mapping[Precision, Fact]
    memory_bytes: Fact
    memory_gb_per_s: Fact
    pcie_gb_per_s: Fact | None
    peer_gb_per_s: Fact
    node_gb_per_s: Fact
    network_gb_per_s: Fact
    gpus_per_node: int = 8
    efficiency: Efficiency = Efficiency()

    def peak_flops(self, precision: Precision) -> float:
        """Return the peak dense rate in FLOP/s; refuse a precision that it has none for."""
        if precision not in self.tflops:
            raise AskedError(
                f"{self.title} has no {precision} products (it has "
                f"{', '.join(sorted(self.tflops))}); choose another ",
                Field("precision"),
            )
        return self.tflops[precision].value * 1e12

    @property
    def facts(self) -> tuple[tuple[str, Fact], ...]:
        """Every number by name, rates first."""
        named = [(f"{precision} TFLOP/s", fact) for precision, fact in self.tflops.items()]
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        return (*named, *((name, value) for name, value in values if isinstance(value, Fact)))


def _rates(source: str, **tflops: float) -> Mapping[Precision, Fact]:
    return MappingProxyType({name: Fact(value, source) for name, value in tflops.items()})  # type: ignore[misc]


_GIB = 2**30
_PCIE4 = Fact(31.5, "PCI Express 4.0 x16: 16 GT/s, 16 lanes, 128b/130b encoding")
_PCIE5 = Fact(63.0, "PCI Express 5.0 x16: 32 GT/s, 16 lanes, 128b/130b encoding")
_HDR = Fact(25.0, "DGX A100 data sheet: one 200 Gb/s adapter per GPU")
_NDR = Fact(50.0, "DGX H100 data sheet: one 400 Gb/s adapter per GPU")
_A100 = "NVIDIA A100 Tensor Core GPU data sheet"
_H100 = "NVIDIA H100 Tensor Core GPU data sheet; rates without sparsity"
_H200 = "NVIDIA H200 Tensor Core GPU data sheet; rates without sparsity"
_B200 = "NVIDIA Blackwell data sheet, HGX B200 at 1,000 W; rates without sparsity"
_MI300X = "AMD Instinct MI300X data sheet"
_ADA = "NVIDIA Ada GPU architecture white paper, GeForce RTX 4090"
_XEON = "Intel Xeon Platinum 8480+ specification"

# Fitted to published numbers, not measured here; benchmarks/estimates.py --fit. A100: matmul and
# memory with which one row of the Zero Bubble table (6.2B, 24 micro-batches) has its least largest
# error. H100: matmul with which a layer of PipeOffload's 10.5B reaches the 440 TFLOP/s that its
# published code takes for one. Everything else is assumed.
_AMPERE = Efficiency(matmul=0.75, attention=0.55, memory=0.64)
_HOPPER = Efficiency(matmul=0.46, attention=0.4, memory=0.6)
_BLACKWELL = Efficiency(matmul=0.46, attention=0.35, memory=0.6)
_CDNA = Efficiency(matmul=0.4, attention=0.25, memory=0.5)
_GEFORCE = Efficiency(matmul=0.75, attention=0.6, memory=0.65)
_CPU = Efficiency(matmul=0.4, attention=0.2, memory=0.6)


def _a100(name: str, title: str, gib: int, bandwidth: float) -> Hardware:
    nvlink = Fact(300.0, f"{_A100}: NVLink 600 GB/s, both directions counted")
    return Hardware(
        name=name,
        title=title,
        tflops=_rates(_A100, bf16=312, fp16=312, fp32=19.5),
        memory_bytes=Fact(gib * _GIB, f"{_A100}: {gib} GB; nvidia-smi shows {gib * 1024} MiB"),
        memory_gb_per_s=Fact(bandwidth, f"{_A100}, SXM"),
        pcie_gb_per_s=_PCIE4,
        peer_gb_per_s=nvlink,
        node_gb_per_s=nvlink,
        network_gb_per_s=_HDR,
        efficiency=_AMPERE,
    )


_NVLINK4 = Fact(450.0, f"{_H100}: NVLink 900 GB/s, both directions counted")
_H100_BYTES = Fact(81559 * 2**20, f"{_H100}: 80 GB; nvidia-smi shows 81559 MiB")
_UPI = Fact(48.0, "UPI 2.0: 24 lanes of 16 GT/s; one link counted, sockets have up to 4")
_B200_LINK = Fact(900.0, f"{_B200}: NVLink 1.8 TB/s per GPU, both directions counted")

_ALL = (
    _a100("a100-40gb", "A100 SXM 40GB", 40, 1555),
    _a100("a100", "A100 SXM 80GB", 80, 2039),
    Hardware(
        name="h100",
        title="H100 SXM 80GB",
        tflops=_rates(_H100, bf16=989.4, fp16=989.4, fp8=1978.9, fp32=66.9),
        memory_bytes=_H100_BYTES,
        memory_gb_per_s=Fact(3350, _H100),
        pcie_gb_per_s=_PCIE5,
        peer_gb_per_s=_NVLINK4,
        node_gb_per_s=_NVLINK4,
        network_gb_per_s=_NDR,
        efficiency=_HOPPER,
    ),
    Hardware(
        name="h100-pcie",
        title="H100 PCIe 80GB",
        tflops=_rates(_H100, bf16=756, fp16=756, fp8=1513, fp32=51),
        memory_bytes=_H100_BYTES,
        memory_gb_per_s=Fact(2000, _H100),
        pcie_gb_per_s=_PCIE5,
        peer_gb_per_s=_PCIE5._replace(source=_PCIE5.source + "; no NVLink bridge assumed"),
        node_gb_per_s=_PCIE5._replace(source=_PCIE5.source + "; no NVLink bridge assumed"),
        network_gb_per_s=Fact(25.0, "assumed: one 200 Gb/s adapter per GPU"),
        efficiency=_HOPPER,
    ),
    Hardware(
        name="h200",
        title="H200 SXM 141GB",
        tflops=_rates(_H200, bf16=989.4, fp16=989.4, fp8=1978.9, fp32=66.9),
        memory_bytes=Fact(143771 * 2**20, f"{_H200}: 141 GB; nvidia-smi shows 143771 MiB"),
        memory_gb_per_s=Fact(4800, _H200),
        pcie_gb_per_s=_PCIE5,
        peer_gb_per_s=Fact(450.0, f"{_H200}: NVLink 900 GB/s, both directions counted"),
        node_gb_per_s=Fact(450.0, f"{_H200}: NVLink 900 GB/s, both directions counted"),
        network_gb_per_s=_NDR,
        efficiency=_HOPPER,
    ),
    Hardware(
        name="b200",
        title="B200 180GB",
        tflops=_rates(_B200, bf16=2250, fp16=2250, fp8=4500, fp32=80),
        memory_bytes=Fact(183359 * 2**20, "NVIDIA B200, 180 GB; nvidia-smi shows 183359 MiB"),
        memory_gb_per_s=Fact(8000, f"{_B200}; the driver's bus width and clock make 7672"),
        pcie_gb_per_s=_PCIE5,
        peer_gb_per_s=_B200_LINK,
        node_gb_per_s=_B200_LINK,
        network_gb_per_s=Fact(50.0, f"{_B200}: one 400 Gb/s adapter per GPU"),
        efficiency=_BLACKWELL,
    ),
    Hardware(
        name="mi300x",
        title="MI300X 192GB",
        tflops=_rates(_MI300X, bf16=1307.4, fp16=1307.4, fp8=2614.9, fp32=163.4),
        memory_bytes=Fact(206_141_652_992, f"{_MI300X}: 192 GB; rocm-smi shows 206141652992 B"),
        memory_gb_per_s=Fact(5300, _MI300X),
        pcie_gb_per_s=_PCIE5,
        peer_gb_per_s=Fact(64.0, f"{_MI300X}: one Infinity Fabric link, 128 GB/s both directions"),
        node_gb_per_s=Fact(448.0, f"{_MI300X}: seven Infinity Fabric links, 64 GB/s each way"),
        network_gb_per_s=Fact(50.0, "assumed: one 400 Gb/s adapter per GPU"),
        efficiency=_CDNA,
    ),
    Hardware(
        name="rtx4090",
        title="GeForce RTX 4090",
        tflops=_rates(f"{_ADA}; fp32 accumulation", bf16=165.2, fp16=165.2, fp8=330.3, fp32=82.6),
        memory_bytes=Fact(24564 * 2**20, f"{_ADA}: 24 GB; nvidia-smi shows 24564 MiB"),
        memory_gb_per_s=Fact(1008, _ADA),
        pcie_gb_per_s=_PCIE4,
        peer_gb_per_s=_PCIE4._replace(source=_PCIE4.source + "; the card has no NVLink"),
        node_gb_per_s=_PCIE4._replace(source=_PCIE4.source + "; the card has no NVLink"),
        network_gb_per_s=Fact(12.5, "assumed: 100 Gb/s per GPU"),
        efficiency=_GEFORCE,
    ),
    Hardware(
        name="cpu",
        title="Xeon Platinum 8480+ (one socket)",
        tflops=_rates(f"{_XEON}: 56 cores x 2.0 GHz x 2048 (AMX) or 64 (AVX-512) FLOP per cycle",
                      bf16=229.4, fp32=7.2),
        memory_bytes=Fact(256 * _GIB, "assumed: 256 GiB per socket"),
        memory_gb_per_s=Fact(307.2, f"{_XEON}: 8 channels of DDR5-4800"),
        pcie_gb_per_s=None,
        peer_gb_per_s=_UPI,
        node_gb_per_s=_UPI,
        network_gb_per_s=Fact(25.0, "assumed: one 200 Gb/s adapter"),
        gpus_per_node=2,
        efficiency=_CPU,
    ),
)  # fmt: skip

GPUS: Mapping[str, Hardware] = MappingProxyType({gpu.name: gpu for gpu in _ALL})
"""Every accelerator of the catalogue by name."""

_GPU_ALIASES = {"a100-80gb": "a100", "h100-sxm": "h100", "4090": "rtx4090"}


def find_gpu(name: str) -> Hardware:
    """Return an accelerator by name; case does not matter.

    Raises
    ------
    InputError
        If the catalogue has none of that name; the message names the nearest.
    """
    key = name.lower()
    return _pick("gpu", _GPU_ALIASES.get(key, key), GPUS)


# --- The catalogue of model shapes, each with its source.
# Where a publisher gives the exact number of parameters, a test holds the shape to it. What the
# numbers were looked up in stands in docs/estimate.md.

_GPT3 = "Brown et al. 2020, Language Models are Few-Shot Learners (arXiv 2005.14165), table 2.1"
_LLAMA2 = "Touvron et al. 2023, Llama 2 (arXiv 2307.09288), and the published config.json"
_LLAMA3 = "The Llama 3 Herd of Models (arXiv 2407.21783), table 3, and the published config.json"
_QWEN25 = "Qwen2.5 Technical Report (arXiv 2412.15115), and the published config.json"
_QWEN3 = "Qwen3 Technical Report (arXiv 2505.09388), tables 1 and 2, and the published config.json"
_MIXTRAL = "Mixtral of Experts (arXiv 2401.04088), table 1, and the published config.json"
_DEEPSEEK2 = "DeepSeek-V2 (arXiv 2405.04434), section 3.1.2, and the published config.json"
_DEEPSEEK3 = "DeepSeek-V3 (arXiv 2412.19437), section 4.2, and the published config.json"
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
    return ModelShape(
        name=name, num_layers=layers, hidden=hidden, num_heads=heads, num_kv_heads=kv_heads,
        ffn=ffn, vocab=vocab, head_width=128 if "qk_norm" in fields else None,
        tied=name in _TIED, source=source, **fields,
    )  # fmt: skip


def _latent(query_rank: int | None) -> LatentAttention:
    return LatentAttention(query_rank=query_rank, kv_rank=512, nope=128, rope=64, value=128)


def _all() -> Iterator[ModelShape]:
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
        experts=Experts(num=160, active=6, ffn=1536, shared_ffn=3072, dense_layers=1),
    )  # fmt: skip
    yield _rotary(
        "deepseek-v3", (61, 7168, 128, 128, 18432, 129280), _DEEPSEEK3, latent=_latent(1536),
        experts=Experts(num=256, active=8, ffn=2048, shared_ffn=2048, dense_layers=3),
        left_out=("the multi-token prediction module",),
    )  # fmt: skip
    for model, small in _ZERO_BUBBLE.items():
        source = f"{_ZB}; vocabulary inferred from the number of parameters"
        name = f"zb-{model.lower()}"
        yield _gelu(name, small, source, positions=1024, bias="all", dropout=True)
    for model, small in PIPEOFFLOAD.items():
        source = f"{_PO}; 8 key/value heads and vocabulary inferred from the number of parameters"
        yield _gelu(f"po-{model.lower()}", small, source, num_kv_heads=8)


MODELS: Mapping[str, ModelShape] = MappingProxyType({shape.name: shape for shape in _all()})
"""Every model of the catalogue by name."""

_MODEL_ALIASES = {
    "llama3.1-8b": "llama3-8b", "llama3.1-70b": "llama3-70b", "llama3-405b": "llama3.1-405b",
}  # fmt: skip


def find_model(name: str) -> ModelShape:
    """Return a model by name; case does not matter.

    Raises
    ------
    InputError
        If the catalogue has none of that name; the message names the nearest.
    """
    key = name.lower()
    return _pick("model", _MODEL_ALIASES.get(key, key), MODELS)


# --- A name looked up in a catalogue; a wrong one is answered with the nearest.

Value = TypeVar("Value")


def _pick(field: str, name: str, catalogue: Mapping[str, Value]) -> Value:
    """Return the entry of that name, which ``field`` gave."""
    found = catalogue.get(name)
    if found is not None:
        return found
    close = difflib.get_close_matches(name, catalogue, n=3)
    hint = f"did you mean {', '.join(close)}?" if close else f"it has {', '.join(catalogue)}"
    raise AskedError(Field(field, name), f": the catalogue has none of that name; {hint}")
