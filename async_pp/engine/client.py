"""`AsyncPPEngine`: vLLM's `EngineClient`, alive inside the host program's event loop.

It is vLLM's `AsyncLLM` (its input and output processors, its statistics, its streams) with one part exchanged: where
`AsyncLLM` talks to an engine process, this one holds the engine core's scheduler itself and drives the ranks. The
constructor only assigns; `async with` starts everything and always stops it, in bounded time.

    async with AsyncPPEngine.from_engine_args(AsyncEngineArgs(model=..., pipeline_parallel_size=2)) as engine:
        async for output in engine.generate("Hello", SamplingParams(max_tokens=16), "request-1"):
            ...
"""

import asyncio
from collections.abc import Collection, Mapping
from types import TracebackType
from typing import Any, Literal, Self

from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.renderers import renderer_from_config
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.metrics.loggers import StatLoggerFactory, load_stat_logger_plugin_factories

from async_pp.core.bubble import StageTime
from async_pp.core.policy import Policy, PolicyName
from async_pp.core.recovery import Intensity, OnLoss, Recovery, Restart
from async_pp.engine.core_client import InProcessClient
from async_pp.engine.epoch import Epoch
from async_pp.engine.host import Host
from async_pp.engine.launch import StartDeadlines
from async_pp.engine.lives import Lives, Loss
from async_pp.engine.ports import OnLost, OnPhase, ignore_lost, ignore_phase
from async_pp.engine.streams import Streams
from async_pp.engine.vllm_seam.config import config_errors, make_config
from async_pp.engine.vllm_seam.dead import as_dead, as_lost
from async_pp.engine.vllm_seam.replay import Carried
from async_pp.engine.vllm_seam.stat_loggers import make_manager
from async_pp.engine.vllm_seam.steering import make_policy
from async_pp.engine.vllm_seam.version import check
from async_pp.errors import EngineClosed, EngineFailed
from async_pp.ranks.environment import PRELOAD, rank_environment
from async_pp.ranks.runner import flush
from async_pp.ranks.spawn import Zygote

EngineState = Literal["starting", "serving", "restarting", "failed", "closed"]


