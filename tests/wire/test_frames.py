"""Frames: what goes in comes out, and what was touched on the way is refused before anything of it is decoded."""

import hmac
import struct
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_pp.errors import BadFrame, BadSeal, LimitExceeded, StaleEpoch, WireError
from async_pp.wire import frames
from async_pp.wire.frames import NO_PAYLOAD, Direction, Opener, Part, Payload, Sealer
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
    Sample,
    Spans,
    StepFailed,
    StepReply,
)

KEY = bytes(range(32))
LIMITS = Limits()
TO_RANK: list[Message] = [Execute(step=7, sample="later", reply="all"), Sample(step=7), Call(call=3), Close()]
FROM_RANK: list[Message] = [
    Hello(pid=4711),
    Phase(name="load", seconds=1.5),
    StepReply(step=7, began_s=1.25, ended_s=2.5),
    Spans(spans=[(7, 1.25, 2.5), (8, 2.5, 1e9)]),
    StepFailed(step=7, kind="KeyError", text="Traceback"),
    CallReply(call=3),
    CallFailed(call=3, kind="ValueError", text=""),
    Bye(reason="closed"),
]


def pair(direction: Direction = Direction.TO_RANK, limits: Limits = LIMITS, **other: Any) -> tuple[Sealer, Opener]:
    mine: dict[str, Any] = {"epoch": 5, "direction": direction, "rank": 1, "limits": limits}
    return Sealer(KEY, **mine), Opener(other.pop("key", KEY), **{**mine, **other})


def flat(frame: list[Part]) -> list[bytes]:
    return [bytes(part) for part in frame]


@pytest.mark.parametrize("message", TO_RANK + FROM_RANK, ids=lambda message: type(message).__name__)
def test_every_message_survives_the_way(message: Message) -> None:
    sealer, opener = pair(Direction.TO_RANK if message in TO_RANK else Direction.FROM_RANK)
    bare = opener.open(sealer.seal(message))
    assert bare.message == message
    assert not bare.has_payload
    loaded = opener.open(sealer.seal(message, {"answer": [1, None, "x"]}))
    assert loaded.has_payload
    assert loaded.load() == {"answer": [1, None, "x"]}


def test_large_buffers_travel_out_of_band_and_are_not_copied() -> None:
    array = np.arange(1 << 16, dtype=np.float32)
    sealer, opener = pair()
    frame = sealer.seal(Call(call=1), {"array": array})
    assert len(frame) == 3, "header with message and seal, pickle, buffer"
    assert np.shares_memory(np.frombuffer(frame[2], dtype=np.float32), array)
    got = opener.open(frame).load()["array"]
    assert np.array_equal(got, array)
    assert np.shares_memory(got, array)


def test_functions_without_an_importable_name_are_encoded_by_value() -> None:
    sealer, opener = pair()
    factor = 3
    assert opener.open(sealer.seal(Call(call=1), lambda worker: worker * factor)).load()(5) == 15


def test_one_payload_serves_many_ranks() -> None:
    payload = Payload.dump([1, 2])
    for rank in range(3):
        sealer = Sealer(KEY, epoch=0, direction=Direction.TO_RANK, rank=rank, limits=LIMITS)
        opener = Opener(KEY, epoch=0, direction=Direction.TO_RANK, rank=rank, limits=LIMITS)
        assert opener.open(sealer.seal(Sample(step=1), payload)).load() == [1, 2]


def test_golden_bytes() -> None:
    """The format is stable: a change of it must change the magic."""
    sealer, _ = pair()
    first, payload = flat(sealer.seal(Sample(step=300), Payload([b"four"])))
    head = "4150503201010000000500000000000000000000000000000002000000" + "0b00000000000000" + "0400000000000000"
    signed = bytes.fromhex(head + "92a673616d706c65cd012c")
    assert (first[:-32].hex(), payload) == (signed.hex(), b"four")
    assert first[-32:] == hmac.digest(KEY, signed + payload, "sha256")


@pytest.mark.parametrize(
    "other, error",
    [
        ({"key": bytes(32)}, BadSeal),
        ({"epoch": 6}, StaleEpoch),
        ({"rank": 2}, BadFrame),
        ({"direction": Direction.FROM_RANK}, BadFrame),
    ],
)
def test_frames_for_somebody_else_are_refused(other: dict[str, Any], error: type[WireError]) -> None:
    sealer, opener = pair(**other)
    with pytest.raises(error):
        opener.open(sealer.seal(Sample(step=1)))


