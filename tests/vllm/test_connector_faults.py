"""Connectors that are late, wrong or fail, on every rank, under vLLM's real scheduler on virtual time.

After each run every request has ended once, every block is free and every count is empty (`FaultRig.verify`); all along
no block is freed or given away while a rank writes or reads it, and nothing goes on before its load is known to be good.
"""

import asyncio
import random
from contextlib import ExitStack
from functools import partial
from itertools import pairwise, product

import pytest

pytest.importorskip("vllm")

from vllm.config import KVTransferConfig

from async_pp.bench import virtual
from async_pp.core.transfers import LEAST_PAUSE_S, MOST_PAUSE_S, PAUSE_SHARE
from async_pp.errors import EngineClosed, RankError, RankLost
from tests.vllm.fault_connector import Fault, Load, Script
from tests.vllm.fault_engine import FaultRig, forget
from tests.vllm.virtual_engine import COSTS, MAX_LEN, engine_core, make_policy, run

pytestmark = pytest.mark.vllm

STAGES = [2, 4]
SLOW = pytest.mark.slow
ROLES = ["kv_producer", "kv_consumer", "kv_both"]


@pytest.fixture(scope="module")
def cores():
    """Engine cores with the connector, by stages and role; each is made once."""
    made = {}
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:

        def core(stages, role="kv_both", *, blocks=24, paced=False):
            key = stages, role, blocks, paced
            if key not in made:
                transfer = KVTransferConfig(
                    kv_connector="FaultConnector",
                    kv_connector_module_path="tests.vllm.fault_connector",
                    kv_role=role,
                )
                made[key] = stack.enter_context(
                    engine_core(patch, stages, blocks=blocks, paced=paced, transfer=transfer)
                )
            return made[key]

        yield core


def play(core, scenario, *, policy="balanced", costs=COSTS[0], **settings):
    stages = core.vllm_config.parallel_config.pipeline_parallel_size
    try:
        return run(core, make_policy(policy, stages), scenario, costs, partial(FaultRig, **settings))
    finally:
        forget(core)


def play_epoch(core, scenario, **settings):
    """A scenario that ends the epoch itself, a coroutine function of the rig and the task that steps. Returns the rig."""

    async def main():
        rig = FaultRig(
            core, make_policy("balanced", core.vllm_config.parallel_config.pipeline_parallel_size), **settings
        )
        await scenario(rig, asyncio.create_task(rig.stepping.run()))
        return rig

    try:
        return virtual.run(main())
    finally:
        forget(core)


FAULTS = {
    "late by calls": Fault(calls=5),
    "late by time": Fault(takes_s=0.3),
    "twice": Fault(twice=True),
    "twice and late": Fault(twice=True, calls=4),
    "blocks at once": Fault(fails="blocks"),
    "blocks at once, then late": Fault(fails="blocks", calls=6),
    "request": Fault(fails="request", calls=2),
    "unknown sent": Fault(unknown="sent"),
    "unknown received": Fault(unknown="received"),
    "unknown failed": Fault(unknown="failed"),
}


def with_fault(where, fault, ranks):
    """The script of a request of which these ranks do this, when they load apart from steps, within one, or send."""
    faults = dict.fromkeys(ranks, fault)
    if fault.fails:  # another is the last to end: before it the failure must not be told
        faults = {0: Fault(takes_s=0.2), 1: Fault(takes_s=0.2)} | faults
    if where == "send":
        return Script(send=faults)
    return Script(loads=[Load(apart=where == "apart", faults=faults)], send={})


def among_others(script, *, abort_s=None, crowd=False):
    """A scenario: one request with this script, aborted or not, and others; `crowd`: more than there is room for."""

    async def scenario(rig):
        rig.add("plain", 7, 20)
        await asyncio.sleep(0.003)
        rig.add("it", 20, 12, script)
        rig.add("good", 13, 6, Script(loads=[Load()], send={}))
        if crowd:
            for number in range(3):
                rig.add(f"crowd {number}", 16, 24, Script(send={}))
        if abort_s is not None:
            await asyncio.sleep(abort_s)
            rig.abort("it")

    return scenario


def policies(fault):
    """The failure policies to try: whether a load that fails is computed."""
    return (True, False) if fault.fails else (True,)


def expected(rig):
    """How each request has to end if it is not aborted."""
    return {name: "ERROR" if name in rig.failed and not rig.recompute else "LENGTH" for name in rig.ends}


