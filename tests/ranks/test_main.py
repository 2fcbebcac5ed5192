"""The rank's loop, over a channel in memory: order, deferral, errors of every kind."""

import asyncio
import threading
import time
from collections.abc import Callable
from operator import methodcaller
from typing import Any

import pytest

from async_pp.channel.memory import MemoryEngineChannel
from async_pp.ranks.board import ROW_BYTES, RankRow
from async_pp.ranks.main import MAX_TEXT, RankLoop, describe
from async_pp.ranks.runner import Attending, OnWorker, flush
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
    Message,
    Reported,
    Sample,
    Spans,
    StepFailed,
    StepReply,
)


class Recorder:
    """A runner that notes what it is asked."""

    def __init__(self) -> None:
        self.notes: list[Any] = []
        self.worker = self
        self.began_s = 0.0
        self.executed = threading.Event()

    def execute(self, payload: Any) -> Any:
        self.notes.append(("execute", payload))
        self.began_s = time.monotonic()
        self.executed.set()
        if isinstance(payload, Exception):
            raise payload
        self.says = payload.get("connectors")
        return payload.get("answer")

    def sample(self, payload: Any) -> Any:
        self.notes.append(("sample", payload))
        return f"sampled under {payload}"

    def connector_output(self, answer: Any) -> Any:
        return self.says

    def attend(self, work: Any) -> Any:
        return f"connectors of {work}"

    def call(self, function: Callable[[Any], Any]) -> Any:
        return function(self)

    def close(self) -> None:
        self.notes.append("close")

    def double(self, number: int) -> int:
        return 2 * number


class Rank:
    """A rank loop on a thread; what it says arrives in `inbox`."""

    def __init__(self, *, is_output: bool = True, tells_spans: bool = True) -> None:
        self.inbox: asyncio.Queue[Envelope] = asyncio.Queue()
        self.engine = MemoryEngineChannel(
            {0: bytes(32)},
            epoch=0,
            limits=Limits(),
            on_message=lambda rank, envelope: self.inbox.put_nowait(envelope),
            on_reject=lambda rank, error: pytest.fail(str(error)),
        )
        self.runner = Recorder()
        memory = bytearray(2 * ROW_BYTES)
        self.row, self.output_row = RankRow(memory, 0), RankRow(memory, 1)
        self.loop = RankLoop(
            self.engine.rank_end(0), self.runner, self.row, output_rank=0 if is_output else 1, tells_spans=tells_spans
        )
        self.thread = threading.Thread(target=self.loop.run, daemon=True)  # a failed test must not hang the run

    async def start(self) -> "Rank":
        await self.engine.start()
        self.thread.start()
        return self

    def send(self, message: Message, payload: Any = NO_PAYLOAD) -> None:
        self.engine.send(0, message, payload)

    async def next(self) -> Envelope:
        async with asyncio.timeout(10):
            return await self.inbox.get()

    async def end(self) -> list[Any]:
        self.send(Close())
        while (await self.next()).message != Bye(reason="closed"):
            pass
        await asyncio.to_thread(self.thread.join)
        return self.runner.notes


def step_of(envelope: Envelope) -> int:
    assert isinstance(envelope.message, StepReply | Reported)
    return envelope.message.step


async def test_sampling_follows_at_once_when_it_is_not_deferred() -> None:
    rank = await Rank().start()
    rank.send(Execute(step=1, sample="now", reply="output"), ({}, "mask"))
    answer = await rank.next()
    assert (step_of(answer), answer.load()) == (1, "sampled under mask")
    rank.send(Execute(step=2, sample="none", reply="output"), ({"answer": "pooled"}, None))
    answer = await rank.next()
    assert (step_of(answer), answer.load()) == (2, "pooled")
    assert await rank.end() == [("execute", {}), ("sample", "mask"), ("execute", {"answer": "pooled"}), "close"]


