"""vLLM's engine core and scheduler behind `SchedulerPort`: everything that is planned or settled goes through here.

The engine core object is vLLM's own: it sizes the KV cache, makes the scheduler, the structured-output manager and the
connectors. What is not used is its loop. All methods run on the loop's thread; the constructor blocks on the ranks and
runs in a helper thread before any step.

An empty `schedule()` is never dispatched. What it would have told the workers (finished and preempted requests, freed
encoder inputs, blocks to zero or copy) is kept and travels with the next real step; what it would have told the
scheduler (a failed grammar, for one) is settled at once.
"""

import asyncio
import dataclasses
import gc
import itertools
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.core import EngineCore
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT
from vllm.v1.request import Request, RequestStatus

from async_pp.core.gather import Scope
from async_pp.core.policy import Balanced
from async_pp.engine.ports import Plan, StepTimes
from async_pp.engine.vllm_seam.bridge import BridgeExecutor


def make_engine_core(config: VllmConfig, make_executor: Callable[[VllmConfig], BridgeExecutor], log_stats: bool) -> Any:
    """vLLM's engine core over our ranks. Blocks on the ranks: call it in a helper thread.

    vLLM freezes the heap of the process here, which is the host program's to decide: it is thawed again unless the host
    had frozen it before.
    """
    frozen_before = gc.get_freeze_count()
    core = EngineCore(config, make_executor, log_stats)
    if not frozen_before:
        gc.unfreeze()
    return core


