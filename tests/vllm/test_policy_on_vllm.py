"""Every policy over vLLM's real schedulers, without ranks, on virtual time: random requests, and what once stood still.

A wedge shows as a virtual loop that has nothing left to wait for.
"""

import asyncio
import dataclasses
import random
import tempfile
from collections import defaultdict
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from async_pp.bench import virtual
from tests.vllm.cadence import Ring

pytestmark = pytest.mark.vllm

BLOCK = 4
MAX_LEN = 64
COSTS = [(0.004, 0.001, 0.0001), (0.01, 0.0, 0.0), (0.0005, 0.002, 0.001)]  # per step, sequence, token


@pytest.fixture(scope="module")
def cores():
    """Engine cores by stages, asynchronous scheduling, vLLM's scheduling policy and blocks; each is made once."""
    made = {}
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:

        def core(stages, *, paced=False, order="fcfs", blocks=24):
            key = stages, paced, order, blocks
            if key not in made:
                made[key] = stack.enter_context(_core(patch, *key))
            return made[key]

        yield core


@contextmanager
def _core(patch, stages, paced, order, blocks):
    from vllm.config import VllmConfig

    from async_pp.bench.simulate import core as simulate
    from async_pp.engine.vllm_seam.scheduler import make_engine_core

    limits = simulate.Limits(6, 48, MAX_LEN, blocks, BLOCK)
    with tempfile.TemporaryDirectory() as folder:
        simulate._write_model(Path(folder), stages, MAX_LEN)
        config = simulate._config(folder, stages, limits)
        config.scheduler_config.policy = order
        config.scheduler_config.async_scheduling = paced
        patch.setattr(
            VllmConfig, "use_v2_model_runner", property(lambda of: bool(of.scheduler_config.async_scheduling))
        )
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
    from async_pp.core.policy import Balanced, FillFirst

    return FillFirst() if name == "fill-first" else Balanced(stages, **({} if name == "balanced" else {name: True}))


