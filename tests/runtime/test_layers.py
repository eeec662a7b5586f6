"""A whole model, measured layer by layer: its cuts are the stages that measuring finds."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from optpipe import Model
from optpipe.errors import InputError
from optpipe.formats.json import load_model as read_model
from optpipe.model import fuse
from optpipe.runtime import PreflightError
from optpipe.runtime.demo import whole_gpt
from optpipe.runtime.measuring import Effort, ModelToMeasure, measure, measure_layers
from optpipe.runtime.measuring.architectures import LayerKinds
from optpipe.runtime.trainers import split
from optpipe.runtime.trainers.split import find_blocks
from optpipe.stage import Mode, Stage
from tests.runtime import measured
from tests.runtime.measured import WorkClock

pytestmark = pytest.mark.usefixtures("few_objects", "one_thread")

SETTINGS: dict[str, Any] = {"effort": Effort(1, 0), "min_offload_bytes": 1}


def test_layers_add_up_to_the_stages_of_a_cut() -> None:
    """Products and bytes of every stage are those that measuring the stage finds."""
    clock = WorkClock()
    instruments = measured.with_clock(clock)
    model, sample, loss_fn, target = whole_gpt()
    sizes = [3, 2, 2, 3]
    with clock.counter:
        layers = measure_layers(
            ModelToMeasure(model, sample, loss_fn, target),
            num_devices=4, instruments=instruments, links=False, **SETTINGS,
        )  # fmt: skip
        model, *_ = whole_gpt()
        stages = split(model, [2, 2, 2, 2], sample=sample)
        whole = measure(
            stages, sample, loss_fn=loss_fn, target=target,
            instruments=instruments, links=False, **SETTINGS,
        )  # fmt: skip
    assert [run.repeat for run in layers.layers] == [1, 8, 1]
    assert len(layers.profile.results) == 3
    found = layers.model(4, 8).problem((0, 1, 2, 3), sizes)
    for cut, stage in zip(found.stages, whole.problem(8).stages, strict=True):
        for name in ("forward_ms", "backward_input_ms", "backward_weight_ms"):
            assert getattr(cut, name) == getattr(stage, name) > 0
        for name in ("activation_bytes", "weight_context_bytes"):
            # A layer counts its input, which the layer before it may have saved as its output.
            assert getattr(cut, name) == pytest.approx(getattr(stage, name), rel=0.04)
        assert cut.static_bytes == stage.static_bytes
        assert cut.output_bytes == stage.output_bytes
        assert cut.layers is not None
        assert cut.layers.total in (2, 3)


def test_each_kind_of_layer_is_measured_once() -> None:
    model = measured.Mixed((16, 16, 32, 16, 32))
    found = measure_layers(
        ModelToMeasure(model, torch.ones(5, 8)), num_devices=2, links=False, **SETTINGS
    )
    assert [run[:3] for run in found.layers] == [
        ("embedding", 1, 0),
        ("Sequential", 2, 1),
        ("Sequential", 1, 2),
        ("Sequential", 1, 1),
        ("Sequential", 1, 2),
        ("head", 1, 3),
    ]
    file = found.model(2, 4)
    assert Model.parse(file.model_dump(exclude_none=True)) == file
    narrow, wide = file.layers[1], file.layers[2]
    assert wide.static_bytes > narrow.static_bytes
    assert file.layers[3].model_dump(exclude={"repeat"}) == narrow.model_dump(exclude={"repeat"})


class _Numbered(nn.Module):
    """A layer whose number decides how much it does."""

    def __init__(self, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return given if self.layer_idx % 2 else given.sin()


def test_a_layer_number_makes_no_kind_unless_it_is_read_and_a_setting_does() -> None:
    one, two, frozen, other = (measured.perceptron(8, 16) for _ in range(4))
    one.layer_idx, two.layer_idx = 0, 1  # type: ignore[assignment]
    next(frozen.parameters()).requires_grad_(False)
    other.sliding_window = 8  # type: ignore[assignment]
    layers = [one, two, frozen, other]
    first, second, *others = map(LayerKinds(layers).of, layers)
    assert first == second
    assert all(a != b for a, b in pairwise([second, *others]))
    numbered = [_Numbered(0), _Numbered(1)]
    first, second = map(LayerKinds(numbered).of, numbered)
    assert first != second


def test_blocks_are_the_longest_outer_list() -> None:
    name, blocks = find_blocks(measured.Mixed((16, 16, 32)))
    assert (name, len(blocks)) == ("blocks", 3)
    name, blocks = find_blocks(measured.Mixed((16, 16)), "blocks.0")
    assert (name, len(blocks)) == ("blocks.0", 3)
    twins = nn.ModuleDict({"left": nn.Sequential(nn.ReLU()), "right": nn.Sequential(nn.ReLU())})
    with pytest.raises(PreflightError, match=r"has left \(1\), right \(1\); name the blocks"):
        find_blocks(twins)


def test_only_the_first_layers_input_is_offloaded_if_both_are_recomputed() -> None:
    """The second layer's input comes back with the recomputation of the first."""
    times = {"forward_ms": 1, "backward_input_ms": 1, "backward_weight_ms": 1}
    again = Mode(
        name="recompute, offload", forward_bytes=10, offload_bytes=8, recompute="apart",
        recompute_ms=1,
    )  # fmt: skip
    stage = Stage(
        device=0, **times, activation_bytes=50, output_bytes=8, modes=(Mode(name="keep"), again)
    )
    (_, mode) = fuse(stage, stage).menu
    assert (mode.forward_bytes, mode.offload_bytes) == (10 + 2, 8)


