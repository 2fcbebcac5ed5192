"""Rows to JSON and to a table."""

import json
from dataclasses import replace

from async_pp.bench import report
from async_pp.bench.report import Row

KEYS = [
    "system",
    "pp",
    "concurrency",
    "tokens_per_s",
    "ttft_ms_p50",
    "ttft_ms_p99",
    "itl_ms_p50",
    "itl_ms_p99",
    "cpu_s_per_1k_tokens",
    "start_to_first_token_s",
    "idle_cpu_percent",
    "rss_mib",
]
OURS = Row("async_pp", 2, 8, 120.0, 50.0, 60.0, 10.0, 20.0, 5.0, 12.0, {"serve": 1.0, "rank 0": 2.0}, 1500.0)
THEIRS = replace(OURS, system="vllm", tokens_per_s=80.0, ttft_ms_p50=100.0, idle_cpu_percent={"engine": 20.0})


def test_json_has_exactly_the_keys_that_readers_rely_on():
    (row,) = json.loads(report.as_json([OURS]))
    assert list(row) == KEYS
    assert row["idle_cpu_percent"] == {"serve": 1.0, "rank 0": 2.0}


def test_medians_are_of_each_figure():
    rounds = [
        OURS,
        THEIRS,
        replace(OURS, tokens_per_s=100.0, rss_mib=1600.0, idle_cpu_percent={"serve": 3.0}),
        replace(OURS, tokens_per_s=400.0, rss_mib=1400.0, idle_cpu_percent={"serve": 8.0, "rank 0": 4.0}),
    ]
    ours, theirs = report.medians(rounds)
    assert (ours.tokens_per_s, ours.rss_mib) == (120.0, 1500.0)
    assert ours.idle_cpu_percent == {"serve": 3.0, "rank 0": 3.0}
    assert theirs == THEIRS


def test_table_puts_what_is_compared_together_with_ratios():
    other = [replace(row, pp=1, concurrency=c) for row in (OURS, THEIRS) for c in (1, 8)]
    text = report.table([OURS, THEIRS, *other])
    lines = text.splitlines()
    start = lines[0].index("system")
    assert [line.split()[:3] for line in lines[1:7]] == [
        ["2", "8", "async_pp"],
        ["2", "8", "vllm"],
        ["1", "1", "async_pp"],
        ["1", "1", "vllm"],
        ["1", "8", "async_pp"],
        ["1", "8", "vllm"],
    ]
    assert all(line[start:].startswith(("async_pp", "vllm")) for line in lines[1:7])
    assert lines[1].split()[3:7] == ["120.0", "1.50", "50", "0.50"]
    assert lines[2].split()[3:6] == ["80.0", "100", "60"]
    assert "  async_pp, PP 2: serve 1.0, rank 0 2.0" in lines
    assert "  vllm, PP 1: engine 20.0" in lines


def test_table_without_the_other_system_has_no_ratio():
    assert report.table([OURS]).splitlines()[1].split()[3:6] == ["120.0", "50", "60"]
