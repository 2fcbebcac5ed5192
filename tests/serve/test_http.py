"""The gate: counting, refusing, and never touching the application for a refused request."""

import asyncio

import pytest

from async_pp.serve.http import Gate


class Sent(list):
    async def __call__(self, message):
        self.append(message)


async def receive():
    return {"type": "http.request"}


def scope(path="/", kind="http"):
    return {"type": kind, "path": path}


async def test_counts_open_responses():
    release = asyncio.Event()

    async def application(scope, receive, send):
        await release.wait()

    gate = Gate(application)
    assert gate.idle.is_set()
    tasks = [asyncio.create_task(gate(scope(), receive, Sent())) for _ in range(2)]
    await asyncio.sleep(0)
    assert gate.open_responses == 2
    assert not gate.idle.is_set()
    release.set()
    await asyncio.wait(tasks)
    assert gate.open_responses == 0
    assert gate.idle.is_set()


async def test_an_application_that_raises_is_counted_too():
    async def application(scope, receive, send):
        raise RuntimeError

    gate = Gate(application)
    with pytest.raises(RuntimeError):
        await gate(scope(), receive, Sent())
    assert gate.idle.is_set()


async def test_refuses_once_shut_and_keeps_the_first_reason():
    async def application(scope, receive, send):
        await send("application")

    gate = Gate(application)
    gate.shut("first")
    gate.shut("second")
    sent = Sent()
    await gate(scope("/v1/completions"), receive, sent)
    assert sent[0]["status"] == 503
    assert b"first" in sent[1]["body"]
    sent = Sent()
    await gate(scope("/live", "websocket"), receive, sent)
    assert sent == [{"type": "websocket.close", "code": 1013, "reason": "first"}]
    for path, kind in (("/metrics", "http"), ("", "lifespan")):
        sent = Sent()
        await gate(scope(path, kind), receive, sent)
        assert sent == ["application"]


async def test_asks_for_a_refusal_on_each_request():
    async def application(scope, receive, send):
        await send("application")

    answers = iter([None, "the engine is gone"])
    gate = Gate(application, lambda: next(answers))
    sent = Sent()
    await gate(scope(), receive, sent)
    assert sent == ["application"]
    await gate(scope(), receive, sent)
    assert sent[1]["status"] == 503
