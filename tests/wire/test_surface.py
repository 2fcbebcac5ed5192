"""Where pickles and names from outside may be used at all."""

import ast
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


@pytest.mark.parametrize("layer", ["wire", "channel", "ranks", "engine"])
def test_no_method_is_looked_up_by_a_name_that_is_not_written_in_the_code(layer: str) -> None:
    found = [
        f"{path.name}:{node.lineno}"
        for path in sorted((PACKAGE / layer).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "getattr"
        and not isinstance(node.args[1], ast.Constant)
    ]
    assert not found
