"""The callbacks of the host program, its statistics loggers among them.

They are called in the middle of the engine's work, some while a rank's message is read. What one raises is neither a
rank's fault nor a reason to end a request: it goes where asyncio sends what its callbacks raise, to the exception
handler of the loop, which logs it unless the host has set its own. The engine goes on.
"""

import asyncio
from collections.abc import Callable
from typing import ParamSpec

from async_pp.engine.ports import OnLost, OnPhase
from async_pp.errors import CallbackFailed

P = ParamSpec("P")


class Host:
    """Calls them. On the loop's thread only.

    Args:
        on_phase: told about start-up progress.
        on_lost: told about losses.
    """

    def __init__(self, on_phase: OnPhase, on_lost: OnLost) -> None:
        self._on_phase = on_phase
        self._on_lost = on_lost

    def phase(self, phase: str, rank: int | None, seconds: float) -> None:
        """A phase has ended."""
        _call("on_phase", self._on_phase, phase, rank, seconds)

    def lost(self, error: BaseException, going_on: int, given_up: int) -> None:
        """A rank set is lost, and another one will follow."""
        _call("on_lost", self._on_lost, error, going_on, given_up)

    def logged(self, call: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Something for a statistics logger."""
        _call("stat_loggers", call, *args, **kwargs)


def _call(name: str, callback: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
    try:
        callback(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is told as what the callback raised
        failure = CallbackFailed(f"{name} raised {type(error).__name__}: {error}")
        failure.__cause__ = error
        asyncio.get_running_loop().call_exception_handler({"message": str(failure), "exception": failure})
