"""A KV connector of the user's own, as vLLM loads one by kv_connector_module_path."""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector


class OwnConnector(ExampleConnector):
    """vLLM's example, which also says what a request brought, sends after its end, and breaks when it is told to.

    With the extra configuration {"breaks_on": n}, loading fails on pipeline rank n.
    """

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any]]:
        """Keep the blocks until every rank has sent, and give back what the request brought."""
        return True, {"brought": request.kv_transfer_params, "blocks": len(block_ids)}

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], None]:
        """Send at once."""
        return finished_req_ids, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Break, or load."""
        from vllm.distributed import get_pp_group

        if get_pp_group().rank_in_group == self._kv_transfer_config.get_from_extra_config("breaks_on", None):
            raise OSError("the storage is gone")
        super().start_load_kv(forward_context, **kwargs)
