"""The virtual loop with its thumb on the scales: any task may go on a few ticks later than it could, in another order.

What asyncio promises stays: plain callbacks run in the order in which they were asked for, and a task goes on once for
each time it was woken. What it does not promise (which of two tasks that are ready goes first, and that nothing else
happens between a result and the one who waits for it) is left to the dice.
"""

import asyncio
import random
from collections.abc import Callable
from itertools import count
from typing import Any

from async_pp.bench.virtual import VirtualLoop

MOST_TICKS = 3


class _Task(asyncio.Task[Any]):
    """A task whose place in a set does not depend on its address."""

    def __init__(self, *args: Any, number: int, **kwargs: Any) -> None:
        self._number = number  # before the rest: it puts the task into a set
        super().__init__(*args, **kwargs)

    def __hash__(self) -> int:
        return self._number


class ChaosLoop(VirtualLoop):
    """A virtual loop.

    Args:
        dice: decides how long a task waits though it could go on. None: not at all.
        share: of the wake-ups that are put off.

    Attributes:
        after_tick: called after each turn of the loop.
    """

    def __init__(self, dice: random.Random | None = None, share: float = 0.0) -> None:
        self._dice = dice
        self._share = share
        self.after_tick: Callable[[], None] = _nothing
        super().__init__()
        numbers = count(1)
        self.set_task_factory(lambda loop, coro, **kw: _Task(coro, loop=loop, number=next(numbers), **kw))

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:
        dice = self._dice
        is_task = dice is not None and isinstance(getattr(callback, "__self__", None), asyncio.Task)
        if is_task and dice.random() < self._share:
            return super().call_soon(self._put_off, dice.randint(1, MOST_TICKS), callback, args, context)
        return super().call_soon(callback, *args, context=context)

    def _put_off(self, ticks: int, callback: Any, args: tuple[Any, ...], context: Any) -> None:
        if ticks > 1:
            super().call_soon(self._put_off, ticks - 1, callback, args, context)
        else:
            super().call_soon(callback, *args, context=context)

    def call_in_ticks(self, ticks: int, callback: Callable[[], Any]) -> None:
        """Call after so many turns of the loop."""
        super().call_soon(self._put_off, ticks, callback, (), None)

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """No time passes in threads: the function is called at once."""
        done: asyncio.Future[Any] = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - as the thread's future would have it
            done.set_exception(error)
        return done

    def _run_once(self) -> None:
        super()._run_once()
        self.after_tick()


def _nothing() -> None:
    """Nobody wants to know."""
