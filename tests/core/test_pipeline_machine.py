"""The pipeline machine under any sequence of events, and that the same sequence gives the same effects.

The rules play the shell and the ranks, well behaved and not. After each event `validate()` and these hold: settles in
dispatch order, never more steps in flight than slots, one slot back per settled step, one release per deferred step and
only after the settle it waits for, each report once and right after what its rank had answered before it, nothing after
the end of the epoch, and idle when everything is answered.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from async_pp.core.gather import Scope
from async_pp.core.pipeline import (
    Dispatch,
    Effect,
    EndEpoch,
    EpochOver,
    Fold,
    FreeSlot,
    InvalidTransition,
    Release,
    Settle,
)
from async_pp.core.window import WindowFull
from tests.core.driving import Driver, told

RANKS = 3
CALLS: dict[str, Callable[..., list[Effect]]] = {
    "plan": Driver.plan,
    "answer": Driver.answer,
    "report": Driver.report,
    "settled": Driver.settled,
    "lose": Driver.lose,
}
REQUESTS = st.text("abcde", min_size=1, max_size=3)
REFUSALS = (InvalidTransition, EpochOver, WindowFull, ValueError)


class PipelineRules(RuleBasedStateMachine):
    """What may happen to one epoch."""

    @initialize(depth=st.integers(1, 4), output_rank=st.integers(0, RANKS - 1))
    def begin(self, depth: int, output_rank: int) -> None:
        self.depth = depth
        self.output_rank = output_rank
        self.driver = self.fresh()
        self.events: list[tuple[str, tuple[object, ...], dict[str, object]]] = []
        self.effects: list[list[tuple[object, ...]]] = []
        self.over = False
        self.slots = depth
        self.requests: dict[int, str] = {}
        self.waits_for: dict[int, int] = {}
        self.expected: dict[int, set[int]] = {}
        self.given: dict[int, set[int]] = {}
        self.settling: list[int] = []  # told to settle, in order
        self.settled: list[int] = []
        self.released: list[int] = []
        self.reports: dict[int, list[tuple[int, set[int]]]] = {rank: [] for rank in range(RANKS)}  # not folded
        self.reported = 0

    def fresh(self) -> Driver:
        return Driver(depth=self.depth, ranks=RANKS, output_rank=self.output_rank)

    @property
    def flying(self) -> list[int]:
        return [number for number in self.requests if number not in self.settled]

    @property
    def answerable(self) -> list[tuple[int, int]]:
        """Answers that well-behaved ranks may still give."""
        return [
            (number, rank)
            for number in self.flying
            if number not in self.waits_for or number in self.released
            for rank in sorted(self.expected[number] - self.given[number])
        ]

    @property
    def unreported(self) -> bool:
        return not self.over and len(self.settling) > len(self.settled)

    def happen(self, name: str, *args: object, **kwargs: object) -> list[Effect]:
        """One event: recorded for the replay, and its effects held against the rules."""
        self.events.append((name, args, kwargs))
        effects = CALLS[name](self.driver, *args, **kwargs)
        self.effects.append(told(effects))
        assert not (self.over and effects), "no effect after the end of the epoch"
        for effect in effects:
            self.carry_out(effect)
        return effects

    def refused(self, error: type[Exception], name: str, *args: object, **kwargs: object) -> None:
        """One event that must be refused and change nothing."""
        before = self.driver.snapshot()
        with pytest.raises(error):
            CALLS[name](self.driver, *args, **kwargs)
        assert self.driver.snapshot() == before
        self.events.append((name, args, kwargs))
        self.effects.append([("refused", error.__name__)])

    def carry_out(self, effect: Effect) -> None:
        match effect:
            case Dispatch(step=step, deferred=deferred):
                assert step.number == len(self.requests) - 1, "in the order of the plans"
                assert deferred == (step.number in self.waits_for)
            case Settle(step=step):
                assert step.number == len(self.settling), "settles in dispatch order, none left out or repeated"
                assert len(self.settling) == len(self.settled), "one settle at a time"
                assert self.given[step.number] == self.expected[step.number], "with every answer it waits for"
                assert list(step.gather.answers()) == sorted(self.expected[step.number])
                self.check_reports()
                self.settling.append(step.number)
            case Release(step=step):
                assert self.waits_for[step.number] in self.settled, "only after the settle it waits for"
                assert step.number not in self.released, "once"
                self.released.append(step.number)
            case Fold(rank=rank, report=report):
                expected, behind = self.reports[rank].pop(0)
                assert report == expected, "in the order in which its rank speaks"
                assert behind <= set(self.settled), "and behind the answers before it"
            case FreeSlot():
                self.slots += 1
                assert self.slots <= self.depth
            case EndEpoch(steps=steps):
                assert [step.number for step in steps] == self.flying
                self.over = True

    @precondition(lambda self: not self.over and self.slots)
    @rule(requests=REQUESTS, pending=st.booleans(), scope=st.sampled_from(Scope))
    def plan(self, requests: str, pending: bool, scope: Scope) -> None:
        self.slots -= 1
        number = len(self.requests)
        sharing = [other for other in self.flying if set(self.requests[other]) & set(requests)]
        if pending and sharing:
            self.waits_for[number] = sharing[-1]
        self.requests[number] = requests
        self.expected[number] = set(range(RANKS)) if scope is Scope.ALL else {self.output_rank}
        self.given[number] = set()
        effects = self.happen("plan", requests, pending=pending, scope=scope)
        assert [type(effect) for effect in effects] == [Dispatch]

    @precondition(lambda self: not self.over and not self.slots)
    @rule(requests=REQUESTS)
    def plan_without_a_slot(self, requests: str) -> None:
        self.refused(WindowFull, "plan", requests)

    @precondition(lambda self: self.over)
    @rule(requests=REQUESTS)
    def plan_after_the_end(self, requests: str) -> None:
        self.refused(EpochOver, "plan", requests)

    @precondition(lambda self: not self.over and self.answerable)
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        number, rank = data.draw(st.sampled_from(self.answerable))
        self.given[number].add(rank)
        self.happen("answer", number, rank)

    @precondition(lambda self: not self.over and any(self.given.values()))
    @rule(data=st.data())
    def answer_again(self, data: st.DataObject) -> None:
        given = [(number, rank) for number, ranks in self.given.items() for rank in sorted(ranks)]
        self.answer_ignored(*data.draw(st.sampled_from(given)))

    @rule(number=st.integers(-1, 20), rank=st.integers(-1, RANKS))
    def answer_from_nowhere(self, number: int, rank: int) -> None:
        expected = self.expected.get(number, set())
        if self.over or rank not in expected or number not in self.flying:
            self.answer_ignored(number, rank)

    @precondition(lambda self: not self.over and set(self.flying) & self.waits_for.keys() - set(self.released))
    @rule(data=st.data())
    def answer_before_sampling(self, data: st.DataObject) -> None:
        deferred = [number for number in self.flying if number in self.waits_for and number not in self.released]
        number = data.draw(st.sampled_from(deferred))
        self.refused(InvalidTransition, "answer", number, data.draw(st.sampled_from(sorted(self.expected[number]))))

    def answer_ignored(self, number: int, rank: int) -> None:
        before, counted = self.driver.snapshot(), self.driver.machine.ignored_answers
        assert self.happen("answer", number, rank) == []
        assert self.driver.snapshot() == before
        assert self.driver.machine.ignored_answers == counted + 1

    def check_reports(self) -> None:
        for behind in (behind for reports in self.reports.values() for _, behind in reports):
            assert behind - set(self.settled), "what waits for nothing is folded at once"

    @rule(rank=st.integers(0, RANKS - 1))
    def report(self, rank: int) -> None:
        self.reported += 1
        self.reports[rank].append((self.reported, {number for number in self.flying if rank in self.given[number]}))
        self.happen("report", rank, self.reported)

    @precondition(lambda self: self.unreported)
    @rule()
    def settle(self) -> None:
        number = self.settling[-1]
        released = len(self.released)
        self.settled.append(number)
        effects = self.happen("settled", number)
        assert [type(effect) for effect in effects].count(FreeSlot) == 1, "one slot back per settled step"
        waiting = [other for other in self.flying if self.waits_for.get(other) == number]
        assert self.released[released:] == waiting, "each step that waited for this settle is released, in order"

    @rule(number=st.integers(-1, 20))
    def settle_unasked(self, number: int) -> None:
        if not self.unreported or number != self.settling[-1]:
            self.refused(ValueError, "settled", number)

    @precondition(lambda self: len(self.requests) > 3)
    @rule()
    def lose(self) -> None:
        was_over = self.over
        effects = self.happen("lose", RuntimeError("gone"))
        assert [type(effect) for effect in effects] == ([] if was_over else [EndEpoch])

    @invariant()
    def holds(self) -> None:
        machine = self.driver.machine
        machine.validate()
        if not self.over:
            self.check_reports()
        assert len(machine.window) <= self.depth
        assert [step.number for step in machine.window] == ([] if self.over else self.flying)
        assert machine.idle == (self.over or not self.flying)
        assert self.over or machine.window.free == self.slots, "tokens and window agree"
        assert self.over or all(self.waits_for[step] in self.flying for step in self.unreleased), "no wait for nothing"

    @property
    def unreleased(self) -> list[int]:
        return [number for number in self.flying if number in self.waits_for and number not in self.released]

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        self.drain()
        self.replay()

    def drain(self) -> None:
        """Answer everything: the machine must come to rest by itself, oldest first, with every slot back."""
        while not self.over and self.flying:
            if self.unreported:
                self.settle()
            else:
                number, rank = self.answerable[-1]  # the youngest first, the hardest order
                self.given[number].add(rank)
                self.happen("answer", number, rank)
            self.holds()
        if not self.over:
            assert self.driver.machine.idle
            assert self.slots == self.depth
            assert not any(self.reports.values())
            assert self.settled == list(self.requests)
            assert sorted(self.released) == sorted(self.waits_for)

    def replay(self) -> None:
        """The same events in a new machine give the same effects."""
        again = self.fresh()
        effects = []
        for name, args, kwargs in self.events:
            try:
                effects.append(told(CALLS[name](again, *args, **kwargs)))
            except REFUSALS as error:
                effects.append([("refused", type(error).__name__)])
        assert effects == self.effects


def test_any_sequence_of_events() -> None:
    run_state_machine_as_test(PipelineRules, settings=settings(max_examples=150, stateful_step_count=40, deadline=None))


SCRIPT = """
from async_pp.core.gather import Scope
from tests.core.driving import Driver, told

driver = Driver(depth=4, ranks=5, output_rank=4)
names = ["request-%d" % number for number in range(40)]
def plan(requests, **kwargs):
    return driver.machine.plan(requests, None, now_s=0.0, **kwargs)
for turn in range(10):
    base = turn * 4
    print(told(plan(names, pending_tokens=False, scope=Scope.ALL)))
    for _ in range(3):
        print(told(plan(names[turn:], pending_tokens=True, scope=Scope.ALL)))
    for step in range(base, base + 4):
        for rank in (3, 1, 4, 0, 2):
            print(told(driver.answer(step, rank)))
        print(list(driver.step(step).gather.answers()), driver.step(step).told())
        print(told(driver.settled(step)))
"""


def test_effects_do_not_depend_on_the_hash_seed() -> None:
    """Request ids are kept in sets; no order of theirs may reach an effect. Another process is another hash seed."""
    outputs = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE,
            check=True,
        ).stdout
        for seed in ("0", "1", "2")
    }
    assert len(outputs) == 1
    assert outputs.pop().count(b"settle") > 40
