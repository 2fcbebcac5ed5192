"""A scheduler in place of vLLM's, small enough to know at any time what must be true of it.

It holds vLLM's own request objects, so that the engine's own replay takes them from one epoch to the next. Blocks of
the KV cache are numbers; a block that is given back twice or is missing breaks the run. What it is called with after
its epoch has ended breaks the run too.
"""

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from zlib import crc32

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.request import Request, RequestStatus

from async_pp.core.fit import Size
from async_pp.core.gather import Scope
from async_pp.engine.ports import Attend, Plan, StepTimes
from async_pp.engine.vllm_seam.replay import Carried, Replay
from async_pp.ranks.runner import Restored
from tests.sim.scenario import Scenario
from tests.sim.story import Story

GRAMMAR = "grammar"


def next_token(tokens: Sequence[int]) -> int:
    """What the model samples after these tokens."""
    return crc32(",".join(map(str, tokens)).encode()) % 997 + 1


@dataclass(frozen=True)
class Resumed:
    resumed_req_ids: frozenset[str]


@dataclass(frozen=True)
class Work:
    """What every rank gets of a step.

    Attributes:
        new: requests of which no rank knows: name and tokens.
        scheduled: name, tokens computed before, tokens of this step.
        masked: requests whose sampling needs a mask.
    """

    epoch: int
    serial: int
    new: tuple[tuple[str, tuple[int, ...]], ...]
    scheduled: tuple[tuple[str, int, int], ...]
    finished: tuple[str, ...]
    masked: tuple[str, ...]
    scheduled_cached_reqs: Resumed


class Blocks:
    """Blocks of a KV cache."""

    def __init__(self, total: int, size: int, story: Story) -> None:
        self.total = total
        self._size = size
        self._story = story
        self._free = deque(range(total))
        self._held: dict[str, list[int]] = {}

    def missing(self, name: str, tokens: int) -> int:
        """Blocks that must be free for so many tokens and are not."""
        return -(-tokens // self._size) - len(self._held.get(name, ())) - len(self._free)

    def take(self, name: str, tokens: int) -> None:
        held = self._held.setdefault(name, [])
        while len(held) < -(-tokens // self._size):
            held.append(self._free.popleft())

    def give_back(self, name: str) -> None:
        for block in self._held.pop(name, ()):
            self._story.require(block not in self._free, f"block {block} of {name} is freed twice")
            self._free.append(block)

    @property
    def free(self) -> int:
        return len(self._free)

    def check(self, names: Collection[str]) -> None:
        """Every block is free or held once, by a request that is open."""
        every = [*self._free, *(block for held in self._held.values() for block in held)]
        self._story.require(len(every) == self.total == len(set(every)), "blocks are lost or held twice")
        strangers = sorted(self._held.keys() - set(names))
        self._story.require(not strangers, f"blocks are held by requests that have ended: {strangers}")


class Core:
    """What the engine uses of vLLM's engine core and of its scheduler, in one."""

    request_block_hasher = None
    kv_cache_config = SimpleNamespace(kv_cache_groups=(None,))
    vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=False))

    def __init__(self, scenario: Scenario, story: Story) -> None:
        self.scheduler = self
        self.use_v2_model_runner = scenario.v2
        self.mm_receiver_cache = None
        self.structured_output_manager = SimpleNamespace(clear_backend=lambda: None)
        self.pause_state = PauseState.UNPAUSED
        self.requests: dict[str, Request] = {}
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.finished: list[str] = []
        self.blocks = Blocks(scenario.blocks, scenario.block_size, story)
        self._story = story

    def add_request(self, request: Request) -> None:
        name = request.request_id
        self._story.require(name not in self.requests, f"{name} is added twice")
        self._story.require(request.num_computed_tokens == 0, f"{name} is added with computed tokens")
        self.requests[name] = request
        self.waiting.append(request)

    def abort_requests(self, names: Iterable[str]) -> None:
        for name in names:
            if name in self.requests:
                self.end(self.requests[name], RequestStatus.FINISHED_ABORTED)

    def end(self, request: Request, status: RequestStatus) -> None:
        request.status = status
        name = request.request_id
        del self.requests[name]
        self.waiting = deque(one for one in self.waiting if one is not request)
        self.running = [one for one in self.running if one is not request]
        self.blocks.give_back(name)
        self.finished.append(name)

    def preempt(self, request: Request) -> None:
        self.running.remove(request)
        self.waiting.appendleft(request)
        self.blocks.give_back(request.request_id)
        request.num_computed_tokens = 0
        request.status = RequestStatus.PREEMPTED

    def set_pause_state(self, state: PauseState) -> None:
        self.pause_state = state

    def shutdown(self) -> None:
        """vLLM's connectors would end."""


