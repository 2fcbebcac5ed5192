"""A KV connector that does what a test says, and simulated ranks whose side of it is late, wrong or fails as it says.

The scheduler's side keeps a script for each request. Ranks are told of loads and sends by the connector's metadata, and
report with their answers to steps and to what is sent apart from the steps, as vLLM's workers do.
"""

import asyncio
from collections import defaultdict, deque
from dataclasses import dataclass, field, replace
from functools import partial

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from async_pp.core.gather import Scope
from async_pp.engine.vllm_seam.scheduler import VllmScheduler
from async_pp.errors import RankError
from async_pp.ranks.runner import ConnectorOutput
from tests.vllm.virtual_engine import BLOCK, CheckedRanks, Rig


@dataclass(frozen=True)
class Fault:
    """What one rank does with its part of a transfer.

    Attributes:
        calls: how many further calls pass before it reports the end.
        until_s: when it is done at the earliest, virtual seconds.
        never: it reports nothing until the ranks are released.
        twice: it reports the end in the next call again.
        fails: "blocks" or "request": how it reports that loading failed. What fails by blocks is told at once.
        unknown: what it reports besides of a request that nobody knows: "sent", "received" or "failed".
        raises: it raises instead.
    """

    calls: int = 0
    until_s: float = 0.0
    never: bool = False
    twice: bool = False
    fails: str = ""
    unknown: str = ""
    raises: bool = False


GOOD = Fault()


@dataclass(frozen=True)
class Load:
    """KV that the connector offers: `tokens` at most, and what each rank does that is no good one."""

    tokens: int = 3 * BLOCK
    apart: bool = True  # from the steps, vLLM's "async"
    faults: dict = field(default_factory=dict)


@dataclass
class Script:
    """What the connector does with one request.

    Attributes:
        unknowing: how often it does not know yet what it has to offer.
        loads: what it offers, one after another: when the request begins, and when it begins again.
        send: what ranks do with the send after the end, by rank; None: nothing is sent.
        send_aborted: whether aborted requests are sent too.
    """

    unknowing: int = 0
    loads: list = field(default_factory=list)
    send: dict | None = None
    send_aborted: bool = False


@dataclass
class Told(KVConnectorMetadata):
    """What ranks are told: loads as (request, blocks, Load), sends as (request, faults)."""

    loads: list
    sends: list


