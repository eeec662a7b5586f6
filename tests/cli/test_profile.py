"""``optpipe profile``: from a function that makes stages to a problem file."""

import importlib
import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from optpipe import load_problem
from optpipe.measurements import Measurements
from optpipe.runtime.launch import launch_ranks
from optpipe.runtime.measuring import load_stages
from optpipe.runtime.treatments import parse_treatment

pytestmark = pytest.mark.usefixtures("few_objects")

TINY = "optpipe.runtime.demo:tiny_gpt"
QUICK = ("--repeats", 2, "--warmups", 1, "--device", "cpu")


@pytest.fixture
def profile(optpipe, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    return partial(optpipe, "profile", "--stages")


def test_the_tiny_model_becomes_a_problem(profile, tmp_path) -> None:
    path, samples = tmp_path / "problem.json", tmp_path / "samples.json"
    code, out, err = profile(TINY, "-o", path, "--samples-out", samples, *QUICK)
    assert code == 0, err
    for title in (
        "median",
        "made by W",
        "offload",
        "H2D GB/s",
        "2 -> 3",
        "core_attn",
        "stays",
    ):
        assert title in out
    assert f"problem written to {path}" in err.replace("\n", "")
    problem = load_problem(path.read_text())
    assert problem.num_microbatches == 16
    assert problem.placement == (0, 1, 2, 3)
    assert all(stage.forward_ms > 0 for stage in problem.stages)
    for stage, menu in enumerate(problem.menus):
        assert 1 < len(menu) <= 8  # which are worth having is a matter of times
        assert all(problem.can_use(stage, number) for number in range(len(menu)))
        assert all(str(parse_treatment(mode.name)) == mode.name for mode in menu)
    # Two samples of 16 tokens with 32 doubles each.
    assert [stage.output_bytes for stage in problem.stages] == [2 * 16 * 32 * 8] * 3 + [0]
    read = Measurements.model_validate_json(samples.read_text())
    assert read.spreads[3, "W"].num_samples == 2


def test_the_report_as_json(profile) -> None:
    """What the tables say, with its notes."""
    code, out, err = profile(
        "tests.runtime.measured:three_perceptrons", "--device", "H100", "--json"
    )
    assert code == 0, err
    report = json.loads(out)
    assert {time["action"] for time in report["times"]} >= {"F", "I", "W"}
    assert len(report["footprints"]) == 3
    assert all(one["received_bytes"] >= 0 for one in report["footprints"])
    assert any("Traced: no pass ran on a GPU" in note for note in report["notes"])


def test_a_gpu_that_is_not_there(profile, tmp_path) -> None:
    """The report says that it is traced and by which shares; memory and rates are the GPU's."""
    path = tmp_path / "problem.json"
    code, out, err = profile(
        "tests.runtime.measured:three_perceptrons", "--device", "H100", "-o", path
    )
    assert code == 0, err
    assert "3 stages on H100 SXM 80GB, traced" in out
    assert "Traced: no pass ran on a GPU" in out
    assert "matmul 0.735" in out
    problem = load_problem(path.read_text())
    assert [device.memory_bytes for device in problem.devices] == [85520809984] * 3
    assert all(stage.forward_ms > 0 for stage in problem.stages)
    assert all(link.latency_ms == pytest.approx(0.02, rel=0.01) for link in problem.links)


def test_an_unknown_device_is_refused_with_the_near_ones(profile) -> None:
    code, _, err = profile(TINY, "--device", "h10")
    assert code == 2
    assert "--device h10: gpu = 'h10'" in err
    assert "did you mean h100?" in err
    code, _, err = profile(TINY, "--device", "cpu", "--ranks", 4)
    assert code == 2
    assert "needs a traced device, and cpu is here" in err.replace("\n", " ")


def test_options_reach_the_problem(profile, tmp_path) -> None:
    path = tmp_path / "problem.json"
    code, _, err = profile(
        TINY, "-o", path, "--microbatch", 3, "--num-microbatches", 5, "--placement", "0,1,1,0",
        "--memory-bytes", 10**9, "--state-copies", 0, "--modes", 0, "--link-latency-ms", 0.25,
        *QUICK,
    )  # fmt: skip
    assert code == 0, err
    problem = load_problem(path.read_text())
    assert problem.num_microbatches == 5
    assert problem.placement == (0, 1, 1, 0)
    assert problem.devices[0].memory_bytes == 10**9
    assert problem.stages[0].output_bytes == 3 * 16 * 32 * 8
    weights = sum(p.numel() for p in load_stages(TINY).stages[1].parameters())
    assert problem.stages[1].static_bytes == 2 * 8 * weights
    assert {link.latency_ms for link in problem.links} == {0.25}
    names = {tuple(mode.name for mode in menu) for menu in problem.menus}
    assert names == {("keep", "offload", "recompute")}


@pytest.mark.extended
def test_ranks_write_one_file_together(tmp_path: Path) -> None:
    path = tmp_path / "problem.json"
    arguments = ["profile", "--stages", TINY, "-o", path, *QUICK]
    assert launch_ranks("optpipe.cli", list(map(str, arguments)), 2) == 0
    problem = load_problem(path.read_text())
    assert problem.placement == (0, 1, 0, 1)
    assert [(link.source, link.target) for link in problem.links] == [(0, 1), (1, 0)]
    assert problem.links[0].latency_ms > 0 or problem.links[0].bandwidth_gb_per_s is not None


@pytest.mark.parametrize(
    ("stages", "arguments", "message"),
    [
        ("nothing", (), "must name a function; write module:function"),
        ("no_such_module:stages", (), "there is no module no_such_module"),
        ("tests.runtime.measured:nothing", (), "has no function nothing (it has: "),
        ("tests.runtime.measured:a_number", (), "returned something of type int; it must return"),
        ("tests.runtime.measured:no_modules", (), "something of type str among the stages"),
        ("tests.runtime.measured:no_list", (), "something of type int for the stages"),
        ("..relative:stages", (), "must name a function; write module:function"),
        (TINY, ("--link-latency-ms", "inf"), "--link-latency-ms inf: must be finite"),
        (TINY, ("--state-copies", "inf"), "must be <= 100"),
        (TINY, ("--memory-bytes", 10**20), "must be <= 9007199254740992"),
        (TINY, ("-o", "p.json", "--samples-out", "p.json"), "cannot write p.json twice"),
        ("tests.runtime.measured:needs_an_argument", (), "is handed nothing, which does not fit"),
        ("tests.runtime.measured:misfits", ("--microbatch", 2), "is handed microbatch=2"),
        ("tests.runtime.measured:misfits", (), "stage 1 cannot run on inputs of size [(2, 3)]"),
        (TINY, ("--placement", "0,x"), "--placement 0,x: must be whole numbers with commas"),
        (TINY, ("--placement", "0,1"), "must name a device for each of 4 stages"),
        (TINY, ("--device", "abacus"), "the catalogue has none of that name; it has a100-40gb"),
        (TINY, ("--device", "cuda:x"), "torch knows no such device; write cuda or cpu"),
        (TINY, ("-o", "/nowhere/p.json"), "there is no folder"),
    ],
)
def test_bad_input_leaves_with_2(profile, stages, arguments, message) -> None:
    code, out, err = profile(stages, *arguments)
    assert code == 2
    assert message in err.replace("\n", " ")
    assert not out


def test_samples_are_kept_where_they_make_no_problem(profile, tmp_path) -> None:
    """They may have taken an hour of GPUs; too many micro-batches are found out after it."""
    samples = tmp_path / "samples.json"
    few = ("--memory-bytes", 1000, "--modes", 0, *QUICK)
    code, out, err = profile(TINY, "--samples-out", samples, *few)
    assert code == 2
    assert "reserved_bytes" in err
    assert "made by W" in out
    assert Measurements.model_validate_json(samples.read_text()).spreads[3, "W"].num_samples == 2


def test_the_current_folder_is_searched(profile, tmp_path, monkeypatch) -> None:
    (tmp_path / "lying_here.py").write_text(
        "import torch\n"
        "def stages():\n"
        "    return [torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)], torch.ones(3, 2)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    path = tmp_path / "problem.json"
    code, out, err = profile("lying_here:stages", "-o", path, *QUICK)
    assert code == 0, err
    assert "There was no loss" in out
    # Times decide which modes are worth having, and a menu may be one that v1 can say.
    assert load_problem(path.read_text()).stages[0].output_bytes == 3 * 2 * 4


def test_without_torch_the_pip_command_is_said() -> None:
    """The command is there in a bare install, and says what it needs."""
    code = (
        "from importlib import metadata\n"
        "found = metadata.version\n"
        "def version(name):\n"
        "    if name == 'torch':\n"
        "        raise metadata.PackageNotFoundError(name)\n"
        "    return found(name)\n"
        "metadata.version = version\n"
        "from optpipe.cli import main\n"
        "main(['profile', '--stages', 'any:thing'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "[runtime]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_pairs_are_measured_with_who_runs_them(profile, tmp_path, monkeypatch) -> None:
    """No exchange hides on one CPU process: what a pair saves is given here."""
    measuring = importlib.import_module("optpipe.runtime.measuring.measure")
    monkeypatch.setattr(measuring, "time_pairs", lambda *_, **__: (0.001, 0.002))
    path, interleave = tmp_path / "problem.json", "optpipe.runtime.overlap:interleave"
    given = (*QUICK, "--modes", 0, "--placement", "0,1,1,0", "--overlap")
    code, out, err = profile(TINY, "-o", path, *given, interleave)
    assert code == 0, err
    assert "B of stage 3" in out
    pairs = load_problem(path.read_text()).pairs
    assert len(pairs) == 2 * 2 * 2 * 2
    assert {one.hidden_ms for one in pairs} == {0.0015}
    code, _, err = profile(TINY, *given, "optpipe.runtime.overlap:none")
    assert code == 2
    assert "--overlap optpipe.runtime.overlap:none" in err
