"""What an AsyncPPEngine does beside plain generation: utilities, other kinds of model, cancellation, loops, two at once.

Tests of one configuration share a start, so each of them walks through several flows; what they compare with is the engine's own
plain answer, which test_same_tokens.py has compared with vLLM's.
"""

import asyncio
import gc
import json
import logging
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import uvloop

from async_pp.errors import ConfigError, EngineClosed, StartupError
from tests.vllm.adapters import NAMES
from tests.vllm.cases import CHOICE, JSON_SCHEMA, PERSON, text
from tests.vllm.drive import lora_request
from tests.vllm.engines import engine, make_bert, sampling, tiny, tokens, vector
from tests.vllm.seam import assigned, tree

pytestmark = pytest.mark.timeout(120)


def rank_of(worker: Any) -> int:
    """Return a worker's rank; sent to the ranks as a callable."""
    return int(worker.rank)


async def joined(running: Any, prompt: str, params: Any, request_id: str) -> str:
    """Return the text of one request."""
    parts = [output.outputs[0].text async for output in running.generate(prompt, params, request_id)]
    return "".join(parts)


async def until(check: Any, running: Any) -> None:
    """Wait, step by step, until check() holds; the surrounding timeout ends a wait that never would."""
    while not check():
        await running.collective_rpc(rank_of)  # a round trip to every rank, in order with the steps


async def test_utilities_run_between_steps(tmp_path: Path) -> None:
    async with engine(pipeline_parallel_size=2, enable_prefix_caching=True) as running:
        theirs = assigned(tree(), "v1/engine/async_llm.py", "AsyncLLM", "__init__")
        assert [name for name in theirs - {"_frontend_profiler_worker_name"} if not hasattr(running, name)] == []

        plain = await tokens(running, "plain")
        assert running.get_tokenizer().encode("abc")
        assert await running.get_supported_tasks() == ("generate",)
        await running.check_health()
        await running.do_log_stats()
        assert await running.collective_rpc("get_supported_tasks") == [("generate",)] * 2
        assert await running.collective_rpc(rank_of) == [0, 1]
        with pytest.raises(Exception, match="no_such_method"):
            await running.collective_rpc("no_such_method")
        assert await tokens(running, "after a failed call") == plain
        await running.reset_mm_cache()
        await running.reset_encoder_cache()
        assert await running.reset_prefix_cache()
        with pytest.raises(Exception, match=r"[Pp]rofil"):
            await running.start_profile()
        assert await tokens(running, "after a refused profile") == plain


async def test_stage_time_is_accounted_for() -> None:
    async with engine(pipeline_parallel_size=2) as running:
        await tokens(running, "first")
        before = await running.bubbles()
        await tokens(running, "measured", 40)
        told = (await running.bubbles()).since(before)
        assert all(stage.busy > 0 and stage.no_work > 0 and stage.host > 0 for stage in told.stages)
        assert told.shares()["busy"] <= 0.5, "one request, two stages"
        assert sum(told.shares().values()) == pytest.approx(1)
        assert len({round(sum(stage), 6) for stage in told.stages}) == 1, "every stage accounts for the same time"
    with pytest.raises(EngineClosed):
        await running.bubbles()


async def test_pause_keeps_and_sleep_wakes() -> None:
    async with engine(pipeline_parallel_size=2) as running:
        plain = await tokens(running, "plain", 60)

        begun = asyncio.Event()
        found: list[int] = []

        async def consume() -> None:
            async for output in running.generate("river lantern", sampling(60), "kept"):
                found.extend(output.outputs[0].token_ids)
                begun.set()

        consumer = asyncio.create_task(consume())
        await begun.wait()
        await running.pause_generation(mode="keep")
        assert await running.is_paused()
        held = len(found)
        await running.collective_rpc(rank_of)
        assert len(found) == held < 60
        await running.resume_generation()
        await consumer
        assert found == plain

        waiting = asyncio.create_task(tokens(running, "finishes", 20))
        await until(lambda: running.output_processor.has_unfinished_requests(), running)
        await running.pause_generation(mode="wait")
        assert waiting.done() or len(await waiting) == 20
        await running.resume_generation()

        await running.sleep(level=1)
        assert await running.is_sleeping()
        queued = asyncio.create_task(tokens(running, "queued"))
        assert await running.wake_up()
        assert not await running.is_sleeping()
        assert await queued == plain[:12]


