"""The fault verbs do what they say."""

import asyncio
from typing import Any

import pytest

from async_pp.channel.memory import MemoryEngineChannel
from async_pp.channel.protocol import RankUnreachable
from async_pp.errors import BadSeal, EngineClosed, WireError
from async_pp.wire.limits import Limits
from async_pp.wire.messages import Close, StepReply
from tests.channel.conftest import KEYS


class Heard:
    def __init__(self) -> None:
        self.steps: list[tuple[int, Any]] = []
        self.rejected: list[tuple[int | None, WireError]] = []

    async def channel(self) -> MemoryEngineChannel:
        made = MemoryEngineChannel(
            KEYS,
            epoch=0,
            limits=Limits(),
            on_message=lambda rank, envelope: self.steps.append((rank, envelope.message.step)),  # type: ignore[union-attr]
            on_reject=lambda rank, error: self.rejected.append((rank, error)),
        )
        await made.start()
        return made


async def settle() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_freeze_holds_both_directions_and_thaw_lets_them_go_in_order() -> None:
    heard = Heard()
    hub = await heard.channel()
    rank = hub.rank_end(0)
    hub.freeze(0)
    for step in range(3):
        rank.send(StepReply(step=step, began_s=0.0, ended_s=0.0))
    hub.send(0, Close())
    await settle()
    assert not heard.steps
    assert hub._lines[0].to_rank.empty()
    hub.thaw(0)
    assert heard.steps == [(0, 0), (0, 1), (0, 2)]
    assert rank.recv().message == Close()


async def test_delay_lets_frames_arrive_late_and_others_pass() -> None:
    heard = Heard()
    hub = await heard.channel()
    hub.delay(0, 2)
    slow, quick = hub.rank_end(0), hub.rank_end(1)
    for step in range(3):
        slow.send(StepReply(step=step, began_s=0.0, ended_s=0.0))
        quick.send(StepReply(step=step, began_s=0.0, ended_s=0.0))
    await settle()
    assert heard.steps == [(1, 0), (1, 1), (0, 0), (1, 2)]
    hub.delay(0, 0)
    assert [step for rank, step in heard.steps if rank == 0] == [0, 1, 2]


async def test_a_corrupt_frame_is_refused_and_so_is_what_follows_it() -> None:
    heard = Heard()
    hub = await heard.channel()
    hub.corrupt(1)
    rank = hub.rank_end(1)
    rank.send(StepReply(step=0, began_s=0.0, ended_s=0.0))
    rank.send(StepReply(step=1, began_s=0.0, ended_s=0.0))
    await settle()
    assert not heard.steps
    assert [rank for rank, _ in heard.rejected] == [1, 1], "a sequence with a hole is not continued"
    assert isinstance(heard.rejected[0][1], BadSeal)


async def test_a_dead_rank_says_and_hears_nothing() -> None:
    heard = Heard()
    hub = await heard.channel()
    rank = hub.rank_end(2)
    rank.send(StepReply(step=0, began_s=0.0, ended_s=0.0))
    hub.die(2)
    await settle()
    assert not heard.steps
    with pytest.raises(RankUnreachable):
        hub.send(2, Close())
    with pytest.raises(EngineClosed):
        rank.recv()


@pytest.mark.parametrize(
    "verb, heard, refused",
    [
        ("drop", [], 3),  # whatever follows the lost one
        ("corrupt", [], 4),
        ("replay", [0, 1, 2, 3], 1),
        ("reorder", [0], 3),  # 1 came early, 0 late; 2 and 3 follow a hole
    ],
)
async def test_a_fault_on_the_way_is_a_refused_frame(verb: str, heard: list[int], refused: int) -> None:
    told = Heard()
    hub = await told.channel()
    rank = hub.rank_end(0)
    getattr(hub, verb)(0)
    for step in range(4):
        rank.send(StepReply(step=step, began_s=0.0, ended_s=0.0))
    await settle()
    assert [step for _, step in told.steps] == heard
    assert len(told.rejected) == refused


async def test_a_rank_that_lives_on_the_loop_polls_when_it_is_told_to() -> None:
    hub = await Heard().channel()
    told: list[str] = []
    rank = hub.rank_end(0, lambda: told.append("frame"))
    assert rank.poll() is None
    hub.freeze(0)
    hub.send(0, Close())
    assert not told and rank.poll() is None
    hub.thaw(0)
    envelope = rank.poll()
    assert told == ["frame"] and envelope is not None and envelope.message == Close()
    hub.die(0)
    with pytest.raises(RankUnreachable):
        hub.send(0, Close())
    with pytest.raises(EngineClosed):
        rank.poll()
