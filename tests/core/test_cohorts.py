"""The number of cohorts by trying, driven by computed stage times: even cohorts where they pay, one where they do not."""

import heapq
from collections import deque
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_pp.core.cohorts import ROUNDS, Measured
from async_pp.core.policy import Balanced, View

StageTime = Callable[[int], float]


def linear(batch: int) -> float:
    """Return a stage time that its batch dominates."""
    return 0.004 + 0.001 * batch


def flat(batch: int) -> float:
    """Return a stage time that the weights dominate."""
    return 0.010


class Pipe:
    """Stages with computed times, as many slots as stages, and decodes that never end."""

    def __init__(self, stages: Sequence[StageTime], decodes: int, host_s: float = 0.0) -> None:
        self.policy = Balanced(len(stages), shared=True)
        self.stages, self.decodes, self.host_s = stages, decodes, host_s
        self.now_s = 0.0
        self.ready = deque(range(decodes))
        self.free_at = [0.0] * len(stages)
        self.flying: list[tuple[float, int, tuple[int, ...]]] = []
        self.sizes: list[int] = []
        self.last: dict[int, int] = dict.fromkeys(range(decodes), 0)

    def run(self, steps: int) -> float:
        """Settle so many steps; return the tokens per second over the last quarter of them."""
        done, began, counted = 0, 0.0, 0
        while done < steps:
            while len(self.flying) < len(self.stages) and self._dispatch():
                pass
            answered_s, _, cohort = heapq.heappop(self.flying)
            self.now_s = max(self.now_s, answered_s) + self.host_s
            self.ready.extend(cohort)
            self.policy.settled(len(cohort), 0, self.now_s)
            done += 1
            if done == steps * 3 // 4:
                began, counted = self.now_s, 0
            counted += len(cohort)
        return counted / (self.now_s - began)

    def _dispatch(self) -> bool:
        limit = self.policy.limits(View(self.decodes, [0] * len(self.ready), flying=len(self.flying))).decodes
        assert 0 <= limit <= len(self.ready)
        assert limit or self.flying or not self.ready, "decodes wait only for a step in flight"
        if not limit:
            return False
        cohort = tuple(self.ready.popleft() for _ in range(limit))
        at = self.now_s
        for stage, time in enumerate(self.stages):
            at = self.free_at[stage] = max(at, self.free_at[stage]) + time(limit)
        heapq.heappush(self.flying, (at, len(self.sizes), cohort))
        self.sizes.append(limit)
        for request in cohort:
            self.last[request] = len(self.sizes)
        return True


def wanted(pipe: Pipe, decodes: int) -> int:
    """Return the number of cohorts that the policy wants."""
    return pipe.policy.split(decodes).cohorts


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
def test_even_cohorts_where_the_batch_costs(stages: int) -> None:
    pipe = Pipe([linear] * stages, 4 * stages)
    rate = pipe.run(400 * stages)
    assert rate >= 0.97 * 4 / linear(4), "each stage always has a cohort of four"
    assert wanted(pipe, 4 * stages) == stages
    assert pipe.sizes[-stages:] == [4] * stages


def test_one_cohort_where_a_second_one_costs_as_much_as_it_brings() -> None:
    """Weights dominate and the last stage is longer, as with a large vocabulary: two cohorts pay it twice."""
    pipe = Pipe([lambda batch: 0.018, lambda batch: 0.027], 8)
    pipe.run(400)
    assert wanted(pipe, 8) == 1
    assert pipe.sizes[-4:] == [8] * 4


def test_cohorts_are_fewer_than_stages_where_the_host_is_slow() -> None:
    pipe = Pipe([flat] * 4, 16, host_s=0.030)
    pipe.run(3000)
    assert wanted(pipe, 16) < 4


def test_a_change_of_the_stage_times_is_noticed() -> None:
    pipe = Pipe([lambda batch: 0.018, lambda batch: 0.027], 8)
    pipe.run(400)
    assert wanted(pipe, 8) == 1
    pipe.stages = [linear, linear]
    assert pipe.run(4000) >= 0.97 * 4 / linear(4)
    assert wanted(pipe, 8) == 2


@pytest.mark.parametrize("decodes", [1, 2, 3, 7])
def test_fewer_decodes_than_stages_travel_alone_until_measured_otherwise(decodes: int) -> None:
    pipe = Pipe([linear] * 8, decodes)
    pipe.run(2000)
    assert pipe.sizes[-1] == 1


def test_prompts_end_a_measurement() -> None:
    def policy_after(prompt_tokens: int) -> Measured:
        policy, now_s = Measured(2), 0.0
        for turn in range(2 * (ROUNDS + 1) + 1):
            now_s += 0.01
            policy.settled(8, 4, prompt_tokens if turn == 3 else 0, now_s)
        return policy

    assert policy_after(0).wanted(8) == 1, "measured, so the neighbour is tried"
    assert policy_after(100).wanted(8) == 2
    policy = policy_after(0)
    policy.settled(0, 0, 0, 0.0)
    assert policy.wanted(8) == 1


def test_sizes_of_load_are_measured_apart() -> None:
    pipe = Pipe([lambda batch: 0.018, lambda batch: 0.027], 8)
    pipe.run(400)
    assert (wanted(pipe, 8), wanted(pipe, 15), wanted(pipe, 16)) == (1, 1, 2)


@given(
    stages=st.integers(1, 8),
    decodes=st.integers(1, 40),
    fixed=st.floats(0.0, 0.02),
    each=st.floats(0.0001, 0.005),
    host_s=st.floats(0.0, 0.01),
)
def test_every_decode_goes_on_whatever_the_times(
    stages: int, decodes: int, fixed: float, each: float, host_s: float
) -> None:
    pipe = Pipe([lambda batch: fixed + each * batch] * stages, decodes, host_s)
    pipe.run(300)
    pipe_again = Pipe([lambda batch: fixed + each * batch] * stages, decodes, host_s)
    pipe_again.run(300)
    assert pipe.sizes == pipe_again.sizes, "same times, same story"
    assert min(pipe.last.values()) >= len(pipe.sizes) - 2 * decodes - 2 * stages, "nobody is left behind"
