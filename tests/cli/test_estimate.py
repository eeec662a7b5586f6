"""``optpipe estimate``: what it prints and writes, and what it refuses."""

import io
import json
import re
from pathlib import Path

import pytest

from optpipe import load_problem, load_schedule
from optpipe.answers import EstimateView
from optpipe.formats.json import load_model
from optpipe.planning import GPUS, MODELS, Training, find_model
from tests.planning.test_catalogue import LLAMA3_8B
from tests.planning.traces import traced_like

LLAMA70 = ("--model", "llama3-70b", "--gpu", "h100", "--pp", 8, "--tp", 8,
           "--sequence", 8192, "--microbatches", 64)  # fmt: skip
SMALL = ("--model", "gpt3-125m", "--gpu", "rtx4090", "--pp", 2, "--sequence", 1024,
         "--microbatches", 4)  # fmt: skip


def test_the_problem_of_the_issue(optpipe, tmp_path) -> None:
    path = tmp_path / "problem.json"
    code, out, err = optpipe("estimate", *LLAMA70, "-o", path)
    assert code == 0, err
    problem = load_problem(path.read_text())
    assert (len(problem.stages), problem.num_microbatches) == (8, 64)
    assert problem.name == "llama3-70b-h100-pp8-tp8"
    assert "70.55 billion parameters" in out
    assert "of peak" in out
    assert "not measured" in out
    assert "problem written to" in err
    share = sum(stage.static_bytes for stage in problem.stages)
    assert share == pytest.approx(18 * 70_553_706_496 / 8, rel=0.01)


def test_a_link_that_bounds_the_step_is_said(optpipe) -> None:
    """Twelve ways of tensor parallelism leave a layer little to compute, and all of its output."""
    given = ("--model", "gpt3-125m", "--gpu", "rtx4090", "--pp", 12, "--tp", 12, "--mfu", 1,
             "--sequence", 1536, "--microbatches", 8)  # fmt: skip
    assert "warning" not in optpipe("estimate", *given).err
    _, _, err = optpipe("estimate", *given, "--no-sequence-parallel")
    assert "warning: link 0 -> 1 is busy for" in err
    assert err.count("the link bounds the step; cut or place the model otherwise") == 2
    assert "warning: so are 20 more links" in err


def test_slices_are_written_and_solved(optpipe, tmp_path) -> None:
    """Whole micro-batches of the same do not fit, whatever they recompute apart."""
    problem, schedule = tmp_path / "p.json", tmp_path / "s.json"
    command = ("estimate", "--model", "llama3-70b", "--gpu", "h100", "--pp", 8, "--tp", 8,
             "--sequence", 131_072, "--microbatches", 2)  # fmt: skip
    code, out, err = optpipe(*command, "--slices", 4, "-o", problem)
    assert code == 0, err
    assert "the stages are those of the first of 4 slices" in " ".join(out.split())
    assert "1F1B fits" not in out
    code, out, _ = optpipe("solve", problem, "--time-limit", 1, "-o", schedule)
    assert code == 0
    assert "1F1B" not in out  # whose backwards are first in, first out
    assert optpipe("check", problem, schedule).code == 0
    code, _, err = optpipe(*command, "--slices", 4, "--model-json", "-o", problem)
    assert code == 2
    assert "--slices 4 and --model-json" in err
    assert "--slices 0: must be >= 1" in optpipe(*command, "--slices", 0).err


def test_a_long_context_is_solved_by_its_menu_alone(optpipe, tmp_path) -> None:
    """128k tokens, no context parallelism; v1's keep, offload and recompute never fit."""
    problem, schedule = tmp_path / "p.json", tmp_path / "s.json"
    command = ("estimate", "--model", "llama3-70b", "--gpu", "h100", "--pp", 8, "--tp", 8,
             "--sequence", 131_072, "--microbatches", 16, "-o", problem)  # fmt: skip
    assert optpipe(*command).code == 0
    code, _, err = optpipe("solve", problem, "--time-limit", 1)
    assert code == 3
    assert "no schedule fits the memory limits (proven)" in err
    code, out, err = optpipe(*command, "--modes", 8)
    assert code == 0, err
    assert "recompute layers, offload" in out
    assert "With one mode per stage 1F1B fits: recompute layers (1); " in out
    code, _, err = optpipe("solve", problem, "--time-limit", 1, "-o", schedule)
    assert code == 0, err
    assert optpipe("check", problem, schedule).code == 0


