"""A KV connector on every sleeping rank, under the engine: no rank's report is lost, and no step waits for one."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from async_pp.bench.pipeline.connectors import NONE, ON_TIME, Connector, Sends, find
from async_pp.bench.pipeline.surroundings import private_folder
from async_pp.models import ensure_tiny
from async_pp.ranks.sleeping_runner import StageTime

STAGES = [StageTime(0.01)] * 2
ROLES = pytest.mark.parametrize("role", ["kv_both", pytest.param("kv_consumer", marks=pytest.mark.slow)])
"""Steps settle on every rank's answer, or on the output rank's while the others report on their own."""


def test_names():
    late = Connector("late-8", 8, "kv_consumer")
    assert find("none,on-time", "kv_both", 2) == (NONE, ON_TIME)
    assert find("late-8", "kv_consumer", 2) == (late,)


def test_sends_are_reported_so_many_steps_late():
    on_time, late = Sends(0), Sends(2)
    told = [{"a"}, {"b", "c"}, set(), set()]
    assert [on_time.step(ended) for ended in told] == told
    assert [late.step(ended) for ended in told] == [set(), set(), {"a"}, {"b", "c"}]


@ROLES
@pytest.mark.vllm
@pytest.mark.timeout(120)
async def test_output_of_a_non_final_rank_from_sample_tokens_reaches_the_scheduler(role, monkeypatch):
    async with started(Connector("", 0, role), monkeypatch) as (engine, told):
        free = told.free_blocks
        long = asyncio.create_task(ask(engine, "long", 80))
        await ask(engine, "short", 4)
        await told.of(1)
        (running,) = told.scheduler.requests.values()
        assert not long.done() and running.request_id.startswith("long")
        (blocks,) = told.scheduler.kv_cache_manager.get_block_ids(running.request_id)
        assert told.free_blocks == free - len(blocks)
        # Every step had tokens, so it was sample_tokens that told.
        assert all(tokens for rows in await engine.collective_rpc("take_rows") for _, _, tokens, _ in rows)
        await long
        await told.of(2)
        assert told.free_blocks == free


@ROLES
@pytest.mark.vllm
@pytest.mark.timeout(120)
async def test_steps_overlap_while_every_rank_reports(role, monkeypatch):
    lengths = range(4, 36, 2)  # an end, and so a report of every rank, all along
    async with started(Connector("", 1, role), monkeypatch) as (engine, told):
        async with asyncio.TaskGroup() as tasks:
            for length in lengths:
                tasks.create_task(ask(engine, f"{length}", length))
        assert len(told.sent) > len(lengths) / 2, "reported while others ran"
        first, second = await engine.collective_rpc("take_rows")
        steps = [row for row in second if row[2]]
        together = [step for step in steps if any(step[0] < end and begin < step[1] for begin, end, *_ in first)]
        assert len(together) > len(steps) / 2
        await told.of(len(lengths))
        assert len(set(told.sent)) == len(lengths)
        assert not told.scheduler.requests


@asynccontextmanager
async def started(connector, monkeypatch):
    """A running engine of two sleeping ranks, and what reaches the scheduler's part of their connector."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    from async_pp import AsyncPPEngine
    from async_pp.bench.pipeline.engines import arguments
    from tests.vllm.engines import AHEAD

    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    with private_folder(ensure_tiny(), len(STAGES)) as folder:
        args = AsyncEngineArgs(**arguments(folder, STAGES, connector))
        async with AsyncPPEngine.from_engine_args(args, zygote=AHEAD.take()) as engine, asyncio.timeout(30):
            yield engine, Told(engine._epoch.scheduler.scheduler)


class Told:
    """What the scheduler's part of the connector is told, as it comes."""

    def __init__(self, scheduler):
        self.scheduler = scheduler
        self.sent = []
        self._came = asyncio.Event()
        scheduler.connector.update_connector_output = self._take

    def _take(self, output):
        self.sent += output.finished_sending or ()
        self._came.set()

    async def of(self, count):
        """Wait until so many requests have been reported as sent by every rank."""
        while len(self.sent) < count:
            self._came.clear()
            await self._came.wait()

    @property
    def free_blocks(self):
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()


async def ask(engine, request_id, tokens_out):
    """One request, answered in full."""
    from tests.vllm.engines import sampling

    prompt = {"prompt_token_ids": [5] * 16}
    async for _ in engine.generate(prompt, sampling(tokens_out, detokenize=False), request_id):
        pass
