"""What a rank may do wrong on the wire although it has the key. Each is sent to a rank and called there."""

import gc
from typing import Any, NoReturn

from async_pp.channel.zmq_rank import ZmqRankChannel
from async_pp.wire.frames import Part, Payload
from async_pp.wire.messages import CallReply, Spans


def _channel() -> ZmqRankChannel:
    """The channel of the rank this runs in."""
    (found,) = (thing for thing in gc.get_objects() if isinstance(thing, ZmqRankChannel))
    return found


def _next() -> list[Part]:
    return _channel()._sealer.seal(CallReply(call=0), "answer")


def _send(frame: list[Part]) -> None:
    _channel()._socket.send_multipart(frame)


def flips_a_bit(runner: Any) -> None:
    """As a fault of memory would."""
    head, message, *others = _next()
    _send([head, bytes(message[:-1]) + bytes([message[-1] ^ 1]), *others])


def says_it_twice(runner: Any) -> None:
    frame = _next()
    _send(frame)
    _send(frame)


def leaves_one_out(runner: Any) -> None:
    """Its next frame has the number after next."""
    _next()


def overtakes_itself(runner: Any) -> None:
    first, second = _next(), _next()
    _send(second)
    _send(first)


def is_of_another_epoch(runner: Any) -> None:
    _channel()._sealer._epoch += 1


def has_another_key(runner: Any) -> None:
    _channel()._sealer._mac.update(b"more")


def sends_noise(runner: Any) -> None:
    _send([b"", b"\xff" * 100])


def sends_no_payload(runner: Any) -> None:
    _channel().send(CallReply(call=0))


def sends_no_pickle(runner: Any) -> None:
    _channel().send(CallReply(call=0), Payload([b"\xff" * 100]))


def sends_a_truncated_pickle(runner: Any) -> None:
    (pickled,) = Payload.dump(list(range(1000))).parts
    _channel().send(CallReply(call=0), Payload([pickled[:50]]))


def sends_a_pickle_without_its_buffers(runner: Any) -> None:
    import numpy as np

    pickled, *_ = Payload.dump(np.zeros(1000)).parts
    _channel().send(CallReply(call=0), Payload([pickled]))


def sends_what_raises(runner: Any) -> None:
    _channel().send(CallReply(call=0), Raises())


class Raises:
    """Cannot be unpickled."""

    def __reduce__(self) -> Any:
        return _raise, ()


def _raise() -> NoReturn:
    raise ZeroDivisionError("on purpose")


def tells_times_of_no_step(runner: Any) -> None:
    _channel().send(Spans(spans=[(2**63, float("nan"), float("-inf"))]))


REFUSED = [
    flips_a_bit,
    says_it_twice,
    leaves_one_out,
    overtakes_itself,
    is_of_another_epoch,
    has_another_key,
    sends_noise,
]
UNREADABLE = [
    sends_no_payload,
    sends_no_pickle,
    sends_a_truncated_pickle,
    sends_a_pickle_without_its_buffers,
    sends_what_raises,
]
