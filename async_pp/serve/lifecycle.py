"""From start to exit code: the order in which things begin and end.

    listen, start engine ──ready──> serve ──first signal──> refuse, drain, end the rest ──> close engine ──> exit 0
                │                     └────engine failed──> refuse, let errors get out ───> close engine ──> exit 3
                └──signal: exit 0, failure: exit 3

The probes are answered from the first line to the last: the listening socket closes when the last response has ended.
Every wait below is on an event, a task or one of the deadlines named here. Knows an engine only by the members of
`Engine` and the application only as ASGI, so it runs in tests without vLLM.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Hashable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

import uvicorn

from async_pp.errors import ConfigError, EngineFailed
from async_pp.serve import http
from async_pp.serve.asgi import Application
from async_pp.serve.auth import ApiKeys
from async_pp.serve.display import Display
from async_pp.serve.gate import Gate
from async_pp.serve.http import HttpServer
from async_pp.serve.probes import OPEN_PATHS, STALL_S, Phase, Probes, Stall, TokenProbe, Vitals
from async_pp.serve.signals import StopRequest

EXIT_OK = 0
EXIT_CONFIG = 1
EXIT_FAILED = 3

END_DEADLINE_S = 9.0
"""From the end of the drain to the end of the process."""
RESPONSES_DEADLINE_S = 4.0
"""For open responses to end after a failure, each with the error that the engine gave it; then all get the same one."""
LAST_WORDS_S = 1.0
"""For that one to be sent and read, and for the application to let go. For so long at least, too, 503 is answered after
a failure: a client or load balancer that asks now learns the truth."""
HTTP_END_S = 1
"""For the HTTP server to close its connections."""

DRAINING = "the server is shutting down"


class Engine(Protocol):
    """What the life cycle needs of an engine: an async context manager that says how it is."""

    failed: asyncio.Event

    @property
    def state(self) -> str:
        """ "serving" when it takes steps, "restarting" while lost ranks are replaced; others do not matter here."""
        ...

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
        http: makes uvicorn's configuration for an application.
        abort_all: ends every request that is open in the engine.
        announce: says that the server answers from now on.
        beside: starts what runs beside the HTTP server, given its loaded configuration; returns what ends it.
        drain_s: seconds that open requests may go on for after the first signal.
        wait_for_restart: new requests are let in while the engine replaces its ranks, and wait; else they are refused.
        most_open: how many requests may be open; asked once the engine is ready.
        keys: API keys; none lets everyone in.
        oldest: what the engine is computing, as anything that differs for another step; None when nothing.
        stall_s: for how long it may be the same.
        token: generates one token; asked for once the engine is ready, None for a model that cannot.
    """

    engine: Engine
    application: Callable[[], Awaitable[Application]]
    http: Callable[[Application], uvicorn.Config]
    abort_all: Callable[[], Awaitable[None]]
    announce: Callable[[], None]
    beside: Callable[[uvicorn.Config], Callable[[], None]] = lambda _config: _nothing
    drain_s: float = 0.0
    wait_for_restart: bool = True
    most_open: Callable[[], int | None] = lambda: None
    keys: Collection[str] = ()
    oldest: Callable[[], Hashable | None] = lambda: None
    stall_s: float = STALL_S
    token: Callable[[], Callable[[], Awaitable[None]] | None] = lambda: None


def _nothing() -> None:
    """Nothing runs beside."""


async def live(service: Service, listener: socket.socket, stop: StopRequest, show: Display) -> int:
    """Run a server from start to end. Returns the exit code of the process.

    Raises:
        ConfigError: the engine or the application refuses its configuration, or the address is taken.
    """
    return await _Life(service, stop, show).live(listener)