@pytest.mark.parametrize("where", ["apart", "within", "send"])
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
@pytest.mark.parametrize("stages", STAGES)
def test_a_request_ends_as_it_should_whatever_some_rank_does(cores, stages, fault, where):
    for ranks, recompute in product(([0], [stages - 1], range(stages)), policies(fault)):
        rig = play(cores(stages), among_others(with_fault(where, fault, ranks)), recompute=recompute)
        assert {name: ends[0] for name, ends in rig.ends.items()} == expected(rig)
        assert ("it" in rig.failed) == (bool(fault.fails) and where != "send")


@pytest.mark.parametrize("where", ["apart", "within", "send"])
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
@pytest.mark.parametrize("stages", STAGES)
def test_aborted_at_any_time(cores, stages, fault, where):
    ends = []
    for number, abort_s in enumerate((0.0, 0.004, 0.012, 0.03, 0.2, 5.0)):  # waits, loads, is in a step, decodes, ended
        script = with_fault(where, fault, [number % stages])
        script.send_aborted = number % 2 == 1
        rig = play(cores(stages), among_others(script, abort_s=abort_s))
        ends += rig.ends.pop("it")
        assert {name: ends[0] for name, ends in rig.ends.items()} == {"plain": "LENGTH", "good": "LENGTH"}
    assert ends[0] == "ABORT" and ends[-1] == "LENGTH"


@pytest.mark.parametrize("where", ["apart", "within", "send"])
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
@pytest.mark.parametrize("stages", STAGES)
def test_preempted(cores, stages, fault, where):
    for recompute in policies(fault):
        rig = play(cores(stages), among_others(with_fault(where, fault, [0]), crowd=True), recompute=recompute)
        assert {name: ends[0] for name, ends in rig.ends.items()} == expected(rig)
        assert rig.ranks.preempted, "there was room for all"


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("delivers", [True, False])
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("stages", [pytest.param(2, marks=SLOW), 4])
def test_roles_delivery_and_failure_policies(cores, stages, role, delivers, recompute):
    async def scenario(rig):
        for number, fault in enumerate(FAULTS.values()):
            for where in ("apart", "within", "send"):
                rig.add(f"{where} {number}", 20, 4, with_fault(where, fault, [number % stages]))
            await asyncio.sleep(0.01)

    rig = play(cores(stages, role), scenario, delivers=delivers, recompute=recompute, lag_s={0: 0.02})
    assert {name: ends[0] for name, ends in rig.ends.items()} == expected(rig)
    assert bool(rig.failed) == (role != "kv_producer")


@pytest.mark.parametrize("where", ["apart", "send"])
@pytest.mark.parametrize("stages", STAGES)
def test_what_a_rank_never_reports_holds_its_own_blocks_and_nothing_else(cores, stages, where):
    async def scenario(rig):
        free = rig.free_blocks
        rig.add("it", 20, 5, with_fault(where, Fault(never=True), [0]))
        for number in range(4):
            rig.add(str(number), 9, 7, Script(loads=[Load()], send={}))
        await asyncio.sleep(30)
        asked = len(rig.ranks.attends)
        steps = len(rig.story)
        await asyncio.sleep(30)
        assert rig.core.scheduler.requests.keys() == {"it"}
        assert rig.ends.keys() - {"it"} == {"0", "1", "2", "3"}
        assert free - rig.free_blocks == len(rig.scheduler._requests.blocks("it"))
        assert rig.scheduler.connectors.open == (("it",) if stages > 1 else ())
        assert len(rig.story) == steps
        assert 0 < len(rig.ranks.attends) - asked <= 30 / MOST_PAUSE_S
        rig.ranks.release_all()

    rig = play(cores(stages), scenario)
    assert rig.ends["it"] == ["LENGTH"]


@pytest.mark.parametrize("ending", ["shutdown", "loss of a rank", "abort, then shutdown"])
@pytest.mark.parametrize("where", ["apart", "send"])
@pytest.mark.parametrize("stages", STAGES)
def test_what_a_rank_never_reports_does_not_outlive_the_epoch(cores, stages, where, ending):
    error = RankLost("gone", rank=0) if ending == "loss of a rank" else EngineClosed("the engine was closed")

    async def scenario(rig, steps):
        rig.add("it", 20, 5, with_fault(where, Fault(never=True), [0]))
        rig.add("plain", 7, 3)
        await rig.events["plain"].wait()
        await asyncio.sleep(1.0)
        if "abort" in ending:
            rig.abort("it")
            await asyncio.sleep(1.0)
        assert rig.core.scheduler.requests.keys() == {"it"} and not steps.done()
        await rig.lost(error, steps)

    rig = play_epoch(cores(stages), scenario)
    end = "LENGTH" if where == "send" else "ABORT" if "abort" in ending else error
    assert rig.ends == {"plain": ["LENGTH"], "it": [end]}


