"""The order of a run, and its results written down."""

import json
from pathlib import Path

from async_pp.bench import BenchFailed
from async_pp.bench.survive import random_faults, report, restarts
from async_pp.bench.survive.settings import Settings, Tell


def run(settings: Settings, model: Path, tell: Tell) -> str:
    """Measure what is wanted; write the figures. Returns the tables.

    Raises:
        BenchFailed: see `settings.run`.
    """
    timed = restarts.measure(settings, model, tell) if settings.kills else None
    chaos = random_faults.measure(settings, model, tell) if settings.minutes else None
    if settings.json is not None:
        settings.json.write_text(json.dumps(report.figures(timed, chaos), indent=2) + "\n", "utf-8")
    broken = [line for part in (timed, chaos) if part is not None for line in part.broken()]
    text = report.table(timed, chaos)
    if broken:
        raise BenchFailed("not as promised:\n" + "\n".join(f"  {line}" for line in broken) + f"\n\n{text}")
    return text
