"""The executor: the rank set of one epoch, seen from the loop.

It spawns the ranks, sends them steps and calls, and turns their answers into futures keyed by (step, rank) and
(call, rank). It decides nothing: a lost rank or a failed step is reported once through `on_lost`, and every open future
ends with the same error. Cancelling whoever awaits a future never cancels the step; its late answer is swallowed.
"""

import asyncio
import itertools
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from async_pp.channel.pending import Pending
from async_pp.channel.protocol import EngineChannel, MakeEngineChannel, RankUnreachable
from async_pp.channel.zmq_engine import ZmqEngineChannel
from async_pp.core.deadlines import Deadline, Overdue, Row, Work
from async_pp.core.gather import Scope
from async_pp.core.silence import Silence
from async_pp.engine.failures import RUNNING, Failures, wrong_hello
from async_pp.engine.launch import StartDeadlines, launch, within
from async_pp.engine.layout import RankLayout
from async_pp.engine.ports import OnOutput, OnPhase, OnSpan, ignore_output, ignore_span
from async_pp.engine.watch import StartWatch, StepWatch
from async_pp.errors import EngineClosed, EngineFailed, StartupError, WireError
from async_pp.ranks.board import Board
from async_pp.ranks.folder import RuntimeFolder, sweep
from async_pp.ranks.main import Bootstrap
from async_pp.ranks.runner import Attending
from async_pp.ranks.spawn import RankSpec, Zygote
from async_pp.ranks.supervisor import STATUS_DEADLINE_S, Supervisor
from async_pp.wire.frames import NO_PAYLOAD, Envelope, Payload
from async_pp.wire.limits import Limits
from async_pp.wire.messages import (
    Call,
    CallFailed,
    CallReply,
    Close,
    Execute,
    Hello,
    Phase,
    Reported,
    Sample,
    SampleMode,
    Spans,
    StepFailed,
    StepReply,
    ToRank,
)

CLOSE_DEADLINE_S = 5.0

RAISED_S = 2 * STATUS_DEADLINE_S
"""How long an error of a rank waits for the death of another, which may be its cause: of a process that ends, the
kernel closes the sockets before it tells the end."""


