"""The house: a class name once, names that say what, no circles of imports, packages three deep."""

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

from optpipe.runtime.torch_names import PRIVATE_NAMES

ROOTS = [
    Path(root)
    for root in (
        "optpipe", "solver/optpipe_solver", "api/optpipe_api", "examples", "benchmarks", "docs",
    )
]  # fmt: skip


@cache
def modules() -> dict[str, ast.Module]:
    """Return every module, parsed, by its dotted name."""
    found = {}
    for root in ROOTS:
        for path in root.rglob("*.py"):
            if "versions" in path.parts:  # alembic's, named by number
                continue
            parts = path.relative_to(root.parent).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = ast.parse(path.read_text(encoding="utf-8"))
    return found


@cache
def nodes() -> dict[str, list[ast.AST]]:
    """Return all that every module is made of: to walk a tree takes as long as to parse it."""
    return {name: list(ast.walk(tree)) for name, tree in modules().items()}


def imports_of(parts: list[ast.AST], known: set[str]) -> set[str]:
    """Return the modules of ours that one imports anywhere, for types alone included."""
    wanted: set[str] = set()
    for node in parts:
        if isinstance(node, ast.ImportFrom) and node.module:
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            wanted.update(name if name in known else node.module for name in full)
        elif isinstance(node, ast.Import):
            wanted.update(alias.name for alias in node.names)
    return wanted & known


def test_a_class_name_exists_once() -> None:
    """One word, one meaning."""
    places = defaultdict(list)
    for name, parts in nodes().items():
        for node in parts:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(name)
    twice = {word: where for word, where in places.items() if len(where) > 1}
    assert not twice


def test_no_circle_of_imports() -> None:
    """Imports inside functions and for types alone count."""
    known = set(nodes())
    arrows = {name: imports_of(parts, known) - {name} for name, parts in nodes().items()}
    while True:
        free = {name for name, wanted in arrows.items() if not wanted}
        if not free:
            break
        arrows = {name: wanted - free for name, wanted in arrows.items() if name not in free}
    assert not arrows, sorted(arrows)


OF_OTHERS = {
    "_forward_impl": "the seam that Megatron-Core has",
    "_init_weights": "documented by transformers for its subclasses",
    "_experts_implementation": "the public `experts_implementation` of transformers, as stored",
    "_from_config": "how transformers' own `from_config` builds a class",
    "_model_mapping": "which configuration classes an Auto class of transformers knows",
    "_supports_attention_backend": "set by transformers' classes: attention is a function by name",
    "_supports_flash_attn": "the same: masks need not exist",
    "_supports_sdpa": "the same: torch's attention",
    "_orig_mod": "the name that `torch.compile` gives to what it wraps, in keys of checkpoints too",
    "_grouped_mm": "a method of transformers' and torchtitan's experts; torch's own is listed",
    "_exit": "documented",
    "_asdict": "documented",
    "_replace": "documented",
}


def test_private_names_of_torch_are_in_one_file_and_listed() -> None:
    """Each with its use and what would be done without it."""
    runtime = {name: parts for name, parts in nodes().items() if ".runtime." in f"{name}."}
    home = runtime.pop("optpipe.runtime.torch_names")
    assert _private_names(home) - _names_defined(home) - {"_C"} == set(PRIVATE_NAMES)
    ours = set[str]().union(*map(_names_defined, runtime.values()), OF_OTHERS)
    others = {name: _private_names(parts) - ours for name, parts in runtime.items()}
    assert not {name: names for name, names in others.items() if names}
    assert len(PRIVATE_NAMES) <= 30


def _names_defined(parts: list[ast.AST]) -> set[str]:
    found: set[str] = set()
    for node in parts:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
            case ast.Attribute(attr=name, ctx=ast.Store(), value=ast.Name(id="self")):
                found.add(name)
    return found


def _private_names(parts: list[ast.AST]) -> set[str]:
    """Return the private attributes that a module reads, by name or `getattr`, and imports from."""
    found: set[str] = set()
    for node in parts:
        match node:
            case ast.Attribute(attr=name, ctx=ast.Load()):
                found.add(name)
            case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(str(name)), *_]):
                found.add(name)
            case ast.ImportFrom(module=str(name)) if name.startswith("torch."):
                found |= {name} if "._" in name else {alias.name for alias in node.names}
    return {name for name in found if "._" in name or (name.startswith("_") and name[:2] != "__")}


def test_packages_are_at_most_three_deep() -> None:
    """A module's folders, its own package counted."""
    deep = [name for name in modules() if name.count(".") > 3]
    assert not deep


def test_a_script_begins_once_all_of_it_is_there() -> None:
    """What stands below its ``if __name__`` would be unknown while it runs."""
    for name, tree in modules().items():
        guards = [node for node in tree.body if ast.unparse(node).startswith("if __name__ ==")]
        assert not guards or tree.body[-1] is guards[-1], name


SAYS_NOTHING = {"held", "told", "asked", "made"}
"""What was done with a value, and not what it is."""


def bound_name(node: ast.AST) -> str:
    """Return the name of a variable, parameter, field or attribute that a node binds, if any."""
    if isinstance(node, ast.arg):
        return node.arg
    if isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
        return node.id if isinstance(node, ast.Name) else node.attr
    return ""


def test_a_name_says_what_it_holds() -> None:
    """``made = solve(problem)`` says less than ``result``; in tests, too."""
    texts = {str(path): path.read_text("utf-8") for path in Path("tests").rglob("*.py")}
    words = re.compile(rf"\b({'|'.join(SAYS_NOTHING)})\b")
    tests = {path: ast.parse(text) for path, text in texts.items() if words.search(text)}
    parts_of = nodes() | {path: list(ast.walk(tree)) for path, tree in tests.items()}
    found = {
        module: names
        for module, parts in parts_of.items()
        if (names := {bound_name(node) for node in parts} & SAYS_NOTHING)
    }
    assert not found


def test_browser_tests_are_in_their_folder() -> None:
    """`.ci/run` looks for them there alone."""
    marked = [
        path
        for path in Path("tests").rglob("test_*.py")
        if "mark.browser" in path.read_text("utf-8") and path != Path("tests/test_house.py")
    ]
    assert marked
    assert all(path.is_relative_to("tests/browser") for path in marked)
