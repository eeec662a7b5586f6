"""The examples: their numbers follow from formulas, and the quickstart ends as it should."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from examples.make_llama3_8b import PROBLEM_FILE, make_problem
from examples.quickstart import free_port
from optpipe import dump_problem, find_violations, load_problem
from optpipe.memory import device_peak_bytes
from optpipe_solver.families.classic import build_one_f_one_b

pytestmark = pytest.mark.long

ROOT = Path(__file__).parent.parent
PROBLEMS = ROOT / "examples" / "problems"


@pytest.fixture(scope="module")
def llama():
    """The example that README, quickstart and benchmarks share."""
    return load_problem(PROBLEM_FILE.read_text())


def test_the_committed_file_is_what_the_formulas_give() -> None:
    assert PROBLEM_FILE.read_text() == dump_problem(make_problem())


def test_the_parameters_add_up_to_llama_3_8b(llama) -> None:
    parameters = sum(stage.static_bytes for stage in llama.stages) / 18
    assert parameters == 8_030_261_248  # the count of the published checkpoint


def test_1f1b_overflows_the_first_gpu_only(llama) -> None:
    programs = build_one_f_one_b(llama)
    violations = find_violations(llama, programs)
    assert [(item.code, item.device) for item in violations] == [("memory.device", 0)]
    excess = device_peak_bytes(llama, 0, programs[0]) - llama.devices[0].usable_bytes
    assert round(excess / 1e9, 1) == 5.6


def test_a_copy_takes_longer_than_a_forward_and_less_than_a_micro_batch(llama) -> None:
    for index in (0, 1, 2):
        stage = llama.stages[index]
        assert stage.forward_ms < llama.offload_ms(index) < stage.busy_ms


def test_the_table_beside_the_file_shows_the_file(llama) -> None:
    text = (PROBLEMS / "README.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", text, re.MULTILINE))
    for field in (
        "forward_ms",
        "backward_input_ms",
        "backward_weight_ms",
        "activation_bytes",
        "weight_context_bytes",
        "offload_bytes",
        "static_bytes",
        "output_bytes",
    ):
        shown = [float(cell.replace(",", "")) for cell in rows[field].split(" | ")[:4]]
        assert shown == [getattr(stage, field) for stage in llama.stages], field
    assert f"{llama.devices[0].memory_bytes:,}" in rows["memory_bytes"]
    assert f"{llama.devices[0].reserved_bytes:,}" in rows["reserved_bytes"]


def test_every_problem_is_listed_and_valid() -> None:
    text = (PROBLEMS / "README.md").read_text()
    files = sorted(PROBLEMS.glob("*.json"))
    assert files
    for path in files:
        assert load_problem(path.read_text()).name
        assert f"`{path.name}`" in text


def test_a_taken_port_is_replaced_by_a_free_one() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        wish = taken.getsockname()[1]
        assert free_port(wish) != wish


def test_the_quickstart_trains_then_waits_and_stops_cleanly_on_ctrl_c(tmp_path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as output:
        running = subprocess.Popen(
            [sys.executable, "examples/quickstart.py", "--time-limit", "1"],
            cwd=ROOT,
            stdout=output,
            stderr=output,
            env={**os.environ, "PYTHONUNBUFFERED": "1", "NO_COLOR": "1"},
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + 200
        while "Ctrl-C stops it" not in log.read_text() and time.monotonic() < deadline:
            assert running.poll() is None, log.read_text()
            time.sleep(0.2)
        assert "Ctrl-C stops it" in log.read_text(), log.read_text()
        running.send_signal(signal.SIGINT)
        assert running.wait(timeout=120) == 0, log.read_text()
    finally:
        running.kill()
        running.wait()
    text = log.read_text()
    assert text.rstrip().endswith("the service is stopped")
    for word in ("proven bound", "gap", "bubble", "peak memory gpu0", "1F1B", "too much"):
        assert word in text
    port = re.search(r"the service is at http://127\.0\.0\.1:(\d+)", text)
    assert port is not None
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", int(port[1]))) != 0
