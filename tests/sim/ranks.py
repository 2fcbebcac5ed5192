"""Ranks as tasks on the virtual loop: what `ranks.main` and a runner do, with times that the scenario gives.

They speak the engine's own messages over the memory channel, compute in order, hand hidden states on from stage to
stage, and keep what vLLM's workers keep: the tokens of each request, as far as they were told or sampled them. The
output rank samples from those, never from what the scheduler believes; where the two differ the tokens come out wrong.
"""

import asyncio
import mmap
import os
import signal
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from async_pp import __version__
from async_pp.channel.memory import MemoryEngineChannel
from async_pp.errors import EngineClosed, StartupError
from async_pp.ranks.board import RankRow
from async_pp.ranks.main import Bootstrap, describe
from async_pp.ranks.runner import Restored
from async_pp.ranks.spawn import RankProcess, RankSpec
from async_pp.wire.frames import NO_PAYLOAD, Envelope
from async_pp.wire.messages import (
    SPANS,
    Bye,
    Call,
    CallFailed,
    CallReply,
    Close,
    Execute,
    Hello,
    Phase,
    Sample,
    Spans,
    StepFailed,
    StepReply,
)
from tests.sim.scenario import Scenario
from tests.sim.scheduler import Work, next_token
from tests.sim.story import Story

FORK_S = 0.003
HELLO_S = 0.005
LOAD_S = 0.05

PROMPT_S = 0.5
"""Within this time the engine has acted on an error that was told, or on a frame that it had to refuse."""


class SimError(Exception):
    """What a runner raised."""


class PeerGone(SimError):
    """A collective has found out that somebody is missing."""


class _Dies(Exception):
    """The rank's process ends. Its one argument says how."""


def load(rank: "SimRank") -> str:
    """The call that loads the model."""
    return f"loaded {rank.number}"


def who(rank: "SimRank") -> int:
    """A call that a user makes."""
    return rank.number


class SimProcess(RankProcess):
    """A rank's process as the supervisor sees it."""

    sim: "SimRank"

    def kill(self, signal_number: int = signal.SIGKILL) -> None:
        self.sim.signalled(signal_number)


class Group:
    """What the ranks of an epoch share: hidden states on their way. They come in order and do not say of which step.

    Args:
        ranks_per_stage: how many hand on each.
        notice_s: when those who wait for a dead rank find out; None: never.
    """

    def __init__(self, ranks_per_stage: int, notice_s: float | None) -> None:
        self.broken = False
        self._ranks_per_stage = ranks_per_stage
        self._notice_s = notice_s
        self._steps: dict[tuple[int, int], list[int]] = {}
        self._ready: dict[tuple[int, int], asyncio.Event] = {}

    async def hidden(self, stage: int, place: int) -> set[int]:
        """Wait for what a stage hands on at a place of the order. Returns the step that it is of."""
        await self._event(stage, place).wait()
        steps = self._steps.get((stage, place), [])
        if len(steps) < self._ranks_per_stage:
            raise PeerGone("connection closed by peer")
        return set(steps)

    def hand_on(self, stage: int, place: int, step: int) -> None:
        steps = self._steps.setdefault((stage, place), [])
        steps.append(step)
        if len(steps) == self._ranks_per_stage:
            self._event(stage, place).set()

    def lost(self) -> None:
        """A rank has died."""
        if self._notice_s is not None and not self.broken:
            asyncio.get_running_loop().call_later(self._notice_s, self._break)

    def _break(self) -> None:
        self.broken = True
        for event in self._ready.values():
            event.set()

    def _event(self, stage: int, place: int) -> asyncio.Event:
        event = self._ready.get((stage, place))
        if event is None:
            event = self._ready[stage, place] = asyncio.Event()
            if self.broken:
                event.set()
        return event


