"""The executor with real rank processes that sleep: calls, steps, overlap, losses, ends. No vLLM."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from async_pp.core.gather import Scope
from async_pp.engine.executor import RankExecutor
from async_pp.engine.stepping import Stepping
from async_pp.errors import EngineClosed, RankError, RankLost, StartupError
from async_pp.ranks.runner import OnWorker, flush
from async_pp.ranks.sleeping_runner import Load, StageTime
from async_pp.ranks.spawn import Zygote
from async_pp.wire.frames import Envelope
from tests.engine.fakes import FakeScheduler, a_plan
from tests.engine.rank_sets import Set
from tests.ranks.failing import Fault
from tests.ranks.late import LATE_S, LateRunner

REPORTING = "tests.ranks.reporting:ReportingRunner"


@pytest.fixture
async def ranks(zygote: Zygote) -> AsyncIterator[Set]:
    made = Set(zygote)
    await made.start()
    yield made
    await made.executor.close()


async def test_calls_answer_in_rank_order_and_raise_what_the_rank_raised(ranks: Set) -> None:
    executor = ranks.executor
    assert await executor.call(OnWorker(attrgetter("_rank"))) == [0, 1]
    with pytest.raises(AttributeError) as caught:
        await executor.call(OnWorker(attrgetter("nothing")))
    assert caught.value.__notes__[0].startswith(("on rank 0:", "on rank 1:"))  # whichever came first
    assert await executor.call(OnWorker(lambda worker: worker._rank + 1)) == [1, 2]
    assert not ranks.lost
    assert ("load", 0) in ranks.phases
    assert ("spawn", None) in ranks.phases


async def test_a_call_that_takes_too_long_times_out_and_its_late_answer_is_nobody_elses(ranks: Set) -> None:
    gate = ranks.executor.runtime_dir / "gate"
    os.mkfifo(gate)
    with pytest.raises(TimeoutError):
        await ranks.executor.call(OnWorker(_opener(gate)), timeout_s=0.05)
    later = asyncio.create_task(ranks.executor.call(OnWorker(attrgetter("_rank"))))
    await asyncio.to_thread(_let_through, gate, 2)
    assert await later == [0, 1]
    assert ranks.executor._calls.late == 2
    assert ranks.executor._calls.tombstones == 0


def _opener(gate: Path) -> Callable[[Any], str]:
    return lambda worker: gate.open().read()


def _let_through(gate: Path, ranks: int) -> None:
    writers = [gate.open("w") for _ in range(ranks)]
    for writer in writers:
        writer.close()


async def test_steps_overlap_in_the_pipeline(zygote: Zygote) -> None:
    """The seed's first regression: stage 0 works on the next step while stage 1 works on this one."""
    made = Set(zygote)
    executor = await made.start(StageTime(alpha_s=0.02))
    scheduler = FakeScheduler([a_plan(str(number)) for number in range(6)])
    for plan in scheduler.todo:
        object.__setattr__(plan, "work", Load(1, 1))
    done = asyncio.Event()
    outputs: list[Any] = []

    def emit(told: Any) -> None:
        outputs.extend(told)
        if len(outputs) == 6:
            done.set()

    steps = Stepping(scheduler, executor, depth=2, emit=emit, clock=time.monotonic)
    made.on_span = steps.span
    began = steps.bubbles()
    task = asyncio.create_task(steps.run())
    steps.wake()
    await done.wait()
    task.cancel()
    await asyncio.wait([task])
    first, last = await executor.call(OnWorker(attrgetter("spans")))
    told = steps.bubbles().since(began)
    for stage, spans in zip(told.stages, (first, last), strict=True):
        sampled = 6 * 0.01  # sampling is part of the output stage's time
        assert stage.busy == pytest.approx(sum(end - begin for begin, end in spans), abs=sampled)
        assert stage.fill_drain > 0
    assert sum(told.shares().values()) == pytest.approx(1)
    overlaps = sum(first[step + 1][0] < last[step][1] for step in range(5))
    assert overlaps >= 4, "stage 0 begins a step before stage 1 has ended the former"
    await executor.close()


async def test_only_the_first_rank_of_a_stage_tells_times_and_a_call_brings_all_of_them(zygote: Zygote) -> None:
    made = Set(zygote, ranks=4, ranks_per_stage=2)
    executor = await made.start()
    assert executor.layout.stages == 2
    told: list[tuple[int, int]] = []
    made.on_span = lambda stage, step, began_s, ended_s: told.append((stage, step))
    for step in range(3):
        scope = Scope.OUTPUT if step < 2 else Scope.ALL
        for _, future in executor.execute(step, Load(1, 1), grammar=None, sample="now", scope=scope):
            await future
    assert [span for span in told if span[0] == 1] == [(1, 0), (1, 1), (1, 2)], "with the answers"
    await executor.call(flush)
    assert sorted(told) == [(stage, step) for stage in range(2) for step in range(3)]
    await executor.close()


