"""The loads: when requests of which length arrive. Pure, so that every system, also the computed one, meets the same.

Arrivals are fixed beforehand (an open loop): a slow system is not spared the next request. Times scale with the stages:
one *stage* is the slowest stage's time of a lone decode, one *round* is a lone decode's way through all stages.
"""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from async_pp.bench.cohorts import Cohort, Member, divide
from async_pp.errors import ConfigError
from async_pp.ranks.sleeping_runner import StageTime

MAX_SEQUENCES = 64
"""Requests that an engine runs at a time."""

MAX_STEP_TOKENS = 512
"""Tokens of a step."""

MAX_MODEL_LEN = 4096
"""Tokens of a request, in and out."""

TOKENS_IN, TOKENS_OUT = 16, 40

LONG_IN = 4000
"""A prompt of eight steps."""

POISSON_IN, POISSON_OUT = (16, 512), (8, 128)
"""Lengths of poisson's requests are spread evenly between these, both included."""

Kind = Literal["request", "short", "long", "long alone", "background"]

COUNTED: tuple[Kind, ...] = ("request", "short")
"""The kinds that a load's TTFT is about."""


@dataclass(frozen=True)
class Arrival:
    """One request.

    Attributes:
        at_s: when it comes, seconds after the begin of its section.
        tokens_in, tokens_out: lengths of prompt and answer.
        kind: its part in the load.
    """

    at_s: float
    tokens_in: int = TOKENS_IN
    tokens_out: int = TOKENS_OUT
    kind: Kind = "request"


Section = tuple[Arrival, ...]
"""Arrivals in order of time. A section begins when the former one's requests have all ended."""


@dataclass(frozen=True)
class Load:
    """One load.

    Attributes:
        name: as on the command line.
        sections: its parts.
        paced: whether it stays below the limit, so that goodput says something.
        note: what a reader of the figures should know, or "".
    """

    name: str
    sections: tuple[Section, ...]
    paced: bool = False
    note: str = ""


@dataclass(frozen=True)
class Conditions:
    """What loads depend on.

    Attributes:
        stages: time of each stage.
        rate: of poisson, as a share of `limiting_rate`.
        duration_s: of poisson's arrivals.
        seed: of poisson.
    """

    stages: tuple[StageTime, ...]
    rate: float = 0.7
    duration_s: float = 20.0
    seed: int = 0

    @property
    def stage_s(self) -> float:
        """The slowest stage's time of a lone decode."""
        return max(stage.of(1, 1) for stage in self.stages)

    @property
    def round_s(self) -> float:
        """A lone decode's time through all stages."""
        return sum(stage.of(1, 1) for stage in self.stages)


def cohorts_of(section: Section, stages: int) -> tuple[list[Member], list[Cohort]]:
    """The members of a section, by arrival, and the even cohorts that they travel in, as many as stages.

    Prompts are taken whole, as far as the step's tokens allow.
    """
    members = [Member(arrival.at_s, arrival.tokens_in, arrival.tokens_out) for arrival in section]
    return members, divide(members, stages, MAX_SEQUENCES, lambda step, _history: MAX_STEP_TOKENS - step.tokens)


def limiting_rate(stages: tuple[StageTime, ...]) -> float:
    """Requests per second of poisson's lengths that the slowest stage can carry when all slots are full.

    With `MAX_SEQUENCES` requests running in P even cohorts a step has b = MAX_SEQUENCES / P sequences. A request with I
    tokens in and O out is in O steps (the first takes its prompt, each gives one token), so it brings
    (I + O - 1) / O tokens to each on average, with the means of I and O for the load. The slowest stage gives a step
    each t = max_s t_s(b, b * (I + O - 1) / O) seconds, and each step gives b of the O tokens that a request needs:
    b / (O * t).
    """
    tokens_in, tokens_out = sum(POISSON_IN) / 2, sum(POISSON_OUT) / 2
    cohort = MAX_SEQUENCES / len(stages)
    tokens = cohort * (tokens_in + tokens_out - 1) / tokens_out
    step_s = max(stage.alpha_s + stage.beta_s * cohort + stage.gamma_s * tokens for stage in stages)
    return cohort / (tokens_out * step_s)


def _burst(requests: int) -> Load:
    return Load(f"burst-{requests}", ((Arrival(0.0),) * requests,))


