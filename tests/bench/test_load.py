"""Loads: the generator's command line, and that no failure passes as a figure."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from async_pp.bench import BenchFailed, load
from async_pp.bench.load import Load, LoadGenerator

LOAD = Load(concurrency=2, requests=6, input_len=16, output_len=8, seed=3)
GOOD = {
    "completed": 6.0,
    "failed": 0.0,
    "total_output_tokens": 48.0,
    "output_throughput": 120.0,
    "p50_ttft_ms": 1.0,
    "p99_ttft_ms": 2.0,
    "p50_itl_ms": 3.0,
    "p99_itl_ms": 4.0,
    "errors": [],
}


def test_figures_of_a_load_that_was_answered_in_full():
    got = load.speed(GOOD, LOAD)
    assert (got.output_tokens, got.tokens_per_s) == (48, 120.0)
    assert (got.ttft_ms_p50, got.ttft_ms_p99, got.itl_ms_p50, got.itl_ms_p99) == (1.0, 2.0, 3.0, 4.0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"failed": 1.0, "completed": 5.0, "errors": ["Traceback:\nConnectionError: gone\n"]}, "1 of 6 .*: Conn.*gone"),
        ({"completed": 5.0}, "1 of 6"),
        ({"total_output_tokens": 47.0}, "47 tokens came where 48"),
        ({"total_output_tokens": 0.0}, "0 tokens"),
    ],
)
def test_a_failure_is_no_figure(change, said):
    with pytest.raises(BenchFailed, match=said):
        load.speed({**GOOD, **change}, LOAD)


def test_command_line():
    words = load.arguments(LOAD, "http://127.0.0.1:1", Path("/m"))
    told = dict(zip(words[:-3:2], words[1:-3:2], strict=True))
    assert (told["--num-prompts"], told["--max-concurrency"], told["--seed"]) == ("6", "2", "3")
    assert (told["--random-input-len"], told["--random-output-len"]) == ("16", "8")
    assert (told["--num-warmups"], told["--temperature"]) == ("0", "0")
    assert "--ignore-eos" in words
    assert load.arguments(replace(LOAD, seed=4), "http://127.0.0.1:1", Path("/m")) != words


def test_a_generator_that_ends_is_a_failure(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(BenchFailed, match="generator ended"), LoadGenerator(Path("/m")):
        pass
