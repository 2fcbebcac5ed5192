"""The runner that hosts one of vLLM's workers, unchanged, through vLLM's own worker wrapper.

What is added around the worker, and nothing else:

- the CPU runner's missing hand-over buffer (`make_buffer`), and the missing `drafter` of stages that do not draft;
- seeded requests whose prompts are cut, on CPUs (`_discarded_draw_nothing`);
- waiting for the former stage without spinning (`handover`), one loop for all process groups (`gloo`);
- what the encoder-cache connector of a stage reports (`encoder_cache`), and the later stages of an instance that only
  encodes, which get no hidden states to compute on;
- a folder for each tensor-parallel rank, where a KV connector's files do not tell them apart (`connectors`);
- requests that the workers of a lost rank set had begun (`restore`);
- draft tokens travel with their step's own answer, instead of being fetched by a later call that would find the next
  step's, and outputs that a device still copies are waited for.
"""

import dataclasses
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import zmq
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import get_pp_group
from vllm.distributed.parallel_state import model_parallel_is_initialized
from vllm.logger import configure_logging
from vllm.platforms import current_platform
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput, make_empty_encoder_model_runner_output
from vllm.v1.worker.worker_base import WorkerWrapperBase

from async_pp.ranks.connectors import own_folder
from async_pp.ranks.encoder_cache import EncoderCacheReports
from async_pp.ranks.gloo import share_one_loop
from async_pp.ranks.handover import Handovers
from async_pp.ranks.runner import ConnectorOutput, Report, Restored, Skipped


class VllmRunner:
    """Runner of one vLLM worker.

    Args:
        rank: global rank; one node, so also the local rank.
        ranks: number of ranks.
        report: told when a start-up phase is done ("device", "load").

    Attributes:
        began_s: as the interface says. Times are those of this process: what a device still does then is not seen. A
            worker that has an attribute of this name knows better.
    """

    worker: WorkerWrapperBase

    def __init__(self, rank: int, ranks: int, report: Report) -> None:
        self._rank = rank
        self._ranks = ranks
        self._report = report
        self._takes_drafts = False
        self._made = False  # the wrapper holds a worker
        self._handovers = Handovers()
        self._encoder_cache = EncoderCacheReports()
        self._idle = False  # a stage after the first, of an instance that only encodes
        self.began_s = 0.0

    def start(self, vllm_config: VllmConfig, init_method: str, environment: Mapping[str, str]) -> None:
        """Make the worker, initialise its device and process group, load the model.

        Args:
            vllm_config: the whole configuration, as the engine resolved it.
            init_method: rendezvous of the process groups, an URL that torch.distributed understands.
            environment: variables that the configuration set in the engine's process.
        """
        folder = Path(init_method.removeprefix("file://")).parent
        os.environ.update(environment)
        if len(str(folder)) + 1 + len(str(uuid.UUID(int=0))) <= zmq.IPC_PATH_MAX_LEN:
            # Where tensor-parallel groups make their sockets: in our folder they are private, and end with it.
            os.environ["VLLM_RPC_BASE_PATH"] = str(folder)
        configure_logging(vllm_config.logging_config)
        parallel = vllm_config.parallel_config
        if vllm_config.kv_transfer_config is not None:
            own_folder(vllm_config.kv_transfer_config, self._rank % parallel.tensor_parallel_size)
        share_one_loop()
        self.worker = WorkerWrapperBase(rpc_rank=self._rank, global_rank=self._rank)
        arguments: list[dict[str, Any]] = [{} for _ in range(self._ranks)]
        arguments[self._rank] = {
            "vllm_config": vllm_config,
            "local_rank": self._rank,
            "rank": self._rank,
            "distributed_init_method": init_method,
            "is_driver_worker": self._rank % parallel.tensor_parallel_size == 0,
        }
        self.worker.init_worker(arguments)
        self._made = True
        self.worker.init_device()
        if model_parallel_is_initialized():
            self._handovers.announce(get_pp_group(), folder)
        self._report("device")
        self.worker.load_model()
        # A worker class of the user's need have neither process groups nor a model runner.
        runner: Any = getattr(self.worker.worker, "model_runner", None)
        if runner is not None:
            make_buffer(runner, vllm_config)
        first_stage = self._rank < parallel.tensor_parallel_size
        transfer = vllm_config.ec_transfer_config
        if runner is not None and transfer is not None and first_stage:
            self._encoder_cache.watch(runner)
        self._idle = transfer is not None and transfer.is_encode_only and not first_stage
        if runner is not None and vllm_config.speculative_config is not None and not hasattr(runner, "drafter"):
            # Only the last stage drafts. Elsewhere vLLM leaves the attribute out, yet asks it when it makes the cache.
            runner.drafter = None
        current_platform.update_block_size_for_backend(vllm_config)
        last_stage = self._rank >= self._ranks - parallel.tensor_parallel_size
        self._takes_drafts = vllm_config.speculative_config is not None and last_stage
        self._report("load")

    def execute(self, payload: Any) -> Any | None:
        """One forward pass; the answer is None when sampling must follow."""
        if isinstance(payload, Skipped):
            for _ in range(payload.steps):  # what an empty step does that matters: its place in the ring of tokens
                self.worker.worker.model_runner.update_pp_decode_requests()
            payload = payload.work
        entered_s = time.monotonic()
        if isinstance(payload, Restored):
            restore(self.worker.worker.model_runner, payload.requests)
            payload = payload.work
        if self._idle:
            output = make_empty_encoder_model_runner_output(payload)
        else:
            output = self.worker.execute_model(payload)
        own: float | None = getattr(self.worker.worker, "began_s", None)
        self.began_s = max(entered_s, self._handovers.arrived_s) if own is None else own
        if output is None:
            return None
        if not payload.total_num_scheduled_tokens:
            self._encoder_cache.ask(payload)
        return self._answer(output)

    def sample(self, payload: Any) -> Any:
        """Sample under the grammar bitmask."""
        with _discarded_draw_nothing(getattr(self.worker.worker, "model_runner", None)):
            return self._answer(self.worker.sample_tokens(payload))

    def connector_output(self, answer: Any) -> ConnectorOutput | None:
        """What the connectors of this rank report with an answer that is not sent."""
        if answer is not None:
            return ConnectorOutput.of(answer[0])
        # Of a step without sampling (pooling), a stage before the last keeps its report for a `sample_tokens` that does
        # not come.
        runner: Any = getattr(self.worker.worker, "model_runner", None)
        kept = getattr(runner, "kv_connector_output", None)
        if kept is not None:
            runner.kv_connector_output = None
        output = ModelRunnerOutput.with_kv_conn_output_only(kept)
        return ConnectorOutput.of(self._encoder_cache.attached(output))

    def attend(self, work: Any) -> ConnectorOutput | None:
        """A scheduler's output without a token, for the connectors."""
        if self._idle:
            return None
        output = self.worker.execute_model(work)
        self._encoder_cache.ask(work)
        return ConnectorOutput.of(self._encoder_cache.attached(output))

    def call(self, function: Callable[[Any], Any]) -> Any:
        """Apply `function` to this runner."""
        return function(self)

    def close(self) -> None:
        """Shut the worker down and leave the process groups."""
        if not self._made:
            return
        from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

        self.worker.shutdown()
        self._handovers.close()
        destroy_model_parallel()
        destroy_distributed_environment()

    def _answer(self, output: Any) -> tuple[Any, Any]:
        if isinstance(output, AsyncModelRunnerOutput):
            output = output.get_output()
        output = self._encoder_cache.attached(output)
        drafts = self.worker.take_draft_token_ids() if self._takes_drafts else None
        return output, drafts


