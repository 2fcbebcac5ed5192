"""What the coroutines need of a scheduler and of a rank set, whoever provides them.

In the engine vLLM's scheduler and rank processes stand behind them; tests and simulations put others there.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from async_pp.core.fit import Size
from async_pp.core.gather import Scope
from async_pp.wire.messages import SampleMode


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
class Attend:
    """Something for the ranks' connectors that is no step: it has no token, takes no slot and is not settled.

    Attributes:
        work: what every rank gets.
        again: whether the scheduler may find a step right after it.
    """

    work: Any
    again: bool = False


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

    def plan(self, ask: bool = False) -> Plan | Attend | None:
        """The next micro-batch, or something for the connectors, or None when nothing could run now.

        None changes nothing that a rank must know. `ask`: whether to ask the ranks how far transfers are, if no step
        does.
        """

    def bitmask(self, plan: Plan) -> Any:
        """The grammar bitmask for the sampling of `plan`, or None. Called when no token it needs is pending."""

    def settle(self, plan: Plan, answers: Mapping[int, Any], output_rank: int) -> Sequence[Any]:
        """Take the answers of a step, by rank. Returns what the streams shall be told."""

    def connector_output(self, rank: int, output: Any) -> Sequence[Any] | None:
        """Take what a rank's connectors report apart from the answers. Returns what the streams shall be told, or None
        when nothing that waits can go on by it."""

    @property
    def transferring(self) -> bool:
        """Whether anything waits for a transfer to end."""

    def timed(self, plan: Plan, times: StepTimes) -> None:
        """All times of a settled step are known. Once per step in dispatch order, several steps after its settle; not
        at all for a step whose ranks did not tell theirs."""


class LayoutPort(Protocol):
    """How many ranks and stages there are, and which rank answers with the sampled tokens."""

    @property
    def ranks(self) -> int: ...

    @property
    def stages(self) -> int: ...

    @property
    def output_rank(self) -> int: ...


class ExecutorPort(Protocol):
    """A started rank set of one epoch. Called on the loop's thread only."""

    @property
    def epoch(self) -> int: ...

    @property
    def layout(self) -> LayoutPort: ...

    def execute(
        self, step: int, work: Any, *, grammar: Any, sample: SampleMode, scope: Scope
    ) -> Sequence[tuple[int, asyncio.Future[Any]]]:
        """Send a step. Returns rank and future of each answer that will come."""

    def attend(self, work: Any) -> Sequence[tuple[int, asyncio.Future[Any]]]:
        """Send something for the connectors. Returns rank and future of each answer: their output, or None."""

    def release(self, step: int, grammar: Any) -> None:
        """Send the deferred sampling of a step."""


OnPhase = Callable[[str, int | None, float], None]
"""Start-up progress: phase, rank (None: all of them), seconds it took. The last phase is "ready"; after a loss the
phases of the next rank set follow, and the last one is "restart", with the seconds since the loss was noticed."""

OnLost = Callable[[BaseException, int, int], None]
"""The loss of a rank set that another one follows: why, how many requests go on, how many were given up."""

OnSpan = Callable[[int, int, float, float], None]
"""A stage's time for a step: stage, step, when it had the inputs and when it was done (monotonic seconds)."""

OnOutput = Callable[[int, Any], None]
"""What a rank's connectors report with a step that the rank does not answer: rank, output."""


def ignore_phase(phase: str, rank: int | None, seconds: float) -> None:
    """Progress that nobody asked for."""


def ignore_lost(error: BaseException, going_on: int, given_up: int) -> None:
    """Losses that nobody asked for."""


def ignore_span(stage: int, step: int, began_s: float, ended_s: float) -> None:
    """Times that nobody asked for."""


def ignore_output(rank: int, output: Any) -> None:
    """Reports that nobody asked for: there is no connector."""
