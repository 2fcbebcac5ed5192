"""The engine on virtual time with a fault connector: its ranks, a scheduler that checks blocks, and the clients.

All along no block is freed or given away while a rank writes or reads it, and no request goes on before its load is
known to be good. When all has ended nothing is left: `FaultRig.verify`.
"""

import asyncio
import traceback
from collections import defaultdict, deque
from dataclasses import dataclass, replace
from functools import partial

from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from async_pp.core.gather import Scope
from async_pp.engine.streams import Streams
from async_pp.engine.vllm_seam.scheduler import VllmScheduler, _output_of
from async_pp.errors import EngineClosed, RankError
from async_pp.ranks.runner import ConnectorOutput, Skipped
from tests.vllm.fault_connector import Script, Worker
from tests.vllm.virtual_engine import CheckedRanks, Rig


class FaultRanks(CheckedRanks):
    """Ranks with a connector each. What a rank sends arrives in order; `lag_s` of it, by rank, comes late.

    Attributes:
        attends: when something was sent apart from the steps.
        preempted: requests that were preempted.
        loading: requests whose load is part of a step in flight, and that step's work.
    """

    def __init__(self, *args, **named):
        super().__init__(*args, **named)
        self._connector = self._rig.core.scheduler.connector
        self.workers = [Worker(rank, self._connector.busy, self._loop.time) for rank in range(self.layout.ranks)]
        self.attends, self.preempted, self.loading, self.lag_s = [], set(), {}, {}
        if self._paced:  # what is sent beside steps in flight counts too, so the cadence may let a request into each
            self._most_flying = self.layout.stages + 1
        self._last_s = dict.fromkeys(range(self.layout.ranks), 0.0)
        self._queues = defaultdict(deque)
        self._said, self._waiting = {}, []
        self.broken = False

    def release_all(self):
        """What never reported does now."""
        for worker in self.workers:
            worker.released = True

    def execute(self, step, work, *, grammar, sample, scope):
        counted, work = work, work.work if isinstance(work, Skipped) else work
        wanted = Scope.ALL if self._rig.delivers or work.has_sync_kv_loads else Scope.OUTPUT
        assert scope is wanted
        self._note_preempted(work)
        early = self.loading.keys() & work.num_scheduled_tokens.keys()
        assert not early, f"{early} goes on before it is known whether its load failed"
        self.loading.update(
            {request_id: work for request_id, _, load in work.kv_connector_metadata.loads if not load.apart}
        )
        answers = super().execute(step, counted, grammar=grammar, sample=sample, scope=scope)
        self._waiting += [answer for _, answer in answers]
        for rank, done_s in enumerate(self._oracle._left_s):
            if rank == self.layout.output_rank:
                self._later(("act", rank), done_s, lambda rank=rank: self._said.update({step: self._act(rank, work)}))
            elif scope is Scope.ALL:
                answers.append((rank, self._future()))
                self._later(("act", rank), done_s, partial(self._reply, rank, work, answers[-1][1]))
            else:
                self._later(("act", rank), done_s, partial(self._report, rank, work))
        return answers

    def attend(self, work):
        assert not work.total_num_scheduled_tokens
        self._note_preempted(work)
        if self._paced:  # vLLM's runner counts it like a step
            self._ring.count()
            self._ring.step(work)
        self.attends.append(self._loop.time())
        answers = []
        for rank, left_s in enumerate(self._oracle._left_s):
            answers.append((rank, self._future()))
            at_s = max(left_s, self._loop.time() + self._hop_s)
            self._later(("act", rank), at_s, partial(self._reply, rank, work, answers[-1][1]))
        return answers

    def _note_preempted(self, work):
        for request_id in work.preempted_req_ids or ():
            self.preempted.add(request_id)
            self.loading.pop(request_id, None)
            self._flying[request_id].clear()

    def _answer(self, step, spans, answer, output):
        if not self.broken:
            super()._answer(step, spans, answer, replace(output, kv_connector_output=self._said.pop(step)))

    def _compute(self, work):
        # As the model runner does: tokens that the scheduler has discarded, after a load that failed, do not count.
        cached = work.scheduled_cached_reqs
        for request_id, tokens in zip(cached.req_ids, cached.num_output_tokens, strict=True):
            if not self._paced:
                self._known[request_id] = self._rig.prompts[request_id] + tokens
        return super()._compute(work)

    def _reply(self, rank, work, answer):
        said = self._output(self._act(rank, work))
        self._send(rank, lambda: answer.done() or answer.set_result(said))

    def _report(self, rank, work):
        said = self._output(self._act(rank, work))
        if said is not None:
            self._send(rank, lambda: self._rig.stepping.connector_output(rank, said))

    def _output(self, kv):
        return ConnectorOutput.of(None if kv is None else _Answer(kv))

    def _act(self, rank, work):
        try:
            return None if self.broken else self.workers[rank].act(work)
        except OSError as error:
            self.lose(RankError(str(error), rank=rank, traceback=traceback.format_exc()))
            return None

    def lose(self, error):
        """The rank set is gone, as `RankExecutor.lose`: all that waits for it gets the error."""
        self.broken = True
        for answer in self._waiting:
            if not answer.done():
                answer.set_exception(error)

    def _send(self, rank, deliver):
        if not self.broken:
            self._later(("send", rank), self._loop.time() + self._hop_s + self.lag_s.get(rank, 0.0), deliver)

    def _later(self, queue, at_s, what):
        """First in, first out within a queue, also where times are equal, which the loop does not promise."""
        at_s = self._last_s[queue] = max(self._last_s.get(queue, 0.0), at_s)
        self._queues[queue].append(what)
        self._loop.call_at(at_s, lambda: self._queues[queue].popleft()())

    def _future(self):
        self._waiting = [answer for answer in self._waiting if not answer.done()]
        self._waiting.append(self._loop.create_future())
        return self._waiting[-1]


