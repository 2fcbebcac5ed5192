"""Streams of a server that loses a rank while it drains, or is asked to end while it replaces ranks."""

import signal
import threading
from concurrent.futures import ThreadPoolExecutor

from .process import events

STREAMS = 8
TOKENS = 600
"""Enough that none has ended when the rank is lost."""


def greedy(server, meanwhile=lambda: None):
    """The tokens of each stream and why it ended; `meanwhile` is called when each has had some."""
    begun = threading.Barrier(STREAMS + 1, timeout=60)

    def stream(number):
        body = {"model": "tiny", "prompt": f"{number} once", "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}
        more = {"stream": True, "return_token_ids": True}
        tokens, parts = [], 0
        with server.client() as client, client.stream("POST", "/v1/completions", json={**body, **more}) as response:
            for part in events(response):
                if part == "[DONE]" or "error" in part:
                    return tokens, part
                tokens += part["choices"][0]["token_ids"]
                parts += 1
                if parts == 5:
                    begun.wait()
        return tokens, "broke off"

    with ThreadPoolExecutor(STREAMS) as pool:
        streams = [pool.submit(stream, number) for number in range(STREAMS)]
        begun.wait()
        meanwhile()
        return [stream.result() for stream in streams]


def a_rank_is_lost_in_the_end(server, rank, *, drain_first):
    """Check that every stream of the server ends as without, and then the server: with nothing left, and code 0."""
    server.ready()
    plain = greedy(server)
    assert {(len(tokens), end) for tokens, end in plain} == {(TOKENS, "[DONE]")}
    probe = server.client()

    def drain():
        server.process.send_signal(signal.SIGTERM)
        server.wait_for("SIGTERM: ending")

    def kill():
        server.ranks()[rank].kill()
        lost = server.wait_for("ranks lost")
        for words in (f"rank {rank} ended: signal SIGKILL", "epoch 0", "step", f"{STREAMS} go on, 0 given up"):
            assert words in lost, lost

    def meanwhile():
        for act in (drain, kill) if drain_first else (kill, drain):
            act()
        statuses = [probe.get(path).status_code for path in ("/livez", "/readyz", "/startupz")]
        assert statuses == [200, 503, 200]
        server.ready("serving again, all ranks replaced in")  # whatever the new ranks leave is looked for, too

    with probe:
        assert greedy(server, meanwhile) == plain
    assert server.code() == 0
    assert server.left() == []
