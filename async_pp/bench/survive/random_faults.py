"""Random faults for minutes under open streams; then what the client was told, and what is left in the server."""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from async_pp.bench import BenchFailed
from async_pp.bench.server import Left, Server
from async_pp.bench.stopping import run_coroutine
from async_pp.bench.survive import faults
from async_pp.bench.survive.faults import Done, Faults
from async_pp.bench.survive.ledger import Account, Ledger, Prompt, prompts
from async_pp.bench.survive.memory import Memory, Sample, watch
from async_pp.bench.survive.servers import server
from async_pp.bench.survive.settings import Settings, Tell
from async_pp.bench.survive.streams import Client, all_of, kept_open, reference

TELL_S = 30.0
"""Between two lines of progress."""

FREE_S = 5.0
"""After the last answer: until the server's metrics say so."""

CACHE = "/torchinductor_"
"""What PyTorch keeps for the next process that compiles the same: nothing of the server's."""

GAUGES = ("vllm:kv_cache_usage_perc", "vllm:num_requests_running", "vllm:num_requests_waiting")


@dataclass(frozen=True)
class RandomFaults:
    """What was found.

    Attributes:
        seconds: of random faults.
        faults: what was due, in order.
        account: of all requests.
        gauges: of the server's metrics, after the last request had ended and one more was answered.
        memory: of the server's process.
        left: how the server ended, and what it left.
    """

    seconds: float
    faults: list[Done]
    account: Account
    gauges: dict[str, float]
    memory: Memory
    left: Left

    @property
    def sent(self) -> dict[str, int]:
        """How often each fault was done."""
        return dict(Counter(fault.fault for fault in self.faults if fault.sent))

    def broken(self) -> list[str]:
        """What is not as promised."""
        found = self.account.faults()
        found += [f"{name} is {value:g} at the end" for name, value in self.gauges.items() if value]
        if not self.memory.flat:
            found.append(f"the server grows by {self.memory.mib_per_minute:.1f} MiB per minute")
        if self.left.exit_code:
            found.append(f"the server's exit code is {self.left.exit_code}")
        found += [f"left running: {name}" for name in self.left.processes]
        found += [f"left behind: {name}" for name in self.left.files if CACHE not in name]
        return found


def measure(settings: Settings, model: Path, tell: Tell) -> RandomFaults:
    """Start a server, break its ranks, stop it.

    Raises:
        BenchFailed: it could not be started, ended, or failed undisturbed.
    """
    tell("starting the server whose ranks get random faults")
    some = prompts(4 * settings.streams, settings.seed + 1)
    with server("async_pp", settings.pp, model, log=settings.log, faulty=True) as running:
        outcome = run_coroutine(_load(settings, some, running, tell))
        tell("stopping")
    assert running.left is not None
    return RandomFaults(*outcome, left=running.left)


async def _load(
    settings: Settings, some: Sequence[Prompt], running: Server, tell: Tell
) -> tuple[float, list[Done], Account, dict[str, float], Memory]:
    leader, *_ = running.processes()
    work = asyncio.create_task(_under_faults(settings, some, running, leader, tell), name="random faults")
    gone = asyncio.create_task(faults.ended(leader.pid), name="end of the server")
    try:
        await asyncio.wait([work, gone], return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise BenchFailed(f"the server has ended\n{running.last_words()}")
        return work.result()
    finally:
        work.cancel()
        gone.cancel()
        await asyncio.wait([work, gone])


async def _under_faults(
    settings: Settings, some: Sequence[Prompt], running: Server, leader: psutil.Process, tell: Tell
) -> tuple[float, list[Done], Account, dict[str, float], Memory]:
    killer = Faults(
        settings.faults, settings.pp, settings.every_s, settings.seed, lambda: faults.ranks(running.processes())
    )
    async with Client(running.url) as client:
        tell("undisturbed")
        ledger = Ledger(await reference(client, some, settings.streams))
        tell(f"{settings.streams} streams, {','.join(settings.faults)} every {settings.every_s:g} s")
        began = time.monotonic()
        samples: list[Sample] = []
        async with kept_open(client, ledger, some, settings.streams, settings.seed):
            beside = [
                asyncio.create_task(killer.run(), name="faults"),
                asyncio.create_task(watch(leader, samples), name="memory"),
                asyncio.create_task(_progress(ledger, killer, tell), name="progress"),
            ]
            try:
                await asyncio.wait(beside, timeout=60 * settings.minutes, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in beside:
                    task.cancel()
                ends = await asyncio.gather(*beside, return_exceptions=True)
            for end in ends:
                if not isinstance(end, asyncio.CancelledError) and isinstance(end, BaseException):
                    raise end
            seconds = time.monotonic() - began
            tell("no more faults; waiting for the last streams")
        gauges = await _gauges(client, some[0])
    return round(seconds, 1), killer.done, ledger.account(), gauges, Memory.of(samples)


async def _progress(ledger: Ledger, killer: Faults, tell: Tell) -> None:
    while True:
        await asyncio.sleep(TELL_S)
        account = ledger.account()
        tell(
            f"{sum(fault.sent for fault in killer.done)} faults; {account.sent} requests sent, {account.completed} "
            f"completed, {account.failed} failed, {account.hung + account.broken} lost, {account.open} open"
        )


async def _gauges(client: Client, prompt: Prompt) -> dict[str, float]:
    """What the server holds: one more request makes it tell, and shows that it serves."""
    account = (await all_of(client, [prompt], 1)).account()
    if not account.completed:
        raise BenchFailed(f"the server does not serve any more: {account.failures} {account.wrong}")
    deadline = time.monotonic() + FREE_S
    while True:
        found = gauges(await client.text("/metrics"))
        if not any(found.values()) or time.monotonic() > deadline:
            return found
        await asyncio.sleep(0.1)


def gauges(metrics: str) -> dict[str, float]:
    """`GAUGES` in a text of Prometheus' format.

    Raises:
        BenchFailed: one is missing.
    """
    found: dict[str, float] = {}
    for line in metrics.splitlines():
        name = line.partition("{")[0]
        if name in GAUGES:
            found[name] = found.get(name, 0.0) + float(line.rpartition(" ")[2])
    if len(found) < len(GAUGES):
        raise BenchFailed(f"the server's metrics lack {', '.join(set(GAUGES) - set(found))}")
    return found
