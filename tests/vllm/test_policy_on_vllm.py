"""Every policy over vLLM's real schedulers, without ranks, on virtual time: random requests, and what once stood still.

A wedge shows as a virtual loop that has nothing left to wait for.
"""

import asyncio
import random
from contextlib import ExitStack

import pytest

pytest.importorskip("vllm")

from tests.vllm.virtual_engine import COSTS, MAX_LEN, engine_core, make_policy, run

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def cores():
    """Engine cores by stages, asynchronous scheduling, vLLM's scheduling policy and blocks; each is made once."""
    made = {}
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:

        def core(stages, *, paced=False, order="fcfs", blocks=24):
            key = stages, paced, order, blocks
            if key not in made:
                made[key] = stack.enter_context(engine_core(patch, stages, paced=paced, order=order, blocks=blocks))
            return made[key]

        yield core


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
