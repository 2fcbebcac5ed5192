"""Faults reach the process they are meant for, and only if it can do them."""

import asyncio
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from async_pp.bench.survive import faults
from async_pp.bench.survive.faults import Faults

SLEEP = "import signal; print(flush=True); signal.pause()"
LISTEN = f"import signal; signal.signal({int(faults.RAISE)}, lambda *_: None); {SLEEP}"


@pytest.fixture
def child():
    made = []

    def make(code, *argv):
        process = subprocess.Popen([sys.executable, "-c", code, *argv], stdout=subprocess.PIPE)
        made.append(process)
        process.stdout.readline()
        return process

    yield make
    for process in made:
        process.kill()
        process.wait()
        process.stdout.close()


def test_ranks_are_found_by_their_titles(child):
    first, second, other = child(SLEEP, "async_pp rank 0"), child(SLEEP, "async_pp rank 11"), child(SLEEP)
    family = [psutil.Process(process.pid) for process in (other, first, second)]
    assert faults.ranks(family) == {0: first.pid, 11: second.pid}
    second.kill()
    second.wait()
    assert faults.ranks(family) == {0: first.pid}


def test_a_fault_that_needs_a_listener_waits_for_one(child):
    deaf, listening = child(SLEEP), child(LISTEN)
    assert not faults.do("raise", deaf.pid) and not faults.do("garbage", listening.pid)
    assert deaf.poll() is None and listening.poll() is None
    assert faults.do("raise", listening.pid)
    assert faults.do("freeze", deaf.pid)
    assert os.waitid(os.P_PID, deaf.pid, os.WSTOPPED | os.WNOWAIT).si_code == os.CLD_STOPPED
    assert faults.do("die", deaf.pid)
    assert deaf.wait() == -signal.SIGKILL
    assert not faults.do("die", deaf.pid) and not faults.do("raise", deaf.pid)


async def test_the_end_of_a_process_is_seen(child):
    process = child(SLEEP)
    seen = asyncio.create_task(faults.ended(process.pid))
    await asyncio.sleep(0)
    killed_s = time.monotonic()
    process.kill()
    assert 0 <= await seen - killed_s < 5
    process.wait()
    assert await faults.ended(process.pid) >= await seen


async def test_faults_follow_from_the_seed(monkeypatch):
    sent = []
    monkeypatch.setattr(faults, "do", lambda fault, pid: sent.append((fault, pid)) or True)

    async def story(seed):
        sent.clear()
        enough, loop = asyncio.Event(), asyncio.get_running_loop()

        def find():
            if len(killer.done) == 8:
                loop.call_soon_threadsafe(enough.set)
            return {0: 10}

        killer = Faults(("die", "raise"), 2, 0.001, seed, find)
        running = asyncio.create_task(killer.run())
        await enough.wait()
        running.cancel()
        await asyncio.wait([running])
        assert sent[:3] == [(done.fault, 10) for done in killer.done if done.sent][:3]
        assert all(done.sent == (done.rank == 0) for done in killer.done)
        return [(done.fault, done.rank) for done in killer.done[:8]]

    assert await story(3) == await story(3) != await story(4)
