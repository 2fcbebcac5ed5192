"""The bare pipe on loads whose best steps are known, and against the formula that nothing exceeds."""

import pytest

from async_pp.bench.simulate.bare import Pipe, fastest, throughput
from async_pp.bench.simulate.requests import Arrival, drawn, mix
from async_pp.bench.simulate.stages import StageCost, formula

COST = StageCost(0.004, 0.001, 0.0001)


def pipe(arrivals, *, stages=4, saturated=True, seats=None, cost=COST, **times):
    seats = 8 * stages if seats is None else seats
    return Pipe(
        [cost] * stages, times.get("hop_s", 0), times.get("host_s", 0), arrivals, saturated, seats, 2048, stages
    )


def ideal(of):
    return formula(of.costs, mix(of.arrivals), of.seats, hop_s=of.hop_s, host_s=of.host_s, most=of.most)


def test_even_decodes_reach_the_formula():
    of = pipe([Arrival(0, 1, 32)] * 200)
    found = fastest(of, ideal(of))
    assert found.cohorts == 4
    assert found.tokens_per_s == pytest.approx(8 / 0.0128)


def test_prompts_are_cut_where_that_is_faster_and_taken_whole_where_it_is_not():
    long = pipe(drawn(300, None, (16, 512), (8, 128), 0))
    found = fastest(long, ideal(long))
    assert found.step_s == pytest.approx(ideal(long).step_s, rel=0.3)
    assert found.tokens_per_s < 0.95 * ideal(long).tokens_per_s
    flat = pipe(long.arrivals, cost=StageCost(0.01))
    assert fastest(flat, ideal(flat)).tokens_per_s == pytest.approx(ideal(flat).tokens_per_s, rel=0.02)


def test_hops_and_host_are_paid_between_two_tokens_of_a_request():
    of = pipe([Arrival(0, 1, 5)], stages=2, seats=1, saturated=False, hop_s=0.002, host_s=0.003)
    assert fastest(of, ideal(of)).tokens_per_s == pytest.approx(1 / (2 * 0.0051 + 3 * 0.002 + 0.003))


def test_requests_as_they_arrive_are_waited_for():
    of = pipe([Arrival(0, 1, 1), Arrival(1, 1, 1)], stages=2, saturated=False)
    assert fastest(of, ideal(of)).tokens_per_s == pytest.approx(2 / (1 + 2 * 0.0051))


def test_a_saturated_load_is_measured_while_it_is_saturated():
    times_s = [1.0, 2.0, 3.0, 4.0, 5.0, 9.0]  # requests of one token, two at a time
    assert throughput(times_s, times_s, 2, saturated=True) == 2 / 2  # from the second's end to the last one's begin
    assert throughput(times_s, times_s, 2, saturated=False) == throughput(times_s, times_s, 3, saturated=True) == 6 / 9
