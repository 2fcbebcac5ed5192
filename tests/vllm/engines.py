"""Short ways to start the engine under test, and one small encoder-only model."""

import json
from pathlib import Path
from typing import Any

from async_pp.models import resolve_model
from tests.vllm.cases import COMMON


def tiny() -> Path:
    """Return the folder of the tiny random Llama."""
    return Path(resolve_model("tiny"))


def engine(model: Path | None = None, **arguments: Any) -> Any:
    """Return an AsyncPPEngine that is not started, for the tiny model unless another folder is given."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    from async_pp import AsyncPPEngine

    return AsyncPPEngine.from_engine_args(AsyncEngineArgs(model=str(model or tiny()), **{**COMMON, **arguments}))


def sampling(max_tokens: int, **more: Any) -> Any:
    """Return vLLM's SamplingParams for greedy text of max_tokens tokens, given out in deltas."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    values = {"temperature": 0.0, "ignore_eos": True, "output_kind": RequestOutputKind.DELTA, **more}
    return SamplingParams(max_tokens=max_tokens, **values)


async def tokens(
    running: Any, request_id: str, max_tokens: int = 12, prompt: str = "river lantern", **more: Any
) -> list[int]:
    """Return the tokens of one greedy request; more goes to generate()."""
    found: list[int] = []
    async for output in running.generate(prompt, sampling(max_tokens), request_id, **more):
        found += output.outputs[0].token_ids
    return found


async def vector(running: Any, request_id: str, prompt: str) -> list[float]:
    """Return the embedding of a prompt."""
    from vllm import PoolingParams

    found: list[float] = []
    async for output in running.encode(prompt, PoolingParams(task="embed"), request_id):
        found = output.outputs.data.tolist()
    return found


def make_bert(folder: Path) -> Path:
    """Write a random two-layer BERT with the tiny model's tokenizer; return its folder."""
    import torch
    from transformers import AutoTokenizer, BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=320,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=128,
        max_position_embeddings=512,
        pad_token_id=2,
    )
    BertModel(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny()).save_pretrained(folder)
    config_file = folder / "config.json"
    config_file.write_text(json.dumps(json.loads(config_file.read_text()) | {"architectures": ["BertModel"]}))
    return folder
