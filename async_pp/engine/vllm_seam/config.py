"""vLLM's configuration, made without leaving marks on the host program.

Creating it writes environment variables (thread settings, preloads) that vLLM's own worker processes inherit, and
configures logging. Here the environment is restored and handed to the ranks instead, and only the ranks' logging is
configured.
"""

import copy
import dataclasses
import math
import os
import pkgutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.utils.cpu_resource_utils import get_allowed_cpu_list, get_memory_node_info

from async_pp.engine.layout import RankLayout
from async_pp.engine.vllm_seam.connector_config import check_known, check_platform
from async_pp.engine.vllm_seam.plugin import BACKEND
from async_pp.errors import ConfigError, first_of
from async_pp.ranks.environment import split_cores

FREE_MEMORY_FOR_KV = 0.4
"""Share of a node's free memory that the KV caches of its ranks take together on CPU."""

RUNNER = "async_pp.ranks.vllm_runner:VllmRunner"

MOST_KV_BYTES = 4 << 30
"""Largest KV cache of a rank that is made unasked on CPU: every page is touched at start, about 1 s per GiB."""


@contextmanager
def captured_environment() -> Iterator[dict[str, str]]:
    """Undo every change to the environment at the end; the dictionary then holds what was set."""
    before = dict(os.environ)
    written: dict[str, str] = {}
    try:
        yield written
    finally:
        written.update({name: value for name, value in os.environ.items() if before.get(name) != value})
        for name in written:
            if name in before:
                os.environ[name] = before[name]
            else:
                del os.environ[name]
        for name in before.keys() - os.environ.keys():
            os.environ[name] = before[name]


def make_config(args: AsyncEngineArgs, usage_context: Any) -> tuple[VllmConfig, dict[str, str]]:
    """Resolve engine arguments. Returns the configuration and the environment that its ranks need.

    Raises:
        ConfigError: the arguments cannot work, in one line.
    """
    backend = pkgutil.resolve_name(BACKEND)
    if args.distributed_executor_backend not in (None, BACKEND, backend):
        raise ConfigError(
            f"--distributed-executor-backend {args.distributed_executor_backend} cannot be used here: "
            "async_pp brings its own ranks; leave the option out"
        )
    args = copy.copy(args)
    args.distributed_executor_backend = backend  # the class: vLLM asks it, not its name, whether it can do pipelines
    logging_config = args.create_logging_config()
    # How this process logs is the host program's to say; the ranks follow what the arguments say.
    args.logging_config = dataclasses.replace(logging_config, configure_logging=False, pylogging_config_file=None)
    args.log_level = args.log_config_file = None
    with captured_environment() as written, config_errors():
        check_known(args.kv_transfer_config)
        config = args.create_engine_config(usage_context=usage_context)
    config.logging_config = logging_config
    check(config)
    share_memory(config)
    return config, written


@contextmanager
def config_errors() -> Iterator[None]:
    """Turn what vLLM raises in this process over arguments, model files and sizes into one line.

    Our own errors pass, out of task groups too.

    Raises:
        ConfigError: with vLLM's words.
    """
    try:
        yield
    except Exception as error:
        first = first_of(error)
        if isinstance(
            first, (ValueError, TypeError, OSError, NotImplementedError, AssertionError, KeyError, ImportError)
        ):
            raise ConfigError(_one_line(first)) from first
        if first is not error:
            raise first from None
        raise


def check(config: VllmConfig) -> None:
    """Refuse what cannot work, before any rank starts.

    Raises:
        ConfigError: with what to change.
    """
    parallel = config.parallel_config
    if parallel.data_parallel_size > 1:
        raise ConfigError("data parallel is not supported: start one server per replica")
    if parallel.nnodes > 1:
        raise ConfigError("more than one node is not supported: all ranks run on this machine")
    if parallel.enable_elastic_ep:
        raise ConfigError("elastic expert parallel is not supported")
    text = config.model_config.hf_text_config
    layers = getattr(text, "num_hidden_layers", None)
    stages = parallel.pipeline_parallel_size
    if layers is not None and stages > layers:
        raise ConfigError(f"pipeline parallel size {stages} is greater than the model's {layers} layers")
    check_platform(config.kv_transfer_config)


def share_memory(config: VllmConfig) -> None:
    """Size each rank's KV cache where the user left memory open. In place; CPU only.

    vLLM lets one worker take nearly all memory of its NUMA node, and refuses to start a second one there. Here the
    ranks share the node with each other and with the host program.
    """
    cache = config.cache_config
    untouched = cache.gpu_memory_utilization == type(cache).gpu_memory_utilization
    if cache.kv_cache_memory_bytes is not None or not untouched or not current_platform.is_cpu():
        return
    nodes = {core.numa_node for core in get_allowed_cpu_list()}
    ranks_per_node = math.ceil(config.parallel_config.world_size / len(nodes))
    free_bytes = min(get_memory_node_info(node).available_memory for node in nodes)
    cache.kv_cache_memory_bytes = min(MOST_KV_BYTES, int(FREE_MEMORY_FOR_KV * free_bytes / ranks_per_node))


def layout(config: VllmConfig) -> RankLayout:
    """Where the ranks of a configuration run. The first rank of the last stage answers."""
    parallel = config.parallel_config
    return RankLayout(
        output_rank=parallel.world_size - parallel.tensor_parallel_size,
        cpus=cores(config),
        runner=RUNNER,
        ranks_per_stage=parallel.world_size // parallel.pipeline_parallel_size,
    )


def cores(config: VllmConfig, environment: Mapping[str, str] = os.environ) -> list[tuple[int, ...] | None]:
    """The cores of each rank: an even split of those allowed to this process, or what the user bound.

    Only the CPU platform binds; elsewhere every rank is unbound.
    """
    ranks = config.parallel_config.world_size
    if not current_platform.is_cpu():
        return [None] * ranks
    bind = environment.get("VLLM_CPU_OMP_THREADS_BIND")
    return list(split_cores(ranks, sorted(os.sched_getaffinity(0)), bind=bind))


def _one_line(error: Exception) -> str:
    """The first sentence that says something: configuration errors of validators span many lines."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and "validation error" in lines[0]:  # the validator's headline names only the class
        lines = lines[1:]
    text = lines[0] if lines else type(error).__name__
    return text.removeprefix("Value error, ").partition(" [type=")[0]
