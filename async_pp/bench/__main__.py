"""`python -m async_pp.bench serve`: the command line, the signals and the exit code.

Exit codes: 0 measured, 1 bad input (one line, nothing was started), 3 a server or a request failed, 128 + signal.
"""

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from async_pp.bench import BenchFailed, settings
from async_pp.errors import ConfigError

EXIT_CONFIG = 1
EXIT_FAILED = 3


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


class _Stopped(BaseException):
    """SIGINT or SIGTERM. Not an `Exception`: nothing on the way may take it for a failure and go on."""


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    top = _Parser(prog="python -m async_pp.bench", description="Measurements that anyone can repeat.")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser(
        "serve",
        help="this server beside vLLM's own, on all cores this process may use",
        description="Measure this server and vLLM's own API server, one after the other, on all cores this process "
        "may use (taskset chooses them), split evenly among the ranks. CPU builds of vLLM.",
    )
    add = serve.add_argument
    add("--against", choices=("vllm", "none"), default="vllm", help="the other system (default: vllm)")
    add("--model", default="default", help="default, tiny, or the folder of a model (default: default)")
    add("--pp", type=int, default=2, help="pipeline size (default: 2)")
    add("--no-reference", dest="reference", action="store_false", help="do not measure PP 1 too")
    add(
        "--concurrency",
        default="1,8,32",
        metavar="C,C,...",
        help="requests in flight, one level each (default: 1,8,32)",
    )
    add("--requests-per-level", type=int, metavar="N", help="default: three waves of the concurrency, at least 4")
    add("--input-len", type=int, default=128, metavar="TOKENS", help="of each prompt (default: 128)")
    add("--output-len", type=int, default=64, metavar="TOKENS", help="of each answer (default: 64)")
    add("--rounds", type=int, default=1, help="repeat everything so often, report medians (default: 1)")
    add("--json", type=Path, metavar="FILE", help="write the figures there too")
    return top


def main(argv: Sequence[str]) -> int:
    """Run the command. Returns the exit code."""
    try:
        chosen = settings.check(parser().parse_args(argv))
        model = chosen.folder()
        from async_pp.bench import report, serve  # psutil, which `check` has looked for, is an extra

        rows = serve.run(chosen, model, _Progress())
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_CONFIG
    except BenchFailed as error:
        print(f"failed: {error}", file=sys.stderr)
        return EXIT_FAILED
    if chosen.json is not None:
        chosen.json.write_text(report.as_json(rows), "utf-8")
    print(report.table(rows), end="")
    return 0


class _Progress:
    """Lines on stderr with the seconds since the start."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def __call__(self, text: str) -> None:
        print(f"[{time.monotonic() - self._began:5.0f} s] {text}", file=sys.stderr, flush=True)


def _stop(number: int, _frame: FrameType | None) -> None:
    # A second signal must not interrupt the stopping of a server, which takes bounded time.
    for other in (signal.SIGINT, signal.SIGTERM):
        signal.signal(other, signal.SIG_IGN)
    raise _Stopped(number)


def _run() -> int:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    try:
        return main(sys.argv[1:])
    except _Stopped as stopped:
        print("stopped; nothing is left running", file=sys.stderr)
        return 128 + int(stopped.args[0])


if __name__ == "__main__":
    sys.exit(_run())
