"""The pipeline machine, case by case: what it does, what it refuses, and that a refusal changes nothing."""

from collections.abc import Callable

import pytest

from async_pp.core.gather import Gather, Scope
from async_pp.core.pipeline import EndEpoch, EpochOver, Event, InvalidTransition, Pipeline, State
from async_pp.core.window import WindowFull
from tests.core.driving import Driver, told


def test_one_step_from_plan_to_settled() -> None:
    driver = Driver()
    assert driver.machine.idle
    assert told(driver.plan("ab")) == [("dispatch", 0, "whole")]
    step = driver.step(0)
    assert not driver.machine.idle
    assert (step.requests, step.plan, step.waits_for, step.planned_at_s) == (frozenset("ab"), "plan ab", None, 1.0)
    assert driver.machine.settling is None
    assert told(driver.answer(0)) == [("settle", 0)]
    assert driver.machine.settling == 0
    assert step.gather.output == (0, 1)
    assert told(driver.settled(0)) == [("free slot",)]
    assert driver.machine.idle and driver.machine.settling is None
    assert step.state is State.SETTLED
    assert step.told() == "+0.0000 s dispatch, +1.0000 s complete, +1.0000 s settle, +2.0000 s settled"


def test_steps_settle_in_dispatch_order_one_at_a_time() -> None:
    driver = Driver(depth=3)
    for request in "abc":
        driver.plan(request)
    assert told(driver.answer(2)) == []
    assert told(driver.answer(0)) == [("settle", 0)]
    assert told(driver.answer(1)) == []
    assert told(driver.settled(0)) == [("free slot",), ("settle", 1)]
    assert told(driver.settled(1)) == [("free slot",), ("settle", 2)]
    assert told(driver.settled(2)) == [("free slot",)]


def test_a_step_that_needs_every_rank_waits_for_every_rank() -> None:
    driver = Driver(ranks=3, output_rank=2)
    driver.plan(scope=Scope.ALL)
    assert driver.answer(0, rank=2) == []
    assert driver.answer(0, rank=0) == []
    assert told(driver.answer(0, rank=1)) == [("settle", 0)]
    assert list(driver.step(0).gather.answers()) == [0, 1, 2]


def test_numbers_go_on_after_a_settle() -> None:
    driver = Driver(depth=1)
    for number in range(5):
        assert told(driver.plan()) == [("dispatch", number, "whole")]
        driver.answer(number)
        driver.settled(number)


def test_pending_tokens_defer_behind_the_youngest_step_that_shares_a_request() -> None:
    driver = Driver()
    driver.plan("a")
    driver.plan("ab")
    driver.plan("c")
    assert told(driver.plan("a", pending=True)) == [("dispatch", 3, "deferred")]
    assert driver.step(3).waits_for == 1
    assert driver.step(3).state is State.DEFERRED
    driver.answer(0)
    assert told(driver.settled(0)) == [("free slot",)]
    driver.answer(1)
    assert told(driver.settled(1)) == [("free slot",), ("release", 3)]
    assert told(driver.answer(3)) == []
    assert told(driver.answer(2)) == [("settle", 2)]
    assert told(driver.settled(2)) == [("free slot",), ("settle", 3)]


def test_pending_tokens_without_a_sharing_step_are_not_deferred() -> None:
    driver = Driver()
    driver.plan("a")
    assert told(driver.plan("b", pending=True)) == [("dispatch", 1, "whole")]
    assert driver.step(1).waits_for is None


def test_a_sharing_step_without_pending_tokens_is_not_deferred() -> None:
    driver = Driver()
    driver.plan("a")
    assert told(driver.plan("a")) == [("dispatch", 1, "whole")]


def test_releases_come_before_the_next_settle_in_dispatch_order() -> None:
    """The next settle may take long; the ranks must have their sample messages meanwhile."""
    driver = Driver()
    driver.plan("ab")
    driver.plan("c")
    driver.plan("a", pending=True)
    driver.plan("b", pending=True)
    driver.answer(1)
    driver.answer(0)
    assert told(driver.settled(0)) == [("free slot",), ("release", 2), ("release", 3), ("settle", 1)]


