"""Rank sets are lost and others follow: every request ends as if nothing had happened, or once with a typed error.

What is asked and expected is the matrix of test_same_tokens.py: samples with seeds, stop strings, log probabilities, grammars.
"""

import asyncio
import gc
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from async_pp.core.recovery import Intensity
from async_pp.errors import CallbackFailed, EngineClosed, EngineFailed, RankError, RankLost, RequestLost
from tests.vllm.adapters import NAMES
from tests.vllm.cases import BASE, COMMON, text
from tests.vllm.drive import differences, run_case
from tests.vllm.engines import engine, tiny, tokens
from tests.vllm.faulty_worker import FAULTY, VERBS
from tests.vllm.test_same_tokens import expected

pytestmark = pytest.mark.timeout(180)

MANY = Intensity(most=100)
PP2 = {"pipeline_parallel_size": 2}


def pids(running: Any) -> list[int]:
    """Return the process ids of the ranks."""
    alive = running._epoch.ranks._supervisor._alive
    return [alive[rank].pid for rank in sorted(alive)]


def kill(running: Any, rank: int) -> None:
    """Kill a rank as the kernel does when memory is short."""
    os.kill(pids(running)[rank], signal.SIGKILL)


def nothing_is_held(running: Any) -> None:
    """Check that neither scheduler nor front end holds anything of a request."""
    scheduler = running._epoch.scheduler.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    assert not scheduler.requests and not running.output_processor.request_states
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1  # vLLM keeps one to itself


class Tokens:
    """Counts the tokens that an engine's streams are told, from before its start, and calls back at one of them."""

    def __init__(self, starting: Any) -> None:
        self._count = 0
        self._at: list[tuple[int, Callable[[], None]]] = []
        self._emit = starting._streams.emit
        starting._streams.emit = self._counted

    def after(self, more: int, call: Callable[[], None]) -> None:
        """Call when so many more have come."""
        self._at.append((self._count + more, call))

    def _counted(self, outputs: Any) -> None:
        self._emit(outputs)
        self._count += sum(len(one.new_token_ids) for told in outputs for one in told.outputs)
        due = [call for at, call in self._at if at <= self._count]
        self._at = [(at, call) for at, call in self._at if at > self._count]
        for call in due:
            call()


async def everything(running: Any, scratch: Path) -> list[str]:
    """Run every case of the matrix at once; return the differences."""
    results = await asyncio.gather(*(run_case(running, case, tiny(), scratch) for case in BASE.cases))
    want = expected(BASE, tiny())
    return [
        line
        for case, (waves, facts) in zip(BASE.cases, results, strict=True)
        for line in differences(case, waves, want[case.name], facts)
    ]


