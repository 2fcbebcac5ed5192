"""A server without vLLM: the real life cycle, signals and HTTP around an engine that only pretends.

    python -m tests.serve.fake PORT [--slow-start] [--stuck]     a process for the signal tests

Routes: /stream sends a line at once and ends when its request is aborted or the engine fails; /echo answers; /stuck
never ends; /die makes the engine fail.
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
        self.closed = False
        self.aborted = asyncio.Event()

    async def __aenter__(self):
        self.entered.set()
        try:
            if self.slow_start:
                await asyncio.Event().wait()
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
        self.aborted.set()


def application(engine):
    async def app(scope, receive, send):
        if scope["type"] == "lifespan":
            for done in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{done}.complete"})
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        text = b"ok\n"
        if scope["path"] == "/die":
            engine.die()
        if scope["path"] in ("/stream", "/stuck"):
            await send({"type": "http.response.body", "body": b"first\n", "more_body": True})
            if scope["path"] == "/stuck":
                await asyncio.Event().wait()
            ends = [asyncio.ensure_future(event.wait()) for event in (engine.aborted, engine.failed)]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for end in ends:
                end.cancel()
            text = f"error: {engine.dead_error}\n".encode() if engine.failed.is_set() else b"aborted\n"
        await send({"type": "http.response.body", "body": text})

    return app


def service(engine, *, announced=lambda: None, drain_s=0.0):
    async def make():
        return application(engine)

    return Service(
        engine=engine,
        application=make,
        http=lambda app: uvicorn.Config(app, log_level="critical"),
        abort_all=engine.abort_all,
        announce=announced,
        drain_s=drain_s,
    )


START_ERRORS = {
    "rank": StartupError("rank 0 ended", phase="load", rank=0),
    "config": ConfigError("pipeline parallel size 9 is greater than the model's 8 layers"),
}


async def main(port, *, slow_start):
    show = Display()
    engine = FakeEngine(slow_start=slow_start)
    stop = signals.StopRequest(deadline_s=9.0, at_once=lambda: None, tell=show.line)
    with stop.installed():
        if slow_start:
            show.line("starting")
        return await live(service(engine, announced=lambda: show.line("serving")), bind("127.0.0.1", port), stop, show)


if __name__ == "__main__":
    signals.before_the_loop(print, lambda: None)
    if "--before-loop" in sys.argv:
        print("waiting", flush=True)
        signals.signal.pause()
    with asyncio.Runner(loop_factory=loop.stock if "--no-uvloop" in sys.argv else loop.fast) as runner:
        sys.exit(runner.run(main(int(sys.argv[1]), slow_start="--slow-start" in sys.argv)))
