"""Restarts timed: one rank is killed under load, from the kill to the next tokens, beside cold starts."""

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from async_pp.bench import BenchFailed
from async_pp.bench.server import Server
from async_pp.bench.stopping import run_coroutine
from async_pp.bench.survive import faults
from async_pp.bench.survive.ledger import Account, Ledger, prompts, silence
from async_pp.bench.survive.servers import server
from async_pp.bench.survive.settings import Settings, Tell
from async_pp.bench.survive.streams import Client, kept_open, reference
from async_pp.bench.systems import System

KILL_LIMIT_S = 600.0
"""From one kill until every request that was open has ended."""


@dataclass(frozen=True)
class Kill:
    """One kill of one rank, seconds since it.

    Attributes:
        rank: which.
        gone_s: its process had ended: the kernel takes its memory back first, and tells nobody before.
        others_gone_s: the engine had noticed, and the others had been ended. None where there is no other one.
        first_s: the first token that came afterwards, of any stream.
        all_s: every stream that was open had got a token, or had ended.
    """

    rank: int
    gone_s: float
    others_gone_s: float | None
    first_s: float
    all_s: float


@dataclass(frozen=True)
class Restarts:
    """What was measured.

    Attributes:
        cold_start_s: from starting a server to its first token, of each start, by system.
        kills: in order.
        account: of all requests meanwhile.
    """

    cold_start_s: dict[str, list[float]]
    kills: list[Kill]
    account: Account

    @property
    def first_s(self) -> float:
        """From a kill to the next token: the median of all kills."""
        return statistics.median(kill.first_s for kill in self.kills)

    def ratio(self, system: System) -> float | None:
        """`first_s` by the median cold start of a system."""
        starts = self.cold_start_s.get(system)
        return self.first_s / statistics.median(starts) if starts else None

    def broken(self) -> list[str]:
        """What is not as promised: a single loss costs no request anything."""
        failed = [f"{self.account.failed} requests failed after single kills"] if self.account.failed else []
        return [*failed, *self.account.faults()]


@dataclass
class _Found:
    kills: list[Kill] = field(default_factory=list)
    account: Account | None = None


def measure(settings: Settings, model: Path, tell: Tell) -> Restarts:
    """Start both servers by turns, the last of ours is the one whose ranks are killed.

    Raises:
        BenchFailed: a server failed, or a kill was followed by no token.
    """
    starts: dict[str, list[float]] = {}
    found = _Found()
    systems: Sequence[System] = ("vllm", "async_pp") if settings.against_vllm else ("async_pp",)
    for number in range(1, settings.starts + 1):
        for system in systems:
            tell(f"cold start {number} of {settings.starts}, {system}")
            with server(system, settings.pp, model) as running:
                starts.setdefault(system, []).append(round(running.start_to_first_token_s, 3))
                if system == "async_pp" and number == settings.starts:
                    run_coroutine(_kill_all(settings, running, found, tell))
    assert found.account is not None
    return Restarts(starts, found.kills, found.account)


async def _kill_all(settings: Settings, running: Server, found: _Found, tell: Tell) -> None:
    some = prompts(2 * settings.streams, settings.seed)
    async with Client(running.url) as client:
        tell("undisturbed")
        ledger = Ledger(await reference(client, some, settings.streams))
        async with kept_open(client, ledger, some, settings.streams, settings.seed):
            for number in range(1, settings.kills + 1):
                for rank in range(settings.pp):
                    tell(f"kill {number} of {settings.kills}, rank {rank}, {settings.streams} streams")
                    found.kills.append(await _kill(client, ledger, running, rank))
        found.account = ledger.account()


async def _kill(client: Client, ledger: Ledger, running: Server, rank: int) -> Kill:
    """Kill a rank when every stream has got a token, and wait for the ends of all that were open."""
    try:
        async with asyncio.timeout(KILL_LIMIT_S):
            await client.until(lambda: _under_way(ledger))
            pids = faults.ranks(await asyncio.to_thread(running.processes))
            if rank not in pids:
                raise BenchFailed(f"rank {rank} is not there to be killed\n{running.last_words()}")
            open_requests = [request for request in ledger.requests if request.outcome is None]
            client.listen()
            async with asyncio.TaskGroup() as watching:
                ends = {other: watching.create_task(faults.ended(pid)) for other, pid in pids.items()}
                await asyncio.sleep(0)  # they look before there is anything to see
                killed_s = time.monotonic()
                faults.do("die", pids[rank])
            await client.until(lambda: all(request.outcome is not None for request in open_requests))
    except TimeoutError:
        raise BenchFailed(f"streams hang after a kill of rank {rank}\n{running.last_words()}") from None
    quiet = silence(killed_s, client.heard(), {request.number for request in open_requests})
    if quiet is None:
        raise BenchFailed(f"no token came after a kill of rank {rank}\n{running.last_words()}")
    gone_s = {other: end.result() - killed_s for other, end in ends.items()}
    own_s = gone_s.pop(rank)
    return Kill(rank, own_s, max(gone_s.values(), default=None), quiet.first_s, quiet.all_s)


def _under_way(ledger: Ledger) -> bool:
    """Most streams have got tokens."""
    open_requests = [request for request in ledger.requests if request.outcome is None]
    return 2 * sum(bool(request.tokens) for request in open_requests) > len(open_requests)