def test_a_table_says_how_many_rows_it_leaves_out(optpipe) -> None:
    done = optpipe("estimate", "--model", "llama3-70b", "--gpu", "h100", "--pp", 81)
    assert done.code == 0, done.err
    assert "and 17 more stages" in done.out
    assert "and 17 more devices" in done.out


def test_what_it_writes_can_be_planned(optpipe, tmp_path) -> None:
    path = tmp_path / "model.json"
    code, _, err = optpipe("estimate", *SMALL, "--model-json", "-o", path)
    assert code == 0, err
    model = load_model(path.read_text())
    assert [layer.name for layer in model.layers] == ["embedding", "layer", "head"]
    assert model.num_layers == 14
    code, _, err = optpipe("plan", path, "--time-limit", 0.5, "--chunks", "1")
    assert code == 0, err
    assert all(found.hidden_ms == 0 for found in load_model(path.read_text()).layers)
    experts = ("--model", "qwen3-30b-a3b", "--gpu", "h100", "--pp", 4, "--ep", 8, "--dp", 8)
    assert optpipe("estimate", *experts, "--pairs", "--model-json", "-o", path).code == 0
    hidden = {one.name: one.hidden_ms for one in load_model(path.read_text()).layers}
    assert any(hidden.values())
    assert optpipe("estimate", *SMALL, "--modes", 8, "--model-json", "-o", path).code == 0
    assert "recompute layers" in {
        mode.name for mode in load_model(path.read_text()).layers[1].modes
    }
    code, _, err = optpipe("plan", path, "--time-limit", 0.5, "--chunks", "1")
    assert code == 0, err


def test_options_reach_the_problem(optpipe, tmp_path) -> None:
    path = tmp_path / "problem.json"
    code, out, err = optpipe(
        "estimate", *SMALL, "--memory-gb", 10, "--pcie-efficiency", 0.4, "--mfu", 0.25,
        "--chunks", 2, "--placement", "v", "-o", path,
    )  # fmt: skip
    assert code == 0, err
    problem = load_problem(path.read_text())
    assert problem.placement == (0, 1, 1, 0)
    device = problem.devices[0]
    assert device.memory_bytes == 10_000_000_000
    assert device.d2h_gb_per_s == 12.6
    assert "compute at 25" in out


def test_nvidias_recipe_of_qwen3_is_typed_in(optpipe, tmp_path) -> None:
    """256 GPUs from their number alone; step, error of its class, causes, memory by kind."""
    path = tmp_path / "problem.json"
    code, out, err = optpipe(
        "estimate", "--model", "qwen3-235b-a22b", "--gpu", "h100:256", "--tp", 2, "--pp", 8,
        "--chunks", 4, "--ep", 32, "--precision", "fp8", "--ep-overlap", "--layout", "even",
        "--microbatches", 128, "-o", path,
    )  # fmt: skip
    assert code == 0, err
    problem = load_problem(path.read_text())
    assert problem.context is not None
    assert problem.context.parallelism["dp"] == 16
    assert "tokens/s/GPU on 256 GPUs" in out
    accuracy = " ".join(out.split("accuracy: ")[1].split())
    assert re.match(r"80% between [\d.]+ and [\d.]+ s \(66 published runs of 7 models", accuracy)
    assert "The class 'experts, hopper, narrow products' has fewer than 10 published" in accuracy
    warning = "Estimates of the class 'experts, hopper' are less accurate than we want: worst error"
    assert warning in " ".join(out.split())
    assert "of it: experts" in out
    for kind in ("weights", "gradients", "optimizer", "activations", "buffers", "reserved"):
        assert kind in out


