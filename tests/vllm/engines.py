"""Short ways to start the engine under test, and one small encoder-only model."""

import atexit
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from async_pp.models import resolve_model
from async_pp.ranks.environment import PRELOAD, rank_environment
from async_pp.ranks.spawn import Zygote
from tests import conftest
from tests.vllm.cases import COMMON


def tiny() -> Path:
    """Return the folder of the tiny random Llama."""
    return Path(resolve_model("tiny"))


class _Ahead:
    """A zygote that imports vLLM while the test before uses the cores little."""

    def __init__(self) -> None:
        self._spare: Zygote | None = None

    def take(self) -> Zygote:
        """Return the spare zygote, or a new one, and launch the next spare."""
        taken = self._spare or _launched()
        self._set(_launched())
        return taken

    def end(self) -> None:
        """End the spare."""
        if self._spare is not None:
            self._spare.kill()
            self._set(None)

    def _set(self, spare: Zygote | None) -> None:
        self._spare = spare
        conftest.KEPT_PROCESSES.clear()
        conftest.KEPT_DESCRIPTORS.clear()
        if spare is not None:
            assert spare._process is not None and spare._control is not None
            conftest.KEPT_PROCESSES.add(spare._process.pid)
            conftest.KEPT_DESCRIPTORS.update((spare._control.fileno(), spare._lifeline))


def _launched() -> Zygote:
    zygote = Zygote()
    zygote.launch(rank_environment(2), PRELOAD)  # the number of threads is the forked rank's own
    return zygote


AHEAD = _Ahead()
atexit.register(AHEAD.end)


def engine(model: Path | None = None, options: Mapping[str, Any] = MappingProxyType({}), **arguments: Any) -> Any:
    """Return an AsyncPPEngine that is not started, for the tiny model unless another folder is given.

    Options are the engine's own, arguments are vLLM's.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs

    from async_pp import AsyncPPEngine

    args = AsyncEngineArgs(model=str(model or tiny()), **{**COMMON, **arguments})
    return AsyncPPEngine.from_engine_args(args, zygote=AHEAD.take(), **options)


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
