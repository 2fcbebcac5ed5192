"""An engine inside somebody's program: what is the program's stays as it was, before, during and after."""

import asyncio
import gc
import importlib
import logging
import os
import signal
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.engine.exceptions import EngineGenerateError
from vllm.v1.metrics.loggers import StatLoggerBase

from async_pp.errors import CallbackFailed, EngineFailed
from tests.vllm.engines import engine, tokens
from tests.vllm.test_engine_flows import host

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(180)]


def surroundings() -> Any:
    """What belongs to the program around the engine, as far as it can be looked at while the engine runs."""
    umask = os.umask(0o022)
    os.umask(umask)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        policy = type(asyncio.get_event_loop_policy())
    return (
        host(),
        umask,
        policy,
        Path.cwd(),
        signal.getitimer(signal.ITIMER_REAL),
        gc.isenabled(),
        gc.get_threshold(),
        logging.root.manager.disable,
        threading.excepthook is threading.__excepthook__,
        os.sched_getaffinity(0),
    )


@pytest.mark.slow
def test_a_thread_with_loops_of_its_own_one_after_the_other() -> None:
    """A notebook's kernel, a worker thread of a web server: not the main thread, and not the last loop of its thread."""
    importlib.import_module("async_pp.engine.client")  # importing vLLM configures its logger: that is not the engine
    found: list[Any] = []
    before = surroundings()
    began = threading.active_count()

    async def cell() -> None:
        async with engine(pipeline_parallel_size=2) as running:
            found.append((await tokens(running, "one"), surroundings()[0]))

    def program() -> None:
        for _ in range(2):
            asyncio.run(cell())

    thread = threading.Thread(target=program)
    thread.start()
    thread.join()
    (first, during), (second, _) = found
    assert first == second
    assert dict(set(during[0].items()) ^ set(before[0][0].items())) == {}
    assert during == before[0]
    assert surroundings() == before
    assert threading.active_count() == began


async def test_entered_used_and_left_in_different_tasks_as_in_the_cells_of_a_notebook() -> None:
    running = engine(pipeline_parallel_size=2)
    before = surroundings()[0]
    await asyncio.create_task(running.__aenter__())
    try:
        assert surroundings()[0] == before
        found = await asyncio.gather(*(asyncio.create_task(tokens(running, f"cell-{i}")) for i in range(3)))
        assert found[0] == found[1] == found[2]
    finally:
        await asyncio.create_task(running.__aexit__(None, None, None))
    assert surroundings()[0] == before
    assert asyncio.all_tasks() == {asyncio.current_task()}


class Logger(StatLoggerBase):
    """Counts what it is told, or raises."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self.records = 0

    def record(self, *_: Any, **__: Any) -> None:
        self.records += 1

    def log_engine_initialized(self) -> None: ...


class Raising(Logger):
    def record(self, *_: Any, **__: Any) -> None:
        raise ZeroDivisionError("of the host")


async def test_a_statistics_logger_that_raises_harms_no_request_and_no_other_logger() -> None:
    made: list[Logger] = []

    def counting(*of: Any) -> Logger:
        made.append(Logger(*of))
        return made[-1]

    told: list[BaseException] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context["exception"]))
    async with engine(options={"stat_loggers": [Raising, counting]}) as running:
        first = await tokens(running, "first", 8)
        assert await tokens(running, "second", 8) == first
        assert not running.errored
    assert made[0].records >= 8
    assert len(told) == made[0].records, "each time it raised"
    assert all(isinstance(one, CallbackFailed) and isinstance(one.__cause__, ZeroDivisionError) for one in told)


async def test_when_outputs_can_no_longer_be_processed_the_engine_says_so_and_no_request_waits_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise KeyError("no such request")

    async with engine() as running:
        await tokens(running, "before", 4)
        monkeypatch.setattr(running.output_processor, "process_outputs", refuse)
        with pytest.raises(EngineGenerateError) as struck:
            await tokens(running, "struck", 4)
        assert isinstance(struck.value.__cause__, KeyError)
        await running.failed.wait()
        assert isinstance(running.dead_error, EngineFailed)
        with pytest.raises(EngineFailed, match="output handler has failed"):
            await tokens(running, "after", 4)
