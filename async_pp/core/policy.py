"""The micro-batch policy: what the next step may take of the decodes and of the prompts.

P stages, R decodes in M cohorts of b, t_s(b) the time of stage s for b sequences, o the round trip outside the stages,
h the host's time per step. A round of the cohorts takes

    T(M, b) = max( Σ_s t_s(b) + o,  Σ_i max_s t_s(b_i),  M·h )

(a cohort cannot be faster than its own way through the stages; the slowest stage, or the host, does one step at a time)
and brings min(R, M·b) tokens. `Balanced` takes the M and b that bring most per second, by times fitted online (`fit`),
and where stages share memory or cores, by trying (`cohorts`). M = P is right wherever the batch costs something; P + 1
where the round trip is longer than the fixed part of a step; fewer where weights or the host dominate.

Cohorts heal: a step takes at most b decodes, so a split such as 2 + 30 is 16 + 16 a round later, and with M cohorts in
flight a decode that is ready waits for those it shall travel with. Cohorts are equal in *time*: a step is full when the
predicted time of its decodes, whose attention grows with their context, has reached that of b average ones.

Prompts are taken in chunks that make steps of equal time. While decodes run, what waits is spread over a round; a step
that has fewer decodes than the average one takes as much more, one that has more takes less, and none is more than half
as long again as without prompts. With no decodes, W seconds of prompts (per stage) are
spread over n steps, which end after (n + P - 1)·(α + β + W/n): shortest for n = sqrt((P - 1)·W/(α + β)), that is
chunks of sqrt(W·(α + β)/(P - 1)) seconds.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from async_pp.core.cohorts import Measured
from async_pp.core.fit import Fit, Line, Size

PORTIONS = 4
"""Steps per stage that pending prompts are spread over while no stage time is known."""

LEAST_PROMPT_TOKENS = 256
"""What a step takes of them in any case while no stage time is known."""

SHARERS = 1
"""Prompts under way at once of those that do not fit into one step."""

MOST_PORTIONS = 8
"""Steps per stage that prompts are spread over where a step seems to cost nothing by itself."""

PROMPT_SHARE = 0.5
"""Time that prompts may add to a step, as a share of what a cohort of decodes takes."""

LEAST_PIECE = 4
"""A prompt is not cut into pieces that take less than so many times what a further sequence costs a step."""

NEARLY_BEST = 0.85
"""Prompts are spread over one step, or as many as stages, unless the best number takes less than this share of that."""

HYSTERESIS = 0.97
"""Another number of cohorts must take less than this share of the present one's time per token to replace it."""

TIE = 0.99
"""Among numbers of cohorts whose times differ by less, the smallest is taken: it has the fewest steps."""

SMOOTHING = 1 / 16
"""Weight of the newest step in the means of round trip and host time."""

UNLIMITED = 1 << 60

