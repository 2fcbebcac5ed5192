"""One epoch of stepping: the shell that carries out what the pipeline machine decides.

Each answer of a step is a coroutine: it awaits the future of one rank, tells the machine when it comes, and carries out
the effects. Planner and steps live in one TaskGroup, so the failure of any ends all of them, and nothing
runs on unseen.

What connectors report beside the answers reaches the machine in the order in which it came among the answers. While
transfers are under way and no step is in flight, the ranks are asked how far they are, after pauses that grow with the
time waited: connectors offer nothing to wait for.

What happens to a step is also told to the accounting of stage time. What that makes of it is told to the scheduler
behind the plan that a settle makes possible, for which the ranks wait.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from async_pp.core.bubble import Bubbles, StageTime
from async_pp.core.pipeline import Dispatch, Effect, EndEpoch, Fold, FreeSlot, Pipeline, Release, Settle, Step
from async_pp.core.transfers import pause_s
from async_pp.engine.planner import Planner
from async_pp.engine.ports import Attend, ExecutorPort, Plan, SchedulerPort, StepTimes
from async_pp.engine.settler import Settler
from async_pp.errors import first_of
from async_pp.wire.messages import SPANS, SampleMode


@dataclass(slots=True)
class _Hosted:
    """A plan and the time that the loop has spent on it."""

    plan: Plan
    host_s: float


class Stepping:
    """Planning, dispatching and settling over one rank set.

    Args:
        scheduler: plans and takes answers.
        executor: the started rank set.
        depth: slots.
        emit: takes what a settle has for the streams.
        clock: seconds on the clock with which the ranks measure their times, time.monotonic() but in simulations. The
            loop's own may be too coarse (uvloop: milliseconds).
    """

    def __init__(
        self,
        scheduler: SchedulerPort,
        executor: ExecutorPort,
        *,
        depth: int,
        emit: Callable[[Sequence[Any]], None],
        clock: Callable[[], float],
    ) -> None:
        self._clock = clock
        self._scheduler = scheduler
        self._executor = executor
        self._pipeline = Pipeline(
            epoch=executor.epoch,
            depth=depth,
            ranks=executor.layout.ranks,
            output_rank=executor.layout.output_rank,
        )
        # Spans lag behind by up to one message's worth of steps. Beyond two no more are coming.
        self._bubbles = Bubbles(executor.layout.stages, start_s=clock(), most_open=depth + 2 * SPANS)
        self._hosted: dict[int, _Hosted] = {}  # of the steps in flight
        self._asked_s = 0.0  # when the scheduler was asked for the plan that is being dispatched
        self._planner = Planner(scheduler, depth, self._plan, self._attend, self._rest, clock)
        self._settler = Settler(scheduler, emit)
        self._loop = asyncio.get_running_loop()
        self._refused: asyncio.Future[None] = self._loop.create_future()  # what a callback of the loop has raised
        self._attending = 0  # ranks that have not answered what was sent to their connectors
        self._waiting_since_s: float | None = None  # when asking for transfers began
        self._next_ask: asyncio.TimerHandle | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self._settled = asyncio.Event()

    def wake(self) -> None:
        """Something may have become plannable."""
        self._bubbles.enabled(self._clock())
        self._planner.wake()

    def span(self, stage: int, step: int, began_s: float, ended_s: float) -> None:
        """A stage has told when it had the inputs of a step and when it was done with it."""
        self._bubbles.span(stage, step, began_s, ended_s)

    def connector_output(self, rank: int, output: Any) -> None:
        """A rank's connectors have reported something beside the answers.

        It is taken by the loop's next turn, as the answers are by their coroutines: so none overtakes another.
        """
        self._soon(self._report, rank, output)

    def bubbles(self) -> StageTime:
        """What became of the stage time so far: up to now when no step is in flight and every rank has told its times,
        else up to the oldest step of which that cannot be said."""
        return self._bubbles.snapshot(self._clock())

    @property
    def oldest_step(self) -> int | None:
        """Number of the oldest step in flight, or None."""
        oldest = self._pipeline.window.oldest
        return None if oldest is None else oldest.number

    @property
    def settling(self) -> int | None:
        """Number of the step that is being settled, or None. Of a settle that raised it stays."""
        return self._pipeline.settling

    async def idle(self) -> None:
        """Wait until no step is in flight, or the epoch has ended."""
        await self._idle.wait()

    async def settled(self) -> None:
        """Wait until another step has settled, or the epoch has ended."""
        if self._pipeline.cause is None:
            self._settled.clear()
            await self._settled.wait()

    async def run(self) -> None:
        """Step until cancelled.

        Raises:
            EngineFailed: the rank set was lost; or whatever a scheduler or settle raised, which ends the epoch as well.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                tasks.create_task(self._planner.run(), name="async_pp planner")
                tasks.create_task(self._until_refused(), name="async_pp callbacks")
        except* Exception as group:  # noqa: BLE001 - unpacked, not swallowed
            raise first_of(group) from None
        finally:
            self._stop_asking()

    def lose(self, cause: BaseException) -> tuple[Step, ...]:
        """The epoch is over. Returns the steps that were in flight, oldest first."""
        self._idle.set()
        self._settled.set()
        effects = self._pipeline.lose(cause, self._clock())
        return next((effect.steps for effect in effects if isinstance(effect, EndEpoch)), ())

    def _plan(self, plan: Plan, asked_s: float) -> None:
        self._idle.clear()
        self._stop_asking()
        self._asked_s = asked_s
        self._apply(
            self._pipeline.plan(
                plan.requests, plan, pending_tokens=plan.pending_tokens, scope=plan.scope, now_s=self._clock()
            )
        )

    # -- connectors ------------------------------------------------------------------------------------------------

    async def _until_refused(self) -> None:
        await self._refused

    def _soon(self, call: Callable[..., None], *args: Any) -> None:
        """Call in the loop's next turn, behind what is due by then. What it raises ends the epoch."""
        self._loop.call_soon(self._call, call, *args)

    def _call(self, call: Callable[..., None], *args: Any) -> None:
        if self._refused.done():  # cancelled with the epoch's coroutines
            return
        try:
            call(*args)
        except Exception as error:  # noqa: BLE001 - whatever it is, it ends the epoch and not this turn of the loop
            self._refused.set_exception(error)

    def _report(self, rank: int, output: Any) -> None:
        self._apply(self._pipeline.report(rank, output))

    def _attend(self, attend: Attend) -> None:
        assert self._tasks is not None
        answers = self._executor.attend(attend.work)
        self._attending += len(answers)
        for rank, answer in answers:
            self._tasks.create_task(self._await_connectors(rank, answer), name=f"async_pp connectors of rank {rank}")

    async def _await_connectors(self, rank: int, answer: asyncio.Future[Any]) -> None:
        output = await answer
        self._attending -= 1
        if output is None:
            self._rest()
        else:
            self._report(rank, output)

    def _fold(self, rank: int, output: Any) -> None:
        if not self._settler.fold(rank, output):
            self._rest()  # not a reason to plan: connectors with statistics would keep planner and ranks busy
            return
        self._waiting_since_s = None  # something moves: ask soon again
        self._planner.wake()

    def _rest(self) -> None:
        """Nothing could run. See that transfers, if any are under way, are asked for."""
        if not self._pipeline.idle or self._attending or self._next_ask is not None:
            return
        if not self._scheduler.transferring:
            self._waiting_since_s = None
            return
        if self._waiting_since_s is None:
            self._waiting_since_s = self._loop.time()
        self._next_ask = self._loop.call_later(pause_s(self._loop.time() - self._waiting_since_s), self._ask)

    def _ask(self) -> None:
        self._next_ask = None
        self._planner.ask()

    def _stop_asking(self) -> None:
        self._waiting_since_s = None
        if self._next_ask is not None:
            self._next_ask.cancel()
            self._next_ask = None

    # -- steps -----------------------------------------------------------------------------------------------------

    async def _await(self, step: Step, rank: int, answer: asyncio.Future[Any]) -> None:
        value = await answer
        now_s = self._clock()
        self._bubbles.answered(step.number, now_s)
        self._apply(self._pipeline.answer(step.number, rank, value, now_s))

    def _apply(self, effects: list[Effect]) -> None:
        try:
            self._carry_out(list(effects))
        finally:
            self._settler.tell()  # behind the planner, which a free slot has woken

    def _carry_out(self, queue: list[Effect]) -> None:
        # A settle has effects of its own, among them the next settle: a queue instead of recursion.
        while queue:
            match queue.pop(0):
                case Dispatch(step=step, deferred=deferred):
                    self._dispatch(step, deferred)
                case Settle(step=step):
                    queue += self._settle(step)
                case Release(step=step):
                    self._executor.release(step.number, self._scheduler.bitmask(step.plan))
                case Fold(rank=rank, report=report):
                    self._fold(rank, report)
                case FreeSlot():
                    self._planner.free_slot()
                    self._soon(self._tell_times)
                    self._settled.set()
                    if self._pipeline.idle:
                        self._idle.set()

    def _settle(self, step: Step) -> list[Effect]:
        began_s = self._clock()
        self._settler.settle(step)
        now_s = self._clock()
        self._hosted.pop(step.number).host_s += now_s - began_s
        self._bubbles.settled(step.number, now_s)
        return self._pipeline.settled(step.number, now_s)

    def _tell_times(self) -> None:
        for timed in self._bubbles.take():
            hosted: _Hosted = timed.tag
            times = StepTimes(timed.stages, timed.round_trip_s, hosted.host_s)
            self._scheduler.timed(hosted.plan, times)

    def _dispatch(self, step: Step, deferred: bool) -> None:
        assert self._tasks is not None
        plan: Plan = step.plan
        sample: SampleMode = "none" if not plan.samples else "later" if deferred else "now"
        grammar = self._scheduler.bitmask(plan) if sample == "now" else None
        futures = self._executor.execute(step.number, plan.work, grammar=grammar, sample=sample, scope=plan.scope)
        for rank, answer in futures:  # one coroutine per answer: each is folded the moment it comes
            name = f"async_pp step {step.number} rank {rank}"
            self._tasks.create_task(self._await(step, rank, answer), name=name)
        now_s = self._clock()
        hosted = self._hosted[step.number] = _Hosted(plan, now_s - self._asked_s)
        self._bubbles.dispatched(step.number, len(plan.requests), now_s, hosted)
