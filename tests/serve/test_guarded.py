"""A server with an API key and a short queue, on the tiny model: probes, keys, overload, and clients that misbehave."""

import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from async_pp.serve.probes import GENERATE_DEADLINE_S

from .process import Raw, Server, events

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(180), pytest.mark.leaks("one server for the tests of this module")]

KEY = "s3cret"
DEADLINE_S = 5
MOST = 4
LONG = {"model": "tiny", "prompt": "once", "max_tokens": 3000, "ignore_eos": True, "stream": True, "temperature": 0}
SHORT = {"model": "tiny", "prompt": "a", "max_tokens": 1}
COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def server():
    guards = ("--api-key", KEY, "--max-num-queued-reqs", str(MOST), "--step-deadline", str(DEADLINE_S))
    with Server("tiny", "-pp", "2", "--dtype", "float32", *guards) as running:
        running.wait_for("spawned in")
        with running.client() as probe:
            running.statuses = []
            while running.statuses[-1:] != [200]:
                running.statuses.append(probe.get("/startupz").status_code)
        yield running.ready()


@pytest.fixture
def client(server):
    with server.client() as client:
        client.headers["Authorization"] = f"Bearer {KEY}"
        yield client


def running(client):
    """Requests in the engine, by its own count."""
    lines = client.get("/metrics").text.splitlines()
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting{")
    return sum(float(line.split()[-1]) for line in lines if line.startswith(names))


def wait_until_empty(client):
    for _ in range(200):  # bounded by requests, not by time: each is a step of the server's loop
        if running(client) == 0:
            return
        client.post(COMPLETIONS, json=SHORT)
    pytest.fail("the engine is not empty")


def test_probes_answer_while_it_starts(server):
    assert set(server.statuses) == {503, 200}
    assert server.statuses == sorted(server.statuses, reverse=True)


def test_no_route_but_the_probes_without_the_key(server, client):
    with server.client() as stranger:
        for path in ("/livez", "/readyz", "/startupz", "/health", "/health/generate"):
            assert stranger.get(path).status_code == 200, path
        described = client.get("/openapi.json").json()["paths"]
        routes = [(method, path) for path, methods in described.items() for method in methods if path != "/health"]
        more = (
            "/metrics",
            "/docs",
            "/redoc",
            "/openapi.json",
            "/ping",
            "/invocations",
            "/version",
            "/load",
            "/nothing",
        )
        routes += [(method, path) for path in more for method in ("get", "post", "options")]
        assert len(routes) > 40
        for method, path in routes:
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": KEY}):
                assert stranger.request(method, path, headers=headers).status_code == 401, (method, path)
    for path in ("/metrics", "/version", "/v1/models", "/ping", "/docs", "/openapi.json"):
        assert client.get(path).status_code == 200, path


def test_a_token_for_many_who_ask(client):
    counted = [line for line in client.get("/metrics").text.splitlines() if line.startswith("vllm:request_success")]
    answers = [client.get("/health/generate").json() for _ in range(20)]
    assert {answer["phase"] for answer in answers} == {"serving"}
    again = [line for line in client.get("/metrics").text.splitlines() if line.startswith("vllm:request_success")]
    done = sum(float(line.split()[-1]) for line in again) - sum(float(line.split()[-1]) for line in counted)
    assert done <= 1, "one in five seconds"


def test_overload_is_told_before_the_first_byte(client):
    with ExitStack() as stack:
        streams = [events(stack.enter_context(client.stream("POST", COMPLETIONS, json=LONG))) for _ in range(MOST)]
        for stream in streams:
            next(stream)
        refused = client.post(COMPLETIONS, json=LONG)
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) > 0
        assert client.get("/readyz").status_code == 200
    wait_until_empty(client)
    refused = client.post(COMPLETIONS, json={**SHORT, "n": MOST + 1})
    assert refused.status_code == 503 and refused.headers["retry-after"]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("how", ["close", "reset", "half-close"])
def test_a_client_that_leaves_frees_its_request(server, client, how, stream):
    raw = Raw(server, {**LONG, "stream": stream}, KEY)
    while running(client) == 0:
        pass
    raw.leave(how)
    wait_until_empty(client)
    raw.socket.close()


def test_a_client_that_never_reads_slows_nobody(server, client):
    silent = [Raw(server, LONG, KEY) for _ in range(MOST - 1)]
    try:
        while running(client) < len(silent):
            pass
        for _ in range(5):
            answer = client.post(COMPLETIONS, json={**SHORT, "max_tokens": 20, "ignore_eos": True})
            assert answer.json()["usage"]["completion_tokens"] == 20
    finally:
        for one in silent:
            one.leave("reset")
    wait_until_empty(client)


def test_a_stream_outlives_a_rank(server, client):
    with client.stream("POST", COMPLETIONS, json=LONG) as response:
        stream = events(response)
        for _ in range(5):
            next(stream)
        server.ranks()[1].kill()
        with server.client() as probe:
            while probe.get("/readyz").status_code == 200:
                pass
            assert probe.get("/livez").status_code == probe.get("/startupz").status_code == 200
            answer = client.post(COMPLETIONS, json=SHORT)  # admitted, and waits
            assert answer.status_code == 200
            assert probe.get("/readyz").status_code == 200
        assert "error" not in next(stream)
    wait_until_empty(client)


def test_probes_answer_while_a_rank_stands_still(server, client):
    """Before the deadline of its step nothing is known; then the ranks are replaced. The probes wait for neither."""

    def statuses():
        return [probe.get(path).status_code for path in ("/livez", "/readyz", "/startupz")]

    with (
        ThreadPoolExecutor(1) as pool,
        server.client(timeout=DEADLINE_S / 2) as probe,
        server.client(timeout=2 * GENERATE_DEADLINE_S) as patient,
        client.stream("POST", COMPLETIONS, json=LONG) as response,
    ):
        stream = events(response)
        next(stream)
        server.ranks()[0].suspend()
        token = pool.submit(patient.get, "/health/generate")  # begun before the deadline
        assert statuses() == [200, 200, 200]
        lost = server.wait_for("its process is stopped")
        assert "ranks lost: rank 0 has not finished step" in lost
        assert statuses() == [200, 503, 200]
        assert probe.get("/health/generate").status_code == 503
        server.wait_for("serving again", count=2)
        assert statuses() == [200, 200, 200]
        assert token.result().status_code in (200, 503), "the token came in time, or it did not"
        assert "error" not in next(stream)
    wait_until_empty(client)


def test_z_a_drain_and_its_end_by_a_second_signal(server, client):
    """Last in this module: it ends the server."""
    server.ready()  # its ranks are others by now
    stuck = Raw(server, LONG, KEY)
    with client.stream("POST", COMPLETIONS, json=LONG) as response:
        stream = events(response)
        next(stream)
        server.process.send_signal(signal.SIGTERM)
        server.wait_for("SIGTERM: ending")
        with server.client() as new:
            assert [new.get(path).status_code for path in ("/livez", "/readyz", "/startupz")] == [200, 503, 200]
            refused = new.post(COMPLETIONS, json=SHORT, headers=client.headers)
            assert (refused.status_code, refused.headers["connection"]) == (503, "close")
            assert refused.headers["retry-after"]
        assert "error" not in next(stream)
        server.process.send_signal(signal.SIGTERM)
        assert server.code() == 128 + signal.SIGTERM
    stuck.socket.close()
    assert server.left() == []
