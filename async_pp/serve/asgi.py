"""What the parts of the HTTP side share: the shapes of ASGI, and an answer that is an error.

Knows no server, no application and no engine.
"""

import json
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from dataclasses import dataclass
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = Iterable[tuple[bytes, bytes]]

RETRY_AFTER_S = 5
"""What a client is told to wait before it asks again: enough for a restart of the ranks, or to be sent elsewhere."""

_KINDS = {401: "AuthenticationError", 503: "ServiceUnavailableError"}
_TYPED_EVENTS = ("/v1/messages", "/v1/responses")  # APIs whose events carry their type beside the data


@dataclass(frozen=True)
class Refusal:
    """Why a request is not answered, in the shape of the API's errors.

    Attributes:
        reason: for a person.
        status: of the HTTP response.
        close: the connection is of no further use either.
    """

    reason: str
    status: int = 503
    close: bool = False

    @property
    def error(self) -> dict[str, Any]:
        """The error object of the OpenAI API."""
        return {"message": self.reason, "type": _KINDS[self.status], "param": None, "code": self.status}

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """What the response says beside its body."""
        more = [(b"www-authenticate", b"Bearer")] if self.status == 401 else [retry_after()]
        return [*more, CLOSE] if self.close else more

    def event(self, path: str) -> bytes:
        """The last event of a stream, as the API at `path` spells an error. No `[DONE]`: the answer is not complete."""
        if path.endswith(_TYPED_EVENTS):
            return b"event: error\ndata: %s\n\n" % json.dumps({"type": "error", "error": self.error}).encode()
        return b"data: %s\n\n" % json.dumps({"error": self.error}).encode()


CLOSE = (b"connection", b"close")


def retry_after() -> tuple[bytes, bytes]:
    """The header of that name."""
    return (b"retry-after", str(RETRY_AFTER_S).encode())


async def refuse(scope: Scope, send: Send, refusal: Refusal) -> None:
    """Answer a request, of which nothing has been answered yet, with an error."""
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1013, "reason": refusal.reason[:120]})
    else:
        await answer(send, refusal.status, {"error": refusal.error}, refusal.headers)


async def answer(send: Send, status: int, content: object, headers: Headers = ()) -> None:
    """A whole JSON response."""
    body = json.dumps(content).encode()
    standard = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*standard, *headers]})
    await send({"type": "http.response.body", "body": body})
