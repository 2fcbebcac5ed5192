"""A channel in memory, with faults as verbs: for tests and simulations.

Frames are sealed and opened as on a socket. The rank's end blocks on its own thread, or is polled on the loop; the
engine's end is called on the loop. The verbs act on what a rank sends (and on what reaches a frozen one), from the
moment they are used.
"""

import asyncio
import queue
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from async_pp.channel.protocol import OnMessage, OnReject, RankUnreachable
from async_pp.errors import EngineClosed, WireError
from async_pp.wire.frames import NO_PAYLOAD, Direction, Envelope, Opener, Part, Sealer
from async_pp.wire.limits import Limits
from async_pp.wire.messages import Message

Frame = list[Part]


@dataclass
class _Line:
    """The two directions to one rank."""

    to_rank: queue.SimpleQueue[Frame | None] = field(default_factory=queue.SimpleQueue)
    held_in: deque[Frame] = field(default_factory=deque)
    held_out: deque[Frame] = field(default_factory=deque)
    frozen: bool = False
    dead: bool = False
    late_by: int = 0
    corrupt: int = 0
    drop: int = 0
    replay: int = 0
    reorder: int = 0
    overtaken: Frame | None = None
    on_frame: "Callable[[], None] | None" = None

    def put(self, frame: Frame | None) -> None:
        """Let a frame, or the end, reach the rank."""
        self.to_rank.put(frame)
        if self.on_frame is not None:
            self.on_frame()


class MemoryEngineChannel:
    """Engine end, and the hub of the ranks' ends.

    Args: as for the ZMQ channel, without a folder.
    """

    endpoint = "memory"

    def __init__(
        self, keys: Mapping[int, bytes], *, epoch: int, limits: Limits, on_message: OnMessage, on_reject: OnReject
    ) -> None:
        self._keys = dict(keys)
        self._epoch = epoch
        self._limits = limits
        self._on_message = on_message
        self._on_reject = on_reject
        self._lines = {rank: _Line() for rank in keys}
        self._sealers = {rank: self._sealer(rank, Direction.TO_RANK) for rank in keys}
        self._openers = {
            rank: Opener(key, epoch=epoch, direction=Direction.FROM_RANK, rank=rank, limits=limits)
            for rank, key in keys.items()
        }
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    async def start(self) -> None:
        """Deliver on this loop from now on."""
        self._loop = asyncio.get_running_loop()

    def send(self, rank: int, message: Message, payload: Any = NO_PAYLOAD) -> None:
        """Send to a rank. Raises RankUnreachable when it is dead or the channel is closed."""
        line = self._lines[rank]
        if self._closed or line.dead:
            raise RankUnreachable(rank)
        frame = self._sealers[rank].seal(message, payload)
        if line.frozen:
            line.held_out.append(frame)
        else:
            line.put(frame)

    def close(self) -> None:
        """No callback from now on; every rank's `recv` ends."""
        if not self._closed:
            self._closed = True
            for line in self._lines.values():
                line.put(None)

    def rank_end(self, rank: int, on_frame: Callable[[], None] | None = None) -> "MemoryRankChannel":
        """The end of one rank. `on_frame` is called when there is something to poll."""
        self._lines[rank].on_frame = on_frame
        opener = Opener(
            self._keys[rank], epoch=self._epoch, direction=Direction.TO_RANK, rank=rank, limits=self._limits
        )
        return MemoryRankChannel(self, rank, self._sealer(rank, Direction.FROM_RANK), opener, self._lines[rank].to_rank)

    # -- faults --------------------------------------------------------------------------------------------------

    def freeze(self, rank: int) -> None:
        """The rank stops: nothing reaches it and nothing comes from it."""
        self._lines[rank].frozen = True

    def thaw(self, rank: int) -> None:
        """It goes on, and everything held arrives in order."""
        line = self._lines[rank]
        line.frozen = False
        while line.held_out:
            line.put(line.held_out.popleft())
        self._release(rank, line)

    def delay(self, rank: int, frames: int) -> None:
        """What the rank sends arrives so many of its frames late; 0 ends the delay and lets the rest arrive."""
        line = self._lines[rank]
        line.late_by = frames
        self._release(rank, line)

    def corrupt(self, rank: int, frames: int = 1) -> None:
        """One bit of each of its next frames is wrong."""
        self._lines[rank].corrupt = frames

    def drop(self, rank: int, frames: int = 1) -> None:
        """Its next frames are lost on the way."""
        self._lines[rank].drop = frames

    def replay(self, rank: int, frames: int = 1) -> None:
        """Each of its next frames arrives twice."""
        self._lines[rank].replay = frames

    def reorder(self, rank: int, frames: int = 1) -> None:
        """Its next frame is overtaken by the one after it, so many times."""
        self._lines[rank].reorder = frames

    def die(self, rank: int) -> None:
        """The rank is gone, with what it had not delivered."""
        line = self._lines[rank]
        line.dead = True
        line.held_in.clear()
        line.held_out.clear()
        line.put(None)

    # -- delivery ------------------------------------------------------------------------------------------------

    def from_rank(self, rank: int, frame: Frame) -> None:
        """A rank's end has sent a frame; called from its thread."""
        if self._loop is None or self._closed:
            return
        self._loop.call_soon_threadsafe(self._arrive, rank, frame)

    def _arrive(self, rank: int, frame: Frame) -> None:
        line = self._lines[rank]
        if line.dead:
            return
        line.held_in.extend(_on_its_way(line, frame))
        self._release(rank, line)

    def _release(self, rank: int, line: _Line) -> None:
        while len(line.held_in) > line.late_by and not line.frozen and not self._closed:
            frame = line.held_in.popleft()
            try:
                envelope = self._openers[rank].open(frame)
            except WireError as error:
                self._on_reject(rank, error)
            else:
                self._on_message(rank, envelope)

    def _sealer(self, rank: int, direction: Direction) -> Sealer:
        return Sealer(self._keys[rank], epoch=self._epoch, direction=direction, rank=rank, limits=self._limits)


