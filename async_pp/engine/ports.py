"""What the coroutines need of a scheduler, whoever provides it.

vLLM's scheduler stands behind it in the engine; tests and simulations put a small one there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from async_pp.core.fit import Size
from async_pp.core.gather import Scope


@dataclass(frozen=True)
class Plan:
    """One micro-batch as the scheduler planned it.

    Attributes:
        requests: ids of the requests in it.
        work: what every rank gets.
        samples: whether sampling follows the forward pass.
        pending_tokens: whether its grammar bitmask needs tokens of steps that are still in flight.
        scope: the ranks whose answers the settle needs.
        decodes: requests in it that have their prompt behind them.
        prompt_tokens: tokens of the others.
        size: what the time of a stage depends on.
    """

    requests: Sequence[str]
    work: Any
    samples: bool
    pending_tokens: bool
    scope: Scope
    decodes: int = 0
    prompt_tokens: int = 0
    size: Size = Size(0, 0)  # noqa: RUF009 - frozen


@dataclass(frozen=True)
class StepTimes:
    """What a settled step took, in seconds.

    Attributes:
        stages: busy time of each stage.
        round_trip_s: time from its dispatch to its answer that neither a stage nor queueing behind another step
            explains.
        host_s: time of the loop for planning, dispatching and settling it.
    """

    stages: tuple[float, ...]
    round_trip_s: float
    host_s: float


class SchedulerPort(Protocol):
    """A scheduler. Called on the loop's thread only."""

    def plan(self) -> Plan | None:
        """The next micro-batch, or None when nothing could run now. None changes nothing that a rank must know."""

    def bitmask(self, plan: Plan) -> Any:
        """The grammar bitmask for the sampling of `plan`, or None. Called when no token it needs is pending."""

    def settle(self, plan: Plan, answers: Mapping[int, Any], output_rank: int) -> Sequence[Any]:
        """Take the answers of a step, by rank. Returns what the streams shall be told."""

    def timed(self, plan: Plan, times: StepTimes) -> None:
        """All times of a settled step are known. Once per step in dispatch order, several steps after its settle; not
        at all for a step whose ranks did not tell theirs."""
