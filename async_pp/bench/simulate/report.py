"""Rows of a simulation: the table for a person, and JSON."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

_DIGITS = 4


@dataclass(frozen=True)
class Host:
    """What the simulation took on this machine: the only figures that differ from run to run.

    Attributes:
        real_s: seconds in all.
        plan_settle_ms_p50: median over the steps of planning and settling one, milliseconds.
        vllm_ms_p50: the same of vLLM's `schedule` and `update_from_output` alone, within it.
    """

    real_s: float
    plan_settle_ms_p50: float | None
    vllm_ms_p50: float | None


@dataclass(frozen=True)
class Row:
    """One pipeline size. The fields are the keys of the JSON. All but `host` follow from settings and seed alone.

    Attributes:
        pp: stages.
        policy: the micro-batch policy.
        requests: answered, all of them.
        tokens_per_s: output tokens per second; with a saturated load, while it is saturated and past its first
            generation of requests.
        bare_pipe_tokens_per_s, bare_pipe_ratio: what the bare pipe gives in the same time (see `bare`), and the share
            of it that was reached.
        bare_pipe_cohorts, bare_pipe_step_ms: its choice: cohorts, and the time up to which prompts fill its steps; None
            when it takes them whole.
        formula_tokens_per_s, formula_ratio: see `stages.formula`, and the share of that.
        stage_use, sequences_per_step: in the same time: busy share of the stages, mean sequences of a step.
        ttft_ms_p50, ttft_ms_p99: from the arrival of a request to its first token.
        itl_ms_p50, itl_ms_p99: between two tokens of a request.
        steps, empty_steps: that the ranks were sent; those without a token.
        virtual_s: from the start to the last token.
        bubble: shares of the stages' time by cause, in the same time as `stage_use` (see `core.bubble`).
        host: what it took here.
    """

    pp: int
    policy: str
    requests: int
    tokens_per_s: float
    bare_pipe_tokens_per_s: float
    bare_pipe_ratio: float
    bare_pipe_cohorts: int
    bare_pipe_step_ms: float | None
    formula_tokens_per_s: float
    formula_ratio: float
    stage_use: float
    sequences_per_step: float
    ttft_ms_p50: float | None
    ttft_ms_p99: float | None
    itl_ms_p50: float | None
    itl_ms_p99: float | None
    steps: int
    empty_steps: int
    virtual_s: float
    bubble: dict[str, float]
    host: Host


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The smallest value that `percent` % of all do not exceed. None of none."""
    if not values:
        return None
    return sorted(values)[math.ceil(percent / 100 * len(values)) - 1]


def as_json(rows: Sequence[Row]) -> str:
    """A list with one object for each row."""
    return json.dumps([_rounded(asdict(row)) for row in rows], indent=1) + "\n"


def table(rows: Sequence[Row]) -> str:
    """The rows as text."""
    lines = [tuple(_COLUMNS)] + [_cells(row) for row in rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_COLUMNS))]
    return "".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) + "\n" for line in lines
    )


_COLUMNS = (
    "PP",
    "tokens/s",
    "bare pipe",
    "of pipe",
    "formula",
    "of it",
    "use",
    "seqs/step",
    "TTFT p50 ms",
    "p99",
    "ITL p50 ms",
    "p99",
    "steps",
    "empty",
    "virtual s",
    "real s",
    "host ms/step",
    "vLLM's",
)


def _cells(row: Row) -> tuple[str, ...]:
    return (
        str(row.pp),
        f"{row.tokens_per_s:,.1f}",
        f"{row.bare_pipe_tokens_per_s:,.1f}",
        f"{row.bare_pipe_ratio:.3f}",
        f"{row.formula_tokens_per_s:,.1f}",
        f"{row.formula_ratio:.3f}",
        f"{row.stage_use:.3f}",
        f"{row.sequences_per_step:.2f}",
        *map(_ms, (row.ttft_ms_p50, row.ttft_ms_p99, row.itl_ms_p50, row.itl_ms_p99)),
        f"{row.steps:,}",
        f"{row.empty_steps:,}",
        f"{row.virtual_s:,.1f}",
        f"{row.host.real_s:,.1f}",
        _ms(row.host.plan_settle_ms_p50, 3),
        _ms(row.host.vllm_ms_p50, 3),
    )


def _ms(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return round(value, _DIGITS) if isinstance(value, float) else value
