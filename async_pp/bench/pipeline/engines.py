"""An engine of vLLM's kind under load: how it is configured and how requests are sent, the same for ours and vLLM's."""

import asyncio
import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from async_pp.bench import BenchFailed
from async_pp.bench.pipeline.connectors import NONE, Connector
from async_pp.bench.pipeline.kv_connector import transfer_config
from async_pp.bench.pipeline.loads import MAX_MODEL_LEN, MAX_SEQUENCES, MAX_STEP_TOKENS, Arrival, Load, Section
from async_pp.bench.pipeline.measured import Answered, Measured, Row
from async_pp.bench.pipeline.worker import CONFIG_KEY, QUALNAME
from async_pp.errors import first_of
from async_pp.ranks.sleeping_runner import StageTime

LOAD_LIMIT_S = 600
"""For one load; far above what a working engine needs for the largest that makes sense."""


def arguments(folder: Path, stages: Sequence[StageTime], connector: Connector = NONE) -> dict[str, Any]:
    """What both engines are given as `AsyncEngineArgs`.

    Args:
        folder: for the ranks' sockets, with the model in it: see `surroundings.private_folder`.
        stages: time of each stage.
        connector: of every rank.
    """
    times_s = [[stage.alpha_s, stage.beta_s, stage.gamma_s] for stage in stages]
    return {
        "model": str(folder / "model"),
        "pipeline_parallel_size": len(stages),
        "worker_cls": QUALNAME,
        "additional_config": {CONFIG_KEY: {"folder": str(folder), "times_s": times_s}},
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": MAX_SEQUENCES,
        "max_num_batched_tokens": MAX_STEP_TOKENS,
        "block_size": 32,
        "enable_prefix_caching": False,
        "enforce_eager": True,
        "disable_log_stats": True,
        "kv_transfer_config": transfer_config(connector),
    }


class Client:
    """Sends loads to a started engine.

    Args:
        engine: an `AsyncLLM`.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._numbers = itertools.count()

    async def run(self, load: Load) -> Measured:
        """Send a load and wait for its last token.

        Raises:
            BenchFailed: a request failed, was not answered in full, or the load took too long.
        """
        try:
            async with asyncio.timeout(LOAD_LIMIT_S):
                answered = [await self._section(section) for section in load.sections]
                return Measured(answered, await self._take_rows())
        except TimeoutError as error:
            raise BenchFailed(f"{load.name} had not ended after {LOAD_LIMIT_S} s") from error

    async def _section(self, section: Section) -> Answered:
        began = time.monotonic()
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(self._request(began, arrival)) for arrival in section]
        except ExceptionGroup as group:
            first = first_of(group)
            raise BenchFailed(f"a request failed: {type(first).__name__}: {first}") from first
        return Answered(began, [task.result() for task in running])

    async def _request(self, began: float, arrival: Arrival) -> list[float]:
        await asyncio.sleep(began + arrival.at_s - time.monotonic())
        prompt = {"prompt_token_ids": [5] * arrival.tokens_in}
        times: list[float] = []
        sampling = SamplingParams(
            max_tokens=arrival.tokens_out,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        async for output in self._engine.generate(prompt, sampling, f"bench-{next(self._numbers)}"):
            times += [time.monotonic() - began] * len(output.outputs[0].token_ids)
        if len(times) != arrival.tokens_out:
            raise ValueError(f"{len(times)} tokens came where {arrival.tokens_out} were asked for")
        return times

    async def _take_rows(self) -> list[list[Row]]:
        return [list(map(tuple, rows)) for rows in await self._engine.collective_rpc("take_rows")]
