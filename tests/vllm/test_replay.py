"""Requests that go from one engine core to the next, over vLLM's real schedulers on virtual time, without ranks.

A token is a function of all tokens before it, so one that is lost, repeated or put elsewhere changes all that follow.
"""

import asyncio
import random
from contextlib import ExitStack

import pytest

pytest.importorskip("vllm")

from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest

from async_pp.bench import virtual
from async_pp.bench.simulate.ranks import SimulatedRanks
from async_pp.ranks.runner import Restored, Skipped
from tests.vllm.virtual_engine import Rig, _with_all_tokens, engine_core, make_policy

pytestmark = pytest.mark.vllm


EPOCHS = 3


def next_token(tokens):
    """Return the only right token after these."""
    return (31 * sum(tokens[-5:]) + 7 * len(tokens)) % 251


class KnowingRanks(SimulatedRanks):
    """Ranks that know a request's tokens only from what this epoch has told them."""

    def __init__(self, rig, *args, **named):
        super().__init__(*args, **named)
        self._rig = rig
        self._tokens = {}

    def execute(self, step, work, **more):
        if isinstance(work, Skipped):
            work = work.work
        restored = {}
        if isinstance(work, Restored):
            restored = {new.req_id: [*new.prompt_token_ids, *tokens] for new, tokens in work.requests}
            work = work.work
        self._tokens |= restored
        work, cached = _with_all_tokens(work), work.scheduled_cached_reqs
        self._tokens |= {new.req_id: list(new.prompt_token_ids) for new in work.scheduled_new_reqs}
        for name in cached.resumed_req_ids:
            assert name in self._tokens, f"no rank of this epoch knows {name}"
            everything = list(cached.all_token_ids.get(name, self._tokens[name]))
            assert restored.get(name, everything) == everything
            self._tokens[name], self._known[name] = everything, len(everything)
        unproven = self._rig.suspects & work.num_scheduled_tokens.keys()
        assert len(unproven) <= 1, f"{unproven} share a step"
        return super().execute(step, work, **more)

    def _compute(self, work):
        load, output = super()._compute(work)
        for name, sampled in zip(output.req_ids, output.sampled_token_ids, strict=True):
            if sampled:
                sampled[:] = [next_token(self._tokens[name])]
                self._tokens[name] += sampled
        return load, output

    def release(self, step, grammar):
        pass


class ReplayRig(Rig):
    """An engine of one epoch, and the answers so far of all epochs."""

    ranks_class = KnowingRanks

    def __init__(self, core, policy, answers):
        self.answers, self.suspects = answers, set()
        super().__init__(core, policy)

    def _take(self, told):
        for output in (output for outputs in told for output in outputs.outputs):
            _, tokens, wanted = self.answers[output.request_id]
            tokens += output.new_token_ids
            self.suspects -= {output.request_id} if output.new_token_ids else set()
            assert output.finished == (len(tokens) == wanted)

    def ask(self, name, prompt, wanted):
        params = SamplingParams(max_tokens=wanted, ignore_eos=True, detokenize=False)
        self.answers[name] = prompt, [], wanted
        self.scheduler.add(
            EngineCoreRequest(
                request_id=name, prompt_token_ids=prompt, mm_features=None, sampling_params=params,
                pooling_params=None, arrival_time=self.loop.time(), lora_request=None, cache_salt=None,
                data_parallel_rank=None,
            )
        )  # fmt: skip
        self.stepping.wake()


@pytest.mark.parametrize(
    ("policy", "paced", "blocks", "seed"),
    [
        ("balanced", False, 24, 0),
        ("paced", True, 60, 1),
        pytest.param("fill-first", False, 24, 2, marks=pytest.mark.slow),
        *[pytest.param("balanced", False, 24 + seed, seed, marks=pytest.mark.slow) for seed in range(3, 13)],
        *[pytest.param("paced", True, 24 + seed, seed, marks=pytest.mark.slow) for seed in range(13, 23)],
    ],
)
def test_tokens_are_those_of_an_engine_that_lost_nothing(policy, paced, blocks, seed, monkeypatch):
    """Losses at random moments, every request that was in flight a suspect; some end or are aborted in between."""
    rng = random.Random(seed)
    answers = {}

    async def main():
        carried, suspects = None, set()
        for epoch in range(EPOCHS):
            core = stack.enter_context(engine_core(monkeypatch, 3, paced=paced, blocks=blocks))
            rig = ReplayRig(core, make_policy(policy, 3), answers)
            if carried is not None:
                rig.suspects = set(suspects)
                rig.scheduler.resume(carried, suspects)
            steps = asyncio.create_task(rig.stepping.run(), name="stepping")
            rig.stepping.wake()
            for number in range(6):
                prompt = [rng.randrange(250) for _ in range(rng.choice((1, 3, 14, 30)))]
                rig.ask(f"{epoch}-{number}", prompt, rng.randint(1, 24))
            if epoch == EPOCHS - 1:
                while rig.scheduler.unfinished:
                    await rig.stepping.settled()
                await rig.stepping.idle()
            else:
                await asyncio.sleep(rng.uniform(0.0, 0.3))
                gone = rng.choice(sorted(answers))
                if len(answers[gone][1]) < answers[gone][2]:
                    rig.scheduler.abort([gone])
                    del answers[gone]
            steps.cancel()
            await asyncio.wait([steps])
            lost = rig.stepping.lose(RuntimeError("lost"))
            carried = rig.scheduler.leave()
            suspects = {name for step in lost for name in step.requests} & carried.requests.keys()
        assert not carried.requests and not core.scheduler.requests

    with ExitStack() as stack:
        virtual.run(main())
    assert len(answers) > 5 * EPOCHS - 1
    for prompt, tokens, wanted in answers.values():
        right = list(prompt)
        for _ in range(wanted):
            right.append(next_token(right))
        assert tokens == right[len(prompt) :]
