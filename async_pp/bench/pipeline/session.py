"""The order of a run: each system alone, with each connector, and nothing of it left before the next."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from async_pp.bench.pipeline import bare, oracle, ours
from async_pp.bench.pipeline.connectors import Connector
from async_pp.bench.pipeline.measured import Measured, Round
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
        own = []
        for connector in settings.connectors:
            with private_folder(model, settings.pp) as folder:
                told = _teller(settings, connector, said, "async_pp")
                own.append(await ours.measure(settings, connector, folder, told))
        vllm: list[list[Measured]] | None = None
        if settings.against_vllm:
            from async_pp.bench.pipeline import peer  # psutil, which it needs, is an extra

            vllm = []
            for connector in settings.connectors:
                with private_folder(model, settings.pp) as folder:
                    told = _teller(settings, connector, said, "vllm")
                    vllm.append(await peer.measure(settings, connector, folder, told))
        pipe = await bare.measure(settings, partial(_tell_at, said, "bare pipe"))
        formula = [oracle.compute(load, settings.stages) for load in settings.loads]
        several = len(settings.connectors)
        found.append(
            Round(
                ours=_by_case(own),
                vllm=None if vllm is None else _by_case(vllm),
                bare_pipe=_by_case([pipe] * several),
                formula=_by_case([formula] * several),
            )
        )
    return found


def _by_case(of_connectors: Sequence[Sequence[Measured]]) -> list[Measured]:
    """What was measured of each load, connector by connector, in the order of `Settings.cases`."""
    return [measured for of_load in zip(*of_connectors, strict=True) for measured in of_load]


def _teller(settings: Settings, connector: Connector, tell: Tell, system: str) -> Tell:
    alone = settings.connectors == (connector,)
    return partial(_tell_at, tell, system if alone else f"{system}, connector {connector.name}")


def _tell_at(tell: Tell, where: str, text: str) -> None:
    tell(f"{where}: {text}")