def test_the_command_writes_a_model_file_that_plan_reads(optpipe, tmp_path) -> None:
    path = tmp_path / "model.json"
    quick = ("--repeats", 2, "--warmups", 1, "--device", "cpu", "--sequence", 8)
    code, out, err = optpipe(
        "profile", "--model", "optpipe.runtime.demo:whole_gpt", "--num-devices", 3, "-o", path,
        *quick,
    )  # fmt: skip
    assert code == 0, err
    assert "_Block" in out
    file = read_model(path.read_text())
    assert (file.num_layers, len(file.devices), file.num_microbatches) == (10, 3, 12)
    assert file.layers[0].output_bytes == 2 * 8 * 32 * 8
    code, out, err = optpipe("plan", path, "--time-limit", 2)
    assert code == 0, err
    assert "gpu2" in out


def test_a_model_without_data_is_traced_for_a_gpu_that_is_not_there(optpipe, tmp_path) -> None:
    """The bytes are those that measuring on the CPU finds; a hundred layers take one trace."""
    paths = [tmp_path / "measured.json", tmp_path / "traced.json"]
    for path, device in zip(paths, ("cpu", "h100"), strict=True):
        code, _, err = optpipe(
            "profile", "--model", "tests.runtime.measured:hundred_layers", "--device", device,
            "--num-devices", 4, "--repeats", 1, "--warmups", 0, "-o", path,
        )  # fmt: skip
        assert code == 0, err
    real, traced = (read_model(path.read_text()) for path in paths)
    assert [layer.repeat for layer in traced.layers] == [1, 100, 1]
    for one, other in zip(real.layers, traced.layers, strict=True):
        for name in ("activation_bytes", "weight_context_bytes", "static_bytes", "output_bytes"):
            assert getattr(one, name) == getattr(other, name)
    assert traced.devices[0].memory_bytes == 85520809984
    assert traced.default_link.bandwidth_gb_per_s == pytest.approx(360)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give either --stages or --model"),
        (("--model", "m:f", "--stages", "m:f"), "give either --stages or --model"),
        (("--model", "m:f"), "--num-devices: is missing"),
        (("--model", "m:f", "--num-devices", 2, "--placement", "0,1"), "belongs to --stages"),
        (("--stages", "m:f", "--sequence", 2), "belongs to --model"),
        (
            ("--model", "tests.runtime.measured:a_number", "--num-devices", 2),
            "returned something of type int; it must return (model, sample) or (model, sample, ",
        ),
        (
            ("--model", "optpipe.runtime.demo:tiny_gpt", "--num-devices", 2),
            "returned something of type list for the model; give an nn.Module",
        ),
        (
            ("--model", "optpipe.runtime.demo:whole_gpt", "--num-devices", 2, "--blocks", "layers"),
            "has no module layers",
        ),
    ],
)
def test_bad_input_leaves_with_2(optpipe, arguments, message) -> None:
    code, _, err = optpipe("profile", "--device", "cpu", *arguments)
    assert code == 2
    assert message in " ".join(err.split())


class _Outside(measured.Mixed):
    """A model whose forward does work outside of its modules."""

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        for _ in range(8):
            given = torch.sin(given)
        found: torch.Tensor = super().forward(given)
        return found


def test_a_model_without_values_whose_stages_repeat_work_is_refused() -> None:
    with torch.device("meta"):
        model = _Outside((16, 16))
    with pytest.raises(InputError, match="outside of modules"):
        measure_layers(ModelToMeasure(model, torch.ones(5, 8)), num_devices=2, **SETTINGS)
