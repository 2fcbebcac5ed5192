"""Whole runs with real processes, through the command."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from async_pp.bench.__main__ import main
from async_pp.bench.pipeline.connectors import NONE
from async_pp.bench.pipeline.loads import WARM_UP
from async_pp.bench.pipeline.peer_process import Job
from async_pp.bench.pipeline.surroundings import ENVIRONMENT, with_layers
from async_pp.ranks.sleeping_runner import StageTime

NULL_WITHOUT_VLLM = {"vllm_tokens_per_s", "vllm_ttft_ms_p50", "vllm_empty_steps"}


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.usefixtures("fonts_are_open")
def test_ours_beside_the_bare_pipe_and_the_formula(tmp_path, capsys):
    before = {name: os.environ.get(name) for name in ENVIRONMENT}
    argv = ["pipeline", "--pp", "2", "--stage", "10,2,0;12,2,0", "--load", "burst-6", "--against", "none"]
    out = tmp_path / "figures.json"
    assert main([*argv, "--json", str(out), "--picture", str(tmp_path / "picture.png")]) == 0
    (row,) = json.loads(out.read_text())
    assert (row["load"], row["pp"], row["empty_steps"]) == ("burst-6", 2, 0)
    assert 0 < row["tokens_per_s"] < 1.05 * row["formula_tokens_per_s"]  # other cohorts than even ones may be better
    assert 0 < row["bare_pipe_tokens_per_s"] < row["formula_tokens_per_s"]
    assert 0 < row["stage_use"] < 1 <= row["sequences_per_step"] <= 6
    assert sum(row["bubble"].values()) == pytest.approx(1, abs=0.01) and row["bubble"]["busy"] > 0.1
    assert {row[name] for name in NULL_WITHOUT_VLLM} == {None}
    assert (tmp_path / "picture.png").stat().st_size
    assert "async_pp" in capsys.readouterr().out
    assert {name: os.environ.get(name) for name in ENVIRONMENT} == before


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_vllm_runs_the_same_loads(tmp_path):
    out = tmp_path / "figures.json"
    argv = ["pipeline", "--pp", "2", "--load", "burst-2", "--load", "short-into-long-prefill", "--json", str(out)]
    assert main([*argv, "--connector", "none,late-2"]) == 0
    rows = json.loads(out.read_text())
    assert [row["connector"] for row in rows] == ["none", "late-2"] * 2
    for row in rows:
        assert 0 < row["vllm_tokens_per_s"] < row["formula_tokens_per_s"]
        assert row["ratio_to_none"] > 0.5 and row["vllm_ratio_to_none"] > 0
        assert row["vllm_empty_steps"] >= 0 and row["vllm_ttft_ms_p50"] > 0


def test_the_peers_process_ends_with_its_socket_and_removes_its_folder(tmp_path):
    folder = tmp_path / "job"
    folder.mkdir()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "async_pp.bench.pipeline.peer_process", str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
        )
        ours.sendall(msgspec.json.encode(Job(str(folder), (StageTime(0.01),), (WARM_UP,), NONE)) + b"\n")
    assert process.wait(30) == -signal.SIGKILL
    assert not folder.exists()


def test_a_model_gets_as_many_layers_as_there_are_stages(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"num_hidden_layers": 8, "vocab_size": 320}')
    for name in ("tokenizer.json", "model.safetensors"):
        (model / name).write_text("")
    with_layers(model, tmp_path / "deep", 12)
    assert json.loads((tmp_path / "deep" / "config.json").read_text()) == {"num_hidden_layers": 12, "vocab_size": 320}
    assert {path.name for path in Path(tmp_path / "deep").iterdir()} == {"config.json", "tokenizer.json"}
