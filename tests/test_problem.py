"""Problems: defaults, the canonical hash, and a message for every rule."""

import copy
import json
from typing import Any

import pytest
from pydantic import ValidationError

from optpipe import Device, Problem, ProblemError, dump_problem, load_problem
from optpipe.stage import KEEP_ALONE
from tests.building import document, everything_at_once, problem, stage

WHOLE = everything_at_once()[0].model_dump(mode="json", by_alias=True)


def plain() -> dict[str, Any]:
    """Two stages on two devices, one link, one host: every rule can be broken by one change."""
    return document(
        [stage(0), stage(1)],
        [{"memory_bytes": 100}, {"memory_bytes": 100}],
        m=2,
        links=[{"from": 0, "to": 1}],
        hosts=[{"name": "host0"}],
    )


def put(data: Any, path: tuple[str | int, ...], value: Any) -> Any:
    """A deep copy of the data with one place changed; `...` as value takes the key away."""
    changed = copy.deepcopy(data)
    place = changed
    for key in path[:-1]:
        place = place[key]
    if value is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return changed


S0, D0 = ("stages", 0), ("devices", 0)
BROKEN: list[tuple[tuple[str | int, ...], Any, str]] = [
    # What a place may hold at all.
    (("num_microbatches",), ..., "num_microbatches: is missing; give it"),
    (("num_microbatches",), 0, "num_microbatches = 0: must be >= 1; stay in range"),
    (("num_microbatches",), 1.5, "num_microbatches = 1.5: must be a whole number; round it"),
    (("num_microbatches",), "2",
     "num_microbatches = '2': must be a number; write it without quotes"),
    (("num_microbatches",), True,
     "num_microbatches = True: must be a number; give one"),
    (("num_microbatches",), None,
     "num_microbatches = None: must be a whole number; give one"),
    (("num_microbatches",), 10**9,
     "stages x num_microbatches = 2 x 1000000000 = 2000000000 exceeds 2000000; "
     "lower num_microbatches; a schedule of that size repeats itself"),
    (("num_microbatches",), 10**10,
     "num_microbatches = 10000000000: must be <= 1000000000; stay in range"),
    ((*S0, "forward_ms"), -1, "stages[0].forward_ms = -1: must be >= 0; stay in range"),
    ((*S0, "forward_ms"), 1e13,
     "stages[0].forward_ms = 10000000000000.0: must be <= 1000000000000; stay in range"),
    ((*S0, "forward_ms"), float("nan"),
     "stages[0].forward_ms = nan: must be finite; give a measured number"),
    ((*D0, "memory_bytes"), "80 GiB",
     "devices[0].memory_bytes = '80 GiB': must be a number; "
     "write the number alone, in the unit of the field's name"),
    ((*S0, "forward_ms"), [],
     "stages[0].forward_ms = []: must be a number; give one"),
    ((*S0, "static_bytes"), -1, "stages[0].static_bytes = -1: must be >= 0; stay in range"),
    ((*S0, "static_bytes"), 2**53 + 1,
     "stages[0].static_bytes = 9007199254740993: must be <= 9007199254740992; stay in range"),
    ((*D0, "memory_bytes"), ..., "devices[0].memory_bytes: is missing; give it"),
    ((*D0, "half_duplex"), "yes",
     "devices[0].half_duplex = 'yes': must be true or false; write true or false"),
    ((*D0, "name"), 7, "devices[0].name = 7: must be a text; put it in quotes"),
    ((*D0, "name"), "x" * 201,
     "devices[0].name = 'xxxxxxxxxxxxxxxxxxxxxxxxxxx...xxxxxxxxxxxxxxxxxxxxxxxxxxxx': "
     "String should have at most 200 characters; change it"),
    ((*D0, "host"), "",
     "devices[0].host = '': String should have at least 1 character; change it"),
    ((*D0, "pcie_group"), 1.5, "devices[0].pcie_group = 1.5: must be a text; put it in quotes"),
    (("devices",), {}, "devices = {}: must be a list; put it in [ ]"),
    (D0, 3, "devices[0] = 3: must be an object; put it in { }"),
    (("objective",), "cost",
     "objective = 'cost': must be 'makespan' or 'span'; choose one"),
    (("format",), "optpipe/problem/v3",
     "format = 'optpipe/problem/v3': must be 'optpipe/problem/v1' or "
     "'optpipe/problem/v2'; choose one"),
    # Names that are not known.
    ((*S0, "forwardms"), 1,
     "stages[0].forwardms: unknown field; did you mean 'forward_ms'? Otherwise remove it"),
    (("links", 0, "source"), 0,
     "links[0].source: unknown field; remove it (known here: bandwidth_gb_per_s, from, "
     "latency_ms, to)"),
    (("bidirectional",), True,
     "bidirectional: unknown field; remove it (known here: context, devices, format, hosts, links, "
     "microbatches, name, num_microbatches, objective, order, pairs, stages)"),
    # Rules between fields.
    ((*D0, "d2h_gb_per_s"), 0, "devices[0].d2h_gb_per_s = 0: must be > 0; stay in range"),
    ((*D0, "d2h_gb_per_s"), 5,
     "d2h_gb_per_s and h2d_gb_per_s go together: what is offloaded must come back; "
     "give both, or neither where nothing may be offloaded"),
    ((*D0, "reserved_bytes"), 101,
     "reserved_bytes 101 may not exceed memory_bytes 100; lower it or raise memory_bytes"),
    ((*S0, "offload_bytes"), 11,
     "stages[0] = {'activation_bytes': 10, 'backward_input_ms': 1, 'backwar...: offload_bytes 11 "
     "may not exceed activation_bytes 10; give the part of the activation that is moved"),
    ((*S0, "recompute_ms"), 1,
     "recompute_ms and checkpoint_bytes go together; "
     "give both, or neither where nothing may be recomputed"),
    ((*S0, "checkpoint_bytes"), 1,
     "recompute_ms and checkpoint_bytes go together; "
     "give both, or neither where nothing may be recomputed"),
    (S0, stage(recompute_ms=1, checkpoint_bytes=11),
     "checkpoint_bytes 11 may not exceed activation_bytes 10; "
     "give what F keeps when the rest is recomputed"),
    # References.
    (("devices",), [], "devices: must have at least 1 items, and has 0; "
     "change the list"),
    (("stages",), [], "stages: must have at least 1 items, and has 0; "
     "change the list"),
    ((*S0, "device"), -1, "stages[0].device = -1: must be >= 0; stay in range"),
    ((*S0, "device"), 2,
     "stages[0].device = 2 does not exist: there are 2 devices, numbered from 0; "
     "correct the number or add the device"),
    (("links", 0, "to"), 9,
     "links: 0 -> 9 names device 9, but there are 2 devices, numbered from 0; "
     "correct the number or add the device"),
    (("links", 0, "from"), -1, "links[0].from = -1: must be >= 0; stay in range"),
    (("links", 0, "to"), 0, "device 0 is linked to itself; remove the link; it is free"),
    (("links",), [{"from": 0, "to": 1}, {"from": 0, "to": 1}],
     "link 0 -> 1 stands twice; remove one of the two"),
    (("hosts",), [{"name": "host0"}, {"name": "host0"}],
     "hosts: two have the same name; rename or remove one"),
    (("hosts",), [{"name": "elsewhere"}],
     "hosts: no device names host 'elsewhere' (devices name host0); "
     "correct the device's host or remove the entry"),
    (("hosts", 0, "memory_bytes"), -1, "hosts[0].memory_bytes = -1: must be >= 0; stay in range"),
    (("devices",), [{"memory_bytes": 1, "pcie_group": 0, "host": host} for host in "ab"],
     "pcie_group '0' spans hosts a and b; "
     "a PCIe uplink belongs to one host: use another group name on each"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "value", "message"), BROKEN, ids=[message[:50] for *_, message in BROKEN]
)
def test_every_rule_says_value_rule_and_fix(path, value, message: str) -> None:
    data = put(plain(), path, value)
    if "elsewhere" not in message and path == ("devices",) and value and value != {}:
        del data["hosts"]
    with pytest.raises(ProblemError) as caught:
        Problem.parse(data)
    line = str(caught.value)
    assert line.endswith(message)
    assert "\n" not in line


