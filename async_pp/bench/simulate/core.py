"""vLLM's engine core, whole, over ranks that do not exist: its scheduler and KV cache manager are the real ones.

The model is a config.json with as many layers as there are stages; no weights are made or read.
"""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.usage.usage_lib import UsageContext
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec

from async_pp.engine.vllm_seam.config import config_errors, make_config
from async_pp.engine.vllm_seam.scheduler import make_engine_core

_HEAD = 32
"""Size of the model's one head; with its cache and its vocabulary it changes nothing but how bytes are counted."""


@dataclass(frozen=True)
class Limits:
    """vLLM's limits, as its engine arguments name them.

    Attributes:
        max_num_seqs: requests that run at the same time.
        max_num_batched_tokens: tokens of one step.
        max_model_len: tokens of one request.
        num_gpu_blocks: blocks of the KV cache.
        block_size: tokens of a block.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_gpu_blocks: int
    block_size: int


class _NoRanks(Executor):
    """Answers what the engine core asks its workers at the start; nothing is ever executed."""

    supports_pp = True

    def _init_executor(self) -> None:
        """Nothing to make."""

    def get_kv_cache_specs(self) -> list[dict[str, Any]]:
        """One layer stands for all: blocks are counted, not bytes."""
        block_size = self.cache_config.block_size
        layer = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=_HEAD, dtype=torch.float32)
        return [{"layer": layer}]

    def determine_available_memory(self) -> list[int]:
        """Room for the blocks that are asked for."""
        (layer,) = self.get_kv_cache_specs()[0].values()
        return [layer.page_size_bytes * self.cache_config.num_gpu_blocks_override]

    def get_supported_kv_cache_layouts(self) -> list[list[str]]:
        """Any: there is no cache."""
        return [["NHD"]]

    def set_kv_cache_layout(self, layout_name: str) -> None:
        """No cache to lay out."""

    def initialize_from_config(self, kv_cache_configs: list[Any]) -> None:
        """No cache to make."""

    def compile_or_warm_up_model(self) -> None:
        """No model."""

    def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        """Refused: there is nobody to ask."""
        raise NotImplementedError(f"the engine core called {method} of ranks that do not exist")

    def check_health(self) -> None:
        """Never lost."""

    def shutdown(self) -> None:
        """Nothing to end."""


@contextmanager
def engine_core(stages: int, limits: Limits) -> Iterator[Any]:
    """A started engine core of `stages` pipeline stages. Blocks for about a second.

    Raises:
        ConfigError: vLLM refuses the limits, with its words.
    """
    with tempfile.TemporaryDirectory(prefix="async-pp-simulate-") as folder:
        _write_model(Path(folder), stages, limits.max_model_len)
        config = _config(folder, stages, limits)
        with config_errors():
            core = make_engine_core(config, _NoRanks, log_stats=False)
    try:
        yield core
    finally:
        core.structured_output_manager.clear_backend()
        core.scheduler.shutdown()


def _config(folder: str, stages: int, limits: Limits) -> VllmConfig:
    config, _ = make_config(
        AsyncEngineArgs(
            model=folder,
            skip_tokenizer_init=True,
            pipeline_parallel_size=stages,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_model_len=limits.max_model_len,
            num_gpu_blocks_override=limits.num_gpu_blocks,
            kv_cache_memory_bytes=1,  # given, so that nobody measures this machine's memory
            block_size=limits.block_size,
            dtype="float32",
            enforce_eager=True,
            # A trace tells lengths, not texts: no two prompts are known to share a prefix.
            enable_prefix_caching=False,
            async_scheduling=False,
        ),
        UsageContext.ENGINE_CONTEXT,
    )
    return config


def _write_model(folder: Path, layers: int, max_tokens: int) -> None:
    model = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": 2 * _HEAD,
        "hidden_size": _HEAD,
        "intermediate_size": _HEAD,
        "num_hidden_layers": layers,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "max_position_embeddings": max_tokens,
    }
    (folder / "config.json").write_text(json.dumps(model), "utf-8")
