"""The limit on the head of a request."""

import asyncio
from contextlib import closing

import pytest
import uvicorn

from async_pp.serve.headers import BoundedHeaders
from async_pp.serve.http import HttpServer
from async_pp.serve.preflight import bind

LIMIT = 10_000


async def hello(scope, receive, send):
    while scope["type"] == "http" and (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


async def answers(*requests):
    """What a server answers to bytes on one connection, until it or they end."""
    with closing(bind("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(
            hello,
            http=BoundedHeaders,
            lifespan="off",
            log_level="critical",
            h11_max_incomplete_event_size=LIMIT,
        )
        server = HttpServer(config)
        listener.listen()
        serving = asyncio.create_task(server.serve_on(listener))
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        found = []
        for request in requests:
            writer.write(request)
            found.append((await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)).split()[1])
            if found[-1] == b"200":
                await reader.readexactly(2)
        writer.close()
        server.should_exit = True
        await serving
        return found


def request(size, body=b""):
    head = b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\nx-large: %s\r\n\r\n" % (len(body), b"x" * size)
    return head + body


@pytest.mark.parametrize(
    ("requests", "statuses"),
    [
        ([request(5000), request(5000), request(5000)], [b"200"] * 3),  # each has a limit of its own
        ([request(10, b"y" * 500_000), request(10)], [b"200", b"200"]),  # a body is no head
        ([request(2_000_000)], [b"431"]),
        ([b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 200_000], [b"431"]),  # many small ones, and it does not end
        ([request(10), b"GET /" + b"x" * 2_000_000], [b"200", b"431"]),
    ],
)
async def test_a_head_has_a_limit(requests, statuses):
    assert await answers(*requests) == statuses
