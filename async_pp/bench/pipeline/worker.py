"""A vLLM worker that computes nothing: a stage that sleeps, for any engine that takes `worker_cls`."""

from typing import Any

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

from async_pp.bench.pipeline.kv_connector import sends_of
from async_pp.ranks.sleeping_runner import Load, SleepingStage, StageTime

QUALNAME = f"{__name__}.SleepingWorker"
"""For `worker_cls`."""

CONFIG_KEY = "sleeping_stages"
"""In vLLM's `additional_config`: `folder` of the sockets, `times_s` of each stage: base, per sequence, per token."""

TOKEN = 100
"""What every request is told it has sampled: an ordinary token of the tiny model."""


class SleepingWorker(WorkerBase):  # type: ignore[misc, unused-ignore]
    """One rank, which is one stage.

    Sampled tokens come from what the scheduler says of a request's length alone, not from the values of tokens, so
    schedulers that plan ahead of sampling are served too.
    """

    def init_device(self) -> None:
        """Join the pipe."""
        config = self.vllm_config.additional_config[CONFIG_KEY]
        self.device = torch.device("cpu")
        self._last = self.parallel_config.pipeline_parallel_size - 1
        self._stage = SleepingStage(
            config["folder"], self.rank, self._last + 1, StageTime(*config["times_s"][self.rank])
        )
        self._sends = sends_of(self.vllm_config.kv_transfer_config, self.rank)
        self._report: KVConnectorOutput | None = None
        self._prompts: dict[str, int] = {}
        self._open: Any = None
        self._rows: list[tuple[float, float, int, int]] = []

    @property
    def began_s(self) -> float:
        """When the newest step began here, monotonic seconds: the former stage's message was there."""
        return self._stage.began_s

    def take_rows(self) -> list[tuple[float, float, int, int]]:
        """Steps since the last call: begin and end, monotonic seconds, tokens, sequences. Empty ones have no tokens."""
        rows, self._rows = self._rows, []
        return rows

    def shutdown(self) -> None:
        """Leave the pipe."""
        if hasattr(self, "_stage"):
            self._stage.close()

    # -- what there is to know about a model that is not there -------------------------------------------------------

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Nothing is loaded."""

    def get_model(self) -> torch.nn.Module:
        """An empty module."""
        return torch.nn.Module()

    def get_supported_tasks(self) -> tuple[str, ...]:
        """Text only."""
        return ("generate",)

    def get_supported_kv_cache_layouts(self) -> list[str]:
        """As of vLLM's own attention."""
        return ["LBNHC", "LBHNC"]

    def get_kv_cache_spec(self) -> dict[str, FullAttentionSpec]:
        """One layer of the smallest kind."""
        return {f"model.layers.{self.rank}.self_attn.attn": self._layer()}

    def _layer(self) -> FullAttentionSpec:
        return FullAttentionSpec(
            block_size=self.cache_config.block_size, num_kv_heads=1, head_size=32, dtype=torch.bfloat16
        )

    def determine_available_memory(self) -> int:
        """Bytes for every request that may run at its greatest length: nothing is ever preempted."""
        blocks = -(-self.model_config.max_model_len // self.cache_config.block_size)
        return int((self.scheduler_config.max_num_seqs * blocks + 1) * self._layer().page_size_bytes)

    def get_cache_block_size_bytes(self) -> int:
        """Of one block."""
        return int(self._layer().page_size_bytes)

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """No cache is made."""

    def get_kv_connector_handshake_metadata(self) -> None:
        """The ranks of the KV connector have nothing to tell each other."""

    def initialize_cache(self, num_gpu_blocks: int, num_cpu_blocks: int) -> None:
        """No cache is made."""

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Nothing is compiled."""
        return CompilationTimes(0.0, 0.0)

    def execute_dummy_batch(self) -> None:
        """Nothing is run."""

    # -- steps -------------------------------------------------------------------------------------------------------

    def execute_model(self, scheduler_output: Any) -> ModelRunnerOutput | None:
        """Sleep through a step. An empty one is only counted: it has nothing that a next stage could wait for.

        As in vLLM's runner, what a KV connector reports is in the answer of an empty step, else in that of
        `sample_tokens`, on every rank.
        """
        tokens, sequences = scheduler_output.total_num_scheduled_tokens, len(scheduler_output.num_scheduled_tokens)
        for request in scheduler_output.finished_req_ids:
            self._prompts.pop(request, None)
        if not tokens:
            self._rows.append((self._stage.began_s, self._stage.began_s, 0, 0))
            return ModelRunnerOutput.with_kv_conn_output_only(self._reported(scheduler_output))
        self._rows.append((*self._stage.step(Load(sequences, tokens)), tokens, sequences))
        self._report = self._reported(scheduler_output)
        self._open = scheduler_output
        return None

    def _reported(self, scheduler_output: Any) -> KVConnectorOutput | None:
        if self._sends is None:
            return None
        return KVConnectorOutput(finished_sending=self._sends.step(scheduler_output.finished_req_ids))

    def sample_tokens(self, grammar_output: Any) -> ModelRunnerOutput:
        """A token for each request whose known tokens are all computed by this step; the last stage's answer counts."""
        step, self._open = self._open, None
        report, self._report = self._report, None
        if step is None or self.rank < self._last:
            return ModelRunnerOutput.with_kv_conn_output_only(report)
        missing = {}
        for new in step.scheduled_new_reqs:
            self._prompts[new.req_id] = len(new.prompt_token_ids)
            missing[new.req_id] = self._prompts[new.req_id] - new.num_computed_tokens
        old = step.scheduled_cached_reqs
        for request, computed, out in zip(old.req_ids, old.num_computed_tokens, old.num_output_tokens, strict=True):
            missing[request] = self._prompts[request] + out - computed
        scheduled = step.num_scheduled_tokens
        return ModelRunnerOutput(
            req_ids=list(scheduled),
            req_id_to_index={request: index for index, request in enumerate(scheduled)},
            sampled_token_ids=[[TOKEN] if tokens >= missing[request] else [] for request, tokens in scheduled.items()],
            kv_connector_output=report,
        )
