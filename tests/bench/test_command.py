"""The command line: what is refused before anything starts, and what needs no heavy import."""

import json
import subprocess
import sys

import pytest

from async_pp.bench import settings
from async_pp.bench.__main__ import main, parser
from async_pp.errors import ConfigError


def parsed(*argv):
    return settings.check(parser().parse_args(["serve", *argv]))


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        ([], "COMMAND"),
        (["engine"], "engine"),
        (["serve", "--bogus"], "--bogus"),
        (["serve", "--against", "sglang"], "sglang"),
        (["serve", "--pp", "0"], "--pp"),
        (["serve", "--pp", "two"], "--pp"),
        (["serve", "--rounds", "0"], "--rounds"),
        (["serve", "--input-len", "0"], "--input-len"),
        (["serve", "--output-len", "1"], "--output-len"),
        (["serve", "--input-len", "2000", "--output-len", "100"], "2100"),
        (["serve", "--concurrency", "1,x"], "1,x"),
        (["serve", "--concurrency", "0"], "--concurrency"),
        (["serve", "--concurrency", "8,8"], "8,8"),
        (["serve", "--requests-per-level", "4"], "32"),
        (["serve", "--model", "/no/such/model"], "/no/such/model"),
        (["serve", "--model", "tiny", "--pp", "9"], "8 layers"),
        (["serve", "--json", "/no/such/folder/file"], "/no/such/folder/file"),
        (["serve", "--json", "/"], "folder"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_1(argv, word, capsys):
    assert main(argv) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ") and err.count("\n") == 1 and word in err


@pytest.mark.parametrize("package", ["psutil", "vllm"])
def test_a_missing_package_is_named_with_its_extra(package, monkeypatch):
    found = settings.importlib.util.find_spec
    monkeypatch.setattr(settings.importlib.util, "find_spec", lambda name: None if name == package else found(name))
    with pytest.raises(ConfigError, match=rf"{package} is needed: install async_pp\["):
        parsed("--model", "tiny")


def test_a_broken_config_is_told(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        parsed("--model", str(tmp_path)).folder()


def test_a_folder_is_taken_as_it_is(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 2}))
    assert parsed("--model", str(tmp_path)).folder() == tmp_path


def test_defaults():
    chosen = parsed()
    assert (chosen.model, chosen.concurrency, chosen.against) == ("default", (1, 8, 32), "vllm")
    assert (chosen.input_len, chosen.output_len, chosen.rounds, chosen.json) == (128, 64, 1, None)
    assert chosen.pipelines == (2, 1)
    assert [chosen.requests_at(level) for level in chosen.concurrency] == [4, 24, 96]


def test_choices():
    chosen = parsed("--against", "none", "--no-reference", "--requests-per-level", "40")
    assert chosen.against is None
    assert chosen.pipelines == (2,)
    assert chosen.requests_at(8) == 40
    assert parsed("--pp", "1").pipelines == (1,)


def test_help_and_checks_import_nothing_heavy():
    code = (
        "import sys; from async_pp.bench.__main__ import main; code = main(['serve', '--pp', '0']);"
        "sys.exit(code != 1 or bool({'vllm', 'torch', 'psutil'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)
    text = subprocess.run(
        [sys.executable, "-m", "async_pp.bench", "serve", "--help"],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout
    assert "--against" in text and "--concurrency" in text
