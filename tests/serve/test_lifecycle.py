"""Start, serve, stop and fail, with an engine that pretends and signals that are delivered by hand."""

import asyncio
import io
import socket

import httpx
import pytest

from async_pp.errors import ConfigError
from async_pp.serve import lifecycle
from async_pp.serve.display import Display
from async_pp.serve.lifecycle import live
from async_pp.serve.preflight import bind
from async_pp.serve.signals import StopRequest

from .fake import START_ERRORS, FakeEngine, service


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


async def first_line(response):
    lines = response.aiter_lines()
    assert await anext(lines) == "first"
    return lines


async def test_serves_until_asked_to_stop():
    engine = FakeEngine()
    async with Running(engine) as server, httpx.AsyncClient() as client:
        assert (await client.get(server.url + "/echo")).text == "ok\n"
        server.stop.asked.set()
        assert await server.life == lifecycle.EXIT_OK
    assert engine.closed
    assert server.err.getvalue() == ""


async def test_stop_ends_open_streams_and_refuses_new_requests():
    engine = FakeEngine()
    async with Running(engine) as server, httpx.AsyncClient(base_url=server.url) as client:
        async with client.stream("GET", "/stream") as response:
            lines = await first_line(response)
            server.stop.asked.set()
            assert [line async for line in lines] == ["aborted"]
        assert await server.life == lifecycle.EXIT_OK
        with pytest.raises(httpx.ConnectError):
            await client.get("/echo")


async def test_stop_drains_first_when_the_user_wants_that():
    engine = FakeEngine()
    async with Running(engine, drain_s=60.0) as server, httpx.AsyncClient(base_url=server.url) as client:
        async with client.stream("GET", "/stream") as response:
            lines = await first_line(response)
            server.stop.asked.set()
            engine.aborted.set()  # here: the request ends by itself
            assert [line async for line in lines] == ["aborted"]
        assert await server.life == lifecycle.EXIT_OK


async def test_a_response_that_never_ends_is_cancelled(monkeypatch):
    monkeypatch.setattr(lifecycle, "RESPONSES_DEADLINE_S", 0.2)
    engine = FakeEngine()
    async with (
        Running(engine) as server,
        httpx.AsyncClient(base_url=server.url) as client,
        client.stream("GET", "/stuck") as response,
    ):
        await first_line(response)
        server.stop.asked.set()
        assert await server.life == lifecycle.EXIT_OK


async def test_failure_ends_streams_with_the_error_and_refuses_with_503():
    engine = FakeEngine()
    async with Running(engine) as server, httpx.AsyncClient(base_url=server.url) as client:
        async with client.stream("GET", "/stream") as response:
            lines = await first_line(response)
            engine.die()
            told = [line async for line in lines]
        assert "rank 1, epoch 0, step 7" in told[0]
        refused = await client.get("/health")
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == 503
        assert "rank 1, epoch 0, step 7" in refused.json()["error"]["message"]
        assert (await client.get("/metrics")).status_code == 200
        assert await server.life == lifecycle.EXIT_FAILED
    assert engine.closed
    assert server.err.getvalue().count("\n") == 1
    assert "rank 1, epoch 0, step 7" in server.err.getvalue()


async def test_stop_during_start_leaves_nothing():
    engine = FakeEngine(slow_start=True)
    async with Running(engine) as server:
        await engine.entered.wait()
        server.stop.asked.set()
        assert await server.life == lifecycle.EXIT_OK
    assert engine.closed
    assert not server.announced.is_set()


async def test_a_rank_that_dies_during_start():
    engine = FakeEngine(start_error=START_ERRORS["rank"])
    async with Running(engine) as server:
        assert await server.life == lifecycle.EXIT_FAILED
    assert "rank 0" in server.err.getvalue()


async def test_bad_configuration_is_the_callers_business():
    async with Running(FakeEngine(start_error=START_ERRORS["config"])) as server:
        with pytest.raises(ConfigError, match="8 layers"):
            await server.life


async def test_a_port_taken_in_the_meantime():
    engine = FakeEngine()
    server = Running(engine)
    port = server.listener.getsockname()[1]
    server.listener.close()
    with socket.create_server(("127.0.0.1", port)), pytest.raises(ConfigError, match="cannot listen"):
        await server.life
    assert engine.closed


async def test_the_port_is_free_for_the_next_server_at_once():
    engine = FakeEngine()
    async with Running(engine) as server, httpx.AsyncClient() as client:
        await client.get(server.url + "/echo")
        port = server.listener.getsockname()[1]
        server.stop.asked.set()
        await server.life
    bind("127.0.0.1", port).close()
