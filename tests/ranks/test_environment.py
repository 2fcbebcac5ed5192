"""The environment of a rank and the split of the cores."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_pp.errors import ConfigError
from async_pp.ranks.environment import rank_environment, split_cores


@given(st.integers(1, 16), st.sets(st.integers(0, 255), min_size=1, max_size=64))
def test_the_split_is_even_and_uses_every_core(ranks: int, cores: set[int]) -> None:
    allowed = sorted(cores)
    split = [cpus for cpus in split_cores(ranks, allowed) if cpus is not None]
    assert len(split) == ranks
    assert {core for cpus in split for core in cpus} == set(allowed[: len(allowed) if len(allowed) >= ranks else ranks])
    sizes = {len(cpus) for cpus in split}
    assert max(sizes) - min(sizes) <= 1
    if len(allowed) >= ranks:
        assert sum(map(len, split)) == len(allowed), "no core is shared when there are enough"


@pytest.mark.parametrize(
    "bind, split",
    [
        ("0|1", [(0,), (1,)]),
        ("0-1|0-1", [(0, 1), (0, 1)]),
        ("4,2-3|7", [(4, 2, 3), (7,)]),
        ("nobind", [None, None]),
        ("auto", [(0, 1), (2, 3)]),
        (None, [(0, 1), (2, 3)]),
    ],
)
def test_what_the_user_bound_is_kept(bind: str | None, split: list[tuple[int, ...] | None]) -> None:
    assert split_cores(2, [0, 1, 2, 3], bind) == split


@pytest.mark.parametrize("bind", ["0", "0|1|2", "a|b", "|1", "3-1|0"])
def test_what_cannot_be_bound_is_a_clear_error(bind: str) -> None:
    with pytest.raises(ConfigError, match="VLLM_CPU_OMP_THREADS_BIND"):
        split_cores(2, [0, 1], bind)


def test_the_environment_has_the_openmp_runtime_preloaded_and_keeps_what_the_user_set() -> None:
    before = dict(os.environ)
    cores = len(os.sched_getaffinity(0))
    environment = rank_environment(2, {"VLLM_HOST_IP": "10.0.0.1", "LD_PRELOAD": "/lib/mine.so"})
    assert environment["VLLM_HOST_IP"] == "10.0.0.1"
    assert environment["OMP_NUM_THREADS"] == str(max(1, cores // 2))
    *libraries, last = environment["LD_PRELOAD"].split(":")
    assert last == "/lib/mine.so"
    assert any("libgomp" in library for library in libraries)
    assert all(Path(library).exists() for library in libraries)
    chosen = rank_environment(1, {"LD_PRELOAD": "/x/libiomp5.so:/x/libtcmalloc.so.4", "OMP_NUM_THREADS": "3"})
    assert chosen["LD_PRELOAD"] == "/x/libiomp5.so:/x/libtcmalloc.so.4"
    assert chosen["OMP_NUM_THREADS"] == "3"
    assert dict(os.environ) == before
