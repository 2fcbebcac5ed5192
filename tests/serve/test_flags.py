"""The light parse: vLLM's spelling freedoms, our group, config files, and one clear line for what is wrong."""

import json
import subprocess
import sys

import pytest

from async_pp.core.recovery import Intensity
from async_pp.errors import ConfigError
from async_pp.serve import catalogue, flags
from async_pp.serve.flags import light_parse, light_parser, normalise


@pytest.fixture(scope="module")
def known():
    return catalogue.load()


@pytest.mark.parametrize(
    "argv,plain",
    [
        (["--max_model_len", "64"], ["--max-model-len", "64"]),
        (["--max_model_len=6_4"], ["--max-model-len=6_4"]),
        (["-O3"], ["--optimization-level", "3"]),
        (["-O", "3"], ["--optimization-level", "3"]),
        (["-O=3"], ["--optimization-level", "3"]),
        (["--kernel_config.x_y", "1", "m"], ["--kernel-config", "{}", "m"]),
        (["-cc.mode=3", "m"], ["-cc", "{}", "m"]),
        (["--additional-config.a.b+", "1,2"], ["--additional-config", "{}"]),
        (["./some.model", "--seed", "-1.5"], ["./some.model", "--seed", "-1.5"]),
    ],
)
def test_normalise(argv, plain):
    assert list(normalise(argv)) == plain


def test_only_what_was_given_is_in_the_result(known):
    assert light_parse([], known) == {}
    given = light_parse(["m", "-pp", "2", "--no-uvloop", "--served-model-name", "a", "b", "--enforce-eager"], known)
    assert given == {
        "model_tag": "m",
        "pipeline_parallel_size": 2,
        "uvloop": False,
        "served_model_name": ["a", "b"],
        "enforce_eager": True,
    }


@pytest.mark.parametrize(
    "argv,words",
    [
        (["--tensor-paralel-size", "2"], "did you mean --tensor-parallel-size"),
        (["--zzzzzz"], "unknown flag --zzzzzz"),
        (["--policy", "fifo"], "fill-first"),
        (["a", "b"], "unexpected argument 'b'"),
        (["--port"], "expected one argument"),
        (["--port", "http"], "invalid int value"),
        (["--dtype", "float8"], "invalid choice"),
        (["--drain-timeout", "-1"], "number of seconds"),
        (["--drain-timeout", "soon"], "number of seconds"),
        (["--drain-timeout", "inf"], "number of seconds"),
        (["--step-deadline", "0"], "greater than 0"),
        (["--on-rank-loss", "cry"], "'replay', 'fail', 'exit'"),
        (["--max-restarts", "3"], "must be like 3-in-300"),
        (["--max-restarts", "3-in-0"], "must be like 3-in-300"),
        (["--config"], "--config needs"),
        (["--config", "nowhere.yaml"], "cannot be read"),
        (["--config", "flags.txt"], ".yaml"),
    ],
)
def test_refuses_with_one_line(known, argv, words):
    with pytest.raises(ConfigError) as caught:
        light_parse(argv, known)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_a_loss_means(known):
    argv = ["--on-rank-loss", "fail", "--max-restarts", "0-in-1.5", "--step-deadline", "7", "--drain-timeout", "0"]
    assert light_parse(argv, known) == {
        "on_rank_loss": "fail",
        "max_restarts": Intensity(0, 1.5),
        "step_deadline": 7.0,
        "drain_timeout": 0.0,
    }


@pytest.mark.parametrize(
    "argv,seconds",
    [
        ([], 30.0),
        (["--drain-timeout", "0"], 0.0),
        (["--shutdown-timeout", "7"], 7.0),
        (["--drain-timeout", "7.0", "--shutdown-timeout", "7"], 7.0),
    ],
)
def test_time_to_drain(known, argv, seconds):
    assert flags.drain_s(light_parse(argv, known)) == seconds


def test_two_times_to_drain_are_refused(known):
    with pytest.raises(ConfigError, match="give one of them"):
        flags.drain_s(light_parse(["--drain-timeout", "7", "--shutdown-timeout", "8"], known))


