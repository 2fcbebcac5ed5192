"""Loads: the same arrivals for everyone, scaled with the stages."""

from itertools import pairwise

import pytest

from async_pp.bench.pipeline.loads import COUNTED, Conditions, find, limiting_rate
from async_pp.ranks.sleeping_runner import StageTime

STAGE = StageTime(0.004, 0.001, 0.0001)


def one(name, conditions):
    return find([name], conditions)[0]


def test_all_is_every_load_once():
    names = [load.name for load in find(["all"], Conditions((STAGE,) * 4))]
    assert names == [
        "burst-1",
        "burst-4",
        "burst-16",
        "stagger-1-stage",
        "stagger-0.37-round",
        "short-while-decoding",
        "short-into-long-prefill",
        "poisson",
    ]


def test_staggers_scale_with_stages():
    conditions = Conditions((STAGE, StageTime(0.009, 0.001)))
    ((*arrivals,),) = one("stagger-1-stage", conditions).sections
    assert len(arrivals) == 8
    assert [after.at_s - before.at_s for before, after in pairwise(arrivals)] == pytest.approx([0.01] * 7)
    ((_, second, *_),) = one("stagger-0.37-round", conditions).sections
    assert second.at_s == pytest.approx(0.37 * (0.0051 + 0.01))


def test_ttft_is_about_the_short_ones():
    for name, shorts in (("short-while-decoding", 6), ("short-into-long-prefill", 3)):
        load = one(name, Conditions((STAGE,) * 2))
        kinds = [arrival.kind for section in load.sections for arrival in section]
        assert [kind for kind in kinds if kind in COUNTED] == ["short"] * shorts


def test_the_limiting_rate_is_what_the_slowest_stage_carries():
    # Eight stages: steps of 8 sequences with (264 + 68 - 1) / 68 tokens each, 8 of 68 tokens gained per step.
    step_s = 0.004 + 0.008 + 0.0001 * 8 * 331 / 68
    assert limiting_rate((STAGE,) * 8) == pytest.approx(8 / 68 / step_s)
    slow = StageTime(0.008, 0.002, 0.0002)
    assert limiting_rate((STAGE, slow, STAGE, STAGE)) == pytest.approx(limiting_rate((slow,) * 4))


def test_poisson_follows_from_its_seed_and_keeps_its_rate():
    conditions = Conditions((STAGE,) * 8, duration_s=200.0, seed=3)
    load = one("poisson", conditions)
    assert load == one("poisson", conditions)
    assert load != one("poisson", Conditions((STAGE,) * 8, duration_s=200.0, seed=4))
    (arrivals,) = load.sections
    assert len(arrivals) == pytest.approx(200 * 0.7 * limiting_rate(conditions.stages), rel=0.1)
    assert {min(a.tokens_in for a in arrivals) >= 16, max(a.tokens_in for a in arrivals) <= 512} == {True}
    assert {min(a.tokens_out for a in arrivals) >= 8, max(a.tokens_out for a in arrivals) <= 128} == {True}
    assert f"{len(arrivals)} requests" in load.note and "70%" in load.note


def test_a_short_poisson_has_one_request_at_least():
    assert len(one("poisson", Conditions((STAGE,), duration_s=1e-9)).sections[0]) == 1
