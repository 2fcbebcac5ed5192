"""The rank's end over ZMQ: a DEALER that blocks on the rank's one thread."""

from typing import Any

import zmq

from async_pp.channel.zmq_engine import identity
from async_pp.wire.frames import NO_PAYLOAD, Direction, Envelope, Opener, Sealer
from async_pp.wire.limits import Limits
from async_pp.wire.messages import Message

FLUSH_MS = 1000
"""How long a closing rank waits for its last words to leave."""


class ZmqRankChannel:
    """Rank end.

    Args:
        endpoint: where the engine listens.
        rank, epoch, key: who this rank is; must match what the engine has.
        limits: limits of a frame.
    """

    def __init__(self, endpoint: str, *, rank: int, epoch: int, key: bytes, limits: Limits) -> None:
        self._sealer = Sealer(key, epoch=epoch, direction=Direction.FROM_RANK, rank=rank, limits=limits)
        self._opener = Opener(key, epoch=epoch, direction=Direction.TO_RANK, rank=rank, limits=limits)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.DEALER)
        for option, value in (
            (zmq.LINGER, FLUSH_MS),
            (zmq.SNDHWM, 0),
            (zmq.RCVHWM, 0),
            (zmq.MAXMSGSIZE, limits.max_payload_bytes),
        ):
            self._socket.setsockopt(option, value)
        self._socket.setsockopt(zmq.IDENTITY, identity(key, epoch, rank))
        self._socket.connect(endpoint)

    def recv(self) -> Envelope:
        """Wait for the next message."""
        parts = self._socket.recv_multipart(copy=False)
        return self._opener.open([part.buffer for part in parts])

    def send(self, message: Message, payload: Any = NO_PAYLOAD) -> None:
        """Send to the engine."""
        self._socket.send_multipart(self._sealer.seal(message, payload), copy=False)

    def close(self) -> None:
        """Flush and stop."""
        self._socket.close()
        self._context.term()