@contextmanager
def _discarded_draw_nothing(runner: Any) -> Iterator[None]:
    """Keep requests whose token will be discarded away from their own random generators.

    A prompt that is cut samples a token after each portion, which is thrown away. vLLM lets a seeded request draw for
    it and then turns its generator back, which generators on CPUs cannot: the first such request would end the engine.
    """
    generators = runner.input_batch.generators if runner is not None and current_platform.is_cpu() else {}
    if not generators:
        yield
        return
    discarded = runner.discard_request_mask.np[: runner.input_batch.num_reqs]
    kept = {index: generators.pop(index) for index in list(generators) if discarded[index]}
    try:
        yield
    finally:
        generators.update(kept)


def restore(runner: Any, requests: Sequence[tuple[NewRequestData, Sequence[int]]]) -> None:
    """Tell a model runner (v1) of requests that others had begun, as if it had preempted them itself.

    A seeded request's generator is advanced by the draws of its tokens so far. On CPUs that is one number per token;
    elsewhere what a token draws depends on how it is sampled, and the generator begins anew.

    Args:
        runner: the model runner.
        requests: each as a new one without blocks, and its output tokens.
    """
    ids = [new.req_id for new, _ in requests]
    known = dataclasses.replace(
        SchedulerOutput.make_empty(),
        scheduled_new_reqs=[new for new, _ in requests],
        num_scheduled_tokens=dict.fromkeys(ids, 1),
        total_num_scheduled_tokens=len(ids),
    )
    runner._update_states(known)  # noqa: SLF001 - where it makes its state of a request
    for new, tokens in requests:
        state = runner.requests[new.req_id]
        state.output_token_ids = list(tokens)
        runner.num_prompt_logprobs.pop(new.req_id, None)  # they were told with the first token
        if state.generator is not None and current_platform.is_cpu():
            torch.randint(0, 2**31, (len(tokens),), generator=state.generator, dtype=torch.long)


def make_buffer(runner: Any, vllm_config: VllmConfig) -> None:
    """Make the buffer that receives the former stage's hidden states, where the runner did not.

    vLLM's CPU runner makes it during the warm-up's profile run, which eager mode skips; the first request would then
    end the engine.

    Args:
        runner: the model runner of one of vLLM's workers, with its model loaded.
        vllm_config: the whole configuration.
    """
    if not current_platform.is_cpu() or get_pp_group().is_first_rank:
        return
    if getattr(runner, "intermediate_tensors", ()) is not None:
        return
    with set_current_vllm_config(vllm_config):
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )
