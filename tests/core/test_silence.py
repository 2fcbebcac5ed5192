"""Ranks that have nothing to say of a step."""

from async_pp.core.deadlines import Row
from async_pp.core.silence import Silence

OUTPUT = 2


class Ranks:
    """Three ranks, the last of which answers; what they have left and told."""

    def __init__(self) -> None:
        self.silence = Silence(3, OUTPUT)
        self.left, self.told = [0] * 3, [0] * 3
        self.missing = {1: {0, 1, OUTPUT}, 2: {0, 1, OUTPUT}}
        self.silence.sent(1, 10)
        self.silence.sent(2, 11)

    def answered(self, step: int, rank: int) -> None:
        self.missing[step].discard(rank)
        self.silence.heard(rank)

    def found(self) -> list[tuple[int, int]]:
        found = self.silence.found(
            lambda rank: Row(0, 0.0, self.left[rank], 0.0, self.told[rank]), lambda step: sorted(self.missing[step])
        )
        for step, rank in found:
            self.missing[step].remove(rank)
        return found


def test_a_rank_that_has_left_the_step_and_has_nothing_on_its_way_is_silent() -> None:
    ranks = Ranks()
    ranks.left = [10, 10, 10]
    assert ranks.found() == [], "the output rank has not answered"
    ranks.answered(1, OUTPUT)
    assert ranks.found() == [(1, 0), (1, 1)]
    assert ranks.found() == []


def test_a_rank_that_is_at_the_step_still_is_not() -> None:
    ranks = Ranks()
    ranks.left = [11, 9, 10]
    ranks.answered(1, OUTPUT)
    assert ranks.found() == [(1, 0)]
    ranks.left[1] = 10
    assert ranks.found() == [(1, 1)]


def test_a_rank_whose_message_has_not_come_is_not() -> None:
    """It may be the answer, or that the step has failed."""
    ranks = Ranks()
    ranks.left, ranks.told = [10, 10, 10], [1, 0, 1]
    ranks.answered(1, OUTPUT)
    assert ranks.found() == [(1, 1)]
    ranks.answered(1, 0)
    assert ranks.found() == []


def test_steps_are_told_apart_by_the_work_that_they_are() -> None:
    ranks = Ranks()
    ranks.left = [11, 10, 11]
    ranks.answered(1, OUTPUT)
    ranks.answered(2, OUTPUT)
    assert ranks.found() == [(1, 0), (1, 1), (2, 0)]
    ranks.left[1] = 11
    assert ranks.found() == [(2, 1)]
