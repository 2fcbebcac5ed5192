"""Frames: a message and its payload, sealed. The only module that pickles.

A frame is a list of parts. The first holds header, message and seal, the others are the payload: each further part
costs a socket some microseconds, for every rank and step. The header holds magic, format version, direction, rank,
epoch, sequence number and the lengths of the message and of every payload part. The seal is HMAC-SHA256 over all of it
with a key that only this engine and this rank have. It is checked before anything is decoded: workers exchange
pickles, and a pickle of a stranger runs code.

Sequence numbers make a replayed, dropped or reordered frame a refused one. A refused frame changes no state.

Payloads are pickled with protocol 5: large buffers travel as parts of their own and are not copied.
"""

import hmac
import io
import pickle
import struct
from collections.abc import Sequence
from enum import Enum
from typing import Any, Final

import cloudpickle
import msgspec

from async_pp.errors import BadFrame, BadSeal, LimitExceeded, StaleEpoch
from async_pp.wire.limits import Limits
from async_pp.wire.messages import FromRank, Message, ToRank

Part = bytes | bytearray | memoryview

MAGIC: Final = b"APP2"
KEY_BYTES: Final = 32
SEAL_BYTES: Final = 32
_HEAD: Final = struct.Struct("<4sBIQQI")  # magic, direction, rank, epoch, sequence, number of lengths that follow
_LENGTH: Final = struct.Struct("<Q")


class Direction(Enum):
    """Which way a frame goes."""

    TO_RANK = 1
    FROM_RANK = 2


_DECODERS: Final[dict[Direction, msgspec.msgpack.Decoder[Message]]] = {
    Direction.TO_RANK: msgspec.msgpack.Decoder(ToRank),
    Direction.FROM_RANK: msgspec.msgpack.Decoder(FromRank),
}
_ENCODER: Final = msgspec.msgpack.Encoder()


def _lengths(parts: Sequence[Part]) -> tuple[int, ...]:
    return tuple(part.nbytes if isinstance(part, memoryview) else len(part) for part in parts)


class Payload:
    """An object encoded for the wire: once, for however many ranks it goes to."""

    __slots__ = ("lengths", "parts")

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = tuple(parts)
        self.lengths = _lengths(self.parts)

    @classmethod
    def dump(cls, value: Any) -> "Payload":
        """Encode a value. Functions of the host's main module and lambdas are encoded by value."""
        buffers: list[pickle.PickleBuffer] = []
        try:
            head = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
            by_value = b"__main__" in head  # what it names there is another module, or nothing, at the other end
        except (pickle.PicklingError, AttributeError, TypeError):
            by_value = True
        if by_value:
            buffers.clear()
            sink = io.BytesIO()
            cloudpickle.Pickler(sink, protocol=5, buffer_callback=buffers.append).dump(value)
            head = sink.getvalue()
        return cls([head, *(buffer.raw() for buffer in buffers)])


NO_PAYLOAD: Final = Payload(())


class Envelope:
    """A message that came, with its payload still encoded.

    Attributes:
        message: what it says.
    """

    __slots__ = ("_parts", "message")

    def __init__(self, message: Message, parts: Sequence[Part]) -> None:
        self.message = message
        self._parts = parts

    @property
    def has_payload(self) -> bool:
        """Whether something travels with the message."""
        return bool(self._parts)

    def load(self) -> Any:
        """Decode the payload. Raises BadFrame when there is none, or when it cannot be decoded."""
        if not self._parts:
            raise BadFrame(f"{type(self.message).__name__} came without the payload it needs")
        try:
            return pickle.loads(self._parts[0], buffers=self._parts[1:])
        except Exception as error:
            raise BadFrame(f"the payload of {type(self.message).__name__} cannot be decoded: {error!r}") from error


class _Side:
    """What both ends of one direction share."""

    def __init__(self, key: bytes, *, epoch: int, direction: Direction, rank: int, limits: Limits) -> None:
        if len(key) != KEY_BYTES:
            raise ValueError(f"a key has {KEY_BYTES} bytes, not {len(key)}")
        self._mac = hmac.new(key, digestmod="sha256")
        self._epoch = epoch
        self._direction = direction
        self._rank = rank
        self._limits = limits
        self._sequence = 0

    def _digest(self, parts: Sequence[Part]) -> bytes:
        mac = self._mac.copy()
        for part in parts:
            mac.update(part)
        return mac.digest()


