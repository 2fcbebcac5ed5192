"""One life of the rank set, with everything that lives and dies with it: executor, vLLM's engine core, and the steps.

A lost rank set is not repaired. The next epoch has new processes, a new engine core (its KV cache manager, connectors
and counters are new with it), and goes on with the requests of this one.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import methodcaller
from typing import Any

from vllm.config import VllmConfig

from async_pp.core.policy import Policy
from async_pp.engine.executor import RankExecutor
from async_pp.engine.launch import StartDeadlines
from async_pp.engine.lives import Loss
from async_pp.engine.ports import OnPhase
from async_pp.engine.stepping import Stepping
from async_pp.engine.vllm_seam.bridge import BridgeExecutor, worker_call
from async_pp.engine.vllm_seam.config import config_errors, layout
from async_pp.engine.vllm_seam.replay import Carried
from async_pp.engine.vllm_seam.scheduler import VllmScheduler, loop_wake, make_engine_core
from async_pp.errors import EngineFailed
from async_pp.ranks.spawn import Zygote


class Epoch:
    """One life of the rank set. `start` (or `load` and `begin`), then `run`; always `close`.

    Args:
        number: which life it is, from 0.
        config: vLLM's configuration.
        written: environment variables that the configuration set.
        zygote: what forks the ranks.
        make_policy: makes the policy that splits the load over its steps.
        step_deadline_s: how long a rank may take for a step; None: as measured.
        start_deadlines: how long the parts of the start may take.
        log_stats: whether vLLM's scheduler keeps statistics.
        emit: takes what a settle has for the streams.
        on_phase: told about start-up progress.
    """

    ranks: RankExecutor
    scheduler: VllmScheduler
    stepping: Stepping

    def __init__(
        self,
        number: int,
        config: VllmConfig,
        written: Mapping[str, str],
        zygote: Zygote,
        *,
        make_policy: Callable[[], Policy],
        step_deadline_s: float | None,
        start_deadlines: StartDeadlines,
        log_stats: bool,
        emit: Callable[[Sequence[Any]], None],
        on_phase: OnPhase,
    ) -> None:
        self.number = number
        self._config = config
        self._written = written
        self._make_policy = make_policy
        self._log_stats = log_stats
        self._emit = emit
        self._on_phase = on_phase
        self._loop = asyncio.get_running_loop()
        self._lost: asyncio.Future[EngineFailed] = self._loop.create_future()
        self._stepping: Stepping | None = None
        self.ranks = RankExecutor(
            layout(config),
            zygote,
            epoch=number,
            on_phase=on_phase,
            on_lost=self._lose,
            on_span=self._span,
            on_output=self._connector_output,
            step_deadline_s=step_deadline_s,
            start_deadlines=start_deadlines,
        )

    async def load(self) -> None:
        """Start the ranks and load the model. Whoever calls it closes the epoch when it fails.

        Raises:
            StartupError: a rank did not become ready.
        """
        await self.ranks.start()
        began = self._loop.time()
        await self.ranks.call(methodcaller("start", self._config, self.ranks.rendezvous, self._written))
        self._on_phase("load", None, self._loop.time() - began)

    async def start(self) -> None:
        """All of it."""
        with config_errors():
            await self.load()
            await self.begin()

    async def begin(self) -> None:
        """Size and make the KV caches and the scheduler. Steps may be planned from then on."""
        began = self._loop.time()
        make_executor = partial(self._bridge, threading.get_ident())
        core = await asyncio.to_thread(make_engine_core, self._config, make_executor, self._log_stats)
        core.model_executor.supported_tasks = (await self.ranks.call(worker_call("get_supported_tasks")))[0]
        self.scheduler = VllmScheduler(
            core,
            wake=loop_wake(self._loop, self.wake),
            emit=self._emit,
            policy=self._make_policy(),
            clock=time.monotonic,
        )
        self.stepping = self._stepping = Stepping(
            self.scheduler, self.ranks, depth=self.scheduler.depth, emit=self._emit, clock=time.monotonic
        )
        self.ranks.started()
        self._on_phase("kv_cache", None, self._loop.time() - began)

    async def run(self) -> Loss:
        """Step until the rank set is lost, or a step cannot be planned or settled. Then nothing is in flight."""
        steps = asyncio.create_task(self.stepping.run(), name=f"async_pp stepping of epoch {self.number}")
        ends: list[asyncio.Future[Any]] = [steps, self._lost]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            steps.cancel()
            await asyncio.wait({steps})
            error = None if steps.cancelled() else steps.exception()
        if self._lost.done():  # what the steps made of it is less than what the ranks told
            error = self._lost.result()
        assert error is not None, "stepping goes on until it is cancelled"
        return self._loss(error)

    def leave(self) -> Carried:
        """Give back what the scheduler side holds. Returns what outlives the epoch."""
        self._stepping = None
        return self.scheduler.leave()

    async def close(self) -> None:
        """End the ranks, in bounded time, and leave. May be called again."""
        try:
            await self.ranks.close()
        finally:
            if self._stepping is not None:
                self.leave().close()

    def wake(self) -> None:
        """Something may have become plannable."""
        if self._stepping is not None:
            self._stepping.wake()

    def _loss(self, error: BaseException) -> Loss:
        number = error.step if isinstance(error, EngineFailed) else self.stepping.settling
        oldest = self.stepping.oldest_step
        steps = self.stepping.lose(error)
        if not isinstance(error, EngineFailed):  # the ranks are well, but what they hold is not what is planned upon
            self.ranks.lose(EngineFailed(f"{type(error).__name__}: {error}", epoch=self.number, step=number))
        computed = next((step.requests for step in steps if step.number == number), frozenset[str]())
        return Loss(error, oldest, computed)

    def _bridge(self, thread: int, config: VllmConfig) -> BridgeExecutor:
        bridge = BridgeExecutor(config, self.ranks, self._loop)
        bridge.bind(thread)
        return bridge

    def _lose(self, error: EngineFailed) -> None:
        if not self._lost.done():
            self._lost.set_result(error)

    def _span(self, stage: int, step: int, began_s: float, ended_s: float) -> None:
        if self._stepping is not None:
            self._stepping.span(stage, step, began_s, ended_s)

    def _connector_output(self, rank: int, output: Any) -> None:
        if self._stepping is not None:
            self._stepping.connector_output(rank, output)
