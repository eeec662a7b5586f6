"""Writes a configuration as a torchtitan 0.3.0 config, and reads one.

A config is a Python function that returns a ``Trainer.Config``: ``torchtitan/config/manager.py``
finds it by ``--module`` and ``--config``. Written ones start from a function of the model's family
in its ``config_registry``. Read ones are never run: Python by its literals, or TOML, as torchtitan
had it before.
"""

from __future__ import annotations

import ast
import re
import tomllib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from optpipe.errors import InputError
from optpipe.planning.catalogue import MODELS
from optpipe.planning.configuration import Configuration
from optpipe.planning.frameworks.rules import check_gpus, check_starts, unwritten
from optpipe.planning.shape import NARROW, Training
from optpipe.planning.step import PipelineCut

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from optpipe.planning.accelerators import Hardware
    from optpipe.planning.shape import Dispatcher, ModelShape, Precision

__all__ = [
    "TITAN_MODELS",
    "TitanModel",
    "find_titan_model",
    "is_torchtitan_text",
    "read_torchtitan",
    "titan_model",
    "torchtitan_config",
]


class TitanModel(NamedTuple):
    """A model of torchtitan: its module, flavor, the config that is written from, and its assets.

    The config is that of another flavor if torchtitan has none, or one that needs torchao.
    """

    module: str
    flavor: str
    config: str
    assets: str


_IMPORTED = re.compile(r"\btorchtitan\.models\.(\w+)")
_REGISTERED = re.compile(r"\bmodel_registry\(\s*['\"]([^'\"]+)['\"]")
_SETS_PARALLELISM = re.compile(
    r"(?:^|--|\s)parallelism\.[a-z_]+[\s=]|^\s*\[parallelism\]|\.parallelism\b", re.MULTILINE
)

TITAN_MODELS = {
    "llama3.2-1b": TitanModel("llama3", "1B", "llama3_8b", "Llama-3.2-1B"),
    "llama3.2-3b": TitanModel("llama3", "3B", "llama3_8b", "Llama-3.2-3B"),
    "llama3-8b": TitanModel("llama3", "8B", "llama3_8b", "Llama-3.1-8B"),
    "llama3-70b": TitanModel("llama3", "70B", "llama3_70b", "Llama-3.1-70B"),
    "llama3.1-405b": TitanModel("llama3", "405B", "llama3_70b", "Llama-3.1-405B"),
    "qwen3-0.6b": TitanModel("qwen3", "0.6B", "qwen3_0_6b", "Qwen3-0.6B"),
    "qwen3-1.7b": TitanModel("qwen3", "1.7B", "qwen3_1_7b", "Qwen3-1.7B"),
    "qwen3-4b": TitanModel("qwen3", "4B", "qwen3_1_7b", "Qwen3-4B"),
    "qwen3-8b": TitanModel("qwen3", "8B", "qwen3_14b", "Qwen3-8B"),
    "qwen3-14b": TitanModel("qwen3", "14B", "qwen3_14b", "Qwen3-14B"),
    "qwen3-32b": TitanModel("qwen3", "32B", "qwen3_32b", "Qwen3-32B"),
    "qwen3-30b-a3b": TitanModel("qwen3", "30B-A3B", "qwen3_30b_a3b", "Qwen3-30B-A3B"),
    "qwen3-235b-a22b": TitanModel("qwen3", "235B-A22B", "qwen3_30b_a3b", "Qwen3-235B-A22B"),
    "deepseek-v2-lite": TitanModel(
        "deepseek_v3", "16B", "deepseek_v3_16b", "deepseek-moe-16b-base"
    ),
    "deepseek-v2": TitanModel("deepseek_v3", "236B", "deepseek_v3_16b", "DeepSeek-V2"),
    "deepseek-v3": TitanModel("deepseek_v3", "671B", "deepseek_v3_671b", "DeepSeek-V3.1-Base"),
    "gpt-oss-20b": TitanModel("gpt_oss", "20b", "gpt_oss_20b", "gpt-oss-20b"),
    "gpt-oss-120b": TitanModel("gpt_oss", "120b", "gpt_oss_120b", "gpt-oss-120b"),
}
"""By name in our catalogue; a shape with the same sizes is the same model."""

