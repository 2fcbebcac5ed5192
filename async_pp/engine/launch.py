"""Launching ranks: each is forked and says hello, or the start ends with an error that names who did not."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from async_pp.engine.failures import Failures
from async_pp.errors import StartupError, first_of
from async_pp.ranks.spawn import RankSpec, Zygote
from async_pp.ranks.supervisor import Supervisor


@dataclass(frozen=True)
class StartDeadlines:
    """How long the parts of a start may take, in seconds.

    Attributes:
        zygote_s: until the process that forks the ranks has imported what they need and has forked them.
        hello_s: until every rank has said hello, from then on.
        load_s: without any sign of progress while the ranks load the model.
        kv_cache_s: without any sign of progress while they make the KV cache and warm up.
    """

    zygote_s: float = 180.0
    hello_s: float = 60.0
    load_s: float = 600.0
    kv_cache_s: float = 600.0


async def launch(
    specs: Sequence[RankSpec],
    hellos: Mapping[int, asyncio.Future[int]],
    *,
    zygote: Zygote,
    supervisor: Supervisor,
    deadlines: StartDeadlines,
    failures: Failures,
) -> None:
    """Fork the ranks, have them watched, and wait until each has said hello.

    Raises:
        StartupError: the zygote has ended, or something took longer than it may; or what the hellos end with.
    """
    try:
        async with asyncio.timeout(deadlines.zygote_s), asyncio.TaskGroup() as tasks:
            for spec in specs:
                tasks.create_task(_spawn(spec, zygote, supervisor))
    except TimeoutError:
        what = f"the process that forks the ranks has not done it within {deadlines.zygote_s:g} s"
        raise failures.start(None, what) from None
    except ExceptionGroup as group:
        raise first_of(group) from None
    try:
        async with asyncio.timeout(deadlines.hello_s):
            for hello in hellos.values():
                await hello
    except TimeoutError:
        raise _silent(hellos, deadlines.hello_s, failures) from None


async def _spawn(spec: RankSpec, zygote: Zygote, supervisor: Supervisor) -> None:
    supervisor.watch(await zygote.spawn(spec))


def _silent(hellos: Mapping[int, asyncio.Future[int]], waited_s: float, failures: Failures) -> StartupError:
    # The one that was waited for has been cancelled.
    silent = next(rank for rank, hello in hellos.items() if not hello.done() or hello.cancelled())
    return failures.start(silent, f"has not said hello within {waited_s:g} s")
