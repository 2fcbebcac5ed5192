"""Rows of results: medians over rounds, JSON, and the table for a person."""

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields

_DIGITS = 3


@dataclass(frozen=True)
class Row:
    """One system at one pipeline size and concurrency. The fields are the keys of the JSON.

    Attributes:
        system: "async_pp" or "vllm".
        pp: pipeline size.
        concurrency: requests in flight.
        tokens_per_s: output tokens, of all requests, over the time of the level.
        ttft_ms_p50, ttft_ms_p99: from sending a request to its first token; with few requests p99 is the slowest.
        itl_ms_p50, itl_ms_p99: between two tokens of a request.
        cpu_s_per_1k_tokens: CPU time of the server's processes per 1,000 output tokens, prompts included.
        start_to_first_token_s: of the server that was measured.
        idle_cpu_percent: of one core, by process name, over some seconds without load after the levels.
        rss_mib: resident memory of the server's processes at the end of the level; pages they share count in each.
    """

    system: str
    pp: int
    concurrency: int
    tokens_per_s: float
    ttft_ms_p50: float
    ttft_ms_p99: float
    itl_ms_p50: float
    itl_ms_p99: float
    cpu_s_per_1k_tokens: float
    start_to_first_token_s: float
    idle_cpu_percent: dict[str, float]
    rss_mib: float


Key = tuple[str, int, int]
_NUMBERS = [field.name for field in fields(Row) if field.type is float]
_COLUMNS = (
    ("PP", ">"),
    ("C", ">"),
    ("system", "<"),
    ("tokens/s", ">"),
    ("ratio", ">"),
    ("TTFT p50 ms", ">"),
    ("ratio", ">"),
    ("TTFT p99", ">"),
    ("ITL p50 ms", ">"),
    ("ITL p99", ">"),
    ("CPU s/1k", ">"),
    ("start s", ">"),
    ("RSS MiB", ">"),
)


def key(row: Row) -> Key:
    """What a row is about."""
    return row.system, row.pp, row.concurrency


def medians(rows: Iterable[Row]) -> list[Row]:
    """One row for each system, pipeline size and concurrency, in order of first appearance: the median of each figure.

    The idle use of a process is the median over the rounds that had a process of its name.
    """
    groups: dict[Key, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return [_median(group) for group in groups.values()]


def _median(group: Sequence[Row]) -> Row:
    names = dict.fromkeys(name for row in group for name in row.idle_cpu_percent)
    idle = {
        name: round(statistics.median(r.idle_cpu_percent[name] for r in group if name in r.idle_cpu_percent), _DIGITS)
        for name in names
    }
    numbers = {name: round(statistics.median(getattr(row, name) for row in group), _DIGITS) for name in _NUMBERS}
    system, pp, concurrency = key(group[0])
    return Row(system=system, pp=pp, concurrency=concurrency, idle_cpu_percent=idle, **numbers)


def as_json(rows: Iterable[Row]) -> str:
    """A list of objects, one per row."""
    return json.dumps([asdict(row) for row in rows], indent=2) + "\n"


def table(rows: Sequence[Row]) -> str:
    """The table, sorted so that what is compared stands together; ratios are ours divided by vLLM's.

    Below it the idle CPU use of each server.
    """
    by_key = {key(row): row for row in rows}
    pipelines = list(dict.fromkeys(row.pp for row in rows))
    ordered = sorted(rows, key=lambda row: (pipelines.index(row.pp), row.concurrency))  # stable: ours stays first
    lines = _aligned([_cells(row, by_key.get(("vllm", row.pp, row.concurrency))) for row in ordered])
    return "\n".join([*lines, "", "Idle CPU, percent of one core:", *_idle(ordered)]) + "\n"


def _cells(row: Row, peer: Row | None) -> list[str]:
    return [
        str(row.pp),
        str(row.concurrency),
        row.system,
        f"{row.tokens_per_s:,.1f}",
        _ratio(row, peer, row.tokens_per_s, peer.tokens_per_s if peer else 0.0),
        f"{row.ttft_ms_p50:,.0f}",
        _ratio(row, peer, row.ttft_ms_p50, peer.ttft_ms_p50 if peer else 0.0),
        f"{row.ttft_ms_p99:,.0f}",
        f"{row.itl_ms_p50:,.1f}",
        f"{row.itl_ms_p99:,.1f}",
        f"{row.cpu_s_per_1k_tokens:,.2f}",
        f"{row.start_to_first_token_s:.1f}",
        f"{row.rss_mib:,.0f}",
    ]


def _ratio(row: Row, peer: Row | None, ours: float, theirs: float) -> str:
    if peer is None or row is peer or theirs <= 0:
        return ""
    return f"{ours / theirs:.2f}"


def _aligned(cells: Sequence[Sequence[str]]) -> list[str]:
    titles = [title for title, _ in _COLUMNS]
    widths = [max(len(row[i]) for row in (titles, *cells)) for i in range(len(titles))]
    return [
        "  ".join(
            f"{cell:{side}{width}}" for cell, (_, side), width in zip(row, _COLUMNS, widths, strict=True)
        ).rstrip()
        for row in (titles, *cells)
    ]


def _idle(rows: Iterable[Row]) -> list[str]:
    """One line per server: its rows all carry the same figures."""
    servers = {(row.system, row.pp): row.idle_cpu_percent for row in rows}
    return [
        f"  {system}, PP {pp}: " + ", ".join(f"{name} {percent:.1f}" for name, percent in idle.items())
        for (system, pp), idle in servers.items()
    ]
