"""The command tune: the gain first, then the table and the certificate; refusals with flags."""

import json
import re
import subprocess
from dataclasses import replace
from itertools import chain
from typing import Any, Literal

import pytest

import optpipe_solver.tune
from optpipe import load_problem, load_schedule
from optpipe.errors import InputError
from optpipe.evaluate import verify
from optpipe_solver.tune import TuneCounts, TuneResult
from optpipe_solver.tune.switches import SwitchGain

SMALL = [
    "tune", "--model", "llama3-8b", "--gpu", "h100", "--gpus", "8", "--global-batch", "16",
    "--sequence", "8192", "--framework", "megatron", "--fix", "tp=2,cp=1,micro_batch=1,pp=4",
    "--time-limit", "2",
]  # fmt: skip
TODAY = ["--current", "tp=2,pp=4,recompute=full"]


def test_the_gain_comes_first_and_the_certificate_last(optpipe, tmp_path) -> None:
    schedule, problem = tmp_path / "schedule.json", tmp_path / "problem.json"
    done = optpipe(*SMALL, *TODAY, "-o", schedule, "--problem-out", problem)
    assert done.code == 0, done.err
    first = " ".join(done.out.split())
    said = (
        r"\d+\.\d% less time per step than what you run \(80% between -?\d+% and \d+%\); the gain"
    )
    assert re.match(said, first), done.out
    assert re.search(r"; the gain is real with a probability of (more than )?\d\d%\. ", first)
    assert re.search(
        r"Step of the best: 80% between [\d.]+ and [\d.]+ s \(67 published runs", first
    )
    assert "are less accurate than we want" in first
    assert re.search(r"Change .*- recompute full, schedule 1f1b → ", first), done.out
    assert "today: TP 2 PP 4 DP 1 MBS 1 recompute full" in done.out
    assert "less memory costs time" in done.out
    assert re.search(r"of \d+ configurations \d+ do not fit, .* is more than \d\.\d% faster", first)
    read = load_problem(problem.read_text())
    verify(read, load_schedule(schedule.read_text()))
    *_, where, command = done.out.strip().splitlines()
    assert where == "To train by it, on every host (--paste arguments.sh writes what it takes):"
    assert command == (
        "source ./arguments.sh && CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun --nproc-per-node 8 "
        'pretrain_gpt.py ${DATA_ARGS[@]} "${OPTPIPE_ARGS[@]}"'
    )


