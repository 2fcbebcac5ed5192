"""Window: order of dispatch, never more steps than slots, and the trap of design rule 1."""

import asyncio
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_pp.core.window import Window, WindowFull


@dataclass(frozen=True)
class Item:
    number: int


def filled(depth: int, *numbers: int) -> Window[Item]:
    window: Window[Item] = Window(depth)
    for number in numbers:
        window.open(Item(number))
    return window


def test_empty_window() -> None:
    window = filled(3)
    assert (len(window), window.free, window.oldest) == (0, 3, None)
    assert list(window) == []
    assert 0 not in window
    assert window.get(0) is None
    assert window.clear() == []


@pytest.mark.parametrize("depth", [0, -1])
def test_a_window_has_a_slot(depth: int) -> None:
    with pytest.raises(ValueError, match=f"at least 1, not {depth}"):
        Window(depth)


def test_steps_are_kept_in_dispatch_order() -> None:
    window = filled(3, 4, 7, 8)
    assert list(window) == [Item(4), Item(7), Item(8)]
    assert window.oldest == Item(4)
    assert 7 in window
    assert 5 not in window
    assert window.get(7) == Item(7)
    assert window.clear() == [Item(4), Item(7), Item(8)]
    assert window.free == 3


def test_iteration_survives_changes() -> None:
    window = filled(3, 0, 1, 2)
    for step in window:
        window.close(step.number)
    assert len(window) == 0


def test_a_step_without_a_slot_is_refused() -> None:
    window = filled(2, 0, 1)
    with pytest.raises(WindowFull, match="all 2 slots are taken"):
        window.open(Item(2))
    assert list(window) == [Item(0), Item(1)]
    window.close(0)
    window.open(Item(2))
    assert list(window) == [Item(1), Item(2)]


@pytest.mark.parametrize("number", [3, 5])
def test_a_step_must_be_the_youngest(number: int) -> None:
    window = filled(3, 5)
    with pytest.raises(ValueError, match=f"step {number} is not younger than step 5"):
        window.open(Item(number))
    assert list(window) == [Item(5)]


@pytest.mark.parametrize(("numbers", "number"), [((), 0), ((1, 2), 2), ((1, 2), 0), ((1, 2), 3)])
def test_only_the_oldest_can_be_closed(numbers: tuple[int, ...], number: int) -> None:
    window = filled(3, *numbers)
    with pytest.raises(ValueError, match=f"step {number} is not the oldest"):
        window.close(number)
    assert [step.number for step in window] == list(numbers)


def test_the_youngest_that_shares_a_request_is_found() -> None:
    window = filled(4, 0, 1, 2, 3)
    requests = {0: frozenset("ab"), 1: frozenset("bc"), 2: frozenset("a"), 3: frozenset("d")}
    assert window.last_sharing(frozenset("a"), requests) == 2
    assert window.last_sharing(frozenset("b"), requests) == 1
    assert window.last_sharing(frozenset("cd"), requests) == 3
    assert window.last_sharing(frozenset("e"), requests) is None
    assert window.last_sharing(frozenset(), requests) is None


@given(depth=st.integers(1, 5), opens=st.lists(st.booleans(), max_size=60))
def test_any_order_of_opening_and_closing_stays_within_the_slots(depth: int, opens: list[bool]) -> None:
    window: Window[Item] = Window(depth)
    flying: list[int] = []
    for number, opening in enumerate(opens):
        if opening and len(flying) < depth:
            window.open(Item(number))
            flying.append(number)
        elif opening:
            with pytest.raises(WindowFull):
                window.open(Item(number))
        elif flying:
            oldest = flying.pop(0)
            assert window.close(oldest) == Item(oldest)
        assert [step.number for step in window] == flying
        assert window.free == depth - len(flying)
        assert window.oldest == (Item(flying[0]) if flying else None)


class Shell:
    """What both shapes of a planning shell share: a window, the steps opened so far, and the most there ever were."""

    STEPS = 20

    def __init__(self, depth: int) -> None:
        self.window: Window[Item] = Window(depth)
        self.opened = 0
        self.peak = 0
        self.full = asyncio.Event()

    def open(self) -> None:
        self.window.open(Item(self.opened))
        self.opened += 1
        self.peak = max(self.peak, len(self.window))
        if not self.window.free or self.opened == self.STEPS:
            self.full.set()  # nothing more will be opened before something is settled

    async def settle_one_when_full(self) -> None:
        """Wait for the fullest the window gets before each settle, so that the peak does not depend on luck."""
        await self.full.wait()
        oldest = self.window.oldest
        assert oldest is not None
        self.window.close(oldest.number)
        if self.opened < self.STEPS:
            self.full.clear()


class NothingSettles(Shell):
    """Ranks that never answer."""

    async def settle_one_when_full(self) -> None:
        await asyncio.Event().wait()


async def by_tokens(shell: Shell, depth: int) -> None:
    """Design rule 1: the queue holds slot tokens, one is taken before planning and comes back after the settle."""
    slots: asyncio.Queue[None] = asyncio.Queue(maxsize=depth)
    for _ in range(depth):
        slots.put_nowait(None)

    async def planner() -> None:
        for _ in range(Shell.STEPS):
            await slots.get()
            shell.open()

    async def settler() -> None:
        for _ in range(Shell.STEPS):
            await shell.settle_one_when_full()
            slots.put_nowait(None)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(planner())
        tasks.create_task(settler())
    assert slots.qsize() == depth


async def by_futures(shell: Shell, depth: int) -> None:
    """The trap: a bounded queue of the steps' futures looks like the same bound, and is not.

    One more step is planned before the queue is asked for room, and one more is held by the settler, outside the queue.
    """
    results: asyncio.Queue[asyncio.Future[None]] = asyncio.Queue(maxsize=depth)
    loop = asyncio.get_running_loop()
    flying: list[asyncio.Future[None]] = []

    async def planner() -> None:
        for _ in range(Shell.STEPS):
            shell.open()
            flying.append(loop.create_future())
            await results.put(flying[-1])

    async def settler() -> None:
        for _ in range(Shell.STEPS):
            await (await results.get())

    async def ranks() -> None:
        for number in range(Shell.STEPS):
            await shell.settle_one_when_full()
            flying[number].set_result(None)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(planner())
        tasks.create_task(settler())
        tasks.create_task(ranks())


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 8])
async def test_queue_of_futures_lets_depth_plus_two_steps_in_flight_and_queue_of_tokens_does_not(depth: int) -> None:
    tokens = Shell(depth)
    await by_tokens(tokens, depth)
    assert (tokens.peak, tokens.opened) == (depth, Shell.STEPS)

    futures = Shell(depth + 2)
    await by_futures(futures, depth)
    assert (futures.peak, futures.opened) == (depth + 2, Shell.STEPS)


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 8])
async def test_the_window_catches_a_shell_that_falls_into_the_trap(depth: int) -> None:
    shell = NothingSettles(depth)
    with pytest.raises(ExceptionGroup) as caught:
        await by_futures(shell, depth)
    assert [type(error) for error in caught.value.exceptions] == [WindowFull]
    assert len(shell.window) == depth
