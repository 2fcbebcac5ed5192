"""What is particular to sockets: strangers, successors, idleness, paths, permissions."""

import asyncio
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import zmq

from async_pp.channel.zmq_engine import ZmqEngineChannel, identity
from async_pp.channel.zmq_rank import ZmqRankChannel
from async_pp.errors import BadFrame, ConfigError, StaleEpoch, WireError
from async_pp.wire.frames import Direction, Sealer
from async_pp.wire.limits import Limits
from async_pp.wire.messages import Call, CallReply, Close, Hello, StepReply
from tests.channel.conftest import KEYS, Harness
from tests.security.mutations import flat, mutate


def frame_of(rank: int, epoch: int = 0, key: bytes | None = None) -> list[bytes]:
    sealer = Sealer(
        KEYS[rank] if key is None else key,
        epoch=epoch,
        direction=Direction.FROM_RANK,
        rank=rank,
        limits=Limits(),
    )
    return flat(sealer.seal(StepReply(step=1, began_s=0.0, ended_s=0.0), {"tokens": [1, 2, 3]}))


@pytest.fixture
def transport() -> str:
    return "zmq"


async def test_20_000_hostile_frames_on_the_socket_none_accepted_and_the_channel_is_alive(harness: Harness) -> None:
    """A rogue that even carries the name of a rank that is not connected yet."""
    await harness.start_rank(0)
    rng = random.Random(7)
    count = 20_000

    def attack() -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as rogue:
            rogue.setsockopt(zmq.SNDHWM, 0)
            rogue.setsockopt(zmq.LINGER, -1)
            rogue.setsockopt(zmq.IDENTITY, identity(KEYS[1], 0, 1))
            rogue.connect(harness.engine.endpoint)
            good = frame_of(1, key=bytes(32))
            sent = 0
            while sent < count:
                hostile = mutate(rng, good) or [b""]
                rogue.send_multipart(hostile)
                sent += 1

    thread = threading.Thread(target=attack)
    thread.start()
    answered = 0
    while len(harness.rejected) < count:
        harness.engine.send(0, Call(call=answered), answered)
        rank, envelope = await harness.inbox.get()
        assert (rank, envelope.message, envelope.load()) == (0, CallReply(call=answered), answered)
        answered += 1
    await asyncio.to_thread(thread.join)
    assert len(harness.rejected) == count
    assert all(rank == 1 for rank, _ in harness.rejected)
    assert harness.inbox.empty()
    assert answered > 10, "real traffic went on meanwhile"


async def test_strangers_are_refused(harness: Harness) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.connect(harness.engine.endpoint)
        stranger.send_multipart(frame_of(0))
        while not harness.rejected:  # noqa: ASYNC110 - the callback is the harness's
            await asyncio.sleep(0)
    (rank, error), *_ = harness.rejected
    assert rank is None
    assert isinstance(error, BadFrame)


async def test_a_successor_receives_nothing_of_its_predecessor_and_its_frames_are_not_mixed(tmp_path: Path) -> None:
    first = Harness("zmq", tmp_path, epoch=0)
    await first.engine.start()
    await first.start_rank(0, lambda channel: channel.recv() and None)
    first.engine.send(0, Call(call=1), "for the first life")
    first.engine.send(0, Call(call=2), "unread when it dies")
    first.engine.close()
    await first.stop()
    second = Harness("zmq", tmp_path, epoch=1)
    await second.engine.start()
    await second.start_rank(0)
    with zmq.Context() as context, context.socket(zmq.DEALER) as ghost:
        ghost.setsockopt(zmq.IDENTITY, identity(KEYS[1], 1, 1))
        ghost.connect(second.engine.endpoint)
        ghost.send_multipart(frame_of(1, epoch=0))  # rightly sealed, in a former life
        while not second.rejected:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0)
    assert isinstance(second.rejected[0][1], StaleEpoch)
    second.engine.send(0, Call(call=3), "for the second life")
    _, envelope = await second.inbox.get()
    assert (envelope.message, envelope.load()) == (CallReply(call=3), "for the second life")
    await second.stop()


async def test_an_idle_channel_costs_nothing(harness: Harness) -> None:
    await harness.start_rank(0)
    calls = 0
    drain = harness.engine._drain  # type: ignore[attr-defined]

    def counted() -> None:
        nonlocal calls
        calls += 1
        drain()

    loop = asyncio.get_running_loop()
    loop.remove_reader(harness.engine._fd)  # type: ignore[attr-defined]
    loop.add_reader(harness.engine._fd, counted)  # type: ignore[attr-defined]
    before = time.process_time()
    await asyncio.sleep(0.5)  # the time in which nothing may happen
    assert calls <= 2
    assert time.process_time() - before < 0.25


async def test_a_message_that_came_during_a_send_is_not_overlooked(harness: Harness) -> None:
    """The descriptor is edge-triggered: a send can swallow the edge of a message that waits."""
    await harness.start_rank(0)
    for number in range(500):
        harness.engine.send(0, Call(call=number), number)
        time.sleep(0.0005)  # noqa: ASYNC251 - blocks the loop on purpose: the answer comes before the next send
        harness.engine.send(0, Call(call=10_000 + number), number)
        for _ in range(2):
            async with asyncio.timeout(5):
                await harness.inbox.get()


def test_a_path_that_is_too_long_for_a_socket_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="TMPDIR"):
        ZmqEngineChannel(
            tmp_path / ("x" * 100),
            KEYS,
            epoch=0,
            limits=Limits(),
            on_message=lambda rank, envelope: None,
            on_reject=lambda rank, error: None,
        )


async def test_a_rank_refuses_what_is_not_from_its_engine(tmp_path: Path) -> None:
    path = f"ipc://{tmp_path}/rogue"
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.bind(path)
        rank = ZmqRankChannel(path, rank=0, epoch=0, key=KEYS[0], limits=Limits())
        rank.send(Hello(pid=1))
        name, *_ = router.recv_multipart()
        rogue = Sealer(b"r" * 32, epoch=0, direction=Direction.TO_RANK, rank=0, limits=Limits())
        router.send_multipart([name, *rogue.seal(Close())])
        with pytest.raises(WireError):
            rank.recv()
        rank.close()
        rank.close()


FORGOTTEN = """
import asyncio, gc, sys
from pathlib import Path
from async_pp.channel.zmq_engine import ZmqEngineChannel
from async_pp.wire.limits import Limits

async def forget():
    channel = ZmqEngineChannel(
        Path(sys.argv[1]), {0: bytes(32)}, epoch=0, limits=Limits(), on_message=print, on_reject=print
    )
    channel.itself = channel
    await channel.start()

asyncio.run(forget())
gc.collect()
"""


def test_a_channel_that_nobody_closes_does_not_keep_its_program_from_going_on(tmp_path: Path) -> None:
    """The collector takes the weak references to a context's sockets away before it ends the context."""
    subprocess.run([sys.executable, "-c", FORGOTTEN, str(tmp_path)], check=True, timeout=60)
