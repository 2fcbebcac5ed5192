"""A run of one seed: engine, clients and faults on the virtual clock, and what must be true at every moment of it."""

import asyncio
import contextlib
import random
from dataclasses import dataclass
from typing import Any

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.exceptions import EngineGenerateError

from async_pp.bench.virtual import Deadlock
from async_pp.errors import EngineClosed, EngineFailed, RequestLost
from tests.sim.engine import SimEngine
from tests.sim.loop import ChaosLoop
from tests.sim.ranks import dead_ends, who
from tests.sim.scenario import FAULTS_END_S, Asked, Fault, Scenario, draw
from tests.sim.scheduler import GRAMMAR, next_token
from tests.sim.story import Broken, Story

BOUND_S = 400.0
"""Virtual seconds after the last fault within which everything ends: several of the longest deadlines."""


@dataclass
class Result:
    """What came of a seed.

    Attributes:
        story: all of it, a line for each event.
        broken: what must not have happened, or None.
        ends: how each request ended.
        losses: rank sets lost.
    """

    seed: int
    story: str
    broken: str | None
    ends: dict[str, str]
    losses: int
    steps: int


def run(seed: int, scenario: Scenario | None = None) -> Result:
    """Run a seed (or a scenario of one's own)."""
    world = World(scenario or draw(seed))
    story = world.story
    try:
        with asyncio.Runner(loop_factory=world.make_loop) as runner:
            runner.run(world.run())
    except KeyboardInterrupt:
        if story.broken is None:
            raise
    except Deadlock as error:
        _note(story, f"deadlock: {error}")
    except Exception as error:  # noqa: BLE001 - whatever it is, it must not happen
        _note(story, f"{type(error).__name__}: {error}")
    return Result(seed, "\n".join(story.lines), story.broken, world.ends, len(world.engine.losses_seen), world.steps)


def _note(story: Story, what: str) -> None:
    if story.broken is None:
        story.broken = what
        story.tell(f"BROKEN: {what}")


