"""The server end to end, on the tiny model with two ranks: routes, refusals, signals, and the death of a rank."""

import asyncio
import json
import shlex
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from .process import STOP_LIMIT_S, Raw, Server, events

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(180)]

TINY = ("tiny", "-pp", "2", "--dtype", "float32")
LONG = {"model": "tiny", "prompt": "once", "max_tokens": 3000, "ignore_eos": True, "stream": True, "temperature": 0}
MESSAGE = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 3000,
    "stream": True,
    "temperature": 0,
}
shared = pytest.mark.leaks("one server for the tests of this module")


@pytest.fixture(scope="module")
def server():
    with Server(*TINY, "--drain-timeout", "0") as running:
        yield running.ready()


@pytest.fixture
def client(server):
    with server.client() as client:
        yield client


@shared
def test_start_is_told(server):
    for text in ("vLLM imported", "spawned in", "rank 0: model loaded", "rank 1: model loaded", "KV cache ready"):
        server.wait_for(text, timeout=1)
    words = shlex.split(server.wait_for("curl http", timeout=1))
    done = subprocess.run([*words, "-s"], capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(done.stdout)["choices"][0]["message"]["role"] == "assistant"


@shared
def test_completions(client):
    body = {"model": "tiny", "prompt": ["a", "b"], "max_tokens": 5, "temperature": 0, "logprobs": 2}
    answers = [client.post("/v1/completions", json=body).json() for _ in range(2)]
    assert answers[0]["usage"]["completion_tokens"] == 10
    assert len(answers[0]["choices"][0]["logprobs"]["tokens"]) == 5
    texts = [[choice["text"] for choice in answer["choices"]] for answer in answers]
    assert texts[0] == texts[1]


@shared
def test_chat_stream_equals_chat(client):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 12, "temperature": 0}
    whole = client.post("/v1/chat/completions", json=body).json()["choices"][0]
    with client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
        parts = list(events(response))
    assert parts[-1] == "[DONE]"
    deltas = [part["choices"][0] for part in parts[:-1] if part["choices"]]
    assert "".join(delta["delta"].get("content") or "" for delta in deltas) == whole["message"]["content"]
    assert deltas[-1]["finish_reason"] == whole["finish_reason"] == "length"


@shared
def test_the_other_routes(client):
    assert client.get("/health").status_code == 200
    assert client.get("/version").json()["version"]
    assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"
    assert client.post("/tokenize", json={"model": "tiny", "prompt": "hi"}).json()["count"] >= 1
    metrics = client.get("/metrics").text
    assert "vllm:num_requests_running" in metrics
    assert "http_requests_total" in metrics
    paths = client.get("/openapi.json").json()["paths"]
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/detokenize", "/load"):
        assert path in paths


CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hi"}]


@shared
@pytest.mark.parametrize(
    "path,body,status",
    [
        ("/v1/completions", b"{", 400),
        ("/v1/completions", b"", 400),
        ("/v1/completions", b"\xff\xfe", 400),
        ("/v1/completions", [], 400),
        ("/v1/completions", {"model": "tiny"}, 400),
        ("/v1/completions", {"model": "other", "prompt": "a"}, 404),
        ("/v1/completions", {"model": "tiny", "prompt": "a", "max_tokens": -1}, 400),
        ("/v1/completions", {"model": "tiny", "prompt": "a", "max_tokens": "many"}, 400),
        ("/v1/completions", {"model": "tiny", "prompt": "a", "temperature": -1}, 400),
        ("/v1/completions", {"model": "tiny", "prompt": "a", "top_p": 2}, 400),
        ("/v1/completions", {"model": "tiny", "prompt": "a", "n": 0}, 400),
        ("/v1/completions", {"model": "tiny", "prompt": [10**9], "max_tokens": 1}, 400),
        ("/v1/completions", {"model": "tiny", "prompt": "a " * 9000}, 400),
        ("/v1/completions", {"model": "tiny", "prompt": "a", "logit_bias": {"x": 1}}, 400),
        (CHAT, {"model": "tiny", "messages": "hi"}, 400),
        (CHAT, {"model": "tiny", "messages": [{"content": "hi"}]}, 400),
        (CHAT, {"model": "tiny", "messages": HELLO, "logprobs": True, "top_logprobs": 1000}, 400),
        (CHAT, {"model": "tiny", "messages": HELLO, "response_format": {"type": "json_schema"}}, 400),
        (CHAT, {"model": "tiny", "messages": HELLO, "tools": "x"}, 400),
        ("/v1/nothing", {}, 404),
        ("/tokenize", {"model": "tiny"}, 400),
    ],
)
def test_malformed_requests_get_their_4xx(client, server, path, body, status):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = client.post(path, content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == status, answer.text
    assert client.get("/health").status_code == 200


@shared
def test_wrong_method(client):
    assert client.get("/v1/completions").status_code == 405


@shared
async def test_many_at_once(server):
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        bodies = [{"model": "tiny", "prompt": f"p{i}", "max_tokens": 8, "ignore_eos": True} for i in range(24)]
        answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))
    assert [answer.json()["usage"]["completion_tokens"] for answer in answers] == [8] * 24


