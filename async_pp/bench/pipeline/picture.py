"""The picture of a run: for each case the work of every stage over time, and where the stages' time went.

Drawn on a figure of its own, without pyplot: no backend is chosen and no global state of matplotlib is changed.
"""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from async_pp.bench.pipeline.measured import Measured, Round, Row
from async_pp.bench.pipeline.report import SYSTEMS, Report
from async_pp.bench.pipeline.settings import Settings

STEPS_WIDE = 12
"""Steps per stage and cohort that a timeline shows: more cannot be told apart."""

PALETTE = "tab10"
SHADES = "viridis"

Shares = Mapping[str, float]


def draw(settings: Settings, newest: Round, reports: Sequence[Report], path: Path) -> None:
    """Draw the rounds' last one, with the shares of the reports, into a file.

    One row per case: the timelines of ours and, where it was run, of vLLM, over the middle of the load's last section;
    then a bar per system. A bar on a timeline is a step on a stage, its colour says how many sequences it has, hatching
    that it has prompt tokens.
    """
    systems = {"async_pp": newest.ours, **({"vllm": newest.vllm} if newest.vllm is not None else {})}
    height_in = len(settings.cases) * (1.4 + 0.16 * settings.pp)
    figure = Figure(figsize=(6.5 * len(systems) + 3.5, height_in), layout="constrained")
    widths = [2.0] * len(systems) + [1.0]
    axes = figure.subplots(len(settings.cases), len(widths), squeeze=False, width_ratios=widths)
    for index, (case, report) in enumerate(zip(settings.cases, reports, strict=True)):
        *timelines, bars = axes[index]
        shown = {name: _window(measured[index]) for name, measured in systems.items()}
        most = max((row[3] for rows in shown.values() for stage in rows for row in stage), default=1)
        colours = ScalarMappable(Normalize(0, most), colormaps[SHADES])
        for axis, (name, rows) in zip(timelines, shown.items(), strict=True):
            _timeline(axis, rows, colours)
            axis.set_title(f"{case.title}: {name}")
        figure.colorbar(colours, ax=timelines[-1], label="sequences")
        _bars(bars, {name: _shares(report, name) for name in systems})
    figure.savefig(path)


def _window(measured: Measured) -> list[list[Row]]:
    """The steps of each stage in the middle of the last section; times in seconds after the window's begin."""
    began_s = measured.answered[-1].began_s
    rows = [[row for row in stage if row[2] and row[0] >= began_s] for stage in measured.rows]
    if not any(rows):
        return rows
    step_s = statistics.fmean(end - begin for stage in rows for begin, end, *_ in stage)
    half_s = STEPS_WIDE * len(rows) * step_s / 2
    first, last = min(stage[0][0] for stage in rows if stage), max(stage[-1][1] for stage in rows if stage)
    middle = (first + last) / 2
    low, high = max(first, middle - half_s), min(last, middle + half_s)
    return [
        [(begin - low, end - low, tokens, sequences) for begin, end, tokens, sequences in stage if low <= begin < high]
        for stage in rows
    ]


def _timeline(axis: Any, rows: Sequence[Sequence[Row]], colours: Any) -> None:
    for stage, steps in enumerate(rows):
        for hatch, some in (("", [r for r in steps if r[2] == r[3]]), ("////", [r for r in steps if r[2] > r[3]])):
            axis.broken_barh(
                [(1e3 * begin, 1e3 * (end - begin)) for begin, end, *_ in some],
                (stage - 0.4, 0.8),
                facecolors=[colours.to_rgba(row[3]) for row in some],
                edgecolor="white",
                linewidth=0.4,
                hatch=hatch,
            )
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.set_yticks(range(len(rows)))
    axis.set_ylabel("stage")
    axis.set_xlabel("ms")


def _shares(report: Report, name: str) -> Shares:
    """Where the stage time went: by cause where the engine tells, else what the ranks themselves know."""
    bubble: Shares | None = report["bubble"] if name == "async_pp" else None
    if bubble:
        return bubble
    use = report[("" if name == "async_pp" else SYSTEMS[name]) + "stage_use"]
    return {"busy": use, "not busy": 1 - use}


def _bars(axis: Any, shares: Mapping[str, Shares]) -> None:
    causes = dict.fromkeys(cause for of in shares.values() for cause in of)
    palette = {cause: colormaps[PALETTE](index) for index, cause in enumerate(causes)}
    left = dict.fromkeys(shares, 0.0)
    for cause in causes:
        widths = [100 * of.get(cause, 0.0) for of in shares.values()]
        axis.barh(list(shares), widths, left=list(left.values()), color=palette[cause], label=cause)
        left = {name: so_far + width for (name, so_far), width in zip(left.items(), widths, strict=True)}
    axis.invert_yaxis()
    axis.set_xlim(0, 100)
    axis.set_title("% of stage time")
    axis.legend(fontsize="x-small", ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.15))
