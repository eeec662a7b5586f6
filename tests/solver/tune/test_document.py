"""A question and a row as JSON values: they come back, and a search goes on from what was found."""

import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from optpipe.errors import InputError
from optpipe.planning import megatron_arguments
from optpipe.planning.shape import Lora
from optpipe.requests import CurrentRun, TuneRequest
from optpipe_solver.tune import (
    TuneResult,
    TuneRow,
    checkpoint_of,
    judge,
    read_checkpoint,
    read_row,
    tune,
)
from optpipe_solver.tune.bounds import LayerTable
from optpipe_solver.tune.document import (
    AskedTune,
    current_configuration,
    read_current,
    read_question,
)
from optpipe_solver.tune.judge import ConfigurationJudge

ASKED: dict[str, Any] = {
    "model": "llama3-8b",
    "gpu": "h100",
    "num_gpus": 8,
    "global_batch": 16,
    "framework": "megatron",
    "fixed": {"tp": 4, "pp": 2, "chunks": 1, "micro_batch": 1},
    "current": {"tp": 2, "pp": 2, "chunks": 2, "recompute": ["layernorm"]},
}


def ask(values: dict[str, Any]) -> AskedTune:
    """What a request with these values asks; those that are None are left out."""
    given = {name: value for name, value in values.items() if value is not None}
    return read_question(TuneRequest.parse(given))


def test_a_row_comes_back_and_a_search_that_starts_from_it_ends_with_no_worse() -> None:
    """It finds nothing better, says so, and still has the row."""
    read = ask(ASKED)
    found: list[TuneResult] = []
    result = tune(read.question, time_limit_s=60.0, on_result=found.append)
    row = found[-1].rows[0]
    assert row == result.best
    again = read_row(
        read.question, json.loads(json.dumps(row.as_json())), row.problem, row.programs
    )
    cut = replace(again.configuration.pipeline, layout=row.configuration.pipeline.layout)
    assert replace(again, configuration=replace(again.configuration, pipeline=cut)) == row
    faster = replace(again, step_ms=0.9 * row.step_ms)
    results: list[TuneResult] = []
    second = tune(read.question, start=faster, time_limit_s=60.0, on_result=results.append)
    assert {one.best for one in (second, *results)} == {faster}


def test_a_pipeline_of_two_kinds_comes_back_and_is_pasted_with_its_own_cut() -> None:
    """The faster kind has more layers, whoever comes first; what runs today stands as was said."""
    fixed = {"tp": 2, "cp": 1, "micro_batch": 1, "chunks": 1}
    today = {"tp": 2, "pp": 4}
    read = ask({**ASKED, "gpu": "a100:4,h100:4", "current": today, "fixed": fixed})
    result = tune(read.question, current=read.current, time_limit_s=60.0)
    assert result.current is not None
    assert result.current.as_json()["gpus"] == ["a100", "a100", "h100", "h100"]
    assert result.best is not None
    assert result.gap is not None
    assert result.gap < 0.01
    orders = {tuple(row.as_json()["gpus"]) for row in result.rows}
    assert {("a100", "h100"), ("h100", "a100")} <= orders
    known = read_checkpoint(read.question, checkpoint_of(result))
    assert known is not None
    rows = {row.as_json()["id"] for row in result.rows[:11]}
    assert rows <= {row.as_json()["id"] for row in known.rows}
    for row in known.rows:
        kinds, sizes = row.configuration.kinds, row.configuration.sizes
        if row.method == "1f1b" and len(kinds) == len(sizes) == 2:
            assert (kinds[0].name == "h100") == (sizes[0] > sizes[1])
    layout = megatron_arguments(known.rows[0].configuration)
    assert "--pipeline-model-parallel-layout" in layout


