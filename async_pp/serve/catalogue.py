"""What `vllm serve` accepts, as facts that cost nothing to read.

Building vLLM's own parser means importing vLLM, which takes ten seconds or more. This module keeps the *shape* of that
parser (names, arity, types, choices, defaults, groups) in a small data file, and reads the *words* (what a flag is for)
out of the installed vLLM's source text with `ast`. From both a plain `argparse` parser is made that answers `--help`
and refuses a misspelt flag at once.

The data file is written by `python -m async_pp.serve.catalogue` and a test holds it equal to the live parser. For a
vLLM it was not written for, the live parser is asked once and the answer kept in the user's cache folder.

Nothing here decides anything about serving, and nothing here imports vLLM at module level.
"""

import argparse
import ast
import json
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import resources
from importlib.util import find_spec
from inspect import cleandoc
from pathlib import Path
from typing import Any

from async_pp.engine.vllm_seam.version import installed

_KINDS = {
    "_StoreAction": "store",
    "_StoreTrueAction": "switch",
    "_StoreFalseAction": "switch",
    "BooleanOptionalAction": "pair",
    "_AppendAction": "append",
    "LoRAParserAction": "store",
    "DeprecatedLogConfigFileAction": "store",
}
_TYPES: dict[Any, str] = {None: "str", str: "str", int: "int", float: "float"}
_SOURCES = ("config/*.py", "engine/arg_utils.py", "entrypoints/launchers/cli_args.py")


@dataclass(frozen=True)
class Flag:
    """One argument. `kind` is store, switch (no value), pair (`--x` and `--no-x`) or append.

    `type` is str, int, float, or other (vLLM converts it in a way of its own, so only vLLM can check the value).
    `default` is the text that help shows, or None when there is none worth showing.
    """

    options: tuple[str, ...]
    dest: str
    kind: str
    nargs: str | None
    type: str
    choices: tuple[str, ...]
    metavar: str | None
    default: str | None


@dataclass(frozen=True)
class Group:
    """Flags under one title, in the parser's order."""

    title: str
    flags: tuple[Flag, ...]


@dataclass(frozen=True)
class Catalogue:
    """All groups of `vllm serve` of one vLLM version."""

    version: str
    groups: tuple[Group, ...]

    def flags(self) -> Iterator[Flag]:
        """Every flag of every group."""
        for group in self.groups:
            yield from group.flags

    def dump(self) -> str:
        """JSON text with one line per flag, so that a change of vLLM's reads well in a diff."""
        lines = [f'{{"version": {json.dumps(self.version)}, "groups": [']
        for index, group in enumerate(self.groups):
            lines.append(f'{{"title": {json.dumps(group.title)}, "flags": [')
            lines.append(",\n".join(json.dumps(asdict(flag)) for flag in group.flags))
            lines.append("]}" + ("," if index + 1 < len(self.groups) else ""))
        return "\n".join([*lines, "]}"]) + "\n"

    @classmethod
    def parse(cls, text: str) -> "Catalogue":
        """The inverse of `dump`."""
        data = json.loads(text)
        return cls(data["version"], tuple(Group(g["title"], tuple(map(_flag, g["flags"]))) for g in data["groups"]))

    @classmethod
    def from_parser(cls, parser: argparse.ArgumentParser, version: str) -> "Catalogue":
        """The facts of a live parser. Groups without flags and the help flag are left out."""
        groups = []
        for group in parser._action_groups:  # noqa: SLF001 - argparse has no public way to list them
            actions = [action for action in group._group_actions if action.dest != "help"]  # noqa: SLF001
            flags = tuple(_from_action(action) for action in actions)
            if flags:
                groups.append(Group(group.title or "", flags))
        return cls(version, tuple(groups))


def _flag(data: dict[str, Any]) -> Flag:
    return Flag(**{**data, "options": tuple(data["options"]), "choices": tuple(data["choices"])})


def _from_action(action: argparse.Action) -> Flag:
    default = action.default
    simple = isinstance(default, str | int | float | bool) and default != argparse.SUPPRESS and default != ""
    metavar = action.metavar
    return Flag(
        options=tuple(action.option_strings),
        dest=action.dest,
        kind=_KINDS.get(type(action).__name__, "store"),
        nargs=str(action.nargs) if action.nargs in ("+", "*", "?") else None,
        type=_TYPES.get(action.type, "other"),
        choices=tuple(str(choice) for choice in action.choices or ()),
        metavar=metavar if isinstance(metavar, str) or metavar is None else "{" + ",".join(map(str, metavar)) + "}",
        default=str(default) if simple else None,
    )


