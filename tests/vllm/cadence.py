"""What vLLM's asynchronous workers prescribe, as a model that checks it: which sampled tokens a rank knows at which step."""

from collections import deque
from typing import Any


class TokenNotKnown(AssertionError):
    """A step needs a token that this rank has not been told."""


class Ring:
    """The sampled tokens on a rank before the last, as vLLM's `PPHandler` and `add_requests` keep them (v1/worker/gpu).

    Every counted step takes the tokens of the step `stages` counts ago, whatever either of them carried.

    Attributes:
        counts: steps counted so far.
    """

    def __init__(self, stages: int) -> None:
        self.counts = 0
        self._slots: deque[list[list[int]]] = deque([[] for _ in range(stages)])
        self._known: dict[str, list[int]] = {}  # tokens known of each request; another list each time it is added

    def count(self) -> None:
        """Take the tokens of the oldest step: what happens first in each step, and in each that is left out."""
        self.counts += 1
        for known in self._slots.popleft():
            known[0] += 1
        self._slots.append([])

    def step(self, work: Any) -> None:
        """Take a vLLM SchedulerOutput. Raises TokenNotKnown when it computes what this rank could not."""
        for request_id in work.finished_req_ids | (work.preempted_req_ids or set()):
            self._known.pop(request_id, None)
        cached = work.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for new in work.scheduled_new_reqs:
            computed[new.req_id] = new.num_computed_tokens
            self._known[new.req_id] = [len(new.prefill_token_ids)]
        for request_id, tokens in work.num_scheduled_tokens.items():
            known = self._known[request_id]
            if computed[request_id] + tokens > known[0]:
                raise TokenNotKnown(f"{request_id} at {computed[request_id]} + {tokens}, known {known[0]} tokens")
            if computed[request_id] + tokens == known[0]:
                self._slots[-1].append(known)
