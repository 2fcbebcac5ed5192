"""One simulation: the engine's planner, machine, settler and scheduler, between simulated clients and simulated ranks.

Nothing in between knows that time is virtual. What is real is the time that planning and settling take on this machine,
which is measured beside it and goes into no virtual figure.
"""

import asyncio
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from vllm import SamplingParams
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest

from async_pp.bench import BenchFailed, stopping, virtual
from async_pp.bench.devices import policy_of
from async_pp.bench.simulate import bare, requests, stages
from async_pp.bench.simulate.core import Limits, engine_core
from async_pp.bench.simulate.ranks import TOKEN, SimulatedRanks
from async_pp.bench.simulate.report import Host, Row, percentile
from async_pp.bench.simulate.settings import Settings
from async_pp.core.bubble import StageTime
from async_pp.engine.ports import Attend, Plan, StepTimes
from async_pp.engine.stepping import Stepping
from async_pp.engine.vllm_seam.scheduler import VllmScheduler

Tell = Callable[[str], None]

TOLD = 10
"""Lines of progress for one simulation."""


def run(chosen: Settings, tell: Tell) -> list[Row]:
    """One row for each pipeline size, in the order given.

    Raises:
        ConfigError: vLLM refuses the limits.
        BenchFailed: the engine could not go on.
    """
    return [_simulate(chosen, pp, tell) for pp in chosen.pipelines]


def _simulate(chosen: Settings, pp: int, tell: Tell) -> Row:
    limits = Limits(**chosen.limits(pp))
    began = time.monotonic()
    with engine_core(pp, limits) as core, stopping.uninterrupted():
        simulation = _Simulation(chosen, pp, core, lambda text: tell(f"PP {pp}: {text}"))
        try:
            virtual.run(simulation.run())
        except virtual.Deadlock as error:
            raise BenchFailed(f"PP {pp}: {simulation.clients.story}: {error}") from error
    real_s = time.monotonic() - began
    tell(f"PP {pp}: the bare pipe")
    return simulation.row(real_s)


@dataclass(frozen=True)
class _Moment:
    """What had happened up to a moment of virtual time: seconds, output tokens, steps, sequences, use of the stages."""

    at_s: float
    tokens: int
    steps: int
    sequences: int
    stages: StageTime