def load() -> Catalogue:
    """The catalogue for the installed vLLM: shipped, else kept from an earlier call, else from the live parser.

    Raises:
        UnsupportedVersion: no vLLM is installed.
    """
    version = installed()
    shipped = Catalogue.parse(resources.files(__package__).joinpath("vllm_flags.json").read_text("utf-8"))
    if shipped.version == version:
        return shipped
    kept = _cache_folder() / f"flags-{version}.json"
    with suppress(OSError, ValueError, KeyError, TypeError):  # absent, unreadable or of another shape: ask again
        return Catalogue.parse(kept.read_text("utf-8"))
    catalogue = from_live_parser()
    with suppress(OSError):  # a read-only home costs only the wait next time
        kept.parent.mkdir(parents=True, exist_ok=True)
        draft = kept.with_suffix(f".{os.getpid()}")
        draft.write_text(catalogue.dump(), "utf-8")
        draft.replace(kept)
    return catalogue


def from_live_parser() -> Catalogue:
    """Ask vLLM itself. Imports it, which takes ten seconds or more."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return Catalogue.from_parser(make_arg_parser(FlexibleArgumentParser()), installed())


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "async_pp"


class Words:
    """What vLLM's source says about its flags: field docstrings, class docstrings and literal help texts.

    Reads some forty files, about 0.15 s. A vLLM without source text gives empty words, never an error.
    """

    def __init__(self) -> None:
        self._fields: dict[str, dict[str, str]] = {}
        self._classes: dict[str, str] = {}
        self._literals: dict[str, str] = {}
        self._links: dict[str, tuple[str, str]] = {}  # option -> variable and field of `add_argument("--x", **v["x"])`
        self._variables: dict[str, str] = {}  # variable -> class whose fields it describes
        spec = find_spec("vllm")
        for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
            for pattern in _SOURCES:
                for path in sorted(Path(folder).glob(pattern)):
                    with suppress(OSError, SyntaxError):
                        self._read(ast.parse(path.read_text("utf-8")))

    def group(self, title: str) -> str:
        """First paragraph about a group, as one line."""
        text = self._classes.get(title) or self._classes.get(title + "Args") or ""
        return " ".join(text.split("\n\n", 1)[0].split())

    def flag(self, title: str, flag: Flag) -> str:
        """What one flag of the group `title` is for. Empty when the source does not say."""
        link = next((self._links[option] for option in flag.options if option in self._links), None)
        if link is not None:
            return self._fields.get(self._variables.get(link[0], ""), {}).get(link[1], "")
        literal = next((self._literals[name] for name in flag.options or (flag.dest,) if name in self._literals), None)
        own = next((self._fields[n][flag.dest] for n in _classes(title) if flag.dest in self._fields.get(n, {})), None)
        return literal or own or self._classes.get(_class_name(flag.dest), "")

    def _read(self, tree: ast.Module) -> None:
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                self._classes[node.name] = ast.get_docstring(node) or ""
                self._fields[node.name] = dict(_field_docs(node))
            elif isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("get_kwargs("):
                self._variables[ast.unparse(node.targets[0])] = ast.unparse(node.value)[len("get_kwargs(") : -1]
            elif isinstance(node, ast.Call):
                self._read_call(node)

    def _read_call(self, node: ast.Call) -> None:
        names = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        for keyword in node.keywords if names else ():
            match keyword:
                case ast.keyword(arg="help", value=ast.Constant(value=str(text))):
                    self._literals.update(dict.fromkeys(names, text))
                case ast.keyword(
                    arg=None, value=ast.Subscript(value=ast.Name(id=variable), slice=ast.Constant(value=str(name)))
                ):
                    self._links.update(dict.fromkeys(names, (variable, name)))


def _classes(title: str) -> tuple[str, ...]:
    """Classes that may hold the fields of a group: ModelConfig, or FrontendArgs and its base."""
    return title, f"{title}Args", f"Base{title}Args"


def _class_name(dest: str) -> str:
    """ "kernel_config" -> "KernelConfig": a flag that takes a whole configuration object is told by its class."""
    return "".join(part.capitalize() for part in dest.split("_"))


def _field_docs(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for before, after in zip(node.body, node.body[1:], strict=False):
        if not (isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)):
            continue
        if isinstance(after.value.value, str) and isinstance(before, ast.AnnAssign):
            yield ast.unparse(before.target), cleandoc(after.value.value)


if __name__ == "__main__":
    sys.stdout.write(from_live_parser().dump())
