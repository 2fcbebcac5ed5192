"""Make the expected values with vLLM's own engine and executor, one rank, eager, float32.

    python -m tests.vllm.make_expected [GROUP ...]

Run it once when a case, the tiny model or the supported vLLM version changes; the files in expected/ are reviewed like code. Every
greedy answer without a grammar is made twice, the second time with the two best log probabilities: where the two best tokens lie
closer than MARGIN, a sum taken in another order could swap them, and the prompt must be changed, because the case would be flaky.
"""

import asyncio
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.conftest import set_environment
from tests.vllm.cases import GROUPS, Case, Group
from tests.vllm.drive import checksum, differences, run_case

EXPECTED = Path(__file__).parent / "expected"
MARGIN = 1e-4


def with_margins(case: Case) -> Case:
    """Return the case with two log probabilities for each greedy request without a grammar, and nothing else."""
    waves = tuple(
        tuple(
            replace(ask, params=dict(ask.params) | {"logprobs": 2})
            for ask in wave
            if ask.params.get("temperature") == 0.0 and "structured_outputs" not in ask.params
        )
        for wave in case.waves
    )
    return replace(case, waves=tuple(wave for wave in waves if wave), must=frozenset())


def smallest_margin(waves: list[list[dict[str, Any]]]) -> float:
    """Return the smallest distance between the two best log probabilities of any position."""
    smallest = float("inf")
    for result in (result for wave in waves for result in wave):
        for row in result["samples"][0]["logprobs"]:
            best, second = sorted(row.values(), reverse=True)[:2]
            smallest = min(smallest, best - second)
    return smallest


async def make(group: Group, model: Path, scratch: Path) -> dict[str, Any]:
    """Return the expected values of a group.

    :raises SystemExit: a fact a case needs did not happen, or two best tokens lie too close.
    """
    import vllm
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(model), **group.engine_args))
    cases, faults = {}, []
    try:
        for case in group.cases:
            waves, facts = await run_case(engine, case, model, scratch, complete=True)
            unstreamed = replace(case, waves=tuple(tuple(replace(a, abort_after=None) for a in w) for w in case.waves))
            faults += differences(unstreamed, waves, waves, facts)
            margins = with_margins(case)
            if margins.waves:
                margin = smallest_margin((await run_case(engine, margins, model, scratch, complete=True))[0])
                print(f"{group.name}/{case.name}: smallest margin {margin:.5f}, facts {facts}", flush=True)
                if margin < MARGIN:
                    faults.append(f"{case.name}: two best tokens {margin:.6f} apart, change its prompts")
            cases[case.name] = [[{k: v for k, v in r.items() if k != "cached"} for r in wave] for wave in waves]
    finally:
        engine.shutdown()
    if faults:
        raise SystemExit("\n".join(faults))
    return {"vllm": vllm.__version__, "weights_sha256": checksum(model), "cases": cases}


def main() -> None:
    """Write expected/GROUP.json for the groups named on the command line, or for all."""
    set_environment()
    from async_pp.models import resolve_model

    EXPECTED.mkdir(exist_ok=True)
    for name in sys.argv[1:] or GROUPS:
        group = GROUPS[name]
        with tempfile.TemporaryDirectory() as scratch:
            values = asyncio.run(make(group, Path(resolve_model(group.model)), Path(scratch)))
        (EXPECTED / f"{name}.json").write_text(json.dumps(values, sort_keys=True, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
