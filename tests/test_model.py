"""Models: defaults, messages, and what a run of layers is as one stage."""

from functools import reduce
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe import Problem, Stage
from optpipe.errors import ModelError
from optpipe.formats.json import dump_model, load_model
from optpipe.model import Model, fuse
from tests.building import PLENTY
from tests.solver.plan.models import gpus, layer, layers, model, models

SUMMED = ("forward_ms", "backward_input_ms", "backward_weight_ms", "grad_sync_ms",
          "activation_bytes", "weight_context_bytes", "offload_bytes", "static_bytes")  # fmt: skip


def as_stages(found: list[dict[str, Any]]) -> list[Stage]:
    return [Stage(device=0, **fields) for fields in found]


def test_repeated_layers_and_defaults_are_filled_in() -> None:
    """Names, hosts and reverse links as in a problem; four layers from two entries."""
    given_ = model([layer(repeat=3), layer(2)], gpus(2), links=[{"from": 0, "to": 1}])
    assert given_.num_layers == 4
    assert [device.name for device in given_.devices] == ["gpu0", "gpu1"]
    assert [host.name for host in given_.hosts] == ["host0"]
    assert [(link.source, link.target) for link in given_.links] == [(0, 1), (1, 0)]
    assert [stage.forward_ms for stage in given_.stages_on[1]] == [1, 1, 1, 2]


def test_what_layers_hide_is_what_their_stages_hide_in_pairs() -> None:
    """Together as much as both can at least; on a device of half the speed twice as long."""
    layers = [layer(2, hidden_ms=1.5, repeat=3), layer(4)]
    found = model(layers, gpus(2, speed=0.5), m=2).problem((0, 1, 1, 0), (1, 1, 1, 1))
    hidden = {(one.forward, one.backward): one.hidden_ms for one in found.pairs}
    assert hidden == {(0, 0): 3, (1, 1): 3, (1, 2): 3, (2, 1): 3, (2, 2): 3}
    shorter = model(layers, gpus(1), m=2).without_pairs().problem((0,), (4,))
    assert not shorter.pairs
    assert shorter.stages[0].forward_ms == 3 * 0.5 + 4


@given(models())
def test_text_and_back_is_the_same_model(found: Model) -> None:
    """Defaults filled in once stay as they are."""
    assert load_model(dump_model(found)) == found


BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"layers": []}, "layers: must have at least 1 items"),
    ({"layers": [layer(repeat=0)]}, "layers[0].repeat = 0: must be >= 1"),
    ({"layers": [layer(repeat=5000)]}, "with repeats there are 5000, more than 4096"),
    ({"layers": [layer(-1)]}, "layers[0].forward_ms = -1: must be >= 0"),
    ({"layers": [layer(forwardms=1)]}, "did you mean 'forward_ms'?"),
    ({"layers": [layer(device=0)]}, "layers[0].device: unknown field"),
    ({"layers": [layer(offload_bytes=11)]}, "offload_bytes 11 may not exceed activation_bytes 10"),
    ({"layers": [layer(hidden_ms=1.5)]}, "hidden_ms 1.5 may not exceed the shorter of F and B"),
    ({"layers": [layer(recompute_ms=1)]}, "recompute_ms and checkpoint_bytes go together"),
    ({"layers": [layer(9e11, repeat=2)]}, "forward_ms = 1800000000000.0 of all layers together"),
    ({"layers": [layer(times_on={"A100": layer()})]}, "times_on.A100.activation_bytes: unknown"),
    ({"layers": [layer(times_on={"A100": {"forward_ms": 1, "backward_input_ms": 1,
      "backward_weight_ms": 1}})]}, "names type 'A100', which no device has (types here: none)"),
    ({"layers": [layer(times_on={"A100": {"forward_ms": 1, "backward_input_ms": 1,
      "backward_weight_ms": 1, "recompute_ms": 1}})]},
     "times_on['A100'].recompute_ms and the layer's recompute_ms go together"),
    ({"devices": gpus(1, speed=0)}, "devices[0].speed = 0: must be > 0"),
    ({"devices": gpus(1, speed="1")}, "devices[0].speed = '1': must be a number"),
    ({"devices": gpus(1, speed=float("nan"))}, "devices[0].speed = nan: must be finite"),
    ({"devices": gpus(1, reserved_bytes=2 * PLENTY)}, "reserved_bytes"),
    ({"links": [{"from": 0, "to": 0}]}, "links: device 0 is linked to itself; remove the link"),
    ({"links": [{"from": 0, "to": 7}]}, "names device 7, but there are 2 devices"),
    ({"hosts": [{"name": "x"}]}, "no device names host 'x'"),
    ({"format": "optpipe/model/v2"}, "format = 'optpipe/model/v2'"),
    ({"stages": []}, "stages: unknown field"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), BROKEN)
def test_a_message_names_the_place_and_the_rule(change: dict[str, Any], message: str) -> None:
    """Every rule is broken once."""
    data = {"num_microbatches": 2, "devices": gpus(2), "layers": [layer(repeat=2)], **change}
    with pytest.raises(ModelError) as caught:
        Model.parse(data)
    assert message in str(caught.value)


def test_times_of_a_type_stand_instead_of_speed() -> None:
    """Times are divided by the speed, the reduction is not, and measured times are as they are."""
    measured = {"forward_ms": 9, "backward_input_ms": 8, "backward_weight_ms": 7}
    found = model(
        [layer(4, 4, 4, grad_sync_ms=3, times_on={"odd": measured})],
        [*gpus(1, speed=2), *gpus(1, speed=2, type="odd")],
    )
    fast, odd = found.stages_on[0][0], found.stages_on[1][0]
    assert (fast.forward_ms, fast.backward_weight_ms, fast.grad_sync_ms) == (2, 2, 3)
    assert (odd.forward_ms, odd.backward_input_ms, odd.backward_weight_ms) == (9, 8, 7)


