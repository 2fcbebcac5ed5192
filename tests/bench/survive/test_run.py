"""The real thing, small: the worker's faults, and one short run of everything on the tiny model."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from async_pp.errors import BadFrame, WireError
from async_pp.wire.frames import Direction, Opener, Sealer
from async_pp.wire.limits import Limits
from async_pp.wire.messages import Bye


@pytest.mark.vllm
@pytest.mark.timeout(120)
def test_the_next_frame_is_rubbish_of_the_same_size_and_the_one_after_is_sound():
    from async_pp.bench.survive.worker import _garble

    how = {"epoch": 0, "direction": Direction.FROM_RANK, "rank": 0, "limits": Limits()}
    sealer, opener = Sealer(bytes(32), **how), Opener(bytes(32), **how)
    sound = sealer.seal(Bye(reason="first"))
    _garble(signal.SIGUSR2, None)
    rubbish = sealer.seal(Bye(reason="other"))
    assert [len(bytes(part)) for part in rubbish] == [len(bytes(part)) for part in sound]
    opener.open(sound)
    with pytest.raises(WireError):
        opener.open(rubbish)
    with pytest.raises(BadFrame, match="out of place"):  # sealed as it should be, but one is missing before it
        opener.open(sealer.seal(Bye(reason="third")))


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_streams_survive_kills_and_random_faults():
    with tempfile.TemporaryDirectory() as folder:  # sockets need a short path
        survive(Path(folder))


def survive(folder):
    file = folder / "figures.json"
    small = ("--model", "tiny", "--against", "none", "--streams", "6", "--kills", "1", "--starts", "1")
    much = ("--minutes", "0.7", "--every", "6", "--json", str(file), "--log", str(folder / "log"))
    ended = subprocess.run(
        [sys.executable, "-m", "async_pp.bench", "survive", *small, *much],
        env={**os.environ, "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    figures = json.loads(file.read_text())
    restarts, faults = figures["restarts"], figures["random_faults"]
    assert [kill["rank"] for kill in restarts["kills"]] == [0, 1]
    assert restarts["account"]["completed"] == restarts["account"]["sent"] > 12
    assert restarts["ratio_to_own_cold_start"] > 0 and restarts["ratio_to_vllm_cold_start"] is None
    account = faults["account"]
    assert account["sent"] == account["completed"] + account["failed"] and account["completed"]
    assert any(fault["sent"] for fault in faults["faults"])
    assert "serving on" in (folder / "log").read_text()
    assert not [path for path in folder.iterdir() if path.name.startswith("bench-")]
