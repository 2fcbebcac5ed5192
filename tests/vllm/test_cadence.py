"""The policy within the cadence that vLLM's async scheduling prescribes, on workers that raise when it is broken."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from async_pp.core.policy import PolicyName
from tests.vllm import paced_worker

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(180)]


@asynccontextmanager
async def paced_engine(
    stages: int, policy: PolicyName, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Any]:
    """An engine with async scheduling and the workers' cadence, of which vLLM's platform says that CPUs have none."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    from async_pp.bench.pipeline.engines import arguments
    from async_pp.bench.pipeline.surroundings import with_layers
    from async_pp.engine import client
    from async_pp.engine.vllm_seam.scheduler import paced
    from async_pp.models import ensure_tiny
    from async_pp.ranks.sleeping_runner import StageTime

    make_config = client.make_config

    def with_async_scheduling(*args: Any) -> Any:
        config, written = make_config(*args)
        config.scheduler_config.async_scheduling = True
        monkeypatch.setattr(type(config), "use_v2_model_runner", True)  # without Triton there is none
        assert paced(config)
        assert config.max_concurrent_batches == stages + 1
        return config, written

    monkeypatch.setattr(client, "make_config", with_async_scheduling)
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    )
    with_layers(ensure_tiny(), folder / "model", stages)
    settings = arguments(folder, [StageTime(0.002, 0.0002, 0.00001)] * stages)
    args = AsyncEngineArgs(**{**settings, "worker_cls": paced_worker.QUALNAME})
    async with client.AsyncPPEngine.from_engine_args(args, policy=policy) as engine:
        yield engine


async def tokens(engine: Any, name: str, prompt: int, answer: int, delay_s: float = 0.0) -> int:
    """How many tokens a request gets."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    await asyncio.sleep(delay_s)
    kind = RequestOutputKind.DELTA
    params = SamplingParams(max_tokens=answer, ignore_eos=True, detokenize=False, output_kind=kind)
    count = 0
    async for output in engine.generate({"prompt_token_ids": [5] * prompt}, params, name):
        count += len(output.outputs[0].token_ids)
    return count


async def sizes(engine: Any) -> list[int]:
    """Sequences of the steps since the last call, as the first rank has seen them."""
    rows = (await engine.collective_rpc("take_rows"))[0]
    assert all(row[2] for row in rows), "no empty step has reached a rank"
    return [row[3] for row in rows]


@pytest.mark.parametrize(("stages", "policy"), [(4, "balanced"), pytest.param(2, "fill-first", marks=pytest.mark.slow)])
async def test_every_load_keeps_the_cadence_without_empty_steps(
    stages: int, policy: PolicyName, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with paced_engine(stages, policy, tmp_path, monkeypatch) as engine:
        async with asyncio.timeout(60):
            assert await tokens(engine, "alone", 16, 20) == 20
            assert await sizes(engine) == [1] * 20

            fewer = await asyncio.gather(*(tokens(engine, f"few-{i}", 8, 12) for i in range(stages - 1)))
            assert fewer == [12] * (stages - 1)

            await sizes(engine)
            burst = await asyncio.gather(*(tokens(engine, f"burst-{i}", 16, 30) for i in range(4 * stages)))
            assert burst == [30] * (4 * stages)
            settled = (await sizes(engine))[10 * stages : 20 * stages]
            if policy == "balanced":
                assert set(settled) == {4}

            mixed = await asyncio.gather(
                *(tokens(engine, f"mixed-{i}", 1 + 311 * (i % 4), 5 + 3 * i, 0.003 * i) for i in range(12))
            )
            assert mixed == [5 + 3 * i for i in range(12)]

            aborted = asyncio.create_task(tokens(engine, "aborted", 16, 1000))
            beside = asyncio.create_task(tokens(engine, "beside", 16, 40))
            await asyncio.sleep(0.1)
            aborted.cancel()
            assert await beside == 40
            await asyncio.wait([aborted])

            paused = asyncio.create_task(tokens(engine, "paused", 16, 40))
            await asyncio.sleep(0.05)
            await engine.pause_generation(mode="keep", clear_cache=False)
            await engine.resume_generation()
            assert await paused == 40
            await sizes(engine)
