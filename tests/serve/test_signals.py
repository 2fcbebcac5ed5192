"""Real signals to a real process, on both loops."""

import signal
import subprocess
import sys

import httpx
import pytest

from async_pp.serve.preflight import bind

pytestmark = pytest.mark.parametrize("kind", ["--uvloop", "--no-uvloop"])


class Process:
    """`tests.serve.fake` as a process."""

    def __init__(self, *options):
        holder = bind("127.0.0.1", 0)
        self.port = holder.getsockname()[1]
        holder.close()
        self.url = f"http://127.0.0.1:{self.port}"
        command = [sys.executable, "-m", "tests.serve.fake", str(self.port), *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.first_line = self.process.stdout.readline()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()

    def ended(self):
        out, err = self.process.communicate(timeout=10)
        return self.process.returncode, out, err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_first_signal_ends_cleanly(kind, number):
    with Process(kind) as server, httpx.Client(base_url=server.url) as client:
        assert "serving" in server.first_line
        with client.stream("GET", "/stream") as response:
            lines = response.iter_lines()
            assert next(lines) == "data: first"
            server.process.send_signal(number)
            assert '"code": 503' in "".join(lines)
        code, out, err = server.ended()
        assert (code, err) == (0, "")
        assert number.name in out


def test_second_signal_ends_at_once(kind):
    with (
        Process(kind, "--drain") as server,
        httpx.Client(base_url=server.url) as client,
        client.stream("GET", "/stream") as response,
    ):
        lines = response.iter_lines()
        assert next(lines) == "data: first"
        server.process.send_signal(signal.SIGTERM)
        assert "SIGTERM: ending" in server.process.stdout.readline()
        with httpx.Client(base_url=server.url) as other:
            assert [other.get(path).status_code for path in ("/livez", "/readyz", "/echo")] == [200, 503, 503]
        server.process.send_signal(signal.SIGINT)
        code, out, _ = server.ended()
    assert code == 128 + signal.SIGINT
    assert "ending at once" in out


def test_signal_during_start(kind):
    with Process(kind, "--slow-start") as server:
        assert "starting" in server.first_line
        assert [httpx.get(server.url + path).status_code for path in ("/livez", "/startupz")] == [200, 503]
        server.process.send_signal(signal.SIGTERM)
        assert server.ended()[0] == 0


def test_signal_before_the_loop(kind):
    with Process(kind, "--before-loop") as server:
        assert "waiting" in server.first_line
        server.process.send_signal(signal.SIGINT)
        code, out, err = server.ended()
        assert (code, err) == (0, "")
        assert "SIGINT: ended during start-up" in out


def test_engine_failure_is_exit_code_3(kind):
    with Process(kind) as server:
        assert httpx.get(server.url + "/die").status_code == 200
        code, _, err = server.ended()
        assert code == 3
        assert "rank 1, epoch 0, step 7" in err
