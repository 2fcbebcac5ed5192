"""`bench soak`: engines started and stopped, and requests served, in one process: what it holds must not grow.

After each stop, and at even distances between the requests, the process is looked at: descriptors, threads, tasks,
children, names in /dev/shm that no process uses, temporary files, resident memory. The counts must be the same at
the end as after the first start and stop, which warms up what libraries make once and keep. Memory may go up and down;
it must not go up all the time: see `grows`.
"""

import asyncio
import gc
import importlib.util
import os
import statistics
import tempfile
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

from async_pp.bench import BenchFailed
from async_pp.bench.pipeline.surroundings import measuring
from async_pp.bench.stopping import run_coroutine
from async_pp.errors import ConfigError
from async_pp.models import resolve_model

RSS_SLACK_MIB = 64.0
"""Growth between the quarters that is no leak: what allocators and caches keep."""

SHARED_MEMORY = Path("/dev/shm")

IN_FLIGHT = 16
TOKENS_OUT = 8
LOOKS = 10
"""How often the process is looked at while requests are served."""


def add_command(commands: Any) -> None:
    """Add the parser of `soak`."""
    command = commands.add_parser(
        "soak",
        help="engines started and stopped, requests served, in one process: nothing may grow",
        description="Start and stop an engine many times in one process, then serve many requests with one, and look "
        "at what the process holds. Exit code 3 when anything grows.",
    )
    command.set_defaults(run=run)
    add = command.add_argument
    add("--model", default="tiny", help="default, tiny, or the folder of a model (default: tiny)")
    add("--pp", type=int, default=2, help="pipeline size (default: 2)")
    add("--starts", type=int, default=200, help="starts and stops (default: 200)")
    add("--requests", type=int, default=10_000, help="requests to one engine after them (default: 10000)")


def run(args: Namespace, tell: Callable[[str], None]) -> str:
    """Start, stop, serve and look. Returns the table.

    Raises:
        ConfigError: it cannot work; nothing was started.
        BenchFailed: something grew, or a request failed.
    """
    if args.starts < 2 or args.requests < 0 or args.pp < 1:
        raise ConfigError("--starts must be at least 2, --requests at least 0 and --pp at least 1")
    if importlib.util.find_spec("psutil") is None:
        raise ConfigError("psutil is not installed: pip install 'async_pp[bench]'")
    model = resolve_model(args.model)
    with measuring(), own_folder() as folder:
        looks = run_coroutine(soak(str(model), args.pp, args.starts, args.requests, folder, tell))
    if grown := [text for text in (grows(looks[0]), grows(looks[1])) if text]:
        raise BenchFailed(f"{'; '.join(grown)}\n{table(*looks)}")
    return table(*looks)


@dataclass(frozen=True)
class Held:
    """What the process holds at one moment.

    `threads` are those outside the loop's own pool, `files` temporary ones, and in /dev/shm those that nobody uses.
    """

    descriptors: int
    threads: int
    tasks: int
    children: int
    files: int
    rss_mib: float

    @classmethod
    def now(cls, folder: Path, since_s: float) -> "Held":
        """Look. Called on the loop; collects garbage first."""
        import psutil  # an extra, which `run` has looked for

        gc.collect()
        process = psutil.Process()
        return cls(
            process.num_fds(),
            # The loop's own pool makes another thread, up to its limit, whenever none of them happens to be idle.
            sum(not thread.name.startswith(("asyncio_", "uvloop_")) for thread in threading.enumerate()),
            len(asyncio.all_tasks()),
            len(process.children(recursive=True)),
            len(list(folder.iterdir())) + _orphans(since_s),
            process.memory_info().rss / 2**20,
        )


@contextmanager
def own_folder() -> Iterator[Path]:
    """A folder for temporary files that nobody else uses."""
    before, tempdir = os.environ.get("TMPDIR"), tempfile.tempdir
    with tempfile.TemporaryDirectory(prefix="async_pp-bench-", ignore_cleanup_errors=True) as name:
        os.environ["TMPDIR"] = tempfile.tempdir = name
        try:
            yield Path(name)
        finally:
            tempfile.tempdir = tempdir
            if before is None:
                del os.environ["TMPDIR"]
            else:
                os.environ["TMPDIR"] = before


def _orphans(since_s: float) -> int:
    """Names of this user in shared memory, younger than `since_s`, that no process has mapped: what was left behind."""
    import psutil

    made = {str(path) for path in SHARED_MEMORY.iterdir() if _is_ours(path, since_s)}
    for process in psutil.process_iter() if made else ():
        try:
            maps = Path(f"/proc/{process.pid}/maps").read_text("utf-8", "replace")
        except OSError:  # it has ended, or is another user's
            continue
        made = {name for name in made if name not in maps}
    return len(made)


