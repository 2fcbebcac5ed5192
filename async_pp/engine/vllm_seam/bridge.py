"""vLLM's `Executor` interface over our rank set, for the code of vLLM that calls it and blocks.

Two users: the engine core's constructor, which sizes and makes the KV caches with blocking calls and therefore runs in
a helper thread while the loop goes on; and the façade, where vLLM's own engine loop drives our ranks.
"""

import asyncio
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from operator import methodcaller
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.executor.abstract import Executor

from async_pp.engine.executor import RankExecutor
from async_pp.ranks.runner import OnWorker


def worker_call(
    method: str | Callable[..., Any], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
) -> OnWorker:
    """A call of a worker's method by name, or of a function that takes the worker first, to be sent to the ranks."""
    if isinstance(method, str):
        return OnWorker(methodcaller(method, *args, **(kwargs or {})))
    return OnWorker(_Applied(method, args, dict(kwargs or {})))


class _Applied:
    """A function of the worker with its further arguments."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.function, self.args, self.kwargs = function, args, kwargs

    def __call__(self, worker: Any) -> Any:
        return self.function(worker, *self.args, **self.kwargs)


class BridgeExecutor(Executor):
    """Blocking calls from a thread that is not the loop's.

    Args:
        vllm_config: the whole configuration.
        ranks: the started rank set.
        loop: the loop it lives on.
    """

    supports_pp = True

    def __init__(self, vllm_config: VllmConfig, ranks: RankExecutor, loop: asyncio.AbstractEventLoop) -> None:
        self._ranks = ranks
        self._loop = loop
        self._loop_thread: int | None = None
        super().__init__(vllm_config)

    def _init_executor(self) -> None:
        """Nothing to make: the rank set is there."""

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        """Steps are dispatched ahead in any case."""
        return True

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
    ) -> list[Any] | Future[list[Any]]:
        """Call every rank's worker; the answers in rank order, or a future of them."""
        future = self.submit(self._ranks.call(worker_call(method, args, kwargs), timeout))
        return future if non_block else future.result()

    def submit(self, coroutine: Any) -> "Future[Any]":
        """Run a coroutine on the loop from this thread. RuntimeError on the loop's own, where it would never end."""
        if threading.get_ident() == self._thread_of_loop():
            coroutine.close()
            raise RuntimeError("a blocking executor call was made on the event loop's thread")
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _thread_of_loop(self) -> int | None:
        return self._loop_thread

    def bind(self, thread: int) -> None:
        """Say which thread runs the loop, so that a blocking call on it is refused instead of hanging."""
        self._loop_thread = thread

    def check_health(self) -> None:
        """Raise the cause when the rank set is lost."""
        if self._ranks.cause is not None:
            raise self._ranks.cause

    def shutdown(self) -> None:
        """The owner of the rank set closes it, not vLLM's core."""
