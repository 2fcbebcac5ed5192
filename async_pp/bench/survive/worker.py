"""vLLM's CPU worker with two faults that a signal asks for: its next step raises, its next frame is rubbish.

What else is done to a rank, a signal does alone (see `faults`).
"""

import os
import signal
from collections.abc import Sequence
from types import FrameType
from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from async_pp.bench.survive.faults import GARBAGE, RAISE
from async_pp.wire.frames import Sealer


class FaultyWorker(CPUWorker):
    """The worker. Faults are armed from when its device is there; before, their signals end the process."""

    _raises = False

    def init_device(self) -> None:
        """Set the device up, then listen to the signals."""
        super().init_device()
        signal.signal(RAISE, self._raise)
        signal.signal(GARBAGE, _garble)

    def execute_model(self, scheduler_output: Any) -> Any:
        """Do a step, unless it is to fail."""
        if self._raises:
            raise RuntimeError("the bench asked for this")
        return super().execute_model(scheduler_output)

    def _raise(self, _number: int, _frame: FrameType | None) -> None:
        self._raises = True


def _garble(_number: int, _frame: FrameType | None) -> None:
    """Let the next frame of this process be rubbish of the same size. The one after it is sound."""
    whole = Sealer.seal

    def seal(sealer: Sealer, *what: Any) -> Sequence[Any]:
        Sealer.seal = whole  # type: ignore[method-assign]
        return [os.urandom(len(memoryview(part))) for part in whole(sealer, *what)]

    Sealer.seal = seal  # type: ignore[method-assign, assignment]
