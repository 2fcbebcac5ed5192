"""Run the cases on any vLLM engine client, and compare what came with what was expected.

Used twice on purpose: make_expected.py drives vLLM's own engine with it, the tests drive ours, so a difference is a difference of
engines. vLLM is imported inside functions only: collecting the tests costs nothing.
"""

import asyncio
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.vllm.adapters import NAMES, make_adapter
from tests.vllm.cases import Ask, Case

LOGPROB_TOLERANCE = 1e-3
"""Absolute tolerance for log probabilities. The layers compute the same numbers however they are split, but a batch of another
composition (requests share steps by timing) may take another blocking in a matrix product, which moves a float32 sum in its last
bits: around 1e-5 here. A wrong position, weight or mask moves them by far more than 1e-3. Tokens are compared exactly."""

Result = dict[str, Any]


def checksum(model: Path) -> str:
    """Return the SHA-256 over the weight files of a model folder, in name order."""
    digest = hashlib.sha256()
    for file in sorted(model.glob("*.safetensors")):
        digest.update(file.name.encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()


def preemptions() -> float:
    """Return how often any engine of this process has preempted a request, from vLLM's own Prometheus counter."""
    from prometheus_client import REGISTRY

    return sum(
        sample.value
        for metric in REGISTRY.collect()
        if metric.name == "vllm:num_preemptions"
        for sample in metric.samples
        if sample.name == "vllm:num_preemptions_total"
    )


def sampling_params(ask: Ask, *, complete: bool = False) -> Any:
    """Return vLLM's SamplingParams for an ask; complete asks for final outputs only."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    values = dict(ask.params)
    if constraint := values.pop("structured_outputs", None):
        values["structured_outputs"] = StructuredOutputsParams(**constraint)
    stream = ask.stream and not complete
    kind = RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY
    return SamplingParams(output_kind=kind, **values)


def lora_request(name: str | None, model: Path, scratch: Path) -> Any:
    """Return vLLM's LoRARequest for an adapter of adapters.py (written below scratch), or None for no name."""
    if name is None:
        return None
    from vllm.lora.request import LoRARequest

    return LoRARequest(name, NAMES[name], str(make_adapter(scratch, model, name)))


def _logprobs(rows: Any) -> list[dict[str, float] | None] | None:
    """Return per position a mapping from token id to log probability, rounded to what the tolerance can tell apart."""
    if rows is None:
        return None
    return [None if row is None else {str(k): round(v.logprob, 4) for k, v in sorted(row.items())} for row in rows]


async def ask_one(engine: Any, ask: Ask, request_id: str, lora: Any, *, complete: bool = False) -> Result:
    """Run one request to its end and return tokens, text, reasons and log probabilities per sample."""
    samples: dict[int, Result] = {}
    cached = 0
    prompt_rows = None
    aborted = False
    async for output in engine.generate(
        ask.prompt, sampling_params(ask, complete=complete), request_id, lora_request=lora
    ):
        cached = max(cached, output.num_cached_tokens or 0)
        prompt_rows = prompt_rows or output.prompt_logprobs
        for part in output.outputs:
            sample = samples.setdefault(part.index, {"tokens": [], "text": "", "reason": None, "stop": None})
            sample["tokens"] += list(part.token_ids)
            sample["text"] += part.text
            sample["reason"], sample["stop"] = part.finish_reason, part.stop_reason
            if part.logprobs is not None:
                sample.setdefault("logprobs", []).extend(_logprobs(part.logprobs) or [])
        if (
            ask.abort_after is not None
            and not complete
            and not aborted
            and len(samples[0]["tokens"]) >= ask.abort_after
        ):
            aborted = True
            await engine.abort(request_id)
    result: Result = {"samples": [samples[i] for i in sorted(samples)], "cached": cached}
    if (rows := _logprobs(prompt_rows)) is not None:
        result["prompt_logprobs"] = rows
    return result


async def run_case(
    engine: Any, case: Case, model: Path, scratch: Path, *, complete: bool = False
) -> tuple[list[list[Result]], dict[str, float]]:
    """Run a case; return the results by wave and request, and the facts counted on the way.

    With complete, nothing is aborted and nothing streamed: that is how expected values are made.
    """
    before = preemptions()
    waves = []
    for number, wave in enumerate(case.waves):
        async with asyncio.TaskGroup() as group:
            tasks = []
            for index, ask in enumerate(wave):
                lora = lora_request(ask.lora, model, scratch)
                request_id = f"{case.name}-{number}-{index}"
                tasks.append(group.create_task(ask_one(engine, ask, request_id, lora, complete=complete)))
        waves.append([task.result() for task in tasks])
    flat = [result for wave in waves for result in wave]
    by_adapter = {
        ask.lora: tuple(result["samples"][0]["tokens"])
        for wave, results in zip(case.waves, waves, strict=True)
        for ask, result in zip(wave, results, strict=True)
    }
    facts = {
        "preemption": preemptions() - before,
        "cached": sum(result["cached"] for result in flat),
        "stopped": sum(s["reason"] == "stop" and s["stop"] is not None for r in flat for s in r["samples"]),
        "adapters_differ": float(len(set(by_adapter.values())) == len(by_adapter)),
    }
    return waves, facts


def differences(
    case: Case, waves: list[list[Result]], expected: list[list[Result]], facts: Mapping[str, float]
) -> list[str]:
    """Return one line for each way in which a run differs from the expected values; empty means the same tokens."""
    found = [f"{case.name}: {fact} did not happen" for fact in sorted(case.must) if not facts[fact]]
    for number, (asks, got_wave, want_wave) in enumerate(zip(case.waves, waves, expected, strict=True)):
        for index, (ask, got, want) in enumerate(zip(asks, got_wave, want_wave, strict=True)):
            where = f"{case.name} wave {number} request {index}"
            found += [f"{where}: {line}" for line in _request_differences(ask, got, want)]
    return found


def _request_differences(ask: Ask, got: Result, want: Result) -> list[str]:
    if len(got["samples"]) != len(want["samples"]):
        return [f"{len(got['samples'])} samples instead of {len(want['samples'])}"]
    found = []
    for i, (have, need) in enumerate(zip(got["samples"], want["samples"], strict=True)):
        if ask.abort_after is not None:
            count = len(have["tokens"])
            if not ask.abort_after <= count < len(need["tokens"]):
                found.append(f"aborted after {count} tokens, not soon after {ask.abort_after}")
            if have["tokens"] != need["tokens"][:count]:
                found.append(_first_difference(i, have["tokens"], need["tokens"][:count]))
            if have["reason"] != "abort":
                found.append(f"finish reason {have['reason']!r} instead of 'abort'")
            continue
        if have["tokens"] != need["tokens"]:
            found.append(_first_difference(i, have["tokens"], need["tokens"]))
        found += [
            f"sample {i}: {k} {have[k]!r} != {need[k]!r}" for k in ("text", "reason", "stop") if have[k] != need[k]
        ]
        found += _logprob_differences(f"sample {i}", have.get("logprobs"), need.get("logprobs"))
    return found + _logprob_differences("prompt", got.get("prompt_logprobs"), want.get("prompt_logprobs"))


def _first_difference(sample: int, have: list[int], need: list[int]) -> str:
    at = next((i for i, (a, b) in enumerate(zip(have, need, strict=False)) if a != b), min(len(have), len(need)))
    return f"sample {sample}: {len(have)} tokens, first difference from the {len(need)} expected at {at}"


def _logprob_differences(name: str, have: Any, need: Any) -> list[str]:
    if (have is None) != (need is None) or (have is not None and len(have) != len(need)):
        return [f"{name}: log probabilities of another shape"]
    found = []
    for at, (a, b) in enumerate(zip(have or [], need or [], strict=True)):
        if (a is None) != (b is None) or (a or {}).keys() != (b or {}).keys():
            found.append(f"{name}: log probabilities of other tokens at {at}")
        elif a is not None and any(abs(a[k] - b[k]) > LOGPROB_TOLERANCE for k in a):
            found.append(f"{name}: log probabilities at {at} are off by more than {LOGPROB_TOLERANCE}")
    return found
