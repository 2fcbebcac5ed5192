"""An engine without ranks on virtual time: vLLM's real schedulers under this package's stepping."""

import asyncio
import dataclasses
import tempfile
from collections import defaultdict
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreRequest

from async_pp.bench import virtual
from async_pp.bench.simulate import core as simulate
from async_pp.bench.simulate.ranks import SimulatedRanks
from async_pp.bench.simulate.stages import StageCost
from async_pp.core.policy import Balanced, FillFirst
from async_pp.engine.stepping import Stepping
from async_pp.engine.vllm_seam.scheduler import VllmScheduler, make_engine_core
from async_pp.engine.vllm_seam.steering import paced as is_paced
from async_pp.ranks.runner import Skipped
from tests.vllm.cadence import Ring

BLOCK = 4
MAX_LEN = 64
COSTS = [(0.004, 0.001, 0.0001), (0.01, 0.0, 0.0), (0.0005, 0.002, 0.001)]  # per step, sequence, token


@contextmanager
def engine_core(patch, stages, *, paced=False, order="fcfs", blocks=24, transfer=None):
    """A started engine core.

    Args:
        patch: a pytest.MonkeyPatch that lives as long.
        stages: pipeline stages.
        paced: whether vLLM schedules asynchronously.
        order: vLLM's scheduling policy.
        blocks: of the KV cache; vLLM keeps one of them to itself.
        transfer: vLLM's KVTransferConfig, or None.
    """
    limits = simulate.Limits(6, 48, MAX_LEN, blocks, BLOCK)
    with tempfile.TemporaryDirectory() as folder:
        simulate._write_model(Path(folder), stages, MAX_LEN)
        config = simulate._config(folder, stages, limits)
        config.scheduler_config.policy = order
        config.scheduler_config.async_scheduling = paced
        config.scheduler_config.disable_hybrid_kv_cache_manager = transfer is not None  # as vLLM does
        config.kv_transfer_config = transfer
        patch.setattr(
            VllmConfig, "use_v2_model_runner", property(lambda of: bool(of.scheduler_config.async_scheduling))
        )
        patch.setattr(simulate._NoRanks, "get_kv_connector_handshake_metadata", lambda of: [])
        core = make_engine_core(config, simulate._NoRanks, log_stats=False)
    grammars = core.structured_output_manager
    patch.setattr(
        grammars, "grammar_init", lambda request: setattr(request.structured_output_request, "_grammar", Future())
    )
    patch.setattr(grammars, "grammar_bitmask", lambda *_: None)
    patch.setattr(grammars, "accept_tokens", lambda *_: True)
    yield core
    grammars.clear_backend()
    core.scheduler.shutdown()


def make_policy(name, stages):
    return FillFirst() if name == "fill-first" else Balanced(stages, **({} if name == "balanced" else {name: True}))


class CheckedRanks(SimulatedRanks):
    """Ranks that write down what they get, for the `rig`, and check what vLLM's workers take for granted."""

    def __init__(self, rig, *args, **named):
        super().__init__(*args, **named)
        self._rig = rig
        self._paced = is_paced(rig.core.vllm_config)
        self._ring = Ring(self.layout.stages)
        self._flying = defaultdict(set)
        self._most_flying = 1 + self._paced

    def execute(self, step, work, **more):
        skipped = 0
        if isinstance(work, Skipped):
            skipped, work = work.steps, work.work
        assert work.total_num_scheduled_tokens, "an empty step reached the ranks"
        assert self._paced or not skipped
        if self._paced:
            for _ in range(skipped + 1):
                self._ring.count()
            self._ring.step(work)
        self._rig.story.append((self._loop.time(), skipped, tuple(work.num_scheduled_tokens.items())))
        return super().execute(step, work, **more)

    def _compute(self, work):
        work, cached = _with_all_tokens(work), work.scheduled_cached_reqs
        known = cached.all_token_ids
        self._known.update({request_id: len(known[request_id]) for request_id in cached.resumed_req_ids & known.keys()})
        for request_id in work.preempted_req_ids or ():
            self._flying[request_id].clear()  # what is in flight of it is answered before it goes on, or dropped
        load, output = super()._compute(work)
        for request_id, tokens in zip(output.req_ids, output.sampled_token_ids, strict=True):
            if tokens:
                self._flying[request_id].add(self.steps)
                assert len(self._flying[request_id]) <= self._most_flying, f"{request_id} is in flight too often"
        return load, output

    def _answer(self, step, spans, answer, output):
        for request_id in output.req_ids:
            self._flying[request_id].discard(step)
        super()._answer(step, spans, answer, output)

    def release(self, step, grammar):
        pass  # the step that it waited for was answered before it


