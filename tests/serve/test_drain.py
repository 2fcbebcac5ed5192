"""The end of a server: readiness first, then what is open finishes or is told, whatever the clients do."""

import asyncio
from contextlib import AsyncExitStack

import httpx
import pytest

from async_pp.serve import lifecycle

from .fake import FakeEngine
from .running import Running, events, first_event, probes, silent


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(lifecycle, "LAST_WORDS_S", 0.2)


async def streams(stack, client, number):
    """Open streams of which the first event has been read: what is left of them."""
    opened = [stack.enter_async_context(client.stream("GET", "/stream")) for _ in range(number)]
    return await asyncio.gather(*(first_event(response) for response in await asyncio.gather(*opened)))


@pytest.mark.parametrize("number", [0, 1, 100])
async def test_what_is_open_finishes(number):
    engine = FakeEngine()
    async with Running(engine, drain_s=60.0) as server, server.client() as client, AsyncExitStack() as stack:
        rest = await streams(stack, client, number)
        server.stop.asked.set()
        if number:
            async with server.client() as new:
                assert await probes(client) == await probes(new) == [200, 503, 200]
                assert (await new.get("/readyz")).json()["phase"] == "draining"
                refused = await new.post("/echo")
                assert (refused.status_code, refused.headers["connection"]) == (503, "close")
                assert refused.headers["retry-after"]
                assert (await new.get("/metrics")).status_code == 200
            assert not server.life.done()
        engine.finish.set()
        assert await asyncio.gather(*map(events, rest)) == [["last"]] * number
        assert await server.life == lifecycle.EXIT_OK
        with pytest.raises(httpx.ConnectError):
            await client.get("/readyz")
    assert engine.closed and engine.left == 0
    assert server.err.getvalue() == ""


@pytest.mark.parametrize("number", [1, 100])
async def test_what_is_open_after_the_deadline_is_told(number):
    engine = FakeEngine()
    async with Running(engine, drain_s=0.0) as server, server.client() as client, AsyncExitStack() as stack:
        rest = await streams(stack, client, number)
        whole = asyncio.create_task(client.get("/whole"))
        await engine.waiting(number + 1)
        server.stop.asked.set()
        for told in await asyncio.gather(*map(events, rest)):
            assert len(told) == 1 and '"code": 503' in told[0]
        assert (await whole).status_code == 503
        assert (await whole).json()["error"]["message"] == lifecycle.DRAINING
        assert await server.life == lifecycle.EXIT_OK
    assert engine.left == number + 1, "the application was told that its clients are gone"
    assert engine.aborted and engine.closed


async def test_neither_a_client_that_does_not_read_nor_a_deaf_handler_holds_the_end():
    engine = FakeEngine()
    loop = asyncio.get_running_loop()
    async with (
        Running(engine, drain_s=0.1) as server,
        server.client() as client,
        client.stream("GET", "/stuck") as response,
        silent(server, "/flood"),
        silent(server, "/stream"),
    ):
        rest = await first_event(response)
        await engine.flooded()
        began_s = loop.time()
        server.stop.asked.set()
        assert '"code": 503' in (await events(rest))[0]
        assert await server.life == lifecycle.EXIT_OK
        assert loop.time() - began_s < 4.0
    assert engine.closed


async def test_a_client_that_does_not_read_is_bounded_and_slows_nobody():
    engine = FakeEngine()
    async with Running(engine) as server, server.client() as client, silent(server, "/flood"):
        await engine.flooded()
        for _ in range(50):
            assert (await client.get("/echo")).text == "ok\n"
        assert engine.flooded_bytes < 16 * 1024**2, "what the kernel holds for a socket, and no more"


@pytest.mark.parametrize("how", ["close", "reset", "half-close"])
async def test_a_client_that_leaves_is_noticed(how):
    engine = FakeEngine()
    async with Running(engine) as server:
        async with silent(server, "/stream") as leave:
            await engine.waiting(1)
            leave(how)
            await engine.waiting(0)
        assert engine.left == 1


async def test_during_start():
    engine = FakeEngine(slow_start=True)
    async with Running(engine) as server, server.client() as client:
        assert await probes(client) == [200, 503, 503]
        assert "starting" in (await client.get("/startupz")).json()["reason"]
        for path in ("/echo", "/metrics", "/health", "/health/generate"):
            assert (await client.get(path)).status_code == 503
        server.stop.asked.set()
        assert await server.life == lifecycle.EXIT_OK
    assert engine.closed
    assert not server.announced.is_set()


async def test_a_start_that_ends():
    engine = FakeEngine(slow_start=True)
    async with Running(engine, keys=("secret",)) as server, server.client() as client:
        assert (await client.get("/echo")).status_code == 401
        assert (await client.get("/startupz")).status_code == 503
        engine.started.set()
        await server.announced.wait()
        assert await probes(client) == [200, 200, 200]
        assert (await client.get("/health/generate")).status_code == 200
        assert engine.tokens == 1
        for path in ("/echo", "/metrics", "/nothing"):
            assert (await client.get(path)).status_code == 401
            key = {"Authorization": "Bearer secret"}
            assert (await client.get(path, headers=key)).status_code == 200


@pytest.mark.parametrize("wait", [True, False])
async def test_during_restart(wait):
    engine = FakeEngine()
    async with (
        Running(engine, drain_s=60.0, wait_for_restart=wait) as server,
        server.client() as client,
        client.stream("GET", "/stream") as response,
    ):
        rest = await first_event(response)
        engine.state = "restarting"
        assert await probes(client) == [200, 503, 200]
        assert (await client.get("/echo")).status_code == (200 if wait else 503)
        server.stop.asked.set()
        assert await probes(client) == [200, 503, 200]
        engine.state = "serving"
        engine.finish.set()
        assert await events(rest) == ["last"]
        assert await server.life == lifecycle.EXIT_OK


async def test_the_engine_fails_in_a_drain():
    engine = FakeEngine()
    async with (
        Running(engine, drain_s=60.0) as server,
        server.client() as client,
        client.stream("GET", "/stream") as response,
    ):
        rest = await first_event(response)
        server.stop.asked.set()
        assert await probes(client) == [200, 503, 200]
        engine.die()
        assert "rank 1" in (await events(rest))[0]
        assert await server.life == lifecycle.EXIT_FAILED
    assert engine.closed


async def test_more_than_it_takes():
    engine = FakeEngine()
    async with Running(engine, most_open=lambda: 2) as server, server.client() as client:
        inside = [asyncio.create_task(client.post("/whole")) for _ in range(2)]
        await engine.waiting(2)
        refused = await client.post("/echo")
        assert refused.status_code == 503 and refused.headers["retry-after"]
        assert (await client.get("/echo")).status_code == 200
        engine.finish.set()
        assert [answer.status_code for answer in await asyncio.gather(*inside)] == [200, 200]
        assert (await client.post("/echo")).status_code == 200
