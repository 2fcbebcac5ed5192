"""vLLM's scheduler, steered by what it offers for that, without a change to it.

That is: the step in which a running request may decode next, the most tokens of a step, the most tokens of one prompt
in a step, and the most requests that run.

With vLLM's async scheduling its workers count steps: a request decodes again P steps after it did, when the first stage
has been told the token of the last. vLLM fills up with empty steps where fewer requests run; here such steps are passed
over, and counted.
"""

import itertools
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from async_pp.core.policy import UNLIMITED, Balanced, FillFirst, Limits, Policy, PolicyName, Prompt, View
from async_pp.engine.vllm_seam.connector_config import takes_whole_prompts
from async_pp.engine.vllm_seam.connectors import receives

PROMPTS_SEEN = 32
"""Prompts that a policy is shown of those that wait: what one step can take, and little work where thousands wait."""


@dataclass(slots=True)
class Candidates:
    """Requests that the next step could take.

    Attributes:
        chunked: running, with a prompt that is not yet scheduled to its end.
        decoding: ids of the other running ones.
        context: tokens of those, in the KV cache or on the way there.
        ready: those of them that could go now; who was left out longest comes first.
        waiting: the next prompts that vLLM would begin, in its order.
        further: how many more there is room for.
        kept: running requests that this step must leave out whatever a policy says.
    """

    chunked: list[Request] = field(default_factory=list)
    decoding: set[str] = field(default_factory=set)
    context: int = 0
    ready: list[Request] = field(default_factory=list)
    waiting: list[Request] = field(default_factory=list)
    further: int = 0
    kept: list[Request] = field(default_factory=list)

    @property
    def prompts(self) -> list[Request]:
        """Those with a prompt that is not scheduled to its end, in the order in which they are taken."""
        return self.chunked + self.waiting


