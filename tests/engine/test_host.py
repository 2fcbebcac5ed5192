"""What a callback of the host raises is the host's: told to its loop, and to nobody else."""

import asyncio
from typing import Any

import pytest

from async_pp.engine.host import Host
from async_pp.errors import CallbackFailed, RankLost


async def test_what_a_callback_raises_goes_to_the_loops_exception_handler() -> None:
    told: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context))
    Host(lambda *_: 1 / 0, lambda *_: None).phase("load", 0, 1.0)
    Host(lambda *_: None, lambda *_: {}["missing"]).lost(RankLost("gone"), 1, 0)
    assert [context["message"] for context in told] == [
        "on_phase raised ZeroDivisionError: division by zero",
        "on_lost raised KeyError: 'missing'",
    ]
    for context, kind in zip(told, (ZeroDivisionError, KeyError), strict=True):
        assert isinstance(context["exception"], CallbackFailed) and isinstance(context["exception"].__cause__, kind)


async def test_what_ends_a_program_passes() -> None:
    def leave(*_: Any) -> None:
        raise SystemExit(5)

    with pytest.raises(SystemExit):
        Host(leave, leave).phase("load", 0, 1.0)
