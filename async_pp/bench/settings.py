"""`bench serve`: what to measure, and the checks that need neither vLLM nor a started process."""

import importlib.util
import json
import os
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_pp.errors import ConfigError
from async_pp.models import resolve_model

MAX_MODEL_LEN = 2048
"""Longest sequence the servers are started for, tokens."""

EMBEDDED = ("default", "tiny")
"""Model names that `async_pp.models` makes on this machine."""


def add_command(commands: Any) -> None:
    """Add the parser of `serve`."""
    serve = commands.add_parser(
        "serve",
        help="this server beside vLLM's own, on all cores this process may use",
        description="Measure this server and vLLM's own API server, one after the other, on all cores this process "
        "may use (taskset chooses them), split evenly among the ranks. CPU builds of vLLM.",
    )
    serve.set_defaults(run=run)
    add = serve.add_argument
    add("--against", choices=("vllm", "none"), default="vllm", help="the other system (default: vllm)")
    add("--model", default="default", help="default, tiny, or the folder of a model (default: default)")
    add("--pp", type=int, default=2, help="pipeline size (default: 2)")
    add("--no-reference", dest="reference", action="store_false", help="do not measure PP 1 too")
    add(
        "--concurrency",
        default="1,8,32",
        metavar="C,C,...",
        help="requests in flight, one level each (default: 1,8,32)",
    )
    add("--requests-per-level", type=int, metavar="N", help="default: three waves of the concurrency, at least 4")
    add("--input-len", type=int, default=128, metavar="TOKENS", help="of each prompt (default: 128)")
    add("--output-len", type=int, default=64, metavar="TOKENS", help="of each answer (default: 64)")
    add("--rounds", type=int, default=1, help="repeat everything so often, report medians (default: 1)")
    add("--json", type=Path, metavar="FILE", help="write the figures there too")


def run(args: Namespace, tell: Callable[[str], None]) -> str:
    """Measure and write the figures where they are wanted. Returns the table.

    Raises:
        ConfigError: it cannot work; nothing was started.
        BenchFailed: a server or a request failed; nothing is left.
    """
    chosen = check(args)
    model = chosen.folder()
    from async_pp.bench import report, serve  # psutil, which `check` has looked for, is an extra

    rows = serve.run(chosen, model, tell)
    if chosen.json is not None:
        chosen.json.write_text(report.as_json(rows), "utf-8")
    return report.table(rows)


@dataclass(frozen=True)
class Settings:
    """One run of the bench.

    Attributes:
        model: "default", "tiny" or a folder.
        pp: pipeline size to measure.
        concurrency: the levels: requests in flight, in the order they are measured.
        input_len, output_len: tokens of each prompt and of each answer.
        requests_per_level: requests measured at each level; None for `requests_at`.
        rounds: how often everything is repeated; medians are reported.
        against: the other system, or None.
        reference: measure PP 1 on the same cores too.
        json: where to write the rows, or None.
    """

    model: str
    pp: int
    concurrency: tuple[int, ...]
    input_len: int
    output_len: int
    requests_per_level: int | None
    rounds: int
    against: str | None
    reference: bool
    json: Path | None

    @property
    def pipelines(self) -> tuple[int, ...]:
        """The pipeline sizes to measure."""
        return (self.pp, 1) if self.reference and self.pp > 1 else (self.pp,)

    def requests_at(self, concurrency: int) -> int:
        """Requests to measure at a level: by default three waves of it, and four at least."""
        return self.requests_per_level or max(4, 3 * concurrency)

    def folder(self) -> Path:
        """The folder of the model, made if need be. Blocks while it is fetched.

        Raises:
            ConfigError: it cannot be made here, or it has fewer layers than stages.
        """
        return model_folder(self.model, self.pp)


def levels(text: str) -> tuple[int, ...]:
    """Read "1,8,32".

    Raises:
        ConfigError: it is not a list of different numbers from 1.
    """
    try:
        found = tuple(int(item) for item in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1 or len(set(found)) < len(found):
        raise ConfigError(f"--concurrency {text}: give different numbers from 1, with commas between, such as 1,8,32")
    return found


def check(args: Namespace) -> Settings:
    """Settings from a parsed command line.

    Raises:
        ConfigError: it cannot work; one line says what to change.
    """
    for name, least in (("pp", 1), ("input_len", 1), ("output_len", 2), ("rounds", 1)):
        if getattr(args, name) < least:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least {least}, not {getattr(args, name)}")
    if args.input_len + args.output_len > MAX_MODEL_LEN:
        total = args.input_len + args.output_len
        raise ConfigError(f"--input-len and --output-len together are {total}: at most {MAX_MODEL_LEN} tokens fit")
    concurrency = levels(args.concurrency)
    if args.requests_per_level is not None and args.requests_per_level < max(concurrency):
        raise ConfigError(
            f"--requests-per-level {args.requests_per_level} cannot keep {max(concurrency)} requests in flight:"
            f" give at least {max(concurrency)}"
        )
    check_model(args.model)
    check_file("--json", args.json)
    check_packages(("psutil", "bench"), ("vllm", "cpu"))
    return Settings(
        model=args.model,
        pp=args.pp,
        concurrency=concurrency,
        input_len=args.input_len,
        output_len=args.output_len,
        requests_per_level=args.requests_per_level,
        rounds=args.rounds,
        against=None if args.against == "none" else args.against,
        reference=args.reference,
        json=args.json,
    )


def check_model(name: str) -> None:
    """ConfigError: it is neither the name of an embedded model nor the folder of one."""
    if name not in EMBEDDED and not (Path(name).expanduser() / "config.json").is_file():
        raise ConfigError(f"--model {name}: give default, tiny or the folder of a model with its config.json")


def model_folder(name: str, pp: int) -> Path:
    """The folder of a model, made if need be. Blocks while it is fetched.

    Raises:
        ConfigError: it cannot be made here, or it has fewer layers than `pp` stages.
    """
    folder = Path(resolve_model(name)).expanduser().absolute()
    layers = _layers(folder)
    if layers is not None and pp > layers:
        raise ConfigError(f"--pp {pp} is greater than the {layers} layers of {name}")
    return folder


def check_packages(*needed: tuple[str, str]) -> None:
    """ConfigError: one of the packages, each with the extra that brings it, is not there."""
    for package, extra in needed:
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"the package {package} is needed: install async_pp[{extra}]")


def check_file(option: str, path: Path | None) -> None:
    """A run takes minutes: its result must not be lost because it cannot be written.

    Raises:
        ConfigError: the file cannot be written.
    """
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"{option} {path} is a folder: name a file")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{option} {path} cannot be written: choose a file in a folder that exists and is yours")


def _layers(folder: Path) -> int | None:
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder / 'config.json'} cannot be read: {error}") from error
    layers = config.get("num_hidden_layers") if isinstance(config, dict) else None
    return layers if isinstance(layers, int) else None
