"""The façade: vLLM's own engine loop on our ranks.

    vllm serve MODEL --distributed-executor-backend async_pp.engine.facade.PipelineExecutor

and `LLM(..., distributed_executor_backend=PipelineExecutor)` work with it. vLLM's loop blocks, so the rank set lives on
an event loop in a thread of its own. Steps keep vLLM's two calls, `execute_model` and `sample_tokens`: both go to the
ranks at once, and each future is resolved by what the output rank answers to that step, never by position.
"""

import asyncio
import threading
import weakref
from collections.abc import Coroutine
from concurrent.futures import Future
from dataclasses import replace
from operator import methodcaller
from typing import Any

from vllm.v1.executor.abstract import FailureCallback
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput

from async_pp.core.gather import Scope
from async_pp.engine.executor import RankExecutor
from async_pp.engine.ports import ignore_phase
from async_pp.engine.vllm_seam.bridge import BridgeExecutor
from async_pp.engine.vllm_seam.config import layout
from async_pp.engine.vllm_seam.version import check
from async_pp.errors import EngineFailed
from async_pp.ranks.environment import PRELOAD, rank_environment
from async_pp.ranks.runner import ConnectorOutput
from async_pp.ranks.spawn import Zygote
from async_pp.wire.messages import SampleMode


class PipelineExecutor(BridgeExecutor):
    """A vLLM executor: constructed with the configuration alone, it spawns and owns its ranks."""

    def __init__(self, vllm_config: Any) -> None:
        check()
        self._thread = _LoopThread()
        self._failure_callback: FailureCallback | None = None
        self._finalizer = weakref.finalize(self, _close, self._thread, owned := _Owned())
        self._owned = owned
        self._next_step = 0
        self._unsampled: tuple[int, Any, Future[Any]] | None = None
        where = layout(vllm_config)
        owned.zygote = Zygote()
        owned.ranks = RankExecutor(where, owned.zygote, epoch=0, on_phase=ignore_phase, on_lost=self._lost)
        try:
            self._thread.run(_start(owned, vllm_config, rank_environment(where.ranks)))
            super().__init__(vllm_config, owned.ranks, self._thread.loop)
            self.bind(self._thread.ident)
        except BaseException:
            self.shutdown()
            raise

    def register_failure_callback(self, callback: FailureCallback) -> None:
        """`callback` is called once when the rank set is lost; at once when it is lost already."""
        if self._ranks.cause is not None:
            callback()
        else:
            self._failure_callback = callback

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        """Send a step. Its answer is None when `sample_tokens` must follow, which the ranks wait for."""
        samples = scheduler_output.total_num_scheduled_tokens > 0 and self.model_config.runner_type != "pooling"
        number = self._next_step
        self._next_step += 1
        sample: SampleMode = "later" if samples else "none"
        answered = self.submit(self._execute(number, scheduler_output, sample))
        if not samples:
            return answered if non_block else answered.result()
        self._unsampled = (number, scheduler_output, answered)
        opened: Future[Any] = Future()
        opened.set_result(None)
        return opened if non_block else None

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        """Send the sampling of the step sent last. The answer is that step's."""
        if self._unsampled is None:
            raise RuntimeError("sample_tokens was called without a step that waits for it")
        (number, _, answered), self._unsampled = self._unsampled, None
        self.submit(self._release(number, grammar_output))
        return answered if non_block else answered.result()

    def take_draft_token_ids(self) -> Any:
        """The draft tokens that came with the newest answer."""
        drafts, self._owned.drafts = self._owned.drafts, None
        return drafts

    def shutdown(self) -> None:
        """End the ranks and the thread. May be called again."""
        self._finalizer()

    async def _execute(self, number: int, scheduler_output: Any, sample: SampleMode) -> Any:
        aggregators = [a for a in (self.kv_output_aggregator, self.ec_output_aggregator) if a is not None]
        scope = Scope.ALL if aggregators else Scope.OUTPUT
        futures = self._ranks.execute(number, scheduler_output, grammar=None, sample=sample, scope=scope)
        answers = {rank: await future for rank, future in futures}
        output_rank = self._ranks.layout.output_rank
        output, self._owned.drafts = answers[output_rank]
        # vLLM's own loop has vLLM's own fold: it wants a model runner's output of every rank.
        outputs = [output if rank == output_rank else _as_output(answer) for rank, answer in answers.items()]
        for aggregator in aggregators:
            output = outputs[output_rank] = aggregator.aggregate(outputs, output_rank=output_rank)
        return output

    async def _release(self, number: int, grammar_output: Any) -> None:
        # A coroutine like `_execute`, because the loop begins coroutines in the order in which they were submitted.
        self._ranks.release(number, grammar_output)

    def _lost(self, error: EngineFailed) -> None:
        callback, self._failure_callback = self._failure_callback, None
        if callback is not None:
            callback()


class _Owned:
    """What the executor's thread holds, without a reference to the executor."""

    zygote: Zygote
    ranks: RankExecutor
    drafts: Any = None


class _LoopThread:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="async_pp façade", daemon=True)
        self._thread.start()

    @property
    def ident(self) -> int:
        """Identity of the loop's thread."""
        assert self._thread.ident is not None
        return self._thread.ident

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine on the loop and wait for it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()

    def stop(self) -> None:
        """End the thread and close the loop."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


def _as_output(reported: ConnectorOutput | None) -> ModelRunnerOutput:
    """What the connectors of a rank report, as the output of its model runner."""
    kv, ec = reported or ConnectorOutput(None, None)
    return replace(EMPTY_MODEL_RUNNER_OUTPUT, kv_connector_output=kv, ec_connector_output=ec)


async def _start(owned: _Owned, config: Any, environment: dict[str, str]) -> None:
    await owned.zygote.start(environment, PRELOAD)
    await owned.ranks.start()
    await owned.ranks.call(methodcaller("start", config, owned.ranks.rendezvous, {}))
    owned.ranks.started()
    owned.ranks.forget_names()  # vLLM kills its engine process without waiting when its server is told to stop


def _close(thread: _LoopThread, owned: _Owned) -> None:
    async def close() -> None:
        try:
            await owned.ranks.close()
        finally:
            await owned.zygote.close()

    try:
        thread.run(close())
    finally:
        thread.stop()


__all__: list[str] = ["PipelineExecutor"]
