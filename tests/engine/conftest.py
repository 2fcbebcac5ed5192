"""What forks the ranks of a test."""

from collections.abc import AsyncIterator

import pytest

from async_pp.ranks.environment import rank_environment
from async_pp.ranks.spawn import Zygote


@pytest.fixture
async def zygote() -> AsyncIterator[Zygote]:
    made = Zygote()
    await made.start(rank_environment(2), ["async_pp.ranks.main", "tests.ranks.failing"])
    yield made
    await made.close()
