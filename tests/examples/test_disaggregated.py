"""Prefill and decode on servers of their own, live: the example's program, two stages each, on one machine.

What is expected comes from vLLM's own engine (tests/vllm/expected), so from a single server without a connector.
"""

import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from async_pp.models import resolve_model
from tests.serve.process import Server, events
from tests.vllm.cases import BASE, BUDGET, CHUNKED, PLAIN, Ask
from tests.vllm.test_same_tokens import expected

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(180)]

PROGRAM = (str(Path(__file__).parents[2] / "examples" / "disaggregated.py"),)
BLOCK = 32
SMALL = ("--block-size", str(BLOCK), "--max-model-len", "512", "--max-num-batched-tokens", "8", "--max-num-seqs", "4")
"""Prompts are cut into small pieces, so that there is a middle in which to end the prefill server."""
_, STREAMED, ALONE, SHORT = PLAIN.waves[0]
MIDDLE, LONG = CHUNKED.waves[0][0], CHUNKED.waves[0][3]


def wanted(ask: Ask) -> list[int]:
    """Return the tokens that a single server gives."""
    group, case = (BASE, PLAIN) if ask in PLAIN.waves[0] else (BUDGET, CHUNKED)
    results = expected(group, Path(resolve_model("tiny")))[case.name][0]
    tokens: list[int] = results[case.waves[0].index(ask)]["samples"][0]["tokens"]
    return tokens


def body(ask: Ask, **more: Any) -> dict[str, Any]:
    """Return a request of the completions API."""
    return {"model": "tiny", "prompt": ask.prompt, "return_token_ids": True, **ask.params, **more}


def tokens(answer: httpx.Response) -> list[int]:
    """Return the tokens of an answer."""
    answer.raise_for_status()
    found: list[int] = answer.json()["choices"][0]["token_ids"]
    return found


def cached(answer: httpx.Response) -> tuple[int, int]:
    """Return how many tokens of the prompt were found, and how many there are in whole blocks without the last token."""
    usage = answer.json()["usage"]
    return usage["prompt_tokens_details"]["cached_tokens"], (usage["prompt_tokens"] - 1) // BLOCK * BLOCK


