"""Defaults by machine and model apply only where the user said nothing."""

from argparse import Namespace

import pytest

from async_pp.serve import defaults


def args():
    return Namespace(
        served_model_name=None, dtype="auto", enforce_eager=False, kv_cache_memory_bytes=None, use_tqdm_on_load=True
    )


def applied(given=None, **settings):
    filled = args()
    defaults.apply(filled, given or {}, **{"model": None, "on_cpu": True, "fast_bf16": False, **settings})
    return filled


def test_embedded_model_on_a_plain_cpu():
    filled = applied()
    assert filled.served_model_name == ["SmolLM2-135M-Instruct"]
    assert filled.dtype == "float32"
    assert filled.enforce_eager is defaults.CPU_ENFORCE_EAGER
    assert filled.kv_cache_memory_bytes == defaults.EMBEDDED_KV_CACHE_BYTES
    assert filled.use_tqdm_on_load is False


def test_a_cpu_with_bfloat16_keeps_the_models_type():
    assert applied(model="org/name", fast_bf16=True).dtype == "auto"
    assert applied(model="org/name", fast_bf16=False).dtype == "float32"
    assert applied(model="tiny", fast_bf16=True).dtype == "float32"


def test_what_was_given_stays():
    filled = applied({"dtype": "auto", "enforce_eager": False, "kv_cache_memory_bytes": "1G", "use_tqdm_on_load": True})
    assert filled == Namespace(**{**vars(args()), "served_model_name": ["SmolLM2-135M-Instruct"]})


def test_another_model_and_a_gpu():
    assert applied(model="org/name").served_model_name is None
    assert applied(model="org/name").kv_cache_memory_bytes is None
    filled = applied(on_cpu=False)
    assert (filled.dtype, filled.enforce_eager, filled.kv_cache_memory_bytes) == ("auto", False, None)


@pytest.mark.parametrize(
    "cpuinfo,fast",
    [
        ("flags : avx2 avx512f", False),
        ("flags : avx512f avx512_bf16 x", True),
        ("flags : amx_bf16", True),
        ("Features : fp asimd bf16 i8mm", True),
        ("", False),
    ],
)
def test_has_fast_bf16(cpuinfo, fast):
    assert defaults.has_fast_bf16(cpuinfo) is fast


def test_this_machine_has_an_answer():
    assert defaults.has_fast_bf16() in (True, False)
