"""A scheduler and an executor small enough to see through."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from async_pp.core.gather import Scope
from async_pp.engine.ports import Attend, Plan, StepTimes


@dataclass
class FakeScheduler:
    """Plans what is put into `todo`; remembers what it was asked and told."""

    todo: list[Plan | Attend] = field(default_factory=list)
    asked: int = 0
    settled: list[tuple[Any, dict[int, Any]]] = field(default_factory=list)
    masks: list[Any] = field(default_factory=list)
    error: Exception | None = None
    times: list[tuple[Any, StepTimes]] = field(default_factory=list)

    transferring: bool = False
    asks: int = 0
    outputs: list[tuple[int, Any]] = field(default_factory=list)

    def plan(self, ask: bool = False) -> Plan | Attend | None:
        self.asked += 1
        self.asks += ask
        if ask and not self.todo and self.transferring:
            return Attend("transfers?")
        return self.todo.pop(0) if self.todo else None

    def connector_output(self, rank: int, output: Any) -> Sequence[Any] | None:
        self.outputs.append((rank, output))
        return None if output == "statistics" else []

    def bitmask(self, plan: Plan) -> Any:
        self.masks.append(plan.work)
        return f"mask of {plan.work}"

    def settle(self, plan: Plan, answers: Mapping[int, Any], output_rank: int) -> Sequence[Any]:
        if self.error is not None:
            raise self.error
        self.settled.append((plan.work, dict(answers)))
        return [f"output of {plan.work}"]

    def timed(self, plan: Plan, times: StepTimes) -> None:
        self.times.append((plan.work, times))


@dataclass
class FakeLayout:
    ranks: int
    output_rank: int

    @property
    def stages(self) -> int:
        return self.ranks


class FakeExecutor:
    """Hands out futures that the test resolves; remembers what was sent."""

    def __init__(self, ranks: int = 2) -> None:
        self.epoch = 0
        self.layout = FakeLayout(ranks, ranks - 1)
        self.sent: list[tuple[str, int, Any]] = []
        self.futures: dict[tuple[int, int], asyncio.Future[Any]] = {}

    def execute(self, step: int, work: Any, *, grammar: Any, sample: str, scope: Scope) -> Any:
        self.sent.append((sample, step, grammar))
        ranks = range(self.layout.ranks) if scope is Scope.ALL else [self.layout.output_rank]
        made = [(rank, asyncio.get_running_loop().create_future()) for rank in ranks]
        self.futures.update({(step, rank): future for rank, future in made})
        return made

    def attend(self, work: Any) -> Any:
        number = -len(self.sent)  # apart from the numbers of steps
        self.sent.append(("attend", number, work))
        made = [(rank, asyncio.get_running_loop().create_future()) for rank in range(self.layout.ranks)]
        self.futures.update({(number, rank): future for rank, future in made})
        return made

    def release(self, step: int, grammar: Any) -> None:
        self.sent.append(("release", step, grammar))


def a_plan(name: str, *requests: str, samples: bool = True, pending: bool = False, scope: Scope = Scope.OUTPUT) -> Plan:
    """A plan whose work is its name."""
    return Plan(requests=requests or (name,), work=name, samples=samples, pending_tokens=pending, scope=scope)


async def turns(count: int = 8) -> None:
    """Let everything that is ready run."""
    for _ in range(count):
        await asyncio.sleep(0)
