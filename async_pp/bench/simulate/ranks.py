"""Simulated ranks: the executor's interface towards stepping, with answers that come when the oracle says.

What a real rank set would compute is known beforehand, so a step costs one calculation and one timer.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput

from async_pp.bench.simulate.stages import Oracle, StageCost, StepLoad
from async_pp.core.gather import Scope
from async_pp.engine.ports import OnSpan
from async_pp.wire.messages import SampleMode

TOKEN = 7
"""The token that every request samples: which one it is changes nothing."""


@dataclass(frozen=True)
class SimulatedLayout:
    """One rank for each stage.

    Attributes:
        stages: number of them.
    """

    stages: int

    @property
    def ranks(self) -> int:
        """As many."""
        return self.stages

    @property
    def output_rank(self) -> int:
        """The last."""
        return self.stages - 1


class SimulatedRanks:
    """One rank set on the running (virtual) loop.

    Args:
        costs: of each stage.
        hop_s: seconds from the engine to the first stage, from each stage to the next, and back to the engine.
        host_s: seconds that the engine is modelled to take for each step, one step after the other.
        on_span: told each stage's begin and end of a step, when the step's answer comes.
    """

    epoch = 0

    def __init__(self, costs: Sequence[StageCost], *, hop_s: float, host_s: float, on_span: OnSpan) -> None:
        self.layout = SimulatedLayout(len(costs))
        self.steps = 0
        self.empty_steps = 0
        self.sequences = 0
        self._loop = asyncio.get_running_loop()
        self._oracle = Oracle(costs, hop_s)
        self._hop_s = hop_s
        self._host_s = host_s
        self._host_free_s = 0.0
        self._on_span = on_span
        self._known: dict[str, int] = {}  # prompt and sampled tokens of each request, as a model runner keeps them

    def execute(
        self, step: int, work: SchedulerOutput, *, grammar: Any, sample: SampleMode, scope: Scope
    ) -> list[tuple[int, asyncio.Future[Any]]]:
        """Send a step. Returns the future of the output rank's answer, which comes in virtual time."""
        load, output = self._compute(work)
        self.steps += 1
        self.empty_steps += not load.tokens
        self.sequences += len(work.num_scheduled_tokens)
        self._host_free_s = max(self._host_free_s, self._loop.time()) + self._host_s
        spans = self._oracle.spans(self._host_free_s, load)
        answer: asyncio.Future[Any] = self._loop.create_future()
        self._loop.call_at(spans[-1][1] + self._hop_s, self._answer, step, spans, answer, output)
        return [(self.layout.output_rank, answer)]

    def attend(self, work: Any) -> list[tuple[int, asyncio.Future[Any]]]:
        """Refused: there is no connector."""
        raise NotImplementedError("something was sent to connectors")

    def release(self, step: int, grammar: Any) -> None:
        """Refused: no request here has a grammar, which alone defers sampling."""
        raise NotImplementedError(f"sampling of step {step} was deferred")

    def _answer(
        self, step: int, spans: Sequence[tuple[float, float]], answer: asyncio.Future[Any], output: ModelRunnerOutput
    ) -> None:
        for stage, (began_s, ended_s) in enumerate(spans):
            self._on_span(stage, step, began_s, ended_s)
        if not answer.done():  # cancelled, when the simulation is stopped
            answer.set_result((output, None))

    def _compute(self, work: SchedulerOutput) -> tuple[StepLoad, ModelRunnerOutput]:
        """What the step costs, and its answer: a token for each request that is computed to its end."""
        for request_id in work.finished_req_ids:
            self._known.pop(request_id, None)
        computed: dict[str, int] = {}
        for new in work.scheduled_new_reqs:
            computed[new.req_id] = new.num_computed_tokens
            self._known[new.req_id] = len(new.prompt_token_ids)
        cached = work.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        attended = 0
        sampled = []
        scheduled = work.num_scheduled_tokens
        for request_id, chunk in scheduled.items():
            seen = computed[request_id] + chunk
            attended += chunk * seen
            ends = seen >= self._known[request_id]
            self._known[request_id] += ends
            sampled.append([TOKEN] if ends else [])
        index = {request_id: place for place, request_id in enumerate(scheduled)}
        output = ModelRunnerOutput(req_ids=list(scheduled), req_id_to_index=index, sampled_token_ids=sampled)
        return StepLoad(len(scheduled), work.total_num_scheduled_tokens, attended), output
