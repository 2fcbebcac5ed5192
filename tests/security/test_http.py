"""Bad requests over HTTP: refused with 4xx, and the server serves on."""

import re
from collections.abc import Iterator

import httpx
import psutil
import pytest

from tests.security import http_fuzz
from tests.security.http_fuzz import Told
from tests.serve.process import Server

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("tiny", "-pp", "2", "--dtype", "float32", "--max-model-len", "128") as running:
        yield running.ready()


@pytest.mark.leaks("one server for the tests of this module")
@pytest.mark.parametrize("examples", [1, pytest.param(40, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])])
def test_bad_requests_are_refused_and_the_server_serves_on(server: Server, examples: int) -> None:
    told = Told()
    before = _completion(server)
    routes = http_fuzz.routes(server.url)
    http_fuzz.raw(server.url, routes, 40 * examples, 1, told)
    http_fuzz.generated(server.url, examples, 1, told)
    assert told.statuses.total() > 40
    assert told.statuses[400] > told.statuses[200]
    assert told.failures == []
    assert _completion(server) == before
    with server.client() as client:
        assert client.get("/health").status_code == 200
        metrics = client.get("/metrics").text
    assert re.search(r"^vllm:num_requests_running\{.*\} 0.0$", metrics, re.MULTILINE), "none hangs"


@pytest.mark.leaks("one server for the tests of this module")
@pytest.mark.parametrize(
    "route, body",
    [
        ("/invocations", "[" * 100_000),
        ("/scale_elastic_ep", "[" * 100_000),
        ("/scale_elastic_ep", "[]"),
        ("/v1/systemone", '{"state": {}, "questions": {}}'),
        ("/v1/responses", '{"input": [{"type": "message", "role": "assistant", "id": "m", "content": []}]}'),
    ],
)
def test_a_body_of_a_shape_that_the_route_does_not_look_for_is_refused(server: Server, route: str, body: str) -> None:
    with server.client() as client:
        for _ in range(2):  # over one connection: the server does not hang up
            answer = client.post(route, content=body, headers={"Content-Type": "application/json"})
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["code"] == 400


@pytest.mark.leaks("one server for the tests of this module")
def test_a_header_that_is_too_large_is_refused(server: Server) -> None:
    with server.client() as client:
        try:
            answer = client.get("/health", headers={"X-Large": "x" * (8 << 20)})
        except httpx.TransportError:
            pass  # hung up before it was sent to its end
        else:
            assert 400 <= answer.status_code < 500
        assert client.get("/health").status_code == 200


@pytest.mark.leaks("one server for the tests of this module")
def test_nothing_listens_but_what_was_asked_for(server: Server) -> None:
    """And gloo, which has no other way between processes: on the loopback interface, once per rank."""
    main = psutil.Process(server.process.pid)
    listening = {
        process.pid: [each.laddr for each in process.net_connections("inet") if each.status == psutil.CONN_LISTEN]
        for process in (main, *main.children(recursive=True))
    }
    assert [(address.ip, address.port) for address in listening.pop(main.pid)] == [("127.0.0.1", server.port)]
    ranks = [rank.pid for rank in server.ranks()]
    assert all(address.ip == "127.0.0.1" for pid in ranks for address in listening[pid])
    assert all(len(listening.pop(pid)) <= 1 for pid in ranks)
    assert not any(listening.values())


def _completion(server: Server) -> str:
    with server.client() as client:
        body = {"model": "tiny", "prompt": "once", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])
