"""A server without vLLM: the real life cycle, signals and HTTP around an engine that only pretends.

    python -m tests.serve.fake PORT [--slow-start] [--drain]     a process for the signal tests

Routes: /stream sends an event at once and ends when the engine finishes or fails, or the client leaves; /whole is the
same without a stream; /echo answers; /stuck ignores all of that; /flood sends without end; /die makes the engine fail.
"""

import asyncio
import sys

import uvicorn

from async_pp.errors import ConfigError, RankLost, StartupError
from async_pp.serve import loop, signals
from async_pp.serve.display import Display
from async_pp.serve.lifecycle import Service, live
from async_pp.serve.preflight import bind


class FakeEngine:
    """An engine whose start, failure and requests are events."""

    def __init__(self, *, slow_start=False, start_error=None):
        self.failed = asyncio.Event()
        self.dead_error = None
        self.slow_start = slow_start
        self.start_error = start_error
        self.entered = asyncio.Event()
        self.started = asyncio.Event()
        self.closed = False
        self.finish = asyncio.Event()
        self.state = "serving"
        self.step = None
        self.aborted = False
        self.tokens = 0
        self.token = asyncio.Event()
        self.token.set()
        self.flooded_bytes = 0
        self.left = 0
        self.inside = 0
        self._news = asyncio.Condition()

    async def __aenter__(self):
        self.entered.set()
        try:
            if self.slow_start:
                await self.started.wait()
            if self.start_error is not None:
                raise self.start_error
        except BaseException:
            self.closed = True
            raise
        return self

    async def __aexit__(self, *_):
        self.closed = True

    def die(self):
        self.dead_error = RankLost("rank 1 ended", exit_status="signal SIGKILL", rank=1, epoch=0, step=7)
        self.failed.set()

    async def abort_all(self):
        self.aborted = True

    async def waiting(self, number):
        """Wait until so many requests wait for the end."""
        async with self._news:
            await self._news.wait_for(lambda: self.inside == number)

    async def enters(self, number):
        async with self._news:
            self.inside += number
            self._news.notify_all()

    async def flooded(self):
        """Wait until a flood stands still: nothing more of it goes out for as long as the loop takes ten turns."""
        while True:
            before = self.flooded_bytes
            for _ in range(10):
                await asyncio.sleep(0)
            if self.flooded_bytes == before > 0:
                return

    async def generate(self):
        self.tokens += 1
        await self.token.wait()


def application(engine):
    async def app(scope, receive, send):
        if scope["type"] == "lifespan":
            for done in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{done}.complete"})
            return
        path = scope["path"]
        if path == "/die":
            engine.die()
        elif path == "/whole":
            await until_the_end(receive)
        kind = b"text/event-stream" if path in ("/stream", "/v1/messages", "/flood", "/stuck") else b"text/plain"
        status = 503 if path == "/busy" else 200
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]})
        text = b"ok\n"
        if kind == b"text/event-stream":
            await send({"type": "http.response.body", "body": b"data: first\n\n", "more_body": True})
            if path == "/stuck":
                await asyncio.Event().wait()
            if path == "/flood":
                await flood(receive, send)
            await until_the_end(receive)
            text = f"data: {engine.dead_error or 'last'}\n\n".encode()
        await send({"type": "http.response.body", "body": text})

    async def flood(receive, send):
        await receive()
        left = asyncio.ensure_future(receive())
        try:
            while not left.done():
                await send({"type": "http.response.body", "body": bytes(65536), "more_body": True})
                engine.flooded_bytes += 65536
                await asyncio.sleep(0)
        finally:
            left.cancel()

    async def until_the_end(receive):
        await receive()  # the request's body
        await engine.enters(1)
        left = asyncio.ensure_future(receive())
        ends = [left, *(asyncio.ensure_future(event.wait()) for event in (engine.finish, engine.failed))]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            engine.left += left.done()
        finally:
            for end in ends:
                end.cancel()
            await engine.enters(-1)

    return app


def service(engine, *, announced=lambda: None, **settings):
    async def make():
        return application(engine)

    return Service(
        engine=engine,
        application=make,
        http=lambda app: uvicorn.Config(app, log_level="critical"),
        abort_all=engine.abort_all,
        announce=announced,
        oldest=lambda: engine.step,
        token=lambda: engine.generate,
        **settings,
    )


START_ERRORS = {
    "rank": StartupError("rank 0 ended", phase="load", rank=0),
    "config": ConfigError("pipeline parallel size 9 is greater than the model's 8 layers"),
}


async def main(port, *, slow_start, drain_s):
    show = Display()
    engine = FakeEngine(slow_start=slow_start)
    stop = signals.StopRequest(deadline_s=9.0, at_once=lambda: None, tell=show.line)
    with stop.installed():
        if slow_start:
            show.line("starting")
        made = service(engine, announced=lambda: show.line("serving"), drain_s=drain_s)
        return await live(made, bind("127.0.0.1", port), stop, show)


if __name__ == "__main__":
    signals.before_the_loop(print, lambda: None)
    if "--before-loop" in sys.argv:
        print("waiting", flush=True)
        signals.signal.pause()
    with asyncio.Runner(loop_factory=loop.stock if "--no-uvloop" in sys.argv else loop.fast) as runner:
        slow, drain_s = "--slow-start" in sys.argv, 60.0 if "--drain" in sys.argv else 0.0
        sys.exit(runner.run(main(int(sys.argv[1]), slow_start=slow, drain_s=drain_s)))