class SimRank:
    """One rank.

    Args:
        boot: what the engine has handed over.
        hub: the channel.
        group: what it shares with the others.
        start_fault: what goes wrong before it serves.
        is_over: whether the engine takes an epoch for lost.

    Attributes:
        slow: how many times longer everything takes.
        raises: steps that will raise.
    """

    def __init__(
        self,
        boot: Bootstrap,
        hub: MemoryEngineChannel,
        group: Group,
        scenario: Scenario,
        story: Story,
        start_fault: str,
        is_over: Callable[[int], bool],
    ) -> None:
        self.number = boot.rank
        self.worker = self
        self.stage = boot.rank // boot.ranks_per_stage
        self.slow = 1.0
        self.raises = 0
        self.ended = False
        self._boot = boot
        self._hub = hub
        self._group = group
        self._scenario = scenario
        self._story = story
        self._start_fault = start_fault
        self._is_over = is_over
        self._is_output = boot.rank == boot.output_rank
        self._arrived = asyncio.Event()
        self._end = hub.rank_end(boot.rank, self._arrived.set)
        self._running = asyncio.Event()
        self._running.set()
        self._held: deque[Envelope] = deque()
        self._samples: dict[int, Envelope] = {}
        self._failed = False
        self._steps = 0
        self._taken = 0  # hand-overs
        self._given = 0
        self._spans: list[tuple[int, float, float]] = []
        self._spans_per_message = 1
        self._known: dict[str, list[int]] = {}
        self._poison = {asked.name: asked.poison for asked in scenario.asked if asked.poison is not None}
        loop = asyncio.get_running_loop()
        self._loop = loop
        self.process = SimProcess(boot.rank, 0, os.eventfd(0, os.EFD_NONBLOCK), loop.create_future(), -1)
        self.process.sim = self
        with Path(boot.board).open("r+b") as board:
            self._memory = mmap.mmap(board.fileno(), 0)
        self._row = RankRow(self._memory, boot.rank, loop.time)
        self._task = loop.create_task(self._run(), name=f"rank {boot.rank} of epoch {boot.epoch}")

    # -- from outside --------------------------------------------------------------------------------------------

    def die(self, how: str) -> None:
        """The process ends now."""
        if self.ended:
            return
        self.ended = True
        self._story.tell(f"e{self._boot.epoch} rank {self.number} ends: {how}")
        self._hub.die(self.number)
        self._group.lost()
        self._task.cancel()
        for view in (self._row._times, self._row._numbers):
            view.release()
        self._memory.close()
        if not self.process.exit_status.done():
            self.process.exit_status.set_result(how)
        if self.process.sentinel >= 0:
            os.eventfd_write(self.process.sentinel, 1)

    def signalled(self, number: int) -> None:
        if number == signal.SIGKILL or self._running.is_set():
            self.die(f"signal {signal.Signals(number).name}")

    def freeze(self) -> None:
        if not self.ended:
            self._running.clear()
            self._hub.freeze(self.number)

    def thaw(self) -> None:
        self._running.set()
        if not self.ended:
            self._hub.thaw(self.number)

    @property
    def stopped(self) -> bool:
        return not self._running.is_set()

    # -- the process ---------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            await self._serve()
        except (_Dies, EngineClosed) as end:
            self.die(str(end) if isinstance(end, _Dies) else "exit code 0")

    async def _serve(self) -> None:
        await self._pass(HELLO_S)
        if self._start_fault == "before hello":
            raise _Dies("exit code 1")
        if self._start_fault == "no hello":
            await self._hang()
        self._say(Hello(pid=self.process.pid, ranks=self._boot.ranks, version=__version__))
        while True:
            envelope = self._held.popleft() if self._held else await self._receive()
            match envelope.message:
                case Execute() as message:
                    self._row.enter()
                    self._steps += 1
                    span = None if self._failed else await self._execute(message, envelope)
                    self._row.leave()
                    if span is not None and self._row.told_by(self._boot.output_rank) >= self._steps:
                        self._reply(StepReply(*span), None)
                    elif span is not None:
                        self._note(span)
                case Call(call=call):
                    self._row.enter()
                    await self._call(call, envelope)
                    self._row.leave()
                case Close():
                    self._say(Bye(reason="closed"))
                    raise _Dies("exit code 0")
                case Sample() if self._failed:
                    pass
                case other:
                    self._story.require(False, f"the engine sent {type(other).__name__} out of turn")

    async def _execute(self, message: Execute, envelope: Envelope) -> tuple[int, float, float] | None:
        step = message.step
        try:
            work, grammar = envelope.load()
            work = self._learn(work)
            if self.stage:
                of = await self._group.hidden(self.stage - 1, self._taken)
                self._taken += 1
                self._story.require(of == {step}, f"step {step} is computed from the hidden states of {of}")
            began_s = self._loop.time()
            await self._compute(work)
            self._group.hand_on(self.stage, self._given, step)
            self._given += 1
            ended_s = self._loop.time()
            if message.sample == "later":
                grammar = await self._await_sample(step)
                began_s += self._loop.time() - ended_s
            answer = self._sampled(work, grammar) if self._is_output else None
        except SimError as error:
            kind, text = describe(error)
            self._failed = True
            self._reply(StepFailed(step=step, kind=kind, text=text))
            return None
        if self._is_output:
            self._reply(StepReply(step=step, began_s=began_s, ended_s=self._loop.time()), answer)
            return None
        span = step, began_s, ended_s
        if message.reply == "all":
            return span
        self._note(span)
        return None

    def _note(self, span: tuple[int, float, float]) -> None:
        if self.number % self._boot.ranks_per_stage == 0:
            self._spans.append(span)
            if len(self._spans) >= self._spans_per_message:
                self._tell_spans()

    def _reply(self, message: StepReply | StepFailed, answer: Any = NO_PAYLOAD) -> None:
        self._row.tell()
        self._say(message, answer)

    def _learn(self, work: Work | Restored) -> Work:
        """Take in what the step says of requests. What does not fit to what is known breaks the run."""
        require = self._story.require
        if isinstance(work, Restored):
            for new, tokens in work.requests:
                require(new.req_id not in self._known, f"{new.req_id} is restored on a rank that knows it")
                self._known[new.req_id] = [*new.prompt_token_ids, *tokens]
            work = work.work
        require(work.epoch == self._boot.epoch, f"a step of epoch {work.epoch} reached a rank of {self._boot.epoch}")
        for name in work.finished:
            self._known.pop(name, None)
        for name, tokens in work.new:
            require(self._scenario.v2 or name not in self._known, f"{name} is new to a rank that knows it")
            self._known[name] = list(tokens)
        for name, before, chunk in work.scheduled:
            require(name in self._known, f"rank {self.number} was never told of {name}")
            if self._is_output:
                have = len(self._known[name])
                require(before + chunk <= have, f"{name}: {before} + {chunk} tokens of {have} are to be computed")
        return work

    async def _compute(self, work: Work) -> None:
        tokens = sum(chunk for _, _, chunk in work.scheduled)
        seconds = self._scenario.stage_s * (1 + 0.05 * tokens)
        await self._pass(seconds / 2)
        if self.raises:
            self.raises -= 1
            raise SimError("CUDA error: an illegal memory access")
        for name, before, chunk in work.scheduled:
            poison = self._poison.get(name)
            if poison is not None and poison.stage == self.stage and before + chunk >= poison.from_tokens:
                self._story.tell(f"e{self._boot.epoch} {name} is poison to rank {self.number}: {poison.kind}")
                self._story.harmed = True
                if poison.kind == "die":
                    raise _Dies("signal SIGSEGV")
                if poison.kind == "raise":
                    raise SimError("device-side assert triggered")
                await self._hang()
        await self._pass(seconds / 2)

    def _sampled(self, work: Work, grammar: Any) -> Any:
        sampled = {}
        for name, before, chunk in work.scheduled:
            tokens = self._known[name]
            if before + chunk < len(tokens):
                continue
            if name in work.masked and name in grammar:  # aborted ones have none
                prompt = next(len(asked.prompt) for asked in self._scenario.asked if name.endswith(asked.name))
                right = len(tokens) - prompt
                self._story.require(grammar[name] == right, f"{name}: the mask of token {grammar[name]} for {right}")
            sampled[name] = next_token(tokens)
            tokens.append(sampled[name])
        return work.epoch, work.serial, sampled

    async def _await_sample(self, step: int) -> Any:
        while step not in self._samples:
            envelope = await self._receive()
            match envelope.message:
                case Sample(step=number):
                    self._samples[number] = envelope
                case Close():
                    raise _Dies("exit code 0")
                case _:
                    self._held.append(envelope)
        return self._samples.pop(step).load()

    async def _call(self, call: int, envelope: Envelope) -> None:
        self._tell_spans()
        function: Callable[[Any], Any] = envelope.load()
        try:
            if function is load:
                await self._load()
            else:
                await self._pass(self._scenario.stage_s)
            answer = function(self)
        except SimError as error:
            kind, text = describe(error)
            self._say(CallFailed(call=call, kind=kind, text=text), error)
            return
        self._say(CallReply(call=call), answer)

    async def _load(self) -> None:
        await self._pass(LOAD_S)
        match self._start_fault:
            case "load raises":
                raise SimError("out of memory")
            case "load dies":
                raise _Dies("signal SIGKILL")
            case "load hangs":
                await self._hang()
        self._say(Phase(name="load", seconds=LOAD_S))

    def _tell_spans(self) -> None:
        if self._spans:
            self._say(Spans(spans=self._spans))
            self._spans = []
            self._spans_per_message = min(SPANS, 2 * self._spans_per_message)

    # -- waiting -------------------------------------------------------------------------------------------------

    async def _receive(self) -> Envelope:
        while True:
            await self._running.wait()
            envelope = self._end.poll()
            if envelope is not None:
                return envelope
            self._arrived.clear()
            await self._arrived.wait()

    async def _pass(self, seconds: float) -> None:
        await asyncio.sleep(seconds * self.slow)
        await self._running.wait()

    async def _hang(self) -> None:
        await asyncio.Event().wait()

    def _say(self, message: Any, payload: Any = NO_PAYLOAD) -> None:
        line = self._hub._lines[self.number]
        arrives = not (line.frozen or line.late_by or line.drop or line.replay or line.reorder or line.overtaken)
        if arrives and (isinstance(message, StepFailed) or line.corrupt):
            self._loop.call_later(PROMPT_S, self._noticed, type(message).__name__)
        self._end.send(message, payload)

    def _noticed(self, what: str) -> None:
        epoch = self._boot.epoch
        self._story.require(self._is_over(epoch), f"epoch {epoch} goes on after a {what} that ends it")


