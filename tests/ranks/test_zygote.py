"""What the zygote promises beyond forking: nothing outlives what it belongs to, a rank owns only what is its own."""

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Iterator

import pytest
import uvloop

from async_pp.ranks.environment import BINDING, rank_environment
from async_pp.ranks.spawn import Zygote
from async_pp.ranks.supervisor import Supervisor
from async_pp.ranks.zygote import Answer
from tests.ranks.test_spawn import spec

NOTICED_S = 0.1
ENDED_S = 1.0


@contextlib.asynccontextmanager
async def started() -> AsyncIterator[Zygote]:
    zygote = Zygote()
    await zygote.start(rank_environment(1))
    try:
        yield zygote
    finally:
        await zygote.close()


async def test_a_killed_zygote_takes_its_ranks_along_and_each_is_told_once() -> None:
    told: asyncio.Queue[tuple[int, str]] = asyncio.Queue()
    async with started() as zygote:
        supervisor = Supervisor(on_death=lambda rank, status: told.put_nowait((rank, status)))
        processes = [await zygote.spawn(spec("ignores_sigterm", rank=rank)) for rank in range(2)]
        for process in processes:
            supervisor.watch(process)
        assert zygote._process is not None
        zygote._process.kill()
        async with asyncio.timeout(ENDED_S):
            deaths = [await told.get(), await told.get()]
        assert sorted(rank for rank, _ in deaths) == [0, 1]
        await supervisor.stop(1.0)
        # The kernel knows how a rank has ended until somebody has reaped it; then nobody does.
        assert {status.partition(":")[0] for _, status in deaths} <= {"unknown", "signal SIGKILL"}
        assert told.empty()


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_death_is_noticed_within_a_tenth_of_a_second_on_both_loops(loop_factory: object) -> None:
    async def scenario() -> float:
        loop = asyncio.get_running_loop()
        told: asyncio.Future[float] = loop.create_future()
        supervisor = Supervisor(on_death=lambda rank, status: told.set_result(loop.time()))
        async with started() as zygote:
            process = await zygote.spawn(spec("waits"))
            supervisor.watch(process)
            began = loop.time()
            process.kill()
            noticed = await told - began
            await supervisor.stop(1.0)
        return noticed

    with asyncio.Runner(loop_factory=loop_factory) as runner:  # type: ignore[arg-type]
        assert runner.run(scenario()) < NOTICED_S


@pytest.mark.parametrize(
    "target, bootstrap, code",
    [
        ("measures_its_bootstrap", bytes(32 << 16), 32),  # larger than any pipe's buffer
        ("counts_its_descriptors", b"", 1),  # its lifeline
        ("is_interrupted", b"", 3),  # a Ctrl-C is for the main process to act on
    ],
)
async def test_what_a_rank_is_given(target: str, bootstrap: bytes, code: int) -> None:
    async with started() as zygote:
        others = [await zygote.spawn(spec("waits", rank=rank)) for rank in (1, 2)]
        process = await zygote.spawn(spec(target, bootstrap))
        assert await process.exit_status == f"exit code {code}"
        for each in (process, *others):
            each.kill()
            await each.exit_status
            each.release()


@pytest.mark.parametrize("turns", range(6))
async def test_a_spawn_cancelled_at_any_turn_leaves_no_rank_and_no_descriptor(turns: int) -> None:
    async with started() as zygote:
        task = asyncio.create_task(zygote.spawn(spec("waits")))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            process = await task
            process.release()
        other = await zygote.spawn(spec("exits", b"0", rank=1))
        await other.exit_status
        other.release()


async def test_a_spawn_cancelled_when_its_answer_is_there_closes_what_came(monkeypatch: pytest.MonkeyPatch) -> None:
    async with started() as zygote:
        task = asyncio.create_task(zygote.spawn(spec("waits")))
        take = zygote._take

        def take_and_cancel(answer: Answer, fds: list[int]) -> None:
            take(answer, fds)
            task.cancel()

        monkeypatch.setattr(zygote, "_take", take_and_cancel)
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_a_rank_that_comes_after_the_stop_is_ended() -> None:
    told: list[int] = []
    async with started() as zygote:
        supervisor = Supervisor(on_death=lambda rank, status: told.append(rank))
        await supervisor.stop(1.0)
        process = await zygote.spawn(spec("ignores_sigterm"))
        supervisor.watch(process)
        assert await process.exit_status == "signal SIGKILL"
    assert told == []


@contextlib.contextmanager
def program(body: str) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A process that prints the ids of the processes it made and then waits."""
    head = """
        import asyncio, os, signal
        from async_pp.ranks.environment import rank_environment
        from async_pp.ranks.spawn import Zygote
        from tests.ranks.test_spawn import spec
    """
    source = textwrap.dedent(head) + textwrap.dedent(body)
    with subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, [int(pid) for pid in process.stdout.readline().split()]
        finally:
            process.kill()


def all_end(pids: list[int], *, after: subprocess.Popen[str]) -> bool:
    """Kill `after`; whether all the others then end in time."""
    watched = [os.pidfd_open(pid) for pid in pids]
    try:
        after.send_signal(signal.SIGKILL)
        left = set(watched)
        while left:
            ended, _, _ = select.select(list(left), [], [], ENDED_S)
            if not ended:
                return False
            left -= set(ended)
        return True
    finally:
        for fd in watched:
            os.close(fd)


def test_ranks_end_with_their_parent_although_its_child_holds_their_lifelines() -> None:
    body = """
        async def main():
            zygote = Zygote()
            await zygote.start(rank_environment(2))
            ranks = [await zygote.spawn(spec("ignores_sigterm", rank=rank)) for rank in range(2)]
            child = os.fork()
            if not child:
                signal.pause()
            print(child, zygote._process.pid, *(rank.pid for rank in ranks), flush=True)
            await asyncio.Event().wait()
        asyncio.run(main())
    """
    with program(body) as (parent, (child, *pids)):
        try:
            assert len(pids) == 3
            assert all_end(pids, after=parent)
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_zygote_ends_with_its_parent_in_the_middle_of_an_import() -> None:
    body = """
        zygote = Zygote()
        zygote.launch(rank_environment(1), ["tests.ranks.slow_import"])
        print(zygote._process.pid, flush=True)
        signal.pause()
    """
    with program(body) as (parent, pids):
        assert all_end(pids, after=parent)


@pytest.mark.parametrize("name", BINDING)
def test_a_zygote_is_bound_to_no_core(name: str) -> None:
    assert name not in rank_environment(2, {name: "0"})
    unbound = {name: "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    assert rank_environment(2, unbound)[name] == "0"