def test_json_has_every_row_with_its_layers(optpipe) -> None:
    done = optpipe(*SMALL, *TODAY, "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    best, today = found["rows"][0], found["current"]
    assert found["gain"] == pytest.approx(1 - best["step_ms"] / today["step_ms"])
    assert sum(best["layers"]) == 34
    assert (best["tp"], best["pp"]) == (2, 4)
    assert "- recompute full" in found["changes"]
    assert best["tflops_per_gpu"] == pytest.approx(best["mfu"] * 989.4, rel=1e-3)
    assert found["bound_ms"] <= best["step_ms"]
    error, (low, high) = found["error"], found["interval_ms"]
    assert (error["num_rows"], error["error_class"]) == (67, "dense, hopper, wide products")
    assert low == pytest.approx(error["low"] * best["step_ms"])
    assert low < best["step_ms"] < high
    assert 0.9 < found["gain_probability"] < 1
    assert 0 < found["gain_interval"][0] < found["gain"] < found["gain_interval"][1]
    assert best["command"].endswith(' pretrain_gpt.py ${DATA_ARGS[@]} "${OPTPIPE_ARGS[@]}"')


def test_a_price_adds_the_cost_of_a_million_tokens(optpipe) -> None:
    """The GPU time that they take, times the price; also in JSON."""
    done = optpipe(*SMALL, *TODAY, "--price-per-gpu-hour", "3.6", "--json")
    for row in json.loads(done.out)["rows"]:
        cost = 1000 / row["tokens_per_s_per_gpu"]
        assert row["cost_per_million_tokens"] == pytest.approx(cost)
    text = optpipe(*SMALL, *TODAY, "--price-per-gpu-hour", "3.6").out
    assert "cost/M tokens" in text


def test_switches_that_are_off_are_listed_with_their_gain_unless_they_are_chosen(optpipe) -> None:
    """In the fastest configuration and in today's; also in JSON."""
    short = ("--model", "llama3.2-1b", "--sequence", "1024")
    text = optpipe(*SMALL, *short, *TODAY).out
    assert "cost" not in text.partition("less memory")[0]
    times = r"[\d,.]+ ms instead of [\d,.]+ ms \(\+\d+\.\d%\)\n"
    line = rf"  --cuda-graphs \(--cuda-graph-impl .*\): {times}"
    title = r"Switches that are off, each alone in the fastest configuration [^:]*:\n"
    assert re.search(title + line, text), text
    assert "alone in today's" not in text, "full recomputation forbids graphs"
    (graphs,) = json.loads(optpipe(*SMALL, *short, *TODAY, "--json").out)["switches"]
    assert (graphs["row"], graphs["field"], graphs["value"]) == ("best", "cuda_graphs", True)
    assert graphs["gain"] == pytest.approx(1 - graphs["step_ms"] / graphs["base_ms"])
    assert "Switches" not in optpipe(*SMALL, *short, *TODAY, "--cuda-graphs").out


def test_files_are_written_before_the_report_is_printed(optpipe, tmp_path, monkeypatch) -> None:
    """So that a closed pipe (| head) does not cost them; a file that fails costs no report."""
    shown: list[list[str]] = []

    def show(*_: object) -> None:
        shown.append(sorted(path.name for path in tmp_path.iterdir()))

    monkeypatch.setattr("optpipe.cli.tune._show", show)
    flags = ("-o", "--problem-out", "--paste", "--paste-benchmark")
    files = ("s.json", "p.json", "a.sh", "b.sh")
    paths = [tmp_path / name for name in files]
    options = chain.from_iterable(zip(flags, paths, strict=True))
    assert optpipe(*SMALL, *options).code == 0
    assert shown == [sorted(files)]
    monkeypatch.setattr("optpipe.cli.console.write_file", failing)
    assert optpipe(*SMALL, "--paste", tmp_path / "c.sh").code != 0
    assert len(shown) == 2


def failing(*_: object) -> None:
    raise InputError("no space left on device; free some")


def change_result(monkeypatch, **fields: Any) -> None:
    """Give other values to these fields of every result of a search."""
    search = optpipe_solver.tune.tune

    def changed(*arguments: Any, **options: Any) -> TuneResult:
        return replace(search(*arguments, **options), **fields)

    monkeypatch.setattr("optpipe_solver.tune.tune", changed)


def switch(row: Literal["best", "current"], step_ms: float) -> SwitchGain:
    return SwitchGain(row=row, field="cuda_graphs", value=True, flag="", step_ms=step_ms,
                      base_ms=1e4, gain=1 - step_ms / 1e4, missing_bytes=0)  # fmt: skip


def test_switches_that_change_nothing_are_in_the_json_only(optpipe, monkeypatch) -> None:
    """And two configurations with the same switches and times have one section."""
    gains = [switch("best", 1e4 - 9), switch("current", 1e4 + 9)]
    monkeypatch.setattr("optpipe_solver.tune.TuneResult.switches", gains)
    assert "Switches" not in optpipe(*SMALL, *TODAY).out
    assert len(json.loads(optpipe(*SMALL, *TODAY, "--json").out)["switches"]) == 2
    gains = [switch("best", 9e3), switch("best", 1e4), switch("current", 9e3)]
    monkeypatch.setattr("optpipe_solver.tune.TuneResult.switches", gains)
    text = optpipe(*SMALL, *TODAY).out
    assert text.count("Switches that are off") == 1
    assert re.findall("  --cuda-graphs: .*", text) == [
        "  --cuda-graphs: 9,000.0 ms instead of 10,000.0 ms (+10.0%)"
    ]


def test_the_report_says_which_rows_were_not_solved_and_why_a_limit_was_exceeded(
    optpipe, monkeypatch
) -> None:
    counts = TuneCounts(total=3, do_not_fit=1, excluded=1, solved=1, open=0)
    change_result(monkeypatch, counts=counts, seconds=21.4, first_s=18.6, stopped_by="time_limit")
    said = " ".join(optpipe(*SMALL).out.split())
    assert (
        "Rows of configurations that were not solved (1 was) are simulated with the framework's "
        "best published schedule, for comparison."
    ) in said
    certificate = "of 3 configurations 1 does not fit, 1 is excluded by its bound, 1 was solved; "
    assert certificate in said
    late = "(21 s, the time limit ended it; bounds and first schedules took 19 s)."
    assert late in said
    change_result(
        monkeypatch, counts=replace(counts, solved=11), seconds=3.9, stopped_by="time_limit"
    )
    said = " ".join(optpipe(*SMALL).out.split())
    assert "for comparison" not in said
    assert "11 were solved" in said
    assert "(4 s, the time limit ended it)." in said
    change_result(monkeypatch, seconds=9.0, first_s=0.5, stopped_by="time_limit")
    said = " ".join(optpipe(*SMALL).out.split())
    assert "(9 s, the time limit ended it; the last simulations took longer)." in said


def test_text_and_json_say_the_same_where_today_was_not_given(optpipe, monkeypatch) -> None:
    verdict = json.loads(optpipe(*SMALL, "--json").out)["verdict"]
    assert re.fullmatch(
        r"[\d,.]+ ms per step; what you run \(current\) was not given, so no gain is known", verdict
    )
    assert " ".join(optpipe(*SMALL).out.split()).startswith(f"{verdict}. Step of the best")
    change_result(monkeypatch, is_current_too_large=True)
    verdict = json.loads(optpipe(*SMALL, "--json").out)["verdict"]
    assert verdict.endswith("; what you run is too large to simulate, so no gain is known")


FAKE_TORCHRUN = """#!/bin/bash
# As Megatron-LM logs: five slow steps, then steps of 2.0, 3.0 and 2.5 s; the second run fails.
echo "$@" >>calls
[ "$(wc -l <calls)" = 2 ] && exit 1
for ms in 9000 9000 9000 9000 9000 2000.0 3000.0 2500.0; do
    echo " [2026-11-29 12:00:00] iteration 1/ 8 | elapsed time per iteration (ms): $ms | lm loss: 1"
done
for mib in 100.0 $PEAK_MIB 200.0; do
    echo "[Rank 0] (after 2 iterations) memory (MB) | allocated: 9 | max allocated: $mib | more"
done
"""


def test_the_pasted_benchmark_measures_the_fastest_three_and_says_what_to_feed(
    optpipe, tmp_path
) -> None:
    """With a torchrun that only logs; the printed command is one that tune takes."""
    script = tmp_path / "run.sh"
    done = optpipe(*SMALL, "--paste-benchmark", script, "--json")
    assert done.code == 0, done.err
    rows = json.loads(done.out)["rows"][:3]
    fake = tmp_path / "torchrun"
    fake.write_text(FAKE_TORCHRUN)
    fake.chmod(0o755)
    ran = subprocess.run(
        ["bash", script.name], capture_output=True, text=True, check=True, cwd=tmp_path,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "STEPS": "8", "PEAK_MIB": str(50 * 1024)},
    )  # fmt: skip
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == 3
    for call in calls:
        assert " pretrain_gpt.py --mock-data --tokenizer-type NullTokenizer" in call
        assert call.endswith(" --train-iters 8 --log-interval 1 --eval-iters 0")
    lines = ran.stdout.splitlines()
    first = f"1: {rows[0]['label']}: 2.5000 s per step, estimated {rows[0]['step_ms'] / 1e3:.4f} s"
    assert first in lines
    assert "2: ended with an error" in lines
    assert f"2: {rows[1]['label']}: no step times; see optpipe_benchmark/2.log" in ran.stdout
    feed = lines[lines.index(first) + 1].split()
    assert feed[:2] == ["optpipe", "tune"]
    assert feed[-4:] == ["--measured-step-s", "2.5000", "--measured-peak-gib", "50.00"]
    at = feed.index("--current") + 1
    feed[at] = tmp_path / feed[at]
    again = optpipe(*feed[1:], "--time-limit", "1", "--json")
    assert again.code == 0, again.err
    current = json.loads(again.out)["current"]
    assert current["label"] == rows[0]["label"]
    assert current["step_ms"] == pytest.approx(2500, rel=0.03)
    assert optpipe(*SMALL[:-6], "--paste-benchmark", script).code == 2, "another framework"