def _on_its_way(line: _Line, frame: Frame) -> list[Frame]:
    """What arrives when a frame is sent."""
    if line.drop:
        line.drop -= 1
        return []
    if line.corrupt:
        line.corrupt -= 1
        damaged = bytearray(frame[0])
        damaged[-1] ^= 1
        return [[damaged, *frame[1:]]]
    if line.replay:
        line.replay -= 1
        return [frame, frame]
    if line.overtaken is not None:
        overtaken, line.overtaken = line.overtaken, None
        return [frame, overtaken]
    if line.reorder:
        line.reorder -= 1
        line.overtaken = frame
        return []
    return [frame]


class MemoryRankChannel:
    """Rank end: blocks on its own thread, or is polled on the loop."""

    def __init__(
        self,
        hub: MemoryEngineChannel,
        rank: int,
        sealer: Sealer,
        opener: Opener,
        inbox: "queue.SimpleQueue[Frame | None]",
    ) -> None:
        self._hub = hub
        self._rank = rank
        self._sealer = sealer
        self._opener = opener
        self._inbox = inbox

    def recv(self) -> Envelope:
        """Wait for the next message. Raises EngineClosed when the other end is gone or this rank has died."""
        return self._opened(self._inbox.get())

    def poll(self) -> Envelope | None:
        """The next message if there is one, as `recv` returns it; never waits."""
        try:
            frame = self._inbox.get_nowait()
        except queue.Empty:
            return None
        return self._opened(frame)

    def _opened(self, frame: Frame | None) -> Envelope:
        if frame is None:
            raise EngineClosed("the engine's end of the channel is closed")
        return self._opener.open(frame)

    def send(self, message: Message, payload: Any = NO_PAYLOAD) -> None:
        """Send to the engine."""
        self._hub.from_rank(self._rank, self._sealer.seal(message, payload))

    def close(self) -> None:
        """Nothing to give back."""
