"""vLLM's engine core and scheduler behind `SchedulerPort`: everything that is planned or settled goes through here.

The engine core object is vLLM's own: it sizes the KV cache, makes the scheduler, the structured-output manager and the
connectors. What is not used is its loop. All methods run on the loop's thread; the constructor blocks on the ranks and
runs in a helper thread before any step.

An empty `schedule()` is never dispatched. What it would have told the workers (finished and preempted requests, freed
encoder inputs, blocks to zero or copy) is kept and travels with the next real step; what it would have told the
scheduler (a failed grammar, for one) is settled at once.

A policy steers vLLM's scheduler through what it offers for that: the step in which a running request may decode next,
the most tokens of a step, and the most tokens of one prompt in a step.

With vLLM's async scheduling its workers count steps: a request decodes again P steps after it did, when the first stage
has been told the token of the last. vLLM fills up with empty steps where fewer requests run; here the count of those
left out goes along with the next real step (`Skipped`).
"""

import asyncio
import dataclasses
import gc
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT
from vllm.v1.request import Request, RequestStatus

from async_pp.core.fit import Size
from async_pp.core.gather import Scope
from async_pp.core.policy import UNLIMITED, Balanced, FillFirst, Limits, Policy, PolicyName, Prompt, View
from async_pp.engine.ports import Plan, StepTimes
from async_pp.engine.vllm_seam.bridge import BridgeExecutor
from async_pp.engine.vllm_seam.connectors import takes_whole_prompts
from async_pp.ranks.runner import Skipped