async def test_a_request_is_gone_when_its_consumer_is_cancelled() -> None:
    async with engine(pipeline_parallel_size=2) as running:
        scheduler = running._epoch.scheduler.scheduler
        begun = asyncio.Event()

        async def consume() -> None:
            async for _ in running.generate("river", sampling(400), "cancelled"):
                begun.set()

        consumer = asyncio.create_task(consume())
        other = asyncio.create_task(tokens(running, "other", 40))
        await begun.wait()
        consumer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await consumer
        # Aborts are taken out at once: no later step may hold the request.
        assert not any("cancelled" in request_id for request_id in scheduler.requests)
        assert len(await other) == 40

        for turns in range(40):  # at each await on the way in, and between steps
            consumer = asyncio.create_task(consume())
            for _ in range(turns):
                await asyncio.sleep(0)
            consumer.cancel()
            await asyncio.wait({consumer})
            assert consumer.cancelled()
            assert not scheduler.requests
            assert not running.output_processor.request_states

        begun.clear()
        consumer = asyncio.create_task(consume())
        await begun.wait()
        await running.abort("cancelled")
        await consumer
        assert not scheduler.requests
        assert not running.output_processor.request_states
        blocks = scheduler.kv_cache_manager.block_pool
        assert blocks.get_num_free_blocks() == blocks.num_gpu_blocks - 1  # one is vLLM's null block


@pytest.mark.slow  # the cases of the same tokens have grammars among others
async def test_structured_output_among_plain_requests() -> None:
    from vllm.sampling_params import StructuredOutputsParams

    async with engine(pipeline_parallel_size=4) as running:
        plain = [await tokens(running, f"alone-{i}", 40, text(i, 4)) for i in range(4)]
        form = sampling(120, ignore_eos=False, structured_outputs=StructuredOutputsParams(**JSON_SCHEMA))
        choice = sampling(24, ignore_eos=False, structured_outputs=StructuredOutputsParams(**CHOICE))
        mixed = await asyncio.gather(
            *(tokens(running, f"mixed-{i}", 40, text(i, 4)) for i in range(4)),
            *(joined(running, text(20 + i, 5), form, f"form-{i}") for i in range(3)),
            *(joined(running, text(30 + i, 5), choice, f"choice-{i}") for i in range(3)),
        )
        assert mixed[:4] == plain
        for document in mixed[4:7]:
            assert isinstance(document, str)
            assert json.loads(document).keys() == PERSON["properties"].keys()
        assert set(mixed[7:]) <= set(CHOICE["choice"])
        bad = sampling(8, structured_outputs=StructuredOutputsParams(json='{"type": "no such type"}'))
        with pytest.raises(Exception, match=r"."):
            await joined(running, "river", bad, "bad grammar")
        assert await tokens(running, "after", 40, text(0, 4)) == plain[0]


async def test_adapters_come_and_go(tmp_path: Path) -> None:
    requests = {name: lora_request(name, tiny(), tmp_path) for name in NAMES}
    lora = {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 3, "max_lora_rank": 8}
    async with engine(pipeline_parallel_size=2, **lora) as running:
        plain = await tokens(running, "plain")
        assert await running.add_lora(requests["amber"])
        assert await running.add_lora(requests["cobalt"])
        assert await running.list_loras() == {NAMES["amber"], NAMES["cobalt"]}
        assert await running.pin_lora(NAMES["amber"])
        amber = await tokens(running, "amber", lora_request=requests["amber"])
        crimson = await tokens(running, "crimson", lora_request=requests["crimson"])
        assert plain != amber != crimson != plain
        assert await running.remove_lora(NAMES["amber"])
        assert NAMES["amber"] not in await running.list_loras()
        assert await tokens(running, "plain again") == plain