class Rig:
    """An engine without ranks, and its clients.

    Attributes:
        story: of each step, when it was sent, the counts left out before it, the tokens of each request.
        left: tokens that each open request still has to get.
    """

    ranks_class = CheckedRanks
    scheduler_class = VllmScheduler

    def __init__(self, core, policy, costs=COSTS[0]):
        stages = core.vllm_config.parallel_config.pipeline_parallel_size
        self.core = core
        self.story, self.left, self.events = [], {}, {}
        self.loop = asyncio.get_running_loop()
        self.ranks = self.ranks_class(
            self,
            [StageCost(*costs)] * stages,
            hop_s=0.0002,
            host_s=0.0001,
            on_span=lambda *span: self.stepping.span(*span),
        )
        self.scheduler = self.scheduler_class(
            core, wake=lambda: self.stepping.wake(), emit=self._take, policy=policy, clock=self.loop.time
        )
        self.stepping = Stepping(
            self.scheduler, self.ranks, depth=self.scheduler.depth, emit=self._take, clock=self.loop.time
        )

    def _take(self, told):
        for output in (output for outputs in told for output in outputs.outputs):
            if output.request_id not in self.left:
                continue  # was aborted
            self.left[output.request_id] -= len(output.new_token_ids)
            assert self.left[output.request_id] >= 0
            if output.finished:
                assert self.left.pop(output.request_id) == 0
                self.events[output.request_id].set()

    def add(self, request_id, tokens_in, tokens_out, *, priority=0, compiles_s=None):
        params = SamplingParams(max_tokens=tokens_out, ignore_eos=True, detokenize=False)
        if compiles_s is not None:
            params.structured_outputs = StructuredOutputsParams(json="{}")
        request = EngineCoreRequest(
            request_id=request_id, prompt_token_ids=[7] * tokens_in, mm_features=None, sampling_params=params,
            pooling_params=None, arrival_time=self.loop.time(), lora_request=None, cache_salt=None,
            data_parallel_rank=None, priority=priority,
        )  # fmt: skip
        self.left[request_id], self.events[request_id] = tokens_out, asyncio.Event()
        self.scheduler.add(request)
        self.stepping.wake()
        if compiles_s is not None:
            grammar = self.core.scheduler.requests[request_id].structured_output_request._grammar
            self.loop.call_later(compiles_s, grammar.set_result, object())

    def abort(self, request_id):
        if self.left.pop(request_id, None) is not None:
            self.scheduler.abort([request_id])
            self.events[request_id].set()
            self.stepping.wake()

    async def ended(self):
        """Wait for the ends of all requests."""
        for event in list(self.events.values()):
            await event.wait()


def _with_all_tokens(work):
    """The step as the simulated ranks want it: the prompt of a resumed request is all that it has."""
    new = [
        dataclasses.replace(new, prompt_token_ids=new.prefill_token_ids or new.prompt_token_ids)
        for new in work.scheduled_new_reqs
    ]
    return dataclasses.replace(work, scheduled_new_reqs=new)


def run(core, policy, scenario, costs=COSTS[0], make_rig=Rig):
    """Run a scenario, a coroutine function of the rig. Returns the rig; nothing is left in the scheduler."""

    async def main():
        rig = make_rig(core, policy, costs)
        async with asyncio.TaskGroup() as tasks:
            steps = tasks.create_task(rig.stepping.run(), name="stepping")
            await scenario(rig)
            await rig.ended()
            await rig.stepping.idle()
            steps.cancel()
        return rig

    try:
        rig = virtual.run(main())
        assert not core.scheduler.requests and not rig.left
        return rig
    finally:
        core.scheduler.set_pause_state(PauseState.UNPAUSED)
        core.abort_requests(list(core.scheduler.requests))
