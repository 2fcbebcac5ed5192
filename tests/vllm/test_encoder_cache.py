"""Encoder outputs that leave, and enter, a pipeline through a connector: vLLM's example connector on every stage."""

from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engines import engine, tokens
from tests.vllm.multimodal import make_blip2, seeing

SHADES = (0, 100)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_blip2(tmp_path_factory.mktemp("blip2"))


async def seen(model: Path, **arguments: Any) -> list[list[int]]:
    """The tokens of two images, one request after the other."""
    async with engine(model, pipeline_parallel_size=2, **arguments) as running:
        return [await tokens(running, f"shade {shade}", prompt=seeing("river", shade)) for shade in SHADES]


async def transferred(model: Path, role: str, store: Path) -> tuple[list[list[int]], set[str], set[str]]:
    """The tokens with a connector, and the images that the scheduler was told to be saved and loaded."""
    from vllm.config import ECTransferConfig

    from tests.vllm.telling_connector import TOLD

    TOLD.clear()
    transfer = ECTransferConfig(
        ec_connector="TellingConnector",
        ec_connector_module_path="tests.vllm.telling_connector",
        ec_role=role,
        ec_connector_extra_config={"shared_storage_path": str(store)},
    )
    found = await seen(model, ec_transfer_config=transfer)
    saved: set[str] = set().union(*(told.finished_sending or () for told in TOLD))
    loaded: set[str] = set().union(*(told.finished_recving or () for told in TOLD))
    return found, saved, loaded


def images(store: Path) -> set[str]:
    """The images whose encoder outputs are stored."""
    return {entry.name for entry in store.iterdir()}


@pytest.mark.timeout(120)
async def test_what_the_first_stage_saves_and_loads_reaches_the_scheduler(model: Path, tmp_path: Path) -> None:
    encoded, saved, loaded = await transferred(model, "ec_both", tmp_path)
    assert encoded[0] != encoded[1]
    assert (saved, loaded, len(saved)) == (images(tmp_path), set(), len(SHADES))
    assert await transferred(model, "ec_consumer", tmp_path) == (encoded, set(), saved)


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_an_instance_that_only_encodes_feeds_one_that_makes_the_tokens_of_one_alone(
    model: Path, tmp_path: Path
) -> None:
    none, saved, loaded = await transferred(model, "ec_producer", tmp_path)
    assert (none, saved, loaded) == ([[], []], images(tmp_path), set())
    alone = await seen(model)
    for role in ("ec_consumer", "ec_both"):
        assert await transferred(model, role, tmp_path) == (alone, set(), saved)
