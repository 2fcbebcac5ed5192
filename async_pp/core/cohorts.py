"""The number of cohorts, found by trying: for stages that share memory bandwidth or cores.

There the time of a stage depends on what the other stages do, so the times seen with one number of cohorts say little
about another. The time per token of a few rounds of nothing but decodes is measured at M cohorts and at the neighbours
M/2 and 2M, for each number of decodes by powers of two. The best is kept and looked at again now and then.
"""

from collections.abc import Sequence
from dataclasses import dataclass

ROUNDS = 4
"""Rounds of all decodes that one measurement takes; one more goes by before it, for the cohorts to form."""

RETRY = 64
"""Measurements of the best number of cohorts before a neighbour is looked at again; twice as many after each trial that
changed nothing, up to MOST_RETRY."""

MOST_RETRY = 64 * RETRY

DRIFT = 1.25
"""A measurement so many times longer or shorter than those before says that something has changed: all is looked at."""

MARGIN = 0.97
"""A neighbour must take less than this share of the best one's time per token to replace it."""


class _Search:
    """The best of several numbers of cohorts, found by measuring the neighbours of the best so far.

    Args:
        candidates: numbers of cohorts, descending; the first is the best until another has been measured to be.
    """

    def __init__(self, candidates: Sequence[int]) -> None:
        self._candidates = candidates
        self._best = 0
        self._trial: int | None = None
        self._rates: dict[int, float] = {}  # seconds per token, smoothed, by index of candidate
        self._since = 0  # measurements of the best since the last trial
        self._retry = RETRY
        self._turn = 0

    @property
    def current(self) -> int:
        """The number of cohorts to use now: the best, or the neighbour that is being measured."""
        return self._candidates[self._best if self._trial is None else self._trial]

    def measured(self, seconds_per_token: float) -> None:
        """Take a measurement of the current one and decide what to use next."""
        index = self._best if self._trial is None else self._trial
        before = self._rates.get(index)
        self._rates[index] = seconds_per_token if before is None else (before + seconds_per_token) / 2
        if self._trial is not None:
            won = self._rates[index] < MARGIN * self._rates[self._best]
            self._retry = RETRY if won else min(MOST_RETRY, 2 * self._retry)
            self._best = index if won else self._best
            self._trial, self._since = None, 0
        elif before is not None and not before / DRIFT < seconds_per_token < before * DRIFT:
            self._rates, self._retry, self._since = {index: seconds_per_token}, RETRY, 0
        else:
            self._since += 1
        neighbours = [i for i in (self._best + 1, self._best - 1) if 0 <= i < len(self._candidates)]
        unknown = [i for i in neighbours if i not in self._rates]
        if unknown:
            self._trial = unknown[0]
        elif neighbours and self._since >= self._retry:
            self._turn += 1
            self._trial = neighbours[self._turn % len(neighbours)]


@dataclass
class _Window:
    """One measurement: tokens since it was begun, and when its counting began."""

    bucket: int
    cohorts: int
    tokens: int = 0
    began_s: float | None = None


class Measured:
    """Numbers of cohorts by measurement.

    Args:
        stages: pipeline stages.
    """

    def __init__(self, stages: int) -> None:
        self._stages = stages
        self._searches: dict[int, _Search] = {}
        self._window: _Window | None = None

    def wanted(self, decodes: int) -> int:
        """Cohorts that so many decodes, at least one, shall travel in."""
        return self._search(decodes).current

    def settled(self, decodes: int, tokens: int, prompt_tokens: int, now_s: float) -> None:
        """A step has settled; see `Policy.settled`. `decodes`: all that run."""
        if prompt_tokens or not tokens or not decodes:
            self._window = None
            return
        bucket, window = decodes.bit_length(), self._window
        if window is None or (window.bucket, window.cohorts) != (bucket, self.wanted(decodes)):
            window = self._window = _Window(bucket, self.wanted(decodes))
        window.tokens += tokens
        if window.began_s is None:
            if window.tokens >= decodes:
                window.began_s, window.tokens = now_s, 0
        elif window.tokens >= ROUNDS * decodes:
            self._search(decodes).measured((now_s - window.began_s) / window.tokens)
            self._window = None

    def _search(self, decodes: int) -> _Search:
        bucket = decodes.bit_length()
        if bucket not in self._searches:
            fewest = 1 << (bucket - 1)  # decodes of this size
            fewer = [self._stages >> halved for halved in range(1, self._stages.bit_length())]
            self._searches[bucket] = _Search([self._stages, *(number for number in fewer if number < fewest)])
        return self._searches[bucket]
