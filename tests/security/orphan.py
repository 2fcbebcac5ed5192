"""A program that runs ranks and is killed at a named gate. Prints the ids of its processes there, and waits.

`python -m tests.security.orphan GATE`, with sleeping ranks; or `... GATE MODEL PP TP` with vLLM's.
"""

import asyncio
import signal
import sys
from operator import methodcaller
from typing import Any, NoReturn

import psutil

from async_pp.core.gather import Scope
from async_pp.engine.executor import RankExecutor
from async_pp.engine.layout import RankLayout
from async_pp.ranks.environment import rank_environment
from async_pp.ranks.sleeping_runner import Load, StageTime
from async_pp.ranks.spawn import RankSpec, Zygote

RUNNER = "async_pp.ranks.sleeping_runner:SleepingRunner"


def gate() -> NoReturn:
    """Stop here for ever."""
    print(*(child.pid for child in psutil.Process().children(recursive=True)), flush=True)
    while True:
        signal.pause()


class SpawnsOne(Zygote):
    """Stops when the first of its ranks is there."""

    async def spawn(self, spec: RankSpec) -> Any:
        await super().spawn(spec)
        gate()


class Keeps(Zygote):
    """Stops when the folder is promised and not made, which it makes."""

    async def keep(self, folder: Any) -> None:
        await super().keep(folder)
        folder.mkdir(0o700)
        gate()


async def sleeping(where: str) -> None:
    zygote = {"keep": Keeps, "spawn": SpawnsOne}.get(where, Zygote)()
    zygote.launch(rank_environment(2), ["tests.ranks.slow_import"] if where == "import" else [])
    layout = RankLayout(output_rank=1, cpus=[None] * 2, runner=RUNNER)
    ranks = RankExecutor(layout, zygote, epoch=0, on_phase=lambda *_: None, on_lost=lambda error: None)
    if where == "import":
        asyncio.get_running_loop().call_soon(gate)
    await ranks.start()
    if where == "load":
        gate()
    await ranks.call(methodcaller("start", str(ranks.runtime_dir), StageTime(alpha_s=60.0)))
    ranks.started()
    ranks.execute(0, Load(1, 1), grammar=None, sample="now", scope=Scope.OUTPUT)
    gate()


async def vllm(where: str, model: str, stages: int, in_stage: int) -> None:
    from vllm import AsyncEngineArgs

    from async_pp import AsyncPPEngine

    def phase(name: str, rank: int | None, seconds: float) -> None:
        if (name, rank) == (where, 0):
            gate()

    args = AsyncEngineArgs(
        model=model,
        pipeline_parallel_size=stages,
        tensor_parallel_size=in_stage,
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        kv_cache_memory_bytes=16 << 20,
    )
    async with AsyncPPEngine.from_engine_args(args, on_phase=phase):
        gate()


if __name__ == "__main__":
    name, *others = sys.argv[1:]
    asyncio.run(vllm(name, others[0], int(others[1]), int(others[2])) if others else sleeping(name))
