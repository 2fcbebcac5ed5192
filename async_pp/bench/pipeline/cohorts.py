"""Even cohorts, decided beforehand: what the formula and the bare pipe step. Pure: the time is an argument.

P cohorts, their members assigned in turn by arrival. A cohort has one step in flight at a time; each takes its members
that have arrived and are not finished, at most its share of the running requests, in order of arrival: a token for each
that decodes, then prompts up to the step's limit. A step of nothing but portions of unfinished prompts gives no token,
so the cohort's next step need not wait for its end: it follows as soon as the first stage has done with the former.
"""

import math
from collections.abc import Sequence

from async_pp.bench.pipeline.loads import MAX_SEQUENCES, MAX_STEP_TOKENS, Arrival, Section
from async_pp.ranks.sleeping_runner import Load


class Member:
    """One request on its way.

    Attributes:
        arrival: when it comes, and its lengths.
        computed: tokens of its prompt that are behind it.
        times_s: when its tokens came, seconds after the section's begin.
    """

    def __init__(self, arrival: Arrival) -> None:
        self.arrival = arrival
        self.computed = 0
        self.times_s: list[float] = []

    @property
    def prompt_left(self) -> int:
        """Tokens of its prompt that no step has taken."""
        return self.arrival.tokens_in - self.computed

    @property
    def finished(self) -> bool:
        """Whether all its tokens have come."""
        return len(self.times_s) == self.arrival.tokens_out


class Cohort:
    """Requests that travel in the same steps.

    Args:
        members: in order of arrival.
        most: how many may travel at a time.
    """

    def __init__(self, members: Sequence[Member], most: int) -> None:
        self._members = list(members)
        self._most = most
        self._answered: list[Member] = []

    def plan(self, now_s: float) -> Load | None:
        """The next step, or None when no member is there."""
        active = [member for member in self._members if member.arrival.at_s <= now_s][: self._most]
        decodes = [member for member in active if not member.prompt_left]
        tokens = sequences = len(decodes)
        self._answered = decodes
        for member in active:
            take = min(member.prompt_left, MAX_STEP_TOKENS - tokens)
            if take > 0:
                member.computed += take
                tokens, sequences = tokens + take, sequences + 1
                if not member.prompt_left:
                    self._answered.append(member)
        return Load(sequences, tokens) if sequences else None

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
        return self._members[0].arrival.at_s if self._members else None


def divide(section: Section, stages: int) -> tuple[list[Member], list[Cohort]]:
    """The members of a section, by arrival, and their cohorts."""
    members = [Member(arrival) for arrival in section]
    most = max(1, math.ceil(MAX_SEQUENCES / stages))
    return members, [Cohort(members[index::stages], most) for index in range(stages)]