def test_one_measured_step_calibrates_all(optpipe) -> None:
    plain = json.loads(optpipe(*SMALL, *TODAY, "--json").out)
    done = optpipe(*SMALL, *TODAY, "--json", "--measured-step-s", "8")
    measured = json.loads(done.out)
    assert measured["current"]["step_ms"] == pytest.approx(8000, rel=0.03)
    assert measured["gain"] == pytest.approx(plain["gain"], abs=0.02)
    widths = [found["error"]["high"] / found["error"]["low"] for found in (plain, measured)]
    assert widths[1] < widths[0]
    assert "pairs of published runs" in measured["error"]["text"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--fix", "layers=3"], "--fix layers=3: must be NAME=NUMBER with a name of tp, cp"),
        (["--current", "tp=3"], "the minimum is 3 GPUs, and multiples of it"),
        (["--current", "pp=0"], "--current pp=0: must be >= 1"),
        (["--current", "dp=0"], "--current dp=0: must be >= 1"),
        (["--current", "chunks=5"], "chunks = 5 with pp = 1: only the stages of a pipeline"),
        (["--current", "pp=8,chunks=5"], "--current: 40 stages, but only 34 layers"),
        (
            ["--model", "llama3.2-3b", "--current", "pp=8"],
            "28 layers are no multiple of 8 ranks, so Megatron-Core does not start; say how yours",
        ),
        (["--current", "pp=8,micro_batch=5"], "does not divide global_batch 16"),
        (["--current", "pp=8,recompute=norms"], "is none of full, core_attn"),
        (["--current", "pp=8,layers=4+x"], "must be numbers with +"),
        (["--current", "pp=2,tp=4,layers=20+15"], "and together the 34 layers"),
        (["--framework", "deepspeed"], "must be 'any', 'megatron', 'torchtitan' or 'huggingface'"),
        (["--measured-step-s", "3"], "of a step of --current; give both or none"),
        (["--headroom", "1.5"], "--headroom 1.5: must be < 1"),
        (["--gpu", "abacus"], "abacus"),
        (["--fix", "dp=1,dp=2"], "--fix: dp is given twice"),
        (["--fix", "ep=1", "--fix", "ep=2"], "--fix: ep is given twice"),
        (["--model", "gpt3-175b"], "8192: 'gpt3-175b' has 2048 learned positions"),
        (["--current", " "], "--current '': must be NAME=NUMBER,... or a file"),
        (["--current", "pp=4,dp=8,measured=1"], "(or recompute, layers)"),
        (
            ["--model", "gemma2-9b", "--paste", "x.sh"],
            "4 norms in a layer: Megatron-LM's arguments",
        ),
        (
            ["--framework", "torchtitan", "--model", "mixtral-8x7b", "--paste", "x.py"],
            "no model of its",
        ),
        (["--gpus", "8,x"], "--gpus 8,x: must be numbers with commas between, or auto"),
        (["--current", "tp"], "--current tp: is no file here, and no NAME=NUMBER,... such as"),
        (["--gpus", "8,16", *TODAY], "--gpus and --current exclude each other"),
        (["--gpu", "a100"], "with several kinds each needs its number; write h100:8"),
    ],
)
def test_what_cannot_be_asked_is_refused(optpipe, arguments, sentence: str) -> None:
    done = optpipe(*SMALL, *arguments)
    assert done.code == 2
    assert sentence in " ".join(done.err.split())