class Rig:
    """An engine without ranks, and its clients.

    Attributes:
        story: of each step, when it was sent, the counts left out before it, the tokens of each request.
        left: tokens that each open request still has to get.
    """

    def __init__(self, core, policy, costs=COSTS[0]):
        from async_pp.bench.simulate.ranks import SimulatedRanks
        from async_pp.bench.simulate.stages import StageCost
        from async_pp.engine.stepping import Stepping
        from async_pp.engine.vllm_seam.scheduler import VllmScheduler
        from async_pp.engine.vllm_seam.steering import paced
        from async_pp.ranks.runner import Skipped

        stages = core.vllm_config.parallel_config.pipeline_parallel_size
        is_paced = paced(core.vllm_config)
        rig = self

        class Ranks(SimulatedRanks):
            ring = Ring(stages)

            def execute(self, step, work, **more):
                skipped = 0
                if isinstance(work, Skipped):
                    skipped, work = work.steps, work.work
                assert work.total_num_scheduled_tokens, "an empty step reached the ranks"
                assert is_paced or not skipped
                if is_paced:
                    for _ in range(skipped + 1):
                        self.ring.count()
                    self.ring.step(work)
                rig.story.append((self._loop.time(), skipped, tuple(work.num_scheduled_tokens.items())))
                return super().execute(step, work, **more)

            def _compute(self, work):
                work, known = _with_all_tokens(work), work.scheduled_cached_reqs.all_token_ids
                self._known.update(
                    {
                        request_id: len(known[request_id])
                        for request_id in work.scheduled_cached_reqs.resumed_req_ids & known.keys()
                    }
                )
                for request_id in work.preempted_req_ids or ():
                    rig.flying[request_id].clear()  # what is in flight of it is answered before it goes on, or dropped
                load, output = super()._compute(work)
                for request_id, tokens in zip(output.req_ids, output.sampled_token_ids, strict=True):
                    if tokens:
                        rig.flying[request_id].add(self.steps)
                        assert len(rig.flying[request_id]) <= 1 + is_paced, f"{request_id} is in flight too often"
                return load, output

            def _answer(self, step, spans, answer, output):
                for request_id in output.req_ids:
                    rig.flying[request_id].discard(step)
                super()._answer(step, spans, answer, output)

            def release(self, step, grammar):
                pass  # the step that it waited for was answered before it

        self.core = core
        self.story, self.flying, self.left, self.events = [], defaultdict(set), {}, {}
        self.loop = asyncio.get_running_loop()
        self.ranks = Ranks(
            [StageCost(*costs)] * stages, hop_s=0.0002, host_s=0.0001, on_span=lambda *s: self.stepping.span(*s)
        )
        self.scheduler = VllmScheduler(
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
        from vllm import SamplingParams
        from vllm.sampling_params import StructuredOutputsParams
        from vllm.v1.engine import EngineCoreRequest

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
        for event in list(self.events.values()):
            await event.wait()


def _with_all_tokens(work):
    """The step as the simulated ranks want it: the prompt of a resumed request is all that it has."""
    new = [
        dataclasses.replace(new, prompt_token_ids=new.prefill_token_ids or new.prompt_token_ids)
        for new in work.scheduled_new_reqs
    ]
    return dataclasses.replace(work, scheduled_new_reqs=new)


def run(core, policy, scenario, costs=COSTS[0]):
    """Run a scenario, a coroutine function of the rig. Returns the rig; nothing is left in the scheduler."""

    async def main():
        rig = Rig(core, policy, costs)
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
        core.scheduler.set_pause_state(_unpaused())
        core.abort_requests(list(core.scheduler.requests))


def _unpaused():
    from vllm.v1.core.sched.interface import PauseState

    return PauseState.UNPAUSED


def random_load(seed, *, preempts):
    """A scenario: arrivals in bursts and trickles, aborts, grammars, pauses; `preempts`: caches are reset too."""

    async def scenario(rig):
        from vllm.v1.core.sched.interface import PauseState

        rng = random.Random(seed)
        for number in range(40):
            tokens_in = rng.choice((1, 2, 7, 30, 50))
            tokens_out = rng.randint(1, min(24, MAX_LEN - tokens_in))
            rig.add(
                str(number), tokens_in, tokens_out,
                priority=rng.randint(0, 2),
                compiles_s=rng.choice((0.0, 0.05, 0.5)) if rng.random() < 0.2 else None,
            )  # fmt: skip
            if rng.random() < 0.2:
                rig.loop.call_later(rng.uniform(0, 0.3), rig.abort, str(number))
            if rng.random() < 0.1:
                rig.core.scheduler.set_pause_state(rng.choice((PauseState.PAUSED_NEW, PauseState.PAUSED_ALL)))
                await asyncio.sleep(rng.uniform(0, 0.2))
                if preempts:
                    rig.core.scheduler.reset_prefix_cache(True)
                rig.core.scheduler.set_pause_state(PauseState.UNPAUSED)
                rig.stepping.wake()
            if rng.random() < 0.4:
                await asyncio.sleep(rng.choice((0.001, 0.02, 0.3)))

    return scenario


KINDS = [
    ("balanced", False),
    ("ahead", False),
    ("shared", False),
    ("fill-first", False),
    ("paced", True),
    ("fill-first", True),
]


@pytest.mark.parametrize("order", ["fcfs", "priority"])
@pytest.mark.parametrize("policy, paced", KINDS)
def test_every_request_ends_the_same_way_each_time(cores, policy, paced, order):
    for seed in range(6):
        stages = 2 + 2 * (seed % 2)
        core = cores(stages, paced=paced, order=order)
        again = [
            run(core, make_policy(policy, stages), random_load(seed, preempts=seed >= 2), COSTS[seed % 3])
            for _ in range(2 if seed == 0 else 1)
        ]
        assert again[0].story == again[-1].story


@pytest.mark.parametrize("policy", ["paced", "fill-first"])
def test_one_request_has_two_steps_in_flight_and_none_is_empty(cores, policy):
    async def alone(rig):
        rig.add("one", 5, 10)

    rig = run(cores(4, paced=True), make_policy(policy, 4), alone)
    assert [skipped for _, skipped, _ in rig.story] == [0, *[3] * 9]


@pytest.mark.parametrize("policy", ["paced", "fill-first"])
def test_a_prompt_that_finds_no_memory_does_not_stop_the_decode_that_holds_it(cores, policy):
    """Only the count keeps the decode back, and the prompt is offered in vain: with nothing in flight nobody asks again."""

    async def two(rig):
        rig.add("first", 32, 24)
        await asyncio.sleep(0.05)
        rig.add("second", 50, 4)

    rig = run(cores(4, paced=True, blocks=18), make_policy(policy, 4), two)
    carried = [{name for name, _ in requests} for _, _, requests in rig.story]
    assert carried == [{"first"}] * 24 + [{"second"}] * (len(carried) - 24)


def test_the_prompt_of_a_request_that_decoded_before_waits_for_its_count_alone(cores):
    from vllm.v1.core.sched.interface import PauseState

    async def forgotten(rig):
        rig.add("one", 45, 15)
        await asyncio.sleep(0.1)
        rig.core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        await rig.stepping.idle()
        rig.core.scheduler.reset_prefix_cache(True)
        rig.core.scheduler.set_pause_state(PauseState.UNPAUSED)
        rig.stepping.wake()

    rig = run(cores(4, paced=True), make_policy("fill-first", 4), forgotten)
    (again,) = (place for place, (_, _, requests) in enumerate(rig.story) if place and requests == (("one", 48),))
    assert rig.story[again + 1][2][0][1] > 1, "its prompt is too long for one step"


class OneAtATime:
    """A caller's own policy: one decode in flight."""

    name = "one at a time"

    def limits(self, view):
        from async_pp.core.policy import Limits

        return Limits(0 if view.flying else len(view.ready[:1]))

    def settled(self, tokens, prompt_tokens, now_s):
        """Nothing is learned."""

    def timed(self, size, stages, round_trip_s, host_s):
        """Nothing is learned."""


def test_a_decode_that_preempts_itself_lets_the_others_go_on(cores):
    """It was left out and goes first, finds no block, and is the youngest: the step is empty with nothing in flight."""

    async def two(rig):
        rig.add("older", 32, 8)
        rig.add("younger", 32, 8)

    run(cores(2, blocks=18), OneAtATime(), two)


def test_pausing_keeps_what_waits_and_lets_the_others_end(cores):
    from vllm.v1.core.sched.interface import PauseState

    async def paused(rig):
        for number in range(12):
            rig.add(str(number), 7, 5)
        await asyncio.sleep(0.001)
        rig.core.scheduler.set_pause_state(PauseState.PAUSED_NEW)
        await asyncio.sleep(5)
        assert len(rig.left) == 6
        rig.core.scheduler.set_pause_state(PauseState.UNPAUSED)
        rig.stepping.wake()

    run(cores(4, paced=True), make_policy("paced", 4), paused)
