"""Options of commands come from the requests: each one arrives, and each is named in errors."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from optpipe.cli import options
from optpipe.cli.app import _program
from optpipe.planning import Training, find_model
from optpipe.requests import (
    CHOSEN_BY_PLAN,
    CompareOptions,
    EstimateAndPlan,
    EstimateRequest,
    ImportRequest,
    ProfileRequest,
    Request,
    ResumeRequest,
    SearchOptions,
    SolveRequest,
    SubmitOptions,
    SweepRequest,
    TuneRequest,
)
from tests.planning.traces import traced_like

CONFIG = {"model_type": "llama", "max": 1}
TRACE = traced_like(find_model("llama3.2-1b"), Training())
COMMANDS = [
    ("solve", SubmitOptions, ["problem.json"]),
    ("plan", EstimateAndPlan, []),
    ("compare", CompareOptions, ["problem.json"]),
    ("sweep", SweepRequest, ["problem.json"]),
    ("explain", SearchOptions, ["problem.json", "schedule.json"]),
    ("submit", SolveRequest, ["problem.json"]),
    ("resume", ResumeRequest, ["job"]),
    ("profile", ProfileRequest, []),
    ("import", ImportRequest, ["csv", "times.csv"]),
    ("estimate", EstimateRequest, []),
    ("tune", TuneRequest, []),
]
# Values that follow no rule: option -> what is written, and the fields that this gives.
WRITTEN: dict[str, tuple[list[str], dict[str, Any]]] = {
    "config": (["m.json"], {"config": CONFIG, "name": "m"}),
    "lengths": (["l.json"], {"lengths": [[7], [3, 4]]}),
    "gpu": (["h100:2", "a100:3"], {"gpu": "h100:2,a100:3"}),
    "num_gpus": (["5"], {"num_gpus": 5}),
    "current": (["tp=2,layers=3+4"], {"current": {"tp": 2, "layers": [3, 4]}}),
    "fixed": (["tp=2,pp=3", "cp=4"], {"fixed": {"tp": 2, "pp": 3, "cp": 4}}),
    "axes": (["memory_gb=1,2", "objective=span"],
             {"axes": {"memory_gb": [1, 2], "objective": ["span"]}}),
    "robust": (["P77"], {"robust": "P77"}),
    "tags": (["a", "b"], {"tags": ["a", "b"]}),
    "placements": (["v,free"], {"placements": ["v", "free"]}),
    "recompute": (["mlp,moe"], {"recompute": ["mlp", "moe"]}),
    "lora_targets": (["linear_fc1,linear_qkv"], {"lora_targets": ["linear_fc1", "linear_qkv"]}),
    "model": (["x"], {"model": "x"}),
    "trace": (["t.json"], {"trace": TRACE, "name": "t"}),
    "range_pattern": (["F=a", "B=b"], {"range_pattern": ["F=a", "B=b"]}),
}  # fmt: skip


def other_value(field: Any) -> Any:
    """A legal value of a field that is not its default."""
    default = field.info.get_default()
    if field.choices:
        return next(value for value in field.choices if value != default)
    if field.type is bool:
        return not default
    if field.type is str:
        return "text"
    limits = field.limits
    low = limits.get("ge", limits.get("gt", 0.0))
    high = min(limits.get("le", 1e6), limits.get("lt", 1e6), low + 8)
    value = (low + high) / 2
    is_whole = field.type is int and field.option.scale == 1
    return max(round(value), 1) if is_whole else value


def written(field: Any) -> tuple[list[str], dict[str, Any]]:
    """How the command line gives another value to a field, and the fields that it gives."""
    if field.name in WRITTEN and field.type is not bool:
        texts, fields = WRITTEN[field.name]
        return [part for text in texts for part in (field.flag, text)], fields
    if field.is_list:
        return [field.flag, "1,2"], {field.name: [1, 2]}
    value = other_value(field)
    if field.type is bool:
        return [field.flag if value else f"--no-{field.flag[2:]}"], {field.name: value}
    if field.option.scale == 1:
        return [field.flag, str(value)], {field.name: value}
    scaled = value * field.option.scale
    return [field.flag, str(value)], {field.name: round(scaled) if field.type is int else scaled}


@pytest.mark.parametrize(("name", "request_type", "arguments"), COMMANDS)
def test_every_option_reaches_the_request(
    *, optpipe, monkeypatch, tmp_path, name, request_type: type[Request], arguments
) -> None:
    """Each alone is set to another value than its default, and read back."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.json").write_text(json.dumps(CONFIG))
    (tmp_path / "l.json").write_text("[7, [3, 4]]")
    (tmp_path / "t.json").write_text(TRACE.model_dump_json())
    seen: list[dict[str, Any]] = []

    class StoppedError(Exception):
        """The command has its options."""

    def note(
        _self: options.RequestBuilder[Any], _request: object, values: Any, _files: Any
    ) -> None:
        seen.append(values)
        raise StoppedError

    monkeypatch.setattr(options.RequestBuilder, "__init__", note)
    command = ["jobs", "resume"] if name == "resume" else [name]
    parameters = parameters_of(command)
    fields_of = list(options._option_fields(request_type))
    listed = [field for field in fields_of if field.path not in NOT_OPTIONS[name]]
    assert {field.flag for field in listed} <= {
        flag for flags in parameters.values() for flag in flags
    }
    for field in listed:
        texts, fields = written(field)
        with pytest.raises(StoppedError):
            optpipe(*command, *arguments, *texts)
        values = seen[-1]
        for part in field.parents:
            values = values[part]
        for key, value in fields.items():
            assert (
                values[key] == pytest.approx(value)
                if isinstance(value, float)
                else (values[key] == value)
            ), (field.flag, values)
    assert {field.name for field in listed} <= set(parameters)


# Fields that a command does not have, each for a reason.
NOT_OPTIONS: dict[str, set[str]] = {
    "solve": {"chunks", "placements", "cache"},
    "plan": {"name", "values", *CHOSEN_BY_PLAN},
    "compare": set(),
    "sweep": {"what_if", "name", "tags", "priority", "options.cache"},
    "explain": set(),
    "submit": {f"options.{name}" for name in ("chunks", "placements", "cache", "objective")},
    "resume": set(),
    "profile": set(),
    "import": set(),
    "estimate": {"name", "values"},
    "tune": {
        *("name", "gpu_counts", "current_file", "current_format", "options.cache"),
        *("tags", "priority"),
    },
}


def parameters_of(command: list[str]) -> dict[str, list[str]]:
    """The parameters of a command and their flags."""
    found = _program()
    for name in command:
        found = found.commands[name]
    return {parameter.name: [*parameter.opts, *parameter.secondary_opts]
            for parameter in found.params}  # fmt: skip


def number_options() -> list[tuple[str, ...]]:
    """Every command with each of its options for one number, subcommands included."""

    def walk(command: Any, *names: str) -> Iterator[tuple[str, ...]]:
        for name, inner in getattr(command, "commands", {}).items():
            yield from walk(inner, *names, name)
        for parameter in command.params:
            if parameter.type_descriptor.annotation in {int, float}:
                yield (*names, parameter.opts[0])

    return list(walk(_program()))


def test_every_number_option_says_in_its_own_words_what_it_takes(optpipe) -> None:
    """None prints the sentence of the library that reads the command line."""
    found = number_options()
    assert {("jobs", "list", "--limit"), ("plot", "--devices"), ("solve", "--seed")} <= {*found}
    for *command, flag in found:
        said = optpipe(*command, flag, "many")
        assert said.code == 2, (command, flag)
        assert "'many' must be a " in said.err, (command, flag, said.err)
