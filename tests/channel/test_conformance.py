"""What every transport must do, on both loops."""

import asyncio
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop

from async_pp.channel.memory import MemoryEngineChannel
from async_pp.channel.pending import Pending
from async_pp.channel.protocol import RankChannel, RankUnreachable
from async_pp.wire.frames import Envelope
from async_pp.wire.messages import Call, CallReply, Close
from tests.channel.conftest import Harness, echo

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}


def on(loop: str, transport: str, folder: Path, body: Callable[[Harness], Any]) -> None:
    """Run a test body on one of the loops; afterwards no thread, task or file is left."""
    threads = threading.active_count()

    async def run() -> None:
        harness = Harness(transport, folder)
        await harness.engine.start()
        try:
            await body(harness)
        finally:
            await harness.stop()
        assert harness.failures.empty(), harness.failures.get()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(run())
    assert threading.active_count() <= threads + 1, "the loop's own helper thread at most"
    assert not list(folder.iterdir())


@pytest.fixture(params=list(LOOPS))
def loop(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_order_is_kept_in_both_directions(loop: str, transport: str, tmp_path: Path) -> None:
    async def body(harness: Harness) -> None:
        for rank in range(3):
            await harness.start_rank(rank)
        for number in range(2_000):
            harness.engine.send(number % 3, Call(call=number), number)
        got: dict[int, list[int]] = {0: [], 1: [], 2: []}
        for _ in range(2_000):
            rank, envelope = await harness.inbox.get()
            assert envelope.message == CallReply(call=envelope.load())
            got[rank].append(envelope.load())
        assert got == {rank: list(range(rank, 2_000, 3)) for rank in range(3)}

    on(loop, transport, tmp_path, body)


def test_a_payload_of_64_mib(loop: str, transport: str, tmp_path: Path) -> None:
    async def body(harness: Harness) -> None:
        await harness.start_rank(0)
        data = bytearray(64 << 20)
        data[::4096] = b"x" * len(data[::4096])
        harness.engine.send(0, Call(call=1), data)
        _, envelope = await harness.inbox.get()
        assert envelope.load() == data

    on(loop, transport, tmp_path, body)


def test_a_rank_that_is_not_there_is_unreachable(loop: str, transport: str, tmp_path: Path) -> None:
    async def body(harness: Harness) -> None:
        await harness.start_rank(0)
        if isinstance(harness.engine, MemoryEngineChannel):
            harness.engine.die(2)
        with pytest.raises(RankUnreachable, match="rank 2"):
            harness.engine.send(2, Call(call=1))
        harness.engine.send(0, Call(call=1), "the others are not touched")
        _, envelope = await harness.inbox.get()
        assert envelope.load() == "the others are not touched"
        harness.engine.send(0, Close())
        await harness.inbox.get()
        harness.engine.close()
        with pytest.raises(RankUnreachable) as caught:
            harness.engine.send(0, Close())
        assert caught.value.rank == 0

    on(loop, transport, tmp_path, body)


def test_closing_from_within_a_callback_ends_the_callbacks(loop: str, transport: str, tmp_path: Path) -> None:
    async def body(harness: Harness) -> None:
        seen: list[int] = []
        done = asyncio.Event()

        def floods(channel: RankChannel) -> None:
            for number in range(50):
                channel.send(CallReply(call=number))

        def first_closes(rank: int, envelope: Envelope) -> None:
            seen.append(rank)
            harness.engine.close()
            harness.engine.close()
            done.set()

        await harness.start_rank(1, lambda channel: None)
        harness.on_message = first_closes
        thread = threading.Thread(target=_run_rank, args=(harness, 0, floods))
        thread.start()
        await done.wait()
        await asyncio.to_thread(thread.join)
        for _ in range(20):
            await asyncio.sleep(0)
        assert seen == [0]

    on(loop, transport, tmp_path, body)


def _run_rank(harness: Harness, rank: int, body: Callable[[RankChannel], None]) -> None:
    channel = harness.rank_channel(rank)
    try:
        body(channel)
    finally:
        channel.close()


def test_cancel_storm_every_reply_is_accounted_for(loop: str, transport: str, tmp_path: Path) -> None:
    """10,000 awaits, half of them cancelled at random turns while replies flow: none is lost, none is mistaken."""
    rng = random.Random(10_000)
    total, per_round = 10_000, 500

    async def body(harness: Harness) -> None:
        await harness.start_rank(0, echo)
        pending: Pending[int, int] = Pending()
        wrong: list[tuple[int, int]] = []
        received = 0
        all_in = asyncio.Event()

        def take(rank: int, envelope: Envelope) -> None:
            nonlocal received
            assert isinstance(envelope.message, CallReply)
            pending.resolve(envelope.message.call, envelope.load())
            received += 1
            if received == total:
                all_in.set()

        harness.on_message = take

        async def one(number: int) -> None:
            future = pending.expect(number)
            harness.engine.send(0, Call(call=number), number)
            answer = await future
            if answer != number:
                wrong.append((number, answer))

        cancelled = 0
        for begin in range(0, total, per_round):
            tasks = [asyncio.create_task(one(number)) for number in range(begin, begin + per_round)]
            await asyncio.sleep(0)  # every one has sent: a task cancelled before it began would send nothing
            for _ in range(rng.randrange(4)):
                await asyncio.sleep(0)
            for task in rng.sample(tasks, per_round // 2):
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            cancelled += sum(isinstance(result, asyncio.CancelledError) for result in results)
        await all_in.wait()
        assert not wrong
        assert cancelled > 0
        assert (pending.delivered + pending.late, pending.unknown) == (total, 0)
        assert pending.late >= 1
        assert (pending.open, pending.tombstones) == (0, 0)

    on(loop, transport, tmp_path, body)
