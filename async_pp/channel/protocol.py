"""The two ends of a channel, whatever carries it."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from async_pp.errors import AsyncPPError, WireError
from async_pp.wire.frames import NO_PAYLOAD, Envelope
from async_pp.wire.limits import Limits
from async_pp.wire.messages import Message

OnMessage = Callable[[int, Envelope], None]
"""Called on the loop with the rank and what it said, in the order it was said."""

OnReject = Callable[[int | None, WireError], None]
"""Called on the loop with the rank and why its frame was refused: an answer of it is lost. The rank is None when the
frame came from somebody who is no rank: that concerns nobody."""


class RankUnreachable(AsyncPPError):
    """The rank is not connected (any more). `rank` names it."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"rank {rank} is not connected")
        self.rank = rank


class EngineChannel(Protocol):
    """The engine's end: never blocks, receives by callback, lives on one loop."""

    @property
    def endpoint(self) -> str:
        """What a rank connects to."""

    async def start(self) -> None:
        """Listen. Callbacks come from now on."""

    def send(self, rank: int, message: Message, payload: Any = NO_PAYLOAD) -> None:
        """Send to a rank. Raises RankUnreachable; never waits."""

    def close(self) -> None:
        """Stop and remove what was made. No callback comes after it; may be called again, also from a callback."""


class MakeEngineChannel(Protocol):
    """Makes the engine's end for the ranks whose keys it gets; not started. `ZmqEngineChannel` is one."""

    def __call__(
        self,
        runtime_dir: Path,
        keys: Mapping[int, bytes],
        *,
        epoch: int,
        limits: Limits,
        on_message: OnMessage,
        on_reject: OnReject,
    ) -> EngineChannel: ...


class RankChannel(Protocol):
    """The rank's end: blocks, used on one thread."""

    def recv(self) -> Envelope:
        """Wait for the next message. Raises WireError on a frame that must be refused."""

    def send(self, message: Message, payload: Any = NO_PAYLOAD) -> None:
        """Send to the engine."""

    def close(self) -> None:
        """Flush what was sent, for a bounded time, and stop. May be called again."""