def called(of: Any, method: str, times: int = 1) -> asyncio.Event:
    """Return an event that is set when a method of an object has been called so often from now on."""
    happened, whole, left = asyncio.Event(), getattr(of, method), [times]

    def call(*args: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            setattr(of, method, whole)
            happened.set()
        return whole(*args)

    setattr(of, method, call)
    return happened


def before(of: Any, method: str, act: Callable[[], None]) -> None:
    """Act before the next call of a method of an object."""
    whole = getattr(of, method)

    def call(*args: Any, **more: Any) -> Any:
        setattr(of, method, whole)
        act()
        return whole(*args, **more)

    setattr(of, method, call)


async def lost(running: Any, rank: int) -> None:
    """Kill a rank, and wait until the loss was noticed."""
    noticed = called(running.engine_core, "suspend")
    kill(running, rank)
    await noticed.wait()
    assert running.state == "restarting"


async def test_every_request_goes_on_from_the_tokens_it_has(tmp_path: Path) -> None:
    told: list[tuple[int | None, int]] = []
    raised: list[Any] = []

    def lost_ranks(error: Any, going_on: int, given_up: int) -> None:
        told.append((error.rank, given_up))
        raise ZeroDivisionError("of the host")

    def phase(name: str, rank: int | None, seconds: float) -> None:
        raise ValueError(f"of the host: {name}")

    asyncio.get_running_loop().set_exception_handler(lambda loop, context: raised.append(context["exception"]))
    options = {"restarts": MANY, "on_lost": lost_ranks, "on_phase": phase}
    starting = engine(options=options, **PP2, **BASE.engine_args)
    count = Tokens(starting)
    async with starting as running:
        for rank in (1, 0):
            count.after(150, lambda rank=rank: kill(running, rank))
            assert await everything(running, tmp_path) == []
            assert running.state == "serving" and not running.errored
            nothing_is_held(running)
        assert running.losses == 2 and running._epoch.number == 2
    assert told == [(1, 0), (0, 0)]
    assert all(isinstance(one, CallbackFailed) for one in raised), raised
    phases = [str(one.__cause__).rpartition(" ")[2] for one in raised if isinstance(one.__cause__, ValueError)]
    assert phases.count("ready") == 1 and phases.count("restart") == 2 and phases.count("device") == 6
    assert len(raised) == len(phases) + 2, "what a callback raises is told as its own and harms nobody"


async def test_what_comes_while_ranks_are_restarted_waits() -> None:
    """Requests, aborts, utilities, a pause; and an idle engine notices a death as well."""
    async with engine(**PP2) as running:
        plain = await tokens(running, "plain", 40)
        await lost(running, 0)
        both = called(running.engine_core, "add_request_async", 2)
        held = asyncio.create_task(tokens(running, "held", 40))
        given_up = asyncio.create_task(tokens(running, "given up", 40))
        asked = asyncio.create_task(running.collective_rpc("get_supported_tasks"))
        paused = asyncio.create_task(running.pause_generation(mode="keep"))
        await both.wait()
        given_up.cancel()
        assert await asked == [("generate",)] * 2
        await paused
        assert running.state == "serving" and await running.is_paused() and not held.done()
        await lost(running, 1)  # which a pause outlives
        assert await running.is_paused()
        await running.resume_generation()
        assert await held == plain
        with pytest.raises(asyncio.CancelledError):
            await given_up
        nothing_is_held(running)


@pytest.mark.slow
async def test_a_utility_that_was_under_way_fails_and_adapters_come_back(tmp_path: Path) -> None:
    from tests.vllm.drive import lora_request

    async with engine(**PP2, enable_lora=True, max_lora_rank=8) as running:
        adapter = lora_request(next(iter(NAMES)), tiny(), tmp_path)
        assert await running.add_lora(adapter)
        bent = await tokens(running, "bent", lora_request=adapter)
        with pytest.raises(EngineFailed, match="rank 1 ended"):
            await running.collective_rpc(_die_on_rank_1)
        assert await running.list_loras() == {adapter.lora_int_id}
        assert await tokens(running, "bent again", lora_request=adapter) == bent


def _die_on_rank_1(worker: Any) -> None:
    if worker.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


async def test_a_request_that_always_kills_its_rank_fails_alone() -> None:
    async with engine(**FAULTY, **PP2) as running:
        plain = [await tokens(running, f"plain {i}", 40, text(i, 4)) for i in range(6)]
        others = [asyncio.create_task(tokens(running, f"other {i}", 40, text(i, 4))) for i in range(6)]
        marked = {"prompt_token_ids": [VERBS["die"], 1, 5, 6]}
        with pytest.raises(RequestLost, match="poison.*SIGKILL") as caught:
            await tokens(running, "poison", prompt=marked)
        assert caught.value.poison and caught.value.http_status == 500
        assert isinstance(caught.value.__cause__, RankLost)
        assert [await other for other in others] == plain
        assert running.losses == 2
        nothing_is_held(running)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
async def test_with_fail_the_open_requests_end_and_the_engine_goes_on(rank: int) -> None:
    starting = engine(options={"on_rank_loss": "fail"}, **PP2)
    count = Tokens(starting)
    async with starting as running:
        plain = await tokens(running, "plain", 60)
        count.after(50, lambda: kill(running, rank))
        ends = await asyncio.gather(*(tokens(running, f"r{i}", 60) for i in range(4)), return_exceptions=True)
        for end in ends:
            assert isinstance(end, RequestLost) and end.http_status == 503 and f"rank {rank} ended" in str(end)
            assert not end.poison
        assert await tokens(running, "after", 60) == plain
        nothing_is_held(running)


async def test_with_exit_the_engine_ends() -> None:
    async with engine(options={"on_rank_loss": "exit"}, **FAULTY, **PP2) as running:
        with pytest.raises(RankError, match="cannot be computed") as caught:
            await tokens(running, "breaks", prompt={"prompt_token_ids": [VERBS["raise"], 0, 5]})
        assert caught.value.rank == 0 and "faulty_worker.py" in caught.value.traceback
        assert running.failed.is_set() and running.state == "failed"
        with pytest.raises(RankError):
            await tokens(running, "after")


async def test_when_no_restart_is_left_every_stream_ends_with_the_error() -> None:
    starting = engine(options={"restarts": Intensity(most=1)}, **PP2)
    count = Tokens(starting)
    async with starting as running:
        for at in (40, 80):
            count.after(at, lambda: kill(running, 0))
        ends = await asyncio.gather(*(tokens(running, f"r{i}", 60) for i in range(4)), return_exceptions=True)
        assert all(isinstance(end, RankLost) and end.epoch == 1 for end in ends), ends
        assert running.failed.is_set() and running.losses == 2


async def test_closing_in_the_middle_of_a_restart_leaves_nothing() -> None:
    from vllm.v1.engine.exceptions import EngineGenerateError

    async with engine(**PP2) as running:
        added = called(running.engine_core, "add_request_async")
        open_one = asyncio.create_task(tokens(running, "open", 400))
        await added.wait()
        await lost(running, 1)
    with pytest.raises(EngineGenerateError) as caught:
        await open_one
    assert isinstance(caught.value.__cause__, EngineClosed)


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["device", "load"])
async def test_a_rank_that_dies_while_it_is_restarted_costs_one_more_restart(phase: str) -> None:
    left = [1]

    def gate(reached: str, rank: int | None, seconds: float) -> None:
        if reached == phase and rank == 0 and starting._epoch.number == 1 and left.pop():
            kill(starting, 0)

    starting = engine(options={"on_phase": gate}, **PP2)
    count = Tokens(starting)
    async with starting as running:
        plain = await tokens(running, "plain", 60)
        count.after(20, lambda: kill(running, 1))
        assert await tokens(running, "twice", 60) == plain
        assert running.losses == 2 and running._epoch.number == 2


