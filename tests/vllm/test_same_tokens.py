"""The same tokens as vLLM: every case of cases.py, live on AsyncPPEngine, against the values vLLM's own engine made.

Engines of one configuration share one start across their cases. Expected values belong to the model whose weights they name.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

from async_pp.core.policy import Balanced, Policy, PolicyName
from async_pp.models import resolve_model
from tests.vllm.cases import BASE, GROUPS, PLAIN, Case, Group
from tests.vllm.drive import checksum, differences, run_case
from tests.vllm.engines import engine

EXPECTED = Path(__file__).parent / "expected"


def expected(group: Group, model: Path) -> dict[str, Any]:
    """Return the expected results by case name; fail when they belong to other weights."""
    values: dict[str, Any] = json.loads((EXPECTED / f"{group.name}.json").read_text())
    if values["weights_sha256"] != checksum(model):
        pytest.fail(
            f"expected/{group.name}.json was made from other weights than those in {model}: regenerate it with "
            f"`python -m tests.vllm.make_expected {group.name}` and review the difference"
        )
    cases: dict[str, Any] = values["cases"]
    return cases


async def compare(
    group: Group,
    cases: tuple[Case, ...],
    scratch: Path,
    policies: tuple[PolicyName | Policy, ...] = ("balanced",),
    **parallel: int,
) -> None:
    """Run cases of a group on one engine of the given parallel sizes, by each policy; fail with every difference."""
    model = Path(resolve_model(group.model))
    want = expected(group, model)
    found: list[str] = []
    async with engine(model, **group.engine_args, **parallel) as running:
        for policy in policies:
            running.use_policy(policy)
            await running.reset_prefix_cache()
            for case in cases:
                waves, facts = await run_case(running, case, model, scratch)
                found += [f"{running.policy}: {line}" for line in differences(case, waves, want[case.name], facts)]
    assert not found, "\n".join(found)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("name", "stages"),
    [
        ("base", 2),
        pytest.param("base", 1, marks=pytest.mark.slow),
        *[(name, 2) for name in ("budget", "pressure")],
        # One stage has no policy and no neighbour: what is left of these is vLLM's own. Four are between two and eight.
        pytest.param("base", 4, marks=pytest.mark.slow),
        *[pytest.param(name, stages, marks=pytest.mark.slow) for name in ("budget", "pressure") for stages in (1, 4)],
    ],
)
async def test_tiny_model(name: str, stages: int, tmp_path: Path) -> None:
    group = GROUPS[name]
    await compare(group, group.cases, tmp_path, pipeline_parallel_size=stages)


@pytest.mark.timeout(120)
async def test_every_policy(tmp_path: Path) -> None:
    """Also the form of the default one for stages with a device each, which a CPU does not get by itself."""
    policies = ("fill-first", Balanced(2, ahead=True))
    await compare(BASE, BASE.cases, tmp_path, policies, pipeline_parallel_size=2)


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_one_layer_per_rank(tmp_path: Path) -> None:
    await compare(BASE, (PLAIN,), tmp_path, pipeline_parallel_size=8)


@pytest.mark.timeout(120)
async def test_tensor_parallel_in_each_stage(tmp_path: Path) -> None:
    """And none of the sockets is left that the ranks of a stage talk over."""
    before = sockets()
    await compare(BASE, (PLAIN,), tmp_path, pipeline_parallel_size=2, tensor_parallel_size=2)
    assert sockets() <= before


def sockets() -> set[Path]:
    """Return the sockets in the folder for temporary files."""
    return {path for path in Path(tempfile.gettempdir()).iterdir() if path.is_socket()}


@pytest.mark.timeout(180)
async def test_default_model_on_two_ranks(tmp_path: Path) -> None:
    group = GROUPS["smol"]
    await compare(group, group.cases, tmp_path, pipeline_parallel_size=2)
