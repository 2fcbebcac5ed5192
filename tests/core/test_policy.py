"""The micro-batch policy: cohorts and chunks from fitted times, and what holds whatever the times are."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_pp.core.fit import Line, Size
from async_pp.core.policy import (
    LEAST_PROMPT_TOKENS,
    PORTIONS,
    SHARERS,
    UNLIMITED,
    Balanced,
    FillFirst,
    Limits,
    Prompt,
    View,
)

from .pipes import VARIED, Pipe, Request, burst, even_tokens_per_s, flat, linear, tokens_per_s

LINE = Line(0.004, 0.001, 0.0001, 0.0)
ATTENTIVE = Line(0.004, 0.001, 0.0001, 1e-6)


def taught(
    line: Line = LINE, stages: int = 8, *, round_trip_s: float = 0.001, host_s: float = 0.001, **kind: bool
) -> Balanced:
    """A policy that knows the stage times."""
    policy = Balanced(stages, **kind)
    for _ in range(64):
        for size in (*VARIED, Size(32, 32, 6400)):
            policy.timed(size, [line.of(size)] * stages, round_trip_s, host_s)
    return policy


def decodes(count: int, ready: int, **more: int) -> View:
    """A view of decodes alone."""
    return View(count, [100] * ready, context=100 * count, **more)


# -- decodes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [Balanced(8), taught()], ids=["unknown", "known"])
def test_a_lopsided_split_is_even_a_round_later(policy: Balanced) -> None:
    assert policy.limits(decodes(16, 15, flying=1)).decodes == 2
    assert policy.limits(decodes(32, 2, flying=1)).decodes == 2
    assert policy.limits(decodes(5, 5)).decodes == 1


def test_as_many_cohorts_as_stages_where_the_batch_costs() -> None:
    assert taught().split(32) == taught(ahead=True).split(32)
    assert (taught().split(32).cohorts, taught().split(32).size) == (8, 4)


def test_one_cohort_more_where_the_round_trip_is_longer_than_the_fixed_part() -> None:
    assert taught(Line(0.0005, 0.002, 0.0, 0.0), 4, round_trip_s=0.006, ahead=True).split(20).cohorts == 5
    assert taught(Line(0.0005, 0.002, 0.0, 0.0), 4, round_trip_s=0.006).split(20).cohorts == 4, "only where allowed"


def test_fewer_cohorts_where_the_host_is_the_bottleneck() -> None:
    assert taught(stages=4, host_s=0.030).split(64).cohorts == 3


def test_a_remainder_that_does_not_pay_waits_its_turn() -> None:
    """33 decodes: eight steps of four and one that waits are faster than steps of five."""
    assert taught().split(33).size == 4
    assert taught().split(39).size == 5


def test_of_equals_the_fewest_cohorts_are_taken() -> None:
    policy = taught(Line(0.010, 0.0, 0.0, 0.0))
    assert policy.limits(decodes(32, 4, flying=7)).decodes == 0, "those that are ready wait for the others"
    assert policy.limits(decodes(32, 32)).decodes == 32
    assert policy.limits(decodes(32, 0, flying=1)).decodes == 0
    assert policy.split(32).cohorts == 1


def test_a_little_better_is_no_reason_to_change_but_for_a_fresh_start() -> None:
    def policy() -> Balanced:
        return taught(Line(0.00395, 0.001, 0.0, 0.0), 4, round_trip_s=0.00475, ahead=True)

    assert policy().split(20, fresh=True).cohorts == 5
    assert policy().split(20).cohorts == 4


def test_one_size_of_steps_says_nothing_about_others() -> None:
    """All in one cohort look the same whether the batch costs or not: to know, there must be another size."""
    policy = Balanced(4)
    for _ in range(64):
        policy.timed(Size(16, 16), [0.020] * 4, 0.001, 0.001)
    assert policy.limits(decodes(16, 16)).decodes == 4


def test_deep_pipes_compare_the_likely_numbers_only() -> None:
    assert taught(stages=64).split(256).cohorts == 64


def test_with_a_cadence_there_are_as_many_cohorts_as_stages() -> None:
    assert taught(Line(0.010, 0.0, 0.0, 0.0), paced=True).split(32).cohorts == 8


def test_cohorts_are_equal_in_time() -> None:
    policy = taught(ATTENTIVE, 2)
    contexts = [8000, 100, 100, 100, 100, 100, 100, 100]
    full = policy.limits(View(8, contexts, context=sum(contexts))).decodes
    assert full == 1, "one long context weighs as much as the others together"
    assert policy.limits(View(8, contexts[1:], context=sum(contexts), flying=1)).decodes == 7
    assert policy.limits(View(8, [100] * 8, context=800)).decodes == 4


# -- prompts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_while_no_time_is_known_prompts_are_taken_in_portions(stages: int) -> None:
    policy = Balanced(stages)
    assert policy.limits(View(0, [])) == Limits(0)
    assert policy.limits(View(0, [], prompts=[Prompt(0, 100)])).prompt_tokens == LEAST_PROMPT_TOKENS
    assert policy.limits(View(0, [], prompts=[Prompt(0, 100_000)])).prompt_tokens == 100_000 / (PORTIONS * stages)


def test_a_burst_is_admitted_in_as_many_steps_as_stages() -> None:
    assert taught().limits(View(0, [], prompts=[Prompt(0, 16)] * 32)).prompt_tokens == 4 * 16
    later = View(4, [], context=64, prompts=[Prompt(0, 16)] * 28)
    policy = taught()
    policy.limits(View(0, [], prompts=[Prompt(0, 16)] * 32))
    assert policy.limits(later).prompt_tokens == 4 * 16, "also while the first ones are in flight"


def test_a_long_prompt_is_cut_for_the_shortest_way_through_the_pipe() -> None:
    """n = sqrt((P - 1)·W/(α + β)) chunks."""
    tokens = taught().limits(View(0, [], prompts=[Prompt(0, 4000)])).prompt_tokens
    assert tokens == pytest.approx(4000 / (7 * 0.4 / 0.005) ** 0.5, rel=0.1)


def test_a_prompt_is_not_cut_where_that_gains_little() -> None:
    assert taught().limits(View(0, [], prompts=[Prompt(0, 16)])).prompt_tokens == 16
    assert taught(stages=1).limits(View(0, [], prompts=[Prompt(0, 4000)])).prompt_tokens == 4000


def test_chunks_shrink_as_the_prefix_grows() -> None:
    def chunk(history: int) -> int:
        policy = taught(ATTENTIVE)
        policy.limits(View(0, [], prompts=[Prompt(0, 8000)], begun=1))
        return policy.limits(View(0, [], prompts=[Prompt(history, 8000 - history)], begun=1)).prompt_tokens

    first, middle, last = chunk(0), chunk(3000), chunk(6000)
    assert first > 1.5 * middle > 1.5 * last
    seconds = [ATTENTIVE.of(Size(1, c, c * (h + c / 2))) for c, h in ((first, 0), (middle, 3000), (last, 6000))]
    assert max(seconds) < 1.1 * min(seconds), "stage times stay level"


def test_where_the_batch_costs_nothing_all_prompts_go_at_once() -> None:
    limits = taught(Line(0.010, 0.0, 0.0, 0.0)).limits(View(0, [], prompts=[Prompt(0, 16)] * 32))
    assert limits.prompt_tokens >= 32 * 16
    assert limits.begin == 32


def test_where_a_step_costs_nothing_by_itself_prompts_are_still_bounded() -> None:
    assert taught(Line(0.0, 0.001, 0.0001, 0.0)).limits(View(0, [], prompts=[Prompt(0, 10_000)])).prompt_tokens < 400


def test_prompts_fill_a_step_up_to_the_level_of_the_decodes() -> None:
    policy = taught()
    beside = policy.limits(View(32, [100] * 4, context=3200, prompts=[Prompt(0, 4000)], flying=7)).prompt_tokens
    alone = policy.limits(View(32, [], context=3200, prompts=[Prompt(0, 4000)], flying=8)).prompt_tokens
    assert 30 <= beside <= 60, "half as long again as a cohort of four"
    assert alone > 2 * beside, "a step without decodes has room for theirs"


def test_a_step_with_fewer_decodes_takes_more_of_the_prompts() -> None:
    """Namely what its missing decodes would have taken."""

    def tokens(ready: int) -> int:
        view = View(28, [100] * ready, context=2800, prompts=[Prompt(0, 200)], flying=7)
        return taught().limits(view).prompt_tokens

    assert [tokens(ready) - tokens(4) for ready in (3, 2)] == pytest.approx([11, 22], abs=1)


def test_a_short_prompt_is_not_cut_to_fill_a_step_up() -> None:
    def tokens(*prompts: int) -> int:
        view = View(32, [100] * 4, context=3200, prompts=[Prompt(0, tokens) for tokens in prompts], flying=7)
        return taught().limits(view).prompt_tokens

    assert tokens(16, 16) == 16
    assert tokens(16, 400) > 16, "a long one is cut in any case"


def test_a_prompt_that_is_nearly_through_is_cut_like_any_other() -> None:
    """A longer step holds up the whole round: in deep pipes that costs more than the sequence of a further piece."""
    limits = taught().limits(View(32, [100] * 4, context=3200, prompts=[Prompt(0, 36)], flying=7))
    assert 20 < limits.prompt_tokens < 36


def test_a_long_prompt_leaves_room_for_short_ones() -> None:
    policy = taught()
    limits = policy.limits(View(0, [], prompts=[Prompt(500, 3000), Prompt(0, 16), Prompt(0, 16)], begun=1))
    assert limits.chunk_tokens == limits.prompt_tokens - 32
    assert limits.begin == 2
    many = policy.limits(View(0, [], prompts=[Prompt(500, 3000), *[Prompt(0, 16)] * 20], begun=1))
    assert many.chunk_tokens == pytest.approx(many.prompt_tokens / 2, abs=1)


def test_only_a_few_long_prompts_are_under_way() -> None:
    policy = taught()
    long = [Prompt(0, 4000)] * 5
    assert policy.limits(View(0, [], prompts=long)).begin == SHARERS
    assert policy.limits(View(0, [], prompts=long, begun=1)).begin == SHARERS - 1
    assert policy.limits(View(0, [], prompts=long, begun=SHARERS)).begin == 0
    assert policy.limits(View(0, [], prompts=[*long[:SHARERS], Prompt(0, 8), *long], begun=SHARERS)).begin == 1
    assert policy.limits(View(0, [], prompts=long, begun=4)).begin == 0, "as many as had begun before go on"


def test_free_memory_bounds_prompts_while_decodes_run() -> None:
    policy, prompts = taught(), [Prompt(0, 4000)]
    assert policy.limits(View(4, [9], context=36, prompts=prompts, free_tokens=70)).prompt_tokens == 6
    assert policy.limits(View(4, [9], context=36, prompts=prompts, free_tokens=10)).prompt_tokens == 0
    assert policy.limits(View(4, [], context=36, prompts=prompts, free_tokens=10, flying=4)) == Limits(0, 0, 1, 1)
    assert policy.limits(View(4, [], context=36, prompts=prompts, free_tokens=10)).prompt_tokens == 1, (
        "never a standstill"
    )
    assert policy.limits(View(0, [], prompts=prompts, free_tokens=10)).prompt_tokens > 10, "vLLM makes room"


# -- whole runs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_a_burst_comes_near_to_even_cohorts(stages: int) -> None:
    policy = Balanced(stages, ahead=True)
    pipe = Pipe([linear] * stages, policy, stages + 1, round_trip_s=0.0, host_s=0.0)
    pipe.run(burst(stages, answer=8))
    requests = burst(4 * stages)
    pipe.run(requests)
    assert tokens_per_s(requests) >= 0.97 * even_tokens_per_s([linear] * stages, 4 * stages)


def test_a_flat_stage_is_no_slower_than_with_fill_first() -> None:
    rates = {}
    for policy, depth in ((Balanced(8, ahead=True), 9), (FillFirst(), 8)):
        pipe = Pipe([flat] * 8, policy, depth)
        pipe.run(burst(32, answer=4))
        requests = burst(32)
        pipe.run(requests)
        rates[policy.name] = tokens_per_s(requests)
    assert rates["balanced"] >= 0.995 * rates["fill-first"]


def test_a_short_prompt_passes_a_long_one() -> None:
    policy = Balanced(8, ahead=True)
    pipe = Pipe([linear] * 8, policy, 9)
    pipe.run(burst(8, answer=8))
    alone = [Request(0.0, 4000, 2)]
    pipe.run(alone)
    long, short = Request(0.0, 4000, 2), Request(0.2, 16, 2)
    pipe.run([long, short])
    behind_one_chunk_s = 8 * (0.004 + 0.0512)
    assert short.tokens_s[0] - short.arrival_s <= behind_one_chunk_s / 2
    assert long.tokens_s[0] <= 1.15 * alone[0].tokens_s[0]


def test_fill_first_takes_what_is_ready() -> None:
    policy = FillFirst()
    assert policy.limits(View(9, [1] * 5, prompts=[Prompt(0, 9)])) == Limits(5, UNLIMITED, UNLIMITED, UNLIMITED)
    policy.settled(1, 0, 0.0)
    policy.timed(Size(1, 1), [0.1], 0.0, 0.0)


def test_no_stages() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Balanced(0)


@settings(deadline=None, max_examples=60)
@given(
    stages=st.integers(1, 6),
    line=st.tuples(*[st.sampled_from([0.0, 0.00002, 0.0001, 0.001, 0.01])] * 3, st.sampled_from([0.0, 1e-7, 1e-5])),
    slow=st.floats(0.5, 4),
    overheads=st.tuples(st.sampled_from([0.0, 0.001, 0.05]), st.sampled_from([0.0, 0.001, 0.02])),
    kind=st.sampled_from(["ahead", "shared", "plain", "fill-first"]),
    seed=st.integers(0, 1000),
    count=st.integers(1, 40),
)
def test_everything_goes_on_whatever_the_times(
    stages: int,
    line: tuple[float, float, float, float],
    slow: float,
    overheads: tuple[float, float],
    kind: str,
    seed: int,
    count: int,
) -> None:
    """Progress, one flight per request, limits kept (asserted by the pipe), a fairness bound, the same story again."""

    def story() -> tuple[list[Request], list[object]]:
        rng = random.Random(seed)
        times = [Line(*line).of, lambda size: slow * Line(*line).of(size), *[Line(*line).of] * stages][:stages]
        if kind == "fill-first":
            policy: Balanced | FillFirst = FillFirst()
        else:
            policy = Balanced(stages, ahead=kind == "ahead", shared=kind == "shared")
        pipe = Pipe(times, policy, stages + (kind == "ahead"), round_trip_s=overheads[0], host_s=overheads[1], seats=16)
        requests = [
            Request(
                rng.random() * rng.choice([0.0, 0.1, 2.0]),
                rng.randint(1, rng.choice([8, 100, 2000])),
                rng.randint(1, 12),
            )
            for _ in range(count)
        ]
        return requests, list(pipe.run(requests))

    requests, steps = story()
    assert all(len(request.tokens_s) == request.answer for request in requests)
    assert (requests, steps) == story()
    # Fairness: between two tokens of a request, everybody else in a seat gets at most a few.
    for request in requests:
        for earlier, later in zip(request.tokens_s, request.tokens_s[1:], strict=False):
            for other in requests:
                assert sum(earlier < at_s < later for at_s in other.tokens_s) <= 6
