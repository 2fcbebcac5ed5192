"""Where the ranks of an engine run, and which of them answers."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RankLayout:
    """Where the ranks of one node run.

    Attributes:
        output_rank: the rank whose answers carry the sampled tokens; the first one of the last stage.
        cpus: per rank the cores it is bound to, or None for unbound.
        runner: dotted name of the Runner.
        ranks_per_stage: ranks that share a stage (tensor parallelism); neighbours in rank order.
    """

    output_rank: int
    cpus: Sequence[tuple[int, ...] | None]
    runner: str
    ranks_per_stage: int = 1

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.cpus)

    @property
    def stages(self) -> int:
        """Number of stages."""
        return self.ranks // self.ranks_per_stage
