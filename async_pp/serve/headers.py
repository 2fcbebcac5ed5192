"""A limit on the head of a request for uvicorn's fast HTTP parser, which has none.

vLLM's `--h11-max-incomplete-event-size` is a setting of uvicorn's other parser. Without this, a client that has no API
key could have the server keep a header of any size.
"""

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_LIMIT_BYTES = 1 << 16
"""Without a setting: what h11 has by default."""

REFUSAL = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class BoundedHeaders(HttpToolsProtocol):
    """Answers 431 and hangs up when the head of a request is longer than the setting allows."""

    _head_bytes = 0
    _in_head = True

    def data_received(self, data: bytes) -> None:
        """Count what belongs to a head that has not ended. One that ends within a read is as long as that at most."""
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        limit: Any = self.config.h11_max_incomplete_event_size
        if self._head_bytes > (limit or HEAD_LIMIT_BYTES) and not self.transport.is_closing():
            self.transport.write(REFUSAL)
            self.transport.close()

    def on_headers_complete(self) -> None:
        """The head has ended."""
        self._in_head = False
        self._head_bytes = 0
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The next head may begin."""
        self._in_head = True
        super().on_message_complete()
