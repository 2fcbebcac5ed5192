"""Zygote, spawn and supervisor, with real processes and without vLLM."""

import asyncio
import os
import select
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from async_pp.errors import StartupError
from async_pp.ranks.environment import rank_environment
from async_pp.ranks.spawn import RankProcess, RankSpec, Zygote, in_words
from async_pp.ranks.supervisor import Supervisor


def spec(target: str, bootstrap: bytes = b"", rank: int = 0, **other: object) -> RankSpec:
    arguments: dict[str, object] = {"cpus": None, "env": {}, "name": f"rank {rank}", **other}
    return RankSpec(rank=rank, target=f"tests.ranks.targets:{target}", bootstrap=bootstrap, **arguments)  # type: ignore[arg-type]


class Deaths:
    """What a supervisor told."""

    def __init__(self) -> None:
        self.told: asyncio.Queue[tuple[int, str]] = asyncio.Queue()
        self.supervisor = Supervisor(on_death=lambda rank, status: self.told.put_nowait((rank, status)))


@pytest.fixture
async def zygote() -> AsyncIterator[Zygote]:
    made = Zygote()
    await made.start(rank_environment(1))
    yield made
    await made.close()


@pytest.fixture
async def deaths() -> AsyncIterator[Deaths]:
    made = Deaths()
    yield made
    await made.supervisor.stop(0.0)


@pytest.mark.parametrize(
    "target, bootstrap, status",
    [
        ("exits", b"0", "exit code 0"),
        ("exits", b"7", "exit code 7"),
        ("raises", b"on purpose", "exit code 1"),
        ("no_such_function", b"", "exit code 1"),
    ],
)
async def test_how_a_rank_ended_is_told_once(
    zygote: Zygote, deaths: Deaths, target: str, bootstrap: bytes, status: str
) -> None:
    deaths.supervisor.watch(await zygote.spawn(spec(target, bootstrap, rank=3)))
    assert await deaths.told.get() == (3, status)
    assert deaths.supervisor.alive == ()
    assert deaths.told.empty()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
async def test_a_killed_rank_is_noticed_with_its_signal(zygote: Zygote, deaths: Deaths, number: signal.Signals) -> None:
    process = await zygote.spawn(spec("waits"))
    deaths.supervisor.watch(process)
    process.kill(number)
    async with asyncio.timeout(5):
        assert await deaths.told.get() == (0, f"signal {number.name}")
    process.kill()  # a rank that has ended is left alone


async def test_a_rank_gets_its_cores_threads_and_environment_and_has_one_thread(zygote: Zygote, tmp_path: Path) -> None:
    core = min(os.sched_getaffinity(0))
    before = dict(os.environ)
    report = tmp_path / "report"
    process = await zygote.spawn(spec("reports", str(report).encode(), cpus=(core,), env={"OF_RANK": "yes"}))
    assert await process.exit_status == "exit code 0"
    process.release()
    assert report.read_text().split("\n") == [str(core), "1", "yes", "1"]
    assert dict(os.environ) == before


async def test_spawning_before_the_preload_is_done_waits_for_it() -> None:
    zygote = Zygote()
    zygote.launch(rank_environment(1), ["json.tool", "asyncio"])
    process = await zygote.spawn(spec("exits", b"5"))
    assert await process.exit_status == "exit code 5"
    process.release()
    await zygote.close()
    await zygote.close()


async def test_a_dead_zygote_is_a_clear_error_and_its_ranks_are_reported(deaths: Deaths) -> None:
    zygote = Zygote()
    await zygote.start(rank_environment(1))
    process = await zygote.spawn(spec("waits"))
    deaths.supervisor.watch(process)
    assert zygote._process is not None
    zygote._process.kill()
    assert "unknown" in await process.exit_status
    with pytest.raises(StartupError, match="zygote"):
        await zygote.spawn(spec("waits"))
    await zygote.close()
    process.kill()
    rank, status = await deaths.told.get()
    assert (rank, status.split(":")[0]) == (0, "unknown")


async def test_a_preload_that_fails_is_a_clear_error(capfd: pytest.CaptureFixture[str]) -> None:
    zygote = Zygote()
    zygote.launch(rank_environment(1), ["no_such_module_anywhere"])
    with pytest.raises(StartupError, match="zygote"):
        await zygote.spawn(spec("waits"))
    await zygote.close()
    assert "no_such_module_anywhere" in capfd.readouterr().err


async def test_cancelled_while_it_forks_it_leaves_no_rank() -> None:
    zygote = Zygote()
    await zygote.start(rank_environment(1), ["asyncio"])
    task = asyncio.create_task(zygote.spawn(spec("computes_for_ever")))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    process = await zygote.spawn(spec("exits", b"0"))  # the first was forked before this one
    await process.exit_status
    process.release()
    await zygote.close()  # the leak check finds a rank that was left


async def test_stop_ends_ranks_that_will_not_end(zygote: Zygote, deaths: Deaths) -> None:
    processes = [await zygote.spawn(spec("ignores_sigterm", rank=rank)) for rank in range(2)]
    for process in processes:
        deaths.supervisor.watch(process)
    await deaths.supervisor.stop(0.2)
    assert {await process.exit_status for process in processes} <= {"signal SIGKILL", "signal SIGTERM"}
    assert deaths.supervisor.alive == ()
    assert deaths.told.empty(), "an end that was asked for is not told"
    await deaths.supervisor.stop(0.2)


async def test_stop_cancelled_in_the_middle_still_ends_every_rank(zygote: Zygote, deaths: Deaths) -> None:
    process = await zygote.spawn(spec("ignores_sigterm"))
    deaths.supervisor.watch(process)
    task = asyncio.create_task(deaths.supervisor.stop(60))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await process.exit_status).startswith("signal")


PARENT = """
import asyncio, sys
from async_pp.ranks.environment import rank_environment
from async_pp.ranks.spawn import Zygote
from tests.ranks.test_spawn import spec
async def main():
    zygote = Zygote()
    await zygote.start(rank_environment(2))
    ranks = [await zygote.spawn(spec("computes_for_ever", rank=rank)) for rank in range(2)]
    print(zygote._process.pid, *(rank.pid for rank in ranks), flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


def test_a_parent_killed_by_sigkill_leaves_nothing_within_a_second() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 3
        watched = [os.pidfd_open(pid) for pid in pids]
        parent.kill()
    try:
        left = set(watched)
        while left:
            ended, _, _ = select.select(list(left), [], [], 1.0)
            assert ended, f"{len(left)} of 3 processes outlived their parent by a second"
            left -= set(ended)
    finally:
        for fd in watched:
            os.close(fd)


@pytest.mark.parametrize("status, words", [(0, "exit code 0"), (-9, "signal SIGKILL"), (-250, "signal 250")])
def test_exit_statuses_in_words(status: int, words: str) -> None:
    assert in_words(status) == words


def test_a_released_process_is_not_signalled() -> None:
    with asyncio.Runner() as runner:
        process = RankProcess(0, 1, -1, runner.get_loop().create_future(), -1)
        process.kill()
        process.release()
