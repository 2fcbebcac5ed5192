"""An encoder-cache connector that tells the scheduler what its workers saved and loaded, as a network's would."""

from typing import Any

from vllm.distributed.ec_transfer.ec_connector.example_connector import ECExampleConnector
from vllm.v1.outputs import ECConnectorOutput

TOLD: list[ECConnectorOutput] = []
"""What reached the scheduler of this process."""


class TellingConnector(ECExampleConnector):
    """vLLM's example connector, which by itself reports nothing."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._saved: set[str] = set()
        self._loaded: set[str] = set()

    def save_caches(self, encoder_cache: dict[str, Any], mm_hash: str, **more: Any) -> None:
        super().save_caches(encoder_cache, mm_hash, **more)
        if self.is_producer:
            self._saved.add(mm_hash)

    def start_load_caches(self, encoder_cache: dict[str, Any], **more: Any) -> None:
        before = set(encoder_cache)
        super().start_load_caches(encoder_cache, **more)
        self._loaded |= set(encoder_cache) - before

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        saved, loaded, self._saved, self._loaded = self._saved, self._loaded, set(), set()
        return saved, loaded

    def update_connector_output(self, connector_output: ECConnectorOutput) -> None:
        TOLD.append(connector_output)
