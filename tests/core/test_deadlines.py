"""Deadlines: how long, from when, and never against a rank that waits for another."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_pp.core.deadlines import ENOUGH, LEAST_S, MOST_S, WINDOW, Backlog, Deadline, Look, Overdue, Row, Work

# -- how long ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fixed_s", [0.0, -1.0, math.inf, math.nan])
def test_a_fixed_deadline_is_a_positive_number(fixed_s: float) -> None:
    with pytest.raises(ValueError, match="positive"):
        Deadline(fixed_s)


def test_a_fixed_deadline_holds_whatever_is_measured() -> None:
    deadline = Deadline(0.25)
    for step in range(ENOUGH):
        deadline.took(step, 3.0)
    assert deadline.seconds == 0.25


@pytest.mark.parametrize(
    "took_s, seconds", [(0.001, LEAST_S), (0.5, LEAST_S), (0.7, 7.0), (6.0, MOST_S), (9.0, MOST_S)]
)
def test_ten_times_p99_within_limits_once_enough_is_known(took_s: float, seconds: float) -> None:
    deadline = Deadline()
    for step in range(ENOUGH - 1):
        deadline.took(step, took_s)
        assert deadline.seconds == MOST_S
    deadline.took(ENOUGH - 1, 1000.0)  # one in a hundred is left out
    assert deadline.seconds == pytest.approx(seconds)


def test_the_slowest_stage_of_each_of_the_last_steps_counts() -> None:
    deadline = Deadline()
    for step in range(WINDOW + ENOUGH):
        for stage_s in (0.1, 0.9, 0.6):
            deadline.took(step, stage_s)
    deadline.took(0, 50.0)  # it has left the window
    assert deadline.seconds == pytest.approx(9.0)
    for step in range(WINDOW, 2 * WINDOW):
        deadline.took(step + ENOUGH, 0.7)
    assert deadline.seconds == pytest.approx(7.0)


# -- from when ---------------------------------------------------------------------------------------------------


class Case:
    """A backlog, the rows it is shown, and what else it asks for."""

    def __init__(self, ranks: int, ranks_per_stage: int = 1) -> None:
        self.rows = [Row(0, 0.0, 0, 0.0)] * ranks
        self.unanswered: dict[int | None, list[int]] = {}
        self.stopped: set[int] = set()
        self.backlog = Backlog(
            ranks_per_stage=ranks_per_stage,
            missing=lambda work: self.unanswered.get(work.step if work.call is None else work.call, []),
            stopped=lambda rank: rank in self.stopped,
        )

    def enters(self, now_s: float, *ranks: int) -> None:
        for rank in ranks:
            self.rows[rank] = self.rows[rank]._replace(entered=self.rows[rank].entered + 1, entered_s=now_s)

    def leaves(self, now_s: float, *ranks: int) -> None:
        for rank in ranks:
            self.rows[rank] = self.rows[rank]._replace(left=self.rows[rank].entered, left_s=now_s)

    def look(self, now_s: float, not_before_s: float = 0.0, deadline_s: float = 10.0) -> Look:
        return self.backlog.look(now_s, self.rows, deadline_s=deadline_s, not_before_s=not_before_s)


def test_with_nothing_on_its_way_there_is_nothing_to_look_at() -> None:
    case = Case(2)
    assert case.look(1.0) == Look(None, None)
    case.backlog.step(0, 1.0, deferred=False)
    case.enters(1.0, 0, 1)
    case.leaves(2.0, 0, 1)
    assert case.look(3.0) == Look(None, None)


def test_the_first_stage_has_from_the_dispatch_and_the_next_from_its_hand_over() -> None:
    case = Case(2)
    case.backlog.step(7, 1.0, deferred=False)
    assert case.look(1.0) == Look(None, 6.0), "what is measured may shorten the deadline"
    assert case.look(8.0) == Look(None, 11.0)
    assert case.look(11.0).overdue == Overdue((0,), 7, 7, False, 1.0)
    case.enters(1.0, 0, 1)
    case.leaves(9.0, 0)
    assert case.look(11.0) == Look(None, 16.0)
    assert case.look(19.0).overdue == Overdue((1,), 7, 7, False, 9.0)


def test_what_was_before_is_not_counted() -> None:
    case = Case(1)
    case.backlog.step(0, 1.0, deferred=False)
    case.backlog.step(1, 1.0, deferred=False)
    case.enters(1.0, 0)
    case.leaves(10.5, 0)
    assert case.look(11.0) == Look(None, 16.0)
    assert case.look(20.5).overdue == Overdue((0,), 1, 1, False, 10.5)


def test_time_in_which_the_engine_stood_still_is_not_counted() -> None:
    case = Case(1)
    case.backlog.step(0, 1.0, deferred=False)
    assert case.look(500.0, not_before_s=500.0) == Look(None, 505.0)
    assert case.look(509.0, not_before_s=500.0) == Look(None, 510.0)
    assert case.look(510.0, not_before_s=500.0).overdue == Overdue((0,), 0, 0, False, 500.0)


def test_a_row_that_tells_the_future_delays_nothing_for_ever() -> None:
    case = Case(2)
    case.rows[1] = Row(0, 0.0, 0, 1e300)
    case.backlog.step(0, 1.0, deferred=False)
    assert case.look(2.0).overdue is None
    assert case.look(12.0).overdue == Overdue((0,), 0, 0, False, 2.0)


def test_a_step_that_waits_for_the_word_to_sample_is_not_late() -> None:
    case = Case(2)
    case.backlog.step(0, 1.0, deferred=True)
    case.enters(1.0, 0, 1)
    assert case.look(300.0) == Look(None, 305.0)
    assert case.look(300.0, deadline_s=2.0) == Look(None, 302.0), "it may be released right now"
    case.backlog.released(0, 300.5)
    assert case.look(310.5).overdue == Overdue((0,), 0, 0, False, 300.5)


def test_of_peers_who_has_not_even_begun_comes_first() -> None:
    case = Case(4, ranks_per_stage=2)
    case.backlog.step(0, 1.0, deferred=False)
    case.enters(1.0, 0, 2, 3)
    assert case.look(20.0).overdue == Overdue((1, 0), 0, 0, False, 1.0)
    case.enters(2.0, 1)
    assert case.look(20.0).overdue == Overdue((0, 1), 0, 0, False, 1.0)


def test_a_rank_whose_process_is_stopped_explains_everything() -> None:
    case = Case(3)
    case.backlog.step(0, 1.0, deferred=False)
    case.enters(1.0, 0, 1, 2)
    case.stopped = {2}
    assert case.look(10.0).overdue is None
    assert case.look(20.0).overdue == Overdue((2,), 0, 0, False, 1.0)


def test_an_answer_that_does_not_come_is_late_too() -> None:
    case = Case(2)
    case.unanswered = {0: [1]}
    case.backlog.step(0, 1.0, deferred=False)
    case.enters(1.0, 0, 1)
    case.leaves(2.0, 0, 1)
    assert case.look(11.0).overdue is None
    assert case.look(12.0).overdue == Overdue((1,), 0, 0, True, 2.0)


def test_a_rank_that_was_stopped_in_a_later_step_before_its_answer_got_out_is_in_that_step() -> None:
    """What computed the later one may be why, so that is what the loss is put down to."""
    case = Case(2)
    case.backlog.step(0, 0.0, deferred=False)
    case.backlog.step(1, 0.0, deferred=False)
    case.enters(1.0, 0, 1)
    case.leaves(2.0, 0, 1)
    case.unanswered = {0: [1]}
    case.stopped = {1}
    case.look(2.0)
    assert case.look(12.0).overdue == Overdue((1,), 0, 0, True, 2.0), "stopped in none"
    case.enters(2.0, 1)
    assert case.look(12.0).overdue == Overdue((1,), 0, 1, True, 2.0)


def test_a_turn_of_the_connectors_has_no_stages_and_no_step() -> None:
    case = Case(3)
    case.unanswered = {5: [2]}
    case.backlog.call(5, 1.0, patient=False)
    case.enters(1.0, 0, 1, 2)
    case.leaves(3.0, 1)
    assert case.look(13.0).overdue == Overdue((0, 2), None, None, False, 3.0)
    assert case.backlog.step_in(case.rows[0]) is None
    case.leaves(4.0, 0, 2)
    assert case.look(14.0).overdue == Overdue((2,), None, None, True, 4.0)


def test_a_call_takes_as_long_as_somebody_waits_for_it_and_holds_up_what_is_behind_it_no_longer() -> None:
    case = Case(2)
    case.backlog.call(5, 1.0, patient=True)
    case.backlog.step(0, 1.0, deferred=False)
    case.enters(1.0, 0, 1)
    case.leaves(2.0, 0)
    case.enters(2.0, 0)
    assert case.look(3600.0) == Look(None, 3605.0)
    case.stopped = {1}
    assert case.look(3600.0).overdue == Overdue((1,), None, None, False, 2.0)
    case.stopped = set()
    case.backlog.given_up(5, 4000.0)
    assert case.look(4009.0).overdue is None
    assert case.look(4010.0).overdue == Overdue((1,), None, None, False, 4000.0)
    case.leaves(4011.0, 1)
    assert case.look(4011.0).overdue is None
    assert case.look(4021.0).overdue == Overdue((0,), 0, 0, False, 4011.0)
    case.backlog.call(6, 4022.0, patient=True)
    case.leaves(4022.0, 0)
    case.enters(4022.0, 1)
    case.leaves(4023.0, 1)
    case.enters(4024.0, 0, 1)
    case.leaves(4024.0, 0, 1)
    assert case.look(4024.0) == Look(None, None)
    case.backlog.given_up(6, 4025.0)  # in the moment in which it ended


def test_the_step_that_a_rank_is_in() -> None:
    case = Case(2)
    case.backlog.call(0, 1.0, patient=False)
    case.backlog.step(9, 1.0, deferred=False)
    assert case.backlog.step_in(case.rows[0]) is None
    case.enters(1.0, 0)
    assert case.backlog.step_in(case.rows[0]) is None
    case.leaves(1.0, 0)
    case.enters(1.0, 0)
    assert case.backlog.step_in(case.rows[0]) == 9
    case.leaves(1.0, 0)
    assert case.backlog.step_in(case.rows[0]) is None
    assert case.backlog.step_in(Row(77, 1.0, 76, 1.0)) is None, "of a work that was never sent"


# -- a pipeline in which one rank freezes ------------------------------------------------------------------------

DEADLINE_S = 10.0


@dataclass(frozen=True)
class Story:
    """What happens in a pipeline: works with their times, and a rank that freezes before or inside one of them."""

    stages: int
    ranks_per_stage: int
    works: Sequence[tuple[float, bool, bool, Sequence[float]]]  # pause before it, is a step, deferred, stage times
    slots: int
    rendezvous: bool  # a stage hands over only when the next one has taken what was before
    frozen: tuple[int, int, bool] | None  # rank, work, whether it has begun it


@st.composite
def stories(draw: st.DrawFn) -> Story:
    stages, per_stage = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    time_s = st.floats(0.01, 0.9 * DEADLINE_S / 2)
    works = draw(
        st.lists(
            st.tuples(
                st.floats(0.0, 30.0),
                st.booleans(),
                st.booleans(),
                st.lists(time_s, min_size=stages, max_size=stages),
            ),
            min_size=1,
            max_size=8,
        )
    )
    frozen = st.tuples(st.integers(0, stages * per_stage - 1), st.integers(0, len(works) - 1), st.booleans())
    return Story(stages, per_stage, works, draw(st.integers(1, 5)), draw(st.booleans()), draw(st.none() | frozen))


class Pipe:
    """The times at which each rank enters and leaves each work, by the recurrence of a pipeline."""

    def __init__(self, story: Story) -> None:
        self.story = story
        ranks = range(story.stages * story.ranks_per_stage)
        self.entered: list[list[float]] = [[] for _ in ranks]
        self.left: list[list[float]] = [[] for _ in ranks]
        self.sent: list[float] = []
        self.word: list[float] = []  # when the word to sample was there
        done: list[float] = []
        clock = 0.0
        for number, (pause_s, _, deferred, _) in enumerate(story.works):
            clock += pause_s
            if number >= story.slots:
                clock = max(clock, done[number - story.slots])
            self.sent.append(clock)
            self.word.append(max(clock, done[-1] if done else 0.0) if deferred else clock)
            self._run(number)
            done.append(max(left[number] for left in self.left))

    def _run(self, number: int) -> None:
        story = self.story
        _, step, _, times = story.works[number]
        before = self.sent[number]
        for stage in range(story.stages):
            ranks = range(stage * story.ranks_per_stage, (stage + 1) * story.ranks_per_stage)
            for rank in ranks:
                free = self.left[rank][-1] if number else 0.0
                halted = story.frozen == (rank, number, False)
                self.entered[rank].append(math.inf if halted else max(free, self.sent[number]))
            begins = max(before, *(self.entered[rank][number] for rank in ranks))
            ends = max(begins + times[stage], self.word[number])
            if step and story.rendezvous and number and stage + 1 < story.stages:
                following = range(ranks.stop, ranks.stop + story.ranks_per_stage)
                ends = max(ends, *(self.left[rank][number - 1] for rank in following))
            for rank in ranks:
                frozen = story.frozen is not None and story.frozen[1] == number and story.frozen[0] in ranks
                self.left[rank].append(math.inf if frozen else ends)
            before = ends if step else before

    def rows(self, now_s: float) -> list[Row]:
        def last(times: list[float]) -> tuple[int, float]:
            past = [time for time in times if time <= now_s]
            return len(past), past[-1] if past else 0.0

        pairs = zip(self.entered, self.left, strict=True)
        return [Row(*last(entered), *last(left)) for entered, left in pairs]


@settings(max_examples=300, deadline=None)
@given(stories(), st.lists(st.floats(0.0, 100.0), max_size=5))
def test_never_names_a_rank_that_waits_for_another_and_always_the_one_that_is_frozen(
    story: Story, extra: list[float]
) -> None:
    pipe = Pipe(story)

    def missing(work: Work) -> Sequence[int]:
        return ()

    backlog = Backlog(ranks_per_stage=story.ranks_per_stage, missing=missing, stopped=lambda rank: False)
    events: list[tuple[float, int, str]] = []
    for number, (_, step, deferred, _) in enumerate(story.works):
        events.append((pipe.sent[number], number, f"{'step' if step else 'turn'} {number} {deferred}"))
        if step and deferred:
            events.append((pipe.word[number], number + 1, f"word {number}"))
    events = [event for event in events if event[0] < math.inf]
    events += [(at, len(story.works) + 1, "look") for at in extra]
    end_s = max(at for at, *_ in events) + story.stages * len(story.works) * DEADLINE_S
    again_s: float | None = None
    named: tuple[float, Overdue] | None = None
    while named is None:
        events.sort()
        if again_s is not None and (not events or again_s < events[0][0]):
            now_s, what = again_s, "look"
        elif events:
            now_s, _, what = events.pop(0)
        else:
            break
        match what.split():
            case ["step", number, deferred]:
                backlog.step(int(number), now_s, deferred=deferred == "True")
            case ["turn", number, _]:
                backlog.call(int(number), now_s, patient=False)
            case ["word", number]:
                backlog.released(int(number), now_s)
        overdue, again_s = backlog.look(now_s, pipe.rows(now_s), deadline_s=DEADLINE_S, not_before_s=0.0)
        if overdue is not None:
            named = now_s, overdue
        assert now_s < end_s + DEADLINE_S
    happens = story.frozen is not None and pipe.left[story.frozen[0]][story.frozen[1]] == math.inf
    happens = happens and pipe.sent[story.frozen[1]] < math.inf if story.frozen is not None else False
    if named is None:
        assert not happens
        return
    now_s, overdue = named
    assert happens and story.frozen is not None
    rank, number, begun = story.frozen
    stage = rank // story.ranks_per_stage
    assert rank in overdue.ranks
    assert {other // story.ranks_per_stage for other in overdue.ranks} == {stage} or not story.works[number][1]
    if not begun:
        assert overdue.ranks[0] == rank
    assert overdue.step == (number if story.works[number][1] else None)
    # It could begin when all that was before it was done; what the others do after that may count once.
    others = [time for left in pipe.left for time in left if time < math.inf]
    assert now_s <= max(pipe.word[number], *others, 0.0) + DEADLINE_S
