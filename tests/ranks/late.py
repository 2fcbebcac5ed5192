"""Sleeping ranks of which the first hands over at once, and is done some steps later."""

import time
from typing import Any

from async_pp.ranks.board import RankRow
from async_pp.ranks.sleeping_runner import SleepingRunner

LATE_S = 0.05


class LateRunner(SleepingRunner):
    """The first rank is late."""

    def sample(self, payload: Any) -> Any:
        time.sleep(LATE_S if self._rank == 0 else 0.0)
        return super().sample(payload)


class WordlessRunner(LateRunner):
    """It also never sees that the output rank has answered."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        RankRow.told_by = lambda *_: 0  # type: ignore[method-assign]
