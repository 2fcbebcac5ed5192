"""The pipeline machine: one epoch of the rank set, as events in and effects out.

A step is planned, dispatched to every rank at once, computed by the ranks in dispatch order, answered, gathered, and
settled in dispatch order. The machine decides *when* each of those happens; shells do it. One literal table says which
event is allowed in which state of a step; everything else raises InvalidTransition with the step's story.

Sampling may be deferred: a step whose grammar bitmask depends on a token that an earlier step in flight still has to
produce is dispatched without its `sample` message, which is released right after the settle of that earlier step.

What a rank reports beside its answers is folded in the order in which the rank speaks. An answer is folded by the
settle of its step, so a report that comes after the answer to a step in flight waits for that settle: else it would
overtake what the answer says of the same transfer.

The machine knows nothing of what a step computes: requests are ids, plans, answers and reports are opaque.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from async_pp.core.gather import Gather, Scope
from async_pp.core.window import Window

STORY_LENGTH = 32


class State(Enum):
    """Where a step is."""

    NEW = auto()
    DEFERRED = auto()  # dispatched, but its sampling waits for an earlier settle
    COMPUTING = auto()  # everything is sent, answers are missing
    READY = auto()  # every expected answer is here, older steps are not settled
    SETTLING = auto()  # handed to the settler
    SETTLED = auto()
    LOST = auto()


class Event(Enum):
    """What can happen to a step."""

    DISPATCH = auto()
    DEFER = auto()
    RELEASE = auto()
    ANSWER = auto()  # one of several expected answers
    COMPLETE = auto()  # the last expected answer
    SETTLE = auto()
    SETTLED = auto()
    LOSE = auto()


TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.NEW, Event.DISPATCH): State.COMPUTING,
    (State.NEW, Event.DEFER): State.DEFERRED,
    (State.DEFERRED, Event.RELEASE): State.COMPUTING,
    (State.COMPUTING, Event.ANSWER): State.COMPUTING,
    (State.COMPUTING, Event.COMPLETE): State.READY,
    (State.READY, Event.SETTLE): State.SETTLING,
    (State.SETTLING, Event.SETTLED): State.SETTLED,
    (State.DEFERRED, Event.LOSE): State.LOST,
    (State.COMPUTING, Event.LOSE): State.LOST,
    (State.READY, Event.LOSE): State.LOST,
    (State.SETTLING, Event.LOSE): State.LOST,
}


class InvalidTransition(Exception):
    """An event came that the table does not allow. Carries the step's number, state, event and story."""

    def __init__(self, step: "Step", event: Event) -> None:
        super().__init__(f"step {step.number}: {event.name} in state {step.state.name}; story: {step.told()}")
        self.step = step.number
        self.state = step.state
        self.event = event


class EpochOver(Exception):
    """Something was planned after the epoch was lost."""


@dataclass
class Step:
    """One micro-batch in flight."""

    number: int
    requests: frozenset[str]
    plan: Any
    gather: Gather
    waits_for: int | None
    planned_at_s: float
    state: State = State.NEW
    story: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=STORY_LENGTH))
    behind: list["Fold"] = field(default_factory=list)  # reports that came after their rank's answer to this step

    def take(self, event: Event, now_s: float) -> None:
        """Move along the table, or raise InvalidTransition and stay."""
        target = TRANSITIONS.get((self.state, event))
        if target is None:
            raise InvalidTransition(self, event)
        self.state = target
        self.story.append((now_s, event.name.lower()))

    def told(self) -> str:
        """The story in one line: seconds since the plan and what happened."""
        return ", ".join(f"+{at - self.planned_at_s:.4f} s {what}" for at, what in self.story) or "nothing yet"


@dataclass(frozen=True)
class Dispatch:
    """Send the step to every rank; its sample message too unless `deferred`."""

    step: Step
    deferred: bool


@dataclass(frozen=True)
class Release:
    """Send the deferred sample message of the step now."""

    step: Step


@dataclass(frozen=True)
class Settle:
    """Settle the step now: every older one is settled. Report back with `settled`."""

    step: Step


@dataclass(frozen=True)
class FreeSlot:
    """Give one slot back."""


@dataclass(frozen=True)
class Fold:
    """Take what a rank has reported beside its answers now: all that it said before is taken."""

    rank: int
    report: Any


@dataclass(frozen=True)
class EndEpoch:
    """The rank set is lost. `steps` were in flight, oldest first; no further effect of this epoch follows."""

    cause: BaseException
    steps: tuple[Step, ...]


Effect = Dispatch | Release | Settle | FreeSlot | Fold | EndEpoch


