"""Disaggregated prefill and decode on one machine: two servers of two stages each, and a proxy before them.

    python examples/disaggregated.py [--model MODEL] [--port PORT] [any flag for both servers]

    client --> proxy --1--> prefill server: computes the prompt and one token; each rank stores its KV in a folder
                    --2--> decode server:  loads it (shared_storage.py), computes the rest, streams it through

Long prompts then never sit between the tokens of other requests. The servers share nothing but the folder. Without
the prefill server, or when a file cannot be loaded, the decode server computes the prompt itself: slower, same tokens.
It ends, and both servers with it, on Ctrl-C or SIGTERM (exit code 0) or when a server that is needed has ended (1).
"""

import argparse
import asyncio
import json
import os
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

STOP_S = 15  # A server ends within 10 s of SIGTERM. After this it is killed, and its ranks end with it.
LIMITS = {"/v1/completions": "max_tokens", "/v1/chat/completions": "max_completion_tokens"}
say = partial(print, flush=True)


@dataclass
class Server:
    """A running `python -m async_pp.serve`. The URL comes when it serves; empty if it ends before."""

    process: asyncio.subprocess.Process
    url: asyncio.Future[str]
    printing: asyncio.Task[None]

    async def stop(self) -> None:
        """End it in bounded time; at once when a second signal cancels this."""
        try:
            if self.process.returncode is None:
                self.process.terminate()
            await asyncio.wait({self.printing}, timeout=STOP_S)
        finally:
            if self.process.returncode is None:
                self.process.kill()
            await asyncio.wait({self.printing}, timeout=STOP_S)


async def start(name: str, role: str, cores: list[int], arguments: argparse.Namespace) -> Server:
    """Start a server on some cores; its stages share them out."""
    transfer = {
        "kv_connector": "SharedStorage",
        "kv_connector_module_path": "shared_storage",
        "kv_role": role,
        "kv_load_failure_policy": arguments.on_load_failure,
        "kv_connector_extra_config": {"folder": arguments.folder},
    }
    options = ("--pipeline-parallel-size", "2", "--kv-cache-memory-bytes", str(256 << 20), *arguments.flags)
    fixed = ("--port", "0", "--kv-transfer-config", json.dumps(transfer), "--enable-prompt-tokens-details")
    process = await asyncio.create_subprocess_exec(
        *("taskset", "-c", ",".join(map(str, cores)), sys.executable, "-m", "async_pp.serve"),
        *(arguments.model, *options, *fixed),  # of a flag given twice, the last counts
        env={
            "TORCHINDUCTOR_CACHE_DIR": f"{tempfile.gettempdir()}/torchinductor",  # is worth keeping
            **os.environ,
            "PYTHONPATH": f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}",
            "TMPDIR": arguments.scratch,  # a server that is killed cannot remove its files
        },
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        limit=1 << 24,  # the longest line, in bytes
        start_new_session=True,  # Ctrl-C is ours alone; we tell the servers
    )
    say(f"{name}: started as process {process.pid} on cores {cores}")
    url = asyncio.get_running_loop().create_future()
    return Server(process, url, asyncio.create_task(print_lines(name, process, url), name=f"lines of {name}"))


async def print_lines(name: str, process: asyncio.subprocess.Process, url: asyncio.Future[str]) -> None:
    """Print what a server and its ranks print, until all have ended; find its URL there."""
    assert process.stdout is not None
    async for line in process.stdout:
        text = line.decode(errors="replace").rstrip()
        say(f"{name}: {text}")
        if " serving on " in text and not url.done():
            url.set_result(text.split(" serving on ")[1].split()[0])
    say(f"{name}: ended with {await process.wait()}")
    if not url.done():
        url.set_result("")


@asynccontextmanager
async def serving(arguments: argparse.Namespace) -> AsyncIterator[list[Server]]:
    """Start both servers; at the end they are stopped, whatever they do."""
    cores = sorted(os.sched_getaffinity(0))
    half, servers = len(cores) // 2, []
    try:
        servers.append(await start("prefill", "kv_producer", cores[:half] or cores, arguments))
        servers.append(await start("decode", "kv_consumer", cores[half:], arguments))
        yield servers
    finally:
        await asyncio.gather(*(server.stop() for server in servers), return_exceptions=True)  # all of them