@shared
def test_z_first_signal_ends_everything_in_time(server):
    """Last in this module: it ends the shared server, with requests open, an idle client and one that does not read."""
    idle = server.client()
    idle.get("/health")
    stuck = Raw(server, LONG)
    with (
        ThreadPoolExecutor() as pool,
        server.client() as client,
        server.client() as other,
        client.stream("POST", "/v1/completions", json=LONG) as response,
        client.stream("POST", "/v1/messages", json=MESSAGE) as messages,
    ):
        whole = pool.submit(other.post, "/v1/completions", json={**LONG, "stream": False})
        stream = events(response)
        next(stream)
        while "vllm:num_requests_running{" not in (metrics := idle.get("/metrics").text) or " 4.0" not in metrics:
            next(stream)
        server.process.send_signal(signal.SIGTERM)
        assert list(stream)[-1]["error"]["code"] == 503
        assert list(events(messages))[-1]["error"]["code"] == 503
        assert whole.result().status_code == 503
        assert server.code(STOP_LIMIT_S) == 0
    assert server.left() == []
    assert not [line for line in server.lines if "Traceback" in line or "rror" in line], server.lines
    idle.close()
    stuck.socket.close()
    assert "SIGTERM" in server.wait_for("SIGTERM", timeout=1)


def test_a_killed_rank_is_told_to_everyone():
    with Server(*TINY, "--on-rank-loss", "exit") as server, ThreadPoolExecutor() as pool:
        server.ready()
        with server.client() as client, server.client() as other:
            whole = pool.submit(client.post, "/v1/completions", json={**LONG, "stream": False})
            with other.stream("POST", "/v1/completions", json=LONG) as response:
                stream = events(response)
                next(stream)
                server.ranks()[1].kill()
                parts = list(stream)
            assert parts[-1] == "[DONE]"
            told = parts[-2]["error"]["message"]
            assert "rank 1" in told
            assert "SIGKILL" in told
            assert "epoch 0" in told
            assert "step " in told
            answer = whole.result()
            assert answer.status_code == 500
            assert "rank 1" in answer.json()["error"]["message"]
            assert other.get("/health").status_code == 503
            assert other.post("/v1/completions", json={**LONG, "stream": False}).status_code == 503
        assert server.code() == 3
        assert [line for line in server.lines if "engine failed" in line and "rank 1" in line]
        assert server.left() == []


def test_signal_while_vllm_is_imported():
    with Server(*TINY) as server:
        server.wait_for("model ready on disk")
        server.process.send_signal(signal.SIGTERM)
        assert server.code() == 0
        assert server.left() == []


@pytest.mark.parametrize(
    "argv,words",
    [
        (["tiny", "--max-model-len", "100000000"], "max_model_len"),
        pytest.param(["tiny", "--chat-template", "/no/such.jinja"], "/no/such.jinja", marks=pytest.mark.slow),
        pytest.param(["tiny", "--enable-auto-tool-choice"], "--tool-call-parser", marks=pytest.mark.slow),
    ],
)
def test_what_only_vllm_can_judge_is_one_line_and_exit_code_1(argv, words):
    with Server(*argv) as server:
        assert server.code(60) == 1
        errors = [line for line in server.lines if "error:" in line]
        assert len(errors) == 1, server.lines
        assert words in errors[0]
        assert not [line for line in server.lines if "spawned" in line]
        assert server.left() == []
