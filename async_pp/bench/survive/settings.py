"""`bench survive`: what to do, and the checks that need neither vLLM nor a started process."""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from async_pp.bench.settings import check_file, check_model, check_packages, model_folder
from async_pp.errors import ConfigError

Tell = Callable[[str], None]
"""Progress, a line at a time."""

Fault = Literal["die", "freeze", "garbage", "raise"]
"""What happens to a rank: SIGKILL, SIGSTOP, its next frame is rubbish, its next step raises."""

FAULTS: tuple[Fault, ...] = get_args(Fault)


def add_command(commands: Any) -> None:
    """Add the parser of `survive`."""
    survive = commands.add_parser(
        "survive",
        help="ranks are killed, frozen and broken under load: what the clients see, and how long it takes",
        description="Kill single ranks under load and measure the time to the next token, beside the cold starts of "
        "this server and vLLM's; then break random ranks for minutes and account for every request. CPU builds "
        "of vLLM.",
    )
    survive.set_defaults(run=run)
    add = survive.add_argument
    add("--against", choices=("vllm", "none"), default="vllm", help="whose cold start to compare (default: vllm)")
    add("--model", default="default", help="default, tiny, or the folder of a model (default: default)")
    add("--pp", type=int, default=2, help="pipeline size (default: 2)")
    add("--streams", type=int, default=64, metavar="N", help="open at any time (default: 64)")
    add("--kills", type=int, default=3, metavar="N", help="of each rank, to be timed; 0: none (default: 3)")
    add("--starts", type=int, default=3, metavar="N", help="cold starts of each server (default: 3)")
    add("--minutes", type=float, default=10.0, help="of random faults; 0: none (default: 10)")
    add("--every", type=float, default=5.0, metavar="SECONDS", help="mean time between two faults (default: 5)")
    add("--faults", default=",".join(FAULTS), metavar="NAME,...", help=f"of {', '.join(FAULTS)} (default: all)")
    add("--seed", type=int, default=0, help="of prompts, faults and their times (default: 0)")
    add("--json", type=Path, metavar="FILE", help="write the figures there too")
    add("--log", type=Path, metavar="FILE", help="write there what the server under random faults prints")


def run(args: Namespace, tell: Tell) -> str:
    """Measure and write the figures where they are wanted. Returns the tables.

    Raises:
        ConfigError: it cannot work; nothing was started.
        BenchFailed: a server failed, or what is promised was not kept; nothing is left. Figures are written in the
            latter case too.
        Stopped: SIGINT or SIGTERM came; nothing is left.
    """
    chosen = check(args)
    model = model_folder(chosen.model, chosen.pp)
    from async_pp.bench.survive import session  # aiohttp and psutil, which `check` has looked for

    return session.run(chosen, model, tell)


@dataclass(frozen=True)
class Settings:
    """One run of the bench.

    Attributes:
        model: "default", "tiny" or a folder.
        pp: pipeline size.
        streams: kept open.
        kills: timed kills of each rank.
        starts: cold starts of each server, if there are kills.
        against_vllm: measure vLLM's cold start.
        minutes: of random faults.
        every_s: mean time between two of them.
        faults: the kinds, each as likely.
        seed: of all that is random.
        json, log: files to write, or None.
    """

    model: str
    pp: int
    streams: int
    kills: int
    starts: int
    against_vllm: bool
    minutes: float
    every_s: float
    faults: tuple[Fault, ...]
    seed: int
    json: Path | None
    log: Path | None


def check(args: Namespace) -> Settings:
    """Settings from a parsed command line.

    Raises:
        ConfigError: it cannot work; one line says what to change.
    """
    for name, least in (("pp", 1), ("streams", 1), ("kills", 0), ("starts", 1), ("minutes", 0)):
        if not getattr(args, name) >= least:
            raise ConfigError(f"--{name} must be at least {least}, not {getattr(args, name)}")
    if not args.every > 0:
        raise ConfigError(f"--every must be greater than 0 seconds, not {args.every:g}")
    if not args.kills and not args.minutes:
        raise ConfigError("--kills 0 and --minutes 0 leave nothing to do")
    check_model(args.model)
    check_file("--json", args.json)
    check_file("--log", args.log)
    check_packages(("psutil", "bench"), ("aiohttp", "cpu"), ("vllm", "cpu"))
    return Settings(
        model=args.model,
        pp=args.pp,
        streams=args.streams,
        kills=args.kills,
        starts=args.starts,
        against_vllm=args.against == "vllm",
        minutes=args.minutes,
        every_s=args.every,
        faults=_faults(args.faults),
        seed=args.seed,
        json=args.json,
        log=args.log,
    )


def _faults(text: str) -> tuple[Fault, ...]:
    names = text.split(",")
    found = tuple(fault for fault in FAULTS if fault in names)
    if len(found) != len(names):
        raise ConfigError(f"--faults {text}: give different ones of {','.join(FAULTS)}, with commas between")
    return found
