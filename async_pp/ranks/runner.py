"""What a rank runs: the interface between the rank's loop and the thing that computes.

A runner lives on the rank's main thread and may block. The loop calls it in the order in which the engine sent things;
it never calls it from two threads. `runner_main` of a rank process makes one from the dotted name in its bootstrap.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

Report = Callable[[str], None]
"""Called with the name of a start-up phase when that phase is done."""


class Runner(Protocol):
    """One rank's computation. Constructed as `Runner(rank, ranks, report)`.

    Attributes:
        began_s: when the last `execute` had its inputs, in monotonic seconds: waiting for the former stage is not
            computing.
    """

    began_s: float

    def execute(self, payload: Any) -> Any | None:
        """Run one step. Returns its answer, or None when `sample` must follow for it."""

    def sample(self, payload: Any) -> Any:
        """Sample the step that `execute` left open, under this grammar bitmask (or None). Returns the step's answer."""

    def connector_output(self, answer: Any) -> Any | None:
        """Of a step's answer (or None) that is not sent, since another rank answers, what the engine must have in any
        case: what the connectors report. None: nothing."""

    def attend(self, work: Any) -> Any | None:
        """Let the connectors begin and end transfers, without a step. Returns what they report, None for nothing."""

    def call(self, function: Callable[[Any], Any]) -> Any:
        """Apply `function` to this runner, between steps, and return what it returns."""

    def close(self) -> None:
        """Give resources back. Called once, at the end of the rank's life."""


def flush(runner: Runner) -> None:
    """A call that does nothing: before a rank answers any, it tells the times of all steps before."""


class ConnectorOutput(NamedTuple):
    """What a rank's connectors report with a step.

    Attributes:
        kv: vLLM's KVConnectorOutput, or None.
        ec: vLLM's ECConnectorOutput, or None.
    """

    kv: Any
    ec: Any

    @classmethod
    def of(cls, output: Any) -> "ConnectorOutput | None":
        """That of a ModelRunnerOutput (or None). None when it says nothing."""
        kv = getattr(output, "kv_connector_output", None)
        ec = getattr(output, "ec_connector_output", None)
        if kv is not None and kv.is_empty() and not kv.expected_finished_count:
            kv = None
        if ec is not None and ec.is_empty():
            ec = None
        return None if kv is None and ec is None else cls(kv, ec)


class Attending:
    """A call that lets the connectors of a rank work while it has no step.

    Args:
        work: what the scheduler has to tell the workers.
    """

    def __init__(self, work: Any) -> None:
        self.work = work

    def __call__(self, runner: Runner) -> Any:
        return runner.attend(self.work)


@dataclass(frozen=True)
class Skipped:
    """Work of a step before which steps were left out that would have carried nothing, but that workers count.

    Attributes:
        steps: how many.
        work: of this step.
    """

    steps: int
    work: Any


@dataclass(frozen=True)
class Restored:
    """Work of a step with requests that ranks of a former epoch had begun.

    Attributes:
        requests: of each, vLLM's NewRequestData without blocks, and the tokens sampled so far.
        work: of this step, in which they are resumed.
    """

    requests: Sequence[tuple[Any, Sequence[int]]]
    work: Any


class OnWorker:
    """A call for the worker behind a runner: picklable, and no method name crosses the wire as text.

    Args:
        function: takes the worker.
    """

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function

    def __call__(self, runner: Any) -> Any:
        return self.function(runner.worker)
