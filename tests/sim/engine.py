"""The engine itself, over simulated ranks and a simulated scheduler.

Real are: vLLM's `AsyncLLM` with its output processor and output handler, our client, `Lives`, `Recovery`, `Epoch`'s
run and end, `Replay`, stepping with planner, machine and settler, the executor with its tables and watches, the
supervisor, the channel in memory with sealed frames. Not real are configuration, tokenizer, scheduler and ranks.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm.v1.engine.output_processor import OutputProcessor

from async_pp.channel.memory import MemoryEngineChannel
from async_pp.core.recovery import Recovery, Restart
from async_pp.engine.client import AsyncPPEngine
from async_pp.engine.epoch import Epoch
from async_pp.engine.executor import RankExecutor
from async_pp.engine.launch import StartDeadlines
from async_pp.engine.layout import RankLayout
from async_pp.engine.lives import Loss
from async_pp.engine.stepping import Stepping
from async_pp.engine.vllm_seam.config import config_errors
from async_pp.engine.vllm_seam.replay import Carried
from tests.sim.ranks import SimZygote, load
from tests.sim.scenario import Scenario
from tests.sim.scheduler import SimScheduler
from tests.sim.story import Story

START_DEADLINES = StartDeadlines(zygote_s=30.0, hello_s=10.0, load_s=60.0, kv_cache_s=60.0)


class SimEpoch(Epoch):
    """One life of the simulated rank set."""

    def __init__(self, number: int, engine: "SimEngine", emit: Callable[[Sequence[Any]], None]) -> None:
        scenario = engine.scenario
        self.number = number
        self._engine = engine
        self._emit = emit
        self._on_phase = lambda phase, rank, seconds: None
        self._loop = asyncio.get_running_loop()
        self._lost = self._loop.create_future()
        self._stepping = None
        layout = RankLayout(
            output_rank=scenario.ranks - scenario.ranks_per_stage,
            cpus=[None] * scenario.ranks,
            runner="",
            ranks_per_stage=scenario.ranks_per_stage,
        )
        self.ranks = RankExecutor(
            layout,
            engine.zygote,
            epoch=number,
            on_phase=self._on_phase,
            on_lost=self._lose,
            on_span=self._span,
            on_output=self._connector_output,
            channel=partial(self._channel, number),
            clock=self._loop.time,
            step_deadline_s=scenario.step_deadline_s,
            start_deadlines=START_DEADLINES,
        )

    def _channel(self, number: int, folder: Path, keys: Any, **rest: Any) -> MemoryEngineChannel:
        self._engine.folders.append(folder)
        hub = self._engine.hubs[number] = MemoryEngineChannel(keys, **rest)
        return hub

    async def load(self) -> None:
        await self.ranks.start()
        await self.ranks.call(load)

    async def begin(self) -> None:
        engine = self._engine
        await self.ranks.call(load)
        self.scheduler = SimScheduler(engine.scenario, self.number, engine.story, engine.whole)
        self.stepping = self._stepping = Stepping(
            self.scheduler, self.ranks, depth=self.scheduler.depth, emit=self._emit, clock=self._loop.time
        )
        self.ranks.started()

    async def run(self) -> Loss:
        loss = await super().run()
        self._engine.lost(self, loss)
        return loss


class SimEngine(AsyncPPEngine):
    """The engine.

    Args:
        scenario: its size and what a loss means.
        story: told what happens.
        whole: decides whether a step waits for every rank.

    Attributes:
        losses_seen: when they were, in seconds.
        suspected: losses in which a request was computed, by request.
    """

    def __init__(self, scenario: Scenario, story: Story, whole: Callable[[], bool]) -> None:
        self.scenario = scenario
        self.story = story
        self.whole = whole
        self.hubs: dict[int, MemoryEngineChannel] = {}
        self.folders: list[Path] = []
        self.zygotes: list[SimZygote] = []
        self.losses_seen: list[float] = []
        self.suspected: dict[str, int] = {}
        args = SimpleNamespace(pipeline_parallel_size=scenario.stages, tensor_parallel_size=scenario.ranks_per_stage)
        super().__init__(args, on_rank_loss=scenario.on_loss, restarts=scenario.intensity)
        self._recovery = _Told(scenario, self)

    @property
    def zygote(self) -> SimZygote:
        return self.zygotes[-1]

    @property
    def epoch(self) -> SimEpoch | None:
        return self._epoch

    async def _have_zygote(self) -> Any:
        if self._zygote is None or self._zygote.ended:
            if self._zygote is not None:
                await self._zygote.close()
            self._zygote = SimZygote(self.scenario, self.story, self.hubs, self._is_over)
            if self.zygotes:
                self._zygote.start_faults = self.zygote.start_faults
            self.zygotes.append(self._zygote)
        return self._zygote

    async def _start(self) -> None:
        await self._have_zygote()
        self.vllm_config = SimpleNamespace(cache_config=SimpleNamespace(kv_sharing_fast_prefill=False))
        self.scheduler_config = SimpleNamespace(max_num_queued_reqs=None, max_num_queued_tokens=None)
        self.model_config = self.observability_config = None
        self.log_requests = self.log_stats = False
        self.admission_stats = None
        epoch = await self.make(0)
        with config_errors():
            await epoch.load()
            await epoch.begin()
        renderer = SimpleNamespace(mm_processor_cache=None, shutdown=lambda: None)
        self._wire(epoch, (renderer, _Inputs(), OutputProcessor(None, log_stats=False)))

    async def make(self, number: int) -> SimEpoch:
        await self._have_zygote()
        self.story.tell(f"e{number} is made")
        self._epoch = SimEpoch(number, self, self._streams.emit)
        return self._epoch

    def _is_over(self, number: int) -> bool:
        return self._epoch.number > number or self._epoch.ranks.cause is not None

    def lost(self, epoch: SimEpoch, loss: Loss) -> None:
        """An epoch in which there were steps was lost."""
        flying = {name for plan in epoch.scheduler.flying for name in plan.requests}
        self.story.require(set(loss.computed) <= flying, f"computed in no step: {sorted(set(loss.computed) - flying)}")

    def fail(self, verdict: Restart, carried: Carried, loss: Loss, epoch: int) -> None:
        for name in sorted(verdict.failed):
            self.story.tell(f"e{epoch} {name} is given up")
        for name in sorted(verdict.poisoned):
            self.story.require(self.suspected.get(name, 0) >= 2, f"{name} is called poison and was in one loss")
        super().fail(verdict, carried, loss, epoch)

    async def resume(self, epoch: Epoch, suspects: Collection[str]) -> None:
        self.story.tell(f"e{epoch.number} goes on; suspects: {' '.join(sorted(suspects))}")
        await super().resume(epoch, suspects)

    def die(self, error: BaseException, step: int | None, why: str | None = None) -> None:
        self.story.tell(f"the engine dies: {type(error).__name__}: {error}; {why}")
        super().die(error, step, why)


class _Told(Recovery):
    """Recovery, with a count of its own of who was in how many losses."""

    def __init__(self, scenario: Scenario, engine: SimEngine) -> None:
        super().__init__(scenario.on_loss, scenario.intensity)
        self._engine = engine

    def lost(self, computed: Collection[str], open_requests: Mapping[str, int], now_s: float) -> Any:
        engine = self._engine
        engine.story.require(engine.story.harmed, "a rank set was lost, and nothing had been done to it")
        engine.losses_seen.append(now_s)
        for name in computed:
            engine.suspected[name] = engine.suspected.get(name, 0) + 1
        verdict = super().lost(computed, open_requests, now_s)
        if isinstance(verdict, Restart):
            limit = engine.scenario.intensity
            recent = sum(at_s > now_s - limit.within_s for at_s in engine.losses_seen)
            engine.story.require(recent <= limit.most, f"restart {recent} of {limit.most} is tried")
        engine.story.tell(f"lost: computed {' '.join(sorted(computed))} -> {type(verdict).__name__}")
        return verdict


class _Inputs:
    """The input processor, for requests that are processed."""

    def resolve_watermarking(self, params: Any) -> None:
        return None

    def apply_watermarking(self, params: Any, watermarking: Any) -> None:
        """None."""

    def assign_request_id(self, request: Any) -> None:
        request.external_req_id = request.request_id