_V_SCHEDULES = ("ZBVZeroBubble", "DualPipeV")
_SINGLE_SCHEDULES = ("1F1B", "GPipe", "PipelineScheduleSingle")
_LOOP_SCHEDULES = (
    "Interleaved1F1B", "InterleavedZeroBubble", "LoopedBFS", "PipelineScheduleMulti",
)  # fmt: skip
_CONVERTERS = {
    "fp8": ("Float8LinearConverter", "Float8GroupedExpertsConverter"),
    "mxfp8": ("MXFP8LinearConverter", "MXFP8GroupedExpertsConverter"),
    "nvfp4": ("NVFP4LinearConverter",),
}
_LINEAR = {
    "fp8": "filter_fqns=['lm_head', 'router.gate'], ",
    "mxfp8": "fqns=['attention', 'shared_experts', 'feed_forward'], ",
    "nvfp4": "fqns=['layers'], ",
}


_RESHARDED = {2: "never", 3: "always"}


class TitanOption(NamedTuple):
    """A setting of torchtitan 0.3.0, and its value of a configuration where it is that simple."""

    name: str
    value: Callable[[Configuration], Any] | None = None


_O = TitanOption

OPTIONS = {
    "local_batch": _O("training.local_batch_size", lambda c: c.training.micro_batch * (
        c.pipeline.num_microbatches if c.pipeline.pp > 1 else 1)),
    "global_batch": _O("training.global_batch_size", lambda c: c.global_batch),
    "sequence": _O("training.seq_len", lambda c: c.training.sequence),
    "param": _O("training.mixed_precision_param",
                lambda c: "float32" if c.training.precision == "fp32" else "bfloat16"),
    "no_graphs": _O("training.disable_cuda_graphs", lambda c: not c.training.cuda_graphs),
    "replicas": _O("parallelism.data_parallel_replicate_degree",
                   lambda c: c.training.dp if c.training.zero == 0 else 1),
    "shards": _O("parallelism.data_parallel_shard_degree",
                 lambda c: 1 if c.training.zero == 0 else c.training.dp),
    "reshard": _O("parallelism.fsdp_reshard_after_forward",
                  lambda c: _RESHARDED.get(c.training.zero, "default")),
    "tp": _O("parallelism.tensor_parallel_degree", lambda c: c.training.tp),
    "sp": _O("parallelism.enable_sequence_parallel", lambda c: c.training.sequence_parallel),
    "cp": _O("parallelism.context_parallel_degree", lambda c: c.training.cp),
    "ep": _O("parallelism.expert_parallel_degree", lambda c: c.training.ep),
    "pp": _O("parallelism.pipeline_parallel_degree", lambda c: c.pipeline.pp),
    "micro_batch": _O("parallelism.pipeline_parallel_microbatch_size",
                      lambda c: c.training.micro_batch),
    "schedule": _O("parallelism.pipeline_parallel_schedule"),
    "csv": _O("parallelism.pipeline_parallel_schedule_csv"),
    "modules": _O("parallelism.module_fqns_per_model_part"),
}  # fmt: skip
"""The settings that are written and read, in the order in which they are written."""


def torchtitan_config(
    configuration: Configuration, *, schedule: str | None = None, csv: str | None = None
) -> str:
    """Return a Python config file for torchtitan 0.3.0.

    Saved as ``optpipe_config.py`` where Python finds it, torchtitan starts it by ``--module
    optpipe_config --config optpipe``. Data, optimizer and checkpoints are those of the config that
    it starts from.

    Parameters
    ----------
    configuration
        Its stages by `Configuration.stages`.
    schedule
        torchtitan's name of the order; without it 1F1B, interleaved with several chunks, or with a
        CSV what goes with the placement. A V needs ``ZBVZeroBubble`` or ``DualPipeV``, by which
        torchtitan places stages.
    csv
        Path of a schedule that `optpipe.formats.exports.dump_csv` wrote for torch, from the
        config's folder; the name then only says where stages stand.

    Raises
    ------
    InputError
        If torchtitan cannot run it so, or has no such model.
    """
    model = titan_model(configuration.shape)
    schedule = _schedule_name(configuration.pipeline, schedule, csv)
    counts = () if csv is None else ("micro-batches", "interleaved micro-batches")
    check_starts(configuration, "torchtitan", *counts)
    _check_stages_hold(configuration)
    return _config_text(configuration, model, schedule, csv)


