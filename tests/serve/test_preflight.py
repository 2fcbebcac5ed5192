"""Quick checks: a table of bad command lines, and the address that is really taken."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from async_pp.errors import ConfigError
from async_pp.serve import environment, preflight
from async_pp.serve.preflight import bind, bind_unix, check, layers_of, url

FREE = ["--port", "0"]


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"num_hidden_layers": 4}))
    return str(folder)


def refused(argv, environment=None):
    with pytest.raises(ConfigError) as caught:
        check(argv, environment or {}).close()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_accepts_and_takes_the_address(model):
    known = check([model, "-pp", "2", "-tp", "2", "--verbose", "--no-uvloop", *FREE], {})
    assert (known.model, known.world_size, known.verbose, known.uvloop) == (model, 4, True, False)
    assert known.local_model
    assert known.address == f"http://127.0.0.1:{known.listener.getsockname()[1]}"
    known.close()
    known.close()


def test_nothing_given():
    known = check(FREE, {})
    assert known.model is None
    assert known.local_model
    assert known.uvloop
    assert known.world_size == 1
    known.close()


@pytest.mark.parametrize(
    "argv,words",
    [
        (["-pp", "5"], "5 is greater than the 4 layers"),
        (["-pp", "0"], "at least 1"),
        (["-tp", "-1"], "at least 1"),
        (["--port", "70000"], "between 0 and 65535"),
        (["--host", "203.0.113.7"], "cannot listen on 203.0.113.7"),
        (["--host", "no host"], "--host no host"),
        (["--ssl-keyfile", "/no/key.pem"], "--ssl-keyfile: no such file"),
        (["--headless"], "--headless"),
        (["--grpc"], "gRPC"),
        (["--grpc-port", "1"], "gRPC"),
        (["--api-server-count", "2"], "--api-server-count"),
        (["-dp", "2"], "one server per replica"),
        (["--data-parallel-rank", "0"], "one server per replica"),
        (["--data-parallel-hybrid-lb"], "one server per replica"),
        (["--nnodes", "2"], "this machine"),
        (["--node-rank", "1"], "this machine"),
        (["--enable-elastic-ep"], "elastic"),
        (["--distributed-executor-backend", "ray"], "leave it out"),
        (["--distributed-executor-backend", "external_launcher"], "leave it out"),
        (["--kv-transfer-config", '{"kv_connector": "A"}'], "kv_role of A is missing"),
        (["--kv-transfer-config", '{"kv_connector": "A", "kv_role": "both"}'], "kv_role of A cannot be 'both'"),
        (
            [
                "--kv-transfer-config",
                json.dumps(
                    {
                        "kv_connector": "MultiConnector",
                        "kv_role": "kv_both",
                        "kv_connector_extra_config": {"connectors": [{"kv_connector": "B"}]},
                    }
                ),
            ],
            "kv_role of B is missing",
        ),
    ],
)
def test_refuses(model, argv, words):
    assert words in refused([model, *([] if "--port" in argv else FREE), *argv])


@pytest.mark.parametrize(
    "argv",
    [
        ["--api-server-count", "1"],
        ["-dp", "1"],
        ["--nnodes", "1"],
        ["--node-rank", "0"],
        ["--kv-transfer-config", '{"kv_connector": "A", "kv_role": "kv_both"}'],
        ["--kv-transfer-config.kv_connector", "A"],
        ["--kv-transfer-config", "left to vLLM"],
    ],
)
def test_accepts_the_harmless_value(model, argv):
    check([model, *FREE, *argv], {}).close()


def test_models_that_are_not_there(tmp_path):
    assert "no such model folder" in refused(["/no/such/model"])
    assert "no such model folder" in refused(["./model"])
    assert "no such model folder" in refused(["a/b/c"])
    (tmp_path / "empty").mkdir()
    assert "no config.json" in refused([str(tmp_path / "empty")])
    (tmp_path / "weights.bin").touch()
    assert "is a file" in refused([str(tmp_path / "weights.bin")])
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    assert "cannot be read" in refused([str(tmp_path / "broken")])


def test_hub_names(tmp_path):
    offline = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    assert "unknown model 'org/name'" in refused(["org/name", *FREE], offline)
    snapshot = tmp_path / "hub" / "models--org--name" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps({"text_config": {"num_hidden_layers": 2}}))
    check(["org/name", *FREE], offline).close()
    assert "2 layers" in refused(["org/name", "-pp", "3", *FREE], offline)
    check(["org/other", *FREE], {"HF_HOME": str(tmp_path)}).close()  # online: vLLM will ask the hub
    check(["s3://bucket/model", *FREE], offline).close()


@pytest.mark.parametrize(
    "config,layers",
    [({}, None), ({"n_layer": 3}, 3), ({"num_hidden_layers": None}, None), ({"text_config": {"n_layers": 2}}, 2)],
)
def test_layers_of(config, layers):
    assert layers_of(config) == layers


def test_port_in_use_by_a_listening_server():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert "already in use" in refused(["default", "--port", str(port)])


def test_port_in_use_by_a_server_that_is_still_starting():
    first = bind("127.0.0.1", 0)
    with pytest.raises(ConfigError, match="already in use"):
        bind("127.0.0.1", first.getsockname()[1])
    first.close()


def test_unix_socket_paths(tmp_path):
    path = tmp_path / "s"
    known = check(["--uds", str(path)], {})
    assert known.address == f"unix:{path}"
    known.listener.listen()
    assert "in use" in refused(["--uds", str(path)])
    known.listener.close()  # as a server that was killed: the path stays
    bind_unix(path).close()
    path.unlink()
    path.touch()
    assert "not a socket" in refused(["--uds", str(path)])
    assert "cannot listen" in refused(["--uds", "/no/such/folder/s"])
    path.unlink()
    known = check(["--uds", str(path)], {})
    known.close()
    assert not path.exists()


@pytest.mark.parametrize(
    "host,tls,expected",
    [
        ("127.0.0.1", False, "http://127.0.0.1:80"),
        ("0.0.0.0", False, "http://127.0.0.1:80"),
        ("::", True, "https://[::1]:80"),
        ("example.org", True, "https://example.org:80"),
    ],
)
def test_url(host, tls, expected):
    assert url(host, 80, tls=tls) == expected


def test_environment_defaults_never_override(model):
    known = check([model, *FREE], {})
    wanted = environment.defaults(known)
    assert wanted["HF_HUB_OFFLINE"] == "1"
    assert wanted["GLOO_SOCKET_IFNAME"] == "lo"
    assert environment.missing(wanted, {"GLOO_SOCKET_IFNAME": "eth0"}).get("GLOO_SOCKET_IFNAME") is None
    known.close()
    with_hub_tokenizer = check([model, "--tokenizer", "org/name", "--verbose", *FREE], {})
    wanted = environment.defaults(with_hub_tokenizer)
    assert "HF_HUB_OFFLINE" not in wanted
    assert "VLLM_LOGGING_LEVEL" not in wanted
    with_hub_tokenizer.close()


PROGRAM = """
import subprocess, sys
import async_pp.serve.program as program
def no_child(*args, **kwargs):
    sys.exit("a child process was started")
subprocess.Popen = no_child
program._launch_zygote = no_child
code = program.main(sys.argv[1:])
sys.exit(99 if "vllm" in sys.modules or "torch" in sys.modules else code)
"""


@pytest.mark.parametrize(
    "argv", [["--wrong-flag"], ["/no/model"], ["-pp", "x"], ["--grpc"], ["--host", "203.0.113.7"], ["m", "n"]]
)
def test_program_exits_1_with_one_line_and_starts_nothing(argv):
    done = subprocess.run([sys.executable, "-c", PROGRAM, *argv], capture_output=True, text=True, check=False)
    assert done.returncode == 1, (done.returncode, done.stderr)
    assert done.stdout == ""
    assert done.stderr.startswith("async_pp: error: ")
    assert done.stderr.count("\n") == 1


def test_embedded_names_need_no_folder():
    for name in preflight.EMBEDDED:
        assert not Path(name).exists()
        check([name, *FREE], {}).close()
