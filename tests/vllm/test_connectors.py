"""vLLM's KV connectors on AsyncPPEngine: the same tokens with each, hits counted to the token, nothing left over.

What is expected comes from vLLM's own engine without a connector (expected/). Prefix caching is off, so that every cached token is
one that a connector loaded. Steps are wide enough for vLLM to take every prompt whole, as these connectors need it.
"""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from async_pp.errors import RankError
from async_pp.models import resolve_model
from tests.vllm.cases import BASE, BUDGET, CHUNKED, PLAIN, Case, Group, text
from tests.vllm.drive import differences, run_case
from tests.vllm.engines import engine, sampling, tokens
from tests.vllm.test_same_tokens import expected

pytestmark = pytest.mark.timeout(120)

BLOCK = 32
WIDE = {"max_num_batched_tokens": 1024, "max_num_seqs": 32}
PP2 = {"pipeline_parallel_size": 2}
TP2_PP2 = PP2 | {"tensor_parallel_size": 2}
CASES: tuple[tuple[Group, Case], ...] = ((BASE, PLAIN), (BUDGET, CHUNKED))


def example(folder: Path, role: str = "kv_both") -> dict[str, Any]:
    """Return the configuration of vLLM's example connector over a folder."""
    extra = {"shared_storage_path": str(folder)}
    return {"kv_connector": "ExampleConnector", "kv_role": role, "kv_connector_extra_config": extra}


def own(folder: Path, role: str = "kv_both", **extra: Any) -> dict[str, Any]:
    """Return the configuration of a connector that is found by its module's path."""
    found = example(folder, role) | {
        "kv_connector": "OwnConnector",
        "kv_connector_module_path": "tests.vllm.own_connector",
    }
    found["kv_connector_extra_config"] |= extra
    return found


def several(*connectors: dict[str, Any], role: str = "kv_both") -> dict[str, Any]:
    """Return the configuration of a MultiConnector."""
    extra = {"connectors": list(connectors)}
    return {"kv_connector": "MultiConnector", "kv_role": role, "kv_connector_extra_config": extra}


def with_connector(transfer: dict[str, Any], **arguments: Any) -> Any:
    """Return an engine, not started, for the tiny model with a connector."""
    from vllm.config import KVTransferConfig

    return engine(kv_transfer_config=KVTransferConfig(**transfer), **WIDE, **arguments)


def external() -> tuple[float, float]:
    """Return the tokens asked of and found in connectors by all engines of this process, from vLLM's counters."""
    from prometheus_client import REGISTRY

    names = [f"vllm:external_prefix_cache_{name}_total" for name in ("queries", "hits")]
    samples = [sample for metric in REGISTRY.collect() for sample in metric.samples]
    queries, hits = (sum(sample.value for sample in samples if sample.name == name) for name in names)
    return queries, hits


def loadable(length: int) -> int:
    """Return how many tokens of a prompt the example connector loads: whole blocks, without the last two tokens."""
    return (length - 2) // BLOCK * BLOCK


async def compare(running: Any, scratch: Path, *, stored: bool) -> None:
    """Run the cases; compare tokens, cached tokens and counters; nothing may be left in the scheduler.

    Four ranks on few cores are slow: they run the case of short prompts only.
    """
    few = running.vllm_config.parallel_config.tensor_parallel_size > 1
    model = Path(resolve_model("tiny"))
    tokenizer = running.get_tokenizer()
    for group, case in CASES[:1] if few else CASES:
        asks = case.waves[0]
        lengths = [len(tokenizer(ask.prompt).input_ids) for ask in asks]
        # A request for the prompt's log probabilities computes all of it.
        wants = [
            0 if not stored or "prompt_logprobs" in a.params else loadable(n)
            for a, n in zip(asks, lengths, strict=True)
        ]
        queries, hits = external()
        waves, facts = await run_case(running, case, model, scratch)
        assert not differences(case, waves, expected(group, model)[case.name], facts)
        assert [result["cached"] for result in waves[0]] == wants
        assert external() == (queries + sum(lengths), hits + sum(wants))
    await nothing_is_left(running)


