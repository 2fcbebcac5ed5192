"""The whole engine under faults, seed after seed; and that a seed always tells the same story."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sim.failing import failing
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


@pytest.mark.parametrize("hash_seed", ("1", "2"))
def test_a_seed_tells_the_same_story_in_every_process(hash_seed: str) -> None:
    here = [run(seed).story for seed in range(20)]
    code = (
        "import logging; logging.disable(logging.CRITICAL)\n"
        "from tests.sim.world import run\n"
        "for seed in range(20): print(run(seed).story, end='\\0')"
    )
    env = {**os.environ, "PYTHONHASHSEED": hash_seed}
    root = Path(__file__).parents[2]
    there = subprocess.run([sys.executable, "-c", code], env=env, cwd=root, check=True, capture_output=True, text=True)
    assert there.stdout.split("\0")[:-1] == here