async def test_while_a_step_waits_for_its_sampling_later_messages_are_held_in_order() -> None:
    rank = await Rank().start()
    rank.send(Execute(step=1, sample="later", reply="output"), ({}, None))
    rank.send(Execute(step=2, sample="now", reply="output"), ({}, "second"))
    rank.send(Call(call=9), OnWorker(methodcaller("double", 21)))
    rank.send(Sample(step=1), "first")
    said = [await rank.next() for _ in range(3)]
    assert [(step_of(one), one.load()) for one in said[:2]] == [
        (1, "sampled under first"),
        (2, "sampled under second"),
    ]
    assert (said[2].message, said[2].load()) == (CallReply(call=9), 42)
    await rank.end()


async def test_a_later_step_may_be_sampled_under_a_word_that_came_first() -> None:
    """It waits for an older step than the one before it does, so it is released sooner."""
    rank = await Rank().start()
    for step in (1, 2, 3):
        rank.send(Execute(step=step, sample="later", reply="output"), ({}, None))
    for step in (3, 1, 2):
        rank.send(Sample(step=step), f"mask {step}")
    said = [await rank.next() for _ in range(3)]
    assert [(step_of(one), one.load()) for one in said] == [(step, f"sampled under mask {step}") for step in (1, 2, 3)]
    await rank.end()


async def test_closing_while_a_step_waits_for_its_sampling_ends_the_rank() -> None:
    rank = await Rank().start()
    rank.send(Execute(step=1, sample="later", reply="output"), ({}, None))
    assert (await rank.end())[-1] == "close"


@pytest.mark.parametrize("reply", ["output", "all"])
@pytest.mark.parametrize("answered", [False, True])
async def test_a_rank_with_nothing_to_say_answers_only_where_the_output_rank_has_and_all_are_asked(
    reply: Any, answered: bool
) -> None:
    rank = await Rank(is_output=False).start()
    if answered:
        rank.output_row.tell()
    rank.send(Execute(step=1, sample="now", reply=reply), ({}, None))
    rank.send(Execute(step=2, sample="now", reply=reply), ({}, None))  # the output rank is behind with this one
    rank.send(Call(call=1), OnWorker(methodcaller("double", 1)))
    first = await rank.next()
    if answered and reply == "all":  # with its times, which are told once
        assert step_of(first) == 1 and first.load() is None
    else:
        assert [step for step, *_ in first.message.spans] == [1]
    assert [step for step, *_ in (await rank.next()).message.spans] == [2]
    assert (await rank.next()).message == CallReply(call=1)
    assert rank.output_row.told_by(0) == (answered and reply == "all")
    await rank.end()


@pytest.mark.parametrize("reply, kind", [("output", Reported), ("all", StepReply)])
async def test_what_the_connectors_of_a_rank_report_is_sent_whoever_answers(reply: Any, kind: type) -> None:
    rank = await Rank(is_output=False, tells_spans=False).start()
    rank.send(Execute(step=1, sample="now", reply=reply), ({"connectors": "news"}, None))
    rank.send(Call(call=1), Attending("nothing else"))
    told = await rank.next()
    assert isinstance(told.message, kind) and step_of(told) == 1 and told.load() == "news"
    assert rank.row.told_by(0) == 1, "the engine knows what is on its way"
    attended = await rank.next()
    assert attended.message == CallReply(call=1) and attended.load() == "connectors of nothing else"
    await rank.end()


async def test_times_of_a_step_are_those_of_forward_pass_and_sampling_without_the_wait_for_its_word() -> None:
    rank = await Rank().start()
    before = time.monotonic()
    rank.send(Execute(step=1, sample="later", reply="output"), ({}, None))
    await asyncio.to_thread(rank.runner.executed.wait, 10)
    rank.send(Sample(step=1), "mask")
    reply = (await rank.next()).message
    assert isinstance(reply, StepReply)
    assert before <= rank.runner.began_s < reply.began_s <= reply.ended_s <= time.monotonic()
    await rank.end()