class AsyncPPEngine(AsyncLLM):
    """The engine. Made by `from_engine_args`, used as an async context manager; not started before that.

    Attributes:
        failed: set when the rank set is lost and no other one follows; `dead_error` then says why.
    """

    def __init__(  # the base's constructor starts processes and blocks: see `_start`
        self,
        engine_args: AsyncEngineArgs,
        *,
        usage_context: UsageContext = UsageContext.ENGINE_CONTEXT,
        stat_loggers: list[StatLoggerFactory] | None = None,
        policy: PolicyName | Policy = "balanced",
        on_rank_loss: OnLoss = "replay",
        restarts: Intensity = Intensity(),  # noqa: B008 - frozen
        step_deadline_s: float | None = None,
        start_deadlines: StartDeadlines = StartDeadlines(),  # noqa: B008 - frozen
        zygote: Zygote | None = None,
        on_phase: OnPhase = ignore_phase,
        on_lost: OnLost = ignore_lost,
    ) -> None:
        self.engine_args = engine_args
        self.failed = asyncio.Event()
        self._usage_context = usage_context
        self._stat_loggers = stat_loggers or []
        self._policy = policy
        self._zygote = zygote
        self._host = Host(on_phase, on_lost)
        self._streams = Streams(on_end=self._end_requests)
        self._recovery = Recovery(on_rank_loss, restarts)
        self._step_deadline_s = step_deadline_s
        self._start_deadlines = start_deadlines
        self._written: Mapping[str, str] = {}
        self._epoch: Epoch | None = None
        self._living: asyncio.Task[None] | None = None
        self.output_handler: asyncio.Task[None] | None = None
        self._dead: BaseException | None = None
        self._closed = False
        self._lost_s = 0.0  # when the last rank set was

    @classmethod
    def from_engine_args(
        cls,
        engine_args: AsyncEngineArgs,
        usage_context: UsageContext = UsageContext.ENGINE_CONTEXT,
        stat_loggers: list[StatLoggerFactory] | None = None,
        *,
        policy: PolicyName | Policy = "balanced",
        on_rank_loss: OnLoss = "replay",
        restarts: Intensity = Intensity(),  # noqa: B008 - frozen
        step_deadline_s: float | None = None,
        start_deadlines: StartDeadlines = StartDeadlines(),  # noqa: B008 - frozen
        zygote: Zygote | None = None,
        on_phase: OnPhase | None = None,
        on_lost: OnLost | None = None,
    ) -> Self:
        """An engine that is not started yet.

        Args:
            engine_args: vLLM's own arguments.
            usage_context: how vLLM's statistics shall call this use.
            stat_loggers: further statistics loggers, as for vLLM.
            policy: which requests share a step, with more than one stage: "balanced", "fill-first" (as vLLM does), or
                a `Policy` of the caller's own.
            on_rank_loss: what becomes of open requests when a rank dies, hangs or raises: "replay" (they go on from the
                tokens they have over a new rank set), "fail" (they end with an error, the engine goes on), or "exit".
            restarts: how many new rank sets are tried before the engine ends.
            step_deadline_s: how long a rank may take for a step from the moment it could begin; None: ten times the
                99th percentile of what was measured, at least 5 s, at most 60 s.
            start_deadlines: how long the parts of a start may take.
            zygote: what forks the ranks, when the caller has launched one early; the engine then ends it too.
            on_phase: told about start-up progress, also of restarts: phase, rank or None, seconds.
            on_lost: told when a rank set is lost and another one follows: the error, how many requests go on, how many
                were given up. What either of the two raises is told to the loop's exception handler (`CallbackFailed`),
                and the engine goes on.
        """
        return cls(
            engine_args,
            usage_context=usage_context,
            stat_loggers=stat_loggers,
            policy=policy,
            on_rank_loss=on_rank_loss,
            restarts=restarts,
            step_deadline_s=step_deadline_s,
            start_deadlines=start_deadlines,
            zygote=zygote,
            on_phase=on_phase or ignore_phase,
            on_lost=on_lost or ignore_lost,
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
        await self._have_zygote()  # it imports while the configuration is made
        config, self._written = await asyncio.to_thread(make_config, self.engine_args, self._usage_context)
        self._assign(config)
        epoch = await self.make(0)
        with config_errors():
            async with asyncio.TaskGroup() as tasks:  # the front end is built while the ranks load
                front = tasks.create_task(asyncio.to_thread(_front_end, config, self.log_stats))
                tasks.create_task(epoch.load())
            await epoch.begin()
        self._wire(epoch, front.result())
        self._host.phase("ready", None, loop.time() - began)

    async def _have_zygote(self) -> Zygote:
        if self._zygote is not None and self._zygote.ended:
            await self._zygote.close()
            self._zygote = None
        if self._zygote is None:
            world = self.engine_args.pipeline_parallel_size * self.engine_args.tensor_parallel_size
            self._zygote = Zygote()
            await self._zygote.start(rank_environment(world), PRELOAD)
        return self._zygote

    def _assign(self, config: VllmConfig) -> None:
        """What the base class keeps of a configuration."""
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

    def _wire(self, epoch: Epoch, front: tuple[Any, InputProcessor, OutputProcessor]) -> None:
        """Put client and streams together and start stepping."""
        self.renderer, self.input_processor, self.output_processor = front
        self.engine_core = InProcessClient(self._streams)
        self.engine_core.use(epoch)
        self.logger_manager = None
        if self.log_stats:
            self.logger_manager = make_manager(
                self.vllm_config,
                self._stat_loggers,
                defaults=not self.engine_args.disable_log_stats,
                told=self._host.logged,
            )
        lives = Lives(self, epoch, self._recovery, asyncio.get_running_loop().time)
        self._living = asyncio.create_task(lives.run(), name="async_pp engine")
        self._run_output_handler()
        assert self.output_handler is not None
        self.output_handler.add_done_callback(self._outputs_ended)

    def _made_policy(self) -> Policy:
        return make_policy(self._policy, self.vllm_config) if isinstance(self._policy, str) else self._policy

    # -- life ----------------------------------------------------------------------------------------------------

    @property
    def policy(self) -> str:
        """Name of the micro-batch policy in force."""
        return self._policy if isinstance(self._policy, str) else self._policy.name

    def use_policy(self, policy: PolicyName | Policy) -> None:
        """Plan by another micro-batch policy from the next step on. May be called before the start as well."""
        self._policy = policy
        if self.state == "serving":
            assert self._epoch is not None
            self._epoch.scheduler.policy = self._made_policy()
            self._epoch.wake()

    @property
    def state(self) -> EngineState:
        """What the engine is doing."""
        if self._closed:
            return "closed"
        if self._dead is not None:
            return "failed"
        if self._living is None:
            return "starting"
        return "serving" if self.engine_core.running else "restarting"

    @property
    def oldest_step(self) -> tuple[int, int] | None:
        """Epoch and number of the oldest step in flight, or None when none is."""
        if self._epoch is None or self.state != "serving":
            return None
        step = self._epoch.stepping.oldest_step
        return None if step is None else (self._epoch.number, step)

    @property
    def losses(self) -> int:
        """Rank sets that were lost so far, those included that did not come up in a restart."""
        return self._recovery.count

    # -- OwnerPort -----------------------------------------------------------------------------------------------

    async def make(self, number: int) -> Epoch:
        """An epoch that is not started."""
        self._epoch = Epoch(
            number,
            self.vllm_config,
            self._written,
            await self._have_zygote(),
            make_policy=self._made_policy,
            step_deadline_s=self._step_deadline_s,
            start_deadlines=self._start_deadlines,
            log_stats=self.log_stats,
            emit=self._streams.emit,
            on_phase=self._host.phase,
        )
        return self._epoch

    def suspend(self, carried: Carried) -> None:
        """Hold what comes from here on, beside what was carried over."""
        self._lost_s = asyncio.get_running_loop().time()
        self.engine_core.suspend(carried)

    def fail(self, verdict: Restart, carried: Carried, loss: Loss, epoch: int) -> None:
        """End the requests that do not go on."""
        were_open = len(carried.requests)
        for name in sorted(verdict.failed | carried.streaming):
            family = {name}
            state = self.output_processor.request_states.get(name)
            if state is not None:
                family |= set() if state.parent_req is None else state.parent_req.child_requests
                poison = name in verdict.poisoned
                state.queue.put(as_lost(loss.error, state.external_req_id, epoch=epoch, poison=poison))
                self.output_processor.abort_requests(sorted(family), internal=True)
            carried.drop(family)
        self._host.lost(loss.error, len(carried.requests), were_open - len(carried.requests))

    async def resume(self, epoch: Epoch, suspects: Collection[str]) -> None:
        """Go on with this epoch."""
        await self.engine_core.resume(epoch, suspects)
        self._host.phase("restart", None, asyncio.get_running_loop().time() - self._lost_s)

    def die(self, error: BaseException, step: int | None, why: str | None = None) -> None:
        """Every open request ends with one typed error; new ones are refused; the ranks are ended by `close`."""
        assert self._epoch is not None
        requests = tuple(self.output_processor.request_states)
        dead = as_dead(error, why, epoch=self._epoch.number, step=step, request_ids=requests)
        self._dead = dead
        self.engine_core.die(dead)
        self.failed.set()

    def _outputs_ended(self, handler: "asyncio.Task[None]") -> None:
        """vLLM's output handler ends by itself when it raises. No later request would ever get a token."""
        if not handler.cancelled() and self._dead is None:
            assert self._living is not None
            self._living.cancel()
            self.die(EngineFailed("vLLM's output handler has failed; its error is in the log"), None)

    def _end_requests(self, error: BaseException) -> None:
        self.output_processor.propagate_error(error)

    async def bubbles(self) -> StageTime:
        """What became of the stages' time since the rank set's start, by cause (`StageTime.shares`).

        Asks the ranks, between steps, for the times that they have not told yet. With no request open the answer counts
        every second up to now; two of them enclose a load (`StageTime.since`), unless the rank set was lost in between.

        Raises:
            EngineFailed: the ranks were lost.
            EngineClosed: the engine was closed, or has not been started.
        """
        if self._living is None or self._dead is not None:
            raise self.dead_error
        epoch = await self.engine_core.epoch()
        await epoch.ranks.call(flush)
        return epoch.stepping.bubbles()

    async def close(self) -> None:
        """End everything: open requests get `EngineClosed`, ranks are asked, then ended, all in bounded time."""
        self._closed = True
        if self._dead is None:
            self._dead = EngineClosed("the engine was closed")
        client = getattr(self, "engine_core", None)
        if isinstance(client, InProcessClient):
            client.die(self._dead)
        try:
            await _cancelled(self._living)
        finally:
            try:
                if self._epoch is not None:
                    await self._epoch.close()
            finally:
                if self._zygote is not None:
                    await self._zygote.close()
                await self._close_front_end()
                if isinstance(client, InProcessClient) and client.carried is not None:
                    client.carried.close()

    async def _close_front_end(self) -> None:
        if (handler := self.output_handler) is not None:
            if not handler.done():
                await self._streams.ended()
            await _cancelled(handler)
        if (renderer := getattr(self, "renderer", None)) is not None:
            await asyncio.to_thread(renderer.shutdown)

    async def add_request(self, *args: Any, **kwargs: Any) -> Any:
        """Admit a request, as vLLM does. Raises the engine's own end, with rank, epoch and step, once it has ended."""
        if self._dead is not None:
            raise self._dead
        return await super().add_request(*args, **kwargs)

    def shutdown(self, timeout: float | None = None) -> None:
        """End the ranks at once, without waiting. `close` is the orderly way; this one is for a program going down."""
        if not getattr(self, "_closed", True) and self._epoch is not None:
            self._closed = True
            self._epoch.ranks.kill()

    @property
    def errored(self) -> bool:
        """Whether the engine can serve no more."""
        return self._dead is not None

    @property
    def is_running(self) -> bool:
        """Whether the engine serves, or will again after a restart."""
        return self._dead is None and self._living is not None

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
