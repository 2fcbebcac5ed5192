"""API keys, in front of everything but the probes.

vLLM's own check guards the paths below /v1 and a few others; here a path is open only if it is listed. A cross-origin
preflight passes, because browsers send it without a key and it is answered without reaching a route.
"""

import hashlib
import hmac
from collections.abc import Collection

from async_pp.serve.asgi import Application, Receive, Refusal, Scope, Send, refuse


class ApiKeys:
    """Lets requests through that bring one of the keys as `Authorization: Bearer KEY`; all, when there are no keys.

    Args:
        application: what is guarded.
        keys: the accepted ones.
        open_paths: may be read (GET, HEAD) without a key.
    """

    def __init__(self, application: Application, keys: Collection[str], open_paths: Collection[str]) -> None:
        self._application = application
        self._digests = [_digest(key.encode()) for key in keys]
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        if self._digests and not self._open(scope) and not self._known(_header(scope, b"authorization")):
            await refuse(scope, send, Refusal("a valid API key is needed: send Authorization: Bearer KEY", status=401))
            return
        await self._application(scope, receive, send)

    def _open(self, scope: Scope) -> bool:
        if scope["type"] != "http":
            return False
        if scope["method"] == "OPTIONS":
            return bool(_header(scope, b"origin") and _header(scope, b"access-control-request-method"))
        return scope["method"] in ("GET", "HEAD") and scope["path"] in self._open_paths

    def _known(self, header: bytes) -> bool:
        scheme, _, key = header.partition(b" ")
        digest = _digest(key)
        # All are compared, in constant time: how long it takes tells nothing about any key, nor which one it was.
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return scheme.lower() == b"bearer" and any(matches)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _header(scope: Scope, name: bytes) -> bytes:
    return next((bytes(value) for key, value in scope["headers"] if key == name), b"")
