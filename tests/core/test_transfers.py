"""Transfers as sets of ranks, and the pauses between asking for them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_pp.core.transfers import LEAST_PAUSE_S, MOST_PAUSE_S, PAUSE_SHARE, Transfers, pause_s


def anything(_: str) -> bool:
    return True


@given(st.integers(1, 5).flatmap(lambda ranks: st.tuples(st.just(ranks), st.permutations(range(ranks)))))
def test_a_transfer_has_ended_with_the_last_rank_whatever_the_order(case: tuple[int, list[int]]) -> None:
    ranks, order = case
    transfers = Transfers(ranks, ranks)
    for rank in order[:-1]:
        transfers.report("a", rank)
        assert transfers.take(anything) == set() and transfers.open == ("a",)
    transfers.report("a", order[-1])
    assert transfers.take(anything) == {"a"}
    assert transfers.take(anything) == set() and transfers.open == ()


def test_a_rank_that_reports_twice_counts_once() -> None:
    transfers = Transfers(2, 2)
    transfers.report("a", 0)
    transfers.report("a", 0)
    assert transfers.take(anything) == set() and transfers.repeated == 1
    transfers.report("a", 1)
    assert transfers.take(anything) == {"a"} and transfers.open == ()


def test_what_has_ended_waits_until_it_may_be_told() -> None:
    transfers = Transfers(1, 1)
    transfers.report("a", 0)
    assert transfers.take(lambda _: False) == set() and transfers.open == ("a",)
    assert transfers.take(anything) == {"a"}


def test_a_new_number_of_ranks_holds_for_transfers_that_nobody_has_reported() -> None:
    transfers = Transfers(3, 3)
    transfers.report("old", 0)
    transfers.expect(1)
    transfers.report("new", 2)
    assert transfers.take(anything) == {"new"}
    transfers.report("old", 1)
    assert transfers.take(anything) == set()
    transfers.report("old", 2)
    assert transfers.take(anything) == {"old"}


@pytest.mark.parametrize("expected", [0, 3])
def test_a_number_that_could_never_be_reached_is_refused(expected: int) -> None:
    with pytest.raises(ValueError, match=f"{expected} ranks are to report each transfer, and there are 2"):
        Transfers(2, expected)


def test_requests_that_are_gone_leave_nothing_behind() -> None:
    transfers = Transfers(2, 2)
    transfers.report("a", 0)
    transfers.forget(["a", "never seen"])
    assert transfers.open == ()
    transfers.report("a", 1)
    assert transfers.take(anything) == set()


def test_the_pause_grows_with_the_time_waited_within_bounds() -> None:
    assert pause_s(0.0) == LEAST_PAUSE_S
    assert pause_s(0.1) == pytest.approx(PAUSE_SHARE * 0.1)
    assert pause_s(60.0) == MOST_PAUSE_S