@pytest.mark.parametrize("delivers", [True, False])
@pytest.mark.parametrize("where", ["apart", "within", "send"])
@pytest.mark.parametrize("stages", STAGES)
def test_a_rank_that_raises_ends_the_epoch_and_every_stream_once(cores, stages, where, delivers):
    async def scenario(rig, steps, rank):
        rig.add("plain", 7, 50)
        rig.add("it", 20, 2, with_fault(where, Fault(raises=True), [rank]))
        await asyncio.wait([steps])
        error = steps.exception()
        assert isinstance(error, RankError) and error.rank == rank
        assert "the storage is gone" in str(error) and "in _begin" in error.traceback
        await rig.lost(error, steps)
        assert rig.ends == {"plain": [error], "it": ["LENGTH"] if where == "send" else [error]}

    for rank in range(stages):
        play_epoch(cores(stages), partial(scenario, rank=rank), delivers=delivers)


@pytest.mark.parametrize("stages", STAGES)
def test_sends_end_without_steps_when_nothing_runs(cores, stages):
    """Ranks are asked after pauses that grow, and what is late by them is late by no more than an eighth of the wait."""
    for takes_s in (0.0, 0.004, 0.02, 0.3, 3.0, 30.0):

        async def scenario(rig, takes_s=takes_s):
            rig.add("it", 20, 5, Script(send={0: Fault(takes_s=takes_s)}))
            await rig.events["it"].wait()
            ended_s, steps, asked = rig.loop.time(), len(rig.story), len(rig.ranks.attends)
            await rig.drained.wait()
            late_s = rig.loop.time() - ended_s - takes_s
            answer_s = 3 * rig.ranks._hop_s + LEAST_PAUSE_S
            assert late_s <= min(MOST_PAUSE_S, PAUSE_SHARE * (takes_s + answer_s)) + answer_s
            assert len(rig.story) == steps, "a step carried nothing"
            pauses = [later - sooner for sooner, later in pairwise(rig.ranks.attends[asked:])]
            assert all(later > sooner - 1e-9 for sooner, later in pairwise(pauses[1:]))  # the first told of the send
            assert len(pauses) <= takes_s / MOST_PAUSE_S + 40, "some forty asks make the pauses that long"

        play(cores(stages), scenario)


@pytest.mark.parametrize("stages", STAGES)
def test_ranks_are_not_asked_while_steps_do_it(cores, stages):
    """Also not when asking has begun before the steps: the load begins with no step in flight, and is asked for."""

    async def scenario(rig):
        rig.add("it", 20, 2, Script(loads=[Load(faults={0: Fault(takes_s=0.3)})], send={0: Fault(takes_s=0.2)}))
        await asyncio.sleep(0.1)
        asked = len(rig.ranks.attends)
        assert asked > 5, "nothing else runs"
        rig.add("plain", 3, 60)
        while "it" in rig.core.scheduler.requests:
            await rig.stepping.settled()
        assert rig.loop.time() > 0.5 and rig.left.keys() == {"plain"}
        assert len(rig.ranks.attends) == asked

    play(cores(stages), scenario)


@pytest.mark.parametrize("paced", [False, True])
@pytest.mark.parametrize("stages", STAGES)
def test_ranks_are_sent_nothing_for_prompts_that_find_no_room(cores, stages, paced):
    """A prompt is tried again when others have left room, not with every step: each try must be sent to connectors."""

    async def scenario(rig):
        for number in range(12):
            rig.add(str(number), 30, 20, Script(send={}))

    rig = play(cores(stages, paced=paced), scenario, policy="paced" if paced else "balanced")
    assert len(rig.ranks.attends) <= 3 * 12 < len(rig.story) / 5


@pytest.mark.parametrize("stages", STAGES)
def test_a_connector_that_does_not_know_is_asked_again_while_steps_fly(cores, stages):
    async def scenario(rig):
        rig.add("plain", 3, 60)
        rig.add("it", 20, 5, Script(unknowing=6, loads=[Load()], send={}))
        await rig.events["it"].wait()
        assert rig.left["plain"] > 30

    play(cores(stages), scenario)


