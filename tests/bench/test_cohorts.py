"""Even cohorts: who travels in a step, and what it carries."""

from collections import deque

from async_pp.bench.cohorts import Cohort, Member, Step, divide, take_turns


def unlimited(_step, _history):
    return 100


def test_a_step_counts_sequences_tokens_and_pairs():
    cohort = Cohort(deque([Member(0, 4, 2), Member(0, 150, 2), Member(5, 1, 1)]), 8, unlimited)
    assert cohort.plan(0) == Step(2, 4 + 100, 4 * 4 + 100 * 100)
    cohort.settle(1)
    assert cohort.plan(1) == Step(2, 1 + 50, 5 + 50 * 150)
    cohort.settle(2)
    assert cohort.plan(2) == Step(1, 1, 151)
    cohort.settle(3)
    assert cohort.plan(3) is None and cohort.next_arrival_s() == 5


def test_without_room_a_step_still_takes_a_token_of_a_prompt():
    cohort = Cohort(deque([Member(0, 2, 1), Member(0, 2, 1)]), 8, lambda _step, _history: 0)
    assert cohort.plan(0) == Step(1, 1, 1) and not cohort.waits
    cohort.settle(1)
    assert cohort.plan(1) == Step(1, 1, 2) and cohort.waits


def test_seats_are_divided_evenly_and_no_cohort_is_without():
    def first_steps(cohorts):
        return [cohort.plan(0).sequences for cohort in cohorts]

    members = [Member(0, 1, 1) for _ in range(9)]
    assert first_steps(divide(members, 3, 7, unlimited)) == [3, 2, 2]
    assert first_steps(divide(members, 5, 2, unlimited)) == [1, 1]
    assert first_steps(take_turns(members, 4, 9, unlimited)) == [3, 2, 2, 2]


def test_a_free_seat_takes_whoever_is_next():
    first, second = take_turns([Member(0, 1, 2), Member(0, 1, 1), Member(0, 1, 1)], 2, 2, unlimited)
    for cohort in (first, second):
        cohort.plan(0)
    second.settle(1)
    assert second.plan(1) == Step(1, 1, 1), "the third one, though the first cohort's turn comes"
