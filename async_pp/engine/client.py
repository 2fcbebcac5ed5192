"""`AsyncPPEngine`: vLLM's `EngineClient`, alive inside the host program's event loop.

It is vLLM's `AsyncLLM` (its input and output processors, its statistics, its streams) with one part exchanged: where
`AsyncLLM` talks to an engine process, this one holds the engine core's scheduler itself and drives the ranks. The
constructor only assigns; `async with` starts everything and always stops it, in bounded time.

    async with AsyncPPEngine.from_engine_args(AsyncEngineArgs(model=..., pipeline_parallel_size=2)) as engine:
        async for output in engine.generate("Hello", SamplingParams(max_tokens=16), "request-1"):
            ...
"""

import asyncio
import threading
import time
from functools import partial
from operator import methodcaller
from types import TracebackType
from typing import Any, Self

from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.renderers import renderer_from_config
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.metrics.loggers import StatLoggerFactory, StatLoggerManager, load_stat_logger_plugin_factories

from async_pp.core.bubble import StageTime
from async_pp.core.policy import Policy, PolicyName
from async_pp.engine.core_client import InProcessClient
from async_pp.engine.executor import OnPhase, RankExecutor, RankLayout
from async_pp.engine.stepping import Stepping
from async_pp.engine.streams import Streams
from async_pp.engine.vllm_seam.bridge import BridgeExecutor, worker_call
from async_pp.engine.vllm_seam.config import config_errors, cores, make_config
from async_pp.engine.vllm_seam.dead import as_dead
from async_pp.engine.vllm_seam.scheduler import VllmScheduler, loop_wake, make_engine_core
from async_pp.engine.vllm_seam.steering import make_policy
from async_pp.engine.vllm_seam.version import check
from async_pp.errors import EngineClosed, EngineFailed
from async_pp.ranks.environment import PRELOAD, rank_environment
from async_pp.ranks.runner import flush
from async_pp.ranks.spawn import Zygote

RUNNER = "async_pp.ranks.vllm_runner:VllmRunner"


def ignore_phase(phase: str, rank: int | None, seconds: float) -> None:
    """Start-up progress that nobody asked for."""


