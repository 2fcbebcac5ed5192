"""The gather of one step: the answers of its ranks, folded as each arrives.

Every step needs the answer of its output rank (the first rank of the last stage). Some steps need every rank: those
whose workers also move KV or encoder cache, because what a non-final stage reports there must not be lost. Sets of
ranks are kept, not counts: a rank that answers twice counts once.

This is the place where KV-connector output of all ranks comes together: `answers()` hands the answers of every rank,
in rank order whatever the order of arrival, to the fold that the settle runs.
"""

from enum import Enum
from typing import Any


class Scope(Enum):
    """Which ranks a step waits for."""

    OUTPUT = "output"
    ALL = "all"


class Gather:
    """Answers of one step.

    Args:
        ranks: number of ranks.
        output_rank: the rank whose answer carries the sampled tokens.
        scope: wait for the output rank alone, or for every rank.
    """

    def __init__(self, ranks: int, output_rank: int, scope: Scope) -> None:
        if not 0 <= output_rank < ranks:
            raise ValueError(f"output rank {output_rank} is not one of {ranks} ranks")
        self.output_rank = output_rank
        self.scope = scope
        self.expected = frozenset(range(ranks)) if scope is Scope.ALL else frozenset({output_rank})
        self._answers: dict[int, Any] = {}

    @property
    def missing(self) -> frozenset[int]:
        """Ranks that the step still waits for."""
        return self.expected - self._answers.keys()

    @property
    def complete(self) -> bool:
        """Whether every expected rank has answered."""
        return not self.missing

    def fold(self, rank: int, answer: Any) -> bool:
        """Take the answer of one rank. Returns False, and changes nothing, when it is not expected or came before."""
        if rank not in self.expected or rank in self._answers:
            return False
        self._answers[rank] = answer
        return True

    @property
    def output(self) -> Any:
        """The answer of the output rank. KeyError before it came."""
        return self._answers[self.output_rank]

    def answers(self) -> dict[int, Any]:
        """The answers so far, by rank, in rank order: the same whatever the order of arrival."""
        return dict(sorted(self._answers.items()))