SEVERAL = ["tune", "--model", "llama3-8b", "--gpu", "h100", "--global-batch", "16", "--sequence",
           "8192", "--framework", "megatron", "--fix", "cp=1,micro_batch=1,chunks=1"]  # fmt: skip


def test_fixed_degrees_that_need_more_gpus_are_named_with_the_minimum(optpipe) -> None:
    done = optpipe("tune", "--model", "llama3-8b", "--gpu", "h100", "--gpus", 8, "--fix", "pp=16")
    assert done.code == 2
    said = "8 GPUs are no multiple of tp 1 x cp 1 x pp 16 = 16; correct one of them: the minimum is"
    assert said in " ".join(done.err.split())


def test_a_degree_is_fixed_by_its_own_name_too(optpipe) -> None:
    given = ("tune", "--model", "llama3-8b", "--gpu", "h100", "--gpus", 8)
    done = optpipe(*given, "--pp", "16", "--mbs=2")
    assert "pp 16 = 16; correct one of them" in " ".join(done.err.split())
    done = optpipe(*given, "--fix", "micro_batch=1", "--mbs=2")
    assert done.err == "error: --fix: micro_batch is given twice; give it once\n"
    done = optpipe("estimate", "--model", "llama3-8b", "--gpu", "h100", "--gbs", "64")
    assert done.err.startswith("error: --gbs: estimate takes the micro-batches of one pipeline;")


