"""The bare pipe: even cohorts of precomputed steps through the simulated stages, without a scheduler.

The limit that can be reached. It has the requests, seats, token budget, hops and host time of the engine beside it,
and free choice: of the number of cohorts (that of the formula, and one more where so many steps may be in flight) and
of how prompts are cut: each step is filled with them up to a level of time, or they are taken whole. All lengths being
known beforehand, every choice is tried on the first requests, and the fastest takes all. It is never short of KV
blocks. Pure.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from async_pp.bench.cohorts import Member, Room, Step, divide, follow, take_turns
from async_pp.bench.simulate.requests import Arrival
from async_pp.bench.simulate.stages import Formula, Oracle, StageCost, StepLoad

LEVELS = (0.95, 1.0, 1.1, 1.25)
"""Times that steps are filled to, as multiples of the formula's, which is the mean if no prompt needs a seat before its
last token."""

TRIED, GENERATIONS = 1000, 4
"""Each choice is tried on so many requests, and on so many times those that run at once, at least."""

_EXACT = 1 + 1e-9
"""So that what just fits does, whatever floating point makes of it."""


@dataclass(frozen=True)
class Pipe:
    """What is stepped through what.

    Attributes:
        costs: of each stage.
        hop_s, host_s: see `ranks.SimulatedRanks`.
        arrivals: the requests, by arrival.
        saturated: the next request takes a seat as soon as one is free, whenever it arrives.
        seats: requests that run at the same time.
        step_tokens: tokens of one step, at most.
        most: steps in flight.
    """

    costs: Sequence[StageCost]
    hop_s: float
    host_s: float
    arrivals: Sequence[Arrival]
    saturated: bool
    seats: int
    step_tokens: int
    most: int


@dataclass(frozen=True)
class BarePipe:
    """The fastest precomputed steps.

    Attributes:
        tokens_per_s: output tokens per second: see `throughput`.
        cohorts: that the requests travel in.
        step_s: time on the slowest stage up to which prompts fill a step; None: they are taken whole.
    """

    tokens_per_s: float
    cohorts: int
    step_s: float | None


def fastest(pipe: Pipe, ideal: Formula) -> BarePipe:
    """The fastest of all choices."""
    cohorts = sorted({ideal.cohorts, min(ideal.cohorts + 1, pipe.most, pipe.seats)})
    levels_s = (*(level * ideal.step_s for level in LEVELS), None)
    trial = replace(pipe, arrivals=pipe.arrivals[: max(TRIED, GENERATIONS * pipe.seats)])
    tried = [_stepped(trial, number, level_s) for number in cohorts for level_s in levels_s]
    best = max(tried, key=lambda one: one.tokens_per_s)
    return best if len(trial.arrivals) == len(pipe.arrivals) else _stepped(pipe, best.cohorts, best.step_s)


def throughput(ends_s: Sequence[float], times_s: Iterable[float], seats: int, saturated: bool) -> float:
    """Output tokens per second.

    Saturated: between the end of as many requests as there are seats (those that began together went in step) and the
    last one's begin, which is when all but as many have ended. Otherwise, or if that is no time, from begin to end.

    Args:
        ends_s: of each request.
        times_s: of each token.
        seats: requests that run at the same time.
        saturated: whether these are always taken.
    """
    ordered = sorted(ends_s)
    first_s, last_s = 0.0, ordered[-1]
    if saturated and len(ordered) > 2 * seats and ordered[seats - 1] < ordered[-seats - 1]:
        first_s, last_s = ordered[seats - 1], ordered[-seats - 1]
    return sum(first_s < time_s <= last_s for time_s in times_s) / (last_s - first_s)


def _stepped(pipe: Pipe, cohorts: int, level_s: float | None) -> BarePipe:
    members = [Member(arrival.arrival_s, arrival.input_tokens, arrival.output_tokens) for arrival in pipe.arrivals]
    if pipe.saturated:
        for member in members:
            member.at_s = 0.0
    split = take_turns if pipe.saturated else divide
    follow(split(members, cohorts, pipe.seats, _room(pipe, level_s)), _send(pipe))
    times_s = (time_s for member in members for time_s in member.times_s)
    tokens_per_s = throughput([member.times_s[-1] for member in members], times_s, pipe.seats, pipe.saturated)
    return BarePipe(tokens_per_s, cohorts, level_s)


def _send(pipe: Pipe) -> Callable[[float, Step], tuple[float, float]]:
    oracle = Oracle(pipe.costs, pipe.hop_s)
    host_free_s = 0.0

    def send(now_s: float, step: Step) -> tuple[float, float]:
        nonlocal host_free_s
        host_free_s = max(host_free_s, now_s) + pipe.host_s
        spans = oracle.spans(host_free_s, _load(step))
        return spans[0][1] - pipe.hop_s, spans[-1][1] + pipe.hop_s

    return send


def _room(pipe: Pipe, level_s: float | None) -> Room:
    if level_s is None:
        return lambda step, _history: pipe.step_tokens - step.tokens
    different = set(pipe.costs)
    full_s = level_s * _EXACT

    def room(step: Step, history: int) -> int:
        left = pipe.step_tokens - step.tokens
        load = _load(step)
        for cost in different:
            left_s = full_s - cost.of(load) - cost.per_sequence_s
            left = min(left, math.floor(min(left, cost.chunk(max(0.0, left_s), history))))
        return left

    return room


def _load(step: Step) -> StepLoad:
    return StepLoad(step.sequences, step.tokens, step.attended)
