"""The transition table: every cell, valid or not, and that table and handlers cover each other."""

import ast
import inspect
import textwrap
from collections.abc import Callable
from itertools import product

import pytest

from async_pp.core import pipeline
from async_pp.core.gather import Gather, Scope
from async_pp.core.pipeline import STORY_LENGTH, TRANSITIONS, Effect, Event, InvalidTransition, Pipeline, State, Step
from tests.core.driving import Driver, told

CELLS = list(product(State, Event))
FINAL = {State.SETTLED, State.LOST}

# Written out once more, by hand: a change of the table must be meant.
EXPECTED = {
    ("NEW", "DISPATCH"): "COMPUTING",
    ("NEW", "DEFER"): "DEFERRED",
    ("DEFERRED", "RELEASE"): "COMPUTING",
    ("DEFERRED", "LOSE"): "LOST",
    ("COMPUTING", "ANSWER"): "COMPUTING",
    ("COMPUTING", "COMPLETE"): "READY",
    ("COMPUTING", "LOSE"): "LOST",
    ("READY", "SETTLE"): "SETTLING",
    ("READY", "LOSE"): "LOST",
    ("SETTLING", "SETTLED"): "SETTLED",
    ("SETTLING", "LOSE"): "LOST",
}


def step_in(state: State) -> Step:
    step = Step(3, frozenset("a"), "plan", Gather(2, 1, Scope.ALL), None, planned_at_s=10.0)
    step.story.append((10.5, "set up"))
    step.state = state
    return step


@pytest.mark.parametrize(("state", "event"), CELLS, ids=lambda value: value.name)
def test_cell(state: State, event: Event) -> None:
    step = step_in(state)
    target = EXPECTED.get((state.name, event.name))
    if target is not None:
        step.take(event, 12.0)
        assert step.state.name == target
        assert list(step.story) == [(10.5, "set up"), (12.0, event.name.lower())]
        return
    with pytest.raises(InvalidTransition) as caught:
        step.take(event, 12.0)
    error = caught.value
    assert (error.step, error.state, error.event) == (3, state, event)
    assert str(error) == f"step 3: {event.name} in state {state.name}; story: +0.5000 s set up"
    assert step.state is state
    assert list(step.story) == [(10.5, "set up")]


def test_every_state_and_event_is_in_the_table() -> None:
    sources = {state for state, _ in TRANSITIONS}
    targets = set(TRANSITIONS.values())
    assert sources == set(State) - FINAL
    assert targets == set(State) - {State.NEW}
    assert {event for _, event in TRANSITIONS} == set(Event)


def test_every_event_and_no_transition_of_its_own_is_in_the_handlers() -> None:
    tree = ast.parse(textwrap.dedent(inspect.getsource(Pipeline)))
    named = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "Event"
    }
    assert named == {event.name for event in Event}
    # `take` is the only place that moves a step, so nothing can go round the table.
    module = ast.parse(inspect.getsource(pipeline))
    moves = [
        target
        for node in ast.walk(module)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Attribute) and target.attr == "state"
    ]
    in_take = ast.parse(textwrap.dedent(inspect.getsource(Step.take)))
    assert len([node for node in ast.walk(in_take) if isinstance(node, ast.Assign)]) == 2  # target, state
    assert [ast.unparse(target) for target in moves] == ["self.state", "self.state"]  # take; InvalidTransition's record


def in_new() -> Driver:
    return Driver()


def in_computing() -> Driver:
    driver = Driver()
    driver.plan("a", scope=Scope.ALL)
    return driver


def in_deferred() -> Driver:
    """Step 0 computes, step 1 waits for it."""
    driver = Driver()
    driver.plan("a")
    driver.plan("a", pending=True)
    return driver


def in_ready() -> Driver:
    """Step 0 computes, step 1 is complete behind it."""
    driver = Driver()
    driver.plan("a")
    driver.plan("b")
    assert driver.answer(1) == []
    return driver


def in_settling() -> Driver:
    driver = Driver()
    driver.plan("a")
    driver.answer(0)
    return driver


CAUSE = RuntimeError("gone")
Act = Callable[[Driver], list[Effect]]

# For each valid cell: how to get there, the step, what happens, and the effects of the handler that makes it happen.
HANDLED: dict[tuple[State, Event], tuple[Callable[[], Driver], int, Act, list[tuple[object, ...]]]] = {
    (State.NEW, Event.DISPATCH): (in_new, 0, lambda d: d.plan(), [("dispatch", 0, "whole")]),
    (State.NEW, Event.DEFER): (in_computing, 1, lambda d: d.plan(pending=True), [("dispatch", 1, "deferred")]),
    (State.DEFERRED, Event.RELEASE): (
        in_deferred,
        1,
        lambda d: d.answer(0) + d.settled(0),
        [("settle", 0), ("free slot",), ("release", 1)],
    ),
    (State.COMPUTING, Event.ANSWER): (in_computing, 0, lambda d: d.answer(0, rank=0), []),
    (State.COMPUTING, Event.COMPLETE): (in_ready, 0, lambda d: d.answer(0), [("settle", 0)]),
    (State.READY, Event.SETTLE): (
        in_ready,
        1,
        lambda d: d.answer(0) + d.settled(0),
        [("settle", 0), ("free slot",), ("settle", 1)],
    ),
    (State.SETTLING, Event.SETTLED): (in_settling, 0, lambda d: d.settled(0), [("free slot",)]),
    (State.DEFERRED, Event.LOSE): (in_deferred, 1, lambda d: d.lose(CAUSE), [("end", repr(CAUSE), (0, 1))]),
    (State.COMPUTING, Event.LOSE): (in_computing, 0, lambda d: d.lose(CAUSE), [("end", repr(CAUSE), (0,))]),
    (State.READY, Event.LOSE): (in_ready, 1, lambda d: d.lose(CAUSE), [("end", repr(CAUSE), (0, 1))]),
    (State.SETTLING, Event.LOSE): (in_settling, 0, lambda d: d.lose(CAUSE), [("end", repr(CAUSE), (0,))]),
}


def test_every_valid_cell_is_handled() -> None:
    assert HANDLED.keys() == TRANSITIONS.keys()


@pytest.mark.parametrize("cell", HANDLED, ids=lambda cell: f"{cell[0].name}-{cell[1].name}")
def test_handler_of_a_valid_cell(cell: tuple[State, Event], monkeypatch: pytest.MonkeyPatch) -> None:
    make, number, act, effects = HANDLED[cell]
    driver = make()
    taken = []
    take = Step.take

    def spy(step: Step, event: Event, now_s: float) -> None:
        taken.append((step.number, step.state, event))
        take(step, event, now_s)

    monkeypatch.setattr(Step, "take", spy)
    assert told(act(driver)) == effects
    assert (number, *cell) in taken
    driver.machine.validate()


def test_the_story_before_anything_happened() -> None:
    assert Step(0, frozenset(), None, Gather(1, 0, Scope.ALL), None, planned_at_s=0.0).told() == "nothing yet"


def test_the_story_is_bounded_and_keeps_the_latest() -> None:
    driver = Driver(ranks=STORY_LENGTH + 8, output_rank=0)
    driver.plan(scope=Scope.ALL)
    step = driver.step(0)
    for rank in range(STORY_LENGTH + 8):
        driver.answer(0, rank)
    assert len(step.story) == STORY_LENGTH
    assert [what for _, what in step.story][-2:] == ["complete", "settle"]
    assert step.told().endswith(f"+{STORY_LENGTH + 8:.4f} s complete, +{STORY_LENGTH + 8:.4f} s settle")
