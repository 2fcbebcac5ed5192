"""Where stage time goes: busy, or idle for one of six causes.

Every second of every stage is counted once. Between two steps i - 1 and i (in dispatch order) a stage s idles for the
gap from e(i-1, s) to b(i, s), with b and e the begin and end that its rank measured. A gap is explained like this:

- Stage 0 waits for a dispatch. Up to the end of the step whose answer made the plan possible it *waits for the
  pipeline*, except for that step's ways from stage to stage, which are *round trip*. From there until the loop has
  taken the answer is *round trip* (a loop that is busy with other things included); from there to the dispatch is
  *host*; from the dispatch to its begin is *round trip*. Where anything else made the plan possible (a request), host
  time begins with that, and what is before is the pipeline's.
- Stage s > 0 waits for stage s - 1. What comes after e(i, s-1) is *round trip* (transit). For the rest w, with
  t = e - b,

      w = gap(i, s-1) + t(i, s-1) - t(i-1, s) - (what step i - 1 waited before stage s)

  so the gap of the former stage explains w first (no work, then host, round trip, fill/drain, imbalance), and only what
  that leaves over is the stage's own: it *waits for the pipeline*, as steps or stages take unequally long.
- Waiting for the pipeline is *imbalance* when as many steps are in flight as there are stages, P. With c < P of them in
  flight, that carry r >= c requests, (P - r) / (P - c) of it is *no work*: so many of the idle stages no split could
  have kept busy.
- While no step is in flight there is *no work*. Around that the way of the first step to a stage and that of the last
  step from it to the output are *fill/drain*: (P - 1) t for each stage when they are even.
- Imbalance of a stage is *stage imbalance* up to (max_k mean t_k - mean t_s) per step, beyond that *cohort imbalance*.

Pure counting: events, measured times and `now` come in as arguments, all in monotonic seconds of one machine. Events
are kept as they come, on the way from an answer to the next step, and accounted for when somebody asks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


class StageSeconds(NamedTuple):
    """Seconds of one stage; their sum is the time that is accounted for.

    Attributes:
        busy: computing.
        no_work: idle, and no split of what was in the engine could have changed that.
        host: idle because of planning, dispatching and settling.
        round_trip: idle while something was on its way between engine and ranks, or from rank to rank.
        fill_drain: idle while the pipeline filled or drained.
        imbalance: idle because steps, or stages, take unequally long.
    """

    busy: float = 0.0
    no_work: float = 0.0
    host: float = 0.0
    round_trip: float = 0.0
    fill_drain: float = 0.0
    imbalance: float = 0.0


@dataclass(frozen=True)
class StageTime:
    """What became of the stage time up to some moment, or between two.

    Attributes:
        stages: the seconds of each stage.
    """

    stages: tuple[StageSeconds, ...]

    def since(self, earlier: "StageTime") -> "StageTime":
        """What has been added to an earlier one."""
        pairs = zip(self.stages, earlier.stages, strict=True)
        return StageTime(tuple(StageSeconds(*(b - a for a, b in zip(old, new, strict=True))) for new, old in pairs))

    def shares(self) -> dict[str, float]:
        """Shares of stages x time by cause: busy, no_work, fill_drain, stage_imbalance, cohort_imbalance, round_trip,
        host. None is negative and they add up to 1; before anything is accounted for all are 0."""
        most_busy = max(stage.busy for stage in self.stages)
        by_stage = [min(stage.imbalance, most_busy - stage.busy) for stage in self.stages]
        seconds = {
            "busy": sum(stage.busy for stage in self.stages),
            "no_work": sum(stage.no_work for stage in self.stages),
            "fill_drain": sum(stage.fill_drain for stage in self.stages),
            "stage_imbalance": sum(by_stage),
            "cohort_imbalance": sum(stage.imbalance - own for stage, own in zip(self.stages, by_stage, strict=True)),
            "round_trip": sum(stage.round_trip for stage in self.stages),
            "host": sum(stage.host for stage in self.stages),
        }
        total = sum(seconds.values())
        return {cause: value / total if total else 0.0 for cause, value in seconds.items()}


class Timed(NamedTuple):
    """A settled step whose times are all known.

    Attributes:
        tag: what came with its dispatch.
        stages: busy seconds per stage.
        round_trip_s: seconds between its dispatch and its answer in which it was neither computed nor queued behind
            another step.
    """

    tag: Any
    stages: tuple[float, ...]
    round_trip_s: float


class _Load(NamedTuple):
    """What is in flight."""

    steps: int
    requests: int


class _Empty(NamedTuple):
    """The end of the last step before nothing was in flight: end of its computation, its answer, its settle."""

    ended_s: float
    answered_s: float
    settled_s: float


@dataclass(slots=True)
class _Step:
    tag: Any
    requests: int
    enabled_s: float  # when the plan became possible
    awaited: "_Step | None"  # the step whose answer did that
    before: _Load  # in flight at `enabled_s`
    first_after: _Empty | None
    dispatched_s: float
    spans: list[tuple[float, float] | None]
    missing: int
    during: _Load  # in flight when it was dispatched or when its answer came, whichever is more, itself included
    answered_s: float
    settled_s: float | None = None
    transit_s: float = 0.0  # its ways from stage to stage, as far as no queue hid them

    def ended_s(self, unknown: float) -> float:
        """When its output rank was done with it, or `unknown`."""
        output = self.spans[-1]
        return unknown if output is None else output[1]


@dataclass(slots=True)
class _Gap:
    """Seconds of idling by cause; handed on from stage to stage."""

    no_work: float = 0.0
    host: float = 0.0
    round_trip: float = 0.0
    fill_drain: float = 0.0
    imbalance: float = 0.0

    def cut(self, most: float) -> float:
        """Keep no more than `most` seconds, in the order above. Returns how much of `most` that leaves unexplained."""
        # One by one and without min(): this runs for every stage of every step.
        part = self.no_work
        if part > most:
            self.no_work = part = most
        most -= part
        part = self.host
        if part > most:
            self.host = part = most
        most -= part
        part = self.round_trip
        if part > most:
            self.round_trip = part = most
        most -= part
        part = self.fill_drain
        if part > most:
            self.fill_drain = part = most
        most -= part
        part = self.imbalance
        if part > most:
            self.imbalance = part = most
        most -= part
        return most


@dataclass(slots=True)
class _Stage(_Gap):
    """Counters of one stage; up to `until_s` they account for all of its time."""

    busy: float = 0.0
    until_s: float = 0.0

    def add(self, gap: _Gap, busy: float) -> None:
        """One more gap, and the busy time after it."""
        self.no_work += gap.no_work
        self.host += gap.host
        self.round_trip += gap.round_trip
        self.fill_drain += gap.fill_drain
        self.imbalance += gap.imbalance
        self.busy += busy

    def seconds(self) -> StageSeconds:
        """The counters as they are now."""
        return StageSeconds(self.busy, self.no_work, self.host, self.round_trip, self.fill_drain, self.imbalance)


class Bubbles:
    """Accounting of one epoch.

    Args:
        stages: number of stages.
        start_s: when it begins.
        most_open: steps that are kept while their spans are missing. Of more, the oldest is forgotten when it has
            settled, and the time up to its settle is not accounted for.
    """

    def __init__(self, stages: int, *, start_s: float, most_open: int) -> None:
        self._stages = [_Stage(until_s=start_s) for _ in range(stages)]
        self._most_open = most_open
        self._open: dict[int, _Step] = {}  # dispatched and not accounted for, in dispatch order
        self._load = _Load(0, 0)
        self._enabled: tuple[float, _Step | None, _Load] = start_s, None, self._load
        self._empty = _Empty(start_s, start_s, start_s)
        self._timed: list[Timed] = []

    @property
    def open(self) -> int:
        """Steps that are in flight or whose spans are not all here."""
        return len(self._open)

    def enabled(self, now_s: float) -> None:
        """Something other than an answer happened that may make a plan possible."""
        self._enabled = now_s, None, self._load

    def dispatched(self, number: int, requests: int, now_s: float, tag: Any = None) -> None:
        """A step is on its way to the ranks.

        Args:
            number: of the step; rising.
            requests: how many it carries.
            now_s: when it had been sent.
            tag: opaque here; comes back in `Timed`.
        """
        enabled_s, awaited, before = self._enabled
        load = _Load(self._load.steps + 1, self._load.requests + requests)
        self._open[number] = _Step(
            tag=tag,
            requests=requests,
            enabled_s=enabled_s,
            awaited=awaited,
            before=before,
            first_after=self._empty if not self._load.steps and not before.steps else None,
            dispatched_s=now_s,
            spans=[None] * len(self._stages),
            missing=len(self._stages),
            during=load,
            answered_s=now_s,
        )
        self._load = load

    def answered(self, number: int, now_s: float) -> None:
        """An answer to a step in flight came; the last one counts."""
        step = self._open[number]
        step.answered_s, step.during = now_s, max(step.during, self._load)
        self._enabled = now_s, step, self._load

    def settled(self, number: int, now_s: float) -> None:
        """A step that was answered has settled."""
        step = self._open[number]
        step.settled_s = now_s
        self._load = _Load(self._load.steps - 1, self._load.requests - step.requests)
        if not self._load.steps:
            self._empty = _Empty(step.ended_s(step.answered_s), step.answered_s, now_s)

    def span(self, stage: int, number: int, began_s: float, ended_s: float) -> None:
        """A stage had the inputs of a step, and was done with it. One that is not awaited changes nothing."""
        step = self._open.get(number)
        if step is not None and step.spans[stage] is None:
            step.spans[stage] = began_s, ended_s
            step.missing -= 1

    def take(self) -> Sequence[Timed]:
        """Account for what has been told. Returns the steps whose times are all known, each once, in dispatch order."""
        self._advance()
        timed, self._timed = self._timed, []
        return timed

    def snapshot(self, now_s: float) -> StageTime:
        """The counters: up to `now_s` when no step is open, else without what the open ones will tell."""
        self._advance()
        if not self._open:
            self._idle(self._empty, now_s)
        return StageTime(tuple(stage.seconds() for stage in self._stages))

    # -- inside --------------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        while self._open:
            number, step = next(iter(self._open.items()))
            if step.settled_s is None:
                return
            if not step.missing:
                self._timed.append(self._account(step, step.settled_s))
            elif len(self._open) > self._most_open:
                for stage in self._stages:
                    stage.until_s = step.settled_s
            else:
                return
            step.awaited = None  # or each step would hold all that were before it
            del self._open[number]

    def _idle(self, empty: _Empty, until_s: float) -> None:
        """Account for the time in which nothing was in flight, and for the drain before it."""
        for stage in self._stages:
            begin = stage.until_s
            ended = _between(begin, empty.ended_s, until_s)
            answered = _between(ended, empty.answered_s, until_s)
            settled = _between(answered, empty.settled_s, until_s)
            stage.fill_drain += ended - begin
            stage.round_trip += answered - ended
            stage.host += settled - answered
            stage.no_work += max(settled, until_s) - settled
            stage.until_s = max(settled, until_s)

    def _account(self, step: _Step, settled_s: float) -> Timed:
        """Account for the gap before a step and for its busy time, on every stage."""
        if step.first_after is not None:
            self._idle(step.first_after, step.enabled_s)
        gap = _Gap()
        came_s = trips_s = 0.0  # when the stage before was done with the step; its time on the way
        times: list[float] = []
        for stage, span in zip(self._stages, step.spans, strict=True):
            assert span is not None
            since_s = stage.until_s
            # Clocks agree; but a rank that told nonsense must not break the sums.
            began_s = max(since_s, min(span[0], settled_s))
            ended_s = max(began_s, min(span[1], settled_s))
            busy_s = ended_s - began_s
            if not times:
                came_s = self._wait_for_dispatch(gap, step, since_s, began_s)
            else:
                came_s = max(since_s, min(came_s, began_s))
                self._wait_for_stage(gap, step, came_s - since_s)
                step.transit_s += began_s - came_s
            gap.round_trip += began_s - came_s
            trips_s += began_s - came_s
            stage.add(gap, busy_s)
            stage.until_s = came_s = ended_s
            times.append(busy_s)
        return Timed(step.tag, tuple(times), trips_s + max(0.0, step.answered_s - came_s))

    def _wait_for_dispatch(self, gap: _Gap, step: _Step, since_s: float, began_s: float) -> float:
        """Explain the first stage's gap up to the dispatch, which is returned."""
        ended_s, transit_s = step.enabled_s, 0.0
        if step.awaited is not None:
            ended_s, transit_s = step.awaited.ended_s(step.enabled_s), step.awaited.transit_s
        awaited_s = _between(since_s, ended_s, began_s)
        enabled_s = _between(awaited_s, step.enabled_s, began_s)
        dispatched_s = _between(enabled_s, step.dispatched_s, began_s)
        transit_s = min(transit_s, awaited_s - since_s)
        gap.no_work, gap.imbalance = self._split(awaited_s - since_s - transit_s, step.before)
        gap.round_trip = transit_s + (enabled_s - awaited_s)
        gap.host = dispatched_s - enabled_s
        return dispatched_s

    def _wait_for_stage(self, gap: _Gap, step: _Step, waited_s: float) -> None:
        """Turn the gap of the stage before into the explanation of `waited_s` seconds on this one."""
        left = gap.cut(waited_s)
        if not left:
            return
        if step.first_after is not None:
            gap.fill_drain += left
        else:
            no_work, imbalance = self._split(left, step.during)
            gap.no_work += no_work
            gap.imbalance += imbalance

    def _split(self, waited_s: float, load: _Load) -> tuple[float, float]:
        """Time of waiting for the pipeline as (no work, imbalance)."""
        stages = len(self._stages)
        idle = stages - load.steps
        if idle <= 0:
            return 0.0, waited_s
        unfillable = stages - min(stages, max(load.steps, load.requests))
        no_work = waited_s * (unfillable / idle)
        return no_work, waited_s - no_work


def _between(low: float, value: float, high: float) -> float:
    """`value` within bounds; `low` where the bounds are the wrong way round."""
    return max(low, min(value, high))