def test_a_platform_plugin_may_bring_flags(known, monkeypatch):
    monkeypatch.setattr(flags, "entry_points", lambda group: ["a plugin"])
    assert light_parse(["--plugin-flag", "m"], known) == {"model_tag": "m"}


def test_config_file(known, tmp_path):
    path = tmp_path / "serve.yaml"
    path.write_text(
        "model: from-file\nport: 1234\npipeline_parallel_size: 2\nenforce-eager: true\nenable-lora: false\n"
        "served-model-name: [a, b]\nkernel-config: {x: 1}\n"
    )
    given = light_parse(["--config", str(path), "--port", "4321"], known)
    assert given["model"] == "from-file"
    assert given["port"] == 4321
    assert given["pipeline_parallel_size"] == 2
    assert given["enforce_eager"] is True
    assert given["enable_lora"] is False
    assert given["served_model_name"] == ["a", "b"]
    assert given["kernel_config"] == '{"x": 1}'
    assert light_parse(["mine", "--config", str(path)], known)["model_tag"] == "mine"


@pytest.mark.parametrize("text", ["- a list", "{unclosed"])
def test_damaged_config_file(known, tmp_path, text):
    path = tmp_path / "serve.yml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="--config"):
        light_parse(["--config", str(path)], known)


def test_every_flag_passes_the_light_parser(known):
    parser = light_parser(known)
    for flag in known.flags():
        for option in flag.options:
            value = flag.choices[0] if flag.choices else "1"
            argv = [option] if flag.kind in ("switch", "pair") else [option, value]
            assert flag.dest in vars(parser.parse_args(argv)), option


REAL = """
import json, sys
from async_pp.core.recovery import Intensity
from async_pp.errors import ConfigError
from async_pp.serve import catalogue, flags
def real(argv):
    try:
        return vars(flags.parse(argv))
    except ConfigError as error:
        assert "\\n" not in str(error)
        return str(error)
rejected = []
for flag in catalogue.load().flags():
    if flag.type == "other" or flag.dest in ("config", "headless", "grpc", "grpc_port", "log_config_file"):
        continue
    for option in flag.options:
        value = flag.choices[0] if flag.choices else "1"
        result = real(["m", option] if flag.kind in ("switch", "pair") else ["m", option, value])
        if isinstance(result, str):
            rejected.append((option, result))
plain = real([])
out = {
    "rejected": rejected,
    "none": [plain["model"], plain["host"], plain["uvicorn_log_level"], plain["uvloop"], plain["verbose"], plain["policy"],
             plain["drain_timeout"], plain["on_rank_loss"], plain["max_restarts"].most, plain["step_deadline"]],
    "named": real(["mine"])["model"],
    "flag": real(["--model", "mine"])["model"],
    "verbose": real(["--verbose"])["uvicorn_log_level"],
    "both": real(["--verbose", "--uvicorn_log_level", "error"])["uvicorn_log_level"],
    "bad": [real(["--nonsense"]), real(["--tool-call-parser", "x", "--enable-auto-tool-choice"]),
            real(["--enable-auto-tool-choice"]), real(["--chat-template", "/no/such.jinja"]),
            real(["--kv-transfer-config.kv_connector", "ExampleConnector"])],
}
print("RESULT" + json.dumps(out))
"""


@pytest.mark.vllm
def test_the_real_parser_accepts_every_flag_and_never_exits():
    done = subprocess.run([sys.executable, "-c", REAL], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    out = json.loads(done.stdout.rpartition("RESULT")[2])
    # What vLLM itself wants a companion flag for.
    companions = {
        "--enable-auto-tool-choice",
        "--enable-log-outputs",
        "--data-parallel-multi-port-external-lb",
        "-dpm",
    }
    assert [pair for pair in out["rejected"] if pair[0] not in companions] == []
    assert out["none"] == [None, "127.0.0.1", "warning", True, False, "balanced", 30.0, "replay", 3, None]
    assert out["named"] == out["flag"] == "mine"
    assert out["verbose"] == "info"
    assert out["both"] == "error"
    assert all(isinstance(line, str) and line for line in out["bad"])