def test_a_chain_of_deferred_steps_is_released_link_by_link() -> None:
    driver = Driver()
    driver.plan("a")
    driver.plan("a", pending=True)
    driver.plan("a", pending=True)
    driver.answer(0)
    assert told(driver.settled(0)) == [("free slot",), ("release", 1)]
    driver.answer(1)
    assert told(driver.settled(1)) == [("free slot",), ("release", 2)]


def test_a_step_may_be_deferred_behind_one_that_settles() -> None:
    driver = Driver()
    driver.plan("a")
    driver.answer(0)
    assert told(driver.plan("a", pending=True)) == [("dispatch", 1, "deferred")]
    assert told(driver.settled(0)) == [("free slot",), ("release", 1)]


def test_a_report_overtakes_no_answer_of_its_rank() -> None:
    driver = Driver()
    driver.plan("a", scope=Scope.ALL)
    driver.plan("b", scope=Scope.ALL)
    driver.plan("ab", pending=True)
    assert told(driver.report(0, "before")) == [("fold", 0, "before")]
    driver.answer(0, rank=0)
    assert told(driver.report(1, "of another rank")) == [("fold", 1, "of another rank")]
    assert driver.report(0, "behind 0") == driver.report(0, "behind 0 too") == []
    driver.answer(1, rank=0)
    driver.answer(1, rank=1)
    assert driver.report(0, "behind 1") == []
    assert told(driver.answer(0, rank=1)) == [("settle", 0)]
    assert driver.report(1, "behind both") == []
    folds = [("fold", 0, "behind 0"), ("fold", 0, "behind 0 too")]
    assert told(driver.settled(0)) == [("free slot",), *folds, ("settle", 1)]
    assert driver.report(0, "behind what is being settled") == []
    folds = [("fold", 0, "behind 1"), ("fold", 1, "behind both"), ("fold", 0, "behind what is being settled")]
    assert told(driver.settled(1)) == [("free slot",), ("release", 2), *folds]


@pytest.mark.parametrize("rank", [0, 1])
def test_an_answer_to_a_deferred_step_is_refused_and_changes_nothing(rank: int) -> None:
    """A rank answers after sampling, and its sample message has not been sent: such an answer is a lie."""
    driver = Driver()
    driver.plan("a")
    driver.plan("a", pending=True, scope=Scope.ALL)
    before = driver.snapshot()
    with pytest.raises(InvalidTransition, match=r"step 1: ANSWER in state DEFERRED; story: \+0.0000 s defer"):
        driver.answer(1, rank)
    assert driver.snapshot() == before


@pytest.mark.parametrize(
    ("number", "rank"),
    [(0, 1), (1, 0), (1, 2), (1, -1), (2, 1), (3, 1), (-1, 1)],
    ids=["settled", "other rank", "no such rank", "negative", "ready, again", "never planned", "no such number"],
)
def test_an_answer_nobody_waits_for_is_counted_and_changes_nothing(number: int, rank: int) -> None:
    driver = Driver()
    for request in "abc":
        driver.plan(request)
    driver.answer(0)
    driver.settled(0)
    driver.answer(2)
    before = driver.snapshot()
    assert driver.answer(number, rank) == []
    assert driver.machine.ignored_answers == 1
    assert driver.snapshot() == before
    driver.answer(number, rank)
    assert driver.machine.ignored_answers == 2


def test_an_answer_to_a_step_that_settles_is_ignored() -> None:
    driver = Driver()
    driver.plan()
    driver.answer(0)
    assert driver.answer(0) == []
    assert driver.machine.ignored_answers == 1