@pytest.mark.parametrize("tells", [True, False])
async def test_times_of_steps_without_an_answer_are_told_many_at_once_and_before_a_calls_answer(tells: bool) -> None:
    rank = await Rank(is_output=False, tells_spans=tells).start()
    began = time.monotonic()
    sizes = [1, 2, 4, 8, SPANS, SPANS, 1]  # more each time, up to the limit; what is left comes before an answer
    for step in range(sum(sizes)):
        rank.send(Execute(step=step, sample="now", reply="output"), ({}, None))
    for call in range(2):
        rank.send(Call(call=call), flush)
    if tells:
        spans = [(await rank.next()).message for _ in sizes]
        assert [len(told.spans) for told in spans if isinstance(told, Spans)] == sizes
        numbers = [step for told in spans if isinstance(told, Spans) for step, *_ in told.spans]
        assert numbers == list(range(sum(sizes)))
        times = [time for told in spans if isinstance(told, Spans) for _, *pair in told.spans for time in pair]
        assert times == sorted(times)
        assert times[0] >= began
    assert [(await rank.next()).message for _ in range(2)] == [CallReply(call=0), CallReply(call=1)]
    await rank.end()


async def test_a_step_that_raises_is_told_by_any_rank_and_calls_are_served() -> None:
    rank = await Rank(is_output=False).start()
    rank.send(Execute(step=1, sample="now", reply="output"), (KeyError("lost"), None))
    failed = (await rank.next()).message
    assert isinstance(failed, StepFailed)
    assert (failed.step, failed.kind) == (1, "KeyError")
    assert "in execute" in failed.text
    rank.send(Call(call=1), OnWorker(methodcaller("double", 2)))
    assert (await rank.next()).load() == 4
    await rank.end()
    assert [rank.row._numbers[word] for word in (1, 3)] == [2, 2], "entered and left, the failed one too"


async def test_after_a_step_that_raised_no_other_is_computed_and_no_word_to_sample_is_out_of_turn() -> None:
    """The next stage would take what is handed on for the states of the step that raised, and answer it with them."""
    rank = await Rank(is_output=True).start()
    rank.send(Execute(step=1, sample="later", reply="output"), (KeyError("lost"), None))
    assert isinstance((await rank.next()).message, StepFailed)
    rank.send(Execute(step=2, sample="later", reply="output"), ({}, None))
    rank.send(Execute(step=3, sample="now", reply="output"), ({}, None))
    rank.send(Sample(step=1), None)
    rank.send(Sample(step=2), None)
    rank.send(Call(call=1), OnWorker(methodcaller("double", 2)))
    assert (await rank.next()).load() == 4, "the answer of a step has come before"
    (name, failed), end = await rank.end()
    assert (name, type(failed), end) == ("execute", KeyError, "close")
    assert [rank.row._numbers[word] for word in (1, 3)] == [4, 4], "the watch counts those left out, too"


class Unspeakable(Exception):
    """Neither its text nor its pickle can be made."""

    def __str__(self) -> str:
        raise RuntimeError("no text")

    def __reduce__(self) -> Any:
        raise RuntimeError("no pickle")


def _raise_unspeakable(worker: Any) -> None:
    raise Unspeakable


def _returns_unpicklable(worker: Any) -> Any:
    return threading.Lock()


async def test_calls_that_raise_carry_the_exception_when_it_can_travel() -> None:
    rank = await Rank().start()
    rank.send(Call(call=1), OnWorker(methodcaller("double")))
    failed = await rank.next()
    assert isinstance(failed.load(), TypeError)
    rank.send(Call(call=2), OnWorker(_raise_unspeakable))
    failed = await rank.next()
    assert isinstance(failed.message, CallFailed)
    assert (failed.message.kind, failed.has_payload) == ("Unspeakable", False)
    rank.send(Call(call=3), OnWorker(_returns_unpicklable))
    failed = await rank.next()
    assert isinstance(failed.message, CallFailed)
    assert failed.message.call == 3
    await rank.end()


def test_descriptions_are_bounded() -> None:
    kind, text = describe(ValueError("x" * 10 * MAX_TEXT))
    assert kind == "ValueError"
    assert len(text) == MAX_TEXT
