"""The oracle against pipelines whose times are known, and the formula."""

import pytest

from async_pp.bench.simulate.stages import Formula, Mix, Oracle, StageCost, StepLoad, formula

ONE = StepLoad(sequences=1, tokens=1, attended=1)
DECODES = Mix(output_tokens=10, tokens=10, attended=0)


def test_a_cost_counts_steps_sequences_tokens_and_pairs():
    cost = StageCost(4, 1, 0.5, 0.25)
    assert cost.of(StepLoad(2, 6, 8)) == 4 + 2 + 3 + 2
    assert cost.slower(2).of(StepLoad(2, 6, 8)) == 22


@pytest.mark.parametrize("cost", [StageCost(4, 1, 0.5, 0.25), StageCost(4, 1, 0.5)])
def test_a_chunk_takes_the_seconds_it_is_given(cost):
    tokens = cost.chunk(60, 7)
    assert cost.of(StepLoad(1, tokens, tokens * (7 + tokens))) == pytest.approx(4 + 1 + 60)
    assert StageCost(4, 1).chunk(60, 7) == float("inf")


def test_equal_steps_follow_each_other_on_every_stage():
    oracle = Oracle([StageCost(1.0)] * 3, hop_s=0)
    ends = [oracle.spans(0, ONE)[-1][1] for _ in range(4)]
    assert ends == [3, 4, 5, 6]  # n + P - 1


def test_hops_delay_a_step_and_occupy_no_stage():
    oracle = Oracle([StageCost(1.0)] * 2, hop_s=0.5)
    assert oracle.spans(10, ONE) == [(10.5, 11.5), (12, 13)]
    assert oracle.spans(10, ONE) == [(11.5, 12.5), (13, 14)]


def test_a_slow_stage_sets_the_pace_and_a_long_step_holds_up_those_behind_it():
    oracle = Oracle([StageCost(1.0, 1.0), StageCost(3.0), StageCost(1.0)], hop_s=0)
    ends = [oracle.spans(0, StepLoad(0, 0, 0))[-1][1] for _ in range(3)]
    assert ends == [5, 8, 11]
    assert oracle.spans(0, StepLoad(20, 0, 0))[0] == (3, 24)
    assert oracle.spans(0, StepLoad(0, 0, 0))[0] == (24, 25)


@pytest.mark.parametrize("stages", [1, 4, 64])
def test_equal_stages_reach_a_full_even_round(stages):
    cost = StageCost(0.004, 0.001, 0.0001)  # 8 sequences: 12.8 ms
    found = formula([cost] * stages, DECODES, 8 * stages, hop_s=0, host_s=0, most=64)
    assert found.tokens_per_s == pytest.approx(8 / 0.0128)
    assert (found.cohorts, found.step_s) == (stages, pytest.approx(0.0128))


def test_the_slowest_stage_the_way_around_and_the_host_bound_it():
    cost = StageCost(0.01)
    slow = formula([cost, cost.slower(4)], DECODES, 8, hop_s=0, host_s=0, most=64)
    assert slow == Formula(pytest.approx(8 / 0.05), 1, 0.04)  # one cohort: 10 + 40 ms; two would take 80
    assert formula([cost] * 2, DECODES, 8, hop_s=0.01, host_s=0, most=2).tokens_per_s == pytest.approx(8 / 0.05)
    assert formula([cost] * 2, DECODES, 8, hop_s=0, host_s=0.1, most=2).tokens_per_s == pytest.approx(8 / 0.12)


def test_prompts_are_spread_over_the_steps_of_their_request():
    cost = StageCost(0.0, 0.0, 0.001, 0.0)
    mix = Mix(output_tokens=10, tokens=109, attended=0)
    assert formula([cost], mix, 4, hop_s=0, host_s=0, most=64).tokens_per_s == pytest.approx(10 / 0.109)
