"""The scheduler's side of the sleeping ranks' KV connector. Theirs is in `worker`, which has no model runner."""

from typing import Any

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata

from async_pp.bench.pipeline.connectors import LATE_RANK, Connector, Sends

_LATE_STEPS = "late_steps"


def transfer_config(connector: Connector) -> KVTransferConfig | None:
    """What vLLM's configuration says of a connector."""
    if connector.late_steps is None:
        return None
    return KVTransferConfig(
        kv_connector=SleepingConnector.__name__,
        kv_connector_module_path=__name__,
        kv_role=connector.role,
        kv_connector_extra_config={_LATE_STEPS: connector.late_steps},
    )


def sends_of(transfer: KVTransferConfig | None, rank: int) -> Sends | None:
    """What a rank has to report under this configuration, or None when there is no connector."""
    if transfer is None:
        return None
    return Sends(transfer.kv_connector_extra_config[_LATE_STEPS] if rank == LATE_RANK else 0)


class SleepingConnector(KVConnectorBase_V1):  # type: ignore[misc, unused-ignore]
    """Holds the blocks of each request that ends until every rank has reported, and loads nothing."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Nothing is stored anywhere."""
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Nothing is kept."""

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Which requests have ended is in the scheduler's output itself."""
        return KVConnectorMetadata()

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        """Hold the blocks."""
        return True, None

    # -- the ranks' side, which no rank makes ------------------------------------------------------------------------

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing is loaded."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing is saved."""

    def wait_for_save(self) -> None:
        """Nothing is saved."""
