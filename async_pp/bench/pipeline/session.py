"""The order of a run: each system alone, one after the other, and nothing of it left before the next."""

import asyncio
import json
import logging
import os
import signal
import tempfile
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import uvloop

from async_pp.bench.pipeline import oracle
from async_pp.bench.pipeline.measured import Measured
from async_pp.bench.pipeline.settings import Settings, Tell
from async_pp.bench.stopping import Stopped
from async_pp.models import ensure_tiny

T = TypeVar("T")

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # sleepers are many more than cores: none may be bound to one
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONWARNINGS": "ignore::FutureWarning",  # of libraries, once per rank
}
"""For all systems alike, while they are measured."""


@dataclass(frozen=True)
class Round:
    """What every system did, load by load in the order of the settings; None for one that was not asked for."""

    ours: list[Measured]
    vllm: list[Measured] | None
    bare_pipe: list[Measured]
    formula: list[Measured]


def run(settings: Settings, tell: Tell) -> list[Round]:
    """Measure everything, as often as the settings say.

    Raises:
        ConfigError: the model cannot be made here; nothing was started.
        BenchFailed: a system or a request failed; nothing is left.
        Stopped: SIGINT or SIGTERM came; nothing is left.
    """
    tiny = ensure_tiny()
    for load in settings.loads:
        if load.note:
            tell(f"{load.name}: {load.note}")
    # The prefix is the package's own, so that what checks for its leftovers finds this folder too.
    with (
        tempfile.TemporaryDirectory(prefix="async_pp-bench-", ignore_cleanup_errors=True) as name,
        _environment(ENVIRONMENT),
    ):
        folder = Path(name)
        model = with_layers(tiny, folder / "model", settings.pp)
        return _on_loop(_rounds(settings, model, folder, tell))


async def _rounds(settings: Settings, model: Path, folder: Path, tell: Tell) -> list[Round]:
    tell("importing vLLM")
    from async_pp.bench.pipeline import bare, ours, peer

    for name in ("vllm", "torch"):  # this process is the bench's own: its progress is all there is to see
        logging.getLogger(name).setLevel(logging.ERROR)

    found = []
    for number in range(1, settings.rounds + 1):
        said = partial(_tell_at, tell, f"round {number} of {settings.rounds}")
        own = await ours.measure(settings, model, _new(folder / f"ours-{number}"), partial(_tell_at, said, "async_pp"))
        vllm = None
        if settings.against_vllm:
            where = _new(folder / f"vllm-{number}")
            vllm = await peer.measure(settings, model, where, partial(_tell_at, said, "vllm"))
        pipe = await bare.measure(settings, partial(_tell_at, said, "bare pipe"))
        found.append(Round(own, vllm, pipe, [oracle.compute(load, settings.stages) for load in settings.loads]))
    return found


def _tell_at(tell: Tell, where: str, text: str) -> None:
    tell(f"{where}: {text}")


def _new(folder: Path) -> Path:
    folder.mkdir()
    return folder


def with_layers(model: Path, folder: Path, layers: int) -> Path:
    """A new `folder` like `model`, but of so many layers, and without weights: nobody loads them here."""
    folder.mkdir()
    for path in model.iterdir():
        if path.suffix != ".safetensors" and path.name != "config.json":
            (folder / path.name).symlink_to(path)
    config = json.loads((model / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers}), "utf-8")
    return folder


@contextmanager
def _environment(wanted: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


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
