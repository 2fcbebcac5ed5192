"""Keys: without one only the probes answer, whatever the route, the method or the spelling."""

import pytest

from async_pp.serve.auth import ApiKeys
from async_pp.serve.probes import OPEN_PATHS

PREFLIGHT = [(b"origin", b"http://a"), (b"access-control-request-method", b"POST")]


async def asked(*headers, path="/v1/models", method="GET", kind="http", keys=("one", "two")):
    """Whether the application was reached, and what was answered else."""
    reached, sent = [], []

    async def application(scope, receive, send):
        reached.append(scope["path"])

    async def send(message):
        sent.append(message)

    scope = {"type": kind, "path": path, "headers": list(headers)}
    if kind == "http":
        scope["method"] = method
    await ApiKeys(application, keys, OPEN_PATHS)(scope, None, send)
    return bool(reached), sent


def bearer(key):
    return (b"authorization", key)


@pytest.mark.parametrize("key", [b"Bearer one", b"bearer two", b"BEARER one"])
async def test_a_key_opens(key):
    assert await asked(bearer(key)) == (True, [])


@pytest.mark.parametrize(
    "key",
    [b"", b"one", b"Bearer", b"Bearer ", b"Bearer three", b"Bearer one ", b"Basic one", b"Bearer \xff", b"Bearer  one"],
)
async def test_anything_else_does_not(key):
    reached, sent = await asked(bearer(key))
    assert not reached
    assert sent[0]["status"] == 401
    assert (b"www-authenticate", b"Bearer") in sent[0]["headers"]
    assert b"one" not in sent[1]["body"].replace(b"None", b"")


@pytest.mark.parametrize("path", OPEN_PATHS)
async def test_probes_are_open_to_readers(path):
    assert (await asked(path=path))[0]
    assert not (await asked(path=path, method="POST"))[0]
    assert not (await asked(path=path + "/"))[0]
    assert not (await asked(path="/" + path))[0]


@pytest.mark.parametrize(
    "path", ["/", "/metrics", "/ping", "/invocations", "/docs", "/openapi.json", "/nothing", "//livez"]
)
@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE"])
async def test_every_other_path_and_method_is_guarded(path, method):
    assert not (await asked(path=path, method=method))[0]


async def test_websockets_are_guarded():
    reached, sent = await asked(kind="websocket", path="/v1/realtime")
    assert not reached
    assert sent[0]["type"] == "websocket.close"
    assert not (await asked(kind="websocket", path="/livez"))[0]
    assert (await asked(bearer(b"Bearer one"), kind="websocket"))[0]


async def test_a_cross_origin_preflight_passes():
    assert (await asked(*PREFLIGHT, method="OPTIONS"))[0]
    assert not (await asked(*PREFLIGHT, method="POST"))[0]
    assert not (await asked(*PREFLIGHT[:1], method="OPTIONS"))[0]


async def test_no_keys_no_guard():
    assert (await asked(keys=()))[0]
