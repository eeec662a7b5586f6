"""Settings as people have them: arguments in a shell script, YAML, or lines of ``name = value``.

Nothing is run. Of YAML, names with scalars, lists in brackets or by dashes, and sections are read.
Sections are ignored, because names are unique without them.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from optpipe.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["FrameworkSettings", "read_settings"]

_NONE = ("", "null", "none", "~")
_FALSE = ("false", "no", "off")
_LAYERS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}


@dataclass(frozen=True)
class FrameworkSettings:
    """Names with their words, as in the text.

    Parameters
    ----------
    words_of
        An argument without a value has no words.
    is_arguments
        Whether they were arguments, whose absence means the program's default.
    twice
        Second values of names; reading such a name is refused.
    """

    words_of: Mapping[str, list[str]]
    is_arguments: bool
    twice: Mapping[str, str] = field(default_factory=dict)
    read: set[str] = field(default_factory=set, compare=False)
    """The names that were looked up."""

    def mentions(self, name: str) -> bool:
        """Whether the text has the name at all."""
        self.read.add(name)
        return name in self.words_of

    def has(self, name: str) -> bool:
        """Whether the text gives it a value that is neither none nor false."""
        self.read.add(name)
        words = self.words_of.get(name)
        if words is None:
            return False
        if name in self.twice:
            raise InputError(f"{name} = {' '.join(words)}, and {self.twice[name]}: give one")
        return not words or words[0].lower() not in (*_NONE, *_FALSE)

    def flag(self, name: str, *, default: bool = False) -> bool:
        """Return whether it is switched on."""
        self.read.add(name)
        words = self.words_of.get(name)
        if words is None or (words and words[0].lower() in _NONE):
            return default
        return self.has(name)

    def words(self, name: str) -> list[str]:
        """Return its values, none where it is absent."""
        return list(self.words_of[name]) if self.has(name) else []

    def word(self, name: str, default: str) -> str:
        """Return its value."""
        words = self.words(name)
        return words[0] if words else default

    def number(self, name: str, default: float | None) -> float:
        """Return its value as a number.

        Raises
        ------
        InputError
            If it is none, or absent without a default.
        """
        words = self.words(name)
        if not words and default is not None:
            return default
        if not words:
            raise InputError(f"{name}: is missing; give it")
        try:
            return float(words[0])
        except ValueError:
            raise InputError(
                f"{name} = {words[0]}: must be a number; write it out, where a script sets it "
                "elsewhere"
            ) from None

    def integer(self, name: str, default: int | None, *, least: int = 0) -> int:
        """Return its value as a whole number of at least ``least``.

        Raises
        ------
        InputError
            If it is none, or absent without a default.
        """
        value = self.number(name, default)
        if not least <= value < 1e12 or value != int(value):
            raise InputError(f"{name} = {value:g}: must be a whole number >= {least}; correct it")
        return int(value)

    def degree(self, name: str, default: int | None) -> int:
        """Return its value as a whole number of at least 1."""
        return self.integer(name, default, least=1)

    def layout(self) -> str:
        """Return Megatron-Core's layout as its letters; empty if there is none."""
        text = "".join(self.words("pipeline_model_parallel_layout")).removeprefix("|")
        for word, letter in _LAYERS.items():
            text = text.replace(word, letter)
        return text


def read_settings(text: str, aliases: Mapping[str, str]) -> FrameworkSettings:
    """Return the settings of a text; ``aliases`` names some otherwise.

    Raises
    ------
    InputError
        If the text has neither arguments nor values, or a quote is open.
    """
    code = re.sub(r"(?:^|\s)#.*", "", text, flags=re.MULTILINE)
    is_arguments = re.search(r"(?:^|[\s\"'(=])--[a-z]", code) is not None
    found, twice = (_Arguments(text).words_of, {}) if is_arguments else _values(text)
    if not found:
        raise InputError(
            "the text has no settings: write arguments (--tensor-model-parallel-size 8) or values "
            "(tensor_model_parallel_size: 8)"
        )
    named = {aliases.get(name, name): words for name, words in found.items()}
    return FrameworkSettings(
        named, is_arguments, {aliases.get(name, name): word for name, word in twice.items()}
    )


# --- Arguments.

_ASSIGNED = re.compile(r"([A-Za-z_]\w*)\+?=(.*)", re.DOTALL)
_OPTION = re.compile(r"--([A-Za-z_$][^\s=;&|<>()]*)(=?)(.*)", re.DOTALL)
_ENDS = ("|", "||", "|&", "&", "&&", ";")
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?-([^}]*))?\}|(\w+))")


