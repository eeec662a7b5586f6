"""Accelerators: peak rates and sizes from their data sheets, and what of them is reached.

Every number carries its source. Rates are dense (no sparsity), bandwidths one direction, GB/s
are 1e9 bytes per second. None of them was measured here. Which were looked up in what, and which
could not be, stands in docs/estimate.md. Sizes of memory are what the vendor's tool shows, because
that is what can be allocated: data sheets round, and mix GB with GiB.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple

from optpipe.errors import FieldError, FieldRef, InputError
from optpipe.presets.shape import pick

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from optpipe.presets.shape import Precision

__all__ = [
    "GPUS",
    "PRIORS",
    "Accelerators",
    "Efficiency",
    "Generation",
    "Hardware",
    "find_gpu",
    "find_gpus",
]

Generation = Literal[
    "ampere", "ada", "hopper", "blackwell-200", "blackwell-300", "cdna3", "cdna4", "cpu"
]


class Fact(NamedTuple):
    """A number and where it comes from."""

    value: float
    source: str


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Which share of a peak rate is reached, per class of work.

    The first four are fitted to published runs where a generation has some, by
    ``python -m benchmarks.scoreboard``; all others are assumptions. Each is adjustable.

    Parameters
    ----------
    matmul
        Of the matrix products with weights in bf16, fp16 or fp32.
    narrow
        Of those in fp8, mxfp8 or nvfp4, at the peak rate of that precision.
    attention
        Of attention's own products (queries with keys, scores with values).
    memory
        Of the memory bandwidth, by everything that is no matrix product: norms, activation
        functions, residual additions, casts, permutations, gradient accumulation, the optimizer.
    pcie
        Of one direction of PCIe, while the other direction and compute are busy.
    network
        Of the links between devices.
    """

    matmul: float = 0.65
    narrow: float = 0.55
    attention: float = 0.5
    memory: float = 0.75
    pcie: float = 0.625
    network: float = 0.8

    def __post_init__(self) -> None:
        for share in fields(self):
            value = getattr(self, share.name)
            if not 0 < value <= 1:
                raise InputError(
                    f"efficiency {share.name} = {value}: must be a share of the peak, above 0 "
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
    network_share, network_latency_ms
        What protocol and oversubscription leave of that, and what a message takes besides.
    gpus_per_node
        Devices that ``peer_gb_per_s`` joins (NVLink's domain: 8 of an HGX board, 72 of a rack).
    gpus_per_host
        Devices of one host and its memory.
    """

    name: str
    title: str
    generation: Generation
    tflops: Mapping[Precision, Fact] = field(hash=False)
    memory_bytes: Fact
    memory_gb_per_s: Fact
    pcie_gb_per_s: Fact | None
    peer_gb_per_s: Fact
    node_gb_per_s: Fact
    network_gb_per_s: Fact
    network_share: float = 1.0
    network_latency_ms: float = 0.03
    gpus_per_node: int = 8
    gpus_per_host: int = 8

    @property
    def efficiency(self) -> Efficiency:
        """What is reached, as the scoreboard fitted it or as assumed."""
        return _EFFICIENCIES[self.generation]

    def peak_flops(self, precision: Precision) -> float:
        """Return the peak dense rate in FLOP/s; refuse a precision that it has none for."""
        if precision not in self.tflops:
            raise FieldError(
                f"{self.title} has no {precision} products (it has "
                f"{', '.join(sorted(self.tflops))}); choose another ",
                FieldRef("precision"),
            )
        return self.tflops[precision].value * 1e12

    @property
    def facts(self) -> tuple[tuple[str, Fact], ...]:
        """Every number by name, rates first."""
        named = [(f"{precision} TFLOP/s", fact) for precision, fact in self.tflops.items()]
        values = ((item.name, getattr(self, item.name)) for item in fields(self))
        return (*named, *((name, value) for name, value in values if isinstance(value, Fact)))

    def on_network(self, text: str | None, oversubscription: float = 1.0) -> Hardware:
        """Return this on another network: ``KIND`` or ``KIND:GBIT``, GBIT per second and device.

        Kinds: infiniband; ethernet (RoCE); tcp. Oversubscription divides what is left between
        nodes. Raises `FieldError` where the text is none of that.
        """
        if not 1 <= oversubscription <= 64:
            raise FieldError(
                FieldRef("oversubscription", oversubscription), ": must be 1 to 64; correct it"
            )
        kind, gbit = "infiniband", None
        if text is not None:
            found = re.fullmatch(r"([a-z]+)(?::(\d+(?:\.\d+)?))?", text.lower())
            if found is None or found[1] not in _NETWORKS:
                known = ", ".join(_NETWORKS)
                raise FieldError(
                    FieldRef("network", text),
                    f": must be one of {known}, with Gbit/s per device behind a colon "
                    "(ethernet:100); correct it",
                )
            kind, gbit = found[1], found[2]
        share, latency_ms, usual = _NETWORKS[kind]
        fact = self.network_gb_per_s
        if gbit is not None or usual is not None:
            rate = float(gbit) if gbit is not None else usual or 0.0
            if not 0 < rate <= 100_000:
                raise FieldError(FieldRef("network", text), ": must be above 0 Gbit/s; correct it")
            fact = Fact(rate / 8, f"asked for: {rate:g} Gbit/s per device, {kind}")
        return replace(
            self,
            network_gb_per_s=fact,
            network_share=share / oversubscription,
            network_latency_ms=latency_ms,
        )


# Kind -> share of its rate beside what the links reach (assumed: RoCE congests, TCP copies), a
# message's latency in ms, and Gbit/s per device where none is said (None: the accelerator's own).
_NETWORKS: dict[str, tuple[float, float, float | None]] = {
    "infiniband": (1.0, 0.03, None),
    "ethernet": (0.85, 0.04, 100.0),
    "tcp": (0.6, 0.1, 100.0),
}


def _rates(source: str, **tflops: float) -> Mapping[Precision, Fact]:
    return {name: Fact(value, source) for name, value in tflops.items()}  # type: ignore[misc]


_GIB = 2**30
_PCIE4 = Fact(31.5, "PCI Express 4.0 x16: 16 GT/s, 16 lanes, 128b/130b encoding")
_PCIE5 = Fact(63.0, "PCI Express 5.0 x16: 32 GT/s, 16 lanes, 128b/130b encoding")
_C2C = Fact(225.0, "NVLink-C2C: 900 GB/s of a Grace CPU, both directions and two GPUs counted")
_HDR = Fact(25.0, "DGX A100 data sheet: one 200 Gb/s adapter per GPU")
_NDR = Fact(50.0, "DGX H100 data sheet: one 400 Gb/s adapter per GPU")
_XDR = Fact(100.0, "DGX B300 and GB300 NVL72 data sheets: one 800 Gb/s ConnectX-8 per GPU")
_A100 = "NVIDIA A100 Tensor Core GPU data sheet"
_H100 = "NVIDIA H100 Tensor Core GPU data sheet; rates without sparsity"
_H200 = "NVIDIA H200 Tensor Core GPU data sheet; rates without sparsity"
_B200 = "NVIDIA Blackwell data sheet, HGX B200 at 1,000 W; rates without sparsity"
_GB200 = "NVIDIA GB200 NVL72 data sheet; rates of 72 GPUs, halved (without sparsity), over 72"
_B300 = "NVIDIA Blackwell Ultra data sheet, HGX B300; rates without sparsity"
_GB300 = "NVIDIA GB300 NVL72 data sheet; rates of 72 GPUs, halved (without sparsity), over 72"
_MI300X = "AMD Instinct MI300X data sheet"
_MI325X = "AMD Instinct MI325X data sheet"
_MI355X = "AMD Instinct MI355X data sheet"
_L40S = "NVIDIA L40S data sheet; rates without sparsity"
_ADA = "NVIDIA Ada GPU architecture white paper, GeForce RTX 4090"
_XEON = "Intel Xeon Platinum 8480+ specification"

# What large kernels keep up for long: some 640 TFLOP/s in bf16 and 1,090 in fp8 on H100 under its
# power limit, attention half of the peak over F and B together (FlashAttention-3, arXiv 2407.08608,
# section 4: 0.4 to 0.75), copies three quarters. The same shares for every generation.
PRIORS: Mapping[str, Efficiency] = MappingProxyType(
    {
        "hopper": Efficiency(matmul=0.65, narrow=0.55, attention=0.5, memory=0.75),
        "blackwell-200": Efficiency(matmul=0.65, narrow=0.55, attention=0.5, memory=0.75),
        "blackwell-300": Efficiency(matmul=0.65, narrow=0.55, attention=0.5, memory=0.75),
    }
)
"""Prior of the four fitted efficiencies of each generation that published runs are of."""

# Hopper and Blackwell: python -m benchmarks.scoreboard --fit. Ampere: matmul and memory with which
# one profiled row (Zero Bubble, arXiv 2401.10241, table 9, 6.2B, 24 micro-batches) has its least
# largest error. All others are assumed.
_EFFICIENCIES: dict[str, Efficiency] = {
    "ampere": Efficiency(matmul=0.76, attention=0.55, memory=0.67),
    "ada": Efficiency(matmul=0.75, narrow=0.65, attention=0.6, memory=0.65),
    "hopper": Efficiency(matmul=0.611, narrow=0.629, attention=0.523, memory=0.766),
    "blackwell-200": Efficiency(matmul=0.605, narrow=0.508, attention=0.489, memory=0.729),
    "blackwell-300": Efficiency(matmul=0.662, narrow=0.661, attention=0.509, memory=0.781),
    "cdna3": Efficiency(matmul=0.45, narrow=0.4, attention=0.3, memory=0.6),
    "cdna4": Efficiency(matmul=0.5, narrow=0.4, attention=0.35, memory=0.6),
    "cpu": Efficiency(matmul=0.4, attention=0.2, memory=0.6),
}


def _a100(name: str, title: str, gib: int, bandwidth: float) -> Hardware:
    nvlink = Fact(300.0, f"{_A100}: NVLink 600 GB/s, both directions counted")
    return Hardware(
        name=name,
        title=title,
        generation="ampere",
        tflops=_rates(_A100, bf16=312, fp16=312, fp32=19.5),
        memory_bytes=Fact(gib * _GIB, f"{_A100}: {gib} GB; nvidia-smi shows {gib * 1024} MiB"),
        memory_gb_per_s=Fact(bandwidth, f"{_A100}, SXM"),
        pcie_gb_per_s=_PCIE4,
        peer_gb_per_s=nvlink,
        node_gb_per_s=nvlink,
        network_gb_per_s=_HDR,
    )


def _nvidia(
    name: str,
    title: str,
    generation: Generation,
    source: str,
    *,
    tflops: dict[str, float],
    mib: int,
    gb: str,
    bandwidth: Fact,
    nvlink: float,
    network: Fact,
    pcie: Fact = _PCIE5,
    domain: int = 8,
    host: int = 8,
) -> Hardware:
    """Return an accelerator on NVLink; ``nvlink`` is GB/s of one direction."""
    link = Fact(nvlink, f"{source}: NVLink {2 * nvlink:,.0f} GB/s, both directions counted")
    return Hardware(
        name=name,
        title=title,
        generation=generation,
        tflops=_rates(source, **tflops),
        memory_bytes=Fact(mib * 2**20, f"{source}: {gb}; nvidia-smi shows {mib} MiB"),
        memory_gb_per_s=bandwidth,
        pcie_gb_per_s=pcie,
        peer_gb_per_s=link,
        node_gb_per_s=link,
        network_gb_per_s=network,
        gpus_per_node=domain,
        gpus_per_host=host,
    )


def _amd(
    name: str,
    title: str,
    generation: Generation,
    source: str,
    *,
    tflops: dict[str, float],
    memory: Fact,
    bandwidth: float,
    link: float,
) -> Hardware:
    """Return an accelerator on seven Infinity Fabric links of ``link`` GB/s each way."""
    return Hardware(
        name=name,
        title=title,
        generation=generation,
        tflops=_rates(source, **tflops),
        memory_bytes=memory,
        memory_gb_per_s=Fact(bandwidth, source),
        pcie_gb_per_s=_PCIE5,
        peer_gb_per_s=Fact(link, f"{source}: one Infinity Fabric link, {2 * link:g} GB/s both"),
        node_gb_per_s=Fact(7 * link, f"{source}: seven Infinity Fabric links, {link:g} GB/s each"),
        network_gb_per_s=Fact(50.0, "assumed: one 400 Gb/s adapter per GPU"),
    )


_HOPPER = {"bf16": 989.4, "fp16": 989.4, "fp8": 1978.9, "fp32": 66.9}
_B = {"bf16": 2250.0, "fp16": 2250.0, "fp8": 4500.0, "mxfp8": 4500.0, "fp32": 75.0}
_GB = {"bf16": 2500.0, "fp16": 2500.0, "fp8": 5000.0, "mxfp8": 5000.0, "fp32": 80.0}
_UPI = Fact(48.0, "UPI 2.0: 24 lanes of 16 GT/s; one link counted, sockets have up to 4")
_NO_NVLINK = "; no NVLink bridge assumed"

_ALL = (
    _a100("a100-40gb", "A100 SXM 40GB", 40, 1555),
    _a100("a100", "A100 SXM 80GB", 80, 2039),
    _nvidia(
        "h100", "H100 SXM 80GB", "hopper", _H100, tflops=_HOPPER, mib=81559, gb="80 GB",
        bandwidth=Fact(3350, _H100), nvlink=450, network=_NDR,
    ),
    _nvidia(
        "h100-500w", "H100 96GB HBM2e at 500 W", "hopper",
        "torchtitan's benchmarks of December 2024: H100, 96 GB HBM2e, 2.4 TB/s, 500 W",
        tflops=_HOPPER, mib=97871, gb="96 GB",
        bandwidth=Fact(2400, "torchtitan's benchmarks of December 2024"), nvlink=450, network=_NDR,
    ),
    Hardware(
        name="h100-pcie",
        title="H100 PCIe 80GB",
        generation="hopper",
        tflops=_rates(_H100, bf16=756, fp16=756, fp8=1513, fp32=51),
        memory_bytes=Fact(81559 * 2**20, f"{_H100}: 80 GB; nvidia-smi shows 81559 MiB"),
        memory_gb_per_s=Fact(2000, _H100),
        pcie_gb_per_s=_PCIE5,
        peer_gb_per_s=_PCIE5._replace(source=_PCIE5.source + _NO_NVLINK),
        node_gb_per_s=_PCIE5._replace(source=_PCIE5.source + _NO_NVLINK),
        network_gb_per_s=Fact(25.0, "assumed: one 200 Gb/s adapter per GPU"),
    ),
    _nvidia(
        "h800", "H800 SXM 80GB", "hopper",
        "DeepSeek-V3 (arXiv 2412.19437), section 3.1, and H100's data sheet",
        tflops=_HOPPER, mib=81559, gb="80 GB", bandwidth=Fact(3350, _H100), nvlink=200,
        network=_NDR,
    ),
    _nvidia(
        "h200", "H200 SXM 141GB", "hopper", _H200, tflops=_HOPPER, mib=143771, gb="141 GB",
        bandwidth=Fact(4800, _H200), nvlink=450, network=_NDR,
    ),
    _nvidia(
        "b200", "B200 180GB", "blackwell-200", _B200, tflops=_B | {"nvfp4": 9000.0}, mib=183359,
        gb="180 GB", bandwidth=Fact(8000, f"{_B200}; bus width and clock make 7672"), nvlink=900,
        network=Fact(50.0, f"{_B200}: one 400 Gb/s adapter per GPU"),
    ),
    _nvidia(
        "gb200", "GB200 NVL72 186GB", "blackwell-200", _GB200, tflops=_GB | {"nvfp4": 10000.0},
        mib=189471, gb="186 GB", bandwidth=Fact(8000, _GB200), nvlink=900,
        network=Fact(50.0, f"{_GB200}: one 400 Gb/s ConnectX-7 per GPU"), pcie=_C2C, domain=72,
        host=4,
    ),
    _nvidia(
        "b300", "B300 270GB", "blackwell-300", _B300, tflops=_B | {"nvfp4": 13125.0}, mib=275040,
        gb="288 GB", bandwidth=Fact(8000, _B300), nvlink=900, network=_XDR,
    ),
    _nvidia(
        "gb300", "GB300 NVL72 279GB", "blackwell-300", _GB300, tflops=_GB | {"nvfp4": 15000.0},
        mib=284208, gb="288 GB", bandwidth=Fact(8000, _GB300), nvlink=900, network=_XDR, pcie=_C2C,
        domain=72, host=4,
    ),
    _amd(
        "mi300x", "MI300X 192GB", "cdna3", _MI300X,
        tflops={"bf16": 1307.4, "fp16": 1307.4, "fp8": 2614.9, "fp32": 163.4},
        memory=Fact(206_141_652_992, f"{_MI300X}: 192 GB; rocm-smi shows 206141652992 B"),
        bandwidth=5300, link=64.0,
    ),
    _amd(
        "mi325x", "MI325X 256GB", "cdna3", _MI325X,
        tflops={"bf16": 1307.4, "fp16": 1307.4, "fp8": 2614.9, "fp32": 163.4},
        memory=Fact(262128 * 2**20, f"{_MI325X}: 256 GB; taken as 262128 MiB, as its tools round"),
        bandwidth=6000, link=64.0,
    ),
    _amd(
        "mi355x", "MI355X 288GB", "cdna4", _MI355X,
        tflops={"bf16": 2500.0, "fp16": 2500.0, "fp8": 5000.0, "mxfp8": 5000.0, "fp32": 157.3},
        memory=Fact(294896 * 2**20, f"{_MI355X}: 288 GB; taken as 294896 MiB, as its tools round"),
        bandwidth=8000, link=76.8,
    ),
    Hardware(
        name="l40s",
        title="L40S 48GB",
        generation="ada",
        tflops=_rates(_L40S, bf16=362.05, fp16=362.05, fp8=733.0, fp32=91.6),
        memory_bytes=Fact(46068 * 2**20, f"{_L40S}: 48 GB; nvidia-smi shows 46068 MiB"),
        memory_gb_per_s=Fact(864, _L40S),
        pcie_gb_per_s=_PCIE4,
        peer_gb_per_s=_PCIE4._replace(source=_PCIE4.source + "; the card has no NVLink"),
        node_gb_per_s=_PCIE4._replace(source=_PCIE4.source + "; the card has no NVLink"),
        network_gb_per_s=Fact(12.5, "assumed: 100 Gb/s per GPU"),
    ),
    Hardware(
        name="rtx4090",
        title="GeForce RTX 4090",
        generation="ada",
        tflops=_rates(f"{_ADA}; fp32 accumulation", bf16=165.2, fp16=165.2, fp8=330.3, fp32=82.6),
        memory_bytes=Fact(24564 * 2**20, f"{_ADA}: 24 GB; nvidia-smi shows 24564 MiB"),
        memory_gb_per_s=Fact(1008, _ADA),
        pcie_gb_per_s=_PCIE4,
        peer_gb_per_s=_PCIE4._replace(source=_PCIE4.source + "; the card has no NVLink"),
        node_gb_per_s=_PCIE4._replace(source=_PCIE4.source + "; the card has no NVLink"),
        network_gb_per_s=Fact(12.5, "assumed: 100 Gb/s per GPU"),
    ),
    Hardware(
        name="cpu",
        title="Xeon Platinum 8480+ (one socket)",
        generation="cpu",
        tflops=_rates(f"{_XEON}: 56 cores x 2.0 GHz x 2048 (AMX) or 64 (AVX-512) FLOP per cycle",
                      bf16=229.4, fp32=7.2),
        memory_bytes=Fact(256 * _GIB, "assumed: 256 GiB per socket"),
        memory_gb_per_s=Fact(307.2, f"{_XEON}: 8 channels of DDR5-4800"),
        pcie_gb_per_s=None,
        peer_gb_per_s=_UPI,
        node_gb_per_s=_UPI,
        network_gb_per_s=Fact(25.0, "assumed: one 200 Gb/s adapter"),
        gpus_per_node=2,
        gpus_per_host=2,
    ),
)  # fmt: skip

GPUS: Mapping[str, Hardware] = MappingProxyType({gpu.name: gpu for gpu in _ALL})
"""Every accelerator of the catalogue by name."""

_GPU_ALIASES = {
    "a100-80gb": "a100", "h100-sxm": "h100", "4090": "rtx4090", "a100-sxm": "a100",
    "gb200-nvl72": "gb200", "gb300-nvl72": "gb300",
}  # fmt: skip


def find_gpu(name: str) -> Hardware:
    """Return an accelerator by name; case does not matter.

    Raises
    ------
    InputError
        If the catalogue has none of that name; the message names the nearest.
    """
    key = name.lower()
    return pick("gpu", _GPU_ALIASES.get(key, key), GPUS)


class Accelerators(NamedTuple):
    """Accelerators of one kind, and how many if that was said."""

    hardware: Hardware
    number: int | None


def find_gpus(
    texts: Sequence[str], network: str | None = None, oversubscription: float = 1.0
) -> list[Accelerators]:
    """Return what each ``name`` or ``name:number`` says, on the network that was said.

    Raises
    ------
    InputError
        If there is none, as `find_gpu` and `Hardware.on_network`, or if one of several has no
        number.
    """
    if not texts:
        raise FieldError(FieldRef("gpu"), f" is missing; give one of {', '.join(GPUS)}")
    found = []
    for text in texts:
        name, colon, count = text.partition(":")
        if colon and not (count.isascii() and count.isdigit() and 0 < int(count) < 10**6):
            raise FieldError(
                FieldRef("gpu"), f" {text}: behind the colon must be a number of GPUs; correct it"
            )
        hardware = find_gpu(name)
        if network is not None or oversubscription != 1:
            hardware = hardware.on_network(network, oversubscription)
        found.append(Accelerators(hardware, int(count) if colon else None))
    if len(found) > 1 and any(kind.number is None for kind in found):
        raise FieldError(
            FieldRef("gpu"),
            f" {','.join(texts)}: with several kinds each needs its number; write "
            f"{texts[0].split(':')[0]}:8",
        )
    return found
