"""Mutated frames by the million: `python -m tests.security.fuzz --frames 1000000`.

Each frame is given to an `Opener` that expects another one. What must hold for each: it is refused with a `WireError`,
nothing of it was decoded (both decoders are replaced by spies), the opener's sequence has not moved; and every now and
then that the right frame is still taken. The same seed gives the same frames.
"""

import argparse
import pickle
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import msgspec

from async_pp.errors import WireError
from async_pp.wire import frames
from async_pp.wire.frames import Direction, Opener
from tests.security.mutations import EPOCH, KEY, LIMITS, RANK, Frame, Target, mutate, targets

FOREIGN_SHARE = 0.1
SOUND_EVERY = 500


class Accepted(AssertionError):
    """A hostile frame was let through, or changed something."""


class _Spy:
    def __init__(self, decoded: list[Any]) -> None:
        self._decoded = decoded

    def decode(self, data: Any) -> Any:
        self._decoded.append(data)
        raise msgspec.DecodeError("nothing may be decoded")


def fuzz(count: int, seed: int, tell: Callable[[int], None] = lambda done: None) -> Counter[str]:
    """Give `count` hostile frames to openers. Returns how many were refused, by error.

    Args:
        count: frames.
        seed: of their generator.
        tell: told now and then how many are done.

    Raises:
        Accepted: a frame was not refused as it must be; its number and seed are in the message.
    """
    rng = random.Random(seed)
    channels = [(target, _opener(target)) for target in targets()]
    decoded: list[Any] = []
    refused: Counter[str] = Counter()
    with ExitStack() as spying:
        spying.enter_context(patch.object(frames, "_DECODERS", {way: _Spy(decoded) for way in Direction}))
        spying.enter_context(patch.object(pickle, "loads", lambda *args, **kwargs: decoded.append(args)))
        for number in range(count):
            target, opener = rng.choice(channels)
            hostile = rng.choice(target.foreign) if rng.random() < FOREIGN_SHARE else mutate(rng, target.good)
            refused[_refusal(opener, hostile)] += 1
            if decoded or opener._sequence != len(target.before):
                raise Accepted(f"frame {number} of seed {seed} changed something: {hostile!r}")
            if number % SOUND_EVERY == 0:
                tell(number)
    for target, opener in channels:
        opener.open(target.good)
    return refused


def _opener(target: Target) -> Opener:
    opener = Opener(KEY, epoch=EPOCH, direction=target.direction, rank=RANK, limits=LIMITS)
    for frame in target.before:
        opener.open(frame)
    return opener


def _refusal(opener: Opener, hostile: Frame) -> str:
    try:
        opener.open(hostile)
    except WireError as error:
        return type(error).__name__
    raise Accepted(f"accepted: {hostile!r}")


def main(argv: list[str]) -> int:
    """Fuzz, with progress on stderr. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.security.fuzz", description=__doc__.split("\n")[0])
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(argv)
    began = time.monotonic()
    step = max(SOUND_EVERY, args.frames // 20 // SOUND_EVERY * SOUND_EVERY)

    def tell(done: int) -> None:
        if done and done % step == 0:
            print(f"{done:,} frames, {done / (time.monotonic() - began):,.0f} per second", file=sys.stderr, flush=True)

    refused = fuzz(args.frames, args.seed, tell)
    kinds = ", ".join(f"{name} {number:,}" for name, number in refused.most_common())
    print(f"{sum(refused.values()):,} hostile frames (seed {args.seed}): none accepted, nothing decoded; {kinds}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
