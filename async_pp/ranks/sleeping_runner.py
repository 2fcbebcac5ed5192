"""A runner that sleeps instead of computing, so that pipelines of any depth run on two cores, without vLLM.

A stage's time is alpha + beta * sequences + gamma * tokens; stage s of a step begins when stage s - 1 has ended, one
step at a time. That order is carried by a message from rank to rank, as hidden states are.
"""

import time
from dataclasses import dataclass, field
from typing import Any

import zmq

from async_pp.ranks.runner import Report


@dataclass(frozen=True)
class StageTime:
    """Seconds of one stage.

    Attributes:
        alpha_s: per step.
        beta_s: per sequence.
        gamma_s: per token.
    """

    alpha_s: float = 0.0
    beta_s: float = 0.0
    gamma_s: float = 0.0

    def of(self, sequences: int, tokens: int) -> float:
        """Time of a step with so many sequences and tokens."""
        return self.alpha_s + self.beta_s * sequences + self.gamma_s * tokens


@dataclass(frozen=True)
class Load:
    """One step's work.

    Attributes:
        sequences, tokens: what it takes time for.
        tells: whether the first stage has something to say with it, so that it is heard when that stage is done.
    """

    sequences: int
    tokens: int
    tells: bool = field(default=False, kw_only=True)


class SleepingStage:
    """One stage that sleeps, joined with its neighbours by sockets of their own.

    Args:
        folder: where the sockets are; private to the pipe.
        rank: number of the stage.
        ranks: stages of the pipe.
        time: what a step takes here.

    Attributes:
        began_s: when the newest step's message from the former stage was there, monotonic seconds; on the first stage,
            when the step was.
    """

    def __init__(self, folder: str, rank: int, ranks: int, time: StageTime) -> None:
        self._time = time
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._upstream: zmq.Socket[bytes] | None = None
        self._downstream: zmq.Socket[bytes] | None = None
        self.began_s = 0.0
        if rank > 0:
            self._upstream = self._context.socket(zmq.PULL)
            self._upstream.bind(f"ipc://{folder}/stage-{rank}")
        if rank < ranks - 1:
            self._downstream = self._context.socket(zmq.PUSH)
            self._downstream.connect(f"ipc://{folder}/stage-{rank + 1}")

    def step(self, load: Load) -> tuple[float, float]:
        """Wait for the former stage, sleep, pass on. Returns begin and end of the sleep, monotonic seconds."""
        if self._upstream is not None:
            self._upstream.recv()
        self.began_s = time.monotonic()
        time.sleep(self._time.of(load.sequences, load.tokens))
        end = time.monotonic()
        if self._downstream is not None:
            self._downstream.send(b"")
        return self.began_s, end

    def close(self) -> None:
        """Leave the pipe."""
        self._context.destroy(linger=0)


class SleepingRunner:
    """Runner of one sleeping stage.

    Attributes:
        worker: itself, for calls that want a worker.
        began_s: begin of the last step.
        spans: begin and end of each step on this rank, monotonic seconds.
    """

    def __init__(self, rank: int, ranks: int, report: Report) -> None:
        self._rank = rank
        self._ranks = ranks
        self._report = report
        self._stage: SleepingStage | None = None
        self.worker = self
        self.began_s = 0.0
        self.spans: list[tuple[float, float]] = []
        self._tells = False

    def start(self, folder: str, *times: StageTime) -> None:
        """Join the ranks into a pipe, through sockets in `folder`. `times`: one for all stages, or one for each."""
        self._stage = SleepingStage(folder, self._rank, self._ranks, times[self._rank % len(times)])
        self._report("load")

    def execute(self, payload: Load) -> None:
        """Wait for the former stage, sleep, pass on. Sampling follows."""
        assert self._stage is not None
        self.began_s, ended_s = self._stage.step(payload)
        self.spans.append((self.began_s, ended_s))
        self._tells = payload.tells and self._rank == 0

    def sample(self, payload: Any) -> Any:
        """The answer names the rank and what it was given to sample under."""
        return self._rank, payload

    def connector_output(self, answer: Any) -> bool | None:
        """There are no connectors; what the step wants to be told."""
        return True if self._tells else None

    def attend(self, work: Any) -> None:
        """There are no connectors."""

    def call(self, function: Any) -> Any:
        """Apply `function` to this runner."""
        return function(self)

    def close(self) -> None:
        """Leave the pipe."""
        if self._stage is not None:
            self._stage.close()