def test_a_search_that_was_killed_computes_no_known_bound_again(monkeypatch) -> None:
    """Nobody is looked at as closely twice, and the end is the same."""
    read = ask({**ASKED, "fixed": {"tp": 2}})
    seen: Counter[tuple[str, str]] = Counter()

    def watch(owner: type, name: str, key: Callable[..., object]) -> None:
        method = getattr(owner, name)

        def watched(self: Any, *args: Any, **more: Any) -> Any:
            seen[name, repr((key(self, *args), more))] += 1
            return method(self, *args, **more)

        monkeypatch.setattr(owner, name, watched)

    watch(LayerTable, "packed_ms", lambda _, candidate: candidate)
    for name in ("simulated", "by_cut", "planned"):
        watch(ConfigurationJudge, name, lambda judged, *_: (judged.training, judged.cut.chunks))
    kept: list[tuple[str, Counter[tuple[str, str]]]] = []

    def note(result: TuneResult) -> None:
        kept.append((checkpoint_of(result), seen.copy()))

    result = tune(read.question, current=read.current, time_limit_s=60.0, on_result=note)
    note(result)
    assert result.best is not None
    whole = seen.copy()
    for text, before in (kept[len(kept) // 2], kept[-1]):
        seen.clear()
        known = read_checkpoint(read.question, text)
        assert known is not None
        said: list[str] = []
        again = tune(
            read.question,
            current=read.current,
            known=known,
            time_limit_s=60.0,
            on_progress=said.append,
        )
        assert said[0] == f"goes on: {len(known.looks.found):,} configurations were looked at"
        assert not set(seen) & {key for key in before if key[0] != "by_families"}
        assert seen.total() < whole.total()
        assert again.best is not None
        assert again.best.step_ms <= result.best.step_ms * (1 + 1e-9)
        assert again.counts.total == result.counts.total
    assert not seen, "all of it was known"
    assert again.certificate == result.certificate
    assert read_checkpoint(read.question, text.replace('"version": 11', '"version": 7')) is None


@pytest.mark.extended
def test_a_killed_search_with_a_work_limit_ends_with_the_answer_of_one_that_was_not(
    monkeypatch,
) -> None:
    """Wherever it was killed: best rows, bound, counts, looks and work, to the last digit."""
    module = sys.modules[TuneResult.__module__]
    monkeypatch.setattr(module, "_TELL_EVERY_S", 0.0)
    monkeypatch.setattr(module, "_TELL_SHARE", 0.0)
    read = ask({**ASKED, "fixed": {"tp": 2, "micro_batch": 1}})
    kept: list[str] = []

    def answer(**more: Any) -> tuple[Any, ...]:
        result = tune(
            read.question, current=read.current, time_limit_s=300.0, work_limit=1.0, gap=0.0,
            **more,
        )  # fmt: skip
        assert result.stopped_by == "work_limit"
        said = {name: value for name, value in result.as_json().items() if name != "seconds"}
        said["rows"] = said["rows"][:11]
        return json.dumps(said), result.looks, result.work

    whole = answer(on_result=lambda result: kept.append(checkpoint_of(result)))
    looks = list(dict.fromkeys(kept))
    assert len(looks) > 6
    for text in (looks[0], looks[len(looks) // 2], looks[-1]):
        assert answer(known=read_checkpoint(read.question, text)) == whole


def test_what_is_run_today_is_read_with_its_chunks_and_comes_back() -> None:
    """Interleaved: two chunks stand round and round; dp is what the GPUs leave."""
    read = ask(ASKED)
    assert read.current is not None
    assert read.current.training.dp == 2
    row = judge(read.question, read.current)
    assert row is not None
    again = read_row(read.question, row.as_json(), row.problem, row.programs)
    assert again.configuration.pipeline.placement == "loop"
    assert again.as_json() == row.as_json()
    assert again.label == row.label == "TP 2 PP 2 VPP 2 DP 2 MBS 1 recompute layernorm"


def test_what_to_change_is_a_difference_of_two_rows() -> None:
    """Degrees with both values, switches that go on and off, layers of equally many stages."""
    question = ask(ASKED).question

    def row(**fields: Any) -> TuneRow:
        found = judge(question, current_configuration(question, CurrentRun(**fields)))
        assert found is not None
        return found

    plain = row(tp=2, pp=2, chunks=2, recompute=["layernorm"])
    other = row(tp=1, pp=2, micro_batch=2, recompute=["mlp"])
    assert replace(other, method="zb-v").changes_from(replace(plain, method="1f1b")) == (
        "TP 2 → 1", "VPP 2 → 1", "DP 2 → 4", "MBS 1 → 2",
        "+ recompute mlp", "- recompute layernorm", "schedule 1f1b → zb-v",
    )  # fmt: skip
    assert plain.changes_from(plain) == ()
    cut = row(tp=2, pp=2, layers=[18, 16])
    moved = replace(row(tp=2, pp=2, layers=[17, 17]), method=cut.method)
    assert moved.changes_from(cut) == ("layers 18,16 → 17,17",)
    even = replace(row(tp=2, pp=4), method=cut.method)
    uneven = ("PP 2 → 4", "DP 2 → 1", "layers Et*17|t*15L → even")
    assert even.changes_from(cut) == uneven
    assert even.changes_from(moved) == ("PP 2 → 4", "DP 2 → 1")
    sizes = [4, 5, 3, 4, 5, 4, 5, 4]
    long = replace(row(tp=1, pp=8, layers=sizes), method=cut.method)
    assert long.changes_from(moved)[-1] == "layers even → 3 to 5 per stage"
    flat = replace(row(tp=2, pp=1), method=cut.method)
    assert flat.changes_from(cut) == ("PP 2 → 1", "DP 2 → 4")


def test_a_measured_step_calibrates_every_time() -> None:
    """Twice as slow as estimated: every step is."""
    plain = ask(ASKED)
    assert plain.current is not None
    before = judge(plain.question, plain.current)
    assert before is not None
    factor = ask({**ASKED, "measured_step_s": 1.0}).question.time_factor
    read = ask({**ASKED, "measured_step_s": 2.0 / factor})
    assert read.question.time_factor == pytest.approx(2.0)
    assert read.current is not None
    after = judge(read.question, read.current)
    assert after is not None
    assert after.step_ms == pytest.approx(2.0 * before.step_ms, rel=1e-3)
    uneven = {**ASKED, "current": {**ASKED["current"], "layers": [4, 4, 4, 22]}}
    read = ask({**uneven, "measured_step_s": 2.0})
    assert read.current is not None
    cut = judge(read.question, read.current)
    assert cut is not None
    assert cut.step_ms == pytest.approx(2000, rel=0.1)


@pytest.mark.parametrize(
    ("changes", "pointer"),
    [
        ({"sequence": 4097, "current": {"tp": 8}}, "/sequence"),
        ({"current": {"tp": 8, "ep": 3}}, "/current/ep"),
        ({"num_gpus": 7, "fixed": {"tp": 2}}, "/num_gpus"),
        ({"measured_step_s": 1.0, "current": None}, "/measured_step_s"),
        ({"model": None, "config": {"model_type": "bert"}}, "/config"),
    ],
)
def test_what_cannot_be_asked_is_refused_at_its_field(
    changes: dict[str, Any], pointer: str
) -> None:
    with pytest.raises(InputError) as caught:
        ask({**ASKED, "fixed": {}, **changes})
    assert caught.value.pointers == (pointer,)


@pytest.mark.parametrize(("model", "num_mtp"), [("deepseek-v3", 0), ("deepseek-v3-mtp", 1)])
def test_a_run_with_other_multi_token_prediction_is_not_compared(model: str, num_mtp: int) -> None:
    text = "--micro-batch-size 1 --pipeline-model-parallel-size 8 "
    text += "--decoder-first-pipeline-num-layers 7 --decoder-last-pipeline-num-layers 6 "
    text += "--mtp-num-layers "
    fields = {"model": model, "gpu": "h200", "num_gpus": 64, "global_batch": 64, "framework": "any"}
    question = ask({**fields, "fixed": {"pp": 8}}).question
    assert read_current(question, f"{text}{num_mtp}").shape == question.shape
    with pytest.raises(InputError, match=f"trains {1 - num_mtp} modules of multi-token prediction"):
        read_current(question, f"{text}{1 - num_mtp}")


# A script that says everything.

SCRIPT = (
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 "
    "--group-query-attention --num-query-groups 8 --swiglu --vocab-size 128256 "
    "--untie-embeddings-and-output-weights "
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 --micro-batch-size 1 "
    "--global-batch-size 32 --seq-length 8192 --bf16 --use-distributed-optimizer "
    "--use-precision-aware-optimizer --exp-avg-dtype bf16 --sequence-parallel --fp8-param-gather"
)
OF_SCRIPT: dict[str, Any] = {"gpu": "h100", "num_gpus": 8, "framework": "megatron"}


def test_a_script_gives_model_batch_sequence_precision_and_optimizer() -> None:
    read = ask({**OF_SCRIPT, "current_file": SCRIPT})
    question = read.question
    assert (question.shape.name, question.global_batch) == ("llama3-8b", 32)
    training = question.training
    assert (training.sequence, training.precision, training.overlap) == (8192, "bf16", False)
    assert (training.optimizer.precision_aware, training.optimizer.exp_avg) == (True, "bf16")
    assert read.current is not None
    assert read.current.not_modelled == ("fp8_param_gather (time and memory)",)


def test_what_is_pasted_for_any_row_has_the_settings_of_todays_script() -> None:
    text = f"{SCRIPT} --rotary-base 1000000 --normalization LayerNorm --lr 1e-4"
    read = ask({**OF_SCRIPT, "current_file": text})
    settings = read.question.shape.settings
    assert settings.values["rotary_base"] == 1000000
    assert settings.values["normalization"] == "LayerNorm"
    assert "--lr" in settings.notes[-1]


def test_what_the_caller_gives_overrides_the_script_where_that_can_be_compared() -> None:
    read = ask({**OF_SCRIPT, "current_file": SCRIPT, "overlap": True, "exp_avg_dtype": "fp32"})
    assert read.question.training.overlap
    assert read.question.training.optimizer.exp_avg == "fp32"
    with pytest.raises(InputError, match="a step of it is 32 sequences of 8,192 tokens"):
        ask({**OF_SCRIPT, "current_file": SCRIPT, "global_batch": 64})


def test_fine_tuning_is_that_of_the_question_in_the_script_too() -> None:
    """Neither LoRA nor lengths are in a script, so that its run and the search train the same."""
    given = {"lora_rank": 8, "lora_targets": ["linear_qkv"], "packed_lengths": [8000, 192]}
    read = ask({**OF_SCRIPT, **given, "current_file": SCRIPT})
    assert read.current is not None
    for training in (read.question.training, read.current.training):
        assert training.lora == Lora(rank=8, targets=frozenset({"linear_qkv"}))
        assert (training.sequence, training.lengths) == (8192, (8000, 192))
    assert read.question.fixed["slices"] == 1
    with pytest.raises(InputError, match="'llama3-8b' has no such matrices"):
        ask({**ASKED, "lora_rank": 8, "lora_targets": ["linear_q_proj"]})


def test_a_question_without_fine_tuning_is_the_same_as_before() -> None:
    """So that answers that are kept are found."""
    fields = TuneRequest.parse(ASKED).question()
    assert not {"lora_rank", "lora_targets", "packed_lengths"} & fields.keys()


def test_a_script_of_a_model_that_the_catalogue_does_not_have_makes_a_config() -> None:
    text = SCRIPT.replace("--ffn-hidden-size 14336", "--ffn-hidden-size 12288")
    text = text.replace("--untie-embeddings-and-output-weights", "")
    shape = ask({**OF_SCRIPT, "current_file": text}).question.shape
    assert (shape.ffn, shape.num_kv_heads, shape.tied) == (12288, 8, True)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (
            "--num-layers 32 --hidden-size 4096",
            "gpt3-6.7b, mpt-7b, po-5.8b; give model, such as --model gpt3-6.7b",
        ),
        ("--tensor-model-parallel-size 2", "does not say which model it trains"),
        ("--num-layers 9 --hidden-size 64 --num-experts 8", "of no model of the catalogue"),
    ],
)
def test_a_script_that_does_not_name_its_model_is_refused(text: str, named: str) -> None:
    with pytest.raises(InputError, match=named):
        ask({**OF_SCRIPT, "current_file": text})
