"""vLLM's `EngineCoreClient`, in process: requests, aborts and utilities as coroutines on the loop's thread.

Utilities run between steps: what concerns the ranks is sent to them in order with the steps, what concerns the
scheduler happens between two calls of it. None blocks the loop, none touches the scheduler from another thread.
"""

import asyncio
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any, get_args

from vllm.lora.request import LoRARequest
from vllm.tasks import SupportedTask
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason, PauseMode
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.executor.abstract import SLEEP_TAGS

from async_pp.engine.epoch import Epoch
from async_pp.engine.streams import Streams
from async_pp.engine.vllm_seam.bridge import worker_call
from async_pp.engine.vllm_seam.replay import Carried


class _Resources:
    """What vLLM's client code looks at: whether the engine is dead."""

    engine_dead = False


class InProcessClient(EngineCoreClient):
    """Client of an engine core on the same loop.

    While a lost rank set is followed by another one, requests are held and utilities wait.

    Args:
        streams: where outputs go.

    Attributes:
        carried: the requests of a lost epoch, until another one goes on with them.
    """

    engine_ranks_managed = (0,)

    def __init__(self, streams: Streams) -> None:
        self.resources = _Resources()
        self.cause: BaseException | None = None
        self.carried: Carried | None = None
        self._streams = streams
        self._epoch: Epoch | None = None
        self._change = asyncio.Event()  # the next epoch to use, or the end
        self._held: dict[str, EngineCoreRequest] = {}  # came while there was none
        self._adapters: dict[int, LoRARequest] = {}
        self._pinned: set[int] = set()
        self._sleeping: set[str] = set()

    # -- life ----------------------------------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        """Whether there is an epoch whose steps go on."""
        return self._epoch is not None and self._epoch.ranks.cause is None

    def use(self, epoch: Epoch) -> None:
        """Go on with this epoch."""
        self._epoch = epoch
        self._changed()

    def die(self, cause: BaseException) -> None:
        """No request, abort or utility works from here on; every open stream ends with `cause`."""
        self.cause = cause
        self.resources.engine_dead = True
        self._held.clear()  # their streams end now, and no abort takes them out any more
        if self.carried is not None:
            self.carried.requests.clear()
        self._changed()
        self._streams.end(cause)

    def suspend(self, carried: Carried) -> None:
        """The epoch is lost: hold what comes from here on, and its requests unless they are aborted."""
        self._epoch = None
        self.carried = carried

    async def resume(self, epoch: Epoch, suspects: Collection[str]) -> None:
        """Go on with the next epoch: load the adapters again, add what was carried over, then what was held."""
        for adapter in list(self._adapters.values()):
            await epoch.ranks.call(worker_call("add_lora", (adapter,)))
        for lora_id in list(self._pinned):
            await epoch.ranks.call(worker_call("pin_lora", (lora_id,)))
        assert self.carried is not None
        carried, self.carried = self.carried, None
        self._sleeping.clear()  # new ranks have all their memory; a pause is carried over
        epoch.scheduler.resume(carried, suspects)
        self.use(epoch)
        held, self._held = self._held, {}
        for request in held.values():
            with suppress(Exception):  # told to its stream
                self._add(epoch, request)
        epoch.wake()

    async def epoch(self) -> Epoch:
        """The epoch whose steps go on; waits for it while the ranks are restarted.

        Raises:
            BaseException: what has ended the engine.
        """
        while True:
            self._check_alive()
            if self._epoch is not None and self.running:
                return self._epoch
            await self._change.wait()

    def _changed(self) -> None:
        change, self._change = self._change, asyncio.Event()
        change.set()

    def shutdown(self, timeout: float | None = None) -> None:
        """The engine that owns the rank set closes it."""

    def dp_engines_running(self) -> bool:
        """Whether any request is open."""
        return self._epoch is None or self._epoch.scheduler.unfinished

    # -- requests ------------------------------------------------------------------------------------------------

    async def get_output_async(self) -> EngineCoreOutputs:
        """The next outputs."""
        return await self._streams.get()

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """Admit a request. One that cannot be admitted ends with an error, as vLLM's own engine has it."""
        self._check_alive()
        if self._epoch is None:
            self._held[request.request_id] = request
            return
        self._add(self._epoch, request)
        self._epoch.wake()

    def _add(self, epoch: Epoch, request: EngineCoreRequest) -> None:
        try:
            epoch.scheduler.add(request)
        except Exception:
            failed = EngineCoreOutput(request.request_id, [], finish_reason=FinishReason.ERROR)
            self._streams.emit([EngineCoreOutputs(outputs=[failed], finished_requests={request.request_id})])
            raise

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        """Take requests out now. After the end there is nothing to take out."""
        if not request_ids or self.cause is not None:
            return
        if self._epoch is not None:
            self._epoch.scheduler.abort(request_ids)
            self._epoch.wake()
            return
        for request_id in request_ids:
            self._held.pop(request_id, None)
        if self.carried is not None:
            self.carried.drop(request_ids)

    # -- pause, sleep, caches --------------------------------------------------------------------------------------

    async def pause_scheduler_async(self, mode: PauseMode = "abort", clear_cache: bool = True) -> None:
        """Stop scheduling and wait until no step is in flight.

        Args:
            mode: "abort" ends every request, "wait" lets the running ones finish, "keep" holds them where they are.
            clear_cache: forget cached prefixes and encoder outputs.
        """
        if mode not in get_args(PauseMode):
            raise ValueError(f"invalid pause mode {mode!r}: choose one of {', '.join(get_args(PauseMode))}")
        epoch = await self.epoch()
        if mode == "abort":
            self._streams.emit(epoch.scheduler.abort_all())
        epoch.scheduler.scheduler.set_pause_state(PauseState.PAUSED_ALL if mode == "keep" else PauseState.PAUSED_NEW)
        epoch.wake()
        while mode == "wait" and (epoch := await self.epoch()).scheduler.unfinished:  # a restart carries the pause over
            await epoch.stepping.settled()
        await epoch.stepping.idle()
        await self._all("synchronize_device")
        if clear_cache:
            await self._reset_caches()

    async def resume_scheduler_async(self) -> None:
        """Schedule again."""
        epoch = await self.epoch()
        epoch.scheduler.scheduler.set_pause_state(PauseState.UNPAUSED)
        epoch.wake()

    async def is_scheduler_paused_async(self) -> bool:
        """Whether any pause is in force."""
        return await self._paused()

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
        return bool(self._sleeping) or await self._paused()

    async def release_kv_cache_memory_async(self) -> None:
        """Give back the KV cache's memory; needs a completed pause, and all memory there."""
        epoch = await self.epoch()
        if not await self._paused() or epoch.scheduler.unfinished:
            raise RuntimeError("pause the engine first: the KV cache is in use")
        if self._sleeping:
            raise RuntimeError("wake the engine up first: some of its memory is given back already")
        await epoch.stepping.idle()
        await self._reset_caches()
        await self._all("discard", ("kv_cache",))
        self._sleeping.add("kv_cache")

    async def _paused(self) -> bool:
        return bool((await self.epoch()).scheduler.core.is_scheduler_paused())

    async def _reset_caches(self) -> None:
        if not await self.reset_prefix_cache_async(True, True):
            raise RuntimeError("the KV connector's cache could not be reset")
        await self.reset_mm_cache_async()
        await self.reset_encoder_cache_async()

    async def reset_prefix_cache_async(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forget cached prefixes. Returns whether all could be forgotten."""
        epoch = await self.epoch()
        done = epoch.scheduler.scheduler.reset_prefix_cache(reset_running_requests, reset_connector)
        epoch.wake()
        return bool(done)

    async def reset_mm_cache_async(self) -> None:
        """Forget cached multi-modal inputs, here and in the ranks."""
        core = (await self.epoch()).scheduler.core
        if core.mm_receiver_cache is not None:
            core.mm_receiver_cache.clear_cache()
        await self._all("reset_mm_cache")

    async def reset_encoder_cache_async(self) -> None:
        """Forget cached encoder outputs, here and in the ranks."""
        (await self.epoch()).scheduler.scheduler.reset_encoder_cache()
        await self._all("reset_encoder_cache")

    # -- LoRA ----------------------------------------------------------------------------------------------------

    async def add_lora_async(self, lora_request: LoRARequest) -> bool:
        """Load an adapter on every rank."""
        added = all(await self._all("add_lora", lora_request))
        if added:
            self._adapters[lora_request.lora_int_id] = lora_request  # a new rank set must load it as well
        return added

    async def remove_lora_async(self, lora_id: int) -> bool:
        """Unload an adapter."""
        self._adapters.pop(lora_id, None)
        self._pinned.discard(lora_id)
        return all(await self._all("remove_lora", lora_id))

    async def list_loras_async(self) -> set[int]:
        """Ids of the loaded adapters, the same on every rank."""
        first, *others = await self._all("list_loras")
        if any(other != first for other in others):
            raise RuntimeError(f"the ranks hold different adapters: {[first, *others]}")
        return set(first)

    async def pin_lora_async(self, lora_id: int) -> bool:
        """Keep an adapter from being evicted."""
        pinned = all(await self._all("pin_lora", lora_id))
        if pinned:
            self._pinned.add(lora_id)
        return pinned

    # -- the rest ------------------------------------------------------------------------------------------------

    async def get_supported_tasks_async(self) -> tuple[SupportedTask, ...]:
        """What the model can do; asked once, at start."""
        return tuple((await self.epoch()).scheduler.core.model_executor.supported_tasks)

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
        (await self.epoch()).scheduler.core.set_weight_version(weight_version)

    async def get_weight_version_async(self) -> str:
        """The name of the weights."""
        return str((await self.epoch()).scheduler.core.get_weight_version())

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
        epoch = await self.epoch()
        return await epoch.ranks.call(worker_call(method, args, kwargs), timeout)

    async def _all(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        return await self.collective_rpc_async(method, None, args, kwargs)

    def _check_alive(self) -> None:
        if self.cause is not None:
            raise self.cause
