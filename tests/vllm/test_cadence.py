"""Policies under vLLM's asynchronous scheduling: its scheduler, our engine and real ranks that sleep.

No CPU runner of vLLM can do it, so the ranks are workers that check what vLLM's would rely on (`paced_worker`): one that
is asked to compute a token that it does not know ends the engine, and with it the test.
"""

import asyncio
from collections import Counter, defaultdict
from itertools import accumulate, pairwise

import pytest

from async_pp.models import ensure_tiny
from async_pp.ranks.sleeping_runner import StageTime
from tests.vllm.engines import sampling

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(120)]


@pytest.fixture
def started(monkeypatch):
    """Return a context manager: a running engine with so many sleeping ranks and vLLM's AsyncScheduler."""
    from contextlib import asynccontextmanager

    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    from async_pp import AsyncPPEngine
    from async_pp.bench.pipeline.engines import arguments
    from async_pp.bench.pipeline.surroundings import private_folder
    from async_pp.engine import client
    from async_pp.engine.vllm_seam.config import make_config
    from tests.vllm.paced_worker import QUALNAME

    def with_async_scheduling(args, usage_context):
        config, written = make_config(args, usage_context)
        config.scheduler_config.async_scheduling = True  # which the CPU platform turns off
        return config, written

    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setattr(client, "make_config", with_async_scheduling)
    # Decides by the resolved value, since resolving refuses the runner without a GPU.
    monkeypatch.setattr(
        VllmConfig, "use_v2_model_runner", property(lambda of: bool(of.scheduler_config.async_scheduling))
    )

    @asynccontextmanager
    async def engine(stages):
        with private_folder(ensure_tiny(), stages) as folder:
            values = {**arguments(folder, [StageTime(0.002, 0.0005)] * stages), "worker_cls": QUALNAME}
            async with AsyncPPEngine.from_engine_args(AsyncEngineArgs(**values)) as running:
                assert isinstance(running._epoch.scheduler.scheduler, AsyncScheduler)
                assert running._epoch.scheduler.depth == stages + 1
                yield running

    return engine


class Clients:
    """Sends requests and looks at what the ranks were given."""

    def __init__(self, engine, stages):
        self.engine, self.stages = engine, stages
        self.sent = 0
        self.prompts = {}  # tokens of each
        self.told = asyncio.Event()  # whenever a token has come

    async def ask(self, tokens_out, tokens_in=16, after_s=0.0):
        """One request, answered in full."""
        self.sent += 1
        request_id = f"r{self.sent}"
        self.prompts[request_id] = tokens_in
        await asyncio.sleep(after_s)
        prompt = {"prompt_token_ids": [5] * tokens_in}
        came = 0
        async for output in self.engine.generate(prompt, sampling(tokens_out, detokenize=False), request_id):
            came += len(output.outputs[0].token_ids)
            self.told.set()
        assert came == tokens_out

    async def some_tokens(self, count):
        """Wait until so many times tokens have come."""
        for _ in range(count):
            self.told.clear()
            await self.told.wait()

    async def all(self, *asks):
        """Several requests at once; returns their steps."""
        async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
            for ask in asks:
                tasks.create_task(ask)
        return await self.steps()

    async def steps(self):
        """What the ranks were given since the last call: the same for all, no step empty, cadence kept."""
        first, *others = await self.engine.collective_rpc("take_steps")
        assert all(other == first for other in others)
        assert all(tokens for _, tokens in first)
        stories = defaultdict(list)
        for count, tokens in first:
            for request_id, number in tokens.items():
                stories[request_id].append((count, number))
        for request_id, story in stories.items():
            decodes = self._decodes(request_id, story)
            assert all(after - before >= self.stages for before, after in pairwise(decodes)), f"{request_id}: {story}"
        return first

    def _decodes(self, request_id, story):
        """The counts at which a request decoded: a piece of a prompt may have one token too, and follow at once.

        None of one whose prompt was computed again: where that ends cannot be seen here.
        """
        prompt = self.prompts[request_id.partition("-")[0]]
        behind = list(accumulate(number for _, number in story))
        decodes = [(count, number) for (count, number), total in zip(story, behind, strict=True) if total > prompt]
        return [count for count, _ in decodes] if all(number == 1 for _, number in decodes) else []


@pytest.mark.parametrize("stages", [pytest.param(2, marks=pytest.mark.slow), 4])
async def test_the_cadence_is_kept(started, stages):
    async with started(stages) as engine:
        clients = Clients(engine, stages)
        for policy in ("balanced", "fill-first"):
            engine.use_policy(policy)
            await alone(clients)
            await fewer_than_stages(clients)
            await staggered(clients)
            await chunked(clients)
            await aborted(clients)
            await paused(clients)
        engine.use_policy("balanced")
        await burst(clients)


async def alone(clients):
    steps = await clients.all(clients.ask(10))
    assert len(steps) == 10  # the prompt's step has the first token
    assert {after - before for (before, _), (after, _) in pairwise(steps)} == {clients.stages}


async def fewer_than_stages(clients):
    requests = max(1, clients.stages - 1)
    steps = await clients.all(*(clients.ask(12) for _ in range(requests)))
    # In tokens: by the times seen so far, even short prompts may be cut.
    assert sum(sum(tokens.values()) for _, tokens in steps) == requests * (16 + 11)


async def staggered(clients):
    await clients.all(*(clients.ask(8 + n, after_s=0.007 * n) for n in range(2 * clients.stages + 1)))


async def chunked(clients):
    """Two prompts longer than a step, while others decode."""
    steps = await clients.all(
        *(clients.ask(20) for _ in range(clients.stages)), *(clients.ask(3, 1300, after_s=0.02) for _ in range(2))
    )
    assert sum(sum(tokens.values()) for _, tokens in steps) == clients.stages * (16 + 19) + 2 * (1300 + 2)


async def aborted(clients):
    """Some clients leave while their steps are in flight; the others are answered."""
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        leaving = [tasks.create_task(clients.ask(1000)) for _ in range(clients.stages)]
        for _ in range(3):
            tasks.create_task(clients.ask(30))
        await clients.some_tokens(4)
        for ask in leaving:
            ask.cancel()
    await clients.steps()
    assert len(await clients.all(clients.ask(5))) == 5


async def paused(clients):
    """Requests go on where they were; after the caches were forgotten, with their prompts again, which the count delays."""
    engine = clients.engine
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        for _ in range(clients.stages + 1):
            tasks.create_task(clients.ask(40, 600))
        await clients.some_tokens(4)
        for clear in (False, True):
            await engine.pause_generation(mode="keep", clear_cache=clear)
            await clients.steps()
            await asyncio.sleep(0.02)  # time for what must not happen
            assert not await clients.steps()
            await engine.resume_generation()
            await clients.some_tokens(2)
    await clients.steps()


async def burst(clients):
    """Cohorts are even some rounds after the last one has come."""
    steps = await clients.all(*(clients.ask(30) for _ in range(4 * clients.stages)))
    sizes = Counter(len(tokens) for _, tokens in steps[8 * clients.stages : -2 * clients.stages])
    assert sizes and set(sizes) <= {3, 4, 5} and sizes[4] == max(sizes.values()), sizes
