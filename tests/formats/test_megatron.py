"""Megatron-Core's nearest flags: read back as its own parser reads them, and honest beside them."""

from __future__ import annotations

import re
import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe import InputError, Problem, Programs, ScheduleFormatError, check
from optpipe.formats.megatron import dump_megatron
from optpipe.formats.megatron_order import group_sizes, megatron_programs
from optpipe.simulate import simulate
from optpipe_solver.families.interleaved import build_interleaved
from optpipe_solver.families.one_f_one_b import build_one_f_one_b
from tests.building import bus, everything_at_once, one_f_one_b, problem, programs, stage


def flags(text: str) -> dict[str, list[str]]:
    """Return the array of flags as a shell reads it."""
    inside = text.split("MEGATRON_PIPELINE_ARGS=(\n")[1].split("\n)\n", maxsplit=1)[0]
    found: dict[str, list[str]] = {}
    for word in shlex.split(inside, comments=True):
        if word.startswith("--"):
            found[word] = []
        else:
            found[list(found)[-1]].append(word)
    return found


def layout(text: str) -> list[tuple[bool, int, bool]]:
    """Return (embedding, transformer layers, loss) of each stage of a layout string."""
    written = re.sub(r"t\*(\d+)", lambda found: "t" * int(found[1]), text)
    return [("E" in part, part.count("t"), "L" in part) for part in written.split("|")]


def said(text: str) -> str:
    """Return what stands below the flags."""
    return text.split("# What these flags do not say:")[1]


def loop(count: int, chunks: int, m: int, **fields) -> Problem:
    """Equal stages round and round."""
    placement = list(range(count)) * chunks
    return problem([stage(device, 2, 2, 2, **fields) for device in placement], m=m)


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 9), st.data())
def test_megatrons_own_order_is_legal(count: int, chunks: int, m: int, data: st.DataObject) -> None:
    """For every group size that it accepts."""
    sizes = group_sizes(count, m) if chunks > 1 else (count,)
    if sizes:
        rows = megatron_programs(count, chunks, m, data.draw(st.sampled_from(sizes)))
        check(loop(count, chunks, m), rows)


@pytest.mark.parametrize(("count", "m"), [(1, 3), (4, 2), (4, 8), (8, 16)])
def test_with_one_chunk_it_is_1f1b(count: int, m: int) -> None:
    """The same as the solver's family."""
    whole = loop(count, 1, m)
    assert megatron_programs(count, 1, m, count) == build_one_f_one_b(whole)


@pytest.mark.parametrize(("count", "chunks", "m"), [(2, 2, 4), (4, 2, 8), (4, 3, 16)])
def test_with_groups_as_large_as_the_pipeline_it_is_interleaved_1f1b(
    count: int, chunks: int, m: int
) -> None:
    """The same as the solver's family."""
    assert megatron_programs(count, chunks, m, count) == build_interleaved(loop(count, chunks, m))


def test_group_sizes_are_those_that_megatron_accepts() -> None:
    """From devices to micro-batches; the last group full, or no smaller than the pipeline."""
    assert group_sizes(4, 8) == (4, 8)
    assert group_sizes(2, 8) == (2, 3, 4, 5, 6, 8)
    assert group_sizes(4, 3) == ()
    many = group_sizes(4, 512)
    assert (len(many), many[0], many[-1]) == (12, 4, 512)


def test_its_own_order_needs_nothing_more() -> None:
    """And says so; the layout is only as good as the numbers given."""
    text = dump_megatron(loop(4, 1, 8), one_f_one_b(4, 8), [8, 9, 1, 0])
    assert flags(text) == {
        "--pipeline-model-parallel-size": ["4"],
        "--pipeline-model-parallel-layout": ["Et*8|t*9|t|L"],
    }
    assert layout("Et*8|t*9|t|L") == [
        (True, 8, False), (False, 9, False), (False, 1, False), (False, 0, True),
    ]  # fmt: skip
    assert said(text).strip() == (
        "# * Nothing about the order: it is the one that Megatron-Core runs by itself."
    )


@given(st.lists(st.integers(0, 12), min_size=1, max_size=8))
def test_a_layout_reads_back(layers: list[int]) -> None:
    """Embedding first, loss last, and as many layers as were given."""
    text = dump_megatron(loop(len(layers), 1, 2), one_f_one_b(len(layers), 2), layers)
    found = layout(flags(text)["--pipeline-model-parallel-layout"][0])
    assert [count for _, count, _ in found] == layers
    assert [first for first, _, _ in found] == [True, *[False] * (len(layers) - 1)]
    assert [last for _, _, last in found] == [*[False] * (len(layers) - 1), True]


def test_without_layers_only_the_number_of_chunks_is_written() -> None:
    """With the fastest group size that fits, and a word about what is missing."""
    whole = loop(2, 2, 8)
    rows = megatron_programs(2, 2, 8, 2)
    text = dump_megatron(whole, rows)
    assert flags(text) == {
        "--pipeline-model-parallel-size": ["2"],
        "--num-virtual-stages-per-pipeline-rank": ["2"],
        "--microbatch-group-size-per-virtual-pipeline-stage": ["2"],
    }
    assert "Give --layers" in said(text)
    times = {g: simulate(whole, megatron_programs(2, 2, 8, g)).makespan_ms for g in (2, 3, 4, 8)}
    assert times[2] == min(times.values())


