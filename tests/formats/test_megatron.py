"""The layout for Megatron-Core: what its parser makes of it is the cut, layer by layer."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe.errors import InputError
from optpipe.formats.exports import check_num_layers, megatron_layout, read_layout
from optpipe.presets import MODELS, Training, estimate, find_gpu
from tests.building import problem, stage
from tests.strategies import few

LAYERS = [{"embedding": 1, "transformer": 2}, {"transformer": 3}, {"transformer": 2, "head": 1}]


def cut(*layers: dict[str, int] | None, devices: tuple[int, ...] = ()) -> Any:
    """A problem whose stages hold these, one on a device unless said otherwise."""
    devices = devices or tuple(range(len(layers)))
    return problem([stage(d, layers=held) for d, held in zip(devices, layers, strict=True)])


def parsed(layout: str) -> list[str]:
    """The stages of a layout, read by the two rules that Megatron-Core's parser has."""
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        layout = re.sub(pattern, lambda found: found[1] * int(found[2]), layout)
    return layout.split("|")


@few(25)
@given(st.sampled_from(sorted(MODELS)), st.sampled_from([2, 3, 4]), st.sampled_from([1, 2, 3]))
def test_an_estimate_is_pasted_into_a_model_of_as_many_layers(name, pp, chunks) -> None:
    """One E first, one L last, and the model's layers; embedding and head are none of them."""
    found = estimate(
        MODELS[name], find_gpu("h100"), Training(sequence=512), pp=pp, num_microbatches=4,
        chunks=chunks, placement="loop",
    )  # fmt: skip
    text = megatron_layout(found.problem)
    wanted, mtp = MODELS[name].num_layers, MODELS[name].mtp
    predicted = f"--mtp-num-layers {mtp} " if mtp else ""
    assert text.startswith(f"--num-layers {wanted} {predicted}--pipeline-model-parallel-size {pp} ")
    stages = parsed(text.split("'")[1])
    assert [len(held) for held in stages] == list(found.sizes)
    assert "".join(stages) == "E" + "t" * wanted + "m" * mtp + "L"
    assert read_layout(text.split("'")[1]) == tuple(one.layers for one in found.problem.stages)
    check_num_layers(found.problem, wanted)
    with pytest.raises(InputError, match=f"hold {wanted} transformer layers, but the model has 7"):
        check_num_layers(found.problem, 7)


def test_layers_of_multi_token_prediction_have_their_letter_and_number() -> None:
    given = cut(LAYERS[0], {"transformer": 3}, {"mtp": 2, "head": 1})
    assert megatron_layout(given) == (
        "--num-layers 5 --mtp-num-layers 2 --pipeline-model-parallel-size 3 "
        "--pipeline-model-parallel-layout 'Et*2|t*3|m*2L'"
    )


@pytest.mark.parametrize(
    ("layers", "devices", "message"),
    [
        ([LAYERS[0], None, LAYERS[2]], (), r"stages\[1\] does not say its layers"),
        ([LAYERS[1], LAYERS[0], LAYERS[2]], (), r"layers.embedding .* \[0, 1, 0\]: .* first stage"),
        ([LAYERS[0], LAYERS[2], LAYERS[2]], (), r"layers.head of the stages = \[0, 1, 1\]"),
        ([LAYERS[0], {"mtp": 1}, LAYERS[2]], (), r"layers.mtp in stages \[1\]: .* move them"),
        ([LAYERS[0], LAYERS[1], LAYERS[2]], (0, 2, 1), r"placement \[0, 2, 1\]: .* rank k mod 3"),
        ([*LAYERS[:2], LAYERS[1], LAYERS[2]], (0, 1, 1, 0), "choose a line or a loop"),
    ],
)
def test_what_it_cannot_place_is_refused(layers, devices, message: str) -> None:
    with pytest.raises(InputError, match=message):
        megatron_layout(cut(*layers, devices=devices))
