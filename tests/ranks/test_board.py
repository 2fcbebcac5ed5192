"""The board: what a rank writes is what the engine reads, whole, at any time."""

import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from async_pp.core.deadlines import Row
from async_pp.ranks.board import ROW_BYTES, Board, RankRow


def let_go(row: RankRow) -> None:
    """What a rank never does: it keeps its row for life."""
    memory = row._times.obj
    row._times.release()
    row._numbers.release()
    memory.close()  # type: ignore[attr-defined]


@pytest.fixture
def board(tmp_path: Path) -> Iterator[Board]:
    made = Board(tmp_path / "board", 3)
    yield made
    made.close()
    made.close()


def test_a_rank_tells_what_it_entered_and_left_last_and_touches_no_row_but_its_own(
    board: Board, tmp_path: Path
) -> None:
    nothing = Row(0, 0.0, 0, 0.0)
    assert board.rows() == [nothing] * 3
    row = RankRow.open(str(tmp_path / "board"), 1)
    before_s = time.monotonic()
    row.enter()
    entered = board.row(1)
    assert (entered.entered, entered.left) == (1, 0)
    row.tell()
    row.leave()
    row.enter()
    now = board.row(1)
    assert (now.entered, now.left, now.told) == (2, 1, 1) and row.told_by(1) == 1 and row.told_by(2) == 0
    assert before_s <= entered.entered_s <= now.left_s <= now.entered_s <= time.monotonic()
    assert [board.row(rank) for rank in (0, 2)] == [nothing] * 2
    let_go(row)


def test_the_rows_live_on_without_a_name(board: Board, tmp_path: Path) -> None:
    row = RankRow.open(str(tmp_path / "board"), 2)
    (tmp_path / "board").unlink()
    row.enter()
    assert board.row(2).entered == 1
    let_go(row)


def test_a_rank_that_was_stopped_between_two_writes_has_not_begun(tmp_path: Path) -> None:
    board = Board(tmp_path / "board", 1)
    with (tmp_path / "board").open("r+b") as file:
        file.write(struct.pack("@d", 7.0))  # the time, not yet the number
    row = board.row(0)
    assert (row.entered, row.left) == (0, 0)
    board.close()


WRITER = """
import sys
from async_pp.ranks.board import RankRow
row = RankRow.open(sys.argv[1], 1)
for _ in range(200_000):
    row.enter()
    row.leave()
"""


def test_a_row_that_is_being_written_is_never_read_in_parts(board: Board, tmp_path: Path) -> None:
    assert ROW_BYTES == 64
    with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path / "board")]) as writer:
        seen = set()
        last = board.row(1)
        while writer.poll() is None:
            row = board.row(1)
            assert row.entered - row.left in (0, 1)
            assert row >= last
            seen.add(row.left)
            last = row
    assert writer.returncode == 0
    assert last.left <= 200_000 == board.row(1).left
    assert len(seen) > 1
