"""What a run found, for a program and for a person: one object per load, and the table."""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from async_pp.bench.pipeline.loads import Load
from async_pp.bench.pipeline.measured import Figures, Measured, Round, figures, goodput
from async_pp.bench.pipeline.settings import Settings

SYSTEMS = {"ours": "", "vllm": "vllm_", "bare_pipe": "bare_pipe_", "formula": "formula_"}
"""Field of a round, and what the names of its figures begin with."""

LONG = ("long_ttft_ms_p50", "long_alone_ttft_ms")
"""Figures that only loads with long prompts have."""

COUNTS = ("empty_steps", "sequences_per_step", "stage_use")
"""Figures that only ranks of an engine have."""

_DIGITS = 3

Report = dict[str, Any]
"""One load; medians over the rounds, null where a system was not run or has no such figure."""


def rows(settings: Settings, rounds: Sequence[Round]) -> list[Report]:
    """One object per load. Names of figures: see `measured.Figures`; ours have no prefix.

    `bubble` is where our stages' time went, shares by cause. Loads that stay below the limit have `goodput` too:
    output tokens per second of the requests whose own mean ITL is at most twice `ideal_period_ms`, the mean ITL of the
    bare pipe under the same arrivals.
    """
    found = []
    for index, load in enumerate(settings.loads):
        each = [_row(load, {name: _of(round_, name, index) for name in SYSTEMS}) for round_ in rounds]
        found.append({"load": load.name, "pp": settings.pp, **_medians(each)})
    return found


def _of(round_: Round, system: str, index: int) -> Measured | None:
    all_: list[Measured] | None = getattr(round_, system)
    return None if all_ is None else all_[index]


def _row(load: Load, measured: Mapping[str, Measured | None]) -> Report:
    known = {name: figures(load.sections, one) if one is not None else None for name, one in measured.items()}
    has_long = any(arrival.kind == "long" for section in load.sections for arrival in section)
    row: Report = {}
    for figure in (field.name for field in fields(Figures)):
        for name, prefix in SYSTEMS.items():
            if (figure in LONG and not has_long) or (figure in COUNTS and name in ("bare_pipe", "formula")):
                continue
            of = known[name]
            row[prefix + figure] = None if of is None else asdict(of)[figure]
    ours, pipe = measured["ours"], known["bare_pipe"]
    row["bubble"] = None if ours is None else ours.bubble
    if load.paced and pipe is not None and pipe.itl_ms_mean is not None:
        row["ideal_period_ms"] = pipe.itl_ms_mean
        for name, prefix in SYSTEMS.items():
            one = measured[name]
            row[prefix + "goodput"] = None if one is None else goodput(load.sections, one, pipe.itl_ms_mean / 1e3)
    return row


def _medians(each: Sequence[Report]) -> Report:
    return {name: _median([row[name] for row in each]) for name in each[0]}


def _median(values: Sequence[Any]) -> Any:
    if any(value is None for value in values):
        return None
    if isinstance(values[0], dict):
        return _medians(values)
    return round(statistics.median(values), _DIGITS)


def as_json(reports: Sequence[Report]) -> str:
    """A list of objects, one per load."""
    return json.dumps(reports, indent=2) + "\n"


_COLUMNS: Mapping[str, tuple[str, str]] = {
    "tokens/s": ("tokens_per_s", ",.1f"),
    "of pipe": ("tokens_per_s", ".0%"),
    "TTFT p50 ms": ("ttft_ms_p50", ",.1f"),
    "ITL p99 ms": ("itl_ms_p99", ",.1f"),
    "seq/step": ("sequences_per_step", ".2f"),
    "empty": ("empty_steps", ",.0f"),
    "stage use": ("stage_use", ".0%"),
    "goodput": ("goodput", ",.1f"),
    "long TTFT": ("long_ttft_ms_p50", ",.1f"),
}


def table(reports: Sequence[Report]) -> str:
    """One line per load and system. "of pipe" is the share of what the bare pipe gave in the same run."""
    titles = ["load", "system", *_COLUMNS]
    lines = [
        [report["load"] if not index else "", name.replace("_", " ").replace("ours", "async_pp"), *_cells(report, name)]
        for report in reports
        for index, name in enumerate(name for name, prefix in SYSTEMS.items() if report[prefix + "tokens_per_s"])
    ]
    empty = [index for index in range(2, len(titles)) if not any(line[index] for line in lines)]
    cells = [[cell for index, cell in enumerate(line) if index not in empty] for line in (titles, *lines)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "".join(
        "  ".join(f"{cell:{'<' if index < 2 else '>'}{widths[index]}}" for index, cell in enumerate(line)).rstrip()
        + "\n"
        for line in cells
    )


def _cells(report: Report, system: str) -> list[str]:
    cells = []
    for title, (figure, shape) in _COLUMNS.items():
        value = report.get(SYSTEMS[system] + figure)
        if title == "of pipe" and value is not None:
            value /= report["bare_pipe_tokens_per_s"]
        cells.append("" if value is None else format(value, shape))
    return cells
