"""Whole simulations: vLLM's scheduler, our engine, virtual ranks."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from async_pp.bench.__main__ import main
from async_pp.bench.simulate import settings

pytestmark = pytest.mark.vllm


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """What the command sets for its own process, it sets for this test only."""
    for name, value in settings.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


def simulated(tmp_path, *argv):
    file = tmp_path / "figures.json"
    assert main(["simulate", "--json", str(file), *argv]) == 0
    return json.loads(file.read_text())


def test_even_decodes_fill_the_pipeline_the_same_way_each_time(tmp_path, capsys):
    argv = ("--pp", "2,4", "--requests", "96", "--input-len", "1", "--output-len", "32")
    first, second = (simulated(tmp_path, *argv) for _ in range(2))
    for row in (*first, *second):
        assert row.pop("host")["real_s"] > 0
    assert first == second
    assert [row["pp"] for row in first] == [2, 4]
    for row in first:
        assert row["empty_steps"] == 0
        assert row["bare_pipe_tokens_per_s"] == pytest.approx(row["formula_tokens_per_s"], rel=0.001)
        assert 0.95 < row["bare_pipe_ratio"] <= 1.001
        assert row["formula_ratio"] == pytest.approx(row["bare_pipe_ratio"], rel=0.001)
        assert row["sequences_per_step"] == pytest.approx(8, rel=0.1)
    assert capsys.readouterr().out.count("\n") == 6


def test_one_request_at_a_time_takes_what_its_stages_and_hops_take(tmp_path):
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,input_tokens,output_tokens\n0,10,3\n100,10,3\n")
    stages = ("--pp", "4", "--stage", "4,1,0.1,0.01", "--slow", "3=2", "--hop", "0.5", "--host", "1")
    (row,) = simulated(tmp_path, *stages, "--policy", "fill-first", "--trace", str(trace))
    hops_and_host = 5 * 0.5 + 1
    prompt, decodes = (
        5 * (4 + 1 + 0.1 * tokens + 0.01 * pairs) + hops_and_host for tokens, pairs in ((10, 100), (1, 11.5))
    )
    assert row["ttft_ms_p50"] == row["ttft_ms_p99"] == pytest.approx(prompt)
    assert row["itl_ms_p50"] == pytest.approx(decodes, abs=0.05)
    assert row["virtual_s"] == pytest.approx(100 + (prompt + 2 * decodes) / 1000, abs=1e-4)
    assert row["steps"] == 6


def test_preempted_requests_are_computed_again_and_answered_in_full(tmp_path):
    (row,) = simulated(
        tmp_path, "--pp", "2", "--requests", "12", "--input-len", "20-40", "--output-len", "40", "--num-gpu-blocks", "12",
        "--policy", "fill-first",
    )  # fmt: skip
    assert row["requests"] == 12


def test_what_vllm_refuses_is_one_line(capsys):
    assert main(["simulate", "--requests", "2", "--input-len", "100", "--num-gpu-blocks", "2"]) == 1
    err = capsys.readouterr().err.splitlines()[-1]
    assert err.startswith("error: ")


@pytest.mark.slow
def test_a_signal_ends_it_and_nothing_is_left(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "async_pp.bench", "simulate", "--pp", "8", "--requests", "5000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    with process:
        for line in process.stderr:
            if "PP 8" in line:
                break
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (130, "")
    assert err.splitlines()[-1] == "stopped; nothing is left running"
    assert not list(Path(tmp_path).glob("async*")) and tempfile.gettempdir() != str(tmp_path)
