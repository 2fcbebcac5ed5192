"""The requests of a simulation: from a trace, or drawn from a seed.

A trace is a file of one request a line, with `arrival_s` (seconds from any origin), `input_tokens` and `output_tokens`:
CSV with these names in its first line (other columns are ignored), or JSON objects, one a line, for a name that ends in
`.jsonl`. The order of lines does not matter.
"""

import csv
import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_pp.bench.simulate.stages import Mix
from async_pp.errors import ConfigError

FIELDS = ("arrival_s", "input_tokens", "output_tokens")


@dataclass(frozen=True)
class Arrival:
    """One request.

    Attributes:
        arrival_s: seconds after the start; what a saturated load makes of it is 0.
        input_tokens, output_tokens: of its prompt and its answer, each at least 1.
    """

    arrival_s: float
    input_tokens: int
    output_tokens: int


Lengths = tuple[int, int]
"""Least and most tokens."""


def drawn(number: int, rate: float | None, input_len: Lengths, output_len: Lengths, seed: int) -> list[Arrival]:
    """Requests of uniformly drawn lengths; with a rate (requests per second) they arrive by a Poisson process."""
    draw = random.Random(seed)
    now_s = 0.0
    arrivals = []
    for _ in range(number):
        arrivals.append(Arrival(now_s, draw.randint(*input_len), draw.randint(*output_len)))
        now_s += draw.expovariate(rate) if rate else 0.0
    return arrivals


def read(path: Path, most: int | None) -> list[Arrival]:
    """The first `most` requests of a trace by arrival (None: all), the first at 0 s.

    Raises:
        ConfigError: it cannot be read, with the line.
    """
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--trace {path} cannot be read: {error}") from error
    lines = text.splitlines()
    rows: Iterable[Any] = csv.DictReader(lines)
    first_line = 2
    parse: Callable[[Any], Any] = dict
    if path.suffix == ".jsonl":
        rows, first_line, parse = lines, 1, json.loads
    arrivals = []
    for number, row in enumerate(rows, first_line):
        try:
            arrivals.append(_arrival(parse(row)))
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"--trace {path}, line {number}: {', '.join(FIELDS)} are needed, finite and positive: {error!r}"
            ) from error
    if not arrivals:
        raise ConfigError(f"--trace {path} has no request")
    arrivals.sort(key=lambda arrival: arrival.arrival_s)
    origin_s = arrivals[0].arrival_s
    return [Arrival(a.arrival_s - origin_s, a.input_tokens, a.output_tokens) for a in arrivals[:most]]


def _arrival(row: Mapping[str, Any]) -> Arrival:
    arrival_s, input_tokens, output_tokens = (row[name] for name in FIELDS)
    arrival = Arrival(float(arrival_s), int(input_tokens), int(output_tokens))
    if not 0 <= arrival.arrival_s < float("inf") or min(arrival.input_tokens, arrival.output_tokens) < 1:
        raise ValueError(arrival)
    return arrival


def mix(arrivals: Sequence[Arrival]) -> Mix:
    """The average of them. A request of n tokens in all looks back at about n²/2 pairs: the prompt at its own square,
    as `StepLoad.attended` counts a prompt in one chunk, and each further token at all before it."""
    count = len(arrivals)
    outputs = sum(a.output_tokens for a in arrivals)
    tokens = sum(a.input_tokens + a.output_tokens - 1 for a in arrivals)
    attended = sum(a.input_tokens**2 + _sum(a.input_tokens, a.output_tokens - 1) for a in arrivals)
    return Mix(outputs / count, tokens / count, attended / count)


def _sum(prompt: int, decodes: int) -> int:
    """Σ (prompt + k) for k = 1 … decodes: what the decodes after a prompt look at."""
    return decodes * prompt + decodes * (decodes + 1) // 2