def _config_text(
    configuration: Configuration, model: TitanModel, schedule: str, csv: str | None
) -> str:
    training = configuration.training
    path = f"torchtitan.models.{model.module}"
    imports = {
        "torchtitan.config": "ParallelismConfig",
        path: "model_registry",
        f"{path}.config_registry": model.config,
        "torchtitan.trainer": "Trainer",
    }
    has_experts = configuration.shape.experts is not None
    classes = _CONVERTERS.get(training.precision, ())[: 1 + has_experts]
    if training.recompute:
        imports["torchtitan.distributed.activation_checkpoint"] = "FullAC"
    if classes or training.compiled or _is_async(training):
        imports["torchtitan.config"] = "CompileConfig, ParallelismConfig"
    if classes:
        imports["torchtitan.components.quantization"] = ", ".join(sorted(classes))
    has_csv = csv is not None and configuration.pipeline.pp > 1
    lines = ["from pathlib import Path", ""] * has_csv
    lines += [f"from {module} import {names}" for module, names in sorted(imports.items())]
    body = [
        f"config = {model.config}()  # its data, optimizer and checkpoints are yours to change",
        f"config.hf_assets_path = './assets/hf/{model.assets}'",
        *_model_lines(configuration, model, classes),
        *_option_lines(configuration, schedule, csv),
    ]
    if classes or training.compiled or _is_async(training):
        is_async = ", enable_async_tensor_parallel=True" * _is_async(training)
        body.append(f"config.compile = CompileConfig(enable=True{is_async})")
    recompute = "FullAC.Config()" if training.recompute else "None"
    body += [f"config.activation_checkpoint = {recompute}", "return config"]
    return "\n".join(
        [
            '"""Written by optpipe; started by --module NAME_OF_THIS_FILE --config optpipe."""',
            *(f"# {note}" for note in unwritten(configuration)),
            "",
            *lines,
            "",
            "",
            "def optpipe() -> Trainer.Config:",
            *(f"    {line}" for line in body),
            "",
        ]
    )


# --- What is written.


def titan_model(shape: ModelShape) -> TitanModel:
    """Return torchtitan's model of a shape; raises `InputError` where it has none."""
    for name, model in TITAN_MODELS.items():
        own = MODELS[name]
        same = {"name": shape.name, "source": shape.source, "left_out": shape.left_out}
        if replace(own, **same) == replace(shape, mtp=own.mtp):  # type: ignore[arg-type]
            return model
    raise InputError(
        f"model {shape.name!r}: torchtitan 0.3.0 has no model of its sizes; it has "
        f"{', '.join(TITAN_MODELS)}"
    )


def _schedule_name(cut: PipelineCut, name: str | None, csv: str | None) -> str:
    count = cut.pp * cut.chunks
    is_loop = cut.stages == tuple(stage % cut.pp for stage in range(count))
    if name is None and csv is None and cut.schedule != "1f1b":
        raise InputError(
            f"schedule {cut.schedule!r}: torchtitan has no name for it; give its CSV (optpipe "
            "export --to torch-csv)"
        )
    if not is_loop:
        name = name or _V_SCHEDULES[0]
        if name not in _V_SCHEDULES or cut.chunks != 2:
            raise InputError(
                f"schedule {name!r} with placement {cut.placement!r} and {cut.chunks} chunks: "
                "torchtitan places a V of two by the names ZBVZeroBubble and DualPipeV, and else "
                "stage k on rank k mod pp; choose one of both"
            )
        return name
    if csv is not None:
        name = name or "PipelineScheduleMulti"
    allowed = _SINGLE_SCHEDULES if cut.chunks == 1 else _LOOP_SCHEDULES
    allowed = (*allowed, "PipelineScheduleMulti") if csv is not None else allowed
    name = name or allowed[0]
    if name not in allowed:
        raise InputError(
            f"schedule {name!r} with placement {cut.placement!r} and {cut.chunks} chunks: "
            f"torchtitan runs it as {', '.join(dict.fromkeys(allowed))}; choose one"
        )
    return name


def _check_stages_hold(configuration: Configuration) -> None:
    """Refuse a stage without modules, as torchtitan's own split does; raises `InputError`."""
    empty = [index for index, layers in enumerate(configuration.stages) if not layers.total]
    if empty:
        raise InputError(
            f"stages {empty}: hold nothing, and torchtitan needs a module in each; give them a "
            "layer"
        )


