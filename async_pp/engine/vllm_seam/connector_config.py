"""vLLM's KV connectors: what is refused before any rank starts, and what they ask of the steps.

A configuration names one connector, or vLLM's `MultiConnector` with a list of them; everything here looks at each.
"""

from collections.abc import Iterator
from typing import Any

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.platforms import current_platform

from async_pp.errors import ConfigError

GPU_ONLY = ("OffloadingConnector", "SimpleCPUOffloadConnector")
"""Copy between a GPU and the CPU's memory. On a CPU the first is refused by its worker, the second makes CUDA streams;
both only when the ranks have loaded the model."""


def configured(transfer: KVTransferConfig) -> Iterator[KVTransferConfig]:
    """The configuration of each connector. Raises what vLLM's validation of the inner ones raises."""
    if transfer.kv_connector != "MultiConnector":
        yield transfer
        return
    inner = transfer.kv_connector_extra_config.get("connectors")
    if not inner:
        raise ConfigError('MultiConnector needs "connectors", a list of connectors, in its kv_connector_extra_config')
    for each in inner:
        yield from configured(KVTransferConfig(**each))


def check_known(transfer: KVTransferConfig | dict[str, Any] | None) -> None:
    """Refuse connectors that vLLM does not know and modules that cannot be imported. Imports them.

    Raises:
        ConfigError: with the connector's name.
        ValueError: vLLM's own word, on a role that is missing for one.
    """
    if transfer is None:
        return
    for each in configured(KVTransferConfig(**transfer) if isinstance(transfer, dict) else transfer):
        name, path = each.kv_connector, each.kv_connector_module_path
        if name is None:
            continue
        try:
            KVConnectorFactory.get_connector_class(each)
        except ValueError as error:
            if path is None:
                raise ConfigError(
                    f"vLLM has no KV connector {name}: check the name, or give kv_connector_module_path for your own"
                ) from error
            raise
        except Exception as error:  # the module is the user's or a further package's: importing it may raise anything
            where = f"module {path}" if path else "its package"
            raise ConfigError(f"KV connector {name}: {where} cannot be used: {' '.join(str(error).split())}") from error


def check_platform(transfer: KVTransferConfig | None) -> None:
    """Refuse connectors that need a GPU where there is none.

    Raises:
        ConfigError: with the connector's name.
    """
    if transfer is None or not current_platform.is_cpu():
        return
    for each in configured(transfer):
        if each.kv_connector in GPU_ONLY and each.kv_connector_module_path is None:
            raise ConfigError(f"{each.kv_connector} does not work on CPU: leave it out or run on a GPU")


def takes_whole_prompts(connector: Any) -> bool:
    """Whether no prompt may be cut, because a connector stores all of it out of the step that begins it.

    Args:
        connector: of the scheduler's side, or None.
    """
    if connector is None:
        return False
    from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    if isinstance(connector, MultiConnector):
        return any(takes_whole_prompts(each) for each in connector.sub_connectors)
    return isinstance(connector, ExampleConnector)
