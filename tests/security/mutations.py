"""Hostile frames: what may be done to a good one, and whole frames made by others. Deterministic given the generator."""

import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from async_pp.wire.frames import _HEAD, SEAL_BYTES, Direction, Part, Payload, Sealer
from async_pp.wire.limits import Limits
from async_pp.wire.messages import (
    Bye,
    Call,
    CallFailed,
    CallReply,
    Close,
    Execute,
    Hello,
    Message,
    Phase,
    Reported,
    Sample,
    Spans,
    StepFailed,
    StepReply,
)

Frame = list[bytes]
Mutation = Callable[[random.Random, Frame], Frame]

KEY = bytes(range(32))
LIMITS = Limits()
EPOCH, RANK = 5, 1
NO_PAYLOAD: Any = Payload(())

TO_RANK: list[tuple[Message, Any]] = [
    (Execute(step=7, sample="later", reply="all"), {"tokens": list(range(50)), "ids": ["a", "b"]}),
    (Sample(step=7), None),
    (Call(call=3), bytearray(1000)),
    (Close(), NO_PAYLOAD),
]
FROM_RANK: list[tuple[Message, Any]] = [
    (Hello(pid=4711), NO_PAYLOAD),
    (Phase(name="load", seconds=1.5), NO_PAYLOAD),
    (StepReply(step=7, began_s=1.25, ended_s=2.5), [[1, 2, 3]]),
    (Reported(step=7), {"finished": {"a"}}),
    (Spans(spans=[(7, 1.25, 2.5), (8, 2.5, 1e9)]), NO_PAYLOAD),
    (StepFailed(step=7, kind="KeyError", text="Traceback"), NO_PAYLOAD),
    (CallReply(call=3), "answer"),
    (CallFailed(call=3, kind="ValueError", text=""), ValueError("no")),
    (Bye(reason="closed"), NO_PAYLOAD),
]


def sealer(direction: Direction, *, key: bytes = KEY, epoch: int = EPOCH, rank: int = RANK) -> Sealer:
    """A sealer at the beginning of its sequence."""
    return Sealer(key, epoch=epoch, direction=direction, rank=rank, limits=LIMITS)


def flat(frame: list[Part]) -> Frame:
    """The frame as a socket brings it."""
    return [bytes(part) for part in frame]


# -- what happens to a good frame ------------------------------------------------------------------------------------


def flip(rng: random.Random, frame: Frame) -> Frame:
    """One bit."""
    index = rng.choice([index for index, part in enumerate(frame) if part])
    part = bytearray(frame[index])
    part[rng.randrange(len(part))] ^= 1 << rng.randrange(8)
    return [*frame[:index], bytes(part), *frame[index + 1 :]]


def cut(rng: random.Random, frame: Frame) -> Frame:
    """A part ends early."""
    index = rng.choice([index for index, part in enumerate(frame) if part])
    return [*frame[:index], frame[index][: rng.randrange(len(frame[index]))], *frame[index + 1 :]]


def grow(rng: random.Random, frame: Frame) -> Frame:
    """A part has something behind its end."""
    index = rng.randrange(len(frame))
    return [*frame[:index], frame[index] + rng.randbytes(rng.randrange(1, 9)), *frame[index + 1 :]]


def drop(rng: random.Random, frame: Frame) -> Frame:
    """A part is missing."""
    index = rng.randrange(len(frame))
    return frame[:index] + frame[index + 1 :]


def double(rng: random.Random, frame: Frame) -> Frame:
    """A part came twice."""
    index = rng.randrange(len(frame))
    return [*frame[: index + 1], *frame[index:]]


def swap(rng: random.Random, frame: Frame) -> Frame:
    """Two parts changed places, if there are two."""
    if len(frame) < 2:
        return frame
    first, second = rng.sample(range(len(frame)), 2)
    frame = list(frame)
    frame[first], frame[second] = frame[second], frame[first]
    return frame


def move_border(rng: random.Random, frame: Frame) -> Frame:
    """The same bytes, split elsewhere: within the first part, which ends with its seal, or between two parts."""
    index = rng.randrange(len(frame))
    if not index:
        head = frame[0]
        at = rng.randrange(len(head) - SEAL_BYTES)
        return [head[:at] + head[-SEAL_BYTES:], head[at:-SEAL_BYTES], *frame[1:]]
    return [*frame[: index - 1], frame[index - 1] + frame[index][:1], frame[index][1:], *frame[index + 1 :]]


