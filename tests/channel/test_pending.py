"""The table of futures: every answer goes to its own waiter, or to its tombstone, or is counted as unknown."""

import asyncio

import pytest

from async_pp.channel.pending import Pending


async def test_answers_by_key_whatever_their_order() -> None:
    pending: Pending[str, int] = Pending()
    first, second = pending.expect("first"), pending.expect("second")
    assert pending.resolve("second", 2)
    assert pending.reject("first", KeyError("no"))
    assert await second == 2
    with pytest.raises(KeyError):
        await first
    assert (pending.open, pending.delivered) == (0, 2)


async def test_a_late_answer_goes_to_the_tombstone_and_never_to_the_next_call() -> None:
    pending: Pending[int, str] = Pending()
    pending.expect(1).cancel()
    assert (pending.open, pending.tombstones) == (0, 1)
    with pytest.raises(ValueError, match="already"):
        pending.expect(1)
    other = pending.expect(2)
    assert not pending.resolve(1, "late")
    assert not other.done()
    assert (pending.late, pending.tombstones) == (1, 0)
    assert not pending.resolve(1, "again")
    assert not pending.reject(3, ValueError())
    assert pending.unknown == 2


async def test_the_end_reaches_every_waiter_once_and_silently(caplog: pytest.LogCaptureFixture) -> None:
    pending: Pending[int, str] = Pending()
    waited, unseen, given_up = pending.expect(1), pending.expect(2), pending.expect(3)
    given_up.cancel()
    end = RuntimeError("over")
    pending.fail_all(end)
    with pytest.raises(RuntimeError) as caught:
        await waited
    assert caught.value is end
    assert unseen.exception() is end
    assert (pending.open, pending.tombstones) == (0, 0)
    del waited, unseen
    await asyncio.sleep(0)
    assert not caplog.records
