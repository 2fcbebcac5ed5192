"""What was measured of a load, and the figures that follow from it. Pure; travels between processes as JSON."""

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from async_pp.bench.pipeline.loads import COUNTED, Arrival, Kind, Section

Row = tuple[float, float, int, int]
"""A step on a stage: begin and end of its work, monotonic seconds, tokens, sequences."""


class Hosted(NamedTuple):
    """What a step cost the host.

    Attributes:
        sequences: requests in it.
        seconds: see `host`.
    """

    sequences: int
    seconds: float


@dataclass(frozen=True)
class Answered:
    """One section.

    Attributes:
        began_s: its begin, monotonic seconds.
        times_s: for each arrival when its tokens came, seconds after the begin.
    """

    began_s: float
    times_s: list[list[float]]

    @property
    def span_s(self) -> float:
        """From the begin to the last token."""
        return max(times[-1] for times in self.times_s)


@dataclass(frozen=True)
class Measured:
    """One load on one system.

    Attributes:
        answered: its sections.
        rows: by stage, the steps of all sections; none where nothing counts them.
        bubble: shares of the stage time by cause, where the engine tells.
        hosted: steps that were not empty, where something is known of the host's time.
    """

    answered: list[Answered]
    rows: list[list[Row]] = field(default_factory=list)
    bubble: dict[str, float] | None = None
    hosted: list[Hosted] = field(default_factory=list)


@dataclass(frozen=True)
class Round:
    """What every system did, in the order of `Settings.cases`; None for one that was not asked for.

    Bare pipe and formula know no connectors: theirs is the same for all cases of a load.
    """

    ours: list[Measured]
    vllm: list[Measured] | None
    bare_pipe: list[Measured]
    formula: list[Measured]


@dataclass(frozen=True)
class Figures:
    """Of one load on one system; None where there is nothing to say.

    Attributes:
        tokens_per_s: output tokens over the time from each section's begin to its last token.
        ttft_ms_p50: from arrival to first token, of requests of a `COUNTED` kind.
        itl_ms_p99, itl_ms_mean: from one token of a request to the next.
        long_ttft_ms_p50, long_alone_ttft_ms: of a long prompt that meets a short request, and of one that does not.
        empty_steps: steps without tokens that reached the ranks; with a connector also what asks idle ranks, apart from
            steps.
        sequences_per_step: mean over the other steps.
        stage_use: share of the sections' time in which a stage worked, mean over the stages.
        host_ms_p50: of a step, of those of the number of sequences that most steps have; see `host`.
        host_sequences: that number.
    """

    tokens_per_s: float
    ttft_ms_p50: float
    itl_ms_p99: float | None
    itl_ms_mean: float | None
    long_ttft_ms_p50: float | None
    long_alone_ttft_ms: float | None
    empty_steps: int | None
    sequences_per_step: float | None
    stage_use: float | None
    host_ms_p50: float | None
    host_sequences: int | None


def figures(sections: Sequence[Section], measured: Measured) -> Figures:
    """The figures of a load whose arrivals are `sections`."""
    pairs = [
        pair
        for section, answered in zip(sections, measured.answered, strict=True)
        for pair in zip(section, answered.times_s, strict=True)
    ]
    span_s = sum(answered.span_s for answered in measured.answered)
    gaps = [after - before for _, times in pairs for before, after in itertools.pairwise(times)]
    steps = [[row for row in rows if row[2]] for rows in measured.rows]
    counted = any(measured.rows)
    usual = Counter(step.sequences for step in measured.hosted).most_common(1)
    sequences = usual[0][0] if usual else None
    return Figures(
        tokens_per_s=sum(len(times) for _, times in pairs) / span_s,
        ttft_ms_p50=1e3 * statistics.median(_ttfts(pairs, COUNTED)),
        itl_ms_p99=1e3 * percentile(gaps, 0.99) if gaps else None,
        itl_ms_mean=1e3 * statistics.fmean(gaps) if gaps else None,
        long_ttft_ms_p50=_median_ms(_ttfts(pairs, ("long",))),
        long_alone_ttft_ms=_median_ms(_ttfts(pairs, ("long alone",))),
        empty_steps=max(len(all_) - len(real) for all_, real in zip(measured.rows, steps, strict=True))
        if counted
        else None,
        sequences_per_step=statistics.fmean(row[3] for row in steps[-1]) if counted else None,
        stage_use=sum(end - begin for rows in steps for begin, end, *_ in rows) / (len(steps) * span_s)
        if counted
        else None,
        host_ms_p50=_median_ms([step.seconds for step in measured.hosted if step.sequences == sequences]),
        host_sequences=sequences,
    )


def goodput(sections: Sequence[Section], measured: Measured, period_s: float) -> float:
    """Output tokens per second of the requests whose own mean ITL is at most two periods."""
    good = 0
    for section, answered in zip(sections, measured.answered, strict=True):
        for _, times in zip(section, answered.times_s, strict=True):
            if len(times) < 2 or (times[-1] - times[0]) / (len(times) - 1) <= 2 * period_s:
                good += len(times)
    return good / sum(answered.span_s for answered in measured.answered)


def percentile(values: Iterable[float], share: float) -> float:
    """The smallest of the values that is not below `share` of them (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def _ttfts(pairs: Iterable[tuple[Arrival, list[float]]], kinds: Sequence[Kind]) -> list[float]:
    return [times[0] - arrival.at_s for arrival, times in pairs if arrival.kind in kinds]


def _median_ms(values: Sequence[float]) -> float | None:
    return 1e3 * statistics.median(values) if values else None