def junk(rng: random.Random, frame: Frame) -> Frame:
    """Nothing of it is left."""
    return [rng.randbytes(rng.randrange(40)) for _ in range(rng.randrange(7))]


def rewrite_head(rng: random.Random, frame: Frame) -> Frame:
    """One field of the header says something else, such as 2**64 - 1 bytes; the seal is not renewed."""
    fields = list(_HEAD.unpack_from(frame[0]))
    lengths = bytearray(frame[0][_HEAD.size : _head_bytes(frame)])
    field = rng.randrange(7)
    if field == 6:
        struct.pack_into("<Q", lengths, 8 * rng.randrange(len(lengths) // 8), rng.choice([0, 2**31, 2**63, 2**64 - 1]))
    elif field == 0:
        fields[0] = rng.choice([b"APP0", b"APP2", bytes(4)])
    else:
        fields[field] = rng.choice([0, 1, 2, 3, 2**8 - 1]) if field == 1 else rng.choice([0, 7, 2**31, 2**32 - 1])
    return [_HEAD.pack(*fields) + lengths + frame[0][_head_bytes(frame) :], *frame[1:]]


def nest(rng: random.Random, frame: Frame) -> Frame:
    """A message that is nested 100,000 deep."""
    nested = rng.choice([b"\x91", b"\x81"]) * 100_000 + b"\x01"
    return [frame[0][: _head_bytes(frame)] + nested + frame[0][-SEAL_BYTES:], *frame[1:]]


def swell(rng: random.Random, frame: Frame) -> Frame:
    """More parts than any frame may have."""
    return [*frame, *[b""] * (LIMITS.max_parts + rng.randrange(1, 9))]


def _head_bytes(frame: Frame) -> int:
    """Of its header: there is a length of the message, and one of each payload part."""
    return _HEAD.size + 8 * len(frame)


COMMON: list[Mutation] = [flip, cut, grow, drop, double, swap, move_border, junk, rewrite_head]
COSTLY: list[Mutation] = [nest, swell]


def mutate(rng: random.Random, frame: Frame) -> Frame:
    """A frame that differs from `frame`."""
    while True:
        mutation = rng.choice(COSTLY) if rng.random() < 0.01 else rng.choice(COMMON)
        if (made := mutation(rng, frame)) != frame:
            return made


# -- frames that were made in good order, for somebody else, or by somebody else ---------------------------------------


@dataclass(frozen=True)
class Target:
    """A direction of a rank's channel after some frames, and what may come next.

    Attributes:
        direction: which way.
        before: frames that came.
        good: the frame that would be right now.
        foreign: whole frames that must be refused: of another key, epoch, direction or rank, replayed, too early.
    """

    direction: Direction
    before: tuple[Frame, ...]
    good: Frame
    foreign: tuple[Frame, ...]


def targets() -> Iterator[Target]:
    """For each kind of message: a channel that has had two frames, and expects that one."""
    for direction, messages in ((Direction.TO_RANK, TO_RANK), (Direction.FROM_RANK, FROM_RANK)):
        other = Direction.FROM_RANK if direction is Direction.TO_RANK else Direction.TO_RANK
        first = messages[0]
        for message in messages:
            sealed = partial(_sealed, (first, first, message, message), direction)
            yield Target(
                direction,
                (sealed(0), sealed(1)),
                sealed(2),
                (
                    sealed(2, key=bytes(32)),
                    sealed(2, epoch=EPOCH - 1),
                    sealed(2, epoch=EPOCH + 1),
                    sealed(2, rank=RANK + 1),
                    sealed(2, way=other),
                    sealed(0),
                    sealed(1),
                    sealed(3),
                ),
            )


def _sealed(
    stream: tuple[Any, ...], direction: Direction, number: int, *, way: Direction | None = None, **who: Any
) -> Frame:
    """The frame of that number in the stream, sealed by who is told or by the right one."""
    made = sealer(way or direction, **who)
    return [flat(made.seal(*each)) for each in stream][number]
