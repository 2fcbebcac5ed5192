"""What the seam makes of engine arguments, in this process and without any rank."""

import os
from typing import Any

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.usage.usage_lib import UsageContext

from async_pp.engine.vllm_seam.config import MOST_KV_BYTES, make_config
from async_pp.errors import ConfigError
from tests.vllm.cases import COMMON, KV_BYTES
from tests.vllm.engines import tiny


def made(**arguments: Any) -> Any:
    """Return the configuration that is made of these arguments for the tiny model."""
    args = AsyncEngineArgs(model=str(tiny()), **{**COMMON, **arguments})
    return make_config(args, UsageContext.ENGINE_CONTEXT)[0]


def test_ranks_share_the_memory_of_their_machine() -> None:
    two = made(kv_cache_memory_bytes=None, pipeline_parallel_size=2).cache_config.kv_cache_memory_bytes
    eight = made(kv_cache_memory_bytes=None, pipeline_parallel_size=8).cache_config.kv_cache_memory_bytes
    assert 0 < eight <= two <= MOST_KV_BYTES


def test_what_the_user_says_about_memory_stands() -> None:
    assert made().cache_config.kv_cache_memory_bytes == KV_BYTES
    cache = made(kv_cache_memory_bytes=None, gpu_memory_utilization=0.3).cache_config
    assert (cache.kv_cache_memory_bytes, cache.gpu_memory_utilization) == (None, 0.3)


def test_arguments_and_environment_are_left_as_they_were() -> None:
    args = AsyncEngineArgs(model=str(tiny()), **COMMON, log_level="ERROR")
    before, environment = dict(vars(args)), dict(os.environ)
    config, _ = make_config(args, UsageContext.ENGINE_CONTEXT)
    assert vars(args) == before
    assert dict(os.environ) == environment
    assert config.logging_config.log_level == "ERROR"


def connector(name: str, **more: Any) -> dict[str, Any]:
    """Return the arguments of vLLM's KVTransferConfig for one connector."""
    return {"kv_connector": name, "kv_role": "kv_both", **more}


def several(*names: str) -> dict[str, Any]:
    """Return the arguments of vLLM's KVTransferConfig for a MultiConnector of these."""
    return connector("MultiConnector", kv_connector_extra_config={"connectors": [connector(name) for name in names]})


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"pipeline_parallel_size": 9}, "pipeline parallel size 9 is greater than the model's 8 layers"),
        ({"distributed_executor_backend": "ray"}, "brings its own ranks"),
        ({"max_model_len": -5}, "max_model_len"),
        ({"quantization": "no-such"}, "no-such"),
        ({"kv_transfer_config": connector("OffloadingConnector")}, "OffloadingConnector does not work on CPU"),
        ({"kv_transfer_config": connector("SimpleCPUOffloadConnector")}, "SimpleCPUOffloadConnector does not work on"),
        ({"kv_transfer_config": several("ExampleConnector", "OffloadingConnector")}, "does not work on CPU"),
        ({"kv_offloading_size": 1.0}, "OffloadingConnector does not work on CPU"),
        ({"kv_offloading_size": 1.0, "kv_offloading_backend": "lmcache"}, "lmcache"),
        ({"kv_transfer_config": connector("NoSuch")}, "vLLM has no KV connector NoSuch"),
        ({"kv_transfer_config": several("NoSuch")}, "vLLM has no KV connector NoSuch"),
        ({"kv_transfer_config": several()}, 'MultiConnector needs "connectors"'),
        (
            {"kv_transfer_config": connector("Mine", kv_connector_module_path="no.such.module")},
            "KV connector Mine: module no.such.module cannot be used: No module named 'no'",
        ),
        (
            {"kv_transfer_config": connector("Mine", kv_connector_module_path="tests.vllm.own_connector")},
            "Class Mine not found in tests.vllm.own_connector",
        ),
        ({"kv_transfer_config": {"kv_connector": "ExampleConnector"}}, "Please specify kv_role"),
        ({"kv_transfer_config": connector("ExampleConnector", kv_role="both")}, "kv_role"),
    ],
)
def test_what_cannot_work_is_one_line(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        made(**arguments)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
