"""From settles to the output handler: a queue of what the scheduler has to tell, ended by an error at most once."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any


class Streams:
    """Queue between the settler and vLLM's output handler, which spreads it over the requests' own streams.

    Args:
        on_end: called with the error once everything queued before the end has been taken.
    """

    def __init__(self, on_end: Callable[[BaseException], None]) -> None:
        self._on_end = on_end
        self._queue: asyncio.Queue[Any] = asyncio.Queue()
        self._end: BaseException | None = None
        self._told_end = asyncio.Event()

    def emit(self, outputs: Sequence[Any]) -> None:
        """Pass on what has something for a stream or for the statistics."""
        for told in outputs:
            if told.outputs or told.scheduler_stats:
                self._queue.put_nowait(told)

    def end(self, error: BaseException) -> None:
        """After what is queued, every open stream ends with `error`. The first end counts."""
        if self._end is None:
            self._end = error
            self._queue.put_nowait(None)

    async def ended(self) -> None:
        """Wait until the end has been told."""
        await self._told_end.wait()

    async def get(self) -> Any:
        """The next thing to tell. After the end there is none: it waits until it is cancelled."""
        told = await self._queue.get()
        if told is None:
            assert self._end is not None
            self._on_end(self._end)
            self._told_end.set()
            await asyncio.Event().wait()
        return told
