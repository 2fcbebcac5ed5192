"""The order of a run: systems alternate, each server is measured alone, and nothing of it is left before the next.

generator ready ── for each round, pipeline size and system:
                     start ── first token ── for each level: warm up ── load ──> idle ── stop
"""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from async_pp.bench import BenchFailed, systems, usage
from async_pp.bench.load import Load, LoadGenerator
from async_pp.bench.report import Row, medians
from async_pp.bench.server import Server, free_port
from async_pp.bench.settings import Settings
from async_pp.bench.systems import System

IDLE_S = 5.0
"""For how long an idle server is watched."""

SETTLE_S = 2.0
"""After the last answer, before it counts as idle: vLLM's readers spin for a second after a message."""

WARM_UP_TOKENS = 8
"""Length of the answers of a level's warm-up, which has as many requests as the level has in flight."""

Tell = Callable[[str], None]


def run(settings: Settings, model: Path, tell: Tell) -> list[Row]:
    """Measure everything and return one row per system, pipeline size and concurrency.

    Args:
        settings: what to measure.
        model: the folder of the model.
        tell: told what is done now.

    Raises:
        BenchFailed: a server or the load generator failed, or a request did. No process is left.
    """
    rows: list[Row] = []
    tell("starting the load generator")
    with LoadGenerator(model) as generator:
        for number, pp, system in turns(settings):
            said = partial(_tell_at, tell, f"round {number} of {settings.rounds}, {system}, PP {pp}")
            rows += _measure(system, pp, settings, model, generator, said)
    return medians(rows)


def _tell_at(tell: Tell, where: str, text: str) -> None:
    tell(f"{where}: {text}")


def turns(settings: Settings) -> Iterator[tuple[int, int, System]]:
    """Round (from 1), pipeline size and system of each server, in order.

    Every second round takes the systems the other way round: a machine that slows down or speeds up favours neither.
    """
    names: tuple[System, ...] = ("async_pp", "vllm") if settings.against == "vllm" else ("async_pp",)
    for number in range(1, settings.rounds + 1):
        for pp in settings.pipelines:
            for system in names if number % 2 else names[::-1]:
                yield number, pp, system


def loads(settings: Settings) -> list[tuple[Load, Load]]:
    """Warm-up and measured load of each level. They are the same for every server; no two have the same prompts."""
    found = []
    for index, concurrency in enumerate(settings.concurrency):
        warm_up = Load(
            concurrency=concurrency,
            requests=concurrency,
            input_len=settings.input_len,
            output_len=min(WARM_UP_TOKENS, settings.output_len),
            seed=2 * index,
        )
        measured = Load(
            concurrency=concurrency,
            requests=settings.requests_at(concurrency),
            input_len=settings.input_len,
            output_len=settings.output_len,
            seed=2 * index + 1,
        )
        found.append((warm_up, measured))
    return found


def _measure(
    system: System, pp: int, settings: Settings, model: Path, generator: LoadGenerator, tell: Tell
) -> list[Row]:
    port = free_port()
    cores = sorted(os.sched_getaffinity(0))
    command, environment = systems.command(system, pp, model, port), systems.environment(system, pp, os.environ, cores)
    tell("starting")
    with Server(command, environment, port) as server:
        tell(f"first token after {server.start_to_first_token_s:.1f} s")
        rows = []
        for warm_up, load in loads(settings):
            tell(f"{load.requests} requests, {load.concurrency} in flight")
            rows.append(_level(system, pp, server, generator, warm_up, load))
        tell("idle")
        idle = _idle(server)
        tell("stopping")
    return [replace(row, idle_cpu_percent=idle) for row in rows]


def _level(system: System, pp: int, server: Server, generator: LoadGenerator, warm_up: Load, load: Load) -> Row:
    samples: dict[str, usage.Sample] = {}

    def mark(event: str) -> None:
        samples[event] = usage.take(server.processes())

    try:
        generator.run(warm_up, server.url)
        speed = generator.run(load, server.url, mark)
    except BenchFailed as error:
        raise BenchFailed(f"{error}\nLast lines of the server:\n{server.last_words()}") from error
    return Row(
        system=system,
        pp=pp,
        concurrency=load.concurrency,
        tokens_per_s=speed.tokens_per_s,
        ttft_ms_p50=speed.ttft_ms_p50,
        ttft_ms_p99=speed.ttft_ms_p99,
        itl_ms_p50=speed.itl_ms_p50,
        itl_ms_p99=speed.itl_ms_p99,
        cpu_s_per_1k_tokens=1000 * usage.cpu_s(samples["begin"], samples["end"]) / speed.output_tokens,
        start_to_first_token_s=server.start_to_first_token_s,
        idle_cpu_percent={},
        rss_mib=usage.rss_mib(samples["end"]),
    )


def _idle(server: Server) -> dict[str, float]:
    """CPU use by process name once the server has settled, percent of one core."""
    time.sleep(SETTLE_S)
    processes = server.processes()
    before, began = usage.take(processes), time.monotonic()
    time.sleep(IDLE_S)
    after, ended = usage.take(processes), time.monotonic()
    return usage.percent_by_name(before, after, ended - began)
