"""Ranks that die, raise, freeze or never start, as real processes: noticed in time, with rank, step and cause."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from operator import methodcaller
from typing import Any

import pytest

from async_pp.core.gather import Scope
from async_pp.engine.failures import RUNNING
from async_pp.engine.launch import StartDeadlines
from async_pp.errors import EngineClosed, RankError, RankHung, RankLost, StartupError
from async_pp.ranks.environment import rank_environment
from async_pp.ranks.runner import OnWorker
from async_pp.ranks.sleeping_runner import Load, StageTime
from async_pp.ranks.spawn import Zygote
from tests.engine.rank_sets import Set
from tests.ranks import failing
from tests.ranks.failing import Fault, On

FAILING = "tests.ranks.failing:FailingRunner"
HELLO = "tests.ranks.hello"
NOTICED_S = 1.0


class Failing(Set):
    """Ranks that fail on demand."""

    def send(self, step: int, work: Load, *, sample: Any = "now") -> asyncio.Future[Any]:
        ((_, answer),) = self.executor.execute(step, work, grammar=None, sample=sample, scope=Scope.OUTPUT)
        return answer


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what another process does where nothing tells of it."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


Make = Callable[..., Awaitable[Failing]]


@pytest.fixture
async def make(zygote: Zygote) -> AsyncIterator[Make]:
    sets = []

    async def started(ranks: int = 2, stage: StageTime = StageTime(), **settings: Any) -> Failing:  # noqa: B008
        sets.append(made := Failing(zygote, ranks, FAILING, **settings))
        await made.start(stage)
        return made

    yield started
    for made in sets:
        await made.executor.close()


@pytest.fixture
async def ranks(make: Make) -> Failing:
    return await make()


# -- raising -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rank, place, sample",
    [
        *((rank, "execute", "now") for rank in (0, 1)),
        *((rank, "sample", sample) for rank in (0, 1) for sample in ("now", "later")),
        (0, "report", "now"),
        (1, "answer", "now"),
    ],
)
async def test_an_exception_anywhere_in_a_step_of_any_rank_is_told_at_once_with_its_traceback(
    ranks: Failing, rank: int, place: str, sample: Any
) -> None:
    await ranks.send(0, Load(1, 1))
    ranks.send(1, Fault(1, 1, rank, place), sample=sample)
    if sample == "later":
        ranks.executor.release(1, None)
    error = await ranks.ends()
    assert isinstance(error, RankError)
    assert (error.rank, error.step) == (rank, 1)
    assert "Traceback" in error.traceback
    assert ("cannot pickle" if place == "answer" else "no luck") in str(error)


@pytest.mark.parametrize("rank", [0, 1])
async def test_an_exception_of_the_connectors_between_steps_is_told_at_once(ranks: Failing, rank: int) -> None:
    ranks.executor.attend(Fault(1, 1, rank, "attend"))
    error = await ranks.ends()
    assert isinstance(error, RankError)
    assert (error.rank, error.step) == (rank, None)
    assert "no luck" in error.traceback


@pytest.mark.parametrize(
    "fails, says",
    [
        (failing.raises_unspeakably, "Unspeakable"),
        (failing.raises_at_length, "the end"),
        (failing.raises_what_cannot_be_encoded, "no file ?.txt"),
        (failing.runs_out_of_memory, "MemoryError"),
        (failing.raises_system_exit, "SystemExit: 3"),
    ],
)
async def test_whatever_is_raised_is_told_within_bounds(ranks: Failing, fails: Callable[[], None], says: str) -> None:
    ranks.send(0, Fault(1, 1, 1, "execute", fails))
    error = await ranks.ends(within_s=5.0)
    assert isinstance(error, RankError)
    assert says in error.traceback
    assert "in execute" in error.traceback or len(error.traceback) > 10_000
    assert len(error.traceback) < 20_000


async def test_garbage_on_the_output_of_a_rank_disturbs_nothing(ranks: Failing) -> None:
    assert await ranks.send(0, Fault(1, 1, 0, "execute", failing.prints_garbage)) == (1, None)
    assert await ranks.send(1, Load(1, 1)) == (1, None)


# -- dying -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("fails, says", [(failing.exits, "exit code 7"), (failing.reads_at_zero, "signal SIGSEGV")])
async def test_a_rank_that_dies_in_a_step_is_lost_with_the_step_that_it_was_in(
    ranks: Failing, rank: int, fails: Callable[[], None], says: str
) -> None:
    for step in range(5):
        ranks.send(step, Load(1, 1))
    ranks.send(5, Fault(1, 1, rank, "execute", fails))
    later = ranks.send(6, Load(1, 1))
    error = await ranks.ends()
    assert isinstance(error, RankLost)
    assert (error.rank, error.step, error.exit_status) == (rank, 5, says)
    with pytest.raises(RankLost):
        await later


async def test_a_rank_that_dies_while_it_has_nothing_to_do_was_in_no_step(ranks: Failing) -> None:
    await ranks.send(0, Load(1, 1))
    await ranks.executor.call(OnWorker(methodcaller("connector_output", None)))
    assert ranks.executor.step_of(0) is None
    os.kill(ranks.pid(0), signal.SIGKILL)
    with pytest.raises(RankLost) as caught:
        await ranks.executor.call(On(1, failing.hangs))
    assert (caught.value.rank, caught.value.step) == (0, None)


async def test_of_a_death_and_the_error_that_it_brings_about_the_death_is_told(ranks: Failing) -> None:
    """The neighbour of a rank that dies may be the first to say so, from whatever step it is in."""
    await ranks.send(0, Load(1, 1))
    ranks.send(1, Fault(1, 1, 1, "execute", failing.hangs))
    ranks.send(2, Fault(1, 1, 0, "execute"))
    await until(lambda: ranks.executor._raised is not None)
    os.kill(ranks.pid(1), signal.SIGKILL)
    error = await ranks.ends()
    assert isinstance(error, RankLost)
    assert (error.rank, error.step) == (1, 1)


@pytest.mark.parametrize("state", ["stopped", "dead"])
async def test_a_death_is_told_at_once_whatever_the_zygote_does(state: str) -> None:
    zygote = Zygote()
    await zygote.start(rank_environment(1), ["async_pp.ranks.main", "tests.ranks.failing"])
    made = Failing(zygote, 1, FAILING)
    await made.start()
    assert zygote._process is not None
    made.send(0, Fault(1, 1, 0, "execute", failing.hangs))
    if state == "dead":
        zygote._process.kill()  # its ranks go with it
    else:
        zygote._process.send_signal(signal.SIGSTOP)
        os.kill(made.pid(0), signal.SIGKILL)
    error = await made.ends(within_s=0.5)
    assert isinstance(error, RankLost)
    assert error.rank == 0
    assert state == "dead" or error.exit_status == "signal SIGKILL"
    await made.executor.close()
    await zygote.close()


# -- freezing ----------------------------------------------------------------------------------------------------

DEADLINE_S = 1.0


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("fails", [failing.stops, failing.hangs])
async def test_a_rank_that_freezes_in_a_step_is_named_at_the_deadline(
    make: Make, rank: int, fails: Callable[[], None]
) -> None:
    made = await make(3, step_deadline_s=DEADLINE_S)
    for step in range(2):
        await made.send(step, Load(1, 1))
    began = time.monotonic()
    made.send(2, Fault(1, 1, rank, "execute", fails))
    made.send(3, Load(1, 1))
    error = await made.ends(within_s=DEADLINE_S + NOTICED_S)
    assert time.monotonic() - began >= DEADLINE_S
    assert isinstance(error, RankHung)
    assert (error.rank, error.step, error.deadline_s) == (rank, 2, DEADLINE_S)
    assert "--step-deadline" in str(error)
    assert ("stopped" in str(error)) == (fails is failing.stops)


@pytest.mark.parametrize("rank", [0, 1, 2])
async def test_a_rank_that_is_frozen_from_outside_is_named_and_what_it_says_afterwards_is_ignored(
    make: Make, rank: int
) -> None:
    made = await make(3, step_deadline_s=DEADLINE_S)
    spans: list[int] = []
    await made.send(0, Load(1, 1))
    await until(lambda: made.executor.step_of(rank) is None)
    pid = made.pid(rank)
    os.kill(pid, signal.SIGSTOP)
    await asyncio.sleep(1.2 * DEADLINE_S)
    assert not made.lost, "nothing was asked of it"
    made.send(1, Load(1, 1))
    error = await made.ends(within_s=DEADLINE_S + NOTICED_S)
    assert isinstance(error, RankHung)
    assert (error.rank, error.step) == (rank, 1)
    made.on_span = lambda stage, step, began_s, ended_s: spans.append(step)
    os.kill(pid, signal.SIGCONT)
    await asyncio.sleep(0.1)
    assert not spans and len(made.lost) == 1
    await made.executor.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_slow_pipeline_in_which_steps_queue_for_longer_than_the_deadline_is_well(make: Make) -> None:
    made = await make(3, StageTime(alpha_s=DEADLINE_S / 4), step_deadline_s=DEADLINE_S)
    answers = [made.send(step, Load(1, 1)) for step in range(6)]
    for answer in answers:
        await answer
    assert not made.lost


@pytest.mark.parametrize("rank", [0, 1])
async def test_connectors_that_hang_are_a_hung_rank(make: Make, rank: int) -> None:
    made = await make(2, step_deadline_s=DEADLINE_S)
    made.executor.attend(Fault(1, 1, rank, "attend", failing.hangs))
    error = await made.ends(within_s=DEADLINE_S + NOTICED_S)
    assert isinstance(error, RankHung)
    assert (error.rank, error.step) == (rank, None)


async def test_a_call_may_take_long_but_one_that_was_given_up_holds_up_nothing_for_ever(make: Make) -> None:
    made = await make(2, step_deadline_s=DEADLINE_S)
    assert await made.executor.call(On(0, failing.sleeps)) == [None, None]
    with pytest.raises(TimeoutError):
        await made.executor.call(On(0, failing.hangs), timeout_s=0.1)
    made.send(0, Load(1, 1))
    error = await made.ends(within_s=DEADLINE_S + NOTICED_S)
    assert isinstance(error, RankHung) and error.step is None


async def test_a_rank_that_is_stopped_in_a_call_is_found(make: Make) -> None:
    made = await make(2, step_deadline_s=DEADLINE_S)
    with pytest.raises(RankHung, match="process is stopped") as caught:
        await made.executor.call(On(1, failing.stops))
    assert caught.value.rank == 1


async def test_rows_are_read_when_the_names_are_gone_and_no_more_when_the_set_is_closed(ranks: Failing) -> None:
    await ranks.send(0, Load(1, 1))
    ranks.executor.forget_names()
    answer = ranks.send(1, Fault(1, 1, 1, "execute", failing.hangs))
    await until(lambda: ranks.executor.step_of(1) == 1)
    await ranks.executor.close(0.1)
    with pytest.raises(EngineClosed):
        await answer
    assert ranks.executor.step_of(1) is None


# -- not starting ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "runner, says",
    [
        ("silent", "rank 1 has not said hello within 1.5 s"),
        ("doubled", "rank 1 said hello twice"),
        ("other_world", "rank 1 was told that there are 7 ranks, not 2"),
        ("other_version", "rank 1 runs async_pp 0.0.0, but the engine"),
        ("old_version", "rank 1 runs async_pp of an unknown version"),
    ],
)
async def test_a_rank_that_says_no_or_a_wrong_hello_ends_the_start(
    zygote: Zygote, monkeypatch: pytest.MonkeyPatch, runner: str, says: str
) -> None:
    made = Set(zygote, start_deadlines=StartDeadlines(hello_s=1.5))
    spec = made.executor._spec
    monkeypatch.setattr(made.executor, "_spec", lambda rank, key: _with_target(spec(rank, key), f"{HELLO}:{runner}"))
    with contextlib.suppress(StartupError):  # the second hello of two may come when all have said their first
        await made.executor.start()
    error = await made.ends(within_s=5.0)
    assert isinstance(error, StartupError)
    assert says in str(error)
    assert error.rank == 1
    await made.executor.close()


def _with_target(spec: Any, target: str) -> Any:
    return replace(spec, target=target) if spec.rank == 1 else spec


async def test_a_zygote_that_does_not_fork_in_time_ends_the_start() -> None:
    zygote = Zygote()
    await zygote.start(rank_environment(1), ["async_pp.ranks.main"])
    assert zygote._process is not None
    zygote._process.send_signal(signal.SIGSTOP)
    made = Set(zygote, start_deadlines=StartDeadlines(zygote_s=0.2))
    with pytest.raises(StartupError, match=r"within 0.2 s during start-up \(spawn\)"):
        await made.executor.start()
    assert not made.executor._runtime_dir.exists()  # type: ignore[union-attr]
    await zygote.close()


@pytest.mark.parametrize("phase", ["load", "kv_cache"])
async def test_a_rank_that_makes_no_progress_in_its_start_ends_it(zygote: Zygote, phase: str) -> None:
    short = {f"{phase}_s": 1.5}
    made = Set(zygote, start_deadlines=StartDeadlines(**short))
    executor = made.executor
    await executor.start()
    if phase == "kv_cache":
        await executor.call(methodcaller("start", str(executor.runtime_dir), StageTime()))
    with pytest.raises(
        StartupError, match=f"rank 1 has made no progress for 1.5 s during start-up .{phase}."
    ) as caught:
        await executor.call(On(1, failing.hangs))
    assert (caught.value.rank, caught.value.phase) == (1, phase)
    assert executor._failures.phase != RUNNING
    await executor.close()
