"""The command line of `bench pipeline`: what is refused before anything starts, and what needs no heavy import."""

import subprocess
import sys

import pytest

from async_pp.bench.__main__ import main, parser
from async_pp.bench.pipeline import settings
from async_pp.errors import ConfigError
from async_pp.ranks.sleeping_runner import StageTime


def parsed(*argv):
    return settings.check(parser().parse_args(["pipeline", *argv]))


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["--pp", "0"], "--pp"),
        (["--pp", "257"], "256"),
        (["--rounds", "0"], "--rounds"),
        (["--rate", "0"], "--rate"),
        (["--rate", "nan"], "--rate"),
        (["--duration", "inf"], "--duration"),
        (["--stage", "4,1"], "4,1"),
        (["--stage", "4,x,1"], "4,x,1"),
        (["--stage", "0,0,0"], "0,0,0"),
        (["--stage=-4,1,1"], "-4"),
        (["--pp", "3", "--stage", "1,1,1;2,1,1"], "3 times"),
        (["--load", "burst-0"], "burst-0"),
        (["--load", "burst"], "burst-N"),
        (["--load", "flood"], "flood"),
        (["--load", "all", "--load", "poisson"], "twice"),
        (["--against", "sglang"], "sglang"),
        (["--policy", "even"], "even"),
        (["--connector", "nixl"], "nixl"),
        (["--connector", "late-0"], "late-0"),
        (["--connector", "none,late-2,late-02"], "once"),
        (["--pp", "1", "--connector", "late-2"], "--pp 2"),
        (["--kv-role", "kv_none"], "kv_none"),
        (["--json", "/"], "--json"),
        (["--picture", "/no/such/folder/p.png"], "--picture"),
        (["--picture", "p.jpg"], ".png"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_1(argv, word, capsys):
    assert main(["pipeline", *argv]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ") and err.count("\n") == 1 and word in err


@pytest.mark.parametrize(("package", "argv"), [("vllm", []), ("psutil", []), ("matplotlib", ["--picture", "p.png"])])
def test_a_missing_package_is_named_with_its_extra(package, argv, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    found = settings.importlib.util.find_spec
    monkeypatch.setattr(settings.importlib.util, "find_spec", lambda name: None if name == package else found(name))
    with pytest.raises(ConfigError, match=rf"{package} is needed: install async_pp\["):
        parsed(*argv)


def test_defaults():
    chosen = parsed()
    assert chosen.stages == (StageTime(0.004, 0.001, 0.0001),) * 8
    assert [load.name for load in chosen.loads] == ["burst-32"]
    assert [case.title for case in chosen.cases] == ["burst-32"]
    assert (chosen.against_vllm, chosen.policy, chosen.rounds, chosen.json, chosen.picture) == (
        True,
        "balanced",
        1,
        None,
        None,
    )


@pytest.mark.parametrize("argv", [["--stage", "1,0,0;2,0,0"], ["--stage", "1,0,0", "--stage", "2,0,0"]])
def test_stages_may_be_unequal(argv):
    assert parsed("--pp", "2", *argv).stages == (StageTime(0.001), StageTime(0.002))


def test_every_load_is_measured_with_every_connector():
    chosen = parsed("--pp", "2", "--load", "burst-1", "--load", "burst-2", "--connector", "none,late-3")
    assert [case.title for case in chosen.cases] == ["burst-1", "burst-1, late-3", "burst-2", "burst-2, late-3"]


def test_help_and_checks_import_nothing_heavy():
    code = (
        "import sys; from async_pp.bench.__main__ import main; code = main(['pipeline', '--load', 'burst-0']);"
        "sys.exit(code != 1 or bool({'vllm', 'torch', 'psutil', 'matplotlib'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)
