"""The rank: a plain blocking loop that receives, computes and answers on one thread.

No asyncio here: a loop plus a compute thread in the rank cost eight times the reply latency in our measurements.
Messages are taken in the order sent. The one exception is a step whose sampling was deferred by the engine: until its
`Sample` arrives, whatever else arrives is held back, because the next step's forward pass would overwrite the state
that the sampling needs.

Stages hand hidden states over by their order alone. A rank that has raised in a step may have left its hand-over out:
what it computed after that would be taken for another step's. So it computes no further step.
"""

import os
import pkgutil
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from async_pp import __version__
from async_pp.channel.protocol import RankChannel
from async_pp.channel.zmq_rank import ZmqRankChannel
from async_pp.ranks.board import RankRow
from async_pp.ranks.runner import Runner
from async_pp.wire.frames import NO_PAYLOAD, Envelope
from async_pp.wire.limits import Limits
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
    Reported,
    Sample,
    Spans,
    StepFailed,
    StepReply,
)

MAX_TEXT = 16_384
"""Characters of a traceback that travel; its end names the error, so the beginning is cut."""


class Bootstrap(msgspec.Struct, frozen=True):
    """What a rank needs to find its engine; handed over an inherited pipe because it holds the key.

    Attributes:
        rank, ranks: this rank and the number of ranks.
        output_rank: the rank whose answers carry the sampled tokens.
        ranks_per_stage: ranks that share a stage; the first of them tells the stage's times.
        epoch: the life of the rank set it belongs to.
        endpoint: where the engine listens.
        board: path of the epoch's board.
        key: 32 bytes that seal every frame between the two.
        runner: dotted name "package.module:Class" of the Runner.
    """

    rank: int
    ranks: int
    output_rank: int
    ranks_per_stage: int
    epoch: int
    endpoint: str
    board: str
    key: bytes
    runner: str

    def encode(self) -> bytes:
        """Bytes for the pipe."""
        return msgspec.msgpack.encode(self)


class _Closing(Exception):
    """The engine asked for the end while a step waited for its sample message."""


