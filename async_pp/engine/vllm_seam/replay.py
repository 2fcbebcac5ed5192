"""Open requests, taken from the engine core of a lost rank set and added to that of the next one.

A request goes on as one that vLLM's scheduler has preempted: its prompt and its tokens so far are computed again, then
the next token is sampled. It is a new object of vLLM's with the tokens of the old one, so that no counter of steps that
never came is left in it. What is in the front end (detokenizer, stop strings, log-probabilities) is not touched by a
loss, and neither is the state of a grammar: it has advanced by exactly the tokens that were settled.

vLLM's workers know a preempted request; those of a new rank set do not. Workers of the v2 runner are told of every
resumed request as of a new one anyhow; for the others the first step of such a request takes along what they must know
(`Restored`).

A suspect of the loss comes back alone: the next one is added when the last one's tokens are scheduled to their end, so
that no step carries two that have not come through one. With asynchronous scheduling it may decode before its first
token has come: there the next one waits for that token.
"""

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from async_pp.ranks.runner import Restored


class Carried:
    """What outlives an engine core: its open requests, and what they or the front end depend on.

    Args:
        core: the engine core; no step of it is settled any more.
    """

    def __init__(self, core: Any) -> None:
        self.requests: dict[str, Request] = {
            name: request for name, request in core.scheduler.requests.items() if not request.is_finished()
        }
        self.pause_state: PauseState = core.scheduler.pause_state
        self._grammars = core.structured_output_manager
        self._inputs = core.mm_receiver_cache

    @property
    def tokens(self) -> dict[str, int]:
        """How many tokens each request has generated."""
        return {name: request.num_output_tokens for name, request in self.requests.items()}

    @property
    def streaming(self) -> frozenset[str]:
        """Ids of requests whose input is still coming in parts, which cannot be added again."""
        return frozenset(name for name, request in self.requests.items() if request.resumable)

    def drop(self, request_ids: Iterable[str]) -> None:
        """These have ended in the meantime."""
        for name in request_ids:
            self.requests.pop(name, None)

    def hand_over(self, core: Any) -> list[Request]:
        """Give it to a new engine core. Returns the requests as they are to be added to it, in order of admission."""
        core.structured_output_manager = core.scheduler.structured_output_manager = self._grammars
        core.mm_receiver_cache = self._inputs  # the front end leaves out inputs that it knows to be in there
        core.scheduler.set_pause_state(self.pause_state)
        return [_anew(request, core) for request in self.requests.values()]

    def close(self) -> None:
        """There is no next engine core."""
        self._grammars.clear_backend()


class Replay:
    """Requests that go on over a new rank set.

    Args:
        core: the engine core over it.
    """

    def __init__(self, core: Any) -> None:
        self._core = core
        self._unknown: set[str] = set()  # with tokens of which this rank set has not been told
        self._suspects: dict[str, Request] = {}  # not added yet
        self._trying: Request | None = None  # the suspect added last
        self._tokens = 0  # that it had
        self._ahead: bool = core.vllm_config.scheduler_config.async_scheduling

    @property
    def waiting(self) -> Mapping[str, Request]:
        """Suspects that have not been added yet, by id."""
        return self._suspects

    def add(self, requests: Iterable[Request], suspects: Collection[str]) -> None:
        """Add requests, suspects one after the other."""
        for request in requests:
            if request.request_id in suspects:
                self._suspects[request.request_id] = request
            else:
                self._add(request)

    def next_suspect(self) -> None:
        """Add the next suspect if the last one's step is planned, or it has ended."""
        scheduler = self._core.scheduler
        while self._suspects:
            trying = self._trying
            if trying is not None and trying.request_id in scheduler.requests and not self._through(trying):
                return
            self._trying = self._suspects.pop(next(iter(self._suspects)))
            self._tokens = self._trying.num_output_tokens
            self._add(self._trying)

    def drop(self, request_ids: Iterable[str]) -> list[str]:
        """Take out those that have not been added yet. Returns their ids."""
        return [name for name in list(request_ids) if self._suspects.pop(name, None) is not None]

    def told(self, output: SchedulerOutput) -> Any:
        """The work of a step, with what its ranks must know of requests that former ranks had begun."""
        names = self._unknown & output.scheduled_cached_reqs.resumed_req_ids
        if not names:
            return output
        self._unknown -= names
        requests = self._core.scheduler.requests
        groups = len(self._core.scheduler.kv_cache_config.kv_cache_groups)
        return Restored([_known(requests[name], groups) for name in sorted(names)], output)

    def _through(self, request: Request) -> bool:
        if self._ahead:
            return bool(request.num_output_tokens > self._tokens)
        return bool(request.num_computed_tokens >= request.num_tokens)

    def _add(self, request: Request) -> None:
        if request.status == RequestStatus.PREEMPTED:
            self._unknown.add(request.request_id)
        self._core.add_request(request)
        request.events.clear()  # the front end was told when it was admitted


def _anew(former: Request, core: Any) -> Request:
    request = Request(
        request_id=former.request_id,
        prompt_token_ids=former.prompt_token_ids,
        sampling_params=former.sampling_params,
        pooling_params=former.pooling_params,
        client_index=former.client_index,
        arrival_time=former.arrival_time,
        prompt_embeds=former.prompt_embeds,
        prompt_is_token_ids=former.prompt_is_token_ids,
        mm_features=former.mm_features,
        lora_request=former.lora_request,
        cache_salt=former.cache_salt,
        priority=former.priority,
        trace_headers=former.trace_headers,
        block_hasher=core.request_block_hasher,
        session_id=former.session_id,
        kv_hints=former.kv_hints,
    )
    request.kv_transfer_params = former.kv_transfer_params  # a connector notes in them what it has loaded
    request.ec_transfer_params = former.ec_transfer_params
    request.prefill_stats = former.prefill_stats  # None once they were told
    request.spec_decode_metrics = former.spec_decode_metrics
    request.structured_output_request = former.structured_output_request
    if former.status != RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
        request.status = RequestStatus.WAITING
    if former.num_output_tokens:
        request.append_output_token_ids(list(former.output_token_ids))
        request.num_preemptions = former.num_preemptions + 1
        if not core.scheduler.use_v2_model_runner:
            request.status = RequestStatus.PREEMPTED
    return request


def _known(request: Request, groups: int) -> tuple[NewRequestData, list[int]]:
    """What a worker knows of a request before any of it is computed, and its output tokens."""
    blocks = tuple[list[int], ...]([] for _ in range(groups))
    # vLLM leaves out inputs that are computed by what the request counts, which this step's tokens are part of.
    new = NewRequestData.from_request(request, blocks)
    return dataclasses.replace(new, mm_features=request.mm_features, num_computed_tokens=0), [*request.output_token_ids]
