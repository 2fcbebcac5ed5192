"""Start, serve, stop and fail, with an engine that pretends and signals that are delivered by hand."""

import socket

import httpx
import pytest

from async_pp.errors import ConfigError
from async_pp.serve import lifecycle
from async_pp.serve.preflight import bind

from .fake import START_ERRORS, FakeEngine
from .running import Running, events, first_event, probes


async def test_serves_until_asked_to_stop():
    engine = FakeEngine()
    async with Running(engine) as server, httpx.AsyncClient() as client:
        assert (await client.get(server.url + "/echo")).text == "ok\n"
        server.stop.asked.set()
        assert await server.life == lifecycle.EXIT_OK
    assert engine.closed
    assert server.err.getvalue() == ""


async def test_failure_ends_streams_with_the_error_and_refuses_with_503():
    engine = FakeEngine()
    async with Running(engine) as server, server.client() as client:
        async with client.stream("GET", "/stream") as response:
            lines = await first_event(response)
            engine.die()
            told = await events(lines)
        assert "rank 1, epoch 0, step 7" in told[0]
        assert await probes(client) == [503, 503, 200]
        refused = await client.get("/health")
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == 503
        assert "rank 1, epoch 0, step 7" in refused.json()["error"]["message"]
        assert (await client.get("/metrics")).status_code == 200
        assert await server.life == lifecycle.EXIT_FAILED
    assert engine.closed
    assert server.err.getvalue().count("\n") == 1
    assert "rank 1, epoch 0, step 7" in server.err.getvalue()


async def test_a_step_that_never_ends_is_no_life():
    engine = FakeEngine()
    async with Running(engine, stall_s=0.0) as server, server.client() as client:
        assert await probes(client) == [200, 200, 200]
        engine.step = (0, 7)
        assert await probes(client) == [200, 200, 200]
        assert await probes(client) == [503, 200, 200]
        engine.step = (1, 0)
        assert await probes(client) == [200, 200, 200]


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