PROMPTS_SEEN = 32
"""Prompts that a policy is shown of those that wait: what one step can take, and little work where thousands wait."""


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
        policy: splits the load over steps. May be exchanged between any two steps.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        core: Any,
        *,
        wake: Callable[[], None],
        emit: Callable[[Sequence[EngineCoreOutputs]], None],
        policy: Policy,
        clock: Callable[[], float],
    ) -> None:
        self.core = core
        self.scheduler = core.scheduler
        self._wake = wake
        self._emit = emit
        self.policy = policy
        self._clock = clock
        config = core.vllm_config
        self._cuts_prompts = (
            config.scheduler_config.enable_chunked_prefill
            and not config.scheduler_config.disable_chunked_mm_input
            and not self.scheduler.need_mamba_block_aligned_split
            and not takes_whole_prompts(self.scheduler.connector)
        )
        speculative = config.speculative_config
        self._tokens_per_decode = 1 + (0 if speculative is None else speculative.num_speculative_tokens)
        self._stages = config.parallel_config.pipeline_parallel_size
        self._paced = paced(config)
        self._decode_steps = 0  # steps in flight that carry decodes and no prompt
        self._held: dict[str, tuple[Request, int]] = {}  # left out of the latest plan, and when vLLM lets them decode
        self._counts: deque[int] = deque()  # vLLM's count at each step in flight, oldest first
        self._skipped = 0  # counts that no step was dispatched for
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
    def depth(self) -> int:
        """Steps that may be in flight: as many as vLLM says, and one more ahead of the first stage where that is safe.

        Safe is it where neither workers nor KV cache recycle something by that number: not with async scheduling, not
        with the connector of auxiliary outputs, and with full attention only.
        """
        config = self.core.vllm_config
        groups = self.scheduler.kv_cache_config.kv_cache_groups
        ahead = (
            self._stages > 1
            and self.policy.name != FillFirst.name
            and not config.scheduler_config.async_scheduling
            and not config.aux_output_config.enabled
            and all(type(group.kv_cache_spec) in (FullAttentionSpec, MLAAttentionSpec) for group in groups)
        )
        return int(config.max_concurrent_batches) + ahead

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
        """The next step, or None when nothing could run."""
        if self.scheduler.pause_state == PauseState.PAUSED_ALL:
            return None
        changed = True
        while changed:
            plan, changed = self._attempt()
            if plan is not None:
                return plan
            # With nothing in flight nobody would ask again, so what could go now must be found now.
            changed = changed or (self._paced and self._pass_counts())
        return None

    def bitmask(self, plan: Plan) -> Any:
        """The grammar bitmask of a step, or None when it has no structured output."""
        if plan.pending_tokens and self.core.check_for_draft_tokens and self._newest_drafts is not None:
            # Planned before its drafts existed: those that the grammar refuses must not be accepted.
            self.scheduler.update_draft_token_ids_in_output(self._newest_drafts, _output_of(plan))
        return self.scheduler.get_grammar_bitmask(_output_of(plan))

    def settle(self, plan: Plan, answers: Mapping[int, Any], output_rank: int) -> Sequence[EngineCoreOutputs]:
        """Fold the answers and update vLLM's scheduler."""
        output, drafts = answers[output_rank]
        if len(answers) > 1:
            output = self._folded([answer for answer, _ in answers.values()], output_rank)
        outputs = self.scheduler.update_from_output(_output_of(plan), output)
        self._decode_steps -= _only_decodes(plan)
        self._counts.popleft()
        self.policy.settled(plan.decodes, plan.prompt_tokens, self._clock())
        if drafts is not None:
            self._newest_drafts = drafts
            if not self.core.async_scheduling:  # with it, the workers keep their drafts themselves
                self.scheduler.update_draft_token_ids(drafts)
        return self._stamped(outputs)

    def timed(self, plan: Plan, times: StepTimes) -> None:
        """Let the policy learn from the times of a step."""
        self.policy.timed(plan.size, times.stages, times.round_trip_s, times.host_s)

    def close(self) -> None:
        """Give back what the scheduler side holds (grammar backends, connectors, event publishers)."""
        self.core.structured_output_manager.clear_backend()
        self.scheduler.shutdown()

    # -- inside --------------------------------------------------------------------------------------------------

    def _attempt(self) -> tuple[Plan | None, bool]:
        """One call of vLLM's scheduler, or none at all when nothing could run.

        Returns the step, if there is one, and whether another attempt may find one where this did not: a call that
        preempts takes no waiting request, and may have preempted the very request that it was to take.
        """
        scheduler = self.scheduler
        self._let_go()
        running = self._running()
        waiting, further = self._waiting()
        ready, prompts = running.ready, running.chunked + waiting
        to_tell = self._has_connector and scheduler.has_finished_requests()
        if not ready and not prompts and not to_tell:
            return None, False
        view = View(
            decodes=len(running.decoding),
            ready=[request.num_computed_tokens for request in ready],
            context=running.context,
            flying=self._decode_steps,
            prompts=[_prompt(request) for request in prompts],
            begun=len(running.chunked),
            further=further,
            free_tokens=scheduler.kv_cache_manager.block_pool.get_num_free_blocks() * scheduler.block_size,
            block_tokens=scheduler.block_size,
        )
        limits = self.policy.limits(view)
        if not limits.decodes and not (prompts and limits.prompt_tokens) and not to_tell:
            return None, False
        self._hold(ready[limits.decodes :])
        output = self._schedule(limits)
        if not output.total_num_scheduled_tokens and not self._has_connector:
            scheduler.current_step -= 1  # workers count what they get
            self._carried = output if self._carried is None else _merged(self._carried, output)
            self._settle_empty(output)
            return None, bool(output.preempted_req_ids)
        if self._carried is not None:
            output, self._carried = _merged(self._carried, output), None
        return self._planned(output, running.decoding), False

    def _running(self) -> "_Running":
        """What runs, in one pass: with hundreds of requests this pass is most of what planning costs here."""
        step = self.scheduler.current_step + 1  # what the next call will make of it
        held, found = self._held, _Running()
        for request in self.scheduler.running:
            if request.is_prefill_chunk:
                found.chunked.append(request)
                continue
            found.decoding.add(request.request_id)
            found.context += request.num_computed_tokens
            if request.next_decode_eligible_step <= step and _has_tokens(request) and request.request_id not in held:
                found.ready.append(request)
        if held:  # who was left out longest comes first
            left_out = [request for request, _ in held.values() if request.request_id in found.decoding]
            found.ready[:0] = [r for r in left_out if r.next_decode_eligible_step <= step and _has_tokens(r)]
        return found

    def _waiting(self) -> tuple[list[Request], int]:
        """The next prompts that vLLM would begin, in its order, and how many more there is room for."""
        scheduler = self.scheduler
        room = scheduler.max_num_active_reqs - self._active()
        if room <= 0:
            return [], 0
        waiting = scheduler.waiting if scheduler.pause_state == PauseState.UNPAUSED else ()
        shown = min(PROMPTS_SEEN, room)
        prompts = list(itertools.islice(itertools.chain(scheduler.kv_holding_waiting, waiting), shown))
        return prompts, min(room, len(scheduler.kv_holding_waiting) + len(waiting)) - len(prompts)

    def _hold(self, requests: Iterable[Request]) -> None:
        """Let the next call of `schedule()` leave these decodes out.

        vLLM skips a running request while its scheduler's step counter is below the request's own.
        """
        self._held = {r.request_id: (r, r.next_decode_eligible_step) for r in requests}
        for request, _ in self._held.values():
            request.next_decode_eligible_step = (
                self.scheduler.current_step + 2
            )  # one more than the next call makes of it

    def _let_go(self) -> None:
        """Undo the last `_hold`: what is held is decided anew for each plan."""
        for request, eligible_step in self._held.values():
            request.next_decode_eligible_step = eligible_step

    def _pass_counts(self) -> bool:
        """Where only vLLM's count of steps keeps running requests back, count on to the first of them.

        As with vLLM's own empty steps, no more than P counts lie between the oldest step in flight and the next one.
        While steps are in flight, requests that something else keeps back are waited for: the next settle asks again.
        A request that was preempted keeps its count, so that its prompt may be kept back as well.

        Returns whether another attempt may find a step now.
        """
        scheduler = self.scheduler
        self._let_go()
        going = [request.next_decode_eligible_step for request in scheduler.running if _has_tokens(request)]
        kept_back = [step for step in going if step > scheduler.current_step + 1]
        if not kept_back:
            return False
        first = min(kept_back)
        if self._counts and (len(kept_back) < len(going) or first - self._counts[0] > self._stages):
            return False
        passed = first - (scheduler.current_step + 1)
        scheduler.current_step += passed
        self._skipped += passed
        return True

    def _schedule(self, limits: Limits) -> SchedulerOutput:
        """vLLM's `schedule()`, with no more prompt tokens than the policy's limits.

        Only where a prompt may be cut anywhere: elsewhere a prompt longer than the share would never be taken.
        """
        scheduler = self.scheduler
        if not self._cuts_prompts or limits.prompt_tokens == UNLIMITED:
            return scheduler.schedule()
        config = scheduler.scheduler_config
        before = scheduler.max_num_scheduled_tokens, scheduler.max_num_active_reqs, config.long_prefill_token_threshold
        most, active, longest = before
        chunk = max(limits.chunk_tokens, self._tokens_per_decode)
        tokens = limits.prompt_tokens + limits.decodes * self._tokens_per_decode
        scheduler.max_num_scheduled_tokens = min(most, tokens)
        scheduler.max_num_active_reqs = min(active, self._active() + limits.begin)
        config.long_prefill_token_threshold = min(longest, chunk) if longest else chunk
        try:
            return scheduler.schedule()
        finally:
            scheduler.max_num_scheduled_tokens, scheduler.max_num_active_reqs, config.long_prefill_token_threshold = (
                before
            )

    def _active(self) -> int:
        """Requests that hold a place in the workers' batches."""
        return int(len(self.scheduler.running) + self.scheduler.num_waiting_for_streaming_input)

    def _planned(self, output: SchedulerOutput, decoding: set[str]) -> Plan:
        scheduled, requests = output.num_scheduled_tokens, self.scheduler.requests
        decodes = decode_tokens = 0
        attention = 0.0
        for request_id, tokens in scheduled.items():
            history = requests[request_id].num_computed_tokens - tokens  # vLLM has counted this step's on
            attention += tokens * (history + tokens / 2)
            if request_id in decoding:
                decodes += 1
                decode_tokens += tokens
        tokens = output.total_num_scheduled_tokens
        plan = Plan(
            requests=tuple(scheduled),
            work=Skipped(self._skipped, output) if self._skipped else output,
            samples=tokens > 0 and self._samples,
            pending_tokens=output.pending_structured_output_tokens,
            scope=Scope.ALL if self._has_connector else Scope.OUTPUT,
            decodes=decodes,
            prompt_tokens=tokens - decode_tokens,
            size=Size(len(scheduled), tokens, attention),
        )
        self._skipped = 0
        self._counts.append(self.scheduler.current_step)
        self._decode_steps += _only_decodes(plan)
        return plan

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


