"""vLLM's own loops on our ranks: `LLM`, and vLLM's API server, told nothing but the executor's dotted path."""

import contextlib
import json
import os
import subprocess
import sys

import httpx
import psutil
import pytest

from async_pp.serve.preflight import bind
from tests.vllm.cases import BASE, COMMON, PLAIN
from tests.vllm.engines import tiny
from tests.vllm.test_same_tokens import expected

PATH = "async_pp.engine.facade.PipelineExecutor"
PROGRAM = """
import json, sys
from pathlib import Path
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    arguments, asks = json.loads(sys.argv[1])
    llm = LLM(**arguments)
    params = [SamplingParams(**ask["params"]) for ask in asks]
    outputs = llm.generate([ask["prompt"] for ask in asks], params, use_tqdm=False)
    Path(sys.argv[2]).write_text(json.dumps([list(output.outputs[0].token_ids) for output in outputs]))
"""

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(180)]


def test_llm_gives_the_expected_tokens(tmp_path):
    arguments = {**COMMON, "model": str(tiny()), "pipeline_parallel_size": 2, "distributed_executor_backend": PATH}
    asks = [{"prompt": ask.prompt, "params": dict(ask.params)} for ask in PLAIN.waves[0]]
    script = tmp_path / "llm.py"
    script.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, script, json.dumps([arguments, asks]), tmp_path / "tokens"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TMPDIR": str(tmp_path)},  # vLLM's own engine process leaves its sockets
    )
    assert done.returncode == 0, done.stderr[-3000:]
    want = [result["samples"][0]["tokens"] for result in expected(BASE, tiny())["plain"][0]]
    assert json.loads((tmp_path / "tokens").read_text()) == want


@pytest.mark.slow  # the server starts vLLM three times over
def test_vllms_own_server_runs_on_our_ranks(tmp_path):
    with contextlib.closing(bind("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
    flags = ["--model", tiny(), "--served-model-name", "tiny", "--host", "127.0.0.1", "--port", port]
    flags += ["-pp", 2, "--distributed-executor-backend", PATH, "--dtype", "float32", "--enforce-eager"]
    flags += ["--max-model-len", 512, "--kv-cache-memory-bytes", 64 << 20]
    command = [sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry", *map(str, flags)]
    log = tmp_path / "log"
    with log.open("w") as output, subprocess.Popen(command, stdout=output, stderr=output, env=os.environ) as server:
        try:
            answer = first_answer(server, f"http://127.0.0.1:{port}/v1/completions", log)
            children = psutil.Process(server.pid).children(recursive=True)
            names = [" ".join(child.cmdline()) for child in children]
        finally:
            server.terminate()
    assert answer["usage"]["completion_tokens"] == 8
    assert any("async_pp.ranks.zygote" in name for name in names)
    assert sum("async_pp rank" in name for name in names) == 2
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not [child for child in alive if child.status() != psutil.STATUS_ZOMBIE]


def first_answer(server, url, log):
    """Ask until the server listens and serves."""
    body = {"model": "tiny", "prompt": "river", "max_tokens": 8, "ignore_eos": True}
    with httpx.Client(timeout=60) as client:
        while True:
            assert server.poll() is None, log.read_text()[-3000:]
            try:
                return client.post(url, json=body).raise_for_status().json()
            except (httpx.ConnectError, httpx.ReadError):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    server.wait(0.3)
