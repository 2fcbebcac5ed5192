"""When is a rank hung: from the moment its work could begin, not while that is queued or waits for somebody else.

The engine sends every rank the same *works* in the same order: steps, turns of the connectors, calls. Each rank takes
them one after the other, and writes which it has entered and left last, and when (`Row`). From that and the times of
sending follows who is to blame when nothing moves. Inside a work a rank may wait for others, out of sight: for hidden
states of an earlier stage, for the peers of its stage in a collective, for a later stage that has not taken the hidden
states of the work before, or for tokens that the last stage sampled some works ago. All of these are earlier in one
order: work after work, and in a step stage after stage. So only the *first* in this order that is not done is on the
clock, from the moment on that everything before it was done: it waits for nobody. Those behind it get their turn when
it is done. That costs at most the time of the works in flight, and never names a rank that waits for another.

Not on the clock: a step whose sampling waits for the engine's word, until the word is sent; ranks that have nothing to
do. A call is as long as whoever waits for it has patience; until then only a rank whose process is stopped is found.

Times are those of the rank's process. Where a device still works when its process has gone on, the first process that
waits for the device is the one that is seen.

Pure: rows, times and `now` come in as arguments, all in monotonic seconds of one machine.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

WINDOW = 512
"""Steps that the deadline follows."""

ENOUGH = 100
"""Steps that must be known: of fewer, 99 of 100 means nothing."""

TIMES = 10.0
LEAST_S = 5.0
MOST_S = 60.0


class Deadline:
    """How long a rank may take for a step: 10 x p99 of the slowest stage's times in recent steps, within [5 s, 60 s].

    60 s until 100 steps are known. The limits and the factor are those of the issue that asked for it: a step that
    compiles something must not end an engine, and nobody waits longer than a minute for a rank that is gone.

    Args:
        fixed_s: seconds that hold instead, whatever is measured.

    Raises:
        ValueError: `fixed_s` is not a positive number.
    """

    def __init__(self, fixed_s: float | None = None) -> None:
        if fixed_s is not None and not (fixed_s > 0 and math.isfinite(fixed_s)):
            raise ValueError(f"a step deadline is a positive number of seconds, not {fixed_s}")
        self._fixed_s = fixed_s
        self._steps = [-1] * WINDOW
        self._slowest_s = [0.0] * WINDOW

    def took(self, step: int, seconds: float) -> None:
        """A stage has told its time for a step. Steps come in any order, those behind the window are left out."""
        slot = step % WINDOW
        known = self._steps[slot]
        if step > known:
            self._steps[slot] = step
            self._slowest_s[slot] = seconds
        elif step == known and seconds > self._slowest_s[slot]:
            self._slowest_s[slot] = seconds

    @property
    def seconds(self) -> float:
        """The deadline as of now."""
        if self._fixed_s is not None:
            return self._fixed_s
        known = sorted(seconds for step, seconds in zip(self._steps, self._slowest_s, strict=True) if step >= 0)
        if len(known) < ENOUGH:
            return MOST_S
        p99_s = known[math.ceil(0.99 * len(known)) - 1]  # nearest rank
        return min(MOST_S, max(LEAST_S, TIMES * p99_s))


class Row(NamedTuple):
    """What a rank says of itself. Works are counted from 1; 0 is none.

    Attributes:
        entered, entered_s: the work that it took up last, and when.
        left, left_s: the work that it was done with last, and when. Failing is leaving too.
        told: messages about steps that it had sent, or begun to send, before it left that.
    """

    entered: int
    entered_s: float
    left: int
    left_s: float
    told: int = 0


@dataclass(slots=True)
class Work:
    """A step or a call on its way. A turn of the connectors is a call that no user made.

    Attributes:
        step: number of the step, or None.
        call: number of the call, or None.
        ready_s: when everything was sent that the ranks need for it, or None before that.
        patient: whether somebody else sees to it that it ends.
    """

    step: int | None
    call: int | None
    ready_s: float | None
    patient: bool = False


@dataclass(frozen=True)
class Overdue:
    """Somebody is not done in time.

    Attributes:
        ranks: who could have been done, those first that have not even begun. Only those that are stopped, if any is.
        step: the step it is about; None for a call.
        computing: the step that the first of the ranks is in. That is a later one where it has left `step`, and was
            stopped before the answer had got out. Where it is in none, `step`.
        answered: whether the ranks say that they are done, but no answer has come.
        since_s: when they could begin; when they were done, if only the answer is missing.
    """

    ranks: tuple[int, ...]
    step: int | None
    computing: int | None
    answered: bool
    since_s: float


class Look(NamedTuple):
    """What a look at the rows shows.

    Attributes:
        overdue: who is not done in time, if somebody is not.
        again_s: when the next look is due; None when nothing is on its way.
    """

    overdue: Overdue | None
    again_s: float | None


class Backlog:
    """The works of one epoch that are not done on every rank.

    Args:
        ranks_per_stage: neighbours in rank order that share a stage.
        missing: the ranks whose answer to a work has not come.
        stopped: whether the process of a rank is held by a signal.
    """

    def __init__(
        self, *, ranks_per_stage: int, missing: Callable[[Work], Sequence[int]], stopped: Callable[[int], bool]
    ) -> None:
        self._ranks_per_stage = ranks_per_stage
        self._missing = missing
        self._stopped = stopped
        self._sent = 0
        self._works: dict[int, Work] = {}  # in the order sent
        self._deferred: dict[int, Work] = {}
        self._calls: dict[int, Work] = {}
        self._place: tuple[int, Sequence[int]] | None = None  # what is on the clock: work, ranks
        self._since_s = 0.0

    def step(self, step: int, now_s: float, *, deferred: bool) -> int:
        """A step was sent. `deferred`: `released` follows. Returns which work of the ranks it is."""
        self._sent += 1
        self._works[self._sent] = work = Work(step, None, None if deferred else now_s)
        if deferred:
            self._deferred[step] = work
        return self._sent

    def released(self, step: int, now_s: float) -> None:
        """The word to sample a deferred step was sent."""
        self._deferred.pop(step).ready_s = now_s

    def call(self, call: int, now_s: float, *, patient: bool) -> None:
        """A call was sent. `patient`: somebody waits for it as long as he likes, until `given_up`."""
        self._sent += 1
        self._works[self._sent] = work = Work(None, call, now_s, patient)
        if patient:
            self._calls[call] = work

    def given_up(self, call: int, now_s: float) -> None:
        """Nobody waits for a patient call any more: from now on it must not hold up what is behind it."""
        work = self._calls.pop(call, None)
        if work is not None:  # else every rank is done with it
            work.ready_s, work.patient = now_s, False

    def step_in(self, row: Row) -> int | None:
        """The step that a rank has entered and not left."""
        work = self._works.get(row.entered) if row.entered > row.left else None
        return None if work is None else work.step

    def look(self, now_s: float, rows: Sequence[Row], *, deadline_s: float, not_before_s: float) -> Look:
        """Is anybody late?

        Args:
            now_s: the time.
            rows: what each rank says of itself.
            deadline_s: how long a work may take.
            not_before_s: time before this does not count.
        """
        while self._works:
            number, work = next(iter(self._works.items()))
            behind = [rank for rank, row in enumerate(rows) if row.left < number]
            late = behind or list(self._missing(work))
            if late:
                break
            del self._works[number]
            if work.call is not None:
                self._calls.pop(work.call, None)
        else:
            return Look(None, None)
        soonest_s = now_s + min(deadline_s, LEAST_S)  # whatever becomes ready from now on is not late before that
        if work.ready_s is None:
            return Look(None, soonest_s)
        if behind and work.step is not None:
            stage = behind[0] // self._ranks_per_stage
            late = [rank for rank in behind if rank // self._ranks_per_stage == stage]
        if self._place != (number, late):
            # Of a rank that has gone on to later works this is more than the time in question, once.
            self._place, self._since_s = (number, late), max(row.left_s for row in rows)
        self._since_s = min(now_s, max(self._since_s, work.ready_s, not_before_s))
        due_s = self._since_s + deadline_s
        if now_s < due_s:
            return Look(None, min(due_s, now_s + LEAST_S))
        ranks = [rank for rank in behind if self._stopped(rank)]
        if not ranks and not work.patient:
            ranks = sorted(late, key=lambda rank: rows[rank].entered >= number)
        if not ranks:
            return Look(None, soonest_s)
        computing = self.step_in(rows[ranks[0]])
        computing = work.step if computing is None else computing
        return Look(Overdue(tuple(ranks), work.step, computing, not behind, self._since_s), soonest_s)
