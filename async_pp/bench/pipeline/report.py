"""What a run found, for a program and for a person: one object per case, and the table."""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from async_pp.bench.pipeline.connectors import NONE
from async_pp.bench.pipeline.loads import Load
from async_pp.bench.pipeline.measured import Figures, Measured, Round, figures, goodput
from async_pp.bench.pipeline.settings import Settings

SYSTEMS = {"ours": "", "vllm": "vllm_", "bare_pipe": "bare_pipe_", "formula": "formula_"}
"""Field of a round, and what the names of its figures begin with."""

ENGINES = ("ours", "vllm")
"""Those that can have a connector."""

LONG = ("long_ttft_ms_p50", "long_alone_ttft_ms")
"""Figures that only loads with long prompts have."""

COUNTS = ("empty_steps", "sequences_per_step", "stage_use", "host_ms_p50", "host_sequences")
"""Figures that only ranks of an engine have."""

_DIGITS = 3

Report = dict[str, Any]
"""One case; medians over the rounds, null where a system was not run or has no such figure."""


def rows(settings: Settings, rounds: Sequence[Round]) -> list[Report]:
    """One object per load and connector. Names of figures: see `measured.Figures`; ours have no prefix.

    `bubble` is where our stages' time went, shares by cause. Loads that stay below the limit have `goodput` too:
    output tokens per second of the requests whose own mean ITL is at most twice `ideal_period_ms`, the mean ITL of the
    bare pipe under the same arrivals. `ratio_to_none` is tokens per second by that of the same round without a
    connector, null where that was not measured.
    """
    by_round = [_rows_of(settings, round_) for round_ in rounds]
    return [
        {"load": case.load.name, "connector": case.connector.name, "pp": settings.pp, **_medians(each)}
        for case, each in zip(settings.cases, zip(*by_round, strict=True), strict=True)
    ]


def _rows_of(settings: Settings, round_: Round) -> list[Report]:
    cases = settings.cases
    found = [_row(case.load, {name: _of(round_, name, index) for name in SYSTEMS}) for index, case in enumerate(cases)]
    pairs = list(zip(cases, found, strict=True))
    without = {case.load.name: row for case, row in pairs if case.connector.late_steps is None}
    for case, row in pairs:
        for prefix in (SYSTEMS[engine] for engine in ENGINES):
            name = prefix + "tokens_per_s"
            own, none = row[name], without.get(case.load.name, {}).get(name)
            row[prefix + "ratio_to_none"] = None if own is None or none is None else own / none
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
    """A list of objects, one per load and connector."""
    return json.dumps(reports, indent=2) + "\n"


_COLUMNS: Mapping[str, tuple[str, str]] = {
    "tokens/s": ("tokens_per_s", ",.1f"),
    "of pipe": ("tokens_per_s", ".0%"),
    "of none": ("ratio_to_none", ".1%"),
    "TTFT p50 ms": ("ttft_ms_p50", ",.1f"),
    "ITL p99 ms": ("itl_ms_p99", ",.1f"),
    "seq/step": ("sequences_per_step", ".2f"),
    "empty": ("empty_steps", ",.0f"),
    "stage use": ("stage_use", ".0%"),
    "host ms": ("host_ms_p50", ",.2f"),
    "goodput": ("goodput", ",.1f"),
    "long TTFT": ("long_ttft_ms_p50", ",.1f"),
}


def table(reports: Sequence[Report]) -> str:
    """One line per load, connector and system.

    "of pipe" is the share of what the bare pipe gave in the same run, "of none" of what the system itself gave without
    a connector.
    """
    titles = ["load", "connector", "system", *_COLUMNS]
    lines: list[list[str]] = []
    for number, report in enumerate(reports):
        first = not number or report["load"] != reports[number - 1]["load"]
        systems = [name for name in (SYSTEMS if first else ENGINES) if report[SYSTEMS[name] + "tokens_per_s"]]
        for index, name in enumerate(systems):
            load = report["load"] if first and not index else ""
            connector = report["connector"] if name in ENGINES and _connected(reports) else ""
            system = name.replace("_", " ").replace("ours", "async_pp")
            lines.append([load, connector, system, *_cells(report, name)])
    empty = [index for index in range(1, len(titles)) if not any(line[index] for line in lines)]
    cells = [[cell for index, cell in enumerate(line) if index not in empty] for line in (titles, *lines)]
    texts = 3 - (1 in empty)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "".join(
        "  ".join(f"{cell:{'<' if index < texts else '>'}{widths[index]}}" for index, cell in enumerate(line)).rstrip()
        + "\n"
        for line in cells
    )


def _connected(reports: Sequence[Report]) -> bool:
    return any(report["connector"] != NONE.name for report in reports)


def _cells(report: Report, system: str) -> list[str]:
    cells = []
    for title, (figure, shape) in _COLUMNS.items():
        value = report.get(SYSTEMS[system] + figure)
        if title == "of pipe" and value is not None:
            value /= report["bare_pipe_tokens_per_s"]
        if title == "of none" and report["connector"] == NONE.name:
            value = None
        cells.append("" if value is None else format(value, shape))
    return cells
