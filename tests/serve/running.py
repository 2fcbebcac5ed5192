"""A server's whole life in a task of the test's own loop, with an engine that pretends."""

import asyncio
import io
import socket
import struct
from contextlib import asynccontextmanager

import httpx

from async_pp.serve.display import Display
from async_pp.serve.lifecycle import live
from async_pp.serve.preflight import bind
from async_pp.serve.signals import StopRequest

from .fake import service


class Running:
    """A life in a task, its lines and its address."""

    def __init__(self, engine, **settings):
        self.engine = engine
        self.out, self.err = io.StringIO(), io.StringIO()
        self.announced = asyncio.Event()
        self.listener = bind("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        show = Display(self.out, self.err)
        self.stop = StopRequest(deadline_s=9.0, at_once=lambda: None, tell=show.line)
        made = service(engine, announced=self.announced.set, **settings)
        self.life = asyncio.create_task(live(made, self.listener, self.stop, show))

    async def __aenter__(self):
        if not self.engine.slow_start and self.engine.start_error is None:
            await self.announced.wait()
        return self

    async def __aexit__(self, *_):
        self.stop.asked.set()
        await asyncio.wait({self.life})
        self.listener.close()

    def client(self):
        return httpx.AsyncClient(base_url=self.url, limits=httpx.Limits(max_connections=None), timeout=30)


async def first_event(response):
    """The rest of the events of a stream of which the first has come."""
    lines = response.aiter_lines()
    assert [await anext(lines), await anext(lines)] == ["data: first", ""]
    return lines


async def events(lines):
    return [line.removeprefix("data: ") async for line in lines if line]


async def probes(client):
    """Status of /livez, /readyz, /startupz."""
    return [(await client.get(path)).status_code for path in ("/livez", "/readyz", "/startupz")]


@asynccontextmanager
async def silent(server, path):
    """A client that asks and does not read; the block gets what makes it leave: "close", "reset" or "half-close"."""

    def leave(how):
        if how == "half-close":
            client.shutdown(socket.SHUT_WR)
            return
        if how == "reset":
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()

    with socket.socket() as client:
        client.setblocking(False)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, server.listener.getsockname())
        await loop.sock_sendall(client, f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        yield leave