class Sealer(_Side):
    """Makes the frames of one direction to or from one rank, in order."""

    def seal(self, message: Message, payload: Any = NO_PAYLOAD) -> list[Part]:
        """Frame a message. `payload` is a value, or a `Payload` that is encoded already.

        Raises:
            LimitExceeded: the frame would be refused by the other side; nothing was counted.
        """
        body = payload if isinstance(payload, Payload) else Payload.dump(payload)
        said = _ENCODER.encode(message)
        _check_limits(len(said), body.lengths, self._limits)
        lengths = (len(said), *body.lengths)
        head = _HEAD.pack(MAGIC, self._direction.value, self._rank, self._epoch, self._sequence, len(lengths))
        first = b"".join((head, *map(_LENGTH.pack, lengths), said))
        self._sequence += 1
        return [first + self._digest((first, *body.parts)), *body.parts]


class Opener(_Side):
    """Checks and opens the frames of one direction to or from one rank, in order."""

    def open(self, parts: Sequence[Part]) -> Envelope:
        """Check a frame and return what it says.

        Raises:
            LimitExceeded: too many parts, or too large; refused before the seal is computed.
            BadSeal: the seal does not match.
            StaleEpoch: sealed right, for another epoch.
            BadFrame: no part, or a first one that is too short for its header; or sealed right, but of the wrong
                lengths, direction, rank, order or content.
        """
        if not parts:
            raise BadFrame("a frame has at least one part")
        first, *payload = parts
        lengths = _lengths(payload)
        head_bytes = _HEAD.size + _LENGTH.size * (1 + len(lengths))
        sealed = memoryview(first)
        message_bytes = sealed.nbytes - head_bytes - SEAL_BYTES
        _check_limits(message_bytes, lengths, self._limits)
        if message_bytes < 0:
            raise BadFrame("the header does not fit the parts")
        signed = sealed[:-SEAL_BYTES]
        if not hmac.compare_digest(self._digest((signed, *payload)), sealed[-SEAL_BYTES:]):
            raise BadSeal("the seal does not match")
        self._check_head(bytes(signed[:head_bytes]), (message_bytes, *lengths))
        try:
            message = _DECODERS[self._direction].decode(signed[head_bytes:])
        except msgspec.MsgspecError as error:
            raise BadFrame(f"the message cannot be decoded: {error}") from error
        self._sequence += 1
        return Envelope(message, payload)

    def _check_head(self, head: bytes, lengths: Sequence[int]) -> None:
        """The header of a frame whose seal is right. The lengths in it fix where message and parts end."""
        magic, direction, rank, epoch, sequence, count = _HEAD.unpack_from(head)
        if magic != MAGIC:
            raise BadFrame(f"unknown format {magic!r}: the other side runs another version")
        if epoch != self._epoch:
            raise StaleEpoch(f"a frame of epoch {epoch} came in epoch {self._epoch}")
        if (direction, rank, sequence) != (self._direction.value, self._rank, self._sequence):
            raise BadFrame(f"frame {sequence} of rank {rank}, direction {direction} is out of place")
        declared = [length for (length,) in _LENGTH.iter_unpack(head[_HEAD.size :])]
        if count != len(lengths) or declared != list(lengths):
            raise BadFrame("the header does not fit the parts")


def _check_limits(message: int, payload: Sequence[int], limits: Limits) -> None:
    if len(payload) > limits.max_parts:
        raise LimitExceeded(f"{len(payload)} payload parts are more than {limits.max_parts}")
    if message > limits.max_message_bytes:
        raise LimitExceeded(f"a message of {message} bytes is larger than {limits.max_message_bytes}")
    if sum(payload) > limits.max_payload_bytes:
        raise LimitExceeded(f"a payload of {sum(payload)} bytes is larger than {limits.max_payload_bytes}")