class Pipeline:
    """Machine of one epoch.

    Args:
        epoch: which life of the rank set this is.
        depth: slots, that is steps in flight at most.
        ranks: number of rank processes.
        output_rank: the rank that returns sampled tokens.
    """

    def __init__(self, *, epoch: int, depth: int, ranks: int, output_rank: int) -> None:
        self.epoch = epoch
        self.ranks = ranks
        self.output_rank = output_rank
        self.window: Window[Step] = Window(depth)
        self.cause: BaseException | None = None
        self.ignored_answers = 0
        self._next = 0
        self._settling: int | None = None

    @property
    def idle(self) -> bool:
        """Whether no step is in flight."""
        return not len(self.window)

    @property
    def settling(self) -> int | None:
        """Number of the step that the shell was told to settle and has not settled, or None."""
        return self._settling

    def plan(
        self, requests: Iterable[str], plan: Any, *, pending_tokens: bool, scope: Scope, now_s: float
    ) -> list[Effect]:
        """A micro-batch was planned, with a slot in hand.

        Args:
            requests: ids of the requests in it.
            plan: what the shell will send; opaque here.
            pending_tokens: its sampling depends on tokens of steps in flight (grammar bitmask): defer it behind the
                youngest step in flight that shares a request with it. Without such a step nothing is pending.
            scope: ranks to wait for.
            now_s: monotonic seconds.
        """
        if self.cause is not None:
            raise EpochOver(f"epoch {self.epoch} is over") from self.cause
        ids = frozenset(requests)
        waits_for = None
        if pending_tokens:
            waits_for = self.window.last_sharing(ids, {step.number: step.requests for step in self.window})
        step = Step(self._next, ids, plan, Gather(self.ranks, self.output_rank, scope), waits_for, now_s)
        self.window.open(step)
        self._next += 1
        step.take(Event.DISPATCH if waits_for is None else Event.DEFER, now_s)
        return [Dispatch(step, deferred=waits_for is not None)]

    def answer(self, number: int, rank: int, answer: Any, now_s: float) -> list[Effect]:
        """A rank answered a step. An answer nobody waits for is counted and changes nothing."""
        step = self.window.get(number)
        if step is None or rank not in step.gather.missing:
            self.ignored_answers += 1
            return []
        last = len(step.gather.missing) == 1
        step.take(Event.COMPLETE if last else Event.ANSWER, now_s)
        step.gather.fold(rank, answer)
        return self._settle_oldest(now_s)

    def report(self, rank: int, report: Any) -> list[Effect]:
        """A rank reported something beside its answers. What comes after the end of the epoch is left out."""
        if self.cause is not None:
            return []
        fold = Fold(rank, report)
        answered = [step for step in self.window if rank in step.gather.expected - step.gather.missing]
        if not answered:
            return [fold]
        answered[-1].behind.append(fold)
        return []

    def settled(self, number: int, now_s: float) -> list[Effect]:
        """The shell has settled the step it was told to settle."""
        if self._settling != number:
            raise ValueError(f"step {number} was not being settled")
        settled = self.window.close(number)
        settled.take(Event.SETTLED, now_s)
        self._settling = None
        effects: list[Effect] = [FreeSlot()]
        for step in self.window:
            if step.state is State.DEFERRED and step.waits_for is not None and step.waits_for <= number:
                step.take(Event.RELEASE, now_s)
                effects.append(Release(step))
        return effects + settled.behind + self._settle_oldest(now_s)

    def lose(self, cause: BaseException, now_s: float) -> list[Effect]:
        """The rank set cannot go on. The first cause counts; later ones change nothing.

        An exception in a step is such a cause, whichever ranks raised. Were the state of the workers known to be good
        after it, the step's requests alone could be failed. It never is: vLLM's workers take a plan in by changing
        their batch, requests and cache tables as they go, a rank that raises leaves its share half done and its peers
        in a collective, and even where every rank refused the plan before touching it, the next one builds on it.
        """
        if self.cause is not None:
            return []
        self.cause = cause
        self._settling = None
        steps = self.window.clear()
        for step in steps:
            step.take(Event.LOSE, now_s)
        return [EndEpoch(cause, tuple(steps))]

    def validate(self) -> None:
        """Raise AssertionError when an invariant is broken. For tests, after every event."""
        steps = list(self.window)
        numbers = [step.number for step in steps]
        assert numbers == sorted(numbers), "in dispatch order"
        assert len(steps) <= self.window.depth, "never more steps than slots"
        assert self.cause is None or not steps, "nothing in flight after the end"
        for step in steps:
            assert step.state not in (State.NEW, State.SETTLED, State.LOST), "only live steps are in the window"
            assert (step.state is State.SETTLING) == (step.number == self._settling), "one settle at a time"
            assert step.gather.complete == (step.state in (State.READY, State.SETTLING)), "ready means complete"
        assert not steps or steps[0].state is not State.READY, "a complete oldest step is being settled"

    def _settle_oldest(self, now_s: float) -> list[Effect]:
        oldest = self.window.oldest
        if oldest is None or self._settling is not None or oldest.state is not State.READY:
            return []
        oldest.take(Event.SETTLE, now_s)
        self._settling = oldest.number
        return [Settle(oldest)]
