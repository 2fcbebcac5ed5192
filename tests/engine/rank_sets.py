"""Rank sets of real processes that sleep."""

from operator import methodcaller
from typing import Any

from async_pp.engine.executor import OnSpan, RankExecutor, RankLayout, ignore_span
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
            on_lost=self.lost.append,
            on_span=lambda *span: self.on_span(*span),
            on_output=lambda rank, output: self.outputs.append((rank, output)),
            **settings,
        )

    async def start(self, stage: StageTime = StageTime()) -> RankExecutor:  # noqa: B008 - frozen
        await self.executor.start()
        await self.executor.call(methodcaller("start", str(self.executor.runtime_dir), stage))
        self.executor.started()
        return self.executor

    def pid(self, rank: int) -> int:
        assert self.executor._supervisor is not None
        return self.executor._supervisor._alive[rank].pid
