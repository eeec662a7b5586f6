"""Intervals cover as many runs of models that were left out as they claim, and so do gains."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import combinations
from math import log
from typing import TYPE_CHECKING

import pytest

from benchmarks.errors import (
    ERRORS_FILE,
    ErrorRow,
    coverage,
    error_classes,
    error_row,
    find_level,
    pair_errors,
    read_scores,
    traced_error,
)
from benchmarks.scoreboard import FILES, published, read_run, stored_fit
from benchmarks.traced_runs import stored_rows
from optpipe.errors import InputError
from optpipe.planning import Training, find_gpu, find_model, shape_of_trace
from optpipe.planning.accuracy import (
    ERRORS,
    MIN_MODELS,
    MIN_ROWS,
    Accuracy,
    class_names,
    find_accuracy,
)
from optpipe.planning.shape import Lora
from tests.planning.traces import traced_like

if TYPE_CHECKING:
    from benchmarks.scoreboard import Score

H100, LLAMA, QWEN = find_gpu("h100"), find_model("llama3-8b"), find_model("qwen3-30b-a3b")
STORED = json.loads(ERRORS_FILE.read_text("utf-8"))


@pytest.fixture(scope="module")
def timed() -> list[Score]:
    """Every published row that has a time, estimated without its model."""
    return [score for score in read_scores(stored_fit())[0] if score.time_error is not None]


@pytest.fixture(scope="module")
def rows(timed) -> list[ErrorRow]:
    """Their errors."""
    return [error_row(score) for score in timed]


def accuracy(shape=LLAMA, gpu=H100, **training) -> Accuracy:
    """The errors of a configuration's class."""
    found = find_accuracy(shape, [gpu], Training(**training))
    assert found is not None
    return found


def test_intervals_cover_80_percent_of_the_rows_of_models_that_they_have_not_seen(rows) -> None:
    """523 of 649; each kind too. Intervals are made again without each model."""
    covered = coverage(rows, STORED["level"])
    assert covered["all"] == (523, 649)
    for inside, total in covered.values():
        assert 0.75 <= inside / total <= 0.85


def test_quantiles_at_10_and_90_percent_would_cover_too_few(rows) -> None:
    """Rows of a model are alike, so that the level must be higher; no higher than needed."""
    assert find_level(rows) == STORED["level"]
    inside, total = coverage(rows, 0.8)["all"]
    assert inside / total < 0.76


def test_the_stored_errors_are_those_of_the_rows(rows) -> None:
    """Classes and pairs, to the last digit that is stored."""
    traced = [traced_error(row) for row in stored_rows()]
    assert error_classes([*rows, *traced], STORED["level"]) == STORED["classes"]
    assert {row.generation for row in traced} == set(STORED["traced_generations"])
    assert pair_errors(rows) == STORED["pairs"]
    assert {row.generation for row in rows} == set(STORED["generations"])


def test_at_least_three_quarters_of_all_published_rows_are_stated(timed) -> None:
    """661 of 876, and 516 of the 654 of 2026; the others are refused with a reason."""
    stated = {}
    for file in FILES:
        runs = published(file)
        stated[file.stem] = (sum(_is_stated(row) for row in runs), len(runs))
    assert stated["runs_2026"] == (516, 654)
    parts = list(stated.values())
    assert (sum(part[0] for part in parts), sum(part[1] for part in parts)) == (661, 876)
    assert len(timed) == 649


def _is_stated(row) -> bool:
    try:
        run = read_run(row)
        run.estimated(run.hardware.efficiency)
    except InputError:
        return False
    return True


def test_gains_are_as_probable_as_is_said(timed) -> None:
    """Pairs of one model and GPU: 934 gains above 95%, 93% of them real; 84% of 819 below."""
    groups = defaultdict(list)
    for score in timed:
        groups[error_row(score).pair].append(score)
    said: Counter[bool] = Counter()
    right: Counter[bool] = Counter()
    for group in groups.values():
        for one, other in combinations(group, 2):
            slow, fast = sorted((one, other), key=lambda s: s.estimate.tokens_per_s_per_gpu)
            rates = [score.estimate.tokens_per_s_per_gpu for score in (slow, fast)]
            run = fast.run
            found = find_accuracy(run.shape, [run.hardware], run.training)
            assert found is not None
            chance = found.gain_probability(1 / rates[0], 1 / rates[1])
            if chance >= 0.8:
                is_sure = chance >= 0.95
                said[is_sure] += 1
                measured = (slow.run.tokens_per_s_per_gpu, fast.run.tokens_per_s_per_gpu)
                right[is_sure] += measured[0] < measured[1]
    assert right[True] / said[True] > 0.92
    assert 0.8 < right[False] / said[False] < 0.9