@pytest.mark.parametrize("number", [1, 2, -1])
def test_a_settle_nobody_asked_for_is_refused_and_changes_nothing(number: int) -> None:
    driver = Driver()
    driver.plan("a")
    driver.plan("b")
    driver.answer(0)
    before = driver.snapshot()
    with pytest.raises(ValueError, match=f"step {number} was not being settled"):
        driver.settled(number)
    assert driver.snapshot() == before
    assert told(driver.settled(0)) == [("free slot",)]
    with pytest.raises(ValueError, match="step 0 was not being settled"):
        driver.settled(0)


def test_a_plan_without_a_slot_is_refused_and_uses_no_number() -> None:
    driver = Driver(depth=1)
    driver.plan("a")
    before = driver.snapshot()
    with pytest.raises(WindowFull):
        driver.plan("b")
    assert driver.snapshot() == before
    driver.answer(0)
    driver.settled(0)
    assert told(driver.plan("b")) == [("dispatch", 1, "whole")]


def test_losing_ends_the_epoch_with_the_steps_in_flight() -> None:
    driver = Driver()
    driver.plan("a")
    driver.plan("b")
    driver.plan("a", pending=True)
    driver.answer(1)
    driver.answer(0)
    steps = list(driver.machine.window)
    cause = RuntimeError("rank 1 ended")
    effects = driver.lose(cause)
    assert effects == [EndEpoch(cause, tuple(steps))]
    assert [step.number for step in steps] == [0, 1, 2]
    assert {step.state for step in steps} == {State.LOST}
    assert steps[2].told().endswith("lose")
    assert driver.machine.idle
    driver.machine.validate()


def test_nothing_comes_after_the_end() -> None:
    driver = Driver()
    driver.plan("a")
    driver.plan("b")
    driver.answer(0)
    cause = RuntimeError("rank 1 ended")
    driver.lose(cause)
    assert driver.lose(RuntimeError("rank 0 ended")) == []
    assert driver.machine.cause is cause
    assert driver.answer(1) == []
    assert driver.machine.ignored_answers == 1
    assert driver.report(0, "late") == []
    with pytest.raises(ValueError, match="step 0 was not being settled"):
        driver.settled(0)
    with pytest.raises(EpochOver, match="epoch 7 is over") as caught:
        driver.plan("c")
    assert caught.value.__cause__ is cause
    driver.machine.validate()


def test_losing_an_idle_epoch() -> None:
    driver = Driver()
    cause = RuntimeError("rank 0 ended")
    assert driver.lose(cause) == [EndEpoch(cause, ())]


def ready_but_not_settling(machine: Pipeline) -> None:
    machine._settling = None


def settled_in_window(machine: Pipeline) -> None:
    step = machine.window.oldest
    assert step is not None
    step.take(Event.SETTLED, 0.0)


def incomplete_in_settling(machine: Pipeline) -> None:
    step = machine.window.oldest
    assert step is not None
    step.gather = Gather(2, 1, Scope.ALL)


def oldest_left_ready(machine: Pipeline) -> None:
    ready_but_not_settling(machine)
    step = machine.window.oldest
    assert step is not None
    step.state = State.READY


def too_many(machine: Pipeline) -> None:
    machine.window.depth = 1


def out_of_order(machine: Pipeline) -> None:
    steps = machine.window.clear()
    machine.window._steps.update({step.number: step for step in reversed(steps)})


def alive_after_the_end(machine: Pipeline) -> None:
    machine.cause = RuntimeError("gone")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (ready_but_not_settling, "one settle at a time"),
        (settled_in_window, "only live steps"),
        (incomplete_in_settling, "ready means complete"),
        (oldest_left_ready, "is being settled"),
        (too_many, "never more steps than slots"),
        (out_of_order, "in dispatch order"),
        (alive_after_the_end, "nothing in flight after the end"),
    ],
)
def test_validate_sees_damage(damage: Callable[[Pipeline], None], words: str) -> None:
    driver = Driver()
    driver.plan("a")
    driver.plan("b")
    driver.answer(0)
    driver.machine.validate()
    damage(driver.machine)
    with pytest.raises(AssertionError, match=words):
        driver.machine.validate()