class _Simulation:
    def __init__(self, chosen: Settings, pp: int, core: Any, tell: Tell) -> None:
        self._chosen = chosen
        self._pp = pp
        self._core = core
        self._costs = chosen.costs(pp)
        self._sequences = min(chosen.limits(pp)["max_num_seqs"], len(chosen.arrivals))
        self._scheduler: _Metered | None = None
        self._ranks: SimulatedRanks | None = None
        self._stepping: Stepping | None = None
        self._depth = pp
        self.clients = _Clients(chosen.arrivals, self._sequences if chosen.saturated else None, self._now, tell)

    async def run(self) -> None:
        """Until every request is answered."""
        loop = asyncio.get_running_loop()
        chosen, clients = self._chosen, self.clients
        ranks = self._ranks = SimulatedRanks(
            self._costs, hop_s=chosen.hop_s, host_s=chosen.host_s, on_span=lambda *span: stepping.span(*span)
        )
        scheduler = VllmScheduler(
            self._core,
            wake=lambda: stepping.wake(),
            emit=clients.take,
            policy=policy_of(chosen.policy, self._pp),
            clock=loop.time,
        )
        metered = self._scheduler = _Metered(scheduler)
        self._depth = scheduler.depth
        stepping = self._stepping = Stepping(metered, ranks, depth=self._depth, emit=clients.take, clock=loop.time)

        def admit(request: EngineCoreRequest) -> None:
            scheduler.add(request)
            stepping.wake()

        task = asyncio.current_task()
        assert task is not None
        with stopping.uninterrupted(lambda: loop.call_soon_threadsafe(task.cancel)):
            async with asyncio.TaskGroup() as tasks:
                steps = tasks.create_task(stepping.run(), name="stepping")
                await clients.run(admit)
                steps.cancel()

    def _now(self) -> _Moment:
        assert self._ranks is not None and self._stepping is not None
        return _Moment(
            asyncio.get_running_loop().time(),
            self.clients.tokens,
            self._ranks.steps,
            self._ranks.sequences,
            self._stepping.bubbles(),
        )

    def row(self, real_s: float) -> Row:
        """The figures, once it has run."""
        assert self._scheduler is not None and self._ranks is not None
        chosen, clients = self._chosen, self.clients
        first, last = clients.measured()
        bubble = last.stages.since(first.stages).shares()
        passed_s = last.at_s - first.at_s
        tokens_per_s = (last.tokens - first.tokens) / passed_s
        formula = self._formula()
        pipe = self._bare_pipe(formula)
        return Row(
            pp=self._pp,
            policy=chosen.policy,
            requests=len(chosen.arrivals),
            tokens_per_s=tokens_per_s,
            bare_pipe_tokens_per_s=pipe.tokens_per_s,
            bare_pipe_ratio=tokens_per_s / pipe.tokens_per_s,
            bare_pipe_cohorts=pipe.cohorts,
            bare_pipe_step_ms=None if pipe.step_s is None else 1000 * pipe.step_s,
            formula_tokens_per_s=formula.tokens_per_s,
            formula_ratio=tokens_per_s / formula.tokens_per_s,
            stage_use=bubble["busy"],
            sequences_per_step=(last.sequences - first.sequences) / (last.steps - first.steps),
            ttft_ms_p50=percentile(clients.ttft_ms, 50),
            ttft_ms_p99=percentile(clients.ttft_ms, 99),
            itl_ms_p50=percentile(clients.itl_ms, 50),
            itl_ms_p99=percentile(clients.itl_ms, 99),
            steps=self._ranks.steps,
            empty_steps=self._ranks.empty_steps,
            virtual_s=clients.ended.at_s,
            bubble=bubble,
            host=Host(
                real_s=real_s,
                plan_settle_ms_p50=percentile(self._scheduler.ours_ms, 50),
                vllm_ms_p50=percentile(self._scheduler.vllm_ms, 50),
            ),
        )

    def _formula(self) -> stages.Formula:
        chosen = self._chosen
        return stages.formula(
            self._costs,
            requests.mix(chosen.arrivals),
            self._sequences,
            hop_s=chosen.hop_s,
            host_s=chosen.host_s,
            most=self._depth,
        )

    def _bare_pipe(self, formula: stages.Formula) -> bare.BarePipe:
        chosen = self._chosen
        pipe = bare.Pipe(
            costs=self._costs,
            hop_s=chosen.hop_s,
            host_s=chosen.host_s,
            arrivals=chosen.arrivals,
            saturated=chosen.saturated,
            seats=self._sequences,
            step_tokens=chosen.limits(self._pp)["max_num_batched_tokens"],
            most=self._depth,
        )
        return bare.fastest(pipe, formula)


