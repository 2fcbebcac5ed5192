"""The time of stages, the order of steps through them, and the fastest that this order allows.

Step i leaves stage s at

    C(i,s) = max(C(i-1,s), C(i,s-1) + hop) + t_s(i)

since a stage takes one step at a time and needs what the stage before it computed; C(i,-1) is when the engine sent the
step. The answer reaches the engine at C(i,P-1) + hop. (After the oracle of a flow shop; with hop on a link of its own,
so that it delays a step but occupies no stage.)
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StepLoad:
    """What one step computes.

    Attributes:
        sequences: requests in it.
        tokens: of all of them.
        attended: pairs of a token and one that it looks at: Σ chunk · (history + chunk) over the requests.
    """

    sequences: float
    tokens: float
    attended: float


@dataclass(frozen=True)
class StageCost:
    """The time of one stage, linear in what a step computes.

    Attributes:
        base_s: seconds per step.
        per_sequence_s, per_token_s: seconds for each of them.
        per_attended_s: seconds for each pair of `StepLoad.attended`.
    """

    base_s: float
    per_sequence_s: float = 0.0
    per_token_s: float = 0.0
    per_attended_s: float = 0.0

    def of(self, load: StepLoad) -> float:
        """Seconds of a step on this stage."""
        return (
            self.base_s
            + self.per_sequence_s * load.sequences
            + self.per_token_s * load.tokens
            + self.per_attended_s * load.attended
        )

    def chunk(self, seconds: float, history: int) -> float:
        """Tokens that a prompt may add in so many seconds, behind `history` tokens: not rounded, maybe infinite.

        The positive root of δ·C² + (γ + δ·history)·C = seconds.
        """
        linear = self.per_token_s + self.per_attended_s * history
        if self.per_attended_s > 0:
            root = math.sqrt(linear * linear + 4 * self.per_attended_s * seconds)
            return (root - linear) / (2 * self.per_attended_s)
        return seconds / linear if linear > 0 else math.inf

    def slower(self, factor: float) -> "StageCost":
        """The same stage on a device that takes `factor` times as long."""
        return StageCost(
            factor * self.base_s,
            factor * self.per_sequence_s,
            factor * self.per_token_s,
            factor * self.per_attended_s,
        )


class Oracle:
    """When each step enters and leaves each stage.

    Args:
        costs: of each stage.
        hop_s: seconds from the engine to the first stage and from each stage to the next.
    """

    def __init__(self, costs: Sequence[StageCost], hop_s: float) -> None:
        self._costs = costs
        self._hop_s = hop_s
        self._left_s = [0.0] * len(costs)

    def spans(self, sent_s: float, load: StepLoad) -> list[tuple[float, float]]:
        """Begin and end on each stage, seconds, of a step that is sent after all before it."""
        spans = []
        ready_s = sent_s
        for stage, cost in enumerate(self._costs):
            began_s = max(self._left_s[stage], ready_s + self._hop_s)
            ready_s = self._left_s[stage] = began_s + cost.of(load)
            spans.append((began_s, ready_s))
        return spans


@dataclass(frozen=True)
class Mix:
    """The average request.

    Attributes:
        output_tokens: tokens of its answer: so many steps carry it when its prompt goes in one.
        tokens: tokens computed for it: its prompt and its answer but for the last token.
        attended: pairs of a token and one that it looks at, of all of those.
    """

    output_tokens: float
    tokens: float
    attended: float


@dataclass(frozen=True)
class Formula:
    """What full, even cohorts give.

    Attributes:
        tokens_per_s: output tokens per second.
        cohorts: M, of so many.
        step_s: T, the time of each step on the slowest stage.
    """

    tokens_per_s: float
    cohorts: int
    step_s: float


def formula(costs: Sequence[StageCost], mix: Mix, sequences: int, *, hop_s: float, host_s: float, most: int) -> Formula:
    """The fastest full, even cohorts.

    R sequences in M cohorts: a round carries each of them once, R tokens, and takes

        max( M · max_s t_s, Σ_s t_s + o, M · h )

    with t_s the stage's time for R/M sequences, each with the average of its tokens over its steps; o = (P + 1) hops
    and the host's time h, which is all that lies between the end of a step and the next of the same sequences. The best
    of all M counts: with equal stages and o = 0 that is M = P and R / (P · t). Prompts count as if each token of theirs
    could go into any step and cost no sequence there: with long ones nothing gets quite so far (see `bare`).

    Args:
        costs: of each stage.
        mix: the average request.
        sequences: R, requests that run at the same time.
        hop_s, host_s: seconds of one hop, and of the engine for each step.
        most: steps in flight.
    """
    stages = len(costs)
    outside_s = (stages + 1) * hop_s + host_s
    found = []
    for cohorts in range(1, min(most, sequences) + 1):
        share = sequences / cohorts
        load = StepLoad(share, share * mix.tokens / mix.output_tokens, share * mix.attended / mix.output_tokens)
        times_s = [cost.of(load) for cost in costs]
        period_s = max(cohorts * max(times_s), sum(times_s) + outside_s, cohorts * host_s)
        found.append(Formula(sequences / period_s, cohorts, max(times_s)))
    return max(found, key=lambda one: one.tokens_per_s)
