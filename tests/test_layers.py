"""The layers hold: the import contracts of pyproject.toml, and what `core` and `wire` may name at all.

The contracts see chains of imports between modules of this package; the syntax trees also show imports inside functions
and those made by a call, which a contract on module level could be worked round with.
"""

import ast
import logging.config
from collections.abc import Iterator
from pathlib import Path

import pytest
from importlinter.api import read_configuration
from importlinter.cli import lint_imports

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "async_pp"
CONFIGURATION = ROOT / "pyproject.toml"

CONTRACTS = [contract["id"] for contract in read_configuration(str(CONFIGURATION))["contracts_options"]]

BELOW_ALL_IO = {"asyncio", "multiprocessing", "socket", "subprocess", "threading", "torch", "uvloop", "vllm", "zmq"}
FORBIDDEN = {
    "core": BELOW_ALL_IO
    | {"concurrent", "datetime", "os", "random", "secrets", "select", "selectors", "signal", "time"},
    "wire": BELOW_ALL_IO | {"datetime", "os", "pathlib", "random", "select", "selectors", "signal", "time"},
}
# Of this package, what each of the two may know.
ALLOWED = {"core": ("async_pp.core",), "wire": ("async_pp.wire", "async_pp.core", "async_pp.errors")}
FILES = [(layer, path) for layer in FORBIDDEN for path in sorted((PACKAGE / layer).rglob("*.py"))]


def imported(tree: ast.AST) -> Iterator[str]:
    """Every module that is imported anywhere in the tree, and the names of functions that import by call."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (name.name for name in names)
            case ast.ImportFrom(module=str(module), level=0, names=names):
                yield module
            case ast.ImportFrom():
                yield "a relative import"  # the rules below could not see what it names
            case ast.Name(id="__import__" | "exec" | "eval" as name):
                yield name


@pytest.mark.parametrize("contract", CONTRACTS)
def test_import_contract(contract: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    # The command configures the logging of this process, and switches off every logger that there is.
    monkeypatch.setattr(logging.config, "dictConfig", lambda _: None)
    status = lint_imports(str(CONFIGURATION), limit_to_contracts=(contract,), no_cache=True)
    assert status == 0, capsys.readouterr().out


def test_the_contracts_that_the_design_asks_for_are_there() -> None:
    assert {"layers", "core-is-pure", "wire-does-no-io", "vllm-has-one-door"} <= set(CONTRACTS)


@pytest.mark.parametrize(("layer", "path"), FILES, ids=lambda value: value.name if isinstance(value, Path) else value)
def test_low_layers_know_neither_io_nor_frameworks_nor_clock(layer: str, path: Path) -> None:
    for name in imported(ast.parse(path.read_text())):
        root = name.partition(".")[0]
        assert root not in FORBIDDEN[layer] | {
            "importlib",
            "pkgutil",
            "__import__",
            "exec",
            "eval",
            "a relative import",
        }
        if root == "async_pp":
            assert name.startswith(ALLOWED[layer])


def test_there_are_files_to_look_at() -> None:
    assert {layer for layer, _ in FILES} == set(FORBIDDEN)


@pytest.mark.parametrize(
    "source",
    [
        "import time",
        "import torch.nn as nn",
        "from asyncio import Queue",
        "def f():\n    import random",
        "if True:\n    from zmq.asyncio import Socket",
        "from vllm.config import VllmConfig",
    ],
)
def test_the_search_finds_imports_of_every_form(source: str) -> None:
    assert {name.partition(".")[0] for name in imported(ast.parse(source))} & FORBIDDEN["core"]


@pytest.mark.parametrize("source", ["from . import frames", "__import__('time')", "from ..core import window"])
def test_the_search_finds_imports_it_could_not_judge(source: str) -> None:
    assert {"a relative import", "__import__"} & set(imported(ast.parse(source)))
