"""An engine in the lifespan of your own FastAPI application, streaming plain text.

uvicorn --app-dir examples embed_fastapi:app
curl -N 'localhost:8000/complete?prompt=The+capital+of+France+is'
"""

import itertools
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from vllm import AsyncEngineArgs, SamplingParams
from vllm.sampling_params import RequestOutputKind

from async_pp import AsyncPPEngine
from async_pp.models import resolve_model

numbers = itertools.count()


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """The engine starts with the application and stops with it."""
    args = AsyncEngineArgs(
        model=str(resolve_model(os.environ.get("MODEL", "default"))),
        pipeline_parallel_size=2,
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        kv_cache_memory_bytes=256 << 20,
    )
    async with AsyncPPEngine.from_engine_args(args) as app.state.engine:
        yield


app = FastAPI(lifespan=lifespan)


@app.get("/complete")
async def complete(prompt: str, max_tokens: int = 32) -> StreamingResponse:
    """Stream a completion. A client that goes away takes its request out of the engine."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0, output_kind=RequestOutputKind.DELTA)
    outputs = app.state.engine.generate(prompt, params, f"request-{next(numbers)}")
    return StreamingResponse((output.outputs[0].text async for output in outputs), media_type="text/plain")
