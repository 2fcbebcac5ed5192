"""What a rank process needs of its environment to compute at full speed on CPUs, found without heavy imports.

An OpenMP runtime reads its settings when it is loaded, and a preloaded allocator must be there at exec. A rank is
forked from a zygote, so the zygote must be exec'ed with what a spawned worker would get: trials with forked ranks that
lacked it lost 20 to 45 % of the tokens per second.
"""

import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from async_pp.errors import ConfigError

PRELOAD = (
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.worker_base",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.model_loader.default_loader",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.core.sched.output",
    "vllm.lora.request",
    "async_pp.ranks.main",
    "async_pp.ranks.vllm_runner",
    "async_pp.engine.facade",
)
"""Modules a zygote imports before it forks: what every rank would import."""

BINDING = ("GOMP_CPU_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND", "KMP_AFFINITY")
"""What binds OpenMP threads when a process starts. Ranks are bound to their cores after the fork."""


def rank_environment(ranks: int, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """The full environment of a zygote for `ranks` ranks on this machine. What the user has set is kept.

    Args:
        ranks: ranks that will share the cores allowed to this process.
        base: environment to start from; this process's by default.
    """
    environment = dict(os.environ if base is None else base)
    if environment.get("VLLM_CPU_OMP_THREADS_BIND") != "nobind":
        for name in BINDING:  # it would bind the zygote, and every rank with it, to the first core
            environment.pop(name, None)
    allowed = len(os.sched_getaffinity(0))
    defaults = {
        "OMP_NUM_THREADS": str(max(1, allowed // ranks)),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_CPP_DYNAMIC_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
        # One machine: its loopback interface carries the rendezvous and the hidden states.
        "GLOO_SOCKET_IFNAME": "lo",
        "VLLM_HOST_IP": "127.0.0.1",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    for name, value in defaults.items():
        environment.setdefault(name, value)
    environment["LD_PRELOAD"] = _preloads(environment.get("LD_PRELOAD", ""))
    return environment


def split_cores(ranks: int, allowed: Sequence[int], bind: str | None = None) -> list[tuple[int, ...] | None]:
    """The cores of each rank.

    Args:
        ranks: number of ranks.
        allowed: cores this process may use, ascending.
        bind: what the user set as VLLM_CPU_OMP_THREADS_BIND: "0-3|4-7" (one list per rank), "nobind", "auto" or None.

    Returns:
        One tuple per rank, None for unbound. An even split in which every core is used; when there are fewer cores than
        ranks, ranks share cores in turn.

    Raises:
        ConfigError: `bind` does not fit the ranks or cannot be read.
    """
    if bind == "nobind":
        return [None] * ranks
    if bind is not None and bind != "auto":
        lists = bind.split("|")
        if len(lists) != ranks:
            raise ConfigError(f"VLLM_CPU_OMP_THREADS_BIND={bind} has {len(lists)} lists of cores for {ranks} ranks")
        return [_core_list(text, bind) for text in lists]
    if len(allowed) < ranks:
        return [(allowed[rank % len(allowed)],) for rank in range(ranks)]
    bounds = [len(allowed) * rank // ranks for rank in range(ranks + 1)]
    return [tuple(allowed[low:high]) for low, high in pairwise(bounds)]


def _core_list(text: str, whole: str) -> tuple[int, ...]:
    cores: list[int] = []
    try:
        for item in text.split(","):
            low, _, high = item.partition("-")
            cores += range(int(low), int(high or low) + 1)
    except ValueError:
        cores = []
    if not cores:
        raise ConfigError(f"VLLM_CPU_OMP_THREADS_BIND={whole} cannot be read: write lists of cores such as 0-3|4-7")
    return tuple(cores)


def _preloads(present: str) -> str:
    """LD_PRELOAD with PyTorch's OpenMP runtime, so that PyTorch and vLLM share one, and vLLM's allocator."""
    wanted: list[str] = []
    if not any(name in present for name in ("libomp", "libgomp", "libiomp")):
        wanted += _first_library("torch", ("lib/libgomp*.so*",))
    if "libtcmalloc" not in present:
        wanted = _first_library("vllm", ("libs/libtcmalloc_minimal*.so*", "libs/libtcmalloc.so*")) + wanted
    return ":".join([*wanted, *filter(None, [present])])


def _first_library(package: str, patterns: Sequence[str]) -> list[str]:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return []
    for pattern in patterns:
        if found := sorted(Path(spec.origin).parent.glob(pattern)):
            return [str(found[0].resolve())]
    return []