class SimScheduler:
    """The scheduler port, and what the engine's client asks of it.

    Args:
        scenario: limits.
        epoch: whose it is.
        whole: decides whether a step waits for every rank.
    """

    def __init__(self, scenario: Scenario, epoch: int, story: Story, whole: Callable[[], bool]) -> None:
        self.core = Core(scenario, story)
        self.scheduler = self.core
        self.depth = scenario.stages + scenario.ahead
        self.left = False
        self.flying: deque[Plan] = deque()
        self.policy: Any = None
        self._scenario = scenario
        self._epoch = epoch
        self._story = story
        self._whole = whole
        self._replay = Replay(self.core)
        self._in_flight: Counter[str] = Counter()
        self._serial = 0
        self._tried: set[str] = set()  # suspects that have not come through a step

    # -- requests ------------------------------------------------------------------------------------------------

    def add(self, request: EngineCoreRequest) -> None:
        self._live("add")
        self.core.add_request(Request.from_engine_core_request(request, None))

    def abort(self, request_ids: Iterable[str]) -> None:
        self._live("abort")
        names = list(request_ids)
        self._replay.drop(names)
        self.core.abort_requests(names)

    def resume(self, carried: Carried, suspects: Collection[str]) -> None:
        self._live("resume")
        self._tried = set(suspects)
        self._replay.add(carried.hand_over(self.core), suspects)

    @property
    def names(self) -> set[str]:
        """Requests that it knows."""
        return {*self.core.requests, *self._replay.waiting}

    @property
    def unfinished(self) -> bool:
        return bool(self.names)

    def leave(self) -> Carried:
        self._live("leave")
        self.left = True
        carried = Carried(self.core)
        carried.requests.update(self._replay.waiting)
        self.core.shutdown()
        return carried

    # -- SchedulerPort -------------------------------------------------------------------------------------------

    transferring = False

    def plan(self, ask: bool = False) -> Plan | Attend | None:
        self._live("plan")
        again = True
        while again:
            self._replay.next_suspect()
            plan, again = self._attempt()
            if plan is not None:
                return plan
        return None

    def bitmask(self, plan: Plan) -> Any:
        self._live("bitmask")
        masked = _of(plan.work).masked
        requests = self.core.requests
        return {name: requests[name].num_output_tokens for name in masked if name in requests} if masked else None

    def settle(self, plan: Plan, answers: Mapping[int, Any], output_rank: int) -> Sequence[EngineCoreOutputs]:
        self._live("settle")
        story = self._story
        work = _of(plan.work)
        story.require(self.flying and self.flying[0] is plan, f"step {work.serial} is settled out of order")
        self.flying.popleft()
        ranks = range(self._scenario.ranks) if plan.scope is Scope.ALL else [output_rank]
        story.require(
            sorted(answers) == list(ranks), f"step {work.serial} is settled with answers of {sorted(answers)}"
        )
        epoch, serial, tokens = answers[output_rank]
        story.require((epoch, serial) == (work.epoch, work.serial), f"step {work.serial} gets an answer to {serial}")
        told = []
        for name, _, _ in work.scheduled:
            self._in_flight[name] -= 1
            self._tried.discard(name)
            request = self.core.requests.get(name)
            if request is None or name not in tokens:
                continue
            request.append_output_token_ids(tokens[name])
            ended = request.num_output_tokens >= request.max_tokens
            reason = FinishReason.LENGTH if ended else None
            told.append(EngineCoreOutput(name, [tokens[name]], finish_reason=reason))
            if ended:
                self.core.end(request, RequestStatus.FINISHED_LENGTH_CAPPED)
        story.tell(f"e{self._epoch} settle {serial}: {' '.join(f'{k}={v}' for k, v in tokens.items())}")
        return [EngineCoreOutputs(outputs=told)]

    def connector_output(self, rank: int, output: Any) -> Sequence[Any] | None:
        self._story.require(False, "a connector's output came, and there is no connector")
        return None

    def timed(self, plan: Plan, times: StepTimes) -> None:
        self._live("timed")
        self._story.require(len(times.stages) == self._scenario.stages, "times of every stage")

    # -- inside --------------------------------------------------------------------------------------------------

    def _live(self, what: str) -> None:
        self._story.require(not self.left, f"{what} reached the scheduler of epoch {self._epoch}, which is over")

    def _attempt(self) -> tuple[Plan | None, bool]:
        core, scenario = self.core, self._scenario
        budget = scenario.budget
        scheduled: dict[str, int] = {}
        preempted: list[str] = []
        cohort = -(-len(core.running) // scenario.stages) or 1
        for request in list(core.running):
            if len(scheduled) < cohort and request in core.running:
                budget -= self._take(request, budget, scheduled, preempted)
        new: list[tuple[str, tuple[int, ...]]] = []
        resumed: list[str] = []
        while core.waiting and not preempted and len(core.running) < scenario.most_running and budget:
            request = core.waiting[0]
            if self._in_flight[request.request_id]:
                break  # preempted or aborted in flight: what is on its way must come first
            taken = self._take(request, budget, scheduled, None)
            if not taken:
                break
            budget -= taken
            core.waiting.popleft()
            core.running.append(request)
            if request.status == RequestStatus.PREEMPTED and not scenario.v2:
                resumed.append(request.request_id)
            else:
                new.append((request.request_id, tuple(request.all_token_ids)))
            request.status = RequestStatus.RUNNING
        if not scheduled:
            return None, bool(preempted)
        return self._planned(scheduled, new, resumed), False

    def _take(self, request: Request, budget: int, scheduled: dict[str, int], preempted: list[str] | None) -> int:
        name, before = request.request_id, request.num_computed_tokens
        chunk = min(request.num_tokens - before, budget, self._scenario.chunk)
        if chunk <= 0:
            return 0
        while self.core.blocks.missing(name, before + chunk) > 0:
            later = self.core.running[self.core.running.index(request) + 1 :] if preempted is not None else []
            victims = [one for one in later if self._idle(one, scheduled)]  # later ones: so the first gets on
            if preempted is None or not victims:
                return 0
            self.core.preempt(victims[-1])
            preempted.append(victims[-1].request_id)
        self.core.blocks.take(name, before + chunk)
        scheduled[name] = chunk
        return chunk

    def _idle(self, request: Request, scheduled: dict[str, int]) -> bool:
        return request.request_id not in scheduled and not self._in_flight[request.request_id]

    def _planned(self, scheduled: dict[str, int], new: list[Any], resumed: list[str]) -> Plan:
        requests = self.core.requests
        rows = []
        pending = False
        masked = []
        for name, chunk in scheduled.items():
            request = requests[name]
            rows.append((name, request.num_computed_tokens, chunk))
            request.num_computed_tokens += chunk
            extra = request.sampling_params.extra_args or {}
            if extra.get(GRAMMAR) and request.num_computed_tokens == request.num_tokens:
                masked.append(name)
                pending = pending or self._in_flight[name] > 0
        suspects = self._tried & scheduled.keys()
        self._story.require(len(suspects) < 2, f"suspects share a step: {sorted(suspects)}")
        self._in_flight.update(list(scheduled))
        finished, self.core.finished = self.core.finished, []
        serial = self._serial
        self._serial += 1
        work = Work(
            self._epoch, serial, tuple(new), tuple(rows), tuple(finished), tuple(masked), Resumed(frozenset(resumed))
        )
        tokens = sum(scheduled.values())
        plan = Plan(
            requests=tuple(scheduled),
            work=self._replay.told(work),
            samples=True,
            pending_tokens=pending,
            scope=Scope.ALL if self._whole() else Scope.OUTPUT,
            size=Size(len(scheduled), tokens),
        )
        self.flying.append(plan)
        self._story.require(len(self.flying) <= self.depth, "more steps in flight than slots")
        self._story.tell(f"e{self._epoch} plan {serial}: {' '.join(f'{n}@{b}+{c}' for n, b, c in rows)}")
        return plan


def _of(work: Any) -> Work:
    return work.work if isinstance(work, Restored) else work