class RankExecutor:
    """The rank set of one epoch.

    Args:
        layout: the ranks.
        zygote: what forks them.
        epoch: number of this life.
        on_phase: told about start-up progress.
        on_lost: told once, with the error, when the rank set cannot go on.
        on_span: told the stages' times, those of the output stage before the answer's future is resolved, the others
            some steps later, or before a `call` that follows them returns.
        on_output: told what connectors report with a step that their rank does not answer.
        step_deadline_s: how long a rank may take for a step from the moment it could begin; None: as measured.
        start_deadlines: how long the parts of the start may take.
        channel: makes what carries the frames; simulations have one in memory.
        clock: that of the ranks, in seconds: time.monotonic() but in simulations.

    Raises:
        ValueError: `step_deadline_s` is not a positive number.
    """

    def __init__(
        self,
        layout: RankLayout,
        zygote: Zygote,
        *,
        epoch: int,
        on_phase: OnPhase,
        on_lost: Callable[[EngineFailed], None],
        on_span: OnSpan = ignore_span,
        on_output: OnOutput = ignore_output,
        step_deadline_s: float | None = None,
        start_deadlines: StartDeadlines = StartDeadlines(),  # noqa: B008 - frozen
        channel: MakeEngineChannel = ZmqEngineChannel,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.layout = layout
        self.epoch = epoch
        self.cause: Exception | None = None
        self._failures = Failures(epoch)
        self.rejected_frames = 0  # refused on the socket, whoever sent them
        self._zygote = zygote
        self._on_phase = on_phase
        self._on_lost = on_lost
        self._on_span = on_span
        self._on_output = on_output
        self._make_channel = channel
        self._clock = clock
        self._steps: Pending[tuple[int, int], Any] = Pending()
        self._calls: Pending[tuple[int, int], Any] = Pending()
        self._silence = Silence(layout.ranks, layout.output_rank)
        self._attends: dict[int, int] = {}  # calls for the connectors, and how many ranks have not answered
        self._raised: asyncio.TimerHandle | None = None  # an error that may have a cause
        self._board: Board | None = None
        self._watch = StepWatch(
            rows=self._rows,
            missing=self._missing,
            stopped=self._stopped,
            ranks_per_stage=layout.ranks_per_stage,
            deadline=Deadline(step_deadline_s),
            on_hung=self._hung,
            clock=clock,
        )
        self._start_deadlines = start_deadlines
        self._start_watch = StartWatch(self._asked, self._stalled)
        self._loading = set(range(layout.ranks))
        self._hellos: Pending[int, int] = Pending()
        self._numbers = itertools.count()
        self._folder: RuntimeFolder | None = None
        self._channel: EngineChannel | None = None
        self._supervisor: Supervisor | None = None

    @property
    def runtime_dir(self) -> Path:
        """Private folder (mode 0700) of this epoch: socket and rendezvous files."""
        if self._folder is None:
            raise EngineClosed("the rank set has not been started")
        return self._folder.path

    async def start(self) -> None:
        """Spawn the ranks and wait until each has said hello. On any failure nothing is left behind.

        Raises:
            StartupError: a rank ended before it said hello, did not say it in time, or said something else.
        """
        try:
            await self._start()
        except BaseException as error:
            if isinstance(error, StartupError):
                self.lose(error)
            await self.close()
            raise

    async def _start(self) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        if self.epoch == 0:
            await asyncio.to_thread(sweep)
        await self._make_folder()
        keys = {rank: secrets.token_bytes(32) for rank in range(self.layout.ranks)}
        self._channel = self._make_channel(
            self.runtime_dir,
            keys,
            epoch=self.epoch,
            limits=Limits(),
            on_message=self._receive,
            on_reject=self._reject,
        )
        await self._channel.start()
        self._supervisor = Supervisor(on_death=self._rank_died)
        self._board = Board(self.runtime_dir / "board", self.layout.ranks)
        await launch(
            [self._spec(rank, key) for rank, key in keys.items()],
            {rank: self._hellos.expect(rank) for rank in keys},
            zygote=self._zygote,
            supervisor=self._supervisor,
            deadlines=self._start_deadlines,
            failures=self._failures,
        )
        self._on_phase("spawn", None, loop.time() - began)
        self._failures.phase = "load"
        self._start_watch.begin(self._start_deadlines.load_s)

    async def _make_folder(self) -> None:
        made = False
        while not made:
            self._folder = RuntimeFolder.named()
            async with within(self._start_deadlines.zygote_s, self._failures):
                await self._zygote.keep(self._folder.path)
            made = self._folder.make()

    def _spec(self, rank: int, key: bytes) -> RankSpec:
        assert self._channel is not None
        boot = Bootstrap(
            rank=rank,
            ranks=self.layout.ranks,
            output_rank=self.layout.output_rank,
            ranks_per_stage=self.layout.ranks_per_stage,
            epoch=self.epoch,
            endpoint=self._channel.endpoint,
            board=str(self.runtime_dir / "board"),
            key=key,
            runner=self.layout.runner,
        )
        return RankSpec(
            rank=rank,
            cpus=self.layout.cpus[rank],
            env={},
            target="async_pp.ranks.main:run",
            bootstrap=boot.encode(),
            name=f"async_pp rank {rank}",
        )

    @property
    def rendezvous(self) -> str:
        """URL of the file over which the ranks' process groups find each other.

        Its last component names the shared memory that the workers make, so it is unique to this epoch.
        """
        return f"file://{self.runtime_dir / self.runtime_dir.name}"

    def started(self) -> None:
        """Start-up is over: from here on a dead rank is a `RankLost`, not a `StartupError`."""
        self._failures.phase = RUNNING
        self._start_watch.stop()
        if self._folder is not None:
            self._folder.unlink_shared_memory()

    def forget_names(self) -> None:
        """Remove the folder while the ranks go on: sockets, pipes and process groups are open and need no name.

        For an owner that may be killed without a chance to close.
        """
        if self._folder is not None:
            self._folder.remove()

    def execute(
        self, step: int, work: Any, *, grammar: Any, sample: SampleMode, scope: Scope
    ) -> list[tuple[int, asyncio.Future[Any]]]:
        """Send a step to every rank. Returns the futures of the answers that the step waits for, by rank.

        With `Scope.ALL` the answer of a rank that has nothing to say is None, and mostly no message: that it is done is
        seen on the board, when the output rank answers.

        Args:
            step: its number.
            work: what the runners execute; encoded once for all ranks.
            grammar: the bitmask, when `sample` is "now".
            sample: "none", "now", or "later" when `release` will follow.
            scope: who answers.
        """
        channel = self._open_channel()
        ranks = [self.layout.output_rank] if scope is Scope.OUTPUT else list(range(self.layout.ranks))
        futures = [(rank, self._steps.expect((step, rank))) for rank in ranks]
        message = Execute(step=step, sample=sample, reply="all" if scope is Scope.ALL else "output")
        payload = Payload.dump((work, grammar))
        self._send_all(channel, message, payload)
        number = self._watch.step(step, deferred=sample == "later")
        if scope is Scope.ALL:
            self._silence.sent(step, number)
        return futures

    def attend(self, work: Any) -> list[tuple[int, asyncio.Future[Any]]]:
        """Let every rank's connectors work, between steps. Returns the futures of their outputs, by rank.

        A rank that raises ends the epoch, as in a step.
        """
        channel = self._open_channel()
        number = next(self._numbers)
        futures = [(rank, self._calls.expect((number, rank))) for rank in range(self.layout.ranks)]
        self._attends[number] = self.layout.ranks
        self._send_all(channel, Call(call=number), Payload.dump(Attending(work)))
        self._watch.call(number, patient=False)
        return futures

    def release(self, step: int, grammar: Any) -> None:
        """Send the deferred sample message of a step."""
        channel = self._open_channel()
        self._send_all(channel, Sample(step=step), Payload.dump(grammar))
        self._watch.released(step)

    async def call(self, function: Callable[[Any], Any], timeout_s: float | None = None) -> list[Any]:
        """Apply `function` to every rank's runner, between steps. Returns the answers in rank order.

        Raises:
            Exception: what the first failing rank raised, at once and with its traceback as a note. The others are not
                waited for: they may sit in a collective with the one that failed.
            StartupError: the same while the ranks start, which ends them.
            TimeoutError: not all answered within `timeout_s` seconds; the call itself goes on in the ranks, and now
                they have as long for it as for a step. So it is after a cancellation.
            EngineFailed: the rank set was lost.
        """
        channel = self._open_channel()
        number = next(self._numbers)
        payload = Payload.dump(function)
        futures = [self._calls.expect((number, rank)) for rank in range(self.layout.ranks)]
        try:
            self._send_all(channel, Call(call=number), payload)
            self._watch.call(number, patient=True)
            self._start_watch.moved()
            async with asyncio.timeout(timeout_s):
                await asyncio.wait(futures, return_when=asyncio.FIRST_EXCEPTION)
            for future in futures:
                if future.done() and (error := future.exception()) is not None:
                    raise error
            return [future.result() for future in futures]
        finally:
            open_ones = [future.cancel() for future in futures]  # one that is not done becomes a tombstone
            if any(open_ones):
                self._watch.given_up(number)
            for future, was_open in zip(futures, open_ones, strict=True):
                if not was_open:
                    future.exception()  # looked at: the first failure has been raised

    def step_of(self, rank: int) -> int | None:
        """The step that a rank has begun and not finished, also when it is frozen or dead. None: it is in none, or the
        rank set is gone."""
        return None if self._board is None else self._watch.step_in(self._board.row(rank))

    def lose(self, error: EngineFailed) -> None:
        """End the epoch: every open future gets `error`, `on_lost` is told. Later causes change nothing."""
        if self.cause is not None:
            return
        self.cause = error
        self._stop_watching()
        for pending in (self._steps, self._calls, self._hellos):
            pending.fail_all(error)
        self._on_lost(error)

    async def close(self, deadline_s: float = CLOSE_DEADLINE_S) -> None:
        """End every rank and remove every trace, within `deadline_s` seconds plus the kill. May be called again."""
        if self.cause is None:
            self.cause = EngineClosed("the engine was closed")
            self._stop_watching()
            for pending in (self._steps, self._calls, self._hellos):
                pending.fail_all(self.cause)
            if self._channel is not None:
                self._send_all(self._channel, Close(), NO_PAYLOAD)
        else:
            deadline_s = min(deadline_s, 0.1)  # a lost rank set has nothing left to say: peers may sit in a collective
        try:
            if self._supervisor is not None:
                await self._supervisor.stop(deadline_s)
        finally:
            self._dispose()

    def kill(self) -> None:
        """End every rank now, without waiting: for interpreters that are going down and second signals."""
        self.cause = self.cause or EngineClosed("the engine was killed")
        self._stop_watching()
        if self._supervisor is not None:
            self._supervisor.kill()
        self._dispose()

    def _stop_watching(self) -> None:
        self._watch.stop()
        self._start_watch.stop()
        if self._raised is not None:
            self._raised.cancel()

    def _dispose(self) -> None:
        if self._channel is not None:
            self._channel.close()
        if self._board is not None:
            self._board.close()
            self._board = None
        if self._folder is not None:
            self._folder.remove()

    def _send_all(self, channel: EngineChannel, message: ToRank, payload: Payload) -> None:
        """Send to every rank. One that is not there any more is left out: its end is about to be told."""
        for rank in range(self.layout.ranks):
            with suppress(RankUnreachable):
                channel.send(rank, message, payload)

    def _open_channel(self) -> EngineChannel:
        if self.cause is not None:
            raise self.cause
        if self._channel is None:
            raise EngineClosed("the rank set has not been started")
        return self._channel

    def _receive(self, rank: int, envelope: Envelope) -> None:
        if self.cause is not None:
            return  # nobody is left whom a rank that goes on could answer
        if self._failures.starting:
            self._start_watch.moved()
        try:
            self._take(rank, envelope)
        except Exception as error:  # noqa: BLE001 - whatever it is, what the rank said is lost
            self._unreadable(rank, error)

    def _take(self, rank: int, envelope: Envelope) -> None:
        match envelope.message:
            case StepReply(step=step, began_s=began_s, ended_s=ended_s):
                self._silence.heard(rank)
                self._take_span(rank, step, began_s, ended_s)
                self._steps.resolve((step, rank), envelope.load())
                self._see_silent()
            case Reported():
                self._silence.heard(rank)
                self._on_output(rank, envelope.load())
                self._see_silent()
            case Spans(spans=spans):
                for span in spans:
                    self._take_span(rank, *span)
            case StepFailed(step=step, kind=kind, text=text):
                self._lose_soon(self._failures.raised(rank, kind, text, step))
            case CallReply(call=call):
                if call in self._attends:
                    self._attends[call] -= 1
                    if not self._attends[call]:
                        del self._attends[call]
                self._calls.resolve((call, rank), envelope.load())
            case CallFailed(call=call, kind=kind, text=text) if call in self._attends:
                self._lose_soon(self._failures.raised(rank, kind, text, None))
            case CallFailed(kind=kind, text=text) if self._failures.starting:
                self._lose_soon(self._failures.raised_at_start(rank, kind, text))
            case CallFailed(call=call, kind=kind, text=text):
                error = envelope.load() if envelope.has_payload else None
                if not isinstance(error, Exception):
                    error = self._failures.raised(rank, kind, text, None)
                error.add_note(f"on rank {rank}:\n{text}")
                self._calls.reject((call, rank), error)
            case Hello(pid=pid) as hello:
                if (wrong := wrong_hello(hello, self.layout.ranks)) is not None:
                    self._broke_off(rank, wrong)
                elif not self._hellos.resolve(rank, pid):
                    self._broke_off(rank, "said hello twice")
            case Phase(name=name, seconds=seconds):
                self._on_phase(name, rank, seconds)
                if name == "load":
                    self._loaded(rank)

    def _see_silent(self) -> None:
        """Take the ranks that have nothing to say of a step for ones that have answered it.

        A rank that leaves a step only after the output rank's answer finds on the board that this was sent, and says a
        word.
        """
        assert self._board is not None
        for step, rank in self._silence.found(self._board.row, self._owing):
            self._steps.resolve((step, rank), None)

    def _owing(self, step: int) -> list[int]:
        """The ranks whose answer to a step has not come."""
        return [rank for rank in range(self.layout.ranks) if (step, rank) in self._steps]

    def _loaded(self, rank: int) -> None:
        self._loading.discard(rank)
        if self._failures.phase == "load" and not self._loading:
            self._failures.phase = "kv_cache"
            self._start_watch.begin(self._start_deadlines.kv_cache_s)

    def _take_span(self, rank: int, step: int, began_s: float, ended_s: float) -> None:
        stage, in_stage = divmod(rank, self.layout.ranks_per_stage)
        if in_stage == 0:
            self._watch.took(step, ended_s - began_s)
            self._on_span(stage, step, began_s, ended_s)

    def _broke_off(self, rank: int, what: str) -> None:
        self.lose(self._failures.broke_off(rank, what, self.step_of(rank)))

    def _lose_soon(self, error: EngineFailed) -> None:
        """A rank raised. If another one ends right now, its end is the cause: the one that raised was its neighbour."""
        if self._raised is None:
            self._raised = asyncio.get_running_loop().call_later(RAISED_S, self.lose, error)

    def _reject(self, rank: int | None, error: WireError) -> None:
        """A frame was refused. A rank's own is one that it sent and that will not come: nothing else tells of it.

        A frame of somebody who is no rank is counted and changes nothing, however many come.
        """
        self.rejected_frames += 1
        if rank is not None:
            self._unreadable(rank, error)

    def _unreadable(self, rank: int, error: Exception) -> None:
        said = str(error) if isinstance(error, WireError) else repr(error)
        failure = self._failures.broke_off(rank, f"sent what cannot be read: {said}", self.step_of(rank))
        failure.__cause__ = error
        self.lose(failure)

    def _rank_died(self, rank: int, status: str) -> None:
        self.lose(self._failures.ended(rank, status, self.step_of(rank)))

    # -- watches -------------------------------------------------------------------------------------------------

    def _rows(self) -> list[Row]:
        assert self._board is not None
        return self._board.rows()

    def _stopped(self, rank: int) -> bool:
        return self._supervisor is not None and self._supervisor.stopped(rank)

    def _missing(self, work: Work) -> list[int]:
        """The ranks whose answer to a work has not come."""
        # Memory is not ordered between processes: a rank that left just when the output rank answered may not have seen
        # that, and have said no word.
        self._see_silent()
        if work.step is not None:
            return self._owing(work.step)
        return [rank for call, rank in self._calls if call == work.call]

    def _asked(self) -> list[int]:
        """The ranks that have not answered the oldest call."""
        oldest = next(iter(self._calls), None)
        return [] if oldest is None else [rank for call, rank in self._calls if call == oldest[0]]

    def _stalled(self, rank: int, deadline_s: float) -> None:
        self.lose(self._failures.start(rank, f"has made no progress for {deadline_s:g} s"))

    def _hung(self, overdue: Overdue, deadline_s: float) -> None:
        waited_s = self._clock() - overdue.since_s
        stopped = self._stopped(overdue.ranks[0])
        self.lose(self._failures.hung(overdue, deadline_s, waited_s=waited_s, stopped=stopped))
