"""The order of a run, and the real thing on the tiny model."""

import json
import math
import signal
import subprocess
import sys

import psutil
import pytest

from async_pp.bench import serve, settings
from async_pp.bench.__main__ import parser

from .test_report import KEYS

real = [pytest.mark.vllm, pytest.mark.timeout(300)]
SMALL = ("--model", "tiny", "--no-reference", "--concurrency", "2", "--input-len", "16")


def chosen(*argv):
    return settings.check(parser().parse_args(["serve", *argv]))


def test_systems_alternate_and_swap_in_every_second_round():
    assert list(serve.turns(chosen("--rounds", "2"))) == [
        (1, 2, "async_pp"),
        (1, 2, "vllm"),
        (1, 1, "async_pp"),
        (1, 1, "vllm"),
        (2, 2, "vllm"),
        (2, 2, "async_pp"),
        (2, 1, "vllm"),
        (2, 1, "async_pp"),
    ]
    assert list(serve.turns(chosen("--against", "none", "--no-reference"))) == [(1, 2, "async_pp")]


def test_loads_have_different_prompts():
    pairs = serve.loads(chosen("--output-len", "4"))
    assert [(warm_up.concurrency, load.requests) for warm_up, load in pairs] == [(1, 4), (8, 24), (32, 96)]
    assert all(warm_up.requests == warm_up.concurrency and warm_up.output_len == 4 for warm_up, _ in pairs)
    assert len({load.seed for pair in pairs for load in pair}) == 6


class Bench:
    """`python -m async_pp.bench serve` as a child, with SIGTERM as its end."""

    def __init__(self, *argv):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "async_pp.bench", "serve", *SMALL, *argv],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait()
        self.process.stdout.close()
        self.process.stderr.close()

    def wait_for(self, text):
        for line in self.process.stderr:
            if text in line:
                return
        pytest.fail(f"{text!r} was not printed")

    def family(self):
        return psutil.Process(self.process.pid).children(recursive=True)


def assert_gone(processes):
    _, alive = psutil.wait_procs(processes, timeout=5)
    assert all(process.status() == psutil.STATUS_ZOMBIE for process in alive)


def check(rows, systems):
    assert [(row["system"], row["pp"], row["concurrency"]) for row in rows] == [(system, 2, 2) for system in systems]
    for row in rows:
        assert list(row) == KEYS
        assert all(math.isfinite(row[name]) and row[name] > 0 for name in KEYS[3:10])
        assert row["ttft_ms_p50"] <= row["ttft_ms_p99"]
        assert row["itl_ms_p50"] <= row["itl_ms_p99"]
        assert row["rss_mib"] > 100
        assert len(row["idle_cpu_percent"]) >= 4  # a server, what starts its ranks, two ranks
        assert all(0 <= percent <= 400 for percent in row["idle_cpu_percent"].values())


@pytest.mark.parametrize(
    ("against", "systems"),
    [
        pytest.param("none", ["async_pp"], marks=[*real, pytest.mark.slow]),
        pytest.param("vllm", ["async_pp", "vllm"], marks=[*real, pytest.mark.slow]),
    ],
)
def test_measures(against, systems, tmp_path):
    file = tmp_path / "figures.json"
    with Bench("--against", against, "--output-len", "8", "--json", str(file)) as bench:
        out, err = bench.process.communicate()
    assert bench.process.returncode == 0, err
    rows = json.loads(file.read_text())
    check(rows, systems)
    assert out.splitlines()[1].split()[:3] == ["2", "2", "async_pp"]
    assert "async_pp rank 1" in rows[0]["idle_cpu_percent"]


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(300)
def test_a_rank_that_dies_under_load_is_a_failure_and_leaves_nothing(tmp_path):
    file = tmp_path / "figures.json"
    with Bench("--against", "none", "--output-len", "2000", "--json", str(file)) as bench:
        bench.wait_for("in flight")
        family = bench.family()
        (rank,) = (process for process in family if "rank 1" in " ".join(process.cmdline()))
        rank.kill()
        out, err = bench.process.communicate()
    assert bench.process.returncode == 3
    assert out == ""
    assert "failed: " in err and "Last lines of the server" in err
    assert not file.exists()
    assert_gone(family)


@pytest.mark.vllm
@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_signal_stops_the_server_too(number):
    with Bench("--against", "none") as bench:
        bench.wait_for("PP 2: starting")
        family = bench.family()
        bench.process.send_signal(number)
        out, err = bench.process.communicate()
    assert bench.process.returncode == 128 + number
    assert out == ""
    assert err == "stopped; nothing is left running\n"
    assert_gone(family)