class World:
    """One run."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.story = Story()
        self.ends: dict[str, str] = {}
        self._dice = random.Random(scenario.seed + 1_000_003)
        self.engine: Any = None
        self._clients: dict[str, asyncio.Task[None]] = {}
        self._closed = False

    @property
    def steps(self) -> int:
        return sum(" settle " in line for line in self.story.lines)

    def make_loop(self) -> ChaosLoop:
        scenario = self.scenario
        dice = random.Random(scenario.seed + 2_000_003) if scenario.put_off else None
        loop = self._loop = ChaosLoop(dice, scenario.put_off)
        self.story.now = loop.time
        loop.set_exception_handler(self._unseen)
        return loop

    def _unseen(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        _note(self.story, f"nobody saw: {context.get('message')}: {type(error).__name__}: {error}")

    # -- the run -------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        scenario, story = self.scenario, self.story
        whole = random.Random(scenario.seed + 3_000_003)
        self.engine = engine = SimEngine(scenario, story, lambda: whole.random() < scenario.all_share)
        started = False
        bound = self._loop.call_later(FAULTS_END_S + BOUND_S, self._overdue)
        try:
            async with engine:
                started = True
                self._loop.after_tick = self._check
                await self._live()
        except EngineFailed as error:
            if started:
                raise
            story.tell(f"did not start: {error}")
        bound.cancel()
        self._loop.after_tick = _nothing
        await self._after()

    def _overdue(self) -> None:
        self._loop.after_tick = _nothing
        open_ones = sorted(name for name, task in self._clients.items() if not task.done())
        self.story.broken = f"{BOUND_S:g} s after the last fault these have not ended: {' '.join(open_ones)}"
        self.story.tell(f"BROKEN: {self.story.broken}")
        raise KeyboardInterrupt  # the one error that a loop lets out

    async def _live(self) -> None:
        loop, scenario = self._loop, self.scenario
        faults = loop.create_task(self._faults(), name="faults")
        for asked in scenario.asked:
            task = loop.create_task(self._client(asked), name=f"client {asked.name}")
            self._clients[asked.name] = task
        closing = loop.create_task(self._close(), name="closing") if scenario.close_s is not None else None
        waited = [*self._clients.values(), faults, *([closing] if closing else [])]
        await asyncio.wait(waited, return_when=asyncio.FIRST_EXCEPTION)
        for task in waited:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise error
        self._settled_down()

    async def _close(self) -> None:
        await asyncio.sleep(self.scenario.close_s or 0)
        self._closed = True
        self.story.tell("the engine is closed")
        await self.engine.close()

    # -- clients -------------------------------------------------------------------------------------------------

    async def _client(self, asked: Asked) -> None:
        await asyncio.sleep(asked.arrival_s)
        task = asyncio.current_task()
        assert task is not None
        if asked.cancel_s is not None:
            self._loop.call_later(asked.cancel_s, task.cancel)
        if asked.cancel_ticks is not None:
            self._loop.call_in_ticks(asked.cancel_ticks, task.cancel)
        self.story.tell(f"{asked.name} arrives")
        end = "cancelled"
        try:
            end = await self._stream(asked)
        except asyncio.CancelledError:
            self._gone(asked.name)
        except (EngineFailed, EngineClosed, EngineGenerateError) as error:
            end = self._justified(asked, error)
        finally:
            self.story.require(asked.name not in self.ends, f"{asked.name} ends twice")
            self.ends[asked.name] = end
            self.story.tell(f"{asked.name} ends: {end}")

    async def _stream(self, asked: Asked) -> str:
        require = self.story.require
        right = [*asked.prompt]
        for _ in range(asked.tokens):
            right.append(next_token(right))
        right = right[len(asked.prompt) :]
        params = SamplingParams(
            max_tokens=asked.tokens,
            n=asked.n,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args={GRAMMAR: True} if asked.grammar else None,
        )
        request = EngineCoreRequest(
            request_id=asked.name,
            prompt_token_ids=list(asked.prompt),
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=self._loop.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        got: list[list[int]] = [[] for _ in range(asked.n)]
        finished = False
        async with contextlib.aclosing(self.engine.generate(request, params, asked.name)) as stream:
            async for output in stream:
                require(not finished, f"{asked.name} gets more after its end")
                finished = output.finished
                for one in output.outputs:
                    got[one.index] += one.token_ids
                    told = got[one.index]
                    require(told == right[: len(told)], f"{asked.name} got {told}, right is {right}")
                    self.story.tell(f"{asked.name} has {len(told)}")
                if asked.slow_s:
                    await asyncio.sleep(asked.slow_s)
        require(all(told == right for told in got), f"{asked.name} ended with {got}, right is {right}")
        return "complete"

    def _gone(self, name: str) -> None:
        """A request that was cancelled is nowhere any more."""
        engine = self.engine
        known = [*engine.output_processor.request_states, *engine.engine_core._held]
        if engine.engine_core.carried is not None:
            known += engine.engine_core.carried.requests
        epoch = engine.epoch
        if epoch is not None and engine.engine_core.running:
            known += epoch.scheduler.names
        left = sorted(one for one in known if one.endswith(name))
        self.story.require(not left, f"{name} was cancelled, and {left} are still there")

    def _justified(self, asked: Asked, error: Exception) -> str:
        scenario, require = self.scenario, self.story.require
        cause = error.__cause__ if isinstance(error, EngineGenerateError) else error
        if isinstance(cause, EngineClosed):
            require(self._closed, f"{asked.name} ends with EngineClosed, and nobody closed the engine")
            return "closed"
        require(isinstance(cause, EngineFailed), f"{asked.name} ends with {cause!r}")
        if isinstance(cause, RequestLost):
            if cause.poison:
                return "poison"
            require(scenario.on_loss == "fail", f"{asked.name} is given up: {cause}")
            return "lost"
        require(scenario.on_loss == "exit" or self._exhausted(), f"{asked.name} ends with the engine: {cause}")
        return "died"

    def _exhausted(self) -> bool:
        limit, times = self.scenario.intensity, self.engine.losses_seen
        recent = [at_s for at_s in times if at_s > times[-1] - limit.within_s] if times else []
        return len(recent) > limit.most

    # -- faults --------------------------------------------------------------------------------------------------

    async def _faults(self) -> None:
        for fault in self.scenario.faults:
            await asyncio.sleep(max(0.0, fault.at_s - self._loop.time()))
            self._inflict(fault)
        await asyncio.sleep(max(0.0, FAULTS_END_S - self._loop.time()))
        self.story.tell("faults end")
        for zygote in self.engine.zygotes:
            zygote.start_faults.clear()
            for rank in zygote.ranks:
                self._well(rank)

    def _inflict(self, fault: Fault) -> None:
        engine, story = self.engine, self.story
        number = fault.rank % self.scenario.ranks
        story.harmed = story.harmed or fault.verb != "call"
        story.tell(f"fault: {fault.verb} {fault.kind} rank {number}")
        if fault.verb == "restart fails":
            engine.zygote.start_faults.append((fault.kind, fault.rank))
            return
        if fault.verb == "zygote dies":
            engine.zygote.ended = True
            for rank in engine.zygote.every:
                rank.die("signal SIGKILL")
            return
        if fault.verb == "call":
            self._calls(fault)
            return
        ranks = [rank for rank in engine.zygote.ranks if not rank.ended]
        if not ranks:
            return
        rank = ranks[fault.rank % len(ranks)]
        hub = engine.hubs[max(engine.hubs)]
        frames = 1 + int(4 * fault.amount)
        match fault.verb:
            case "die":
                rank.die("signal SIGKILL")
            case "freeze":
                rank.freeze()
                self._loop.call_later(4 * fault.amount**3, rank.thaw)
            case "slow":
                rank.slow = 1 + 20 * fault.amount
            case "error":
                rank.raises = 1
            case "error on every rank":
                for one in ranks:
                    one.raises = 1
            case "late":
                hub.delay(rank.number, frames)
            case verb:
                getattr(hub, verb)(rank.number, frames)

    def _well(self, rank: Any) -> None:
        rank.slow, rank.raises = 1.0, 0
        rank.thaw()
        hub = self.engine.hubs[rank._boot.epoch]
        for verb in ("delay", "corrupt", "drop", "replay", "reorder"):
            if not rank.ended:
                getattr(hub, verb)(rank.number, 0)

    def _calls(self, fault: Fault) -> None:
        """Somebody uses the engine's utilities, and does not wait for the answer as long as he should."""
        task = self._loop.create_task(self._call(fault.amount), name="call")
        self._clients[f"call {len(self._clients)}"] = task
        if fault.amount > 0.5:
            self._loop.call_in_ticks(int(40 * (fault.amount - 0.5)), task.cancel)

    async def _call(self, amount: float) -> None:
        try:
            async with asyncio.timeout(amount):
                answers = await self.engine.collective_rpc(_Who(), timeout=amount / 10)
            self.story.require(answers == list(range(self.scenario.ranks)), f"a call is answered by {answers}")
            told = "answered"
        except (TimeoutError, EngineFailed, EngineClosed) as error:
            told = type(error).__name__
        except asyncio.CancelledError:
            told = "cancelled"
        self.story.tell(f"call: {told}")

    # -- what must be true ---------------------------------------------------------------------------------------

    def _check(self) -> None:
        """After each turn of the loop."""
        story = self.story
        if story.broken is not None:
            self._loop.after_tick = _nothing
            raise Broken(story.broken)
        epoch = self.engine.epoch
        stepping = None if epoch is None else epoch._stepping
        if stepping is None or stepping._tasks is None:
            return
        scheduler, pipeline = epoch.scheduler, stepping._pipeline
        try:
            pipeline.validate()
        except AssertionError as error:
            story.require(False, f"pipeline: {error}")
        flying = len(pipeline.window)
        if pipeline.cause is None:
            story.require(flying == len(scheduler.flying), "the machine and the scheduler differ in what is in flight")
            slots = stepping._planner._slots.qsize()
            story.require(slots + flying == scheduler.depth, f"{slots} slots and {flying} steps of {scheduler.depth}")
        scheduler.core.blocks.check(scheduler.core.requests)

    def _settled_down(self) -> None:
        """When every request has ended and no fault is in force."""
        engine, require = self.engine, self.story.require
        asked = {one.name for one in self.scenario.asked}
        require(self.ends.keys() == asked, f"no end of {sorted(asked - self.ends.keys())}")
        if engine.state != "serving":
            return
        require(not engine.output_processor.request_states, "the front end remembers requests")
        scheduler = engine.epoch.scheduler
        require(not scheduler.names, f"the scheduler remembers {sorted(scheduler.names)}")
        require(scheduler.core.blocks.free == self.scenario.blocks, "blocks are not free")
        require(not engine.engine_core._held and engine.engine_core.carried is None, "requests are held")

    async def _after(self) -> None:
        """When the engine is closed."""
        engine, require = self.engine, self.story.require
        for _ in range(4):  # what was cancelled ends
            await asyncio.sleep(0)
        left = {task.get_name() for task in asyncio.all_tasks()} - {asyncio.current_task().get_name()}
        require(not left, f"tasks are left: {sorted(left)}")
        ranks = [rank for zygote in engine.zygotes for rank in zygote.every]
        require(not dead_ends(ranks), f"ranks are left: {dead_ends(ranks)}")
        require(not any(folder.exists() for folder in engine.folders), "folders are left")
        if engine.epoch is not None:
            executor = engine.epoch.ranks
            for pending in (executor._steps, executor._calls, executor._hellos):
                require(not pending.open and not pending.tombstones, "something is still awaited")


class _Who:
    """Picklable, and what `worker_call` makes of a function takes a worker: the simulated rank is its own."""

    def __call__(self, worker: Any) -> int:
        return who(worker)


def _nothing() -> None:
    """Nothing to check."""