PolicyName = Literal["balanced", "fill-first"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt that is not yet in the KV cache as a whole.

    Attributes:
        history: its tokens that are, or that steps in flight bring there.
        remaining: its other tokens.
    """

    history: int
    remaining: int


@dataclass(frozen=True, slots=True)
class View:
    """What a policy may look at.

    Attributes:
        decodes: requests that have their prompt behind them, also those in flight.
        ready: context of each decode that could go now, tokens; who was left out longest comes first.
        context: sum of the contexts of all decodes, tokens.
        flying: steps in flight that carry decodes and no prompt.
        prompts: the next prompts, in the order they are taken; not necessarily all.
        begun: how many of them, the first ones, have begun.
        further: how many more prompts wait for which there is room.
        free_tokens: tokens that fit into the free part of the KV cache.
        block_tokens: tokens per block of it.
    """

    decodes: int
    ready: Sequence[int]
    context: int = 0
    flying: int = 0
    prompts: Sequence[Prompt] = ()
    begun: int = 0
    further: int = 0
    free_tokens: int = UNLIMITED
    block_tokens: int = 16


@dataclass(frozen=True, slots=True)
class Limits:
    """What the next step may take, at most.

    Attributes:
        decodes: of the ready ones, the first so many; 0 lets them wait for a cohort in flight.
        prompt_tokens: of all prompts together.
        chunk_tokens: of one prompt.
        begin: prompts that have not begun.
    """

    decodes: int
    prompt_tokens: int = UNLIMITED
    chunk_tokens: int = UNLIMITED
    begin: int = UNLIMITED


class Policy(Protocol):
    """A micro-batch policy. Called on one thread; time is an argument."""

    name: str

    def limits(self, view: View) -> Limits:
        """Limits of the next step. With nothing in flight they let something go, or the engine would stand still."""

    def settled(self, tokens: int, prompt_tokens: int, now_s: float) -> None:
        """A step has settled.

        Args:
            tokens: decodes that the step carried.
            prompt_tokens: prompt tokens that it carried.
            now_s: monotonic seconds.
        """

    def timed(self, size: Size, stages: Sequence[float], round_trip_s: float, host_s: float) -> None:
        """The times of a settled step have come: of each stage, of the way outside the stages, of the host. Seconds."""


class FillFirst:
    """vLLM's own behaviour: a step takes whatever is ready, up to vLLM's limits."""

    name = "fill-first"

    def limits(self, view: View) -> Limits:
        """No limit."""
        return Limits(len(view.ready))

    def settled(self, tokens: int, prompt_tokens: int, now_s: float) -> None:
        """Nothing is learned."""

    def timed(self, size: Size, stages: Sequence[float], round_trip_s: float, host_s: float) -> None:
        """Nothing is learned."""


@dataclass(frozen=True, slots=True)
class _Split:
    """Cohorts wanted in flight, and decodes of each."""

    cohorts: int
    size: int


@dataclass
class _Overheads:
    """Smoothed times outside the stages, seconds per step."""

    round_trip_s: float = 0.0
    host_s: float = 0.0

    def add(self, round_trip_s: float, host_s: float) -> None:
        self.round_trip_s += SMOOTHING * (round_trip_s - self.round_trip_s)
        self.host_s += SMOOTHING * (host_s - self.host_s)


@dataclass(eq=False)
class Balanced:
    """Even cohorts of decodes, prompts in chunks that match them.

    Args:
        stages: pipeline stages.
        ahead: whether one step more than there are stages may be in flight.
        shared: whether the stages share memory bandwidth or cores: then the number of cohorts is found by trying.
        paced: whether workers prescribe a cadence of `stages` steps between two decodes of a request, as with vLLM's
            async scheduling: then there are as many cohorts as stages.
    """

    stages: int
    ahead: bool = False
    shared: bool = False
    paced: bool = False
    name: str = field(default="balanced", init=False)

    def __post_init__(self) -> None:
        if self.stages < 1:
            raise ValueError(f"stages must be at least 1, not {self.stages}")
        self._fit = Fit(self.stages)
        self._overheads = _Overheads()
        self._measured = Measured(self.stages) if self.shared and not self.paced else None
        self._depth = self.stages + self.ahead
        self._cohorts = self.stages
        self._decoding = 0
        self._splits: dict[int, _Split] = {}  # by decodes; until stage times are computed anew
        # Prompts that came while no decode ran, at their most, seconds per stage. None once a decode has begun.
        self._wave_s: float | None = 0.0

    # -- Policy --------------------------------------------------------------------------------------------------

    def limits(self, view: View) -> Limits:
        """Limits of the next step."""
        self._decoding = view.decodes
        fresh = not view.flying and len(view.ready) == view.decodes
        split = _Split(self.stages, 1)
        if view.decodes:
            split = self.split(view.decodes, view.context / view.decodes, fresh=fresh)
        decodes = self._decodes(view, split)
        if not view.decodes:
            self._wave_s = self._wave_s or 0.0
        if view.ready:  # a decode has begun
            self._wave_s = None
        if not view.prompts:
            return Limits(decodes)
        line = self._fit.slowest
        if line is None:
            pending = sum(prompt.remaining for prompt in view.prompts) * (1 + view.further / len(view.prompts))
            tokens = max(LEAST_PROMPT_TOKENS, math.ceil(pending / (PORTIONS * self.stages)))
        else:
            tokens = self._prompt_tokens(view, split, decodes, line)
        if view.decodes:
            # Each decode may need another block before the next prompt ends. With no decode, prompts have all.
            tokens = min(tokens, max(0, view.free_tokens - view.decodes * view.block_tokens))
            if not tokens and not decodes and not view.flying:
                tokens = 1
        return Limits(decodes, tokens, *_share(view, tokens))

    def settled(self, tokens: int, prompt_tokens: int, now_s: float) -> None:
        """A step has settled; see `Policy.settled`."""
        if self._measured is not None:
            self._measured.settled(self._decoding, tokens, prompt_tokens, now_s)

    def timed(self, size: Size, stages: Sequence[float], round_trip_s: float, host_s: float) -> None:
        """The times of a step have come; see `Policy.timed`."""
        before = self._fit.total
        self._fit.add(size, stages)
        if self._fit.total is not before:
            self._splits.clear()
        self._overheads.add(round_trip_s, host_s)

    # -- decodes -------------------------------------------------------------------------------------------------

    def split(self, decodes: int, context: float = 0.0, *, fresh: bool = False) -> _Split:
        """How so many decodes, at least one, shall travel.

        Args:
            decodes: all that run.
            context: tokens of each, on average.
            fresh: none of them is in flight, so that no present number of cohorts has a bonus.
        """
        if self._measured is not None:
            cohorts = self._measured.wanted(decodes)
            return _Split(cohorts, math.ceil(decodes / cohorts))
        total, slowest = self._fit.total, self._fit.slowest
        if self.paced or not self._fit.varied or total is None or slowest is None:
            return _Split(self.stages, math.ceil(decodes / self.stages))
        if fresh or decodes not in self._splits:
            self._splits[decodes] = self._fastest(decodes, context, fresh, total, slowest)
        return self._splits[decodes]

    def _fastest(self, decodes: int, context: float, fresh: bool, total: Line, slowest: Line) -> _Split:
        best_s, present_s = math.inf, math.inf
        best = present = _Split(1, decodes)
        for cohorts in self._candidates(decodes):
            for size in {decodes // cohorts, -(-decodes // cohorts)}:
                carried = min(decodes, cohorts * size)
                way_s = total.of(Size(size, size, size * context)) + self._overheads.round_trip_s
                busy_s = cohorts * slowest.step + slowest.of(Size(carried, carried, carried * context)) - slowest.step
                seconds = max(way_s, busy_s, cohorts * self._overheads.host_s) / carried
                if seconds < best_s * TIE:
                    best_s, best = seconds, _Split(cohorts, size)
                if cohorts == min(self._cohorts, decodes) and seconds < present_s:
                    present_s, present = seconds, _Split(cohorts, size)
        # Half as many or fewer that are as fast have as much less to plan and to send.
        fewer = 2 * best.cohorts <= present.cohorts and best_s <= present_s
        if not fresh and not fewer and best_s >= HYSTERESIS * present_s:
            return present
        if best.cohorts != self._cohorts:
            self._cohorts = best.cohorts
            self._splits.clear()
        return best

    def _candidates(self, decodes: int) -> list[int]:
        """Numbers of cohorts to compare, ascending: all up to the depth, or, of very deep pipes, the likely ones."""
        likely = {self._depth >> halved for halved in range(self._depth.bit_length())}
        likely |= {self.stages >> halved for halved in range(self.stages.bit_length())}
        likely |= {self._cohorts, *range(1, 9)}
        return sorted({min(number, decodes, self._depth) for number in likely})

    def _decodes(self, view: View, split: _Split) -> int:
        """How many of the ready decodes go: none while their cohorts are all in flight."""
        if view.flying >= split.cohorts:
            return 0
        line = self._fit.slowest
        if len(view.ready) <= split.size or line is None or line.pair == 0:
            return min(len(view.ready), split.size)
        each = line.sequence + line.token
        full_s = split.size * (each + line.pair * view.context / view.decodes)
        taken_s = 0.0
        for taken, context in enumerate(view.ready):
            cost_s = each + line.pair * context
            if taken and taken_s + cost_s / 2 > full_s:
                return taken
            taken_s += cost_s
        return len(view.ready)

    # -- prompts -------------------------------------------------------------------------------------------------

    def _prompt_tokens(self, view: View, split: _Split, decodes: int, line: Line) -> int:
        """Prompt tokens whose predicted time fits into the step."""
        count = len(view.prompts) + view.further
        pending_s = sum(_seconds(line, prompt, prompt.remaining) for prompt in view.prompts)
        pending_s *= count / len(view.prompts)  # those that are not shown are taken for alike
        ending = UNLIMITED  # prompts that may end with this step
        if self._wave_s is None:
            average = view.context / view.decodes
            size = (view.decodes + count) / split.cohorts
            level_s = (1 + PROMPT_SHARE) * line.of(Size(size, size, size * average))
            room_s = max(line.step, level_s - line.of(Size(decodes, decodes, decodes * average)))
            fewer = view.decodes / split.cohorts - decodes  # than the average step has
            share_s = max(pending_s / self.stages, LEAST_PIECE * line.sequence)
            even_s = share_s + fewer * (line.sequence + line.token + line.pair * average)
            budget_s = min(room_s, max(share_s / 2, even_s))
        else:
            self._wave_s = max(self._wave_s, pending_s)
            portions = self._portions(line, self._wave_s - line.sequence, count)
            budget_s = line.sequence + (self._wave_s - line.sequence) / portions
            if portions == self.stages:
                ending = -(-(view.decodes + count) // self.stages)
        tokens = 0
        for prompt in view.prompts:
            whole_s = _seconds(line, prompt, prompt.remaining)
            if whole_s <= budget_s:
                tokens += prompt.remaining
                ending -= 1
            elif tokens and whole_s <= LEAST_PIECE * line.sequence:
                break
            else:
                chunk = line.chunk(max(0.0, budget_s - line.sequence), prompt.history)
                tokens += math.ceil(min(prompt.remaining, chunk))
            budget_s -= whole_s
            if budget_s < 0 or not ending:
                break
        return max(1, tokens)

    def _portions(self, line: Line, pending_s: float, prompts: int) -> float:
        """Steps that prompts are spread over when no decode runs: the best number, or one that is nearly as good: 1
        cuts nothing, and with P the cohorts of decodes that follow are even from the start.

        Args:
            line: the slowest stage.
            pending_s: what all prompts take of it, without what each step costs in any case.
            prompts: how many they are.
        """
        others = self.stages - 1
        step_s = line.step + line.sequence
        if others * pending_s <= step_s:
            return 1
        shortest_s = (math.sqrt(pending_s) + math.sqrt(others * step_s)) ** 2
        for portions in (self.stages, 1) if prompts > 1 else (1, self.stages):
            if (portions + others) * (step_s + pending_s / portions) * NEARLY_BEST <= shortest_s:
                return portions
        return math.sqrt(others * pending_s / step_s) if step_s else MOST_PORTIONS * self.stages


def _seconds(line: Line, prompt: Prompt, tokens: int) -> float:
    """What so many further tokens of a prompt add to a step."""
    pairs = tokens * (prompt.history + tokens / 2)
    return line.sequence + line.token * tokens + line.pair * pairs


def _share(view: View, tokens: int) -> tuple[int, int]:
    """The most one prompt may take of a step's tokens, and how many further prompts may begin.

    Prompts that fit into the step are taken whole, in order. One that does not leaves up to half of the step to those
    that do, and shares the rest with others of its kind. No more than `SHARERS` of them are under way: many that are
    done side by side all end late, and each costs its part of every step.
    """
    long = [index for index, prompt in enumerate(view.prompts) if prompt.remaining > tokens]
    under_way = sum(index < view.begun for index in long)
    waiting = [index for index in long if index >= view.begun]
    last = waiting[max(0, SHARERS - under_way) :]
    begin = (last[0] if last else len(view.prompts)) - view.begun
    if not long:
        return UNLIMITED, begin
    left = tokens - min(tokens // 2, sum(prompt.remaining for prompt in view.prompts if prompt.remaining <= tokens))
    return max(1, left // min(SHARERS, len(long))), begin