class FaultConnector(KVConnectorBase_V1):
    """The scheduler's side.

    Attributes:
        scripts: by request.
        busy: blocks that ranks write ("load") or read ("send"), by (rank, kind, request): from when the connector got
            them until the rank reports.
    """

    requires_kv_delivery = False

    def __init__(self, *args, **named):
        super().__init__(*args, **named)
        self._ranks = range(self._vllm_config.parallel_config.pipeline_parallel_size)
        self.reset()

    def reset(self):
        self.scripts, self.busy, self._receiving = defaultdict(Script), {}, set()
        self._told = Told([], [])

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        script = self.scripts[request.request_id]
        if script.unknowing:
            script.unknowing -= 1
            return None, False
        if not script.loads or not self._kv_transfer_config.is_kv_consumer:
            return 0, False
        load = script.loads[0]
        most = request.num_tokens - (not load.apart)  # a step must have something to compute
        tokens = min(load.tokens, most) // BLOCK * BLOCK
        return tokens, load.apart and tokens > 0

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        if not num_external_tokens:
            return
        load = self.scripts[request.request_id].loads.pop(0)
        written = blocks.get_block_ids()[0][: num_external_tokens // BLOCK]
        self._told.loads.append((request.request_id, written, load))
        if load.apart:
            self._receiving.add(request.request_id)
            self._keep_busy("load", request.request_id, written)

    def build_connector_meta(self, scheduler_output):
        told, self._told = self._told, Told([], [])
        return told

    def update_connector_output(self, connector_output):
        self._receiving -= connector_output.finished_recving or set()

    def request_finished(self, request, block_ids):
        script = self.scripts[request.request_id]
        ended = request.status == RequestStatus.FINISHED_LENGTH_CAPPED or script.send_aborted
        if script.send is None or not ended or not self._kv_transfer_config.is_kv_producer:
            return False, None
        self._told.sends.append((request.request_id, script.send))
        if request.request_id not in self._receiving:  # else the end of that frees the blocks
            self._keep_busy("send", request.request_id, block_ids)
        return True, {"sent": len(block_ids)}

    def _keep_busy(self, kind, request_id, blocks):
        self.busy.update({(rank, kind, request_id): frozenset(blocks) for rank in self._ranks})

    # Of the worker's side nothing is used.
    start_load_kv = wait_for_layer_load = save_kv_layer = wait_for_save = None


class Worker:
    """One rank's side.

    Attributes:
        injected: reports made that must change nothing.
        vain: reports of sends whose blocks the end of a load frees: the request may be gone by then, or not yet.
        failed: requests of which it said that loading failed.
    """

    def __init__(self, rank, busy, clock):
        self.rank, self._busy, self._clock = rank, busy, clock
        self._open = []  # [kind, request, calls left, fault]
        self._again = []
        self.released = False
        self.injected, self.vain, self.failed = 0, 0, set()

    def act(self, work):
        """A step, or what is sent apart from steps. Returns what it reports. Raises RankError when a fault says so."""
        sent, received, failed, invalid = ids = set(), set(), set(), set()
        for kind, request_id in self._again:
            (sent if kind == "send" else received).add(request_id)
            self.injected += 1
        self._again = []
        for request_id, blocks, load in work.kv_connector_metadata.loads:
            fault = load.faults.get(self.rank, GOOD)
            self._begin("load" if load.apart else None, request_id, fault, ids)
            if fault.fails == "blocks" or (fault.fails and not load.apart):
                invalid.update(blocks[len(blocks) // 2 :])
                self.failed.add(request_id)
        for request_id, faults in work.kv_connector_metadata.sends:
            self._begin("send", request_id, faults.get(self.rank, GOOD), ids)
        for transfer in list(self._open):
            kind, request_id, calls, fault = transfer
            if calls > 0 or self._clock() < fault.until_s or (fault.never and not self.released):
                transfer[2] -= 1
                continue
            self._open.remove(transfer)
            self.vain += self._busy.pop((self.rank, kind, request_id), None) is None
            (sent if kind == "send" else received).add(request_id)
            if fault.fails == "request" and kind == "load":
                failed.add(request_id)
                self.failed.add(request_id)
            if fault.twice:
                self._again.append((kind, request_id))
        return KVConnectorOutput(
            finished_sending=sent, finished_recving=received, failed_recving=failed, invalid_block_ids=invalid
        )

    def _begin(self, kind, request_id, fault, ids):
        sent, received, failed, _ = ids
        if fault.raises:
            raise RankError(f"the connector of rank {self.rank} raised", rank=self.rank)
        if kind is not None:
            self._open.append([kind, request_id, fault.calls, fault])
        if fault.unknown:
            nobody = f"nobody of {request_id}"
            (sent if fault.unknown == "sent" else received).add(nobody)
            if fault.unknown == "failed":
                failed.add(nobody)
            self.injected += 1 + (fault.unknown == "failed")


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
        self._last_s = dict.fromkeys(range(self.layout.ranks), 0.0)
        self._queues = defaultdict(deque)
        self._said, self._waiting = {}, []
        self.broken = False

    def release_all(self):
        """What never reported does now."""
        for worker in self.workers:
            worker.released = True

    def execute(self, step, work, *, grammar, sample, scope):
        wanted = Scope.ALL if self._rig.delivers or work.has_sync_kv_loads else Scope.OUTPUT
        assert scope is wanted
        self._note_preempted(work)
        early = self.loading.keys() & work.num_scheduled_tokens.keys()
        assert not early, f"{early} goes on before it is known whether its load failed"
        self.loading.update(
            {request_id: work for request_id, _, load in work.kv_connector_metadata.loads if not load.apart}
        )
        answers = super().execute(step, work, grammar=grammar, sample=sample, scope=scope)
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
        except RankError as error:
            self.broken = True
            for answer in self._waiting:
                if not answer.done():
                    answer.set_exception(error)
            return None

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
        for request_id in [name for name, work in loading.items() if work is plan.work]:
            del loading[request_id]
        return self._checked(told)

    def connector_output(self, rank, output):
        return self._checked(super().connector_output(rank, output))

    def abort(self, request_ids):
        self._checked(super().abort(request_ids))

    def _checked(self, result):
        for (rank, kind, request_id), blocks in self.scheduler.connector.busy.items():
            gone = blocks - self._requests.blocks(request_id)
            assert not gone, f"rank {rank} is at the {kind} of {request_id}, and its blocks {gone} were freed"
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