def metric(client: httpx.Client, name: str) -> float:
    """Return a value of the decode server."""
    lines = client.get("/metrics").raise_for_status().text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:{name}{{"))


def process(program: Server, name: str) -> psutil.Process:
    """Return a server of the program."""
    return psutil.Process(int(program.wait_for(f"{name}: started as process").split("process ")[1].split()[0]))


def client_of(program: Server, name: str) -> httpx.Client:
    """Return a client for a server of the program, past the proxy."""
    url = program.wait_for(f"{name}: async_pp: serving on").split("serving on ")[1].split()[0]
    return httpx.Client(base_url=url, timeout=60)


def lines(program: Server, text: str) -> int:
    """Return how many lines with a text were printed."""
    return sum(text in line for line in program.lines)


@pytest.mark.parametrize("policy", ["recompute", pytest.param("fail", marks=pytest.mark.slow)])
def test_the_tokens_are_a_single_servers_whatever_becomes_of_prefill(policy: str, tmp_path: Path) -> None:
    folder = tmp_path / "stored"
    argv = ("--model", "tiny", "--folder", str(folder), "--on-load-failure", policy, *SMALL)
    with Server(*argv, program=PROGRAM) as program:
        program.ready("proxy: serving on")
        runtime = [path.name for path in program.folder.glob("*/async_pp-*")]
        assert len(runtime) == 2
        with program.client() as client:
            prompts_are_loaded(client)
            the_decode_server_alone_gives_the_same(program, client)
            files_that_are_damaged_give_the_policys_outcome(program, folder, policy)
            prefill_ends_in_the_middle_of_a_prompt(program, client, folder)
            for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
                assert metric(client, gauge) == 0
        program.process.send_signal(signal.SIGINT)
        if policy == "fail":  # and now, at once
            program.wait_for("decode: async_pp: SIGTERM", 10)
            program.process.send_signal(signal.SIGINT)
        assert program.code() == 0
        program.wait_for("decode: ended with", 1)
        assert not lines(program, "Exception") and not lines(program, "Traceback")
        assert not program.left() and not list(program.folder.iterdir())
        assert not [path for name in runtime for path in Path("/dev/shm").glob(f"{name}*")]
        assert all(path.suffix == ".safetensors" for path in folder.iterdir())


def prompts_are_loaded(client: httpx.Client) -> None:
    """The decode server computes the last piece of a prompt only, and counts the rest as found outside."""
    answer = client.post("/v1/completions", json=body(SHORT))
    assert tokens(answer) == wanted(SHORT)
    found, whole = cached(answer)
    assert found == whole > 0
    assert metric(client, "external_prefix_cache_hits_total") == whole
    assert metric(client, "external_prefix_cache_queries_total") == answer.json()["usage"]["prompt_tokens"]
    with client.stream("POST", "/v1/completions", json=body(STREAMED, stream=True)) as stream:
        *parts, end = events(stream)
    assert [token for part in parts for token in part["choices"][0]["token_ids"]] == wanted(STREAMED)
    assert len(parts) > 1 and end == "[DONE]"


def the_decode_server_alone_gives_the_same(program: Server, client: httpx.Client) -> None:
    """It computes a prompt that is stored when its request says so: then it is a single server."""
    hits = metric(client, "external_prefix_cache_hits_total")
    with client_of(program, "prefill") as prefill:
        answer = prefill.post("/v1/completions", json=body(ALONE, max_tokens=1))
    usage = answer.raise_for_status().json()["usage"]
    assert answer.json()["kv_transfer_params"] == {"stored_tokens": usage["prompt_tokens"] // BLOCK * BLOCK}
    answer = client.post("/v1/completions", json=body(ALONE, kv_transfer_params={"stored_tokens": 0}))
    assert tokens(answer) == wanted(ALONE)
    found, whole = cached(answer)
    assert found == 0 < whole
    assert metric(client, "external_prefix_cache_hits_total") == hits


def files_that_are_damaged_give_the_policys_outcome(program: Server, folder: Path, policy: str) -> None:
    """Another request at the same time is not touched."""
    before = set(folder.iterdir())
    with client_of(program, "prefill") as prefill, client_of(program, "decode") as decode:
        prefill.post("/v1/completions", json=body(MIDDLE, max_tokens=1)).raise_for_status()
        for path in (new := set(folder.iterdir()) - before):
            path.write_bytes(path.read_bytes()[:100])
        assert len(new) > 4
        with ThreadPoolExecutor(2) as pool:
            damaged, beside = pool.map(lambda ask: decode.post("/v1/completions", json=body(ask)), (MIDDLE, SHORT))
    assert tokens(beside) == wanted(SHORT)
    if policy == "recompute":
        assert tokens(damaged) == wanted(MIDDLE)
    else:
        assert damaged.status_code == 500


def prefill_ends_in_the_middle_of_a_prompt(program: Server, client: httpx.Client, folder: Path) -> None:
    """Its request goes on: the decode server loads what is whole, and computes the rest. So does the next one."""
    before, answered = len(list(folder.iterdir())), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(lambda: client.post("/v1/completions", json=body(LONG)))
        answer.add_done_callback(lambda _: answered.set())
        while len(list(folder.iterdir())) < before + 4:
            assert not answered.wait(0.002)
        process(program, "prefill").kill()
        assert tokens(answer.result()) == wanted(LONG)
    found, whole = cached(answer.result())
    assert 0 < found < whole
    assert lines(program, "the decode server computes the prompt") == 1
    assert tokens(client.post("/v1/completions", json=body(LONG))) == wanted(LONG)
    assert lines(program, "the decode server computes the prompt") == 2
    program.wait_for("prefill: ended with -9", 10)


def test_a_signal_while_the_servers_start_leaves_nothing() -> None:
    with Server("--model", "tiny", program=PROGRAM) as program:
        program.ready("decode: started as process")
        program.process.terminate()
        assert program.code() == 0
        assert not program.left() and not list(program.folder.iterdir())


def test_a_model_that_is_not_there_ends_the_program() -> None:
    with Server("--model", "./not-there", program=PROGRAM) as program:
        assert program.code(60) == 1
        program.wait_for("./not-there")
        assert not list(program.folder.iterdir())


def test_what_is_wrong_with_the_command_line_is_said_before_anything_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, *PROGRAM, "--port", port]
        refused = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    assert refused.returncode == 2
    assert f"--port {port}: " in refused.stderr and "in use" in refused.stderr
    assert not refused.stdout
    shown = subprocess.run([*command, "--help"], capture_output=True, text=True, check=True, timeout=10)
    assert "--on-load-failure" in shown.stdout