def random_load(seed, paced):
    """A scenario with all of it, and settings for it; `paced`: vLLM schedules asynchronously."""
    rng = random.Random(seed)

    def fault(last):
        return Fault(
            calls=rng.choice((0, 0, 1, 3, 9)),
            takes_s=rng.choice((0.0, 0.0, 0.0, 0.1, 0.4)),
            twice=last and rng.random() < 0.1,  # it would be taken for the end of the next load
            fails=rng.choice(("", "", "", "blocks", "request")),
            unknown=rng.choice(("",) * 9 + ("sent", "received", "failed")),
        )

    def faults(stages, last):
        return {rank: fault(last) for rank in range(stages) if rng.random() < 0.4}

    def script(stages):
        loads = rng.choice((0, 1, 1, 2, 3))
        return Script(
            unknowing=rng.choice((0, 0, 0, 1, 5)),
            loads=[
                Load(rng.choice((4, 8, 20, 64)), rng.random() < 0.6, faults(stages, number == loads - 1))
                for number in range(loads)
            ],
            send=faults(stages, True) if rng.random() < 0.5 else None,
            send_aborted=rng.random() < 0.5,
        )

    async def scenario(rig):
        stages = rig.ranks.layout.stages
        for number in range(12):
            tokens_in = rng.choice((1, 7, 20, 33, 50))
            tokens_out = rng.randint(1, min(20, MAX_LEN - tokens_in))
            rig.add(str(number), tokens_in, tokens_out, script(stages))
            if rng.random() < 0.25:
                rig.loop.call_later(rng.uniform(0, 0.4), rig.abort, str(number))
            if rng.random() < 0.4:
                await asyncio.sleep(rng.choice((0.001, 0.02, 0.3)))

    settings = {
        "delivers": rng.random() < 0.5,
        # vLLM's asynchronous scheduler does not recover from a load that fails within a step (vllm-project/vllm#45138).
        "recompute": rng.random() < 0.6 and not paced,
        "lag_s": {rank: rng.choice((0.0, 0.003, 0.04)) for rank in range(4)},
        "costs": rng.choice(COSTS),
        "policy": rng.choice(("paced", "fill-first") if paced else ("balanced", "ahead", "shared", "fill-first")),
    }
    return scenario, settings


def play_random(core, seed):
    scenario, settings = random_load(seed, core.vllm_config.scheduler_config.async_scheduling)
    rig = play(core, scenario, **settings)
    assert all(end in ("ABORT", expected(rig)[name]) for name, (end,) in rig.ends.items()), seed
    return rig


@pytest.mark.parametrize("seeds", [range(12), pytest.param(range(12, 300), marks=SLOW)], ids=["few", "many"])
@pytest.mark.parametrize("role", [pytest.param(role, marks=SLOW) for role in ROLES[:2]] + ROLES[2:])
@pytest.mark.parametrize("paced", [False, True])
@pytest.mark.parametrize("stages", STAGES)
def test_random_faults(cores, stages, paced, role, seeds):
    core = cores(stages, role, paced=paced)
    rigs = [play_random(core, seed) for seed in seeds]
    assert any(rig.ranks.preempted for rig in rigs)
    again = play_random(core, seeds[0])
    assert again.story == rigs[0].story and again.ends == rigs[0].ends


@pytest.mark.parametrize("stages, seed", [(2, 135), (4, 22)])
def test_what_is_sent_beside_steps_makes_a_decode_due_where_workers_count_it(cores, stages, seed):
    """With vLLM's async scheduling, and no step in flight that would have the decode looked at again."""
    play_random(cores(stages, paced=True), seed)


def test_a_failure_told_with_a_step_is_not_overtaken_by_what_its_rank_says_next(cores):
    """The step waits for another rank; what was sent beside it is answered meanwhile, and tells of the same load."""
    play_random(cores(2, paced=True), 296)


@pytest.mark.parametrize("stages, seed", [(4, 46), (4, 52), (2, 92)])
def test_a_load_that_failed_as_a_whole_keeps_no_room_reserved(cores, stages, seed):
    """vLLM goes on reserving it, and in a small cache that keeps the request, and all behind it, out for ever."""
    play_random(cores(stages), seed)
