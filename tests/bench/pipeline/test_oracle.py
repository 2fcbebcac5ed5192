"""The formula on loads small enough to compute by hand."""

import pytest

from async_pp.bench.pipeline.loads import Arrival, Conditions, Load, find
from async_pp.bench.pipeline.measured import figures
from async_pp.bench.pipeline.oracle import compute
from async_pp.ranks.sleeping_runner import StageTime

SECOND = StageTime(1.0)


def times(stages, *arrivals):
    return compute(Load("", (arrivals,)), stages).answered[0].times_s


def test_one_request_takes_every_stage_for_every_token():
    assert times([SECOND, StageTime(2.0)], Arrival(0.5, 16, 3)) == [[3.5, 6.5, 9.5]]


def test_even_cohorts_fill_the_pipe():
    # Two cohorts of one: the second enters stage 0 when the first has left it; then each waits only for itself.
    assert times([SECOND] * 2, Arrival(0.0, 1, 3), Arrival(0.0, 1, 3)) == [[2, 4, 6], [3, 5, 7]]


def test_the_slowest_stage_sets_the_period():
    (first, second) = times([SECOND, StageTime(3.0)], Arrival(0.0, 1, 3), Arrival(0.0, 1, 3))
    assert (first, second) == ([4, 10, 16], [7, 13, 19])


def test_who_comes_while_the_cohort_is_away_waits_for_its_return():
    assert times([SECOND], Arrival(0.0, 1, 2), Arrival(0.5, 1, 2)) == [[1, 2], [2, 3]]


def test_portions_of_a_prompt_follow_each_other_without_waiting():
    # 1,100 tokens in steps of 512: the third ends two seconds after the first on the last stage; then one decode.
    assert times([SECOND] * 3, Arrival(0.0, 1100, 2)) == [[5, 8]]


def test_steps_have_limits():
    # 64 requests run at most on one stage, and the 65th waits until the first have ended.
    found = times([SECOND], *[Arrival(0.0, 1, 1)] * 65)
    assert found == [[1]] * 64 + [[2]]
    # 512 tokens at most: the second prompt's rest goes with the decode of the first.
    assert times([SECOND], Arrival(0.0, 300, 2), Arrival(0.0, 300, 1)) == [[1, 2], [2]]


@pytest.mark.parametrize("pp", [4, 8])
def test_a_long_burst_comes_near_the_steady_limit(pp):
    stage = StageTime(0.004, 0.001, 0.0001)
    load = Load("", ((Arrival(0.0, 16, 4000),) * (4 * pp),))
    steady = 4 / stage.of(4, 4)
    assert steady == pytest.approx(476, rel=0.01)
    assert figures(load.sections, compute(load, [stage] * pp)).tokens_per_s == pytest.approx(steady, rel=0.01)


def test_every_load_ends():
    conditions = Conditions((StageTime(0.004, 0.001, 0.0001),) * 3, duration_s=10.0)
    for load in find(["all"], conditions):
        for section, answered in zip(load.sections, compute(load, conditions.stages).answered, strict=True):
            assert [len(of) for of in answered.times_s] == [arrival.tokens_out for arrival in section]
            assert all(of[0] > arrival.at_s for of, arrival in zip(answered.times_s, section, strict=True))
