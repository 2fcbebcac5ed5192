"""The HTTP side: a gate in front of the application, and uvicorn without its signal handling.

The gate counts open responses and, once shut, answers every new request with 503 and the reason, without touching the
application. It knows nothing of vLLM: any ASGI application can stand behind it.
"""

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable, Generator, MutableMapping
from contextlib import contextmanager
from typing import Any

import uvicorn

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

_ALWAYS_OPEN = ("/metrics",)


class Gate:
    """Lets requests through until `shut`.

    Args:
        application: what stands behind the gate.
        refusal: asked on each request; a text means that the engine cannot serve and why. It closes the gap between a
            failure and the moment that `shut` is called for it.
    """

    def __init__(self, application: Application, refusal: Callable[[], str | None] = lambda: None) -> None:
        self._application = application
        self._refusal = refusal
        self._reason: str | None = None
        self._open = 0
        self.idle = asyncio.Event()
        self.idle.set()

    @property
    def open_responses(self) -> int:
        """Requests let through whose responses have not ended."""
        return self._open

    def shut(self, reason: str) -> None:
        """Refuse new requests with this reason. The first reason stays."""
        self._reason = self._reason or reason

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        if scope["type"] not in ("http", "websocket"):
            await self._application(scope, receive, send)
            return
        reason = self._reason or self._refusal()
        if reason is not None and scope["path"] not in _ALWAYS_OPEN:
            await _refuse(scope, send, reason)
            return
        self._open += 1
        self.idle.clear()
        try:
            await self._application(scope, receive, send)
        finally:
            self._open -= 1
            if self._open == 0:
                self.idle.set()


async def _refuse(scope: Scope, send: Send, reason: str) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1013, "reason": reason[:120]})
        return
    error = {"message": reason, "type": "ServiceUnavailableError", "param": None, "code": 503}
    body = json.dumps({"error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 503, "headers": [*headers, (b"connection", b"close")]})
    await send({"type": "http.response.body", "body": body})


class HttpServer(uvicorn.Server):
    """uvicorn on a socket that is already bound, ended by `should_exit` only: signals are the life cycle's business."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave the signal handlers alone."""
        yield

    def stop_accepting(self) -> None:
        """Close the listening sockets; open connections go on. Idempotent, and harmless before the start."""
        for server in getattr(self, "servers", []):
            server.close()

    async def serve_on(self, listener: socket.socket) -> None:
        """Serve until `should_exit`. Closes `listener`.

        Raises:
            OSError: somebody else listens on the address.
        """
        listener.listen(self.config.backlog)
        if listener.family != socket.AF_UNIX:
            # Inherited by accepted connections: those still closing must not keep the next server from binding.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        await self.serve(sockets=[listener])