def offloading() -> tuple[Problem, Programs]:
    """The first device has memory for one activation; it parks micro-batch 0 on the host."""
    stages = [stage(0, offload_bytes=10), stage(1, offload_bytes=10)]
    devices = [bus(memory_bytes=15), bus(memory_bytes=20)]
    rows = programs(
        "0F0 0OFFLOAD0 0RELEASE0 0F1 0B1 0F2 0B2 0F3 0B3 0RELOAD0 0B0",
        "1F0 1F1 1B1 1F2 1B2 1F3 1B3 1B0",
    )
    whole = problem(stages, devices, m=4)
    check(whole, rows)
    return whole, rows


def test_offload_becomes_one_share_for_all() -> None:
    """One of four on the device that offloads most; which and when is said to be left out."""
    text = dump_megatron(*offloading())
    found = flags(text)
    assert found["--activation-offload-fraction"] == ["0.25"]
    assert "core_attn" in found["--offload-modules"]
    assert "--fine-grained-activation-offloading" in found
    assert "--recompute-granularity" not in found
    assert "offloads 1, 0 of 4 micro-batches of stage 0, 1" in said(text)
    assert "does not fit gpu0 without offload or recompute: it needs 20 B of 15 B" in said(text)
    assert "does not fit gpu1" not in said(text)


def test_a_share_is_rounded_up() -> None:
    """A third is 0.34: less would not free enough."""
    whole = problem([stage(0, offload_bytes=4), stage(1, offload_bytes=4)], m=3)
    rows = programs(
        "0F0 0OFFLOAD0 0RELEASE0 0F1 0B1 0F2 0B2 0RELOAD0 0B0", "1F0 1F1 1B1 1F2 1B2 1B0"
    )
    assert flags(dump_megatron(whole, rows))["--activation-offload-fraction"] == ["0.34"]


def test_recomputed_micro_batches_become_layers() -> None:
    """Half the micro-batches of 7 layers are 3.5, rounded up; unknown without layers."""
    whole = problem([stage(0, recompute_ms=1, checkpoint_bytes=1), stage(1)], m=2)
    rows = programs("0F0 0F1 0RECOMPUTE0 0B0 0B1", "1F0 1B0 1F1 1B1")
    found = flags(dump_megatron(whole, rows, [7, 7]))
    assert found["--recompute-granularity"] == ["full"]
    assert found["--recompute-method"] == ["block"]
    assert found["--recompute-num-layers"] == ["4"]
    text = dump_megatron(whole, rows)
    assert "--recompute-num-layers" not in flags(text)
    assert "recomputes 1, 0 of 2 micro-batches" in said(text)
    assert "Without --layers no flag" in said(text)


def test_split_backwards_and_other_placements_are_said_to_be_lost() -> None:
    """With both times, by the same simulation."""
    whole = problem([stage(device) for device in (0, 1, 1, 0)], m=2)
    rows = programs(
        "0F0 0F1 3F0 3I0 3F1 3I1 3W0 3W1 0I0 0W0 0I1 0W1",
        "1F0 2F0 1F1 2F1 2I0 1I0 2I1 1I1 2W0 1W0 2W1 1W1",
    )
    check(whole, rows)
    text = said(dump_megatron(whole, rows))
    assert "stage 2 is on device 1 here, but Megatron-Core puts it on rank 0" in text
    assert "--delay-wgrad-compute" in text
    assert f"the plan takes {simulate(whole, rows).makespan_ms:.4g} ms" in text


def test_all_modes_at_once_are_all_said() -> None:
    """Offload, recompute, split backwards, a V: with a third micro-batch it has flags."""
    whole, rows = everything_at_once()
    more = whole.model_copy(update={"num_microbatches": 3, "hosts": ()})
    own = programs("0F2 5F2 5B2 0B2", "1F2 4F2 4B2 1B2", "2F2 3F2 3B2 2B2")
    joined = tuple((*a, *b) for a, b in zip(rows, own, strict=True))
    check(more, joined)
    text = dump_megatron(more, joined, [1, 2, 3, 4, 5, 6])
    for words in ("placement", "split backward", "offloaded", "recomputed", "go together"):
        assert words in said(text)
    assert set(flags(text)) == {
        "--pipeline-model-parallel-size", "--pipeline-model-parallel-layout",
        "--microbatch-group-size-per-virtual-pipeline-stage",
        "--fine-grained-activation-offloading", "--offload-modules",
        "--activation-offload-fraction", "--recompute-granularity", "--recompute-method",
        "--recompute-num-layers",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("placement", "m", "message"),
    [
        ([0, 1, 0], 2, "3 stages on 2 devices"),
        ([0, 0, 0, 1], 2, "4 stages on 2 devices"),
        ([0, 1, 2, 0, 1, 2], 2, "2 micro-batches on 3 devices"),
    ],
)
def test_where_nothing_comes_near_it_is_refused(placement: list[int], m: int, message: str) -> None:
    """With the numbers and what to do."""
    whole = problem([stage(device) for device in placement], m=m)
    with pytest.raises(ScheduleFormatError, match=message):
        dump_megatron(whole, ((),) * len(whole.devices))


@pytest.mark.parametrize("layers", [[1], [1, 2, 3], [1, -1], []])
def test_layers_are_one_number_for_each_stage(layers: list[int]) -> None:
    """Not negative."""
    with pytest.raises(InputError, match="one number, at least 0, for each of the 2 stages"):
        dump_megatron(loop(2, 1, 2), one_f_one_b(2, 2), layers)
