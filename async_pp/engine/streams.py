"""From settles to the output handler: a queue of what the scheduler has to tell, ended by an error at most once."""

import asyncio
from collections.abc import Sequence
from typing import Any


class Streams:
    """Queue between the settler and vLLM's output handler, which spreads it over the requests' own streams."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Any] = asyncio.Queue()
        self._end: BaseException | None = None

    def emit(self, outputs: Sequence[Any]) -> None:
        """Pass on what has something for a stream or for the statistics."""
        for told in outputs:
            if told.outputs or told.scheduler_stats:
                self._queue.put_nowait(told)

    def end(self, error: BaseException) -> None:
        """After what is queued, every `get` raises `error`. The first end counts."""
        if self._end is None:
            self._end = error
            self._queue.put_nowait(None)

    async def get(self) -> Any:
        """The next thing to tell."""
        told = await self._queue.get()
        if told is None:
            assert self._end is not None
            self._queue.put_nowait(None)
            raise self._end
        return told
