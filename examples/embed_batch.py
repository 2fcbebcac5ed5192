"""Answer a list of questions with an engine that lives inside this program.

python examples/embed_batch.py [MODEL] [PIPELINE_PARALLEL_SIZE]
"""

import asyncio
import sys
from collections.abc import Sequence

from vllm import AsyncEngineArgs, SamplingParams

from async_pp import AsyncPPEngine
from async_pp.models import resolve_model

QUESTIONS = ["The capital of France is", "Two plus two is", "Water boils at", "The first president of the USA was"]


async def answer(engine: AsyncPPEngine, number: int, question: str) -> str:
    """The model's continuation of one question."""
    text = ""
    async for output in engine.generate(question, SamplingParams(max_tokens=16, temperature=0), f"question-{number}"):
        text = output.outputs[0].text
    return text


async def main(model: str, stages: int, questions: Sequence[str] = QUESTIONS) -> list[str]:
    """Start, answer all at once, stop."""
    args = AsyncEngineArgs(
        model=str(resolve_model(model)),
        pipeline_parallel_size=stages,
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        kv_cache_memory_bytes=256 << 20,
        disable_log_stats=True,
    )
    async with AsyncPPEngine.from_engine_args(args) as engine, asyncio.TaskGroup() as tasks:
        answers = [tasks.create_task(answer(engine, n, question)) for n, question in enumerate(questions)]
    return [task.result() for task in answers]


if __name__ == "__main__":
    model, stages = [*sys.argv[1:], *["default", "2"][len(sys.argv) - 1 :]]
    for question, text in zip(QUESTIONS, asyncio.run(main(model, int(stages))), strict=True):
        print(f"{question}{text}")
