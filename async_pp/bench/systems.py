"""How each system is started: command line and environment, the same for both wherever both understand it.

What differs, and why: vLLM's server is told to use its multiprocess executor and the worker with the missing buffer,
and loads no plugin, so nothing of this package but that worker runs in it. Ours brings its ranks and needs neither; it
ends when a rank is lost, as vLLM's does.
Defaults that the two would choose differently are given to both, as vLLM's own server chooses them on a CPU.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from async_pp.bench.settings import MAX_MODEL_LEN
from async_pp.ranks.environment import BINDING, split_cores

System = Literal["async_pp", "vllm"]

HOST = "127.0.0.1"
SERVED_NAME = "bench"

KV_CACHE_BYTES = 512 * 1024**2
"""Key-value cache of each rank: room for all requests of the default levels at any pipeline size."""

TOKENS_PER_STEP, SEQUENCES = 2048, 128
"""Per rank: what vLLM's own server takes on a CPU as limits of a step's tokens and of running requests."""

_LAUNCH: dict[System, tuple[str, ...]] = {
    "async_pp": ("async_pp.serve", "--on-rank-loss", "exit"),
    "vllm": (
        "vllm.entrypoints.launchers.api_server.entry",
        "--distributed-executor-backend",
        "mp",
        "--worker-cls",
        "async_pp.bench.peer_worker.BufferedWorker",
    ),
}

_SHARED_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_HOST_IP": HOST,
    "GLOO_SOCKET_IFNAME": "lo",
    "TOKENIZERS_PARALLELISM": "false",
}


def command(system: System, pp: int, model: Path, port: int) -> list[str]:
    """The command that starts a server of `system` with `pp` stages."""
    flags: dict[str, object] = {
        "--model": model,
        "--served-model-name": SERVED_NAME,
        "--host": HOST,
        "--port": port,
        "--pipeline-parallel-size": pp,
        "--dtype": "float32",
        "--max-model-len": MAX_MODEL_LEN,
        "--kv-cache-memory-bytes": KV_CACHE_BYTES,
        "--max-num-batched-tokens": TOKENS_PER_STEP * pp,
        "--max-num-seqs": SEQUENCES * pp,
        "--uvicorn-log-level": "warning",
    }
    words = [str(word) for pair in flags.items() for word in pair]
    return [sys.executable, "-m", *_LAUNCH[system], *words, "--enforce-eager", "--disable-uvicorn-access-log"]


def environment(system: System, pp: int, base: Mapping[str, str], allowed: Sequence[int]) -> dict[str, str]:
    """The whole environment of such a server.

    Args:
        system, pp: as for `command`.
        base: the environment to start from. What it says to vLLM and OpenMP is dropped: a setting of the shell that
            one system heeds and the other does not would spoil the comparison.
        allowed: the cores to use, ascending; split evenly among the ranks.
    """
    kept = {name: value for name, value in base.items() if not name.startswith(("VLLM_", "OMP_"))}
    for name in BINDING:
        kept.pop(name, None)
    cores = split_cores(pp, allowed)
    bound = {"VLLM_CPU_OMP_THREADS_BIND": "|".join(",".join(map(str, of_rank or ())) for of_rank in cores)}
    return {**kept, **_SHARED_ENVIRONMENT, **bound, **({"VLLM_PLUGINS": ""} if system == "vllm" else {})}