def _model_lines(
    configuration: Configuration, model: TitanModel, classes: Sequence[str]
) -> Iterator[str]:
    training = configuration.training
    arguments = [f"'{model.flavor}'"]
    if configuration.shape.experts is not None and training.dispatcher == "deduplicated":
        in_domain = configuration.gpus_per_node > 8
        arguments.append(f"moe_comm_backend='{'hybridep' if in_domain else 'deepep'}'")
    yield f"config.model_spec = model_registry({', '.join(arguments)}" + ("," if classes else ")")
    if classes:
        yield "    converters=["
        for one in classes:
            only = _LINEAR[training.precision] if "Linear" in one else ""
            yield f"        {one}.Config({only}model_compile_enabled=True),"
        yield "    ],"
        yield ")"


class _NextToConfig(str):
    """A path relative to the config's folder, written as a Python expression."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"str(Path(__file__).parent / {str(self)!r})"


def _option_lines(configuration: Configuration, schedule: str, csv: str | None) -> Iterator[str]:
    """Yield the sections ``training`` and ``parallelism``, as `OPTIONS` has them."""
    cut = configuration.pipeline
    values = {one.name: one.value(configuration) for one in OPTIONS.values() if one.value}
    if cut.pp > 1:
        values[OPTIONS["schedule"].name] = schedule
        values |= {} if csv is None else {OPTIONS["csv"].name: _NextToConfig(csv)}
    else:
        del values[OPTIONS["micro_batch"].name]  # local batch over this: torch's micro-batches
    for name, value in values.items():
        if name.startswith("training."):
            yield f"config.{name} = {value!r}"
    yield "config.parallelism = ParallelismConfig("
    for name, value in values.items():
        if name.startswith("parallelism."):
            yield f"    {name.removeprefix('parallelism.')}={value!r},"
    if cut.pp > 1:
        yield f"    {OPTIONS['modules'].name.removeprefix('parallelism.')}=["
        yield from (f"        {names!r}," for names in _modules(configuration))
        yield "    ],"
    yield ")"


def _modules(configuration: Configuration) -> list[list[str]]:
    """Return the names of the modules of each stage."""
    start, found = 0, []
    for counts in configuration.stages:
        layers = [f"layers.{start + index}" for index in range(counts.transformer)]
        start += counts.transformer
        ends = ["norm", "lm_head"] * counts.head
        found.append([*["tok_embeddings"] * counts.embedding, *layers, *ends])
    return found


def _is_async(training: Training) -> bool:
    return training.tp > 1 and training.overlap


# --- What is read.


def find_titan_model(text: str) -> str:
    """Return the catalogue's name of the model that a torchtitan config trains.

    Raises `InputError` if the text does not name one of `TITAN_MODELS`.
    """
    said = _Said(_values(text))
    imported, registered = _IMPORTED.search(text), _REGISTERED.search(text)
    module = said.value("model.name", imported and imported[1])
    flavor = said.value("model.flavor", registered and registered[1])
    for name, model in TITAN_MODELS.items():
        if (model.module, model.flavor) == (module, flavor):
            return name
    named = " ".join(str(one) for one in (module, flavor) if one) or "none"
    raise InputError(
        f"its model is {named}, and the models known by torchtitan's name and flavor are "
        f"{', '.join(TITAN_MODELS)}; give the model"
    )


def is_torchtitan_text(text: str) -> bool:
    """Whether a text sets options of torchtitan, in a config file, in Python or as arguments."""
    return _SETS_PARALLELISM.search(text) is not None


def read_torchtitan(
    text: str,
    shape: ModelShape,
    hardware: Hardware,
    num_gpus: int,
    *,
    global_batch: int | None = None,
    sequence: int | None = None,
) -> Configuration:
    """Return the configuration that a torchtitan config starts.

    Parameters
    ----------
    text
        Python, of which assignments to ``config.parallelism.tensor_parallel_degree`` and the like
        and arguments of ``ParallelismConfig(...)`` and its sisters count; or TOML. What is absent
        has torchtitan's default; what the function that it starts from sets is not known.
    shape, hardware, num_gpus
        What is trained, and on how many accelerators.
    global_batch, sequence
        For texts without them: sequences per step, by default one local batch of each replica; and
        tokens per sequence.

    Returns
    -------
    Configuration
        With sizes by ``module_fqns_per_model_part``, or as torchtitan cuts without it.
        `Training.overlap` is that of tensor-parallel collectives where there are any. The order of
        a CSV or of ZBVZeroBubble is not read, which `Configuration.not_modelled` says.

    Raises
    ------
    InputError
        If a value is wrong or missing, or says what no configuration says: selective
        checkpointing, a name of another order than 1F1B or ZBVZeroBubble, replicas of shards,
        several passes of the pipeline in a step.
    """
    said = _Said(_values(text))
    if said.value("parallelism.pipeline_parallel_split_points", None):
        raise InputError(
            "parallelism.pipeline_parallel_split_points: is not read; give "
            "module_fqns_per_model_part"
        )
    own = TITAN_MODELS.get(shape.name.removesuffix("-mtp"))
    flavor = said.value("model.flavor", None)
    if own is not None and flavor not in (None, own.flavor):
        raise InputError(
            f"model.flavor = {flavor!r}: {shape.name!r} is {own.flavor}; correct it, or name the "
            "model that the text trains"
        )
    tp, cp, pp, ep = (said.integer(name, 1) for name in ("tp", "cp", "pp", "ep"))
    dp, zero = _replicas(said, num_gpus, tp * cp * pp, cp=cp, pp=pp)
    micro_batch, m = _batches(said, dp, pp, global_batch)
    etp = tp if ep == 1 else 1
    check_gpus(num_gpus, tp=tp, cp=cp, pp=pp, ep=ep)
    is_async = said.value("compile.enable_async_tensor_parallel", False) or said.value(
        "parallelism.enable_async_tensor_parallel", False
    )
    has_experts = shape.experts is not None
    precision = cast("Precision", _precision(said))
    # Narrow products and asynchronous tensor parallelism are compiled in any case.
    is_chosen = precision not in NARROW and not (is_async and tp > 1)
    training = Training(
        micro_batch=micro_batch,
        sequence=said.integer("sequence", sequence),
        tp=tp,
        cp=cp,
        dp=dp,
        ep=ep if has_experts else 1,
        etp=said.integer("parallelism.expert_tensor_parallel_degree", etp) if has_experts else 1,
        zero=zero,
        precision=precision,
        sequence_parallel=tp == 1 or bool(said.value("sp", True)),
        recompute=_recompute(said),
        cuda_graphs=_has_graphs(said, pp, ep),
        dispatcher=cast("Dispatcher", _dispatcher(said) if has_experts else "alltoall"),
        overlap=bool(is_async) if tp > 1 else True,
        kernels="torch",
        compiled=is_chosen and bool(said.value("compile.enable", False)),
    )
    cut, sizes = _cut(said, shape, pp, m)
    found = Configuration(
        shape=replace(shape, mtp=0), hardware=hardware, training=training, pipeline=cut, sizes=sizes
    )
    named = said.modules
    if named and [sorted(part) for part in named] != [sorted(part) for part in _modules(found)]:
        raise InputError(
            f"parallelism.module_fqns_per_model_part: must be tok_embeddings, layers.0 to "
            f"layers.{shape.num_layers - 1}, norm and lm_head in this order; correct it, or name "
            "the model that the text trains"
        )
    if named:
        _check_stages_hold(found)
    unread = _unread_order(said) if pp > 1 else ""
    counts = ("micro-batches", "interleaved micro-batches") if unread else ()
    # Earlier versions had an option for the ranks of an expert.
    check_starts(found, "torchtitan", "ranks of an expert", *counts)
    fused = _LOOP_SCHEDULES[0] if cut.chunks > 1 else _SINGLE_SCHEDULES[0]
    note = f"{unread} (its order is not read: the step of today is that of {fused})"
    return replace(found, not_modelled=(note,) if unread else ())


@dataclass(frozen=True)
class _Said:
    """Settings by section and name, as Python values; `OPTIONS` are found by their keys, too."""

    values: Mapping[str, Any]

    def value(self, name: str, default: Any) -> Any:
        name = _name(name)
        found = self.values.get(name, default)
        if isinstance(found, ast.expr):
            raise InputError(
                f"{name} = {ast.unparse(found)[:60]}: is not read, since nothing is run; write the "
                "value itself"
            )
        return found

    def integer(self, name: str, default: int | None, *, least: int = 1) -> int:
        found = self.value(name, default)
        if found is None:
            raise InputError(f"{_name(name)}: is missing; give it")
        if not isinstance(found, int) or isinstance(found, bool) or found < least:
            raise InputError(
                f"{_name(name)} = {found!r}: must be a whole number >= {least}; correct it"
            )
        return found

    def word(self, name: str, default: str) -> str:
        found = self.value(name, default)
        if not isinstance(found, str):
            raise InputError(f"{_name(name)} = {found!r}: must be a text; put it in quotes")
        return found

    @property
    def modules(self) -> list[list[str]]:
        """The modules of each stage; none where the text does not name them."""
        name = OPTIONS["modules"].name
        found = self.value(name, None) or []
        if not isinstance(found, list) or not all(
            isinstance(part, list) and all(isinstance(one, str) for one in part) for part in found
        ):
            raise InputError(f"{name} = {found!r}: must be a list of lists of names; correct it")
        return found


def _name(name: str) -> str:
    return OPTIONS[name].name if name in OPTIONS else name


_SECTIONS = {
    "ParallelismConfig": "parallelism", "TrainingConfig": "training", "CompileConfig": "compile",
}  # fmt: skip


def _values(text: str) -> dict[str, Any]:
    try:
        read = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        pass
    else:
        values = dict(_flat(read))
        mode = values.get("activation_checkpoint.mode", "selective")
        converters = str(values.get("model.converters", "")).lower()
        narrow = [name for name in ("mxfp8", "nvfp4", "fp8") if name in converters]
        narrow += ["fp8"] * ("float8" in converters) + ["mxfp8"] * ("'mx'" in converters)
        return {"graphs": False, "recompute": mode, "narrow": narrow[:1], **values}
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise InputError(
            f"neither TOML nor Python (line {error.lineno}: {error.msg}); give a torchtitan config"
        ) from None
    found: dict[str, Any] = {"graphs": True, "recompute": "selective", "narrow": []}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                _take(found, ast.unparse(target).partition(".")[2], node.value)
        elif isinstance(node, ast.Call):
            # Arguments of a section's class, and what converters and registries are called.
            called = ast.unparse(node.func).removesuffix(".Config").rpartition(".")[2]
            section = _SECTIONS.get(called, "model" if called == "model_registry" else "")
            for keyword in node.keywords:
                name = keyword.arg or ""
                _take(found, f"{section}.{name}" if section else name, keyword.value)
            narrow = [one for one, classes in _CONVERTERS.items() if called in classes]
            found["narrow"] = narrow or found["narrow"]
    return found


def _flat(read: Mapping[str, Any], section: str = "") -> Iterator[tuple[str, Any]]:
    """Yield values by their innermost section: lines of assignments may be TOML too."""
    for name, value in read.items():
        if isinstance(value, dict):
            yield from _flat(value, name)
        else:
            yield f"{section}.{name}", value


def _take(found: dict[str, Any], name: str, node: ast.expr) -> None:
    if name == "activation_checkpoint":
        said = ast.unparse(node)
        known = {"FullAC": "full", "None": "none", "SelectiveAC": "selective"}
        kinds = [kind for word, kind in known.items() if word in said]
        found["recompute"] = kinds[0] if kinds else said[:60]
    elif "." in name:
        try:
            found[name] = ast.literal_eval(node)
        except ValueError:
            found[name] = node


def _replicas(said: _Said, num_gpus: int, split: int, *, cp: int, pp: int) -> tuple[int, int]:
    """Return the degree of data parallelism, and how far its state is spread."""
    copies = said.integer("replicas", 1)
    shards = said.integer("shards", -1, least=-1)
    if shards == -1:
        shards = num_gpus // (split * copies)
    if copies * shards * split != num_gpus:
        raise InputError(
            f"{num_gpus} GPUs: are not data_parallel_replicate_degree {copies} x "
            f"data_parallel_shard_degree {shards} x tensor, context and pipeline degrees {split}; "
            "correct one of them"
        )
    if copies > 1 and shards * cp > 1:
        raise InputError(
            f"data_parallel_replicate_degree = {copies} with {shards * cp} shards: state is either "
            "spread over all replicas or not at all here; set one of them to 1"
        )
    policy = said.word("reshard", "default")
    if copies > 1 or (shards * cp == 1 and policy == "default"):
        return copies, 0
    return shards, {kept: zero for zero, kept in _RESHARDED.items()}.get(policy, 2 if pp > 1 else 3)


def _batches(said: _Said, dp: int, pp: int, global_batch: int | None) -> tuple[int, int]:
    """Return sequences per micro-batch, and micro-batches of a step."""
    local = said.integer("local_batch", None)
    whole = said.integer("global_batch", -1, least=-1)
    whole = whole if whole > 0 else global_batch or local * dp
    size = said.integer("micro_batch", 1) if pp > 1 else local
    if local < 1 or size < 1 or local % size or whole % (local * dp):
        raise InputError(
            f"training.global_batch_size = {whole}, local_batch_size = {local} and "
            f"pipeline_parallel_microbatch_size = {size} on {dp} replicas: each must be a multiple "
            "of the next; correct one of them"
        )
    if pp > 1 and whole != local * dp:
        raise InputError(
            f"training.global_batch_size = {whole}: is {whole // (local * dp)} passes of the "
            f"pipeline with local_batch_size = {local}, each filled and drained; only one is "
            f"estimated: set local_batch_size = {whole // dp} to compare with that"
        )
    return size, whole // (dp * size)


def _precision(said: _Said) -> str:
    if said.word("training.dtype", "float32") != "float32":
        raise InputError(
            f"training.dtype = {said.word('training.dtype', '')}: gradients and optimizer are "
            "float32 here; leave it out to compare with that"
        )
    narrow = said.value("narrow", [])
    if narrow:
        return str(narrow[0])
    wide = said.word("param", "bfloat16")
    return "fp32" if wide == "float32" else "bf16"


def _recompute(said: _Said) -> frozenset[str]:
    mode = said.word("recompute", "selective")
    if mode not in ("full", "none"):
        raise InputError(
            f"activation_checkpoint = {mode}: what operators keep is not estimated (torchtitan's "
            "default is selective); give full or none to compare with that"
        )
    return frozenset({"full"} if mode == "full" else ())


def _has_graphs(said: _Said, pp: int, ep: int) -> bool:
    """Return the text's value; by default they are on where torchtitan captures at all."""
    disabled = said.value("no_graphs", None)
    if disabled is None:
        return bool(said.value("graphs", True)) and pp == 1 and ep == 1
    return not disabled


