"""Gather: each rank is folded once, and the result does not depend on the order of arrival."""

from itertools import permutations

import pytest

from async_pp.core.gather import Gather, Scope

ORDERS = [order for ranks in range(1, 6) for order in permutations(range(ranks))]


@pytest.mark.parametrize("ranks", range(1, 6))
def test_all_orders_of_arrival_give_one_result(ranks: int) -> None:
    expected = {rank: f"answer {rank}" for rank in range(ranks)}
    for output_rank in range(ranks):
        for order in permutations(range(ranks)):
            gather = Gather(ranks, output_rank, Scope.ALL)
            for position, rank in enumerate(order):
                assert not gather.complete
                assert gather.missing == set(order[position:])
                assert gather.fold(rank, f"answer {rank}")
            assert gather.complete
            assert gather.missing == frozenset()
            assert list(gather.answers().items()) == list(expected.items())
            assert gather.output == f"answer {output_rank}"


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_a_rank_that_answers_twice_counts_once_at_every_position(order: tuple[int, ...]) -> None:
    for twice in range(len(order)):
        gather = Gather(len(order), 0, Scope.ALL)
        for position, rank in enumerate(order):
            assert gather.fold(rank, ("first", rank))
            if position >= twice:
                assert not gather.fold(order[twice], ("second", order[twice]))
                assert gather.missing == set(order[position + 1 :])
        assert gather.answers() == {rank: ("first", rank) for rank in range(len(order))}


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_the_output_scope_takes_the_output_rank_alone(order: tuple[int, ...]) -> None:
    output_rank = len(order) - 1
    gather = Gather(len(order), output_rank, Scope.OUTPUT)
    assert gather.missing == {output_rank}
    for position, rank in enumerate(order):
        assert gather.fold(rank, rank) == (rank == output_rank)
        assert gather.complete == (output_rank in order[: position + 1])
    assert gather.answers() == {output_rank: output_rank}


@pytest.mark.parametrize("rank", [-1, 3, 99])
def test_a_rank_that_does_not_exist_changes_nothing(rank: int) -> None:
    gather = Gather(3, 2, Scope.ALL)
    assert not gather.fold(rank, "stray")
    assert gather.answers() == {}
    assert gather.missing == {0, 1, 2}


@pytest.mark.parametrize("position", range(3))
def test_an_error_or_nothing_is_an_answer_like_any_other(position: int) -> None:
    answers: list[object] = ["left", None, "right"]
    answers[position] = ValueError("raised by the rank")
    gather = Gather(3, 1, Scope.ALL)
    for rank, answer in enumerate(answers):
        assert gather.fold(rank, answer)
        assert not gather.fold(rank, "again")
    assert gather.complete
    assert list(gather.answers().values()) == answers


def test_the_answers_are_a_copy() -> None:
    gather = Gather(2, 0, Scope.ALL)
    gather.fold(1, "kept")
    gather.answers().clear()
    assert gather.answers() == {1: "kept"}


def test_there_is_no_output_before_the_output_rank_answered() -> None:
    gather = Gather(2, 1, Scope.ALL)
    gather.fold(0, "not the output")
    with pytest.raises(KeyError):
        _ = gather.output


@pytest.mark.parametrize(("ranks", "output_rank"), [(0, 0), (1, 1), (2, -1), (2, 2)])
def test_the_output_rank_must_exist(ranks: int, output_rank: int) -> None:
    with pytest.raises(ValueError, match=f"output rank {output_rank} is not one of {ranks} ranks"):
        Gather(ranks, output_rank, Scope.OUTPUT)
