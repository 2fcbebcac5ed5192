"""A program with one engine that moves its KV cache by NIXL: `python -m tests.vllm.nixl_peer ROLE STAGES`.

A process each, because vLLM remembers the port of NIXL's side channel for the life of a process. Requests come as lines
of JSON (prompt, max_tokens, kv_transfer_params) and answers (tokens, kv_transfer_params) go the same way; all have the
same request id, by which NixlPushConnector brings the two sides together. It ends with its input.
"""

import asyncio
import json
import sys

from tests.vllm.engines import engine, sampling


async def serve(role: str, stages: int) -> None:
    """Start the engine and answer."""
    from vllm.config import KVTransferConfig

    transfer = KVTransferConfig(kv_connector="NixlPushConnector", kv_role=role, kv_buffer_device="cpu")
    async with engine(pipeline_parallel_size=stages, kv_transfer_config=transfer) as running:
        while line := await asyncio.to_thread(sys.stdin.readline):
            ask = json.loads(line)
            params = sampling(ask["max_tokens"], extra_args={"kv_transfer_params": ask["kv_transfer_params"]})
            tokens: list[int] = []
            handed = None
            async for output in running.generate(ask["prompt"], params, "shared"):
                tokens += output.outputs[0].token_ids
                handed = output.kv_transfer_params or handed
            print(json.dumps({"tokens": tokens, "kv_transfer_params": handed}), flush=True)


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], int(sys.argv[2])))