class Steering:
    """What a policy sees of vLLM's scheduler, and how its limits are applied.

    Args:
        core: a started engine core.

    Attributes:
        paced: whether vLLM's workers prescribe when a request may decode again.
        skipped: counts that were passed over since it was last set to 0.
    """

    def __init__(self, core: Any) -> None:
        config = core.vllm_config
        self.scheduler = core.scheduler
        self.paced = paced(config)
        self.skipped = 0
        self._cuts_prompts = (
            config.scheduler_config.enable_chunked_prefill
            and not config.scheduler_config.disable_chunked_mm_input
            and not self.scheduler.need_mamba_block_aligned_split
            and not takes_whole_prompts(self.scheduler.connector)
        )
        speculative = config.speculative_config
        self._tokens_per_decode = 1 + (0 if speculative is None else speculative.num_speculative_tokens)
        self._stages = config.parallel_config.pipeline_parallel_size
        self._found_none: tuple[str, int] | None = None  # the prompt that last found no room; blocks that were free
        self._held: dict[str, tuple[Request, int]] = {}  # left out of the latest plan, and when vLLM lets them decode

    def candidates(self, keep: Collection[str] = ()) -> Candidates:
        """Look at the scheduler's queues. What the last `schedule` held back is decided anew.

        Args:
            keep: ids of running requests that must not be scheduled now.
        """
        self._let_go()
        found = Candidates()
        self._running(found, keep)
        self._waiting(found)
        return found

    def view(self, found: Candidates, flying: int) -> View:
        """What a policy may look at. `flying`: steps in flight that carry decodes and no prompt."""
        scheduler = self.scheduler
        return View(
            decodes=len(found.decoding),
            ready=[request.num_computed_tokens for request in found.ready],
            context=found.context,
            flying=flying,
            prompts=[_prompt(request) for request in found.prompts],
            begun=len(found.chunked),
            further=found.further,
            free_tokens=self._free_blocks * scheduler.block_size,
            block_tokens=scheduler.block_size,
        )

    def pass_counts(self, oldest: int | None) -> bool:
        """Where only vLLM's count of steps keeps running requests back, count on to the first of them.

        As with vLLM's own empty steps, no more than P counts lie between the oldest step in flight and the next one.
        While steps are in flight, requests that something else keeps back are waited for: the next settle asks again.
        A request that was preempted keeps its count, so that its prompt may be kept back as well.

        Args:
            oldest: the count at the oldest step in flight, or None.

        Returns:
            whether another attempt may find a step now.
        """
        scheduler = self.scheduler
        self._let_go()
        going = [request.next_decode_eligible_step for request in scheduler.running if _has_tokens(request)]
        kept_back = [step for step in going if step > scheduler.current_step + 1]
        if not kept_back:
            return False
        first = min(kept_back)
        if oldest is not None and (len(kept_back) < len(going) or first - oldest > self._stages):
            return False
        passed = first - (scheduler.current_step + 1)
        scheduler.current_step += passed
        self.skipped += passed
        return True

    def no_room(self, found: Candidates, limits: Limits) -> bool:
        """Whether `schedule` could only begin prompts, and the first of them found no room when it was tried like that
        and would find none now: behind it vLLM begins no other.

        What this cannot see (a prefix that others brought into the KV cache, room for encoder outputs) is found with
        the next step that takes decodes along, for which there is always a try, or with nothing in flight.
        """
        first = _first(found, limits)
        return first is not None and self._found_none is not None and self._none_for(first, *self._found_none)

    def schedule(self, found: Candidates, limits: Limits) -> SchedulerOutput:
        """vLLM's `schedule()`, with no more decodes and prompt tokens than the policy's limits.

        The latter only where a prompt may be cut anywhere: elsewhere one that is longer than the share would never be
        taken.
        """
        first, deferred = _first(found, limits), self.scheduler.deferred_waiting
        deferred.discard(first)  # vLLM puts it there again if it is not for want of room that it is passed over
        output = self._schedule(found, limits)
        if first is not None and not output.total_num_scheduled_tokens and first not in deferred:
            self._found_none = first.request_id, self._free_blocks
        return output

    def _none_for(self, first: Request, request_id: str, free_blocks: int) -> bool:
        return first.request_id == request_id and self._free_blocks <= free_blocks

    @property
    def _free_blocks(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def _schedule(self, found: Candidates, limits: Limits) -> SchedulerOutput:
        scheduler = self.scheduler
        for request in scheduler.kv_holding_waiting:
            if request.status == RequestStatus.WAITING and not request.num_computed_tokens:
                # Its load has failed as a whole. vLLM goes on reserving room for the rest of it, out of which the
                # request itself would have to be admitted: in a small cache never, and nothing behind it either.
                scheduler._inflight_prefills.discard(request)  # noqa: SLF001
        self._hold([*found.ready[limits.decodes :], *found.kept])
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

    def _running(self, found: Candidates, keep: Collection[str]) -> None:
        """What runs, in one pass: with hundreds of requests this pass is most of what planning costs here."""
        step = self.scheduler.current_step + 1  # what the next call will make of it
        held = self._held
        for request in self.scheduler.running:
            if keep and request.request_id in keep:
                found.kept.append(request)
                continue
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

    def _waiting(self, found: Candidates) -> None:
        """What waits: without those whose KV is on its way from elsewhere, which nothing here can take on."""
        scheduler = self.scheduler
        room = scheduler.max_num_active_reqs - self._active()
        if room <= 0:
            return
        holding = [request for request in scheduler.kv_holding_waiting if not receives(scheduler, request)]
        waiting = scheduler.waiting if scheduler.pause_state == PauseState.UNPAUSED else ()
        found.waiting += itertools.islice(itertools.chain(holding, waiting), min(PROMPTS_SEEN, room))
        found.further = min(room, len(holding) + len(waiting)) - len(found.waiting)

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

    def _active(self) -> int:
        """Requests that hold a place in the workers' batches."""
        return int(len(self.scheduler.running) + self.scheduler.num_waiting_for_streaming_input)


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


def _first(found: Candidates, limits: Limits) -> Request | None:
    """The prompt that the step begins with, when it could only begin prompts."""
    begins = found.waiting and limits.prompt_tokens and limits.begin and not limits.decodes and not found.chunked
    return found.waiting[0] if begins else None


def _prompt(request: Request) -> Prompt:
    return Prompt(request.num_computed_tokens, request.num_tokens - request.num_computed_tokens)
