"""The connector over a shared folder: its files alone, its two sides without an engine, and two stages with it."""

import asyncio
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from async_pp.models import resolve_model
from tests.vllm.cases import BASE, BUDGET, CHUNKED, PLAIN, text
from tests.vllm.drive import differences, run_case
from tests.vllm.engines import engine, sampling, tokens
from tests.vllm.test_same_tokens import expected

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(120)]

BLOCK = 32
PP2 = {"pipeline_parallel_size": 2}


def store(folder: Path, ranks: int = 2) -> Any:
    """Return the files of a folder."""
    from examples.shared_storage import Store

    return Store(folder, ranks)


def layers(value: float) -> dict[str, torch.Tensor]:
    """Return what a rank holds of a block."""
    return {"layer": torch.full((2, 4), value)}


def test_a_block_is_there_when_every_rank_has_written_its_part(tmp_path: Path) -> None:
    files, found = store(tmp_path), layers(0)
    assert not files.has("block")
    files.save("block", 1, layers(1))
    assert not files.has("block")
    files.save("block", 0, layers(2))
    assert files.has("block")
    assert files.load("block", 1, found)
    assert found["layer"].eq(1).all()


def test_a_write_that_ends_midway_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = store(tmp_path, 1)
    write = Path.write_bytes

    def full(path: Path, data: bytes) -> int:
        write(path, data[:50])
        assert not files.has("block")
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="no space"):
        files.save("block", 0, layers(1))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("size", [0, 50, -1])
def test_a_truncated_file_is_removed_and_its_layers_are_not_touched(size: int, tmp_path: Path) -> None:
    files, found = store(tmp_path, 1), layers(7)
    files.save("block", 0, layers(1))
    truncate(files.path("block", 0), size)
    assert not files.load("block", 0, found)
    assert found["layer"].eq(7).all()
    assert not files.has("block")
    assert not files.load("block", 0, found)  # and so is one that is not there


def test_a_file_of_other_shapes_is_not_loaded(tmp_path: Path) -> None:
    files, found = store(tmp_path, 1), layers(7)
    files.save("block", 0, {"layer": torch.ones(4, 2)})
    assert not files.load("block", 0, found)
    assert found["layer"].eq(7).all()


def truncate(path: Path, size: int) -> None:
    """Cut a file to a size, or by one byte for -1."""
    path.write_bytes(path.read_bytes()[:size])


def connector(folder: Path, role: str = "kv_both", rank: int | None = None, **model: Any) -> Any:
    """Return the connector of a rank, or the one beside the scheduler, of an engine of two stages."""
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from examples.shared_storage import SharedStorage

    config = SimpleNamespace(
        kv_transfer_config=KVTransferConfig(**transfer(folder, role)),
        model_config=SimpleNamespace(
            **{"model": "m", "revision": None, "dtype": "float32", "quantization": None} | model
        ),
        cache_config=SimpleNamespace(cache_dtype="auto", block_size=4),
        parallel_config=SimpleNamespace(pipeline_parallel_size=2, tensor_parallel_size=1, rank=rank),
    )
    side = KVConnectorRole.SCHEDULER if rank is None else KVConnectorRole.WORKER
    made = SharedStorage(config, side, SimpleNamespace(kv_cache_groups=[None]))
    made.register_kv_caches({"layer": torch.arange(80.0).reshape(10, 2, 4)})
    return made


def request(name: str, prompt: list[int], **more: Any) -> Any:
    """Return what the connector reads of vLLM's request."""
    nothing = {"prompt_embeds": None, "lora_request": None, "cache_salt": None, "mm_features": ()}
    nothing |= {"kv_transfer_params": None}
    values = nothing | {"num_computed_tokens": 0} | more
    return SimpleNamespace(request_id=name, prompt_token_ids=prompt, **values)


def step(number_of_tokens: dict[str, int], tables: dict[str, list[int]]) -> Any:
    """Return what the connector reads of the scheduler's output."""
    blocks = SimpleNamespace(get_block_ids=lambda name: (tables[name],))
    return SimpleNamespace(num_scheduled_tokens=number_of_tokens, kv_connector_block_state=blocks)


def run(worker: Any, meta: Any, computed: tuple[str, ...] = ("layer",)) -> Any:
    """Let a rank do its part of a step. Returns its word for the scheduler's side."""
    worker.bind_connector_metadata(meta)
    worker.start_load_kv(None)
    for layer in computed:
        worker.save_kv_layer(layer, None, None)
    worker.wait_for_save()
    return worker.build_connector_worker_meta()