def test_a_measured_step_calibrates_and_its_factor_is_said(optpipe) -> None:
    """To be given to other configurations."""
    code, out, err = optpipe("estimate", *SMALL, "--measured-step-s", 1)
    assert code == 0, err
    assert "a step with 1F1B: 1.000 s" in out
    factor = out.split("--time-factor ")[1].split()[0]
    assert "accuracy" not in out
    code, out, err = optpipe("estimate", *SMALL, "--time-factor", factor)
    assert code == 0, err
    assert "a step with 1F1B: 1.000 s" in out
    command = ("estimate", "--model", "llama3-8b", "--gpu", "h100", "--pp", 4)
    _, out, _ = optpipe(*command, "--time-factor", 1.1)
    accuracy = " ".join(out.split("accuracy: ")[1].split())
    assert "pairs of published runs of one model on one GPU" in accuracy
    assert "are less accurate than we want" not in out


def test_two_kinds_of_accelerators(optpipe, tmp_path) -> None:
    """Each a part of the pipeline, as many ranks as its number makes."""
    path = tmp_path / "problem.json"
    code, out, err = optpipe(
        "estimate", "--model", "llama3-8b", "--gpu", "h100:4", "--gpu", "a100-40gb:4", "--pp", 4,
        "--tp", 2, "--network", "ethernet:100", "-o", path,
    )  # fmt: skip
    assert code == 0, err
    sizes = [device.memory_bytes for device in load_problem(path.read_text()).devices]
    assert sizes[0] == sizes[1] > sizes[2] == sizes[3]
    assert "accuracy: not known" in out


def test_lengths_make_unequal_micro_batches(optpipe, tmp_path) -> None:
    """A step of each, alone, is what its costs say; a group has the largest of its numbers."""
    lengths, path = tmp_path / "batch.json", tmp_path / "problem.json"
    batch = [8192, [8000, 192], [2048] * 4, 16_384, [192, 8000]]
    lengths.write_text(json.dumps(batch))
    command = ("estimate", "--model", "llama3-8b", "--gpu", "h100", "--pp", 2)
    code, out, err = optpipe(*command, "--lengths", lengths, "--costs", 4, "-o", path)
    assert code == 0, err
    assert "unequal micro-batches: 1 of " in out
    whole = load_problem(path.read_text())
    assert whole.context is not None
    assert whole.context.tokens_per_microbatch == round((4 * 8192 + 16_384) / 5)
    ids = whole.cost_of
    assert (whole.num_costs, len(set(ids)), ids[1] == ids[4]) == (4, 4, True)
    for at in (0, 3):
        assert optpipe(*command, "--sequence", batch[at], "-o", tmp_path / "one.json").code == 0
        alone = load_problem((tmp_path / "one.json").read_text())
        if whole.stages[0].layers == alone.stages[0].layers:
            of_cost = list(whole.stages_by_cost[ids[at]])
            assert [s.activation_bytes for s in of_cost] == [
                s.activation_bytes for s in alone.stages
            ]
            assert [s.forward_ms for s in of_cost] == [s.forward_ms for s in alone.stages]
    work = [sum(s.busy_ms for s in whole.stages_by_cost[ids[at]]) for at in (2, 1, 0, 3)]
    assert work == sorted(set(work))
    assert optpipe(*command, "--lengths", lengths, "--costs", 2, "-o", path).code == 0
    fewer = load_problem(path.read_text())
    assert fewer.num_costs == 2
    for j, s in ((j, s) for j in range(5) for s in range(2)):
        rounded, own = fewer.stage_of(s, j), whole.stage_of(s, j)
        assert rounded.busy_ms >= own.busy_ms
        assert rounded.activation_bytes >= own.activation_bytes


