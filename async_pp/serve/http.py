"""uvicorn without its signal handling and without an application's lifespan, which is run beside it."""

import asyncio
import socket
from collections.abc import AsyncIterator, Generator
from contextlib import asynccontextmanager, contextmanager

import uvicorn

from async_pp.serve.asgi import Application, Message

LIFESPAN_END_S = 1.0
"""For what an application does when it ends; then it is cancelled."""


class HttpServer(uvicorn.Server):
    """uvicorn on a socket that is already bound, ended by `should_exit` only: signals are the life cycle's business."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave the signal handlers alone."""
        yield

    def drop_connections(self) -> None:
        """Close all connections now, whatever of their responses is unread. Idempotent."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    async def serve_on(self, listener: socket.socket) -> None:
        """Serve until `should_exit`. Closes `listener`.

        Raises:
            OSError: somebody else listens on the address.
        """
        listener.listen(self.config.backlog)
        if listener.family != socket.AF_UNIX:
            # Inherited by accepted connections: those still closing must not keep the next server from binding.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            await self.serve(sockets=[listener])
        finally:
            for server in getattr(self, "servers", ()):  # closed already, unless this was cancelled
                server.close()
            self.drop_connections()  # of clients that do not read: nothing waits for them any longer


@asynccontextmanager
async def lifespan(application: Application) -> AsyncIterator[None]:
    """Let an application start and end around the block. uvicorn does so only before it listens, which is too early.

    Raises:
        RuntimeError: the application says that it cannot start.
    """
    told: asyncio.Queue[Message] = asyncio.Queue()
    heard: asyncio.Queue[Message] = asyncio.Queue()
    scope = {"type": "lifespan", "asgi": {"version": "3.0", "spec_version": "2.0"}}
    task = asyncio.ensure_future(application(scope, told.get, heard.put))
    started = asyncio.create_task(heard.get(), name="application start")
    try:
        told.put_nowait({"type": "lifespan.startup"})
        await asyncio.wait({task, started}, return_when=asyncio.FIRST_COMPLETED)
        if not started.done() or started.result()["type"] != "lifespan.startup.complete":
            raise RuntimeError("the HTTP application could not start") from task.exception() if task.done() else None
        yield
        told.put_nowait({"type": "lifespan.shutdown"})
        await asyncio.wait({task}, timeout=LIFESPAN_END_S)
    finally:
        started.cancel()
        task.cancel()
        await asyncio.wait({task, started})
        if not task.cancelled():
            task.exception()  # looked at: the server has ended anyway
