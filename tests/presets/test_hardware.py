"""The catalogue of accelerators: sources, units, and names."""

from __future__ import annotations

import pytest

from optpipe.errors import InputError
from optpipe.presets import GPUS, Efficiency, find_gpu

EXPECTED = {
    "a100-40gb", "a100", "h100", "h100-pcie", "h200", "b200", "mi300x", "rtx4090", "cpu",
}  # fmt: skip


def test_the_catalogue_has_what_it_promises() -> None:
    """And each under its own name."""
    assert set(GPUS) == EXPECTED
    assert all(name == hardware.name for name, hardware in GPUS.items())


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_every_number_has_a_source_and_a_possible_size(name) -> None:
    """Units that were mixed up would be off by a thousand."""
    hardware = GPUS[name]
    for label, fact in hardware.facts:
        assert len(fact.source) > 5, label
        assert fact.value > 0
    assert 20e9 < hardware.memory_bytes.value < 300e9
    assert 100 < hardware.memory_gb_per_s.value < 10_000
    assert 50 < hardware.tflops["bf16"].value < 5000
    assert hardware.peer_gb_per_s.value <= hardware.node_gb_per_s.value
    labels = {label for label, _ in hardware.facts}
    assert {"bf16 TFLOP/s", "memory_bytes", "memory_gb_per_s", "network_gb_per_s"} <= labels


def test_names_are_found_whatever_their_case() -> None:
    """A usual other name too, and a typo gets a hint."""
    assert find_gpu("H100") is GPUS["h100"]
    assert find_gpu("a100-80gb") is GPUS["a100"]
    with pytest.raises(InputError, match="did you mean"):
        find_gpu("h1000")


@pytest.mark.parametrize("value", [0.0, -0.1, 1.5])
def test_an_efficiency_is_a_share(value) -> None:
    """Above 0, at most 1."""
    with pytest.raises(InputError, match="efficiency matmul"):
        Efficiency(matmul=value)


@pytest.mark.parametrize("name", sorted(EXPECTED - {"cpu"}))
def test_memory_is_what_the_vendors_tool_shows(name) -> None:
    """Whole MiB, and the number stands in the source: data sheets round."""
    fact = GPUS[name].memory_bytes
    assert fact.value % 2**20 == 0
    shown = (f"{int(fact.value) >> 20} MiB", f"{int(fact.value)} B")
    assert any(text in fact.source for text in shown), fact.source