class SimZygote:
    """What forks ranks: the interface of `ranks.spawn.Zygote`, as far as the engine uses it.

    Attributes:
        ended: whether it has died.
        ranks: the ranks of the last epoch.
        start_faults: what goes wrong with the next ranks: kind, and a number that says with which rank.
    """

    def __init__(
        self,
        scenario: Scenario,
        story: Story,
        hubs: dict[int, MemoryEngineChannel],
        is_over: Callable[[int], bool],
    ) -> None:
        self._is_over = is_over
        self.ended = False
        self.ranks: list[SimRank] = []
        self.every: list[SimRank] = []
        self.start_faults: list[tuple[str, int]] = []
        self._scenario = scenario
        self._story = story
        self._hubs = hubs
        self._group: Group | None = None
        self._epoch = -1

    async def spawn(self, spec: RankSpec) -> RankProcess:
        boot = msgspec.msgpack.decode(spec.bootstrap, type=Bootstrap)
        if self.ended:
            raise StartupError("the zygote that forks the ranks has ended", phase="spawn", rank=boot.rank)
        if boot.epoch != self._epoch:
            self._epoch = boot.epoch
            self.ranks = []
            self._group = Group(boot.ranks_per_stage, self._scenario.peers_notice_s)
        fault = ""
        for kind, number in list(self.start_faults):
            if number % boot.ranks == boot.rank:
                self.start_faults.remove((kind, number))
                fault = kind
                break
        await asyncio.sleep(FORK_S)
        if fault == "fork":
            raise StartupError("cannot allocate memory", phase="spawn", rank=boot.rank)
        assert self._group is not None
        rank = SimRank(boot, self._hubs[boot.epoch], self._group, self._scenario, self._story, fault, self._is_over)
        self.ranks.append(rank)
        self.every.append(rank)
        self._story.tell(f"e{boot.epoch} rank {boot.rank} is forked{': ' + fault if fault else ''}")
        return rank.process

    async def keep(self, *paths: Any) -> None:
        """Folders to remove when the program is killed."""

    async def close(self) -> None:
        """Its ranks end with it."""
        self.ended = True
        for rank in self.every:
            rank.die("signal SIGKILL")


def dead_ends(ranks: Sequence[SimRank]) -> list[int]:
    """Ranks that have not ended, or whose process was not let go of."""
    return [rank.number for rank in ranks if not rank.ended or rank.process.sentinel >= 0]
