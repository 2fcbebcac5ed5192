"""What the engine does about hostile frames: a rank's own end its epoch at once, a stranger's end nothing."""

import asyncio
import os
import random
import secrets
import stat
import time
from collections.abc import AsyncIterator, Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq

from async_pp.channel.zmq_engine import identity
from async_pp.errors import RankError, RankLost, StartupError, WireError
from async_pp.ranks.environment import rank_environment
from async_pp.ranks.runner import OnWorker
from async_pp.ranks.spawn import Zygote
from async_pp.wire.frames import KEY_BYTES
from tests.engine.rank_sets import Set
from tests.security import lies
from tests.security.mutations import TO_RANK, Direction, flat, mutate, sealer

NOTICED_S = 1.0


@pytest.fixture
async def zygote() -> AsyncIterator[Zygote]:
    made = Zygote()
    await made.start(rank_environment(2), ["async_pp.ranks.main", "async_pp.ranks.sleeping_runner"])
    yield made
    await made.close()


@pytest.fixture
async def ranks(zygote: Zygote) -> AsyncIterator[Set]:
    made = Set(zygote)
    await made.start()
    yield made
    await made.executor.close()


def _one_lies(lie: Callable[[Any], None]) -> OnWorker:
    return OnWorker(lambda worker: lie(worker) if worker._rank == 1 else None)


@pytest.mark.parametrize("lie", lies.REFUSED + lies.UNREADABLE, ids=lambda lie: lie.__name__)
async def test_a_rank_whose_frame_cannot_be_taken_ends_its_epoch_at_once(
    ranks: Set, lie: Callable[[Any], None]
) -> None:
    """The answer it held will not come: without this its step would hang until its deadline."""
    began = time.monotonic()
    with pytest.raises(RankError, match="rank 1 sent what cannot be read: ") as caught:
        await ranks.executor.call(_one_lies(lie))
    assert time.monotonic() - began < NOTICED_S
    assert isinstance(caught.value.__cause__, WireError)
    assert ranks.lost == [caught.value]
    assert bool(ranks.executor.rejected_frames) == (lie in lies.REFUSED)


async def test_times_of_no_step_end_nothing(ranks: Set) -> None:
    await ranks.executor.call(_one_lies(lies.tells_times_of_no_step))
    assert not ranks.lost


async def test_what_the_engine_cannot_make_sense_of_ends_the_epoch(ranks: Set) -> None:
    def fails(*span: Any) -> None:
        raise KeyError("no such step")

    ranks.on_span = fails
    with pytest.raises(RankError, match=r"cannot be read: KeyError\('no such step'\)"):
        await ranks.executor.call(_one_lies(lies.tells_times_of_no_step))


async def test_during_start_it_is_a_start_up_error(zygote: Zygote) -> None:
    made = Set(zygote)
    await made.executor.start()
    with pytest.raises(StartupError, match=r"rank 1 sent what cannot be read: .*\(rank 1, epoch 0") as caught:
        await made.executor.call(_one_lies(lies.flips_a_bit))
    assert caught.value.phase == "load"
    await made.executor.close()


@pytest.mark.parametrize("name", [b"", b"0:1", identity(bytes(32), 0, 1)], ids=["none", "guessed", "of another key"])
async def test_a_stranger_ends_nothing_and_takes_nobodys_place(ranks: Set, name: bytes) -> None:
    """Not even one of the same user, who alone can reach the socket at all."""
    executor = ranks.executor
    assert executor._channel is not None
    good = flat(sealer(Direction.FROM_RANK, epoch=0).seal(*TO_RANK[0]))
    rng = random.Random(3)
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.setsockopt(zmq.LINGER, -1)
        if name:
            stranger.setsockopt(zmq.IDENTITY, name)
        stranger.connect(executor._channel.endpoint)
        for _ in range(500):
            stranger.send_multipart(mutate(rng, good) or [b""])
        while executor.rejected_frames < 500:
            assert await executor.call(OnWorker(attrgetter("_rank"))) == [0, 1]
    assert not ranks.lost


async def test_a_rank_ends_when_its_engine_sends_what_is_not_sealed_for_it(ranks: Set) -> None:
    executor = ranks.executor
    assert executor._channel is not None
    executor._channel._sealers[1]._sequence += 1
    with pytest.raises(RankLost, match="rank 1 ended: exit code 1"):
        await asyncio.wait_for(executor.call(OnWorker(attrgetter("_rank"))), NOTICED_S)


async def test_what_others_on_this_machine_can_see_and_reach(zygote: Zygote, monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[bytes] = []
    monkeypatch.setattr(secrets, "token_bytes", lambda size: keys.append(os.urandom(size)) or keys[-1])
    made = Set(zygote)
    folder = (await made.start()).runtime_dir
    keys = [key for key in keys if len(key) == KEY_BYTES]
    assert len(set(keys)) == 2, "each rank has a key of its own"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    family = [psutil.Process(), *psutil.Process().children(recursive=True)]
    assert len(family) >= 4
    for process in family:
        seen = [Path(f"/proc/{process.pid}/{name}").read_bytes() for name in ("cmdline", "environ")]
        assert not any(key in told or key.hex().encode() in told for key in keys for told in seen)
        assert not process.net_connections("inet"), "nothing on TCP"
    await made.executor.close()