def _staggered(name: str, conditions: Conditions, apart_s: float) -> Load:
    return Load(name, (tuple(Arrival(index * apart_s) for index in range(4 * len(conditions.stages))),))


def _one_stage_apart(conditions: Conditions) -> Load:
    return _staggered("stagger-1-stage", conditions, conditions.stage_s)


def _part_of_a_round_apart(conditions: Conditions) -> Load:
    return _staggered("stagger-0.37-round", conditions, 0.37 * conditions.round_s)


def _short_while_decoding(conditions: Conditions) -> Load:
    """One request decodes; six of one token come, each at another phase of its round."""
    background = Arrival(0.0, tokens_out=60, kind="background")
    at_s = [(3 + 2.37 * index) * conditions.round_s for index in range(6)]
    return Load("short-while-decoding", ((background, *(Arrival(when, tokens_out=1, kind="short") for when in at_s)),))


def _short_into_long_prefill(conditions: Conditions) -> Load:
    """A long prompt alone, then three times one with a short request that comes after 1.2, 2.5, 4.3 of its portions."""
    portion_s = max(stage.of(1, MAX_STEP_TOKENS) for stage in conditions.stages)
    alone = (Arrival(0.0, LONG_IN, 2, "long alone"),)
    pairs = (
        (Arrival(0.0, LONG_IN, 2, "long"), Arrival(after * portion_s, tokens_out=2, kind="short"))
        for after in (1.2, 2.5, 4.3)
    )
    return Load("short-into-long-prefill", (alone, *pairs))


def _poisson(conditions: Conditions) -> Load:
    draw = random.Random(conditions.seed)
    limit = limiting_rate(conditions.stages)
    arrivals: list[Arrival] = []
    at_s = 0.0
    while True:
        at_s += draw.expovariate(conditions.rate * limit)
        if at_s > conditions.duration_s and arrivals:
            break
        arrivals.append(Arrival(at_s, draw.randint(*POISSON_IN), draw.randint(*POISSON_OUT)))
    note = (
        f"{len(arrivals)} requests; rate {conditions.rate * limit:.2f}/s, {conditions.rate:.0%} of {limit:.2f}/s,"
        f" which the slowest stage carries with {MAX_SEQUENCES} requests running"
    )
    return Load("poisson", (tuple(arrivals),), paced=True, note=note)


WARM_UP = Load("warm-up", tuple((Arrival(0.0, tokens_in=8, tokens_out=16),) * number for number in (1, 24)))
"""Sent to every system before anything is measured: the first request finds all cold, and a system that learns stage
times has met steps of several sizes, as any that has served for a second."""

_NAMED: dict[str, Callable[[Conditions], Load]] = {
    "stagger-1-stage": _one_stage_apart,
    "stagger-0.37-round": _part_of_a_round_apart,
    "short-while-decoding": _short_while_decoding,
    "short-into-long-prefill": _short_into_long_prefill,
    "poisson": _poisson,
}


def names() -> tuple[str, ...]:
    """The names that `find` knows."""
    return ("burst-N", *_NAMED, "all")


def find(wanted: Iterable[str], conditions: Conditions) -> tuple[Load, ...]:
    """The loads of these names. "all": bursts of 1, P and 4 P, and every other one.

    Raises:
        ConfigError: a name is unknown or comes twice.
    """
    found: list[Load] = []
    for name in wanted:
        if name == "all":
            pp = len(conditions.stages)
            found += [_burst(requests) for requests in dict.fromkeys((1, pp, 4 * pp))]
            found += [make(conditions) for make in _NAMED.values()]
        elif name in _NAMED:
            found.append(_NAMED[name](conditions))
        else:
            found.append(_burst(_burst_size(name)))
    twice = {load.name for load in found if [other.name for other in found].count(load.name) > 1}
    if twice:
        raise ConfigError(f"--load {', '.join(sorted(twice))} comes twice: name each load once")
    return tuple(found)


def _burst_size(name: str) -> int:
    head, _, number = name.partition("-")
    if head != "burst" or not number.isascii() or not number.isdecimal() or not int(number):
        raise ConfigError(f"--load {name} is unknown: choose among {', '.join(names())}, with a number from 1 for N")
    return int(number)
