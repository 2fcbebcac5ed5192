"""vLLM's `EngineCoreClient`, in process: requests, aborts and utilities as coroutines on the loop's thread.

Utilities run between steps: what concerns the ranks is sent to them in order with the steps, what concerns the
scheduler happens between two calls of it. None blocks the loop, none touches the scheduler from another thread.
"""

from collections.abc import Callable
from typing import Any, get_args

from vllm.lora.request import LoRARequest
from vllm.tasks import SupportedTask
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason, PauseMode
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.executor.abstract import SLEEP_TAGS

from async_pp.engine.executor import RankExecutor
from async_pp.engine.stepping import Stepping
from async_pp.engine.streams import Streams
from async_pp.engine.vllm_seam.bridge import worker_call
from async_pp.engine.vllm_seam.scheduler import VllmScheduler


class _Resources:
    """What vLLM's client code looks at: whether the engine is dead."""

    engine_dead = False


class InProcessClient(EngineCoreClient):
    """Client of an engine core on the same loop.

    Args:
        scheduler: the scheduler port.
        ranks: the rank set.
        stepping: the steps over it.
        streams: where outputs go.
    """

    engine_ranks_managed = (0,)

    def __init__(self, scheduler: VllmScheduler, ranks: RankExecutor, stepping: Stepping, streams: Streams) -> None:
        self.resources = _Resources()
        self.cause: BaseException | None = None
        self._scheduler = scheduler
        self._core = scheduler.core
        self._ranks = ranks
        self._stepping = stepping
        self._streams = streams
        self._sleeping: set[str] = set()

    # -- life ----------------------------------------------------------------------------------------------------

    def die(self, cause: BaseException) -> None:
        """No request, abort or utility works from here on; every open stream ends with `cause`."""
        self.cause = cause
        self.resources.engine_dead = True
        self._streams.end(cause)

    def shutdown(self, timeout: float | None = None) -> None:
        """The engine that owns the rank set closes it."""

    def dp_engines_running(self) -> bool:
        """Whether any request is open."""
        return self._scheduler.unfinished

    # -- requests ------------------------------------------------------------------------------------------------

    async def get_output_async(self) -> EngineCoreOutputs:
        """The next outputs."""
        return await self._streams.get()

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """Admit a request. One that cannot be admitted ends with an error, as vLLM's own engine has it."""
        self._check_alive()
        try:
            self._scheduler.add(request)
        except Exception:
            failed = EngineCoreOutput(request.request_id, [], finish_reason=FinishReason.ERROR)
            self._streams.emit([EngineCoreOutputs(outputs=[failed], finished_requests={request.request_id})])
            raise
        self._stepping.wake()

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        """Take requests out now. After the end there is nothing to take out."""
        if request_ids and self.cause is None:
            self._scheduler.abort(request_ids)
            self._stepping.wake()

    # -- pause, sleep, caches --------------------------------------------------------------------------------------

    async def pause_scheduler_async(self, mode: PauseMode = "abort", clear_cache: bool = True) -> None:
        """Stop scheduling and wait until no step is in flight.

        Args:
            mode: "abort" ends every request, "wait" lets the running ones finish, "keep" holds them where they are.
            clear_cache: forget cached prefixes and encoder outputs.
        """
        self._check_alive()
        if mode not in get_args(PauseMode):
            raise ValueError(f"invalid pause mode {mode!r}: choose one of {', '.join(get_args(PauseMode))}")
        if mode == "abort":
            self._streams.emit(self._scheduler.abort_all())
        scheduler = self._scheduler.scheduler
        scheduler.set_pause_state(PauseState.PAUSED_ALL if mode == "keep" else PauseState.PAUSED_NEW)
        self._stepping.wake()
        while mode == "wait" and self._scheduler.unfinished:
            await self._stepping.settled()
        await self._stepping.idle()
        await self._all("synchronize_device")
        if clear_cache:
            await self._reset_caches()

    async def resume_scheduler_async(self) -> None:
        """Schedule again."""
        self._scheduler.scheduler.set_pause_state(PauseState.UNPAUSED)
        self._stepping.wake()

    async def is_scheduler_paused_async(self) -> bool:
        """Whether any pause is in force."""
        return bool(self._core.is_scheduler_paused())

    async def sleep_async(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Pause; from level 1 on the workers also give memory back."""
        await self.pause_scheduler_async(mode, clear_cache=level >= 1)
        if level >= 1 and "weights" not in self._sleeping:
            await self._all("sleep", level=level)
            self._sleeping |= SLEEP_TAGS

    async def wake_up_async(self, tags: list[str] | None = None) -> bool:
        """Bring memory back and schedule again once all of it is. Returns whether it is."""
        if tags is not None:
            tags = [tag for tag in tags if tag != "scheduling"]
            if unknown := set(tags) - self._sleeping:
                raise ValueError(f"not asleep: {', '.join(sorted(unknown))}")
        if self._sleeping and (tags is None or tags):
            await self._all("wake_up", tags=tags)
            self._sleeping -= set(tags) if tags else set(self._sleeping)
        if not self._sleeping:
            await self.resume_scheduler_async()
        return not self._sleeping

    async def is_sleeping_async(self) -> bool:
        """Whether the engine is paused or memory is given back."""
        return bool(self._core.is_scheduler_paused() or self._sleeping)

    async def release_kv_cache_memory_async(self) -> None:
        """Give back the KV cache's memory; needs a completed pause, and all memory there."""
        if not self._core.is_scheduler_paused() or self._scheduler.unfinished:
            raise RuntimeError("pause the engine first: the KV cache is in use")
        if self._sleeping:
            raise RuntimeError("wake the engine up first: some of its memory is given back already")
        await self._stepping.idle()
        await self._reset_caches()
        await self._all("discard", ("kv_cache",))
        self._sleeping.add("kv_cache")

    async def _reset_caches(self) -> None:
        if not await self.reset_prefix_cache_async(True, True):
            raise RuntimeError("the KV connector's cache could not be reset")
        await self.reset_mm_cache_async()
        await self.reset_encoder_cache_async()

    async def reset_prefix_cache_async(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forget cached prefixes. Returns whether all could be forgotten."""
        done = self._scheduler.scheduler.reset_prefix_cache(reset_running_requests, reset_connector)
        self._stepping.wake()
        return bool(done)

    async def reset_mm_cache_async(self) -> None:
        """Forget cached multi-modal inputs, here and in the ranks."""
        if self._core.mm_receiver_cache is not None:
            self._core.mm_receiver_cache.clear_cache()
        await self._all("reset_mm_cache")

    async def reset_encoder_cache_async(self) -> None:
        """Forget cached encoder outputs, here and in the ranks."""
        self._scheduler.scheduler.reset_encoder_cache()
        await self._all("reset_encoder_cache")

    # -- LoRA ----------------------------------------------------------------------------------------------------

    async def add_lora_async(self, lora_request: LoRARequest) -> bool:
        """Load an adapter on every rank."""
        return all(await self._all("add_lora", lora_request))

    async def remove_lora_async(self, lora_id: int) -> bool:
        """Unload an adapter."""
        return all(await self._all("remove_lora", lora_id))

    async def list_loras_async(self) -> set[int]:
        """Ids of the loaded adapters, the same on every rank."""
        first, *others = await self._all("list_loras")
        if any(other != first for other in others):
            raise RuntimeError(f"the ranks hold different adapters: {[first, *others]}")
        return set(first)

    async def pin_lora_async(self, lora_id: int) -> bool:
        """Keep an adapter from being evicted."""
        return all(await self._all("pin_lora", lora_id))

    # -- the rest ------------------------------------------------------------------------------------------------

    async def get_supported_tasks_async(self) -> tuple[SupportedTask, ...]:
        """What the model can do; asked once, at start."""
        return tuple(self._core.model_executor.supported_tasks)

    async def profile_async(
        self,
        is_start: bool = True,
        profile_prefix: str | None = None,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
    ) -> None:
        """Start or stop the workers' profiler."""
        bounds = {"delay_iterations": delay_iterations, "max_iterations": max_iterations}
        await self._all("profile", is_start, profile_prefix, **{k: v for k, v in bounds.items() if v is not None})

    async def save_sharded_state_async(
        self, path: str, pattern: str | None = None, max_size: int | None = None
    ) -> None:
        """Write each rank's shard of the model."""
        await self._all("save_sharded_state", path=path, pattern=pattern, max_size=max_size)

    async def execute_dummy_batch_async(self) -> None:
        """Run an empty batch on every rank."""
        await self._all("execute_dummy_batch")

    async def set_weight_version_async(self, weight_version: str) -> None:
        """Name the weights; the name travels with every output."""
        self._core.set_weight_version(weight_version)

    async def get_weight_version_async(self) -> str:
        """The name of the weights."""
        return str(self._core.get_weight_version())

    async def compute_weight_checksums_async(self) -> list[dict[str, str]]:
        """Checksums of each rank's weights."""
        return await self._all("compute_weight_checksums")

    async def collective_rpc_async(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call a worker method, or a function of the worker, on every rank. Answers in rank order."""
        self._check_alive()
        return await self._ranks.call(worker_call(method, args, kwargs), timeout)

    async def _all(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        return await self.collective_rpc_async(method, None, args, kwargs)

    def _check_alive(self) -> None:
        if self.cause is not None:
            raise self.cause
