"""Defaults that depend on the machine and on the model: the one place where they are decided.

Each applies only where the user said nothing. They turn "no flags at all" into a server that runs well.
"""

import re
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CPU_ENFORCE_EAGER = True
"""Compilation on CPU costs start-up time and gains little for models that fit there."""

EMBEDDED_KV_CACHE_BYTES = 512 * 1024**2
"""Key-value cache per rank for an embedded model on CPU: room for one of full length or dozens of short requests."""

SERVED_NAMES = {None: "SmolLM2-135M-Instruct", "default": "SmolLM2-135M-Instruct", "tiny": "tiny"}
"""Name under which an embedded model is served unless `--served-model-name` says otherwise."""

QUEUE_FACTOR, QUEUE_LEAST = 8, 1024
"""Open requests that are admitted, as a multiple of those that one step may hold, and at least."""

_BF16 = re.compile(r"\b(avx512_bf16|amx_bf16|bf16)\b")


def has_fast_bf16(cpuinfo: str | None = None) -> bool:
    """This CPU computes in bfloat16 natively. An unknown CPU (no /proc/cpuinfo) counts as one that does."""
    if cpuinfo is None:
        try:
            cpuinfo = Path("/proc/cpuinfo").read_text("utf-8")
        except OSError:
            return True
    return _BF16.search(cpuinfo) is not None


def most_requests(max_num_seqs: int) -> int:
    """How many requests may be open, running and waiting, where --max-num-queued-reqs says nothing. vLLM has no limit.

    What waits costs memory, and a client that waits behind so many has most likely given up.
    """
    return max(QUEUE_FACTOR * max_num_seqs, QUEUE_LEAST)


def apply(args: Namespace, given: Mapping[str, Any], *, model: str | None, on_cpu: bool, fast_bf16: bool) -> None:
    """Fill in what the user left open, in place.

    Args:
        args: the namespace of vLLM's parser.
        given: what the user really said, by destination.
        model: the model as the user named it; None, "default" and "tiny" are the embedded ones.
        on_cpu: vLLM runs on its CPU platform.
        fast_bf16: see `has_fast_bf16`; without it bfloat16 is emulated at half the speed of float32. The embedded
            models run in float32 on every CPU: they fit, and answer alike on all machines.
    """
    if model in SERVED_NAMES and args.served_model_name is None:
        args.served_model_name = [SERVED_NAMES[model]]
    if not getattr(args, "verbose", False) and "use_tqdm_on_load" not in given:
        args.use_tqdm_on_load = False
    if not on_cpu:
        return
    if "dtype" not in given and (model in SERVED_NAMES or not fast_bf16):
        args.dtype = "float32"
    if "enforce_eager" not in given:
        args.enforce_eager = CPU_ENFORCE_EAGER
    if model in SERVED_NAMES and "kv_cache_memory_bytes" not in given:
        args.kv_cache_memory_bytes = EMBEDDED_KV_CACHE_BYTES