@pytest.mark.parametrize("stages", [pytest.param(1, marks=pytest.mark.slow), 2])
async def test_decoder_as_an_embedding_model(stages: int) -> None:
    async with engine(runner="pooling", pipeline_parallel_size=stages) as running:
        assert "embed" in await running.get_supported_tasks()
        alone = await vector(running, "alone", text(0, 6))
        assert math.isclose(sum(x * x for x in alone), 1.0, abs_tol=1e-4)
        many = await asyncio.gather(*(vector(running, f"v{i}", text(i, 6 + i)) for i in range(8)))
        assert many[0] == pytest.approx(alone, abs=1e-4)
        assert many[1] != pytest.approx(alone, abs=1e-2)


async def test_encoder_only_model(tmp_path: Path) -> None:
    model = make_bert(tmp_path / "bert")
    async with engine(model, runner="pooling", max_num_batched_tokens=512) as running:
        alone = await vector(running, "alone", text(0, 6))
        many = await asyncio.gather(*(vector(running, f"v{i}", text(i, 6 + i)) for i in range(4)))
        assert many[0] == pytest.approx(alone, abs=1e-4)
        assert many[1] != pytest.approx(alone, abs=1e-2)
    with pytest.raises(ConfigError, match="(?i)pipeline"):
        async with engine(model, runner="pooling", pipeline_parallel_size=2):
            pass


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 2])
async def test_ngram_speculation_changes_no_token(stages: int) -> None:
    prompt = "copper " * 12
    async with engine() as running:
        plain = await tokens(running, "plain", 40, prompt)
    speculation = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    async with engine(pipeline_parallel_size=stages, speculative_config=speculation) as running:
        found = await asyncio.gather(*(tokens(running, f"r{i}", 40, prompt) for i in range(3)))
        assert found == [plain] * 3


async def test_a_start_that_the_ranks_refuse_is_one_error_and_leaves_nothing() -> None:
    with pytest.raises(StartupError, match="rank [01] raised ValueError: .*memory") as caught:
        async with engine(pipeline_parallel_size=2, kv_cache_memory_bytes=None, gpu_memory_utilization=0.9999):
            pass
    assert "\n" not in str(caught.value)


async def test_a_cache_that_is_too_small_for_one_request_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="(?i)cache"):
        async with engine(num_gpu_blocks_override=2, pipeline_parallel_size=2):
            pass


@pytest.mark.slow  # an example does the same in each default run
@pytest.mark.slow  # an example runs two
async def test_two_engines_in_one_process() -> None:
    async with engine(pipeline_parallel_size=2, max_num_batched_tokens=64) as one, engine() as two:
        first, second = await asyncio.gather(tokens(one, "same id", 30), tokens(two, "same id", 30))
        assert first == second

        # A seed gives the same tokens in both, although the first cuts the prompt and samples a token to discard for
        # each portion. (With vLLM's own runner that ends the engine on a CPU.)
        seeded = sampling(20, temperature=1.0, seed=7)
        cut, whole = await asyncio.gather(
            *(joined(each, text(3, 60), seeded, "seeded") for each in (one, two)),
        )
        assert cut == whole


@pytest.mark.parametrize(
    "run", [pytest.param(asyncio.run, marks=pytest.mark.slow), uvloop.run], ids=["asyncio", "uvloop"]
)
def test_on_either_loop(run: Any) -> None:
    async def main() -> int:
        async with engine(pipeline_parallel_size=2) as running:
            return len(await tokens(running, "one", 10))

    import async_pp.engine.client  # noqa: F401 - what importing vLLM sets is vLLM's own

    before = host()
    assert run(main()) == 10
    assert host() == before


def host() -> Any:
    """Return what belongs to the program around the engine: environment, signal handlers, logging, collector."""
    loggers = [logging.getLogger(name) for name in (None, "vllm", "async_pp")]
    return (
        dict(os.environ),
        [signal.getsignal(number) for number in signal.valid_signals()],
        [(logger.level, list(logger.handlers), logger.propagate) for logger in loggers],
        logging.getLogRecordFactory(),
        gc.get_freeze_count(),
    )
