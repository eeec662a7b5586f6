"""Causal language models of the installed transformers, built without data from a config.json.

`AutoModelForCausalLM` makes the model of a configuration, on "meta" and in bf16. Only classes of
the installed package are used; code in a repository (``auto_map``) is never run. Of a wrapper with
images or sound, the text part is built.

Blocks are the outermost lists of modules that have modules of their own. `LayerKinds` groups blocks
that do the same work: the same class, shapes and settings, inside and in the call.
"""

from __future__ import annotations

import difflib
from importlib import metadata
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from optpipe.errors import InputError
from optpipe.runtime.measuring.kernels import ATTENTION, register_attention, window_of
from optpipe.runtime.torch_names import tree_leaves
from optpipe.runtime.trainers.huggingface import require_transformers

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = [
    "LayerKinds",
    "TextConfig",
    "build_model",
    "count_active",
    "count_experts",
    "find_blocks",
    "list_architectures",
    "read_config",
]


def list_architectures() -> dict[str, Any]:
    """Return the model types with a causal language model in transformers, and its class's name."""
    require_transformers()
    from transformers.models.auto import modeling_auto  # noqa: PLC0415

    return dict(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


class TextConfig(NamedTuple):
    """The configuration of a text model, and the model type and configuration of its file."""

    text: Any
    model_type: str
    whole: Any


def read_config(data: dict[str, Any]) -> TextConfig:
    """Return the configuration of the text model that a ``config.json`` describes.

    A model type that transformers does not know is read as the architecture that the file names
    (``architectures``), if transformers has that one.

    Raises
    ------
    MissingExtraError
        If transformers is not installed.
    InputError
        If the model type is not known, or the configuration's class refuses the file.
    """
    require_transformers()
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: PLC0415

    kind = _known_type(data)
    if kind is None and isinstance(text := data.get("text_config"), dict):
        # A wrapper that transformers does not know, around a text model that it knows.
        data = {key: data[key] for key in ("tie_word_embeddings",) if key in data} | text
        kind = _known_type(data)
    if kind is None:
        raise _unknown(data.get("model_type"))
    fields = {key: value for key, value in data.items() if key not in _NOT_READ}
    try:
        whole = CONFIG_MAPPING[kind](**fields)
        config = whole.get_text_config(decoder=True)
        if config is not whole and "text_config" not in data and _differs(config, data):
            # Early files of wrappers have the text's fields next to those of images.
            text = {key: value for key, value in fields.items() if not key.endswith("_config")}
            whole = CONFIG_MAPPING[kind](text_config=text)
            config = whole.get_text_config(decoder=True)
    except Exception as error:
        raise InputError(
            f"config: transformers {_version()} refuses it as {kind}: {_first_line(error)}; give "
            "the fields that its configuration class expects, or use --from formula"
        ) from error
    given = data.get("text_config") or data
    if _differs(config, given):
        raise InputError(
            f"config: transformers {_version()} does not take num_hidden_layers or hidden_size of "
            f"this file as {kind}; give them in the form that its configuration class writes"
        )
    if config is not whole and "tie_word_embeddings" not in given:
        config.tie_word_embeddings = getattr(whole, "tie_word_embeddings", False)
    if hasattr(config, "is_decoder"):
        # Encoders such as BERT are language models only with a causal mask.
        config.is_decoder = True
    if getattr(config, "is_encoder_decoder", False):
        config.is_encoder_decoder = False
    config.use_cache = False
    return TextConfig(config, kind, whole)


def _differs(config: Any, data: dict[str, Any]) -> bool:
    """Whether a configuration has another size than the file."""
    return any(
        isinstance(data.get(name), int) and getattr(config, name, None) != data[name]
        for name in ("num_hidden_layers", "hidden_size")
    )


_NOT_READ = frozenset({"auto_map", "quantization_config", "transformers_version", "model_type"})
"""Fields about the storage of a checkpoint, or with names of code that is not run."""


def build_model(given: TextConfig) -> nn.Module:
    """Return the causal language model of a configuration, on "meta", in bf16 and in training mode.

    Raises
    ------
    InputError
        If its class cannot build it.
    """
    register_attention()
    config, make, kind = _choose_class(given)
    for name, supported in (
        (ATTENTION, kind._supports_attention_backend or kind._supports_flash_attn),  # noqa: SLF001
        ("sdpa", kind._supports_sdpa),  # noqa: SLF001
        ("eager", True),
    ):
        if not supported:
            continue
        try:
            with torch.device("meta"):
                model: Any = make(config, dtype=torch.bfloat16, attn_implementation=name)
        except KeyError as error:
            if error.args == (name,):
                continue  # classes of attention by name
            raise _not_built(config, error) from error
        except Exception as error:
            raise _not_built(config, error) from error
        if config is not given.text:
            model = model.get_decoder()
        if not model.get_output_embeddings():
            if not isinstance(getattr(model.config, "vocab_size", None), int):
                raise InputError(
                    f"config: model_type = {given.model_type!r} has no vocabulary (vocab_size); "
                    "give the config.json of a language model"
                )
            model = _WithHead(model)
        _move_rest(model)
        if callable(getattr(model, "set_default_language", None)):
            model.set_default_language(config.languages[0])
        return model.train()  # type: ignore[no-any-return]
    raise AssertionError(name)


def _choose_class(given: TextConfig) -> tuple[Any, Any, Any]:
    """Return the configuration to build, the function that builds it, and the model's class."""
    import transformers  # noqa: PLC0415

    config, model_type, whole = given
    causal, base = transformers.AutoModelForCausalLM, transformers.AutoModel
    named: Any = getattr(transformers, list_architectures().get(model_type, ""), None)
    if getattr(named, "config_class", None) is type(config) and type(config) not in _classes(
        causal
    ):
        return config, named._from_config, named  # noqa: SLF001
    for maker, one in ((causal, config), (base, config), (base, whole)):
        if type(one) in _classes(maker):
            kind = _classes(maker)[type(one)]
            return one, maker.from_config, kind[0] if isinstance(kind, tuple) else kind
    raise _unknown(model_type)


def _classes(maker: Any) -> Any:
    """Return the classes of models by the class of their configuration."""
    return maker._model_mapping  # noqa: SLF001


def _move_rest(model: nn.Module) -> None:
    """Move parameters to "meta" that code has made elsewhere (``torch.normal``), in place."""
    for module in model.modules():
        for name, one in module.named_parameters(recurse=False):
            if not one.is_meta:
                moved = nn.Parameter(one.to("meta", torch.bfloat16), one.requires_grad)
                setattr(module, name, moved)


class _WithHead(nn.Module):
    """A text model that is only part of a wrapper, with the head that the wrapper gives it."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        config = model.config
        self.model = model
        self.config = config
        with torch.device("meta"):
            self.lm_head = nn.Linear(
                config.hidden_size, config.vocab_size, bias=False, dtype=torch.bfloat16
            )
        if getattr(config, "tie_word_embeddings", False):
            self.lm_head.weight = model.get_input_embeddings().weight

    @property
    def tp_plan(self) -> dict[str, str]:
        """The plan of the text model, and of the head as in transformers' causal models."""
        plan = {f"model.{place}": style for place, style in (self.model.tp_plan or {}).items()}
        return plan and {"lm_head": "colwise_gather_output", **plan}

    def forward(self, input_ids: Tensor, **options: Any) -> Tensor:
        """Return the logits of token ids (b, tokens)."""
        states = self.model(input_ids=input_ids, **options).last_hidden_state
        logits: Tensor = self.lm_head(states)
        return logits


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of a model: all members of its outermost lists of larger modules.

    Raises
    ------
    InputError
        If there are none.
    """

    def walk(module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            members = list(child.children())
            if isinstance(child, nn.ModuleList | nn.ModuleDict) and any(
                next(one.children(), None) is not None for one in members
            ):
                yield from members
            else:
                yield from walk(child)

    blocks = list(walk(model))
    if not blocks:
        raise InputError(
            f"{type(model).__name__} has no list of layers (nn.ModuleList); give the model by its "
            "layers (optpipe/model/v1)"
        )
    return blocks


class LayerKinds:
    """Decides which blocks of a model do the same work.

    A block's kind is its class, the shapes of its parameters and buffers, and its settings. These
    are the numbers, strings and flags of all modules in it. A parameter that an earlier block has
    counts as shared. Two settings are left out:

    * a number that only counts the layers, unless a method of the module reads it;
    * a fraction in a module of torch or transformers, such as a dropout's.
    """

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        settings = [_settings(block) for block in blocks]
        counts: dict[tuple[str, str], set[int]] = {}
        for index, found in enumerate(settings):
            for place, value in found.items():
                if type(value) is int:
                    counts.setdefault(place, set()).add(value - index)
        numbering = {
            place
            for place, differences in counts.items()
            if len(differences) == 1 and sum(place in found for found in settings) > 1
        }
        seen: set[int] = set()
        self._kinds: dict[nn.Module, tuple[Any, ...]] = {}
        for block, found in zip(blocks, settings, strict=True):
            kept = tuple(
                (place, value)
                for place, value in found.items()
                if not (place in numbering or place[1].endswith(_NUMBERS))
                or _reads(type(block.get_submodule(place[0])), place[1])
            )
            shapes = tuple(
                (name, tuple(one.shape), one.dtype, one.requires_grad, id(one) in seen)
                for name, one in block.named_parameters()
            )
            seen |= {id(one) for one in block.parameters()}
            buffers = tuple(
                (name, tuple(one.shape), one.dtype) for name, one in block.named_buffers()
            )
            self._kinds.setdefault(block, (type(block), shapes, buffers, kept))

    def of(self, block: nn.Module, values: Any = (), *, again: bool = False) -> tuple[Any, ...]:
        """Return the kind of a call of a block, given all arguments; ``again`` if it ran before."""
        call = tuple(
            (tuple(one.shape), one.dtype, one.requires_grad, window_of(one))
            if isinstance(one, Tensor)
            else one
            if isinstance(one, bool | str | None)
            else type(one)
            for one in tree_leaves(values)
        )
        return (*self._kinds[block], call, again)


_NUMBERS = ("_idx", "_id", "_number", "_index")
"""Ends of names of settings that count the layers."""

_LIBRARIES = ("torch.", "transformers.")


def _settings(block: nn.Module) -> dict[tuple[str, str], Any]:
    found: dict[tuple[str, str], Any] = {}
    for place, module in block.named_modules():
        found[place, "class"] = type(module).__qualname__
        has_fractions = not type(module).__module__.startswith(_LIBRARIES)
        for name, value in vars(module).items():
            if (isinstance(value, bool | int | str) and name != "training") or (
                isinstance(value, float) and has_fractions
            ):
                found[place, name] = value
            elif value is None or isinstance(value, tuple):
                found[place, name] = str(value)
    return found


_NO_WORK = frozenset({"__init__", "__repr__", "extra_repr"})
"""Methods that run in no pass."""


def _reads(kind: type, attribute: str) -> bool:
    """Return whether a method of a class that does work reads an attribute.

    Methods of torch and transformers do not count: their layers find their cache by its number.
    """
    return any(
        attribute in method.__code__.co_names
        for owner in kind.__mro__
        if not owner.__module__.startswith(_LIBRARIES)
        for name, method in vars(owner).items()
        if isinstance(method, FunctionType) and name not in _NO_WORK
    )


# --- Experts.

_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts",
            "num_routed_experts", "ffn_config.moe_num_experts")  # fmt: skip
_ACTIVE = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k",
           "experts_per_token", "top_k_experts", "top_k", "ffn_config.moe_top_k",
           "num_selected_experts", "num_experts_per_layer")  # fmt: skip


def count_experts(config: Any) -> int:
    """Return the number of routed experts of a layer that has some, 0 without."""
    return _first_number(config, _EXPERTS)


def count_active(config: Any) -> int:
    """Return how many routed experts a token goes through, 0 without."""
    return min(_first_number(config, _ACTIVE) or 1, count_experts(config))


def _first_number(config: Any, names: Iterable[str]) -> int:
    for name in names:
        value = config
        for part in name.split("."):
            value = getattr(value, part, None)
        if isinstance(value, list):
            value = max(value, default=0)
        if isinstance(value, int) and value > 0:
            return value
    return 0


# --- What transformers has.


def _known_type(data: dict[str, Any]) -> str | None:
    """Return the model type by which transformers reads a file, None if it knows none."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: PLC0415

    kind = data.get("model_type")
    if isinstance(kind, str) and kind in CONFIG_MAPPING:
        return kind
    named = data.get("architectures")
    if isinstance(named, list) and len(named) == 1:
        return next((name for name, one in list_architectures().items() if one == named[0]), None)
    return None


def _unknown(kind: object) -> InputError:
    known = list_architectures()
    near = difflib.get_close_matches(str(kind), known, n=3, cutoff=0.5)
    nearest = f"; near ones are {', '.join(near)}" if near else ""
    return InputError(
        f"config: model_type = {kind!r} is not among the {len(known)} causal language models of "
        f"transformers {_version()}{nearest}; correct it, install a transformers that has it, or "
        "describe the model by its layers (optpipe/model/v1)"
    )


def _not_built(config: Any, error: Exception) -> InputError:
    return InputError(
        f"config: transformers {_version()} cannot build a model of type {config.model_type} from "
        f"it: {type(error).__name__}: {_first_line(error)}; give the fields that its code reads"
    )


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines)[:300]


def _version() -> str:
    return metadata.version("transformers")
