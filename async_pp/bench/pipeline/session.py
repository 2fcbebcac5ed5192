"""The order of a run: each system alone, one after the other, and nothing of it left before the next."""

import asyncio
import signal
from collections.abc import Coroutine
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import uvloop

from async_pp.bench.pipeline import bare, oracle, ours, peer
from async_pp.bench.pipeline.measured import Round
from async_pp.bench.pipeline.settings import Settings, Tell
from async_pp.bench.pipeline.surroundings import private_folder
from async_pp.bench.stopping import Stopped

T = TypeVar("T")


def run(settings: Settings, model: Path, tell: Tell) -> list[Round]:
    """Measure everything, as often as the settings say.

    Args:
        settings: what to measure.
        model: a folder whose configuration and tokenizer are used.
        tell: told what is done now.

    Raises:
        BenchFailed: a system or a request failed; nothing is left.
        Stopped: SIGINT or SIGTERM came; nothing is left.
    """
    return _on_loop(_rounds(settings, model, tell))


async def _rounds(settings: Settings, model: Path, tell: Tell) -> list[Round]:
    found = []
    for number in range(1, settings.rounds + 1):
        said = partial(_tell_at, tell, f"round {number} of {settings.rounds}")
        with private_folder(model, settings.pp) as folder:
            own = await ours.measure(settings, folder, partial(_tell_at, said, "async_pp"))
        vllm = None
        if settings.against_vllm:
            with private_folder(model, settings.pp) as folder:
                vllm = await peer.measure(settings, folder, partial(_tell_at, said, "vllm"))
        pipe = await bare.measure(settings, partial(_tell_at, said, "bare pipe"))
        found.append(Round(own, vllm, pipe, [oracle.compute(load, settings.stages) for load in settings.loads]))
    return found


def _tell_at(tell: Tell, where: str, text: str) -> None:
    tell(f"{where}: {text}")


def _on_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` on a loop of its own, which ends it on the first SIGINT or SIGTERM.

    Raises:
        Stopped: a signal came, and `work` has ended.
    """
    caught: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_until_signal(work, caught))
    except asyncio.CancelledError:
        if not caught:
            raise
        raise Stopped(caught[0]) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


async def _until_signal(work: Coroutine[Any, Any, T], caught: list[int]) -> T:
    task = asyncio.create_task(work, name="bench pipeline")

    def stop(number: int) -> None:
        if not caught:  # only the first counts: stopping takes bounded time
            caught.append(number)
            task.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    return await task
