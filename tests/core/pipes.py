"""A pipeline of computed stage times with requests that have prompts, planned by a policy. No scheduler, no clock."""

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from async_pp.core.fit import Size
from async_pp.core.policy import Policy, Prompt, View

StageTime = Callable[[Size], float]

VARIED = [
    Size(1, 1, 100),
    Size(1, 8, 36),
    Size(4, 4, 900),
    Size(8, 8, 100),
    Size(2, 300, 90_000),
    Size(1, 512, 1_300_000),
]
"""Steps that tell all terms of a stage time apart."""

BUDGET_TOKENS = 512
PROMPTS_SEEN = 32


def linear(size: Size) -> float:
    """4 ms + 1 ms per sequence + 0.1 ms per token."""
    return 0.004 + 0.001 * size.sequences + 0.0001 * size.tokens


def flat(size: Size) -> float:
    """10 ms, whatever the step carries: the weights dominate."""
    return 0.010


@dataclass
class Request:
    """One request and what became of it."""

    arrival_s: float
    prompt: int
    answer: int
    computed: int = 0
    in_flight: bool = False
    tokens_s: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Step:
    """One planned step."""

    planned_s: float
    decodes: int
    prompt_tokens: int
    sequences: int


class Pipe:
    """Runs requests to their end.

    Args:
        stages: time of each stage.
        policy: what plans.
        depth: slots.
        round_trip_s, host_s: per step, outside the stages.
        seats: requests that may run at once.
    """

    def __init__(
        self,
        stages: Sequence[StageTime],
        policy: Policy,
        depth: int,
        *,
        round_trip_s: float = 0.001,
        host_s: float = 0.001,
        seats: int = 64,
    ) -> None:
        self.stages, self.policy, self.depth, self.seats = stages, policy, depth, seats
        self.round_trip_s, self.host_s = round_trip_s, host_s

    def run(self, requests: list[Request]) -> list[Step]:
        """Plan until every request has its tokens. Checks on the way what must hold for any policy."""
        self.now_s, self.steps = 0.0, list[Step]()
        self.free_at = [0.0] * len(self.stages)
        self.coming = deque(sorted(requests, key=lambda request: request.arrival_s))
        self.waiting, self.chunked = deque[Request](), list[Request]()
        self.running, self.ready = list[Request](), list[Request]()
        self.flying: list[tuple[float, int, list[Request], list[Request], Size, list[float], Step]] = []
        while True:
            while self.coming and self.coming[0].arrival_s <= self.now_s + 1e-12:
                self.waiting.append(self.coming.popleft())
            if len(self.flying) < self.depth and self._plan():
                continue
            if self.flying and not (self.coming and self.coming[0].arrival_s < self.flying[0][0]):
                self._settle()
            elif self.coming:
                self.now_s = max(self.now_s, self.coming[0].arrival_s)
            else:
                break
        assert not self.waiting and not self.chunked and not self.running, "everything goes on to its end"
        return self.steps

    def _plan(self) -> bool:
        room = self.seats - len(self.running) - len(self.chunked)
        prompts = self.chunked + list(self.waiting)[: max(0, min(PROMPTS_SEEN, room))]
        if not self.ready and not prompts:
            return False
        flying = sum(step.decodes > 0 and not step.prompt_tokens for *_, step in self.flying)
        view = View(
            decodes=len(self.running),
            ready=[request.computed for request in self.ready],
            context=sum(request.computed for request in self.running),
            flying=flying,
            prompts=[Prompt(request.computed, request.prompt - request.computed) for request in prompts],
            begun=len(self.chunked),
        )
        limits = self.policy.limits(view)
        assert 0 <= limits.decodes <= len(self.ready)
        if not limits.decodes and not (prompts and limits.prompt_tokens):
            assert self.flying, "with nothing in flight something goes"
            return False
        self.now_s += self.host_s
        decodes, self.ready = self.ready[: limits.decodes], self.ready[limits.decodes :]
        ended, taken, attention = self._take(prompts, limits)
        for request in decodes:
            attention += request.computed
            request.computed += 1
        assert not any(request.in_flight for request in decodes), "nobody is in flight twice"
        for request in decodes + ended:
            request.in_flight = True
        tokens = sum(taken)
        size = Size(len(decodes) + len(taken), len(decodes) + tokens, attention)
        assert 0 < size.tokens <= BUDGET_TOKENS
        at_s, times = self.now_s + self.round_trip_s / 2, []
        for index, stage in enumerate(self.stages):
            at_s = max(at_s, self.free_at[index]) + stage(size)
            self.free_at[index] = at_s
            times.append(stage(size))
        step = Step(self.now_s, len(decodes), tokens, len(decodes) + len(taken))
        entry = (at_s + self.round_trip_s / 2, len(self.steps), decodes, ended, size, times, step)
        heapq.heappush(self.flying, entry)
        self.steps.append(step)
        return True

    def _take(self, prompts, limits) -> tuple[list[Request], list[int], float]:
        """What vLLM's scheduler makes of the limits: prompts in order, each up to its share."""
        left = min(BUDGET_TOKENS - limits.decodes, limits.prompt_tokens)
        ended, taken, attention, begun = [], [], 0.0, 0
        for request in prompts:
            fresh = request not in self.chunked
            if left <= 0 or (fresh and begun >= limits.begin):
                break
            begun += fresh
            chunk = min(left, limits.chunk_tokens, request.prompt - request.computed)
            assert chunk > 0
            attention += chunk * (request.computed + chunk / 2)
            request.computed += chunk
            left -= chunk
            taken.append(chunk)
            if fresh:
                self.waiting.remove(request)
                self.chunked.append(request)
            if request.computed == request.prompt:
                self.chunked.remove(request)
                self.running.append(request)
                ended.append(request)
        return ended, taken, attention

    def _settle(self) -> None:
        at_s, _, decodes, ended, size, times, step = heapq.heappop(self.flying)
        self.now_s = max(self.now_s, at_s)
        for request in decodes + ended:
            request.in_flight = False
            request.tokens_s.append(self.now_s)
            if len(request.tokens_s) == request.answer:
                self.running.remove(request)
            else:
                self.ready.append(request)
        self.policy.settled(step.decodes, step.prompt_tokens, self.now_s)
        self.policy.timed(size, times, self.round_trip_s, self.host_s)


def burst(count: int, prompt: int = 16, answer: int = 40) -> list[Request]:
    """Requests that arrive together."""
    return [Request(0.0, prompt, answer) for _ in range(count)]


def tokens_per_s(requests: Sequence[Request]) -> float:
    """Over the whole run."""
    tokens = sum(len(request.tokens_s) for request in requests)
    return tokens / (max(r.tokens_s[-1] for r in requests) - min(r.arrival_s for r in requests))


def even_tokens_per_s(stages: Sequence[StageTime], count: int, prompt: int = 16, answer: int = 40) -> float:
    """What a burst reaches in as many even cohorts as stages, with nothing outside the stages."""
    cohorts = [count // len(stages)] * len(stages)
    free_at, ends = [0.0] * len(stages), [0.0] * len(cohorts)
    for turn in range(answer):
        for cohort, members in enumerate(cohorts):
            size, at_s = Size(members, members * (1 if turn else prompt)), ends[cohort]
            for index, stage in enumerate(stages):
                at_s = free_at[index] = max(at_s, free_at[index]) + stage(size)
            ends[cohort] = at_s
    return sum(cohorts) * answer / max(ends)
