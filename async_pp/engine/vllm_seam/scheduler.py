"""vLLM's engine core and scheduler behind `SchedulerPort`: everything that is planned or settled goes through here.

The engine core object is vLLM's own: it sizes the KV cache, makes the scheduler, the structured-output manager and the
connectors. What is not used is its loop. All methods run on the loop's thread; the constructor blocks on the ranks and
runs in a helper thread before any step.

An empty `schedule()` never becomes a step. What it would have told the workers (finished and preempted requests, freed
encoder inputs, blocks to zero or copy) is kept and travels with the next real step; what it would have told the
scheduler (a failed grammar, for one) is settled at once. With KV or encoder-cache connectors it is sent apart from the
steps (`Attend`), because only they know what its metadata means; and while transfers are under way and no step asks the
ranks how far they are, they are asked in the same way.

With vLLM's async scheduling its workers count steps: the count of those left out goes along with the next real step
(`Skipped`).
"""

import asyncio
import dataclasses
import gc
import os
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from async_pp.core.fit import Size
from async_pp.core.gather import Scope
from async_pp.core.policy import FillFirst, Policy
from async_pp.engine.ports import Attend, Plan, StepTimes
from async_pp.engine.vllm_seam.bridge import BridgeExecutor
from async_pp.engine.vllm_seam.connectors import ConnectorFold, SchedulerRequests
from async_pp.engine.vllm_seam.replay import Carried, Replay
from async_pp.engine.vllm_seam.steering import Candidates, Steering
from async_pp.ranks.runner import ConnectorOutput, Restored, Skipped

WRITTEN_WHEN_READ = "VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME"