@dataclass
class _Arguments:
    """The arguments of a shell script, in which variables may be set."""

    text: str
    words_of: dict[str, list[str]] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    _open: list[str] | None = None

    def __post_init__(self) -> None:
        # An array's brackets hold arguments like any others.
        self._take(_split(re.sub(r"\b\w+\+?=\(", " ", self.text.replace("\\\n", " "))))

    def _take(self, tokens: list[str], *, is_expanded: bool = False) -> None:
        """Read words; the variables of expanded ones are unset where bash expands them."""
        for token in tokens:
            assigned = _ASSIGNED.fullmatch(token)
            if assigned is not None and not token.startswith("-"):
                value = assigned[2] if is_expanded else self._expanded(assigned[2])
                self.variables[assigned[1]] = value
                if "--" in value:
                    self._take(_split(value), is_expanded=True)
                self._open = None
                continue
            self._argument(token if is_expanded else self._expanded(token))

    def _argument(self, token: str) -> None:
        option = _OPTION.fullmatch(token.strip())
        if option is None:
            self._append(token)
            return
        name, equals, value = option.groups()
        if not equals and re.search(r"\s", value):
            # "--flag value" as one word: bash splits it where a script expands it unquoted.
            self._take(_split(token), is_expanded=True)
            return
        self._open = self.words_of[name.rstrip(":").replace("-", "_")] = []
        if equals and value:
            self._append(value)
        elif value:
            self._open = None

    def _append(self, token: str) -> None:
        """Add a value to the open option; the end of an array or of a command ends it."""
        if token in _ENDS:
            self._open = None
        is_closed = token.count("(") != token.count(")")
        word = token.rstrip(")") if is_closed else token
        if self._open is not None and word:
            self._open.append(word)
        if is_closed:
            self._open = None

    def _expanded(self, token: str) -> str:
        def value(found: re.Match[str]) -> str:
            name = found[1] or found[3]
            default = found[0] if found[2] is None else found[2]
            return self.variables.get(name, default)

        return _VARIABLE.sub(value, token)


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text, comments=True)
    except ValueError as error:
        raise InputError(f"not arguments: {error}; close the quote") from None


# --- Values.

_LINE = re.compile(r"([\s{]*)\+*[\"']?([A-Za-z_][\w.]*)[\"']?\s*[:=]\s*(.*)")
_NEXT = re.compile(r"[ \t(,]+(?=\+*[A-Za-z_][\w.]*=[^\s=])")  # several on one line
_ITEM = re.compile(r"\s*((?:-\s+)+)(.*)")


def _values(text: str) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Return the values of a text, and second values that differ; ``model`` takes precedence."""
    found: dict[str, list[str]] = {}
    twice: dict[str, str] = {}
    of_model: set[str] = set()
    section = ""
    for indent, path, words in _lines(text):
        if not indent and not words:
            section = path
        head, _, last = path.rpartition(".")
        name = path if last.startswith("_") else last
        in_model = "model" in (section, head.rpartition(".")[2])
        is_none = not words or words[0].lower() in _NONE
        known = found.get(name, ["null"])
        if known == ["null"] or (in_model and name not in of_model and not is_none):
            found[name] = ["null"] if is_none else words
            twice.pop(name, None)
        elif not is_none and known != words and name not in of_model:
            twice[name] = " ".join(words)
        if in_model and not is_none:
            of_model.add(name)
    return found, twice


def _lines(text: str) -> Iterator[tuple[int, str, list[str]]]:
    """Yield indentation, name and words of each setting."""
    setting: tuple[int, str, list[str]] | None = None
    parent = ""
    for raw in _NEXT.sub("\n", text).splitlines():
        line = re.sub(r"(?:^|\s)#.*", "", raw).rstrip()
        item, named = _ITEM.fullmatch(line), _LINE.fullmatch(line)
        if item is not None and setting is not None:
            is_empty = item[2].strip() == "[]"
            word = "" if is_empty else _scalar(item[2])
            _append(setting[2], word, is_new=is_empty or item[1].count("-") > 1)
        elif named is not None:
            if setting is not None:
                yield setting
            words = _listed(named[3])
            name = f"{parent}.{named[2]}" if named[2].startswith("_") else named[2]
            parent = parent if name != named[2] else named[2]
            setting = (len(named[1]), name, words)
    if setting is not None:
        yield setting


def _append(words: list[str], word: str, *, is_new: bool) -> None:
    """Add an item of a list; of a list of lists as ``|a,b|c``, the one word that layouts have."""
    if is_new:
        words[:] = ["".join(words) + f"|{word}"]
    elif words and words[0].startswith("|"):
        words[0] += f",{word}"
    else:
        words.append(word)


def _listed(text: str) -> list[str]:
    text = text.strip("{} \t,")
    if text.count(")") > text.count("("):
        text = text.rstrip("),")
    if not text.startswith(("[", "(")) or "*" in text:  # [0]*3+[1]*58 is one word
        return [_scalar(text)] if text else []
    inner = text.strip("()")
    if inner.startswith("[["):
        stages = re.findall(r"\[([^\[\]]*)\]", inner[1:-1])
        return ["|".join(",".join(map(_scalar, stage.split(","))) for stage in stages)]
    return [_scalar(part) for part in inner.strip("[]").split(",") if part.strip()]


def _scalar(text: str) -> str:
    return text.strip().strip("\"'").strip()
