"""Rank sets of real processes that sleep."""

import asyncio
from operator import methodcaller
from typing import Any

from async_pp.engine.executor import RankExecutor
from async_pp.engine.layout import RankLayout
from async_pp.engine.ports import OnSpan, ignore_span
from async_pp.errors import EngineFailed
from async_pp.ranks.sleeping_runner import StageTime
from async_pp.ranks.spawn import Zygote

RUNNER = "async_pp.ranks.sleeping_runner:SleepingRunner"


class Set:
    """A rank set and what it told."""

    def __init__(
        self, zygote: Zygote, ranks: int = 2, runner: str = RUNNER, ranks_per_stage: int = 1, **settings: Any
    ) -> None:
        self.lost: list[EngineFailed] = []
        self.over = asyncio.Event()
        self.phases: list[tuple[str, int | None]] = []
        self.on_span: OnSpan = ignore_span
        self.outputs: list[tuple[int, Any]] = []
        self.executor = RankExecutor(
            RankLayout(
                output_rank=ranks - ranks_per_stage,
                cpus=[None] * ranks,
                runner=runner,
                ranks_per_stage=ranks_per_stage,
            ),
            zygote,
            epoch=0,
            on_phase=lambda name, rank, seconds: self.phases.append((name, rank)),
            on_lost=self._lost,
            on_span=lambda *span: self.on_span(*span),
            on_output=lambda rank, output: self.outputs.append((rank, output)),
            **settings,
        )

    def _lost(self, error: EngineFailed) -> None:
        self.lost.append(error)
        self.over.set()

    async def start(self, stage: StageTime = StageTime()) -> RankExecutor:  # noqa: B008 - frozen
        await self.executor.start()
        await self.executor.call(methodcaller("start", str(self.executor.runtime_dir), stage))
        self.executor.started()
        return self.executor

    async def ends(self, within_s: float = 1.0) -> EngineFailed:
        """The error with which the epoch ends, within this time."""
        async with asyncio.timeout(within_s):
            await self.over.wait()
        (error,) = self.lost
        return error

    def pid(self, rank: int) -> int:
        assert self.executor._supervisor is not None
        return self.executor._supervisor._alive[rank].pid