def make_engine_core(config: VllmConfig, make_executor: Callable[[VllmConfig], BridgeExecutor], log_stats: bool) -> Any:
    """vLLM's engine core over our ranks. Blocks on the ranks: call it in a helper thread.

    vLLM freezes the heap of the process here, which is the host program's to decide: it is thawed again unless the host
    had frozen it before. Then it is thawed beforehand, for vLLM collects before it freezes: a former engine core,
    frozen as this one will be, is full of cycles and would stay for ever.

    And it reads all its variables, once and for all, of which one is written by being read.
    """
    frozen_before = gc.get_freeze_count()
    gc.unfreeze()
    was_set = WRITTEN_WHEN_READ in os.environ
    core = EngineCore(config, make_executor, log_stats)
    if not frozen_before:
        gc.unfreeze()
    if not was_set:
        os.environ.pop(WRITTEN_WHEN_READ, None)
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
        self._stages = config.parallel_config.pipeline_parallel_size
        self._steering = Steering(core)
        self._flying: deque[_Flying] = deque()  # steps in flight, oldest first
        self._samples = not core.is_pooling_model
        self._newest_drafts: Any = None
        self._carried: SchedulerOutput | None = None
        self._replay = Replay(core)
        self._requests = SchedulerRequests(self.scheduler)
        self.connectors: ConnectorFold | None = None
        kv, ec = self.scheduler.connector, self.scheduler.ec_connector
        self._delivers = False  # whether a settle needs what every rank has to say of the step
        if kv is not None or ec is not None:
            ranks = config.parallel_config.world_size
            expected = ranks if kv is None else kv.get_finished_count() or ranks
            self.connectors = ConnectorFold(ranks, expected, self._requests)
            encodes = config.ec_transfer_config is not None and config.ec_transfer_config.is_encode_only
            events = config.kv_events_config is not None and config.kv_events_config.enable_kv_cache_events
            # Of an instance that only encodes the output rank has nothing to compute, and answers first.
            self._delivers = bool(self.scheduler.requires_kv_delivery or events or encodes)

    # -- requests ------------------------------------------------------------------------------------------------

    def add(self, request: EngineCoreRequest) -> None:
        """Admit a request; it is schedulable at once. Raises what vLLM's checks raise."""
        admitted, wave = self.core.preprocess_add_request(request)
        self.core.add_request(admitted, wave)
        self._watch_grammar(admitted)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Take requests out, now: a later settle finds them gone."""
        names = list(request_ids)
        self._replay.drop(names)
        self.core.abort_requests(names)

    def abort_all(self) -> list[EngineCoreOutputs]:
        """Take every request out. Returns what their streams shall be told."""
        gone = self._replay.drop(self._replay.waiting)
        gone += [r.request_id for r in self.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)]
        if not gone:
            return []
        ends = [EngineCoreOutput(name, [], finish_reason=FinishReason.ABORT) for name in gone]
        return [EngineCoreOutputs(outputs=ends, finished_requests=set(gone))]

    def resume(self, carried: Carried, suspects: Collection[str]) -> None:
        """Go on with the requests of a former epoch, from the tokens that they have."""
        self._replay.add(carried.hand_over(self.core), suspects)

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
        return bool(self.scheduler.has_unfinished_requests() or self._replay.waiting)

    # -- SchedulerPort -------------------------------------------------------------------------------------------

    def plan(self, ask: bool = False) -> Plan | Attend | None:
        """The next step, or what is sent apart from the steps, or None when nothing could run.

        Args:
            ask: whether to ask the ranks for finished transfers when no step does it.
        """
        changed = True
        while changed:
            self._replay.next_suspect()
            plan, changed = self._attempt(ask)
            if plan is not None:
                return plan
            changed = changed or self._passes_counts()
        return None

    def bitmask(self, plan: Plan) -> Any:
        """The grammar bitmask of a step, or None when it has no structured output."""
        if plan.pending_tokens and self.core.check_for_draft_tokens and self._newest_drafts is not None:
            # Planned before its drafts existed: those that the grammar refuses must not be accepted.
            self.scheduler.update_draft_token_ids_in_output(self._newest_drafts, _output_of(plan))
        return self.scheduler.get_grammar_bitmask(_output_of(plan))

    def settle(self, plan: Plan, answers: Mapping[int, Any], output_rank: int) -> Sequence[EngineCoreOutputs]:
        """Update vLLM's scheduler with the answers and with what connectors have reported."""
        output, drafts = answers[output_rank]
        if self.connectors is not None:
            for rank, answer in answers.items():
                said = ConnectorOutput.of(output) if rank == output_rank else answer
                if said is not None:
                    self.connectors.add(rank, *said)
            output = self._reported(output, self.connectors)
        outputs = self.scheduler.update_from_output(_output_of(plan), output)
        self._flying.popleft()
        self.policy.settled(plan.decodes, plan.prompt_tokens, self._clock())
        if drafts is not None:
            self._newest_drafts = drafts
            if not self.core.async_scheduling:  # with it, the workers keep their drafts themselves
                self.scheduler.update_draft_token_ids(drafts)
        return self._stamped(outputs)

    def connector_output(self, rank: int, output: ConnectorOutput) -> Sequence[EngineCoreOutputs] | None:
        """Fold what a rank's connectors report, apart from the step's own answers. The next settle takes it along; with
        no step in flight it is settled here.

        Returns what the streams shall be told, or None when nothing that waits could go on by it: a transfer has not
        ended on every rank, or there were only statistics.
        """
        if self.connectors is None:
            raise RuntimeError(f"rank {rank} sent the output of a connector, and none is configured")
        self.connectors.add(rank, *output)
        if self._flying:
            return None
        settled = self._reported(EMPTY_MODEL_RUNNER_OUTPUT, self.connectors)
        kv, ec = settled.kv_connector_output, settled.ec_connector_output
        outputs = self._told(self.scheduler.update_from_output(SchedulerOutput.make_empty(), settled))
        moved = kv.finished_sending or kv.finished_recving or kv.failed_recving or kv.invalid_block_ids or ec
        return outputs if moved or outputs else None

    @property
    def transferring(self) -> bool:
        """Whether anything waits for a connector: requests for their KV, blocks for being sent, or a push."""
        scheduler = self.scheduler
        if self.connectors is None:
            return False
        pushes = (c.has_pending_push_work() for c in (scheduler.connector, scheduler.ec_connector) if c is not None)
        return bool(
            scheduler.has_finished_requests() or scheduler.kv_holding_waiting or scheduler.waiting or any(pushes)
        )

    def timed(self, plan: Plan, times: StepTimes) -> None:
        """Let the policy learn from the times of a step."""
        self.policy.timed(plan.size, times.stages, times.round_trip_s, times.host_s)

    def leave(self) -> Carried:
        """Give back what the scheduler side holds (connectors, event publishers), but not what outlives it."""
        carried = Carried(self.core)
        carried.requests.update(self._replay.waiting)
        self.scheduler.shutdown()
        return carried

    # -- inside --------------------------------------------------------------------------------------------------

    def _attempt(self, ask: bool) -> tuple[Plan | Attend | None, bool]:
        """One call of vLLM's scheduler, or none at all when nothing could run.

        Returns what is to be sent, if there is anything, and whether another attempt may find a step where this did
        not: a call that preempts takes no waiting request, and may have preempted the very request that it was to take.
        """
        scheduler, steering = self.scheduler, self._steering
        # Steps in flight ask the ranks themselves, and the next one takes along what there is to tell.
        tells = (
            self.connectors is not None
            and not self._flying
            and bool(scheduler.finished_req_ids or (ask and self.transferring))
        )
        paused = scheduler.pause_state == PauseState.PAUSED_ALL
        if paused and not tells:
            return None, False
        # What loads its KV in a step in flight may yet turn out not to have it: no further chunk of it before.
        loading = () if self.connectors is None else {name for step in self._flying for name in step.loads}
        found = steering.candidates(loading)
        if paused:
            found = Candidates(kept=found.kept)
        if not found.ready and not found.prompts and not tells:
            return None, False
        limits = self.policy.limits(steering.view(found, sum(step.only_decodes for step in self._flying)))
        if not limits.decodes and not (found.prompts and limits.prompt_tokens) and not tells:
            return None, False
        # An attempt that takes nothing is no step, and would still have to be sent to the connectors.
        if self._flying and steering.no_room(found, limits):
            return None, False
        output = steering.schedule(found, limits)
        if self.connectors is not None:
            self._requests.note()
        if output.total_num_scheduled_tokens:
            if self._carried is not None:
                output, self._carried = _merged(self._carried, output), None
            return self._planned(output, found.decoding), False
        preempted = bool(output.preempted_req_ids)
        if self.connectors is not None:
            self._settle_empty(output)
            # Where workers count steps they count this, so that a decode may be due that was not.
            due = not self._flying and bool(steering.candidates().ready)
            return Attend(output, again=preempted or due or self._passes_counts()), False
        scheduler.current_step -= 1  # workers count what they get
        self._carried = output if self._carried is None else _merged(self._carried, output)
        self._settle_empty(output)
        return None, preempted

    def _passes_counts(self) -> bool:
        """Count on to the next running request, where nothing else keeps it back. With nothing in flight nobody would
        ask again, so what could go now must be found now."""
        oldest = self._flying[0].count if self._flying else None
        return self._steering.paced and self._steering.pass_counts(oldest)

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
        skipped, self._steering.skipped = self._steering.skipped, 0
        loads = output.has_sync_kv_loads
        plan = Plan(
            requests=tuple(scheduled),
            work=Skipped(skipped, output) if skipped else self._replay.told(output),
            samples=tokens > 0 and self._samples,
            pending_tokens=output.pending_structured_output_tokens,
            scope=Scope.ALL if self._delivers or loads else Scope.OUTPUT,
            decodes=decodes,
            prompt_tokens=tokens - decode_tokens,
            size=Size(len(scheduled), tokens, attention),
        )
        self._flying.append(
            _Flying(
                count=self.scheduler.current_step,
                only_decodes=decodes > 0 and not plan.prompt_tokens,
                loads=_beginning(output) if loads else (),
            )
        )
        return plan

    def _settle_empty(self, output: SchedulerOutput) -> None:
        self._emit(self._told(self.scheduler.update_from_output(output, EMPTY_MODEL_RUNNER_OUTPUT)))

    def _told(self, outputs: dict[int, EngineCoreOutputs]) -> list[EngineCoreOutputs]:
        """Of outputs that no step stands behind those that say something."""
        return [told for told in self._stamped(outputs) if told.outputs]

    def _stamped(self, outputs: dict[int, EngineCoreOutputs]) -> list[EngineCoreOutputs]:
        self.core._attach_weight_version(outputs)  # noqa: SLF001 - the one place where vLLM stamps it
        return list(outputs.values())

    def _reported(self, output: ModelRunnerOutput, fold: ConnectorFold) -> ModelRunnerOutput:
        """An output with what the connectors of all ranks have reported, instead of its own rank's."""
        kv, ec = fold.take()
        self._requests.received(kv.finished_recving or set())
        # A copy: vLLM's empty output is one object for all.
        return dataclasses.replace(output, kv_connector_output=kv, ec_connector_output=ec)

    def _watch_grammar(self, request: Request) -> None:
        """Be woken when the request's grammar is compiled: until then it cannot be scheduled."""
        structured = request.structured_output_request
        compiling = None if structured is None else structured._grammar  # noqa: SLF001 - the future itself
        if compiling is not None and hasattr(compiling, "add_done_callback"):
            compiling.add_done_callback(lambda _: self._wake())


@dataclasses.dataclass(frozen=True, slots=True)
class _Flying:
    """A step in flight.

    Attributes:
        count: vLLM's count of steps at it.
        only_decodes: whether it carries decodes and no prompt.
        loads: its requests that may load KV within it: with any that does, all that begin in it.
    """

    count: int
    only_decodes: bool
    loads: tuple[str, ...]


def _output_of(plan: Plan) -> SchedulerOutput:
    return plan.work.work if isinstance(plan.work, Skipped | Restored) else plan.work


def _beginning(output: SchedulerOutput) -> tuple[str, ...]:
    """Requests that begin, or begin again, with this step."""
    return (*(new.req_id for new in output.scheduled_new_reqs), *output.scheduled_cached_reqs.resumed_req_ids)


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
