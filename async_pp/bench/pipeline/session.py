"""The order of a run: each system alone, one after the other, and nothing of it left before the next."""

from functools import partial
from pathlib import Path

from async_pp.bench.pipeline import bare, oracle, ours
from async_pp.bench.pipeline.measured import Round
from async_pp.bench.pipeline.settings import Settings, Tell
from async_pp.bench.pipeline.surroundings import private_folder
from async_pp.bench.stopping import run_coroutine


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
    return run_coroutine(_rounds(settings, model, tell))


async def _rounds(settings: Settings, model: Path, tell: Tell) -> list[Round]:
    found = []
    for number in range(1, settings.rounds + 1):
        said = partial(_tell_at, tell, f"round {number} of {settings.rounds}")
        with private_folder(model, settings.pp) as folder:
            own = await ours.measure(settings, folder, partial(_tell_at, said, "async_pp"))
        vllm = None
        if settings.against_vllm:
            from async_pp.bench.pipeline import peer  # psutil, which it needs, is an extra

            with private_folder(model, settings.pp) as folder:
                vllm = await peer.measure(settings, folder, partial(_tell_at, said, "vllm"))
        pipe = await bare.measure(settings, partial(_tell_at, said, "bare pipe"))
        found.append(Round(own, vllm, pipe, [oracle.compute(load, settings.stages) for load in settings.loads]))
    return found


def _tell_at(tell: Tell, where: str, text: str) -> None:
    tell(f"{where}: {text}")
