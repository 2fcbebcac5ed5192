"""What a person sees: one line per start-up phase, the address, how to try it, and how it ended.

Plain text lines, flushed at once, on standard output; errors on standard error. No colours, no cursor movement: the
same lines are read by people, by log collectors and by tests.
"""

import json
import shlex
import sys
from collections.abc import Callable
from time import monotonic
from typing import TextIO

from async_pp.errors import AsyncPPError

PROG = "async_pp"

_PHASES = {
    "import": "vLLM imported",
    "model": "model ready on disk",
    "spawn": "spawned",
    "device": "device set up",
    "load": "model loaded",
    "kv_cache": "KV cache ready",
    "ready": "ready",
    "restart": "serving again, all ranks replaced",
}
_OF_NO_RANK = ("import", "model", "restart")


class Display:
    """Writes the lines. `clock` gives seconds; the total shown at the end counts from construction.

    Attributes:
        latest: the start-up phase that ended last, in words.
    """

    def __init__(
        self, out: TextIO | None = None, err: TextIO | None = None, clock: Callable[[], float] = monotonic
    ) -> None:
        self._out = sys.stdout if out is None else out
        self._err = sys.stderr if err is None else err
        self._clock = clock
        self._began = clock()
        self.latest = "nothing yet"

    @property
    def elapsed_s(self) -> float:
        """Seconds since construction."""
        return self._clock() - self._began

    def line(self, text: str) -> None:
        """One line of information."""
        print(f"{PROG}: {text}", file=self._out, flush=True)

    def error(self, text: str) -> None:
        """One line that says what is wrong and what to do; line breaks in `text` become spaces."""
        print(f"{PROG}: error: {' '.join(text.split())}", file=self._err, flush=True)

    def phase(self, name: str, rank: int | None, seconds: float) -> None:
        """A start-up phase ended, of one rank or (None) of all."""
        who = "all ranks" if rank is None else f"rank {rank}"
        what = _PHASES.get(name, name)
        self.latest = what if name in _OF_NO_RANK else f"{who}: {what}"
        self.line(f"{self.latest} in {seconds:.1f} s")

    def lost(self, error: BaseException, going_on: int, given_up: int) -> None:
        """The ranks were lost, others are being started, and requests go on or were given up."""
        kind = "" if isinstance(error, AsyncPPError) else f"{type(error).__name__}: "
        why = " ".join(f"{kind}{error}".split())
        self.line(f"ranks lost: {why}; starting others; open requests: {going_on} go on, {given_up} given up")

    def serving(self, address: str, curl: str) -> None:
        """The server answers from now on."""
        self.line(f"serving on {address} after {self.elapsed_s:.1f} s; try:")
        print(curl, file=self._out, flush=True)


def curl_line(address: str, model: str, *, route: str, api_key: bool) -> str:
    """A shell line that sends one request to the server, ready to paste.

    Args:
        address: "http://host:port" or "unix:/path".
        model: a served model name.
        route: "chat", "completions", "embeddings", or anything else for the list of models.
        api_key: the server wants a key; it is left to the shell variable API_KEY, never printed.
    """
    base, words = address, ["curl"]
    if address.startswith("unix:"):
        base, words = "http://localhost", ["curl", "--unix-socket", shlex.quote(address.removeprefix("unix:"))]
    key = ["-H", '"Authorization: Bearer $API_KEY"'] if api_key else []
    bodies: dict[str, tuple[str, dict[str, object]]] = {
        "chat": ("chat/completions", {"messages": [{"role": "user", "content": "What is a pipeline?"}]}),
        "completions": ("completions", {"prompt": "A pipeline is"}),
        "embeddings": ("embeddings", {"input": "A pipeline"}),
    }
    if route not in bodies:
        return " ".join([*words, f"{base}/v1/models", *key])
    path, body = bodies[route]
    limit = {} if route == "embeddings" else {"max_tokens": 64}
    data = shlex.quote(json.dumps({"model": model, **body, **limit}))
    return " ".join([*words, f"{base}/v1/{path}", *key, "-H", "'Content-Type: application/json'", "-d", data])
