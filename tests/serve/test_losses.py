"""A server loses a rank while it drains, or is asked to end while it replaces ranks. One more is in test_clients.py."""

import pytest

from .losses import a_rank_is_lost_in_the_end
from .process import Server

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.mark.parametrize("gate,rank", [("draining", 0), ("restarting", 0), ("restarting", 1)])
def test_streams_end_whole(gate, rank):
    with Server("tiny", "-pp", "2", "--dtype", "float32") as server:
        a_rank_is_lost_in_the_end(server, rank, drain_first=gate == "draining")