class _Clients:
    """Sends the requests and notes when tokens come.

    Args:
        arrivals: the requests, by arrival.
        kept: keep so many requests open as long as there are any, whenever they arrive; None: as they arrive.
        now: what has happened so far.
        tell: told about the progress.
    """

    def __init__(
        self, arrivals: Sequence[requests.Arrival], kept: int | None, now: Callable[[], _Moment], tell: Tell
    ) -> None:
        self.tokens = 0
        self.ttft_ms = array("d")
        self.itl_ms = array("d")
        self._arrivals = arrivals
        self._kept = kept
        self._now = now
        self._tell = tell
        self._told_every = max(1, len(arrivals) // TOLD)
        self._sent = 0
        self._ended = 0
        self._came_s: dict[str, tuple[float, bool]] = {}  # of each open request: when it or its last token came
        self._done = asyncio.Event()
        self._moments: dict[str, _Moment] = {}
        self._admit: Callable[[EngineCoreRequest], None] = lambda _request: None

    @property
    def story(self) -> str:
        """How far it came."""
        return f"{self._sent} requests sent, {self._ended} of {len(self._arrivals)} answered"

    async def run(self, admit: Callable[[EngineCoreRequest], None]) -> None:
        """Send all requests and wait until each is answered."""
        self._admit = admit
        self._moments["begin"] = self._now()
        loop = asyncio.get_running_loop()
        if self._kept is not None:
            for _ in range(self._kept):
                self._send()
        else:
            for arrival in self._arrivals:
                if arrival.arrival_s > loop.time():
                    await asyncio.sleep(arrival.arrival_s - loop.time())
                self._send()
        await self._done.wait()
        self._moments["end"] = self._now()

    @property
    def ended(self) -> _Moment:
        """The end."""
        return self._moments["end"]

    def measured(self) -> tuple[_Moment, _Moment]:
        """The moments between which throughput is measured.

        As requests arrive: begin and end. With a number of open requests: when as many have ended (those that began
        together went in step), and when the last was sent (from then on fewer are open); begin and end as well if that
        is no time.
        """
        moments = self._moments
        first, last = moments.get("a generation has ended"), moments.get("all are sent")
        if first is not None and last is not None and first.at_s < last.at_s:
            return first, last
        return moments["begin"], moments["end"]

    def take(self, outputs: Sequence[EngineCoreOutputs]) -> None:
        """Tokens have come."""
        now_s = asyncio.get_running_loop().time()
        for output in (output for told in outputs for output in told.outputs):
            since_s, waits = self._came_s[output.request_id]
            if output.new_token_ids:
                (self.ttft_ms if waits else self.itl_ms).append(1000 * (now_s - since_s))
                self._came_s[output.request_id] = (now_s, False)
                self.tokens += len(output.new_token_ids)
            if output.finished:
                self._end(output.request_id)

    def _send(self) -> None:
        number = str(self._sent)
        arrival = self._arrivals[self._sent]
        self._sent += 1
        now_s = asyncio.get_running_loop().time()
        self._came_s[number] = (now_s, True)
        if self._kept is not None and self._sent == len(self._arrivals):
            self._moments["all are sent"] = self._now()
        self._admit(
            EngineCoreRequest(
                request_id=number,
                prompt_token_ids=[TOKEN] * arrival.input_tokens,
                mm_features=None,
                sampling_params=SamplingParams(max_tokens=arrival.output_tokens, ignore_eos=True, detokenize=False),
                pooling_params=None,
                arrival_time=now_s,
                lora_request=None,
                cache_salt=None,
                data_parallel_rank=None,
            )
        )

    def _end(self, request_id: str) -> None:
        del self._came_s[request_id]
        self._ended += 1
        if self._ended == self._kept:
            self._moments["a generation has ended"] = self._now()
        if self._ended % self._told_every == 0:
            now_s = asyncio.get_running_loop().time()
            self._tell(f"{self._ended} of {len(self._arrivals)} requests, {now_s:.1f} virtual s")
        if self._ended == len(self._arrivals):
            self._done.set()
        elif self._kept is not None and self._sent < len(self._arrivals):
            self._send()


class _Metered:
    """A scheduler port that measures the real time of each step: its own calls, and vLLM's two within them.

    Attributes:
        ours_ms, vllm_ms: of each settled step. A plan that came to nothing counts towards the next one.
    """

    def __init__(self, scheduler: VllmScheduler) -> None:
        self.ours_ms = array("d")
        self.vllm_ms = array("d")
        self._scheduler = scheduler
        self._inside_s = 0.0  # vLLM's, all in all
        self._planning = _Took()
        self._planned: deque[_Took] = deque()  # of each plan in flight, oldest first
        vllm = scheduler.scheduler
        vllm.schedule = self._inside(vllm.schedule)
        vllm.update_from_output = self._inside(vllm.update_from_output)

    def plan(self, ask: bool = False) -> Plan | Attend | None:
        with self._measured(self._planning):
            plan = self._scheduler.plan(ask)
        if isinstance(plan, Plan):
            self._planned.append(self._planning)
            self._planning = _Took()
        return plan

    def bitmask(self, plan: Plan) -> Any:
        return self._scheduler.bitmask(plan)

    def settle(self, plan: Plan, answers: Mapping[int, Any], output_rank: int) -> Sequence[EngineCoreOutputs]:
        took = self._planned.popleft()
        with self._measured(took):
            outputs = self._scheduler.settle(plan, answers, output_rank)
        self.ours_ms.append(1000 * took.ours_s)
        self.vllm_ms.append(1000 * took.vllm_s)
        return outputs

    def connector_output(self, rank: int, output: Any) -> Sequence[EngineCoreOutputs] | None:
        return self._scheduler.connector_output(rank, output)

    @property
    def transferring(self) -> bool:
        return self._scheduler.transferring

    def timed(self, plan: Plan, times: StepTimes) -> None:
        self._scheduler.timed(plan, times)

    @contextmanager
    def _measured(self, took: "_Took") -> Iterator[None]:
        began, inside_s = time.perf_counter(), self._inside_s
        yield
        took.ours_s += time.perf_counter() - began
        took.vllm_s += self._inside_s - inside_s

    def _inside(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args)
            finally:
                self._inside_s += time.perf_counter() - began

        return timed


@dataclass
class _Took:
    """Seconds of planning and settling a step; those of vLLM within them."""

    ours_s: float = 0.0
    vllm_s: float = 0.0
