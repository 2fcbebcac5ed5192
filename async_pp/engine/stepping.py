"""One epoch of stepping: the shell that carries out what the pipeline machine decides.

Each answer of a step is a coroutine: it awaits the future of one rank, tells the machine when it comes, and carries out
the effects. Planner and steps live in one TaskGroup, so the failure of any ends all of them, and nothing
runs on unseen.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from async_pp.core.pipeline import Dispatch, Effect, EndEpoch, FreeSlot, Pipeline, Release, Settle, Step
from async_pp.engine.planner import Planner
from async_pp.engine.ports import ExecutorPort, Plan, SchedulerPort
from async_pp.engine.settler import Settler
from async_pp.errors import first_of
from async_pp.wire.messages import SampleMode


class Stepping:
    """Planning, dispatching and settling over one rank set.

    Args:
        scheduler: plans and takes answers.
        executor: the started rank set.
        depth: slots.
        emit: takes what a settle has for the streams.
    """

    def __init__(
        self,
        scheduler: SchedulerPort,
        executor: ExecutorPort,
        *,
        depth: int,
        emit: Callable[[Sequence[Any]], None],
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._pipeline = Pipeline(
            epoch=executor.epoch,
            depth=depth,
            ranks=executor.layout.ranks,
            output_rank=executor.layout.output_rank,
        )
        self._planner = Planner(scheduler, depth, self._plan)
        self._settler = Settler(scheduler, emit)
        self._tasks: asyncio.TaskGroup | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self._settled = asyncio.Event()
        self._clock = asyncio.get_running_loop().time

    def wake(self) -> None:
        """Something may have become plannable."""
        self._planner.wake()

    @property
    def oldest_step(self) -> int | None:
        """Number of the oldest step in flight, or None."""
        oldest = self._pipeline.window.oldest
        return None if oldest is None else oldest.number

    async def idle(self) -> None:
        """Wait until no step is in flight."""
        await self._idle.wait()

    async def settled(self) -> None:
        """Wait until another step has settled, or the epoch has ended."""
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
        except* Exception as group:  # noqa: BLE001 - unpacked, not swallowed
            raise first_of(group) from None

    def lose(self, cause: BaseException) -> tuple[Step, ...]:
        """The epoch is over. Returns the steps that were in flight, oldest first."""
        self._idle.set()
        self._settled.set()
        effects = self._pipeline.lose(cause, self._clock())
        return next((effect.steps for effect in effects if isinstance(effect, EndEpoch)), ())

    def _plan(self, plan: Plan) -> None:
        self._idle.clear()
        self._apply(
            self._pipeline.plan(
                plan.requests, plan, pending_tokens=plan.pending_tokens, scope=plan.scope, now_s=self._clock()
            )
        )

    async def _await(self, step: Step, rank: int, answer: asyncio.Future[Any]) -> None:
        self._apply(self._pipeline.answer(step.number, rank, await answer, self._clock()))

    def _apply(self, effects: list[Effect]) -> None:
        # A settle has effects of its own, among them the next settle: a queue instead of recursion.
        queue = list(effects)
        while queue:
            match queue.pop(0):
                case Dispatch(step=step, deferred=deferred):
                    self._dispatch(step, deferred)
                case Settle(step=step):
                    self._settler.settle(step)
                    queue += self._pipeline.settled(step.number, self._clock())
                case Release(step=step):
                    self._executor.release(step.number, self._scheduler.bitmask(step.plan))
                case FreeSlot():
                    self._planner.free_slot()
                    self._settled.set()
                    if self._pipeline.idle:
                        self._idle.set()

    def _dispatch(self, step: Step, deferred: bool) -> None:
        assert self._tasks is not None
        plan: Plan = step.plan
        sample: SampleMode = "none" if not plan.samples else "later" if deferred else "now"
        grammar = self._scheduler.bitmask(plan) if sample == "now" else None
        futures = self._executor.execute(step.number, plan.work, grammar=grammar, sample=sample, scope=plan.scope)
        for rank, answer in futures:  # one coroutine per answer: each is folded the moment it comes
            name = f"async_pp step {step.number} rank {rank}"
            self._tasks.create_task(self._await(step, rank, answer), name=name)
