"""`bench survive`: what is refused before anything starts."""

import pytest

from async_pp.bench.__main__ import main, parser
from async_pp.bench.survive import settings


def parsed(*argv):
    return settings.check(parser().parse_args(["survive", *argv]))


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["--pp", "0"], "--pp"),
        (["--streams", "0"], "--streams"),
        (["--kills", "-1"], "--kills"),
        (["--minutes", "nan"], "--minutes"),
        (["--kills", "0", "--minutes", "0"], "nothing to do"),
        (["--every", "0"], "--every"),
        (["--faults", "die,vanish"], "die,freeze,garbage,raise"),
        (["--faults", "die,die"], "--faults"),
        (["--faults", ""], "--faults"),
        (["--model", "/no/such/model"], "/no/such/model"),
        (["--model", "tiny", "--pp", "9"], "8 layers"),
        (["--log", "/no/such/folder/file"], "--log"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_1(argv, word, capsys):
    assert main(["survive", *argv]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ") and err.count("\n") == 1 and word in err


def test_defaults_and_choices():
    chosen = parsed()
    assert (chosen.pp, chosen.streams, chosen.minutes, chosen.against_vllm) == (2, 64, 10.0, True)
    assert chosen.faults == ("die", "freeze", "garbage", "raise")
    assert parsed("--faults", "raise,die", "--against", "none").faults == ("die", "raise")
