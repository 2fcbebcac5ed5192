"""Memory, metrics, verdicts and tables."""

import json
from dataclasses import replace

import pytest

from async_pp.bench import BenchFailed
from async_pp.bench.server import Left
from async_pp.bench.survive import report
from async_pp.bench.survive.faults import Done
from async_pp.bench.survive.ledger import Ledger
from async_pp.bench.survive.memory import Memory, Sample
from async_pp.bench.survive.random_faults import RandomFaults, gauges
from async_pp.bench.survive.restarts import Kill, Restarts


def sizes(*mib):
    return [Sample(float(second), size, 30 + second // 50, 8) for second, size in enumerate(mib)]


def test_memory_that_grows_after_the_warm_up_is_not_flat():
    flat = Memory.of(sizes(*range(300, 500, 4), *[500, 500, 501] * 50))
    assert flat.flat and (flat.first_mib, flat.last_mib, flat.descriptors) == (500, 500, (31, 33))
    grown = Memory.of(sizes(*[500 + second / 2 for second in range(200)]))
    assert not grown.flat and grown.mib_per_minute == 30


METRICS = """# HELP vllm:kv_cache_usage_perc used
vllm:kv_cache_usage_perc{engine="0",model_name="bench"} 0.25
vllm:num_requests_running{engine="0"} 1.0
vllm:num_requests_running_total{engine="0"} 7.0
vllm:num_requests_waiting{engine="0"} 0.0
"""


def test_gauges_are_read_from_the_metrics():
    found = gauges(METRICS)
    assert found["vllm:kv_cache_usage_perc"] == 0.25 and sorted(found.values()) == [0.0, 0.25, 1.0]
    with pytest.raises(BenchFailed, match="kv_cache_usage_perc"):
        gauges(METRICS.replace("kv_cache_usage", "gone"))


GOOD = RandomFaults(
    seconds=60.0,
    faults=[Done(1.0, "die", 0, sent=True), Done(2.0, "raise", 1, sent=False), Done(3.0, "die", 1, sent=True)],
    account=Ledger().account(),
    gauges={"vllm:kv_cache_usage_perc": 0.0},
    memory=Memory.of(sizes(*[500] * 60)),
    left=Left(0, (), ("/tmp/bench-x/torchinductor_me",)),
)
RESTARTS = Restarts(
    {"vllm": [20.0, 22.0, 40.0], "async_pp": [10.0]},
    [Kill(0, 0.05, 0.15, 2.0, 2.5), Kill(1, 0.05, 0.25, 2.2, 2.2), Kill(1, 0.05, 0.35, 9.0, 9.5)],
    Ledger().account(),
)


def test_what_is_promised():
    assert GOOD.broken() == [] and RESTARTS.broken() == []
    bad = replace(
        GOOD,
        account=replace(GOOD.account, hung=2, twice=1),
        gauges={"vllm:kv_cache_usage_perc": 0.5},
        memory=replace(GOOD.memory, flat=False, mib_per_minute=30.0),
        left=Left(3, ("async_pp rank 1",), ("/dev/shm/x",)),
    )
    assert bad.broken() == [
        "2 requests hung",
        "1 requests told twice",
        "vllm:kv_cache_usage_perc is 0.5 at the end",
        "the server grows by 30.0 MiB per minute",
        "the server's exit code is 3",
        "left running: async_pp rank 1",
        "left behind: /dev/shm/x",
    ]
    assert replace(RESTARTS, account=replace(RESTARTS.account, failed=1)).broken()


def test_figures_and_tables():
    figures = json.loads(json.dumps(report.figures(RESTARTS, GOOD)))
    assert figures["restarts"]["ratio_to_vllm_cold_start"] == 0.1
    assert figures["restarts"]["ratio_to_own_cold_start"] == pytest.approx(0.22)
    assert figures["random_faults"]["faults"][1] == {"at_s": 2.0, "fault": "raise", "rank": 1, "sent": False}
    text = report.table(RESTARTS, GOOD)
    assert "others ended 0.250 (0.350)  next token 2.20 (9.00)  all streams 2.50 (9.50)" in text
    assert "async_pp: 10.0 s; kill to next token is 0.22 of it" in text
    assert "die 2; came while no such rank ran: 1" in text
    assert report.figures(None, GOOD)["restarts"] is None
    assert "others ended -" in report.table(replace(RESTARTS, kills=[Kill(0, 0.05, None, 2.0, 2.0)]), None)
