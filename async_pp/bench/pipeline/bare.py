"""The bare pipe: even cohorts through real sleeping ranks, without a scheduler. What this machine can give."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from operator import methodcaller

from async_pp.bench import BenchFailed
from async_pp.bench.cohorts import Cohort
from async_pp.bench.pipeline.loads import WARM_UP, Load, Section, cohorts_of
from async_pp.bench.pipeline.measured import Answered, Measured
from async_pp.bench.pipeline.settings import Settings, Tell
from async_pp.core.gather import Scope
from async_pp.engine.executor import RankExecutor
from async_pp.engine.layout import RankLayout
from async_pp.errors import EngineFailed, first_of
from async_pp.ranks.environment import rank_environment
from async_pp.ranks.sleeping_runner import Load as Work
from async_pp.ranks.sleeping_runner import StageTime
from async_pp.ranks.spawn import Zygote

RUNNER = "async_pp.ranks.sleeping_runner:SleepingRunner"


@asynccontextmanager
async def started(stages: Sequence[StageTime]) -> AsyncIterator["BarePipe"]:
    """A pipe of these stages; nothing of it is left afterwards.

    Raises:
        BenchFailed: a rank ended.
    """
    zygote = Zygote()
    layout = RankLayout(output_rank=len(stages) - 1, cpus=[None] * len(stages), runner=RUNNER)
    # A lost rank fails every future, which whoever awaits it tells.
    executor = RankExecutor(layout, zygote, epoch=0, on_phase=lambda *_: None, on_lost=lambda _: None)
    try:
        await zygote.start(rank_environment(len(stages)), ["async_pp.ranks.main", RUNNER.partition(":")[0]])
        await executor.start()
        await executor.call(methodcaller("start", str(executor.runtime_dir), *stages))
        executor.started()
        pipe = BarePipe(executor, stages)
        await pipe.run(WARM_UP)
        yield pipe
    except (EngineFailed, ExceptionGroup) as error:
        first = first_of(error)
        if not isinstance(first, EngineFailed):
            raise
        raise BenchFailed(f"the bare pipe ended: {first}") from first
    finally:
        try:
            await executor.close()
        finally:
            await zygote.close()


class BarePipe:
    """Started ranks. See `started`."""

    def __init__(self, executor: RankExecutor, stages: Sequence[StageTime]) -> None:
        self._executor = executor
        self._stages = stages
        self._steps: Iterator[int] = itertools.count()

    async def run(self, load: Load) -> Measured:
        """Step a load until its last token has come."""
        return Measured([await self._section(section) for section in load.sections])

    async def _section(self, section: Section) -> Answered:
        members, cohorts = cohorts_of(section, len(self._stages))
        began = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for cohort in cohorts:
                tasks.create_task(self._step(cohort, began))
        return Answered(began, [member.times_s for member in members])

    async def _step(self, cohort: Cohort, began: float) -> None:
        while (at_s := cohort.next_arrival_s()) is not None:
            await asyncio.sleep(max(0.0, began + at_s - time.monotonic()))
            step = cohort.plan(time.monotonic() - began)
            if step is None:  # the clock of the loop is coarser: a moment too early
                continue
            scope = Scope.OUTPUT if cohort.waits else Scope.ALL
            work = Work(step.sequences, step.tokens, tells=not cohort.waits)
            answers = self._executor.execute(next(self._steps), work, grammar=None, sample="now", scope=scope)
            for _, later in answers[1:]:
                later.add_done_callback(_looked_at)
            await answers[0][1]  # of the last stage, or, of all of them, the first
            cohort.settle(time.monotonic() - began)


def _looked_at(future: asyncio.Future[object]) -> None:
    """Nobody waits for it: the steps that do matter come after it, or end with the same loss."""
    if not future.cancelled():
        future.exception()


async def measure(settings: Settings, tell: Tell) -> list[Measured]:
    """Measure every load. Nothing of the pipe is left afterwards.

    Raises:
        BenchFailed: a rank ended.
    """
    async with started(settings.stages) as pipe:
        found = []
        for load in settings.loads:
            tell(load.name)
            found.append(await pipe.run(load))
        return found
