"""Run seeds: `python -m tests.sim --seeds 50000`. Those that have failed before come first.

A failing seed is written to failing_seeds.txt beside this file, from where the tests replay it; `--seed N` tells its
story.
"""

import argparse
import logging
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator

from tests.sim.failing import failing, remember
from tests.sim.world import Result, run

TOLD = 20
"""Lines of progress."""

BATCH = 50
"""Seeds that a process takes at once."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description="Simulate the whole engine with faults.")
    parser.add_argument("--seeds", type=int, default=500, help="how many seeds")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--seed", type=int, help="this one alone, with its story")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)  # losses are what is simulated
    if args.seed is not None:
        result = run(args.seed)
        print(result.story)
        return int(result.broken is not None)
    seeds = [*failing(), *range(args.first, args.first + args.seeds)]
    began = time.monotonic()
    ends: Counter[str] = Counter()
    losses = steps = broken = 0
    for done, result in enumerate(_results(seeds, args.processes), 1):
        ends.update(result.ends.values())
        losses += result.losses
        steps += result.steps
        if result.broken is not None:
            broken += 1
            remember(result.seed)
            print(f"seed {result.seed}: {result.broken}", flush=True)
        if done % max(1, len(seeds) // TOLD) == 0 or done == len(seeds):
            passed_s = time.monotonic() - began
            print(f"{done} of {len(seeds)} seeds, {broken} broken, {passed_s:.0f} s", flush=True)
    told = ", ".join(f"{count} {end}" for end, count in ends.most_common())
    print(f"{losses} rank sets lost, {steps} steps settled; requests: {told}")
    return int(broken > 0)


def _results(seeds: list[int], processes: int) -> Iterator[Result]:
    if processes == 1:
        yield from map(_short, seeds)
        return
    with multiprocessing.get_context("fork").Pool(processes) as pool:  # nothing runs here yet that a fork could break
        for results in pool.imap_unordered(_batch, _batches(seeds)):
            yield from results


def _batches(seeds: list[int]) -> Iterable[list[int]]:
    return (seeds[first : first + BATCH] for first in range(0, len(seeds), BATCH))


def _batch(seeds: list[int]) -> list[Result]:
    return [_short(seed) for seed in seeds]


def _short(seed: int) -> Result:
    result = run(seed)
    result.story = ""  # not to be carried from process to process
    return result


if __name__ == "__main__":
    sys.exit(main())
