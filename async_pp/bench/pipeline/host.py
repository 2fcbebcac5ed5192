"""What a step costs the host: with this engine planning, dispatch and settling, with vLLM's the two calls of its
scheduler, which plan and settle. The engine's own account is read through the policy, which is told of every step;
vLLM's engine, in a process of its own, writes what its two calls take to a file.
"""

import struct
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from async_pp.bench.pipeline.measured import Hosted
from async_pp.core.fit import Size
from async_pp.core.policy import Limits, Policy, View


class Watched:
    """A policy that keeps what the engine says of each step's host time.

    Args:
        policy: the one that decides.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.name = policy.name
        self._settled = 0
        self._timed: list[Hosted] = []
        self._taken = 0

    def limits(self, view: View) -> Limits:
        """As the policy decides."""
        return self._policy.limits(view)

    def settled(self, tokens: int, prompt_tokens: int, now_s: float) -> None:
        """Tell the policy, and count."""
        self._settled += 1
        self._policy.settled(tokens, prompt_tokens, now_s)

    def timed(self, size: Size, stages: Sequence[float], round_trip_s: float, host_s: float) -> None:
        """Tell the policy, and keep."""
        self._timed.append(Hosted(int(size.sequences), host_s))
        self._policy.timed(size, stages, round_trip_s, host_s)

    def take(self) -> list[Hosted]:
        """Of the steps settled since the last call those whose times have come; the others, the last few, are lost."""
        since, self._taken = self._taken, self._settled
        return self._timed[since:]


_STEP = struct.Struct("<qd")


def timed(scheduler: type[Any], path: Path) -> type[Any]:
    """A vLLM scheduler class that writes, for each step that is not empty, the time of its two calls to a file."""

    class Timed(scheduler):
        """The scheduler, with a watch."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._planned_s: deque[float] = deque()
            self._times = path.open("ab", buffering=0)

        def schedule(self, *args: Any, **kwargs: Any) -> Any:
            """As before."""
            began_s = time.perf_counter()
            output = super().schedule(*args, **kwargs)
            if output.total_num_scheduled_tokens:
                self._planned_s.append(time.perf_counter() - began_s)
            return output

        def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            """As before."""
            began_s = time.perf_counter()
            outputs = super().update_from_output(scheduler_output, *args, **kwargs)
            if scheduler_output.total_num_scheduled_tokens:
                spent_s = self._planned_s.popleft() + time.perf_counter() - began_s
                self._times.write(_STEP.pack(len(scheduler_output.num_scheduled_tokens), spent_s))
            return outputs

    return Timed


class Written:
    """What a `timed` scheduler has written.

    Args:
        path: of its file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0

    def take(self) -> list[Hosted]:
        """The steps since the last call."""
        with self._path.open("rb") as file:
            file.seek(self._read)
            said = file.read()
        whole = said[: len(said) - len(said) % _STEP.size]
        self._read += len(whole)
        return [Hosted(*step) for step in _STEP.iter_unpack(whole)]