def test_prompts_share_the_names_of_their_common_beginning_only(tmp_path: Path) -> None:
    side = connector(tmp_path)
    plain = side._names(request("a", list(range(11))))
    assert len(set(plain)) == 2
    assert side._names(request("b", [*range(8), 1, 2, 3, 4]))[:2] == plain
    assert side._names(request("c", [9, *range(1, 11)]))[1] != plain[1]
    image = SimpleNamespace(identifier="i", mm_position=SimpleNamespace(offset=5, length=2))
    shown = side._names(request("d", list(range(11)), mm_features=[image]))
    assert (shown[0] == plain[0], shown[1] == plain[1]) == (True, False)
    adapter = SimpleNamespace(lora_name="l", lora_path="/l")
    others = [
        side._names(request("e", list(range(11)), lora_request=adapter)),
        side._names(request("f", list(range(11)), cache_salt="s")),
        connector(tmp_path, model="other")._names(request("g", list(range(11)))),
    ]
    assert not {name for names in others for name in names} & set(plain)
    assert side._names(request("h", list(range(11)), prompt_embeds=object())) == []


def test_a_block_is_stored_with_the_step_that_completes_it(tmp_path: Path) -> None:
    side, first, second = connector(tmp_path, "kv_producer"), *(connector(tmp_path, rank=rank) for rank in (0, 1))
    asked = request("a", list(range(10)))
    side.on_new_request(asked)
    tables = {"a": [3, 1, 2]}
    wanted = []
    for chunk in (3, 3, 4, 1):
        meta = side.build_connector_meta(step({"a": chunk}, tables))
        wanted.append([block for _, block in meta.saves])
        run(first, meta)
        run(second, meta)
        asked.num_computed_tokens += chunk
    assert wanted == [[], [3], [1], []]
    assert side.get_num_new_matched_tokens(asked, 0) == (0, False), "a producer loads nothing"
    other = connector(tmp_path, "kv_consumer")
    other.on_new_request(asked)
    assert other.get_num_new_matched_tokens(asked, 0) == (8, False)
    assert other.get_num_new_matched_tokens(asked, 4) == (4, False)
    whole = request("b", list(range(8)))
    other.on_new_request(whole)
    assert other.get_num_new_matched_tokens(whole, 0) == (4, False), "one token is left to compute"
    assert side.request_finished(asked, []) == (False, {"stored_tokens": 8})
    assert other.request_finished(asked, []) == (False, None)


@pytest.mark.parametrize("given, loaded", [(0, 0), (4, 4), (7, 4), (99, 8), (-1, 0), ("all", 8), (None, 8)])
def test_a_request_may_say_how_much_is_loaded_at_most(given: Any, loaded: int, tmp_path: Path) -> None:
    side = connector(tmp_path)
    asked = request("a", list(range(12)), kv_transfer_params={"stored_tokens": given})
    side.on_new_request(asked)
    for rank in (0, 1):
        for name in side._names(asked):
            side._store.save(name, rank, layers(1))
    assert side.get_num_new_matched_tokens(asked, 0) == (loaded, False)


def test_nothing_is_stored_after_a_forward_pass_that_failed(tmp_path: Path) -> None:
    side, worker = connector(tmp_path), connector(tmp_path, rank=0)
    side.on_new_request(request("a", list(range(5))))
    run(worker, side.build_connector_meta(step({"a": 5}, {"a": [1, 2]})), computed=())
    assert not list(tmp_path.iterdir())


def test_a_load_that_fails_is_reported_once_and_nothing_computed_from_it_is_stored(tmp_path: Path) -> None:
    side, ranks = connector(tmp_path), [connector(tmp_path, rank=rank) for rank in (0, 1)]
    asked, beside = request("a", list(range(13))), request("b", list(range(13)))
    names = side._names(asked)
    for rank in (0, 1):
        for name in names[:2]:
            side._store.save(name, rank, {"layer": torch.zeros(2, 4)})
    side.on_new_request(asked)
    side.on_new_request(beside)
    assert side.get_num_new_matched_tokens(asked, 0) == (8, False)
    tables = {"a": [5, 6, 7, 8], "b": [5, 6, 9, 8]}  # the second finds the first two in the engine's own cache
    side.update_state_after_alloc(asked, SimpleNamespace(get_block_ids=lambda: (tables["a"],)), 8)
    asked.num_computed_tokens = beside.num_computed_tokens = 8
    side._store.path(names[1], 0).unlink()

    meta = side.build_connector_meta(step({"a": 5, "b": 5}, tables))
    assert (meta.loads, meta.saves) == ([(names[0], 5), (names[1], 6)], [])
    words = [run(rank, meta) for rank in ranks]
    assert [rank.get_block_ids_with_load_errors() for rank in ranks] == [{6}, set()]
    assert not ranks[0].get_block_ids_with_load_errors()
    assert ranks[1]._caches["layer"][5:7].eq(0).all()

    side.update_connector_output(SimpleNamespace(kv_connector_worker_meta=words[0]))
    asked.num_computed_tokens = 4  # the scheduler's answer to the invalid block
    assert not side.build_connector_meta(step({"b": 1}, tables)).saves, "one rank has not ended"
    side.update_connector_output(SimpleNamespace(kv_connector_worker_meta=words[1]))
    meta = side.build_connector_meta(step({"a": 9}, tables))
    assert [block for _, block in meta.saves] == [5, 6, 7]
    assert not side._loading
    assert words[0].aggregate(words[1]).ranks == Counter({1: 2})