async def test_all_rank_steps_get_every_answer(zygote: Zygote) -> None:
    made = Set(zygote, runner=REPORTING)
    executor = await made.start()
    futures = executor.execute(0, Load(2, 1), grammar="mask", sample="now", scope=Scope.ALL)
    assert [(rank, await future) for rank, future in futures] == [(0, ("of", (0, "mask"))), (1, (1, "mask"))]
    futures = executor.execute(1, Load(1, 1), grammar="mask", sample="now", scope=Scope.ALL)
    assert [(rank, await future) for rank, future in futures] == [(0, None), (1, (1, "mask"))]
    assert not made.outputs, "it was answered"
    await executor.close()


def messages(executor: RankExecutor) -> list[tuple[int, str]]:
    """Rank and kind of every message that comes from now on."""
    came: list[tuple[int, str]] = []
    take = executor._take

    def noted(rank: int, envelope: Envelope) -> None:
        came.append((rank, type(envelope.message).__name__))
        take(rank, envelope)

    executor._take = noted  # type: ignore[method-assign]
    return came


async def test_a_rank_with_nothing_to_say_says_nothing_and_is_known_to_be_done(zygote: Zygote) -> None:
    made = Set(zygote, ranks=4)
    executor = await made.start(StageTime(0.003))
    came = messages(executor)
    for step in range(40):
        for rank, future in executor.execute(step, Load(1, 1), grammar=None, sample="now", scope=Scope.ALL):
            assert await future == (None if rank < 3 else (3, None))
    answers = [rank for rank, kind in came if kind == "StepReply"]
    assert answers.count(3) == 40 and len(answers) < 60, "40, and a word where a rank was late"
    assert not executor._silence._works
    await executor.close()


@pytest.mark.parametrize("runner", ["LateRunner", "WordlessRunner"])
async def test_a_step_waits_for_the_rank_that_is_done_after_the_output_rank(zygote: Zygote, runner: str) -> None:
    """Also where no word comes: the watch, which would take the rank for hung, looks at the board."""
    made = Set(zygote, runner=f"{LateRunner.__module__}:{runner}", step_deadline_s=0.5)
    executor = await made.start()
    began_s = time.monotonic()
    steps = [executor.execute(step, Load(1, 1), grammar=None, sample="now", scope=Scope.ALL) for step in range(3)]
    for number, step in enumerate(steps, start=1):
        for _, future in step:
            await future
        assert time.monotonic() - began_s >= number * LATE_S
    assert not executor._silence._works and not made.lost
    await executor.close()


async def test_a_rank_that_raises_once_it_has_handed_over_is_not_taken_for_silent(zygote: Zygote) -> None:
    made = Set(zygote, runner="tests.ranks.failing:FailingRunner")
    executor = await made.start()
    fault = Fault(1, 1, 0, "report")
    answers = dict(executor.execute(0, fault, grammar=None, sample="now", scope=Scope.ALL))
    await asyncio.wait(answers.values())
    assert isinstance(answers[0].exception(), RankError)
    await executor.close()


async def test_connectors_of_ranks_that_do_not_answer_report_only_what_they_have(zygote: Zygote) -> None:
    made = Set(zygote, runner=REPORTING)
    executor = await made.start()
    for step, sequences in enumerate((1, 2, 1, 3)):
        ((_, future),) = executor.execute(step, Load(sequences, 1), grammar=step, sample="now", scope=Scope.OUTPUT)
        assert await future == (1, step)
    await executor.call(flush)
    assert made.outputs == [(0, ("of", (0, 1))), (0, ("of", (0, 3)))]
    await executor.close()


async def test_connectors_work_without_a_step_and_one_that_raises_ends_the_epoch(zygote: Zygote) -> None:
    made = Set(zygote, runner=REPORTING)
    executor = await made.start()
    answers = [await future for _, future in executor.attend("begin")]
    assert answers == [(0, "begin"), (1, "begin")]
    assert [await future for _, future in executor.attend("silence on 0")] == [None, (1, "silence on 0")]
    assert not executor._attends and not executor._calls.open
    futures = executor.attend("raise on 1")
    for _, future in futures:
        await asyncio.wait([future])
    (error,) = made.lost
    assert isinstance(error, RankError) and error.rank == 1 and "the connector is broken" in error.traceback
    assert isinstance(futures[1][1].exception(), RankError)
    await executor.close()


async def test_sampling_that_was_deferred_follows_its_word(ranks: Set) -> None:
    ((_, future),) = ranks.executor.execute(1, Load(1, 1), grammar=None, sample="later", scope=Scope.OUTPUT)
    ranks.executor.release(1, "late mask")
    assert await future == (1, "late mask")


async def test_cancelling_a_waiter_does_not_cancel_the_step(ranks: Set) -> None:
    ((_, given_up),) = ranks.executor.execute(0, Load(1, 1), grammar=None, sample="now", scope=Scope.OUTPUT)
    given_up.cancel()
    ((_, future),) = ranks.executor.execute(1, Load(1, 1), grammar="next", sample="now", scope=Scope.OUTPUT)
    assert await future == (1, "next")
    assert ranks.executor._steps.late == 1


