"""A sleeping vLLM worker that keeps the cadence of vLLM's asynchronous workers, and fails where a step breaks it."""

from types import SimpleNamespace
from typing import Any

from async_pp.bench.pipeline.worker import SleepingWorker
from tests.vllm.cadence import Ring

QUALNAME = f"{__name__}.PacedWorker"
"""For `worker_cls`."""


class PacedWorker(SleepingWorker):
    """One rank. Those before the last refuse what they have not been told the tokens for."""

    def compile_or_warm_up_model(self) -> Any:
        """The model runner is there from now on: before, it would be asked for its buffers."""
        ring = self._ring = Ring(self._last + 1)
        self.model_runner = SimpleNamespace(
            update_pp_decode_requests=ring.count, input_batch=SimpleNamespace(generators={})
        )
        self._steps: list[tuple[int, dict[str, int]]] = []
        return super().compile_or_warm_up_model()

    def execute_model(self, scheduler_output: Any) -> Any:
        """Count the step, check it, sleep through it."""
        self.model_runner.update_pp_decode_requests()
        if self.rank < self._last:
            self._ring.step(scheduler_output)
        self._steps.append((self._ring.counts, dict(scheduler_output.num_scheduled_tokens)))
        return super().execute_model(scheduler_output)

    def reset_mm_cache(self) -> None:
        """There is none."""

    def reset_encoder_cache(self) -> None:
        """There is none."""

    def take_steps(self) -> list[tuple[int, dict[str, int]]]:
        """Steps since the last call: vLLM's count at each, and the tokens of each request."""
        steps, self._steps = self._steps, []
        return steps