async def compute_prompt(session: aiohttp.ClientSession, url: str, body: Any, headers: dict[str, str]) -> Any:
    """Let the prefill server compute and store a prompt. Returns what its connector has to say to the other one's."""
    try:
        async with session.post(url, json=body, headers=headers) as answer:
            say(f"proxy: prefill answers {answer.status}")
            return (await answer.json()).get("kv_transfer_params") if answer.ok else None
    except aiohttp.ClientError as error:
        say(f"proxy: prefill failed ({error}); the decode server computes the prompt")


@asynccontextmanager
async def proxy(prefill: str, decode: str, listener: socket.socket) -> AsyncIterator[None]:
    """Serve; both servers are given by their URLs."""

    async def handle(request: web.Request) -> web.StreamResponse:
        content = await request.read()
        kept = {name: request.headers[name] for name in ("Authorization", "X-Request-Id") if name in request.headers}
        headers = kept | {"Content-Type": request.content_type}
        try:
            body = json.loads(content) if request.path in LIMITS else None
        except ValueError:
            body = None  # the decode server says what is wrong
        if isinstance(body, dict):
            once = {LIMITS[request.path]: 1, "min_tokens": 0, "n": 1, "stream": False, "stream_options": None}
            transfer = await compute_prompt(session, prefill + request.path, body | once, kept)
            if isinstance(body.get("prompt", ""), str):  # of several prompts, the answer is about the first
                content = json.dumps({"kv_transfer_params": transfer} | body).encode()
        url, response = decode + request.path_qs, web.StreamResponse()
        try:
            async with session.request(request.method, url, data=content, headers=headers) as answer:
                response.set_status(answer.status)
                response.content_type = answer.content_type
                await response.prepare(request)
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
        except aiohttp.ClientError as error:
            say(f"proxy: decode failed: {error}")
            if not response.prepared:
                raise web.HTTPBadGateway(text=f"the decode server does not answer: {error}") from error
            assert request.transport is not None
            request.transport.abort()  # what is cut must not look whole
        return response

    app = web.Application(client_max_size=1 << 26)
    app.router.add_route("*", "/{path:.*}", handle)
    # A client that goes away cancels its handler, which closes the connection to the servers: they drop the request.
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)  # kept connections may be closed just when used again
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:
        await runner.setup()
        try:
            await web.SockSite(runner, listener).start()
            yield
        finally:
            await runner.cleanup()


async def run(arguments: argparse.Namespace, listener: socket.socket) -> int:
    """Serve until a signal (0), or until a server that is needed has ended (1)."""
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    try:
        async with serving(arguments) as (prefill, decode):
            for url in asyncio.as_completed([prefill.url, decode.url]):
                if not await url:
                    return 1
            async with proxy(prefill.url.result(), decode.url.result(), listener):
                say("proxy: serving on http://{}:{}".format(*listener.getsockname()))
                await decode.process.wait()
            return 1
    except asyncio.CancelledError:  # a signal
        return 0


def main() -> int:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--port", type=int, default=0, help="of the proxy, on loopback; 0 takes a free one")
    parser.add_argument("--folder", help="where KV is stored and kept; without it a temporary one")
    parser.add_argument("--on-load-failure", choices=("recompute", "fail"), default="recompute")
    arguments, flags = parser.parse_known_args()
    with socket.socket() as listener, tempfile.TemporaryDirectory(prefix="kv-") as scratch:
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", arguments.port))
        except (OSError, OverflowError) as error:
            parser.error(f"--port {arguments.port}: {error}")
        arguments.scratch, arguments.flags = scratch, flags
        arguments.folder = arguments.folder or f"{scratch}/stored"
        return asyncio.run(run(arguments, listener))


if __name__ == "__main__":
    sys.exit(main())
