"""``optpipe import``: what it prints and writes, and its exit codes."""

import json
from itertools import product
from pathlib import Path

import pytest

from examples.measurements.make_samples import BASE, HERE
from optpipe import load_problem
from optpipe.measurements import read_times
from tests.measurements.traces import NETWORK, P2P, Trace

TRACES = sorted(HERE.glob("rank*.json.gz"))
SIZES = ("--activation-bytes", "10GiB", "--memory-bytes", "80 GiB")


def test_traces_replace_the_times_of_a_base_problem(optpipe, tmp_path: Path) -> None:
    out_file = tmp_path / "measured.json"
    code, out, err = optpipe("import", "kineto", *TRACES, "--base", BASE, "-o", out_file)
    assert code == 0, err
    assert "median" in out
    assert "0 -> 1" in out
    assert "note: Times are those of the GPU kernels" in out
    built = load_problem(out_file.read_text())
    assert built.name == "llama3-8b-h100-pp4, times from 4 Kineto traces"
    assert built.stages[0].static_bytes == load_problem(BASE.read_text()).stages[0].static_bytes
    code, out, err = optpipe("bound", out_file)
    assert code == 0, err


def test_a_log_and_a_table_of_sizes_make_a_problem(optpipe, tmp_path: Path) -> None:
    out_file = tmp_path / "measured.json"
    code, _, err = optpipe(
        "import", "megatron", HERE / "megatron-log.txt", "--sizes", HERE / "stages.csv",
        "--memory-bytes", "80GiB", "--weight-share", 0.4, "--link-gb-per-s", 300,
        "--d2h-gb-per-s", 20, "--h2d-gb-per-s", 25, "-o", out_file,
    )  # fmt: skip
    assert code == 0, err
    built = load_problem(out_file.read_text())
    first = built.stages[0]
    assert first.backward_weight_ms == pytest.approx(0.4 * first.fused_backward_ms)
    assert built.num_microbatches == 8
    assert built.devices[0].memory_bytes == 80 * 2**30
    assert built.devices[0].h2d_gb_per_s == 25
    assert built.links[0].bandwidth_gb_per_s == 300
    assert built.can_offload(0)


def test_what_is_missing_is_named_and_nothing_written(optpipe, tmp_path: Path) -> None:
    out_file = tmp_path / "measured.json"
    code, _, err = optpipe("import", "csv", HERE / "times.csv", "-o", out_file)
    assert code == 2
    assert "activation_bytes of stage 0-3" in err
    assert "memory_bytes of device 0-3" in err
    assert "median" in err
    assert not out_file.exists()


def test_a_look_needs_no_sizes(optpipe) -> None:
    code, out, err = optpipe("import", "csv", HERE / "times.csv")
    assert (code, err) == (0, "")
    assert "no problem yet" in out


def test_json_is_for_programs(optpipe, tmp_path: Path) -> None:
    messages = tmp_path / "messages.csv"
    messages.write_text("from,to,bytes,time_ms\n0,1,1000000,1\n")
    code, out, _ = optpipe(
        "import", "csv", HERE / "times.csv", "--messages", messages, "--json", "--name", "mine"
    )
    report = json.loads(out)
    assert code == 0
    assert report["times"][0]["action"] == "F"
    assert report["times"][0]["num_samples"] == 24
    assert report["links"][0]["bandwidth_gb_per_s"] == pytest.approx(1)
    assert "activation_bytes" in report["missing"]
    assert report["notes"] == []


def test_warm_up_is_left_out_and_samples_are_kept(optpipe, tmp_path: Path) -> None:
    kept = tmp_path / "kept.csv"
    code, _, _ = optpipe(
        "import", "csv", HERE / "times.csv", "--warmup-steps", 2, "--times-out", kept, *SIZES
    )
    assert code == 0
    assert {sample.step for sample in read_times(kept.read_text()).samples} == {2}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("csv", HERE / "megatron-log.txt"), "megatron-log.txt: line 1: columns"),
        (("kineto", HERE / "times.csv"), "times.csv: not JSON"),
        (("megatron", HERE / "times.csv"), "times.csv: the log has no timer forward-compute"),
        (("csv", HERE / "times.csv", HERE / "times.csv"), "2 files: csv reads one"),
        (("csv", HERE / "times.csv", "--gpu-time", "busy"), "--gpu-time belongs to kineto"),
        (("kineto", *TRACES, "--base", BASE, "--pairs", "-o", "p.json"), "--pairs: nothing hides"),
        (("csv", HERE / "times.csv", "--pairs"), "--pairs belongs to kineto"),
        (("kineto", *TRACES, "--equal-stages"), "--equal-stages belongs to megatron"),
        (("csv", HERE / "times.csv", "--activation-bytes", "10 GiBi"), "must be a size"),
        (("csv", HERE / "times.csv", "--d2h-gb-per-s", "-1"), "--d2h-gb-per-s -1.0: must be > 0"),
        (("csv", HERE / "times.csv", "--weight-share", "2"), "--weight-share 2.0: must be <= 1"),
        (
            ("csv", HERE / "times.csv", "--base", BASE, "--sizes", HERE / "stages.csv", "-o", "x"),
            "static_bytes, output_bytes: given beside a base problem",
        ),
        (("csv", HERE / "times.csv", "-o", HERE / "none" / "x.json"), "there is no folder"),
    ],
)
def test_bad_input_leaves_with_2(optpipe, arguments, message) -> None:
    code, _, err = optpipe("import", *arguments)
    assert code == 2
    assert message in err
    assert "Traceback" not in err


def test_what_passes_hide_behind_each_other_is_read_from_traces(optpipe, tmp_path) -> None:
    """Both compute 1, exchange 1, compute 1 ms: in turn 6, together 4; the first step is left out,
    and the rank whose passes exchange nothing has no pair. Pairs of a base are not kept."""
    paths = []
    for rank in range(2):
        trace = Trace(rank=rank)
        for step, name in product(range(2), "FB"):
            if rank == 0:
                call = {"Collective name": "all_to_allv"}
                trace.work(P2P, 1000, 1000 + 900 * (step == 0), stream=NETWORK, **call)
            trace.gpu(f"PP:{rank}{name}0", (0, 1000), (2000, 1000))
        paths.append(trace.write(tmp_path / f"rank{rank}.json"))
    out = tmp_path / "measured.json"
    sizes = ["--activation-bytes", "1", "--memory-bytes", "100", "--num-microbatches", "4"]
    code, report, err = optpipe("import", "kineto", *paths, *sizes, "--pairs", "-o", out)
    assert code == 0, err
    (pair,) = load_problem(out.read_text()).pairs
    assert (pair.forward, pair.backward, pair.with_, pair.hidden_ms) == (0, 0, "B", 2.0)
    assert "includes waiting for the other ranks of its group" in " ".join(report.split())
    longer = load_problem(out.read_text()).model_dump(mode="json", by_alias=True)
    for cost in (cost for one in longer["stages"] for cost in one["costs"]):
        cost |= {"forward_ms": 9, "backward_ms": 9}
    longer["pairs"][0]["hidden_ms"] = 8
    base = tmp_path / "base.json"
    base.write_text(json.dumps(longer))
    code, _, err = optpipe("import", "kineto", *paths, "--base", base, "--pairs", "-o", out)
    assert code == 0, err
    assert load_problem(out.read_text()).pairs == (pair,)
