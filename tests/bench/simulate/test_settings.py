"""The command line: what is refused before vLLM is imported, and what traces say."""

import subprocess
import sys

import pytest

from async_pp.bench.__main__ import main, parser
from async_pp.bench.simulate import settings
from async_pp.bench.simulate.requests import Arrival, drawn, mix
from async_pp.bench.simulate.stages import StageCost

TRACE = "arrival_s,input_tokens,output_tokens,note\n12.5,8,2,b\n10,4,3,a\n11,1,1,c\n"


def parsed(*argv):
    return settings.check(parser().parse_args(["simulate", *argv]))


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    return path


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["--pp", "0"], "--pp"),
        (["--pp", "4,x"], "--pp"),
        (["--stage", "fast"], "--stage"),
        (["--stage", "1,2,3,4,5"], "--stage"),
        (["--stage", "-1"], "--stage"),
        (["--stage", "0,0,0,1"], "--stage"),
        (["--stage", "1", "--stage", "2"], "--pp 2"),
        (["--slow", "4=2"], "0 to 3"),
        (["--slow", "0=nan"], "--slow"),
        (["--hop", "-1"], "--hop"),
        (["--host", "inf"], "--host"),
        (["--rate", "0"], "--rate"),
        (["--rate", "1", "--saturated"], "--saturated"),
        (["--requests", "0"], "--requests"),
        (["--input-len", "9-3"], "--input-len"),
        (["--output-len", "0"], "--output-len"),
        (["--policy", "fast"], "--policy"),
        (["--trace", "/no/such/trace"], "/no/such/trace"),
        (["--trace", "x", "--rate", "1"], "exclude"),
        (["--block-size", "0"], "--block-size"),
        (["--json", "/"], "folder"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_1(argv, word, capsys):
    assert main(["simulate", *argv]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ") and err.count("\n") == 1 and word in err


@pytest.mark.parametrize(
    "text",
    [
        "",
        "arrival_s,input_tokens,output_tokens\n",
        "arrival_s,input_tokens\n1,2\n",
        TRACE + "13,0,1,d\n",
        TRACE + "x,1,1,d\n",
    ],
)
def test_a_bad_trace_is_one_line(text, tmp_path, capsys):
    path = tmp_path / "trace.csv"
    path.write_text(text)
    assert main(["simulate", "--trace", str(path)]) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1 and "trace.csv" in err


def test_a_trace_is_sorted_and_begins_at_zero(trace, tmp_path):
    expected = (Arrival(0, 4, 3), Arrival(1, 1, 1), Arrival(2.5, 8, 2))
    chosen = parsed("--trace", str(trace))
    assert chosen.arrivals == expected and not chosen.saturated
    assert parsed("--trace", str(trace), "--requests", "2").arrivals == expected[:2]
    lines = tmp_path / "trace.jsonl"
    lines.write_text('{"arrival_s": 3, "input_tokens": 4, "output_tokens": 3}\n')
    assert parsed("--trace", str(lines), "--saturated").arrivals == expected[:1]


def test_stages_and_limits_by_pipeline_size():
    chosen = parsed("--pp", "2,4", "--stage", "4,1", "--slow", "1=2", "--input-len", "10", "--output-len", "7")
    assert chosen.saturated and len(chosen.arrivals) == settings.REQUESTS
    assert chosen.costs(2) == (StageCost(0.004, 0.001), StageCost(0.008, 0.002))
    assert chosen.limits(4) == {
        "max_num_seqs": 32,
        "max_num_batched_tokens": settings.TOKENS_PER_STEP,
        "max_model_len": 17,
        "num_gpu_blocks": 1 + 2 * 32,
        "block_size": 16,
    }
    unequal = parsed("--pp", "2", "--stage", "1", "--stage", "3")
    assert unequal.costs(2) == (StageCost(0.001), StageCost(0.003))


def test_requests_are_drawn_from_the_seed_at_the_rate():
    one, same, other = (drawn(2000, 5.0, (16, 512), (8, 128), seed) for seed in (1, 1, 2))
    assert one == same != other
    assert one[0].arrival_s == 0 and one[-1].arrival_s == pytest.approx(400, rel=0.1)
    assert {min(a.input_tokens for a in one), max(a.input_tokens for a in one)} <= set(range(16, 513))
    assert {a.arrival_s for a in drawn(3, None, (1, 1), (1, 1), 0)} == {0}


def test_the_average_request():
    average = mix([Arrival(0, 4, 3), Arrival(0, 2, 1)])
    assert (average.output_tokens, average.tokens) == (2, 4)
    assert average.attended == (4 * 4 + 5 + 6 + 2 * 2) / 2


def test_help_and_checks_import_nothing_heavy():
    code = (
        "import sys; from async_pp.bench.__main__ import main; code = main(['simulate', '--pp', '0']);"
        "sys.exit(code != 1 or bool({'vllm', 'torch', 'psutil'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)
