"""vLLM's CPU worker with the one fix that pipeline parallelism on CPUs needs, for `--worker-cls` of vLLM's server.

Without it the unmodified server dies on its first request (see `make_buffer`), and there would be nothing to compare.
"""

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from async_pp.ranks.vllm_runner import make_buffer


class BufferedWorker(CPUWorker):
    """The worker, with the hand-over buffer made once the model is loaded."""

    def load_model(self, **how: Any) -> None:
        """Load the model, then make the buffer."""
        super().load_model(**how)
        make_buffer(self.model_runner, self.vllm_config)
