"""Disaggregated prefill and decode on one machine: two servers of two stages each, and a proxy before them.

    python examples/disaggregated.py [--model MODEL] [--port PORT] [any flag for both servers]

    client --> proxy --1--> prefill server: computes the prompt and one token; each rank stores its KV in a folder
                    --2--> decode server:  loads it (shared_storage.py), computes the rest, streams it through

Long prompts then never sit between the tokens of other requests. The servers share nothing but the folder. Without
the prefill server, or when a file cannot be loaded, the decode server computes the prompt itself: slower, same tokens.
"""

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

STAGES = 2
STOP_S = 15
"""A server ends within 10 s of SIGTERM; after this it is killed, and its ranks end with it."""
GENERATES = ("/v1/completions", "/v1/chat/completions")


def say(line: str) -> None:
    """Print a line at once."""
    print(line, flush=True)


@dataclass
class Server:
    """A running `python -m async_pp.serve`. The URL comes when it serves; empty if it ends before."""

    name: str
    process: asyncio.subprocess.Process
    url: asyncio.Future[str]


@asynccontextmanager
async def serving(name: str, role: str, arguments: argparse.Namespace, cores: list[int]) -> AsyncIterator[Server]:
    """Start a server on some cores; at the end it is stopped, whatever it does."""
    transfer = {
        "kv_connector": "SharedStorage",
        "kv_connector_module_path": "shared_storage",
        "kv_role": role,
        "kv_load_failure_policy": arguments.on_load_failure,
        "kv_connector_extra_config": {"folder": arguments.folder},
    }
    options = ["--port", "0", "--kv-transfer-config", json.dumps(transfer), "--enable-prompt-tokens-details"]
    options += ["--pipeline-parallel-size", str(STAGES), "--kv-cache-memory-bytes", str(256 << 20)]
    # A stage keeps its cores: "0,2|1,3" are those of the first and those of the second. Too few are shared.
    stages = [cores[stage::STAGES] or cores for stage in range(STAGES)]
    environment = {
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(",".join(map(str, each)) for each in stages),
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-m", "async_pp.serve", arguments.model, *options, *arguments.flags]
    process = await asyncio.create_subprocess_exec(
        *command,
        env=environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C is ours alone; we tell the servers
    )
    server = Server(name, process, asyncio.get_running_loop().create_future())
    say(f"{name}: started as process {process.pid} on cores {cores}")
    relay = asyncio.create_task(print_lines(server), name=f"lines of {name}")
    try:
        yield server
    finally:
        await stop(process)
        await relay
        say(f"{name}: ended with {process.returncode}")


async def stop(process: asyncio.subprocess.Process) -> None:
    """End a server in bounded time; at once when a second signal cancels this."""
    try:
        if process.returncode is None:
            process.terminate()
        async with asyncio.timeout(STOP_S):
            await process.wait()
    except TimeoutError:
        pass  # killed below
    finally:
        if process.returncode is None:
            process.kill()


async def print_lines(server: Server) -> None:
    """Print what a server prints, until it ends; find its URL there."""
    assert server.process.stdout is not None
    async for line in server.process.stdout:
        text = line.decode(errors="replace").rstrip()
        say(f"{server.name}: {text}")
        if " serving on " in text and not server.url.done():
            server.url.set_result(text.split(" serving on ")[1].split()[0])
    if not server.url.done():
        server.url.set_result("")


async def compute_prompt(session: aiohttp.ClientSession, prefill: Server, path: str, body: dict[str, Any]) -> None:
    """Let the prefill server compute and store a prompt. If it cannot, that is all: the decode server will."""
    once = body | {"max_tokens": 1, "n": 1, "stream": False, "stream_options": None, "min_tokens": 0}
    if "max_completion_tokens" in once:
        once["max_completion_tokens"] = 1
    began = time.monotonic()
    try:
        async with session.post(prefill.url.result() + path, json=once) as answer:
            await answer.read()
            outcome = f"answered {answer.status}"
    except aiohttp.ClientError as error:
        outcome = f"failed ({error}); the decode server computes the prompt"
    say(f"proxy: prefill {outcome} after {time.monotonic() - began:.2f} s")


@asynccontextmanager
async def proxy(prefill: Server, decode: Server, port: int) -> AsyncIterator[str]:
    """Serve on loopback; gives the URL."""

    async def handle(request: web.Request) -> web.StreamResponse:
        content = await request.read()
        if request.path in GENERATES:
            try:
                body = json.loads(content)
            except ValueError:
                body = None
            if isinstance(body, dict):
                await compute_prompt(session, prefill, request.path, body)
        url, headers = decode.url.result() + request.path_qs, {"Content-Type": request.content_type}
        async with session.request(request.method, url, data=content or None, headers=headers) as answer:
            response = web.StreamResponse(status=answer.status)
            response.content_type = answer.content_type
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
            await response.write_eof()
            return response

    app = web.Application(client_max_size=1 << 26)
    app.router.add_route("*", "/{path:.*}", handle)
    # A client that goes away cancels its handler, which closes the connection to the servers: they drop the request.
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None, sock_connect=5)) as session:
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", port).start()
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


async def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal (0), or until a server that is needed has ended (1)."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    cores = sorted(os.sched_getaffinity(0))
    half = len(cores) // 2
    try:
        async with (
            serving("prefill", "kv_producer", arguments, cores[:half] or cores) as prefill,
            serving("decode", "kv_consumer", arguments, cores[half:]) as decode,
        ):
            if not (await prefill.url and await decode.url):
                return 1
            async with proxy(prefill, decode, arguments.port) as url:
                say(f"proxy: serving on {url}")
                await decode.process.wait()
            return 1
    except asyncio.CancelledError:  # a signal
        return 0


def main() -> int:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--port", type=int, default=0, help="of the proxy; 0 takes a free one")
    parser.add_argument("--folder", help="where KV is stored and kept; else a temporary one")
    parser.add_argument("--on-load-failure", choices=("recompute", "fail"), default="recompute")
    arguments = argparse.Namespace()
    arguments.flags = parser.parse_known_args(namespace=arguments)[1]
    if arguments.folder is not None:
        return asyncio.run(run(arguments))
    with tempfile.TemporaryDirectory(prefix="kv-") as arguments.folder:
        return asyncio.run(run(arguments))


if __name__ == "__main__":
    sys.exit(main())
