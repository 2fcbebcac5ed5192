"""The whole engine under faults, seed after seed; and that a seed always tells the same story."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sim.failing import failing
from tests.sim.scenario import Asked, Fault, Poison, PoisonKind, Scenario
from tests.sim.world import Result, run

SEEDS = 500


def _told(result: Result) -> str:
    return f"seed {result.seed}: {result.broken}\n{result.story}"


def test_seeds_that_have_failed_before() -> None:
    for seed in failing():
        result = run(seed)
        assert result.broken is None, _told(result)


def test_nothing_is_broken_lost_or_told_twice_whatever_fails() -> None:
    ends: set[str] = set()
    losses = 0
    for seed in range(SEEDS):
        result = run(seed)
        assert result.broken is None, _told(result)
        ends |= set(result.ends.values())
        losses += result.losses
    assert ends == {"complete", "cancelled", "closed", "died", "lost", "poison"}, "each way to end has been seen"
    assert losses > SEEDS / 2


@pytest.mark.parametrize("kind", ["die", "raise", "hang"])
@pytest.mark.parametrize("stage", [0, 1])
def test_poison_takes_two_rank_sets_with_it_and_no_other_request(kind: PoisonKind, stage: int) -> None:
    prompt = (1, 2, 3)
    asked = [Asked(f"r{number}", 0.0, prompt, 6) for number in range(5)]
    asked[2] = Asked("r2", 0.0, prompt, 6, poison=Poison(kind, stage, len(prompt) + 2))
    result = run(0, Scenario(0, asked=asked))
    assert result.broken is None, _told(result)
    assert result.losses == 2, _told(result)
    assert result.ends == {one.name: "poison" if one.poison else "complete" for one in asked}, _told(result)


def test_a_family_of_choices_is_given_up_as_one() -> None:
    asked = [Asked("r0", 0.0, (1, 2), 8, n=3), Asked("r1", 0.0, (3,), 8), Asked("r2", 1.0, (4,), 2)]
    result = run(0, Scenario(0, on_loss="fail", asked=asked, faults=[Fault(0.2, "die", 0, 0.0)]))
    assert result.broken is None, _told(result)
    assert result.ends == {"r0": "lost", "r1": "lost", "r2": "complete"}, _told(result)


def test_a_seed_tells_the_same_story_in_every_process() -> None:
    here = [run(seed).story for seed in range(20)]
    code = (
        "import logging; logging.disable(logging.CRITICAL)\n"
        "from tests.sim.world import run\n"
        "for seed in range(20): print(run(seed).story, end='\\0')"
    )
    env = {**os.environ, "PYTHONHASHSEED": "1"}
    root = Path(__file__).parents[2]
    there = subprocess.run([sys.executable, "-c", code], env=env, cwd=root, check=True, capture_output=True, text=True)
    assert there.stdout.split("\0")[:-1] == here