class RankLoop:
    """The loop of one rank over its channel.

    Args:
        channel: the blocking end of the channel.
        runner: what computes.
        row: where it writes what it works on.
        output_rank: the rank that answers every step; which may be this one.
        tells_spans: whether it tells the times of the steps that it does not answer.
    """

    def __init__(
        self, channel: RankChannel, runner: Runner, row: RankRow, *, output_rank: int, tells_spans: bool
    ) -> None:
        self._channel = channel
        self._runner = runner
        self._row = row
        self._output_rank = output_rank
        self._is_output = row.rank == output_rank
        self._steps = 0
        self._tells_spans = tells_spans
        self._spans: list[tuple[int, float, float]] = []
        self._spans_per_message = 1  # then twice as many each time: the first times are wanted at once
        self._held: deque[Envelope] = deque()
        self._samples: dict[int, Envelope] = {}  # that came before their steps: a later step may wait for less
        self._failed = False  # a step has raised

    def run(self) -> None:
        """Serve until `Close` comes. An error of the runner is reported; after one in a step only calls are served."""
        try:
            while True:
                envelope = self._held.popleft() if self._held else self._channel.recv()
                match envelope.message:
                    case Execute():
                        self._row.enter()
                        self._steps += 1
                        span = None if self._failed else self._execute(envelope.message, envelope)
                        self._row.leave()
                        if span is not None:
                            self._silent(span)
                    case Call(call=call):
                        self._row.enter()
                        self._call(call, envelope)
                        self._row.leave()
                    case Close():
                        raise _Closing
                    case Sample() if self._failed:
                        pass
                    case other:
                        raise RuntimeError(f"the engine sent {type(other).__name__} out of turn")
        except _Closing:
            self._runner.close()
            self._channel.send(Bye(reason="closed"))

    def _execute(self, message: Execute, envelope: Envelope) -> tuple[int, float, float] | None:
        """Returns the step's span where the engine waits for this rank, which has nothing to say."""
        try:
            return self._step(message, envelope)
        except _Closing:
            raise
        except BaseException as error:  # noqa: BLE001 - whatever it is, the engine decides; so for SystemExit
            self._failed = True
            kind, text = describe(error)
            self._row.tell()
            self._channel.send(StepFailed(step=message.step, kind=kind, text=text))
            return None

    def _step(self, message: Execute, envelope: Envelope) -> tuple[int, float, float] | None:
        work, grammar = envelope.load()
        answer = self._runner.execute(work)
        ended_s = time.monotonic()
        held_s = 0.0
        if message.sample == "later":
            # The message comes in any case; a step that needed no sampling only takes it off the wire.
            grammar = self._await_sample(message.step)
            held_s = time.monotonic() - ended_s
        if answer is None and message.sample != "none":
            answer = self._runner.sample(grammar)
        began_s = self._runner.began_s
        if self._is_output:  # sampling is its stage's work, waiting for the word to sample is not
            began_s, ended_s = began_s + held_s, time.monotonic()
        if not self._is_output:
            answer = self._runner.connector_output(answer)
        span = message.step, began_s, ended_s
        if self._is_output or (answer is not None and message.reply == "all"):
            self._reply(StepReply(*span), answer)
            return None
        if answer is not None:
            self._reply(Reported(step=message.step), answer)
        if message.reply == "all":
            return span
        self._note(span)
        return None

    def _silent(self, span: tuple[int, float, float]) -> None:
        """This rank has left a step for which the engine waits, and has nothing to say of it."""
        if self._row.told_by(self._output_rank) >= self._steps:
            self._reply(StepReply(*span), None)  # the engine may have looked before this rank had left
        else:
            self._note(span)

    def _note(self, span: tuple[int, float, float]) -> None:
        if self._tells_spans:
            self._spans.append(span)
            if len(self._spans) >= self._spans_per_message:
                self._tell_spans()

    def _reply(self, message: StepReply | Reported, answer: Any) -> None:
        self._row.tell()
        self._channel.send(message, answer)

    def _tell_spans(self) -> None:
        if self._spans:
            self._channel.send(Spans(spans=self._spans))
            self._spans = []
            self._spans_per_message = min(SPANS, 2 * self._spans_per_message)

    def _await_sample(self, step: int) -> Any:
        while step not in self._samples:
            envelope = self._channel.recv()
            match envelope.message:
                case Sample(step=number):
                    self._samples[number] = envelope
                case Close():
                    raise _Closing
                case _:
                    self._held.append(envelope)
        return self._samples.pop(step).load()

    def _call(self, call: int, envelope: Envelope) -> None:
        self._tell_spans()
        try:
            answer = self._runner.call(envelope.load())
        except BaseException as error:  # noqa: BLE001 - whatever it is, the caller gets it
            kind, text = describe(error)
            self._send_failure(CallFailed(call=call, kind=kind, text=text), error)
            return
        try:
            self._channel.send(CallReply(call=call), answer)
        except Exception as error:  # noqa: BLE001 - an answer that cannot be pickled is the caller's error
            kind, text = describe(error)
            self._channel.send(CallFailed(call=call, kind=kind, text=text))

    def _send_failure(self, message: CallFailed, error: BaseException) -> None:
        try:
            self._channel.send(message, error)
        except Exception:  # noqa: BLE001 - an exception that cannot be pickled travels as text alone
            self._channel.send(message, NO_PAYLOAD)


def describe(error: BaseException) -> tuple[str, str]:
    """Class name and traceback text of an error, bounded, also for errors whose own text raises."""
    try:
        text = "".join(traceback.format_exception(error))
    except Exception as failure:  # noqa: BLE001 - an error whose text raises is still an error
        text = f"{type(error).__name__}: (its text could not be made: {type(failure).__name__})"
    # What cannot be encoded (a file's name, say) must not keep the rest from being told.
    kind, text = (said.encode(errors="replace").decode() for said in (type(error).__name__[:200], text[-MAX_TEXT:]))
    return kind, text


def run(bootstrap: bytes) -> None:
    """Entry of a rank process: connect, say hello, serve until told to close."""
    boot = msgspec.msgpack.decode(bootstrap, type=Bootstrap)
    channel = ZmqRankChannel(boot.endpoint, rank=boot.rank, epoch=boot.epoch, key=boot.key, limits=Limits())
    try:
        row = RankRow.open(boot.board, boot.rank)
        channel.send(Hello(pid=os.getpid(), ranks=boot.ranks, version=__version__))
        make: Callable[..., Runner] = pkgutil.resolve_name(boot.runner)
        runner = make(boot.rank, boot.ranks, _phases(channel))
        leads_stage = boot.rank % boot.ranks_per_stage == 0
        RankLoop(channel, runner, row, output_rank=boot.output_rank, tells_spans=leads_stage).run()
    finally:
        channel.close()


def _phases(channel: RankChannel) -> Callable[[str], None]:
    """Report start-up phases with the seconds each took."""
    since = time.monotonic()

    def report(name: str) -> None:
        nonlocal since
        now = time.monotonic()
        channel.send(Phase(name=name, seconds=now - since))
        since = now

    return report
