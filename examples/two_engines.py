"""Two engines in one program, on one event loop: they share no names, ports or files.

python examples/two_engines.py [MODEL] [MODEL]
"""

import asyncio
import sys

from vllm import AsyncEngineArgs, SamplingParams

from async_pp import AsyncPPEngine
from async_pp.models import resolve_model


def engine(model: str, stages: int) -> AsyncPPEngine:
    """An engine that is not started yet."""
    args = AsyncEngineArgs(
        model=str(resolve_model(model)),
        pipeline_parallel_size=stages,
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        kv_cache_memory_bytes=128 << 20,
        disable_log_stats=True,
    )
    return AsyncPPEngine.from_engine_args(args)


async def complete(engine: AsyncPPEngine, name: str) -> str:
    """What this engine makes of the same prompt."""
    text = ""
    async for output in engine.generate("Once upon a time", SamplingParams(max_tokens=12, temperature=0), name):
        text = output.outputs[0].text
    return text


async def main(first: str, second: str) -> list[str]:
    """Run both at once."""
    async with engine(first, 2) as one, engine(second, 1) as other:
        return list(await asyncio.gather(complete(one, "first"), complete(other, "second")))


if __name__ == "__main__":
    first, second = [*sys.argv[1:], "tiny", "tiny"][:2]
    for name, text in zip((first, second), asyncio.run(main(first, second)), strict=True):
        print(f"{name}: {text!r}")