def transfer(folder: Path, role: str, **more: Any) -> dict[str, Any]:
    """Return the configuration of the connector."""
    extra = {"folder": str(folder)}
    named = {"kv_connector": "SharedStorage", "kv_connector_module_path": "examples.shared_storage"}
    return named | {"kv_role": role, "kv_connector_extra_config": extra} | more


def with_storage(folder: Path, role: str, arguments: dict[str, Any], **more: Any) -> Any:
    """Return an engine, not started, whose prompts are cut into pieces of 64 tokens at most."""
    from vllm.config import KVTransferConfig

    wide = {"max_num_batched_tokens": 64, "enable_prefix_caching": False}
    return engine(kv_transfer_config=KVTransferConfig(**transfer(folder, role, **more)), **(wide | arguments))


async def compare(running: Any, scratch: Path, *, stored: bool) -> None:
    """Run the cases; the tokens are those of vLLM without a connector, every whole block is loaded, nothing is left."""
    model = Path(resolve_model("tiny"))
    for group, case in ((BASE, PLAIN), (BUDGET, CHUNKED)):
        waves, facts = await run_case(running, case, model, scratch)
        assert not differences(case, waves, expected(group, model)[case.name], facts)
        for ask, result in zip(case.waves[0], waves[0], strict=True):
            length = len(running.get_tokenizer()(ask.prompt).input_ids)
            wants = (length - 1) // BLOCK * BLOCK if stored and "prompt_logprobs" not in ask.params else 0
            assert result["cached"] == wants
    await nothing_is_left(running)


async def nothing_is_left(running: Any) -> None:
    """Check that all requests are gone and all blocks are free, and that the connector knows of none."""
    scheduler = running._epoch.scheduler.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    while scheduler.requests or scheduler.has_finished_requests():  # bounded by the test's timeout
        await running.collective_rpc("get_supported_tasks")
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1  # one is vLLM's null block
    assert not (scheduler.connector._prompts or scheduler.connector._loads or scheduler.connector._loading)


@pytest.mark.slow  # the default run has two servers that do so, in test_disaggregated.py
@pytest.mark.timeout(300)  # four ranks on few cores, twice
@pytest.mark.parametrize("sizes", [PP2, PP2 | {"tensor_parallel_size": 2}])
async def test_one_engine_produces_and_another_consumes(sizes: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "stored"
    async with with_storage(folder, "kv_producer", sizes) as running:
        await compare(running, tmp_path, stored=False)
    files = set(folder.iterdir())
    assert all(path.suffix == ".safetensors" for path in files)
    async with with_storage(folder, "kv_consumer", sizes) as running:
        await compare(running, tmp_path, stored=True)
    assert set(folder.iterdir()) == files


@pytest.mark.slow
async def test_one_engine_does_both(tmp_path: Path) -> None:
    async with with_storage(tmp_path / "stored", "kv_both", PP2) as running:
        await compare(running, tmp_path, stored=False)
        await compare(running, tmp_path, stored=True)


@pytest.mark.parametrize("policy", ["fail", pytest.param("recompute", marks=pytest.mark.slow)])
async def test_a_file_that_is_damaged_gives_the_policys_outcome(policy: str, tmp_path: Path) -> None:
    """Each rank finds a damaged file in turn. Of two requests at once only the one that needs it is touched."""
    folder = tmp_path / "stored"
    long, short = text(103, 40), text(1, 20)
    async with with_storage(folder, "kv_both", PP2, kv_load_failure_policy=policy) as running:
        want = [await tokens(running, f"first {prompt[:9]}", prompt=prompt) for prompt in (long, short)]
        names = running._epoch.scheduler.scheduler.connector._names(
            request("names", running.get_tokenizer()(long).input_ids)
        )
        assert len(names) > 3
        for rank in (0, 1):
            truncate(store(folder).path(names[1], rank), 100)
            found = await asyncio.gather(
                finished(running, f"damaged {rank}", long), finished(running, f"beside {rank}", short)
            )
            assert found[1] == (want[1], "length")
            assert found[0] == ((want[0], "length") if policy == "recompute" else ([], "error"))
            await nothing_is_left(running)
            # Removed, it is computed and stored again.
            assert await tokens(running, f"again {rank}", prompt=long) == want[0]
            assert store(folder).has(names[1])


async def finished(running: Any, name: str, prompt: str) -> tuple[list[int], str | None]:
    """Return the tokens of one request and the reason of its end."""
    found, reason = [], None
    async for output in running.generate(prompt, sampling(12), name):
        found += output.outputs[0].token_ids
        reason = output.outputs[0].finish_reason
    return found, reason