@pytest.mark.parametrize("victim", [0, 1])
async def test_a_killed_rank_ends_every_open_future_with_one_typed_error(ranks: Set, victim: int) -> None:
    gate = ranks.executor.runtime_dir / "gate"
    os.mkfifo(gate)
    calling = asyncio.create_task(ranks.executor.call(OnWorker(_opener(gate))))
    await asyncio.sleep(0)  # the call is sent: both ranks will stand at the gate when the step comes
    ((_, future),) = ranks.executor.execute(0, Load(1, 1), grammar=None, sample="now", scope=Scope.OUTPUT)
    os.kill(ranks.pid(victim), signal.SIGKILL)
    with pytest.raises(RankLost, match=f"rank {victim} ended: signal SIGKILL") as caught:
        await future
    with pytest.raises(RankLost):
        await calling
    assert (caught.value.rank, caught.value.exit_status) == (victim, "signal SIGKILL")
    assert ranks.lost == [caught.value]
    with pytest.raises(RankLost):
        await ranks.executor.call(OnWorker(attrgetter("_rank")))
    with pytest.raises(RankLost):
        ranks.executor.execute(1, Load(1, 1), grammar=None, sample="now", scope=Scope.OUTPUT)


async def test_a_step_that_raises_on_any_rank_ends_the_epoch_with_its_traceback(ranks: Set) -> None:
    ((_, future),) = ranks.executor.execute(0, "no load", grammar=None, sample="now", scope=Scope.OUTPUT)
    with pytest.raises(RankError) as caught:
        await future
    assert (caught.value.rank, caught.value.step) == (0, 0)
    assert "AttributeError" in str(caught.value)
    assert "Traceback" in caught.value.traceback


@pytest.mark.parametrize("runner", ["async_pp.ranks.sleeping_runner:Missing", "no_such_module:Runner"])
async def test_a_rank_that_cannot_start_is_a_startup_error(zygote: Zygote, runner: str) -> None:
    made = Set(zygote, runner=runner)
    with pytest.raises((StartupError, ExceptionGroup)) as caught:
        await made.start()
    error = caught.value
    assert isinstance(error, StartupError)
    assert error.rank is not None
    assert "start-up" in str(error)
    await made.executor.close()


def _raises_on(victim: int, gate: Path) -> Callable[[Any], str]:
    """Raise on one rank; on the others wait for a writer that never comes, as in a collective without that rank."""

    def act(worker: Any) -> str:
        if worker._rank == victim:
            raise ValueError("no memory")
        return gate.open().read()

    return act


async def test_a_rank_that_raises_alone_during_start_ends_it_at_once(zygote: Zygote) -> None:
    made = Set(zygote)
    executor = made.executor
    await executor.start()
    gate = executor.runtime_dir / "gate"
    os.mkfifo(gate)
    with pytest.raises(StartupError, match=r"rank 1 raised ValueError: no memory during start-up \(load\)") as caught:
        await executor.call(OnWorker(_raises_on(1, gate)))
    assert (caught.value.rank, caught.value.phase) == (1, "load")
    assert isinstance(caught.value.__cause__, RankError)
    assert "Traceback" in caught.value.__cause__.traceback
    await executor.close()


async def test_a_call_that_raises_on_one_rank_does_not_wait_for_the_others(ranks: Set) -> None:
    gate = ranks.executor.runtime_dir / "gate"
    os.mkfifo(gate)
    with pytest.raises(ValueError, match="no memory"):
        await ranks.executor.call(OnWorker(_raises_on(0, gate)))
    later = asyncio.create_task(ranks.executor.call(OnWorker(attrgetter("_rank"))))
    await asyncio.to_thread(_let_through, gate, 1)
    assert await later == [0, 1]
    assert not ranks.lost


async def test_closing_ends_open_calls_and_leaves_nothing(zygote: Zygote) -> None:
    made = Set(zygote)
    executor = await made.start()
    folder = executor.runtime_dir
    assert folder.stat().st_mode & 0o777 == 0o700
    gate = folder / "gate"
    os.mkfifo(gate)
    calling = asyncio.create_task(executor.call(OnWorker(_opener(gate))))
    await asyncio.sleep(0)
    await executor.close(0.5)
    with pytest.raises(EngineClosed):
        await calling
    await executor.close()
    assert not folder.exists()
    assert not made.lost


@pytest.mark.parametrize("turn", range(0, 40, 3))
async def test_a_start_cancelled_at_any_turn_leaves_nothing(zygote: Zygote, turn: int) -> None:
    made = Set(zygote)
    task = asyncio.create_task(made.executor.start())
    for _ in range(turn):
        await asyncio.sleep(0)
    task.cancel()
    done, _ = await asyncio.wait([task], timeout=20)
    assert done, "the leak check finds what it left"
    await made.executor.close()
