"""The gate in front of the application: who gets in, who is inside, and how those inside are sent home.

It is shut until the application is there, and for good once the server ends. Every response behind it is followed, so
that the life cycle can wait for all of them, and end those that take too long with an error that the client can read.
It knows nothing of vLLM: any ASGI application can stand behind it.
"""

import asyncio
from collections.abc import Callable

from async_pp.serve.asgi import CLOSE, Application, Message, Receive, Refusal, Scope, Send, refuse, retry_after

METRICS = "/metrics"
"""Stays open when the gate is shut, and is not waited for: what ends is what should be watched."""

STARTING = Refusal("the server is starting", close=True)
OVERLOADED = Refusal("the server has as many open requests as it takes: try again later, or another instance")


class Gate:
    """Shut until `open` is called, and again from `shut` on.

    Args:
        ask: asked on each request; a text means that the engine cannot take it and why. It closes the gap between a
            failure and the moment that `shut` is called for it.
    """

    def __init__(self, ask: Callable[[], str | None] = lambda: None) -> None:
        self._ask = ask
        self._application: Application | None = None
        self._most: int | None = None
        self._shut: Refusal | None = None
        self._open: set[_Response] = set()
        self.idle = asyncio.Event()
        self.idle.set()

    @property
    def open_responses(self) -> int:
        """Requests let through whose responses have not ended."""
        return len(self._open)

    def open(self, application: Application, most: int | None = None) -> None:
        """Let requests through to `application`.

        Args:
            application: takes them.
            most: how many may be inside that cost the engine something (POST, websocket); None for no limit.
        """
        self._application = application
        self._most = most

    def shut(self, reason: str) -> None:
        """Refuse new requests with this reason. The first reason stays."""
        self._shut = self._shut or Refusal(reason, close=True)

    async def end(self, reason: str) -> None:
        """End the open responses with an error, and wait until all have ended.

        A stream gets it as its last event, a response that has not begun as 503. The server then tells the
        application that the client has left, and the application gives up what it was doing. A response of another
        kind that has begun stays as it is: an end would make it look whole. Takes as long as clients that do not read
        let it take: the caller bounds it.
        """
        refusal = Refusal(reason, close=True)
        async with asyncio.TaskGroup() as tasks:
            for response in self._open:
                tasks.create_task(response.end(refusal), name="async_pp last words")
        await self.idle.wait()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry, of requests; an application's lifespan is run by `http.lifespan`."""
        if scope["path"] == METRICS and self._application is not None:
            await self._application(scope, receive, send)
            return
        refusal = self._refusal(scope)
        if self._application is None or refusal is not None:
            await refuse(scope, send, refusal or STARTING)
            return
        response = _Response(scope, send, self._ending)
        self._open.add(response)
        self.idle.clear()
        try:
            await self._application(scope, receive, response.send)
        except Exception:
            if not response.ended_by_us:  # what an application says about being ended interests nobody
                raise
        finally:
            self._open.discard(response)
            if not self._open:
                self.idle.set()

    def _refusal(self, scope: Scope) -> Refusal | None:
        if self._shut is not None:
            return self._shut
        if (reason := self._ask()) is not None:
            return Refusal(reason)
        if self._most is not None and _costly(scope) and sum(one.costly for one in self._open) >= self._most:
            return OVERLOADED
        return None

    def _ending(self) -> bool:
        return self._shut is not None


def _costly(scope: Scope) -> bool:
    return bool(scope["type"] == "websocket" or scope["method"] == "POST")


class _Response:
    """What has been sent of a response."""

    def __init__(self, scope: Scope, send: Send, ending: Callable[[], bool]) -> None:
        self.costly = _costly(scope)
        self.ended_by_us = False
        self._scope = scope
        self._send = send
        self._ending = ending
        self._begun = False
        self._stream = False
        self._ended = False

    async def send(self, message: Message) -> None:
        """The application's way to the client."""
        if self.ended_by_us:
            return
        kind = message["type"]
        if kind == "http.response.start":
            self._begun = True
            message = self._started(message)
        elif kind == "http.response.body":
            self._ended = not message.get("more_body", False)
        elif kind in ("websocket.close", "websocket.http.response.body"):
            self._ended = True
        await self._send(message)

    def _started(self, message: Message) -> Message:
        headers = list(message.get("headers", ()))
        names = {bytes(name).lower(): value for name, value in headers}
        self._stream = names.get(b"content-type", b"").startswith(b"text/event-stream")
        if message["status"] in (429, 503) and b"retry-after" not in names:  # vLLM's own refusals
            headers.append(retry_after())
        if self._ending():
            headers.append(CLOSE)
        return {**message, "headers": headers}

    async def end(self, refusal: Refusal) -> None:
        """Say the last words, if there is a way to."""
        if self._ended or (self._begun and not self._stream):
            return
        self.ended_by_us = True
        if self._stream:
            event = refusal.event(self._scope["path"])
            await self._send({"type": "http.response.body", "body": event, "more_body": False})
        else:
            await refuse(self._scope, self._send, refusal)
