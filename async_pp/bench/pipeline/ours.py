"""This package's engine under load, in this process, as an application has it."""

from dataclasses import replace
from pathlib import Path

from vllm.engine.arg_utils import AsyncEngineArgs

from async_pp.bench import BenchFailed
from async_pp.bench.devices import policy_of
from async_pp.bench.pipeline.connectors import Connector
from async_pp.bench.pipeline.engines import Client, arguments
from async_pp.bench.pipeline.host import Watched
from async_pp.bench.pipeline.loads import WARM_UP
from async_pp.bench.pipeline.measured import Measured
from async_pp.bench.pipeline.settings import Settings, Tell
from async_pp.engine.client import AsyncPPEngine
from async_pp.errors import EngineFailed


async def measure(settings: Settings, connector: Connector, folder: Path, tell: Tell) -> list[Measured]:
    """Measure every load. Nothing of the engine is left afterwards.

    Args:
        settings: what to measure.
        connector: of every rank.
        folder: for the ranks' sockets; the model is in it.
        tell: told what is done now.

    Raises:
        BenchFailed: the engine or a request failed.
    """
    args = AsyncEngineArgs(**arguments(folder, settings.stages, connector))
    policy = Watched(policy_of(settings.policy, len(settings.stages)))
    found: list[Measured] = []
    try:
        async with AsyncPPEngine.from_engine_args(args, policy=policy) as engine:
            client = Client(engine)
            await client.run(WARM_UP)
            for load in settings.loads:
                tell(load.name)
                policy.take()
                before = await engine.bubbles()
                measured = await client.run(load)
                bubble = (await engine.bubbles()).since(before).shares()
                found.append(replace(measured, bubble=bubble, hosted=policy.take()))
    except EngineFailed as error:
        raise BenchFailed(f"the engine ended: {error}") from error
    return found
