"""Options of commands come from the requests: each one arrives, and each is named in errors."""

import json
from typing import Any

import pytest
from annotated_types import Ge, Gt, Le, Lt

from optpipe.cli import options
from optpipe.requests import (
    CompareOptions,
    EstimateRequest,
    PlanOptions,
    ProfileRequest,
    Request,
    ResumeRequest,
    SearchOptions,
    SolveRequest,
    SubmitOptions,
    SweepRequest,
    TuneRequest,
)

CONFIG = {"model_type": "llama", "max": 1}
COMMANDS = [
    ("solve", SubmitOptions, ["problem.json"]),
    ("plan", PlanOptions, ["model.json"]),
    ("compare", CompareOptions, ["problem.json"]),
    ("sweep", SweepRequest, ["problem.json"]),
    ("explain", SearchOptions, ["problem.json", "schedule.json"]),
    ("submit", SolveRequest, ["problem.json"]),
    ("resume", ResumeRequest, ["job"]),
    ("profile", ProfileRequest, []),
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
    "model": (["x"], {"model": "x"}),
}  # fmt: skip


def other_value(leaf: Any, default: Any) -> Any:
    """A legal value of a field that is not its default."""
    choices = options._choices(leaf.info.annotation)
    if choices:
        return next(value for value in choices if value != default)
    if leaf.kind is bool:
        return not default
    if leaf.kind is str:
        return "text"
    limits = options._limits(leaf)
    low = limits.get(Ge, limits.get(Gt, 0.0))
    high = min(limits.get(Le, 1e6), limits.get(Lt, 1e6), low + 8)
    value = (low + high) / 2
    return max(round(value), 1) if leaf.kind is int and leaf.option.scale == 1 else value


def written(leaf: Any, default: Any) -> tuple[list[str], dict[str, Any]]:
    """How the command line gives another value to a field, and the fields that it gives."""
    if leaf.name in WRITTEN and leaf.kind is not bool:
        texts, fields = WRITTEN[leaf.name]
        return [part for text in texts for part in (leaf.flag, text)], fields
    if str(leaf.kind).startswith("list"):
        return [leaf.flag, "1,2"], {leaf.name: [1, 2]}
    value = other_value(leaf, default)
    if leaf.kind is bool:
        return [leaf.flag if value else f"--no-{leaf.flag[2:]}"], {leaf.name: value}
    scaled = value * leaf.option.scale
    field = round(scaled) if leaf.kind is int else scaled if leaf.option.scale != 1 else value
    return [leaf.flag, str(value)], {leaf.name: field}


@pytest.mark.parametrize(("name", "request_type", "arguments"), COMMANDS)
def test_every_option_reaches_the_request(
    *, optpipe, monkeypatch, tmp_path, name, request_type: type[Request], arguments
) -> None:
    """Each alone is set to another value than its default, and read back."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.json").write_text(json.dumps(CONFIG))
    (tmp_path / "l.json").write_text("[7, [3, 4]]")
    seen: list[dict[str, Any]] = []

    class StoppedError(Exception):
        """The command has its options."""

    def note(self: options.OptionsOf[Any], *_: object, **__: object) -> None:
        seen.append(self._values)
        raise StoppedError

    monkeypatch.setattr(options.OptionsOf, "__init__", wrapped(options.OptionsOf.__init__, note))
    command = ["jobs", "resume"] if name == "resume" else [name]
    parameters = parameters_of(command)
    leaves = [leaf for leaf in options._leaves(request_type, {}) if leaf.name in parameters]
    assert {leaf.flag for leaf in leaves} <= {
        flag for flags in parameters.values() for flag in flags
    }
    for leaf in leaves:
        texts, fields = written(leaf, leaf.default)
        with pytest.raises(StoppedError):
            optpipe(*command, *arguments, *texts)
        values = seen[-1]
        for part in leaf.path[:-1]:
            values = values[part]
        for field, value in fields.items():
            assert (
                values[field] == pytest.approx(value)
                if isinstance(value, float)
                else (values[field] == value)
            ), (leaf.flag, values)
    names = {leaf.name for leaf in options._leaves(request_type, {})}
    assert names - set(parameters) <= NOT_OPTIONS[name]


# Fields that a command does not have, each for a reason.
NOT_OPTIONS: dict[str, set[str]] = {
    "solve": {"chunks", "placements", "cache"},
    "plan": set(),
    "compare": set(),
    "sweep": {"what_if", "name", "tags", "priority", "cache"},
    "explain": set(),
    "submit": {"chunks", "placements", "cache", "objective"},
    "resume": set(),
    "profile": set(),
    "estimate": {"name"},
    "tune": {"name", "current_file", "current_format", "cache", "tags", "priority"},
}


def wrapped(original: Any, after: Any) -> Any:
    def run(self: Any, *arguments: Any) -> None:
        original(self, *arguments)
        after(self)

    return run


def parameters_of(command: list[str]) -> dict[str, list[str]]:
    """The parameters of a command and their flags."""
    from optpipe.cli import _program

    found = _program()
    for name in command:
        found = found.commands[name]
    return {parameter.name: [*parameter.opts, *parameter.secondary_opts]
            for parameter in found.params}  # fmt: skip
