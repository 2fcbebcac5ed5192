"""`python -m async_pp.bench COMMAND`: the command line, the signals and the exit code.

Exit codes: 0 measured, 1 bad input (one line, nothing was started), 3 a server or a request failed or a promise was
not kept, 128 + signal.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

from async_pp.bench import BenchFailed, settings, simulate, soak, stopping
from async_pp.bench.pipeline import settings as pipeline
from async_pp.bench.survive import settings as survive
from async_pp.errors import ConfigError

EXIT_CONFIG = 1
EXIT_FAILED = 3

COMMANDS = (settings, pipeline, simulate, soak, survive)
"""Modules with a command: `add_command(commands)` adds its parser, whose `run` default takes arguments and progress."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    top = _Parser(prog="python -m async_pp.bench", description="Measurements that anyone can repeat.")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in COMMANDS:
        module.add_command(commands)
    return top


def main(argv: Sequence[str]) -> int:
    """Run the command. Returns the exit code."""
    try:
        args = parser().parse_args(argv)
        print(args.run(args, Progress()), end="")
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_CONFIG
    except BenchFailed as error:
        print(f"failed: {error}", file=sys.stderr)
        return EXIT_FAILED
    return 0


class Progress:
    """Lines on stderr with the seconds since the start."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def __call__(self, text: str) -> None:
        """Say what is done now."""
        print(f"[{time.monotonic() - self._began:5.0f} s] {text}", file=sys.stderr, flush=True)


def _run() -> int:
    stopping.install()
    try:
        return main(sys.argv[1:])
    except stopping.Stopped as stopped:
        print("stopped; nothing is left running", file=sys.stderr)
        return 128 + stopped.number


if __name__ == "__main__":
    sys.exit(_run())
