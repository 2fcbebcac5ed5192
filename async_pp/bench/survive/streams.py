"""Streams through the HTTP API: a number of them kept open, each written down in the ledger."""

import asyncio
import contextlib
import itertools
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from types import TracebackType
from typing import Self

import aiohttp

from async_pp.bench import BenchFailed
from async_pp.bench.survive.ledger import Ledger, Prompt, Request, undisturbed
from async_pp.bench.systems import SERVED_NAME

HANG_S = 300.0
"""A stream that brings nothing for so long hangs. Frozen ranks, up to a minute each, may follow each other."""

REFUSED_S = 0.2
"""Before the next request where one was refused: a server that is busy is not helped by being asked at once."""


class Client:
    """Sends requests, inside `async with`.

    Args:
        url: of the server.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._session: aiohttp.ClientSession | None = None
        self._heard: list[tuple[float, int]] | None = None
        self._news = asyncio.Event()

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=HANG_S, sock_read=HANG_S)
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    def listen(self) -> None:
        """Note from now on when tokens come."""
        self._heard = []

    def heard(self) -> list[tuple[float, int]]:
        """When tokens came since `listen`, monotonic seconds, and for which request. None is noted from now on."""
        heard, self._heard = self._heard, None
        return heard or []

    async def until(self, true: Callable[[], bool]) -> None:
        """Wait until something is so; asked after whatever happens to a stream. For one task at a time."""
        while not true():
            self._news.clear()
            await self._news.wait()

    async def send(self, request: Request) -> None:
        """Send a request and write down how it ends; an end is all that can happen."""
        body = {
            "model": SERVED_NAME,
            "prompt": list(request.prompt.tokens),
            "max_tokens": request.prompt.asked,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        assert self._session is not None
        try:
            async with self._session.post(f"{self._url}/v1/completions", json=body) as answer:
                if answer.status == 200:
                    await self._read(request, answer)
                else:
                    request.refused(_json(await answer.read()), answer.status)
        except TimeoutError:
            request.end("hung")
        except aiohttp.ClientError as error:
            request.end("broken", type(error).__name__)
        self._news.set()

    async def _read(self, request: Request, answer: aiohttp.ClientResponse) -> None:
        done = False
        async for line in answer.content:
            if not line.startswith(b"data: "):
                continue
            if (content := line.removeprefix(b"data: ").strip()) == b"[DONE]":
                done = True
            elif isinstance(event := _json(content), dict):
                if request.event(event) and self._heard is not None:
                    self._heard.append((time.monotonic(), request.number))
                self._news.set()
            else:
                request.end("broken", "an event that is no JSON object")
        request.stream_ended(done=done)

    async def text(self, path: str) -> str:
        """The body of a GET."""
        assert self._session is not None
        async with self._session.get(self._url + path) as answer:
            return await answer.text()


def _json(text: bytes) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return None


async def all_of(client: Client, prompts: Sequence[Prompt], at_once: int) -> Ledger:
    """Send each prompt once, so many at a time."""
    ledger, turns = Ledger(), iter(prompts)
    await _lanes(client, ledger, turns, at_once)
    return ledger


@contextlib.asynccontextmanager
async def kept_open(
    client: Client, ledger: Ledger, prompts: Sequence[Prompt], count: int, seed: int
) -> AsyncIterator[None]:
    """Keep so many streams open inside the block, of prompts in random order; leaving it waits for their ends."""
    stopped = False

    def turns() -> Iterator[Prompt]:
        chance = random.Random(f"turns {seed}")
        for _ in itertools.takewhile(lambda _: not stopped, itertools.repeat(None)):
            yield chance.choice(prompts)

    lanes = asyncio.create_task(_lanes(client, ledger, turns(), count), name="streams")
    try:
        yield
        stopped = True
        await lanes
    finally:
        lanes.cancel()
        await asyncio.wait([lanes])


async def _lanes(client: Client, ledger: Ledger, turns: Iterator[Prompt], count: int) -> None:
    async def lane() -> None:
        for prompt in turns:
            request = ledger.open(prompt)
            await client.send(request)
            if request.outcome != "completed":
                await asyncio.sleep(REFUSED_S)

    async with asyncio.TaskGroup() as lanes:
        for _ in range(count):
            lanes.create_task(lane())


async def reference(client: Client, prompts: Sequence[Prompt], at_once: int) -> dict[int, list[tuple[int, ...]]]:
    """The tokens of each prompt undisturbed, in two runs with different numbers of them in a step.

    Raises:
        BenchFailed: a request was not completed.
    """
    ledgers = [await all_of(client, prompts, count) for count in (at_once, max(1, at_once // 4))]
    for ledger in ledgers:
        account = ledger.account()
        if account.completed < account.sent:
            wrong = {**account.failures, **account.wrong}
            raise BenchFailed(f"{account.sent - account.completed} requests failed undisturbed: {wrong}")
    return undisturbed(*ledgers)
