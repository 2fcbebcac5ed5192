"""Loads for a server: the parent's side of the load generator, and the checks that no failure passes as a figure."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any, Self

from async_pp.bench import BenchFailed
from async_pp.bench.server import last_lines
from async_pp.bench.stopping import uninterrupted
from async_pp.bench.systems import HOST, SERVED_NAME

START_LIMIT_S = 120
LOAD_LIMIT_S = 1800
"""For one load, from its prompts to its result."""


@dataclass(frozen=True)
class Load:
    """Requests of one length, so many in flight. The prompts follow from these numbers alone.

    Attributes:
        concurrency: requests in flight.
        requests: in all.
        input_len, output_len: tokens of each prompt and answer.
        seed: of the prompts; loads for one server need different ones, or its prefix cache knows their prompts.
    """

    concurrency: int
    requests: int
    input_len: int
    output_len: int
    seed: int


@dataclass(frozen=True)
class Speed:
    """What the client saw. TTFT runs from sending a request to its first token, ITL from one token to the next."""

    output_tokens: int
    tokens_per_s: float
    ttft_ms_p50: float
    ttft_ms_p99: float
    itl_ms_p50: float
    itl_ms_p99: float


def arguments(load: Load, url: str, model: Path) -> list[str]:
    """The command line of `vllm bench serve` for a load. `model` is the folder whose tokenizer makes the prompts."""
    flags: dict[str, object] = {
        "--backend": "openai",
        "--base-url": url,
        "--model": SERVED_NAME,
        "--tokenizer": model,
        "--dataset-name": "random",
        "--random-input-len": load.input_len,
        "--random-output-len": load.output_len,
        "--num-prompts": load.requests,
        "--max-concurrency": load.concurrency,
        "--seed": load.seed,
        "--temperature": 0,
        "--percentile-metrics": "ttft,itl",
        "--metric-percentiles": "50,99",
        # Both would send a prompt of the measured load beforehand, which a prefix cache then knows.
        "--num-warmups": 0,
        "--ready-check-timeout-sec": 0,
    }
    words = [str(word) for pair in flags.items() for word in pair]
    return [*words, "--ignore-eos", "--disable-tqdm", "--save-detailed"]


def speed(result: Mapping[str, Any], load: Load) -> Speed:
    """The figures of a load of which every request was answered in full.

    Raises:
        BenchFailed: a request failed, or tokens are missing.
    """
    asked = load.requests * load.output_len
    if result["failed"] or result["completed"] != load.requests:
        why = "".join(result["errors"]).strip().splitlines()[-1:]
        raise BenchFailed(
            f"{load.requests - int(result['completed'])} of {load.requests} requests failed: {''.join(why)}"
        )
    if result["total_output_tokens"] != asked:
        raise BenchFailed(f"{result['total_output_tokens']:.0f} tokens came where {asked} were asked for")
    return Speed(
        output_tokens=asked,
        tokens_per_s=result["output_throughput"],
        ttft_ms_p50=result["p50_ttft_ms"],
        ttft_ms_p99=result["p99_ttft_ms"],
        itl_ms_p50=result["p50_itl_ms"],
        itl_ms_p99=result["p99_itl_ms"],
    )


class LoadGenerator:
    """The load generator, ready inside `with`.

    Args:
        model: the folder whose tokenizer makes the prompts.
    """

    def __init__(self, model: Path) -> None:
        self._model = model
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed in __exit__
        self._pipe: Connection | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        """Start it and wait until it is ready, so that its start costs no server anything."""
        self._pipe, theirs = Pipe()
        try:
            with theirs, uninterrupted():
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "async_pp.bench.generator", str(theirs.fileno())],
                    # No proxy of the user's may stand between client and server.
                    env={**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_PLUGINS": "", "no_proxy": HOST, "NO_PROXY": HOST},
                    stdin=subprocess.DEVNULL,
                    stdout=self._log,
                    stderr=self._log,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                )
            self._receive(time.monotonic() + START_LIMIT_S)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Kill it: it holds nothing."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._pipe is not None:
            self._pipe.close()
        self._log.close()

    def run(self, load: Load, url: str, mark: Callable[[str], None] = lambda _event: None) -> Speed:
        """Send a load and wait for its end.

        Args:
            load: what to send.
            url: of the server.
            mark: called with "begin" just before the first request and with "end" after the last answer.

        Raises:
            BenchFailed: see `speed`; or the generator failed, or the load took too long.
        """
        deadline = time.monotonic() + LOAD_LIMIT_S
        self._send(arguments(load, url, self._model))
        while True:
            message = self._receive(deadline)
            match message["event"]:
                case "result":
                    return speed(message, load)
                case "error":
                    raise BenchFailed(f"the load generator failed: {message['text']}\n{last_lines(self._log)}")
                case event:
                    mark(event)
                    self._send("on")

    def _send(self, message: object) -> None:
        assert self._pipe is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: told when its answer is waited for
            self._pipe.send_bytes(json.dumps(message).encode())

    def _receive(self, deadline: float) -> dict[str, Any]:
        assert self._pipe is not None
        if not self._pipe.poll(max(0.0, deadline - time.monotonic())):
            raise BenchFailed(f"the load did not end in time\n{last_lines(self._log)}")
        try:
            message: dict[str, Any] = json.loads(self._pipe.recv_bytes())
        except (EOFError, OSError) as error:
            raise BenchFailed(f"the load generator ended\n{last_lines(self._log)}") from error
        return message
