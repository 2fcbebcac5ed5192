"""Bad requests for every route of a running server: what schemathesis makes of its OpenAPI schema, and raw bytes.

The same seed gives the same requests.
"""

import itertools
import json
import random
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import hypothesis
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode

REQUEST_LIMIT_S = 30.0
ANSWERED_UNREAD_BYTES = 1 << 16
"""A server may answer, and hang up, before it has read a body as large as this; the client sees that it hung up."""

JSON = "application/json"


@dataclass
class Told:
    """What a server answered.

    Attributes:
        statuses: how often each.
        failures: requests that it answered with 5xx or not at all: route, answer, request.
    """

    statuses: Counter[int] = field(default_factory=Counter)
    failures: list[tuple[str, str, str]] = field(default_factory=list)

    def note(self, route: str, response: requests.Response | Exception, sent: Any) -> None:
        """Take note of an answer."""
        if isinstance(response, Exception):
            self.failures.append((route, repr(response), repr(sent)[:500]))
            return
        self.statuses[response.status_code] += 1
        if response.status_code >= 500:
            self.failures.append((route, f"{response.status_code} {response.text[:300]}", repr(sent)[:500]))


def generated(url: str, examples: int, seed: int, told: Told) -> None:
    """Requests that schemathesis makes of the schema: `examples` bad ones and as many good ones for each route."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
        for result in schema.get_all_operations():
            operation = result.ok()
            for mode in (GenerationMode.NEGATIVE, GenerationMode.POSITIVE):
                _one_route(operation, mode, examples, seed, told)


def _one_route(operation: Any, mode: GenerationMode, examples: int, seed: int, told: Told) -> None:
    @hypothesis.seed(seed)
    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        derandomize=False,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(operation.as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        _short(case.body)
        try:
            response = case.call(timeout=REQUEST_LIMIT_S)
        except Exception as error:  # noqa: BLE001 - what the client cannot send is no fault of the server's
            if isinstance(error, requests.ConnectionError | requests.Timeout):
                told.note(operation.label, error, case.body)
            return
        told.note(operation.label, response, (case.query, case.headers, case.body))

    try:
        send()
    except hypothesis.errors.Unsatisfiable:
        pass  # a route without parameters cannot be called wrongly


def _short(body: Any) -> None:
    """A request that happens to be good shall not generate for minutes."""
    if isinstance(body, dict) and isinstance(body.get("max_tokens"), int):
        body["max_tokens"] = min(body["max_tokens"], 4)


def raw(url: str, routes: list[str], count: int, seed: int, told: Told) -> None:
    """Bodies that no schema would make: not JSON, not text, too deep, too large, of another type than they say."""
    rng = random.Random(seed)
    for number, (content, kind) in enumerate(itertools.islice(_bodies(rng), count)):
        route = routes[number % len(routes)]
        headers = {"Content-Type": kind} if kind else {}
        try:
            response = requests.post(f"{url}{route}", data=content, headers=headers, timeout=REQUEST_LIMIT_S)
        except requests.ConnectionError as error:
            if len(content) < ANSWERED_UNREAD_BYTES:
                told.note(route, error, content[:200])
        except requests.RequestException as error:
            told.note(route, error, content[:200])
        else:
            told.note(route, response, (kind, content[:200]))


def _bodies(rng: random.Random) -> Iterator[tuple[bytes, str | None]]:
    good = json.dumps({"model": "tiny", "prompt": "a", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1})
    while True:
        yield b"[" * 100_000, JSON
        yield b'{"a":' * 100_000, JSON
        yield b'{"model": "tiny", "prompt": ' + b"[" * 900 + b"]" * 900 + b"}", JSON
        yield json.dumps({"model": "tiny", "prompt": "a " * 50_000, "max_tokens": 1}).encode(), JSON
        yield json.dumps({"model": "x" * 1_000_000, "prompt": "a"}).encode(), JSON
        yield b'{"model": "tiny", "prompt": "a", "max_tokens": 1' + b"0" * 5000 + b"}", JSON
        yield b'{"model": "tiny", "prompt": "a", "temperature": 1e999}', JSON
        yield b'{"model": "tiny", "prompt": "a", "temperature": NaN}', JSON
        yield b'{"model": "tiny", "prompt": "\\ud800", "max_tokens": 1}', JSON
        yield b'{"model": "tiny", "prompt": "a\\u0000b", "max_tokens": 1}', JSON
        yield b'{"model": null, "prompt": null, "messages": null, "input": null}', JSON
        yield rng.randbytes(rng.randrange(1, 2000)), JSON
        yield rng.randbytes(200), None
        yield good.encode("utf-16"), JSON
        yield good.encode(), "text/plain"
        yield good.encode(), "multipart/form-data; boundary=x"
        yield good.encode(), "application/x-www-form-urlencoded"
        yield good.encode()[: rng.randrange(len(good))], JSON
        place = rng.randrange(len(good))
        yield (good[:place] + rng.choice('{}[]",:0-eE\\') + good[place + 1 :]).encode(), JSON


def routes(url: str) -> list[str]:
    """Paths that take a body, without parameters in them."""
    paths = requests.get(f"{url}/openapi.json", timeout=REQUEST_LIMIT_S).json()["paths"]
    return sorted(path for path, methods in paths.items() if "post" in methods and "{" not in path)


if __name__ == "__main__":
    import sys

    address, number = sys.argv[1], int(sys.argv[2])
    found, began = Told(), time.monotonic()
    print(routes(address))
    raw(address, routes(address), 20 * len(routes(address)), 1, found)
    print(f"raw {time.monotonic() - began:.0f} s", found.statuses)
    try:
        generated(address, number, 1, found)
    finally:
        print(f"{time.monotonic() - began:.0f} s", found.statuses)
        for failure in found.failures:
            print(failure)