def _dispatcher(said: _Said) -> str:
    backend = said.word("model.moe_comm_backend", "standard")
    kinds = {"standard": "alltoall", "deepep": "deduplicated", "hybridep": "deduplicated"}
    if backend not in kinds:
        raise InputError(
            f"moe_comm_backend = {backend}: standard, deepep and hybridep are estimated; give one"
        )
    return kinds[backend]


def _unread_order(said: _Said) -> str:
    """Return the setting whose order of passes is not read; empty if there is none."""
    csv = OPTIONS["csv"].name  # often an expression: a path next to the config
    if said.values.get(csv):
        return csv.rpartition(".")[2]
    return _V_SCHEDULES[0] if said.word("schedule", "1F1B") == _V_SCHEDULES[0] else ""


def _cut(said: _Said, shape: ModelShape, pp: int, m: int) -> tuple[PipelineCut, tuple[int, ...]]:
    if pp == 1:
        return PipelineCut(num_microbatches=m), ()
    name = said.word("schedule", "1F1B")
    unread = _unread_order(said)
    is_single = name.lower() in {one.lower() for one in _SINGLE_SCHEDULES}
    if not unread and name.lower() not in ("1f1b", "interleaved1f1b"):
        raise InputError(
            f"pipeline_parallel_schedule = {name}: the step of 1F1B and Interleaved1F1B is "
            "estimated; give one of them to compare with that"
        )
    named = said.modules
    ends = [
        said.integer(f"parallelism.pipeline_parallel_{end}_stage_less_layers", 1, least=0)
        for end in ("first", "last")
    ]
    whole = shape.num_layers + sum(ends)
    each = said.value("parallelism.pipeline_parallel_layers_per_stage", None)
    if named:
        sizes = [len(part) - ("norm" in part) for part in named]
    else:
        default = pp * (1 if is_single else 2)
        count = -(-whole // each) if isinstance(each, int) and each > 0 else default
        size, more = divmod(whole, count)
        sizes = [size + (index < more) for index in range(count)]
        sizes[0] += 1 - ends[0]
        sizes[-1] += 1 - ends[1]
    chunks = len(sizes) // pp
    if len(sizes) % pp or (not unread and (chunks == 1) != is_single):
        raise InputError(
            f"{len(sizes)} stages on pp = {pp} with {name}: 1F1B has one for each rank, "
            "Interleaved1F1B several; correct one of them"
        )
    placement = "loop" if chunks > 1 else "linear"
    cut = PipelineCut(pp=pp, chunks=chunks, num_microbatches=m, placement=placement)
    return cut, tuple(sizes)
