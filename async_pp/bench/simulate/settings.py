"""`bench simulate`: what to simulate, and the checks that need no vLLM."""

import importlib.util
import os
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_pp.bench.settings import check_file
from async_pp.bench.simulate import requests
from async_pp.bench.simulate.requests import Arrival, Lengths
from async_pp.bench.simulate.stages import StageCost
from async_pp.core.policy import PolicyName
from async_pp.errors import ConfigError

SEQUENCES_PER_STAGE = 8
"""Default of --max-num-seqs, per stage."""

TOKENS_PER_STEP = 2048
"""Default of --max-num-batched-tokens, where no more sequences than that run."""

REQUESTS = 10_000
INPUT_LEN, OUTPUT_LEN = "16-512", "8-128"

ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
"""What this program sets before it imports vLLM, where the user set nothing: no look at the hub, no reports, no word
about what the workers, which there are none of, would do."""


def add_command(commands: Any) -> None:
    """Add the parser of `simulate`."""
    simulate = commands.add_parser(
        "simulate",
        help="this engine on a virtual clock: deep or unequal pipelines, many requests, no ranks",
        description="Run this engine's planning and vLLM's scheduler on a virtual clock, with stages whose times are "
        "given: for deep pipelines, unequal stages and long loads, without a rank and without waiting. All times in "
        "milliseconds. Same settings, same seed, same result.",
    )
    simulate.set_defaults(run=run)
    add = simulate.add_argument
    add("--pp", default="4", metavar="P,P,...", help="pipeline sizes, one row each (default: 4)")
    add(
        "--stage",
        action="append",
        metavar="BASE,SEQ,TOKEN[,PAIR]",
        help="time of a stage per step, sequence, token and (attention) pair of a token and one it looks at; once for "
        "all stages, or once for each (default: 4,1,0.1)",
    )
    add(
        "--slow",
        action="append",
        default=[],
        metavar="STAGE=FACTOR",
        help="a stage, from 0, that takes so many times it",
    )
    add("--hop", type=float, default=0.0, metavar="MS", help="from stage to stage, and to and from the engine")
    add("--host", type=float, default=0.0, metavar="MS", help="that the engine takes for each step")
    add("--policy", choices=("balanced", "fill-first"), default="balanced", help="default: balanced")
    load = simulate.add_mutually_exclusive_group()
    load.add_argument("--rate", type=float, metavar="R", help="requests per second, Poisson")
    load.add_argument(
        "--saturated",
        action="store_true",
        help="max-num-seqs requests open, the next as soon as one ends (default without --rate and --trace)",
    )
    add("--trace", type=Path, metavar="FILE", help=f"CSV, or JSON lines (.jsonl), with {', '.join(requests.FIELDS)}")
    add("--requests", type=int, metavar="N", help=f"of the trace at most; else that many (default: {REQUESTS})")
    add("--input-len", metavar="TOKENS", help=f"or LEAST-MOST (default: {INPUT_LEN})")
    add("--output-len", metavar="TOKENS", help=f"or LEAST-MOST (default: {OUTPUT_LEN})")
    add("--seed", type=int, default=0, help="of lengths and arrivals (default: 0)")
    add("--max-num-seqs", type=int, metavar="N", help=f"requests that run (default: {SEQUENCES_PER_STAGE} per stage)")
    add("--max-num-batched-tokens", type=int, metavar="N", help=f"of one step (default: {TOKENS_PER_STEP})")
    add("--block-size", type=int, default=16, metavar="TOKENS", help="of a KV block (default: 16)")
    add("--num-gpu-blocks", type=int, metavar="N", help="KV blocks of a stage (default: enough for max-num-seqs)")
    add("--json", type=Path, metavar="FILE", help="write the figures there too")


def run(args: Namespace, tell: Callable[[str], None]) -> str:
    """Simulate and write the figures where they are wanted. Returns the table.

    Raises:
        ConfigError: it cannot work.
        BenchFailed: the engine could not go on.
    """
    chosen = check(args)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    tell("importing vLLM")
    from async_pp.bench.simulate import report, simulation

    rows = simulation.run(chosen, tell)
    if chosen.json is not None:
        chosen.json.write_text(report.as_json(rows), "utf-8")
    return report.table(rows)