def test_a_class_is_of_kind_kernels_generation_and_products() -> None:
    """The narrowest first; a wider one where it has fewer runs or models."""
    assert class_names(LLAMA, H100, Training(kernels="torch")) == (
        "dense, PyTorch, hopper, wide products", "dense, PyTorch, hopper", "dense, PyTorch",
        "dense", "all",
    )  # fmt: skip
    assert (
        class_names(QWEN, H100, Training(precision="fp8"))[0] == "experts, hopper, narrow products"
    )
    assert class_names(LLAMA, H100, Training(lora=Lora()))[-2] == "fine-tuning"
    assert all(one.num_rows >= MIN_ROWS and one.num_models >= MIN_MODELS for one in ERRORS.values())
    narrow = accuracy(QWEN, find_gpu("a100"))
    assert (narrow.wanted, narrow.error.name) == ("experts, ampere, wide products", "experts")
    assert "'experts, ampere, wide products' has fewer than 10 published runs" in narrow.text(1e3)
    assert "fewer than" not in accuracy().text(1e3)
    assert find_accuracy(LLAMA, [find_gpu("mi300x")], Training()) is None
    assert find_accuracy(LLAMA, [H100, find_gpu("h200")], Training()) is not None
    assert find_accuracy(LLAMA, [H100, find_gpu("a100")], Training()) is None


def test_traces_of_dense_models_have_an_interval_and_those_with_experts_have_none() -> None:
    """It would cover one of six rows with experts, whose traces are too slow."""
    covered = coverage([traced_error(row) for row in stored_rows()], STORED["level"])
    inside, total = covered["trace, dense"]
    assert inside / total > 0.75
    assert covered["trace, experts"] == (1, 6)
    dense, routed = (shape_of_trace(traced_like(one, Training())) for one in (LLAMA, QWEN))
    found = accuracy(dense)
    assert (found.wanted, found.error.name) == ("trace, dense", "trace")
    assert "'trace, dense' has fewer than 10 published runs" in found.text(1e3)
    assert find_accuracy(dense, [find_gpu("b200")], Training()) is None
    assert find_accuracy(dense, [H100], Training(lora=Lora())) is None
    assert find_accuracy(routed, [H100], Training()) is None


def test_an_interval_is_around_the_step_and_grows_with_it() -> None:
    """Both ends are multiples of the step; the sentence has them in seconds."""
    found = accuracy(precision="fp8")
    low, high = found.interval_ms(9_800.0)
    assert low < 9_800 < high
    assert found.interval_ms(19_600.0) == pytest.approx((2 * low, 2 * high))
    assert found.text(9_800.0).startswith(f"80% between {low / 1e3:.3g} and {high / 1e3:.3g} s")
    fields = found.as_json(9_800.0)
    assert (fields["low"] * 9_800, fields["high"] * 9_800) == pytest.approx((low, high))
    assert found.as_json(None)["text"] == ""


def test_a_measured_step_makes_the_interval_that_of_two_runs_of_one_model() -> None:
    """Narrower, as errors are mostly common to both runs, and around the step."""
    found = accuracy(QWEN, precision="fp8")
    calibrated = replace(found, is_calibrated=True)
    low, high = calibrated.factors
    assert low < 1 < high
    assert high / low < found.factors[1] / found.factors[0]
    assert low * high == pytest.approx(1.0)
    assert "pairs of published runs" in calibrated.text(1e3)
    assert calibrated.warning == ""


def test_the_probability_of_a_gain_grows_with_it() -> None:
    """A half without a gain, and symmetric."""
    found = accuracy()
    assert found.gain_probability(100.0, 100.0) == 0.5
    chances = [found.gain_probability(100.0, best) for best in (99.0, 95.0, 80.0)]
    assert chances == sorted(chances)
    assert chances[0] < 0.6
    assert chances[2] > 0.95
    assert found.gain_probability(80.0, 100.0) == pytest.approx(1 - chances[2])
    assert accuracy(QWEN).gain_probability(100.0, 80.0) < chances[2]
    low, high = found.gain_interval(100.0, 80.0)
    assert low < 0.2 < high
    assert found.gain_probability(100.0, 100.0 * (0.8 / (1 - low))) == pytest.approx(0.9, rel=1e-4)
    assert found.advises_measuring(0.6)
    assert not found.advises_measuring(0.95)


def test_a_class_that_misses_its_aims_is_warned_of() -> None:
    """With both numbers; nothing is said where both aims are met."""
    warning = accuracy().warning
    error = ERRORS["dense, hopper, wide products"]
    assert f"median error {error.median:.1%} (we aim at 6%)" in warning
    assert f"worst error {error.worst:.1%} (we aim at 20%)" in warning
    good = replace(accuracy(), error=replace(error, median=0.05, worst=0.2))
    assert good.warning == ""
    assert log(accuracy().factors[0]) == pytest.approx(error.low)