def test_each_number_of_gpus_has_a_row_and_the_smallest_that_fits_is_named(optpipe) -> None:
    """With tokens per GPU-hour and the cost, or with what is missing."""
    limits = ("--time-limit", "40", "--price-per-gpu-hour", "2")
    done = optpipe(*SEVERAL, "--gpus", "8,1,4", *limits, "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    unfit, *fits = found["scaling"]
    assert [row["num_gpus"] for row in found["scaling"]] == [1, 4, 8]
    assert unfit["step_ms"] is None
    assert unfit["missing_bytes"] > 2**30
    for row in fits:
        assert row["tokens_per_gpu_hour"] == pytest.approx(3600 * row["tokens_per_s_per_gpu"])
        cost = 2e6 / row["tokens_per_gpu_hour"]
        assert row["cost_per_million_tokens"] == pytest.approx(cost)
        seconds = 16 * 8192 / row["num_gpus"] / row["tokens_per_s_per_gpu"]
        assert row["step_ms"] == pytest.approx(1e3 * seconds, rel=1e-6)
    assert fits[0]["step_ms"] > fits[1]["step_ms"]
    best = found["rows"][0]
    assert (best["label"], best["step_ms"]) == (fits[0]["label"], fits[0]["step_ms"])
    said = "4 GPUs are the smallest number tried that fits; on 1 GPUs, the configuration "
    assert found["verdict"].startswith(said)
    gib = f"needs at least {unfit['missing_bytes'] / 2**30:.1f} GiB more per GPU"
    assert found["verdict"].endswith(gib)


def test_auto_begins_below_the_smallest_number_that_fits(optpipe, monkeypatch) -> None:
    monkeypatch.setattr("optpipe_solver.tune.scaling.MAX_AUTO_GPUS", 8)
    done = optpipe(*SEVERAL, "--gpus", "auto", "--time-limit", "40")
    assert done.code == 0, done.err
    table = done.out.partition("numbers of GPUs")[2].partition("bf16 MFU")[0]
    assert re.findall(r"^ *(\d) ", table, re.MULTILINE) == ["2", "4", "8"], done.out
    assert "nearest to fitting, TP" in table
    numbered = [one.replace("h100", "h100:8") for one in SEVERAL]
    refused = optpipe(*numbered, "--gpus", "auto")
    assert "needs one kind of GPU without a number in --gpu" in " ".join(refused.err.split())


def test_once_a_number_fits_no_other_is_tried_after_the_time(optpipe) -> None:
    done = optpipe(*SEVERAL, "--gpus", "1,4,8", "--time-limit", "0.001", "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)["scaling"]
    assert [row["step_ms"] is not None for row in found] == [False, True, False]
    assert found[2]["reason"] == "not tried: the search had ended"


def test_if_no_number_of_gpus_fits_the_largest_says_what_is_missing(optpipe) -> None:
    done = optpipe(*SEVERAL, "--gpus", "1,2", "--memory-gb", "20", "--time-limit", "40")
    assert done.code == 3
    assert re.search(r"none of these numbers of GPUs fits: on 2, .* GiB more per GPU", done.err)


def test_if_nothing_fits_the_answer_names_a_number_of_gpus(optpipe) -> None:
    """And the nearest configuration with the memory that it lacks."""
    done = optpipe("tune", "--model", "llama3-70b", "--gpu", "h100", "--gpus", 8,
                   "--global-batch", 128, "--framework", "megatron", "--fix", "tp=8")  # fmt: skip
    assert done.code == 3
    assert "nearest to fitting, TP 8 PP 1 DP 1 MBS 1 recompute full, needs at least 7" in done.err
    assert re.search(r"\d+ GPUs are enough \(TP 8 PP ", done.err)


def test_what_runs_today_but_does_not_fit_in_the_model_is_no_baseline(optpipe) -> None:
    """The report says first by how much it does not fit, and gives no percentage of its time."""
    slower = [one.replace("tp=2", "tp=8").replace("pp=4", "pp=1") for one in SMALL]
    done = optpipe(*slower, "--current", "pp=1", "--memory-gb", "40")
    assert done.code == 0, done.err
    text = " ".join(done.out.split())
    first = re.match(
        r"What you run does not fit in this model: pipeline rank 0 needs (\d+\.\d) of 37\.3 GiB, "
        r"(\d+\.\d) GiB more than it has\. No gain is given\. Bytes are estimates too\. "
        r"The fastest that fits takes [\d,.]+ ms per step\. Step of the best: 80% ",
        text,
    )
    assert first, done.out
    assert float(first[1]) - 37.3 == pytest.approx(float(first[2]), abs=0.11)
    assert "today: TP 1 PP 1 DP 8 MBS 1" in text
    rows = text.partition("configuration step ms")[2].partition("less memory")[0]
    assert not re.search(r"[+-]\d+\.\d%", rows), done.out
    assert "per step than what you run" not in text


def test_a_file_of_another_step_is_not_compared_and_other_numbers_are_named(
    optpipe, tmp_path
) -> None:
    """Fewer tokens per step would be called a gain; FP8 and switches that are off, said to be."""
    folder = tmp_path / "lr=3e-4"
    folder.mkdir()
    script = folder / "train.sh"
    text = (
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 --micro-batch-size 1 "
        "--global-batch-size 16 --seq-length {} --bf16"
    )
    script.write_text(text.format(4096))
    done = optpipe(*SMALL, "--current", script)
    assert done.code == 2
    said = " ".join(done.err.split())
    assert "a step of it is 16 sequences of 4,096 tokens, asked are 16 of 8,192" in said
    script.write_text("\ufeff" + text.format(8192))  # as some editors save it
    given = ("--precision", "fp8", "--measured-step-s", "60")
    done = optpipe(*SMALL, "--current", script, *given)
    assert done.code == 0, done.err
    said = " ".join(done.out.split())
    assert "today: TP 2 PP 4 DP 1 MBS 1 ZeRO 0" in said
    differ = "precision bf16 and not fp8, sequence parallel off and not on"
    assert f"What you run has {differ}: the gain is that of changing this" in said
    assert re.search(r"The measured step is \d+\.?\d* times its estimate", said)