def test_replayed_dropped_and_reordered_frames_are_refused_and_change_nothing() -> None:
    sealer, opener = pair()
    first, second, third = (sealer.seal(Sample(step=step)) for step in range(3))
    assert opener.open(first).message == Sample(step=0)
    for wrong in (first, third):
        with pytest.raises(BadFrame):
            opener.open(wrong)
    assert opener.open(second).message == Sample(step=1)
    assert opener.open(third).message == Sample(step=2)


def _resealed(head: bytes, message: bytes, *payload: bytes) -> list[bytes]:
    seal = hmac.digest(KEY, head + message + b"".join(payload), "sha256")
    return [head + message + seal, *payload]


def _head(count: int, *lengths: int, magic: bytes = frames.MAGIC) -> bytes:
    return frames._HEAD.pack(magic, 1, 1, 5, 0, count) + b"".join(struct.pack("<Q", length) for length in lengths)


SAID = b"\x92\xa6sample\x01"  # a message that would be taken


def test_the_frame_that_the_wrong_ones_are_made_of_is_taken() -> None:
    _, opener = pair()
    frame = _resealed(_head(2, len(SAID), 5), SAID, b"defgh")
    assert opener.open(frame).message == Sample(step=1)


@pytest.mark.parametrize(
    "frame",
    [
        _resealed(_head(1, len(SAID), magic=b"APP0"), SAID),
        _resealed(_head(1, 2**31), SAID),
        _resealed(_head(2, len(SAID)), SAID),
        _resealed(_head(1), SAID),
        _resealed(_head(2, len(SAID), 4), SAID, b"defgh"),
        _resealed(_head(3, len(SAID), 2, 4), SAID, b"def", b"ghi"),  # split elsewhere
        _resealed(b"", SAID),
        _resealed(_head(1, 3), b"abc"),  # not a message
        _resealed(_head(1, 100_001), b"\x91" * 100_001),  # nested 100,000 deep
        _resealed(_head(1, 100_010), b"\x93\xa6sample\x01" + b"\x91" * 100_000 + b"\x01"),  # in a field too many
        [b""],
        [],
    ],
    ids=[
        "format",
        "length",
        "count",
        "short head",
        "length of a payload part",
        "borders",
        "no head",
        "message",
        "nesting",
        "nested field",
        "empty part",
        "nothing",
    ],
)
def test_frames_of_the_wrong_shape_are_refused_even_when_their_seal_is_right(frame: list[bytes]) -> None:
    _, opener = pair()
    with pytest.raises(BadFrame):
        opener.open(frame)


def test_payloads_that_cannot_be_decoded() -> None:
    sealer, opener = pair()
    with pytest.raises(BadFrame, match="without"):
        opener.open(sealer.seal(Sample(step=1))).load()
    with pytest.raises(BadFrame, match="cannot be decoded"):
        opener.open(sealer.seal(Sample(step=1), Payload([b"no pickle"]))).load()


@pytest.mark.parametrize(
    "limits, payload",
    [
        (Limits(max_parts=1), Payload([b"a", b"b"])),
        (Limits(max_message_bytes=4), NO_PAYLOAD),
        (Limits(max_payload_bytes=3), Payload([b"ab", b"cd"])),
    ],
)
def test_limits_hold_on_both_sides_and_a_refused_seal_is_not_counted(limits: Limits, payload: Payload) -> None:
    generous, _ = pair()
    strict, opener = pair(limits=limits)
    with pytest.raises(LimitExceeded):
        strict.seal(Sample(step=1), payload)
    assert strict._sequence == 0
    with pytest.raises(LimitExceeded):
        opener.open(generous.seal(Sample(step=1), payload))


def test_a_key_has_32_bytes() -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        Sealer(b"short", epoch=0, direction=Direction.TO_RANK, rank=0, limits=LIMITS)


@given(st.binary(max_size=200), st.integers(min_value=0, max_value=2**40))
def test_any_payload_and_step_survive(data: bytes, step: int) -> None:
    sealer, opener = pair()
    envelope = opener.open(flat(sealer.seal(StepLike(step), data)))
    assert (envelope.message, envelope.load()) == (StepLike(step), data)


def StepLike(step: int) -> Sample:  # noqa: N802 - reads as the message it makes
    return Sample(step=step)


def test_a_function_of_the_main_module_travels_by_value() -> None:
    """The host's `__main__` is not the rank's: a name in it would be found nowhere, or be another function."""
    sealer, opener = pair()
    main = sys.modules["__main__"]
    code = "def doubled(x): return 2 * x\nclass Thing: factor = 3\n"
    exec(code, main.__dict__)
    try:
        frame = sealer.seal(Call(call=1), (main.doubled, main.Thing))
    finally:
        del main.doubled, main.Thing
    doubled, thing = opener.open(frame).load()
    assert (doubled(4), thing.factor) == (8, 3)