async def nothing_is_left(running: Any) -> None:
    """Check that all requests are gone and all blocks are free, once what the ranks still have to say is settled."""
    scheduler = running._epoch.scheduler.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    while scheduler.requests or scheduler.has_finished_requests():  # bounded by the test's timeout
        await running.collective_rpc("get_supported_tasks")  # a round trip to every rank, in order with the steps
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1  # one is vLLM's null block


def stored_files(folder: Path) -> set[str]:
    """Return the files below a folder, by relative path."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*.safetensors")}


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("several", PP2),
        *[pytest.param(kind, TP2_PP2, marks=pytest.mark.slow) for kind in ("example", "own", "several")],
        *[pytest.param(kind, PP2, marks=pytest.mark.slow) for kind in ("example", "own")],
    ],
)
async def test_tokens_are_the_same_with_what_was_stored_and_without(kind: str, sizes: Any, tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    transfers = {"example": example(one), "own": own(one), "several": several(example(one), own(other))}
    async with with_connector(transfers[kind], **sizes) as running:
        await compare(running, tmp_path, stored=False)
        files = stored_files(one)
        await compare(running, tmp_path, stored=True)
        assert stored_files(one) == files
    per_layer = {name for name in files if not name.startswith("shard-1")}
    assert len(per_layer) == 8 * len({Path(name).parent for name in per_layer}), "8 layers, each written by its stage"
    if "tensor_parallel_size" in sizes:
        assert files == per_layer | {f"shard-1/{name}" for name in per_layer}
    if kind == "several":
        assert stored_files(other) == files


@pytest.mark.slow  # the example for prefill and decode does it live
@pytest.mark.parametrize("sizes", [PP2, TP2_PP2])
async def test_one_engine_produces_and_another_consumes(sizes: Any, tmp_path: Path) -> None:
    """And what a request brings for its connector goes in, and what the connector says of it comes out."""
    folder = tmp_path / "stored"
    params = {"kv_transfer_params": {"note": "for the connector", "number": 7}}
    async with with_connector(own(folder, "kv_producer"), **sizes) as running:
        await compare(running, tmp_path, stored=False)
        asked = sampling(4, extra_args=params)
        told = [output async for output in running.generate(text(1, 4), asked, "with parameters")][
            -1
        ].kv_transfer_params
        assert told == {"brought": params["kv_transfer_params"], "blocks": 1}
        await nothing_is_left(running)
    async with with_connector(example(folder, "kv_consumer"), **sizes) as running:
        await compare(running, tmp_path, stored=True)


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
async def test_a_connector_that_raises_ends_the_engine_with_its_ranks_traceback(rank: int, tmp_path: Path) -> None:
    options = {"on_rank_loss": "exit"}
    async with with_connector(own(tmp_path / "stored", breaks_on=rank), options=options, **PP2) as running:
        began = time.monotonic()
        with pytest.raises(RankError, match="the storage is gone") as caught:
            await tokens(running, "first")
        assert time.monotonic() - began < 2
        assert caught.value.rank == rank
        assert "own_connector.py" in caught.value.traceback
        assert running.failed.is_set()


@pytest.mark.slow
def test_parameters_go_in_and_out_through_the_http_api(tmp_path: Path) -> None:
    from tests.serve.process import Server

    body = {"prompt": text(1, 4), "max_tokens": 4, "kv_transfer_params": {"note": "for the connector"}}
    transfer = json.dumps(own(tmp_path / "stored"))
    with Server("tiny", "-pp", "2", "--port", "0", "--enforce-eager", "--kv-transfer-config", transfer) as server:
        server.ready()
        with server.client() as client:
            answer = client.post("/v1/completions", json=body).raise_for_status().json()
    assert answer["kv_transfer_params"]["brought"] == body["kv_transfer_params"]
