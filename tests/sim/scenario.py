"""What a seed means: the engine's size, the requests with their clients, and the faults with their times."""

import random
from dataclasses import dataclass, field
from typing import Literal

from async_pp.core.recovery import Intensity, OnLoss

FAULTS_END_S = 1.5
"""Virtual seconds after which no fault begins, and those in force end."""

PoisonKind = Literal["die", "raise", "hang"]

VERBS = {
    "die": 4,
    "freeze": 4,
    "slow": 2,
    "error": 3,
    "error on every rank": 1,
    "late": 3,
    "corrupt": 2,
    "drop": 2,
    "replay": 1,
    "reorder": 1,
    "restart fails": 3,
    "zygote dies": 1,
    "call": 5,
}
"""Faults and how often they are drawn."""

START_FAULTS = ("fork", "before hello", "no hello", "load raises", "load dies", "load hangs", "late in the start")


@dataclass(frozen=True)
class Poison:
    """What a request does to a rank that computes it."""

    kind: PoisonKind
    stage: int
    from_tokens: int


@dataclass(frozen=True)
class Asked:
    """A request and its client.

    Attributes:
        slow_s: what the client takes for each output.
        cancel_s, cancel_ticks: when it gives up, counted from its arrival.
    """

    name: str
    arrival_s: float
    prompt: tuple[int, ...]
    tokens: int
    n: int = 1
    grammar: bool = False
    slow_s: float = 0.0
    cancel_s: float | None = None
    cancel_ticks: int | None = None
    poison: Poison | None = None


@dataclass(frozen=True)
class Fault:
    """What happens to a rank (drawn as a large number, so that any size of pipeline has one), and how much of it."""

    at_s: float
    verb: str
    rank: int
    amount: float
    kind: str = ""


@dataclass
class Scenario:
    """One seed's world."""

    seed: int
    stages: int = 2
    ranks_per_stage: int = 1
    ahead: int = 0
    v2: bool = False
    on_loss: OnLoss = "replay"
    intensity: Intensity = field(default_factory=lambda: Intensity(1000, 1e9))
    step_deadline_s: float | None = None
    block_size: int = 4
    blocks: int = 64
    budget: int = 16
    chunk: int = 8
    most_running: int = 8
    all_share: float = 0.0
    stage_s: float = 0.01
    peers_notice_s: float | None = 0.002
    asked: list[Asked] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    close_s: float | None = None
    put_off: float = 0.0

    @property
    def ranks(self) -> int:
        return self.stages * self.ranks_per_stage


def draw(seed: int) -> Scenario:
    """The scenario of a seed."""
    dice = random.Random(seed)
    scenario = Scenario(
        seed,
        stages=dice.choice((1, 2, 2, 3, 4)),
        ranks_per_stage=dice.choice((1, 1, 1, 1, 2)),
        ahead=dice.choice((0, 1)),
        v2=dice.random() < 0.3,
        on_loss=dice.choices(("replay", "fail", "exit"), (17, 2, 1))[0],
        step_deadline_s=dice.choice((None, 0.4, 1.0, 3.0)),
        block_size=dice.choice((2, 4)),
        budget=dice.choice((4, 8, 16)),
        chunk=dice.choice((2, 4, 16)),
        most_running=dice.choice((2, 4, 8)),
        all_share=dice.choice((0.0, 0.0, 0.3, 1.0)),
        stage_s=dice.choice((0.002, 0.01, 0.03)),
        peers_notice_s=dice.choice((None, 0.0, 0.001, 0.02, 0.2)),
        put_off=dice.choice((0.0, 0.1, 0.5)),
    )
    if dice.random() < 0.15:
        scenario.intensity = Intensity(dice.randint(0, 3), dice.choice((0.5, 300.0)))
    if dice.random() < 0.1:
        scenario.close_s = dice.uniform(0.0, 2 * FAULTS_END_S)
    scenario.asked = [_asked(dice, scenario, number) for number in range(dice.randint(2, 9))]
    longest = max(len(asked.prompt) + asked.tokens for asked in scenario.asked)
    scenario.blocks = -(-longest // scenario.block_size) + dice.choice((0, 2, 8, 40))
    poisoned = dice.random() < 0.2
    if poisoned:
        chosen = dice.randrange(len(scenario.asked))
        asked = scenario.asked[chosen]
        kind = dice.choice(("die", "raise", "hang"))
        poison = Poison(kind, dice.randrange(scenario.stages), len(asked.prompt) + dice.randint(0, asked.tokens - 1))
        scenario.asked[chosen] = Asked(asked.name, asked.arrival_s, asked.prompt, asked.tokens, poison=poison)
    if not poisoned or dice.random() < 0.5:
        scenario.faults = sorted((_fault(dice) for _ in range(dice.choice((0, 1, 1, 2, 3, 5)))), key=lambda f: f.at_s)
    return scenario


def _asked(dice: random.Random, scenario: Scenario, number: int) -> Asked:
    cancel_s = dice.uniform(0.0, FAULTS_END_S) if dice.random() < 0.12 else None
    cancel_ticks = dice.randint(0, 120) if cancel_s is None and dice.random() < 0.12 else None
    return Asked(
        name=f"r{number}",
        arrival_s=dice.choice((0.0, 0.0, dice.uniform(0.0, FAULTS_END_S))),
        prompt=tuple(dice.randint(1, 997) for _ in range(dice.randint(1, dice.choice((3, 12, 24))))),
        tokens=dice.randint(1, dice.choice((2, 6, 12))),
        n=2 if dice.random() < 0.08 else 1,
        grammar=dice.random() < 0.3,
        slow_s=dice.choice((0.0, 0.0, 0.0, dice.uniform(0.01, 0.3))),
        cancel_s=cancel_s,
        cancel_ticks=cancel_ticks,
    )


def _fault(dice: random.Random) -> Fault:
    verb = dice.choices(tuple(VERBS), tuple(VERBS.values()))[0]
    kind = dice.choice(START_FAULTS) if verb == "restart fails" else ""
    at_s = dice.choice((dice.uniform(0.0, FAULTS_END_S), dice.uniform(0.0, 0.3)))
    return Fault(at_s, verb, dice.randrange(1000), dice.random(), kind)
