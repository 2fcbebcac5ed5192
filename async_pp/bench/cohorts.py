"""Even cohorts, decided beforehand: what the formula and the bare pipes step. Pure: the time is an argument.

A cohort has one step in flight at a time; each takes its members that have arrived and are not finished, at most as
many as it has seats, in order of arrival: a token for each that decodes, then prompts as far as there is room. A step
of nothing but portions of unfinished prompts gives no token, so the cohort's next step need not wait for its end: it
follows as soon as the first stage has done with the former.
"""

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """What one step carries.

    Attributes:
        sequences: requests in it.
        tokens: of all of them.
        attended: pairs of a token and one that it looks at: Σ chunk · (history + chunk) over the requests.
    """

    sequences: int
    tokens: int
    attended: int


class Member:
    """One request on its way.

    Attributes:
        at_s: when it comes, seconds after the begin.
        tokens_in, tokens_out: lengths of prompt and answer.
        computed: tokens of its prompt that are behind it.
        times_s: when its tokens came, seconds after the begin.
    """

    def __init__(self, at_s: float, tokens_in: int, tokens_out: int) -> None:
        self.at_s = at_s
        self.tokens_in = tokens_in
        self.tokens_out = tokens_out
        self.computed = 0
        self.times_s: list[float] = []

    @property
    def finished(self) -> bool:
        """Whether all its tokens have come."""
        return len(self.times_s) == self.tokens_out


Room = Callable[[Step, int], int]
"""How many tokens a prompt may add to a step: by what the step has already, and the prompt's history in tokens."""


class Cohort:
    """Requests that travel in the same steps.

    Args:
        waiting: who may become a member, in order of arrival. Cohorts may share it.
        seats: how many may travel at a time, at least one.
        room: for prompts. A step that is empty otherwise takes a token of one in any case.
    """

    def __init__(self, waiting: deque[Member], seats: int, room: Room) -> None:
        self._waiting = waiting
        self._seats = seats
        self._room = room
        self._members: list[Member] = []
        self._answered: list[Member] = []

    def plan(self, now_s: float) -> Step | None:
        """The next step, or None when no member is there."""
        waiting, members = self._waiting, self._members
        while waiting and waiting[0].at_s <= now_s and len(members) < self._seats:
            members.append(waiting.popleft())
        prompts = [member for member in members if member.computed < member.tokens_in]
        self._answered = [member for member in members if member.computed == member.tokens_in]
        decodes = len(self._answered)
        step = Step(decodes, decodes, sum(member.tokens_in + len(member.times_s) for member in self._answered))
        for member in prompts:
            history = member.computed
            take = min(member.tokens_in - history, max(self._room(step, history), not step.tokens))
            if take > 0:
                member.computed += take
                step = Step(step.sequences + 1, step.tokens + take, step.attended + take * member.computed)
                if member.computed == member.tokens_in:
                    self._answered.append(member)
        return step if step.tokens else None

    @property
    def waits(self) -> bool:
        """Whether the step that was planned last gives tokens, for which the cohort's next step waits."""
        return bool(self._answered)

    def settle(self, now_s: float) -> None:
        """The step that was planned last has gone through the pipe."""
        for member in self._answered:
            member.times_s.append(now_s)
        self._members = [member for member in self._members if not member.finished]

    def next_arrival_s(self) -> float | None:
        """When its first unfinished member comes, or None when there is none."""
        first = self._members or self._waiting
        return first[0].at_s if first else None


def divide(members: Sequence[Member], cohorts: int, seats: int, room: Room) -> list[Cohort]:
    """Cohorts whose members are assigned in turn, by arrival. `seats`: of all of them, divided evenly."""
    shares = _shares(seats, cohorts)
    return [Cohort(deque(members[index :: len(shares)]), own, room) for index, own in enumerate(shares)]


def take_turns(members: Iterable[Member], cohorts: int, seats: int, room: Room) -> list[Cohort]:
    """Cohorts whose members are whoever is next when a seat is free. `seats`: of all of them, divided evenly."""
    waiting = deque(members)
    return [Cohort(waiting, own, room) for own in _shares(seats, cohorts)]


def _shares(seats: int, cohorts: int) -> list[int]:
    """Even, and none empty: no more cohorts than seats."""
    cohorts = min(cohorts, seats)
    return [seats // cohorts + (index < seats % cohorts) for index in range(cohorts)]


def follow(cohorts: Sequence[Cohort], send: Callable[[float, Step], tuple[float, float]]) -> None:
    """Step cohorts through a computed pipe until each has ended.

    Args:
        cohorts: the cohorts.
        send: send a step at a time, not earlier than any before it. Returns when the cohort's next one may be sent if
            it does not wait for the step's tokens, and when these come.
    """
    ready = [(at_s, index) for index, cohort in enumerate(cohorts) if (at_s := cohort.next_arrival_s()) is not None]
    heapq.heapify(ready)
    while ready:
        now_s, index = heapq.heappop(ready)
        cohort = cohorts[index]
        step = cohort.plan(now_s)
        if step is not None:
            early_s, ended_s = send(now_s, step)
            cohort.settle(ended_s)
            now_s = ended_s if cohort.waits else early_s
        if (at_s := cohort.next_arrival_s()) is not None:
            heapq.heappush(ready, (max(now_s, at_s), index))