@pytest.mark.parametrize(
    ("batch", "arguments", "named"),
    [
        ("[8192]", ("--sequence", 8192), "--sequence and --lengths"),
        ("[8192]", ("--microbatches", 1), "--microbatches and --lengths"),
        ("[8192]", ("--model-json",), "--lengths and --model-json"),
        ("[8192]", ("--modes", 4), "--modes beside --lengths: menus"),
        ("[8192]", ("--pairs",), "--pairs beside --lengths: no problem"),
        ("[8192]", ("--measured-step-s", 3), "--measured-step-s beside --lengths"),
        ("[8192, []]", (), "--lengths [1]: must have at least 1 items, and has 0"),
        ("[[10, 0]]", (), "--lengths [0][1]=0: must be >= 1"),
        ("[8.5]", (), "batch.json: must be a list with an entry for each micro-batch"),
        (None, ("--costs", 3), "add --lengths FILE"),
    ],
)
def test_lengths_that_say_nothing_are_refused(optpipe, tmp_path, batch, arguments, named) -> None:
    lengths = tmp_path / "batch.json"
    lengths.write_text(batch or "")
    given = () if batch is None else ("--lengths", lengths)
    code, _, err = optpipe("estimate", "--model", "llama3-8b", "--gpu", "h100", *given, *arguments)
    assert code == 2
    assert named in err


@pytest.mark.parametrize("file", ["my-llama/config.json", "c/my-llama.json"])
def test_a_config_is_read(optpipe, tmp_path, file) -> None:
    """And named by its folder, or where it has a name of its own by that."""
    (path := tmp_path / file).parent.mkdir()
    path.write_text(json.dumps(LLAMA3_8B))
    code, out, err = optpipe("estimate", "--config", path, "--gpu", "h100")
    assert code == 0, err
    assert "my-llama: 8.03 billion parameters" in out


def test_a_config_is_traced_if_asked_and_says_so(optpipe, tmp_path: Path) -> None:
    """Its parameters are those of the formula."""
    path = tmp_path / "tiny.json"
    tiny = LLAMA3_8B | {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6, "vocab_size": 256,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    }  # fmt: skip
    path.write_text(json.dumps(tiny))
    command = ("estimate", "--config", path, "--gpu", "h100", "--pp", 2, "--sequence", 128)
    code, out, err = optpipe(*command, "--from", "trace")
    assert code == 0, err
    assert "costs from a trace (traced: llama, transformers" in out
    assert "traced llama in" in err
    assert "Megatron-Core:" not in out
    code, by_formula, err = optpipe(*command)
    assert code == 0, err
    assert "costs from a formula (config.json, model_type llama)" in by_formula
    assert by_formula.splitlines()[0].split(",")[0] == out.splitlines()[0].split(",")[0]
    code, _, err = optpipe("estimate", "--config", path, "--gpu", "h1000", "--from", "trace")
    assert code == 2
    assert "h1000" in err
    assert "traced llama in" not in err


def test_a_file_with_a_trace_stands_instead_of_a_config(optpipe, tmp_path: Path) -> None:
    path = tmp_path / "traced-llama.json"
    path.write_text(traced_like(find_model("llama3.2-1b"), Training()).model_dump_json())
    code, out, err = optpipe("estimate", "--trace", path, "--gpu", "h100", "--pp", 2)
    assert code == 0, err
    assert "traced-llama: 1.24 billion parameters" in out
    path.write_text("[]")
    code, _, err = optpipe("estimate", "--trace", path, "--gpu", "h100")
    assert code == 2
    assert "must be a traced model" in err


