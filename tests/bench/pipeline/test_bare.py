"""The bare pipe with real ranks, without vLLM."""

import os
import signal

import pytest

from async_pp.bench import BenchFailed
from async_pp.bench.pipeline.bare import started
from async_pp.bench.pipeline.loads import Arrival, Load
from async_pp.bench.pipeline.oracle import compute
from async_pp.ranks.runner import OnWorker
from async_pp.ranks.sleeping_runner import StageTime

STAGES = [StageTime(0.01), StageTime(0.02)]


async def test_it_does_what_the_formula_computes_but_slower():
    load = Load("", ((Arrival(0.0, 1100, 2), Arrival(0.005, 1, 3), Arrival(0.3, 1, 1)), (Arrival(0.0, 1, 2),)))
    async with started(STAGES) as pipe:
        measured = await pipe.run(load)
    for real, ideal in zip(measured.answered, compute(load, STAGES).answered, strict=True):
        for times, least in zip(real.times_s, ideal.times_s, strict=True):
            assert len(times) == len(least)
            assert all(time >= bound - 0.001 for time, bound in zip(times, least, strict=True))


async def test_a_lost_rank_ends_it_with_an_error():
    async def lose_one():
        async with started(STAGES) as pipe:
            pids = await pipe._executor.call(OnWorker(lambda worker: os.getpid()))
            os.kill(pids[1], signal.SIGKILL)
            await pipe.run(Load("", ((Arrival(0.0, 1100, 100), Arrival(0.0, 1, 100)),)))

    with pytest.raises(BenchFailed, match="the bare pipe ended: rank 1 ended: signal SIGKILL"):
        await lose_one()
