"""Both transports behind one harness: an engine end on the loop, ranks on threads."""

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from async_pp.channel.memory import MemoryEngineChannel
from async_pp.channel.protocol import EngineChannel, RankChannel, RankUnreachable
from async_pp.channel.zmq_engine import ZmqEngineChannel
from async_pp.channel.zmq_rank import ZmqRankChannel
from async_pp.errors import WireError
from async_pp.wire.frames import Envelope
from async_pp.wire.limits import Limits
from async_pp.wire.messages import Bye, Call, CallReply, Close, Hello

KEYS = {rank: bytes([rank]) * 32 for rank in range(3)}


class Harness:
    """An engine end with what it received, and echoing ranks."""

    def __init__(self, transport: str, folder: Path, epoch: int = 0) -> None:
        self.transport = transport
        self.epoch = epoch
        self.inbox: asyncio.Queue[tuple[int, Envelope]] = asyncio.Queue()
        self.rejected: list[tuple[int | None, WireError]] = []
        self.on_message: Callable[[int, Envelope], None] = lambda rank, envelope: self.inbox.put_nowait(
            (rank, envelope)
        )
        arguments: dict[str, Any] = {
            "epoch": epoch,
            "limits": Limits(),
            "on_message": lambda rank, envelope: self.on_message(rank, envelope),
            "on_reject": lambda rank, error: self.rejected.append((rank, error)),
        }
        self.engine: EngineChannel = (
            MemoryEngineChannel(KEYS, **arguments)
            if transport == "memory"
            else ZmqEngineChannel(folder, KEYS, **arguments)
        )
        self._threads: list[threading.Thread] = []
        self.failures: queue.SimpleQueue[BaseException] = queue.SimpleQueue()

    def rank_channel(self, rank: int) -> RankChannel:
        if isinstance(self.engine, MemoryEngineChannel):
            return self.engine.rank_end(rank)
        return ZmqRankChannel(self.engine.endpoint, rank=rank, epoch=self.epoch, key=KEYS[rank], limits=Limits())

    async def start_rank(self, rank: int, body: Callable[[RankChannel], None] | None = None) -> None:
        """Run a rank on a thread and wait for its hello, which the engine needs before it can send."""

        def run() -> None:
            channel = self.rank_channel(rank)
            try:
                channel.send(Hello(pid=rank))
                (body or echo)(channel)
            except BaseException as error:  # noqa: BLE001 - told to the test at its end
                self.failures.put(error)
            finally:
                channel.close()

        thread = threading.Thread(target=run, name=f"rank {rank}")
        thread.start()
        self._threads.append(thread)
        got, envelope = await self.inbox.get()
        assert (got, envelope.message) == (rank, Hello(pid=rank))

    async def stop(self) -> None:
        for rank in KEYS:
            try:
                self.engine.send(rank, Close())
            except RankUnreachable:
                continue
        while any(thread.is_alive() for thread in self._threads):
            await asyncio.to_thread(self._threads.pop().join)
        self.engine.close()


def echo(channel: RankChannel) -> None:
    """Answer every call with its own payload until the end."""
    while True:
        envelope = channel.recv()
        match envelope.message:
            case Call(call=call):
                channel.send(CallReply(call=call), envelope.load())
            case Close():
                channel.send(Bye(reason="closed"))
                return


@pytest.fixture(params=["memory", "zmq"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def harness(transport: str, tmp_path: Path) -> AsyncIterator[Harness]:
    made = Harness(transport, tmp_path)
    await made.engine.start()
    yield made
    await made.stop()
