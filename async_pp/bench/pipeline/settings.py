"""`bench pipeline`: what to measure, and the checks that need neither vLLM nor a started process."""

import importlib.util
import math
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from async_pp.bench.pipeline import connectors
from async_pp.bench.pipeline.connectors import Connector
from async_pp.bench.pipeline.loads import Conditions, Load, find, names
from async_pp.bench.pipeline.surroundings import measuring
from async_pp.bench.settings import check_file
from async_pp.bench.stopping import uninterrupted
from async_pp.core.policy import PolicyName
from async_pp.errors import ConfigError
from async_pp.models import ensure_tiny
from async_pp.models.tiny import MAX_LAYERS
from async_pp.ranks.sleeping_runner import StageTime

Tell = Callable[[str], None]
"""Progress, a line at a time."""


def add_command(commands: Any) -> None:
    """Add the parser of `pipeline`."""
    pipeline = commands.add_parser(
        "pipeline",
        help="pipelines of sleeping ranks: this engine, vLLM and the computed limit",
        description="Measure how near this engine and vLLM's come to what a pipeline can do. The ranks are real "
        "processes that sleep instead of computing, so any depth runs on few cores. CPU builds of vLLM.",
        epilog=f"Loads: {', '.join(names())}. A burst's N is the number of requests. Requests have 16 tokens in and 40 "
        "out unless the load says otherwise.",
    )
    pipeline.set_defaults(run=run)
    add = pipeline.add_argument
    add("--pp", type=int, default=8, help="pipeline size (default: 8)")
    add(
        "--stage",
        action="append",
        metavar="MS,MS,MS",
        help="time of a stage: base, per sequence, per token; for unequal stages once for each, or with ';' between "
        "(default: 4,1,0.1)",
    )
    add("--load", action="append", metavar="NAME", help="may be repeated; 'all' for every one (default: burst-4P)")
    add("--against", choices=("vllm", "none"), default="vllm", help="the other system (default: vllm)")
    add(
        "--policy",
        choices=get_args(PolicyName),
        default="balanced",
        help="how this engine splits its load (default: balanced)",
    )
    add(
        "--connector",
        default=connectors.NONE.name,
        metavar="NAME[,NAME]",
        help="KV connector of every rank, for both systems, each measured in turn: none, on-time, or late-K, where the "
        "first rank reports K steps late (default: none)",
    )
    add(
        "--kv-role",
        choices=connectors.ROLES,
        default=connectors.ON_TIME.role,
        help="of the connector, as vLLM has it; with kv_consumer no step needs every rank (default: kv_both)",
    )
    add("--rate", type=float, default=0.7, help="of poisson, as a share of the limit (default: 0.7)")
    add("--duration", type=float, default=20.0, metavar="S", help="of the arrivals of poisson (default: 20)")
    add("--seed", type=int, default=0, help="of poisson (default: 0)")
    add("--rounds", type=int, default=1, help="repeat everything so often, report medians (default: 1)")
    add("--json", type=Path, metavar="FILE", help="write the figures there too")
    add("--picture", type=Path, metavar="FILE.png", help="draw the stages' work over time there")


def run(args: Namespace, tell: Tell) -> str:
    """Measure and write the figures where they are wanted. Returns the table.

    Raises:
        ConfigError: it cannot work; nothing was started.
        BenchFailed: an engine or a request failed; nothing is left.
        Stopped: SIGINT or SIGTERM came; nothing is left.
    """
    chosen = check(args)
    model = ensure_tiny()
    for load in chosen.loads:
        if load.note:
            tell(f"{load.name}: {load.note}")
    with measuring():
        tell("importing vLLM")
        with uninterrupted():  # an exception out of nowhere, halfway through an import, is taken for something else
            from async_pp.bench.pipeline import session
        rounds = session.run(chosen, model, tell)
    from async_pp.bench.pipeline import report

    rows = report.rows(chosen, rounds)
    if chosen.json is not None:
        chosen.json.write_text(report.as_json(rows), "utf-8")
    if chosen.picture is not None:
        from async_pp.bench.pipeline import picture

        picture.draw(chosen, rounds[-1], rows, chosen.picture)
    return report.table(rows)


