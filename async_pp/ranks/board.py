"""The board: where each rank writes which work it has entered and left last, for the engine to read at any time.

A file in the epoch's private folder that both sides map into memory: what a rank that is frozen, wedged or dead was
doing must be known without asking it. A row is one cache line, so that ranks do not slow each other down.

It also spares messages that would say nothing: a rank that has left a step, and of which every message has come, has
nothing to say of it. So messages are counted, those about steps.

Both sides count the works (see `core.deadlines`) for themselves: frames carry sequence numbers and none can be lost.
A mapping outlives the name of its file.
"""

import mmap
import struct
import time
from collections.abc import Callable
from pathlib import Path

from async_pp.core.deadlines import Row

ROW_BYTES = 64

_ROW = struct.Struct("@dqdqq")  # entered_s, entered, left_s, left, told
_WORDS = ROW_BYTES // 8
_TOLD = 4  # word of a row

READS = 8
"""Times that a row is read to see it twice the same."""


class RankRow:
    """A rank's own row.

    Args:
        memory: of the whole board.
        rank: whose row.
        clock: in seconds, that of the engine's watch.
    """

    def __init__(self, memory: mmap.mmap | bytearray, rank: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.rank = rank
        self._clock = clock
        self._times = memoryview(memory).cast("d")
        self._numbers = memoryview(memory).cast("q")
        self._entered_at = rank * _WORDS
        self._left_at = self._entered_at + 2
        self._told_at = self._entered_at + _TOLD
        self._works = 0

    @classmethod
    def open(cls, path: str, rank: int) -> "RankRow":
        """The row in a board that the engine has made. It stays mapped for the life of the process."""
        with Path(path).open("r+b") as file:
            return cls(mmap.mmap(file.fileno(), 0), rank)

    # Each word is written whole, which `struct.pack_into` does not do: it clears the place first. The time goes first:
    # between the two a row says "not entered yet" or "not left yet", with a time that nobody needs.

    def enter(self) -> None:
        """The next work begins."""
        self._works += 1
        self._times[self._entered_at] = self._clock()
        self._numbers[self._entered_at + 1] = self._works

    def tell(self) -> None:
        """A message about a step is about to be sent."""
        self._numbers[self._told_at] += 1

    def told_by(self, rank: int) -> int:
        """Messages about steps that another rank has sent, or has begun to send."""
        return self._numbers[rank * _WORDS + _TOLD]

    def leave(self) -> None:
        """The work is done, or has failed."""
        self._times[self._left_at] = self._clock()
        self._numbers[self._left_at + 1] = self._works


class Board:
    """The engine's view of all rows.

    Args:
        path: of the file, which is made.
        ranks: number of rows.
    """

    def __init__(self, path: Path, ranks: int) -> None:
        self._ranks = ranks
        path.write_bytes(bytes(ranks * ROW_BYTES))
        with path.open("rb") as file:
            self._memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def row(self, rank: int) -> Row:
        """What a rank says of itself now."""
        read = self._read(rank)
        for _ in range(READS):
            before, read = read, self._read(rank)
            if before == read:
                break
        entered_s, entered, left_s, left, told = _ROW.unpack(read)
        return Row(entered, entered_s, left, left_s, told)

    def rows(self) -> list[Row]:
        """What every rank says of itself now."""
        return [self.row(rank) for rank in range(self._ranks)]

    def close(self) -> None:
        """Let go of the memory. May be called again."""
        self._memory.close()

    def _read(self, rank: int) -> bytes:
        return self._memory[rank * ROW_BYTES : rank * ROW_BYTES + _ROW.size]
