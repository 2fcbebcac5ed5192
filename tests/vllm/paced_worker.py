"""A sleeping worker that speaks the protocol of vLLM's workers with async scheduling and pipelines.

There, ranks before the last learn sampled tokens through a ring of P places, one per counted step: what step T sampled is
known from step T + P on. No CPU worker does that; this one keeps the count and raises when a step comes too early.
"""

from types import SimpleNamespace
from typing import Any

from async_pp.bench.pipeline.worker import SleepingWorker

QUALNAME = f"{__name__}.PacedWorker"


class PacedWorker(SleepingWorker):
    """Counts steps, also those that were left out, and checks the cadence of every request."""

    def init_device(self) -> None:
        super().init_device()
        self._counted = 0
        self._sampled: dict[str, int] = {}  # the count at which each request was last sampled

    def update_pp_decode_requests(self) -> None:
        self._counted += 1

    def execute_model(self, scheduler_output: Any) -> Any:
        if self.model_runner is None:  # not before: while it starts, nobody may take it for one of vLLM's
            batch = SimpleNamespace(generators={})
            self.model_runner = SimpleNamespace(
                update_pp_decode_requests=self.update_pp_decode_requests, input_batch=batch
            )
        self.update_pp_decode_requests()
        for request in scheduler_output.finished_req_ids:
            self._sampled.pop(request, None)
        for request in scheduler_output.num_scheduled_tokens:
            before = self._sampled.get(request)
            if before is not None and self._counted - before < self._last + 1:
                raise RuntimeError(f"{request}: sampled at {before}, decoded at {self._counted}, P = {self._last + 1}")
        return super().execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: Any) -> Any:
        last, self._last = self._last, self.rank  # every rank has to know who is sampled
        try:
            output = super().sample_tokens(grammar_output)
        finally:
            self._last = last
        for request, tokens in zip(output.req_ids, output.sampled_token_ids or (), strict=False):
            if tokens:
                self._sampled[request] = self._counted
        return output