def test_the_list_names_everything_with_sources(optpipe) -> None:
    code, out, _ = optpipe("estimate", "--list")
    assert code == 0
    for name in (*MODELS, *GPUS):
        assert name in out
    assert "arXiv 2401.10241" in out
    assert "data sheet" in out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--gpu", "h100"), "--model"),
        (("--model", "llama3-8b"), "--gpu: is missing"),
        ((*SMALL, "--gpu", "a100"), "with several kinds each needs its number"),
        ((*SMALL, "--gpu", "a100:x"), "--gpu a100:x"),
        (("--model", "llama3-8b", "--gpu", "h100:12", "--tp", 8, "--pp", 2), "12 GPUs are not"),
        ((*SMALL, "--network", "wifi"), "--network 'wifi'"),
        ((*SMALL, "--recompute", "everything"), "--recompute 'everything'"),
        ((*SMALL, "--measured-step-s", 0), "--measured-step-s 0.0"),
        (("--model", "llama3-9b", "--gpu", "h100"), "did you mean"),
        (("--model", "llama3-8b", "--gpu", "h101"), "did you mean"),
        (("--model", "meta-llama/Meta-Llama-3-8B", "--gpu", "h100"), "did you mean llama3-8b"),
        (("--model", "llama3-8b", "--gpu", "H100 80GB"), "did you mean h100"),
        (("--model", "llama3-8b", "--gpu", "h100", "--network", "ib"), "(infiniband:400)"),
        ((*SMALL, "--memory-gb", 0), "--memory-gb"),
        ((*SMALL, "--mfu", 2), "--mfu 2.0"),
        ((*SMALL, "--offloaded-layers", 99), "--offloaded-layers 99: 'gpt3-125m' has 12 layers"),
        ((*SMALL, "--recompute", "moe"), "--recompute 'moe': 'gpt3-125m' has no such modules"),
        (
            ("--model", "qwen3-30b-a3b", "--gpu", "h100", "--recompute", "mlp"),
            "--recompute 'mlp': 'qwen3-30b-a3b' has no such modules",
        ),
        (("--model", "gpt3-13b", "--gpu", "h100"), "--sequence 4096: 'gpt3-13b' has 2048 learned"),
        ((*SMALL, "--pcie-efficiency", 0), "--pcie-efficiency 0.0: must be > 0"),
        ((*SMALL, "--precision", "bf8"), "--precision 'bf8'"),
        ((*SMALL, "--placement", "zigzag"), "--placement 'zigzag'"),
        ((*SMALL, "--tp", 5, "--no-sequence-parallel"), "--tp 5 does not divide heads"),
        ((*SMALL, "--pp", 64), "lower --pp or --chunks"),
        ((*SMALL, "--config", "config.json"), "cannot read config.json"),
        (("--config", "no-such.json", "--gpu", "h100"), "no-such.json"),
        ((*SMALL, "-o", "/no/such/folder/p.json"), "there is no folder"),
    ],
)
def test_bad_input_leaves_with_2(optpipe, arguments, named) -> None:
    code, _, err = optpipe("estimate", *arguments)
    assert code == 2
    assert named in err


def test_a_problem_goes_through_a_pipe(optpipe, monkeypatch) -> None:
    """`-o -` leaves standard output to the problem, and solve takes it from standard input."""
    code, out, err = optpipe("estimate", *SMALL, "-o", "-")
    assert code == 0, err
    assert "billion parameters" in err
    problem = load_problem(out)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(out.encode())))
    code, out, err = optpipe("solve", "-", "--method", "1f1b", "-o", "-")
    assert code == 0, err
    assert load_schedule(out).problem_hash == problem.problem_hash
    assert "this schedule" in err


def test_a_pipe_that_carries_no_problem_is_refused(optpipe, monkeypatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff")))
    code, _, err = optpipe("bound", "-")
    assert code == 2
    assert "standard input is not UTF-8" in err


def test_an_estimate_is_json_as_the_service_answers_it(optpipe) -> None:
    done = optpipe("estimate", "--model", "llama3-8b", "--gpu", "h100", "--pp", "4", "--json")
    assert done.code == 0, done.err
    found = EstimateView.model_validate_json(done.out)
    assert len(found.problem.devices) == 4
    low, high = found.interval_ms or (0, 0)
    assert low < found.step_ms < high
