"""The lines a person reads, and a curl line that a shell really takes apart as meant."""

import io
import json
import shlex

import pytest

from async_pp.errors import RankLost
from async_pp.serve.display import Display, curl_line


def test_lines():
    out, err = io.StringIO(), io.StringIO()
    ticks = iter([0.0, 12.34])
    show = Display(out, err, clock=lambda: next(ticks))
    show.phase("import", None, 1.0)
    show.phase("load", 1, 2.5)
    show.phase("new phase", None, 0.1)
    show.serving("http://127.0.0.1:1", "curl x")
    show.lost(RankLost("rank 1 ended: signal SIGKILL", rank=1, epoch=0, step=7), 5, 1)
    show.lost(ValueError("not in\nlist"), 0, 6)
    show.phase("restart", None, 2.31)
    show.error("two\nlines")
    assert out.getvalue().splitlines() == [
        "async_pp: vLLM imported in 1.0 s",
        "async_pp: rank 1: model loaded in 2.5 s",
        "async_pp: all ranks: new phase in 0.1 s",
        "async_pp: serving on http://127.0.0.1:1 after 12.3 s; try:",
        "curl x",
        "async_pp: ranks lost: rank 1 ended: signal SIGKILL (rank 1, epoch 0, step 7); starting others; open requests: 5 go on, 1 given up",
        "async_pp: ranks lost: ValueError: not in list; starting others; open requests: 0 go on, 6 given up",
        "async_pp: serving again, all ranks replaced in 2.3 s",
    ]
    assert err.getvalue() == "async_pp: error: two lines\n"


@pytest.mark.parametrize("route", ["chat", "completions", "embeddings"])
def test_curl_line(route):
    words = shlex.split(curl_line("http://127.0.0.1:1", "it's a model", route=route, api_key=False))
    assert words[0] == "curl"
    assert words[1].startswith("http://127.0.0.1:1/v1/")
    body = json.loads(words[words.index("-d") + 1])
    assert body["model"] == "it's a model"


def test_curl_line_never_holds_the_key_and_knows_unix_sockets():
    line = curl_line("unix:/tmp/a b", "m", route="models", api_key=True)
    assert "$API_KEY" in line
    assert shlex.split(line)[:4] == ["curl", "--unix-socket", "/tmp/a b", "http://localhost/v1/models"]
