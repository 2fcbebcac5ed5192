"""The gate: who gets in, what is counted, and how those inside are ended."""

import asyncio
import json

import pytest

from async_pp.serve.asgi import RETRY_AFTER_S
from async_pp.serve.gate import Gate


class Sent(list):
    async def __call__(self, message):
        self.append(message)

        self.news.set()

    def __init__(self):
        self.news = asyncio.Event()

    @property
    def headers(self):
        return dict(self[0]["headers"])

    @property
    def body(self):
        return b"".join(message["body"] for message in self[1:])


async def said(sent):
    """Wait until something more has been sent."""
    sent.news.clear()
    await sent.news.wait()


async def receive():
    return {"type": "http.request"}


def scope(path="/", kind="http", method="POST"):
    return {"type": kind, "path": path, "method": method}


def opened(application, most=None, **settings):
    gate = Gate(**settings)
    gate.open(application, most)
    return gate


async def echo(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"ok"})


def stream(left, *, kind=b"text/event-stream"):
    """An application that sends half an answer and then waits until the client has left."""

    async def application(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"Content-Type", kind)]})
        await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
        await left.wait()
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    return application


async def test_counts_open_responses():
    release = asyncio.Event()
    gate = opened(lambda *_: release.wait())
    assert gate.idle.is_set()
    tasks = [asyncio.create_task(gate(scope(), receive, Sent())) for _ in range(2)]
    await asyncio.sleep(0)
    assert gate.open_responses == 2
    assert not gate.idle.is_set()
    release.set()
    await asyncio.wait(tasks)
    assert gate.open_responses == 0
    assert gate.idle.is_set()


async def test_one_that_raises_or_is_cancelled_is_counted_too():
    async def application(scope, receive, send):
        raise RuntimeError

    gate = opened(application)
    with pytest.raises(RuntimeError):
        await gate(scope(), receive, Sent())
    assert gate.idle.is_set()
    gate = opened(lambda *_: asyncio.Event().wait())
    task = asyncio.create_task(gate(scope(), receive, Sent()))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled() and gate.idle.is_set()


async def test_is_shut_until_opened_and_again_in_the_end():
    gate = Gate()
    for path in ("/v1/completions", "/metrics"):
        sent = Sent()
        await gate(scope(path), receive, sent)
        assert (sent[0]["status"], sent.headers[b"connection"]) == (503, b"close")
        assert sent.headers[b"retry-after"] == b"%d" % RETRY_AFTER_S
        assert "starting" in json.loads(sent.body)["error"]["message"]
    gate.open(echo)
    await gate(scope(), receive, sent := Sent())
    assert sent.body == b"ok"
    gate.shut("first")
    gate.shut("second")
    await gate(scope("/v1/completions"), receive, sent := Sent())
    assert sent[0]["status"] == 503
    assert b"first" in sent.body
    await gate(scope("/live", "websocket"), receive, sent := Sent())
    assert sent == [{"type": "websocket.close", "code": 1013, "reason": "first"}]
    await gate(scope("/metrics", method="GET"), receive, sent := Sent())
    assert sent.body == b"ok"


async def test_asks_for_a_refusal_on_each_request():
    answers = iter([None, "the engine is gone"])
    gate = opened(echo, ask=lambda: next(answers))
    for status in (200, 503):
        await gate(scope(), receive, sent := Sent())
        assert sent[0]["status"] == status


async def test_takes_no_more_than_its_limit():
    release = asyncio.Event()
    gate = opened(lambda *_: release.wait(), most=2)
    tasks = [asyncio.create_task(gate(scope(), receive, Sent())) for _ in range(2)]
    await asyncio.sleep(0)
    await gate(scope(), receive, sent := Sent())
    assert sent[0]["status"] == 503
    assert b"retry-after" in sent.headers and b"connection" not in sent.headers
    tasks.append(asyncio.create_task(gate(scope(method="GET"), receive, Sent())))
    await asyncio.sleep(0)
    assert gate.open_responses == 3
    release.set()
    await asyncio.wait(tasks)


@pytest.mark.parametrize("status", [429, 503])
async def test_a_refusal_of_the_applications_own_says_when_to_come_back(status):
    async def busy(scope, receive, send):
        await send({"type": "http.response.start", "status": status, "headers": []})

    await opened(busy)(scope(), receive, sent := Sent())
    assert sent.headers == {b"retry-after": b"%d" % RETRY_AFTER_S}


@pytest.mark.parametrize(
    "path,last",
    [
        ("/v1/completions", b'data: {"error": {"message": "enough"'),
        ("/v1/messages", b'event: error\ndata: {"type": "error", "error": {"message": "enough"'),
    ],
)
async def test_a_stream_ends_with_an_error_event(path, last):
    left, sent = asyncio.Event(), Sent()
    gate = opened(stream(left))
    task = asyncio.create_task(gate(scope(path), receive, sent))
    await asyncio.sleep(0)
    gate.shut("enough")
    end = asyncio.create_task(gate.end("enough"))
    await said(sent)
    left.set()  # the server has told the application that the response is over
    await end
    await task
    events = sent.body.split(b"\n\n")
    assert events[0] == b"data: 1"
    assert events[1].startswith(last)
    assert events[2:] == [b""], "no [DONE]: what the application says after the end is dropped"
    assert not sent[-1]["more_body"]


async def test_what_has_not_begun_ends_with_503_and_what_is_no_stream_stays_as_it_is():
    async def waiting(scope, receive, send):
        await left.wait()
        raise RuntimeError("the client has left")

    left, unbegun, half = asyncio.Event(), Sent(), Sent()
    gate = opened(waiting)
    tasks = [asyncio.create_task(gate(scope(), receive, unbegun))]
    await asyncio.sleep(0)
    gate.open(stream(left, kind=b"audio/wav"))
    tasks.append(asyncio.create_task(gate(scope(), receive, half)))
    await asyncio.sleep(0)
    end = asyncio.create_task(gate.end("enough"))
    await said(unbegun)
    assert unbegun[0]["status"] == 503 and b"enough" in unbegun.body
    assert len(half) == 2
    left.set()
    await end
    await asyncio.gather(*tasks)


async def test_an_answer_in_a_drain_closes_its_connection():
    go, sent = asyncio.Event(), Sent()

    async def late(scope, receive, send):
        await go.wait()
        await echo(scope, receive, send)

    gate = opened(late)
    task = asyncio.create_task(gate(scope(), receive, sent))
    await asyncio.sleep(0)
    gate.shut("ending")
    go.set()
    await task
    assert sent.headers == {b"connection": b"close"}
    assert sent.body == b"ok"
