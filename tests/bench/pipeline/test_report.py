"""Figures, rows and the table, from answers made by hand."""

import json

import pytest

from async_pp.bench.__main__ import parser
from async_pp.bench.pipeline import report
from async_pp.bench.pipeline.loads import Arrival, Load
from async_pp.bench.pipeline.measured import Answered, Measured, Round, figures, goodput, percentile
from async_pp.bench.pipeline.settings import check

SECTIONS = (
    (Arrival(0.0, 4000, 2, "long alone"),),
    (Arrival(0.0, 4000, 2, "long"), Arrival(1.0, 16, 3, "short")),
)
ROWS = [
    [(10.0, 11.0, 512, 1), (12.0, 13.0, 3, 3), (14.0, 14.0, 0, 0)],
    [(11.0, 12.0, 512, 1), (13.0, 14.0, 3, 3), (14.0, 14.0, 0, 0)],
]
ANSWERS = [Answered(10.0, [[3.0, 4.0]]), Answered(20.0, [[5.0, 6.0], [3.0, 4.0, 6.0]])]


def test_figures():
    found = figures(SECTIONS, Measured(ANSWERS, ROWS))
    assert found.tokens_per_s == pytest.approx(7 / 10)
    assert found.ttft_ms_p50 == pytest.approx(2000)
    assert (found.itl_ms_p99, found.itl_ms_mean) == (2000, 1250)
    assert (found.long_ttft_ms_p50, found.long_alone_ttft_ms) == (5000, 3000)
    assert (found.empty_steps, found.sequences_per_step, found.stage_use) == (1, 2, 0.2)


def test_what_was_not_counted_is_none():
    found = figures([(Arrival(0.0, 1, 1),)], Measured([Answered(0.0, [[1.0]])]))
    assert (found.itl_ms_p99, found.itl_ms_mean, found.empty_steps, found.stage_use) == (None,) * 4


def test_goodput_counts_requests_by_their_own_mean():
    assert goodput(SECTIONS, Measured(ANSWERS), 0.5) == pytest.approx(4 / 10)
    assert goodput(SECTIONS, Measured(ANSWERS), 0.75) == pytest.approx(7 / 10)


def test_percentile_is_the_nearest_rank():
    assert percentile(range(1, 101), 0.99) == 99
    assert percentile([3, 1], 0.99) == 3
    assert percentile([3, 1], 0.5) == 1


def made(rounds, *, vllm=True, paced=True, bubble=None, connectors="none"):
    argv = ["pipeline", "--pp", "2", "--against", "vllm" if vllm else "none", "--connector", connectors]
    settings = check(parser().parse_args(argv))
    load = Load("mixed", SECTIONS, paced=paced)
    object.__setattr__(settings, "loads", (load,))
    of = [
        Round(
            [_slower(case, gap, bubble) for case in range(len(settings.cases))],
            [Measured(ANSWERS, ROWS)] * len(settings.cases) if vllm else None,
            [Measured(ANSWERS)] * len(settings.cases),
            [Measured(ANSWERS)] * len(settings.cases),
        )
        for gap in rounds
    ]
    return settings, report.rows(settings, of)


def _slower(by_s, gap, bubble):
    return Measured([Answered(0.0, [[1.0, 1.0 + gap + by_s]]), ANSWERS[1]], ROWS, bubble)


def test_rows_are_medians_and_null_where_nothing_was_run():
    _, (row,) = made([1.0, 4.0, 2.0], vllm=False, bubble={"busy": 0.25, "no_work": 0.75})
    assert list(row)[:7] == [
        "load",
        "connector",
        "pp",
        "tokens_per_s",
        "vllm_tokens_per_s",
        "bare_pipe_tokens_per_s",
        "formula_tokens_per_s",
    ]
    assert (row["load"], row["pp"]) == ("mixed", 2)
    assert row["tokens_per_s"] == pytest.approx(7 / 9, abs=1e-3)
    assert row["vllm_tokens_per_s"] is None and row["vllm_empty_steps"] is None
    assert row["bubble"] == {"busy": 0.25, "no_work": 0.75}
    assert (row["ideal_period_ms"], row["bare_pipe_goodput"], row["vllm_goodput"]) == (1250, 0.7, None)
    assert json.loads(report.as_json([row])) == [row]


def test_ratios_are_to_the_same_round_without_a_connector():
    _, rows = made([1.0, 4.0, 2.0], connectors="none,late-1")
    assert [(row["load"], row["connector"]) for row in rows] == [("mixed", "none"), ("mixed", "late-1")]
    # The section that differs takes 2, 5 and 3 s without and a second more with it, the other one 6 s.
    assert [row["ratio_to_none"] for row in rows] == [1, pytest.approx(9 / 10)]
    assert [row["vllm_ratio_to_none"] for row in rows] == [1, 1]
    _, (row,) = made([1.0], connectors="late-1", vllm=False)
    assert (row["ratio_to_none"], row["vllm_ratio_to_none"]) == (None, None)


def test_the_table_has_a_line_for_each_connector():
    _, rows = made([1.0], connectors="none,late-1")
    title, *lines = report.table(rows).splitlines()
    assert "connector" in title and "of none" in title
    assert [line.split()[:2] for line in lines[:2]] == [["mixed", "none"], ["none", "vllm"]]
    assert [line.split()[:2] for line in lines[4:]] == [["late-1", "async_pp"], ["late-1", "vllm"]]
    assert "88.9%" in lines[4] and "%" not in lines[0].partition("of none")[2]


def test_goodput_is_of_paced_loads_only():
    _, (row,) = made([1.0], paced=False)
    assert not any("goodput" in name for name in row)


def test_the_table_has_a_line_per_system_and_no_empty_column():
    _, rows = made([1.0], vllm=False)
    title, *lines = report.table(rows).splitlines()
    assert [line.removeprefix("mixed").split("  ")[0].strip() or line.split()[0] for line in lines]
    assert [word in title for word in ("of pipe", "long TTFT", "goodput", "seq/step")] == [True] * 4
    assert "connector" not in title and "of none" not in title
    assert [name for line in lines for name in ("async_pp", "vllm", "bare pipe", "formula") if name in line] == [
        "async_pp",
        "bare pipe",
        "formula",
    ]
    _, rows = made([1.0], paced=False)
    assert "goodput" not in report.table(rows)


@pytest.mark.usefixtures("fonts_are_open")
@pytest.mark.parametrize("bubble", [None, {"busy": 0.25, "fill_drain": 0.5, "host": 0.25}])
def test_the_picture_is_drawn(tmp_path, bubble):
    from async_pp.bench.pipeline import picture

    settings, rows = made([1.0], bubble=bubble)
    round_ = Round([Measured(ANSWERS, _later(ROWS))], [Measured(ANSWERS, _later(ROWS))], [], [])
    picture.draw(settings, round_, rows, tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def _later(rows):
    """The rows in the last section."""
    return [[(begin + 10, end + 10, *of) for begin, end, *of in stage] for stage in rows]