def _is_ours(path: Path, since_s: float) -> bool:
    try:
        status = path.lstat()
    except OSError:  # taken away meanwhile
        return False
    return status.st_uid == os.geteuid() and status.st_ctime > since_s


def grows(looks: Sequence[Held]) -> str | None:
    """What grew from the first look on, in words; None when nothing did.

    Counts are compared between the first and the last look. Of the memory the median of the last quarter is compared
    with that of the second: the first still fills caches.
    """
    if len(looks) < 2:
        return None
    first, last = looks[0], looks[-1]
    counts = [field.name for field in fields(Held) if field.name != "rss_mib"]
    grown = [
        f"{name} {getattr(first, name)} -> {getattr(last, name)}"
        for name in counts
        if getattr(last, name) > getattr(first, name)
    ]
    quarter = max(1, len(looks) // 4)
    before = statistics.median(look.rss_mib for look in looks[quarter : 2 * quarter])
    after = statistics.median(look.rss_mib for look in looks[-quarter:])
    if after - before > RSS_SLACK_MIB:
        grown.append(f"resident memory {before:.0f} -> {after:.0f} MiB")
    return ", ".join(grown) or None


def table(starts: Sequence[Held], requests: Sequence[Held]) -> str:
    """The looks as lines: after the first, some, and the last start; then while requests were served."""
    head = ["", *(field.name for field in fields(Held))]
    rows = [(f"start {index + 1}", starts[index]) for index in _some(len(starts))]
    rows += [(f"requests {index}/{len(requests) - 1}", look) for index, look in enumerate(requests)]
    lines = [[name, *(f"{value:.0f}" for value in astuple(look))] for name, look in rows]
    widths = [max(len(line[column]) for line in [head, *lines]) for column in range(len(head))]
    return "".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) + "\n" for line in [head, *lines]
    )


def _some(count: int) -> list[int]:
    """At most `LOOKS` + 1 indices out of `count`, evenly, with the first and the last."""
    return sorted({round(step * (count - 1) / LOOKS) for step in range(LOOKS + 1)})


async def soak(
    model: str, stages: int, starts: int, requests: int, folder: Path, tell: Callable[[str], None]
) -> tuple[list[Held], list[Held]]:
    """Start and stop, then serve. Returns what was held after each stop, and while requests were served.

    Args:
        model: its folder.
        stages, starts, requests: how many.
        folder: for temporary files: `own_folder`.
        tell: told of the progress.

    Raises:
        BenchFailed: a request was not answered in full.
    """
    since_s = time.time()
    after_stops: list[Held] = []
    began = time.monotonic()
    for number in range(starts):
        async with _engine(model, stages) as engine:
            await _serve(engine, f"start-{number}", IN_FLIGHT)
        after_stops.append(Held.now(folder, since_s))
        if number in _some(starts):
            tell(f"start {number + 1} of {starts}, {(time.monotonic() - began) / (number + 1):.1f} s each")
    served: list[Held] = []
    if requests:
        async with _engine(model, stages) as engine:
            await _serve(engine, "warm", IN_FLIGHT)
            served.append(Held.now(folder, since_s))
            for portion in range(LOOKS):
                await _serve(
                    engine, f"portion-{portion}", requests * (portion + 1) // LOOKS - requests * portion // LOOKS
                )
                served.append(Held.now(folder, since_s))
                tell(f"{requests * (portion + 1) // LOOKS} of {requests} requests")
    return after_stops, served


def _engine(model: str, stages: int) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs

    from async_pp.engine.client import AsyncPPEngine

    return AsyncPPEngine.from_engine_args(
        AsyncEngineArgs(
            model=model,
            pipeline_parallel_size=stages,
            dtype="float32",
            enforce_eager=True,
            max_model_len=128,
            max_num_seqs=IN_FLIGHT,
            kv_cache_memory_bytes=16 << 20,
        )
    )


async def _serve(engine: Any, name: str, count: int) -> None:
    """So many requests, `IN_FLIGHT` at a time; every third one is given up in the middle."""
    from vllm import SamplingParams

    numbers = iter(range(count))

    async def client() -> None:
        for number in numbers:
            params = SamplingParams(max_tokens=TOKENS_OUT, temperature=0.0, ignore_eos=True)
            outputs = engine.generate(f"soak {number}", params, f"{name}-{number}")
            tokens = 0
            async for output in outputs:
                tokens = len(output.outputs[0].token_ids)
                if number % 3 == 2:
                    break
            await outputs.aclose()
            if not tokens or (number % 3 != 2 and tokens != TOKENS_OUT):
                raise BenchFailed(f"request {name}-{number} was not answered in full")

    async with asyncio.TaskGroup() as tasks:
        for index in range(min(IN_FLIGHT, count)):
            tasks.create_task(client(), name=f"soak client {index}")
