"""The client against a small server that answers as it is told by the first token of the prompt."""

import asyncio
import contextlib
import json

import pytest
from aiohttp import web

from async_pp.bench import BenchFailed
from async_pp.bench.survive import streams
from async_pp.bench.survive.ledger import Ledger, Prompt
from async_pp.bench.survive.streams import Client, kept_open, reference

GOOD, ERROR, STOPS, HANGS, REFUSES, NONSENSE = range(6)


class Fake:
    """Answers; `most` is how many it had at once."""

    def __init__(self):
        self.open = self.most = self.asked = 0
        self.gone = asyncio.Event()

    async def answer(self, request):
        body = await request.json()
        what, count = body["prompt"][0], body["max_tokens"]
        self.asked += 1
        if what == REFUSES:
            return web.json_response({"error": {"message": "busy", "type": "Busy", "code": 503}}, status=503)
        self.open += 1
        self.most = max(self.most, self.open)
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            await self.stream(response, what, count)
        finally:
            self.open -= 1
        return response

    async def stream(self, response, what, count):
        async def event(content):
            await response.write(b"data: " + content + b"\n\n")
            await asyncio.sleep(0)

        for index in range(count if what == GOOD else 1):
            reason = "length" if index == count - 1 else None
            choice = {"token_ids": [index], "finish_reason": reason}
            await event(json.dumps({"choices": [choice]}).encode())
        if what == HANGS:
            await self.gone.wait()
        if what == ERROR:
            await event(json.dumps({"error": {"message": "lost", "type": "Lost", "code": 503}}).encode())
        if what == NONSENSE:
            await event(b"[]")
        if what != STOPS:
            await event(b"[DONE]")


@contextlib.asynccontextmanager
async def served():
    fake = Fake()
    app = web.Application()
    app.router.add_post("/v1/completions", fake.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        async with Client(f"http://127.0.0.1:{runner.addresses[0][1]}") as client:
            yield fake, client
        fake.gone.set()
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(
    ("what", "outcome", "why"),
    [
        (GOOD, "completed", ""),
        (ERROR, "failed", "503 Lost"),
        (REFUSES, "failed", "503 Busy"),
        (STOPS, "broken", "the stream stopped"),
        (NONSENSE, "broken", "an event that is no JSON object"),
        (HANGS, "hung", ""),
    ],
)
async def test_how_requests_end(what, outcome, why, monkeypatch):
    monkeypatch.setattr(streams, "HANG_S", 0.2)
    async with served() as (_, client):
        request = Ledger().open(Prompt(0, (what,), 3))
        client.listen()
        await client.send(request)
        assert (request.outcome, request.why) == (outcome, why)
        assert [number for _, number in client.heard()] == [0] * len(request.tokens)


async def test_a_server_that_is_not_there_is_written_down():
    request = Ledger().open(Prompt(0, (GOOD,), 3))
    async with Client("http://127.0.0.1:1") as client:
        await client.send(request)
    assert request.outcome == "broken"


async def test_streams_are_kept_open_until_the_block_ends():
    async with served() as (fake, client):
        ledger = Ledger()
        some = [Prompt(number, (GOOD,), 2 + number) for number in range(4)]
        async with kept_open(client, ledger, some, 3, seed=0):
            await client.until(lambda: ledger.account().completed >= 20)
        account = ledger.account()
        assert account.sent == account.completed == fake.asked >= 20
        assert fake.most == 3


async def test_leaving_the_block_by_an_error_waits_for_nothing():
    async def fails(client):
        ledger = Ledger()
        async with kept_open(client, ledger, [Prompt(0, (HANGS,), 3)], 2, seed=0):
            await client.until(lambda: sum(bool(request.tokens) for request in ledger.requests) == 2)
            raise RuntimeError("enough")

    async with served() as (_, client):
        with pytest.raises(RuntimeError, match="enough"):
            await fails(client)


async def test_an_undisturbed_run_is_complete_or_a_failure():
    async with served() as (_, client):
        assert await reference(client, [Prompt(5, (GOOD,), 2)], 4) == {5: [(0, 1), (0, 1)]}
        with pytest.raises(BenchFailed, match="503 Busy"):
            await reference(client, [Prompt(0, (REFUSES,), 2)], 4)
