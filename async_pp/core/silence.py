"""Steps that every rank answers: which ranks have nothing to say, and send nothing. Pure.

A rank writes on the board which work it has left and how many messages about steps it had sent by then. Once all of
those have come and none was the step's, there is none.
"""

from collections.abc import Callable, Collection

from async_pp.core.deadlines import Row


class Silence:
    """Told of what is sent and what comes.

    Args:
        ranks: number of ranks.
        output_rank: the rank that answers in any case. Before it has, nothing is looked for: then the others are mostly
            done.
    """

    def __init__(self, ranks: int, output_rank: int) -> None:
        self._output_rank = output_rank
        self._heard = [0] * ranks
        self._works: dict[int, int] = {}  # steps, and which work of the ranks each is

    def sent(self, step: int, work: int) -> None:
        """A step that every rank answers was sent. `work`: which of the ranks' works it is, from 1."""
        self._works[step] = work

    def heard(self, rank: int) -> None:
        """A message about a step has come from a rank."""
        self._heard[rank] += 1

    def found(self, row: Callable[[int], Row], missing: Callable[[int], Collection[int]]) -> list[tuple[int, int]]:
        """Steps and ranks that have nothing to say of them; each is returned as long as it is missing.

        Args:
            row: what a rank says of itself now.
            missing: ranks whose answer to a step has not come.
        """
        found: list[tuple[int, int]] = []
        for step, work in list(self._works.items()):
            ranks = missing(step)
            if self._output_rank in ranks:
                continue
            silent = [(step, rank) for rank in ranks if self._is_silent(row(rank), rank, work)]
            found += silent
            if len(silent) == len(ranks):
                del self._works[step]
        return found

    def _is_silent(self, row: Row, rank: int, work: int) -> bool:
        return row.left >= work and row.told == self._heard[rank]