@dataclass(frozen=True)
class _Answer:
    kv_connector_output: KVConnectorOutput


class CheckedScheduler(VllmScheduler):
    """The port; after everything that may free or give away blocks it looks whether a rank is still at them."""

    rig = None

    def plan(self, ask=False):
        return self._checked(super().plan(ask))

    def settle(self, plan, answers, output_rank):
        told = super().settle(plan, answers, output_rank)
        loading = self.rig.ranks.loading
        for request_id in [name for name, work in loading.items() if work is _output_of(plan)]:
            del loading[request_id]
        return self._checked(told)

    def connector_output(self, rank, output):
        return self._checked(super().connector_output(rank, output))

    def abort(self, request_ids):
        self._checked(super().abort(request_ids))

    def _checked(self, result):
        failed = self.scheduler.failed_recving_kv_req_ids
        for (rank, kind, request_id), blocks in self.scheduler.connector.busy.items():
            gone = blocks - self._requests.blocks(request_id)
            assert not gone, f"rank {rank} is at the {kind} of {request_id}, and its blocks {gone} were freed"
            told = request_id in failed or self.scheduler.requests[request_id].status == RequestStatus.FINISHED_ERROR
            assert kind != "load" or not told, f"rank {rank} still loads {request_id}, and its failure was told"
        if not self.scheduler.requests:
            self.rig.drained.set()
        return result


