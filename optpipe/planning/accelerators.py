"""Accelerators: peak rates and sizes from ``gpus.json``, and the shares of them that are reached.

Every number has its source. None of them was measured here. docs/estimate.md lists the sources, and
the numbers that have none.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, fields, replace
from importlib import resources
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from optpipe.errors import FieldError, FieldRef, InputError
from optpipe.planning.shape import pick

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from optpipe.planning.shape import Precision

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
    """One kind of accelerator and its node.

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
        """The share of peak rates that is reached, fitted by the scoreboard or assumed."""
        return _EFFICIENCIES[self.generation]

    @property
    def operator_efficiency(self) -> Efficiency:
        """The share of peak rates that a single operator of torch reaches, as traces take it."""
        return _OPERATOR_EFFICIENCIES.get(self.generation, self.efficiency)

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
                like = "infiniband:400" if text.lower().startswith("i") else "ethernet:100"
                raise FieldError(
                    FieldRef("network", text),
                    f": must be one of {known}, with Gbit/s per device behind a colon "
                    f"({like}); correct it",
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


_FACTS = ("memory_bytes", "memory_gb_per_s", "pcie_gb_per_s", "peer_gb_per_s", "node_gb_per_s",
          "network_gb_per_s")  # fmt: skip


def _hardware(entry: dict[str, Any]) -> Hardware:
    """Return the accelerator of an entry of ``gpus.json``; it empties the entry."""
    source = entry.pop("tflops_source")
    tflops = {name: Fact(rate, source) for name, rate in entry.pop("tflops").items()}
    found = {name: entry.pop(name) for name in _FACTS}
    facts: dict[str, Any] = {
        name: None if fact is None else Fact(*fact) for name, fact in found.items()
    }
    return Hardware(tflops=tflops, **facts, **entry)


_DATA = json.loads(resources.files("optpipe.planning").joinpath("gpus.json").read_text("utf-8"))
_NETWORKS: dict[str, tuple[float, float, float | None]] = {
    kind: tuple(numbers) for kind, numbers in _DATA["networks"]["kinds"].items()
}
_EFFICIENCIES = {
    name: Efficiency(**shares) for name, shares in _DATA["efficiencies"]["generations"].items()
}
_OPERATOR_EFFICIENCIES = {
    name: Efficiency(**shares) for name, shares in _DATA["operators"]["generations"].items()
}
PRIORS: Mapping[str, Efficiency] = MappingProxyType(
    {name: Efficiency(**shares) for name, shares in _DATA["priors"]["generations"].items()}
)
"""Priors of the four fitted efficiencies, for each generation that published runs are of."""
GPUS: Mapping[str, Hardware] = MappingProxyType(
    {entry["name"]: _hardware(entry) for entry in _DATA["gpus"]}
)
"""Every accelerator of the catalogue by name, from ``gpus.json``."""


def find_gpu(name: str) -> Hardware:
    """Return an accelerator by name; case does not matter.

    Raises
    ------
    InputError
        If the catalogue has none of that name; the message names the nearest.
    """
    key = name.lower()
    return pick("gpu", _DATA["aliases"].get(key, key), GPUS)


class Accelerators(NamedTuple):
    """Accelerators of one kind, and their number if given."""

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
