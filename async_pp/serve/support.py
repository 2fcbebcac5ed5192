"""Features of `vllm serve` that this server does not have, each with what to do instead.

A literal table over parsed flags. It is asked twice: with what the light parse found (values may be raw text), which
answers before vLLM is imported, and with the namespace of vLLM's own parser.
"""

from collections.abc import Callable, Mapping
from typing import Any

from async_pp.errors import ConfigError

BACKEND = "async_pp.engine.facade.PipelineExecutor"

Given = Mapping[str, Any]


def _more_than_one(name: str) -> Callable[[Given], bool]:
    return lambda given: given.get(name) is not None and int(given[name]) > 1


def _any_of(*names: str) -> Callable[[Given], bool]:
    def asked(given: Given) -> bool:
        values = [given.get(name) for name in names]
        return any(value is not None and value is not False for value in values)  # 0 is a value that was given

    return asked


_REPLICA = "start one server per replica, each on its own port, behind a load balancer"
_ONE_MACHINE = "all ranks run on this machine"

_UNSUPPORTED: tuple[tuple[Callable[[Given], bool], str], ...] = (
    (_any_of("headless"), f"--headless is not supported: {_ONE_MACHINE}, and this process serves them"),
    (
        lambda given: given.get("api_server_count") not in (None, 1),
        "--api-server-count other than 1 is not supported: the engine lives in the one server process",
    ),
    (_any_of("grpc", "grpc_port"), "gRPC is not supported: leave --grpc and --grpc-port out and use the HTTP API"),
    (_more_than_one("data_parallel_size"), f"--data-parallel-size greater than 1 is not supported: {_REPLICA}"),
    (
        _any_of(
            "data_parallel_rank",
            "data_parallel_start_rank",
            "data_parallel_hybrid_lb",
            "data_parallel_external_lb",
            "data_parallel_multi_port_external_lb",
        ),
        f"data-parallel load balancing is not supported: {_REPLICA}",
    ),
    (_more_than_one("nnodes"), f"--nnodes greater than 1 is not supported: {_ONE_MACHINE}"),
    (
        lambda given: int(given.get("node_rank") or 0) > 0,
        f"--node-rank is not supported: {_ONE_MACHINE}",
    ),
    (_any_of("enable_elastic_ep"), "--enable-elastic-ep is not supported: leave it out"),
    (
        lambda given: given.get("distributed_executor_backend") not in (None, BACKEND),
        "--distributed-executor-backend cannot be chosen here: this server brings its own ranks; leave it out",
    ),
)


def check(given: Given) -> None:
    """Refuse the first unsupported feature that was asked for.

    Raises:
        ConfigError: one line that names the flag and the way out.
    """
    for asked, message in _UNSUPPORTED:
        if asked(given):
            raise ConfigError(message)