class FaultRig(Rig):
    """An engine with a connector, and its clients.

    Attributes:
        ends: how each request ended for its client.
        prompts: tokens of each prompt.
        delivers: whether the connector requires delivery.
        drained: set when the scheduler knows no request any more.
    """

    ranks_class = FaultRanks
    scheduler_class = CheckedScheduler

    def __init__(self, core, policy, *args, delivers=False, recompute=True, lag_s=None):
        scheduler = core.scheduler
        # As the constructor of vLLM's scheduler takes them from the connector and its configuration.
        scheduler.requires_kv_delivery, scheduler.recompute_kv_load_failures = delivers, recompute
        scheduler.connector.reset()
        self.delivers, self.recompute = delivers, recompute
        self.ends, self.prompts, self.drained = defaultdict(list), {}, asyncio.Event()
        self.streams = Streams(self.fail)
        super().__init__(core, policy, *args)
        self.scheduler.rig = self
        self.ranks.lag_s = lag_s or {}
        self._free = self.free_blocks

    @property
    def free_blocks(self):
        return self.core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    @property
    def failed(self):
        """Requests of which a rank said that loading failed."""
        return set().union(*(worker.failed for worker in self.ranks.workers))

    def add(self, request_id, tokens_in, tokens_out, script=None, **more):
        self.core.scheduler.connector.scripts[request_id] = script or Script()
        self.prompts[request_id] = tokens_in
        self.drained.clear()
        super().add(request_id, tokens_in, tokens_out, **more)

    def abort(self, request_id):
        if request_id in self.left:
            self.ends[request_id].append("ABORT")
        super().abort(request_id)

    def _take(self, told):
        for output in (output for outputs in told for output in outputs.outputs):
            request_id = output.request_id
            assert not self.ends[request_id], f"{request_id} is told something after its end"
            self.left[request_id] -= len(output.new_token_ids)
            if output.finished:
                self.ends[request_id].append(output.finish_reason.name)
                left = self.left.pop(request_id)
                assert (left == 0) == (output.finish_reason.name == "LENGTH")
                self.events[request_id].set()

    def fail(self, error):
        """The engine has ended: every open stream is told."""
        for request_id in self.left:
            self.ends[request_id].append(error)
        self.left.clear()

    async def ended(self):
        """Wait until every request has ended and every transfer too; then nothing may be left, or go on."""
        await super().ended()
        await self.drained.wait()
        await self.stepping.idle()
        await asyncio.sleep(1)
        asked = len(self.ranks.attends)
        await asyncio.sleep(5)
        assert len(self.ranks.attends) == asked, "ranks are asked for nothing"
        self.verify()

    async def lost(self, error, steps):
        """End the epoch, as the client does; `steps` is the task that steps. Nothing goes on, or is left to go on."""
        self.stepping.lose(error)
        self.streams.end(error)
        self.streams.end(EngineClosed("another end, later"))
        self.ranks.lose(error)
        steps.cancel()
        await asyncio.wait([steps])
        reader = asyncio.create_task(self.streams.get())
        await self.streams.ended()
        reader.cancel()
        await asyncio.sleep(10)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert not [timer for timer in self.loop._scheduled if not timer.cancelled()]
        assert all(len(ends) == 1 for ends in self.ends.values()) and not self.left

    def verify(self):
        scheduler, fold = self.core.scheduler, self.scheduler.connectors
        assert not scheduler.requests and not scheduler.deferred_frees and not scheduler.kv_holding_waiting
        assert not scheduler.finished_recving_kv_req_ids and not scheduler.failed_recving_kv_req_ids
        assert self.free_blocks == self._free, "blocks leaked"
        assert fold.open == () and not fold._failed and not fold._invalid and not self.scheduler._requests._receiving
        assert not scheduler.connector.busy and not self.ranks.loading
        told = sum(fold.dropped.values()) + fold.repeated - sum(worker.injected for worker in self.ranks.workers)
        assert 0 <= told <= sum(worker.vain for worker in self.ranks.workers)
        assert not fold.unfolded
        stepping = self.stepping
        assert not stepping._hosted and not stepping._attending and stepping.oldest_step is None
        assert not self.scheduler._flying and self.scheduler._carried is None
        for request_id, ends in self.ends.items():
            assert len(ends) == 1, f"{request_id} ended {len(ends)} times"
        timers = [timer for timer in self.loop._scheduled if not timer.cancelled()]
        assert not timers and len(asyncio.all_tasks()) == 4, "something is left behind"  # test, stepping and its two


def forget(core):
    """Free what a run that could not end has left in a scheduler."""
    scheduler = core.scheduler
    scheduler.processed_step_seq = scheduler.sched_step_seq
    scheduler._drain_deferred_frees()
    core.abort_requests(list(scheduler.requests))
    for request in list(scheduler.requests.values()):
        scheduler._free_blocks(request)
    for gone in (
        scheduler.finished_recving_kv_req_ids,
        scheduler.failed_recving_kv_req_ids,
        scheduler.finished_req_ids,
    ):
        gone.clear()
