"""From start to exit code: the order in which things begin and end.

    start engine ──ready──> serve ──first signal──> stop accepting, end open responses ──> close engine ──> exit 0
         │                    └────rank set lost──> refuse with 503, let errors get out ──> close engine ──> exit 3
         └──signal: exit 0, failure: exit 3

Every wait below is on an event, a task or one of the deadlines named here. Knows an engine only by the four members of
`Engine` and the application only as ASGI, so it runs in tests without vLLM.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, TypeVar

import uvicorn

from async_pp.errors import ConfigError, EngineFailed
from async_pp.serve.display import Display
from async_pp.serve.http import Application, Gate, HttpServer
from async_pp.serve.signals import StopRequest

T = TypeVar("T")

EXIT_OK = 0
EXIT_CONFIG = 1
EXIT_FAILED = 3

END_DEADLINE_S = 9.0
"""From the first signal to the end of the process, besides a drain the user asked for."""
RESPONSES_DEADLINE_S = 4.0
"""For open responses to end once their requests were aborted or failed; then their tasks are cancelled."""
LAST_WORDS_S = 1.0
"""For how long at least 503 is answered after a failure: a client or load balancer that asks now learns the truth."""


class Engine(Protocol):
    """What the life cycle needs of an engine: an async context manager that says when it failed and why."""

    failed: asyncio.Event

    @property
    def dead_error(self) -> BaseException:
        """Why `failed` is set."""
        ...

    async def __aenter__(self) -> Any:
        """Start; raises `ConfigError` or `EngineFailed`, and leaves nothing behind when it fails or is cancelled."""
        ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        """Close: nothing of the engine is left after it."""
        ...


@dataclass(frozen=True)
class Service:
    """One server to run.

    Attributes:
        engine: not started yet.
        application: makes the ASGI application, once the engine is ready.
        http: makes uvicorn's configuration for the gated application.
        abort_all: ends every open request; their streams finish.
        announce: says that the server answers from now on.
        beside: starts what runs beside the HTTP server, given its loaded configuration; returns what ends it.
        drain_s: seconds that open requests may go on for after the first signal.
    """

    engine: Engine
    application: Callable[[], Awaitable[Application]]
    http: Callable[[Application], uvicorn.Config]
    abort_all: Callable[[], Awaitable[None]]
    announce: Callable[[], None]
    beside: Callable[[uvicorn.Config], Callable[[], None]] = lambda _config: _nothing
    drain_s: float = 0.0


def _nothing() -> None:
    """Nothing runs beside."""


async def live(service: Service, listener: socket.socket, stop: StopRequest, show: Display) -> int:
    """Run a server from start to end. Returns the exit code of the process.

    Raises:
        ConfigError: the engine or the application refuses its configuration.
    """
    async with AsyncExitStack() as stack:
        try:
            application = await _unless_stopped(_start(service, stack), stop)
        except EngineFailed as error:
            show.error(f"start failed: {error}")
            return EXIT_FAILED
        if application is None:
            return EXIT_OK
        return await _serve(service, application, listener, stop, show)


async def _start(service: Service, stack: AsyncExitStack) -> Application:
    await stack.enter_async_context(service.engine)
    return await service.application()


async def _serve(
    service: Service, application: Application, listener: socket.socket, stop: StopRequest, show: Display
) -> int:
    engine = service.engine
    gate = Gate(application, lambda: str(engine.dead_error) if engine.failed.is_set() else None)
    config = service.http(gate)
    config.timeout_graceful_shutdown = int(RESPONSES_DEADLINE_S)
    server = HttpServer(config)
    config.load()
    end_beside = service.beside(config)
    serving = asyncio.create_task(server.serve_on(listener), name="http server")
    stopped = asyncio.create_task(stop.asked.wait(), name="stop request")
    failed = asyncio.create_task(engine.failed.wait(), name="engine failure")
    try:
        service.announce()
        await asyncio.wait({serving, stopped, failed}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            return _ended_early(serving, show)
        if failed.done():
            show.error(f"engine failed: {engine.dead_error}")
            gate.shut(str(engine.dead_error))
            await _last_words(gate, stopped)
            code = EXIT_FAILED
        else:
            gate.shut("the server is shutting down")
            server.stop_accepting()
            await _within(service.drain_s, gate.idle.wait())
            await service.abort_all()
            code = EXIT_OK
        server.should_exit = True
        await serving
        return code
    finally:
        end_beside()
        for task in (stopped, failed, serving):
            task.cancel()
        await asyncio.wait({stopped, failed, serving})


async def _last_words(gate: Gate, stopped: asyncio.Task[Any]) -> None:
    """Let open responses end with their errors; a stop request does not shorten it, the deadline is short enough."""
    loop = asyncio.get_running_loop()
    least = loop.time() + LAST_WORDS_S
    await _within(RESPONSES_DEADLINE_S, gate.idle.wait())
    if (rest := least - loop.time()) > 0:
        await asyncio.wait({stopped}, timeout=rest)


def _ended_early(serving: asyncio.Task[None], show: Display) -> int:
    error = serving.exception()
    if isinstance(error, OSError):
        raise ConfigError(f"cannot listen: {error.strerror or error}; choose another --port") from error
    show.error(f"the HTTP server ended by itself: {error or 'without an error'}")
    return EXIT_FAILED


async def _within(seconds: float, wait: Awaitable[Any]) -> None:
    """Await something for so long at most."""
    try:
        async with asyncio.timeout(seconds):
            await wait
    except TimeoutError:
        return


async def _unless_stopped(work: Awaitable[T], stop: StopRequest) -> T | None:
    """The result of `work`, or None when a stop request came first; the work is then cancelled and has ended."""
    task = asyncio.ensure_future(work)
    stopped = asyncio.create_task(stop.asked.wait(), name="stop request")
    try:
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        stopped.cancel()
        if not task.done():
            task.cancel()
        await asyncio.wait({task, stopped})
        if not task.cancelled():
            task.exception()  # looked at: what a stopped start still says interests nobody