@dataclass(frozen=True)
class Settings:
    """One run of the simulation.

    Attributes:
        pipelines: pipeline sizes, one simulation each.
        stages: cost of every stage, or of each one.
        slow: factors by stage.
        hop_s, host_s: see `ranks.SimulatedRanks`.
        policy: "balanced" or "fill-first".
        saturated: keep as many requests open as may run, whenever they arrive.
        arrivals: the requests, by arrival.
        max_num_seqs, max_num_batched_tokens, num_gpu_blocks: vLLM's limits, or None for defaults by pipeline size.
        block_size: tokens of a KV block.
        json: where to write the rows, or None.
    """

    pipelines: tuple[int, ...]
    stages: tuple[StageCost, ...]
    slow: dict[int, float]
    hop_s: float
    host_s: float
    policy: PolicyName
    saturated: bool
    arrivals: tuple[Arrival, ...]
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    num_gpu_blocks: int | None
    block_size: int
    json: Path | None

    def costs(self, pp: int) -> tuple[StageCost, ...]:
        """Of each of `pp` stages."""
        costs = self.stages if len(self.stages) > 1 else self.stages * pp
        return tuple(cost.slower(self.slow.get(stage, 1.0)) for stage, cost in enumerate(costs))

    def limits(self, pp: int) -> dict[str, int]:
        """vLLM's limits for `pp` stages, by the names of its engine arguments."""
        sequences = self.max_num_seqs or SEQUENCES_PER_STAGE * pp
        longest = max(arrival.input_tokens + arrival.output_tokens for arrival in self.arrivals)
        blocks = -(-longest // self.block_size)
        return {
            "max_num_seqs": sequences,
            "max_num_batched_tokens": self.max_num_batched_tokens or max(TOKENS_PER_STEP, sequences),
            "max_model_len": longest,
            # vLLM keeps one block for itself.
            "num_gpu_blocks": self.num_gpu_blocks or 1 + blocks * sequences,
            "block_size": self.block_size,
        }


def check(args: Namespace) -> Settings:
    """Settings from a parsed command line.

    Raises:
        ConfigError: it cannot work; one line says what to change.
    """
    pipelines = _pipelines(args.pp)
    stages = tuple(_stage(text) for text in args.stage or ["4,1,0.1"])
    if len(stages) > 1 and pipelines != (len(stages),):
        raise ConfigError(f"--stage is given {len(stages)} times: give it once, or --pp {len(stages)}")
    for name in ("requests", "max_num_seqs", "max_num_batched_tokens", "num_gpu_blocks", "block_size"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, not {value}")
    for name in ("hop", "host"):
        if not 0 <= getattr(args, name) < float("inf"):
            raise ConfigError(f"--{name} must be 0 or more milliseconds, not {getattr(args, name)}")
    if args.rate is not None and not 0 < args.rate < float("inf"):
        raise ConfigError(f"--rate must be greater than 0, not {args.rate}")
    check_file("--json", args.json)
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError("the package vllm is needed: install async_pp[cpu]")
    return Settings(
        pipelines=pipelines,
        stages=stages,
        slow=dict(_slow(text, min(pipelines)) for text in args.slow),
        hop_s=args.hop / 1000,
        host_s=args.host / 1000,
        policy=args.policy,
        saturated=args.saturated or (args.rate is None and args.trace is None),
        arrivals=tuple(_arrivals(args)),
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        num_gpu_blocks=args.num_gpu_blocks,
        block_size=args.block_size,
        json=args.json,
    )


def _arrivals(args: Namespace) -> list[Arrival]:
    if args.trace is None:
        input_len = _lengths("--input-len", args.input_len or INPUT_LEN)
        output_len = _lengths("--output-len", args.output_len or OUTPUT_LEN)
        return requests.drawn(args.requests or REQUESTS, args.rate, input_len, output_len, args.seed)
    for name in ("rate", "input_len", "output_len"):
        if getattr(args, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} and --trace exclude each other: the trace says it")
    return requests.read(args.trace, args.requests)


def _pipelines(text: str) -> tuple[int, ...]:
    try:
        found = tuple(int(item) for item in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise ConfigError(f"--pp {text}: give numbers from 1, with commas between, such as 4,8,16")
    return found


def _stage(text: str) -> StageCost:
    try:
        times = [float(item) / 1000 for item in text.split(",")]
    except ValueError:
        times = []
    if not 1 <= len(times) <= 4 or not all(0 <= time < float("inf") for time in times) or not any(times[:3]):
        raise ConfigError(f"--stage {text}: give milliseconds as BASE,SEQ,TOKEN or BASE,SEQ,TOKEN,PAIR, not all 0")
    return StageCost(*times)


def _slow(text: str, stages: int) -> tuple[int, float]:
    stage, _, factor = text.partition("=")
    try:
        found = int(stage), float(factor)
    except ValueError:
        found = -1, 0.0
    if not 0 <= found[0] < stages or not 0 < found[1] < float("inf"):
        raise ConfigError(f"--slow {text}: give a stage from 0 to {stages - 1} and a factor, such as 0=2")
    return found


def _lengths(flag: str, text: str) -> Lengths:
    least, dash, most = text.partition("-")
    try:
        found = int(least), int(most if dash else least)
    except ValueError:
        found = 0, 0
    if not 1 <= found[0] <= found[1]:
        raise ConfigError(f"{flag} {text}: give tokens from 1, or least and most, such as 16-512")
    return found