@dataclasses.dataclass(slots=True)
class _Running:
    """Running requests, sorted.

    Attributes:
        chunked: those whose prompt is not yet scheduled to its end.
        decoding: ids of the others.
        context: tokens of those, in the KV cache or on the way there.
        ready: those of them that could go now.
    """

    chunked: list[Request] = dataclasses.field(default_factory=list)
    decoding: set[str] = dataclasses.field(default_factory=set)
    context: int = 0
    ready: list[Request] = dataclasses.field(default_factory=list)


def paced(config: VllmConfig) -> bool:
    """Whether vLLM's workers prescribe when a request may decode again."""
    stages = config.parallel_config.pipeline_parallel_size
    return bool(stages > 1 and config.scheduler_config.async_scheduling and config.use_v2_model_runner)


def make_policy(name: PolicyName, config: VllmConfig) -> Policy:
    """The policy of this name for a configuration.

    On CPUs the stages share memory bandwidth, and mostly cores with the engine.
    """
    stages = config.parallel_config.pipeline_parallel_size
    if name == "fill-first" or stages == 1:
        return FillFirst()
    return Balanced(
        stages,
        ahead=not config.scheduler_config.async_scheduling,
        shared=current_platform.is_cpu(),
        paced=paced(config),
    )


def _has_tokens(request: Request) -> bool:
    """Whether a running request has tokens that no step in flight carries, and may get another one."""
    computed, placeholders = request.num_computed_tokens, request.num_output_placeholders
    if not placeholders:
        return bool(request.num_tokens_with_spec > computed)
    # Async scheduling. Its last token may be in flight.
    if computed + 2 - placeholders >= request.num_prompt_tokens + request.max_tokens:
        return False
    return bool(request.num_tokens_with_spec + placeholders > computed)


def _prompt(request: Request) -> Prompt:
    return Prompt(request.num_computed_tokens, request.num_tokens - request.num_computed_tokens)


def _output_of(plan: Plan) -> SchedulerOutput:
    return plan.work.work if isinstance(plan.work, Skipped) else plan.work


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