@pytest.mark.parametrize("text", ["[]", "null", "3", '"x"', "true"])
def test_a_document_that_is_no_object_is_refused(text: str) -> None:
    with pytest.raises(ProblemError, match=r"the document = .*: must be an object; put it in"):
        Problem.parse(json.loads(text))


def test_all_faults_are_told_at_once_but_not_thousands() -> None:
    data = plain() | {"stages": [stage(f=-1)] * 1000}
    with pytest.raises(ProblemError) as caught:
        Problem.parse(data)
    lines = str(caught.value).splitlines()
    assert lines[7] == "stages[7].forward_ms = -1: must be >= 0; stay in range"
    assert lines[8:] == ["... and 992 more"]


def test_defaults_are_those_of_the_design() -> None:
    bare = Problem.parse(
        {"num_microbatches": 1, "devices": [{"memory_bytes": 5}] * 2, "stages": [stage(1)]}
    )
    assert [device.name for device in bare.devices] == ["gpu0", "gpu1"]
    device = bare.devices[1]
    assert (device.d2h_gb_per_s, device.h2d_gb_per_s, device.pcie_group) == (None, None, None)
    assert (device.half_duplex, device.host, device.reserved_bytes) == (False, "host0", 0)
    assert [(host.name, host.memory_bytes) for host in bare.hosts] == [("host0", None)]
    bare_stage = bare.stages[0]
    assert bare_stage.weight_context_bytes == bare_stage.activation_bytes == 10
    assert not bare_stage.can_recompute
    assert bare_stage.fused_backward_ms == 2
    assert not bare.can_offload(0)
    assert bare.objective == "makespan"
    assert bare.boundary_ms == ((0.0, 0.0),)


def test_a_missing_reverse_link_is_a_copy_and_a_given_one_is_kept() -> None:
    stages = [stage(0, output_bytes=2_000_000), stage(1), stage(1), stage(0)]
    mirrored = problem(stages, links=[{"from": 1, "to": 0, "latency_ms": 3}])
    assert mirrored.boundary_ms == ((3, 3), (0, 0), (3, 3), (0, 0))
    both = [{"from": 1, "to": 0, "latency_ms": 3}, {"from": 0, "to": 1, "bandwidth_gb_per_s": 1}]
    assert problem(stages, links=both).boundary_ms == ((2, 3), (0, 0), (3, 0), (0, 0))


def test_hash_ignores_name_key_order_and_what_defaults_say_anyway() -> None:
    data = plain()
    expected = Problem.parse(data).problem_hash
    assert expected.startswith("sha256:")
    same = [
        data | {"name": "other"},
        dict(reversed(data.items())),
        data | {"stages": [dict(reversed(one_stage.items())) for one_stage in data["stages"]]},
        data | {"links": [{"from": 1, "to": 0, "latency_ms": 0}]},
        data | {"links": [{"from": 1, "to": 0}, {"from": 0, "to": 1}]},
        put(data, ("hosts",), ...),
        put(data, ("stages", 0, "weight_context_bytes"), 10),
        put(data, ("stages", 0, "forward_ms"), 1.0),
        put(data, ("stages", 0, "activation_bytes"), 10.0),
        put(data, ("stages", 0, "grad_sync_ms"), -0.0),
        put(data, ("devices", 1, "name"), "gpu1"),
        put(data, ("devices", 1, "name"), ""),
        json.loads(json.dumps(data)),
    ]  # fmt: skip
    assert [Problem.parse(other).problem_hash for other in same] == [expected] * len(same)


def _leaves(data: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    if not isinstance(data, dict | list):
        return [path]
    pairs = data.items() if isinstance(data, dict) else enumerate(data)
    return [leaf for key, value in pairs for leaf in _leaves(value, (*path, key))]


@pytest.mark.parametrize("path", [leaf for leaf in _leaves(WHOLE) if leaf[-1] != "format"], ids=str)
def test_hash_changes_with_every_field_but_the_name(path) -> None:
    old: Any = WHOLE
    for key in path:
        old = old[key]
    new = {bool: lambda: not old, int: lambda: old + 1, float: lambda: old + 0.25}.get(
        type(old), lambda: "span" if old == "makespan" else f"{old}'"
    )()
    if old is None:
        new = "group" if path[-1] == "pcie_group" else 1
    if path[-1] in ("from", "to", "device"):
        new = (old + 1) % 3
    data = put(WHOLE, path, "makespan" if path == ("objective",) else new)
    try:
        changed = Problem.parse(data)
    except ProblemError:
        # One field alone may break a rule (a lone bandwidth, a second link): then nothing to hash.
        return
    same = changed.problem_hash == Problem.parse(WHOLE).problem_hash
    assert same == (path == ("name",))


def test_busy_is_the_busiest_devices_cheapest_compute_without_recompute() -> None:
    stages = [
        stage(0, 3, 4, 2),
        stage(1, 3, 4, 2, backward_ms=5, recompute_ms=9, checkpoint_bytes=1),
    ]
    assert problem(stages, m=10).busy_ms == 90
    assert problem([*stages, stage(1, 1, 0, 0)], m=10).busy_ms == 90
    assert problem([*stages, stage(1, 2, 0, 0)], m=10).busy_ms == 100


def test_a_copy_with_changes_is_validated_and_forgets_the_old_hash() -> None:
    one = problem([stage()], m=2)
    hashes = {one.problem_hash, one.model_copy(update={"num_microbatches": 3}).problem_hash}
    assert len(hashes) == 2
    with pytest.raises(ProblemError, match="num_microbatches = 0: must be >= 1"):
        one.model_copy(update={"num_microbatches": 0})


def test_values_are_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        problem([stage()]).num_microbatches = 3  # type: ignore[misc]


def test_a_device_can_be_made_without_a_name() -> None:
    built = Problem(num_microbatches=1, devices=(Device(memory_bytes=9),), stages=(stage(),))
    assert built.devices[0].name == "gpu0"


def test_layers_are_kept_and_nothing_else_changes() -> None:
    """A file that does not say them is the same text with the same hash; one that does, another."""
    plain = problem([stage(0), stage(1)])
    assert "layers" not in dump_problem(plain)
    assert plain.problem_hash == (
        "sha256:ba6fd95478dfb6c63eb7810c31880991d39e1aa65591f64d6ccb8107f6f6b7de"  # before layers
    )
    known = problem([stage(0, layers={"embedding": 1, "transformer": 3}), stage(1)])
    assert load_problem(dump_problem(known)) == known
    assert str(known.stages[0].layers) == "embedding + 3"
    assert known.problem_hash != plain.problem_hash
    assert known.model_copy(update={"stages": plain.stages}).problem_hash == plain.problem_hash


# --- v2: costs and menus, layers, context, lanes.


def nested(**cost: Any) -> dict[str, Any]:
    """A document of v2 with one stage; ``cost`` replaces fields of its one cost."""
    fields = {"forward_ms": 1, "backward_input_ms": 1, "backward_weight_ms": 1,
              "activation_bytes": 9}  # fmt: skip
    return {
        "format": "optpipe/problem/v2",
        "num_microbatches": 2,
        "devices": [{"memory_bytes": 99}],
        "stages": [{"device": 0, "costs": [{**fields, **cost}]}],
    }


KEEP = {"name": "keep"}


def test_a_menu_that_v1_can_say_is_read_as_v1() -> None:
    again = {"name": "recompute", "forward_bytes": 2, "recompute_ms": 3, "recompute": "apart"}
    menu: list[dict[str, Any]] = [KEEP, {"name": "offload", "offload_bytes": 5}, again]
    read = Problem.parse(nested(modes=menu))
    flat = read.stages[0]
    assert read.format == "optpipe/problem/v1"
    assert (flat.offload_bytes, flat.checkpoint_bytes, flat.recompute_ms) == (5, 2, 3)
    # v1 has no names: one that may say which part goes is kept, and runs as it says.
    menu[1] |= {"name": "offload mlp"}
    read = Problem.parse(nested(modes=menu))
    assert read.format == "optpipe/problem/v2"
    assert [mode.name for mode in read.menus[0]] == ["keep", "offload mlp", "recompute"]


def test_a_menu_of_v2_is_filled_in_and_comes_back() -> None:
    """What a mode leaves out is the cost's; so is what it says again, and the hash is one."""
    inside = {"name": "mlp", "forward_bytes": 4, "recompute": "inside", "recompute_ms": 1}
    menu: list[dict[str, Any]] = [
        KEEP,
        {"name": "fp8", "forward_bytes": 5},
        inside,
        {"name": "all", "offload_bytes": 9},
    ]
    read = Problem.parse(nested(modes=menu, backward_workspace_bytes=7))
    assert read.format == "optpipe/problem/v2"
    keep, fp8, mlp, away = read.menus[0]
    assert (keep.forward_bytes, keep.weight_context_bytes, keep.backward_bytes) == (9, 9, 9)
    assert (fp8.weight_context_bytes, fp8.backward_bytes) == (5, 5)  # no more than what is kept
    assert (mlp.weight_context_bytes, mlp.backward_bytes, mlp.inside_ms) == (9, 4, 1)
    assert (away.least_bytes, away.backward_workspace_bytes) == (0, 7)
    assert not read.can_use(0, 3)
    said = [KEEP, menu[1] | {"weight_context_bytes": 5}, inside | {"offload_bytes": 0}, menu[3]]
    again = Problem.parse(nested(modes=said, backward_workspace_bytes=7))
    assert again.problem_hash == read.problem_hash
    assert load_problem(dump_problem(read)) == read
    stages = [{**nested()["stages"][0], "uniform_modes": True}]
    assert Problem.parse({**nested(), "stages": stages}).format == "optpipe/problem/v2"


def test_modes_are_numbered_as_actions_tell_them() -> None:
    """In a menu that v1 can say offload is 1 and recompute 2, whether the other is there or not."""
    again = {"name": "recompute", "forward_bytes": 2, "recompute_ms": 3, "recompute": "apart"}
    alone = Problem.parse(nested(modes=[KEEP, again])).stages[0]
    assert alone.numbered_menu == (alone.menu[0], None, alone.menu[1])
    assert alone.numbered_menu[2] is not None
    assert alone.numbered_menu[2].least_bytes == 2
    named = Problem.parse(nested(modes=[KEEP, again | {"name": "recompute all"}])).stages[0]
    assert named.numbered_menu == named.menu
    assert [mode.name for mode in named.menu] == ["keep", "recompute all"]
    kept = alone.model_copy(update=dict(KEEP_ALONE))
    assert kept.numbered_menu == (*kept.menu, None, None)


def test_layers_and_context_are_of_v2_and_come_back() -> None:
    data = nested()
    data["stages"][0]["layers"] = {"embedding": 1, "transformer": 10}
    data["context"] = {"tokens_per_microbatch": 8192, "parallelism": {"tp": 8}}
    read = Problem.parse(data)
    written = json.loads(dump_problem(read))
    assert written["stages"][0]["costs"][0]["modes"] == [{"name": "keep"}]
    assert Problem.parse(written) == read
    other = Problem.parse({**data, "context": None, "name": "another"})
    assert other.problem_hash == read.problem_hash
    with pytest.raises(ProblemError, match=r"layers, context, .* are fields of optpipe/problem/v2"):
        Problem.parse({**plain(), "context": data["context"]})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pairs": [{"forward": 0, "backward": 0, "hidden_ms": 99}]}, "may not exceed the shorter"),
        ({"microbatches": [{"cost": 0}] * 7}, "microbatches has 7 entries, .* one entry per"),
        ({"num_microbatches": 1, "microbatches": [{"cost": 1}]}, "a micro-batch has cost 1"),
        ({"stages": [{"device": 0, "costs": []}]}, r"stages\[0\]\.costs must be a list of 1 to"),
        ({"stages": [{**nested()["stages"][0]["costs"][0], "device": 0, "others": [{}]}]},
         r"stages\[0\]\.others: unknown field; remove it"),
        ({"other_costs": [[]]}, r"other_costs: unknown field; write all costs into stages"),
        (nested(modes=[{"name": "half", "forward_bytes": 4}]), r"modes\[0\] .*put .* first"),
        (nested(modes=[KEEP, {"name": "x", "forward_bytes": 10}]), "exceed activation_bytes 9"),
        (nested(modes=[KEEP, {"name": "x", "forward_bytes": 4, "offload_bytes": 5}]),
         "offload_bytes 5 may not exceed forward_bytes 4"),
        (nested(modes=[KEEP, {"name": "x", "recompute_ms": 4}]), "recompute and .* go together"),
        (nested(modes=[KEEP, KEEP]), "two modes of a menu are called 'keep'"),
        (nested(modes=[KEEP, {"name": "x", "inside_bytes": 4}]), "inside_bytes 4 without"),
        (nested(offload_bytes=4), r"stages\[0\]\.costs\[0\]\.offload_bytes: unknown field; modes"),
        ({"stages": [{**nested()["stages"][0], "forward_ms": 2}]},
         r"stages\[0\]\.forward_ms: unknown field beside costs; write it into"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_or_scheduled_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ProblemError, match=message):
        Problem.parse({**nested(), **change})
