"""``optpipe compare``: one table in three forms, progress beside it, and a clean end by Ctrl-C."""

import json
import os
import signal
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from optpipe import dump_problem, load_csv
from optpipe_solver.compare import AS_GIVEN, ComparisonRow, Workload
from tests.plot.conftest import make_small_problem

WIDTH = 100


@pytest.fixture
def run(optpipe, monkeypatch, tmp_path: Path):
    """Run ``optpipe compare`` on the small problem, on a terminal of 100 columns."""
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    path = tmp_path / "problem.json"
    path.write_text(dump_problem(make_small_problem()))
    return partial(optpipe, "compare", path)


@pytest.fixture
def comparing(monkeypatch):
    """Let another function compare."""
    # By module: the package's attribute of this name is the function.
    return partial(monkeypatch.setattr, sys.modules["optpipe_solver.compare"], "compare")


@pytest.fixture
def answering(comparing):
    """Replace the comparison itself; the options it was called with are in the returned dict."""

    def answering(rows: list[ComparisonRow]) -> dict[str, Any]:
        called: dict[str, Any] = {}

        def compare(_problem: object, **options: Any) -> list[ComparisonRow]:
            called.update(options)
            return rows

        comparing(compare)
        return called

    return answering


def absent(method: str, reason: str) -> ComparisonRow:
    return ComparisonRow(
        method=method,
        placement=AS_GIVEN,
        problem=make_small_problem(),
        programs=None,
        seconds=0.0,
        reason=reason,
    )


def row(method: str, **changes: Any) -> ComparisonRow:
    """A row with a schedule; numbers as wide as they get."""
    full = replace(
        absent(method, ""),
        programs=load_csv("0F0\n1F0\n"),
        seconds=12.5,
        makespan_ms=12345.67,
        span_ms=12345.67,
        makespan_bubble=0.456,
        span_bubble=0.456,
        p50_ms=12345.67,
        p95_ms=12345.67,
        peak_bytes=80 * 1024**3,
        host_peak_bytes=512 * 1024**3,
    )
    return replace(full, **changes)


def test_table_keeps_the_order_and_says_what_does_not_fit_and_why_not(run, answering) -> None:
    answering([
        row("zz-best"),
        row("aa-big", over_limit=True),
        absent("zb-v", "needs [a V]"),
        absent("v-min", "needs [a V]"),
    ])  # fmt: skip
    done = run()
    assert done.code == 0
    lines = done.out.splitlines()
    table = [line.split() for line in lines]
    head, units = table[:2]
    assert " ".join(head) == "method makespan bubble span bubble P50 P95 memory host took limit"
    assert " ".join(units) == "ms % ms % ms ms GiB GiB s"
    numbers = "12,345.7 45.6 12,345.7 45.6 12,345.7 12,345.7 80.0 512.0 12.50"
    assert " ".join(table[2]) == f"zz-best {numbers} fits"
    assert (table[3][0], table[3][-1]) == ("aa-big", "over")
    assert lines[-2:] == ["not applicable here:", "  zb-v, v-min: needs [a V]"]
    assert "P50, P95: step time when every duration varies by +-10%" in done.out


def test_the_widest_table_is_wider_than_100_columns_before_it_is_cut(
    run, answering, monkeypatch
) -> None:
    """A narrow terminal or a pipe has 100 columns, too."""
    wide = row("interleaved-1f1b+offload", placement="loop x2", tokens_per_s=1234567.0, mfu=0.456)
    answering([wide, row("b", over_limit=True, tokens_per_s=1.0, mfu=0.1)])
    monkeypatch.setenv("COLUMNS", "80")
    out = run().out
    assert WIDTH < max(map(len, out.splitlines())) <= WIDTH + 14
    assert "…" not in out
    for cell in ("interleaved", "offload", "loop", "1,234,567", "12,345.7", "512.0", "over"):
        assert cell in out


def test_markdown_is_a_table_and_nothing_else(run, answering) -> None:
    answering([row("a", placement="v x2"), absent("zb-v", "needs [a V]")])
    lines = run("--markdown").out.splitlines()
    assert [line.split(" | ")[0] for line in lines] == ["| method", "| ---", "| a", "| zb-v"]
    assert "| a | v x2 |" in lines[2]
    assert lines[3].endswith("| needs [a V] |")