@pytest.mark.slow
async def test_the_zygote_is_made_anew_when_it_has_died() -> None:
    async with engine(**PP2) as running:
        plain = await tokens(running, "plain", 40)
        noticed = called(running.engine_core, "suspend")
        os.kill(running._zygote._process.pid, signal.SIGKILL)  # the kernel takes its ranks along
        await noticed.wait()
        assert await tokens(running, "after", 40) == plain


@pytest.mark.slow
async def test_a_frozen_heap_does_not_keep_the_engine_cores_of_former_epochs() -> None:
    """vLLM's server freezes the heap, and its engine core freezes what there is as well, each one its own blocks."""
    async with engine(**PP2) as running:
        gc.freeze()
        try:
            frozen = []
            for name in ("one", "two", "three"):
                await lost(running, 0)
                await tokens(running, name, 4)
                frozen.append(gc.get_freeze_count())
        finally:
            gc.unfreeze()
        blocks = running._epoch.scheduler.scheduler.kv_cache_manager.block_pool.num_gpu_blocks
        assert 0 < frozen[2] < frozen[1] + blocks


GATES = ("idle", "dispatching", "settling", *VERBS)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("stages", [2, 3])
async def test_thirty_two_streams_survive_a_kill_of_each_rank_at_each_gate(stages: int) -> None:
    """Idle, dispatching, computing, replying, settling, in every way; starting and loading are above."""
    arguments = COMMON | FAULTY | {"pipeline_parallel_size": stages}
    async with engine(options={"restarts": MANY, "step_deadline_s": 3.0}, **arguments) as running:
        prompts = [text(i, 3 + i % 7) for i in range(32)]

        async def streams(name: str) -> list[list[int]]:
            return await asyncio.gather(*(tokens(running, f"{name} {i}", 24, p) for i, p in enumerate(prompts)))

        plain = await streams("plain")
        for gate in GATES:
            for rank in range(stages):
                losses = running.losses
                name = f"{gate} {rank}"
                if gate == "idle":
                    await lost(running, rank)
                    assert await streams(name) == plain, name
                elif gate in ("dispatching", "settling"):
                    of, method = (
                        (running._epoch.ranks, "execute")
                        if gate == "dispatching"
                        else (running._epoch.scheduler, "settle")
                    )
                    before(of, method, lambda rank=rank: kill(running, rank))
                    assert await streams(name) == plain, name
                else:
                    others = asyncio.create_task(streams(name))
                    ends = await asyncio.gather(
                        tokens(running, f"fault {name}", 4, {"prompt_token_ids": [VERBS[gate], rank, 9]}),
                        return_exceptions=True,
                    )
                    assert await others == plain, name
                    # A step whose answer is there before the death was seen is settled: then the request goes on, too.
                    assert gate == "die after" or (isinstance(ends[0], RequestLost) and ends[0].poison), name
                once = gate not in VERBS
                assert losses < running.losses <= losses + (1 if once else 4), name
                nothing_is_held(running)
