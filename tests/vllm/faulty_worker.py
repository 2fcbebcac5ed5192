"""A worker of vLLM's that fails as the prompts of its requests tell it to, for engines started with FAULTY.

A prompt that begins with VERBS[verb] and a rank makes that rank do it whenever a step carries the request.
"""

import os
import signal
from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

VERBS = {"die": 300, "die after": 301, "raise": 302, "exit": 303, "crash": 304, "freeze": 305}
FAULTY = {"worker_cls": f"{__name__}.FaultyWorker"}


class FaultyWorker(CPUWorker):
    """See above."""

    _marked: dict[str, int]

    def execute_model(self, scheduler_output: Any) -> Any:
        """Fail, or do as vLLM's."""
        marked = self.__dict__.setdefault("_marked", {})
        for new in scheduler_output.scheduled_new_reqs:
            verb, rank = (new.prompt_token_ids or [0, 0])[:2]
            if rank == self.rank:
                marked[new.req_id] = verb
        found = {marked.get(name) for name in scheduler_output.num_scheduled_tokens}
        self._dies_after = VERBS["die after"] in found
        if VERBS["die"] in found:
            os.kill(os.getpid(), signal.SIGKILL)
        if VERBS["freeze"] in found:
            os.kill(os.getpid(), signal.SIGSTOP)
        if VERBS["exit"] in found:
            os._exit(7)
        if VERBS["crash"] in found:
            os.kill(os.getpid(), signal.SIGSEGV)
        if VERBS["raise"] in found:
            raise RuntimeError("this request cannot be computed")
        return self._left(super().execute_model(scheduler_output))

    def sample_tokens(self, grammar_output: Any) -> Any:
        """As vLLM's, and then perhaps no answer."""
        return self._left(super().sample_tokens(grammar_output))

    def _left(self, output: Any) -> Any:
        if output is not None and self._dies_after:
            os.kill(os.getpid(), signal.SIGKILL)
        return output
