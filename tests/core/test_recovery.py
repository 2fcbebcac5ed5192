"""Recovery: restarts are limited, poison is found, everyone else goes on."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_pp.core.recovery import PAST_TOKENS, GiveUp, Intensity, OnLoss, Recovery, Restart

NAMES = {f"r{number}": 0 for number in range(5)}


def test_a_loss_lets_every_open_request_go_on() -> None:
    verdict = Recovery().lost(computed=["r1"], open_requests=dict.fromkeys(["r0", "r1", "r2"], 0), now_s=0.0)
    assert verdict == Restart(failed=frozenset(), poisoned=frozenset(), suspects=frozenset({"r1"}))


def test_who_is_computed_in_a_second_loss_is_poison_and_the_others_go_on() -> None:
    recovery = Recovery()
    recovery.lost(["r1", "r2"], NAMES, 0.0)
    assert recovery.lost(["r1", "r3"], NAMES, 1.0) == Restart(
        failed=frozenset({"r1"}), poisoned=frozenset({"r1"}), suspects=frozenset({"r2", "r3"})
    )


def test_a_name_that_has_ended_and_comes_again_is_no_suspect() -> None:
    recovery = Recovery()
    recovery.lost(["r1"], {"r1": 0}, 0.0)
    recovery.lost([], {"r2": 0}, 1.0)
    verdict = recovery.lost(["r1"], {"r1": 0, "r2": 0}, 2.0)
    assert isinstance(verdict, Restart) and not verdict.poisoned


@pytest.mark.parametrize(
    ("tokens", "after_s", "poison"),
    [
        (PAST_TOKENS, 300.0, False),
        (PAST_TOKENS - 1, 1e6, True),  # it dies where it died, however long it has waited meanwhile
        (1e6, 299.0, True),  # it dies again and again, and would use up the restarts
    ],
)
def test_a_loss_is_forgotten_when_it_is_old_and_the_request_well_past_it(
    tokens: int, after_s: float, poison: bool
) -> None:
    recovery = Recovery()
    recovery.lost(["r1"], {"r0": 0, "r1": 40}, 0.0)
    verdict = recovery.lost(["r1"], {"r0": 0, "r1": 40 + tokens}, after_s)
    assert isinstance(verdict, Restart) and verdict.poisoned == (frozenset({"r1"}) if poison else frozenset())
    if not poison:
        again = recovery.lost(["r1"], {"r0": 0, "r1": 41 + tokens}, after_s + 1.0)
        assert isinstance(again, Restart) and again.poisoned == {"r1"}, "the second loss counts as a first one"


def test_who_is_cleared_is_no_suspect_of_a_loss_in_which_it_was_not_computed() -> None:
    recovery = Recovery()
    recovery.lost(["r0", "r1"], {"r0": 0, "r1": 0}, 0.0)
    verdict = recovery.lost([], {"r0": PAST_TOKENS, "r1": 0}, 300.0)
    assert isinstance(verdict, Restart) and verdict.suspects == {"r1"}


@given(period_s=st.integers(1, 1000), gained=st.integers(0, 2000))
def test_a_request_that_dies_again_and_again_never_ends_the_engine(period_s: int, gained: int) -> None:
    recovery = Recovery()
    for number in range(1, 12):
        verdict = recovery.lost(["r1"], {"r1": number * gained}, number * period_s)
        assert isinstance(verdict, Restart)
        if verdict.poisoned:
            assert number == 2, "it comes to that soon or never"
            return
    assert gained >= PAST_TOKENS and period_s >= 300.0


def test_a_computed_request_that_has_ended_meanwhile_is_left_out() -> None:
    verdict = Recovery().lost(["gone"], {"r1": 0}, 0.0)
    assert verdict == Restart(failed=frozenset(), poisoned=frozenset(), suspects=frozenset())


def test_restarts_are_limited_within_the_time_and_allowed_again_after_it() -> None:
    recovery = Recovery(intensity=Intensity(most=3, within_s=300.0))
    assert all(isinstance(recovery.lost([], NAMES, at_s), Restart) for at_s in (0.0, 100.0, 200.0))
    verdict = recovery.lost([], NAMES, 299.9)
    assert isinstance(verdict, GiveUp) and "3 restarts within 300 s" in verdict.why
    assert isinstance(recovery.lost([], NAMES, 300.0), Restart)  # the first one is out of the window
    assert recovery.count == 5


def test_no_restart_at_all_can_be_wanted() -> None:
    assert isinstance(Recovery(intensity=Intensity(most=0)).lost([], NAMES, 0.0), GiveUp)
    assert isinstance(Recovery("exit").lost([], NAMES, 0.0), GiveUp)


def test_fail_ends_everyone_and_the_engine_goes_on() -> None:
    verdict = Recovery("fail").lost(["r1"], {"r1": 0, "r2": 0}, 0.0)
    assert verdict == Restart(failed=frozenset({"r1", "r2"}), poisoned=frozenset(), suspects=frozenset())


@pytest.mark.parametrize(("most", "within_s"), [(-1, 1.0), (1, 0.0), (1, -1.0), (1, float("nan"))])
def test_an_intensity_that_means_nothing_is_refused(most: int, within_s: float) -> None:
    with pytest.raises(ValueError, match="restarts"):
        Intensity(most, within_s)


@given(
    on_loss=st.sampled_from(["replay", "fail"]),
    losses=st.lists(
        st.tuples(
            st.sets(st.sampled_from(sorted(NAMES))),
            st.dictionaries(st.sampled_from(sorted(NAMES)), st.integers(0, 3 * PAST_TOKENS)),
            st.floats(0.0, 400.0),
        ),
        max_size=12,
    ),
)
def test_nobody_is_lost_or_failed_without_a_reason(
    on_loss: OnLoss, losses: list[tuple[set[str], dict[str, int], float]]
) -> None:
    recovery = Recovery(on_loss, Intensity(most=3, within_s=300.0))
    now_s, restarts_s = 0.0, []
    for computed, open_requests, passed_s in losses:
        now_s += passed_s
        verdict = recovery.lost(computed, open_requests, now_s)
        if isinstance(verdict, GiveUp):
            assert sum(at_s > now_s - 300.0 for at_s in restarts_s) == 3
            continue
        restarts_s.append(now_s)
        assert verdict.failed <= open_requests.keys() and verdict.poisoned <= verdict.failed & computed
        assert verdict.suspects <= open_requests.keys() - verdict.failed
        assert verdict.failed == (set(open_requests) if on_loss == "fail" else verdict.poisoned)
