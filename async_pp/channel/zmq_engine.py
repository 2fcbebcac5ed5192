"""The engine's end over ZMQ: a ROUTER that binds, read through its file descriptor.

The engine binds and the ranks connect, so frames of a dead rank can never reach its successor: each life of a rank has
an identity of its own. ROUTER_MANDATORY turns a send to nobody into an error instead of silence.

The identity comes from the rank's key, so nobody else can take a rank's place on the socket: what is refused under a
rank's identity is a frame of that rank that was damaged, and what is refused without one concerns no rank.

The descriptor of a ZMQ socket is edge-triggered and covers both directions: after it fired, and after a send, the
socket's events must be asked for and read until nothing is left, or a message waits unseen. After a send that is done
by the loop's next turn: once for all that are sent in this one, and not while the ranks wait for them.
"""

import asyncio
import hmac
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import zmq

from async_pp.channel.protocol import OnMessage, OnReject, RankUnreachable
from async_pp.errors import BadFrame, ConfigError, WireError
from async_pp.wire.frames import NO_PAYLOAD, Direction, Opener, Sealer
from async_pp.wire.limits import Limits
from async_pp.wire.messages import Message

MAX_PATH_BYTES = 107
"""Longest path of a Unix socket on Linux."""

DRAIN_AT_ONCE = 64
"""Messages handled per wake-up before other callbacks of the loop get their turn."""

_open: set["zmq.Context[zmq.Socket[bytes]]"] = set()
"""Contexts whose channel was not closed. Were one collected together with its socket, as garbage of a program that
forgot an engine, it would wait for ever for that socket's end, and the program with it."""


def identity(key: bytes, epoch: int, rank: int) -> bytes:
    """Name of one life of a rank on the socket; who does not have its key cannot tell it."""
    # A name that begins with a zero byte would be one of those that ZMQ gives itself.
    return b"r" + hmac.digest(key, f"identity of rank {rank} in epoch {epoch}".encode(), "sha256")


class ZmqEngineChannel:
    """Engine end.

    Args:
        runtime_dir: private folder (mode 0700) for the socket file.
        keys: key of each rank.
        epoch: life of the rank set.
        limits: limits of a frame.
        on_message, on_reject: callbacks, on the loop.
    """

    def __init__(
        self,
        runtime_dir: Path,
        keys: Mapping[int, bytes],
        *,
        epoch: int,
        limits: Limits,
        on_message: OnMessage,
        on_reject: OnReject,
    ) -> None:
        self._path = runtime_dir / "engine.sock"
        if len(bytes(self._path)) > MAX_PATH_BYTES:
            raise ConfigError(f"the path of the socket is too long ({self._path}): set TMPDIR to a shorter folder")
        self._limits = limits
        self._on_message = on_message
        self._on_reject = on_reject
        self._ranks = {identity(key, epoch, rank): rank for rank, key in keys.items()}
        self._identities = {rank: name for name, rank in self._ranks.items()}
        self._sealers = {
            rank: Sealer(key, epoch=epoch, direction=Direction.TO_RANK, rank=rank, limits=limits)
            for rank, key in keys.items()
        }
        self._openers = {
            rank: Opener(key, epoch=epoch, direction=Direction.FROM_RANK, rank=rank, limits=limits)
            for rank, key in keys.items()
        }
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._socket: zmq.Socket[bytes] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._fd = -1
        self._drain_soon: asyncio.Handle | None = None

    @property
    def endpoint(self) -> str:
        """What a rank connects to."""
        return f"ipc://{self._path}"

    async def start(self) -> None:
        """Bind and read."""
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context(io_threads=1)
        _open.add(self._context)
        socket = self._context.socket(zmq.ROUTER)
        self._socket = socket
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.SNDHWM, 0),  # the number of slots bounds what is in flight, not the socket
            (zmq.RCVHWM, 0),
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.MAXMSGSIZE, self._limits.max_payload_bytes),
        ):
            socket.setsockopt(option, value)
        socket.bind(self.endpoint)
        self._fd = int(socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._drain)

    def send(self, rank: int, message: Message, payload: Any = NO_PAYLOAD) -> None:
        """Send to a rank. Raises RankUnreachable when it is not connected or the channel is closed."""
        if self._socket is None:
            raise RankUnreachable(rank)
        frame = self._sealers[rank].seal(message, payload)
        try:
            self._socket.send_multipart([self._identities[rank], *frame], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            raise RankUnreachable(rank) from error
        self._drain_again()

    def close(self) -> None:
        """Stop reading, close the socket and its context, remove the socket file."""
        if self._drain_soon is not None:
            self._drain_soon.cancel()
            self._drain_soon = None
        socket, self._socket = self._socket, None
        if socket is None:
            return
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._fd)
        socket.close(linger=0)
        if self._context is not None:
            self._context.term()
            _open.discard(self._context)
        self._path.unlink(missing_ok=True)

    def _drain_again(self) -> None:
        """A send may have swallowed the edge of a message that came: read in the loop's next turn."""
        if self._drain_soon is None:
            assert self._loop is not None
            self._drain_soon = self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        self._drain_soon = None
        for _ in range(DRAIN_AT_ONCE):
            if self._socket is None or not int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                return
            name, *parts = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            self._take(name.bytes, [part.buffer for part in parts])
        self._drain_again()

    def _take(self, name: bytes, parts: list[memoryview]) -> None:
        rank = self._ranks.get(name)
        if rank is None:
            self._on_reject(None, BadFrame("a frame came from somebody who is not a rank of this epoch"))
            return
        try:
            envelope = self._openers[rank].open(parts)
        except WireError as error:
            self._on_reject(rank, error)
            return
        self._on_message(rank, envelope)
