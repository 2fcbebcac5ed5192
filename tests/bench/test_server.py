"""A server's start, its failures, and that nothing of it is left."""

import os
import sys
from pathlib import Path

import psutil
import pytest

from async_pp.bench import BenchFailed, server
from async_pp.bench.server import Server, free_port

FAKE = Path(__file__).with_name("fake_server.py")


def fake(what):
    port = free_port()
    return Server([sys.executable, str(FAKE), str(port), what], os.environ, port)


def test_start_waits_for_health_and_the_first_token():
    with fake("good") as running:
        assert running.start_to_first_token_s > server.POLL_S
        assert "listening" in running.last_words()
        (process,) = running.processes()
        folder = Path(process.environ()["TMPDIR"])
        assert folder.is_dir()
        (shared,) = Path("/dev/shm").glob(f"bench-fake-{running.url.rpartition(':')[2]}")
    assert not shared.exists()
    assert not process.is_running()
    assert not folder.exists()


def test_what_does_not_end_is_killed_with_its_children(monkeypatch):
    monkeypatch.setattr(server, "STOP_LIMIT_S", 0.1)
    monkeypatch.setattr(server, "CHILDREN_LIMIT_S", 0.1)
    with fake("stubborn") as running:
        family = running.processes()
    assert len(family) == 2
    _, alive = psutil.wait_procs(family, timeout=5)
    assert all(process.status() == psutil.STATUS_ZOMBIE for process in alive)


@pytest.mark.parametrize(
    ("what", "said"),
    [("silent", r"without a token \(200\)"), ("refuses", r"\(500\)"), ("drops", "first request failed")],
)
def test_an_answer_without_a_token_is_a_failure(what, said):
    with pytest.raises(BenchFailed, match=said), fake(what):
        pass


def test_a_server_that_ends_is_a_failure_with_its_last_words():
    gone = Server([sys.executable, "-c", "import sys; sys.exit('no such flag')"], os.environ, free_port())
    with pytest.raises(BenchFailed, match="ended with 1 before it answered /health\nno such flag"), gone:
        pass


def test_a_server_that_does_not_answer_in_time_is_a_failure(monkeypatch):
    monkeypatch.setattr(server, "START_LIMIT_S", 0.1)
    silent = Server([sys.executable, "-c", "import signal; signal.pause()"], os.environ, free_port())
    with pytest.raises(BenchFailed, match=r"not answered /health after 0.1 s"), silent:
        pass


def test_a_command_that_is_not_there_leaves_nothing():
    with pytest.raises(FileNotFoundError), Server(["/no/such/program"], os.environ, free_port()):
        pass
