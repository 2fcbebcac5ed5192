"""The table of what is awaited: futures by key, with tombstones for those whose waiter gave up.

Cancelling a future never cancels what it waits for: the answer still comes. The tombstone swallows it, so that it can
never be taken for the answer to something else (matching by position does that).
"""

import asyncio
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Pending(Generic[K, V]):
    """Futures by key. Lives on one loop.

    Attributes:
        delivered: answers that reached their waiter.
        late: answers that a tombstone swallowed.
        unknown: answers to a key that was never awaited, or was answered before.
    """

    def __init__(self) -> None:
        self.delivered = 0
        self.late = 0
        self.unknown = 0
        self._open: dict[K, asyncio.Future[V]] = {}

    @property
    def open(self) -> int:
        """Keys that somebody waits for."""
        return sum(not future.cancelled() for future in self._open.values())

    @property
    def tombstones(self) -> int:
        """Keys whose waiter gave up and whose answer has not come."""
        return sum(future.cancelled() for future in self._open.values())

    def __contains__(self, key: K) -> bool:
        """Whether the answer to `key` has not come, whoever waits for it."""
        return key in self._open

    def __iter__(self) -> Iterator[K]:
        """The keys whose answer has not come, oldest first."""
        return iter(self._open)

    def expect(self, key: K) -> "asyncio.Future[V]":
        """A future for the answer to `key`. ValueError when it is awaited already or its tombstone still stands."""
        if key in self._open:
            raise ValueError(f"{key!r} is awaited already")
        future: asyncio.Future[V] = asyncio.get_running_loop().create_future()
        self._open[key] = future
        return future

    def resolve(self, key: K, value: V) -> bool:
        """The answer came. Returns whether somebody got it."""
        future = self._take(key)
        if future is None:
            return False
        future.set_result(value)
        return True

    def reject(self, key: K, error: BaseException) -> bool:
        """The answer is an error. Returns whether somebody got it."""
        future = self._take(key)
        if future is None:
            return False
        self._fail(future, error)
        return True

    def fail_all(self, error: BaseException) -> None:
        """No answer will come any more: every waiter gets `error`, every tombstone goes."""
        futures = list(self._open.values())
        self._open.clear()
        for future in futures:
            if not future.done():
                self._fail(future, error)

    def _take(self, key: K) -> "asyncio.Future[V] | None":
        future = self._open.pop(key, None)
        if future is None:
            self.unknown += 1
        elif future.done():
            self.late += 1
        else:
            self.delivered += 1
            return future
        return None

    @staticmethod
    def _fail(future: "asyncio.Future[V]", error: BaseException) -> None:
        future.set_exception(error)
        future.exception()  # marks it as seen: a waiter that was cancelled in the same tick will never look
