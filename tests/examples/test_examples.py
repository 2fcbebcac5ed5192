"""The examples are programs a user would copy: short, and they run."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
README = EXAMPLES.parent / "README.md"
ENVIRONMENT = {**os.environ, "MODEL": "tiny", "PYTHONUNBUFFERED": "1"}

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(180)]


LONG = {"disaggregated": 210, "shared_storage": 300}


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_is_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) < LONG.get(path.stem, 60)


@pytest.mark.parametrize(
    "name, arguments, lines", [("embed_batch.py", ["tiny", "2"], 4), ("two_engines.py", ["tiny", "tiny"], 2)]
)
def test_it_runs_and_leaves_nothing(name: str, arguments: list[str], lines: int) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / name, *arguments], env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(done.stdout.splitlines()) >= lines
    if name == "two_engines.py":
        first, second = (line.partition(": ")[2] for line in done.stdout.splitlines()[-2:])
        assert first == second, "one model, one prompt: the number of stages changes nothing"


@pytest.mark.slow  # embed_batch.py is nearly the same program
def test_the_program_in_the_readme_runs(tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    body = [line for line in program.splitlines() if line and not line.startswith(("import", "from"))]
    assert len(body) <= 15
    path = tmp_path / "readme.py"
    path.write_text(program.replace('"default"', '"tiny"'))
    done = subprocess.run([sys.executable, path], env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(done.stdout.splitlines()) >= 16  # one line or more per streamed token


def test_the_fastapi_application_streams(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    log = tmp_path / "log"
    command = [sys.executable, "-m", "uvicorn", "--app-dir", EXAMPLES, "embed_fastapi:app", "--port", str(port)]
    with log.open("w") as output, subprocess.Popen(command, env=ENVIRONMENT, stdout=output, stderr=output) as server:
        try:
            with httpx.Client(transport=httpx.HTTPTransport(retries=0), timeout=60) as client:
                text = _first_answer(client, f"http://127.0.0.1:{port}/complete", server, log)
            assert text
            children = psutil.Process(server.pid).children(recursive=True)
        finally:
            server.terminate()
        assert server.wait(20) in (0, -15)
    # A zombie has ended: whoever adopted it has yet to take note.
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]


def _first_answer(client: httpx.Client, url: str, server: "subprocess.Popen[bytes]", log: Path) -> str:
    """Ask until the server listens; the socket is refused, at once, before that."""
    while True:
        assert server.poll() is None, log.read_text()[-3000:]
        try:
            answer = client.get(url, params={"prompt": "Hello", "max_tokens": 8})
        except httpx.ConnectError:
            try:
                server.wait(0.2)
            except subprocess.TimeoutExpired:
                continue
        else:
            answer.raise_for_status()
            return answer.text