@given(st.lists(layers(), min_size=1, max_size=5))
def test_a_run_keeps_the_totals(found: list[dict[str, Any]]) -> None:
    """Sums are exact (whole numbers here), fused durations included; the output is the last's."""
    stages = as_stages(found)
    whole = reduce(fuse, stages)
    for name in SUMMED:
        assert getattr(whole, name) == sum(getattr(stage, name) for stage in stages)
    assert whole.fused_backward_ms == sum(stage.fused_backward_ms for stage in stages)
    assert whole.output_bytes == stages[-1].output_bytes
    assert whole.can_recompute == all(stage.can_recompute for stage in stages)
    assert Stage.model_validate(whole.model_dump()) == whole


@given(st.lists(layers(), min_size=1, max_size=5))
def test_a_run_never_needs_more_than_its_stage_says(found: list[dict[str, Any]]) -> None:
    """Layers run one by one; every pass stays below max(before, after) + workspace."""
    stages = as_stages(found)
    whole = reduce(fuse, stages)
    full, context = whole.activation_bytes, whole.weight_context_bytes
    kept = list(accumulate(stage.activation_bytes for stage in stages))
    later = [sum(s.weight_context_bytes for s in stages[k:]) for k in range(len(stages) + 1)]
    for k, stage in enumerate(stages):
        before = kept[k] - stage.activation_bytes
        assert kept[k] + stage.forward_workspace_bytes <= full + whole.forward_workspace_bytes
        assert kept[k] + stage.backward_workspace_bytes <= full + whole.backward_workspace_bytes
        turning = max(kept[k] + later[k + 1], before + later[k])
        limit = max(full, context) + whole.backward_input_workspace_bytes
        assert turning + stage.backward_input_workspace_bytes <= limit
        weights = later[k] + stage.backward_weight_workspace_bytes
        assert weights <= context + whole.backward_weight_workspace_bytes


@given(st.lists(layers(), min_size=1, max_size=5))
def test_a_recomputed_run_never_needs_more_than_its_stage_says(found: list[dict[str, Any]]) -> None:
    """F keeps checkpoints, less what a recomputation brings back; it holds a layer's input."""
    stages = as_stages([{"recompute_ms": 1, "checkpoint_bytes": 0, **fields} for fields in found])
    whole = reduce(fuse, stages)
    kept = 0
    for k, stage in enumerate(stages):
        checkpoint = stage.checkpoint_bytes or 0
        limit = (whole.checkpoint_bytes or 0) + whole.forward_workspace_bytes
        assert kept + checkpoint + stage.forward_workspace_bytes <= limit
        kept += max(0, checkpoint - (stages[k - 1].output_bytes if k else 0))
    assert whole.checkpoint_bytes == kept
    assert whole.recompute_ms == sum(stage.recompute_ms or 0 for stage in stages)


def test_the_bytes_between_contexts_and_activations_are_counted() -> None:
    """I of the second layer has its context and the first one's activation at once."""
    first = Stage(device=0, **layer(activation_bytes=10, weight_context_bytes=1))
    second = Stage(device=0, **layer(activation_bytes=1, weight_context_bytes=10))
    assert fuse(first, second).backward_input_workspace_bytes == 20 - 11


def test_a_cut_makes_a_problem_with_links_where_stages_meet() -> None:
    """Given links stay, neighbours without one get the default, and others none."""
    found = model(
        [layer(output_bytes=7, repeat=4)], gpus(3),
        links=[{"from": 0, "to": 1, "latency_ms": 5}], default_link={"latency_ms": 2}, name="x",
    )  # fmt: skip
    cut = found.problem((1, 0, 2), (1, 1, 2))
    assert isinstance(cut, Problem)
    assert cut.name == "x"
    assert cut.placement == (1, 0, 2)
    assert [stage.forward_ms for stage in cut.stages] == [1, 1, 2]
    assert cut.boundary_ms == ((5, 5), (2, 2), (0, 0))
    assert found.transfer_ms(1, 2, 7) == 2
    assert found.transfer_ms(1, 1, 7) == 0


@pytest.mark.parametrize(
    ("placement", "cut", "message"),
    [
        ((0, 1), (1, 2, 1), "3 sizes for 2 stages"),
        ((0, 1), (0, 4), "every stage needs at least 1 layer, and together all 4"),
        ((0, 1), (1, 1), "every stage needs at least 1 layer, and together all 4"),
        ((0, 2), (2, 2), "device 2 does not exist: there are 2 devices"),
    ],
)
def test_what_is_no_cut_is_refused(
    placement: tuple[int, ...], cut: tuple[int, ...], message: str
) -> None:
    """With the rule and what to correct."""
    with pytest.raises(ModelError, match=message):
        model([layer(repeat=4)], gpus(2)).problem(placement, cut)


def test_the_schema_names_the_fields_of_a_file() -> None:
    """Aliases as written, and nothing of the inside."""
    schema = Model.model_json_schema()
    assert schema["additionalProperties"] is False
    assert {"layers", "devices", "default_link", "num_microbatches"} <= set(schema["properties"])
    assert "device" not in schema["$defs"]["Layer"]["properties"]
    assert {"from", "to"} <= set(schema["$defs"]["Link"]["properties"])
