"""What a rank changes in the configuration of its KV connector.

vLLM's `ExampleConnector` names files by prompt and layer. Pipeline ranks have different layers, but the tensor-parallel
ranks of a stage, which hold different heads of the same layers, would write over each other.
"""

from pathlib import Path

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory


def own_folder(transfer: KVTransferConfig, shard: int) -> None:
    """Let each tensor-parallel rank after the first store in a folder of its own, below the configured one. In place.

    The first rank's is the configured one: the scheduler's side looks there for what is stored.

    Args:
        transfer: this rank's own copy.
        shard: tensor-parallel rank.
    """
    if not shard or transfer.kv_connector is None:
        return
    from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    kind, extra = KVConnectorFactory.get_connector_class(transfer), transfer.kv_connector_extra_config
    if issubclass(kind, MultiConnector):
        for each in extra["connectors"]:
            inner = KVTransferConfig(**each)
            own_folder(inner, shard)
            each["kv_connector_extra_config"] = inner.kv_connector_extra_config
    elif issubclass(kind, ExampleConnector):
        folder = extra.get("shared_storage_path", "/tmp")  # as the connector itself reads it
        extra["shared_storage_path"] = str(Path(folder) / f"shard-{shard}")
