"""Stage times, fitted while the engine runs.

A stage takes t = α + β·sequences + γ·tokens + δ·attention seconds for a step, where `attention` counts the pairs of
tokens that its attention looks at: a chunk of C tokens behind a history of H has C·(H + C/2) of them (the a·C(C + H)
of dynamic chunk sizing, see docs/policy.md). One fit is for the sum over all stages, one for the slowest stage.

What was seen is kept as one mean per kind of step, a kind being the powers of two of its sequences and tokens. So a
long stretch of equal steps does not drown what other sizes have taught, and what changes is followed by the kinds that
still occur. The coefficients are the non-negative ones with the least squared relative error over the kinds.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

MEMORY = 32
"""Steps of a kind over which its mean is taken."""

FRESH = 16
"""Steps after which the coefficients are computed anew; a kind not seen before has them computed at once."""

RIDGES = (0.0, 1e-3, 1e-4, 1e-2)
"""Weight of each coefficient against the error. They decide what the steps seen so far leave open: time that may be
fixed is taken for fixed, and attention is not blamed for what tokens explain."""

LONG_CONTEXT = 256
"""Tokens. While all contexts are shorter, what attention takes cannot be told from what tokens take; a guess at it,
multiplied by the square of a long prompt, would be far off."""

RESOLUTION_S = 1e-9
"""Of a clock: times that are not longer say nothing."""


@dataclass(frozen=True, slots=True)
class Size:
    """What a step carries.

    Attributes:
        sequences: requests in it.
        tokens: scheduled tokens.
        attention: pairs of tokens that attention looks at.
    """

    sequences: float
    tokens: float
    attention: float = 0.0


@dataclass(frozen=True, slots=True)
class Line:
    """Coefficients of a stage time, seconds.

    Attributes:
        step: α, per step.
        sequence: β, per sequence.
        token: γ, per token.
        pair: δ, per pair of tokens.
    """

    step: float
    sequence: float
    token: float
    pair: float

    def of(self, size: Size) -> float:
        """Seconds for a step."""
        return self.step + self.sequence * size.sequences + self.token * size.tokens + self.pair * size.attention

    def chunk(self, seconds: float, history: int) -> float:
        """Tokens of a prompt that so many seconds are enough for, behind `history` tokens: not rounded, maybe infinite.

        The positive root of δ/2·C² + (γ + δ·H)·C = seconds.
        """
        linear = self.token + self.pair * history
        if self.pair > 0:
            return (math.sqrt(linear * linear + 2 * self.pair * seconds) - linear) / self.pair
        return seconds / linear if linear > 0 else math.inf


class Fit:
    """The two fits of a pipeline.

    Args:
        stages: number of stages.

    Attributes:
        total, slowest: coefficients of all stages together and of the slowest one; None before the first step.
        varied: whether steps of different numbers of sequences have been seen. Before that nothing tells the fixed part
            of a step from that of a sequence.
    """

    def __init__(self, stages: int) -> None:
        self._means = [0.0] * stages  # smoothed time of each stage: says which is the slowest
        self._kinds: dict[tuple[int, int], _Kind] = {}
        self._since = 0
        self.varied = False
        self.total: Line | None = None
        self.slowest: Line | None = None

    def add(self, size: Size, stages: Sequence[float]) -> None:
        """Take the stage times of one step, seconds."""
        self._means = [mean + (time - mean) / MEMORY for mean, time in zip(self._means, stages, strict=True)]
        slowest = stages[max(range(len(stages)), key=self._means.__getitem__)]
        key = (int(size.sequences).bit_length(), int(size.tokens).bit_length())
        kind = self._kinds.get(key)
        if kind is None:
            self.varied = self.varied or any(sequences != key[0] for sequences, _ in self._kinds)
            kind = self._kinds[key] = _Kind()
            self._since = FRESH
        kind.add((1.0, size.sequences, size.tokens, size.attention), sum(stages), slowest)
        self._since += 1
        if self._since >= FRESH:
            self._since = 0
            kinds = list(self._kinds.values())
            self.total = _line([(kind.features, kind.total) for kind in kinds])
            self.slowest = _line([(kind.features, kind.slowest) for kind in kinds])


class _Kind:
    """Means over the latest steps of one kind. The first, often a cold one, is dropped when there is another."""

    def __init__(self) -> None:
        self.seen = 0
        self.features = [0.0] * 4
        self.total = 0.0
        self.slowest = 0.0

    def add(self, features: Sequence[float], total: float, slowest: float) -> None:
        self.seen += 1
        over = min(MEMORY, max(1, self.seen - 1))
        self.features = [mean + (x - mean) / over for mean, x in zip(self.features, features, strict=True)]
        self.total += (total - self.total) / over
        self.slowest += (slowest - self.slowest) / over


def _line(rows: Sequence[tuple[Sequence[float], float]]) -> Line:
    """Non-negative coefficients with the least squared relative error. `rows`: features and seconds of each kind."""
    rows = [(features, seconds) for features, seconds in rows if seconds > RESOLUTION_S]
    if not rows:
        return Line(0.0, 0.0, 0.0, 0.0)
    scales = [max(features[j] for features, _ in rows) for j in range(4)]
    relative = [
        [x / scale / seconds if scale else 0.0 for x, scale in zip(features, scales, strict=True)]
        for features, seconds in rows
    ]
    kept = [j for j in range(4) if scales[j]]
    if kept[-1] == 3 and max(features[3] / max(1.0, features[2]) for features, _ in rows) < LONG_CONTEXT:
        del kept[-1]
    # A coefficient that comes out negative is left out, the most negative first: at most three times, since all
    # features and times are positive.
    while True:
        solved = _least_squares([[row[j] for j in kept] for row in relative], [RIDGES[j] for j in kept])
        worst = min(range(len(kept)), key=solved.__getitem__)
        if solved[worst] >= 0:
            break
        del kept[worst]
    found = [0.0] * 4
    for j, value in zip(kept, solved, strict=True):
        found[j] = value / scales[j]
    return Line(*found)


def _least_squares(rows: Sequence[Sequence[float]], ridges: Sequence[float]) -> list[float]:
    """x that makes rows · x closest to ones, by the normal equations, with a ridge in proportion to each column."""
    width = len(rows[0])
    matrix = [[sum(row[i] * row[j] for row in rows) for j in range(width)] for i in range(width)]
    for i in range(width):
        matrix[i][i] *= 1 + ridges[i]
        matrix[i].append(sum(row[i] for row in rows))
    for i in range(width):  # symmetric and positive definite: no pivoting is needed
        for k in range(i + 1, width):
            factor = matrix[k][i] / matrix[i][i]
            matrix[k] = [a - factor * b for a, b in zip(matrix[k], matrix[i], strict=True)]
    solved = [0.0] * width
    for i in reversed(range(width)):
        solved[i] = (matrix[i][width] - sum(matrix[i][j] * solved[j] for j in range(i + 1, width))) / matrix[i][i]
    return solved
