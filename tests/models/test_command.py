"""`python -m async_pp.models`: the folder on stdout, everything else on stderr, and one line on bad input."""

import io
from pathlib import Path

import pytest

from async_pp.models.__main__ import main
from async_pp.models.progress import StderrProgress


def test_prints_only_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tiny", "--layers", "2", "--cache-dir", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert out.strip() == str(tmp_path / "models" / "tiny-2-layers")
    assert "making a random model" in err
    assert main(["tiny", "--layers", "2", "--cache-dir", str(tmp_path), "--verify"]) == 0
    assert capsys.readouterr().err == ""


def test_bad_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tiny", "--layers", "0", "--cache-dir", str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_bar_on_a_terminal_only() -> None:
    terminal, file = _Terminal(), io.StringIO()
    for stream in (terminal, file):
        progress = StderrProgress(stream)
        progress.stage("one")
        progress.update(1, 2)
        progress.stage("two")
    assert "50%" in terminal.getvalue()
    assert "%" not in file.getvalue()
    assert StderrProgress(terminal).terminal() is terminal
    assert StderrProgress(file).terminal() is None
