"""The client's book: what was sent, how each request ended, and whether its tokens are the right ones. Pure.

A request is opened once and must end once: *completed* (all tokens that were asked for, then the end of the stream),
*failed* (an error of the API, with message and type, before or in the stream), *hung* (nothing came for too long) or
*broken* (anything else: a stream that stops, an answer that is no answer). The first two are promised, the others are
not allowed. What comes after an end, or beyond the tokens that were asked for, came *twice*.
"""

import random
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Outcome = Literal["completed", "failed", "hung", "broken"]

INPUT_LEN, OUTPUT_LEN = (8, 64), (16, 64)
"""Shortest and longest prompt and answer, tokens."""

TOKEN_IDS = (5, 256)
"""First and one past the last of prompts: every model has them, and those below are special in the embedded ones."""


@dataclass(frozen=True)
class Prompt:
    """What a request asks for: the continuation of `tokens` by exactly `asked` greedy ones."""

    number: int
    tokens: tuple[int, ...]
    asked: int


def prompts(count: int, seed: int) -> list[Prompt]:
    """Prompts of random tokens and lengths. The first of a longer list are those of a shorter one."""
    chance = random.Random(f"prompts {seed}")
    return [
        Prompt(
            number,
            tuple(chance.randrange(*TOKEN_IDS) for _ in range(chance.randint(*INPUT_LEN))),
            chance.randint(*OUTPUT_LEN),
        )
        for number in range(count)
    ]


@dataclass(eq=False)
class Request:
    """One request in the book.

    Attributes:
        number: in order of sending.
        prompt: what it asks for.
        tokens: what has come.
        outcome: None while it is open.
        why: what a failed or broken one was told: the error's code and type, or what was missing.
        finished: the API has said that these were all tokens.
        twice: something came after the end, or more than was asked for.
    """

    number: int
    prompt: Prompt
    tokens: list[int] = field(default_factory=list)
    outcome: Outcome | None = None
    why: str = ""
    finished: bool = False
    twice: bool = False

    def event(self, content: Mapping[str, Any]) -> int:
        """An event of the stream. Returns how many tokens it brought."""
        if self.outcome is not None:
            self.twice = True
            return 0
        if "error" in content:
            self.refused(content)
            return 0
        brought = 0
        for choice in content.get("choices", ()):
            new = choice.get("token_ids") or ()
            self.tokens += new
            brought += len(new)
            self.twice |= bool(new) and self.finished
            if choice.get("finish_reason") is not None:
                self.twice |= self.finished
                self.finished = True
                if choice["finish_reason"] != "length":
                    self.end("broken", f"finish reason {choice['finish_reason']}")
        self.twice |= len(self.tokens) > self.prompt.asked
        return brought

    def refused(self, content: Any, status: int | None = None) -> None:
        """An error came, in the stream or (with its HTTP status) instead of it."""
        error = content.get("error") if isinstance(content, dict) else None
        if isinstance(error, dict) and error.get("message") and error.get("type"):
            self.end("failed", f"{error.get('code') or status} {error['type']}")
        else:
            self.end("broken", "an error without message and type" if status is None else f"status {status}")

    def stream_ended(self, *, done: bool) -> None:
        """The stream is over; `done`: after the event that says so."""
        if self.outcome is not None:
            return
        if self.finished and done and len(self.tokens) == self.prompt.asked:
            self.end("completed")
        elif self.finished:
            self.end("broken", f"{len(self.tokens)} tokens of {self.prompt.asked}, end told: {done}")
        else:
            self.end("broken", "the stream stopped")

    def end(self, outcome: Outcome, why: str = "") -> None:
        """It has ended."""
        if self.outcome is not None:
            self.twice = True
            return
        self.outcome, self.why = outcome, why


@dataclass(frozen=True)
class Account:
    """The book, added up. Sent is the sum of completed, failed, hung, broken and open.

    Attributes:
        failures: how many failed with which error.
        wrong: what the broken ones were told, and how many were.
        different: completed with other tokens than undisturbed.
        unsteady: completed ones of prompts whose tokens differed already undisturbed; they are not compared.
    """

    sent: int
    completed: int
    failed: int
    hung: int
    broken: int
    open: int
    twice: int
    different: int
    unsteady: int
    failures: dict[str, int]
    wrong: dict[str, int]

    def faults(self) -> list[str]:
        """What is not as promised."""
        named = {
            "hung": self.hung,
            "broken": self.broken,
            "still open": self.open,
            "told twice": self.twice,
            "with other tokens than undisturbed": self.different,
        }
        return [f"{count} requests {name}" for name, count in named.items() if count]


class Ledger:
    """All requests of a load.

    Args:
        reference: the tokens of each prompt undisturbed, by the prompt's number, of several runs.
    """

    def __init__(self, reference: Mapping[int, Collection[tuple[int, ...]]] | None = None) -> None:
        self._reference = reference or {}
        self.requests: list[Request] = []

    def open(self, prompt: Prompt) -> Request:
        """Note a request that is about to be sent."""
        request = Request(len(self.requests), prompt)
        self.requests.append(request)
        return request

    def account(self) -> Account:
        """Add up."""
        outcomes = Counter(request.outcome for request in self.requests)
        completed = [request for request in self.requests if request.outcome == "completed"]
        unsteady = [r for r in completed if len(set(self._reference.get(r.prompt.number, ()))) > 1]
        steady = [r for r in completed if len(set(self._reference.get(r.prompt.number, ()))) == 1]
        return Account(
            sent=len(self.requests),
            completed=len(completed),
            failed=outcomes["failed"],
            hung=outcomes["hung"],
            broken=outcomes["broken"],
            open=outcomes[None],
            twice=sum(request.twice for request in self.requests),
            different=sum(tuple(r.tokens) not in self._reference[r.prompt.number] for r in steady),
            unsteady=len(unsteady),
            failures=_counted(self.requests, "failed"),
            wrong=_counted(self.requests, "broken"),
        )


def undisturbed(*ledgers: Ledger) -> dict[int, list[tuple[int, ...]]]:
    """The tokens of each prompt in undisturbed runs."""
    found: dict[int, list[tuple[int, ...]]] = {}
    for ledger in ledgers:
        for request in ledger.requests:
            found.setdefault(request.prompt.number, []).append(tuple(request.tokens))
    return found


def _counted(requests: Iterable[Request], outcome: Outcome) -> dict[str, int]:
    return dict(Counter(request.why for request in requests if request.outcome == outcome).most_common())


@dataclass(frozen=True)
class Silence:
    """The longest time without a token after a kill.

    Attributes:
        first_s: from the kill to the first token after it.
        all_s: from the kill to when every request that was open has got a token after it, or has ended.
    """

    first_s: float
    all_s: float


def silence(killed_s: float, arrivals: Sequence[tuple[float, int]], open_requests: Collection[int]) -> Silence | None:
    """Find it. What was computed before the kill may still arrive after it, so the first arrival alone says nothing.

    Args:
        killed_s: when.
        arrivals: of tokens since then, in order: when, for which request.
        open_requests: those that were open at the kill.

    Returns:
        None when no token came.
    """
    times = [killed_s, *(at for at, _ in arrivals)]
    if len(times) < 2:
        return None
    end = max(range(1, len(times)), key=lambda index: times[index] - times[index - 1])
    went_on: dict[int, float] = {}
    for at, number in arrivals[end - 1 :]:
        if number in open_requests:
            went_on.setdefault(number, at)
    first_s = times[end] - killed_s
    return Silence(first_s, max([first_s, *(at - killed_s for at in went_on.values())]))
