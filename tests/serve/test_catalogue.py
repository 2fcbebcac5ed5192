"""The catalogue of vLLM's flags: it equals the live parser, and its words are those of vLLM's source."""

import json
import subprocess
import sys

import pytest

from async_pp.serve import catalogue
from async_pp.serve.catalogue import Catalogue, Words

LIVE = """
import argparse, json, sys
sys.argv = ["x", "--help"]  # makes vLLM fill in its help texts
from async_pp.serve.catalogue import from_live_parser
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
words = {}
for group in make_arg_parser(FlexibleArgumentParser())._action_groups:
    for action in group._group_actions:
        words[action.dest] = action.help or ""
print("RESULT" + json.dumps([from_live_parser().dump(), words]))
"""


def test_dump_and_parse_are_inverse():
    known = catalogue.load()
    assert Catalogue.parse(known.dump()) == known


def test_loads_without_importing_vllm():
    assert catalogue.load().version
    assert len(list(catalogue.load().flags())) > 250
    code = "import sys; from async_pp.serve import catalogue; catalogue.load(); sys.exit('vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_another_version_is_kept_in_the_cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    shipped = catalogue.load()
    monkeypatch.setattr(catalogue, "installed", lambda: "0.99.0")
    asked = []

    def live():
        asked.append(1)
        return Catalogue("0.99.0", shipped.groups)

    monkeypatch.setattr(catalogue, "from_live_parser", live)
    assert catalogue.load() == catalogue.load()
    assert len(asked) == 1
    (tmp_path / "async_pp" / "flags-0.99.0.json").write_text("{damaged")
    assert catalogue.load().version == "0.99.0"
    assert len(asked) == 2


@pytest.mark.vllm
def test_equals_the_live_parser_and_tells_what_vllm_tells():
    done = subprocess.run([sys.executable, "-c", LIVE], capture_output=True, text=True, check=True)
    dumped, theirs = json.loads(done.stdout.rpartition("RESULT")[2])
    live, known = Catalogue.parse(dumped), catalogue.load()
    assert live.version == known.version
    assert known.groups == live.groups, "run `python -m async_pp.serve.catalogue > async_pp/serve/vllm_flags.json`"
    words = Words()
    silent = []
    for group in known.groups:
        for flag in group.flags:
            told = theirs[flag.dest].partition("\n\nAPI docs:")[0].partition("\n\nShould either")[0].strip()
            ours = words.flag(group.title, flag)
            if told and not ours:
                silent.append(flag.dest)
    assert silent == ["log_config_file"]  # its text is computed; a deprecated flag