class _Life:
    """One life of a server."""

    def __init__(self, service: Service, stop: StopRequest, show: Display) -> None:
        self._service = service
        self._engine = service.engine
        self._stop = stop
        self._show = show
        self._started = False
        self._gate = Gate(self._engine_refuses)
        self._vitals = Vitals(
            phase=self._phase,
            reason=self._reason,
            stalled_s=Stall(service.oldest, asyncio.get_running_loop().time).seconds,
            stall_s=service.stall_s,
        )

    # -- how it is -----------------------------------------------------------------------------------------------

    def _phase(self) -> Phase:
        if self._engine.failed.is_set():
            return "failed"
        if self._stop.asked.is_set():
            return "draining"
        if not self._started:
            return "starting"
        return "restarting" if self._engine.state == "restarting" else "serving"

    def _reason(self) -> str:
        match self._phase():
            case "failed":
                return str(self._engine.dead_error)
            case "starting":
                return f"the server is starting; last: {self._show.latest}"
            case "restarting":
                return "the ranks were lost and are being replaced"
            case _:
                return DRAINING

    def _engine_refuses(self) -> str | None:
        phase = self._phase()
        refused = phase == "failed" or (phase == "restarting" and not self._service.wait_for_restart)
        return self._reason() if refused else None

    # -- what it does --------------------------------------------------------------------------------------------

    async def live(self, listener: socket.socket) -> int:
        """See the function of that name."""
        async with AsyncExitStack() as stack, self._listening(listener) as serving:  # the latter ends first
            begun = asyncio.create_task(self._begin(stack), name="start")
            stopped = asyncio.create_task(self._stop.asked.wait(), name="stop request")
            failed = asyncio.create_task(self._engine.failed.wait(), name="engine failure")
            try:
                await asyncio.wait({begun, serving, stopped}, return_when=asyncio.FIRST_COMPLETED)
                if not serving.done():
                    if not begun.done():
                        return EXIT_OK
                    begun.result()
                    self._service.announce()
                    await asyncio.wait({serving, stopped, failed}, return_when=asyncio.FIRST_COMPLETED)
                if serving.done():
                    return self._ended_early(serving)
                return await self._end(stopped, failed)
            except EngineFailed as error:
                self._show.error(f"start failed: {error}")
                return EXIT_FAILED
            finally:
                for task in (begun, stopped, failed):
                    await _ended(task)

    @asynccontextmanager
    async def _listening(self, listener: socket.socket) -> AsyncIterator[asyncio.Task[None]]:
        """The HTTP server, from before the start to after the last response."""
        config = self._service.http(Probes(ApiKeys(self._gate, self._service.keys, OPEN_PATHS), self._vitals))
        config.lifespan = "off"
        config.timeout_graceful_shutdown = HTTP_END_S
        config.load()
        server = HttpServer(config)
        end_beside = self._service.beside(config)
        serving = asyncio.create_task(server.serve_on(listener), name="http server")
        try:
            yield serving
            if self._gate.open_responses:
                server.drop_connections()  # of clients that do not read, and of handlers that do not end
            server.should_exit = True
            await asyncio.wait({serving})
        finally:
            end_beside()
            await _ended(serving)

    async def _begin(self, stack: AsyncExitStack) -> None:
        await stack.enter_async_context(self._engine)
        application = await self._service.application()
        await stack.enter_async_context(http.lifespan(application))
        if (generate := self._service.token()) is not None:
            self._vitals.token = TokenProbe(generate)
            stack.push_async_callback(self._vitals.token.close)
        self._gate.open(application, self._service.most_open())
        self._started = True

    async def _end(self, stopped: asyncio.Task[Any], failed: asyncio.Task[Any]) -> int:
        if not failed.done():
            self._gate.shut(DRAINING)
            idle = asyncio.create_task(self._gate.idle.wait(), name="drain")
            await asyncio.wait({idle, failed}, timeout=self._service.drain_s, return_when=asyncio.FIRST_COMPLETED)
            await _ended(idle)
        if failed.done():
            await self._tell_failure(stopped)
            return EXIT_FAILED
        await _within(LAST_WORDS_S, self._gate.end(DRAINING))
        await _within(LAST_WORDS_S, self._service.abort_all())
        return EXIT_OK

    async def _tell_failure(self, stopped: asyncio.Task[Any]) -> None:
        """Let open responses end with their errors; a stop request shortens only what is for those who ask anew."""
        why = str(self._engine.dead_error)
        self._show.error(f"engine failed: {why}")
        self._gate.shut(why)
        loop = asyncio.get_running_loop()
        least_s = loop.time() + LAST_WORDS_S
        await _within(RESPONSES_DEADLINE_S, self._gate.idle.wait())
        await _within(LAST_WORDS_S, self._gate.end(why))
        if (rest_s := least_s - loop.time()) > 0:
            await asyncio.wait({stopped}, timeout=rest_s)

    def _ended_early(self, serving: asyncio.Task[None]) -> int:
        error = serving.exception()
        if isinstance(error, OSError):
            raise ConfigError(f"cannot listen: {error.strerror or error}; choose another --port") from error
        self._show.error(f"the HTTP server ended by itself: {error or 'without an error'}")
        return EXIT_FAILED


async def _within(seconds: float, wait: Awaitable[Any]) -> None:
    """Await something for so long at most."""
    try:
        async with asyncio.timeout(seconds):
            await wait
    except TimeoutError:
        return


async def _ended(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait until it has ended; what it says then interests nobody."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()