class AsyncPPEngine(AsyncLLM):
    """The engine. Made by `from_engine_args`, used as an async context manager; not started before that.

    Attributes:
        failed: set when the rank set is lost; `dead_error` then says why.
    """

    def __init__(  # the base's constructor starts processes and blocks: see `_start`
        self,
        engine_args: AsyncEngineArgs,
        *,
        usage_context: UsageContext = UsageContext.ENGINE_CONTEXT,
        stat_loggers: list[StatLoggerFactory] | None = None,
        policy: PolicyName | Policy = "balanced",
        zygote: Zygote | None = None,
        on_phase: OnPhase = ignore_phase,
    ) -> None:
        self.engine_args = engine_args
        self.failed = asyncio.Event()
        self._usage_context = usage_context
        self._stat_loggers = stat_loggers or []
        self._policy = policy
        self._zygote = zygote
        self._on_phase = on_phase
        self._streams = Streams(on_end=self._end_requests)
        self._ranks: RankExecutor | None = None
        self._scheduler: VllmScheduler | None = None
        self._stepping: Stepping | None = None
        self._stepper: asyncio.Task[None] | None = None
        self._dead: BaseException | None = None
        self._closed = False

    @classmethod
    def from_engine_args(
        cls,
        engine_args: AsyncEngineArgs,
        usage_context: UsageContext = UsageContext.ENGINE_CONTEXT,
        stat_loggers: list[StatLoggerFactory] | None = None,
        *,
        policy: PolicyName | Policy = "balanced",
        zygote: Zygote | None = None,
        on_phase: OnPhase | None = None,
    ) -> Self:
        """An engine that is not started yet.

        Args:
            engine_args: vLLM's own arguments.
            usage_context: how vLLM's statistics shall call this use.
            stat_loggers: further statistics loggers, as for vLLM.
            policy: which requests share a step, with more than one stage: "balanced", "fill-first" (as vLLM does), or
                a `Policy` of the caller's own.
            zygote: what forks the ranks, when the caller has launched one early; the engine then ends it too.
            on_phase: told about start-up progress: phase, rank or None, seconds.
        """
        return cls(
            engine_args,
            usage_context=usage_context,
            stat_loggers=stat_loggers,
            policy=policy,
            zygote=zygote,
            on_phase=on_phase or ignore_phase,
        )

    async def __aenter__(self) -> Self:
        """Start. On any failure, also a cancellation, nothing is left behind.

        Raises:
            ConfigError: the arguments cannot work; no rank was started.
            StartupError: a rank did not become ready.
        """
        try:
            await self._start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    # -- start ---------------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        check()
        if self._zygote is None:
            world = self.engine_args.pipeline_parallel_size * self.engine_args.tensor_parallel_size
            self._zygote = Zygote()
            await self._zygote.start(rank_environment(world), PRELOAD)
        config, written = await asyncio.to_thread(make_config, self.engine_args, self._usage_context)
        self._assign(config)
        parallel = config.parallel_config
        layout = RankLayout(
            output_rank=parallel.world_size - parallel.tensor_parallel_size,
            cpus=cores(config),
            runner=RUNNER,
            ranks_per_stage=parallel.world_size // parallel.pipeline_parallel_size,
        )
        self._ranks = RankExecutor(
            layout,
            self._zygote,
            epoch=0,
            on_phase=self._on_phase,
            on_lost=self._lost,
            on_span=self._span,
            on_output=self._connector_output,
        )
        await self._ranks.start()
        with config_errors():
            async with asyncio.TaskGroup() as tasks:  # the front end is built while the ranks load
                front = tasks.create_task(asyncio.to_thread(_front_end, config, self.log_stats))
                tasks.create_task(self._ranks.call(methodcaller("start", config, self._ranks.rendezvous, written)))
            since = loop.time()
            self._on_phase("load", None, since - began)
            make_executor = partial(self._bridge, threading.get_ident())
            core = await asyncio.to_thread(make_engine_core, config, make_executor, self.log_stats)
        core.model_executor.supported_tasks = (await self._ranks.call(worker_call("get_supported_tasks")))[0]
        self._on_phase("kv_cache", None, loop.time() - since)
        self._wire(core, front.result())
        self._ranks.started()
        self._on_phase("ready", None, loop.time() - began)

    def _bridge(self, thread: int, config: VllmConfig) -> BridgeExecutor:
        assert self._ranks is not None
        bridge = BridgeExecutor(config, self._ranks, self._loop)
        bridge.bind(thread)
        return bridge

    def _assign(self, config: VllmConfig) -> None:
        """What the base class keeps of a configuration."""
        self._loop = asyncio.get_running_loop()
        args = self.engine_args
        self.vllm_config = config
        self.model_config = config.model_config
        self.scheduler_config = config.scheduler_config
        self.observability_config = config.observability_config
        self.log_requests = args.enable_log_requests
        self._stat_loggers = [*self._stat_loggers, *load_stat_logger_plugin_factories()]
        self.log_stats = not args.disable_log_stats or bool(self._stat_loggers)
        self.admission_stats = None
        self.profiler = None
        self._client_count = 1
        self._elastic_ep_lock = asyncio.Lock()
        self._profile_lock = asyncio.Lock()
        self._frontend_profiler_injected = False
        self._profile_session_guard_enabled = True
        self._profile_session_active = False

    def _wire(self, core: Any, front: tuple[Any, InputProcessor, OutputProcessor]) -> None:
        """Put core, steps, client and streams together and start stepping."""
        assert self._ranks is not None
        self.renderer, self.input_processor, self.output_processor = front
        self._scheduler = VllmScheduler(
            core,
            wake=loop_wake(self._loop, self._wake),
            emit=self._streams.emit,
            policy=self._made(self._policy),
            clock=time.monotonic,
        )
        self._stepping = Stepping(
            self._scheduler,
            self._ranks,
            depth=self._scheduler.depth,
            emit=self._streams.emit,
            clock=time.monotonic,
        )
        self.engine_core = InProcessClient(self._scheduler, self._ranks, self._stepping, self._streams)
        self.logger_manager = None
        if self.log_stats:
            self.logger_manager = StatLoggerManager(
                vllm_config=self.vllm_config,
                engine_idxs=[0],
                custom_stat_loggers=self._stat_loggers,
                enable_default_loggers=not self.engine_args.disable_log_stats,
                client_count=1,
            )
            self.logger_manager.log_engine_initialized()
        self._stepper = asyncio.create_task(self._step(), name="async_pp stepping")
        self.output_handler = None
        self._run_output_handler()

    def _made(self, policy: PolicyName | Policy) -> Policy:
        return make_policy(policy, self.vllm_config) if isinstance(policy, str) else policy

    # -- life ----------------------------------------------------------------------------------------------------

    @property
    def policy(self) -> str:
        """Name of the micro-batch policy in force."""
        return self._policy if isinstance(self._policy, str) else self._policy.name

    def use_policy(self, policy: PolicyName | Policy) -> None:
        """Plan by another micro-batch policy from the next step on. May be called before the start as well."""
        self._policy = policy
        if self._scheduler is not None:
            self._scheduler.policy = self._made(policy)
            self._wake()

    async def _step(self) -> None:
        assert self._stepping is not None
        try:
            await self._stepping.run()
        except Exception as error:  # noqa: BLE001 - whatever ended the steps ends the engine, and is told
            self._die(error)

    def _wake(self) -> None:
        if self._stepping is not None:
            self._stepping.wake()

    def _connector_output(self, rank: int, output: Any) -> None:
        if self._stepping is not None:
            self._stepping.connector_output(rank, output)

    def _span(self, stage: int, step: int, began_s: float, ended_s: float) -> None:
        if self._stepping is not None:
            self._stepping.span(stage, step, began_s, ended_s)

    def _end_requests(self, error: BaseException) -> None:
        self.output_processor.propagate_error(error)

    def _lost(self, error: EngineFailed) -> None:
        """The executor lost its ranks. Before stepping has begun the start itself fails with the same error."""
        if self._stepping is not None:
            self._die(error)

    def _die(self, error: BaseException) -> None:
        """Every open request ends with one typed error; new ones are refused; the ranks are ended by `close`."""
        if self._dead is not None:
            return
        assert self._stepping is not None and self._scheduler is not None and self._ranks is not None
        step = self._stepping.oldest_step
        requests = tuple(self.output_processor.request_states)
        dead = as_dead(error, epoch=self._ranks.epoch, step=step, request_ids=requests)
        self._dead = dead
        self._stepping.lose(dead)
        self.engine_core.die(dead)
        self._ranks.lose(dead)
        self.failed.set()

    async def bubbles(self) -> StageTime:
        """What became of the stages' time since the start, by cause (`StageTime.shares`).

        Asks the ranks, between steps, for the times that they have not told yet. With no request open the answer counts
        every second up to now; two of them enclose a load (`StageTime.since`).

        Raises:
            EngineFailed: the ranks were lost.
            EngineClosed: the engine was closed, or has not been started.
        """
        if self._ranks is None or self._stepping is None or self._dead is not None:
            raise self.dead_error
        await self._ranks.call(flush)
        return self._stepping.bubbles()

    async def close(self) -> None:
        """End everything: open requests get `EngineClosed`, ranks are asked, then ended, all in bounded time."""
        self._closed = True
        if self._dead is None:
            self._dead = EngineClosed("the engine was closed")
        if isinstance(getattr(self, "engine_core", None), InProcessClient):
            self.engine_core.die(self._dead)
        try:
            await _cancelled(self._stepper)
            if self._stepping is not None:
                self._stepping.lose(self._dead)
        finally:
            try:
                if self._ranks is not None:
                    await self._ranks.close()
            finally:
                if self._zygote is not None:
                    await self._zygote.close()
                await self._close_front_end()

    async def _close_front_end(self) -> None:
        handler = getattr(self, "output_handler", None)
        if handler is not None:
            if not handler.done():
                await self._streams.ended()
            await _cancelled(handler)
        if self._scheduler is not None:
            scheduler, self._scheduler = self._scheduler, None
            scheduler.close()
        if (renderer := getattr(self, "renderer", None)) is not None:
            await asyncio.to_thread(renderer.shutdown)

    async def add_request(self, *args: Any, **kwargs: Any) -> Any:
        """Admit a request, as vLLM does. Raises the engine's own end, with rank, epoch and step, once it has ended."""
        if self._dead is not None:
            raise self._dead
        return await super().add_request(*args, **kwargs)

    def shutdown(self, timeout: float | None = None) -> None:
        """End the ranks at once, without waiting. `close` is the orderly way; this one is for a program going down."""
        if not getattr(self, "_closed", True) and self._ranks is not None:
            self._closed = True
            self._ranks.kill()

    @property
    def errored(self) -> bool:
        """Whether the engine can serve no more."""
        return self._dead is not None

    @property
    def is_running(self) -> bool:
        """Whether the engine serves."""
        return self._dead is None and self._stepping is not None

    @property
    def dead_error(self) -> BaseException:
        """Why the engine can serve no more."""
        return self._dead or EngineClosed("the engine is not started")


def _front_end(config: VllmConfig, log_stats: bool) -> tuple[Any, InputProcessor, OutputProcessor]:
    """Tokenizer and processors: reads files, so it runs in a helper thread."""
    renderer = renderer_from_config(config)
    outputs = OutputProcessor(
        renderer.tokenizer,
        log_stats=log_stats,
        stream_interval=config.scheduler_config.stream_interval,
        tracing_enabled=config.observability_config.otlp_traces_endpoint is not None,
    )
    return renderer, InputProcessor(config, renderer), outputs


async def _cancelled(task: asyncio.Task[None] | None) -> None:
    """Cancel a task and wait until it has ended."""
    if task is not None:
        task.cancel()
        await asyncio.wait([task])