def test_an_infeasible_problem_is_exit_code_3(run, tmp_path: Path) -> None:
    """As solve: with the smallest memory that works; 4 where nothing was found, 0 with a row."""
    (tmp_path / "problem.json").write_text(dump_problem(make_small_problem(1)))
    done = run("--time-limit", 1, "--json")
    assert done.code == 3
    assert "devices[0].memory_bytes must be at least" in done.err
    assert all(found["programs"] is None or found["over_limit"] for found in json.loads(done.out))


def test_nothing_that_fits_is_exit_code_4(run, answering) -> None:
    """Over the limit, or of a copy, is not a schedule of this problem."""
    answering([row("a", over_limit=True), row("b", placement="v x2"), absent("c", "no")])
    assert run().code == 4
    answering([row("a")])
    assert run().code == 0


def test_rows_of_a_copy_are_said_to_solve_another_problem(run, answering) -> None:
    answering([row("optpipe"), row("optpipe", placement="v x2")])
    assert "solve another problem" in run().out
    answering([row("optpipe")])
    assert "another problem" not in run().out


def test_workload_gives_tokens_and_mfu(run, answering) -> None:
    called = answering([row("a", tokens_per_s=2048.4, mfu=0.417)])
    options = ("--tokens-per-microbatch", 4096, "--tflop-per-microbatch", 2, "--peak-tflops", 40)
    cells = run(*options, "--seed", 3, "--threads", 2).out.splitlines()[2].split()
    assert cells[-3:-1] == ["2,048", "41.7"]
    assert called["workload"] == Workload(
        tokens_per_microbatch=4096, flops_per_microbatch=2e12, peak_flops_per_s=4e13
    )
    assert (called["seed"], called["threads"]) == (3, 2)
    assert 10 <= called["time_limit_s"] <= 20


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--json", "--markdown"), "exclude each other"),
        (("--peak-tflops", 3), "give both or none"),
        (("--tflop-per-microbatch", 3), "give both or none"),
        (("--tokens-per-microbatch", 0), "--tokens-per-microbatch 0.0: must be > 0"),
        (("--tokens-per-microbatch", "nan"), "'nan' must be a number"),
        (
            ("--tflop-per-microbatch", 1, "--peak-tflops", "inf"),
            "--peak-tflops inf: must be finite",
        ),
    ],
)
def test_options_that_make_no_sense_are_exit_code_2(run, answering, options, message: str) -> None:
    answering([row("a")])
    done = run(*options)
    assert (done.code, done.out) == (2, "")
    assert message in done.err


def test_a_terminal_sees_the_newest_row_while_it_runs(run, comparing, monkeypatch) -> None:
    """The line is redrawn on stderr and taken away in the end; stdout has the table alone."""
    monkeypatch.setenv("FORCE_COLOR", "1")

    def compare(_problem: object, *, on_row: Any, **_: object) -> list[ComparisonRow]:
        on_row(row("a", placement="[v] x2"))
        time.sleep(0.3)
        return [row("a")]

    comparing(compare)
    done = run("--markdown")
    assert "comparing every method; the optimiser takes up to 20 s; done: a ([v] x2)" in done.err
    assert done.out.startswith("| method")


def test_ctrl_c_prints_what_there_is_and_leaves_with_130(run, comparing) -> None:
    """The comparison is asked to stop, not torn down; `timeout` sends two signals at once."""

    def compare(_problem: object, *, should_stop: Any, **_: object) -> list[ComparisonRow]:
        assert not should_stop()
        for _signal in range(2):
            os.kill(os.getpid(), signal.SIGINT)
        assert should_stop()
        return [row("first")]

    comparing(compare)
    done = run()
    assert done.code == 130
    assert done.out.splitlines()[2].startswith("first")
    assert "methods that were not reached are missing" in done.err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_ctrl_c_leaves_at_once_without_a_stack_trace(run, comparing) -> None:
    def compare(*_: object, **__: object) -> list[ComparisonRow]:
        for _attempt in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1.1)
        raise AssertionError("the second one should have ended it")

    comparing(compare)
    done = run()
    assert (done.code, done.out) == (130, "")
    assert "Traceback" not in done.err