class VllmScheduler:
    """The scheduler port.

    Args:
        core: a started engine core.
        wake: called, from any thread, when a grammar has been compiled.
        emit: takes what a plan that is not dispatched has to tell the streams.
        policy: splits the load over steps; None leaves that to vLLM.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        core: Any,
        *,
        wake: Callable[[], None],
        emit: Callable[[Sequence[EngineCoreOutputs]], None],
        policy: Balanced | None,
        clock: Callable[[], float],
    ) -> None:
        self.core = core
        self.scheduler = core.scheduler
        self._wake = wake
        self._emit = emit
        self._policy = policy
        self._clock = clock
        config = core.vllm_config
        self._cuts_prompts = (
            config.scheduler_config.enable_chunked_prefill
            and not config.model_config.is_multimodal_model
            and not self.scheduler.need_mamba_block_aligned_split
        )
        speculative = config.speculative_config
        self._tokens_per_decode = 1 + (0 if speculative is None else speculative.num_speculative_tokens)
        self._decode_steps = 0  # steps in flight that carry decodes and no prompt
        self._samples = not core.is_pooling_model
        self._newest_drafts: Any = None
        connectors = (self.scheduler.connector, self.scheduler.ec_connector)
        self._has_connector = any(connector is not None for connector in connectors)
        self._carried: SchedulerOutput | None = None

    # -- requests ------------------------------------------------------------------------------------------------

    def add(self, request: EngineCoreRequest) -> None:
        """Admit a request; it is schedulable at once. Raises what vLLM's checks raise."""
        admitted, wave = self.core.preprocess_add_request(request)
        self.core.add_request(admitted, wave)
        self._watch_grammar(admitted)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Take requests out, now: a later settle finds them gone."""
        self.core.abort_requests(list(request_ids))

    def abort_all(self) -> list[EngineCoreOutputs]:
        """Take every request out. Returns what their streams shall be told."""
        gone = self.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        if not gone:
            return []
        ends = [EngineCoreOutput(request.request_id, [], finish_reason=FinishReason.ABORT) for request in gone]
        return [EngineCoreOutputs(outputs=ends, finished_requests={request.request_id for request in gone})]

    @property
    def unfinished(self) -> bool:
        """Whether a request waits or runs that the pause state lets go on."""
        return bool(self.scheduler.has_unfinished_requests())

    @property
    def open_requests(self) -> tuple[str, ...]:
        """Ids of all requests that have not ended."""
        return tuple(self.scheduler.requests)

    # -- SchedulerPort -------------------------------------------------------------------------------------------

    def plan(self) -> Plan | None:
        """One call of vLLM's scheduler, or none at all when nothing could run."""
        decoding = {request.request_id for request in self.scheduler.running if not request.is_prefill_chunk}
        held = self._hold(len(decoding))
        if not self._could_run(held):
            return None
        output = self._schedule(len(decoding) - len(held))
        if not output.total_num_scheduled_tokens and not self._has_connector:
            self._carried = output if self._carried is None else _merged(self._carried, output)
            self._settle_empty(output)
            return None
        if self._carried is not None:
            output, self._carried = _merged(self._carried, output), None
        tokens = output.total_num_scheduled_tokens
        scheduled = output.num_scheduled_tokens
        decodes = decoding & scheduled.keys()
        plan = Plan(
            requests=tuple(scheduled),
            work=output,
            samples=tokens > 0 and self._samples,
            pending_tokens=output.pending_structured_output_tokens,
            scope=Scope.ALL if self._has_connector else Scope.OUTPUT,
            decodes=len(decodes),
            prompt_tokens=tokens - sum(scheduled[request_id] for request_id in decodes),
        )
        self._decode_steps += _only_decodes(plan)
        return plan

    def bitmask(self, plan: Plan) -> Any:
        """The grammar bitmask of a step, or None when it has no structured output."""
        if plan.pending_tokens and self.core.check_for_draft_tokens and self._newest_drafts is not None:
            # Planned before its drafts existed: those that the grammar refuses must not be accepted.
            self.scheduler.update_draft_token_ids_in_output(self._newest_drafts, plan.work)
        return self.scheduler.get_grammar_bitmask(plan.work)

    def settle(self, plan: Plan, answers: Mapping[int, Any], output_rank: int) -> Sequence[EngineCoreOutputs]:
        """Fold the answers and update vLLM's scheduler."""
        output, drafts = answers[output_rank]
        if len(answers) > 1:
            output = self._folded([answer for answer, _ in answers.values()], output_rank)
        outputs = self.scheduler.update_from_output(plan.work, output)
        self._decode_steps -= _only_decodes(plan)
        if self._policy is not None:
            running = sum(not request.is_prefill_chunk for request in self.scheduler.running)
            self._policy.settled(running, plan.decodes, plan.prompt_tokens, self._clock())
        if drafts is not None:
            self._newest_drafts = drafts
            if not self.core.async_scheduling:  # with it, the workers keep their drafts themselves
                self.scheduler.update_draft_token_ids(drafts)
        return self._stamped(outputs)

    def timed(self, plan: Plan, times: StepTimes) -> None:
        """The policy measures rounds, not stages."""

    def close(self) -> None:
        """Give back what the scheduler side holds (grammar backends, connectors, event publishers)."""
        self.core.structured_output_manager.clear_backend()
        self.scheduler.shutdown()

    # -- inside --------------------------------------------------------------------------------------------------

    def _hold(self, decoding: int) -> set[str]:
        """Let the next call of `schedule()` leave out the decodes that the policy leaves out. Returns their ids.

        vLLM skips a running request while its scheduler's step counter is below the request's own. Who was left out
        longest goes first: whoever is left out gets the newest count.
        """
        if self._policy is None or not decoding:
            return set()
        step = self.scheduler.current_step + 1  # what the next call will make of it
        ready = [r for r in self.scheduler.running if not r.is_prefill_chunk and _has_tokens(r)]
        limit = self._policy.decode_limit(decoding, len(ready), self._decode_steps)
        ready.sort(key=lambda request: request.next_decode_eligible_step, reverse=True)
        for request in ready[:limit]:  # left out of a call that was not made after all: the counter stands still
            request.next_decode_eligible_step = min(request.next_decode_eligible_step, step)
        for request in ready[limit:]:
            request.next_decode_eligible_step = step + 1
        return {request.request_id for request in ready[limit:]}

    def _schedule(self, decodes: int) -> SchedulerOutput:
        """vLLM's `schedule()`, with no more prompt tokens than the policy's share.

        Only where a prompt may be cut anywhere: elsewhere a prompt longer than the share would never be taken.
        """
        scheduler = self.scheduler
        if self._policy is None or not self._cuts_prompts:
            return scheduler.schedule()
        most = scheduler.max_num_scheduled_tokens
        share = self._policy.prompt_limit(self._pending_prompt_tokens())
        scheduler.max_num_scheduled_tokens = min(most, share + decodes * self._tokens_per_decode)
        try:
            return scheduler.schedule()
        finally:
            scheduler.max_num_scheduled_tokens = most

    def _pending_prompt_tokens(self) -> int:
        """Prompt tokens that no step has taken yet."""
        scheduler = self.scheduler
        chunked = (request for request in scheduler.running if request.is_prefill_chunk)
        waiting = itertools.chain(chunked, scheduler.waiting, scheduler.kv_holding_waiting)
        return sum(request.num_tokens - request.num_computed_tokens for request in waiting)

    def _could_run(self, held: Container[str]) -> bool:
        """Whether `schedule()` has a candidate: one that waits, or runs with tokens that no step in flight carries."""
        scheduler = self.scheduler
        if scheduler.pause_state == PauseState.PAUSED_ALL:
            return False
        if scheduler.kv_holding_waiting or (scheduler.waiting and scheduler.pause_state == PauseState.UNPAUSED):
            return True
        if self._has_connector and scheduler.has_finished_requests():
            return True
        return any(_has_tokens(request) and request.request_id not in held for request in scheduler.running)

    def _settle_empty(self, output: SchedulerOutput) -> None:
        outputs = self.scheduler.update_from_output(output, EMPTY_MODEL_RUNNER_OUTPUT)
        self._emit([told for told in self._stamped(outputs) if told.outputs])

    def _stamped(self, outputs: dict[int, EngineCoreOutputs]) -> list[EngineCoreOutputs]:
        self.core._attach_weight_version(outputs)  # noqa: SLF001 - the one place where vLLM stamps it
        return list(outputs.values())

    def _folded(self, answers: list[Any], output_rank: int) -> Any:
        """All ranks' answers as one, by vLLM's own aggregators."""
        executor = self.core.model_executor
        folded = answers[output_rank]
        for aggregator in (executor.kv_output_aggregator, executor.ec_output_aggregator):
            if aggregator is not None:
                folded = aggregator.aggregate(answers, output_rank=output_rank)
        return folded

    def _watch_grammar(self, request: Request) -> None:
        """Be woken when the request's grammar is compiled: until then it cannot be scheduled."""
        structured = request.structured_output_request
        compiling = None if structured is None else structured._grammar  # noqa: SLF001 - the future itself
        if compiling is not None and hasattr(compiling, "add_done_callback"):
            compiling.add_done_callback(lambda _: self._wake())


