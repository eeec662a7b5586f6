"""``optpipe export``: every form, to a file or to the terminal, and what is refused."""

from pathlib import Path

import pytest

from optpipe import dump_csv, dump_problem
from optpipe.cli.plot import TARGETS
from tests.building import everything_at_once, one_f_one_b, problem, programs, stage

FIRST_WORDS = {
    "torch-csv": "0F0,0F1,0B0,0F2,0B1,0B2\n",
    "python": '"""A pipeline schedule as ScheduledNodes',
    "megatron-layout": "--num-layers 3 --pipeline-model-parallel-size 2 ",
    "trace": '{"traceEvents": [',
}


@pytest.fixture
def plain(tmp_path) -> tuple[Path, Path]:
    """A problem and its 1F1B, which every form can hold."""
    ends = {"embedding": 1, "transformer": 2}, {"transformer": 1, "head": 1}
    stages = [stage(device, layers=layers) for device, layers in enumerate(ends)]
    return write(tmp_path, problem(stages, m=3), one_f_one_b(2, 3))


def write(folder: Path, whole, rows) -> tuple[Path, Path]:
    """Write a problem as JSON and programs as CSV."""
    paths = folder / "problem.json", folder / "schedule.csv"
    paths[0].write_text(dump_problem(whole))
    paths[1].write_text(dump_csv(rows))
    return paths


@pytest.mark.parametrize("target", TARGETS)
def test_every_form_is_written_to_a_file_or_to_the_terminal(
    optpipe, plain, tmp_path, target: str
) -> None:
    code, out, err = optpipe("export", *plain, "--to", target)
    assert (code, err) == (0, "")
    assert out.startswith(FIRST_WORDS[target])
    path = tmp_path / "exported"
    code, nothing, err = optpipe("export", *plain, "--to", target, "-o", path)
    assert (code, nothing) == (0, "")
    assert "written to" in err
    assert path.read_text() == out


def test_layers_are_checked_before_anything_is_written(optpipe, plain) -> None:
    """Embedding and head are no transformer layers: 3, not 5."""
    assert optpipe("export", *plain, "--to", "megatron-layout", "--num-layers", "3")[0] == 0
    code, out, err = optpipe("export", *plain, "--to", "megatron-layout", "--num-layers", "5")
    assert (code, out) == (2, "")
    assert "the stages hold 3 transformer layers, but the model has 5" in err


def test_split_backwards_can_be_fused_on_the_way(optpipe, tmp_path) -> None:
    rows = programs("0F0 0F1 0I0 0I1 0W0 0W1", "1F0 1I0 1F1 1I1 1W0 1W1")
    paths = write(tmp_path, problem([stage(0), stage(1)], m=2), rows)
    code, out, err = optpipe("export", *paths, "--to", "torch-csv", "--fuse")
    assert (code, err) == (0, "")
    assert out == dump_csv(programs("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"))


def test_fusing_is_checked_anew(optpipe, tmp_path) -> None:
    """A fused backward with a workspace that does not fit is no legal schedule."""
    whole = problem(
        [stage(backward_workspace_bytes=7)], [{"memory_bytes": 15}], m=1,
    )  # fmt: skip
    paths = write(tmp_path, whole, programs("0F0 0I0 0W0"))
    assert optpipe("check", *paths)[0] == 0
    code, _, err = optpipe("export", *paths, "--to", "torch-csv", "--fuse")
    assert code == 2
    assert ">>0B0<<" in err


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("torch-csv", "row 1, column 2: torch's runtime has no OFFLOAD"),
        ("python", "row 2, column 6: 1RECOMPUTE0"),
    ],
)
def test_what_a_runtime_cannot_run_is_refused(optpipe, tmp_path, target, message) -> None:
    paths = write(tmp_path, *everything_at_once())
    path = tmp_path / "exported"
    code, out, err = optpipe("export", *paths, "--to", target, "-o", path)
    assert (code, out) == (2, "")
    assert message in " ".join(err.split())
    assert not path.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--to", "onnx"), "--to 'onnx': must be one of torch-csv, python"),
        (("--to", "python", "-o", "/nowhere/nodes.py"), "there is no folder /nowhere"),
        ((), "Missing option '--to'"),
    ],
)
def test_wrong_arguments_are_named(optpipe, plain, arguments, message: str) -> None:
    code, out, err = optpipe("export", *plain, *arguments)
    assert (code, out) == (2, "")
    assert message in " ".join(err.split())
