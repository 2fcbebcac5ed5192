"""--help answers without vLLM, about everything."""

import subprocess
import sys

import pytest

from async_pp.serve import catalogue, helptext

NO_VLLM = """
import sys
from async_pp.serve.program import main
code = main(sys.argv[1:])
loaded = [name for name in ("vllm", "torch", "transformers") if name in sys.modules]
sys.exit(f"loaded {loaded}" if loaded else code)
"""


@pytest.mark.parametrize(
    "argv,topic",
    [
        ([], None),
        (["model", "--port", "1"], None),
        (["-h"], ""),
        (["m", "--help"], ""),
        (["--help=all"], "all"),
        (["--help=ModelConfig"], "ModelConfig"),
    ],
)
def test_asked_for(argv, topic):
    assert helptext.asked_for(argv) == topic


@pytest.mark.parametrize("word", ["--help", "--help=all", "--help=async-pp", "-h"])
def test_help_does_not_import_vllm(word):
    done = subprocess.run([sys.executable, "-c", NO_VLLM, word], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--no-uvloop" in done.stdout
    assert done.stderr == ""


def test_overview_names_every_group_and_our_flags():
    overview = helptext.text("", width=100)
    for group in catalogue.load().groups:
        assert group.title in overview
    assert "--verbose" in overview
    assert "127.0.0.1" in overview


def test_all_names_every_flag():
    everything = helptext.text("all", width=100)
    for flag in catalogue.load().flags():
        for option in flag.options:
            assert option in everything


def test_changed_defaults_are_shown():
    assert "(default: 127.0.0.1)" in helptext.text("--host", width=200)
    assert "(default: warning)" in helptext.text("uvicorn_log_level", width=200)


@pytest.mark.parametrize("topic", ["ModelConfig", "modelconfig", "pipeline", "async-pp", "max_model_len"])
def test_topics(topic):
    assert "--" in helptext.text(topic, width=80)


def test_unknown_topic_says_where_to_look():
    assert "--help=all" in helptext.text("nonsense", width=80)


@pytest.mark.parametrize("width", [60, 80, 160])
def test_fits_the_terminal(width):
    long_words = {line for line in helptext.text("all", width=width).splitlines() if len(line) > width}
    assert long_words == set()