def _has_tokens(request: Request) -> bool:
    """Whether a running request has tokens that no step in flight carries."""
    return bool(request.num_tokens_with_spec + request.num_output_placeholders > request.num_computed_tokens)


def _only_decodes(plan: Plan) -> bool:
    return plan.decodes > 0 and not plan.prompt_tokens


def _merged(earlier: SchedulerOutput, later: SchedulerOutput) -> SchedulerOutput:
    """`later` with what an `earlier` plan that was never dispatched had to tell the workers."""
    return dataclasses.replace(
        later,
        finished_req_ids=earlier.finished_req_ids | later.finished_req_ids,
        free_encoder_mm_hashes=[*earlier.free_encoder_mm_hashes, *later.free_encoder_mm_hashes],
        preempted_req_ids=_joined(earlier.preempted_req_ids, later.preempted_req_ids),
        new_block_ids_to_zero=_joined(earlier.new_block_ids_to_zero, later.new_block_ids_to_zero),
        kv_cache_block_copies=_joined(earlier.kv_cache_block_copies, later.kv_cache_block_copies),
    )


def _joined(earlier: Any, later: Any) -> Any:
    """Two optional sets or lists as one, earlier first."""
    if not earlier or not later:
        return earlier or later
    return earlier | later if isinstance(earlier, set) else [*earlier, *later]


def loop_wake(loop: asyncio.AbstractEventLoop, wake: Callable[[], None]) -> Callable[[], None]:
    """`wake`, callable from any thread, also one that outlives the loop by a moment."""

    def call() -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(wake)

    return call
