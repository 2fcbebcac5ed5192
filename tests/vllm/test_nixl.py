"""KV blocks of a two-stage pipeline, written by NIXL over the CPU's memory into an engine of one stage."""

import asyncio
import importlib.util
import json
import os
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.vllm.cases import text

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="the package nixl is not installed"),
]


@asynccontextmanager
async def peer(role: str, stages: int) -> AsyncIterator[asyncio.subprocess.Process]:
    """One engine in a process of its own, which is gone afterwards."""
    with socket.create_server(("localhost", 0)) as free:
        port = str(free.getsockname()[1])
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.vllm.nixl_peer", role, str(stages)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"VLLM_NIXL_SIDE_CHANNEL_PORT": port},
    )
    try:
        yield process
        process.stdin.close()  # type: ignore[union-attr] - a pipe
        assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def ask(process: asyncio.subprocess.Process, prompt: str, max_tokens: int, params: Any = None) -> dict[str, Any]:
    """Send one request and return its answer; what vLLM prints between is passed over."""
    assert process.stdin is not None and process.stdout is not None
    question = {"prompt": prompt, "max_tokens": max_tokens, "kv_transfer_params": params}
    process.stdin.write(json.dumps(question).encode() + b"\n")
    while line := await process.stdout.readline():
        if line.startswith(b'{"tokens"'):
            answer: dict[str, Any] = json.loads(line)
            return answer
    raise AssertionError(f"the peer ended with {await process.wait()}")


async def test_a_pipeline_prefills_and_another_engine_decodes_from_its_blocks() -> None:
    """The decoding engine is given another prompt of equal length and end: only blocks of the first explain its tokens."""
    true = "amber " + text(7, 30)
    other = "azure " + text(7, 30)
    async with asyncio.timeout(180), peer("kv_producer", 2) as prefill, peer("kv_consumer", 1) as decode:
        want = await ask(prefill, true, 12)
        assert (await ask(decode, other, 12))["tokens"] != want["tokens"]
        handed = await ask(prefill, true, 1, {"do_remote_decode": True, "do_remote_prefill": False})
        assert handed["kv_transfer_params"]["pp_size"] == 2
        got = await ask(decode, other, 12, handed["kv_transfer_params"])
        assert got["tokens"] == want["tokens"]
