"""The load generator's process: vLLM's own `vllm.benchmarks.serve`, one load after the other, told through a pipe.

It is a process of its own because importing vLLM takes seconds and its work must not count as a server's, and one for
all loads because those seconds come once. JSON both ways: in comes the command line of a load, out go
`{"event": "begin"}` and `{"event": "end"}` around the load itself, each answered before it goes on, and at last its
`{"event": "result", ...}` or `{"event": "error", ...}`. The end of the pipe ends it.
"""

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from typing import Any

KEPT = (
    "completed",
    "failed",
    "total_output_tokens",
    "output_throughput",
    "p50_ttft_ms",
    "p99_ttft_ms",
    "p50_itl_ms",
    "p99_itl_ms",
)
"""Of vLLM's result, what is of use here. Times in ms, throughput in tokens per second."""


def main(fd: int) -> None:
    """Serve loads until the pipe ends."""
    os.dup2(2, 1)  # vLLM's report of each load goes where its warnings go
    pipe = Connection(fd)
    from vllm.benchmarks import serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    serve.add_cli_args(parser)
    # The one place between the making of prompts, which takes long enough to spoil CPU figures, and their sending.
    serve.benchmark = _marked(serve.benchmark, pipe)
    _tell(pipe, event="ready")
    while True:
        try:
            argv = json.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            result = asyncio.run(serve.main_async(parser.parse_args(argv)))
        except Exception as error:  # noqa: BLE001 - whatever it is, the bench tells it and ends
            _tell(pipe, event="error", text=f"{type(error).__name__}: {error}")
        else:
            errors = [text for text in result["errors"] if text]
            _tell(pipe, event="result", errors=errors[:1], **{name: float(result[name]) for name in KEPT})


def _marked(benchmark: Callable[..., Awaitable[Any]], pipe: Connection) -> Callable[..., Awaitable[Any]]:
    async def marked(**arguments: Any) -> Any:
        _mark(pipe, "begin")
        result = await benchmark(**arguments)
        _mark(pipe, "end")
        return result

    return marked


def _mark(pipe: Connection, event: str) -> None:
    _tell(pipe, event=event)
    pipe.recv_bytes()


def _tell(pipe: Connection, **message: Any) -> None:
    pipe.send_bytes(json.dumps(message).encode())


if __name__ == "__main__":
    main(int(sys.argv[1]))
