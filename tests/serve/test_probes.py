"""The probes' truth table, the stall of /livez, and how seldom /health/generate generates."""

import asyncio
import json

import pytest

from async_pp.serve.probes import Probes, Stall, TokenProbe, Vitals, stall_s

PATHS = ("/livez", "/readyz", "/startupz", "/health/generate")


async def ask(vitals, path, method="GET"):
    sent = []

    async def application(scope, receive, send):
        sent.append("application")

    async def send(message):
        sent.append(message)

    await Probes(application, vitals)({"type": "http", "path": path, "method": method}, None, send)
    return sent if sent == ["application"] else (sent[0]["status"], json.loads(sent[1]["body"]))


def vitals(phase="serving", stalled=0.0, token=None):
    return Vitals(phase=lambda: phase, reason=lambda: f"because {phase}", stalled_s=lambda: stalled, token=token)


async def nothing():
    """A token at once."""


@pytest.mark.parametrize(
    "phase,live,ready,started,token",
    [
        ("starting", 200, 503, 503, 503),
        ("serving", 200, 200, 200, 200),
        ("restarting", 200, 503, 200, 503),
        ("draining", 200, 503, 200, 503),
        ("failed", 503, 503, 200, 503),
    ],
)
async def test_truth_table(phase, live, ready, started, token):
    for path, status in zip(PATHS, (live, ready, started, token), strict=True):
        code, content = await ask(vitals(phase, token=TokenProbe(nothing)), path)
        assert (code, content["phase"]) == (status, phase), path
        assert content.get("reason") == (None if status == 200 else f"because {phase}")


async def test_only_reading_one_of_the_probes_is_a_probe():
    for path, method in (("/livez", "POST"), ("/health", "GET"), ("/livez/", "GET")):
        assert await ask(vitals(), path, method) == ["application"]
    assert (await ask(vitals(), "/readyz", "HEAD"))[0] == 200


async def test_a_step_that_does_not_end_is_no_life():
    now, oldest = [0.0], [None]
    stall = Stall(lambda: oldest[0], lambda: now[0])
    states = Vitals(lambda: "serving", lambda: "", stall.seconds, stall_s=stall_s(None))
    for at, step, status in [
        (0, None, 200),
        (1000, 1, 200),
        (1119, 1, 200),
        (1121, 1, 503),
        (1122, 2, 200),
        (9999, None, 200),
    ]:
        now[0], oldest[0] = at, step
        assert (await ask(states, "/livez"))[0] == status, at
    assert stall_s(5.0) == stall_s(None) < stall_s(300.0) == 600.0


async def test_a_model_without_tokens_says_so():
    assert (await ask(vitals(), "/health/generate"))[0] == 503


class Token:
    def __init__(self):
        self.count = 0
        self.asked = asyncio.Event()
        self.go = asyncio.Event()

    async def __call__(self):
        self.count += 1
        self.asked.set()
        await self.go.wait()


async def test_one_token_at_a_time_for_all_who_ask():
    token = Token()
    probe = TokenProbe(token)
    asked = [asyncio.create_task(ask(vitals(token=probe), "/health/generate")) for _ in range(8)]
    await asyncio.sleep(0)
    asked[0].cancel()  # the one for whom it is generated leaves
    await asyncio.sleep(0)
    token.go.set()
    answers = await asyncio.gather(*asked[1:])
    assert [code for code, _ in answers] == [200] * 7
    token.go.clear()
    code, content = await ask(vitals(token=probe), "/health/generate")  # again, at once: the latest result
    assert code == 200 and content["age_s"] >= 0 and token.count == 1


async def test_another_token_after_a_while_and_the_old_result_until_then():
    token = Token()
    probe = TokenProbe(token, every_s=0.0)
    token.go.set()
    await probe.ask()
    token.go.clear()
    token.asked.clear()
    second = asyncio.create_task(probe.ask())
    await token.asked.wait()
    assert (await probe.ask()).problem is None  # does not wait for the second
    assert token.count == 2
    await probe.close()
    await asyncio.wait({second})


async def test_a_token_that_does_not_come_in_time():
    code, content = await ask(vitals(token=TokenProbe(Token(), deadline_s=0.0)), "/health/generate")
    assert code == 503 and "no token within 0 s" in content["reason"]


async def test_an_engine_that_refuses():
    async def refuse():
        raise RuntimeError("busy")

    code, content = await ask(vitals(token=TokenProbe(refuse)), "/health/generate")
    assert (code, content["reason"]) == (503, "RuntimeError: busy")