@dataclass(frozen=True)
class Case:
    """What is measured at a time: a load, with a connector."""

    load: Load
    connector: Connector

    @property
    def title(self) -> str:
        """For a person."""
        return self.load.name if self.connector.late_steps is None else f"{self.load.name}, {self.connector.name}"


@dataclass(frozen=True)
class Settings:
    """One run of the bench.

    Attributes:
        stages: time of each stage; their number is the pipeline size.
        loads: what to measure, in order.
        connectors: with which KV connectors, in order.
        against_vllm: measure vLLM too.
        policy: how our engine splits its load.
        rounds: how often everything is repeated.
        json, picture: files to write, or None.
    """

    stages: tuple[StageTime, ...]
    loads: tuple[Load, ...]
    connectors: tuple[Connector, ...]
    against_vllm: bool
    policy: PolicyName
    rounds: int
    json: Path | None
    picture: Path | None

    @property
    def pp(self) -> int:
        """Pipeline size."""
        return len(self.stages)

    @property
    def cases(self) -> tuple[Case, ...]:
        """Every load with every connector, load by load."""
        return tuple(Case(load, connector) for load in self.loads for connector in self.connectors)


def stage_times(texts: Sequence[str], pp: int) -> tuple[StageTime, ...]:
    """Read "4,1,0.1" (milliseconds), for all stages or for each.

    Raises:
        ConfigError: it cannot be read, or there is neither one nor `pp` of them.
    """
    found = tuple(_stage_time(part) for text in texts for part in text.split(";"))
    if len(found) not in (1, pp):
        raise ConfigError(f"--stage is given for {len(found)} stages: give it once, or {pp} times for --pp {pp}")
    return found * pp if len(found) == 1 else found


def _stage_time(text: str) -> StageTime:
    try:
        values = [float(item) / 1e3 for item in text.split(",")]
    except ValueError:
        values = []
    if len(values) != 3 or min(values) < 0 or not all(map(math.isfinite, values)) or not sum(values):
        raise ConfigError(f"--stage {text}: give base, per sequence and per token in ms, such as 4,1,0.1")
    return StageTime(*values)


def check(args: Namespace) -> Settings:
    """Settings from a parsed command line.

    Raises:
        ConfigError: it cannot work; one line says what to change.
    """
    for name in ("pp", "rounds"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name} must be at least 1, not {getattr(args, name)}")
    if args.pp > MAX_LAYERS:
        raise ConfigError(f"--pp can be at most {MAX_LAYERS}, not {args.pp}")
    for name in ("rate", "duration"):
        if not 0 < getattr(args, name) < math.inf:
            raise ConfigError(f"--{name} must be greater than 0, not {getattr(args, name)}")
    stages = stage_times(args.stage or ["4,1,0.1"], args.pp)
    conditions = Conditions(stages, rate=args.rate, duration_s=args.duration, seed=args.seed)
    loads = find(args.load or [f"burst-{4 * args.pp}"], conditions)
    for option, path in (("--json", args.json), ("--picture", args.picture)):
        check_file(option, path)
    if args.picture is not None and args.picture.suffix != ".png":
        raise ConfigError(f"--picture {args.picture}: give a name that ends with .png")
    needed = {"vllm": "cpu"}
    if args.against == "vllm":
        needed["psutil"] = "bench"
    if args.picture is not None:
        needed["matplotlib"] = "bench"
    for package, extra in needed.items():
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"the package {package} is needed: install async_pp[{extra}]")
    return Settings(
        stages=stages,
        loads=loads,
        connectors=connectors.find(args.connector, args.kv_role, args.pp),
        against_vllm=args.against == "vllm",
        policy=args.policy,
        rounds=args.rounds,
        json=args.json,
        picture=args.picture,
    )
