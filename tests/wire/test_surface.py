"""Where pickles and names from outside may be used at all.

Only `wire.frames` unpickles, and only what lies behind a seal that it has checked: whoever could have anything else
unpickled, or called by a name, would run code of his own.
"""

import ast
import tomllib
from pathlib import Path

import pytest

import async_pp

PACKAGE = Path(async_pp.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
PICKLERS = {"pickle", "cloudpickle", "marshal", "shelve", "dill"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_frames_pickles(path: Path) -> None:
    tree = ast.parse(path.read_text())
    imported = {
        alias.name.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
    } | {(node.module or "").split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    if path != PACKAGE / "wire" / "frames.py":
        assert not imported & PICKLERS


BY_NAME = {
    "getattr", "setattr", "delattr", "attrgetter", "methodcaller", "import_module", "resolve_name", "__import__",
    "eval", "exec", "compile",
}  # fmt: skip
"""What finds or runs something by its name."""

TOLD_BY_THE_PARENT = {
    "ranks/main.py": ["resolve_name"],  # the class of the runner: from the bootstrap, which is inherited
    "ranks/zygote.py": ["import_module", "resolve_name"],  # from its command line and over its inherited socket
    "engine/vllm_seam/bridge.py": ["methodcaller"],  # the method that the program itself wants called on its workers
}


@pytest.mark.parametrize("layer", ["wire", "channel", "ranks", "engine"])
def test_nothing_is_looked_up_by_a_name_that_is_not_written_in_the_code(layer: str) -> None:
    found: dict[str, list[str]] = {}
    for path in sorted((PACKAGE / layer).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and (name := _called(node.func)) in BY_NAME:
                wanted = node.args[1] if name in ("getattr", "setattr", "delattr") else node.args[0]
                if not isinstance(wanted, ast.Constant) and ast.unparse(wanted) != "BACKEND":  # a constant
                    found.setdefault(str(path.relative_to(PACKAGE)), []).append(name)
    expected = {path: names for path, names in TOLD_BY_THE_PARENT.items() if path.startswith(f"{layer}/")}
    assert {path: sorted(names) for path, names in found.items()} == expected


def _called(function: ast.expr) -> str:
    match function:
        case ast.Name(id=name) | ast.Attribute(value=ast.Name(), attr=name):
            return name
    return ""


def test_the_linter_refuses_pickles_elsewhere() -> None:
    rules = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]
    assert "S301" in rules["select"]
    assert [path for path, ignored in rules["per-file-ignores"].items() if "S301" in ignored] == [
        "async_pp/wire/frames.py",
        "tests/*",
    ]
